//! Vectors of texts against those of `transformers`.

use hearthnet_engine::Embedder;
use hearthnet_engine::kernels::Isa;
use hearthnet_files::gguf::Value;
use hearthnet_files::{BoundaryDtype, Pooling};

use super::{data, floats, largest_difference, open, references, rewrite};
use crate::engine_common::{ids, options};

/// Largest deviation of a value of a vector of length 1 from *cache*, and from *plain*: observed
/// 2.9e-5 and 1.7e-4.
pub(super) const CACHE_BOUND: f32 = 4e-5;
pub(super) const PLAIN_BOUND: f32 = 1e-3;

#[test]
fn vectors_are_those_of_transformers() {
    for name in ["qwen3", "gemma3"] {
        let prompt = &references()[name].prompt;
        let expected = floats(&data().join(format!("{name}.vectors")));
        let width = open(name).spec().width as usize;
        let (plain, cache) = expected.split_at(3 * width);
        for (value, at, pooling) in [
            (1, 0, Pooling::Mean),
            (2, 1, Pooling::First),
            (3, 2, Pooling::Last),
        ] {
            let key = format!("{}.pooling_type", open(name).spec().architecture);
            let keep = |_: &str, _: &mut Vec<f32>| hearthnet_files::TensorType::F16;
            let file = rewrite(name, &[(&key, Value::U32(value))], keep).unwrap();
            let file = file.with_boundary(BoundaryDtype::F32);
            assert_eq!(file.pooling(), pooling);
            let options = options(1, Isa::detect());
            let mut embedder = Embedder::load(&file, &options, &mut |_, _| {}).unwrap();
            let vector = embedder.embed(prompt).unwrap();
            let of = |all: &[f32]| largest_difference(&vector, &all[at * width..][..width]);
            let (from_cache, from_plain) = (of(cache), of(plain));
            println!("{name} {pooling:?} cache {from_cache:.1e}, plain {from_plain:.1e}");
            assert!(from_cache <= CACHE_BOUND && from_plain <= PLAIN_BOUND);
            // Sequences are closed.
            assert_eq!(embedder.embed(prompt).unwrap(), vector);
        }
    }
}

#[test]
fn a_text_may_fill_the_context_and_longer_and_empty_ones_are_refused() {
    let file = open("qwen3");
    let mut embedder = Embedder::load(&file, &options(2, Isa::detect()), &mut |_, _| {}).unwrap();
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
