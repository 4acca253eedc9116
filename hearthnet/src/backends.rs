//! What computes the layers of a chat: hosts, this machine, or both.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_model::engine::{Engine, Head};
use hearthnet_orchestrator::backend::Backend;
use hearthnet_orchestrator::fallback::{LoadLocal, WithFallback};
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::{Choice, HostPool, HostSource, PooledHosts};
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_orchestrator::local::{LocalBackend, SharedEngine};
use hearthnet_orchestrator::router::GreedyCover;
use hearthnet_orchestrator::sharded::{ModelOnWire, PumpSettings, ShardedBackend};
use hearthnet_orchestrator::{Cancel, ChatError};
use tokio::runtime::Handle;

use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::models::{OpenModel, engine_options};
use crate::output::{Progress, note};

/// Everything on this machine, for one conversation: blocks and head share their threads.
pub(crate) fn local_backend(
    model: &OpenModel,
    config: &Config,
    threads: Option<usize>,
) -> Result<(LocalBackend, Head), Failure> {
    let (engine, head) = local_engine(model, config, threads)?;
    Ok((engine.open()?, head))
}

/// Everything on this machine, for one conversation after the other.
pub(crate) fn local_engine(
    model: &OpenModel,
    config: &Config,
    threads: Option<usize>,
) -> Result<(SharedEngine, Head), Failure> {
    let fail = |e: &dyn std::fmt::Display| {
        Failure::new(Kind::Model, format!("{}: {e}", model.path.display()))
    };
    let layers = 0..model.file.spec().layers;
    let mut progress = Progress::new("loading the model");
    let options = engine_options(config, threads);
    let engine = Engine::load(&model.file, layers, &options, &mut |done, total| {
        progress.set(done, total);
    })
    .map_err(|e| fail(&e))?;
    let head = Head::beside(&model.file, &engine).map_err(|e| fail(&e))?;
    Ok((SharedEngine::new(engine, &model.id, u64::MAX), head))
}

/// Connects to every host at once, for chats. A host that cannot be reached is left out as long as
/// others have its layers; what is then missing, the router tells. Also says why any was left out.
pub(crate) fn connect(
    runtime: &Handle,
    hosts: &[HostAddr],
    key: &Arc<hearthnet_bus::NodeKey>,
    model: &OpenModel,
    config: &Config,
) -> Result<(Box<dyn HostSource>, Vec<ChatError>), Failure> {
    let pool = HostPool::new(
        runtime.clone(),
        Arc::clone(key),
        config.transport()?,
        hosts.iter().cloned(),
    );
    let source = PooledHosts {
        choice: Choice {
            health: pool.health().clone(),
            ..choice(model, key.id(), config)
        },
        pool: Arc::new(pool),
    };
    let failures = runtime.block_on(source.reach());
    Ok((Box::new(source), failures))
}

/// How hosts for a model are chosen.
pub(crate) fn choice(model: &OpenModel, own_id: NodeId, config: &Config) -> Choice {
    let inference = &config.research.distributed_inference;
    Choice {
        model: on_wire(model),
        policy: Arc::new(GreedyCover),
        max_shards: inference.max_shards_per_request,
        own_id,
        allow_self: inference.allow_self_as_shard,
        health: SharedHealth::default(),
    }
}

/// The wire's view of a model.
pub(crate) fn on_wire(model: &OpenModel) -> ModelOnWire {
    let (spec, bands) = (model.file.spec(), model.bands.clone());
    ModelOnWire {
        hosted: model.private.hosted(),
        ..ModelOnWire::new(&model.id, model.weights, spec, bands)
    }
}

/// Routes over the connected hosts and opens a stream on each one chosen. With
/// `local`, this machine takes over when they cannot go on.
pub(crate) fn open_route(
    runtime: &Handle,
    model: &OpenModel,
    source: (Box<dyn HostSource>, Vec<ChatError>),
    config: &Config,
    local: Option<LoadLocal>,
    cancel: &Cancel,
) -> Result<Box<dyn Backend>, Failure> {
    warned(open_backend_or_why(
        runtime, model, source, config, local, cancel,
    ))
}

/// A backend, and the hosts that it does without.
pub(crate) type Opened = Result<(Box<dyn Backend>, Vec<ChatError>), ChatError>;

pub(crate) fn open_backend_or_why(
    runtime: &Handle,
    model: &OpenModel,
    (source, failures): (Box<dyn HostSource>, Vec<ChatError>),
    config: &Config,
    local: Option<LoadLocal>,
    cancel: &Cancel,
) -> Opened {
    match open_backend(runtime, model, source, config, local, cancel) {
        Ok(backend) => Ok((backend, failures)),
        // A host that could not be reached explains a hole better than the hole does.
        Err(error @ ChatError::ShardUnavailable(_)) => {
            Err(failures.into_iter().next().unwrap_or(error))
        }
        Err(error) => Err(error),
    }
}

pub(crate) fn warned(opened: Opened) -> Result<Box<dyn Backend>, Failure> {
    let (backend, failures) = opened?;
    for failure in &failures {
        note(format!("warning: going on without one host: {failure}"));
    }
    Ok(backend)
}

/// How a sequence is pumped through hosts; with `fallback` they are given up after some failures.
pub(crate) fn pump_settings(config: &Config, fallback: bool) -> PumpSettings {
    let inference = &config.research.distributed_inference;
    PumpSettings {
        prefill_rows: inference.prefill_rows,
        depth: inference.steps_in_flight,
        health_timeout: Duration::from_secs_f64(inference.shard_health_timeout_seconds),
        history_bytes: inference.history_mb << 20,
        give_up_after: fallback.then_some(inference.fallback_to_local_after_failures),
        room_timeout: Duration::from_secs(match fallback {
            true => inference.room_timeout_before_fallback_seconds,
            false => inference.room_timeout_seconds,
        }),
        start_timeout: Duration::from_secs(inference.room_timeout_at_start_seconds),
    }
}

/// A backend over the hosts of a source. With `local`, this machine takes over when they cannot
/// go on.
pub(crate) fn open_backend(
    runtime: &Handle,
    model: &OpenModel,
    source: Box<dyn HostSource>,
    config: &Config,
    local: Option<LoadLocal>,
    cancel: &Cancel,
) -> Result<Box<dyn Backend>, ChatError> {
    let (wire, settings) = (on_wire(model), pump_settings(config, local.is_some()));
    let hosts = ShardedBackend::open(runtime.clone(), wire, source, settings, cancel);
    model.private.around(match local {
        Some(local) => Box::new(WithFallback::begin(hosts, local, runtime, cancel)?),
        None => Box::new(hosts?),
    })
}

/// The layers of hosts on this machine, loaded if one chat comes to need them.
pub(crate) fn load_local(model: &OpenModel, config: &Config) -> LoadLocal {
    let (file, id) = (Arc::clone(&model.file), model.id.clone());
    let layers = model.private.hosted();
    let options = engine_options(config, None);
    Box::new(move || {
        let engine = Engine::load(&file, layers.clone(), &options, &mut |_, _| {})
            .map_err(|e| ChatError::Engine(e.to_string()))?;
        Ok(Box::new(LocalBackend::new(engine, &id)?))
    })
}
