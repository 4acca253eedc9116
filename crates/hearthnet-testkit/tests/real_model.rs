//! The real model and its variants can be fetched and opened.

use hearthnet_files::ModelFile;
use hearthnet_files::gguf::TensorType;

#[test]
fn variants_are_the_same_model_in_other_types() {
    let original = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    // Values in the matrices of a block, and bytes of its two norms.
    let matrices = 576 * (2 * 576 + 2 * 192 + 3 * 1536);
    let norms = 2 * 576 * 4;
    for name in ["q4_1", "q8_0", "q4_0", "f16", "f32"] {
        let model = ModelFile::open(&hearthnet_testkit::variant(name)).unwrap();
        assert_eq!(model.spec(), original.spec());
        let dtype: TensorType = name.parse().unwrap();
        for layer in 0..30 {
            let bytes = dtype.row_bytes(matrices).unwrap() + norms;
            assert_eq!(model.layer_bytes(layer), bytes, "{name}");
        }
        let embedding = if name.starts_with("q4") {
            TensorType::Q8_0
        } else {
            dtype
        };
        assert_eq!(
            model.tensor("token_embd.weight").unwrap().dtype,
            embedding,
            "{name}"
        );
    }
}
