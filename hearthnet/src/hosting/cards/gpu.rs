//! The exact engine on graphics cards, in a program built with it.

use std::ops::Range;
use std::path::Path;

use hearthnet_engine::bench::{BenchOptions, EngineBench, bench_layers};
use hearthnet_engine::{ARITHMETIC, Engine, EngineOptions, Head, SeqId};
use hearthnet_files::ModelFile;
use hearthnet_gpu::{Choice, Gpu, GpuEngine, GpuLoadError};
use hearthnet_shard::{Device, Footprint, LayerEngine, LoadFault, Span, StreamFault};

use crate::cli::{Failure, Kind};

/// Graphics cards that this program can use, and how each computes: a line each.
pub(crate) fn cards() -> Vec<String> {
    let adapters = match hearthnet_gpu::adapters() {
        Ok(adapters) => adapters,
        Err(error) => return vec![format!("not used, {error}")],
    };
    adapters
        .into_iter()
        .map(|facts| {
            let name = format!("gpu:{} {} ({}", facts.index, facts.name, facts.backend);
            match Gpu::open(Choice::Index(facts.index)) {
                Ok(gpu) => format!("{name}): the same bytes, arithmetic {}", gpu.arithmetic()),
                Err(error) => format!("{name}): not used, {error}"),
            }
        })
        .collect()
}

/// Layers on the processor or on a card.
pub(crate) enum Layers {
    Processor(Engine),
    Card(GpuEngine),
}

/// Card that is opened before the process gives up its rights.
enum Opened {
    /// The processor computes.
    None,
    /// The card computes if it is faster.
    IfFaster(Gpu),
    Always(Gpu),
    Failed(String),
}

fn open(device: Device) -> Opened {
    let choice = match device {
        Device::Processor => return Opened::None,
        Device::Auto | Device::Card(None) => Choice::Auto,
        Device::Card(Some(index)) => Choice::Index(index.into()),
    };
    match (Gpu::open(choice), device) {
        (Ok(gpu), Device::Auto) => Opened::IfFaster(gpu),
        (Ok(gpu), _) => Opened::Always(gpu),
        (Err(error), Device::Auto) => {
            tracing::info!("the processor computes: {error}");
            Opened::None
        }
        (Err(error), _) => Opened::Failed(error.to_string()),
    }
}

/// Opens the card, calls `isolate` with whether there is one, and returns the function that loads
/// layers.
pub(crate) fn begin(
    device: Device,
    isolate: impl FnOnce(bool),
) -> impl FnOnce(
    &ModelFile,
    Range<u32>,
    &EngineOptions,
    &mut dyn FnMut(u64, u64),
) -> Result<Layers, LoadFault> {
    let opened = open(device);
    isolate(matches!(opened, Opened::IfFaster(_) | Opened::Always(_)));
    move |file, range, options, progress| {
        let (gpu, must) = match opened {
            Opened::None => return on_processor(file, range, options, progress),
            Opened::Failed(reason) => return Err(reason.into()),
            Opened::IfFaster(gpu) => (gpu, false),
            Opened::Always(gpu) => (gpu, true),
        };
        let chosen = match must {
            true => Ok(true),
            false => is_faster(file, range.clone(), &gpu, options),
        };
        let loaded = chosen.and_then(|faster| match faster {
            true => {
                let layers = range.clone();
                hearthnet_gpu::load(file, layers, &gpu, options, progress).map(Some)
            }
            false => Ok(None),
        });
        match loaded {
            Ok(Some(engine)) => Ok(Layers::Card(engine)),
            Ok(None) => on_processor(file, range, options, progress),
            Err(error) if !must => {
                tracing::info!("the processor computes: {error}");
                on_processor(file, range, options, progress)
            }
            Err(error) => Err(error.to_string().into()),
        }
    }
}

fn on_processor(
    file: &ModelFile,
    range: Range<u32>,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Layers, LoadFault> {
    let engine = Engine::load(file, range, options, progress)?;
    Ok(Layers::Processor(engine))
}

fn is_faster(
    file: &ModelFile,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
) -> Result<bool, GpuLoadError> {
    hearthnet_gpu::check(file.spec())?;
    let found = hearthnet_gpu::compare(file, range, gpu, options)?;
    tracing::info!(
        "some layers take {:.1} ms on the graphics card, {:.1} ms on the processor",
        found.card.as_secs_f64() * 1e3,
        found.processor.as_secs_f64() * 1e3,
    );
    Ok(found.card_is_faster())
}

/// Calls a method of the engine that there is.
macro_rules! each {
    ($self:ident, $engine:ident => $call:expr) => {
        match $self {
            Layers::Processor($engine) => $call,
            Layers::Card($engine) => $call,
        }
    };
}

impl LayerEngine for Layers {
    type Seq = SeqId;

    fn open(&mut self) -> Result<SeqId, StreamFault> {
        each!(self, engine => LayerEngine::open(engine))
    }

    fn fork(&mut self, seq: SeqId, length: u32) -> Result<SeqId, StreamFault> {
        each!(self, engine => LayerEngine::fork(engine, seq, length))
    }

    fn close(&mut self, seq: SeqId) {
        each!(self, engine => LayerEngine::close(engine, seq));
    }

    fn len(&self, seq: SeqId) -> u32 {
        each!(self, engine => LayerEngine::len(engine, seq))
    }

    fn truncate(&mut self, seq: SeqId, length: u32) -> Result<u32, StreamFault> {
        each!(self, engine => LayerEngine::truncate(engine, seq, length))
    }

    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<SeqId>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        each!(self, engine => LayerEngine::forward(engine, layers, spans, x))
    }

    fn weight_bytes(&self) -> u64 {
        each!(self, engine => LayerEngine::weight_bytes(engine))
    }

    fn footprint(&self) -> Footprint {
        each!(self, engine => LayerEngine::footprint(engine))
    }

    fn kv_bytes_in_use(&self) -> u64 {
        each!(self, engine => LayerEngine::kv_bytes_in_use(engine))
    }

    fn card(&self) -> Option<String> {
        match self {
            Self::Processor(_) => None,
            Self::Card(engine) => Some(engine.backend().to_string()),
        }
    }

    fn is_lost(&mut self) -> bool {
        each!(self, engine => LayerEngine::is_lost(engine))
    }
}

/// Measures layers on a card. Embedding and logits run on the processor, as for callers.
pub(crate) fn bench(
    path: &Path,
    device: Device,
    options: &BenchOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<EngineBench, Failure> {
    let gpu = match open(device) {
        Opened::IfFaster(gpu) | Opened::Always(gpu) => gpu,
        Opened::Failed(reason) => return Err(Failure::new(Kind::Refused, reason)),
        Opened::None => return Err(Failure::new(Kind::Refused, "there is no graphics card")),
    };
    bench_layers(path, ARITHMETIC, options, progress, |file, options| {
        let layers = 0..file.spec().layers;
        let engine = hearthnet_gpu::load(file, layers, &gpu, options, &mut |_, _| ())?;
        Ok((engine, Head::load(file, options)?))
    })
    .map_err(|e| Failure::new(Kind::BadRequest, e.to_string()).hint("see --help"))
}
