//! Shard host with a libtorch engine.

use std::ops::Range;

use hearthnet_files::ModelFile;
use hearthnet_shard::{
    LoadFault, Place, RunningHost, ShardConfig, ShardHost, StartError, StartProgress,
};

use crate::engine::load;
use crate::options::TorchOptions;

/// Serves layers as [`ShardHost::start`] does. The engine options of `config` set threads and
/// limits; `options` sets device and format.
///
/// # Errors
/// See [`StartError`]. After an error, no task is left running.
pub async fn start(
    config: ShardConfig,
    options: TorchOptions,
    place: impl Into<Place<'_>>,
    progress: impl FnMut(StartProgress) + Send,
) -> Result<RunningHost, StartError> {
    ShardHost::start_with(config, place, progress, |spec, engine| {
        let options = TorchOptions { engine, ..options };
        let target = options.target(spec).map_err(|error| StartError::Load {
            reason: error.to_string(),
        })?;
        let load_layers =
            move |file: &ModelFile, layers: Range<u32>, progress: &mut dyn FnMut(u64, u64)| {
                load(file, layers, &options, progress).map_err(|e| LoadFault::from(e.to_string()))
            };
        Ok((target.arithmetic(), load_layers))
    })
    .await
}
