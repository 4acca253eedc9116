//! The configuration: defaults, one TOML file, and `--set` on top.
//!
//! Values are merged as TOML tables before they become a [`Config`], so that
//! every key exists once (in the struct), unknown keys are refused wherever they
//! come from, and `config show` can tell where each value came from.

mod sources;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::MAX_NAME_BYTES;
use hearthnet_http::HttpSettings;
use hearthnet_model::ModelRef;
use hearthnet_orchestrator::service::ServiceSettings;
use hearthnet_orchestrator::sharded::PumpSettings;
use hearthnet_shard::ServeConfig;

use crate::failure::{Failure, Kind};
use sources::{FileText, Flag, Wrong, flatten, lookup};

/// As many as a node connects to.
const MAX_STATIC_PEERS: usize = 64;

/// Everything that can be configured; see `config/hearthnet.toml` for the meaning of each key.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
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

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Policy {
    pub(crate) research: ResearchPolicy,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ResearchPolicy {
    pub(crate) enable: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) listen: String,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            name: String::new(),
            listen: "auto".into(),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Model {
    pub(crate) default: String,
}

impl Model {
    /// The model that is meant where a command names none, if one is configured.
    pub(crate) fn default(&self) -> Option<ModelRef> {
        // An unreadable one was refused when the configuration was loaded.
        self.default
            .parse()
            .ok()
            .filter(|_| !self.default.is_empty())
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Chat {
    pub(crate) history: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Discovery {
    pub(crate) mdns: bool,
    pub(crate) static_peers: Vec<String>,
}

impl Default for Discovery {
    fn default() -> Self {
        Self {
            mdns: true,
            static_peers: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Http {
    pub(crate) listen: String,
    pub(crate) api_key_file: String,
    pub(crate) max_body_bytes: usize,
}

impl Default for Http {
    fn default() -> Self {
        let http = HttpSettings::default();
        Self {
            listen: http.listen,
            api_key_file: String::new(),
            max_body_bytes: http.max_body_bytes,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Metrics {
    pub(crate) listen: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Research {
    pub(crate) distributed_inference: Inference,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Inference {
    pub(crate) enabled: bool,
    pub(crate) backend: String,
    pub(crate) activation_dtype: String,
    pub(crate) max_shards_per_request: usize,
    pub(crate) shard_health_timeout_seconds: f64,
    pub(crate) allow_self_as_shard: bool,
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

impl Default for Inference {
    fn default() -> Self {
        let (pump, service) = (PumpSettings::default(), ServiceSettings::default());
        let (turns, keep) = (service.turns, service.keep);
        Self {
            enabled: true,
            backend: LAYERED.into(),
            activation_dtype: "fp16".into(),
            max_shards_per_request: 16,
            shard_health_timeout_seconds: pump.health_timeout.as_secs_f64(),
            allow_self_as_shard: true,
            private_first_layers: 2,
            private_last_layers: 0,
            routing_policy: "greedy".into(),
            prefill_rows: pump.prefill_rows,
            steps_in_flight: pump.depth,
            fallback_to_local: true,
            fallback_to_local_after_failures: 2,
            room_timeout_seconds: pump.room_timeout.as_secs(),
            room_timeout_before_fallback_seconds: 30,
            room_timeout_at_start_seconds: pump.start_timeout.as_secs(),
            history_mb: pump.history_bytes >> 20,
            max_concurrent_pipelines: turns.places,
            max_waiting_chats: turns.waiting,
            max_waiting_chats_per_caller: turns.waiting_per_caller,
            kept_conversations: keep.count,
            kept_conversation_seconds: keep.idle_ms / 1000,
            slow_reader_seconds: service.slow_reader.as_secs(),
            host: Host::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Host {
    pub(crate) serve_shards: bool,
    pub(crate) serve_layers: String,
    pub(crate) shard_eviction_idle_seconds: u64,
    /// M26 calls it `shard_max_vram_mb`.
    #[serde(alias = "shard_max_vram_mb")]
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

impl Default for Host {
    fn default() -> Self {
        let serve = ServeConfig::new("");
        Self {
            serve_shards: false,
            serve_layers: "auto".into(),
            shard_eviction_idle_seconds: serve.evict_after.map_or(0, |idle| idle.as_secs()),
            memory_budget_mb: 0,
            kv_budget_mb: serve.kv_budget_bytes >> 20,
            kv_share_per_caller_percent: serve.kv_share_per_caller,
            max_concurrent_streams: serve.max_concurrent_streams,
            max_streams_per_caller: 0,
            max_waiting_steps_per_caller: serve.max_waiting_steps_per_caller,
            prefill_piece_ms: serve.prefill_piece.as_millis() as u64,
            niceness: serve.niceness,
            drain_seconds: 10,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Engine {
    pub(crate) threads: usize,
    pub(crate) cpu_latency_us: CpuLatency,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            threads: 0,
            cpu_latency_us: CpuLatency::Word(CpuLatencyWord::Auto),
        }
    }
}

/// How soon idle cores are to wake while rows go back and forth.
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
    /// How soon cores are to wake while rows go back and forth, in microseconds, if that is not
    /// left to the system.
    pub(crate) fn cpu_latency(&self) -> Option<u32> {
        match self.cpu_latency_us {
            CpuLatency::Microseconds(limit) => Some(limit),
            CpuLatency::Word(CpuLatencyWord::Auto) => hearthnet_transport::cpu_latency::advised(),
            CpuLatency::Word(CpuLatencyWord::Off) => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Transport {
    pub(crate) chunk_bytes: u32,
    pub(crate) window_chunks: u32,
    pub(crate) compress_above_bytes: u32,
    pub(crate) keep_alive_seconds: u64,
    pub(crate) session_lifetime_seconds: u64,
    pub(crate) max_sessions: usize,
    pub(crate) receive_buffer_bytes: u32,
}

impl Default for Transport {
    fn default() -> Self {
        let transport = hearthnet_transport::Config::default();
        Self {
            chunk_bytes: transport.chunk_bytes,
            window_chunks: transport.window_chunks,
            compress_above_bytes: transport.compress_above.unwrap_or(0),
            keep_alive_seconds: transport.keep_alive.as_secs(),
            session_lifetime_seconds: transport.session_lifetime.as_secs(),
            max_sessions: transport.max_sessions,
            receive_buffer_bytes: transport.recv_buffer_bytes,
        }
    }
}

/// A configuration and the origin of every value that is not a default.
#[derive(Debug, Clone, Default)]
pub(crate) struct Loaded {
    /// What is in force: `policy.research.enable` is off where M26's own switch,
    /// `research.distributed_inference.enabled`, is.
    pub(crate) config: Config,
    /// What was written.
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
        let flags = sets
            .iter()
            .map(|set| Flag::parse(set))
            .collect::<Result<Vec<Flag>, Failure>>()?;
        let mut merged = file.as_ref().map(|f| f.table.clone()).unwrap_or_default();
        for flag in &flags {
            sources::merge(&mut merged, flag.table.clone());
        }
        let loaded = Self {
            file,
            flags,
            ..Self::default()
        };
        // Both parts are readable by themselves.
        let written: Config = merged
            .try_into()
            .map_err(|e: toml::de::Error| Failure::new(Kind::Config, e.message().to_owned()))?;
        written.validate().map_err(|wrong| loaded.locate(&wrong))?;
        let mut config = written.clone();
        config.policy.research.enable &= config.research.distributed_inference.enabled;
        Ok(Self {
            config,
            written,
            ..loaded
        })
    }

    /// Says where a value that cannot be comes from.
    fn locate(&self, wrong: &Wrong) -> Failure {
        let flag = self.flags.iter().rev().find(|f| f.sets(&wrong.key));
        match (flag, &self.file) {
            (Some(flag), _) => flag.failure(wrong),
            (None, Some(file)) => file.failure(wrong),
            (None, None) => wrong.failure(""),
        }
    }

    /// Whether the research switch is on and M26's own switch of this module is what is off.
    pub(crate) fn module_is_off(&self) -> bool {
        self.written.policy.research.enable && !self.config.policy.research.enable
    }

    /// The file that was read, if there is one.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Every key with its value and where the value comes from.
    pub(crate) fn explain(&self) -> Vec<(String, String, String)> {
        let all = toml::Table::try_from(&self.written).unwrap_or_default();
        let mut rows = Vec::new();
        flatten("", &all, &mut |key, value| {
            let origin = if self.flags.iter().any(|flag| flag.sets(key)) {
                "--set".to_owned()
            } else {
                match &self.file {
                    Some(file) if lookup(&file.table, key).is_some() => file.place(key),
                    _ => "default".to_owned(),
                }
            };
            rows.push((key.to_owned(), value.to_string(), origin));
        });
        rows
    }
}

/// Refuses a text that is no configuration; `path` is where it is going to lie.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), Failure> {
    let file = FileText::of(path, text)?;
    let config: Config = file
        .table
        .clone()
        .try_into()
        .map_err(|e: toml::de::Error| {
            Failure::new(Kind::Config, format!("{}: {}", path.display(), e.message()))
        })?;
    config.validate().map_err(|wrong| file.failure(&wrong))
}

/// M26's name for the engine that is here: whole layers of small models.
const LAYERED: &str = "small_model_layered";

impl Config {
    fn validate(&self) -> Result<(), Wrong> {
        let inference = &self.research.distributed_inference;
        let bad = |key: &str, why: &str| Err(Wrong::new(key, why));
        let d = "research.distributed_inference";
        if inference.backend != LAYERED {
            return bad(
                &format!("{d}.backend"),
                "must be \"small_model_layered\", HearthNet's own engine: M26's other one, \
                 \"petals_like\", is not built (leave the line out, or write the former)",
            );
        }
        if let Err(why) = crate::args::parse_layers(&inference.host.serve_layers) {
            return bad(
                &format!("{d}.host.serve_layers"),
                &format!("is no range: {why}"),
            );
        }
        if !["fp16", "fp32"].contains(&inference.activation_dtype.as_str()) {
            return bad(
                &format!("{d}.activation_dtype"),
                "must be \"fp16\" (as the model's file says), or \"fp32\" for debugging",
            );
        }
        if !self.model.default.is_empty()
            && let Err(why) = self.model.default.parse::<ModelRef>()
        {
            return bad("model.default", &format!("names no model: {why}"));
        }
        if !(1..=1024).contains(&inference.max_shards_per_request) {
            return bad(
                &format!("{d}.max_shards_per_request"),
                "must lie between 1 and 1024",
            );
        }
        let timeout = inference.shard_health_timeout_seconds;
        if !(timeout > 0.0 && timeout <= 86_400.0) {
            return bad(
                &format!("{d}.shard_health_timeout_seconds"),
                "must be more than 0 and at most 86400 seconds",
            );
        }
        if inference.routing_policy != "greedy" {
            return bad(&format!("{d}.routing_policy"), "must be \"greedy\"");
        }
        if let CpuLatency::Microseconds(limit) = self.engine.cpu_latency_us
            && limit > 1_000_000
        {
            return bad("engine.cpu_latency_us", "must be at most 1000000");
        }
        if !(1..=65_536).contains(&inference.prefill_rows) {
            return bad(&format!("{d}.prefill_rows"), "must lie between 1 and 65536");
        }
        if !(1..=64).contains(&inference.steps_in_flight) {
            return bad(&format!("{d}.steps_in_flight"), "must lie between 1 and 64");
        }
        if inference.fallback_to_local_after_failures == 0 {
            return bad(
                &format!("{d}.fallback_to_local_after_failures"),
                "must be at least 1",
            );
        }
        // A TiB of rows is no bound any more.
        if inference.history_mb > 1 << 20 {
            return bad(&format!("{d}.history_mb"), "must be at most 2^20");
        }
        // Each runs on a thread of its own, of which the runtime has 512.
        if !(1..=256).contains(&inference.max_concurrent_pipelines) {
            return bad(
                &format!("{d}.max_concurrent_pipelines"),
                "must lie between 1 and 256",
            );
        }
        for (key, value) in [
            ("max_waiting_chats", inference.max_waiting_chats),
            (
                "max_waiting_chats_per_caller",
                inference.max_waiting_chats_per_caller,
            ),
            ("kept_conversations", inference.kept_conversations),
        ] {
            if value > 65_536 {
                return bad(&format!("{d}.{key}"), "must be at most 65536");
            }
        }
        for (key, value) in [
            (
                "kept_conversation_seconds",
                inference.kept_conversation_seconds,
            ),
            ("slow_reader_seconds", inference.slow_reader_seconds),
            ("room_timeout_seconds", inference.room_timeout_seconds),
            (
                "room_timeout_at_start_seconds",
                inference.room_timeout_at_start_seconds,
            ),
            (
                "room_timeout_before_fallback_seconds",
                inference.room_timeout_before_fallback_seconds,
            ),
        ] {
            if !(1..=86_400).contains(&value) {
                return bad(&format!("{d}.{key}"), "must lie between 1 and 86400");
            }
        }
        if !(1 << 10..=1 << 30).contains(&self.http.max_body_bytes) {
            return bad("http.max_body_bytes", "must lie between 1024 and 2^30");
        }
        if inference.host.max_concurrent_streams == 0 {
            return bad(
                &format!("{d}.host.max_concurrent_streams"),
                "must be at least 1",
            );
        }
        if inference.host.max_waiting_steps_per_caller == 0 {
            return bad(
                &format!("{d}.host.max_waiting_steps_per_caller"),
                "must be at least 1",
            );
        }
        if !(1..=100).contains(&inference.host.kv_share_per_caller_percent) {
            return bad(
                &format!("{d}.host.kv_share_per_caller_percent"),
                "must lie between 1 and 100",
            );
        }
        if !(0..=19).contains(&inference.host.niceness) {
            return bad(&format!("{d}.host.niceness"), "must lie between 0 and 19");
        }
        if !(1..=10_000).contains(&inference.host.prefill_piece_ms) {
            return bad(
                &format!("{d}.host.prefill_piece_ms"),
                "must lie between 1 and 10000",
            );
        }
        if inference.host.drain_seconds > 3600 {
            return bad(&format!("{d}.host.drain_seconds"), "must be at most 3600");
        }
        // One MiB holds a sequence of some length in any model; a PiB is no budget any more.
        if !(1..=1 << 30).contains(&inference.host.kv_budget_mb) {
            return bad(
                &format!("{d}.host.kv_budget_mb"),
                "must lie between 1 and 2^30",
            );
        }
        if inference.host.memory_budget_mb > 1 << 30 {
            return bad(
                &format!("{d}.host.memory_budget_mb"),
                "must be at most 2^30",
            );
        }
        if self.node.name.len() > MAX_NAME_BYTES || self.node.name.chars().any(char::is_control) {
            return bad("node.name", "must be at most 64 bytes of plain text");
        }
        let listen = &self.node.listen;
        if listen != "auto" && listen.parse::<std::net::SocketAddr>().is_err() {
            return bad(
                "node.listen",
                "must be \"auto\" or ADDRESS:PORT, for example \"0.0.0.0:7600\"",
            );
        }
        if self.discovery.static_peers.len() > MAX_STATIC_PEERS {
            return bad("discovery.static_peers", "must name at most 64 peers");
        }
        for peer in &self.discovery.static_peers {
            if let Err(why) = peer.parse::<StaticPeer>() {
                return bad(
                    "discovery.static_peers",
                    &format!(
                        "must list HOST:PORT or HOST:PORT#NODEID, for example \"192.168.1.20:7600\"; {why}"
                    ),
                );
            }
        }
        if let Err(why) = self.transport() {
            return bad("transport", &format!("cannot be as it is: {why}"));
        }
        if self.engine.threads > 1024 {
            return bad("engine.threads", "must be at most 1024");
        }
        Ok(())
    }

    /// Threads that compute: the setting, or one per core.
    pub(crate) fn threads(&self) -> usize {
        match self.engine.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    /// The transport's limits in its own terms, and within their ranges.
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
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error) => Err(Failure::new(Kind::Config, error.to_string())
                .hint("see [transport] in config/hearthnet.toml")),
        }
    }
}

/// `$XDG_CONFIG_HOME/hearthnet/hearthnet.toml`, or the same under `~/.config`.
pub(crate) fn default_path() -> Option<PathBuf> {
    crate::paths::xdg("XDG_CONFIG_HOME", ".config").map(|d| d.join("hearthnet/hearthnet.toml"))
}

/// The commented example as a configuration to start from: every key is there, commented
/// out, so that later defaults apply; distributed inference is on if `research` says so.
pub(crate) fn starter(research: bool) -> String {
    let mut out = String::from(
        "# This node's configuration. A line that begins with #KEY = VALUE shows a default;\n\
         # remove its # to change it. `hearthnet config show` prints what is in force.\n",
    );
    // The example's own heading tells how to use the example.
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
mod tests {
    use super::*;

    fn load(text: &str, sets: &[&str]) -> Result<Loaded, Failure> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, text).unwrap();
        let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
        Loaded::load(Some(&path), &sets)
    }

    #[test]
    fn the_commented_example_holds_exactly_the_defaults_and_every_key() {
        let loaded = load(EXAMPLE, &[]).unwrap();
        assert_eq!(loaded.config, Config::default());
        for (key, _, origin) in loaded.explain() {
            assert_ne!(
                origin, "default",
                "{key} is missing from config/hearthnet.toml"
            );
        }
    }

    #[test]
    fn every_key_of_the_example_has_a_comment() {
        let mut above = "";
        for line in EXAMPLE.lines() {
            if line.contains(" = ") && !line.starts_with('#') {
                assert!(above.starts_with('#'), "no comment above: {line}");
            }
            above = line;
        }
    }

    #[test]
    fn a_new_configuration_changes_nothing_but_what_was_asked_for() {
        assert_eq!(
            load(&starter(false), &[]).unwrap().config,
            Config::default()
        );
        let mut on = Config::default();
        on.policy.research.enable = true;
        assert_eq!(load(&starter(true), &[]).unwrap().config, on);
        for line in EXAMPLE.lines().filter(|l| !l.starts_with('#')) {
            assert!(starter(false).contains(line), "{line}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_by_name_wherever_it_stands() {
        for (text, sets) in [
            ("[engine]\nthread = 2", &[][..]),
            ("", &["engine.thread=2"][..]),
        ] {
            let error = load(text, sets).unwrap_err().to_string();
            assert!(error.contains("thread"), "{error}");
        }
    }

    #[test]
    fn a_flag_overrides_the_file_and_says_so() {
        let loaded = load("[engine]\nthreads = 2", &["engine.threads=3"]).unwrap();
        assert_eq!(loaded.config.engine.threads, 3);
        let rows = loaded.explain();
        let row = rows.iter().find(|r| r.0 == "engine.threads").unwrap();
        assert_eq!((row.1.as_str(), row.2.as_str()), ("3", "--set"));
    }

    fn refused(text: &str, sets: &[&str]) -> (String, String) {
        let failure = load(text, sets).unwrap_err();
        let hint = failure.hint_text().unwrap_or_default().to_owned();
        // The directory is a new one each time.
        let message = failure.to_string();
        let at = message.find("c.toml").unwrap_or(0);
        (message[at..].to_owned(), hint)
    }

    #[test]
    fn an_error_names_file_line_and_key_and_what_was_expected() {
        for (text, message) in [
            (
                "# mine\n[engine]\n\nthreads = \"two\"",
                "c.toml:4: engine.threads must be a whole number, 0 or more, not the text \"two\"",
            ),
            (
                "[node]\nname = 5",
                "c.toml:2: node.name must be text in quotes, not 5",
            ),
            (
                "[research.distributed_inference]\nfallback_to_local = \"yes\"",
                "c.toml:2: research.distributed_inference.fallback_to_local must be true or false, \
                 not the text \"yes\"",
            ),
            (
                "engine.threads = -1",
                "c.toml:1: engine.threads must be a whole number, 0 or more, not -1",
            ),
            (
                "\n[discovery]\nstatic_peers = \"a\"",
                "c.toml:3: discovery.static_peers must be a list, for example [\"a\", \"b\"], not \
                 the text \"a\"",
            ),
            (
                "engine = 3",
                "c.toml:1: engine must be a table of settings, not 3",
            ),
            (
                "[engine]\ncpu_latency_us = \"always\"",
                "c.toml:2: engine.cpu_latency_us must be \"auto\", \"off\" or a number of microseconds",
            ),
        ] {
            assert_eq!(refused(text, &[]).0, message);
        }
        // What only the whole tells, and what is no TOML.
        for (text, beginning) in [
            (
                "[http]\n[research.distributed_inference]\nbackend = \"petals_like\"",
                "c.toml:3: research.distributed_inference.backend must be \"small_model_layered\"",
            ),
            (
                "[http]\nmax_body_bytes = 5",
                "c.toml:2: http.max_body_bytes must lie",
            ),
            ("[engine]\nthreads = two", "c.toml:2: this is not TOML: "),
            ("[engine]\n\nthreads 2", "c.toml:3: this is not TOML: "),
        ] {
            let (message, _) = refused(text, &[]);
            assert!(message.starts_with(beginning), "{message}");
        }
    }

    #[test]
    fn an_error_of_a_flag_does_not_blame_the_file() {
        let file = "[engine]\nthreads = 2\n[http]\nmax_body_bytes = 4096";
        for (set, message) in [
            (
                "engine.threads=two",
                "--set engine.threads=two: engine.threads must be a whole number, 0 or more, not \
                 the text \"two\"",
            ),
            (
                "engine.thread=2",
                "--set engine.thread=2: engine.thread is no setting",
            ),
            (
                "http.max_body_bytes=5",
                "--set http.max_body_bytes=5: http.max_body_bytes must lie between 1024 and 2^30",
            ),
        ] {
            assert_eq!(refused(file, &[set]).0, message);
        }
        // And one of the file not a flag.
        let wrong = "[engine]\nthreads = \"two\"";
        assert!(
            refused(wrong, &["engine.threads=2"])
                .0
                .starts_with("c.toml:2: ")
        );
    }

    #[test]
    fn a_name_that_is_almost_right_is_answered_with_the_right_one() {
        for (text, message, meant) in [
            (
                "[engine]\n thread = 2",
                "c.toml:2: engine.thread is no setting",
                "engine.threads",
            ),
            (
                "\n[engin]\nthreads = 2",
                "c.toml:2: engin is no setting",
                "`hearthnet config show`",
            ),
            (
                "[research.distributed_inference]\nkv_budget_mb = 64",
                "c.toml:2: research.distributed_inference.kv_budget_mb is no setting",
                "research.distributed_inference.host.kv_budget_mb",
            ),
        ] {
            let (said, hint) = refused(text, &[]);
            assert_eq!(said, message);
            assert!(hint.contains(meant), "{hint}");
        }
    }

    /// Section 7 of M26, as it stands there.
    const M26: &str = r#"
[research.distributed_inference]
enabled = true
backend = "small_model_layered"
max_shards_per_request = 16
shard_health_timeout_seconds = 30
fallback_to_local = true
activation_dtype = "fp16"          # "fp16" | "fp32"
allow_self_as_shard = false
max_concurrent_pipelines = 4

[research.distributed_inference.host]
serve_shards = true
shard_eviction_idle_seconds = 600
shard_max_vram_mb = 20000
"#;

    #[test]
    fn the_block_of_m26_is_read_as_it_stands_there() {
        let loaded = load(M26, &["policy.research.enable=true"]).unwrap();
        let inference = &loaded.config.research.distributed_inference;
        assert!(inference.enabled && inference.host.serve_shards);
        assert_eq!(inference.host.memory_budget_mb, 20_000);
        assert!(loaded.config.policy.research.enable);
        let rows = loaded.explain();
        let key = "research.distributed_inference.host.memory_budget_mb";
        let row = rows.iter().find(|row| row.0 == key).unwrap();
        assert!(row.1 == "20000" && row.2.ends_with("c.toml:15"), "{row:?}");
        // Under one name or the other.
        let (message, _) = refused(&format!("{M26}memory_budget_mb = 5"), &[]);
        assert!(message.contains("memory_budget_mb"), "{message}");
        let over = load(
            M26,
            &["research.distributed_inference.host.shard_max_vram_mb=7"],
        );
        let over = over.unwrap().config.research.distributed_inference;
        assert_eq!(over.host.memory_budget_mb, 7);
    }

    #[test]
    fn the_module_is_on_only_where_both_switches_are() {
        let on = |text: &str| {
            let loaded = load(text, &[]).unwrap();
            (loaded.config.policy.research.enable, loaded.module_is_off())
        };
        let policy = "policy.research.enable = true\n";
        let module = "research.distributed_inference.enabled = ";
        assert_eq!(on(policy), (true, false));
        assert_eq!(on(&format!("{policy}{module}true")), (true, false));
        assert_eq!(on(&format!("{policy}{module}false")), (false, true));
        assert_eq!(on(&format!("{module}true")), (false, false));
    }

    #[test]
    fn values_out_of_range_name_the_setting() {
        for set in [
            "research.distributed_inference.max_shards_per_request=0",
            "research.distributed_inference.shard_health_timeout_seconds=0.0",
            "research.distributed_inference.shard_health_timeout_seconds=nan",
            "research.distributed_inference.routing_policy=random",
            "research.distributed_inference.fallback_to_local_after_failures=0",
            "research.distributed_inference.room_timeout_seconds=0",
            "research.distributed_inference.room_timeout_before_fallback_seconds=86401",
            "research.distributed_inference.history_mb=9999999",
            "research.distributed_inference.max_concurrent_pipelines=0",
            "research.distributed_inference.kept_conversation_seconds=0",
            "http.max_body_bytes=5",
            "research.distributed_inference.host.max_concurrent_streams=0",
            "research.distributed_inference.host.memory_budget_mb=2000000000",
            "research.distributed_inference.host.drain_seconds=3601",
            "research.distributed_inference.host.kv_share_per_caller_percent=0",
            "research.distributed_inference.host.max_waiting_steps_per_caller=0",
            "research.distributed_inference.host.prefill_piece_ms=0",
            "engine.cpu_latency_us=-1",
            "engine.cpu_latency_us=always",
            "engine.cpu_latency_us=1000001",
            "research.distributed_inference.host.niceness=20",
            "research.distributed_inference.host.niceness=-1",
            "node.listen=somewhere:7600",
            "model.default=\"hf:nobody\"",
            "research.distributed_inference.activation_dtype=fp8",
            "research.distributed_inference.backend=petals_like",
            "discovery.static_peers=[\"nowhere\"]",
            "research.distributed_inference.host.serve_layers=7",
            "research.distributed_inference.host.serve_layers=all",
            "node.name=\"two\\nlines\"",
        ] {
            let error = load("", &[set]).unwrap_err().to_string();
            let leaf = set.split('=').next().unwrap().rsplit('.').next().unwrap();
            assert!(error.contains(leaf), "{error}");
        }
    }

    #[test]
    fn a_flag_that_is_not_key_and_value_is_refused() {
        for set in ["novalue", "=1", "a..b=1"] {
            assert!(load("", &[set]).is_err(), "{set}");
        }
    }
}
