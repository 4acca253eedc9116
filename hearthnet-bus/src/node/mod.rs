//! A running node of a community: one listener for calls, gossip, weights and tensors, and a link to
//! each reachable member.
//!
//! | concept | type | file |
//! |---|---|---|
//! | the node | [`Node`] | this file |
//! | its settings; state that its handle and its tasks share | [`NodeSettings`] | `shared.rs` |
//! | access control, at the connection and after each change of the log | [`TensorAcceptor`], [`Connections`] | `access.rs` |
//! | choice and back-off of dials | | `dialer.rs` |
//! | accepting, linking, watching rights, advertising | | `tasks.rs` |
//! | changes for the flight record | | `flight_diff.rs` |
//! | capabilities and calls | [`calls`] | `calls/` |
//! | joining a community | [`joining`] | `joining/` |
//! | addresses of nodes | [`discovery`] | `discovery/` |
//! | recent events | [`flight`] | `flight/` |
//! | reaching and calling nodes | [`Node::call`] | `reach.rs` |
//! | transfer of weights | [`weights`] | `weights/` |
//! | delivering events signed by the root key | [`Node::push_root_events`] | `by_root.rs` |
//!
//! ```text
//!                        one TLS listener
//!   /bus/v1     calls     ── CallServer ── Registry (this node's capabilities)
//!   /sync/v1    gossip    ── one link per member, dialled by either side ── EventLog
//!   /weights/v1 weights   ── WeightsStore (files of models)
//!   /tensor/v1  sessions  ── TensorAcceptor ── TensorSessions (a shard host of each model)
//! ```
//!
//! # Invariants
//!
//! - The right to a connection is read from the log when the connection is made, and again after
//!   every change of the log. A connection whose peer lost its right is closed with `revoked` or
//!   `unauthorized`. This includes the node's own connections to hosts that may no longer see its
//!   rows.
//! - A discovered address is only a hint; the TLS handshake proves the key of the node there.
//! - A stranger can only call `community.join`, and only while an invite is open.

mod access;
mod by_root;
pub mod calls;
mod dialer;
pub mod discovery;
pub mod flight;
mod flight_diff;
pub mod joining;
mod reach;
mod shared;
mod tasks;
#[cfg(test)]
mod tests;
pub mod weights;
#[cfg(test)]
mod weights_tests;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use hearthnet_transport::{
    Admission, BindError, CloseCode, Code, Config, Connection, Hello, IdentityError, Listener,
    PATH, PathRule, connect_here,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

pub use access::{Connections, TensorAcceptor};
pub use reach::first_of;
pub use shared::{LinkInfo, NodeSettings};

use crate::community::log::{EventLog, Level};
use crate::community::sync::Accounts;
use crate::identity::receipt::Statement;
use crate::node::calls::{BUS_PATH, CallServer, MAX_MESSAGE_BYTES, Registry};
use crate::node::discovery::{
    Announcement, CommunityTag, Discovery, DiscoveryError, DiscoverySettings,
};
use crate::now_ms;
use crate::{NodeId, NodeKey, SIGNATURE_BYTES};
use access::{Access, TensorService, TensorServices, Use};
use shared::Inner;
use weights::{Busy, WeightsStore};

/// Accepted sessions that the shard host has not taken yet. Further ones get `session_limit`.
const WAITING_SESSIONS: usize = 16;

/// Cause of a failed start of a node.
#[derive(Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum NodeError {
    /// The address is in use or not this machine's, or a setting is out of its range.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// No certificate can be made from the node key.
    #[error(transparent)]
    #[strum(serialize = "internal")]
    Identity(#[from] IdentityError),
    /// The announcement is not valid.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
}

impl NodeError {
    /// Stable code for machines.
    pub fn code(&self) -> Code {
        Code::new(self.into())
    }
}

/// A member, as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    pub node: NodeId,
    /// Level according to the log; `None` for a node that is not a member.
    pub level: Option<Level>,
    pub link: Option<LinkInfo>,
    /// Known addresses, best first.
    pub endpoints: Vec<SocketAddr>,
}

/// Path rule for calls, used by listeners and callers.
pub fn bus_rule() -> PathRule {
    PathRule::new(BUS_PATH, MAX_MESSAGE_BYTES)
        .with_text()
        .with_sockets(128, 8)
        .with_strangers(16)
}

/// A running node. Clones share it. It ends at [`Node::shutdown`], or when the last clone is
/// dropped.
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
    /// Starts the listener if one is configured, discovery, and a link to each member. Members can
    /// call the capabilities of `registry`.
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
        let access = Arc::new(Access {
            log: log.clone(),
            research: settings.research,
            tensor: TensorServices::default(),
            weights: Arc::default(),
        });
        let listener = match &settings.listen {
            None => None,
            Some(addr) => {
                let admission = Arc::clone(&access) as Arc<dyn Admission>;
                let sync = crate::community::sync::path_rule();
                let rules = [bus_rule(), sync, weights::path_rule()];
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
        let server = CallServer::new(id, registry, Arc::clone(&access) as _);
        let inner = Arc::new(Inner {
            connections: Connections::new(log.clone()),
            links: Mutex::default(),
            accounts: Accounts::new(&settings.sync),
            flight_diff: Mutex::default(),
            revoked_by: Mutex::default(),
            unknown_to: Mutex::default(),
            changed: watch::Sender::new(0),
            dial: Notify::new(),
            advertise: Notify::new(),
            tasks: Mutex::new(Some(JoinSet::new())),
            server: Arc::new(server),
            key,
            id,
            identity,
            log,
            settings,
            access,
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

    pub fn id(&self) -> NodeId {
        self.inner.id
    }

    /// Bound address of the listener, if there is one.
    pub fn listen_addr(&self) -> Option<SocketAddr> {
        self.inner.listen
    }

    /// Addresses at which other nodes can reach this one, best first; empty without a listener.
    pub fn own_endpoints(&self) -> Vec<String> {
        self.inner.own_endpoints()
    }

    pub fn log(&self) -> &EventLog {
        &self.inner.log
    }

    /// Open connections; each is closed when the right to it ends.
    pub fn connections(&self) -> &Connections {
        &self.inner.connections
    }

    pub fn discovery(&self) -> &Discovery {
        &self.inner.discovery
    }

    /// Server for this node's calls, shared with a [`LocalApi`](crate::node::calls::LocalApi).
    pub fn call_server(&self) -> &Arc<CallServer> {
        &self.inner.server
    }

    /// All other members and all linked nodes, by node id.
    pub fn peers(&self) -> Vec<PeerInfo> {
        let (state, mut links) = (self.inner.log.state(), self.inner.open_links());
        let members = state.members().map(|(node, _)| *node);
        let mut nodes: BTreeSet<NodeId> = members.chain(links.keys().copied()).collect();
        nodes.remove(&self.inner.id);
        let peer = |node| PeerInfo {
            node,
            level: state.level(&node),
            link: links.remove(&node),
            endpoints: self.inner.discovery.endpoints(&node),
        };
        nodes.into_iter().map(peer).collect()
    }

    /// Members that refuse this node because its key was revoked or frozen. Only this refusal tells
    /// the node, since no peer sends it the event. The claim of a member is no proof: an anchor
    /// could have made the event.
    pub fn refused_by(&self) -> Vec<NodeId> {
        self.inner.revoked_by.lock().iter().copied().collect()
    }

    /// Counter that grows when a link starts, ends or gets in sync, and when a member first refuses
    /// this node.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// Resolves once there is at least one link and all links are in sync. The node then has every
    /// event that its linked members have.
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

    /// Members that refused this node with `unauthorized` when it last dialled them: they lack the
    /// event that admitted it, or its admission is not valid for them.
    pub fn unknown_to(&self) -> Vec<NodeId> {
        self.inner.unknown_to.lock().iter().copied().collect()
    }

    /// Quota key of a caller: itself, or the member that [answers for
    /// it](crate::community::log::Community::answers_for). This node is its own quota key.
    pub fn quota_key(&self, node: &NodeId) -> NodeId {
        match *node == self.id() {
            true => *node,
            false => self.inner.log.state().answers_for(node),
        }
    }

    /// Starts to serve tensor sessions for a host of `weights`. The returned receiver yields the
    /// sessions that `acceptor` admits, and replaces an earlier receiver of the same weights. With
    /// receivers of several weights, each gets the sessions whose grant was issued for its weights
    /// ([`Grant::of_host`](crate::Grant::of_host)). A session without a live receiver is refused
    /// with `purpose_unknown`.
    pub fn serve_tensors(
        &self,
        weights: [u8; 32],
        acceptor: Arc<dyn TensorAcceptor>,
    ) -> TensorSessions {
        let (sender, sessions) = mpsc::channel(WAITING_SESSIONS);
        self.inner.access.tensor.add(TensorService {
            weights,
            acceptor,
            sessions: sender,
        });
        TensorSessions {
            sessions,
            access: Arc::clone(&self.inner.access),
        }
    }

    /// Serves the weights in `store` to members, instead of an earlier store. Without a store they
    /// are refused with `purpose_unknown`. While `busy` is true, this node sends and requests
    /// weights at a limited pace, also with [`weights_of`](Self::weights_of).
    pub fn serve_weights(&self, store: Arc<dyn WeightsStore>, busy: Busy) {
        self.inner.access.weights.serve(store, busy);
    }

    /// Bytes of weights that this node has sent to members since its start.
    pub fn weights_sent(&self) -> u64 {
        self.inner.access.weights.sent()
    }

    /// Signs what the host of this node received and returned in a stream.
    pub fn sign_receipt(&self, statement: &Statement) -> [u8; SIGNATURE_BYTES] {
        statement.sign(&self.inner.key)
    }

    /// Opens a tensor session with the shard host of this same node, without a network connection.
    /// The same checks apply as for a member, now and after each change of the log.
    ///
    /// # Errors
    /// The code with which a member would be refused.
    pub fn open_here(&self, hello: &Hello, config: &Config) -> Result<Connection, CloseCode> {
        let inner = &self.inner;
        let key = inner.id;
        inner.access.admit_path(&key, PATH)?;
        inner.access.admit_hello(&key, hello, now_ms() / 1000)?;
        let grant = access::grant_of(&hello.token);
        let service = inner.access.tensor.of(grant);
        let service = service.ok_or(CloseCode::PurposeUnknown)?;
        let (ours, theirs) = connect_here(key, hello, config, &inner.settings.transport);
        let (what, closer) = (Use::Tensor(grant), theirs.closer());
        inner.connections.add(inner.id, what, closer, false);
        match service.sessions.try_send(theirs) {
            Ok(()) => Ok(ours),
            Err(_) => Err(CloseCode::SessionLimit),
        }
    }

    /// A weak handle, for components that the node itself owns.
    pub fn downgrade(&self) -> WeakNode {
        WeakNode {
            inner: Arc::downgrade(&self.inner),
            owner: Arc::downgrade(&self._owner),
        }
    }

    pub fn transport(&self) -> &Config {
        &self.inner.settings.transport
    }

    /// Announces the node's end to the network, closes every connection with `shutdown`, and ends
    /// every task. The log is already stored.
    pub async fn shutdown(&self) {
        self.inner.discovery.shutdown().await;
        self.inner.connections.close_all(CloseCode::Shutdown);
        let tasks = self.inner.tasks.lock().take();
        if let Some(mut tasks) = tasks {
            tasks.shutdown().await;
        }
        // Connections that were made during the shutdown.
        self.inner.connections.close_all(CloseCode::Shutdown);
    }
}

/// Weak handle to a node. See [`Node::downgrade`].
#[derive(Clone)]
pub struct WeakNode {
    inner: Weak<Inner>,
    owner: Weak<Owner>,
}

impl WeakNode {
    /// The node, or `None` if its last handle was dropped.
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

/// Receiver of a node's admitted tensor sessions.
pub struct TensorSessions {
    sessions: mpsc::Receiver<Connection>,
    access: Arc<Access>,
}

impl TensorSessions {
    /// The next session; `None` if another receiver has replaced this one, or the node has ended.
    pub async fn next(&mut self) -> Option<Connection> {
        self.sessions.recv().await
    }
}

impl Drop for TensorSessions {
    fn drop(&mut self) {
        self.sessions.close();
        // A later receiver may have replaced this one already, and stays.
        self.access.tensor.remove_ended();
    }
}
