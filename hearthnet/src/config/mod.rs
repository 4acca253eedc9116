//! The configuration: defaults, one TOML file, and `--set` on top.
//!
//! The defaults are those of the commented example, `config/hearthnet.toml`. Values are merged as TOML
//! tables before they become a [`Config`], so that unknown keys are refused wherever they come from, and
//! `config show` can tell where each value came from.

mod sources;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::MAX_NAME_BYTES;
use hearthnet_model::ModelRef;

use crate::failure::{Failure, Kind};
use sources::{FileText, Flag, Wrong, flatten, lookup, over_defaults};

/// As many as a node connects to.
const MAX_STATIC_PEERS: usize = 64;

/// Everything that can be configured; see `config/hearthnet.toml` for the meaning of each key.
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
    /// The model that is meant where a command names none, if one is configured.
    pub(crate) fn default(&self) -> Option<ModelRef> {
        // An unreadable one was refused when the configuration was loaded.
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

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Host {
    pub(crate) serve_shards: bool,
    pub(crate) serve_layers: String,
    pub(crate) shard_eviction_idle_seconds: u64,
    /// M26 calls it `shard_max_vram_mb`.
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

/// A configuration and the origin of every value that is not a default.
#[derive(Debug, Clone)]
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
        let flags = sets.iter().map(|set| Flag::parse(set));
        let flags = flags.collect::<Result<Vec<Flag>, Failure>>()?;
        let tables = file.iter().map(|file| &file.table);
        let written = over_defaults(tables.chain(flags.iter().map(|flag| &flag.table)))
            // Each part is readable by itself.
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

    /// Whether the research switch is on and M26's own switch of this module is what is off.
    pub(crate) fn module_is_off(&self) -> bool {
        self.written.policy.research.enable && !self.config.policy.research.enable
    }

    /// The file that was read, if there is one.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Every key with its value and where the value comes from.
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

/// Refuses a text that is no configuration; `path` is where it is going to lie.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), Failure> {
    let file = FileText::of(path, text)?;
    let config = over_defaults([&file.table])
        .map_err(|e| Failure::new(Kind::Config, format!("{}: {}", path.display(), e.message())))?;
    config.validate().map_err(|wrong| file.failure(&wrong))
}

/// M26's name for the engine that is here: whole layers of small models.
const LAYERED: &str = "small_model_layered";

/// M26's table, and its part about hosts.
const INFERENCE: &str = "research.distributed_inference";
const HOST: &str = "research.distributed_inference.host";

/// Refuses a number outside of a range. From 0 on every number is "at most", up to the greatest
/// there is "at least".
fn within(table: &str, key: &str, value: u64, range: RangeInclusive<u64>) -> Result<(), Wrong> {
    let text = |n: u64| match n.is_power_of_two() && n >= 1 << 20 {
        true => format!("2^{}", n.ilog2()),
        false => n.to_string(),
    };
    let why = match (*range.start(), *range.end()) {
        (0, most) => format!("must be at most {}", text(most)),
        (least, u64::MAX) => format!("must be at least {}", text(least)),
        (least, most) => format!("must lie between {} and {}", text(least), text(most)),
    };
    must(range.contains(&value), table, key, &why)
}

fn must(holds: bool, table: &str, key: &str, why: &str) -> Result<(), Wrong> {
    match holds {
        true => Ok(()),
        false => Err(Wrong::new(&format!("{table}.{key}"), why)),
    }
}

impl Config {
    fn validate(&self) -> Result<(), Wrong> {
        let i = &self.research.distributed_inference;
        must(
            i.backend == LAYERED,
            INFERENCE,
            "backend",
            "must be \"small_model_layered\", HearthNet's own engine: M26's other one, \
             \"petals_like\", is not built (leave the line out, or write the former)",
        )?;
        if let Err(why) = crate::args::parse_layers(&i.host.serve_layers) {
            must(false, HOST, "serve_layers", &format!("is no range: {why}"))?;
        }
        must(
            ["fp16", "fp32"].contains(&i.activation_dtype.as_str()),
            INFERENCE,
            "activation_dtype",
            "must be \"fp16\" (as the model's file says), or \"fp32\" for debugging",
        )?;
        if !self.model.default.is_empty()
            && let Err(why) = self.model.default.parse::<ModelRef>()
        {
            must(false, "model", "default", &format!("names no model: {why}"))?;
        }
        let shards = i.max_shards_per_request as u64;
        within(INFERENCE, "max_shards_per_request", shards, 1..=1024)?;
        let timeout = i.shard_health_timeout_seconds;
        must(
            timeout > 0.0 && timeout <= 86_400.0,
            INFERENCE,
            "shard_health_timeout_seconds",
            "must be more than 0 and at most 86400 seconds",
        )?;
        let greedy = i.routing_policy == "greedy";
        must(greedy, INFERENCE, "routing_policy", "must be \"greedy\"")?;
        if let CpuLatency::Microseconds(limit) = self.engine.cpu_latency_us {
            within("engine", "cpu_latency_us", limit.into(), 0..=1_000_000)?;
        }
        for (key, value, range) in [
            ("prefill_rows", i.prefill_rows as u64, 1..=65_536),
            ("steps_in_flight", i.steps_in_flight as u64, 1..=64),
            (
                "fallback_to_local_after_failures",
                i.fallback_to_local_after_failures.into(),
                1..=u64::MAX,
            ),
            // A TiB of rows is no bound any more.
            ("history_mb", i.history_mb as u64, 0..=1 << 20),
            // Each runs on a thread of its own, of which the runtime has 512.
            (
                "max_concurrent_pipelines",
                i.max_concurrent_pipelines as u64,
                1..=256,
            ),
            ("max_waiting_chats", i.max_waiting_chats as u64, 0..=65_536),
            (
                "max_waiting_chats_per_caller",
                i.max_waiting_chats_per_caller as u64,
                0..=65_536,
            ),
            (
                "kept_conversations",
                i.kept_conversations as u64,
                0..=65_536,
            ),
            (
                "kept_conversation_seconds",
                i.kept_conversation_seconds,
                DAY,
            ),
            ("slow_reader_seconds", i.slow_reader_seconds, DAY),
            ("room_timeout_seconds", i.room_timeout_seconds, DAY),
            (
                "room_timeout_at_start_seconds",
                i.room_timeout_at_start_seconds,
                DAY,
            ),
            (
                "room_timeout_before_fallback_seconds",
                i.room_timeout_before_fallback_seconds,
                DAY,
            ),
        ] {
            within(INFERENCE, key, value, range)?;
        }
        let body = self.http.max_body_bytes as u64;
        within("http", "max_body_bytes", body, 1 << 10..=1 << 30)?;
        let host = &i.host;
        let (streams, steps) = (
            host.max_concurrent_streams,
            host.max_waiting_steps_per_caller,
        );
        let share = host.kv_share_per_caller_percent;
        for (key, value, range) in [
            ("max_concurrent_streams", streams.into(), 1..=u64::MAX),
            ("max_waiting_steps_per_caller", steps.into(), 1..=u64::MAX),
            ("kv_share_per_caller_percent", share.into(), 1..=100),
            ("prefill_piece_ms", host.prefill_piece_ms, 1..=10_000),
            ("drain_seconds", host.drain_seconds, 0..=3600),
            // One MiB holds a sequence of some length in any model; a PiB is no budget any more.
            ("kv_budget_mb", host.kv_budget_mb, 1..=1 << 30),
            ("memory_budget_mb", host.memory_budget_mb, 0..=1 << 30),
        ] {
            within(HOST, key, value, range)?;
        }
        let nice = (0..=19).contains(&host.niceness);
        must(nice, HOST, "niceness", "must lie between 0 and 19")?;
        let name = &self.node.name;
        must(
            name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control),
            "node",
            "name",
            "must be at most 64 bytes of plain text",
        )?;
        let listen = &self.node.listen;
        must(
            listen == "auto" || listen.parse::<std::net::SocketAddr>().is_ok(),
            "node",
            "listen",
            "must be \"auto\" or ADDRESS:PORT, for example \"0.0.0.0:7600\"",
        )?;
        let peers = &self.discovery.static_peers;
        let few = peers.len() <= MAX_STATIC_PEERS;
        must(
            few,
            "discovery",
            "static_peers",
            "must name at most 64 peers",
        )?;
        if let Some(why) = peers
            .iter()
            .find_map(|peer| peer.parse::<StaticPeer>().err())
        {
            let why = format!(
                "must list HOST:PORT or HOST:PORT#NODEID, for example \"192.168.1.20:7600\"; {why}"
            );
            must(false, "discovery", "static_peers", &why)?;
        }
        if let Err(why) = self.transport() {
            return Err(Wrong::new(
                "transport",
                &format!("cannot be as it is: {why}"),
            ));
        }
        within("engine", "threads", self.engine.threads as u64, 0..=1024)
    }

    /// Threads that compute: the setting, or one per core.
    pub(crate) fn threads(&self) -> usize {
        match self.engine.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    /// The transport's limits in its own terms and within their ranges, with its own defaults for
    /// the rest.
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

/// From a second to a day.
const DAY: RangeInclusive<u64> = 1..=86_400;

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

    fn defaults() -> Config {
        over_defaults([]).unwrap()
    }

    #[test]
    fn the_commented_example_holds_exactly_the_defaults_and_every_key() {
        let loaded = load(EXAMPLE, &[]).unwrap();
        assert_eq!(loaded.config, defaults());
        assert_eq!(load("", &[]).unwrap().config, defaults());
        for (key, _, origin) in loaded.explain().unwrap() {
            assert_ne!(
                origin, "default",
                "{key} is missing from config/hearthnet.toml"
            );
        }
    }

    #[test]
    fn what_a_library_would_do_unasked_is_what_the_defaults_say() {
        fn same(said: impl std::fmt::Debug, own: impl std::fmt::Debug) {
            assert_eq!(format!("{said:?}"), format!("{own:?}"));
        }
        let all = defaults();
        let (listen, host) = ("[::1]:1", &all.research.distributed_inference.host);
        same(
            all.transport().unwrap(),
            hearthnet_transport::Config::default(),
        );
        same(
            crate::backends::pump_settings(&all, false),
            hearthnet_orchestrator::sharded::PumpSettings::default(),
        );
        same(
            crate::host_setup::serve_config(host, listen),
            hearthnet_shard::ServeConfig::new(listen),
        );
        same(
            crate::service_setup::settings(&all),
            hearthnet_orchestrator::service::ServiceSettings::default(),
        );
        same(
            crate::service_setup::http_settings(&all.http.listen, &all).unwrap(),
            hearthnet_http::HttpSettings::default(),
        );
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
        assert_eq!(load(&starter(false), &[]).unwrap().config, defaults());
        let mut on = defaults();
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
        let rows = loaded.explain().unwrap();
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
        let rows = loaded.explain().unwrap();
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
