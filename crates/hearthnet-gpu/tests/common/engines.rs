//! Helpers of the tests that compare the engine on a card with that on the processor.
#![allow(dead_code)] // each test binary uses a part

use std::ops::Range;
use std::sync::OnceLock;

use hearthnet_engine::{Backend, Engine, EngineError, EngineOn, EngineOptions, SeqId, Span};
use hearthnet_files::ModelFile;
use hearthnet_gpu::{Choice, Gpu, GpuEngine};

/// Mesa's driver that computes on the processor (Debian: `mesa-vulkan-drivers`).
pub(crate) fn card() -> &'static Gpu {
    static CARD: OnceLock<Gpu> = OnceLock::new();
    CARD.get_or_init(open)
}

pub(crate) fn open() -> Gpu {
    Gpu::open(Choice::Software).expect("a software driver of Vulkan")
}

pub(crate) fn options() -> EngineOptions {
    EngineOptions {
        threads: 1,
        max_kv_bytes: 64 << 20,
        ..EngineOptions::default()
    }
}

pub(crate) fn on_card(file: &ModelFile, layers: Range<u32>) -> GpuEngine {
    let loaded = hearthnet_gpu::load(file, layers, card(), &options(), &mut |_, _| ());
    loaded.unwrap_or_else(|error| panic!("{}: {error}", file.spec().architecture))
}

pub(crate) fn on_processor(file: &ModelFile, layers: Range<u32>) -> Engine {
    Engine::load(file, layers, &options(), &mut |_, _| ()).unwrap()
}

/// Engines on the card and on the processor with all layers.
pub(crate) fn both(file: &ModelFile) -> (GpuEngine, Engine) {
    let layers = 0..file.spec().layers;
    (on_card(file, layers.clone()), on_processor(file, layers))
}

/// Appends rows to a sequence in batches of so many rows each, and returns them as they come out.
pub(crate) fn append<B: Backend>(
    engine: &mut EngineOn<B>,
    seq: SeqId,
    rows: &[f32],
    sizes: &[usize],
) -> Result<Vec<f32>, EngineError> {
    let values = engine.spec().row_values(&engine.layers());
    let (mut out, mut rest, mut sizes) = (Vec::new(), rows, sizes.iter().cycle());
    while !rest.is_empty() {
        let size = sizes.next().map_or(1, |size| *size);
        let (batch, later) = rest.split_at(rest.len().min(size * values));
        let mut x = batch.to_vec();
        let span = Span::new(seq, engine.len(seq)?, (batch.len() / values) as u32);
        engine.forward(&[span], &mut x)?;
        out.extend(x);
        rest = later;
    }
    Ok(out)
}

/// Runs rows through a new sequence in batches of so many rows each.
pub(crate) fn through<B: Backend>(
    engine: &mut EngineOn<B>,
    rows: &[f32],
    sizes: &[usize],
) -> Vec<f32> {
    let seq = engine.open().unwrap();
    let out = append(engine, seq, rows, sizes).unwrap();
    engine.close(seq);
    out
}

/// First value that differs in its bits.
pub(crate) fn difference(found: &[f32], expected: &[f32], width: usize) -> Option<String> {
    assert_eq!(found.len(), expected.len());
    let both = || found.iter().zip(expected);
    let at = both().position(|(a, b)| a.to_bits() != b.to_bits())?;
    let differ = both().filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    Some(format!(
        "{differ} of {} differ, first row {} value {}: {} for {}",
        found.len(),
        at / width,
        at % width,
        found[at],
        expected[at]
    ))
}

#[track_caller]
pub(crate) fn assert_same(found: &[f32], expected: &[f32], width: usize, what: &str) {
    if let Some(difference) = difference(found, expected, width) {
        panic!("{what}: {difference}");
    }
}
