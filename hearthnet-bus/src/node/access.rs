//! Who may use which path: asked when a connection is made, and again with every change of the
//! log for as long as it is open. That binds both directions: whoever asks this node, and the
//! hosts that this node asks.

use std::collections::HashMap;
use std::sync::Arc;

use hearthnet_transport::{
    Admission, CloseCode, Closer, Connection, Hello, PATH, RefusedConnection, SessionClosed,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc;

use crate::community::log::{Community, EventLog, Level, OpenInvite};
use crate::community::sync::SYNC_PATH;
use crate::node::calls::{Authority, BUS_PATH, Research, Trust};
use crate::node::flight;
use crate::now_ms;
use crate::{Grant, NodeId};

/// How long a peer that this node has dialled may stay unknown: until then the log that says who
/// it is may be on its way, from itself.
const UNKNOWN_MS: u64 = 60_000;

/// What a shard host decides about tensor sessions. Membership has been looked at before.
pub trait TensorAcceptor: Send + Sync {
    /// Whether a session may be opened. `now_unix` is in seconds.
    ///
    /// # Errors
    /// The code to close with: `purpose_unknown`, or one of the `token_` codes.
    fn admit_hello(&self, peer: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode>;

    /// A session has ended, or was refused, and why. For counting.
    fn session_ended(&self, _peer: &NodeId, _closed: &SessionClosed) {}
}

/// What a connection is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Bus,
    Sync,
    /// With the grant that the session stands on.
    Tensor(Option<(NodeId, [u8; 16])>),
    /// The same from the caller's side: the peer is to see this node's rows, or to say how it can.
    Host(Option<(NodeId, [u8; 16])>),
}

impl Use {
    fn of_path(path: &str) -> Option<Use> {
        match path {
            BUS_PATH => Some(Use::Bus),
            SYNC_PATH => Some(Use::Sync),
            PATH => Some(Use::Tensor(None)),
            _ => None,
        }
    }
}

/// Whether a peer may use a path, as the log is now.
pub(super) fn may_use(
    state: &Community,
    peer: &NodeId,
    what: Use,
    now_ms: u64,
) -> Result<(), CloseCode> {
    // It is no member: all that it may is to bring what it has signed (`sync/link.rs`).
    if *peer == state.id.root() {
        return match what {
            Use::Sync => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        };
    }
    // Frozen or revoked, its key counts no more. It has to be told: nobody will send it the events
    // that say so.
    if state.is_revoked(peer) || state.is_frozen(peer) {
        return Err(CloseCode::Revoked);
    }
    if state.level(peer).is_none() {
        // A stranger may ask to join, while there is an invite with which it could.
        let invited = || state.invites().any(|(_, invite)| is_open(invite, now_ms));
        return match what {
            Use::Bus if invited() => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        };
    }
    match what {
        Use::Bus | Use::Sync => Ok(()),
        // Whoever sees what others compute has to be trusted.
        Use::Host(_) if state.level(peer) < Some(Level::Trusted) => Err(CloseCode::Unauthorized),
        Use::Tensor(_) | Use::Host(_) if !state.policy.research => Err(CloseCode::Unauthorized),
        Use::Tensor(Some((issuer, id))) | Use::Host(Some((issuer, id)))
            if state.is_grant_revoked(&issuer, &id, now_ms) =>
        {
            Err(CloseCode::Revoked)
        }
        Use::Tensor(_) | Use::Host(_) => Ok(()),
    }
}

/// Whether somebody may still join with an invite.
pub(super) fn is_open(invite: &OpenInvite, now_ms: u64) -> bool {
    !invite.withdrawn && invite.used < invite.uses && invite.expires_ms > now_ms
}

/// Where tensor sessions go.
#[derive(Clone)]
pub(super) struct TensorService {
    pub(super) acceptor: Arc<dyn TensorAcceptor>,
    pub(super) sessions: mpsc::Sender<Connection>,
}

/// The community's rules, for the listener and for calls.
pub(super) struct Access {
    pub(super) log: EventLog,
    /// This machine's own setting.
    pub(super) research: bool,
    pub(super) tensor: RwLock<Option<TensorService>>,
}

impl Access {
    pub(super) fn tensor(&self) -> Option<TensorService> {
        self.tensor.read().clone()
    }

    fn may_use_path(&self, key: &NodeId, path: &str) -> Result<(), CloseCode> {
        let what = Use::of_path(path).ok_or(CloseCode::Unauthorized)?;
        may_use(&self.log.state(), key, what, now_ms())?;
        match what {
            Use::Tensor(_) if self.tensor().is_none() => Err(CloseCode::PurposeUnknown),
            _ => Ok(()),
        }
    }

    fn may_open(&self, key: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode> {
        let tensor = self.tensor().ok_or(CloseCode::PurposeUnknown)?;
        let what = Use::Tensor(grant_of(&hello.token));
        may_use(&self.log.state(), key, what, now_ms())?;
        tensor.acceptor.admit_hello(key, hello, now_unix)
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
            // Who was revoked gets to the upgrade, which tells it so.
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
        if let Some(tensor) = self.tensor() {
            tensor.acceptor.session_ended(key, closed);
        }
    }

    fn path_ended(&self, key: &NodeId, path: &str, closed: &SessionClosed) {
        tracing::debug!(peer = ?key, path, code = %closed.code, by_us = closed.by_us, "closed");
    }
}

impl Authority for Access {
    fn trust(&self, node: &NodeId) -> Trust {
        self.log.state().level(node).into()
    }

    fn research(&self) -> Research {
        match (self.research, self.log.state().policy.research) {
            (false, _) => Research::OffHere,
            (true, false) => Research::OffInCommunity,
            (true, true) => Research::On,
        }
    }

    fn answers_for(&self, node: &NodeId) -> NodeId {
        self.log.state().answers_for(node)
    }
}

/// The grant that a session with this token stands on.
pub(super) fn grant_of(token: &[u8]) -> Option<(NodeId, [u8; 16])> {
    // The session authoriser has checked, or will check, everything else about it.
    let grant = Grant::verify_signature(token).ok()?;
    Some((grant.issuer, grant.id))
}

/// One open connection.
struct Open {
    peer: NodeId,
    what: Use,
    closer: Closer,
    /// When this node dialled it; `None`: the peer did.
    dialled_ms: Option<u64>,
    was_member: bool,
}

/// Every open connection of a node, whoever made it: each is looked at again with every change of
/// the log, and closed when the right to it has ended. Clones are the same table.
#[derive(Clone)]
pub struct Connections {
    log: EventLog,
    open: Arc<Mutex<(u64, HashMap<u64, Open>)>>,
}

impl Connections {
    pub(super) fn new(log: EventLog) -> Connections {
        Connections {
            log,
            open: Arc::default(),
        }
    }

    /// A table of its own, for a program that asks hosts while another one is the node: looked
    /// at with every change of `log` until its last clone is dropped.
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

    /// Watches a connection to `host` over which this node is to send rows, or to be granted a
    /// session: from now on it lasts as long as the host is trusted, the community computes
    /// together, and the grant in `token`, if there is one already, holds. It is closed with
    /// `revoked` or `unauthorized`, at once if its right has ended while it was being made.
    pub fn watch_host(&self, host: NodeId, token: Option<&[u8]>, closer: Closer) {
        self.add(host, Use::Host(token.and_then(grant_of)), closer, false);
    }

    /// Watches a connection from now on, and closes it at once if the right to it was lost while
    /// it was being made.
    pub(super) fn add(&self, peer: NodeId, what: Use, closer: Closer, dialled: bool) {
        let now_ms = now_ms();
        let mut open = Open {
            peer,
            what,
            closer,
            dialled_ms: dialled.then_some(now_ms),
            was_member: false,
        };
        let mut guard = self.open.lock();
        let (serial, all) = &mut *guard;
        all.retain(|_, one| !one.closer.is_closed());
        // The state is read under the lock: a change after this finds the connection in the table.
        if open.check(&self.log.state(), now_ms) {
            *serial += 1;
            all.insert(*serial, open);
        }
    }

    /// Looks at every open connection again.
    pub(super) fn check(&self, now_ms: u64) {
        let state = self.log.state();
        self.open
            .lock()
            .1
            .retain(|_, open| !open.closer.is_closed() && open.check(&state, now_ms));
    }

    /// Closes everything.
    pub(super) fn close_all(&self, code: CloseCode) {
        for (_, open) in self.open.lock().1.drain() {
            open.closer.close(code);
        }
    }

    pub(super) fn count(&self) -> usize {
        let mut guard = self.open.lock();
        guard.1.retain(|_, open| !open.closer.is_closed());
        guard.1.len()
    }
}

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Connections").field(&self.count()).finish()
    }
}

impl Open {
    /// Closes the connection if its right is gone. `true`: it stays.
    fn check(&mut self, state: &Community, now_ms: u64) -> bool {
        let right = may_use(state, &self.peer, self.what, now_ms);
        let is_member = state.level(&self.peer).is_some();
        match right {
            Ok(()) => {
                self.was_member |= is_member;
                true
            }
            // A node that this one has chosen to dial: the log that makes it a member may only be
            // coming. Nothing is sent to it before (`sync/link.rs`).
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
