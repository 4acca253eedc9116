//! Status of a running node, for local programs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use hearthnet_bus::calls::{CallError, Client, Code, Kind as ParamKind, Params, Registry};
use hearthnet_bus::discovery::{MdnsHealth, Source};
use hearthnet_bus::node::{Node, WeakNode};
use hearthnet_bus::{Capability, NodeId};
use hearthnet_http::{KeyUse, NamedKeys};
use hearthnet_orchestrator::health::{ShardHealth, SharedHealth};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::holdings::{self, Holdings, LayersIn};
use super::local_api::{CALL_TIMEOUT, NODE_STATUS, Offer, answer, ask_over, silent};
use super::sync::wait_until_synced;
use crate::cli::{Failure, note};
use crate::home::now_ms;

/// Status shared between the daemon and its capability.
#[derive(Default)]
pub(crate) struct SharedStatus {
    /// Weak, because the node holds its capabilities.
    pub(super) node: OnceLock<WeakNode>,
    /// Fields that the daemon sets: `serving`, `suspended`, `url`, `key_file`, `downloads`, `waiting`
    /// and `isolation`.
    pub(super) running: Mutex<Running>,
    /// Named keys of the HTTP interface.
    pub(super) keys: OnceLock<NamedKeys>,
    /// Counters of what the node gives.
    pub(super) gave: OnceLock<CountsGiven>,
    /// Layers in pieces of a model that this node knows.
    pub(super) layers_in: OnceLock<LayersIn>,
}

/// Returns what the node has given up to this moment.
pub(super) type CountsGiven = Box<dyn Fn() -> Option<SoFar> + Send + Sync>;

/// Tokens and minutes that a node has given to other members so far, by its own count. The node
/// announces them once a day (`node.gave`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SoFar {
    pub(crate) tokens: u64,
    pub(crate) minutes: u64,
    pub(crate) weights_bytes: u64,
}

/// Status of a running node, as its local API returns it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Running {
    pub(crate) listen: Option<String>,
    /// State of mDNS: `running`, `off`, or the problem.
    pub(crate) mdns: String,
    /// Peers that are linked or known.
    pub(crate) peers: Vec<Peer>,
    /// Ids of the shards that it serves, with `, ` between them.
    pub(crate) serving: Option<String>,
    /// Reason why requested layers are not served now.
    pub(crate) suspended: Option<String>,
    pub(crate) url: Option<String>,
    /// File with the key that clients of `url` must send.
    pub(crate) key_file: Option<String>,
    /// Use of the named keys of `url` since the node started.
    pub(crate) keys: Vec<KeyUse>,
    /// Whether each host that advertises layers, and each member with measurements, responds, by node
    /// id.
    pub(crate) hosts: BTreeMap<NodeId, bool>,
    /// Layers of the adopted models that linked members hold. Only if asked for.
    pub(crate) holdings: Option<Holdings>,
    /// Health of hosts as measured by its chats.
    pub(crate) host_health: Vec<ShardHealth>,
    /// Parts of the sandbox that are in force.
    pub(crate) isolation: String,
    /// Parts of models that are being fetched.
    pub(crate) downloads: Vec<Download>,
    /// Code of the error for which a model cannot be fetched at present, by the model's name.
    pub(crate) waiting: BTreeMap<String, String>,
    /// Contributions of this node to others up to this moment.
    pub(crate) gave: Option<SoFar>,
    /// Members whose last event is dated too far ahead to be accepted, and how far, in ms.
    pub(crate) dated_ahead: BTreeMap<NodeId, u64>,
}

/// Pieces of a model that are being fetched, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Download {
    pub(crate) name: String,
    pub(crate) done: u64,
    pub(crate) total: u64,
}

/// A download that `node.status` shows until this is dropped.
pub(crate) struct ShownDownload {
    pub(super) told: Arc<SharedStatus>,
    pub(super) name: String,
}

impl ShownDownload {
    pub(crate) fn set(&self, done: u64) {
        let mut running = self.told.running.lock();
        let shown = running.downloads.iter_mut().find(|it| it.name == self.name);
        if let Some(shown) = shown {
            shown.done = done;
        }
    }
}

impl Drop for ShownDownload {
    fn drop(&mut self) {
        let mut running = self.told.running.lock();
        running.downloads.retain(|it| it.name != self.name);
    }
}

/// Why a model cannot be fetched at present, which `node.status` shows until this is dropped.
pub(crate) struct ShownWait {
    pub(super) told: Arc<SharedStatus>,
    pub(super) model: String,
}

impl ShownWait {
    /// Shows the code of an error; `None` while the fetch goes on.
    pub(crate) fn set(&self, code: Option<&str>) {
        let mut running = self.told.running.lock();
        match code {
            Some(code) => running.waiting.insert(self.model.clone(), code.to_owned()),
            None => running.waiting.remove(&self.model),
        };
    }
}

impl Drop for ShownWait {
    fn drop(&mut self) {
        self.set(None);
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub(crate) node: NodeId,
    /// Address of the link, or the address to try.
    pub(crate) endpoint: String,
    pub(crate) connected: bool,
    /// Origin of its address: `mdns`, `static`, `log`, or `incoming`.
    pub(crate) found: String,
}

/// Registers the status call. The returned [`SharedStatus`] sets the parts that the daemon knows.
pub(super) fn offer(
    registry: &Registry,
    health: &SharedHealth,
    isolation: &'static str,
) -> Result<Arc<SharedStatus>, Failure> {
    let told = Arc::new(SharedStatus::default());
    told.running.lock().isolation = isolation.to_owned();
    let (asked, health) = (Arc::clone(&told), health.clone());
    Offer {
        params: Params::none()
            .optional("hosts", ParamKind::Flag)
            .optional("holdings", ParamKind::Flag)
            .optional("settled", ParamKind::Flag),
        ..Offer::new(
            NODE_STATUS,
            "Returns the node's addresses, links and state, for programs on the node's own machine.",
            move |params, _| status(Arc::clone(&asked), health.clone(), params),
        )
    }
    .register(registry)?;
    Ok(told)
}

impl Running {
    /// Asks the node that runs on `dir`. Returns `None` if no node runs, or if the call fails. Prints a
    /// warning if the node does not respond.
    pub(crate) async fn ask(dir: &Path, params: &Value) -> Option<Self> {
        let asking = async {
            let client = Client::connect_local(dir).await.ok()?;
            ask_over(&client, NODE_STATUS, params).await
        };
        match tokio::time::timeout(CALL_TIMEOUT, asking).await {
            Ok(answer) => answer,
            Err(_) => {
                note(format!("warning: {}", silent(dir)));
                None
            }
        }
    }
}

impl SharedStatus {
    /// Shows the HTTP interface: its URL, the file with its key, and its named keys. A process opens
    /// one listener.
    pub(crate) fn show_http(
        &self,
        url: Option<String>,
        key_file: Option<&Path>,
        keys: Option<&NamedKeys>,
    ) {
        let mut running = self.running.lock();
        running.url = url;
        running.key_file = key_file.and_then(Path::to_str).map(str::to_owned);
        if let Some(keys) = keys {
            let _ = self.keys.set(keys.clone());
        }
    }

    /// Status of a process without a node.
    pub(crate) fn without_node(&self) -> Running {
        Running {
            keys: self.keys.get().map(NamedKeys::uses).unwrap_or_default(),
            ..self.running.lock().clone()
        }
    }

    /// State of the node now, without asking hosts and without reading the log's file.
    pub(super) fn running_now(&self, node: &Node, health: &SharedHealth) -> Running {
        Running {
            listen: node.listen_addr().map(|a| a.to_string()),
            mdns: mdns_name(node.discovery().health()).to_owned(),
            peers: peers(node),
            host_health: health.all(),
            gave: self.gave.get().and_then(|so_far| so_far()),
            ..self.without_node()
        }
    }
}

async fn status(
    told: Arc<SharedStatus>,
    health: SharedHealth,
    params: Value,
) -> Result<Value, CallError> {
    let node = told.node.get().and_then(WeakNode::upgrade);
    let node =
        node.ok_or_else(|| CallError::new(Code::BUSY, "the node is starting or stopping"))?;
    if params["settled"] == true {
        wait_until_synced(&node).await;
    }
    let mut running = told.running_now(&node, &health);
    let log = node.log().clone();
    let ahead = tokio::task::spawn_blocking(move || log.dated_ahead(now_ms())).await;
    running.dated_ahead = ahead.ok().and_then(Result::ok).unwrap_or_default();
    if params["hosts"] == true {
        running.hosts = hosts_that_answer(&node).await;
    }
    if params["holdings"] == true
        && let Some(layers_in) = told.layers_in.get()
    {
        running.holdings = Some(holdings::of_members(&node, layers_in).await);
    }
    answer(&running)
}

/// Time after which a host is called unreachable: many times the response time of a busy host on a
/// LAN, and short enough for an interactive command.
const PROBE: Duration = Duration::from_millis(1500);

/// Probes every host that advertises layers, and every member on which plans count.
async fn hosts_that_answer(node: &Node) -> BTreeMap<NodeId, bool> {
    let (state, now) = (node.log().state(), now_ms());
    let mut hosts: BTreeSet<NodeId> = state.shards(now).map(|a| a.author).collect();
    hosts.extend(state.measured(now).map(|(member, _)| *member));
    let asked = hosts.into_iter().map(|host| async move {
        let answers = host == node.id() || answers(node, host).await;
        (host, answers)
    });
    join_all(asked).await.into_iter().collect()
}

async fn answers(node: &Node, host: NodeId) -> bool {
    let describe = Capability::bus_describe();
    let params = json!({});
    let asked = async { node.call(host, &describe, &params).await?.result().await };
    match tokio::time::timeout(PROBE, asked).await {
        // A refusal is a response, too.
        Ok(answer) => !matches!(answer, Err(error) if *error.code() == Code::UNREACHABLE),
        Err(_) => false,
    }
}

fn peers(node: &Node) -> Vec<Peer> {
    let hints = node.discovery().found();
    let found = |peer: &NodeId| {
        let of_peer = hints.iter().filter(|h| h.node.as_ref() == Some(peer));
        let how: BTreeSet<&str> = of_peer.map(|h| source_name(h.source)).collect();
        Vec::from_iter(how).join(", ")
    };
    let peers = node.peers().into_iter().map(|peer| Peer {
        node: peer.node,
        endpoint: peer
            .endpoints
            .first()
            .map_or_else(String::new, ToString::to_string),
        connected: peer.link.is_some(),
        found: found(&peer.node),
    });
    peers.collect()
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
