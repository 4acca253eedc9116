//! Access control of connections: checked when a connection is made, and again after every change
//! of the log while it is open. It covers both directions: peers that call this node, and hosts
//! that this node calls.

use std::sync::Arc;

use hearthnet_transport::{
    Admission, CloseCode, Closer, Connection, Hello, PATH, RefusedConnection, SessionClosed,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc;

use crate::community::log::{Community, EventLog, Level};
use crate::community::sync::SYNC_PATH;
use crate::node::calls::{Authority, BUS_PATH, Research};
use crate::node::flight;
use crate::node::weights::{WEIGHTS_PATH, Weights};
use crate::now_ms;
use crate::{Grant, NodeId};

/// Time for which a dialled peer may be unknown, in milliseconds: the event that makes it a member
/// may still have to come from that peer.
const UNKNOWN_MS: u64 = 60_000;

/// A shard host's decision about tensor sessions. The node checks membership before it.
pub trait TensorAcceptor: Send + Sync {
    /// Decides whether a session may be opened. `now_unix` is in seconds.
    ///
    /// # Errors
    /// The code to close with: `purpose_unknown`, or one of the `token_` codes.
    fn admit_hello(&self, peer: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode>;

    /// Called when a session has ended or was refused, for metrics.
    fn session_ended(&self, _peer: &NodeId, _closed: &SessionClosed) {}
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Bus,
    Sync,
    /// Transfer of weights, in either direction.
    Weights,
    /// A session of a caller, with the grant that authorises it.
    Tensor(Option<(NodeId, [u8; 16])>),
    /// A connection to a host that receives this node's rows or is asked for a grant.
    Host(Option<(NodeId, [u8; 16])>),
}

/// Checks the right of a peer to a connection against `state`.
pub(super) fn may_use(
    state: &Community,
    peer: &NodeId,
    what: Use,
    now_ms: u64,
) -> Result<(), CloseCode> {
    // The root key is not a member: it may only deliver events that it signed (`sync/link.rs`).
    if *peer == state.id.root() {
        return match what {
            Use::Sync => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        };
    }
    // The key is frozen or revoked. The refusal says so, because no peer sends that node the event.
    if state.is_revoked(peer) || state.is_frozen(peer) {
        return Err(CloseCode::Revoked);
    }
    if state.level(peer).is_none() {
        // A stranger may call `community.join` while an invite is open.
        let invited = || state.invites().any(|(_, invite)| invite.is_open(now_ms));
        return match what {
            Use::Bus if invited() => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        };
    }
    match what {
        Use::Bus | Use::Sync | Use::Weights => Ok(()),
        // A host sees the rows of others, so it has to be trusted.
        Use::Host(_)
            if state.level(peer) < Some(Level::Trusted)
                || state.reputation(peer).is_convicted() =>
        {
            Err(CloseCode::Unauthorized)
        }
        Use::Tensor(_) | Use::Host(_) if !state.policy.research => Err(CloseCode::Unauthorized),
        Use::Tensor(Some((issuer, id))) | Use::Host(Some((issuer, id)))
            if state.is_grant_revoked(&issuer, &id, now_ms) =>
        {
            Err(CloseCode::Revoked)
        }
        Use::Tensor(_) | Use::Host(_) => Ok(()),
    }
}

/// Acceptor and receiver of the tensor sessions of one host.
#[derive(Clone)]
pub(super) struct TensorService {
    /// Identity of the weights of which the host serves layers.
    pub(super) weights: [u8; 32],
    pub(super) acceptor: Arc<dyn TensorAcceptor>,
    pub(super) sessions: mpsc::Sender<Connection>,
}

/// Shard hosts of this node, at most one for each model.
#[derive(Default)]
pub(super) struct TensorServices(RwLock<Vec<TensorService>>);

impl TensorServices {
    /// Adds a host, or replaces the one of the same weights.
    pub(super) fn add(&self, service: TensorService) {
        let mut all = self.0.write();
        all.retain(|one| one.weights != service.weights);
        all.push(service);
    }

    /// Removes the hosts that take no more sessions.
    pub(super) fn remove_ended(&self) {
        self.0.write().retain(|one| !one.sessions.is_closed());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }

    /// Host that a session is for: the only one, else the one that the grant names. A session
    /// without a valid grant is for any host, which refuses it with a code of its own.
    pub(super) fn of(&self, grant: Option<(NodeId, [u8; 16])>) -> Option<TensorService> {
        let all = self.0.read();
        let mut hosts = all.iter();
        let host = match (grant, all.len()) {
            (Some((_, id)), 2..) => hosts.find(|one| Grant::is_for_host(&id, &one.weights)),
            _ => hosts.next(),
        };
        host.cloned()
    }
}

/// The community's rules for the listener and for calls.
pub(super) struct Access {
    pub(super) log: EventLog,
    /// This machine's setting `policy.research.enable`.
    pub(super) research: bool,
    pub(super) tensor: TensorServices,
    pub(super) weights: Arc<Weights>,
}

impl Access {
    fn may_use_path(&self, key: &NodeId, path: &str) -> Result<(), CloseCode> {
        let what = match path {
            BUS_PATH => Use::Bus,
            SYNC_PATH => Use::Sync,
            WEIGHTS_PATH => Use::Weights,
            PATH => Use::Tensor(None),
            _ => return Err(CloseCode::Unauthorized),
        };
        may_use(&self.log.state(), key, what, now_ms())?;
        match what {
            Use::Tensor(_) if self.tensor.is_empty() => Err(CloseCode::PurposeUnknown),
            Use::Weights if !self.weights.is_served() => Err(CloseCode::PurposeUnknown),
            _ => Ok(()),
        }
    }

    fn may_open(&self, key: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode> {
        let grant = grant_of(&hello.token);
        let host = self.tensor.of(grant).ok_or(CloseCode::PurposeUnknown)?;
        may_use(&self.log.state(), key, Use::Tensor(grant), now_ms())?;
        host.acceptor.admit_hello(key, hello, now_unix)
    }
}

impl Admission for Access {
    fn admit_peer(&self, key: &NodeId) -> bool {
        let state = self.log.state();
        let what = match *key == state.id.root() {
            true => Use::Sync,
            false => Use::Bus,
        };
        match may_use(&state, key, what, now_ms()) {
            // A revoked peer is admitted up to the upgrade, which tells it so.
            Ok(()) | Err(CloseCode::Revoked) => true,
            Err(code) => {
                flight::peer_refused(*key, code);
                false
            }
        }
    }

    fn belongs(&self, key: &NodeId) -> bool {
        self.log.state().level(key).is_some()
    }

    fn counts_with(&self, key: &NodeId) -> NodeId {
        self.log.state().answers_for(key)
    }

    fn admit_path(&self, key: &NodeId, path: &str) -> Result<(), CloseCode> {
        self.may_use_path(key, path)
            .inspect_err(|code| flight::peer_refused(*key, *code))
    }

    fn admit_hello(&self, key: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode> {
        self.may_open(key, hello, now_unix)
            .inspect_err(|code| flight::peer_refused(*key, *code))
    }

    fn connection_refused(&self, why: &RefusedConnection) {
        flight::connection_refused(why);
    }

    fn session_ended(&self, key: &NodeId, closed: &SessionClosed) {
        // The hosts of a process count together.
        if let Some(host) = self.tensor.of(None) {
            host.acceptor.session_ended(key, closed);
        }
    }

    fn path_ended(&self, key: &NodeId, path: &str, closed: &SessionClosed) {
        tracing::debug!(peer = ?key, path, code = %closed.code, by_us = closed.by_us, "closed");
    }
}

impl Authority for Access {
    fn level(&self, node: &NodeId) -> Option<Level> {
        self.log.state().level(node)
    }

    fn research(&self) -> Research {
        match (self.research, self.log.state().policy.research) {
            (false, _) => Research::OffHere,
            (true, false) => Research::OffInCommunity,
            (true, true) => Research::On,
        }
    }

    fn quota_key(&self, node: &NodeId) -> NodeId {
        self.log.state().answers_for(node)
    }
}

/// Grant of a session token, as issuer and id.
pub(super) fn grant_of(token: &[u8]) -> Option<(NodeId, [u8; 16])> {
    // The session authoriser checks everything else about the grant.
    let grant = Grant::verify_signature(token).ok()?;
    Some((grant.issuer, grant.id))
}

struct Open {
    peer: NodeId,
    what: Use,
    closer: Closer,
    /// Time at which this node dialled; `None` if the peer did.
    dialled_ms: Option<u64>,
    was_member: bool,
}

/// Table of a node's open connections, incoming and outgoing. After every change of the log each is
/// checked again, and closed if its right has ended. Clones share the table.
#[derive(Clone)]
pub struct Connections {
    log: EventLog,
    open: Arc<Mutex<Vec<Open>>>,
}

impl Connections {
    pub(super) fn new(log: EventLog) -> Connections {
        Connections {
            log,
            open: Arc::default(),
        }
    }

    /// A table for a program that calls hosts while another process is the node. It is checked
    /// after every change of `log` until its last clone is dropped.
    ///
    /// Must be called within a tokio runtime.
    pub fn watched(log: EventLog) -> Connections {
        let this = Connections::new(log);
        let (log, open) = (this.log.clone(), Arc::downgrade(&this.open));
        tokio::spawn(async move {
            let mut changes = log.changes();
            while changes.changed().await.is_ok() {
                let Some(open) = open.upgrade() else { return };
                let log = log.clone();
                Connections { log, open }.check(now_ms());
            }
        });
        this
    }

    /// Watches a connection to `host` over which this node sends rows or asks for a grant. It stays
    /// open while the host is trusted and not convicted, the policy allows research and the grant
    /// in `token`, if any, is valid. After that, or if the right is gone already, it is closed with
    /// `revoked` or `unauthorized`.
    pub fn watch_host(&self, host: NodeId, token: Option<&[u8]>, closer: Closer) {
        self.add(host, Use::Host(token.and_then(grant_of)), closer, false);
    }

    /// Watches a connection from now on. Closes it at once if its right was lost while it was being
    /// made.
    pub(super) fn add(&self, peer: NodeId, what: Use, closer: Closer, dialled: bool) {
        let now_ms = now_ms();
        let mut open = Open {
            peer,
            what,
            closer,
            dialled_ms: dialled.then_some(now_ms),
            was_member: false,
        };
        let mut all = self.open.lock();
        all.retain(|one| !one.closer.is_closed());
        // The state is read under the lock, so a later change finds the connection in the table.
        if open.check(&self.log.state(), now_ms) {
            all.push(open);
        }
    }

    /// Checks every open connection again.
    pub(super) fn check(&self, now_ms: u64) {
        let state = self.log.state();
        let mut all = self.open.lock();
        all.retain_mut(|open| !open.closer.is_closed() && open.check(&state, now_ms));
    }

    pub(super) fn close_all(&self, code: CloseCode) {
        for open in self.open.lock().drain(..) {
            open.closer.close(code);
        }
    }

    pub(super) fn count(&self) -> usize {
        let mut all = self.open.lock();
        all.retain(|open| !open.closer.is_closed());
        all.len()
    }
}

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Connections").field(&self.count()).finish()
    }
}

impl Open {
    /// Closes the connection if its right is gone. Returns true if it stays open.
    fn check(&mut self, state: &Community, now_ms: u64) -> bool {
        let right = may_use(state, &self.peer, self.what, now_ms);
        let is_member = state.level(&self.peer).is_some();
        match right {
            Ok(()) => {
                self.was_member |= is_member;
                true
            }
            // This node dialled the peer, and the log that makes it a member may still be on its
            // way. Nothing is sent to the peer before that (`sync/link.rs`).
            Err(CloseCode::Unauthorized)
                if !self.was_member
                    && self
                        .dialled_ms
                        .is_some_and(|at| now_ms < at.saturating_add(UNKNOWN_MS)) =>
            {
                true
            }
            Err(code) => {
                tracing::info!(peer = %self.peer.short(), %code, "closing a connection");
                self.closer.close(code);
                false
            }
        }
    }
}
