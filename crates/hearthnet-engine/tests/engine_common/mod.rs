//! Helpers of the engine's tests.
#![allow(clippy::unwrap_used, clippy::panic)] // a failure fails the test

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{Embedder, Engine, EngineError, EngineOptions, Head, SeqId, Span};
use hearthnet_files::{ModelFile, ModelSpec};
use hearthnet_testkit::FullModel;

/// Options with this many threads and this instruction set, and little memory.
pub(crate) fn options(threads: usize, isa: Isa) -> EngineOptions {
    EngineOptions {
        threads,
        isa,
        max_kv_bytes: 256 << 20,
        ..EngineOptions::default()
    }
}

pub(crate) fn whole(file: &ModelFile, options: &EngineOptions) -> FullModel {
    FullModel::load(file, options, &mut |_, _| ()).unwrap()
}

pub(crate) fn engine(
    file: &ModelFile,
    layers: std::ops::Range<u32>,
    options: &EngineOptions,
) -> Engine {
    Engine::load(file, layers, options, &mut |_, _| ()).unwrap()
}

pub(crate) fn embedder(file: &ModelFile, threads: usize, isa: Isa) -> Embedder {
    Embedder::load(file, &options(threads, isa), &mut |_, _| {}).unwrap()
}

/// Pseudo-random token ids; deterministic for a seed.
pub(crate) fn ids(file: &ModelFile, count: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % u64::from(file.spec().vocab)) as u32
        })
        .collect()
}

pub(crate) fn embed(head: &Head, ids: &[u32]) -> Vec<f32> {
    let mut rows = Vec::new();
    head.embed(ids, &mut rows).unwrap();
    rows
}

pub(crate) fn logits(head: &Head, rows: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    head.logits(rows, &mut out).unwrap();
    out
}

/// Appends rows to a sequence of an engine.
pub(crate) fn forward(
    engine: &mut Engine,
    seq: SeqId,
    rows: &mut [f32],
) -> Result<(), EngineError> {
    let count = rows.len() / engine.spec().row_values(&engine.layers());
    let position = engine.len(seq).unwrap();
    engine.forward(&[Span::new(seq, position, count as u32)], rows)
}

/// Converts rows to bytes of the boundary dtype and back, as a hop does.
pub(crate) fn hop(spec: &ModelSpec, rows: &[f32]) -> Vec<f32> {
    let (mut bytes, mut back) = (Vec::new(), Vec::new());
    spec.boundary.encode(rows, &mut bytes);
    spec.boundary.decode(&bytes, &mut back).unwrap();
    back
}

/// The residual stream of rows that each have `values` values.
pub(crate) fn streams(spec: &ModelSpec, rows: &[f32], values: usize) -> Vec<f32> {
    let rows = rows.chunks_exact(values);
    rows.flat_map(|row| &row[..spec.width as usize])
        .copied()
        .collect()
}

/// Streams of rows, with the per-layer inputs of some layers; `inputs` are the rows before the
/// first layer.
pub(crate) fn with_inputs(
    spec: &ModelSpec,
    streams: &[f32],
    inputs: &[f32],
    layers: &std::ops::Range<u32>,
) -> Vec<f32> {
    let [begin, end] = [layers.start, layers.end].map(|layer| spec.row_values(&(0..layer)));
    let rows = inputs.chunks_exact(spec.row_values(&(0..spec.layers)));
    let streams = streams.chunks_exact(spec.width as usize);
    let rows = streams.zip(rows);
    rows.flat_map(|(stream, row)| stream.iter().chain(&row[begin..end]))
        .copied()
        .collect()
}

pub(crate) fn open(whole: &mut FullModel) -> SeqId {
    whole.engine_mut().open().unwrap()
}

/// Appends tokens in chunks, and returns the rows of the last layer.
pub(crate) fn append(whole: &mut FullModel, seq: SeqId, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for ids in ids.chunks(chunk) {
        let mut rows = embed(whole.head(), ids);
        forward(whole.engine_mut(), seq, &mut rows).unwrap();
        let spec = whole.head().spec();
        all.extend(streams(spec, &rows, rows.len() / ids.len()));
    }
    all
}

/// Runs tokens in chunks through a new sequence, and returns the rows of the last layer.
pub(crate) fn in_chunks(whole: &mut FullModel, ids: &[u32], chunk: usize) -> Vec<f32> {
    let seq = open(whole);
    append(whole, seq, ids, chunk)
}

/// Runs tokens through a new sequence in one batch.
pub(crate) fn run(whole: &mut FullModel, ids: &[u32]) -> (SeqId, Vec<f32>) {
    let seq = open(whole);
    let rows = append(whole, seq, ids, ids.len().max(1));
    (seq, rows)
}

/// Logits of all tokens, in a new sequence.
pub(crate) fn all_logits(whole: &mut FullModel, ids: &[u32]) -> Vec<f32> {
    let (seq, mut logits) = (open(whole), Vec::new());
    whole.append_all(seq, ids, &mut logits);
    logits
}

/// Fails with the position of the first value whose bits differ.
#[track_caller]
pub(crate) fn assert_same_bits(found: &[f32], expected: &[f32], width: usize, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    if let Some(at) = differing(found, expected).first() {
        panic!(
            "{what}: row {}, column {}: {:e} instead of {:e}; {} of {} values differ",
            at / width,
            at % width,
            found[*at],
            expected[*at],
            differing(found, expected).len(),
            found.len()
        );
    }
}

/// Indices of values whose bits differ.
pub(crate) fn differing(a: &[f32], b: &[f32]) -> Vec<usize> {
    let pairs = a.iter().zip(b).enumerate();
    pairs
        .filter(|(_, (a, b))| a.to_bits() != b.to_bits())
        .map(|(at, _)| at)
        .collect()
}

/// Mean of a sample, and its standard error.
pub(crate) fn mean_and_error(sample: &[f64]) -> (f64, f64) {
    let n = sample.len() as f64;
    let mean = sample.iter().sum::<f64>() / n;
    let variance = sample.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, (variance / n).sqrt())
}
