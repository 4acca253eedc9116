//! Settings, and the values that follow from them.

use std::time::Duration;

use hearthnet_engine::EngineOptions;
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::exact::Exact;
use serde::{Deserialize, Serialize};

use crate::cli::args::EngineKind;
use crate::cli::failure::{Failure, Kind};

/// Name of libtorch's engine in the configuration.
pub(super) const TORCH: &str = "torch";

/// The whole configuration. `config/hearthnet.toml` documents each key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) policy: Policy,
    pub(crate) node: Node,
    pub(crate) model: Model,
    pub(crate) discovery: Discovery,
    pub(crate) http: Http,
    pub(crate) chat: Chat,
    pub(crate) metrics: Metrics,
    pub(crate) research: Research,
    pub(crate) engine: Engine,
    pub(crate) transport: Transport,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Policy {
    pub(crate) research: ResearchPolicy,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResearchPolicy {
    pub(crate) enable: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) listen: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Model {
    pub(crate) default: String,
}

impl Model {
    /// Model for commands that name none, if one is configured.
    pub(crate) fn default(&self) -> Option<ModelRef> {
        // An invalid name was refused when the configuration was loaded.
        self.default
            .parse()
            .ok()
            .filter(|_| !self.default.is_empty())
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Chat {
    pub(crate) history: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Discovery {
    pub(crate) mdns: bool,
    pub(crate) static_peers: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Http {
    pub(crate) listen: String,
    pub(crate) api_key_file: String,
    pub(crate) max_body_bytes: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Metrics {
    pub(crate) listen: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Research {
    pub(crate) distributed_inference: Inference,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Inference {
    pub(crate) enabled: bool,
    pub(crate) backend: String,
    pub(crate) activation_dtype: String,
    pub(crate) max_shards_per_request: usize,
    pub(crate) shard_health_timeout_seconds: f64,
    pub(crate) allow_self_as_shard: bool,
    pub(crate) exact: Exact,
    pub(crate) private_first_layers: u32,
    pub(crate) private_last_layers: u32,
    pub(crate) routing_policy: String,
    pub(crate) prefill_rows: usize,
    pub(crate) steps_in_flight: usize,
    pub(crate) fallback_to_local: bool,
    pub(crate) fallback_to_local_after_failures: u32,
    pub(crate) room_timeout_seconds: u64,
    pub(crate) room_timeout_before_fallback_seconds: u64,
    pub(crate) room_timeout_at_start_seconds: u64,
    pub(crate) history_mb: usize,
    pub(crate) max_concurrent_pipelines: usize,
    pub(crate) max_waiting_chats: usize,
    pub(crate) max_waiting_chats_per_caller: usize,
    pub(crate) kept_conversations: usize,
    pub(crate) kept_conversation_seconds: u64,
    pub(crate) slow_reader_seconds: u64,
    pub(crate) host: Host,
}

impl Inference {
    pub(crate) fn engine(&self) -> EngineKind {
        match self.backend == TORCH {
            true => EngineKind::Torch,
            false => EngineKind::Exact,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Host {
    pub(crate) serve_shards: bool,
    pub(crate) serve_layers: String,
    pub(crate) device: String,
    pub(crate) dtype: String,
    pub(crate) shard_eviction_idle_seconds: u64,
    /// Alias: `shard_max_vram_mb`.
    pub(crate) memory_budget_mb: u64,
    pub(crate) kv_budget_mb: u64,
    pub(crate) kv_share_per_caller_percent: u32,
    pub(crate) max_concurrent_streams: u32,
    pub(crate) max_streams_per_caller: u32,
    pub(crate) max_waiting_steps_per_caller: u32,
    pub(crate) prefill_piece_ms: u64,
    pub(crate) niceness: i32,
    pub(crate) drain_seconds: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Engine {
    pub(crate) threads: usize,
    pub(crate) cpu_latency_us: CpuLatency,
}

/// Wake-up time of idle cores while rows are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "must be \"auto\", \"off\" or a number of microseconds"
)]
pub(crate) enum CpuLatency {
    Word(CpuLatencyWord),
    Microseconds(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CpuLatencyWord {
    Auto,
    Off,
}

impl Engine {
    /// Requested wake-up time of cores while rows are exchanged, in microseconds; `None` leaves it
    /// to the system.
    pub(crate) fn cpu_latency(&self) -> Option<u32> {
        match self.cpu_latency_us {
            CpuLatency::Microseconds(limit) => Some(limit),
            CpuLatency::Word(CpuLatencyWord::Auto) => hearthnet_transport::cpu_latency::advised(),
            CpuLatency::Word(CpuLatencyWord::Off) => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Transport {
    pub(crate) chunk_bytes: u32,
    pub(crate) window_chunks: u32,
    pub(crate) compress_above_bytes: u32,
    pub(crate) keep_alive_seconds: u64,
    pub(crate) session_lifetime_seconds: u64,
    pub(crate) max_sessions: usize,
    pub(crate) receive_buffer_bytes: u32,
}

impl Config {
    /// Compute threads: the setting, or one per core.
    pub(crate) fn threads(&self) -> usize {
        match self.engine.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    /// Engine options; `threads` overrides the thread count.
    pub(crate) fn engine_options(&self, threads: Option<usize>) -> EngineOptions {
        let host = &self.research.distributed_inference.host;
        EngineOptions {
            threads: threads.filter(|&n| n > 0).unwrap_or_else(|| self.threads()),
            max_kv_bytes: host.kv_budget_mb << 20,
            ..EngineOptions::default()
        }
    }

    /// Transport limits from the configuration, validated; other limits keep the transport's
    /// defaults.
    pub(crate) fn transport(&self) -> Result<hearthnet_transport::Config, Failure> {
        let t = &self.transport;
        let config = hearthnet_transport::Config {
            chunk_bytes: t.chunk_bytes,
            window_chunks: t.window_chunks,
            compress_above: Some(t.compress_above_bytes).filter(|&n| n > 0),
            keep_alive: Duration::from_secs(t.keep_alive_seconds),
            session_lifetime: Duration::from_secs(t.session_lifetime_seconds),
            max_sessions: t.max_sessions,
            recv_buffer_bytes: t.receive_buffer_bytes,
            ..Default::default()
        };
        config.validate().map_err(|error| {
            Failure::new(Kind::Config, error.to_string())
                .hint("see [transport] in config/hearthnet.toml")
        })?;
        Ok(config)
    }
}
