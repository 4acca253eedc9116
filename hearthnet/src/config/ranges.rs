//! Valid values of settings.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::is_name;
use hearthnet_hub::ModelRef;

use super::schema::{Config, TORCH};
use super::sources::{ConfigError, HOST, lookup};
use crate::cli::args::{parse_device, parse_dtype, parse_layers, parse_listen};

/// Limit of peers that a node connects to.
const MAX_STATIC_PEERS: usize = 64;

/// Name of the exact engine in the configuration.
const LAYERED: &str = "small_model_layered";

const INFERENCE: &str = "research.distributed_inference";

const DAY: RangeInclusive<u64> = 1..=86_400;

/// Ranges of integer settings, checked after loading. A range from 0 reads "at most" in errors, a
/// range to `u64::MAX` "at least".
pub(super) const RANGES: [(&str, &str, RangeInclusive<u64>); 24] = [
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
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
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
        if let Err(why) = parse_layers(&i.host.serve_layers) {
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
}
