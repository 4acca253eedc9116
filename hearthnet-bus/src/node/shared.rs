//! State that the handle of a node and the node's tasks share: settings, parts, links.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use hearthnet_transport::{Closer, Config, Identity};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::access::{Access, Connections};
use super::flight_diff::FlightDiff;
use crate::community::log::EventLog;
use crate::community::sync::{Accounts, Progress, SyncConfig};
use crate::node::calls::CallServer;
use crate::node::discovery::{Discovery, DiscoverySettings};
use crate::{NodeId, NodeKey};

/// Settings of a node. [`NodeSettings::new`] fills in the defaults.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeSettings {
    /// Listen address, `host:port`; port 0 picks a free one. `None`: no listener, for short-lived
    /// client programs.
    pub listen: Option<String>,
    /// Addresses advertised to other nodes, `ADDR:PORT`. Empty: this machine's addresses.
    pub endpoints: Vec<String>,
    /// Discovery settings; [`Node::start`](super::Node::start) fills in the node and the community.
    pub discovery: DiscoverySettings,
    /// Names of capabilities that are announced to the network.
    pub caps: Vec<String>,
    /// This node's name in the community, at most 64 bytes.
    pub name: String,
    /// Name and version of the software.
    pub software: String,
    /// This machine's setting `policy.research.enable`.
    pub research: bool,
    /// Limits and deadlines of connections. The default keep-alive is 10 s: a silent peer counts as
    /// gone after 20 s.
    pub transport: Config,
    /// Limits of gossip.
    pub sync: SyncConfig,
}

impl NodeSettings {
    /// No listener, mDNS on, no static peers, experiments off.
    pub fn new(name: impl Into<String>) -> NodeSettings {
        NodeSettings {
            listen: None,
            endpoints: Vec::new(),
            discovery: DiscoverySettings::default(),
            caps: Vec::new(),
            name: name.into(),
            software: concat!("hearthnet ", env!("CARGO_PKG_VERSION")).to_owned(),
            research: false,
            transport: Config {
                keep_alive: std::time::Duration::from_secs(10),
                ..Config::default()
            },
            sync: SyncConfig::default(),
        }
    }
}

/// A gossip link to a member.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkInfo {
    /// True if this node dialled the link.
    pub dialled: bool,
    /// Time of the link's start, in Unix milliseconds.
    pub since_ms: u64,
    /// Transferred events, and whether both logs are in sync.
    pub progress: Progress,
}

/// An open link.
pub(super) struct Link {
    /// True if the node with the lower id dialled the link: of two links, that one is kept.
    pub(super) by_lower: bool,
    pub(super) dialled: bool,
    pub(super) since_ms: u64,
    pub(super) closer: Closer,
    pub(super) progress: watch::Receiver<Progress>,
}

pub(super) struct Inner {
    pub(super) key: Arc<NodeKey>,
    pub(super) id: NodeId,
    pub(super) identity: Identity,
    pub(super) log: EventLog,
    pub(super) settings: NodeSettings,
    pub(super) access: Arc<Access>,
    pub(super) server: Arc<CallServer>,
    pub(super) discovery: Discovery,
    pub(super) listen: Option<SocketAddr>,
    pub(super) connections: Connections,
    pub(super) links: Mutex<HashMap<NodeId, Link>>,
    pub(super) accounts: Accounts,
    pub(super) flight_diff: Mutex<FlightDiff>,
    /// Members that refused this node with `revoked`.
    pub(super) revoked_by: Mutex<BTreeSet<NodeId>>,
    /// Members that refused this node with `unauthorized` when it last dialled them.
    pub(super) unknown_to: Mutex<BTreeSet<NodeId>>,
    /// Incremented when a link starts, ends or gets in sync, or when a member first refuses this
    /// node.
    pub(super) changed: watch::Sender<u64>,
    /// Wakes the dial task.
    pub(super) dial: Notify,
    /// This node has become a member: advertise its addresses at once.
    pub(super) advertise: Notify,
    pub(super) tasks: Mutex<Option<JoinSet<()>>>,
}
