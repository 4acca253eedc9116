//! The chat service as the program sets it up: models, hosts or this machine, and the HTTP door.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_model::engine::{Engine, EngineOptions, Head};
use hearthnet_model::reference::expand_home;
use hearthnet_orchestrator::backend::Backend;
use hearthnet_orchestrator::fallback::{LoadLocal, WithFallback};
use hearthnet_orchestrator::hosts::{Choice, HostPool, PooledHosts};
use hearthnet_orchestrator::http::{
    ApiKey, HttpError, HttpServer, HttpSettings, MIN_KEY_BYTES, Metrics, Part,
};
use hearthnet_orchestrator::local::{EngineOnDemand, SharedEngine};
use hearthnet_orchestrator::service::fair_queue::QueueLimits;
use hearthnet_orchestrator::service::prefix_cache::PrefixCacheLimits;
use hearthnet_orchestrator::service::{Opener, ServedModel, Service, ServiceSettings};
use hearthnet_orchestrator::sharded::ShardedBackend;
use hearthnet_orchestrator::{Cancel, ChatError};
use tokio::runtime::Handle;

use crate::args::DoorArgs;
use crate::backends::{choice, pump_settings};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::models::{OpenModel, engine_options, load_head, model_failure, text_model};
use crate::output::{Progress, note};

/// How long chats may take to end when the service is asked to stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(20);

/// How long responses may take to leave once their chats have ended.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

/// A conversation is taken over for its next turn only if that saves at least so many tokens:
/// fewer are run in less time than it takes to ask.
const MIN_PREFIX: usize = 8;

/// A model that is answered with on this machine alone.
pub(crate) fn local_model(model: &OpenModel, config: &Config) -> Result<ServedModel, Failure> {
    let fail = |e: &dyn std::fmt::Display| model_failure(&model.path, e);
    let options = local_options(model, config);
    let layers = 0..model.file.spec().layers;
    let mut progress = Progress::new("loading the model");
    let engine = Engine::load(&model.file, layers, &options, &mut |done, total| {
        progress.set(done, total);
    })
    .map_err(|e| fail(&e))?;
    drop(progress);
    let head = Head::beside(&model.file, &engine).map_err(|e| fail(&e))?;
    let engine = SharedEngine::new(engine, &model.id, options.max_kv_bytes);
    let open = move |_: &Cancel| Ok(Box::new(engine.open()?) as Box<dyn Backend>);
    served(model, head, Box::new(open))
}

/// A model that is answered with over hosts known by address. With `fallback` this machine goes
/// on when they cannot.
pub(crate) fn hosted_model(
    model: &OpenModel,
    config: &Config,
    pool: HostPool,
    own_id: NodeId,
    fallback: bool,
    runtime: &Handle,
) -> Result<ServedModel, Failure> {
    let head = load_head(model, &engine_options(config, None))?;
    let settings = pump_settings(config, fallback);
    let choice = Choice {
        health: pool.health().clone(),
        ..choice(model, own_id, config)
    };
    let (pool, runtime) = (Arc::new(pool), runtime.clone());
    let private = model.private.clone();
    let local = fallback.then(|| Arc::new(on_demand(model, config)));
    let open = move |cancel: &Cancel| -> Result<Box<dyn Backend>, ChatError> {
        let source = PooledHosts {
            pool: Arc::clone(&pool),
            choice: choice.clone(),
        };
        let hosts = ShardedBackend::open(
            runtime.clone(),
            choice.model.clone(),
            Box::new(source),
            settings.clone(),
            cancel,
        );
        private.around(match &local {
            Some(local) => Box::new(WithFallback::begin(hosts, load(local), &runtime, cancel)?),
            None => Box::new(hosts?),
        })
    };
    served(model, head, Box::new(open))
}

fn served(model: &OpenModel, head: Head, opener: Box<dyn Opener>) -> Result<ServedModel, Failure> {
    Ok(ServedModel {
        id: model.id.clone(),
        weights: model.weights,
        text: text_model(model, head)?,
        opener,
    })
}

/// A sequence for one chat that has no hosts any more, on the engine that all such chats share.
pub(crate) fn load(local: &Arc<EngineOnDemand>) -> LoadLocal {
    let local = Arc::clone(local);
    Box::new(move || Ok(Box::new(local.open()?) as Box<dyn Backend>))
}

/// The layers of hosts on this machine, loaded when a chat has no hosts any more.
pub(crate) fn on_demand(model: &OpenModel, config: &Config) -> EngineOnDemand {
    let (file, id) = (Arc::clone(&model.file), model.id.clone());
    let (options, layers) = (local_options(model, config), model.private.hosted());
    EngineOnDemand::new(Box::new(move || {
        let engine = Engine::load(&file, layers.clone(), &options, &mut |_, _| {})
            .map_err(|e| ChatError::Engine(e.to_string()))?;
        Ok(SharedEngine::new(engine, &id, options.max_kv_bytes))
    }))
}

/// Memory for as many conversations as may run, each as long as the model allows. It is taken as
/// they grow, so most of it never is.
fn local_options(model: &OpenModel, config: &Config) -> EngineOptions {
    let spec = model.file.spec();
    let inference = &config.research.distributed_inference;
    let position = 2 * u64::from(spec.kv_heads) * u64::from(spec.head_dim) * u64::from(spec.layers);
    // Keys and values take four bytes at most.
    let all = (inference.max_concurrent_pipelines as u64)
        .saturating_mul(u64::from(spec.context))
        .saturating_mul(4 * position);
    let options = engine_options(config, None);
    EngineOptions {
        max_kv_bytes: options.max_kv_bytes.max(all),
        ..options
    }
}

/// How much is served at once, as the configuration says.
pub(crate) fn settings(config: &Config) -> ServiceSettings {
    let inference = &config.research.distributed_inference;
    ServiceSettings {
        turns: QueueLimits {
            places: inference.max_concurrent_pipelines,
            waiting: inference.max_waiting_chats,
            waiting_per_caller: inference.max_waiting_chats_per_caller,
        },
        keep: PrefixCacheLimits {
            count: inference.kept_conversations,
            idle_ms: inference.kept_conversation_seconds.saturating_mul(1000),
            min_prefix: MIN_PREFIX,
        },
        slow_reader: Duration::from_secs(inference.slow_reader_seconds),
    }
}

/// Opens the HTTP door to a service; `listen` overrides the configuration.
pub(crate) async fn open_http(
    service: &Service,
    listen: Option<&str>,
    config: &Config,
) -> Result<HttpServer, Failure> {
    let settings = http_settings(listen.unwrap_or(&config.http.listen), config)?;
    let metrics = count(Part::Caller)?;
    let server = HttpServer::start(service.clone(), Some(metrics), &settings).await;
    server.map_err(|error| http_failure(&error, "--http"))
}

/// Counts from here on. To be called before anything begins that should be counted.
pub(crate) fn count(part: Part) -> Result<Metrics, Failure> {
    Metrics::install(part).map_err(Failure::internal)
}

/// A door at `listen`, with the key that the configuration names.
pub(crate) fn http_settings(listen: &str, config: &Config) -> Result<HttpSettings, Failure> {
    Ok(HttpSettings {
        listen: listen.to_owned(),
        api_key: match config.http.api_key_file.as_str() {
            "" => None,
            path => Some(read_key(&expand_home(Path::new(path)))?),
        },
        max_body_bytes: config.http.max_body_bytes,
        ..HttpSettings::default()
    })
}

/// Why a door cannot be opened that `flag` can put elsewhere.
pub(crate) fn http_failure(error: &HttpError, flag: &str) -> Failure {
    match error {
        HttpError::KeyNeeded(_) => Failure::new(Kind::Config, error.to_string()).hint(
            "name a file that holds a key with http.api_key_file, or listen on 127.0.0.1 only",
        ),
        _ => Failure::new(Kind::Host, error.to_string()).hint(format!(
            "is another program using the port? {flag} 127.0.0.1:0 takes a free one"
        )),
    }
}

/// Lets what is being answered end, and closes the door. Until then whoever comes is told that the
/// service stops.
pub(crate) async fn close(server: HttpServer, service: &Service) {
    service.drain(DRAIN_DEADLINE).await;
    server.shutdown(CLOSE_DEADLINE).await;
}

/// The key that clients must send, from a file that only its owner can read.
fn read_key(path: &Path) -> Result<ApiKey, Failure> {
    use std::os::unix::fs::PermissionsExt as _;
    let fail = |why: String| {
        Failure::new(
            Kind::Config,
            format!("http.api_key_file {}: {why}", path.display()),
        )
        .hint("for example: (umask 077; head -c 24 /dev/urandom | base64 > http.key)")
    };
    let metadata = std::fs::metadata(path).map_err(|e| fail(e.to_string()))?;
    if metadata.permissions().mode() & 0o077 != 0 {
        return Err(fail("others may read it: chmod 600".into()));
    }
    // A key is a line; what is longer is some other file.
    if metadata.len() > 4096 {
        return Err(fail("it is too long for a key".into()));
    }
    let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    ApiKey::new(&text).ok_or_else(|| {
        fail(format!(
            "a key has at least {MIN_KEY_BYTES} printable ASCII characters"
        ))
    })
}

/// The model that `args` ask for, over the hosts that they name or on this machine.
pub(crate) async fn model_of(
    args: &DoorArgs,
    model: &mut OpenModel,
    key: Option<Arc<NodeKey>>,
    config: &Config,
) -> Result<ServedModel, Failure> {
    let Some(key) = key.filter(|_| !args.local) else {
        return local_model(model, config);
    };
    crate::private_layers::load(
        model,
        args.private,
        crate::private_layers::chats(config),
        config,
    )?;
    let runtime = Handle::current();
    let own_id = key.id();
    let hosts = args.shard.iter().cloned();
    let pool = HostPool::new(runtime.clone(), key, config.transport()?, hosts);
    // A host that is not there yet may come; whoever starts this should know all the same.
    for failure in pool.reach().await.failures {
        note(format!("warning: a host cannot be reached: {failure}"));
    }
    let fallback = config.research.distributed_inference.fallback_to_local && !args.no_fallback;
    hosted_model(model, config, pool, own_id, fallback, &runtime)
}
