//! Counts honest rows that differ in a bit between two computations. An audit convicts a host of one
//! such row, so there must be none.
//!
//! ```text
//! cargo run --release -p hearthnet-engine --example honest_rows [-- ROWS]
//! ```
//!
//! Random tokens go through synthetic models of several weight types and families and, if it is on
//! this machine, through SmolLM2-135M-Instruct, until ROWS rows were compared (default 10,000,000).
//! Each row after each layer is compared with that of a first computation, which takes the whole
//! text in one batch on one thread. The others differ from it in the instruction set, the number of
//! threads, and how the text is cut. The exit status is 1 if a row differs.

#![allow(clippy::print_stdout, reason = "a measurement: it prints")]

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{EngineOptions, Span};
use hearthnet_files::ModelFile;
use hearthnet_testkit::{FullModel, TinyLlama, smollm2_on_this_machine};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Tokens of a text.
const TOKENS: usize = 192;
/// Threads and rows of a batch, of each computation on each instruction set.
const CUTS: [(usize, usize); 3] = [(1, TOKENS), (2, 61), (1, 5)];
/// The real model takes this part of the rows.
const REAL_SHARE: u64 = 20;
/// Texts for each one that the portable kernels compute, of the synthetic models and of the real one:
/// these kernels are a hundred times slower.
const PORTABLE_EVERY: [u64; 2] = [64, 256];

/// A computation: its instruction set, the rows of a batch, and the model.
struct Way {
    isa: Isa,
    cut: usize,
    model: FullModel,
    compared: u64,
    differ: u64,
}

fn main() -> Outcome<ExitCode> {
    let wanted = std::env::args().nth(1);
    let wanted: u64 = wanted.map_or(Ok(10_000_000), |text| text.parse())?;
    let tiny = |weights, recurrent| TinyLlama {
        layers: 4,
        width: 256,
        heads: 8,
        kv_heads: 4,
        head_dim: 32,
        ffn: 512,
        weights,
        recurrent,
        ..TinyLlama::default()
    };
    let types = ["f16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k"];
    let mut models: Vec<(String, ModelFile)> = types
        .map(|weights| (format!("synthetic, {weights}"), tiny(weights, false).file()))
        .into();
    models.push(("synthetic, recurrent".into(), tiny("q8_0", true).file()));
    let mut shares = vec![wanted; models.len()];
    if let Some(path) = smollm2_on_this_machine() {
        models.push((
            "SmolLM2-135M-Instruct, q4_1".into(),
            ModelFile::open(&path)?,
        ));
        shares.push(wanted / REAL_SHARE);
    }
    let synthetic = (wanted - wanted / REAL_SHARE) / (types.len() as u64 + 1) + 1;
    shares
        .iter_mut()
        .for_each(|share| *share = (*share).min(synthetic));

    let (mut compared, mut differ) = (0, 0);
    for ((name, file), share) in models.iter().zip(shares) {
        let (rows, wrong) = compare(name, file, share)?;
        compared += rows;
        differ += wrong;
    }
    println!("{differ} of {compared} rows differ");
    Ok(ExitCode::from(u8::from(differ > 0)))
}

/// Compares so many rows of a model. Returns the number of compared rows, and of those that differ.
fn compare(name: &str, file: &ModelFile, share: u64) -> Outcome<(u64, u64)> {
    let (begin, is_real) = (Instant::now(), file.spec().layers > 8);
    let best = Isa::detect();
    let mut ways = Vec::new();
    for isa in Isa::available() {
        for (threads, cut) in CUTS {
            let options = EngineOptions {
                threads,
                isa,
                ..EngineOptions::default()
            };
            ways.push(Way {
                isa,
                cut,
                model: FullModel::load(file, &options, &mut |_, _| {})?,
                compared: 0,
                differ: 0,
            });
        }
    }
    let first = ways
        .iter()
        .position(|way| way.isa == best)
        .ok_or("no kernels")?;
    let mut first = ways.remove(first);
    let (mut text, mut random) = (0u64, 0x9e37_79b9_7f4a_7c15u64);
    while ways.iter().map(|way| way.compared).sum::<u64>() < share {
        let ids: Vec<u32> = (0..TOKENS)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random % u64::from(file.spec().vocab)) as u32
            })
            .collect();
        let expected = rows_of(&mut first.model, &ids, first.cut)?;
        for way in &mut ways {
            let every = PORTABLE_EVERY[usize::from(is_real)];
            if way.isa == Isa::Portable && !text.is_multiple_of(every) {
                continue;
            }
            let rows = rows_of(&mut way.model, &ids, way.cut)?;
            let width = file.spec().width as usize;
            let same = |(a, b): (&[f32], &[f32])| {
                let mut bits = a.iter().zip(b);
                bits.all(|(a, b)| a.to_bits() == b.to_bits())
            };
            let pairs = rows.chunks_exact(width).zip(expected.chunks_exact(width));
            let equal = pairs.filter(|pair| same(*pair)).count();
            let all = (expected.len() / width) as u64;
            way.compared += all;
            way.differ += all - equal as u64;
        }
        text += 1;
    }
    for isa in Isa::available() {
        let of = ways.iter().filter(|way| way.isa == isa);
        let (rows, wrong) = of.fold((0, 0), |(rows, wrong), way| {
            (rows + way.compared, wrong + way.differ)
        });
        println!("{name}: {wrong} of {rows} rows by {isa} differ from those by {best}");
    }
    let count = |of: fn(&Way) -> u64| ways.iter().map(of).sum::<u64>();
    println!(
        "{name}: {text} texts, {:.0} s",
        begin.elapsed().as_secs_f64()
    );
    Ok((count(|way| way.compared), count(|way| way.differ)))
}

/// Rows after every layer.
fn rows_of(model: &mut FullModel, ids: &[u32], cut: usize) -> Outcome<Vec<f32>> {
    let (mut x, mut all) = (Vec::new(), Vec::new());
    model.head().embed(ids, &mut x)?;
    let width = model.head().spec().width as usize;
    let engine = model.engine_mut();
    for layer in engine.layers() {
        let (seq, mut position) = (engine.open()?, 0);
        for rows in x.chunks_mut(cut * width) {
            let count = u32::try_from(rows.len() / width)?;
            engine.forward_layers(layer..layer + 1, &[Span::new(seq, position, count)], rows)?;
            position += count;
        }
        engine.close(seq);
        all.extend_from_slice(&x);
    }
    Ok(all)
}
