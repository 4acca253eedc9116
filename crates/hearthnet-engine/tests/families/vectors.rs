//! Vectors of texts against those of `transformers`.

use hearthnet_engine::kernels::Isa;
use hearthnet_files::gguf::{TensorType, Value};
use hearthnet_files::{BoundaryDtype, ModelFile, Pooling};
use hearthnet_testkit::family;

use super::{data, floats, largest_difference, references, rewrite};
use crate::engine_common::{embedder, ids};

/// Largest deviation of a value of a vector of length 1 from *cache*, and from *plain*: observed
/// 2.9e-5 and 1.7e-4.
const CACHE_BOUND: f32 = 4e-5;
const PLAIN_BOUND: f32 = 1e-3;

/// Compares the vectors that each pooling makes of a text with references, each of which has the
/// mean, the first and the last state.
pub(super) fn check_poolings(
    name: &str,
    change: fn(ModelFile) -> ModelFile,
    ids: &[u32],
    [plain, cache]: [&[f32]; 2],
) {
    let width = plain.len() / 3;
    for (kind, at, pooling) in [
        (1, 0, Pooling::Mean),
        (2, 1, Pooling::First),
        (3, 2, Pooling::Last),
    ] {
        let key = format!("{}.pooling_type", family(name).spec().architecture);
        let metadata = [(key.as_str(), Value::U32(kind))];
        let file = change(rewrite(name, &metadata, |_, _| TensorType::F16).unwrap());
        assert_eq!(file.pooling(), pooling);
        let mut embedder = embedder(&file, 1, Isa::detect());
        let vector = embedder.embed(ids).unwrap();
        let of = |all: &[f32]| largest_difference(&vector, &all[at * width..][..width]);
        let (from_cache, from_plain, tokens) = (of(cache), of(plain), ids.len());
        println!("{name} {pooling:?} of {tokens}: cache {from_cache:.1e}, plain {from_plain:.1e}");
        assert!(from_cache <= CACHE_BOUND && from_plain <= PLAIN_BOUND);
        // Sequences are closed.
        assert_eq!(embedder.embed(ids).unwrap(), vector);
    }
}

#[test]
fn vectors_are_those_of_transformers() {
    for name in ["qwen3", "gemma3"] {
        let prompt = &references()[name].prompt;
        let expected = floats(&data().join(format!("{name}.vectors")));
        let width = family(name).spec().width as usize;
        assert_eq!(expected.len(), 6 * width);
        let change = |file: ModelFile| file.with_boundary(BoundaryDtype::F32);
        check_poolings(name, change, prompt, expected.split_at(3 * width).into());
    }
}

#[test]
fn a_text_may_fill_the_context_and_longer_and_empty_ones_are_refused() {
    let file = family("qwen3");
    let mut embedder = embedder(&file, 2, Isa::detect());
    let context = file.spec().context as usize;
    let long = ids(&file, context, 3);
    let vector = embedder.embed(&long).unwrap();
    let square: f32 = vector.iter().map(|value| value * value).sum();
    assert!((square - 1.0).abs() < 1e-5, "{square}");
    embedder.embed(&ids(&file, context + 1, 3)).unwrap_err();
    embedder.embed(&[]).unwrap_err();
    embedder.embed(&[file.spec().vocab]).unwrap_err();
    assert_eq!(embedder.embed(&long).unwrap(), vector);
}
