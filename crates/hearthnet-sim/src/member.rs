//! A member of the scene of logs: its process with event log and gossip, which may be killed and
//! started again.
//!
//! The code of logs and gossip is the product's. Every node admits every peer, so that nothing but
//! gossip itself keeps events from a revoked node.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use hearthnet_bus::log::{Body, Event, EventLog, Heads, Lane, Level, LogError};
use hearthnet_bus::sync::{Accounts, Clock, Progress, SyncConfig, gossip, path_rule};
use hearthnet_bus::testing::{self, Home, Open};
use hearthnet_bus::{NodeId, NodeKey, now_ms};
use hearthnet_testkit::{TempDir, memory_folder};
use hearthnet_transport::{Acceptor, Arrival, Config, PeerSocket, connect_path_over};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::net::{Net, Node};
use crate::observer::{Actor, Observer};

/// Number of members. The first two are anchors; the last one may be revoked.
pub(crate) const MEMBERS: usize = 4;
pub(crate) const REVOKED: Node = MEMBERS - 1;

/// A community that all runs begin with.
pub struct Founded {
    dir: TempDir,
    begin_ms: u64,
}

pub(crate) fn key(node: Node) -> NodeKey {
    testing::key(1 + node as u8)
}

impl Founded {
    /// # Panics
    /// If the log cannot be written: the simulation cannot begin.
    #[allow(clippy::expect_used)]
    pub fn new() -> Self {
        let founder = Home::founded(key(0), false);
        for member in 1..MEMBERS {
            founder.admit(key(member).id(), Level::Member);
        }
        let body = Body::LevelChanged {
            node: key(1).id(),
            level: Level::Anchor,
            last_seq: Some(0),
        };
        let root = testing::key(testing::ROOT);
        founder
            .log
            .append(&root, body, now_ms())
            .expect("a second anchor");
        let copy = memory_folder();
        for name in files(founder.path()) {
            fs::copy(founder.path().join(&name), copy.path().join(&name)).expect("a copy");
        }
        Self {
            dir: copy,
            begin_ms: now_ms() + 1_000,
        }
    }
}

impl Default for Founded {
    fn default() -> Self {
        Self::new()
    }
}

/// Names of the files in a folder.
fn files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// The observer's knowledge of the logs.
#[derive(Default)]
pub(crate) struct Known {
    /// Tag of each author's event by number: one history.
    pub(crate) history: BTreeMap<(NodeId, u64), u64>,
    /// Acknowledged durable events by author.
    pub(crate) written: BTreeMap<NodeId, BTreeSet<String>>,
    /// Members whose disks have lost acknowledged writes.
    pub(crate) forgetful: BTreeSet<NodeId>,
    /// Events whose authors knew of the revocation when they wrote them.
    pub(crate) secret: BTreeSet<String>,
    pub(crate) done: u32,
    pub(crate) failed: u32,
}

/// A member. Its process may be killed and started again.
pub(crate) struct Member {
    pub(crate) node: Node,
    pub(crate) actor: Actor,
    pub(crate) net: Net,
    pub(crate) known: Arc<Mutex<Known>>,
    dir: PathBuf,
    log: Mutex<Option<EventLog>>,
    tasks: Mutex<JoinSet<()>>,
    clock: Clock,
    /// Milliseconds that the clock is ahead.
    pub(crate) ahead_ms: Arc<AtomicI64>,
    /// Number of faults that fill the disk, and that let the process stand still.
    full: AtomicU32,
    paused: AtomicU32,
}

impl Member {
    pub(crate) fn new(
        node: Node,
        founded: &Founded,
        dir: PathBuf,
        net: &Net,
        observer: &Observer,
        known: &Arc<Mutex<Known>>,
    ) -> Self {
        let (begin, begin_ms) = (Instant::now(), founded.begin_ms);
        let ahead_ms = Arc::new(AtomicI64::new(0));
        let ahead = Arc::clone(&ahead_ms);
        let clock = move || {
            let now = begin_ms + begin.elapsed().as_millis() as u64;
            now.saturating_add_signed(ahead.load(Ordering::Relaxed))
        };
        let actor = observer.actor(format!("member {node}"));
        let copied = fs::create_dir_all(&dir).and_then(|()| {
            files(founded.dir.path()).iter().try_for_each(|name| {
                fs::copy(founded.dir.path().join(name), dir.join(name)).map(drop)
            })
        });
        actor.check(copied.is_ok(), || format!("no copy of the log: {copied:?}"));
        Self {
            node,
            actor,
            net: net.clone(),
            known: Arc::clone(known),
            dir,
            log: Mutex::default(),
            tasks: Mutex::new(JoinSet::new()),
            clock: Arc::new(clock),
            ahead_ms,
            full: AtomicU32::new(0),
            paused: AtomicU32::new(0),
        }
    }

    pub(crate) fn log(&self) -> Option<EventLog> {
        self.log.lock().clone()
    }

    /// Starts the process: opens the log, listens, and links with all others.
    pub(crate) fn start(&self) {
        let log = match EventLog::open(&self.dir) {
            Ok(log) => log,
            Err(error) => return self.actor.violated(format!("open: {error}")),
        };
        let recovered = log.recovery().map(|recovery| recovery.what.clone());
        self.actor
            .note(format!("starts, recovered: {}", recovered.is_some()));
        log.fill_disk(self.full.load(Ordering::Relaxed) > 0);
        *self.log.lock() = Some(log.clone());
        let config = sync_config();
        let accounts = Accounts::with_clock(&config, Arc::clone(&self.clock));
        let own = key(self.node).id();
        let talk = move |socket: PeerSocket| {
            let (log, config, accounts) = (log.clone(), config.clone(), accounts.clone());
            let (progress, _) = watch::channel(Progress::default());
            gossip(socket, own, log, config, accounts, progress)
        };
        let mut tasks = self.tasks.lock();
        for peer in 0..self.node {
            let (net, talk, node) = (self.net.clone(), talk.clone(), self.node);
            tasks.spawn(async move {
                loop {
                    if let Some(socket) = dial(&net, node, peer).await {
                        talk(socket).await;
                    }
                    sleep(Duration::from_millis(500)).await;
                }
            });
        }
        let (mut arrivals, node) = (self.net.listen(self.node), self.node);
        tasks.spawn(async move {
            let identity = key(node).identity();
            let rules = [path_rule()];
            let acceptor = identity
                .ok()
                .and_then(|it| Acceptor::new(&it, Arc::new(Open), Config::default(), &rules).ok());
            let Some(acceptor) = acceptor else { return };
            let mut sockets = JoinSet::new();
            while let Some(io) = arrivals.recv().await {
                while sockets.try_join_next().is_some() {}
                let (acceptor, talk) = (acceptor.clone(), talk.clone());
                sockets.spawn(async move {
                    if let Ok(Arrival::Peer(socket)) = acceptor.arrive(io).await {
                        talk(socket).await;
                    }
                });
            }
        });
    }

    /// Ends the process at once. Its files are left as they are at this moment: closing them would
    /// move the write-ahead log into the file. `damage` changes the write-ahead log.
    pub(crate) async fn kill(&self, damage: impl FnOnce(&mut Vec<u8>)) {
        self.net.kill(self.node);
        let mut kept: Vec<(PathBuf, Vec<u8>)> = files(&self.dir)
            .into_iter()
            .filter(|name| !name.ends_with("-shm"))
            .filter_map(|name| {
                let path = self.dir.join(name);
                fs::read(&path).ok().map(|bytes| (path, bytes))
            })
            .collect();
        if self.log.lock().take().is_none() {
            return;
        }
        self.actor.note("is killed");
        let mut tasks = std::mem::replace(&mut *self.tasks.lock(), JoinSet::new());
        tasks.shutdown().await;
        // Work that a task had begun ends now.
        sleep(Duration::from_millis(1)).await;
        for name in files(&self.dir) {
            if name.contains("sqlite-") {
                let _ = fs::remove_file(self.dir.join(name));
            }
        }
        let ahead = |path: &Path| path.to_string_lossy().ends_with("-wal");
        if let Some((_, bytes)) = kept.iter_mut().find(|(path, _)| ahead(path)) {
            damage(bytes);
        }
        for (path, bytes) in kept {
            let written = fs::write(&path, bytes);
            self.actor
                .check(written.is_ok(), || format!("restore: {written:?}"));
        }
    }

    /// A fault fills the disk (1), or ends (-1).
    pub(crate) fn fill_disk(&self, by: i32) {
        let full = count(&self.full, by);
        if let Some(log) = self.log() {
            log.fill_disk(full > 0);
        }
    }

    /// A fault lets the process stand still (1), or ends (-1).
    pub(crate) fn pause(&self, by: i32) {
        count(&self.paused, by);
    }

    /// The log of a process that does not stand still.
    fn awake(&self) -> Option<EventLog> {
        let is_awake = self.paused.load(Ordering::Relaxed) == 0;
        self.log().filter(|_| is_awake)
    }

    pub(crate) fn write(&self, body: Body) -> bool {
        let Some(log) = self.awake() else {
            return false;
        };
        let (own, durable) = (key(self.node), body.slot().is_none());
        let knows = log.state().is_revoked(&key(REVOKED).id());
        match log.append(&own, body, (self.clock)()) {
            Ok(id) => {
                let mut known = self.known.lock();
                known.done += 1;
                if durable {
                    let written = known.written.entry(own.id()).or_default();
                    written.insert(id.to_string());
                }
                if knows {
                    known.secret.insert(id.to_string());
                }
                true
            }
            Err(error) => {
                let mut known = self.known.lock();
                known.failed += 1;
                let is_fine = matches!(
                    error,
                    LogError::Clock { .. }
                        | LogError::Behind { .. }
                        | LogError::ReadOnly { .. }
                        | LogError::NoEffect(_)
                );
                self.actor.check(is_fine, || format!("append: {error}"));
                self.actor.note(format!("append: {}", error.code()));
                false
            }
        }
    }

    /// An action that the node of a member takes from time to time.
    pub(crate) fn upkeep(&self) {
        if let Some(log) = self.awake() {
            // An error is the disk's.
            let _ = log.maintain(&key(self.node), (self.clock)());
            self.write(Body::NodeSeen {
                endpoints: Vec::new(),
                name: self.actor.name.clone(),
                software: "sim".into(),
            });
        }
    }

    /// Compares the heads of the log with the one history of each author.
    pub(crate) fn check_heads(&self) -> Option<BTreeMap<NodeId, (u64, u64)>> {
        let heads = self.log()?.heads();
        let mut known = self.known.lock();
        let mut ends = BTreeMap::new();
        for (author, head) in heads.authors {
            let tag = *known.history.entry((author, head.seq)).or_insert(head.tip);
            self.actor.check(tag == head.tip, || {
                format!("event {} of an author is another one here", head.seq)
            });
            self.actor.check(head.fork.is_none(), || {
                format!("the history of {} forks", author.short())
            });
            if head.seq > 0 {
                ends.insert(author, (head.seq, head.tip));
            }
        }
        Some(ends)
    }

    /// Ids of all events in the log; durable ones only, if asked.
    pub(crate) fn events(&self, durable: bool) -> BTreeSet<String> {
        let Some(log) = self.log() else {
            return BTreeSet::new();
        };
        let all = log.missing(&Heads::empty(log.community()), usize::MAX, usize::MAX);
        let all = all.map(|batch| batch.events).unwrap_or_default();
        let events = all.iter().filter_map(|raw| Event::verify(raw).ok());
        let kept = events.filter(|event| !durable || matches!(event.lane, Lane::Durable { .. }));
        kept.map(|event| event.id.to_string()).collect()
    }
}

/// Adds to a number of faults, and returns the sum.
fn count(faults: &AtomicU32, by: i32) -> u32 {
    let now = faults.load(Ordering::Relaxed).saturating_add_signed(by);
    faults.store(now, Ordering::Relaxed);
    now
}

fn sync_config() -> SyncConfig {
    let mut config = SyncConfig::default();
    config.refresh_ms = 20_000;
    config.heads_gap_ms = 1_000;
    // Simulated minutes hold more comparisons than real ones.
    config.heads_per_minute = 600;
    config
}

async fn dial(net: &Net, from: Node, to: Node) -> Option<PeerSocket> {
    let io = net.connect(from, to).await.ok()?;
    let identity = key(from).identity().ok()?;
    let (expect, rule, config) = (Some(key(to).id()), path_rule(), Config::default());
    let socket = connect_path_over(io, "sim:1", &identity, expect, &rule, &config);
    socket.await.ok()
}
