//! Models that make vectors of whole texts, against `transformers` and against themselves.

use std::collections::BTreeMap;

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{Engine, EngineError, Head, Span};
use hearthnet_files::Manifest;
use hearthnet_files::gguf::{TensorType, Value};
use hearthnet_files::manifest::VerifyError;
use hearthnet_files::spec::{EncoderSpec, Rotation};
use hearthnet_testkit::family;
use serde::Deserialize;

use super::vectors::check_poolings;
use super::{TYPES, data, floats, json, largest_difference, refused, rewrite};
use crate::engine_common::{assert_same_bits, embed, embedder, engine, ids, options};

const NAMES: [&str; 3] = ["bert", "gemmaembedding", "nomicbert"];

#[derive(Deserialize)]
struct Reference {
    texts: Vec<Vec<u32>>,
}

fn texts() -> BTreeMap<String, Vec<Vec<u32>>> {
    let text = std::fs::read_to_string(data().join("encoders.json")).unwrap();
    let all: BTreeMap<String, Reference> = serde_json::from_str(&text).unwrap();
    all.into_iter()
        .map(|(name, reference)| (name, reference.texts))
        .collect()
}

#[test]
fn vectors_are_those_of_transformers() {
    for (name, texts) in texts() {
        let expected = floats(&data().join(format!("{name}.vectors")));
        let width = family(&name).spec().width as usize;
        // Of each text: plain and cache; of each of them: mean, first and last state.
        let mut expected = expected.chunks_exact(3 * width);
        for ids in &texts {
            let [plain, cache] = [expected.next().unwrap(), expected.next().unwrap()];
            check_poolings(&name, |file| file, ids, [plain, cache]);
        }
        assert!(expected.next().is_none());
    }
}

#[test]
fn threads_instruction_sets_cuts_and_batches_change_no_bit() {
    for name in NAMES {
        let mut next = 0;
        let file = rewrite(name, &[], |_, _| {
            next += 1;
            TYPES[next % TYPES.len()]
        });
        let file = file.unwrap();
        let (spec, width) = (file.spec(), file.spec().width as usize);
        let texts = [ids(&file, 250, 5), ids(&file, 3, 6), ids(&file, 41, 7)];
        let mut reference = engine(&file, 0..spec.layers, &options(1, Isa::Portable));
        let head = Head::beside(&file, &reference).unwrap();
        let expected = texts.each_ref().map(|ids| {
            let mut rows = embed(&head, ids);
            run(&mut reference, &mut rows, width);
            rows
        });
        let mut vectors = embedder(&file, 1, Isa::Portable);
        let expected_vectors = texts.each_ref().map(|ids| vectors.embed(ids).unwrap());
        for isa in Isa::available() {
            for threads in [1, 3] {
                let what = format!("{name}, {isa}, {threads} threads");
                let mut whole = engine(&file, 0..spec.layers, &options(threads, isa));
                let head = Head::beside(&file, &whole).unwrap();
                // All three in one batch.
                let mut rows = Vec::new();
                let spans = texts.each_ref().map(|ids| {
                    rows.extend(embed(&head, ids));
                    Span::new(whole.open().unwrap(), 0, ids.len() as u32)
                });
                whole.forward(&spans, &mut rows).unwrap();
                assert_same_bits(&rows, &expected.concat(), width, &what);
                // The short ones by a pass that splits matrices.
                for (ids, expected) in texts.iter().zip(&expected).skip(1) {
                    let mut rows = embed(&head, ids);
                    run(&mut whole, &mut rows, width);
                    assert_same_bits(&rows, expected, width, &what);
                }
                let mut embedder = embedder(&file, threads, isa);
                for (ids, expected) in texts.iter().zip(&expected_vectors) {
                    let vector = embedder.embed(ids).unwrap();
                    assert_same_bits(&vector, expected, width, &what);
                }
            }
        }
        for cut in 1..spec.layers {
            let options = options(2, Isa::detect());
            let mut rows = embed(&head, &texts[0]);
            for layers in [0..cut, cut..spec.layers] {
                run(&mut engine(&file, layers, &options), &mut rows, width);
            }
            assert_same_bits(&rows, &expected[0], width, &format!("{name}, cut {cut}"));
        }
    }
}

/// Runs a whole text.
fn run(engine: &mut Engine, rows: &mut [f32], width: usize) {
    let seq = engine.open().unwrap();
    let span = Span::new(seq, 0, (rows.len() / width) as u32);
    engine.forward(&[span], rows).unwrap();
    engine.close(seq);
}

#[test]
fn each_row_attends_to_later_rows_as_far_as_the_window_reaches() {
    for name in NAMES {
        let file = family(name);
        let width = file.spec().width as usize;
        let mut whole = engine(&file, 0..1, &options(1, Isa::detect()));
        let head = Head::beside(&file, &whole).unwrap();
        let mut ids = ids(&file, 20, 9);
        let mut rows = |ids: &[u32]| {
            let mut rows = embed(&head, ids);
            run(&mut whole, &mut rows, width);
            rows
        };
        let before = rows(&ids);
        ids[10] = (ids[10] + 1) % file.spec().vocab;
        let after = rows(&ids);
        let changed: Vec<usize> = (0..20)
            .filter(|row| before[row * width..][..width] != after[row * width..][..width])
            .collect();
        // The first layer of Gemma has a window.
        let expected: Vec<usize> = match file.spec().window(0) {
            Some(positions) => (11 - positions as usize..10 + positions as usize).collect(),
            None => (0..20).collect(),
        };
        assert_eq!(changed, expected, "{name}");
    }
}

#[test]
fn a_text_is_not_continued_and_longer_and_empty_ones_are_refused() {
    for name in NAMES {
        let file = family(name);
        let mut embedder = embedder(&file, 2, Isa::detect());
        let context = file.spec().context;
        let long = ids(&file, context as usize, 3);
        let vector = embedder.embed(&long).unwrap();
        let square: f32 = vector.iter().map(|value| value * value).sum();
        assert!((square - 1.0).abs() < 1e-5, "{square}");
        let longer = [&long[..], &[1]].concat();
        let found = embedder.embed(&longer).unwrap_err();
        let wanted = u64::from(context) + 1;
        let limit = context;
        assert_eq!(found, EngineError::ContextFull { wanted, limit }, "{name}");
        embedder.embed(&[]).unwrap_err();
        embedder.embed(&[file.spec().vocab]).unwrap_err();
        assert_eq!(embedder.embed(&long).unwrap(), vector);

        let mut whole = engine(&file, 0..file.spec().layers, &options(1, Isa::detect()));
        let head = Head::beside(&file, &whole).unwrap();
        let seq = whole.open().unwrap();
        let mut rows = embed(&head, &[3, 4]);
        whole.forward(&[Span::new(seq, 0, 2)], &mut rows).unwrap();
        let mut rows = embed(&head, &[5]);
        let found = whole.forward(&[Span::new(seq, 2, 1)], &mut rows);
        assert_eq!(found, Err(EngineError::WholeText(seq)), "{name}");
    }
}

#[test]
fn every_tensor_changes_the_vector_and_is_covered_by_the_manifest() {
    let ids = [3, 14, 15, 9, 2, 6];
    for name in NAMES {
        let file = family(name);
        let manifest = Manifest::of(&file, &mut |_, _| {});
        let decoded = Manifest::decode(&manifest.encode()).unwrap();
        assert_eq!(&decoded, &manifest, "{name}");
        let plain = embedder(&file, 1, Isa::detect()).embed(&ids).unwrap();
        for info in file.gguf().tensors() {
            let mut dtypes = file.gguf().tensors().iter().map(|info| info.dtype);
            let other = rewrite(name, &[], |tensor, values| {
                if tensor == info.name {
                    let count = values.len();
                    // Rows of tokens, types and positions that the text has.
                    let each = values.iter_mut().enumerate();
                    each.for_each(|(i, value)| *value += 0.5 * ((i % 7) as f32) / count as f32);
                    values
                        .iter_mut()
                        .step_by(3)
                        .for_each(|value| *value += 0.25);
                }
                dtypes.next().unwrap()
            });
            let other = other.unwrap();
            let layers = file.spec().layers;
            assert_eq!(
                manifest.verify(&other, 0..layers, true, &mut |_, _| {}),
                Err(VerifyError::Tensor(info.name.clone()))
            );
            let changed = embedder(&other, 1, Isa::detect()).embed(&ids).unwrap();
            // A constant in all keys of a head changes no weight of attention.
            let same = info.name.ends_with("attn_k.bias");
            let difference = largest_difference(&plain, &changed);
            assert!(
                same || difference > 1e-4,
                "{name}, {}: {difference}",
                info.name
            );
        }
    }
}

#[test]
fn specs_describe_each_family() {
    let of = |name| family(name).spec().clone();
    let bert = of("bert");
    let encoder = r#"{"layer_norm": true, "positions": true, "token_types": 2, "plain_ffn": true}"#;
    assert_eq!(bert.encoder, Some(json(encoder)));
    assert_eq!(bert.rotation(0), Rotation::None);
    assert!(bert.attention.qkv_bias && bert.attention.output_bias);
    let nomic = of("nomicbert");
    let encoder = r#"{"layer_norm": true, "token_types": 2}"#;
    assert_eq!(nomic.encoder, Some(json(encoder)));
    assert_eq!(
        (nomic.rotation(0), nomic.rope.theta),
        (Rotation::Global, 1000.0)
    );
    let gemma = of("gemmaembedding");
    let encoder: EncoderSpec = json(r#"{"projection": 64}"#);
    assert_eq!(gemma.encoder, Some(encoder));
    // The file has 6, of both sides.
    assert_eq!((gemma.window(0), gemma.window(5)), (Some(4), None));
    for name in NAMES {
        let spec = of(name);
        let again = serde_json::to_string(&spec).unwrap();
        assert_eq!(json::<hearthnet_files::ModelSpec>(&again), spec);
    }
}

#[test]
fn unsupported_keys_of_encoders_are_refused_by_name() {
    for (name, key, value) in [
        ("bert", "attention.causal", Value::Bool(true)),
        ("bert", "attention.layer_norm_epsilon", Value::F32(0.0)),
        ("bert", "attention.sliding_window", Value::U32(5)),
        ("bert", "pooling_type", Value::U32(4)),
        ("bert", "expert_count", Value::U32(2)),
        ("nomicbert", "attention.causal", Value::Bool(true)),
        ("nomicbert", "moe_every_n_layers", Value::U32(2)),
        ("gemmaembedding", "attention.causal", Value::Bool(true)),
        ("gemmaembedding", "dense_2_feat_in", Value::U32(16)),
        ("gemmaembedding", "dense_3_feat_in", Value::U32(32)),
        ("gemmaembedding", "dense_3_feat_out", Value::U32(16)),
    ] {
        let (key, error) = refused(name, key, value);
        assert!(error.contains(&key), "{key}: {error}");
    }
    for (key, value, said) in [
        ("bert.context_length", 300, "position_embd"),
        ("tokenizer.ggml.token_type_count", 3, "token_types"),
        ("tokenizer.ggml.token_type_count", 0, "token_type_count"),
    ] {
        let metadata = [(key, Value::U32(value))];
        let error = rewrite("bert", &metadata, |_, _| TensorType::F32).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
}
