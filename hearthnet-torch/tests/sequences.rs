//! Sequences of an engine: shortened, forked, handed over; budgets and refusals.
#![cfg(feature = "libtorch")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{append, deviation, family, load, options, rewrite, rows};
use hearthnet_model::engine::Span;
use hearthnet_model::manifest::WeightsId;
use hearthnet_model::{BoundaryDtype, Gguf, ModelFile};
use hearthnet_testkit::TinyLlama;
use hearthnet_torch::{
    DeviceChoice, Dtype, SnapshotError, TorchEngine, TorchError, TorchLoadError, TorchOptions,
    TorchSnapshot,
};

fn tiny(model: &TinyLlama) -> ModelFile {
    ModelFile::from_gguf(Gguf::from_bytes(model.bytes()).unwrap()).unwrap()
}

/// The same operations on the same tensors give the same bits on one machine; other batches need
/// not.
const SAME: f32 = 1e-2;

#[test]
fn a_sequence_goes_on_alike_after_truncation_fork_and_handing_over() {
    // One of them with narrow rows, one with sinks and a window.
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
            let snapshot = engine.export(seq, 40).unwrap();
            let expected = append(&mut engine, seq, after, 40);

            let check = |engine: &mut TorchEngine, seq, way: &str| {
                let found = append(engine, seq, after, 40);
                let worst = deviation(&found, &expected, width);
                assert!(worst <= SAME, "{what}, {way}: {worst:e}");
            };
            // What the original appended is not in the fork, nor the other way round.
            append(&mut engine, fork, &other, 40);
            engine.truncate(fork, 40).unwrap();
            check(&mut engine, fork, "fork");
            engine.truncate(seq, 40).unwrap();
            check(&mut engine, seq, "truncated");
            engine.truncate(seq, 0).unwrap();
            append(&mut engine, seq, before, 7);
            check(&mut engine, seq, "appended anew in pieces");

            let mut elsewhere = load(&file, 0..layers, &options(dtype));
            let bytes = snapshot.as_bytes().to_vec();
            let seq = elsewhere.import(&TorchSnapshot::from_bytes(bytes));
            check(&mut elsewhere, seq.unwrap(), "handed over");
        }
    }
}

#[test]
fn a_part_of_a_snapshot_is_the_beginning_of_its_sequence() {
    let file = family("llama31");
    let width = file.spec().width as usize;
    let input = rows(&file, 40, 1);
    let mut engine = load(&file, 1..2, &options(Dtype::Fp32));
    let seq = engine.open().unwrap();
    let expected = append(&mut engine, seq, &input, 40);
    let snapshot = engine.export(seq, 10).unwrap();
    let seq = engine.import(&snapshot).unwrap();
    assert_eq!(engine.len(seq), Ok(10));
    let found = append(&mut engine, seq, &input[10 * width..], 30);
    assert!(deviation(&found, &expected[10 * width..], width) <= SAME);
    let none = engine.export(seq, 0).unwrap();
    let empty = engine.import(&none).unwrap();
    assert_eq!(engine.len(empty), Ok(0));
    assert!(matches!(
        engine.export(seq, 41),
        Err(TorchError::PositionGap { position: 41, .. })
    ));
}

#[test]
fn snapshots_that_this_engine_would_not_have_written_are_refused() {
    let file = family("llama31");
    let mut engine = load(&file, 0..2, &options(Dtype::Fp32));
    let seq = engine.open().unwrap();
    append(&mut engine, seq, &rows(&file, 5, 1), 5);
    let sound = engine.export(seq, 5).unwrap().as_bytes().to_vec();
    let used = engine.kv_bytes_in_use();
    let mut import = |bytes: &[u8]| engine.import(&TorchSnapshot::from_bytes(bytes.to_vec()));
    for at in [0, 4, 6, 8, 39, 48, 52, 56] {
        let mut bytes = sound.clone();
        bytes[at] ^= 1;
        let found = import(&bytes);
        assert!(matches!(found, Err(SnapshotError::Foreign(_))), "{at}");
    }
    for at in [40, 47] {
        let mut bytes = sound.clone();
        bytes[at] ^= 4;
        let found = import(&bytes);
        assert!(matches!(found, Err(SnapshotError::Layers { .. })), "{at}");
    }
    for (at, len) in [(60, sound.len()), (0, sound.len() - 1), (0, 64)] {
        let mut bytes = sound[..len].to_vec();
        bytes[at] ^= u8::from(at == 60);
        let found = import(&bytes);
        assert!(matches!(found, Err(SnapshotError::Length { .. })), "{at}");
    }
    assert!(matches!(
        import(&sound[..63]),
        Err(SnapshotError::Foreign(_))
    ));
    let mut bytes = sound.clone();
    bytes[64..68].copy_from_slice(&f32::NAN.to_le_bytes());
    assert_eq!(import(&bytes), Err(SnapshotError::NotFinite));
    assert_eq!(engine.kv_bytes_in_use(), used);

    let other = TorchOptions {
        weights: WeightsId([1; 32]),
        ..options(Dtype::Fp32)
    };
    let mut other = load(&file, 0..2, &other);
    let found = other.import(&TorchSnapshot::from_bytes(sound.clone()));
    assert!(matches!(found, Err(SnapshotError::Foreign(_))));
    let mut half = load(&file, 0..2, &options(Dtype::Fp16));
    let found = half.import(&TorchSnapshot::from_bytes(sound));
    assert!(matches!(found, Err(SnapshotError::Foreign(_))));
}

#[test]
fn memory_is_taken_by_whole_pages_and_never_beyond_the_budget() {
    let file = tiny(&TinyLlama::default());
    let probe = load(&file, 0..2, &options(Dtype::Fp16));
    // Keys and values of two heads of 16 in two layers.
    assert_eq!(probe.kv_bytes_per_position(), 2 * 2 * 2 * 16 * 2);
    let page = probe.kv_bytes_per_position() * u64::from(probe.kv_page_positions());
    let three = TorchOptions {
        max_kv_bytes: 3 * page + page / 2,
        ..options(Dtype::Fp16)
    };
    let mut engine = load(&file, 0..2, &three);
    let (a, b) = (engine.open().unwrap(), engine.open().unwrap());
    assert_eq!(engine.kv_bytes_in_use(), 0);
    append(&mut engine, a, &rows(&file, 33, 1), 33);
    assert_eq!(engine.kv_bytes_in_use(), 2 * page);
    append(&mut engine, b, &rows(&file, 32, 2), 32);
    assert_eq!(engine.kv_bytes_in_use(), 3 * page);
    // One of the two fits by itself; both or nothing.
    let mut x = rows(&file, 2, 3);
    let spans = [(a, 33), (b, 32)].map(|(seq, position)| Span {
        seq,
        position,
        rows: 1,
    });
    let full = engine.forward(&spans, &mut x);
    let expected = TorchError::KvFull {
        needed: page,
        free: 0,
        limit: 3 * page + page / 2,
    };
    assert_eq!(full, Err(expected));
    assert_eq!((engine.len(a), engine.len(b)), (Ok(33), Ok(32)));
    // A fork costs nothing until it appends: then all of its pages.
    let fork = engine.fork(a).unwrap();
    assert_eq!(engine.kv_bytes_in_use(), 3 * page);
    let mut x = rows(&file, 1, 3);
    let span = Span {
        seq: fork,
        position: 33,
        rows: 1,
    };
    let full = engine.forward(&[span], &mut x);
    assert!(matches!(full, Err(TorchError::KvFull { .. })), "{full:?}");
    assert!(engine.close(a));
    assert_eq!(engine.kv_bytes_in_use(), 3 * page);
    append(&mut engine, fork, &rows(&file, 1, 3), 1);
    engine.truncate(fork, 32).unwrap();
    assert_eq!(engine.kv_bytes_in_use(), 2 * page);
    assert!(engine.close(b) && engine.close(fork) && !engine.close(a));
    assert_eq!(engine.kv_bytes_in_use(), 0);
    assert_eq!(engine.len(a), Err(TorchError::UnknownSequence(a)));
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let file = tiny(&TinyLlama::default());
    let few = TorchOptions {
        max_sequences: 2,
        max_context: Some(40),
        ..options(Dtype::Fp32)
    };
    let mut engine = load(&file, 0..2, &few);
    let (a, b) = (engine.open().unwrap(), engine.open().unwrap());
    assert_eq!(engine.open(), Err(TorchError::TooManySequences(2)));
    assert_eq!(engine.fork(a), Err(TorchError::TooManySequences(2)));
    append(&mut engine, a, &rows(&file, 3, 1), 3);
    let span = |seq, position, rows| Span {
        seq,
        position,
        rows,
    };
    let mut x = rows(&file, 2, 1);
    let gap = |seq, position, len| TorchError::PositionGap { seq, position, len };
    assert_eq!(engine.forward(&[span(a, 4, 2)], &mut x), Err(gap(a, 4, 3)));
    assert_eq!(engine.truncate(a, 4), Err(gap(a, 4, 3)));
    assert_eq!(
        engine.forward(&[span(a, 3, 1), span(a, 3, 1)], &mut x),
        Err(TorchError::DuplicateSequence(a))
    );
    assert_eq!(
        engine.forward(&[span(a, 3, 2), span(b, 0, 0)], &mut x),
        Err(TorchError::EmptySpan(b))
    );
    assert_eq!(
        engine.forward(&[span(a, 3, 1)], &mut x),
        Err(TorchError::RowsMismatch {
            expected: 64,
            found: 128
        })
    );
    assert_eq!(
        engine.forward_layers(1..2, &[span(a, 3, 2)], &mut x),
        Err(TorchError::OtherLayers {
            seq: a,
            ran: 0..2,
            asked: 1..2
        })
    );
    assert_eq!(
        engine.forward_layers(1..3, &[span(b, 0, 2)], &mut x),
        Err(TorchError::Layers {
            asked: 1..3,
            engine: 0..2
        })
    );
    let mut long = rows(&file, 41, 1);
    assert_eq!(
        engine.forward(&[span(b, 0, 41)], &mut long),
        Err(TorchError::ContextFull {
            wanted: 41,
            limit: 40
        })
    );
    assert_eq!((engine.len(a), engine.len(b)), (Ok(3), Ok(0)));
    append(&mut engine, a, &x, 2);
}

#[test]
fn rows_that_are_not_finite_are_refused() {
    let file = tiny(&TinyLlama::default());
    for dtype in Dtype::ALL {
        let mut engine = load(&file, 0..2, &options(dtype));
        let seq = engine.open().unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = rows(&file, 3, 1);
            x[2 * 64 + 5] = bad;
            let span = Span {
                seq,
                position: 0,
                rows: 3,
            };
            let found = engine.forward(&[span], &mut x);
            assert_eq!(found, Err(TorchError::InputNotFinite(2)));
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
    let file = rewrite(&tiny(&model), "blk.1.ffn_down.weight", |value| {
        *value *= 1e7;
    });
    // The weights themselves are beyond fp16.
    let found = TorchEngine::load(&file, 0..3, &options(Dtype::Fp16), &mut |_, _| ());
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
        // Rows of zeros stay what they are, whatever the weights.
        append(&mut engine, quiet, &[0.0; 3 * 64], 3);
        let used = engine.kv_bytes_in_use();
        let mut x = vec![0.0; 3 * 64];
        x.extend(rows(&file, 2, 1));
        let spans = [(quiet, 3, 3), (loud, 0, 2)].map(|(seq, position, rows)| Span {
            seq,
            position,
            rows,
        });
        let expected = TorchError::OutOfRange {
            layer: 1,
            row: 3,
            dtype,
            boundary: BoundaryDtype::F16,
        };
        assert_eq!(engine.forward(&spans, &mut x), Err(expected));
        assert_eq!((engine.len(quiet), engine.len(loud)), (Ok(3), Ok(0)));
        assert_eq!(engine.kv_bytes_in_use(), used);
        // It goes on.
        append(&mut engine, quiet, &[0.0; 64], 1);
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error_and_auto_takes_one_that_is() {
    let file = tiny(&TinyLlama::default());
    let missing = TorchOptions {
        device: DeviceChoice::Cuda(127),
        ..TorchOptions::default()
    };
    let found = TorchEngine::load(&file, 0..2, &missing, &mut |_, _| ());
    assert!(
        matches!(found, Err(TorchLoadError::Device { .. })),
        "{found:?}"
    );
    let mut engine = load(&file, 0..2, &TorchOptions::default());
    let seq = engine.open().unwrap();
    append(&mut engine, seq, &rows(&file, 3, 1), 3);
}
