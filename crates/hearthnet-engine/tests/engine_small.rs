//! The engine on small synthetic models: every weight type and odd shapes, errors, and random
//! sequences of operations.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{Engine, EngineError, EngineOptions, LoadError, SeqId, Span, footprint};
use hearthnet_files::floats::{f16_to_f32, f32_to_f16};
use hearthnet_files::gguf::{TensorInfo, TensorType};
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{Gguf, ModelFile, quantize};
use hearthnet_testkit::{FullModel, TinyLlama, encoded, rewritten, with_nan};
use proptest::prelude::*;

use crate::engine_common::{
    all_logits, append, assert_same_bits, embed, engine, forward, ids, in_chunks, logits, open,
    options, run, whole,
};

fn model(bytes: Vec<u8>) -> ModelFile {
    ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap()
}

fn tiny() -> ModelFile {
    TinyLlama::default().file()
}

/// The same model with other values or types: `change` gets each tensor's values, and returns the
/// type to store them in.
fn rewrite(
    tiny: &TinyLlama,
    mut change: impl FnMut(&TensorInfo, &mut Vec<f32>) -> TensorType,
) -> ModelFile {
    let gguf = Gguf::from_bytes(tiny.bytes()).unwrap();
    model(rewritten(&gguf, &[], |info, mut values| {
        let dtype = change(info, &mut values);
        encoded(dtype, &values)
    }))
}

#[test]
fn a_nan_in_any_tensor_is_refused_at_load_by_its_name() {
    let untied = TinyLlama {
        tied: false,
        ..TinyLlama::default()
    };
    let bytes = untied.bytes();
    let names = model(bytes.clone());
    let names = names.gguf().tensors().iter().map(|info| info.name.clone());
    for name in names {
        let file = model(with_nan(&bytes, &name));
        let loaded = FullModel::load(&file, &options(1, Isa::Portable), &mut |_, _| {});
        let error = loaded.map(drop).unwrap_err();
        assert!(
            matches!(&error, LoadError::NotFinite(tensor) if *tensor == name),
            "{name}: {error}"
        );
    }
}

fn with_q8_cache(file: ModelFile) -> ModelFile {
    file.with_cache(CacheDtype::Q8_0).unwrap()
}

/// Shapes and types with different code paths: partial panels, partial vectors, several sizes of
/// query head groups, all weight types, all boundary dtypes, a separate output matrix.
fn models() -> Vec<(&'static str, ModelFile)> {
    let shape = |heads, kv_heads, head_dim| TinyLlama {
        heads,
        kv_heads,
        head_dim,
        ..TinyLlama::default()
    };
    let base = TinyLlama::default();
    let deeper = TinyLlama {
        layers: 3,
        ..shape(10, 2, base.head_dim)
    };
    let bf16 = TinyLlama {
        boundary: Some("bf16"),
        ..base.clone()
    };
    let odd = TinyLlama {
        width: 40,
        ffn: 52,
        vocab: 301,
        weights: "f32",
        embedding: "f16",
        tied: false,
        boundary: Some("f32"),
        ..shape(3, 3, 24)
    };
    let mut models: Vec<(&str, ModelFile)> = [
        ("grouped by 2", base.clone()),
        ("one KV head for 6", shape(6, 1, base.head_dim)),
        ("as many KV heads", shape(6, 6, base.head_dim)),
        ("grouped by 5", deeper),
        ("wide heads", shape(3, 1, 96)),
        ("bf16", bf16),
        ("odd", odd),
    ]
    .map(|(name, tiny)| (name, tiny.file()))
    .into();
    for weights in ["f32", "f16", "q8_0", "q4_1", "q4_0"] {
        let tiny = TinyLlama {
            weights,
            embedding: "f16",
            tied: false,
            ..base.clone()
        };
        models.push((weights, tiny.file()));
    }
    // Every matrix of a block in another type, so that none can be packed together.
    use TensorType as T;
    let types = [T::F32, T::F16, T::Q8_0, T::Q4_1, T::Q4_0];
    let mut next = 0;
    let mixed = rewrite(
        &TinyLlama {
            weights: "f32",
            ..base
        },
        |info, _| {
            if info.dims.len() == 1 || info.name.starts_with("token") {
                return info.dtype;
            }
            next += 1;
            types[next % types.len()]
        },
    );
    models.push(("mixed types", mixed));
    for (name, tiny) in [
        ("q8_0 cache, grouped by 3", shape(6, 2, 32)),
        ("q8_0 cache, wide heads", shape(3, 1, 96)),
        ("q8_0 cache, one head for 8", shape(8, 1, 128)),
    ] {
        models.push((name, with_q8_cache(tiny.file())));
    }
    models
}

#[test]
fn all_shapes_and_types_are_exact() {
    for (name, file) in models() {
        let width = file.spec().width as usize;
        let prompt = ids(&file, 75, 3);
        let mut reference = whole(&file, &options(1, Isa::Portable));
        let expected = in_chunks(&mut reference, &prompt, 1);
        assert!(expected.iter().all(|value| value.is_finite()), "{name}");
        let expected_logits = logits(reference.head(), &expected);
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let mut whole = whole(&file, &options(threads, isa));
                for chunk in [1, 3, 20, 75] {
                    let what = format!("{name}, {isa}, {threads} threads, chunks of {chunk}");
                    let rows = in_chunks(&mut whole, &prompt, chunk);
                    assert_same_bits(&rows, &expected, width, &what);
                }
                let found = logits(whole.head(), &expected);
                assert_same_bits(&found, &expected_logits, file.spec().vocab as usize, name);
            }
        }
    }
}

/// Key or value as the cache stores it.
fn kept(x: f64) -> f64 {
    f64::from(f16_to_f32(f32_to_f16(x as f32)))
}

/// The model according to its published formulas, in f64, with weights taken from the file, and
/// keys and values in f16.
fn plain_rows(file: &ModelFile, ids: &[u32]) -> Vec<f64> {
    let spec = file.spec();
    let tensor = |name: &str| {
        let view = file.tensor(name).unwrap();
        let mut values = Vec::new();
        quantize::decode(view.dtype, view.bytes, &mut values).unwrap();
        (
            values.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>(),
            view.cols(),
        )
    };
    let times = |name: &str, x: &[f64]| -> Vec<f64> {
        let (matrix, cols) = tensor(name);
        let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
        matrix.chunks(cols).map(dot).collect()
    };
    let norm = |name: &str, x: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(spec.norm_eps)).sqrt();
        x.iter()
            .zip(tensor(name).0)
            .map(|(x, w)| x * scale * w)
            .collect()
    };
    let d = spec.head_dim as usize;
    let turn = |x: &mut [f64], position: usize| {
        for head in x.chunks_mut(d) {
            for (i, pair) in head.chunks_mut(2).enumerate() {
                let angle = position as f64 * spec.rope.theta.powf(-2.0 * i as f64 / d as f64);
                let (sin, cos) = angle.sin_cos();
                let [a, b] = [pair[0], pair[1]];
                pair.copy_from_slice(&[a * cos - b * sin, a * sin + b * cos]);
            }
        }
    };
    let (embedding, width) = tensor("token_embd.weight");
    let mut rows: Vec<Vec<f64>> = ids
        .iter()
        .map(|id| embedding[*id as usize * width..][..width].to_vec())
        .collect();
    for layer in 0..spec.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = Default::default();
        for (position, row) in rows.iter_mut().enumerate() {
            let x = norm(&name("attn_norm"), row);
            let mut q = times(&name("attn_q"), &x);
            let mut k = times(&name("attn_k"), &x);
            turn(&mut q, position);
            turn(&mut k, position);
            keys.push(k.into_iter().map(kept).collect());
            values.push(times(&name("attn_v"), &x).into_iter().map(kept).collect());
            let mut attended = Vec::new();
            for (head, q) in q.chunks(d).enumerate() {
                let at = head / (spec.heads / spec.kv_heads) as usize * d;
                let dot =
                    |k: &Vec<f64>| -> f64 { q.iter().zip(&k[at..]).map(|(a, b)| a * b).sum() };
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|k| (dot(k) / (d as f64).sqrt()).exp())
                    .collect();
                let sum: f64 = scores.iter().sum();
                attended.extend((at..at + d).map(|i| {
                    values
                        .iter()
                        .zip(&scores)
                        .map(|(v, s)| v[i] * s / sum)
                        .sum::<f64>()
                }));
            }
            for (x, y) in row.iter_mut().zip(times(&name("attn_output"), &attended)) {
                *x += y;
            }
            let x = norm(&name("ffn_norm"), row);
            let gate = times(&name("ffn_gate"), &x);
            let up = times(&name("ffn_up"), &x);
            let h: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            for (x, y) in row.iter_mut().zip(times(&name("ffn_down"), &h)) {
                *x += y;
            }
        }
    }
    rows.concat()
}

#[test]
fn floating_point_weights_agree_with_the_formulas_in_f64() {
    // Without activation quantisation, and with a residual stream in f32, only f32 rounding errors
    // remain. Some of them move a key or a value to the next f16.
    for (heads, kv_heads) in [(4, 2), (6, 6), (5, 1)] {
        let tiny = TinyLlama {
            heads,
            kv_heads,
            weights: "f32",
            embedding: "f32",
            boundary: Some("f32"),
            ..TinyLlama::default()
        };
        let file = tiny.file();
        let ids = ids(&file, 40, 9);
        let expected = plain_rows(&file, &ids);
        let (_, rows) = run(&mut whole(&file, &options(2, Isa::detect())), &ids);
        let error: f64 = rows
            .iter()
            .zip(&expected)
            .map(|(a, b)| (f64::from(*a) - b).powi(2))
            .sum();
        let size: f64 = expected.iter().map(|b| b * b).sum();
        let relative = (error / size).sqrt();
        assert!(
            relative < 3e-5,
            "{heads}/{kv_heads} heads: relative error {relative:e}"
        );
    }
}

#[test]
fn a_row_beyond_the_boundary_dtype_is_an_error_that_names_layer_and_row() {
    let tiny = TinyLlama {
        weights: "f32",
        layers: 3,
        ..TinyLlama::default()
    };
    // Token 7 has a huge first value, which the middle block's last matrix amplifies.
    let file = rewrite(&tiny, |info, values| {
        if info.name == "blk.1.ffn_down.weight" {
            values.iter_mut().for_each(|value| *value *= 1e5);
        }
        info.dtype
    });
    for (threads, count) in [(1, 3), (2, 3), (2, 150)] {
        let mut whole = whole(&file, &options(threads, Isa::detect()));
        let (quiet, loud) = (open(&mut whole), open(&mut whole));
        // Rows of zeros stay zero, whatever the weights.
        forward(whole.engine_mut(), quiet, &mut vec![0.0; count * 64]).unwrap();
        let used = whole.engine().kv_bytes_in_use();

        let mut batch = vec![0.0; (2 + count) * 64];
        batch[3 * 64..].copy_from_slice(&embed(whole.head(), &vec![7; count - 1]));
        let spans = [
            Span::new(quiet, count as u32, 2),
            Span::new(loud, 0, count as u32),
        ];
        assert_eq!(
            whole.engine_mut().forward(&spans, &mut batch),
            Err(EngineError::BoundaryOverflow { layer: 1, row: 3 })
        );
        let lengths = [quiet, loud].map(|seq| whole.engine().len(seq).unwrap());
        assert_eq!(lengths, [count as u32, 0], "nothing was appended");
        assert_eq!(whole.engine().kv_bytes_in_use(), used);
        // A part of the model without overflow still runs.
        let mut rows = embed(whole.head(), &[7]);
        let span = Span::new(loud, 0, 1);
        whole
            .engine_mut()
            .forward_layers(0..1, &[span], &mut rows)
            .unwrap();
    }
}

#[test]
fn rows_that_do_not_fit_the_spans_are_refused() {
    let file = tiny();
    let mut engine = engine(&file, 0..2, &options(1, Isa::detect()));
    let seq = engine.open().unwrap();
    let span = Span::new(seq, 0, 2);
    for found in [0, 64, 127, 129] {
        let expected = 128;
        let mismatch = EngineError::RowsMismatch { expected, found };
        let result = engine.forward(&[span], &mut vec![0.0; found]);
        assert_eq!(result, Err(mismatch));
    }
    let many = engine.forward(&[Span::new(seq, 0, u32::MAX)], &mut [0.0; 64]);
    assert!(matches!(many, Err(EngineError::RowsMismatch { .. })));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut rows = vec![0.0; 128];
        rows[100] = bad;
        let result = engine.forward(&[span], &mut rows);
        assert_eq!(result, Err(EngineError::InputNotFinite(1)));
    }
    let none = engine.forward(&[], &mut []);
    assert_eq!(none, Ok(()), "an empty batch is none");
    assert_eq!((engine.len(seq), engine.kv_bytes_in_use()), (Ok(0), 0));
}

#[test]
fn layers_that_are_not_there_are_refused() {
    let tiny = TinyLlama {
        layers: 4,
        ..TinyLlama::default()
    };
    let file = tiny.file();
    let load = |layers| Engine::load(&file, layers, &options(1, Isa::detect()), &mut |_, _| ());
    for range in [0..0, 2..2, 3..5, 4..5, 0..u32::MAX, u32::MAX..u32::MAX] {
        let result = load(range.clone()).map(|_| ());
        let expected = format!("layers {}..{} are not a part", range.start, range.end);
        assert!(result.unwrap_err().to_string().starts_with(&expected));
    }
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 3..1;
    assert!(matches!(load(backwards), Err(LoadError::Layers { .. })));

    let mut engine = load(1..3).unwrap();
    let seq = engine.open().unwrap();
    let span = Span::new(seq, 0, 1);
    for asked in [0..2, 1..4, 2..2, 0..1, 3..4] {
        let result = engine.forward_layers(asked.clone(), &[span], &mut [0.0; 64]);
        let engine = 1..3;
        assert_eq!(result, Err(EngineError::Layers { asked, engine }));
    }
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let file = tiny();
    let load = |options: EngineOptions| Engine::load(&file, 0..1, &options, &mut |_, _| ());
    for threads in [0, 1025, usize::MAX] {
        let result = load(EngineOptions {
            threads,
            ..EngineOptions::default()
        });
        let Err(LoadError::Option { option, .. }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(option, "threads");
    }
    let without_memory = EngineOptions {
        max_kv_bytes: 0,
        ..EngineOptions::default()
    };
    let mut engine = load(without_memory).unwrap();
    let seq = engine.open().unwrap();
    let full = forward(&mut engine, seq, &mut [0.0; 64]);
    assert!(matches!(full, Err(EngineError::KvFull { free: 0, .. })));
}

#[test]
fn max_context_can_shorten_but_not_extend_the_context() {
    let file = tiny();
    for (asked, limit) in [(None, 256), (Some(10), 10), (Some(1000), 256)] {
        let options = EngineOptions {
            max_context: asked,
            ..options(1, Isa::detect())
        };
        let mut engine = engine(&file, 0..1, &options);
        let seq = engine.open().unwrap();
        let mut rows = vec![0.0; limit as usize * 64];
        forward(&mut engine, seq, &mut rows).unwrap();
        let wanted = u64::from(limit) + 1;
        assert_eq!(
            forward(&mut engine, seq, &mut rows[..64]),
            Err(EngineError::ContextFull { wanted, limit })
        );
    }
}

#[test]
fn tokens_beyond_the_vocabulary_are_refused() {
    let file = tiny();
    let mut whole = whole(&file, &options(1, Isa::detect()));
    let seq = open(&mut whole);
    let mut out = vec![1.0];
    let (id, vocab) = (320, 320);
    let error = EngineError::UnknownToken { id, vocab };
    let embedded = whole.head().embed(&[319, id], &mut out);
    assert_eq!(embedded, Err(error.clone()));
    assert!(out.is_empty());
    assert!(whole.append(seq, &[u32::MAX], &mut out).is_err());
    assert_eq!(whole.append(seq, &[320], &mut out), Err(error));
    assert_eq!(whole.engine().len(seq), Ok(0));
    let mismatch = EngineError::RowsMismatch {
        expected: 128,
        found: 65,
    };
    assert_eq!(
        whole.head().logits(&[0.0; 65], &mut out),
        Err(mismatch.clone())
    );
    assert_eq!(whole.head().norm(&mut [0.0; 65]), Err(mismatch));
    let bad = EngineError::InputNotFinite(0);
    assert_eq!(
        whole.head().logits(&[f32::NAN; 64], &mut out),
        Err(bad.clone())
    );
    assert_eq!(whole.head().norm(&mut [f32::NAN; 64]), Err(bad));
}

#[test]
fn logits_of_many_rows_are_those_of_each() {
    let file = tiny();
    let mut whole = whole(&file, &options(3, Isa::detect()));
    let prompt = ids(&file, 150, 1);
    let all = all_logits(&mut whole, &prompt);
    assert_eq!(all.len(), 150 * 320);
    let seq = open(&mut whole);
    let mut last = Vec::new();
    for (id, expected) in prompt.iter().zip(all.chunks(320)) {
        whole.append(seq, &[*id], &mut last).unwrap();
        assert_same_bits(&last, expected, 320, "a row's logits");
    }
    whole.append(seq, &[], &mut last).unwrap();
    assert!(last.is_empty(), "no tokens, no logits");
}

#[test]
fn debug_output_contains_no_conversation_text() {
    let file = tiny();
    let mut whole = whole(&file, &options(1, Isa::detect()));
    run(&mut whole, &[1, 2, 3]);
    assert!(format!("{whole:?}").len() < 600, "{whole:?}");
}

#[derive(Clone, Debug)]
enum Op {
    Open,
    /// Rows for several sequences in one batch.
    Batch(Vec<(usize, usize)>),
    Truncate(usize, usize),
    Fork(usize),
    Close(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let which = || 0..100usize;
    prop_oneof![
        2 => Just(Op::Open),
        6 => prop::collection::vec((which(), prop_oneof![Just(1), 1..6usize, 1..70usize]), 1..5)
            .prop_map(Op::Batch),
        1 => (which(), 0..200usize).prop_map(|(seq, len)| Op::Truncate(seq, len)),
        1 => which().prop_map(Op::Fork),
        1 => which().prop_map(Op::Close),
    ]
}

/// Rows of a token sequence, computed one by one by a portable engine with one thread, and cached.
struct Oracle {
    whole: FullModel,
    known: BTreeMap<Vec<u32>, Vec<f32>>,
}

impl Oracle {
    fn rows(&mut self, ids: &[u32]) -> &[f32] {
        let Self { whole, known } = self;
        known.entry(ids.to_vec()).or_insert_with(|| {
            let seq = open(whole);
            let rows = append(whole, seq, ids, 1);
            whole.engine_mut().close(seq);
            rows
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_gives_the_rows_of_a_plain_replay(
        ops in prop::collection::vec(op(), 1..40),
        recurrent in any::<bool>(),
        q8 in any::<bool>(),
        seed in any::<u64>(),
        threads in 1..4usize,
        isa in prop::sample::select(Isa::available()),
    ) {
        let mut file = TinyLlama { recurrent, head_dim: 32, ..TinyLlama::default() }.file();
        if q8 {
            file = with_q8_cache(file);
        }
        let width = file.spec().width as usize;
        let mut oracle = Oracle {
            whole: whole(&file, &options(1, Isa::Portable)),
            known: BTreeMap::new(),
        };
        // Two engines; one has little memory.
        let few = 3 * footprint(file.spec(), 0..2).bytes(4 * 32);
        let small = EngineOptions { max_kv_bytes: few, ..options(threads, isa) };
        let mut engines = [engine(&file, 0..2, &options(threads, isa)), engine(&file, 0..2, &small)];
        let mut model: Vec<(usize, SeqId, Vec<u32>)> = Vec::new();
        let mut salt = seed;
        for op in ops {
            let count = model.len().max(1);
            let pick = |index: usize| index % count;
            match op {
                Op::Open => {
                    let which = (salt % 2) as usize;
                    model.push((which, engines[which].open().unwrap(), Vec::new()));
                }
                _ if model.is_empty() => {}
                Op::Batch(batch) => {
                    let which = model[pick(batch[0].0)].0;
                    let mut parts: Vec<(usize, Vec<u32>)> = Vec::new();
                    for (index, count) in batch {
                        salt = salt.wrapping_add(1);
                        let index = pick(index);
                        let new = parts.iter().all(|(other, _)| *other != index);
                        if new && model[index].0 == which {
                            parts.push((index, ids(&file, count, salt)));
                        }
                    }
                    let spans: Vec<Span> = parts
                        .iter()
                        .map(|(index, ids)| {
                            let (_, seq, before) = &model[*index];
                            let (position, rows) = (before.len() as u32, ids.len() as u32);
                            Span::new(*seq, position, rows)
                        })
                        .collect();
                    let all: Vec<u32> = parts.iter().flat_map(|(_, ids)| ids.clone()).collect();
                    let mut rows = embed(oracle.whole.head(), &all);
                    match engines[which].forward(&spans, &mut rows) {
                        Ok(()) => {
                            let mut rest = &rows[..];
                            for (index, ids) in parts {
                                let (own, others) = rest.split_at(ids.len() * width);
                                rest = others;
                                let tokens = &mut model[index].2;
                                let before = tokens.len() * width;
                                tokens.extend(ids);
                                let expected = &oracle.rows(tokens)[before..];
                                assert_same_bits(own, expected, width, "a batch");
                            }
                        }
                        Err(EngineError::KvFull { .. } | EngineError::ContextFull { .. }) => {}
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Op::Truncate(index, len) => {
                    let (which, seq, tokens) = &mut model[pick(index)];
                    let fits = len <= tokens.len();
                    let kept = engines[*which].truncate(*seq, len as u32);
                    prop_assert_eq!(kept.is_ok(), fits);
                    if let Ok(kept) = kept {
                        let kept = kept as usize;
                        let earlier = recurrent && kept < len && kept.is_multiple_of(64);
                        prop_assert!(kept == len || earlier, "{} of {}", kept, len);
                        tokens.truncate(kept);
                    }
                }
                Op::Fork(index) => {
                    let (which, seq, tokens) = model[pick(index)].clone();
                    match engines[which].fork(seq) {
                        Ok(fork) => model.push((which, fork, tokens)),
                        // A fork has states of its own.
                        Err(EngineError::KvFull { .. }) if recurrent => {}
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Op::Close(index) => {
                    let (which, seq, _) = model.swap_remove(pick(index));
                    prop_assert!(engines[which].close(seq));
                }
            }
            for (which, seq, tokens) in &model {
                prop_assert_eq!(engines[*which].len(*seq), Ok(tokens.len() as u32));
            }
        }
        // Every remaining sequence runs one row further.
        for (which, seq, mut tokens) in model {
            let mut rows = embed(oracle.whole.head(), &[42]);
            if forward(&mut engines[which], seq, &mut rows).is_ok() {
                tokens.push(42);
                let expected = &oracle.rows(&tokens)[(tokens.len() - 1) * width..];
                assert_same_bits(&rows, expected, width, "the last row");
            }
            engines[which].close(seq);
        }
        prop_assert_eq!(engines.map(|engine| engine.kv_bytes_in_use()), [0, 0]);
    }
}
