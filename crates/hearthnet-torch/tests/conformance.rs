//! Every model family against the exact engine.
//!
//! The bounds are those of `specs/torch-arithmetic.md`: a small multiple of the observed deviation,
//! and far below the effect of a defect.
#![cfg(feature = "libtorch")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{append, deviation, deviations, exact, exact_layers, families, load, options};
use hearthnet_engine::Span;
use hearthnet_files::gguf::TensorType;
use hearthnet_files::{BoundaryDtype, ModelFile};
use hearthnet_testkit::{TinyLlama, embeddings as rows, every_weight_as, family};
use hearthnet_torch::Dtype;

/// Bound of the deviation of a row.
fn bound(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Fp32 => 8e-3,
        Dtype::Fp16 => 2e-2,
        Dtype::Bf16 => 1.2e-1,
    }
}

/// Of this many rows, one may be routed to another expert because two scores are nearly equal. Its
/// deviation is then beyond the bound, and so is that of later rows that attend to it.
const CHOSEN_ANEW: usize = 20;

#[test]
fn every_cut_of_every_family_is_close_to_the_exact_engine() {
    let mut bad = Vec::new();
    let names = families();
    assert!(names.len() >= 19, "{names:?}");
    for name in names {
        // Rounding between blocks would amplify deviations to steps of a coarse format.
        let file = family(&name).with_boundary(BoundaryDtype::F32);
        let (layers, width) = (file.spec().layers, file.spec().width as usize);
        let boundaries = exact(&file, &rows(&file, 33, 7));
        let mut line = format!("{name:12}");
        for dtype in Dtype::ALL {
            let (mut worst, mut anew, mut alike) = (0f32, 0, 33);
            // Single layers come first: there a rerouted row does not affect others.
            let cuts = (1..=layers).flat_map(|n| (0..=layers - n).map(move |at| (at, at + n)));
            for (start, end) in cuts {
                let mut engine = load(&file, start..end, &options(dtype));
                let seq = engine.open().unwrap();
                let [input, expected] = [start, end].map(|at| &boundaries[at as usize]);
                // A prefill, a decode step, and the rest.
                let (first, rest) = input.split_at(20 * width);
                let (one, rest) = rest.split_at(width);
                let mut found = append(&mut engine, seq, first, 20);
                found.extend(append(&mut engine, seq, one, 1));
                found.extend(append(&mut engine, seq, rest, 12));
                let rows = deviations(&found, expected, width);
                let beyond = |row: &f32| *row > bound(dtype);
                if file.spec().experts.is_none() {
                    worst = rows.into_iter().fold(worst, f32::max);
                    continue;
                }
                let first = rows.iter().position(beyond).unwrap_or(rows.len());
                alike = alike.min(first);
                if end == start + 1 {
                    anew += rows.iter().filter(|row| beyond(row)).count();
                    let close = rows.into_iter().filter(|row| !beyond(row));
                    worst = close.fold(worst, f32::max);
                } else {
                    worst = rows[..alike].iter().copied().fold(worst, f32::max);
                }
            }
            line += &format!("  {dtype} {worst:.1e}");
            if anew > 0 {
                line += &format!(" ({anew} anew, from {alike} on)");
            }
            if worst > bound(dtype) || anew > 33 * layers as usize / CHOSEN_ANEW || alike < 10 {
                bad.push(line.clone());
            }
        }
        println!("{line}");
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn rows_between_blocks_are_values_of_the_boundary_dtype() {
    for boundary in BoundaryDtype::ALL {
        let file = family("llama31").with_boundary(boundary);
        for dtype in Dtype::ALL {
            let mut engine = load(&file, 0..1, &options(dtype));
            let seq = engine.open().unwrap();
            let found = append(&mut engine, seq, &rows(&file, 9, 1), 9);
            let mut rounded = found.clone();
            boundary.round(&mut rounded);
            assert_eq!(found, rounded, "{boundary} {dtype}");
            // The F32 values do change when rounded to another dtype.
            if boundary == BoundaryDtype::F32 {
                BoundaryDtype::F16.round(&mut rounded);
                assert_ne!(found, rounded);
            }
        }
    }
}

#[test]
fn weights_of_every_type_are_decoded_correctly() {
    let types: Vec<TensorType> = TensorType::supported().collect();
    assert!(types.len() >= 16, "{types:?}");
    for dtype in types {
        let model = TinyLlama {
            width: 256,
            head_dim: 64,
            ffn: 256,
            vocab: 325,
            weights: "f32",
            embedding: "f32",
            ..TinyLlama::default()
        };
        // The exact engine rounds activations for quantised weights, so it gets the same weights as
        // F32.
        let [file, plain] = every_weight_as(&model, |_| dtype);
        let input = rows(&file, 40, 3);
        let expected = exact(&plain, &input).pop().unwrap();
        let mut engine = load(&file, 0..file.spec().layers, &options(Dtype::Fp32));
        let seq = engine.open().unwrap();
        let found = append(&mut engine, seq, &input, 40);
        let worst = deviation(&found, &expected, 256);
        println!("{:7} {worst:.1e}", dtype.name());
        assert!(worst <= bound(Dtype::Fp32), "{}: {worst:e}", dtype.name());
    }
}

/// Runs rows through some layers on one of the engines, the first rows in one batch.
fn through(
    file: &ModelFile,
    layers: std::ops::Range<u32>,
    dtype: Option<Dtype>,
    rows: &[f32],
) -> Vec<f32> {
    match dtype {
        Some(dtype) => {
            let mut engine = load(file, layers, &options(dtype));
            let seq = engine.open().unwrap();
            append(&mut engine, seq, rows, 20)
        }
        None => exact_layers(file, layers, rows),
    }
}

#[test]
fn a_pipeline_split_anywhere_over_both_engines_is_close_to_the_unsplit_model() {
    for name in families() {
        let file = family(&name).with_boundary(BoundaryDtype::F32);
        // A row routed to another expert has another output from there on.
        if file.spec().experts.is_some() {
            continue;
        }
        let (layers, width) = (file.spec().layers, file.spec().width as usize);
        let input = rows(&file, 33, 5);
        for dtype in Dtype::ALL {
            let torch = Some(dtype);
            let mut worst = 0f32;
            for cut in 1..layers {
                for (first, second, whole) in [
                    (torch, torch, torch),
                    (torch, None, None),
                    (None, torch, None),
                ] {
                    let uncut = through(&file, 0..layers, whole, &input);
                    let between = through(&file, 0..cut, first, &input);
                    let found = through(&file, cut..layers, second, &between);
                    worst = worst.max(deviation(&found, &uncut, width));
                }
            }
            println!("{name:12} {dtype} {worst:.1e}");
            assert!(worst <= bound(dtype), "{name} {dtype}: {worst:e}");
        }
    }
}

#[test]
fn sequences_in_a_batch_are_close_to_each_alone() {
    for name in families() {
        let file = family(&name).with_boundary(BoundaryDtype::F32);
        let width = file.spec().width as usize;
        for dtype in Dtype::ALL {
            let mut engine = load(&file, 0..file.spec().layers, &options(dtype));
            let prompts = [(33, 1), (1, 2), (12, 3)].map(|(n, seed)| rows(&file, n, seed));
            let alone = prompts.clone().map(|prompt| {
                let seq = engine.open().unwrap();
                append(&mut engine, seq, &prompt, prompt.len())
            });
            // The first half of each prompt, all together; then one row of each at different
            // positions.
            let seqs = prompts.clone().map(|_| engine.open().unwrap());
            let mut found = [const { Vec::new() }; 3];
            loop {
                let (mut spans, mut x) = (Vec::new(), Vec::new());
                for (seq, prompt) in seqs.iter().zip(&prompts) {
                    let position = engine.len(*seq).unwrap();
                    let rest = &prompt[position as usize * width..];
                    let rows = match position {
                        0 => (prompt.len() / width).div_ceil(2),
                        _ => rest.len() / width,
                    };
                    if rows > 0 {
                        x.extend(&rest[..rows * width]);
                        spans.push(Span::new(*seq, position, rows as u32));
                    }
                }
                if spans.is_empty() {
                    break;
                }
                engine.forward(&spans, &mut x).unwrap();
                let mut x = &x[..];
                for span in spans {
                    let nth = seqs.iter().position(|seq| *seq == span.seq).unwrap();
                    let (own, rest) = x.split_at(span.rows as usize * width);
                    found[nth].extend(own);
                    x = rest;
                }
            }
            for (found, alone) in found.iter().zip(&alone) {
                let worst = deviation(found, alone, width);
                let bound = bound(dtype);
                assert!(worst <= bound, "{name} {dtype}: {worst:e}");
            }
        }
    }
}
