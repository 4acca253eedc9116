//! The real model's file, read by this crate.

use hearthnet_files::{BoundaryDtype, LayerTensor, ModelFile, RopeKind, TensorType};

#[test]
fn the_real_file_opens_as_a_llama_with_known_hyperparameters() {
    let model = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let spec = model.spec();
    assert_eq!(spec.architecture, "llama");
    assert_eq!((spec.layers, spec.width, spec.ffn), (30, 576, 1536));
    assert_eq!((spec.heads, spec.kv_heads, spec.head_dim), (9, 3, 64));
    assert_eq!(
        (spec.vocab, spec.context, spec.norm_eps),
        (49_152, 8192, 1e-5)
    );
    assert_eq!(
        (spec.rope.kind, spec.rope.dims, spec.rope.theta),
        (RopeKind::Interleaved, 64, 1e5)
    );
    assert_eq!(
        (spec.boundary, spec.tied_embedding),
        (BoundaryDtype::F16, true)
    );

    let down = model.layer_tensor(29, LayerTensor::FfnDown).unwrap();
    assert_eq!(
        (down.dtype, down.cols(), down.rows()),
        (TensorType::Q4_1, 1536, 576)
    );
    assert_eq!(down.bytes.len(), 1536 / 32 * 20 * 576);
    let norm = model.layer_tensor(0, LayerTensor::AttnNorm).unwrap();
    assert_eq!(
        (norm.dtype, norm.cols(), norm.rows()),
        (TensorType::F32, 576, 1)
    );
    // The embedding is the output matrix.
    assert!(model.tensor("output.weight").is_err());
    assert!(model.layer_tensor(30, LayerTensor::FfnDown).is_err());

    let all: u64 = model.gguf().tensors().iter().map(|info| info.bytes).sum();
    let layers: u64 = (0..30).map(|layer| model.layer_bytes(layer)).sum();
    assert_eq!(layers + model.head_bytes(), all);
}
