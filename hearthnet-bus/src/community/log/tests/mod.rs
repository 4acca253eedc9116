//! Tests of the log as a whole.

mod attacks;
mod disk;
mod disputes;
mod gave;
mod models;
mod month;
mod order;

use hearthnet_transport::Code;
use tempfile::TempDir;

use super::*;
use crate::community::invite::{Invite, JoinRequest};
use crate::testing::{self, id, key};
use crate::vectors_tests::hex_blocks;
use crate::{CommunityId, Descriptor, NodeId, NodeKey};

/// A Wednesday in 2027, in Unix milliseconds.
const NOW: u64 = 1_800_000_000_000;
/// Milliseconds of a day.
const DAY: u64 = 86_400_000;
/// Seed of the root key.
const ROOT: u8 = 200;

fn root() -> NodeKey {
    key(ROOT)
}

fn community() -> CommunityId {
    CommunityId::from(root().id())
}

/// Log in a folder of its own.
struct Home {
    log: EventLog,
    dir: TempDir,
}

impl Home {
    /// A community whose founder is key 1.
    fn new() -> Self {
        Self::in_folder(folder())
    }

    /// [`Home::new`] in this folder.
    fn in_folder(dir: TempDir) -> Self {
        let policy = Policy::default();
        let log = EventLog::create(dir.path(), &root(), id(1), "Elm Street", policy, NOW).unwrap();
        Self { log, dir }
    }

    /// [`Home::new`] with other quotas.
    fn with_quotas(quotas: Quotas) -> Self {
        let dir = Self::new().closed();
        let log = EventLog::open_with(dir.path(), quotas).unwrap();
        Self { log, dir }
    }

    /// Empty log of the same community.
    fn joining() -> Self {
        let dir = folder();
        let log = EventLog::prepare(dir.path(), community()).unwrap();
        Self { log, dir }
    }

    /// Another log with all events of this one. Both are in the same state.
    #[track_caller]
    fn replica(&self) -> Self {
        let other = Self::joining();
        sync(&self.log, &other.log, NOW);
        self.assert_same(&other);
        other
    }

    #[track_caller]
    fn assert_same(&self, other: &Self) {
        assert_eq!(other.log.state(), self.log.state());
        assert_eq!(other.log.heads(), self.log.heads());
        assert!(self.log.is_consistent() && other.log.is_consistent());
    }

    /// Closes the log.
    fn closed(self) -> TempDir {
        drop(self.log);
        self.dir
    }

    /// Opens the log in a folder.
    fn opened(dir: TempDir) -> Self {
        let log = EventLog::open(dir.path()).unwrap();
        Self { log, dir }
    }

    /// Closes the log and opens it again.
    fn reopened(self) -> Self {
        Self::opened(self.closed())
    }

    fn level(&self, seed: u8) -> Option<Level> {
        self.log.state().level(&id(seed))
    }

    /// Appends an event of the key with this seed.
    #[track_caller]
    fn append(&self, seed: u8, body: Body) -> EventId {
        self.log.append(&key(seed), body, NOW).unwrap()
    }

    /// Tries to append an event and returns the error.
    #[track_caller]
    fn refused(&self, seed: u8, body: Body) -> LogError {
        self.log.append(&key(seed), body, NOW).unwrap_err()
    }

    /// Tries to append an event, which must fail with this code.
    #[track_caller]
    fn refuses(&self, seed: u8, body: Body, code: &str) {
        assert_eq!(self.refused(seed, body).code(), code);
    }

    /// The root, whose next event follows its first one and a Lamport time.
    fn root_after(&self, lamport: u64) -> Author {
        Author {
            seq: 1,
            prev: EventHash::of(&self.all()[0]).unwrap(),
            ..Author::after(lamport, ROOT)
        }
    }

    /// Admits a node by a new invite of the founder. The seed of the invite's key is 100 higher.
    #[track_caller]
    fn admit(&self, seed: u8, level: Level) {
        self.append(1, invited(100 + seed, level, 1));
        self.append(1, admitted(100 + seed, seed, level));
    }

    /// Receives events, and expects that all are accepted.
    #[track_caller]
    fn takes(&self, raw: &[Vec<u8>]) {
        assert_eq!(codes(&self.log, raw, NOW), [""; 0]);
    }

    /// All events, as a peer without events receives them.
    fn all(&self) -> Vec<Vec<u8>> {
        let nothing = Heads::empty(self.log.community());
        self.log.missing(&nothing, 4096, 1 << 24).unwrap().events
    }
}

#[track_caller]
fn assert_sound(log: &EventLog) {
    assert_eq!(log.verify().unwrap().problems, Vec::<String>::new());
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

    /// Author whose first event follows a Lamport time.
    fn after(lamport: u64, seed: u8) -> Self {
        Self {
            lamport,
            ..Self::new(key(seed))
        }
    }

    /// Unsigned durable event that follows the last one.
    fn draft(&self, body: Body) -> Event {
        Event {
            community: community(),
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

    /// Makes an event whose Lamport time and time are ahead.
    fn make_ahead(&mut self, ahead_ms: u64, body: Body) -> Vec<u8> {
        let at = NOW + ahead_ms;
        self.sign(&Event {
            lamport: at,
            time_ms: at,
            ..self.draft(body)
        })
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

/// The founder, positioned after the root's event.
fn founder() -> Author {
    Author::after(1, 1)
}

/// Receives events and returns the codes of the refused ones.
fn codes(log: &EventLog, raw: &[Vec<u8>], now: u64) -> Vec<Code> {
    let received = log.receive(raw, id(99), now).unwrap();
    received.refused.iter().map(|(_, why)| why.code()).collect()
}

fn policy(research: bool) -> Body {
    Body::PolicyChanged(Policy {
        research,
        ..Policy::default()
    })
}

/// Lets every member invite.
fn open_policy() -> Body {
    Body::PolicyChanged(Policy {
        who_may_invite: Level::Member,
        ..Policy::default()
    })
}

fn invited(seed: u8, level: Level, uses: u32) -> Body {
    Body::Invited {
        invite: id(seed),
        level,
        uses,
        expires_ms: NOW + 3_600_000,
    }
}

/// Admission of key `node` by the invite `invite`.
fn admitted(invite: u8, node: u8, level: Level) -> Body {
    let name = format!("node {node}");
    let request = JoinRequest::sign(&key(invite), community(), id(node), &name).unwrap();
    Body::Admitted { request, level }
}

/// Withdrawal of an invite that names these members.
fn withdrawn(invite: u8, named: Option<&[u8]>) -> Body {
    let named = named.map(|seeds| seeds.iter().map(|seed| id(*seed)).collect());
    Body::InviteWithdrawn {
        invite: id(invite),
        members: named,
    }
}

fn level_of(seed: u8, level: Level, last_seq: u64) -> Body {
    Body::LevelChanged {
        node: id(seed),
        level,
        last_seq: Some(last_seq),
    }
}

fn revoked(seed: u8, last_seq: u64) -> Body {
    Body::Revoked {
        node: id(seed),
        last_seq,
    }
}

fn adoption(n: u8) -> Adoption {
    Adoption {
        head: [n; 32],
        name: format!("model {n}"),
        layers: 32,
        pieces: [n; 32],
        sources: vec![format!("hf:owner/repository/{n}.gguf")],
        weights: [n; 32],
        file_bytes: 4_000_000_000,
        head_bytes: 6_000_000,
        manifest_bytes: 30_000,
    }
}

fn adopted(n: u8) -> Body {
    Body::ModelAdopted(adoption(n))
}

fn dropped(n: u8) -> Body {
    Body::ModelDropped { weights: [n; 32] }
}

/// Counters at the end of the day that began `after` days after [`NOW`].
fn gave(after: u64) -> Gave {
    Gave {
        day: NOW / DAY + after,
        tokens: 1000 * after,
        minutes: 60 * after,
        weights_bytes: 5000 * after,
    }
}

fn named(name: &str) -> Body {
    Body::Named { name: name.into() }
}

fn note(bytes: Vec<u8>) -> Body {
    Body::Unknown {
        kind: "notes.written".into(),
        slot: None,
        bytes,
    }
}

fn seen(name: &str) -> Body {
    Body::NodeSeen {
        endpoints: vec!["192.168.1.20:7600".into()],
        name: name.into(),
        software: "hearthnet/0.1.0".into(),
    }
}

fn advert(author: &NodeKey, depth: u32) -> Body {
    Body::ShardAdvertised(Box::new(Descriptor {
        queue_depth: depth,
        ..testing::descriptor(author.id())
    }))
}

fn shard_withdrawn(shard_id: &str) -> Body {
    Body::ShardWithdrawn {
        shard_id: shard_id.into(),
    }
}

/// Sends events in small batches until `to` has all of `from`. Returns the number of sent events.
fn sync(from: &EventLog, to: &EventLog, now: u64) -> usize {
    let mut heads = to.heads();
    let mut sent = 0;
    loop {
        let batch = from.missing(&heads, 7, 1 << 20).unwrap();
        sent += batch.events.len();
        to.receive(&batch.events, id(99), now).unwrap();
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
    let home = home.reopened();
    let state = home.log.state();
    assert!(state.is_created());
    assert_eq!(state.name, "Elm Street");
    assert_eq!(home.level(1), Some(Level::Anchor));
    assert_eq!(home.level(ROOT), None);
    assert_eq!(state.state_hash(), hash);
    assert_eq!(home.log.community(), community());
}

#[test]
fn the_example_of_the_specification_is_what_this_code_makes() {
    let spec = include_str!("../../../../../specs/event-log.md");
    let hex = |bytes: &[u8]| hex::encode(bytes);
    let time_ms = 1_750_000_000_000;
    let community = CommunityId::from(id(1));
    let event = Event {
        community,
        author: id(1),
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
            founder: id(2),
        },
    };
    let raw = event.sign(&key(1)).unwrap();
    let dir = folder();
    let log = EventLog::prepare(dir.path(), community).unwrap();
    assert_eq!(codes(&log, std::slice::from_ref(&raw), time_ms), [""; 0]);
    let blocks: Vec<_> = hex_blocks(spec).collect();
    let (heads, first) = (log.heads().to_cbor(), log.state().state_hash());
    let adoption = Body::ModelAdopted(Adoption {
        head: [5; 32],
        name: "tiny".into(),
        pieces: [6; 32],
        sources: vec!["hf:owner/repository/tiny.gguf".into()],
        weights: [7; 32],
        ..adoption(0)
    });
    let body = adoption.encode().unwrap();
    log.append(&key(2), adoption, time_ms).unwrap();
    let adopted = log.state().state_hash();
    let gave = Body::NodeGave(Gave {
        day: day_of(time_ms),
        tokens: 700,
        minutes: 1440,
        weights_bytes: 5_000_000_000,
    });
    let given = gave.encode().unwrap();
    log.append(&key(2), gave, time_ms).unwrap();
    assert_eq!(blocks, [hex(&raw), hex(&heads), hex(&body), hex(&given)]);
    let gave = log.state().state_hash();
    for hash in [EventHash::of(&raw).unwrap().0, first, adopted, gave] {
        assert!(spec.contains(&hex(&hash)), "{}", hex(&hash));
    }
}

#[test]
fn a_folder_has_one_community() {
    let home = Home::new();
    let again = EventLog::prepare(home.dir.path(), community());
    assert!(matches!(again, Err(LogError::Exists { .. })));
    let empty = folder();
    let opened = EventLog::open(empty.path());
    assert!(matches!(opened, Err(LogError::NoCommunity { .. })));
    let founder = id(1);
    let bad = EventLog::create(empty.path(), &root(), founder, "", Policy::default(), NOW);
    assert!(matches!(bad, Err(LogError::Event(_))));
    assert!(!empty.path().join(FILE_NAME).exists());
}

#[test]
fn an_invited_node_joins_and_other_logs_learn_of_it() {
    let (home, level) = (Home::new(), Level::Trusted);
    home.append(1, invited(50, level, 1));
    let code = Invite::new(home.log.community(), [50; 32], NOW / 1000 + 3600, vec![]).unwrap();
    let request = code.request(id(2), "attic").unwrap();
    home.append(1, Body::Admitted { request, level });
    assert_eq!(home.level(2), Some(level));
    assert_eq!(home.log.state().member(&id(2)).unwrap().name, "attic");

    let other = Home::joining();
    assert!(!other.log.state().is_created());
    assert_eq!(sync(&home.log, &other.log, NOW), 3);
    home.assert_same(&other);
    assert_eq!(sync(&home.log, &other.log, NOW), 0);

    let used = home.refused(1, admitted(50, 3, level));
    assert!(matches!(used, LogError::NoEffect(NoEffect::InviteUsed)));
}

#[test]
fn a_node_that_left_can_rejoin_by_a_new_invite() {
    let home = Home::new();
    home.admit(2, Level::Trusted);
    home.append(2, Body::Left {});
    assert_eq!(home.level(2), None);
    assert!(!home.log.state().is_revoked(&id(2)));
    home.refuses(2, Body::Left {}, "unauthorized");
    home.append(1, invited(51, Level::Member, 1));
    home.append(1, admitted(51, 2, Level::Member));
    assert_eq!(home.level(2), Some(Level::Member));
    home.replica();
}

#[test]
fn the_last_anchor_cannot_leave_others_alone_but_the_last_member_can() {
    let home = Home::new();
    home.admit(2, Level::Trusted);
    let alone = home.refused(1, Body::Left {});
    assert!(matches!(alone, LogError::NoEffect(NoEffect::LastAnchor(_))));
    home.append(ROOT, level_of(2, Level::Anchor, 0));
    home.append(1, Body::Left {});
    home.append(2, Body::Left {});
    assert_eq!(home.log.state().members().count(), 0);
    assert!(home.log.is_consistent());
}

#[test]
fn a_member_changes_only_its_own_name() {
    let home = Home::new();
    home.append(1, named("attic"));
    let state = home.log.state();
    assert_eq!(state.member(&id(1)).unwrap().name, "attic");
    let same = home.refused(1, named("attic"));
    assert!(matches!(same, LogError::NoEffect(NoEffect::SameName(_))));
    home.refuses(7, named("attic"), "unauthorized");
    for bad in ["", "two\nlines", &"x".repeat(65)] {
        let refused = home.refused(1, named(bad));
        assert_eq!(refused.code(), "log_malformed", "{bad:?}");
    }
    home.replica();
}

#[test]
fn an_advertisement_is_seen_replaced_and_withdrawn() {
    let (home, me, other) = (Home::new(), key(1), Home::joining());
    let append = |body, now| home.log.append(&me, body, now).unwrap();
    append(advert(&me, 0), NOW);
    append(advert(&me, 3), NOW + 1);
    sync(&home.log, &other.log, NOW + 1);
    for log in [&home.log, &other.log] {
        let state = log.state();
        let shards: Vec<_> = state.shards(NOW + 1).collect();
        assert_eq!(shards.len(), 1);
        assert_eq!(shards[0].descriptor.queue_depth, 3);
        assert_eq!(state.shards(NOW + 1 + ADVERT_LIFE_MS).count(), 0);
    }
    append(shard_withdrawn("m:0-7"), NOW + 2);
    assert_eq!(sync(&home.log, &other.log, NOW + 2), 1);
    assert_eq!(other.log.state().shards(NOW + 2).count(), 0);
    let later = NOW + 10 * ADVERT_LIFE_MS;
    assert_eq!(home.log.compact(later).unwrap().ephemeral, 1);
    assert_eq!(home.log.compact(later).unwrap(), Compacted::default());
}

#[test]
fn an_advertisement_by_a_clock_that_was_set_back_a_day_does_no_harm_once_it_is_right() {
    let (home, me, other) = (Home::new(), key(1), Home::joining());
    let append = |body, now| home.log.append(&me, body, now).unwrap();
    let depths = |log: &EventLog, now: u64| -> Vec<u32> {
        let state = log.state();
        let shards = state.shards(now).map(|shard| shard.descriptor.queue_depth);
        shards.collect()
    };
    let (right, back) = (NOW + DAY, NOW);
    append(advert(&me, 1), right);
    sync(&home.log, &other.log, right);
    // Others refuse the next one as expired, and keep the earlier one for its life.
    append(advert(&me, 2), back);
    sync(&home.log, &other.log, right + 1);
    assert_eq!(depths(&home.log, back), [2]);
    assert_eq!(depths(&other.log, right + 1), [1]);
    let later = right + ADVERT_LIFE_MS;
    assert!(depths(&other.log, later).is_empty());
    append(advert(&me, 3), later);
    sync(&home.log, &other.log, later);
    assert_eq!(depths(&other.log, later), [3]);
}

#[test]
fn announcements_of_neighbours_reveal_a_wrong_clock() {
    let home = Home::new();
    (2..=4).for_each(|seed| home.admit(seed, Level::Member));
    let say = |seed: u8, time: u64| Author::new(key(seed)).say(time, time, seen("n"));
    assert_eq!(home.log.clock_offset(NOW), None);
    // Two clocks are an hour ahead: their events are refused, but the clocks are recorded.
    for seed in [2, 3] {
        let event = say(seed, NOW + 3_600_000);
        let received = home.log.receive(&[event], id(seed), NOW).unwrap();
        assert_eq!(received.refused.len(), 1);
    }
    assert_eq!(home.log.clock_offset(NOW), Some((3_600_000, 2)));
    // A relayed announcement may be old, so it is not recorded.
    home.log.receive(&[say(4, NOW)], id(2), NOW).unwrap();
    assert_eq!(home.log.clock_offset(NOW), Some((3_600_000, 2)));
}

#[test]
fn another_handle_of_the_same_file_sees_changes_after_update() {
    let home = Home::new();
    let second = EventLog::open(home.dir.path()).unwrap();
    let mut changes = second.changes();
    changes.mark_unchanged();
    home.append(1, invited(50, Level::Member, 1));
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
    home.append(1, invited(51, Level::Member, 1));
    assert_eq!(home.level(4), Some(Level::Member));
    // An event of a peer that another handle has stored already is visible too.
    home.append(1, invited(52, Level::Member, 1));
    second.receive(&home.all(), id(1), NOW).unwrap();
    assert_eq!(second.state(), home.log.state());
}
