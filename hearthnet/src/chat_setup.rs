//! Set-up of the chat service: models, backends, and the HTTP interface.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::{NodeKey, regular_file, whole_file};
use hearthnet_http::{ApiKey, HttpError, HttpServer, HttpSettings, MIN_KEY_BYTES, Metrics, Part};
use hearthnet_model::engine::{EngineOptions, Head};
use hearthnet_model::reference::expand_home;
use hearthnet_orchestrator::backend::Backend;
use hearthnet_orchestrator::chat::Conversation;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::fallback::WithFallback;
use hearthnet_orchestrator::hosts::{HostSource, Patience, PooledHosts};
use hearthnet_orchestrator::http::serve;
use hearthnet_orchestrator::service::fair_queue::QueueLimits;
use hearthnet_orchestrator::service::prefix_cache::PrefixCacheLimits;
use hearthnet_orchestrator::service::{Opener, ServedModel, Service, ServiceSettings};
use hearthnet_orchestrator::sharded::ShardedBackend;
use hearthnet_orchestrator::{Cancel, ChatError};
use tokio::runtime::Handle;

use crate::args::AnswerArgs;
use crate::chat_backends::{kv_bytes, local_engine, on_demand, pooled_hosts, pump_settings};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::models::{OpenModel, engine_options, load_head, text_model};
use crate::output::note;
use crate::paths::close_folder;

/// Time limit for running chats when the service stops.
const DRAIN_DEADLINE: Duration = Duration::from_secs(20);

/// Time limit for responses after their chats have ended.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

/// Model that runs on this machine alone.
pub(crate) fn local_model(model: &OpenModel, config: &Config) -> Result<ServedModel, Failure> {
    let options = local_options(model, config);
    let (engine, head) = local_engine(model, &options, options.max_kv_bytes)?;
    let open = move |_: Exact, _: &Cancel| Ok(Box::new(engine.open()?) as Box<dyn Backend>);
    served(model, head, config, Box::new(open))
}

/// Model that runs on hosts known by address.
pub(crate) fn pooled_model(
    model: &OpenModel,
    config: &Config,
    fallback: bool,
    runtime: &Handle,
    hosts: PooledHosts,
) -> Result<ServedModel, Failure> {
    let source = move |_: &OpenModel, exact| {
        let mut hosts = hosts.clone();
        hosts.choice.exact = exact;
        Ok(Box::new(hosts) as Box<dyn HostSource>)
    };
    hosted_model(model, config, fallback, runtime, source)
}

/// Model that runs on the hosts of `source`, which are looked up for each chat. With `fallback`
/// this machine continues when hosts cannot; all such chats share one engine.
pub(crate) fn hosted_model(
    model: &OpenModel,
    config: &Config,
    fallback: bool,
    runtime: &Handle,
    source: impl Fn(&OpenModel, Exact) -> Result<Box<dyn HostSource>, Failure> + Send + Sync + 'static,
) -> Result<ServedModel, Failure> {
    let head = load_head(model, &engine_options(config, None))?;
    let local = fallback.then(|| on_demand(model, local_options(model, config)));
    let (handle, all, asked) = (runtime.clone(), config.clone(), model.clone());
    let open = move |exact: Exact, cancel: &Cancel| {
        let source = source(&asked, exact).map_err(|e| ChatError::Engine(e.to_string()))?;
        let local = local.as_ref().map(|load| load());
        let settings = pump_settings(&all, local.is_some());
        let since = Instant::now();
        let hosts = ShardedBackend::open(handle.clone(), source, settings, cancel);
        asked.private.around(match local {
            Some(local) => {
                let begun = WithFallback::begin(hosts, since, local, exact, &handle, cancel);
                Box::new(begun?)
            }
            None => Box::new(hosts?),
        })
    };
    served(model, head, config, Box::new(open))
}

fn served(
    model: &OpenModel,
    head: Head,
    config: &Config,
    open: Opener,
) -> Result<ServedModel, Failure> {
    Ok(ServedModel {
        id: model.id.clone(),
        weights: model.weights,
        text: text_model(model, head)?,
        open,
        exact: config.research.distributed_inference.exact,
    })
}

/// Starts a conversation in this process, without a service's queue. Connects to `named` hosts
/// first. A host that cannot be reached is left out if other hosts have its layers, or if this
/// machine can answer (`Patience::Short`). Returns warnings about such hosts.
pub(crate) fn converse(
    runtime: &Handle,
    served: &ServedModel,
    named: Option<&(PooledHosts, Patience)>,
    exact: Option<Exact>,
    cancel: &Cancel,
) -> Result<(Conversation, Vec<String>), Failure> {
    let left_out = named.map_or_else(Vec::new, |(hosts, patience)| {
        runtime.block_on(hosts.reach(*patience))
    });
    match (served.open)(exact.unwrap_or(served.exact), cancel) {
        Ok(backend) => {
            let warning = |why| format!("warning: continuing without one host: {why}");
            let warnings = left_out.into_iter().map(warning).collect();
            Ok((Conversation::new(backend), warnings))
        }
        // The connection error explains the missing layers better.
        Err(error @ ChatError::ShardUnavailable(_)) => {
            Err(left_out.into_iter().next().unwrap_or(error).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Engine options with KV memory for all running conversations at full context.
fn local_options(model: &OpenModel, config: &Config) -> EngineOptions {
    let all = kv_bytes(model.file.spec(), settings(config).turns.most_running());
    let options = engine_options(config, None);
    EngineOptions {
        max_kv_bytes: options.max_kv_bytes.max(all),
        ..options
    }
}

/// Limits of the service from the configuration.
pub(crate) fn settings(config: &Config) -> ServiceSettings {
    let inference = &config.research.distributed_inference;
    ServiceSettings {
        turns: QueueLimits {
            places: inference.max_concurrent_pipelines,
            waiting: inference.max_waiting_chats,
            waiting_per_caller: inference.max_waiting_chats_per_caller,
            ..ServiceSettings::default().turns
        },
        keep: PrefixCacheLimits {
            count: inference.kept_conversations,
            idle_ms: inference.kept_conversation_seconds.saturating_mul(1000),
            ..ServiceSettings::default().keep
        },
        slow_reader: Duration::from_secs(inference.slow_reader_seconds),
    }
}

/// Opens the HTTP interface of a service; `listen` overrides the configuration.
pub(crate) async fn open_http(
    service: &Service,
    listen: Option<&str>,
    config: &Config,
) -> Result<HttpServer, Failure> {
    let settings = http_settings(listen.unwrap_or(&config.http.listen), config)?;
    let metrics = count(Part::Caller)?;
    let server = serve(service.clone(), Some(metrics), &settings).await;
    server.map_err(|error| http_failure(&error, "--http"))
}

/// Installs the metrics. Call it before anything that should be counted.
pub(crate) fn count(part: Part) -> Result<Metrics, Failure> {
    Metrics::install(part).map_err(Failure::internal)
}

/// Settings of an HTTP listener at `listen`, with the configured key.
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

/// Error of a listener; `flag` is the flag that sets its address.
pub(crate) fn http_failure(error: &HttpError, flag: &str) -> Failure {
    match error {
        HttpError::KeyNeeded(_) => Failure::new(Kind::Config, error.to_string()).hint(
            "name a file that holds a key with http.api_key_file, or listen on 127.0.0.1 only",
        ),
        HttpError::Listen { source, .. } => Failure::new(Kind::of_io(source), error.to_string())
            .hint(format!(
                "is another program using the port? {flag} 127.0.0.1:0 takes a free one"
            )),
        _ => Failure::new(Kind::Host, error.to_string()),
    }
}

/// Finishes running answers, then closes the listener. New requests are refused meanwhile.
pub(crate) async fn close(server: HttpServer, service: &Service) {
    service.drain(DRAIN_DEADLINE).await;
    server.shutdown(CLOSE_DEADLINE).await;
}

/// Reads the key that clients must send, from a file that only its owner can read.
fn read_key(path: &Path) -> Result<ApiKey, Failure> {
    use std::os::unix::fs::PermissionsExt as _;
    let fail = |why: String| {
        Failure::new(
            Kind::Config,
            format!("http.api_key_file {}: {why}", path.display()),
        )
        .hint("for example: (umask 077; head -c 24 /dev/urandom | base64 > http.key)")
    };
    let folder = whole_file::folder_of(path);
    if let Some(mode) = whole_file::writable_by_others(folder) {
        let why = format!("other users may write to its folder (mode {mode:03o})");
        return Err(fail(why).hint(close_folder(folder)));
    }
    let file = regular_file::open(path).map_err(|e| fail(e.to_string()))?;
    let metadata = file.metadata().map_err(|e| fail(e.to_string()))?;
    if metadata.permissions().mode() & 0o077 != 0 {
        return Err(fail("other users may read it: chmod 600".into()));
    }
    // A key is one line; a longer file is surely something else.
    let text = regular_file::all_of(file, 4096).map_err(|e| match e.kind() {
        ErrorKind::FileTooLarge => fail("it is too long for a key".into()),
        _ => fail(e.to_string()),
    })?;
    let text = String::from_utf8_lossy(&text);
    ApiKey::new(&text).ok_or_else(|| {
        fail(format!(
            "a key has at least {MIN_KEY_BYTES} printable ASCII characters"
        ))
    })
}

/// Model that `args` request, over named hosts or on this machine.
pub(crate) async fn model_of(
    args: &AnswerArgs,
    model: &mut OpenModel,
    key: Option<Arc<NodeKey>>,
    config: &Config,
) -> Result<ServedModel, Failure> {
    let Some(key) = key.filter(|_| !args.local) else {
        return local_model(model, config);
    };
    let chats = crate::private_layers::chats(config);
    crate::private_layers::load(model, args.private, chats, config)?;
    let runtime = Handle::current();
    let hosts = pooled_hosts(&runtime, &args.shard, &key, model, config)?;
    // The host may start later, so this is only a warning.
    for failure in hosts.pool.reach().await.failures {
        note(format!("warning: a host cannot be reached: {failure}"));
    }
    let fallback = config.research.distributed_inference.fallback_to_local && !args.no_fallback;
    pooled_model(model, config, fallback, &runtime, hosts)
}
