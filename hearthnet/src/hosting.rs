//! A host of layers as people and other programs see it: what it says when it serves, and when it cannot.

use std::time::Duration;

use hearthnet_bus::Descriptor;
use hearthnet_shard::{ServeConfig, StartError, StartProgress};
use serde::{Deserialize, Serialize};

use crate::config::Host;
use crate::failure::{Failure, Kind};
use crate::output::{Progress, bytes};

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

/// So few positions of context that its owner should hear of it: many conversations are longer.
const FEW_POSITIONS: u64 = 2000;

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
        let (what, done, total) = match step {
            StartProgress::Hashing { done, total } => ("hashing the model", done, total),
            StartProgress::Verifying { done, total } => ("checking the layers", done, total),
            StartProgress::Loading { done, total } => ("loading the layers", done, total),
            _ => return,
        };
        if phase != what {
            (bar, phase) = (Some(Progress::new(what)), what);
        }
        if let Some(bar) = &mut bar {
            bar.set(done, total);
        }
    }
}

/// Memory that a process occupies now, in bytes, where the system tells (Linux).
pub(crate) fn resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
