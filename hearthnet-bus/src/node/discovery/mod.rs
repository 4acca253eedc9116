//! Discovery of other nodes: mDNS on the local network, and static peers where multicast is
//! blocked.
//!
//! | concept | type | file |
//! |---|---|---|
//! | mDNS announcement of a node | [`Announcement`] | `announcement.rs` |
//! | configured peer | [`StaticPeer`] | `static_peer.rs` |
//! | addresses of this machine, distances | [`Local`] | `local.rs` |
//! | endpoints of one node | [`Hint`], [`Source`] | `entry.rs` |
//! | endpoints of all nodes | [`AddressBook`] | `book.rs` |
//! | the mDNS daemon and its guard | [`MdnsHealth`] | `mdns.rs` |
//! | its settings | [`DiscoverySettings`] | `settings.rs` |
//! | the running discovery | [`Discovery`] | this file |
//!
//! Normative for other implementations: `specs/discovery.md`.
//!
//! Discovery proves nothing. Any device on the network can announce any node id at any address;
//! only the TLS handshake proves the node. So a result is called a [`Hint`], the number of hints is
//! bounded, and a hint never displaces better knowledge.

mod announcement;
mod book;
mod entry;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod local;
mod mdns;
mod settings;
mod static_peer;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

pub use announcement::{
    Announcement, AnnouncementError, CommunityTag, Instance, MAX_CAP_CHARS, MAX_CAPS, SERVICE_TYPE,
    TXT_VERSION,
};
pub use book::{AddressBook, MAX_MEMBERS, MAX_STRANGERS, MAX_UNNAMED, vouched_first};
pub use entry::{Hint, MAX_PER_CLASS, MAX_PROVED, Source};
pub use local::{Claims, Distance, Local, LocalAddress};
pub use mdns::MdnsHealth;
pub use settings::{DiscoveryError, DiscoverySettings, MAX_STATIC_PEERS, MDNS_PORT};
pub use static_peer::{StaticPeer, StaticPeerError};

use crate::NodeId;
use crate::now_ms;
use mdns::{Event, Mdns};

/// Interval at which the daemon is checked, the book expires entries, and this machine's addresses
/// are read.
const TICK: Duration = Duration::from_secs(1);
/// Interval of queries. mDNS hints are valid for ten minutes.
const ASK_AGAIN: Duration = Duration::from_secs(4 * 60);
/// Delays of repeated announcements and queries after the start or a change of addresses. Packets
/// may get lost while a link comes up: a switch with spanning tree forwards none for up to 30 s. The
/// daemon also stays silent on an interface where its announcement failed, until the next one.
const AGAIN_AFTER: [Duration; 4] = [
    Duration::from_secs(3),
    Duration::from_secs(8),
    Duration::from_secs(20),
    Duration::from_secs(45),
];
/// Minimum interval of queries by [`Discovery::look_again`].
const ASK_AT_MOST: Duration = Duration::from_secs(2);
/// Interval at which the names of static peers are looked up.
const LOOK_UP: Duration = Duration::from_secs(60);
/// Time limit of one look-up.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(5);
/// First pause after a flood or a failure; doubled each time, up to [`LONGEST_REST`].
const FIRST_REST: Duration = Duration::from_secs(5);
const LONGEST_REST: Duration = Duration::from_secs(60);
/// After this long without trouble the next pause is the first one again.
const CALM: Duration = Duration::from_secs(10 * 60);

/// Counters since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Announcements of other communities.
    pub foreign: u64,
    /// Invalid announcements, by their first problem.
    pub refused: BTreeMap<AnnouncementError, u64>,
    /// Restarts of the daemon because of floods.
    pub floods: u64,
}

enum Order {
    LookAgain,
    Stop(oneshot::Sender<()>),
}

struct Shared {
    book: Mutex<AddressBook>,
    counts: Mutex<Counts>,
    health: Mutex<MdnsHealth>,
    changed: watch::Sender<u64>,
}

/// Running discovery. Clones share it. It ends at [`Discovery::shutdown`], or when the last clone
/// is dropped.
#[derive(Clone)]
pub struct Discovery {
    shared: Arc<Shared>,
    orders: mpsc::Sender<Order>,
}

impl Discovery {
    /// Starts discovery, and announces the node if `announcement` is given. The receiver's value
    /// increases with every change of the results.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError::Announcement`] if the announcement is not valid. If mDNS does not work on
    /// this machine, discovery starts without it, static peers are still found, and
    /// [`Discovery::health`] returns [`MdnsHealth::Failed`].
    pub fn start(
        settings: DiscoverySettings,
        announcement: Option<Announcement>,
    ) -> Result<(Self, watch::Receiver<u64>), DiscoveryError> {
        if let Some(announcement) = &announcement {
            announcement.to_txt()?;
        }
        let (changed, changes) = watch::channel(0);
        let (orders, inbox) = mpsc::channel(16);
        let shared = Arc::new(Shared {
            book: Mutex::new(AddressBook::new(settings.own)),
            counts: Mutex::default(),
            health: Mutex::new(MdnsHealth::Off),
            changed,
        });
        shared.book().set_local(Local::read(&settings.interfaces));
        let shell = Shell {
            settings,
            announcement,
            shared: Arc::clone(&shared),
            mdns: None,
            asked: Instant::now(),
            moved: Instant::now(),
            said_again: 0,
            rest: FIRST_REST,
            rest_until: None,
            trouble: None,
        };
        tokio::spawn(shell.run(inbox));
        Ok((Self { shared, orders }, changes))
    }

    /// All current hints.
    pub fn found(&self) -> Vec<Hint> {
        self.shared.book().hints(now_ms())
    }

    /// Endpoints of `node`, best first.
    pub fn endpoints(&self, node: &NodeId) -> Vec<SocketAddr> {
        self.shared.book().endpoints(node, now_ms())
    }

    /// See [`AddressBook::endpoints_by_source`].
    pub fn endpoints_by_source(&self, node: &NodeId) -> Vec<(Source, SocketAddr)> {
        self.shared.book().endpoints_by_source(node, now_ms())
    }

    /// Endpoints to dial now for `node`, best first, without addresses that only the node claims
    /// and that failed recently. They count as dialled.
    pub(crate) fn dialable(&self, node: &NodeId) -> Vec<SocketAddr> {
        self.shared.book().dialable(node, now_ms())
    }

    pub(crate) fn local(&self) -> Local {
        self.shared.book().local().clone()
    }

    /// Endpoints of a listener of this machine on `port`, for invite codes and `node.seen` events.
    pub fn own_endpoints(&self, port: u16) -> Vec<SocketAddr> {
        self.shared.book().local().endpoints(port)
    }

    /// See [`AddressBook::set_members`].
    pub(crate) fn set_members(&self, members: impl IntoIterator<Item = NodeId>) {
        self.shared.book().set_members(members, now_ms());
    }

    /// See [`AddressBook::told`].
    pub fn told(&self, source: Source, node: NodeId, endpoints: &[SocketAddr]) {
        self.shared.told(source, node, endpoints);
    }

    /// See [`AddressBook::signed`].
    pub(crate) fn signed(&self, node: &NodeId, endpoints: &[SocketAddr]) {
        self.shared.book().signed(node, endpoints, now_ms());
    }

    /// See [`AddressBook::proved`].
    pub fn proved(&self, node: NodeId, endpoint: SocketAddr) {
        self.shared.book().proved(node, endpoint, now_ms());
    }

    /// See [`AddressBook::failed`].
    pub fn failed(&self, node: Option<&NodeId>, endpoint: SocketAddr) {
        self.shared.book().failed(node, endpoint);
    }

    /// Queries the network soon, because a node is missing. At most once in 2 s.
    pub fn look_again(&self) {
        // A full inbox contains this order already, or is about to be read.
        let _ = self.orders.try_send(Order::LookAgain);
    }

    /// State of mDNS.
    pub fn health(&self) -> MdnsHealth {
        *self.shared.health.lock()
    }

    /// Counters since the start.
    pub fn counts(&self) -> Counts {
        self.shared.counts.lock().clone()
    }

    /// Sends the goodbye and stops. The results stay readable.
    pub async fn shutdown(&self) {
        let (answer, done) = oneshot::channel();
        if self.orders.send(Order::Stop(answer)).await.is_ok() {
            let _ = done.await;
        }
    }
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, AddressBook> {
        self.book.lock()
    }

    fn bump(&self) {
        self.changed.send_modify(|version| *version += 1);
    }

    fn told(&self, source: Source, node: NodeId, endpoints: &[SocketAddr]) {
        if self.book().told(source, node, endpoints, now_ms()) {
            self.bump();
        }
    }
}

/// Task of a [`Discovery`].
struct Shell {
    settings: DiscoverySettings,
    announcement: Option<Announcement>,
    shared: Arc<Shared>,
    mdns: Option<Mdns>,
    /// Time of the last query.
    asked: Instant,
    /// Time of the daemon's start, or of the last change of this machine's addresses.
    moved: Instant,
    /// Number of delays of [`AGAIN_AFTER`] that have passed since.
    said_again: usize,
    /// Length of the next pause.
    rest: Duration,
    /// End of the current pause.
    rest_until: Option<Instant>,
    /// Start of the last pause.
    trouble: Option<Instant>,
}

impl Shell {
    async fn run(mut self, mut inbox: mpsc::Receiver<Order>) {
        // Dropping the set ends the look-ups.
        let mut looking = JoinSet::new();
        looking.spawn(look_up_static_peers(
            Arc::clone(&self.shared),
            self.settings.clone(),
        ));
        self.start_mdns();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let stopped = loop {
            let event = async {
                match &self.mdns {
                    Some(mdns) => mdns.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                order = inbox.recv() => match order {
                    None => break None,
                    Some(Order::Stop(answer)) => break Some(answer),
                    Some(Order::LookAgain) => {
                        if self.asked.elapsed() >= ASK_AT_MOST {
                            self.ask_again();
                        }
                    }
                },
                event = event => self.take(event),
                _ = tick.tick() => self.tick().await,
            }
        };
        if let Some(mdns) = self.mdns.take() {
            mdns.shut_down().await;
        }
        *self.shared.health.lock() = MdnsHealth::Off;
        if let Some(answer) = stopped {
            let _ = answer.send(());
        }
    }

    fn start_mdns(&mut self) {
        if !self.settings.mdns {
            return;
        }
        self.rest_until = None;
        self.asked = Instant::now();
        self.has_moved();
        match Mdns::start(&self.settings, self.announcement.as_ref()) {
            Ok(mdns) => {
                self.mdns = Some(mdns);
                *self.shared.health.lock() = MdnsHealth::Running;
            }
            Err(error) => {
                tracing::warn!(%error, "mDNS");
                self.take_a_rest(MdnsHealth::Failed);
            }
        }
    }

    /// Drops the daemon; another one is started after a pause.
    fn take_a_rest(&mut self, why: MdnsHealth) {
        let now = Instant::now();
        if self
            .trouble
            .is_none_or(|last| now.duration_since(last) > CALM)
        {
            self.rest = FIRST_REST;
        }
        self.trouble = Some(now);
        self.rest_until = Some(now + self.rest);
        self.rest = (self.rest * 2).min(LONGEST_REST);
        self.mdns = None;
        *self.shared.health.lock() = why;
    }

    fn has_moved(&mut self) {
        self.moved = Instant::now();
        self.said_again = 0;
    }

    /// Repeats the announcement and the query if a delay of [`AGAIN_AFTER`] has passed.
    fn say_again(&mut self) {
        let due = AGAIN_AFTER.get(self.said_again);
        if due.is_none_or(|after| self.moved.elapsed() < *after) {
            return;
        }
        self.said_again += 1;
        if let (Some(mdns), Some(announcement)) = (&mut self.mdns, &self.announcement)
            && let Err(error) = mdns.announce(announcement, self.settings.listen)
        {
            tracing::debug!(%error, "mDNS");
        }
        self.ask_again();
    }

    fn ask_again(&mut self) {
        self.asked = Instant::now();
        if let Some(Err(error)) = self.mdns.as_mut().map(Mdns::ask_again) {
            tracing::debug!(%error, "mDNS");
        }
    }

    /// Processes an event of the daemon.
    fn take(&mut self, event: Event) {
        match event {
            Event::Ended => {
                // Too many events at once. A new query repeats what is left in the cache.
                if self.asked.elapsed() >= ASK_AT_MOST {
                    self.ask_again();
                } else {
                    self.take_a_rest(MdnsHealth::Flooded);
                    self.shared.counts.lock().floods += 1;
                }
            }
            Event::Removed(name) => {
                if Instance::from_full_name(&name)
                    .is_some_and(|instance| self.shared.book().gone(&instance))
                {
                    self.shared.bump();
                }
            }
            Event::Resolved(service) => {
                let mut book = self.shared.book();
                let read = mdns::read(&service, book.local());
                let mut counts = self.shared.counts.lock();
                match read {
                    Err(fault) => *counts.refused.entry(fault).or_default() += 1,
                    Ok((said, _))
                        if self
                            .settings
                            .community
                            .is_some_and(|own| own != said.community) =>
                    {
                        counts.foreign += 1;
                    }
                    Ok((said, endpoints)) => {
                        let changed = book.heard(&said, &endpoints, now_ms());
                        drop((book, counts));
                        if changed {
                            self.shared.bump();
                        }
                    }
                }
            }
        }
    }

    async fn tick(&mut self) {
        let local = Local::read(&self.settings.interfaces);
        let (moved, expired) = {
            let mut book = self.shared.book();
            let moved = *book.local() != local;
            if moved {
                book.set_local(local);
            }
            (moved, book.expire(now_ms()))
        };
        if moved {
            self.has_moved();
        }
        if moved || expired {
            self.shared.bump();
        }
        if self.rest_until.is_some_and(|until| Instant::now() >= until) {
            self.start_mdns();
        }
        let Some(mdns) = &self.mdns else { return };
        match mdns.check().await {
            MdnsHealth::Flooded => {
                self.shared.counts.lock().floods += 1;
                tracing::warn!("the local network is flooded with mDNS; resting");
                self.take_a_rest(MdnsHealth::Flooded);
            }
            health => {
                *self.shared.health.lock() = health;
                self.say_again();
                if self.asked.elapsed() >= ASK_AGAIN {
                    self.ask_again();
                }
            }
        }
    }
}

/// Keeps the endpoints of static peers in the book current.
async fn look_up_static_peers(shared: Arc<Shared>, settings: DiscoverySettings) {
    while !settings.static_peers.is_empty() {
        let local = Local::read(&settings.interfaces);
        let mut unnamed = Vec::new();
        for peer in settings.static_peers.iter().take(MAX_STATIC_PEERS) {
            let endpoints: Vec<SocketAddr> = match peer.address(&local) {
                Ok(address) => address.into_iter().collect(),
                Err(name) => look_up(name).await,
            };
            match peer.node() {
                Some(node) => shared.told(Source::Static, node, &endpoints),
                None => unnamed.extend(endpoints),
            }
        }
        if shared.book().set_unnamed(unnamed, now_ms()) {
            shared.bump();
        }
        tokio::time::sleep(LOOK_UP).await;
    }
}

async fn look_up((name, port): (&str, u16)) -> Vec<SocketAddr> {
    match tokio::time::timeout(LOOK_UP_LIMIT, tokio::net::lookup_host((name, port))).await {
        Ok(Ok(found)) => found.take(MAX_PER_CLASS).collect(),
        _ => Vec::new(),
    }
}
