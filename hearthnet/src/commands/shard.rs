//! `hearthnet shard serve`: layers of a model for other machines.

use std::io::Read;
use std::time::Duration;

use hearthnet_bus::Descriptor;
use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::http::Health;
use hearthnet_shard::{
    LoadPhase, ServeConfig, ShardConfig, ShardHost, StartError, StartProgress, resident_bytes,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::args::{Global, Layers, PrivateArgs, ServeArgs, ShardCommand};
use crate::commands::{engine_options, node_key, open_model, print_bytes, print_json, runtime};
use crate::community::Home;
use crate::config::{Config, Host};
use crate::daemon::{self, Plan};
use crate::failure::{Failure, Kind};
use crate::memory::named_layers_fit;
use crate::metrics_server::MetricsServer;
use crate::output::{Progress, bytes, note};

/// Where a host listens that is served by hand, unless told otherwise: on this machine only.
const LOOPBACK: &str = "127.0.0.1:0";

/// So few positions of context that its owner should hear of it: many conversations are longer.
const FEW_POSITIONS: u64 = 2000;

/// What `--json` prints when the host is ready.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// `ADDR:PORT#NODEID`, as `chat --shard` takes it.
    pub(crate) address: String,
    /// The host's own words.
    pub(crate) descriptor: Descriptor,
    /// Bytes of the weights as they lie in memory.
    pub(crate) weight_bytes: u64,
    /// Bytes of KV cache per position of a sequence.
    pub(crate) kv_bytes_per_position: u64,
    /// Positions that the KV memory holds, of all conversations together.
    #[serde(default)]
    pub(crate) kv_positions: u64,
    /// Memory of the process, where the system tells.
    pub(crate) resident_bytes: Option<u64>,
    /// URL of its numbers, if it shows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<String>,
}

pub(crate) fn run(command: ShardCommand, global: &Global, config: &Config) -> Result<(), Failure> {
    let ShardCommand::Serve(args) = command;
    if !config.policy.research.enable {
        return Err(ChatError::ExperimentalDisabled.into());
    }
    // Who names its callers serves them by hand; everybody else serves the community.
    let home = match args.peer_key.is_empty() {
        true => Home::find(global)?,
        false => None,
    };
    if let Some(home) = home {
        let plan = Plan {
            model: args.model,
            layers: Some(args.layers),
            threads: args.threads,
            for_layers: true,
            listen: args.listen,
            http: args.http,
            private: PrivateArgs::default(),
            metrics: args.metrics,
            json: args.json,
            lifeline: args.lifeline,
        };
        return daemon::run(&plan, &home, global, config);
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(serve_by_hand(args, global, config));
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

/// Serves the nodes that the command line names, without a community.
async fn serve_by_hand(args: ServeArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    let Layers::Range(lo, hi) = args.layers else {
        return Err(Failure::new(
            Kind::Config,
            "--layers auto takes what the community lacks, and this node is in none",
        )
        .hint("write --layers LO-HI, or found or join a community first: `hearthnet community --help`"));
    };
    let listen = args.listen.clone().unwrap_or_else(|| LOOPBACK.to_owned());
    // Signals count from here on: a Ctrl-C while loading ends the program cleanly, too.
    let mut stop = stop_requests(args.lifeline)?;
    let numbers = MetricsServer::open(args.metrics.as_deref(), config).await?;
    let key = node_key(global)?;
    let model = open_model(global, config, args.model.as_ref(), None)?;
    let settings = &config.research.distributed_inference.host;
    named_layers_fit(&model.file, &model.id, (lo, hi), settings.memory_budget_mb)?;
    let host_config = ShardConfig {
        model_id: Some(model.id),
        boundary: Some(model.file.spec().boundary),
        expected_weights: Some(model.weights),
        engine: engine_options(config, args.threads),
        serve: ServeConfig {
            admitted: args.peer_key.clone(),
            transport: config.transport()?,
            ..serve_config(settings, &listen)
        },
        ..ShardConfig::new(model.path, (lo, hi), &listen)
    };
    if args.peer_key.is_empty() && !args.json {
        note("only this node itself may use this host; admit others with --peer-key NODEID");
    }
    let start = ShardHost::start(host_config, &key, start_progress());
    let host = tokio::select! {
        host = start => host.map_err(|e| start_failure(&listen, &e))?,
        _ = stop.recv() => return Err(ChatError::Cancelled.into()),
    };
    let ready = Ready {
        address: format!("{}#{}", host.local_addr(), host.node_id()),
        descriptor: host.descriptor(),
        weight_bytes: host.memory().weight_bytes,
        kv_bytes_per_position: host.memory().kv_bytes_per_position,
        kv_positions: host.memory().kv_positions,
        resident_bytes: resident_bytes(std::process::id()),
        metrics: numbers.url(),
    };
    numbers.say(Health::Serving);
    if args.json {
        print_json(&ready)?;
    } else {
        print_bytes(announcement(&ready).as_bytes())?;
    }
    tokio::select! {
        _ = stop.recv() => {}
        () = host.failed() => {
            return Err(Failure::internal("the engine's thread ended unexpectedly"));
        }
    }
    numbers.say(Health::Leaving);
    if !args.json {
        note(stopping(settings));
    }
    tokio::select! {
        _ = host.shutdown(Duration::from_secs(settings.drain_seconds)) => Ok(()),
        // Asked twice: at once, then.
        _ = stop.recv() => Ok(()),
    }
}

/// How a host serves, as far as the settings say.
pub(crate) fn serve_config(settings: &Host, listen: &str) -> ServeConfig {
    ServeConfig {
        max_concurrent_streams: settings.max_concurrent_streams,
        max_streams_per_caller: match settings.max_streams_per_caller {
            0 => u32::MAX,
            most => most,
        },
        max_waiting_steps_per_caller: settings.max_waiting_steps_per_caller,
        kv_budget_bytes: settings.kv_budget_mb << 20,
        kv_share_per_caller: settings.kv_share_per_caller_percent,
        prefill_piece: Duration::from_millis(settings.prefill_piece_ms),
        niceness: settings.niceness,
        evict_after: Some(settings.shard_eviction_idle_seconds)
            .filter(|&seconds| seconds > 0)
            .map(Duration::from_secs),
        ..ServeConfig::new(listen)
    }
}

/// What a host says that was asked to stop.
pub(crate) fn stopping(settings: &Host) -> String {
    format!(
        "stopping: open streams may go on for {} s, new ones are refused; ask again to stop at once",
        settings.drain_seconds
    )
}

/// A message for every SIGINT, SIGTERM and SIGHUP (the terminal was closed: open streams are served
/// to their end as with SIGTERM), and for the end of standard input when it is the lifeline.
pub(crate) fn stop_requests(lifeline: bool) -> Result<mpsc::Receiver<()>, Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let (sender, receiver) = mpsc::channel(4);
    let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
    if !hangup_is_ignored() {
        kinds.push(SignalKind::hangup());
    }
    for kind in kinds {
        let mut signals = signal(kind).map_err(Failure::internal)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() && sender.send(()).await.is_ok() {}
        });
    }
    if lifeline {
        std::thread::spawn(move || {
            let mut sink = [0; 64];
            while matches!(std::io::stdin().read(&mut sink), Ok(n) if n > 0) {}
            // The receiver is gone when the program is ending anyway.
            let _ = sender.blocking_send(());
        });
    }
    Ok(receiver)
}

/// Whether whoever started this program wants it to outlive the terminal, as `nohup` does.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal 1 is the lowest bit.
    ignored.is_some_and(|mask| mask & 1 == 1)
}

pub(crate) fn announcement(ready: &Ready) -> String {
    let d = &ready.descriptor;
    let daemon_node = ready
        .resident_bytes
        .map_or_else(String::new, |n| format!(", process {}", bytes(n)));
    format!(
        "serving {} (layers {}-{} of {})\n  \
         weights   {} in memory{daemon_node}\n  \
         context   {} MiB for {} positions of all conversations together, {} each{}\n  \
         identity  {}\n  \
         streams   at most {}\n  \
         address   {}\n{}",
        d.model_id,
        d.layer_range.0,
        d.layer_range.1,
        d.total_layers,
        bytes(ready.weight_bytes),
        d.kv_mb,
        ready.kv_positions,
        bytes(ready.kv_bytes_per_position),
        match ready.kv_positions < FEW_POSITIONS {
            true => ": few, longer conversations are refused (host.kv_budget_mb)",
            false => "",
        },
        d.weights_sha256,
        d.max_concurrent_streams,
        ready.address,
        ready
            .metrics
            .as_ref()
            .map_or_else(String::new, |url| format!("  numbers   {url}\n")),
    )
}

pub(crate) fn start_failure(listen: &str, error: &StartError) -> Failure {
    let (kind, hint) = match error {
        StartError::Listen(_) => (
            Kind::Host,
            format!("is another program using {listen}? port 0 takes a free one"),
        ),
        StartError::WeightsMismatch { .. } => {
            (Kind::WeightsMismatch, "fetch the model again with `hearthnet model pull`".to_owned())
        }
        StartError::LayerRange { .. } => (
            Kind::BadRequest,
            "`hearthnet model inspect` tells how many layers the model has".to_owned(),
        ),
        StartError::KvBudget { needed, .. } => (
            Kind::Config,
            format!(
                "set research.distributed_inference.host.kv_budget_mb to {} at the very least, and \
                 to {} for conversations of 2,000 tokens",
                needed.div_ceil(1 << 20),
                (needed / 32 * 2000).div_ceil(1 << 20),
            ),
        ),
        StartError::Setting { .. } => {
            (Kind::Config, "`hearthnet config show` lists every setting".to_owned())
        }
        StartError::Model(_) | StartError::Load { .. } => (
            Kind::Model,
            "`hearthnet model inspect` shows what a file holds; `hearthnet model pull` fetches a fresh one"
                .to_owned(),
        ),
        _ => (Kind::Internal, "try again".to_owned()),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

/// Shows how far a host has come with its start: a bar for each phase.
pub(crate) fn start_progress() -> impl FnMut(StartProgress) + Send + 'static {
    let mut bar = None;
    let mut phase = "";
    move |step| {
        let what = match step.phase {
            LoadPhase::Hashing => "hashing the model",
            LoadPhase::Verifying => "checking the layers",
            LoadPhase::Loading => "loading the layers",
            _ => return,
        };
        if phase != what {
            (bar, phase) = (Some(Progress::new(what)), what);
        }
        if let Some(bar) = &mut bar {
            bar.set(step.done, step.total);
        }
    }
}
