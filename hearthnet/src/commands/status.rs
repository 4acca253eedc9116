//! `hearthnet status`: members, peers, layers, health and the log, at a glance.
//!
//! All but the live connections is in the log, so it works without a running node; which
//! peers are connected, a running node tells through its door for programs on this machine.

use std::fmt::Write as _;

use hearthnet_bus::log::{Community, LogHealth};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::args::{Global, StatusArgs};
use crate::commands::{print_bytes, print_json, runtime};
use crate::community::{Home, label, name_of, now_ms};
use crate::config::Config;
use crate::coverage::{Coverage, by_model};
use crate::failure::Failure;
use crate::layers::runs_text;
use crate::local_door;
use crate::output::{bytes, span, table};

/// What a running node tells of itself through its door.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Running {
    /// Where it listens.
    pub(crate) listen: Option<String>,
    /// How mDNS does: `running`, `off`, or why not.
    pub(crate) mdns: String,
    /// The peers it has a link with or knows of.
    pub(crate) peers: Vec<Peer>,
    /// The shard that it serves, if it does.
    pub(crate) serving: Option<String>,
    /// Why it serves none now, although it is to.
    #[serde(default)]
    pub(crate) suspended: Option<String>,
    /// URL of its OpenAI-compatible interface, if it is open.
    #[serde(default)]
    pub(crate) url: Option<String>,
}

/// A peer of a running node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Node id.
    pub(crate) node: String,
    /// Where it is, or was looked for.
    pub(crate) endpoint: String,
    /// Whether there is a link with it now.
    pub(crate) connected: bool,
    /// How it was found: `mdns`, `static`, `log`, or `incoming`.
    pub(crate) found: String,
}

pub(crate) fn run(args: &StatusArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    let home = Home::open(global)?;
    let runtime = runtime()?;
    let running: Option<Running> = runtime.block_on(local_door::ask(
        &home.dir,
        local_door::NODE_STATUS,
        &json!({}),
    ));
    runtime.shutdown_background();
    let state = home.state();
    let now = now_ms();
    let models = by_model(state.shards(now));
    let health = home.log.health();
    let figures = Figures::of(&home);
    let log = json!({
        "durable_events": figures.durable,
        "ephemeral_events": figures.ephemeral,
        "bytes": figures.bytes,
        "health": health_name(&health),
        "reason": reason(&health),
        "state_hash": crate::output::hex(&state.state_hash()),
        "frozen": state.frozen().map(|(node, _)| node.to_string()).collect::<Vec<_>>(),
    });
    if args.json {
        return print_json(&json!({
            "node": {
                "id": home.key.id().to_string(),
                "short": home.key.id().short(),
                "level": state.level(&home.key.id()),
                "revoked": state.is_revoked(&home.key.id()),
                "standing": crate::standing::json(&home),
                "running": running,
                "research": config.policy.research.enable,
            },
            "community": {
                "id": home.log.community().to_string(),
                "name": state.name,
                "policy": {
                    "research": state.policy.research,
                    "who_may_invite": state.policy.who_may_invite,
                },
            },
            "members": members_json(&state, now),
            "models": models.iter().map(|m| model_json(m, &state, now)).collect::<Vec<_>>(),
            "log": log,
        }));
    }
    let mut out = String::new();
    heading(&mut out, &home, &state, config);
    members(&mut out, &home, &state, now, running.as_ref());
    peers(&mut out, &state, now, running.as_ref());
    for model in &models {
        shards(&mut out, model, &state, now);
    }
    if models.is_empty() {
        out.push_str(
            "\nlayers     nobody serves any; `hearthnet shard serve --layers auto` does\n",
        );
    }
    let _ = writeln!(
        out,
        "\nlog        {} events and {} short-lived ones, {}; {}",
        figures.durable,
        figures.ephemeral,
        bytes(figures.bytes),
        match reason(&health) {
            None => "healthy".to_owned(),
            Some(why) => format!("READ-ONLY: {why}"),
        }
    );
    print_bytes(out.as_bytes())
}

fn heading(out: &mut String, home: &Home, state: &Community, config: &Config) {
    let id = home.key.id();
    let level = match state.level(&id) {
        Some(level) => level.to_string(),
        None if state.is_revoked(&id) => "revoked".to_owned(),
        None if state.is_frozen(&id) => "frozen: two histories were signed with its key".to_owned(),
        None => "no member".to_owned(),
    };
    let research = match (config.policy.research.enable, state.policy.research) {
        (true, true) => "on",
        (false, _) => "off here (policy.research.enable)",
        (true, false) => "off in the community (`hearthnet community policy --research on`)",
    };
    let _ = writeln!(
        out,
        "community  {} ({})\nthis node  {} ({level})\nresearch   {research}",
        state.name,
        home.log.community().short(),
        label(state, &id),
    );
}

fn members(out: &mut String, home: &Home, state: &Community, now: u64, running: Option<&Running>) {
    let rows: Vec<Vec<String>> = state
        .members()
        .map(|(node, member)| {
            let id = node.to_string();
            let connected =
                running.is_some_and(|r| r.peers.iter().any(|p| p.connected && p.node == id));
            let heard = state.nodes(now).any(|seen| seen.node == *node);
            let mark = match (state.is_frozen(node), *node == home.key.id()) {
                (true, _) => "frozen",
                (_, true) if running.is_some() => "this node, running",
                (_, true) => "this node, not running",
                _ if connected => "connected",
                _ if heard => "heard of lately",
                _ => "",
            };
            vec![
                name_of(state, node, now).to_owned(),
                node.short(),
                member.level.to_string(),
                mark.to_owned(),
            ]
        })
        .collect();
    let _ = write!(out, "\n{}", table(&["member", "node", "level", ""], &rows));
}

fn peers(out: &mut String, state: &Community, now: u64, running: Option<&Running>) {
    let Some(running) = running else {
        out.push_str("\npeers      no node runs here; `hearthnet serve` or `hearthnet shard serve` starts one\n");
        return;
    };
    let listen = running.listen.as_deref().unwrap_or("nowhere");
    let _ = writeln!(out, "\nlistening  {listen}; mDNS {}", running.mdns);
    if running.peers.is_empty() {
        out.push_str("peers      none\n");
        return;
    }
    let rows: Vec<Vec<String>> = running
        .peers
        .iter()
        .map(|peer| {
            let name = peer
                .node
                .parse()
                .map_or("", |node| name_of(state, &node, now));
            vec![
                if name.is_empty() {
                    peer.node.clone()
                } else {
                    name.to_owned()
                },
                peer.endpoint.clone(),
                peer.found.clone(),
                if peer.connected {
                    "connected"
                } else {
                    "not connected"
                }
                .to_owned(),
            ]
        })
        .collect();
    out.push_str(&table(&["peer", "at", "found by", ""], &rows));
}

fn shards(out: &mut String, model: &Coverage<'_>, state: &Community, now: u64) {
    let covered = if model.missing.is_empty() {
        format!("all {} layers are served", model.total)
    } else {
        format!(
            "missing layers {} of {}",
            runs_text(&model.missing),
            model.total
        )
    };
    let _ = writeln!(out, "\n{}  {covered}", model.model_id);
    let rows: Vec<Vec<String>> = model
        .shards
        .iter()
        .map(|advert| {
            let d = &advert.descriptor;
            vec![
                label(state, &advert.author),
                format!("{}-{}", d.layer_range.0, d.layer_range.1),
                // Of the layers, and for the context of conversations.
                format!("{} + {} MiB", d.weights_mb, d.kv_mb),
                format!("{} of {}", d.queue_depth, d.max_concurrent_streams),
                if d.ms_per_token > 0.0 {
                    format!("{:.2}", d.ms_per_token)
                } else {
                    String::new()
                },
                d.endpoint.clone(),
                span(advert.expires_ms.saturating_sub(now)),
            ]
        })
        .collect();
    out.push_str(&table(
        &[
            "host",
            "layers",
            "memory",
            "streams",
            "ms/token",
            "at",
            "holds for",
        ],
        &rows,
    ));
}

fn members_json(state: &Community, now: u64) -> Vec<Value> {
    state
        .members()
        .map(|(node, member)| {
            json!({
                "node": node.to_string(),
                "name": name_of(state, node, now),
                "level": member.level,
                "frozen": state.is_frozen(node),
                "heard": state.nodes(now).any(|seen| seen.node == *node),
            })
        })
        .collect()
}

fn model_json(model: &Coverage<'_>, state: &Community, now: u64) -> Value {
    let shards: Vec<Value> = model
        .shards
        .iter()
        .map(|advert| {
            json!({
                "node": advert.author.to_string(),
                "name": name_of(state, &advert.author, now),
                "expires_in_ms": advert.expires_ms.saturating_sub(now),
                "descriptor": advert.descriptor,
            })
        })
        .collect();
    json!({
        "model_id": model.model_id,
        "weights_sha256": model.weights,
        "total_layers": model.total,
        "missing_layers": model.missing,
        "complete": model.missing.is_empty(),
        "shards": shards,
    })
}

/// The size of the log.
struct Figures {
    durable: u64,
    ephemeral: u64,
    bytes: u64,
}

impl Figures {
    fn of(home: &Home) -> Self {
        let heads = home.log.heads();
        let size = |tail: &str| {
            let mut path = home.log.path().as_os_str().to_owned();
            path.push(tail);
            std::fs::metadata(path).map_or(0, |meta| meta.len())
        };
        Self {
            durable: heads.authors.values().map(|head| head.seq).sum(),
            ephemeral: heads
                .authors
                .values()
                .map(|head| head.slots.len() as u64)
                .sum(),
            bytes: size("") + size("-wal"),
        }
    }
}

fn health_name(health: &LogHealth) -> &'static str {
    match health {
        LogHealth::Ok => "ok",
        LogHealth::Damaged { .. } => "damaged",
        _ => "read_only",
    }
}

fn reason(health: &LogHealth) -> Option<String> {
    match health {
        LogHealth::Ok => None,
        LogHealth::ReadOnly { reason, .. } => Some(reason.clone()),
        LogHealth::Damaged { what, .. } => Some(what.clone()),
        _ => Some("unknown".to_owned()),
    }
}
