//! Configuration of a host of layers, and its announcement.

use std::time::Duration;

use hearthnet_bus::Descriptor;
use hearthnet_orchestrator::exact::is_exact;
use hearthnet_shard::{MemoryReport, RunningHost, ServeConfig, ShardConfig};
use serde::{Deserialize, Serialize};

use crate::cli::{Failure, bytes};
use crate::config::{Config, Host};
use crate::models::OpenModel;

/// Number of positions below which the announcement warns: many conversations are longer.
const FEW_POSITIONS: u64 = 2000;

/// Output of `--json` when the host is ready.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// `ADDR:PORT#NODEID`, as `chat --shard` takes it.
    pub(crate) address: String,
    pub(crate) descriptor: Descriptor,
    #[serde(flatten)]
    pub(crate) memory: MemoryReport,
    /// URL of the metrics, if they are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<String>,
}

impl Ready {
    /// Describes a host that is reachable at `address`.
    pub(crate) fn of(host: &RunningHost, address: String, metrics: Option<String>) -> Self {
        Self {
            address,
            descriptor: host.descriptor(),
            memory: host.memory(),
            metrics,
        }
    }
}

/// Configuration of a host of layers of `model`. `threads` overrides the configuration.
pub(crate) fn shard_config(
    model: &OpenModel,
    layers: (u32, u32),
    listen: &str,
    threads: Option<usize>,
    config: &Config,
) -> ShardConfig {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = config.host_threads(cores);
    ShardConfig {
        model_id: Some(model.id.clone()),
        formats: Some(model.file.spec().formats()),
        expected_weights: Some(model.weights),
        engine: config.engine_options(threads.filter(|&n| n > 0).or(Some(most))),
        serve: ServeConfig {
            transport: config.transport(),
            ..serve_config(config, listen)
        },
        ..ShardConfig::new(&model.path, layers, listen)
    }
}

/// Serve options from the settings.
pub(crate) fn serve_config(config: &Config, listen: &str) -> ServeConfig {
    let settings = &config.research.distributed_inference.host;
    ServeConfig {
        max_concurrent_streams: settings.max_concurrent_streams.0,
        max_streams_per_caller: match settings.max_streams_per_caller.0 {
            0 => u32::MAX,
            most => most,
        },
        max_waiting_steps_per_caller: settings.max_waiting_steps_per_caller.0,
        kv_budget_bytes: settings.kv_budget_mb.0 << 20,
        kv_share_per_caller: settings.kv_share_per_caller_percent.0,
        prefill_piece: Duration::from_millis(settings.prefill_piece_ms.0),
        niceness: config.manners.niceness.0,
        evict_after: Some(settings.shard_eviction_idle_seconds)
            .filter(|&seconds| seconds > 0)
            .map(Duration::from_secs),
        ..ServeConfig::new(listen)
    }
}

/// Message when a host is asked to stop.
pub(crate) fn stopping(settings: &Host) -> String {
    format!(
        "stopping: open streams may go on for {} s, new ones are refused; ask again to stop at once",
        settings.drain_seconds.0
    )
}

/// Error of a host whose engine has failed.
pub(crate) fn engine_failed() -> Failure {
    Failure::internal("the engine has failed: its device is gone, its process ended too often, or it has a defect")
        .code("engine_failed")
        .hint("start it again; the log names the cause")
}

pub(crate) fn announcement(ready: &Ready) -> String {
    let d = &ready.descriptor;
    let memory = &ready.memory;
    let resident = memory
        .resident_bytes
        .map_or_else(String::new, |n| format!(", process {}", bytes(n)));
    format!(
        "serving {} (layers {}-{} of {})\n  \
         weights   {} in memory{resident}\n  \
         context   {} MiB for {} positions of all conversations together, {} each{}\n  \
         identity  {}\n  \
         streams   at most {}\n  \
         address   {}\n{}{}",
        d.model_id,
        d.layer_range.0,
        d.layer_range.1,
        d.total_layers,
        bytes(memory.weight_bytes),
        d.kv_mb,
        memory.kv_positions,
        bytes(memory.kv_bytes_per_position),
        match memory.kv_positions < FEW_POSITIONS {
            true => ": few, longer conversations are refused (host.kv_budget_mb)",
            false => "",
        },
        d.weights_sha256,
        d.max_concurrent_streams,
        ready.address,
        match (is_exact(&d.arithmetic), d.card()) {
            (true, None) => String::new(),
            (true, Some(card)) => format!("  engine    exact, on a graphics card: {card}\n"),
            (false, _) => format!(
                "  engine    {}: answers may differ from those of exact hosts\n",
                d.arithmetic
            ),
        },
        ready
            .metrics
            .as_ref()
            .map_or_else(String::new, |url| format!("  metrics   {url}\n")),
    )
}
