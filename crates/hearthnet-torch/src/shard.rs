//! Shard host with a libtorch engine.

use hearthnet_engine::Span;
use hearthnet_shard::{
    EngineSource, Footprint, LayerEngine, LoadFault, LoadPhase, ModelLayers, Place, Prepared,
    RunningHost, ShardConfig, ShardHost, StartError, StartProgress, StreamFault,
};

use crate::engine::TorchEngine;
use crate::error::TorchError;
use crate::kv::Seq;
use crate::options::{Target, TorchOptions};

/// Layer range of a file; can be loaded repeatedly.
#[derive(Debug)]
pub struct TorchSource {
    layers: ModelLayers,
    options: TorchOptions,
}

/// Serves layers as [`ShardHost::start`] does. The engine options of `config` set threads and
/// limits; `options` sets device and format.
///
/// # Errors
/// See [`StartError`]. After an error, no task is left running.
pub async fn start(
    config: ShardConfig,
    options: TorchOptions,
    place: impl Into<Place<'_>>,
    mut progress: impl FnMut(StartProgress) + Send,
) -> Result<RunningHost, StartError> {
    let prepared = ShardHost::prepare(config, &mut progress).await?;
    let Prepared {
        serve,
        mut served,
        layers,
        engine,
    } = prepared;
    let options = TorchOptions {
        threads: Some(engine.threads),
        max_kv_bytes: engine.max_kv_bytes,
        max_sequences: engine.max_sequences,
        max_context: engine.max_context,
        ..options
    };
    let target = options.target(layers.spec());
    let target: Target = target.map_err(|error| StartError::Load {
        reason: error.to_string(),
    })?;
    served.arithmetic = target.arithmetic();
    let source = TorchSource { layers, options };
    ShardHost::start_on(serve, place, served, source, &mut progress).await
}

impl TorchSource {
    pub fn new(layers: ModelLayers, options: TorchOptions) -> Self {
        Self { layers, options }
    }
}

impl EngineSource for TorchSource {
    type Engine = TorchEngine;

    fn load(&mut self, progress: &mut dyn FnMut(StartProgress)) -> Result<TorchEngine, LoadFault> {
        let file = self.layers.open(&mut *progress)?;
        let mut report = |done, total| {
            progress(StartProgress {
                phase: LoadPhase::Loading,
                done,
                total,
            });
        };
        let range = self.layers.range();
        TorchEngine::load(&file, range, &self.options, &mut report)
            .map_err(|e| e.to_string().into())
    }
}

impl LayerEngine for TorchEngine {
    type Seq = Seq;

    fn open(&mut self) -> Result<Seq, StreamFault> {
        Ok(TorchEngine::open(self)?)
    }

    fn close(&mut self, seq: Seq) {
        TorchEngine::close(self, seq);
    }

    fn len(&self, seq: Seq) -> u32 {
        TorchEngine::len(self, seq).unwrap_or(0)
    }

    fn truncate(&mut self, seq: Seq, length: u32) -> Result<(), StreamFault> {
        Ok(TorchEngine::truncate(self, seq, length)?)
    }

    fn forward(
        &mut self,
        (lo, hi): (u32, u32),
        spans: &[Span<Seq>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        Ok(self.forward_layers(lo..hi.saturating_add(1), spans, x)?)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            weight_bytes: self.weight_bytes(),
            kv_bytes_per_position: self.kv_bytes_per_position(),
            kv_page_positions: self.kv_page_positions(),
        }
    }

    fn kv_bytes_in_use(&self) -> u64 {
        TorchEngine::kv_bytes_in_use(self)
    }

    fn is_lost(&mut self) -> bool {
        TorchEngine::is_lost(self)
    }
}

impl From<TorchError> for StreamFault {
    fn from(error: TorchError) -> Self {
        match error {
            TorchError::PositionGap { position, len, .. } => Self::PositionGap {
                position,
                length: len,
            },
            TorchError::ContextFull { limit, .. } => Self::ContextFull { max: limit },
            TorchError::KvFull { .. } | TorchError::OutOfMemory => Self::KvFull,
            TorchError::InputNotFinite(_) => Self::TensorNonFinite,
            TorchError::OutOfRange { layer, .. } => Self::BoundaryOverflow { layer },
            other => Self::Internal {
                reason: other.to_string(),
            },
        }
    }
}
