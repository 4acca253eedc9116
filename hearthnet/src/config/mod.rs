//! The configuration: defaults, one TOML file, and `--set` on top.
//!
//! Defaults are the values of the commented example, `config/hearthnet.toml`. Values are merged as
//! TOML tables before they become a [`Config`], so that unknown keys are refused in every source,
//! and `config show` can name the origin of each value.

mod sources;

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::is_name;
use hearthnet_model::ModelRef;
use hearthnet_orchestrator::exact::Exact;

use crate::args::{EngineKind, parse_device, parse_dtype, parse_listen};
use crate::failure::{Failure, Kind};
use sources::{ConfigError, FileText, Flag, flatten, lookup, over_defaults};

/// Limit of peers that a node connects to.
const MAX_STATIC_PEERS: usize = 64;

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

#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    /// Effective values: `policy.research.enable` is off if the module's own switch,
    /// `research.distributed_inference.enabled`, is off.
    pub(crate) config: Config,
    /// Values as written.
    written: Config,
    file: Option<FileText>,
    flags: Vec<Flag>,
}

impl Loaded {
    /// Reads the file (`explicit`, or the user's own when it exists) and applies `--set` flags.
    pub(crate) fn load(explicit: Option<&Path>, sets: &[String]) -> Result<Self, Failure> {
        let path = match explicit {
            Some(path) => Some(path.to_owned()),
            None => default_path().filter(|p| p.exists()),
        };
        let file = path.map(|path| FileText::read(&path)).transpose()?;
        let flags = sets.iter().map(|set| Flag::parse(set));
        let flags = flags.collect::<Result<Vec<Flag>, Failure>>()?;
        let tables = file.iter().map(|file| &file.table);
        let written = over_defaults(tables.chain(flags.iter().map(|flag| &flag.table)))
            // Each source was valid by itself.
            .map_err(|e| Failure::new(Kind::Config, e.message()))?;
        if let Err(wrong) = written.validate() {
            let flag = flags.iter().rev().find(|flag| flag.sets(&wrong.key));
            return Err(match (flag, &file) {
                (Some(flag), _) => flag.failure(&wrong),
                (None, Some(file)) => file.failure(&wrong),
                (None, None) => wrong.failure(""),
            });
        }
        let mut config = written.clone();
        config.policy.research.enable &= config.research.distributed_inference.enabled;
        Ok(Self {
            config,
            written,
            file,
            flags,
        })
    }

    /// Whether the research switch is on, but the module's own switch is off.
    pub(crate) fn module_is_off(&self) -> bool {
        self.written.policy.research.enable && !self.config.policy.research.enable
    }

    /// Path of the file, if one was read.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Every key with its value and the origin of the value.
    pub(crate) fn explain(&self) -> Result<Vec<(String, String, String)>, Failure> {
        let all = toml::Table::try_from(&self.written).map_err(Failure::internal)?;
        let mut rows = Vec::new();
        flatten("", &all, &mut |key, value| {
            let origin = match &self.file {
                _ if self.flags.iter().any(|flag| flag.sets(key)) => "--set".to_owned(),
                Some(file) if lookup(&file.table, key).is_some() => file.place(key),
                _ => "default".to_owned(),
            };
            rows.push((key.to_owned(), value.to_string(), origin));
        });
        Ok(rows)
    }
}

/// Checks a configuration text; `path` is only used in errors.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), Failure> {
    let file = FileText::of(path, text)?;
    let config = over_defaults([&file.table])
        .map_err(|e| Failure::new(Kind::Config, format!("{}: {}", path.display(), e.message())))?;
    config.validate().map_err(|wrong| file.failure(&wrong))
}

/// Name of the exact engine in the configuration.
const LAYERED: &str = "small_model_layered";

const TORCH: &str = "torch";

const INFERENCE: &str = "research.distributed_inference";
const HOST: &str = "research.distributed_inference.host";

const DAY: RangeInclusive<u64> = 1..=86_400;

/// Ranges of integer settings, checked after loading. A range from 0 reads "at most" in errors, a
/// range to `u64::MAX` "at least".
const RANGES: [(&str, &str, RangeInclusive<u64>); 24] = [
    ("engine", "cpu_latency_us", 0..=1_000_000),
    ("engine", "threads", 0..=1024),
    ("http", "max_body_bytes", 1 << 10..=1 << 30),
    (INFERENCE, "fallback_to_local_after_failures", 1..=u64::MAX),
    // More than a TiB of rows is surely a mistake.
    (INFERENCE, "history_mb", 0..=1 << 20),
    (INFERENCE, "kept_conversation_seconds", DAY),
    (INFERENCE, "kept_conversations", 0..=65_536),
    // Each pipeline occupies a thread; the runtime has at most 512 blocking threads.
    (INFERENCE, "max_concurrent_pipelines", 1..=256),
    (INFERENCE, "max_shards_per_request", 1..=1024),
    (INFERENCE, "max_waiting_chats", 0..=65_536),
    (INFERENCE, "max_waiting_chats_per_caller", 0..=65_536),
    (INFERENCE, "prefill_rows", 1..=65_536),
    (INFERENCE, "room_timeout_at_start_seconds", DAY),
    (INFERENCE, "room_timeout_before_fallback_seconds", DAY),
    (INFERENCE, "room_timeout_seconds", DAY),
    (INFERENCE, "slow_reader_seconds", DAY),
    (INFERENCE, "steps_in_flight", 1..=64),
    (HOST, "drain_seconds", 0..=3600),
    // One MiB holds a sequence of some length in any model; more than a PiB is surely a mistake.
    (HOST, "kv_budget_mb", 1..=1 << 30),
    (HOST, "kv_share_per_caller_percent", 1..=100),
    (HOST, "max_concurrent_streams", 1..=u64::MAX),
    (HOST, "max_waiting_steps_per_caller", 1..=u64::MAX),
    (HOST, "memory_budget_mb", 0..=1 << 30),
    (HOST, "prefill_piece_ms", 1..=10_000),
];

fn within(key: &str, value: u64, range: &RangeInclusive<u64>) -> Result<(), ConfigError> {
    let text = |n: u64| match n.is_power_of_two() && n >= 1 << 20 {
        true => format!("2^{}", n.ilog2()),
        false => n.to_string(),
    };
    let why = match (*range.start(), *range.end()) {
        (0, most) => format!("must be at most {}", text(most)),
        (least, u64::MAX) => format!("must be at least {}", text(least)),
        (least, most) => format!("must lie between {} and {}", text(least), text(most)),
    };
    ensure(range.contains(&value), key, &why)
}

fn ensure(holds: bool, key: &str, why: &str) -> Result<(), ConfigError> {
    match holds {
        true => Ok(()),
        false => Err(ConfigError::new(key, why)),
    }
}

impl Config {
    fn validate(&self) -> Result<(), ConfigError> {
        // Cannot fail: it was read from such a table.
        let table = toml::Table::try_from(self).unwrap_or_default();
        for (part, key, range) in RANGES {
            let key = format!("{part}.{key}");
            // A setting that holds a word instead has no range.
            if let Some(toml::Value::Integer(value)) = lookup(&table, &key) {
                within(&key, u64::try_from(*value).unwrap_or(u64::MAX), &range)?;
            }
        }
        let i = &self.research.distributed_inference;
        ensure(
            [LAYERED, TORCH].contains(&i.backend.as_str()),
            "research.distributed_inference.backend",
            "must be \"small_model_layered\", HearthNet's own engine, or \"torch\"; \"petals_like\" is not implemented",
        )?;
        if let Err(why) = parse_device(&i.host.device) {
            let key = "research.distributed_inference.host.device";
            return Err(ConfigError::new(key, &format!("is not a device: {why}")));
        }
        if let Err(why) = parse_dtype(&i.host.dtype) {
            let key = "research.distributed_inference.host.dtype";
            return Err(ConfigError::new(key, &format!("is not a format: {why}")));
        }
        if let Err(why) = crate::args::parse_layers(&i.host.serve_layers) {
            let key = "research.distributed_inference.host.serve_layers";
            return Err(ConfigError::new(key, &format!("is not a range: {why}")));
        }
        ensure(
            ["fp16", "fp32"].contains(&i.activation_dtype.as_str()),
            "research.distributed_inference.activation_dtype",
            "must be \"fp16\" (as the model's file says), or \"fp32\" for debugging",
        )?;
        if !self.model.default.is_empty()
            && let Err(why) = self.model.default.parse::<ModelRef>()
        {
            return Err(ConfigError::new(
                "model.default",
                &format!("names no model: {why}"),
            ));
        }
        let timeout = i.shard_health_timeout_seconds;
        ensure(
            timeout > 0.0 && timeout <= 86_400.0,
            "research.distributed_inference.shard_health_timeout_seconds",
            "must be more than 0 and at most 86400 seconds",
        )?;
        ensure(
            i.routing_policy == "greedy",
            "research.distributed_inference.routing_policy",
            "must be \"greedy\"",
        )?;
        ensure(
            (0..=19).contains(&i.host.niceness),
            "research.distributed_inference.host.niceness",
            "must lie between 0 and 19",
        )?;
        let name = &self.node.name;
        ensure(
            name.is_empty() || is_name(name),
            "node.name",
            "must be at most 64 bytes, without invisible characters",
        )?;
        let listen = &self.node.listen;
        ensure(
            listen == "auto" || listen.parse::<SocketAddr>().is_ok(),
            "node.listen",
            "must be \"auto\" or ADDRESS:PORT, for example \"0.0.0.0:7600\"",
        )?;
        let form = "must be ADDRESS:PORT, for example \"127.0.0.1:7602\"";
        for (key, listen) in [
            ("http.listen", &self.http.listen),
            ("metrics.listen", &self.metrics.listen),
        ] {
            if listen.is_empty() && key == "metrics.listen" {
                continue;
            }
            ensure(parse_listen(listen).is_ok(), key, form)?;
            let address = listen.parse::<SocketAddr>().ok();
            ensure(
                !self.http.api_key_file.is_empty()
                    || address.is_none_or(|address| address.ip().is_loopback()),
                key,
                "can be reached by other machines, so a key is needed: name a file that holds one \
                 with http.api_key_file, or listen on 127.0.0.1 only",
            )?;
        }
        let (key, peers) = ("discovery.static_peers", &self.discovery.static_peers);
        ensure(
            peers.len() <= MAX_STATIC_PEERS,
            key,
            "must name at most 64 peers",
        )?;
        for peer in peers {
            if let Err(why) = peer.parse::<StaticPeer>() {
                let form =
                    "must list HOST:PORT or HOST:PORT#NODEID, for example \"192.168.1.20:7600\"";
                return Err(ConfigError::new(key, &format!("{form}; {why}")));
            }
        }
        self.transport()
            .map(drop)
            .map_err(|why| ConfigError::new("transport", &format!("is not valid: {why}")))
    }

    /// Compute threads: the setting, or one per core.
    pub(crate) fn threads(&self) -> usize {
        match self.engine.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
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

pub(crate) fn default_path() -> Option<PathBuf> {
    crate::paths::xdg("XDG_CONFIG_HOME", ".config").map(|d| d.join("hearthnet/hearthnet.toml"))
}

/// Initial configuration from the commented example: every key is commented out, so that later
/// defaults apply. `research` switches distributed inference on.
pub(crate) fn starter(research: bool) -> String {
    let mut out = String::from(
        "# This node's configuration. A line that begins with #KEY = VALUE shows a default;\n\
         # remove its # to change it. `hearthnet config show` prints what is in force.\n",
    );
    // The example's heading explains how to use the example, so it is left out.
    let body = EXAMPLE.split_once("\n\n").map_or("", |(_, body)| body);
    for line in body.lines() {
        out.push('\n');
        let is_key = !line.starts_with('#') && line.contains(" = ");
        if line == "enable = false" && research {
            out.push_str("enable = true");
        } else {
            out.push_str(if is_key { "#" } else { "" });
            out.push_str(line);
        }
    }
    out.push('\n');
    out
}

const EXAMPLE: &str = include_str!("../../../config/hearthnet.toml");

#[cfg(test)]
mod tests;
