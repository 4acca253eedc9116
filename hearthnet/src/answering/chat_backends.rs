//! Backends that run a model's layers for chats, as configured: hosts, this machine alone, or hosts
//! with this machine as fallback.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::node::Connections;
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_engine::{Engine, EngineOptions, Head, LoadError, footprint};
use hearthnet_files::ModelSpec;
use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::backend::Backend;
use hearthnet_orchestrator::fallback::LoadLocal;
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::{Choice, CommunityHosts, HostPool, Links, ModelOnWire};
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_orchestrator::local::{EngineOnDemand, SharedEngine};
use hearthnet_orchestrator::router::Speeds;
use hearthnet_orchestrator::sharded::{PumpSettings, RecomputeHere, recompute};
use tokio::runtime::Handle;

use crate::cli::{Failure, Progress};
use crate::config::Config;
use crate::home::Home;
use crate::models::{OpenModel, load_failure, share_of_free};
use crate::node::TransientNode;

/// Upper bound in bytes of the KV caches of `chats` conversations, each with the model's full
/// context. Pages are allocated as the conversations grow, so most of it is never used.
pub(crate) fn kv_bytes(spec: &ModelSpec, chats: usize) -> u64 {
    // The 64 extra positions cover partly filled pages.
    let each = footprint(spec, 0..spec.layers).bytes(spec.context.saturating_add(64));
    (chats as u64).saturating_mul(each)
}

/// Loads all layers and the head on this machine; they share their threads. The KV caches of all
/// conversations take at most `kv_budget` bytes.
pub(crate) fn local_engine(
    model: &OpenModel,
    options: &EngineOptions,
    kv_budget: u64,
) -> Result<(SharedEngine, Head), Failure> {
    let fail = |e: &LoadError| load_failure(&model.path, e);
    let layers = 0..model.file.spec().layers;
    let engine = Progress::during("loading the model", |set| {
        Engine::load(&model.file, layers, options, set)
    })
    .map_err(|e| fail(&e))?;
    let head = Head::beside(&model.file, &engine).map_err(|e| fail(&e))?;
    Ok((SharedEngine::new(engine, &model.id, kv_budget), head))
}

/// Loads the hosted layers on this machine when the first chat without hosts needs them.
pub(crate) fn on_demand(
    model: &OpenModel,
    options: EngineOptions,
) -> impl Fn() -> LoadLocal + use<> {
    let (file, id) = (Arc::clone(&model.file), model.id.clone());
    let layers = model.private.hosted();
    let engine = Arc::new(EngineOnDemand::new(Box::new(move || {
        let engine = Engine::load(&file, layers.clone(), &options, &mut |_, _| {})
            .map_err(|e| ChatError::Engine(e.to_string()))?;
        Ok(SharedEngine::new(engine, &id, options.max_kv_bytes))
    })));
    move || {
        let engine = Arc::clone(&engine);
        Arc::new(move || Ok(Box::new(engine.open()?) as Box<dyn Backend>))
    }
}

/// Computes layers on this machine for audits, with an engine of their own. Layers that do not fit
/// into half of the free memory are left to other hosts.
pub(crate) fn recompute_here(model: &OpenModel, options: EngineOptions) -> RecomputeHere {
    let file = Arc::clone(&model.file);
    Arc::new(move |layers: Range<u32>, rows: &[f32]| {
        let bytes: u64 = layers.clone().map(|layer| file.layer_bytes(layer)).sum();
        if bytes > share_of_free(50) {
            let why = "the layers of an audit do not fit into half of the free memory".to_owned();
            return Err(ChatError::Engine(why));
        }
        recompute(&file, layers, &options, rows)
    })
}

pub(crate) fn choice(model: &OpenModel, own_id: NodeId, config: &Config) -> Choice {
    let inference = &config.research.distributed_inference;
    let (spec, bands) = (model.file.spec(), model.bands.clone());
    Choice {
        model: ModelOnWire {
            hosted: model.private.hosted(),
            ..ModelOnWire::new(&model.id, model.weights, spec, bands)
        },
        max_shards: inference.max_shards_per_request.0,
        own_id,
        allow_self: inference.allow_self_as_shard,
        exact: inference.exact,
        policy: inference.routing_policy,
        speeds: Speeds::new(),
        health: SharedHealth::default(),
    }
}

/// Hosts known by address, for chats with `model`. Does not connect yet.
pub(crate) fn pooled_hosts(
    runtime: &Handle,
    hosts: &[HostAddr],
    key: &Arc<NodeKey>,
    model: &OpenModel,
    config: &Config,
) -> HostPool {
    let (transport, hosts) = (config.transport(), hosts.iter().cloned());
    let choice = choice(model, key.id(), config);
    HostPool::new(runtime.clone(), Arc::clone(key), transport, hosts, choice)
}

/// Hosts of `home`'s community, for chats with `model`. All chats share `links`.
pub(crate) fn community_hosts(
    model: &OpenModel,
    runtime: &Handle,
    home: &Home,
    config: &Config,
    links: Links,
) -> CommunityHosts {
    let (runtime, transport) = (runtime.clone(), config.transport());
    let (key, log) = (Arc::clone(&home.key), home.log.clone());
    let choice = choice(model, key.id(), config);
    let mut hosts = CommunityHosts::new(runtime, key, log, transport, choice, links);
    let asked = home.clone();
    hosts.expelled = Arc::new(move || asked.level().err().map(|why| why.to_string()));
    hosts
}

/// [`community_hosts`] of a command. With `fallback`, chats wait for hosts only until the log has
/// synced.
pub(crate) fn transient_hosts(
    model: &OpenModel,
    runtime: &Handle,
    transient: &TransientNode,
    home: &Home,
    config: &Config,
    fallback: bool,
) -> CommunityHosts {
    let node = transient.node();
    let connections = match node {
        Some(node) => node.connections().clone(),
        // The local node watches only its own connections, so this process watches these.
        None => {
            let _inside = runtime.enter();
            Connections::watched(home.log.clone())
        }
    };
    let links = Links::new(connections, SharedHealth::default());
    let mut hosts = community_hosts(model, runtime, home, config, links);
    hosts.discovery = node.map(|node| node.discovery().clone());
    hosts.in_sync = fallback.then(|| transient.in_sync());
    hosts
}

/// Settings of the pipeline pump. With `fallback` it gives up on hosts after a few failures.
pub(crate) fn pump_settings(config: &Config, fallback: bool) -> PumpSettings {
    let inference = &config.research.distributed_inference;
    #[allow(clippy::needless_update)]
    PumpSettings {
        prefill_rows: inference.prefill_rows.0,
        depth: inference.steps_in_flight.0,
        health_timeout: Duration::from_secs_f64(inference.shard_health_timeout_seconds),
        history_bytes: inference.history_mb.0 << 20,
        give_up_after: fallback.then_some(inference.fallback_to_local_after_failures.0),
        room_timeout: Duration::from_secs(match fallback {
            true => inference.room_timeout_before_fallback_seconds.0,
            false => inference.room_timeout_seconds.0,
        }),
        start_timeout: Duration::from_secs(inference.room_timeout_at_start_seconds.0),
        audit_share: inference.audit_share,
        // Tests of other crates switch on a further field.
        ..PumpSettings::default()
    }
}
