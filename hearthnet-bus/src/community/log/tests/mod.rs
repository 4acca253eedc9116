//! Tests of the log as a whole.

mod attacks;
mod disk;
mod month;
mod order;

use hearthnet_transport::Code;
use tempfile::TempDir;

use super::*;
use crate::community::invite::{Invite, JoinRequest};
use crate::{CommunityId, Descriptor, NodeId, NodeKey};

/// A Wednesday in 2027, in Unix milliseconds.
const NOW: u64 = 1_800_000_000_000;

fn key(seed: u8) -> NodeKey {
    NodeKey::from_secret(&[seed; 32])
}

fn root() -> NodeKey {
    key(200)
}

/// Log in a folder of its own.
struct Home {
    log: EventLog,
    dir: TempDir,
}

impl Home {
    /// A community whose founder is key 1.
    fn new() -> Self {
        let dir = folder();
        let policy = Policy::default();
        let log =
            EventLog::create(dir.path(), &root(), key(1).id(), "Elm Street", policy, NOW).unwrap();
        Self { log, dir }
    }

    /// Empty log of the same community.
    fn joining() -> Self {
        let dir = folder();
        let log = EventLog::prepare(dir.path(), CommunityId::from(root().id())).unwrap();
        Self { log, dir }
    }

    fn level(&self, seed: u8) -> Option<Level> {
        self.log.state().level(&key(seed).id())
    }
}

/// Temporary folder, in memory if possible: most tests do not depend on the disk.
fn folder() -> TempDir {
    let memory = std::path::Path::new("/dev/shm");
    match memory.is_dir() {
        true => TempDir::new_in(memory).unwrap(),
        false => TempDir::new().unwrap(),
    }
}

/// Makes valid and invalid events of one author.
struct Author {
    key: NodeKey,
    seq: u64,
    prev: EventHash,
    lamport: u64,
}

impl Author {
    fn new(key: NodeKey) -> Self {
        Self {
            key,
            seq: 0,
            prev: EventHash::ZERO,
            lamport: 0,
        }
    }

    /// Unsigned durable event that follows the last one.
    fn draft(&self, body: Body) -> Event {
        Event {
            community: CommunityId::from(root().id()),
            author: self.key.id(),
            seq: self.seq + 1,
            lamport: self.lamport + 1,
            time_ms: NOW,
            id: EventId::new(NOW, u128::from(self.seq)),
            lane: Lane::Durable { prev: self.prev },
            body,
        }
    }

    /// Signs an event. The next draft follows it.
    fn sign(&mut self, event: &Event) -> Vec<u8> {
        let raw = event.sign(&self.key).unwrap();
        self.seq = event.seq;
        self.lamport = event.lamport;
        self.prev = EventHash::of(&raw).unwrap();
        raw
    }

    fn make(&mut self, body: Body) -> Vec<u8> {
        self.sign(&self.draft(body))
    }

    fn say(&self, seq: u64, time_ms: u64, body: Body) -> Vec<u8> {
        let event = Event {
            seq,
            time_ms,
            lane: Lane::Ephemeral {
                slot: body.slot().unwrap(),
                expires_ms: time_ms + ADVERT_LIFE_MS,
            },
            ..self.draft(body)
        };
        event.sign(&self.key).unwrap()
    }
}

/// Receives events and returns the codes of the refused ones.
fn codes(log: &EventLog, raw: &[Vec<u8>], now: u64) -> Vec<Code> {
    let received = log.receive(raw, key(99).id(), now).unwrap();
    received.refused.iter().map(|(_, why)| why.code()).collect()
}

fn invited(seed: u8, level: Level, uses: u32) -> Body {
    Body::Invited {
        invite: key(seed).id(),
        level,
        uses,
        expires_ms: NOW + 3_600_000,
    }
}

/// Admission of key `node` by the invite `invite`.
fn admitted(invite: u8, node: u8, level: Level) -> Body {
    let community = CommunityId::from(root().id());
    let name = format!("node {node}");
    let request = JoinRequest::sign(&key(invite), community, key(node).id(), &name).unwrap();
    Body::Admitted { request, level }
}

fn descriptor(host: NodeId) -> Descriptor {
    Descriptor {
        shard_id: "m:0-7".into(),
        model_id: "m".into(),
        weights_sha256: "0a".repeat(32),
        layer_range: (0, 7),
        total_layers: 16,
        vram_required_mb: 10,
        weights_mb: 0,
        kv_mb: 0,
        max_concurrent_streams: 4,
        host,
        endpoint: "127.0.0.1:1".into(),
        advertised_at: 1,
        boundary_dtype: "fp16".into(),
        arithmetic: "canonical-1".into(),
        ms_per_token: 1.5,
        queue_depth: 0,
        software: "hearthnet/0.1.0".into(),
    }
}

/// Sends events in small batches until `to` has all of `from`. Returns the number of sent events.
fn sync(from: &EventLog, to: &EventLog, now: u64) -> usize {
    let mut heads = to.heads();
    let mut sent = 0;
    loop {
        let batch = from.missing(&heads, 7, 1 << 20).unwrap();
        sent += batch.events.len();
        to.receive(&batch.events, key(99).id(), now).unwrap();
        if !batch.more {
            return sent;
        }
        heads = batch.then;
    }
}

#[test]
fn a_new_community_has_its_founder_as_anchor_and_survives_reopening() {
    let home = Home::new();
    let hash = home.log.state().state_hash();
    let Home { log, dir } = home;
    drop(log);
    let log = EventLog::open(dir.path()).unwrap();
    let state = log.state();
    assert!(state.is_created());
    assert_eq!(state.name, "Elm Street");
    assert_eq!(state.level(&key(1).id()), Some(Level::Anchor));
    assert_eq!(state.level(&root().id()), None);
    assert_eq!(state.state_hash(), hash);
    assert_eq!(log.community(), CommunityId::from(root().id()));
}

#[test]
fn the_example_of_the_specification_is_what_this_code_makes() {
    let spec = include_str!("../../../../../specs/event-log.md");
    let hex = |bytes: &[u8]| hex::encode(bytes);
    let time_ms = 1_750_000_000_000;
    let community = CommunityId::from(key(1).id());
    let event = Event {
        community,
        author: key(1).id(),
        seq: 1,
        lamport: 1,
        time_ms,
        id: EventId::new(time_ms, 0),
        lane: Lane::Durable {
            prev: EventHash::ZERO,
        },
        body: Body::CommunityCreated {
            name: "Elm Street".into(),
            policy: Policy::default(),
            founder: key(2).id(),
        },
    };
    let raw = event.sign(&key(1)).unwrap();
    let dir = folder();
    let log = EventLog::prepare(dir.path(), community).unwrap();
    assert_eq!(codes(&log, std::slice::from_ref(&raw), time_ms), [""; 0]);
    let blocks: Vec<String> = spec
        .split("```hex")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .map(|block| block.split_whitespace().collect())
        .collect();
    assert_eq!(blocks, [hex(&raw), hex(&log.heads().to_cbor())]);
    for hash in [EventHash::of(&raw).unwrap().0, log.state().state_hash()] {
        assert!(spec.contains(&hex(&hash)), "{}", hex(&hash));
    }
}

#[test]
fn a_folder_has_one_community() {
    let home = Home::new();
    let again = EventLog::prepare(home.dir.path(), CommunityId::from(root().id()));
    assert!(matches!(again, Err(LogError::Exists { .. })));
    let empty = folder();
    assert!(matches!(
        EventLog::open(empty.path()),
        Err(LogError::NoCommunity { .. })
    ));
    let bad = EventLog::create(
        empty.path(),
        &root(),
        key(1).id(),
        "",
        Policy::default(),
        NOW,
    );
    assert!(matches!(bad, Err(LogError::Event(_))));
    assert!(!empty.path().join(FILE_NAME).exists());
}

#[test]
fn an_invited_node_joins_and_other_logs_learn_of_it() {
    let home = Home::new();
    home.log
        .append(&key(1), invited(50, Level::Trusted, 1), NOW)
        .unwrap();
    let code = Invite::new(home.log.community(), [50; 32], NOW / 1000 + 3600, vec![]).unwrap();
    let request = code.request(key(2).id(), "attic").unwrap();
    let level = Level::Trusted;
    home.log
        .append(&key(1), Body::Admitted { request, level }, NOW)
        .unwrap();
    assert_eq!(home.level(2), Some(Level::Trusted));
    assert_eq!(home.log.state().member(&key(2).id()).unwrap().name, "attic");

    let other = Home::joining();
    assert!(!other.log.state().is_created());
    assert_eq!(sync(&home.log, &other.log, NOW), 3);
    assert_eq!(other.log.state(), home.log.state());
    assert_eq!(other.log.heads(), home.log.heads());
    assert_eq!(sync(&home.log, &other.log, NOW), 0);
    assert!(home.log.is_consistent() && other.log.is_consistent());

    let used = home
        .log
        .append(&key(1), admitted(50, 3, Level::Trusted), NOW);
    assert!(matches!(
        used,
        Err(LogError::NoEffect(NoEffect::InviteUsed))
    ));
}

#[test]
fn a_node_that_left_can_rejoin_by_a_new_invite() {
    let home = Home::new();
    let (two, level) = (key(2), Level::Trusted);
    for body in [invited(50, level, 1), admitted(50, 2, level)] {
        home.log.append(&key(1), body, NOW).unwrap();
    }
    home.log.append(&two, Body::Left {}, NOW).unwrap();
    assert_eq!(home.level(2), None);
    assert!(!home.log.state().is_revoked(&two.id()));
    let again = home.log.append(&two, Body::Left {}, NOW);
    assert_eq!(again.unwrap_err().code(), "unauthorized");
    for body in [
        invited(51, Level::Member, 1),
        admitted(51, 2, Level::Member),
    ] {
        home.log.append(&key(1), body, NOW).unwrap();
    }
    assert_eq!(home.level(2), Some(Level::Member));
    let other = Home::joining();
    sync(&home.log, &other.log, NOW);
    assert_eq!(other.log.state(), home.log.state());
    assert!(home.log.is_consistent() && other.log.is_consistent());
}

#[test]
fn the_last_anchor_cannot_leave_others_alone_but_the_last_member_can() {
    let home = Home::new();
    for body in [
        invited(50, Level::Trusted, 1),
        admitted(50, 2, Level::Trusted),
    ] {
        home.log.append(&key(1), body, NOW).unwrap();
    }
    let alone = home.log.append(&key(1), Body::Left {}, NOW);
    assert!(matches!(
        alone,
        Err(LogError::NoEffect(NoEffect::LastAnchor(_)))
    ));
    let (node, level) = (key(2).id(), Level::Anchor);
    let promoted = Body::LevelChanged {
        node,
        level,
        last_seq: None,
    };
    home.log.append(&root(), promoted, NOW).unwrap();
    home.log.append(&key(1), Body::Left {}, NOW).unwrap();
    home.log.append(&key(2), Body::Left {}, NOW).unwrap();
    assert_eq!(home.log.state().members().count(), 0);
    assert!(home.log.is_consistent());
}

#[test]
fn a_member_changes_only_its_own_name() {
    let home = Home::new();
    let name = |text: &str| Body::Named { name: text.into() };
    home.log.append(&key(1), name("attic"), NOW).unwrap();
    let state = home.log.state();
    assert_eq!(state.member(&key(1).id()).unwrap().name, "attic");
    let same = home.log.append(&key(1), name("attic"), NOW);
    assert!(matches!(
        same,
        Err(LogError::NoEffect(NoEffect::SameName(_)))
    ));
    let stranger = home.log.append(&key(7), name("attic"), NOW);
    assert_eq!(stranger.unwrap_err().code(), "unauthorized");
    for bad in ["", "two\nlines", &"x".repeat(65)] {
        let refused = home.log.append(&key(1), name(bad), NOW);
        assert_eq!(refused.unwrap_err().code(), "log_malformed", "{bad:?}");
    }
    let other = Home::joining();
    sync(&home.log, &other.log, NOW);
    assert_eq!(other.log.state(), home.log.state());
}

#[test]
fn an_advertisement_is_seen_replaced_and_withdrawn() {
    let home = Home::new();
    let (me, other) = (key(1), Home::joining());
    let advert = |depth| {
        Body::ShardAdvertised(Box::new(Descriptor {
            queue_depth: depth,
            ..descriptor(me.id())
        }))
    };
    home.log.append(&me, advert(0), NOW).unwrap();
    home.log.append(&me, advert(3), NOW + 1).unwrap();
    sync(&home.log, &other.log, NOW + 1);
    for log in [&home.log, &other.log] {
        let state = log.state();
        let shards: Vec<_> = state.shards(NOW + 1).collect();
        assert_eq!(shards.len(), 1);
        assert_eq!(shards[0].descriptor.queue_depth, 3);
        assert_eq!(state.shards(NOW + 1 + ADVERT_LIFE_MS).count(), 0);
    }
    let withdrawn = Body::ShardWithdrawn {
        shard_id: "m:0-7".into(),
    };
    home.log.append(&me, withdrawn, NOW + 2).unwrap();
    assert_eq!(sync(&home.log, &other.log, NOW + 2), 1);
    assert_eq!(other.log.state().shards(NOW + 2).count(), 0);
    let later = NOW + 10 * ADVERT_LIFE_MS;
    assert_eq!(home.log.compact(later).unwrap().ephemeral, 1);
    assert_eq!(home.log.compact(later).unwrap(), Compacted::default());
}

#[test]
fn announcements_of_neighbours_reveal_a_wrong_clock() {
    let home = Home::new();
    for seed in 2..=4 {
        home.log
            .append(&key(1), invited(48 + seed, Level::Member, 1), NOW)
            .unwrap();
        home.log
            .append(&key(1), admitted(48 + seed, seed, Level::Member), NOW)
            .unwrap();
    }
    let say = |seed: u8, time: u64| {
        let seen = Body::NodeSeen {
            endpoints: vec![],
            name: "n".into(),
            software: "s".into(),
        };
        (Author::new(key(seed)).say(time, time, seen), key(seed).id())
    };
    assert_eq!(home.log.clock_offset(NOW), None);
    // Two clocks are an hour ahead: their events are refused, but the clocks are recorded.
    for seed in [2, 3] {
        let (event, from) = say(seed, NOW + 3_600_000);
        let received = home.log.receive(&[event], from, NOW).unwrap();
        assert_eq!(received.refused.len(), 1);
    }
    assert_eq!(home.log.clock_offset(NOW), Some((3_600_000, 2)));
    // A relayed announcement may be old, so it is not recorded.
    let (event, _) = say(4, NOW);
    home.log.receive(&[event], key(2).id(), NOW).unwrap();
    assert_eq!(home.log.clock_offset(NOW), Some((3_600_000, 2)));
}

#[test]
fn another_handle_of_the_same_file_sees_changes_after_update() {
    let home = Home::new();
    let second = EventLog::open(home.dir.path()).unwrap();
    let mut changes = second.changes();
    changes.mark_unchanged();
    home.log
        .append(&key(1), invited(50, Level::Member, 1), NOW)
        .unwrap();
    assert_ne!(second.state(), home.log.state());
    second.update().unwrap();
    assert!(changes.has_changed().unwrap());
    assert_eq!(second.state(), home.log.state());
    changes.mark_unchanged();
    second.update().unwrap();
    assert!(!changes.has_changed().unwrap());
    second
        .append(&key(1), admitted(50, 4, Level::Member), NOW)
        .unwrap();
    home.log
        .append(&key(1), invited(51, Level::Member, 1), NOW)
        .unwrap();
    assert_eq!(home.level(4), Some(Level::Member));
    // An event of a peer that another handle has stored already is visible too.
    home.log
        .append(&key(1), invited(52, Level::Member, 1), NOW)
        .unwrap();
    let all = home
        .log
        .missing(&Heads::empty(home.log.community()), 99, 1 << 20);
    second
        .receive(&all.unwrap().events, key(1).id(), NOW)
        .unwrap();
    assert_eq!(second.state(), home.log.state());
}
