//! The exact engine on graphics cards, in a program built with it.

use std::ops::Range;
use std::path::Path;

use hearthnet_engine::bench::{BenchOptions, EngineBench, bench_layers};
use hearthnet_engine::{ARITHMETIC, Engine, EngineOptions, Head, SeqId};
use hearthnet_files::ModelFile;
use hearthnet_gpu::{Choice, Gpu, GpuEngine, GpuLoadError};
use hearthnet_shard::{Device, Footprint, Joined, LayerEngine, LoadFault, Span, StreamFault};

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
                Ok(gpu) => format!("{name}): the same bytes, arithmetic {}", gpu.summary()),
                Err(error) => format!("{name}): not used, {error}"),
            }
        })
        .collect()
}

/// Layers on the processor, on a card, or the first ones on a card and the others on the processor.
pub(crate) enum Layers {
    Processor(Engine),
    Card(GpuEngine),
    Both(Box<Joined<GpuEngine, Engine>>),
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
                hearthnet_gpu::load_most(file, layers, &gpu, options, progress).map(Some)
            }
            false => Ok(None),
        });
        match loaded {
            Ok(Some(card)) => with_rest(card, file, range, options, progress),
            Ok(None) => on_processor(file, range, options, progress),
            Err(error) if !must => {
                tracing::info!("the processor computes: {error}");
                on_processor(file, range, options, progress)
            }
            Err(error) => Err(error.to_string().into()),
        }
    }
}

/// Loads the layers for which the card had no room onto the processor.
fn with_rest(
    card: GpuEngine,
    file: &ModelFile,
    range: Range<u32>,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Layers, LoadFault> {
    let cut = card.layers().end;
    if cut == range.end {
        return Ok(Layers::Card(card));
    }
    let (first, all) = (cut - range.start, range.len());
    tracing::info!(
        "the graphics card has room for {first} of {all} layers; the processor computes the others"
    );
    let rest = options.share(file.spec(), cut..range.end, range.clone());
    let rest = Engine::load(file, cut..range.end, &rest, progress)?;
    Ok(Layers::Both(Box::new(Joined::new(card, rest, cut))))
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

/// Calls a function with the engine that there is. A sequence has an id in each engine of
/// [`Layers::Both`]; the others use the first one.
macro_rules! each {
    ($self:ident, $seq:ident => $call:ident($($argument:expr),*)) => {
        match $self {
            Layers::Processor(engine) => LayerEngine::$call(engine, $seq.0 $(, $argument)*),
            Layers::Card(engine) => LayerEngine::$call(engine, $seq.0 $(, $argument)*),
            Layers::Both(engine) => engine.$call($seq $(, $argument)*),
        }
    };
    ($self:ident => $call:ident()) => {
        match $self {
            Layers::Processor(engine) => LayerEngine::$call(engine),
            Layers::Card(engine) => LayerEngine::$call(engine),
            Layers::Both(engine) => engine.$call(),
        }
    };
}

/// Id of a sequence of a single engine.
fn one(seq: SeqId) -> (SeqId, SeqId) {
    (seq, seq)
}

impl LayerEngine for Layers {
    type Seq = (SeqId, SeqId);

    fn open(&mut self) -> Result<Self::Seq, StreamFault> {
        match self {
            Self::Processor(engine) => LayerEngine::open(engine).map(one),
            Self::Card(engine) => LayerEngine::open(engine).map(one),
            Self::Both(engine) => engine.open(),
        }
    }

    fn fork(&mut self, seq: Self::Seq, length: u32) -> Result<Self::Seq, StreamFault> {
        match self {
            Self::Processor(engine) => LayerEngine::fork(engine, seq.0, length).map(one),
            Self::Card(engine) => LayerEngine::fork(engine, seq.0, length).map(one),
            Self::Both(engine) => engine.fork(seq, length),
        }
    }

    fn close(&mut self, seq: Self::Seq) {
        each!(self, seq => close());
    }

    fn len(&self, seq: Self::Seq) -> u32 {
        each!(self, seq => len())
    }

    fn truncate(&mut self, seq: Self::Seq, length: u32) -> Result<u32, StreamFault> {
        each!(self, seq => truncate(length))
    }

    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<Self::Seq>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        let first = || -> Vec<_> { spans.iter().map(|span| span.of(span.seq.0)).collect() };
        match self {
            Self::Processor(engine) => LayerEngine::forward(engine, layers, &first(), x),
            Self::Card(engine) => LayerEngine::forward(engine, layers, &first(), x),
            Self::Both(engine) => engine.forward(layers, spans, x),
        }
    }

    fn weight_bytes(&self) -> u64 {
        each!(self => weight_bytes())
    }

    fn footprint(&self) -> Footprint {
        each!(self => footprint())
    }

    fn kv_bytes_in_use(&self) -> u64 {
        each!(self => kv_bytes_in_use())
    }

    fn card(&self) -> Option<String> {
        each!(self => card())
    }

    fn is_lost(&mut self) -> bool {
        each!(self => is_lost())
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
