//! What a running node tells programs on this machine about itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use hearthnet_bus::calls::{CallError, Code, Kind as ParamKind, Params, Registry};
use hearthnet_bus::discovery::{MdnsHealth, Source};
use hearthnet_bus::node::{Node, WeakNode};
use hearthnet_bus::{Capability, NodeId};
use hearthnet_orchestrator::health::{ShardHealth, SharedHealth};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::settle::settle_in;
use crate::community::now_ms;
use crate::failure::Failure;
use crate::local_api::{self, NODE_STATUS, Offer};

/// What the program has told of itself, for whoever asks.
#[derive(Default)]
pub(crate) struct Told {
    /// The node, once it runs: it holds its capabilities, and they do not hold it.
    node: OnceLock<WeakNode>,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) serving: Serving,
    pub(super) url: Option<String>,
}

impl Told {
    pub(super) fn set_node(&self, node: WeakNode) {
        let _ = self.node.set(node);
    }
}

/// Whether a node serves layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Serving {
    /// Nobody has asked for it.
    #[default]
    No,
    /// This shard.
    Shard(String),
    /// It would, and cannot now, for this reason.
    Suspended(String),
}

/// What a running node tells of itself through its local API.
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
    /// Whether each host that advertises layers answers, by node id.
    #[serde(default)]
    pub(crate) hosts: BTreeMap<String, bool>,
    /// What its chats have seen of hosts.
    #[serde(default)]
    pub(crate) host_health: Vec<ShardHealth>,
    /// What it cannot touch any more.
    #[serde(default)]
    pub(crate) isolation: String,
    /// The members whose last event is dated so far ahead that it is not taken, and how far, in ms.
    #[serde(default)]
    pub(crate) dated_ahead: BTreeMap<String, u64>,
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

/// Makes the daemon tell of itself what it is told from now on, and what its chats see of hosts.
pub(super) fn offer(registry: &Registry, health: &SharedHealth) -> Result<Arc<Told>, Failure> {
    let told = Arc::new(Told::default());
    let (asked, health) = (Arc::clone(&told), health.clone());
    Offer {
        params: Params::none()
            .optional("hosts", ParamKind::Flag)
            .optional("settled", ParamKind::Flag),
        ..Offer::new(
            NODE_STATUS,
            "Tells programs on the node's own machine where it listens and whom it is linked with.",
            move |params, _| status(Arc::clone(&asked), health.clone(), params),
        )
    }
    .register(registry)?;
    Ok(told)
}

async fn status(told: Arc<Told>, health: SharedHealth, params: Value) -> Result<Value, CallError> {
    let node = told.node.get().and_then(WeakNode::upgrade);
    let node =
        node.ok_or_else(|| CallError::new(Code::BUSY, "the node is starting or stopping"))?;
    if params["settled"] == true {
        settle_in(&node).await;
    }
    let mut running = running(&node, &told.state.lock());
    let log = node.log().clone();
    let ahead = tokio::task::spawn_blocking(move || log.dated_ahead(now_ms())).await;
    let ahead = ahead
        .ok()
        .and_then(Result::ok)
        .unwrap_or_default()
        .into_iter();
    running.dated_ahead = ahead.map(|(node, ms)| (node.to_string(), ms)).collect();
    running.host_health = health.all();
    if params["hosts"] == true {
        running.hosts = hosts_that_answer(&node).await;
    }
    local_api::answer(&running)
}

/// How long a host may take to answer before it is called unreachable: many times what a busy one
/// takes on a LAN, and soon enough for somebody who looks.
const PROBE: Duration = Duration::from_millis(1500);

/// Whether each host that advertises layers answers now.
async fn hosts_that_answer(node: &Node) -> BTreeMap<String, bool> {
    let state = node.log().state();
    let hosts: BTreeSet<NodeId> = state.shards(now_ms()).map(|a| a.author).collect();
    let asked = hosts.into_iter().map(|host| async move {
        let answers = host == node.id() || answers(node, host).await;
        (host.to_string(), answers)
    });
    join_all(asked).await.into_iter().collect()
}

async fn answers(node: &Node, host: NodeId) -> bool {
    let describe = Capability::bus_describe();
    let params = json!({});
    let asked = async {
        let answer = match node.call(host, &describe, &params).await {
            Ok(stream) => stream.result().await,
            Err(error) => Err(error),
        };
        // Who refuses is there.
        !matches!(answer, Err(error) if *error.code() == Code::UNREACHABLE)
    };
    tokio::time::timeout(PROBE, asked).await.unwrap_or(false)
}

fn running(node: &Node, told: &State) -> Running {
    let hints = node.discovery().found();
    let found = |peer: &NodeId| {
        let of_peer = hints.iter().filter(|h| h.node.as_ref() == Some(peer));
        let how: BTreeSet<&str> = of_peer.map(|h| source_name(h.source)).collect();
        Vec::from_iter(how).join(", ")
    };
    let peers = node.peers().into_iter().map(|peer| Peer {
        node: peer.node.to_string(),
        endpoint: peer
            .endpoints
            .first()
            .map_or_else(String::new, ToString::to_string),
        connected: peer.link.is_some(),
        found: found(&peer.node),
    });
    let (serving, suspended) = match told.serving.clone() {
        Serving::No => (None, None),
        Serving::Shard(shard) => (Some(shard), None),
        Serving::Suspended(why) => (None, Some(why)),
    };
    Running {
        listen: node.listen_addr().map(|a| a.to_string()),
        mdns: mdns_name(node.discovery().health()).to_owned(),
        peers: peers.collect(),
        serving,
        suspended,
        url: told.url.clone(),
        hosts: BTreeMap::new(),
        host_health: Vec::new(),
        isolation: crate::isolation::stands().to_owned(),
        dated_ahead: BTreeMap::new(),
    }
}

fn source_name(source: Source) -> &'static str {
    match source {
        Source::Proved => "earlier",
        Source::Static => "static peer",
        Source::Log => "log",
        Source::Mdns => "mDNS",
    }
}

fn mdns_name(health: MdnsHealth) -> &'static str {
    match health {
        MdnsHealth::Off => "off",
        MdnsHealth::Running => "running",
        MdnsHealth::Flooded => "resting: the network is flooded",
        MdnsHealth::Silent => "silent: it does not answer",
        MdnsHealth::Failed => "failed to start",
        #[allow(unreachable_patterns, reason = "more may come")]
        _ => "unknown",
    }
}
