//! Background tasks of a node: accepting, linking, dialling, watching rights, advertising its
//! addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{
    Arrival, CloseCode, Code, ConnectError, Listener, PeerSocket, background, connect_path,
};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::access::{Use, grant_of};
use super::dialer::{Dialer, Target};
use super::shared::{Inner, Link, LinkInfo};
use crate::community::log::{ADVERT_LIFE_MS, Body, Community, EventLog, MAX_ENDPOINTS};
use crate::community::sync::{Progress, gossip, path_rule};
use crate::node::calls::BUS_PATH;
use crate::node::discovery::{Claims, Source};
use crate::node::flight;
use crate::node::weights::WEIGHTS_PATH;
use crate::{NodeId, NodeKey, now_ms};

/// Interval of housekeeping: addresses and time limits.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which a node advertises its addresses: well before the last advertisement expires.
const TELL_MS: u64 = ADVERT_LIFE_MS / 3;
/// Interval at which expired events are deleted.
const COMPACT_MS: u64 = 5 * 60_000;

pub(super) fn start(inner: &Arc<Inner>, listener: Option<Listener>, found: watch::Receiver<u64>) {
    if let Some(listener) = listener {
        inner.spawn(accept(Arc::clone(inner), listener));
    }
    inner.spawn_background(watch_rights(Arc::clone(inner)));
    inner.spawn(dial(Arc::clone(inner), found));
    inner.spawn(housekeeping(Arc::clone(inner)));
}

impl Inner {
    /// Runs a task until the node ends.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_on(task, &Handle::current());
    }

    /// Runs a task that other nodes can trigger, at lower priority than running chats.
    fn spawn_background(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_on(task, &background());
    }

    fn spawn_on(&self, task: impl Future<Output = ()> + Send + 'static, there: &Handle) {
        if let Some(tasks) = self.tasks.lock().as_mut() {
            while tasks.try_join_next().is_some() {}
            tasks.spawn_on(task, there);
        }
    }

    /// The set of members for a refusal with `code`, and its meaning. `None` if the code says
    /// nothing about this node's membership.
    fn refusals(&self, code: CloseCode) -> Option<(&Mutex<BTreeSet<NodeId>>, &'static str)> {
        match code {
            CloseCode::Revoked => Some((&self.revoked_by, "was revoked")),
            CloseCode::Unauthorized => Some((&self.unknown_to, "is no member")),
            _ => None,
        }
    }

    fn bump(&self) {
        self.changed.send_modify(|version| *version += 1);
    }

    pub(super) fn own_endpoints(&self) -> Vec<String> {
        let Some(listen) = self.listen else {
            return Vec::new();
        };
        if !self.settings.endpoints.is_empty() {
            return self.settings.endpoints.clone();
        }
        if !listen.ip().is_unspecified() {
            return vec![listen.to_string()];
        }
        let mut own = self.discovery.own_endpoints(listen.port());
        own.retain(|addr| listen.is_ipv6() || addr.is_ipv4());
        own.iter().map(SocketAddr::to_string).collect()
    }

    /// Keeps one of the two possible links with a peer, and runs gossip over it.
    pub(super) fn adopt(self: &Arc<Self>, socket: PeerSocket, dialled: bool) {
        let peer = socket.peer();
        if peer == self.id {
            return socket.close(CloseCode::Normal);
        }
        let by_lower = dialled == (self.id < peer);
        let (shown, progress) = watch::channel(Progress::default());
        {
            let mut links = self.links.lock();
            if let Some(old) = links.get(&peer).filter(|old| !old.closer.is_closed()) {
                if old.by_lower && !by_lower {
                    return socket.close(CloseCode::Normal);
                }
                old.closer.close(CloseCode::Normal);
            }
            let link = Link {
                by_lower,
                dialled,
                since_ms: now_ms(),
                closer: socket.closer(),
                progress: progress.clone(),
            };
            links.insert(peer, link);
        }
        let closer = socket.closer();
        self.connections.add(peer, Use::Sync, closer, dialled);
        self.revoked_by.lock().remove(&peer);
        self.unknown_to.lock().remove(&peer);
        self.bump();
        tracing::info!(peer = %peer.short(), dialled, "linked");
        flight::record(self.flight_diff.lock().connected(peer));

        let inner = Arc::clone(self);
        let (log, config) = (self.log.clone(), self.settings.sync.clone());
        let (own, accounts) = (self.id, self.accounts.clone());
        self.spawn_background(async move {
            let mut progress = progress;
            let mut running = std::pin::pin!(gossip(socket, own, log, config, accounts, shown));
            let mut was_in_sync = false;
            let closed = loop {
                tokio::select! {
                    closed = &mut running => break closed,
                    Ok(()) = progress.changed() => {
                        let in_sync = progress.borrow_and_update().in_sync;
                        if in_sync != was_in_sync {
                            was_in_sync = in_sync;
                            inner.bump();
                        }
                    }
                }
            };
            tracing::info!(peer = %peer.short(), code = %closed.code, by_us = closed.by_us,
                "link closed");
            flight::record(flight::Event::PeerLost {
                peer,
                code: closed.code.into(),
            });
            // A later link with the peer may have replaced this one.
            let mut links = inner.links.lock();
            links.retain(|_, link| !link.closer.is_closed());
            drop(links);
            inner.bump();
            inner.dial.notify_one();
        });
    }

    /// Receives events from the holder of the root key. This is not a link, since the root is not a
    /// member.
    fn accept_root_events(self: &Arc<Self>, socket: PeerSocket) {
        let (root, closer) = (socket.peer(), socket.closer());
        self.connections.add(root, Use::Sync, closer, false);
        let (own, log, config) = (self.id, self.log.clone(), self.settings.sync.clone());
        let (shown, _) = watch::channel(Progress::default());
        let accounts = self.accounts.clone();
        self.spawn_background(async move {
            let closed = gossip(socket, own, log, config, accounts, shown).await;
            tracing::info!(code = %closed.code, "session with the root key ended");
        });
    }

    /// Answers the requests of a peer for weights.
    fn serve_weights(&self, socket: PeerSocket) {
        let (peer, closer) = (socket.peer(), socket.closer());
        self.connections.add(peer, Use::Weights, closer, false);
        let party = self.log.state().answers_for(&peer);
        let weights = Arc::clone(&self.access.weights);
        self.spawn_background(async move {
            let closed = weights.attend(socket, party).await;
            tracing::debug!(peer = %peer.short(), %closed, "a transfer of weights ended");
        });
    }

    /// Runs work on the log on a blocking thread; `None` if it panicked.
    async fn on_log<T: Send + 'static>(
        &self,
        work: impl FnOnce(&EventLog, &NodeKey) -> T + Send + 'static,
    ) -> Option<T> {
        let (log, key) = (self.log.clone(), Arc::clone(&self.key));
        let done = tokio::task::spawn_blocking(move || work(&log, &key)).await;
        done.ok()
    }

    /// Records changes of the community in the flight record.
    fn record_changes(&self, state: &Community, now_ms: u64) {
        let events = self.flight_diff.lock().look(state, now_ms);
        events.into_iter().for_each(flight::record);
    }

    pub(super) fn open_links(&self) -> BTreeMap<NodeId, LinkInfo> {
        let links = self.links.lock();
        let open = links.iter().filter(|(_, link)| !link.closer.is_closed());
        let info = |link: &Link| LinkInfo {
            dialled: link.dialled,
            since_ms: link.since_ms,
            progress: *link.progress.borrow(),
        };
        open.map(|(node, link)| (*node, info(link))).collect()
    }

    fn linked(&self) -> BTreeSet<NodeId> {
        self.open_links().into_keys().collect()
    }

    /// Nodes that should be linked, with the time of each one's last announcement.
    fn wanted(&self) -> BTreeMap<Target, u64> {
        let state = self.log.state();
        let mut wanted = BTreeMap::new();
        for hint in self.discovery.found() {
            match hint.node {
                // Before the first sync no member is known. Any node that claims this community may
                // have its history, which proves itself.
                Some(node) if !state.is_created() || state.level(&node).is_some() => {
                    wanted.insert(Target::Node(node), hint.last_seen_ms);
                }
                Some(_) => {}
                None => {
                    let at = |endpoint| (Target::Address(endpoint), hint.last_seen_ms);
                    wanted.extend(hint.endpoints.into_iter().map(at));
                }
            }
        }
        wanted
    }
}

/// Dispatches connections from the listener.
async fn accept(inner: Arc<Inner>, mut listener: Listener) {
    loop {
        match listener.accept().await {
            Arrival::Session(session) => {
                let peer = session.peer();
                let grant = grant_of(session.token());
                let (what, closer) = (Use::Tensor(grant), session.closer());
                inner.connections.add(peer, what, closer, false);
                let sent = match inner.access.tensor.of(grant) {
                    Some(service) => service.sessions.try_send(session).map_err(|error| {
                        error.into_inner().close(CloseCode::SessionLimit);
                    }),
                    None => {
                        session.close(CloseCode::PurposeUnknown);
                        Err(())
                    }
                };
                if sent.is_err() {
                    tracing::debug!(peer = %peer.short(), "no shard host took a tensor session");
                }
            }
            Arrival::Peer(socket) if socket.path() == BUS_PATH => {
                let (peer, closer) = (socket.peer(), socket.closer());
                inner.connections.add(peer, Use::Bus, closer, false);
                let server = Arc::clone(&inner.server);
                inner.spawn(async move { server.serve(socket).await });
            }
            Arrival::Peer(socket) if socket.path() == WEIGHTS_PATH => inner.serve_weights(socket),
            Arrival::Peer(socket) if socket.peer() == inner.log.community().root() => {
                inner.accept_root_events(socket);
            }
            Arrival::Peer(socket) => inner.adopt(socket, false),
            _ => {}
        }
    }
}

/// After each change of the log, checks every connection again and updates the known addresses.
async fn watch_rights(inner: Arc<Inner>) {
    let mut changes = inner.log.changes();
    let mut was_member = false;
    loop {
        changes.mark_unchanged();
        let (state, now_ms) = (inner.log.state(), now_ms());
        inner.connections.check(now_ms);
        inner.record_changes(&state, now_ms);
        let members = state.members().map(|(node, _)| *node);
        inner.discovery.set_members(members);
        let (own, local) = (inner.own_endpoints(), inner.discovery.local());
        let claims = Claims::new(&state, &own, local, now_ms);
        // Include expired events: after an absence, a node that has just started has no other
        // signed addresses.
        for seen in state.nodes(0).filter(|seen| seen.node != inner.id) {
            let endpoints = seen.endpoints.iter();
            let signed: Vec<SocketAddr> = endpoints.filter_map(|text| text.parse().ok()).collect();
            let admitted = seen.endpoints.iter().filter_map(|text| claims.admit(text));
            let admitted: Vec<SocketAddr> = admitted.collect();
            inner.discovery.told(Source::Log, seen.node, &admitted);
            inner.discovery.signed(&seen.node, &signed);
        }
        inner.dial.notify_one();
        let is_member = state.level(&inner.id).is_some();
        if is_member && !was_member {
            inner.advertise.notify_one();
        }
        was_member = is_member;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Dials the wanted nodes that are not linked.
async fn dial(inner: Arc<Inner>, mut found: watch::Receiver<u64>) {
    let mut dialer = Dialer::new(inner.id);
    let (done, mut ended) = tokio::sync::mpsc::channel::<Target>(64);
    loop {
        for target in dialer.plan(now_ms(), &inner.wanted(), &inner.linked()) {
            let (task, done) = (Arc::clone(&inner), done.clone());
            inner.spawn(async move {
                connect(&task, target).await;
                let _ = done.send(target).await;
            });
        }
        let rest = dialer.next_ms().map_or(60_000, |next| {
            next.saturating_sub(now_ms()).clamp(50, 60_000)
        });
        tokio::select! {
            Some(target) = ended.recv() => {
                dialer.ended(target, now_ms(), jitter());
                if !matches!(target, Target::Node(node) if inner.linked().contains(&node)) {
                    // The node may have a new address.
                    inner.discovery.look_again();
                }
            }
            () = inner.dial.notified() => {}
            changed = found.changed() => {
                if changed.is_err() {
                    // Discovery has ended: keep its last results.
                    inner.dial.notified().await;
                }
            }
            () = tokio::time::sleep(Duration::from_millis(rest)) => {}
        }
    }
}

fn jitter() -> u64 {
    // Without randomness nodes may dial at the same time, which is harmless.
    getrandom::u64().unwrap_or(0)
}

/// Makes one attempt at a link.
async fn connect(inner: &Arc<Inner>, target: Target) {
    let rule = path_rule();
    let socket = match target {
        Target::Node(node) => match inner.reach(node, &rule).await {
            Ok(socket) => socket,
            Err(failed) => {
                let code = failed.first().and_then(|(_, error)| error.code());
                let code = code.map_or(Code::UNREACHABLE, Code::from);
                let event = inner.flight_diff.lock().unreachable(node, code);
                event.into_iter().for_each(flight::record);
                for code in failed.iter().filter_map(|(_, error)| error.code()) {
                    refused(inner, node, code);
                }
                return;
            }
        },
        Target::Address(endpoint) => {
            let (addr, config) = (endpoint.to_string(), &inner.settings.transport);
            match connect_path(&addr, &inner.identity, None, &rule, config).await {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::debug!(%endpoint, %error, "could not connect");
                    if let ConnectError::Refused { by, code } = error
                        && inner.log.state().level(&by).is_some()
                    {
                        refused(inner, by, code);
                    }
                    inner.discovery.failed(None, endpoint);
                    return;
                }
            }
        }
    };
    let peer = socket.peer();
    if let Target::Address(endpoint) = target {
        let state = inner.log.state();
        if peer == inner.id || (state.is_created() && state.level(&peer).is_none()) {
            return socket.close(CloseCode::Unauthorized);
        }
        inner.discovery.proved(peer, endpoint);
        if inner.linked().contains(&peer) {
            return socket.close(CloseCode::Normal);
        }
    }
    inner.adopt(socket, true);
}

/// Records that a member refuses this node as revoked or unknown. Logged once per member.
fn refused(inner: &Inner, by: NodeId, code: CloseCode) {
    let Some((said, what)) = inner.refusals(code) else {
        return;
    };
    if said.lock().insert(by) {
        tracing::info!(node = %by.short(), "a member refuses this node: it {what}");
        inner.bump();
    }
}

/// Advertises this node's addresses, applies events that are due, and deletes expired events.
async fn housekeeping(inner: Arc<Inner>) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut told: (u64, Vec<String>) = (0, Vec::new());
    // The clock may also be set back.
    let passed = |since: u64, now: u64, ms: u64| now.abs_diff(since) >= ms;
    let mut compacted_ms = now_ms();
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = inner.advertise.notified() => {}
        }
        let now_ms = now_ms();
        let state = inner.log.state();
        // Rights can also end with time: invites expire.
        inner.connections.check(now_ms);
        inner.record_changes(&state, now_ms);

        let tended = inner
            .on_log(move |log, key| log.maintain(key, now_ms))
            .await;
        if let Some(Err(error)) = tended {
            tracing::debug!(%error, "maintenance of the log failed");
        }

        let endpoints = inner.own_endpoints();
        let due = passed(told.0, now_ms, TELL_MS) || endpoints != told.1;
        if due && !endpoints.is_empty() && state.level(&inner.id).is_some() {
            let body = Body::NodeSeen {
                endpoints: endpoints.iter().take(MAX_ENDPOINTS).cloned().collect(),
                name: inner.settings.name.clone(),
                software: inner.settings.software.clone(),
            };
            match inner
                .on_log(move |log, key| log.append(key, body, now_ms))
                .await
            {
                Some(Ok(_)) => told = (now_ms, endpoints),
                // The next tick tries again.
                Some(Err(error)) => {
                    tracing::debug!(%error, "could not advertise this node's addresses");
                }
                None => {}
            }
        }
        if passed(compacted_ms, now_ms, COMPACT_MS) {
            compacted_ms = now_ms;
            let compacted = inner.on_log(move |log, _| log.compact(now_ms)).await;
            if let Some(Err(error)) = compacted {
                tracing::warn!(%error, "the log could not be compacted");
            }
        }
    }
}
