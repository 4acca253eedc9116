//! Shard host with a libtorch engine.

use hearthnet_shard::{
    EngineSource, LoadFault, LoadPhase, ModelLayers, Place, Prepared, RunningHost, ShardConfig,
    ShardHost, StartError, StartProgress,
};

use crate::engine::{TorchEngine, load};
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
    let options = TorchOptions { engine, ..options };
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
        let engine = load(&file, self.layers.range(), &self.options, &mut report);
        engine.map_err(|e| e.to_string().into())
    }
}
