//! Short measurement: whether a card is faster than the processor.

use std::ops::Range;
use std::time::{Duration, Instant};

use hearthnet_engine::{Backend, Engine, EngineError, EngineOn, EngineOptions, LoadError, Span};
use hearthnet_files::ModelFile;

use super::load;
use crate::{Gpu, GpuError, GpuLoadError};

/// Layers that are measured: enough that one submission and one read do not count more than in use.
const LAYERS: u32 = 4;
/// Rows of the prompt, and of the answer behind it.
const PROMPT: u32 = 16;
const ANSWER: u32 = 6;

/// Time of a short prompt and a short answer through some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    pub card: Duration,
    pub processor: Duration,
}

impl Comparison {
    pub fn card_is_faster(&self) -> bool {
        self.card < self.processor
    }
}

/// Loads the first layers of a range onto the card and onto the processor, and measures both.
///
/// # Errors
/// See [`GpuLoadError`].
pub fn compare(
    file: &ModelFile,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
) -> Result<Comparison, GpuLoadError> {
    let spec = file.spec();
    let few = range.start..range.end.min(range.start.saturating_add(LAYERS));
    // Layers that use the keys of others cannot be separated from them.
    let some = match spec.check_range(&few) {
        Ok(()) => few,
        Err(_) => range,
    };
    let options = EngineOptions {
        max_kv_bytes: u64::MAX,
        max_context: None,
        ..options.clone()
    };
    let mut card = load(file, some.clone(), gpu, &options, &mut |_, _| ())?;
    let card = time(&mut card)?;
    let mut processor = Engine::load(file, some, &options, &mut |_, _| ())?;
    let processor = time(&mut processor)?;
    Ok(Comparison { card, processor })
}

/// Time of the second of two equal runs. The first one compiles kernels and allocates.
fn time<B: Backend>(engine: &mut EngineOn<B>) -> Result<Duration, GpuLoadError> {
    let mut taken = Duration::MAX;
    for _ in 0..2 {
        let begun = Instant::now();
        run(engine).map_err(|error| match error {
            EngineError::Device(reason) => GpuLoadError::Gpu(GpuError::Lost(reason)),
            other => LoadError::Unsupported(other.to_string()).into(),
        })?;
        taken = begun.elapsed();
    }
    Ok(taken)
}

fn run<B: Backend>(engine: &mut EngineOn<B>) -> Result<(), EngineError> {
    let values = engine.spec().row_values(&engine.layers());
    let seq = engine.open()?;
    let answer = match engine.spec().encoder {
        // An encoder has whole texts only.
        Some(_) => 0,
        None => ANSWER,
    };
    let mut position = 0;
    for rows in [PROMPT].into_iter().chain((0..answer).map(|_| 1)) {
        // Small values of both signs, which every boundary dtype has.
        let cells = 0..values * rows as usize;
        let mut x: Vec<f32> = cells.map(|i| ((i * 37 % 17) as f32 - 8.0) / 64.0).collect();
        engine.forward(&[Span::new(seq, position, rows)], &mut x)?;
        position += rows;
    }
    engine.close(seq);
    Ok(())
}
