//! Engine of a host: the exact one, on the processor or (feature `gpu`) a graphics card; or, with the
//! feature `torch`, libtorch's.
//!
//! Only this folder and `cards` know which of these features the program was built with.

#[cfg(not(feature = "torch"))]
mod no_torch;
pub(crate) mod start;
#[cfg(feature = "torch")]
mod torch;

use std::ops::Range;

use hearthnet_engine::ARITHMETIC;
use hearthnet_files::ModelFile;
use hearthnet_orchestrator::placement::room;
use hearthnet_shard::{
    Device, Place, RunningHost, ShardConfig, ShardHost, StartError, StartProgress,
};

#[cfg(not(feature = "torch"))]
use self::no_torch::Torch;
use self::start::{start_failure, start_progress};
#[cfg(feature = "torch")]
use self::torch::Torch;
use crate::cli::args::{EngineKind, HostEngineArgs, TorchArgs};
use crate::cli::{Failure, Kind, bytes, failure};
use crate::config::Config;
use crate::hosting::cards::{self, no_cards_built};
use crate::hosting::engine_process;
use crate::models::{OpenModel, weights_budget};

#[cfg(feature = "torch")]
pub(crate) use self::torch::bench;

#[cfg(not(feature = "torch"))]
pub(crate) use self::no_torch::bench;

#[derive(Debug, Clone)]
pub(crate) enum HostEngine {
    Exact(Device),
    Torch(Torch),
}

/// Engine chosen on the command line, else in the configuration.
fn asked(args: &HostEngineArgs, config: &Config) -> EngineKind {
    let configured = config.research.distributed_inference.backend;
    args.backend.unwrap_or(configured)
}

impl HostEngine {
    /// Engine chosen on the command line, else in the configuration.
    ///
    /// # Errors
    /// Returns an error if the program was built without the engine or the device, or if `--device`
    /// or `--dtype` do not apply to it.
    pub(crate) fn of(args: &HostEngineArgs, config: &Config) -> Result<Self, Failure> {
        let host = &config.research.distributed_inference.host;
        match asked(args, config) {
            EngineKind::Exact => exact_device(&args.torch, &host.device).map(Self::Exact),
            EngineKind::Torch => {
                let device = args.torch.device.as_ref().unwrap_or(&host.device);
                let dtype = args.torch.dtype.as_ref().unwrap_or(&host.dtype);
                Torch::of(device, dtype).map(Self::Torch)
            }
        }
    }

    /// Starts a host, with the exact engine in a process of its own if this process can start one.
    /// `listen` is only used in error messages.
    pub(crate) async fn start(
        &self,
        config: ShardConfig,
        place: impl Into<Place<'_>>,
        listen: &str,
    ) -> Result<RunningHost, Failure> {
        let (place, progress) = (place.into(), start_progress());
        let started = match self {
            Self::Exact(device) => match engine_process::connect() {
                Some(connect) => {
                    let config = ShardConfig {
                        device: *device,
                        ..config
                    };
                    ShardHost::start_in_child(config, place, progress, connect).await
                }
                None => start_here(config, place, *device, progress).await,
            },
            Self::Torch(torch) => torch.start(config, place, progress).await,
        };
        started.map_err(|error| {
            let failure = start_failure(listen, &error);
            match (self, &error) {
                (Self::Torch(_), StartError::Load { .. }) => failure.hint(
                    "serve fewer layers, or choose another --device or --dtype; `--backend exact` \
                     needs no graphics card",
                ),
                _ => failure,
            }
        })
    }

    /// Bytes of each layer in memory. An upper bound, because vectors are padded.
    pub(crate) fn layer_bytes(&self, file: &ModelFile) -> Result<Vec<u64>, Failure> {
        match self {
            Self::Exact(_) => {
                let layers = 0..file.spec().layers;
                Ok(layers.map(|layer| file.layer_bytes(layer)).collect())
            }
            Self::Torch(torch) => torch.layer_bytes(file),
        }
    }

    /// Bytes of weights that layers with `--layers auto` may take, of which `held` are in use.
    pub(crate) fn auto_budget(
        &self,
        file: &ModelFile,
        config: &Config,
        held: u64,
    ) -> Result<u64, Failure> {
        let host = &config.research.distributed_inference.host;
        if let Self::Torch(torch) = self
            && host.memory_budget_mb.0 == 0
            && torch.is_on_card(file)?
        {
            return Err(Failure::new(
                Kind::Config,
                "the memory of the graphics card is not known, so --layers auto needs a budget",
            )
            .hint(
                "set research.distributed_inference.host.memory_budget_mb, or name layers: --layers LO-HI",
            ));
        }
        Ok(weights_budget(config, held))
    }
}

/// Error if layers were named that a model of `total` layers lacks.
pub(crate) fn no_such_layers(model: &str, (lo, hi): (u32, u32), total: u32) -> Failure {
    failure!(
        BadRequest,
        "layers {lo}-{hi} do not exist: {model} has layers 0-{}",
        total.saturating_sub(1)
    )
    .hint("--layers auto chooses what the community lacks")
}

/// Error if the memory for weights is too small for a layer of a model. `budget` is the part of it
/// for this model, if other models share it.
pub(crate) fn no_layer_fits(
    model: &str,
    layer_bytes: &[u64],
    budget: u64,
    is_shared: bool,
) -> Failure {
    let layer = layer_bytes.iter().copied().max().unwrap_or_default();
    let needed_mb = layer.div_ceil(1 << 20);
    let (beside, hint) = match is_shared {
        true => (
            " beside other models",
            format!(
                "the models share this memory equally: raise manners.memory_percent, or \
                 research.distributed_inference.host.memory_budget_mb to {needed_mb} for each model, or \
                 let an anchor drop one: `hearthnet model drop`"
            ),
        ),
        false => (
            "",
            format!(
                "set research.distributed_inference.host.memory_budget_mb to {needed_mb} or more, or \
                 raise manners.memory_percent"
            ),
        ),
    };
    failure!(
        Host,
        "not one layer of {model} ({} each) fits into the memory for weights{beside} ({}): {} are missing",
        bytes(layer),
        bytes(budget),
        bytes(layer.saturating_sub(budget)),
    )
    .hint(hint)
}

/// Checks that explicitly named layers fit into `budget`, the part of `memory_budget_mb` that other
/// models leave. Without a setting there is no limit.
pub(crate) fn named_layers_fit(
    model: &OpenModel,
    engine: &HostEngine,
    (lo, hi): (u32, u32),
    setting_mb: u64,
    budget: u64,
) -> Result<(), Failure> {
    if setting_mb == 0 {
        return Ok(());
    }
    let all = engine.layer_bytes(&model.file)?;
    // Missing layers are refused elsewhere.
    let layers = all.get(lo as usize..=hi as usize).unwrap_or_default();
    let needed = layers
        .iter()
        .fold(0, |all: u64, one| all.saturating_add(*one));
    if needed <= budget {
        return Ok(());
    }
    let fit = match room(budget, layers) {
        0 => "not one of them does".to_owned(),
        n => format!(
            "{n} of them do, {lo}-{} for example",
            lo.saturating_add(n - 1)
        ),
    };
    let others = (setting_mb << 20).saturating_sub(budget);
    let beside = match others {
        0 => "",
        _ => " beside other models",
    };
    let whole = needed.saturating_add(others).div_ceil(1 << 20);
    Err(failure!(Config, "layers {lo}-{hi} of {} take {}, which do not fit into the {} that \
             memory_budget_mb = {setting_mb} allows{beside}; {fit}",
            model.id,
            bytes(needed),
            bytes(budget),)
    .hint(format!(
        "name fewer layers, or set research.distributed_inference.host.memory_budget_mb to {whole} or more"
    )))
}

/// Starts a host whose exact engine is in this process.
async fn start_here(
    config: ShardConfig,
    place: Place<'_>,
    device: Device,
    progress: impl FnMut(StartProgress) + Send,
) -> Result<RunningHost, StartError> {
    ShardHost::start_with(config, place, progress, |_, options| {
        let load =
            move |file: &ModelFile, layers: Range<u32>, progress: &mut dyn FnMut(u64, u64)| {
                cards::begin(device, |_| ())(file, layers, &options, progress)
            };
        Ok((ARITHMETIC.to_owned(), load))
    })
    .await
}

/// Device of the exact engine; refuses libtorch's options.
pub(crate) fn exact_device(args: &TorchArgs, configured: &str) -> Result<Device, Failure> {
    if args.dtype.is_some() {
        return Err(Failure::new(
            Kind::Config,
            "--dtype is for libtorch; the exact engine computes in its own numbers",
        )
        .hint("add --backend torch, or leave it out"));
    }
    let name = args.device.as_deref();
    match name.unwrap_or(configured).parse() {
        Ok(Device::Card(_)) if !cfg!(feature = "gpu") => Err(no_cards_built()),
        Ok(device) => Ok(device),
        // A setting for libtorch's hosts.
        Err(_) if name.is_none() => Ok(Device::Auto),
        Err(error) => Err(Failure::new(
            Kind::Config,
            format!(
                "the exact engine has no device {:?}: {error}",
                name.unwrap_or_default()
            ),
        )
        .hint("add --backend torch for cuda and mps")),
    }
}

/// Whether a daemon with these arguments and settings needs access to graphics cards.
pub(crate) fn may_use_cards(args: &HostEngineArgs, config: &Config) -> bool {
    cfg!(feature = "torch") && asks_for_a_card(args, config)
}

fn asks_for_a_card(args: &HostEngineArgs, config: &Config) -> bool {
    let host = &config.research.distributed_inference.host;
    asked(args, config) == EngineKind::Torch
        && args.torch.device.as_ref().unwrap_or(&host.device) != "cpu"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(backend: Option<EngineKind>, device: Option<&str>) -> HostEngineArgs {
        HostEngineArgs {
            backend,
            torch: TorchArgs {
                device: device.map(str::to_owned),
                dtype: None,
            },
        }
    }

    const TORCH: &str = "research.distributed_inference.backend=torch";

    #[test]
    fn the_command_line_overrules_the_configuration() {
        let (plain, torch) = (Config::for_test(&[]), Config::for_test(&[TORCH]));
        let none = args(None, None);
        assert!(matches!(
            HostEngine::of(&none, &plain),
            Ok(HostEngine::Exact(Device::Auto))
        ));
        let exact = args(Some(EngineKind::Exact), None);
        assert!(matches!(
            HostEngine::of(&exact, &torch),
            Ok(HostEngine::Exact(Device::Auto))
        ));
        assert_eq!(asked(&none, &torch), EngineKind::Torch);
        assert_eq!(
            asked(&args(Some(EngineKind::Torch), None), &plain),
            EngineKind::Torch
        );
    }

    #[test]
    fn memory_for_no_layer_is_told_with_what_is_missing_and_what_helps() {
        let layers = [2 << 20, (3 << 20) + 1];
        let alone = no_layer_fits("tiny", &layers, 1 << 20, false);
        assert!(alone.to_string().contains("2.0 MiB are missing"), "{alone}");
        assert!(alone.hint_text().unwrap().contains("memory_budget_mb to 4"));
        let beside = no_layer_fits("tiny", &layers, 1 << 20, true);
        assert!(beside.to_string().contains("beside other models"));
        let hint = beside.hint_text().unwrap();
        assert!(hint.contains("to 4 for each model") && hint.contains("model drop"));
    }

    #[test]
    fn a_device_of_libtorch_is_refused_for_the_exact_engine() {
        let failure =
            HostEngine::of(&args(None, Some("cuda")), &Config::for_test(&[])).unwrap_err();
        assert_eq!(failure.kind, Kind::Config);
        assert!(failure.hint_text().unwrap().contains("--backend torch"));
    }

    #[test]
    fn the_device_of_the_exact_engine_comes_from_the_command_line_or_the_configuration() {
        let on = |device: Option<&str>, sets: &[&str]| match HostEngine::of(
            &args(None, device),
            &Config::for_test(sets),
        ) {
            Ok(HostEngine::Exact(device)) => Ok(device),
            Ok(other) => panic!("{other:?}"),
            Err(failure) => Err(failure),
        };
        let cpu = "research.distributed_inference.host.device=cpu";
        assert_eq!(on(None, &[]).unwrap(), Device::Auto);
        assert_eq!(on(None, &[cpu]).unwrap(), Device::Processor);
        assert_eq!(on(Some("auto"), &[cpu]).unwrap(), Device::Auto);
        match on(Some("gpu:2"), &[cpu]) {
            Ok(device) => assert_eq!(device, Device::Card(Some(2))),
            Err(failure) => {
                assert!(!cfg!(feature = "gpu") && failure.has_code("backend_not_built"));
            }
        }
    }

    #[test]
    #[cfg(not(feature = "torch"))]
    fn a_program_without_libtorch_says_how_to_build_one_with_it() {
        for (args, config) in [
            (args(Some(EngineKind::Torch), None), Config::for_test(&[])),
            (args(None, None), Config::for_test(&[TORCH])),
        ] {
            let failure = HostEngine::of(&args, &config).unwrap_err();
            assert!(failure.has_code("backend_not_built"), "{failure}");
            assert!(failure.hint_text().unwrap().contains("--features torch"));
            assert!(!may_use_cards(&args, &config));
        }
    }

    #[test]
    fn only_libtorch_on_a_card_may_access_cards() {
        let torch = Config::for_test(&[TORCH]);
        assert!(asks_for_a_card(&args(None, None), &torch));
        assert_eq!(
            may_use_cards(&args(None, None), &torch),
            cfg!(feature = "torch")
        );
        assert!(!asks_for_a_card(&args(None, Some("cpu")), &torch));
        assert!(!asks_for_a_card(&args(None, None), &Config::for_test(&[])));
        let on_processor =
            Config::for_test(&[TORCH, "research.distributed_inference.host.device=cpu"]);
        assert!(!asks_for_a_card(&args(None, None), &on_processor));
        assert!(asks_for_a_card(&args(None, Some("cuda:1")), &on_processor));
    }
}
