//! Set-up of chats: models with the backends that run them, and limits of the service.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_engine::{EngineOptions, Head};
use hearthnet_orchestrator::backend::Backend;
use hearthnet_orchestrator::chat::{Conversation, MAX_CHOICES};
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::fallback::WithFallback;
use hearthnet_orchestrator::hosts::{HostPool, HostSource};
use hearthnet_orchestrator::service::fair_queue::QueueLimits;
use hearthnet_orchestrator::service::prefix_cache::PrefixCacheLimits;
use hearthnet_orchestrator::service::{Opener, ServedModel, ServiceSettings};
use hearthnet_orchestrator::sharded::ShardedBackend;
use hearthnet_orchestrator::{Cancel, ChatError};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::chat_backends::{
    kv_bytes, local_engine, on_demand, pooled_hosts, pump_settings, recompute_here,
};
use super::private_layers;
use crate::cli::args::AnswerArgs;
use crate::cli::{Failure, note};
use crate::config::{Config, Context};
use crate::models::open_file::require_whole;
use crate::models::{OpenModel, load_head, text_model};

/// Model that runs on this machine alone.
pub(crate) fn local_model(model: &OpenModel, config: &Config) -> Result<ServedModel, Failure> {
    require_whole(&model.id, &model.file).map_err(|why| {
        why.beside_hint("without --local, the homes of the community answer together")
    })?;
    let options = local_options(model, config);
    let (engine, head) = local_engine(model, &options, options.max_kv_bytes)?;
    let open = move |_: Exact, _: &Cancel| Ok(Box::new(engine.open()?) as Box<dyn Backend>);
    served(model, head, config, Box::new(open))
}

/// Model that runs on `hosts`, which each chat searches. With `fallback` this machine continues when
/// hosts cannot; all such chats share one engine.
pub(crate) fn hosted_model(
    model: &OpenModel,
    config: &Config,
    fallback: bool,
    runtime: &Handle,
    hosts: impl HostSource + Clone + Sync + 'static,
) -> Result<ServedModel, Failure> {
    let head = load_head(model, &config.engine_options(None))?;
    let hosted = model.private.hosted();
    // A machine with a part of the model cannot continue alone.
    let is_whole = model
        .file
        .holds_layers(hosted.start, hosted.end.saturating_sub(1));
    let may_compute = fallback && is_whole;
    let local = may_compute.then(|| on_demand(model, local_options(model, config)));
    let here = may_compute.then(|| recompute_here(model, config.engine_options(Some(1))));
    let (handle, all, private) = (runtime.clone(), config.clone(), model.private.clone());
    let open = move |exact: Exact, cancel: &Cancel| {
        let local = local.as_ref().map(|load| load());
        let settings = pump_settings(&all, local.is_some());
        let since = Instant::now();
        let mut source = hosts.clone();
        source.demand(exact);
        let hosts = ShardedBackend::open(handle.clone(), Box::new(source), settings, cancel);
        let hosts = hosts.map(|hosts| hosts.with_local_audits(here.clone()));
        private.around(match local {
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
        file: Arc::clone(&model.file),
        hosted: model.private.hosted(),
        text: text_model(model, head)?,
        open,
        exact: config.research.distributed_inference.exact,
    })
}

/// Starts a conversation in this process, without a service's queue. Returns warnings about `named`
/// hosts that cannot be reached. Such a host is left out if other hosts have its layers, or if this
/// machine can answer.
pub(crate) fn converse(
    runtime: &Handle,
    served: &ServedModel,
    named: Option<&HostPool>,
    exact: Option<Exact>,
    cancel: &Cancel,
) -> Result<(Conversation, Vec<String>), Failure> {
    let opened = (served.open)(exact.unwrap_or(served.exact), cancel);
    // Only afterwards, so that a silent host is waited for once.
    let left_out = || named.map_or_else(Vec::new, |pool| runtime.block_on(pool.failures()));
    match opened {
        Ok(backend) => {
            let warning = |why| format!("warning: continuing without one host: {why}");
            let warnings = left_out().into_iter().map(warning).collect();
            Ok((Conversation::new(backend), warnings))
        }
        // The connection error explains the missing layers better.
        Err(error @ ChatError::ShardUnavailable(_)) => {
            Err(left_out().into_iter().next().unwrap_or(error).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Engine options with KV memory for all running and kept conversations at full context.
fn local_options(model: &OpenModel, config: &Config) -> EngineOptions {
    let all = kv_bytes(model.file.spec(), most_chats(config));
    let options = config.engine_options(None);
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
            places: inference.max_concurrent_pipelines.0,
            waiting: inference.max_waiting_chats.0,
            waiting_per_caller: inference.max_waiting_chats_per_caller.0,
            ..ServiceSettings::default().turns
        },
        longest_wait: Duration::from_secs(inference.max_waiting_seconds.0),
        keep: PrefixCacheLimits {
            count: inference.kept_conversations.0,
            idle_ms: inference.kept_conversation_seconds.0.saturating_mul(1000),
            ..ServiceSettings::default().keep
        },
        slow_reader: Duration::from_secs(inference.slow_reader_seconds.0),
    }
}

/// Most conversations of `serve`, running or kept, if one of the requests asks for several answers.
/// Without room for those of further requests, they run one after the other.
pub(crate) fn most_chats(config: &Config) -> usize {
    let settings = settings(config);
    settings.turns.most_running() + settings.keep.count + MAX_CHOICES as usize - 1
}

/// Model that `args` request, over named hosts or on this machine.
pub(crate) async fn model_of(
    args: &AnswerArgs,
    model: &mut OpenModel,
    cx: &Context,
) -> Result<ServedModel, Failure> {
    let config = &cx.config;
    if args.local {
        return local_model(model, config);
    }
    let key = Arc::new(cx.global.node_key()?);
    private_layers::load(model, args.private, most_chats(config), config)?;
    let runtime = Handle::current();
    let hosts = pooled_hosts(&runtime, &args.shard, &key, model, config);
    // The host may start later, so this is only a warning.
    for failure in hosts.reach().await {
        note(format!("warning: a host cannot be reached: {failure}"));
    }
    let fallback = config.research.distributed_inference.fallback_to_local && !args.no_fallback;
    hosted_model(model, config, fallback, &runtime, hosts)
}
