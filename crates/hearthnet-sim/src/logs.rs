//! The scene of logs: four members with their event logs on disk, and gossip between all of them.
//!
//! The code of logs and gossip is the product's. Every node admits every peer, so that nothing but
//! gossip itself keeps events from a revoked node.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use hearthnet_bus::log::{Body, Event, EventLog, Heads, Lane, Level, LogError};
use hearthnet_bus::sync::{Accounts, Clock, Progress, SyncConfig, gossip, path_rule};
use hearthnet_bus::testing::{self, Home, Open};
use hearthnet_bus::{NodeId, NodeKey, now_ms};
use hearthnet_testkit::{TempDir, memory_folder};
use hearthnet_transport::{Acceptor, Arrival, Config, PeerSocket, connect_path_over};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};

use crate::faults::{Fault, Scene, Schedule};
use crate::net::{Net, Node};
use crate::observer::{Observer, Report};
use crate::random::Random;
use crate::run::in_virtual_time;

/// Number of members. The first two are anchors; the last one may be revoked.
const MEMBERS: usize = 4;
const REVOKED: Node = MEMBERS - 1;
/// Virtual time within which all logs are equal after the end of all faults.
const CONVERGE_WITHIN: Duration = Duration::from_secs(300);
/// Time in which members write.
const WRITING: Duration = Duration::from_millis(4_500);

/// A fault of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The process dies, and starts again later from its disk.
    Crash,
    /// The same in the middle of a write: the end of the write-ahead log is garbage.
    TornWrite,
    /// The same on a disk that has lost its last writes, although it acknowledged them.
    LostWrites,
    /// The disk has no room.
    FullDisk,
    /// The clock is wrong, by up to 20 minutes in either direction, until the end.
    ClockJump,
    /// No packets in either direction.
    Partition,
    /// No packets to the member.
    PartitionIn,
    /// No packets from the member.
    PartitionOut,
    /// Packets take 40 times as long.
    SlowLink,
    /// A bit of the member's next packets changes.
    DamagedPacket,
    /// An anchor revokes the last member for ever.
    Revoke,
}

/// The scene.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Logs {}

impl Scene for Logs {
    type Kind = Kind;

    const OPTION: &'static str = " --logs";
    const NODES: usize = MEMBERS;
    const KINDS: &'static [Kind] = &[
        Kind::Crash,
        Kind::TornWrite,
        Kind::LostWrites,
        Kind::FullDisk,
        Kind::ClockJump,
        Kind::Partition,
        Kind::PartitionIn,
        Kind::PartitionOut,
        Kind::SlowLink,
        Kind::DamagedPacket,
        Kind::Revoke,
    ];
}

/// A community that all runs begin with.
pub struct Founded {
    dir: TempDir,
    begin_ms: u64,
}

fn key(node: Node) -> NodeKey {
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
struct Known {
    /// Tag of each author's event by number: one history.
    history: BTreeMap<(NodeId, u64), u64>,
    /// Acknowledged durable events by author.
    written: BTreeMap<NodeId, BTreeSet<String>>,
    /// Members whose disks have lost acknowledged writes.
    forgetful: BTreeSet<NodeId>,
    /// Events whose authors knew of the revocation when they wrote them.
    secret: BTreeSet<String>,
    done: u32,
    failed: u32,
}

/// A member. Its process may be killed and started again.
struct Member {
    node: Node,
    name: String,
    net: Net,
    observer: Observer,
    known: Arc<Mutex<Known>>,
    dir: PathBuf,
    log: Mutex<Option<EventLog>>,
    tasks: Mutex<JoinSet<()>>,
    clock: Clock,
    /// Milliseconds that the clock is ahead.
    ahead_ms: Arc<AtomicI64>,
}

impl Member {
    fn new(
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
        let name = format!("member {node}");
        let copied = fs::create_dir_all(&dir).and_then(|()| {
            files(founded.dir.path()).iter().try_for_each(|name| {
                fs::copy(founded.dir.path().join(name), dir.join(name)).map(drop)
            })
        });
        observer.check(&name, copied.is_ok(), || {
            format!("no copy of the log: {copied:?}")
        });
        Self {
            node,
            name,
            net: net.clone(),
            observer: observer.clone(),
            known: Arc::clone(known),
            dir,
            log: Mutex::default(),
            tasks: Mutex::new(JoinSet::new()),
            clock: Arc::new(clock),
            ahead_ms,
        }
    }

    fn log(&self) -> Option<EventLog> {
        self.log.lock().clone()
    }

    /// Starts the process: opens the log, listens, and links with all others.
    fn start(&self) {
        let log = match EventLog::open(&self.dir) {
            Ok(log) => log,
            Err(error) => return self.observer.violated(&self.name, format!("open: {error}")),
        };
        let recovered = log.recovery().map(|recovery| recovery.what.clone());
        self.observer.note(
            &self.name,
            format!("starts, recovered: {}", recovered.is_some()),
        );
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
    async fn kill(&self, damage: impl FnOnce(&mut Vec<u8>)) {
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
        self.observer.note(&self.name, "is killed");
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
            self.observer.check(&self.name, written.is_ok(), || {
                format!("restore: {written:?}")
            });
        }
    }

    fn write(&self, body: Body) -> bool {
        let Some(log) = self.log() else { return false };
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
                self.observer
                    .check(&self.name, is_fine, || format!("append: {error}"));
                self.observer
                    .note(&self.name, format!("append: {}", error.code()));
                false
            }
        }
    }

    /// An action that the node of a member takes from time to time.
    fn upkeep(&self) {
        if let Some(log) = self.log() {
            // An error is the disk's.
            let _ = log.maintain(&key(self.node), (self.clock)());
            self.write(Body::NodeSeen {
                endpoints: Vec::new(),
                name: self.name.clone(),
                software: "sim".into(),
            });
        }
    }

    /// Compares the heads of the log with the one history of each author.
    fn check_heads(&self) -> Option<BTreeMap<NodeId, (u64, u64)>> {
        let heads = self.log()?.heads();
        let mut known = self.known.lock();
        let mut ends = BTreeMap::new();
        for (author, head) in heads.authors {
            let tag = *known.history.entry((author, head.seq)).or_insert(head.tip);
            self.observer.check(&self.name, tag == head.tip, || {
                format!("event {} of an author is another one here", head.seq)
            });
            self.observer.check(&self.name, head.fork.is_none(), || {
                format!("the history of {} forks", author.short())
            });
            if head.seq > 0 {
                ends.insert(author, (head.seq, head.tip));
            }
        }
        Some(ends)
    }

    /// Ids of all events in the log; durable ones only, if asked.
    fn events(&self, durable: bool) -> BTreeSet<String> {
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

/// Runs a schedule.
pub fn run(founded: &Founded, schedule: &Schedule<Logs>) -> Report {
    in_virtual_time(scene(founded, schedule))
}

async fn scene(founded: &Founded, schedule: &Schedule<Logs>) -> Report {
    let begin = Instant::now();
    let (observer, net) = (Observer::begin(), Net::new(schedule.seed));
    let (known, dir) = (Arc::new(Mutex::<Known>::default()), memory_folder());
    let members: Vec<Rc<Member>> = (0..MEMBERS)
        .map(|node| {
            let dir = dir.path().join(node.to_string());
            Rc::new(Member::new(node, founded, dir, &net, &observer, &known))
        })
        .collect();
    members.iter().for_each(|member| member.start());
    let end = begin + schedule.end().max(WRITING);
    let mut tasks = Vec::new();
    for (number, fault) in (0..).zip(&schedule.faults) {
        let (fault, all) = (*fault, members.clone());
        let random = Random::new(schedule.seed, 500 + number);
        tasks.push(spawn_local(async move {
            happen(fault, begin, &all, random).await;
        }));
    }
    for member in &members {
        let member = Rc::clone(member);
        let mut random = Random::new(schedule.seed, 900 + member.node as u64);
        tasks.push(spawn_local(async move {
            let mut number = 0;
            while begin.elapsed() < WRITING {
                sleep(Duration::from_millis(random.between(50, 700))).await;
                number += 1;
                let name = format!("name {number}");
                member.write(Body::Named { name });
                if random.one_in(4) {
                    member.upkeep();
                }
                member.check_heads();
            }
        }));
    }
    for task in tasks {
        if let Err(error) = task.await {
            observer.violated("run", format!("a task failed: {error}"));
        }
    }
    sleep_until(end).await;
    let healed = Instant::now();
    let is_revoked = |node: Node| {
        let revoked = key(node).id();
        members.iter().any(|member| {
            member
                .log()
                .is_some_and(|log| log.state().is_revoked(&revoked))
        })
    };
    loop {
        let left = || members.iter().filter(|member| !is_revoked(member.node));
        let heads: Vec<_> = left().map(|member| member.check_heads()).collect();
        // All members are there, so each log has its own events back, or knows that they are lost.
        let doubts = left().any(|member| member.log().is_some_and(|log| log.is_in_doubt()));
        let seconds = healed.elapsed().as_secs();
        let lengths: Vec<u64> = heads
            .iter()
            .map(|heads| heads.iter().flatten().map(|(_, (seq, _))| seq).sum())
            .collect();
        observer.note("run", format!("{lengths:?} events"));
        let are_equal = heads.windows(2).all(|pair| pair.first() == pair.last());
        if are_equal && !doubts && seconds > 2 {
            break;
        }
        if healed.elapsed() > CONVERGE_WITHIN {
            observer.violated(
                "run",
                format!("the logs do not become equal: {lengths:?} events, in doubt: {doubts}"),
            );
            break;
        }
        members.iter().for_each(|member| member.upkeep());
        sleep(Duration::from_secs(1)).await;
    }
    check_events(&members, &observer, &known.lock(), is_revoked);
    for member in &members {
        let log = member.log();
        if let Some(Ok(found)) = log.map(|log| log.verify()) {
            observer.check(&member.name, found.problems.is_empty(), || {
                format!("the log is damaged: {:?}", found.problems)
            });
        }
        member.kill(|_| {}).await;
    }
    sleep(Duration::from_secs(200)).await;
    let pipes = net.open_pipes();
    observer.check("run", pipes == 0, || {
        format!("{pipes} directions of connections are left")
    });
    let known = known.lock();
    observer.finish(known.done, known.failed)
}

/// Checks which events arrived where.
fn check_events(
    members: &[Rc<Member>],
    observer: &Observer,
    known: &Known,
    is_revoked: impl Fn(Node) -> bool,
) {
    for member in members {
        if is_revoked(member.node) {
            let mut got = member.events(false).into_iter();
            let secret = got.find(|id| known.secret.contains(id));
            observer.check(&member.name, secret.is_none(), || {
                "it was revoked, and received an event of a member that knew it".into()
            });
            continue;
        }
        let held = member.events(true);
        for author in members.iter().filter(|author| !is_revoked(author.node)) {
            let id = key(author.node).id();
            // Events that no other member had are lost with the disk.
            if known.forgetful.contains(&id) {
                continue;
            }
            let written = known.written.get(&id);
            let lost = written
                .into_iter()
                .flatten()
                .filter(|id| !held.contains(*id))
                .count();
            observer.check(&member.name, lost == 0, || {
                format!("it lacks {lost} acknowledged events of {}", author.name)
            });
        }
    }
}

/// Clock errors, in milliseconds.
const JUMPS: [i64; 6] = [-1_200_000, -90_000, -20_000, 20_000, 90_000, 1_200_000];

/// Lets a fault happen, and ends it.
async fn happen(fault: Fault<Kind>, begin: Instant, all: &[Rc<Member>], mut random: Random) {
    sleep_until(begin + fault.at).await;
    let Some(member) = all.get(fault.node) else {
        return;
    };
    let (net, observer) = (&member.net, &member.observer);
    observer.note(&member.name, format!("fault: {:?}", fault.kind));
    let ways = |into: bool, out_of: bool| {
        let others = (0..MEMBERS).filter(move |node| *node != fault.node);
        others.flat_map(move |other| {
            let ways = [(other, fault.node, into), (fault.node, other, out_of)];
            ways.into_iter().filter(|way| way.2)
        })
    };
    let block = |into: bool, out_of: bool, by: i32| {
        for (from, to, _) in ways(into, out_of) {
            net.change(from, to, |way| {
                way.blocked = way.blocked.saturating_add_signed(by);
            });
        }
    };
    let slow = |factor| {
        ways(true, true).for_each(|(from, to, _)| net.change(from, to, |way| way.slow = factor));
    };
    let over = sleep_until(begin + fault.at + fault.lasts);
    match fault.kind {
        Kind::Crash | Kind::TornWrite | Kind::LostWrites => {
            if fault.kind == Kind::LostWrites {
                let (own, mut known) = (key(fault.node).id(), member.known.lock());
                // The node may write events that only this disk held again, in another way.
                known.history.retain(|(author, _), _| *author != own);
                known.forgetful.insert(own);
            }
            let damage = |bytes: &mut Vec<u8>| match fault.kind {
                Kind::TornWrite => {
                    let length = random.between(1, 9_000);
                    bytes.extend((0..length).map(|_| random.draw() as u8));
                }
                // The header of a write-ahead log has 32 bytes, a frame some 4 KiB.
                Kind::LostWrites => {
                    let lost = random.below(200_000) as usize;
                    bytes.truncate(bytes.len().saturating_sub(lost).max(32));
                }
                _ => {}
            };
            member.kill(damage).await;
            over.await;
            if member.log().is_none() {
                member.start();
            }
        }
        Kind::FullDisk => {
            if let Some(log) = member.log() {
                log.fill_disk(true);
                drop(log);
            }
            over.await;
            if let Some(log) = member.log() {
                log.fill_disk(false);
            }
        }
        Kind::ClockJump => {
            let jump = random.below(JUMPS.len() as u64) as usize;
            let jump = JUMPS.get(jump).copied().unwrap_or_default();
            member.ahead_ms.fetch_add(jump, Ordering::Relaxed);
            over.await;
            member.ahead_ms.fetch_sub(jump, Ordering::Relaxed);
        }
        Kind::Partition => {
            block(true, true, 1);
            over.await;
            block(true, true, -1);
        }
        Kind::PartitionIn => {
            block(true, false, 1);
            over.await;
            block(true, false, -1);
        }
        Kind::PartitionOut => {
            block(false, true, 1);
            over.await;
            block(false, true, -1);
        }
        Kind::SlowLink => {
            slow(40);
            over.await;
            slow(0);
        }
        Kind::DamagedPacket => {
            ways(false, true)
                .for_each(|(from, to, _)| net.change(from, to, |way| way.damaged += 1));
        }
        Kind::Revoke => {
            // The anchor with this number, or the first one.
            let anchor = all.get(fault.node % 2).unwrap_or(member);
            while begin.elapsed() < fault.at + fault.lasts {
                let last_seq = anchor.log().map_or(0, |log| {
                    let heads = log.heads();
                    heads
                        .authors
                        .get(&key(REVOKED).id())
                        .map_or(0, |head| head.seq)
                });
                let node = key(REVOKED).id();
                let is_done = |log: EventLog| log.state().is_revoked(&node);
                if anchor.log().is_some_and(is_done)
                    || anchor.write(Body::Revoked { node, last_seq })
                {
                    break;
                }
                sleep(Duration::from_millis(200)).await;
            }
        }
    }
    observer.note(&member.name, format!("over: {:?}", fault.kind));
}
