//! Host for layers of a model file, on the exact engine.

use std::ops::Range;
use std::path::{Path, PathBuf};

use hearthnet_engine::{ARITHMETIC, Backend, Engine, EngineOn, EngineOptions, SeqId};
use hearthnet_files::manifest::Manifest;
use hearthnet_files::part::open_model;
use hearthnet_files::spec::Formats;
use hearthnet_files::{ModelFile, ModelSpec, TextId, WeightsId};
use hearthnet_transport::run_blocking;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::child::{Connect, Load, RemoteSource};
use crate::config::ServeConfig;
use crate::device::Device;
use crate::engine::{
    EngineSource, Footprint, LayerEngine, LoadFault, LoadPhase, Served, Span, StartProgress,
    in_phase,
};
use crate::fault::{StartError, StreamFault};
use crate::host::{Place, RunningHost, ShardHost};

/// Configuration of a host: model, layers, engine and serving.
#[derive(Debug, Clone)]
pub struct ShardConfig {
    pub model: PathBuf,
    /// Name of the model in the descriptor. Default: the file's stem.
    pub model_id: Option<String>,
    /// First and last layer to serve, both inclusive.
    pub layers: (u32, u32),
    /// Formats of the rows between layers, and of keys and values, if they shall differ from those of
    /// the file.
    pub formats: Option<Formats>,
    /// Refuse to start with any other weights. Default: accept any.
    pub expected_weights: Option<WeightsId>,
    /// Threads and instruction set. The limits of memory, sequences and context in it are
    /// replaced by those of `serve`.
    pub engine: EngineOptions,
    /// Device of an engine in a process of its own ([`ShardHost::start_in_child`]).
    pub device: Device,
    pub serve: ServeConfig,
}

impl ShardConfig {
    /// Serves `layers` (first and last, inclusive) of `model` on `listen` (`host:port`) to the
    /// host's own key, with all defaults.
    pub fn new(model: impl Into<PathBuf>, layers: (u32, u32), listen: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            model_id: None,
            layers,
            formats: None,
            expected_weights: None,
            engine: EngineOptions::default(),
            device: Device::default(),
            serve: ServeConfig::new(listen),
        }
    }
}

impl ShardHost {
    /// Opens and hashes the model, listens, verifies the tensors of the layer range against the
    /// manifest, loads these layers and no others, and serves.
    ///
    /// `progress` is called from the calling task.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left running.
    pub async fn start(
        config: ShardConfig,
        place: impl Into<Place<'_>>,
        progress: impl FnMut(StartProgress) + Send,
    ) -> Result<RunningHost, StartError> {
        Self::start_with(config, place, progress, |_, options| {
            let load =
                move |file: &ModelFile, layers: Range<u32>, progress: &mut dyn FnMut(u64, u64)| {
                    Engine::load(file, layers, &options, progress).map_err(LoadFault::from)
                };
            Ok((ARITHMETIC.to_owned(), load))
        })
        .await
    }

    /// As [`Self::start`], on another engine. `engine` receives the model, and the options that the
    /// exact engine would have, with the limits of `config.serve`. It returns the name of its
    /// arithmetic in descriptors, and a function that loads a half-open range of layers: once at the
    /// start, and again when a stream is opened after the weights were unloaded.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_with<E, L>(
        config: ShardConfig,
        place: impl Into<Place<'_>>,
        mut progress: impl FnMut(StartProgress) + Send,
        engine: impl FnOnce(&ModelSpec, EngineOptions) -> Result<(String, L), StartError>,
    ) -> Result<RunningHost, StartError>
    where
        E: LayerEngine,
        L: FnMut(&ModelFile, Range<u32>, &mut dyn FnMut(u64, u64)) -> Result<E, LoadFault>
            + Send
            + 'static,
    {
        let known = Known::read(config, &mut progress).await?;
        let (arithmetic, load) = engine(known.manifest.spec(), known.options.clone())?;
        let served = known.served(arithmetic);
        let source = ModelSource {
            path: known.path,
            manifest: known.manifest,
            range: half_open(known.layers),
            load,
        };
        Self::start_on(known.serve, place, served, source, &mut progress).await
    }

    /// As [`Self::start`], with the engine in a process that `connect` starts: at the start, and again
    /// when a stream is opened after the weights were unloaded or the process was lost.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_in_child(
        config: ShardConfig,
        place: impl Into<Place<'_>>,
        mut progress: impl FnMut(StartProgress) + Send,
        connect: Connect,
    ) -> Result<RunningHost, StartError> {
        let device = config.device;
        let known = Known::read(config, &mut progress).await?;
        let served = known.served(ARITHMETIC.to_owned());
        let load = Load {
            range: half_open(known.layers),
            niceness: known.serve.niceness,
            options: known.options,
            device,
            manifest: known.manifest.encode(),
        };
        let source = RemoteSource::new(known.path, load, connect);
        Self::start_on(known.serve, place, served, source, &mut progress).await
    }
}

/// Model of a host, read and checked, and the configuration for it.
struct Known {
    path: PathBuf,
    model_id: String,
    layers: (u32, u32),
    manifest: Manifest,
    weights: WeightsId,
    options: EngineOptions,
    serve: ServeConfig,
}

impl Known {
    async fn read(
        config: ShardConfig,
        progress: &mut (dyn FnMut(StartProgress) + Send),
    ) -> Result<Self, StartError> {
        let ShardConfig {
            model,
            model_id,
            layers,
            formats,
            expected_weights,
            engine: options,
            device: _,
            mut serve,
        } = config;
        serve.validate()?;
        let (report, mut reports) = mpsc::channel(16);
        let path = model.clone();
        let opening = run_blocking(&Handle::current(), move || {
            let progress = in_phase(LoadPhase::Hashing, move |step| {
                // A start that reads slowly misses some reports.
                let _ = report.try_send(step);
            });
            open(&path, layers, formats, expected_weights, progress)
        });
        while let Some(step) = reports.recv().await {
            progress(step);
        }
        let (manifest, weights, text) = opening.await.map_err(|error| StartError::Load {
            reason: error.to_string(),
        })??;

        if let Some(text) = text {
            serve.software.push_str(&format!(" text/{text}"));
        }
        let options = EngineOptions {
            max_kv_bytes: serve.kv_budget_bytes,
            max_sequences: serve.max_concurrent_streams as usize,
            max_context: serve.max_positions,
            ..options
        };
        Ok(Self {
            model_id: model_id.unwrap_or_else(|| stem(&model)),
            path: model,
            layers,
            manifest,
            weights,
            options,
            serve,
        })
    }

    fn served(&self, arithmetic: String) -> Served {
        let spec = self.manifest.spec();
        Served {
            model_id: self.model_id.clone(),
            weights: self.weights.0,
            lo: self.layers.0,
            hi: self.layers.1,
            total_layers: spec.layers,
            rows: spec.row_shape(),
            boundary: spec.boundary,
            context: spec.context,
            arithmetic,
        }
    }
}

/// Opens the file and computes its identity, without keeping it open.
fn open(
    path: &Path,
    (lo, hi): (u32, u32),
    formats: Option<Formats>,
    expected: Option<WeightsId>,
    mut progress: impl FnMut(u64, u64),
) -> Result<(Manifest, WeightsId, Option<TextId>), StartError> {
    let mut file = open_model(path)?;
    if let Some(formats) = formats {
        file = file.with_formats(formats);
    }
    let total = file.spec().layers;
    if lo > hi || hi >= total {
        return Err(StartError::LayerRange { lo, hi, total });
    }
    let manifest = file.manifest(&mut progress);
    let found = manifest.weights_id();
    match expected {
        Some(expected) if expected != found => Err(StartError::WeightsMismatch {
            expected: expected.to_string(),
            found: found.to_string(),
        }),
        // A model without a tokenizer is served as well.
        _ => Ok((manifest, found, file.gguf().text_id().ok())),
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(
        || "model".into(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}

fn half_open((lo, hi): (u32, u32)) -> Range<u32> {
    // `hi` is a layer of the model, as checked before, so the sum cannot overflow.
    lo..hi.saturating_add(1)
}

/// Layer range of a file, the expected hashes of its tensors, and the function that loads it.
struct ModelSource<L> {
    path: PathBuf,
    manifest: Manifest,
    range: Range<u32>,
    load: L,
}

impl<E, L> EngineSource for ModelSource<L>
where
    E: LayerEngine,
    L: FnMut(&ModelFile, Range<u32>, &mut dyn FnMut(u64, u64)) -> Result<E, LoadFault>
        + Send
        + 'static,
{
    type Engine = E;

    /// Opens the file anew each time: while the weights are unloaded the file is not held open, and
    /// a reload verifies that it is unchanged.
    fn load(&mut self, progress: &mut dyn FnMut(StartProgress)) -> Result<E, LoadFault> {
        let file = open_model(&self.path)?.with_formats(self.manifest.spec().formats());
        self.manifest
            .verify(
                &file,
                self.range.clone(),
                false,
                &mut in_phase(LoadPhase::Verifying, &mut *progress),
            )
            .map_err(|error| error.to_string())?;
        let progress = &mut in_phase(LoadPhase::Loading, progress);
        (self.load)(&file, self.range.clone(), progress)
    }
}

impl<B: Backend + 'static> LayerEngine for EngineOn<B> {
    type Seq = SeqId;

    fn open(&mut self) -> Result<SeqId, StreamFault> {
        Ok(Self::open(self)?)
    }

    fn fork(&mut self, seq: SeqId, length: u32) -> Result<SeqId, StreamFault> {
        let fork = Self::fork(self, seq)?;
        if let Err(fault) = self.truncate_to(fork, length) {
            Self::close(self, fork);
            return Err(fault);
        }
        Ok(fork)
    }

    fn close(&mut self, seq: SeqId) {
        Self::close(self, seq);
    }

    fn len(&self, seq: SeqId) -> u32 {
        Self::len(self, seq).unwrap_or(0)
    }

    fn truncate(&mut self, seq: SeqId, length: u32) -> Result<u32, StreamFault> {
        Ok(Self::truncate(self, seq, length)?)
    }

    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<SeqId>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        Ok(self.forward_layers(half_open(layers), spans, x)?)
    }

    fn weight_bytes(&self) -> u64 {
        Self::weight_bytes(self)
    }

    fn footprint(&self) -> Footprint {
        Self::footprint(self)
    }

    fn kv_bytes_in_use(&self) -> u64 {
        Self::kv_bytes_in_use(self)
    }

    fn card(&self) -> Option<String> {
        self.backend().card()
    }

    fn is_lost(&mut self) -> bool {
        Self::is_lost(self)
    }
}
