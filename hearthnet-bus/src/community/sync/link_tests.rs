//! Gossip with the real log, in memory and over TLS.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hearthnet_transport::{
    Arrival, CloseCode, Config, Frame, Listener, PeerSocket, SessionClosed, connect_path,
};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::budget::SyncConfig;
use super::link::{Accounts, gossip, path_rule};
use super::message::SyncMessage;
use super::session::Progress;
use crate::community::log::{Body, EventLog, Heads, Level, Policy};
use crate::testing::{Home, Open, hear, id, key};
use crate::{NodeId, now_ms};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Community of key 1.
fn founder() -> Home {
    Home::founded(key(1), false)
}

/// Another machine, which only knows the id of the community.
fn joiner() -> Home {
    Home::joining(key(1))
}

fn admit(home: &Home, seed: u8) {
    home.admit(id(seed), Level::Trusted);
}

fn seen(home: &Home, seed: u8, port: u16) {
    let body = Body::NodeSeen {
        endpoints: vec![format!("127.0.0.1:{port}")],
        name: format!("node {seed}"),
        software: "test".into(),
    };
    home.log.append(&key(seed), body, now_ms()).unwrap();
}

type Task = JoinHandle<SessionClosed>;

/// Runs one end of a session.
fn run(socket: PeerSocket, own: NodeId, log: &EventLog) -> (Task, watch::Receiver<Progress>) {
    let config = SyncConfig::default();
    let accounts = Accounts::new(&config);
    let (shown, progress) = watch::channel(Progress::default());
    let session = gossip(socket, own, log.clone(), config, accounts, shown);
    (tokio::spawn(session), progress)
}

/// Waits for the end of a session.
async fn ended(task: Task) -> SessionClosed {
    timeout(TIMEOUT, task).await.unwrap().unwrap()
}

struct Link {
    tasks: [Task; 2],
    progress: [watch::Receiver<Progress>; 2],
}

fn start(sockets: (PeerSocket, PeerSocket), logs: [&EventLog; 2]) -> Link {
    let keys = (sockets.1.peer(), sockets.0.peer());
    let (left, left_progress) = run(sockets.0, keys.0, logs[0]);
    let (right, right_progress) = run(sockets.1, keys.1, logs[1]);
    Link {
        tasks: [left, right],
        progress: [left_progress, right_progress],
    }
}

async fn linked(left: (&Home, u8), right: (&Home, u8)) -> Link {
    let keys = [id(left.1), id(right.1)];
    let sockets = PeerSocket::pair(keys, &path_rule()).await;
    start(sockets, [&left.0.log, &right.0.log])
}

impl Link {
    fn cut(self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Waits until all logs have equal heads.
async fn agreed(homes: &[&Home]) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let first = homes[0].log.heads().to_cbor();
        if homes.iter().all(|home| home.log.heads().to_cbor() == first) {
            break;
        }
        assert!(Instant::now() < deadline, "the logs differ");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for home in homes {
        assert_eq!(
            home.log.state().state_hash(),
            homes[0].log.state().state_hash()
        );
    }
}

#[tokio::test]
async fn a_joiner_gets_the_whole_history_and_live_events_go_both_ways() {
    let (first, second) = (founder(), joiner());
    admit(&first, 2);
    let link = linked((&first, 1), (&second, 2)).await;
    agreed(&[&first, &second]).await;
    assert_eq!(second.log.state().level(&id(2)), Some(Level::Trusted));
    seen(&second, 2, 1);
    seen(&first, 1, 2);
    agreed(&[&first, &second]).await;
    assert_eq!(first.log.state().nodes(now_ms()).count(), 2);
    // Each event crossed the link once.
    for progress in &link.progress {
        let mut progress = progress.clone();
        let even = progress.wait_for(|progress| progress.in_sync);
        timeout(TIMEOUT, even).await.unwrap().unwrap();
    }
    let sent: u64 = link.progress.iter().map(|p| p.borrow().sent).sum();
    assert_eq!(sent, 3 + 2);
}

#[tokio::test]
async fn a_log_that_lost_events_writes_again_when_a_peer_has_brought_them_back() {
    let (first, other) = (founder(), joiner());
    admit(&first, 2);
    let link = linked((&first, 1), (&other, 2)).await;
    agreed(&[&first, &other]).await;
    link.cut();
    // The founder's file is gone, except for the community's name.
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("log.sqlite"), b"nothing").unwrap();
    let name = format!("{}\n", first.log.community());
    std::fs::write(dir.path().join("log.community"), name).unwrap();
    let again = Home::opened(dir, key(1));
    assert!(again.log.recovery().is_some() && again.log.is_in_doubt());
    let policy = Policy {
        research: true,
        ..Policy::default()
    };
    let write = || {
        again
            .log
            .append(&key(1), Body::PolicyChanged(policy), now_ms())
    };
    assert_eq!(write().unwrap_err().code(), "log_behind");
    let _link = linked((&again, 1), (&other, 2)).await;
    let deadline = Instant::now() + TIMEOUT;
    while write().is_err() {
        assert!(Instant::now() < deadline, "the log stays in doubt");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    agreed(&[&again, &other]).await;
    assert!(other.log.state().policy.research);
    assert_eq!(other.log.state().frozen().count(), 0);
}

#[tokio::test]
async fn a_partition_that_heals_leaves_identical_states() {
    let homes = [founder(), joiner(), joiner(), joiner()];
    for seed in 2..=4 {
        admit(&homes[0], seed);
    }
    let all: Vec<&Home> = homes.iter().collect();
    let mut links = Vec::new();
    for at in 0..4 {
        let next = (at + 1) % 4;
        links.push(linked((&homes[at], at as u8 + 1), (&homes[next], next as u8 + 1)).await);
    }
    agreed(&all).await;
    // Two halves go on separately: each promotes nodes and writes events unknown to the other.
    links.drain(..).for_each(Link::cut);
    let left = linked((&homes[0], 1), (&homes[1], 2)).await;
    let right = linked((&homes[2], 3), (&homes[3], 4)).await;
    for port in 1..30 {
        seen(&homes[1], 2, port);
        seen(&homes[3], 4, port);
        admit(&homes[0], 10 + port as u8);
    }
    agreed(&all[..2]).await;
    agreed(&all[2..]).await;
    assert_eq!(homes[2].log.state().members().count(), 4);
    let bridge = linked((&homes[1], 2), (&homes[2], 3)).await;
    agreed(&all).await;
    assert_eq!(homes[3].log.state().members().count(), 4 + 29);
    [left, right, bridge].into_iter().for_each(Link::cut);
}

#[tokio::test]
async fn proofs_of_forks_travel_and_freeze_the_author_everywhere() {
    let (first, second, third) = (founder(), joiner(), joiner());
    (7..10).for_each(|seed| admit(&first, seed));
    let invite = first.invite(Level::Trusted, 2);
    let link = linked((&first, 7), (&second, 8)).await;
    agreed(&[&first, &second]).await;
    link.cut();
    // The founder's key on two machines, which are members under other keys. It writes one event on
    // each, because not every log keeps events after a fork.
    for (home, seed) in [(&first, 3), (&second, 4)] {
        let request = invite.request(id(seed), "neighbour").unwrap();
        let level = Level::Trusted;
        home.append(Body::Admitted { request, level });
    }
    let link = linked((&first, 7), (&second, 8)).await;
    agreed(&[&first, &second]).await;
    let onward = linked((&second, 8), (&third, 9)).await;
    agreed(&[&first, &second, &third]).await;
    for home in [&first, &second, &third] {
        assert!(home.log.state().is_frozen(&id(1)));
    }
    [link, onward].into_iter().for_each(Link::cut);
}

#[tokio::test]
async fn logs_sync_over_tls() {
    let (first, second) = (founder(), joiner());
    (2..60).for_each(|seed| admit(&first, seed));
    let identity = key(1).identity().unwrap();
    let config = Config::default();
    let rules = [path_rule()];
    let listener = Listener::bind("127.0.0.1:0", &identity, Arc::new(Open), config, &rules);
    let mut listener = listener.await.unwrap();
    let addr = listener.local_addr().to_string();
    let own = key(2).identity().unwrap();
    let config = Config::default();
    let dialled = connect_path(&addr, &own, Some(id(1)), &rules[0], &config).await;
    let Arrival::Peer(arrived) = listener.accept().await else {
        panic!("no socket")
    };
    let link = start((arrived, dialled.unwrap()), [&first.log, &second.log]);
    agreed(&[&first, &second]).await;
    seen(&second, 2, 1);
    agreed(&[&first, &second]).await;
    // One side ends; the other gets the close.
    let [left, right] = link.tasks;
    left.abort();
    let closed = ended(right).await;
    assert_eq!((closed.code, closed.by_us), (CloseCode::Normal, false));
}

// ------------------------------------------------------------------ a hostile peer

/// Socket to a node with the log of `home`. Key 66 holds the other end.
async fn attack(home: &Home) -> (PeerSocket, Task) {
    let keys = [id(66), id(1)];
    let (attacker, victim) = PeerSocket::pair(keys, &path_rule()).await;
    let (task, _) = run(victim, id(1), &home.log);
    let hello = SyncMessage::Hello {
        version: 1,
        community: *home.log.community().as_bytes(),
    };
    say(&attacker, hello).await;
    (attacker, task)
}

async fn say(socket: &PeerSocket, message: SyncMessage) {
    let frame = Frame::Binary(message.encode());
    socket.send(frame).await.unwrap();
}

/// Receives the next message.
async fn heard(socket: &mut PeerSocket) -> SyncMessage {
    let Frame::Binary(message) = socket.recv().await.unwrap() else {
        panic!()
    };
    SyncMessage::decode(&message).unwrap()
}

/// All events of a log.
fn all_of(log: &EventLog) -> Vec<Bytes> {
    let all = log.missing(&Heads::empty(log.community()), 100, 1 << 20);
    all.unwrap().events.into_iter().map(Bytes::from).collect()
}

/// Event of an author that is unknown to the log.
fn foreign_event(home: &Home) -> Vec<u8> {
    let other = joiner();
    hear(&other.log, &home.log);
    admit(&other, 33);
    let new = other.log.missing(&home.log.heads(), 100, 1 << 20);
    new.unwrap().events.remove(0)
}

#[tokio::test]
async fn a_forged_event_is_not_stored_and_ends_the_session() {
    let home = founder();
    let before = home.log.state().state_hash();
    let mut forged = foreign_event(&home);
    *forged.last_mut().unwrap() ^= 1;
    let (mut attacker, task) = attack(&home).await;
    let events = vec![Bytes::from(forged)];
    say(&attacker, SyncMessage::Events { number: 1, events }).await;
    let closed = ended(task).await;
    let code = CloseCode::InvalidSignature;
    assert_eq!((closed.code, closed.by_us), (code, true));
    assert_eq!(home.log.state().state_hash(), before);
    // The attacker gets the close code.
    let told = loop {
        if let Err(closed) = attacker.recv().await {
            break closed;
        }
    };
    assert_eq!(told.code, code);
}

#[tokio::test]
async fn an_event_of_another_community_ends_the_session() {
    let home = founder();
    let elsewhere = Home::founded_as(201, key(66), false).log;
    let events = all_of(&elsewhere);
    let (attacker, task) = attack(&home).await;
    say(&attacker, SyncMessage::Events { number: 1, events }).await;
    assert_eq!(ended(task).await.code, CloseCode::BodyMalformed);
}

#[tokio::test]
async fn a_peer_that_sends_rubbish_is_closed_and_one_that_replays_is_not() {
    let home = founder();
    let (attacker, task) = attack(&home).await;
    let heads = Bytes::from_static(b"\xa1\x00\x00");
    say(&attacker, SyncMessage::Heads { round: 1, heads }).await;
    assert_eq!(ended(task).await.code, CloseCode::BodyMalformed);

    let (mut attacker, task) = attack(&home).await;
    let events = all_of(&home.log);
    let before = home.log.heads();
    for number in 1..=20 {
        let events = events.clone();
        say(&attacker, SyncMessage::Events { number, events }).await;
        let accepted = loop {
            if let SyncMessage::Ack { accepted, .. } = heard(&mut attacker).await {
                break accepted;
            }
        };
        assert_eq!(accepted, 0);
    }
    assert_eq!(home.log.heads(), before);
    assert!(!task.is_finished());
    task.abort();
}

#[tokio::test]
async fn neither_events_nor_even_go_to_a_peer_that_is_no_member() {
    let home = founder();
    let (mut attacker, task) = attack(&home).await;
    let heads = Heads::empty(home.log.community()).to_cbor().into();
    say(&attacker, SyncMessage::Heads { round: 1, heads }).await;
    // The heads are processed before the second batch is acknowledged.
    for number in 1..=2 {
        let events = all_of(&home.log);
        say(&attacker, SyncMessage::Events { number, events }).await;
    }
    loop {
        match heard(&mut attacker).await {
            SyncMessage::Events { .. } => panic!("a stranger gets the log"),
            SyncMessage::Even { .. } => panic!("a stranger hears that it lacks nothing"),
            SyncMessage::Ack { number: 2, .. } => break,
            _ => {}
        }
    }
    // As a member, it gets all events.
    admit(&home, 66);
    let sent = loop {
        if let SyncMessage::Events { events, .. } = heard(&mut attacker).await {
            break events.len();
        }
    };
    assert_eq!(sent, 3);
    while heard(&mut attacker).await != (SyncMessage::Even { round: 1 }) {}
    task.abort();
}

#[tokio::test]
async fn a_closer_ends_gossip_at_once() {
    let (first, second) = (founder(), joiner());
    admit(&first, 2);
    let keys = [id(1), id(2)];
    let (left, right) = PeerSocket::pair(keys, &path_rule()).await;
    let closer = left.closer();
    let link = start((left, right), [&first.log, &second.log]);
    agreed(&[&first, &second]).await;
    closer.close(CloseCode::Revoked);
    for (task, by_us) in link.tasks.into_iter().zip([true, false]) {
        let closed = ended(task).await;
        assert_eq!((closed.code, closed.by_us), (CloseCode::Revoked, by_us));
    }
}
