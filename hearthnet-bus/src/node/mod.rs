//! A node of a community: one listener for calls, gossip and tensors; a link to each member that
//! can be reached; and nobody connected who has no right to be.
//!
//! | concept | type | file |
//! |---|---|---|
//! | the node | [`Node`], [`NodeSettings`] | this file |
//! | who may use which path, and who may be asked, at first and later | [`TensorAcceptor`], [`Connections`] | `access.rs` |
//! | whom to dial when | | `dialer.rs` |
//! | accepting, linking, watching, telling | | `tasks.rs` |
//! | what the flight record is told | | `flight_diff.rs` |
//! | what a node can be asked to do | [`calls`] | `calls/` |
//! | how a stranger joins through it | [`joining`] | `joining/` |
//! | who may be where | [`discovery`] | `discovery/` |
//! | what happened of late | [`flight`] | `flight/` |
//! | reaching and calling nodes | [`Node::call`] | `reach.rs` |
//! | bringing what the root key has signed | [`Node::bring_as_root`] | `by_root.rs` |
//!
//! ```text
//!                        one TLS listener
//!   /bus/v1     calls     ── CallServer ── Registry (this node's capabilities)
//!   /sync/v1    gossip    ── one link per member, whoever dialled ── EventLog
//!   /tensor/v1  sessions  ── TensorAcceptor ── TensorSessions (a shard host)
//! ```
//!
//! # What always holds
//!
//! - Who may connect is read from the log when a connection is made, and again with every change of
//!   the log: connections of those who lost their right are closed with `revoked` or `unauthorized`.
//!   So are this node's own, with hosts that may not see its rows any more.
//! - A discovered address is a hint. What counts is the key that answers there.
//! - A stranger gets no further than asking to join, and that only while there is an invite.

mod access;
mod by_root;
pub mod calls;
mod dialer;
pub mod discovery;
pub mod flight;
mod flight_diff;
pub mod joining;
mod reach;
mod tasks;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use hearthnet_transport::{
    Admission, BindError, CloseCode, Closer, Code, Config, Connection, Hello, Identity,
    IdentityError, Listener, PATH, PathRule, connect_here,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

pub use access::{Connections, TensorAcceptor};

use crate::community::log::{EventLog, Level};
use crate::community::sync::{Accounts, Progress, SyncConfig};
use crate::node::calls::{BUS_PATH, CallServer, MAX_MESSAGE_BYTES, Registry};
use crate::node::discovery::{
    Announcement, CommunityTag, Discovery, DiscoveryError, DiscoverySettings,
};
use crate::now_ms;
use crate::{NodeId, NodeKey};
use access::{Access, TensorService, Use};
use flight_diff::FlightDiff;

/// Sessions that wait for the shard host; beyond them `session_limit`.
const WAITING_SESSIONS: usize = 16;

/// How a node is to run. [`NodeSettings::new`] fills in the defaults.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeSettings {
    /// Where to listen, `host:port`; port 0 picks a free one. `None`: no listener, for programs
    /// that ask and go.
    pub listen: Option<String>,
    /// What others are told to dial, `ADDR:PORT`. Empty: this machine's addresses.
    pub endpoints: Vec<String>,
    /// How to look for others. Which node and which community is filled in.
    pub discovery: DiscoverySettings,
    /// What is announced to the network: names of capabilities.
    pub caps: Vec<String>,
    /// What this node is called among members, at most 64 bytes.
    pub name: String,
    /// Name and version of the software.
    pub software: String,
    /// This machine's setting `policy.research.enable`.
    pub research: bool,
    /// Limits and deadlines of connections. The keep-alive is 10 s unless set otherwise: after 20 s
    /// of silence a neighbour is known to be gone.
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

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The address is taken or not this machine's, or a setting is out of its range.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// The node key makes no certificate.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// What is to be announced is not sound.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
}

impl NodeError {
    /// The stable code, for machines.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::Listen(_) => "listen",
            Self::Discovery(_) => "discovery",
            Self::Identity(_) => "internal",
        })
    }
}

/// A member, as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Node id of the member.
    pub node: NodeId,
    /// What the log says it may do.
    pub level: Option<Level>,
    /// The link, if there is one.
    pub link: Option<LinkInfo>,
    /// Where it may be, best first.
    pub endpoints: Vec<SocketAddr>,
}

/// A link to a member: gossip goes over it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkInfo {
    /// Whether this node dialled it.
    pub dialled: bool,
    /// Since when, in Unix milliseconds.
    pub since_ms: u64,
    /// What went over it, and whether both logs are even.
    pub progress: Progress,
}

/// A link that is up.
struct Link {
    serial: u64,
    /// Whether the node with the lower id dialled it: such a link wins over the other.
    by_lower: bool,
    dialled: bool,
    since_ms: u64,
    closer: Closer,
    progress: watch::Receiver<Progress>,
}

struct Inner {
    key: Arc<NodeKey>,
    id: NodeId,
    identity: Identity,
    log: EventLog,
    settings: NodeSettings,
    rights: Arc<Access>,
    server: Arc<CallServer>,
    discovery: Discovery,
    listen: Option<SocketAddr>,
    connections: Connections,
    links: Mutex<(u64, HashMap<NodeId, Link>)>,
    accounts: Accounts,
    flight_diff: Mutex<FlightDiff>,
    /// Members that refused this node because it was put out of the community.
    put_out_by: Mutex<BTreeSet<NodeId>>,
    /// Members to which this node was nobody when they were last asked.
    strange_to: Mutex<BTreeSet<NodeId>>,
    /// Grows when a link comes, goes or becomes even, or a member says that this node was put out.
    changed: watch::Sender<u64>,
    /// Somebody may have to be dialled.
    dial: Notify,
    /// This node has become a member: it says where it is without delay.
    tell: Notify,
    /// Everything that runs for this node.
    tasks: Mutex<Option<JoinSet<()>>>,
}

/// The rule of the path for calls, for listeners and for those who dial.
pub fn bus_rule() -> PathRule {
    PathRule::new(BUS_PATH, MAX_MESSAGE_BYTES)
        .with_text()
        .with_sockets(128, 8)
        .with_strangers(16)
}

/// A node at work. Clones are the same one; it ends when it is shut down, or with its last clone.
#[derive(Clone)]
pub struct Node {
    inner: Arc<Inner>,
    _owner: Arc<Owner>,
}

/// Ends the node when the last handle to it is dropped.
struct Owner(Arc<Inner>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.connections.close_all(CloseCode::Shutdown);
        drop(self.0.tasks.lock().take());
    }
}

impl Node {
    /// Starts a node: listens, if it is to, looks for others, and keeps a link to each member. The
    /// registry's capabilities are served to members.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn start(
        key: Arc<NodeKey>,
        log: EventLog,
        settings: NodeSettings,
        registry: Arc<Registry>,
    ) -> Result<Node, NodeError> {
        let (id, identity) = (key.id(), key.identity()?);
        let rights = Arc::new(Access {
            log: log.clone(),
            research: settings.research,
            tensor: RwLock::new(None),
        });
        let listener = match &settings.listen {
            None => None,
            Some(addr) => {
                let admission = Arc::clone(&rights) as Arc<dyn Admission>;
                let rules = [bus_rule(), crate::community::sync::path_rule()];
                let config = settings.transport.clone();
                Some(Listener::bind(addr, &identity, admission, config, &rules).await?)
            }
        };
        let listen = listener.as_ref().map(Listener::local_addr);
        let community = CommunityTag::of(log.community().as_bytes());
        let announcement = listen.map(|addr| Announcement {
            node: id,
            community,
            port: addr.port(),
            caps: settings.caps.clone(),
        });
        let discovery = DiscoverySettings {
            own: Some(id),
            community: Some(community),
            listen: listen.map(|addr| addr.ip()),
            ..settings.discovery.clone()
        };
        let (discovery, found) = Discovery::start(discovery, announcement)?;
        let server = CallServer::new(id, registry, Arc::clone(&rights) as _);
        let inner = Arc::new(Inner {
            connections: Connections::new(log.clone()),
            links: Mutex::default(),
            accounts: Accounts::new(&settings.sync),
            flight_diff: Mutex::default(),
            put_out_by: Mutex::default(),
            strange_to: Mutex::default(),
            changed: watch::Sender::new(0),
            dial: Notify::new(),
            tell: Notify::new(),
            tasks: Mutex::new(Some(JoinSet::new())),
            server: Arc::new(server),
            key,
            id,
            identity,
            log,
            settings,
            rights,
            discovery,
            listen,
        });
        tasks::start(&inner, listener, found);
        flight::record(flight::Event::NodeStarted {});
        if let Some(addr) = listen {
            tracing::info!(%addr, node = %id, "listening");
        }
        Ok(Node {
            _owner: Arc::new(Owner(Arc::clone(&inner))),
            inner,
        })
    }

    /// This node.
    pub fn id(&self) -> NodeId {
        self.inner.id
    }

    /// Where it listens, if it does.
    pub fn listen_addr(&self) -> Option<SocketAddr> {
        self.inner.listen
    }

    /// Where others can reach it, best first; empty without a listener.
    pub fn own_endpoints(&self) -> Vec<String> {
        self.inner.own_endpoints()
    }

    /// The community's log.
    pub fn log(&self) -> &EventLog {
        &self.inner.log
    }

    /// Its open connections, which end with the right to them.
    pub fn connections(&self) -> &Connections {
        &self.inner.connections
    }

    /// Who is where.
    pub fn discovery(&self) -> &Discovery {
        &self.inner.discovery
    }

    /// What answers this node's calls; also for a [`LocalApi`](crate::node::calls::LocalApi).
    pub fn call_server(&self) -> &Arc<CallServer> {
        &self.inner.server
    }

    /// All other members, and whoever is linked, by node id.
    pub fn peers(&self) -> Vec<PeerInfo> {
        let state = self.inner.log.state();
        let mut links: HashMap<NodeId, LinkInfo> = self
            .inner
            .links
            .lock()
            .1
            .iter()
            .filter(|(_, link)| !link.closer.is_closed())
            .map(|(node, link)| {
                let info = LinkInfo {
                    dialled: link.dialled,
                    since_ms: link.since_ms,
                    progress: *link.progress.borrow(),
                };
                (*node, info)
            })
            .collect();
        let mut nodes: Vec<NodeId> = state.members().map(|(node, _)| *node).collect();
        nodes.extend(links.keys());
        nodes.sort_unstable();
        nodes.dedup();
        nodes.retain(|node| *node != self.inner.id);
        nodes
            .into_iter()
            .map(|node| PeerInfo {
                node,
                level: state.level(&node),
                link: links.remove(&node),
                endpoints: self.inner.discovery.endpoints(&node),
            })
            .collect()
    }

    /// Members that refuse this node because its key counts no more: it was revoked, or frozen. The
    /// events that say so do not reach a node that nobody talks to any more. What a member says is
    /// not proved by that; an anchor could have made the event.
    pub fn refused_by(&self) -> Vec<NodeId> {
        self.inner.put_out_by.lock().iter().copied().collect()
    }

    /// A number that grows when a link comes, goes, or becomes even, and when a member says that
    /// this node was put out of the community.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// Resolves once there is a link, and every link is even: this node knows then what its
    /// neighbours know.
    pub async fn until_in_sync(&self) {
        let mut changes = self.changes();
        loop {
            let links: Vec<_> = self.peers().into_iter().filter_map(|p| p.link).collect();
            if !links.is_empty() && links.iter().all(|link| link.progress.in_sync) {
                return;
            }
            // The sender lives as long as this node.
            let _ = changes.changed().await;
        }
    }

    /// Members that took this node for a stranger when they were last asked: they have not heard that it
    /// was let in, or whoever let it in had no right to.
    pub fn strange_to(&self) -> Vec<NodeId> {
        self.inner.strange_to.lock().iter().copied().collect()
    }

    /// Whom a caller counts with where what one may have is limited: who
    /// [answers for it](crate::community::log::Community::answers_for). This node stands for itself.
    pub fn party(&self, node: &NodeId) -> NodeId {
        match *node == self.id() {
            true => *node,
            false => self.inner.log.state().answers_for(node),
        }
    }

    /// Serves tensor sessions from now on: those that `acceptor` lets in come out of what is returned.
    /// Replaces whoever served them before. Until then, and after what is returned was dropped,
    /// nobody gets any.
    pub fn serve_tensors(&self, acceptor: Arc<dyn TensorAcceptor>) -> TensorSessions {
        let (sender, sessions) = mpsc::channel(WAITING_SESSIONS);
        let service = TensorService {
            acceptor,
            sessions: sender,
        };
        let tensor = &self.inner.rights.tensor;
        let mut tensor = tensor.write();
        *tensor = Some(service);
        TensorSessions {
            sessions,
            rights: Arc::clone(&self.inner.rights),
        }
    }

    /// Opens a tensor session with whoever serves them at this very node, without a wire: what is
    /// asked of a member is asked of this node, and its right is watched like any other's.
    ///
    /// # Errors
    /// The code with which a member would be turned away.
    pub fn open_here(&self, hello: &Hello, config: &Config) -> Result<Connection, CloseCode> {
        let inner = &self.inner;
        let key = inner.id;
        inner.rights.admit_path(&key, PATH)?;
        inner.rights.admit_hello(&key, hello, now_ms() / 1000)?;
        let service = inner.rights.tensor().ok_or(CloseCode::PurposeUnknown)?;
        let (ours, theirs) = connect_here(key, hello, config, &inner.settings.transport);
        let what = Use::Tensor(access::grant_of(theirs.token()));
        let closer = theirs.closer();
        inner.connections.add(inner.id, what, closer, false);
        match service.sessions.try_send(theirs) {
            Ok(()) => Ok(ours),
            Err(_) => Err(CloseCode::SessionLimit),
        }
    }

    /// A handle that does not keep the node alive, for what the node itself holds.
    pub fn downgrade(&self) -> WeakNode {
        WeakNode {
            inner: Arc::downgrade(&self.inner),
            owner: Arc::downgrade(&self._owner),
        }
    }

    /// Limits and deadlines of this node's connections.
    pub fn transport(&self) -> &Config {
        &self.inner.settings.transport
    }

    /// Stops: says goodbye to the network, closes every connection with `shutdown`, ends every
    /// task. What was stored is stored.
    pub async fn shutdown(&self) {
        self.inner.discovery.shutdown().await;
        self.inner.connections.close_all(CloseCode::Shutdown);
        let tasks = self.inner.tasks.lock().take();
        if let Some(mut tasks) = tasks {
            tasks.shutdown().await;
        }
        // What was being connected meanwhile.
        self.inner.connections.close_all(CloseCode::Shutdown);
    }
}

/// A handle to a node that may have ended. See [`Node::downgrade`].
#[derive(Clone)]
pub struct WeakNode {
    inner: Weak<Inner>,
    owner: Weak<Owner>,
}

impl WeakNode {
    /// The node, unless its last handle is gone.
    pub fn upgrade(&self) -> Option<Node> {
        Some(Node {
            inner: self.inner.upgrade()?,
            _owner: self.owner.upgrade()?,
        })
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("id", &self.inner.id)
            .field("listen", &self.inner.listen)
            .field("connections", &self.inner.connections.count())
            .finish_non_exhaustive()
    }
}

/// The tensor sessions of a node, as they come.
pub struct TensorSessions {
    sessions: mpsc::Receiver<Connection>,
    rights: Arc<Access>,
}

impl TensorSessions {
    /// The next session; `None` when somebody else has taken over, or the node has ended.
    pub async fn next(&mut self) -> Option<Connection> {
        self.sessions.recv().await
    }
}

impl Drop for TensorSessions {
    fn drop(&mut self) {
        self.sessions.close();
        let tensor = &self.rights.tensor;
        let mut tensor = tensor.write();
        // Only this one's: it may have been replaced.
        tensor.take_if(|service| service.sessions.is_closed());
    }
}
