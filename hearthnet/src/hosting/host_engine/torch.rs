//! libtorch's engine, in a program built with it.

use std::path::Path;

use hearthnet_engine::bench::{BenchOptions, EngineBench};
use hearthnet_files::ModelFile;
use hearthnet_shard::{Place, RunningHost, ShardConfig, StartError, StartProgress};
use hearthnet_torch::{TorchLoadError, TorchOptions};

use crate::cli::args::TorchArgs;
use crate::cli::{Failure, Kind};

/// Options of libtorch's engine, which is not loaded yet.
#[derive(Debug, Clone)]
pub(crate) struct Torch(TorchOptions);

fn failed(error: &TorchLoadError) -> Failure {
    Failure::new(Kind::Refused, error.to_string()).hint(
        "`--device cpu` computes on the processor; `--backend exact` does so without libtorch",
    )
}

impl Torch {
    pub(super) fn of(device: &str, dtype: &str) -> Result<Self, Failure> {
        let wrong = |e: hearthnet_torch::OptionError| Failure::new(Kind::Config, e.to_string());
        let dtype = match dtype {
            "auto" => None,
            dtype => Some(dtype.parse().map_err(wrong)?),
        };
        Ok(Self(TorchOptions {
            device: device.parse().map_err(wrong)?,
            dtype,
            ..TorchOptions::default()
        }))
    }

    pub(super) async fn start(
        &self,
        config: ShardConfig,
        place: Place<'_>,
        progress: impl FnMut(StartProgress) + Send,
    ) -> Result<RunningHost, StartError> {
        hearthnet_torch::start(config, self.0.clone(), place, progress).await
    }

    pub(super) fn layer_bytes(&self, file: &ModelFile) -> Result<Vec<u64>, Failure> {
        let target = self.0.target(file.spec()).map_err(|e| failed(&e))?;
        let layers = 0..file.spec().layers;
        Ok(layers
            .map(|layer| target.layer_bytes(file, layer))
            .collect())
    }

    pub(super) fn is_on_card(&self, file: &ModelFile) -> Result<bool, Failure> {
        let target = self.0.target(file.spec()).map_err(|e| failed(&e))?;
        Ok(target.is_on_card())
    }
}

pub(crate) fn bench(
    path: &Path,
    args: &TorchArgs,
    options: &BenchOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<EngineBench, Failure> {
    let auto = "auto".to_owned();
    let [device, dtype] = [&args.device, &args.dtype].map(|given| given.as_ref().unwrap_or(&auto));
    let Torch(torch) = Torch::of(device, dtype)?;
    hearthnet_torch::bench(path, &torch, options, progress)
        .map_err(|e| Failure::new(Kind::BadRequest, e.to_string()).hint("see --help"))
}
