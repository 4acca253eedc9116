//! Sequences: truncation, fork, budgets and refusals.
#![cfg(feature = "libtorch")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{append, deviation, load, options, rewrite};
use hearthnet_engine::{EngineError, Span};
use hearthnet_files::BoundaryDtype;
use hearthnet_testkit::{TinyLlama, embeddings as rows, family};
use hearthnet_torch::{DeviceChoice, Dtype, TorchEngine, TorchLoadError, TorchOptions};

/// The same operations on the same tensors give the same bits on one machine. Other batch sizes
/// need not.
const SAME: f32 = 1e-2;

#[test]
fn a_sequence_continues_equally_after_truncation_and_fork() {
    // minicpm3 has latent attention; gptoss has sinks and a window.
    for name in ["llama31", "minicpm3", "gptoss"] {
        let file = family(name);
        let (layers, width) = (file.spec().layers, file.spec().width as usize);
        for dtype in [Dtype::Fp16, Dtype::Fp32] {
            let what = format!("{name} {dtype}");
            let (input, other) = (rows(&file, 80, 1), rows(&file, 40, 2));
            let (before, after) = input.split_at(40 * width);
            let mut engine = load(&file, 0..layers, &options(dtype));
            let seq = engine.open().unwrap();
            append(&mut engine, seq, before, 40);
            let fork = engine.fork(seq).unwrap();
            let expected = append(&mut engine, seq, after, 40);

            let check = |engine: &mut TorchEngine, seq, way: &str| {
                let found = append(engine, seq, after, 40);
                let worst = deviation(&found, &expected, width);
                assert!(worst <= SAME, "{what}, {way}: {worst:e}");
            };
            // Rows appended to the original are not in the fork, and vice versa.
            append(&mut engine, fork, &other, 40);
            engine.truncate(fork, 40).unwrap();
            check(&mut engine, fork, "fork");
            engine.truncate(seq, 40).unwrap();
            check(&mut engine, seq, "truncated");
            engine.truncate(seq, 0).unwrap();
            append(&mut engine, seq, before, 7);
            check(&mut engine, seq, "appended anew in pieces");
        }
    }
}

#[test]
fn memory_is_taken_by_whole_pages_and_never_beyond_the_budget() {
    let file = TinyLlama::default().file();
    let probe = load(&file, 0..2, &options(Dtype::Fp16));
    // Two layers, keys and values, two heads of 16, two bytes each.
    assert_eq!(probe.footprint().per_position, 2 * 2 * 2 * 16 * 2);
    let page = probe.footprint().page_bytes();
    let mut three = options(Dtype::Fp16);
    three.engine.max_kv_bytes = 3 * page + page / 2;
    let mut engine = load(&file, 0..2, &three);
    let (a, b) = (engine.open().unwrap(), engine.open().unwrap());
    assert_eq!(engine.kv_bytes_in_use(), 0);
    append(&mut engine, a, &rows(&file, 33, 1), 33);
    assert_eq!(engine.kv_bytes_in_use(), 2 * page);
    append(&mut engine, b, &rows(&file, 32, 2), 32);
    assert_eq!(engine.kv_bytes_in_use(), 3 * page);
    // Only one of the two fits: the batch is refused as a whole.
    let mut x = rows(&file, 2, 3);
    let spans = [Span::new(a, 33, 1), Span::new(b, 32, 1)];
    let full = engine.forward(&spans, &mut x);
    let expected = EngineError::KvFull {
        needed: page,
        free: page / 2,
        limit: 3 * page + page / 2,
    };
    assert_eq!(full, Err(expected));
    assert_eq!((engine.len(a), engine.len(b)), (Ok(33), Ok(32)));
    // A fork needs no memory until it appends; then it needs all of its pages.
    let fork = engine.fork(a).unwrap();
    assert_eq!(engine.kv_bytes_in_use(), 3 * page);
    let mut x = rows(&file, 1, 3);
    let full = engine.forward(&[Span::new(fork, 33, 1)], &mut x);
    assert!(matches!(full, Err(EngineError::KvFull { .. })), "{full:?}");
    assert!(engine.close(a));
    assert_eq!(engine.kv_bytes_in_use(), 3 * page);
    append(&mut engine, fork, &rows(&file, 1, 3), 1);
    engine.truncate(fork, 32).unwrap();
    assert_eq!(engine.kv_bytes_in_use(), 2 * page);
    assert!(engine.close(b) && engine.close(fork) && !engine.close(a));
    assert_eq!(engine.kv_bytes_in_use(), 0);
    assert_eq!(engine.len(a), Err(EngineError::UnknownSequence(a)));
}

#[test]
fn the_options_limit_sequences_and_their_length() {
    let file = TinyLlama::default().file();
    let mut few = options(Dtype::Fp32);
    few.engine.max_sequences = 2;
    few.engine.max_context = Some(40);
    let mut engine = load(&file, 0..2, &few);
    let (a, b) = (engine.open().unwrap(), engine.open().unwrap());
    assert_eq!(engine.open(), Err(EngineError::TooManySequences(2)));
    append(&mut engine, a, &rows(&file, 3, 1), 3);
    let mut long = rows(&file, 41, 1);
    let full = EngineError::ContextFull {
        wanted: 41,
        limit: 40,
    };
    assert_eq!(engine.forward(&[Span::new(b, 0, 41)], &mut long), Err(full));
    assert_eq!((engine.len(a), engine.len(b)), (Ok(3), Ok(0)));
    append(&mut engine, a, &rows(&file, 2, 1), 2);
}

#[test]
fn rows_that_are_not_finite_are_refused() {
    let file = TinyLlama::default().file();
    for dtype in Dtype::ALL {
        let mut engine = load(&file, 0..2, &options(dtype));
        let seq = engine.open().unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = rows(&file, 3, 1);
            x[2 * 64 + 5] = bad;
            let found = engine.forward(&[Span::new(seq, 0, 3)], &mut x);
            assert_eq!(found, Err(EngineError::InputNotFinite(2)));
            assert_eq!((engine.len(seq), engine.kv_bytes_in_use()), (Ok(0), 0));
        }
    }
}

#[test]
fn a_row_beyond_the_boundary_dtype_is_an_error_that_names_layer_and_row() {
    let model = TinyLlama {
        weights: "f32",
        layers: 3,
        ..TinyLlama::default()
    };
    let file = rewrite(&model.file(), "blk.1.ffn_down.weight", |value| {
        *value *= 1e7;
    });
    // The weights themselves are beyond the range of fp16.
    let found = hearthnet_torch::load(&file, 0..3, &options(Dtype::Fp16), &mut |_, _| ());
    match found {
        Err(TorchLoadError::Range { tensor, dtype }) => {
            assert_eq!(
                (tensor.as_str(), dtype),
                ("blk.1.ffn_down.weight", Dtype::Fp16)
            );
        }
        other => panic!("{other:?}"),
    }
    for dtype in [Dtype::Bf16, Dtype::Fp32] {
        let mut engine = load(&file, 0..3, &options(dtype));
        let (quiet, loud) = (engine.open().unwrap(), engine.open().unwrap());
        // Rows of zeros stay zero, whatever the weights.
        append(&mut engine, quiet, &[0.0; 3 * 64], 3);
        let used = engine.kv_bytes_in_use();
        let mut x = vec![0.0; 3 * 64];
        x.extend(rows(&file, 2, 1));
        let spans = [Span::new(quiet, 3, 3), Span::new(loud, 0, 2)];
        let expected = EngineError::OutOfRange {
            layer: 1,
            row: 3,
            formats: format!("{dtype} or of the boundary dtype {}", BoundaryDtype::F16),
        };
        assert_eq!(engine.forward(&spans, &mut x), Err(expected));
        assert_eq!((engine.len(quiet), engine.len(loud)), (Ok(3), Ok(0)));
        assert_eq!(engine.kv_bytes_in_use(), used);
        // The sequence can go on.
        append(&mut engine, quiet, &[0.0; 64], 1);
    }
}

#[test]
fn a_missing_device_is_an_error_and_auto_selects_an_available_one() {
    let file = TinyLlama::default().file();
    let missing = TorchOptions {
        device: DeviceChoice::Cuda(127),
        ..TorchOptions::default()
    };
    let found = hearthnet_torch::load(&file, 0..2, &missing, &mut |_, _| ());
    assert!(
        matches!(found, Err(TorchLoadError::Device { .. })),
        "{found:?}"
    );
    let mut engine = load(&file, 0..2, &TorchOptions::default());
    let seq = engine.open().unwrap();
    append(&mut engine, seq, &rows(&file, 3, 1), 3);
}
