//! Settings, and the values that follow from them.

use std::collections::BTreeMap;
use std::time::Duration;

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_engine::EngineOptions;
use hearthnet_files::spec::CacheDtype;
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::router::PolicyName;
use hearthnet_platform::local_socket::SocketMode;
use serde::Deserialize;

use super::rules::{
    QuietHours, UpToADay, Whole, Within, activation_dtype, aliases, allowed_hosts, backend,
    cors_origins, device, dtype, health_timeout, layers, listen, listen_or_none, model,
    node_listen, node_name, parsed, quiet_hours, share, static_peers,
};
use crate::cli::args::{EngineKind, Layers};

/// The whole configuration. `config/hearthnet.toml` documents each key and has its default. The
/// rule of a setting is its type or its attribute. Other keys were refused before (`sources.rs`).
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Config {
    pub(crate) policy: Policy,
    pub(crate) node: Node,
    pub(crate) model: Model,
    pub(crate) discovery: Discovery,
    pub(crate) http: Http,
    pub(crate) chat: Chat,
    pub(crate) metrics: Metrics,
    pub(crate) manners: Manners,
    pub(crate) research: Research,
    pub(crate) engine: Engine,
    pub(crate) transport: Transport,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Policy {
    pub(crate) research: ResearchPolicy,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct ResearchPolicy {
    pub(crate) enable: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Node {
    #[serde(deserialize_with = "node_name")]
    pub(crate) name: String,
    #[serde(deserialize_with = "node_listen")]
    pub(crate) listen: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Model {
    #[serde(deserialize_with = "model")]
    pub(crate) default: Option<ModelRef>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Chat {
    pub(crate) history: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Discovery {
    pub(crate) mdns: bool,
    #[serde(deserialize_with = "static_peers")]
    pub(crate) static_peers: Vec<StaticPeer>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Http {
    #[serde(deserialize_with = "listen")]
    pub(crate) listen: String,
    pub(crate) socket: String,
    #[serde(deserialize_with = "parsed")]
    pub(crate) socket_mode: SocketMode,
    pub(crate) tls_certificate_file: String,
    pub(crate) tls_key_file: String,
    pub(crate) api_key_file: String,
    #[serde(deserialize_with = "allowed_hosts")]
    pub(crate) allowed_hosts: Vec<String>,
    #[serde(deserialize_with = "cors_origins")]
    pub(crate) cors_origins: Vec<String>,
    #[serde(deserialize_with = "aliases")]
    pub(crate) aliases: BTreeMap<String, String>,
    pub(crate) max_body_bytes: Within<usize, 1024, { 1 << 30 }>,
    pub(crate) strict: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Metrics {
    #[serde(deserialize_with = "listen_or_none")]
    pub(crate) listen: String,
}

/// How much of this machine its node uses for others, and when.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Manners {
    pub(crate) memory_percent: Within<u64, 1, 100>,
    pub(crate) cores_percent: Within<usize, 1, 100>,
    /// Alias: `research.distributed_inference.host.niceness`.
    pub(crate) niceness: Within<i32, 0, 19>,
    pub(crate) idle_io: bool,
    #[serde(deserialize_with = "quiet_hours")]
    pub(crate) quiet_hours: Option<QuietHours>,
    pub(crate) only_when_idle: bool,
    pub(crate) on_battery: bool,
    // More than a PB is surely a mistake.
    pub(crate) disk_gb: Within<u64, 0, 1_000_000>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Research {
    pub(crate) distributed_inference: Inference,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Inference {
    pub(crate) enabled: bool,
    #[serde(deserialize_with = "backend")]
    pub(crate) backend: EngineKind,
    #[serde(deserialize_with = "activation_dtype")]
    pub(crate) activation_dtype: String,
    #[serde(deserialize_with = "parsed")]
    pub(crate) cache_dtype: CacheDtype,
    pub(crate) max_shards_per_request: Within<usize, 1, 1024>,
    #[serde(deserialize_with = "health_timeout")]
    pub(crate) shard_health_timeout_seconds: f64,
    pub(crate) allow_self_as_shard: bool,
    pub(crate) exact: Exact,
    #[serde(deserialize_with = "share")]
    pub(crate) audit_share: f64,
    pub(crate) disputes: bool,
    pub(crate) judge_disputes: bool,
    pub(crate) private_first_layers: Whole<u32>,
    pub(crate) private_last_layers: Whole<u32>,
    #[serde(deserialize_with = "parsed")]
    pub(crate) routing_policy: PolicyName,
    pub(crate) prefill_rows: Within<usize, 1, 65_536>,
    pub(crate) steps_in_flight: Within<usize, 1, 64>,
    pub(crate) fallback_to_local: bool,
    pub(crate) fallback_to_local_after_failures: Within<u32, 1, { u64::MAX }>,
    pub(crate) room_timeout_seconds: UpToADay,
    pub(crate) room_timeout_before_fallback_seconds: UpToADay,
    pub(crate) room_timeout_at_start_seconds: UpToADay,
    // More than a TiB of rows is surely a mistake.
    pub(crate) history_mb: Within<usize, 0, { 1 << 20 }>,
    // Each pipeline occupies a thread; the runtime has at most 512 blocking threads.
    pub(crate) max_concurrent_pipelines: Within<usize, 1, 256>,
    pub(crate) max_waiting_chats: Within<usize, 0, 65_536>,
    pub(crate) max_waiting_chats_per_caller: Within<usize, 0, 65_536>,
    pub(crate) max_waiting_seconds: UpToADay,
    pub(crate) kept_conversations: Within<usize, 0, 65_536>,
    pub(crate) kept_conversation_seconds: UpToADay,
    pub(crate) slow_reader_seconds: UpToADay,
    pub(crate) host: Host,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Host {
    pub(crate) serve_shards: bool,
    #[serde(deserialize_with = "layers")]
    pub(crate) serve_layers: Layers,
    #[serde(deserialize_with = "device")]
    pub(crate) device: String,
    #[serde(deserialize_with = "dtype")]
    pub(crate) dtype: String,
    pub(crate) shard_eviction_idle_seconds: u64,
    /// Alias: `shard_max_vram_mb`.
    pub(crate) memory_budget_mb: Within<u64, 0, { 1 << 30 }>,
    // One MiB holds a sequence of some length in any model; more than a PiB is surely a mistake.
    pub(crate) kv_budget_mb: Within<u64, 1, { 1 << 30 }>,
    pub(crate) kv_share_per_caller_percent: Within<u32, 1, 100>,
    pub(crate) max_concurrent_streams: Within<u32, 1, { u64::MAX }>,
    pub(crate) max_streams_per_caller: Whole<u32>,
    pub(crate) max_waiting_steps_per_caller: Within<u32, 1, { u64::MAX }>,
    pub(crate) prefill_piece_ms: Within<u64, 1, 10_000>,
    pub(crate) drain_seconds: Within<u64, 0, 3600>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Engine {
    pub(crate) threads: Within<usize, 0, 1024>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Transport {
    pub(crate) chunk_bytes: Whole<u32>,
    pub(crate) window_chunks: Whole<u32>,
    pub(crate) compress_above_bytes: Whole<u32>,
    pub(crate) keep_alive_seconds: u64,
    pub(crate) session_lifetime_seconds: u64,
    pub(crate) max_sessions: Whole<usize>,
    pub(crate) receive_buffer_bytes: Whole<u32>,
}

impl Config {
    /// Compute threads: the setting, or one per core.
    pub(crate) fn threads(&self) -> usize {
        match self.engine.threads.0 {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    /// Compute threads of layers for others, on a machine with so many cores.
    pub(crate) fn host_threads(&self, cores: usize) -> usize {
        let share = cores.saturating_mul(self.manners.cores_percent.0) / 100;
        self.threads().min(share).max(1)
    }

    /// Layers to serve, if any.
    pub(crate) fn layers(&self) -> Option<Layers> {
        let host = &self.research.distributed_inference.host;
        host.serve_shards.then_some(self.serve_layers())
    }

    /// Layers for a daemon that serves layers, whatever `serve_shards` says.
    pub(crate) fn serve_layers(&self) -> Layers {
        self.research.distributed_inference.host.serve_layers
    }

    /// Engine options; `threads` overrides the thread count.
    pub(crate) fn engine_options(&self, threads: Option<usize>) -> EngineOptions {
        let host = &self.research.distributed_inference.host;
        EngineOptions {
            threads: threads.filter(|&n| n > 0).unwrap_or_else(|| self.threads()),
            max_kv_bytes: host.kv_budget_mb.0 << 20,
            ..EngineOptions::default()
        }
    }

    /// Transport limits from the configuration; other limits keep the transport's defaults.
    pub(crate) fn transport(&self) -> hearthnet_transport::Config {
        let t = &self.transport;
        let host = &self.research.distributed_inference.host;
        hearthnet_transport::Config {
            chunk_bytes: t.chunk_bytes.0,
            window_chunks: t.window_chunks.0,
            compress_above: Some(t.compress_above_bytes.0).filter(|&n| n > 0),
            keep_alive: Duration::from_secs(t.keep_alive_seconds),
            session_lifetime: Duration::from_secs(t.session_lifetime_seconds),
            max_sessions: t.max_sessions.0,
            recv_buffer_bytes: t.receive_buffer_bytes.0,
            caller_steps: host.max_waiting_steps_per_caller.0,
            ..Default::default()
        }
    }
}
