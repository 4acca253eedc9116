//! The attacks on the event log: each raises its code, and harms nothing.

use super::*;
use crate::{Domain, SIGNATURE_BYTES};

/// The group order of Ed25519, little-endian.
const ORDER: [u8; 32] = [
    0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
];

fn policy(research: bool) -> Body {
    Body::PolicyChanged(Policy {
        research,
        ..Policy::default()
    })
}

fn advert(author: &NodeKey, depth: u32) -> Body {
    Body::ShardAdvertised(Box::new(Descriptor {
        queue_depth: depth,
        ..descriptor(author.id())
    }))
}

/// The founder, after the root's event.
fn founder() -> Author {
    Author {
        lamport: 1,
        ..Author::new(key(1))
    }
}

#[test]
fn an_event_in_anothers_name_is_refused() {
    let home = Home::new();
    let good = founder().make(policy(true));
    let signed = &good[..good.len() - SIGNATURE_BYTES];
    let with = |signature: &[u8]| [signed, signature].concat();
    let mut changed = good.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    let events = [
        with(&key(2).sign(Domain::Event, signed)),
        with(&key(1).sign(Domain::JoinRequest, signed)),
        with(&[0; SIGNATURE_BYTES]),
        changed,
    ];
    assert_eq!(codes(&home.log, &events, NOW), ["invalid_signature"; 4]);
    assert!(!home.log.state().policy.research);
    assert_eq!(codes(&home.log, &[good], NOW), [""; 0]);
    assert!(home.log.state().policy.research);
}

#[test]
fn a_malleable_signature_and_a_key_of_small_order_are_refused() {
    let home = Home::new();
    let good = founder().make(policy(true));
    let mut twin = good.clone();
    let scalar = twin.len() - 32;
    let mut carry = 0;
    for (byte, order) in twin[scalar..].iter_mut().zip(ORDER) {
        carry += u16::from(*byte) + u16::from(order);
        *byte = carry.to_le_bytes()[0];
        carry >>= 8;
    }
    // A key of order one verifies R = S*B for any message: here S = 0, R = the identity.
    let mut small = good.clone();
    let identity: [u8; 32] = std::array::from_fn(|i| u8::from(i == 0));
    let key_at = small
        .windows(32)
        .position(|w| w == key(1).id().as_bytes())
        .unwrap();
    small[key_at..key_at + 32].copy_from_slice(&identity);
    let end = small.len();
    small[end - 64..end - 32].copy_from_slice(&identity);
    small[end - 32..].fill(0);
    let mut commitment = good.clone();
    commitment[end - 64..end - 32].copy_from_slice(&identity);
    let events = [twin, small, commitment];
    assert_eq!(codes(&home.log, &events, NOW), ["invalid_signature"; 3]);
}

#[test]
fn an_admission_needs_the_signature_of_the_invite() {
    let home = Home::new();
    let mut me = founder();
    let invite = me.make(invited(50, Level::Member, 1));
    let Body::Admitted { mut request, level } = admitted(50, 2, Level::Member) else {
        unreachable!()
    };
    // Another node with the proof that was made for node 2.
    request.node = key(3).id();
    let forged = me.draft(Body::Admitted { request, level });
    assert_eq!(forged.sign(&me.key), Err(EventError::Signature));
    let honest = me
        .draft(admitted(50, 2, Level::Member))
        .sign(&me.key)
        .unwrap();
    let mut bytes = honest[..honest.len() - SIGNATURE_BYTES].to_vec();
    let node_at = bytes
        .windows(32)
        .position(|w| w == key(2).id().as_bytes())
        .unwrap();
    bytes[node_at..node_at + 32].copy_from_slice(key(3).id().as_bytes());
    let signature = me.key.sign(Domain::Event, &bytes);
    bytes.extend_from_slice(&signature);
    assert_eq!(
        codes(&home.log, &[invite, bytes], NOW),
        ["invalid_signature"]
    );
    assert_eq!(home.level(3), None);
}

#[test]
fn two_bodies_at_one_place_freeze_their_author_and_the_proof_spreads() {
    let home = Home::new();
    let mut me = founder();
    let invite = me.make(invited(50, Level::Trusted, 2));
    let admit = me.make(admitted(50, 2, Level::Trusted));
    assert_eq!(codes(&home.log, &[invite, admit], NOW), [""; 0]);
    let other = Home::joining();
    sync(&home.log, &other.log, NOW);

    let third = me.draft(policy(true));
    let mut twins: Vec<_> = [true, false]
        .map(|research| Event {
            body: policy(research),
            ..third.clone()
        })
        .iter()
        .map(|event| event.sign(&me.key).unwrap())
        .collect();
    let triplet = Event {
        body: invited(51, Level::Member, 1),
        ..third
    };
    let triplet = triplet.sign(&me.key).unwrap();
    twins.push(triplet);
    twins.sort_by_key(|raw| EventHash::of(raw).unwrap());
    // The highest hash first: it takes effect, and is replaced in the proof by the others.
    twins.reverse();
    let received = home.log.receive(&twins, key(99).id(), NOW).unwrap();
    assert_eq!(received.accepted, [0, 1, 2]);
    assert_eq!(codes(&home.log, &twins, NOW), ["log_fork"]);
    let later = Event {
        seq: 4,
        lamport: 90,
        lane: Lane::Durable {
            prev: EventHash::of(&twins[0]).unwrap(),
        },
        ..me.draft(policy(true))
    };
    assert_eq!(
        codes(&home.log, &[later.sign(&me.key).unwrap()], NOW),
        ["log_fork"]
    );

    let check = |log: &EventLog| {
        let state = log.state();
        assert!(state.is_frozen(&key(1).id()));
        assert_eq!(state.level(&key(1).id()), None);
        // What it did before the fork stays.
        assert_eq!(state.level(&key(2).id()), Some(Level::Trusted));
        assert!(!state.policy.research);
        let (_, fork) = state.frozen().next().unwrap();
        let mut proof: Vec<_> = twins.iter().map(|t| EventHash::of(t).unwrap()).collect();
        proof.sort();
        assert_eq!((fork.seq, &fork.proof[..]), (3, &proof[..2]));
        assert!(log.is_consistent());
    };
    check(&home.log);
    let refused = home.log.append(&key(1), policy(true), NOW).unwrap_err();
    assert_eq!(refused.code(), "log_fork");
    // A node that knows one of the two bodies and takes it for the whole story.
    assert_eq!(codes(&other.log, &twins[..1], NOW), [""; 0]);
    assert!(sync(&home.log, &other.log, NOW) > 0);
    check(&other.log);
    assert_eq!(other.log.state(), home.log.state());
    assert_eq!(other.log.heads(), home.log.heads());
}

#[test]
fn different_histories_of_one_length_are_noticed_when_heads_are_compared() {
    let (home, other) = (Home::new(), Home::joining());
    sync(&home.log, &other.log, NOW);
    let me = founder();
    for (log, research) in [(&home.log, true), (&other.log, false)] {
        let event = me.draft(policy(research)).sign(&me.key).unwrap();
        assert_eq!(codes(log, &[event], NOW), [""; 0]);
    }
    assert_eq!(sync(&home.log, &other.log, NOW), 1);
    assert!(other.log.state().is_frozen(&key(1).id()));
    sync(&other.log, &home.log, NOW);
    assert_eq!(other.log.state(), home.log.state());
    assert_eq!(other.log.heads(), home.log.heads());
}

#[test]
fn nobody_advertises_the_shard_of_another() {
    let home = Home::new();
    let me = founder();
    let good = me.say(1, NOW, advert(&me.key, 0));
    let mut signed = good[..good.len() - SIGNATURE_BYTES].to_vec();
    let (mine, other) = (me.key.id().to_string(), key(2).id().to_string());
    let host = signed
        .windows(mine.len())
        .position(|w| w == mine.as_bytes())
        .unwrap();
    signed[host..host + mine.len()].copy_from_slice(other.as_bytes());
    let forged = [&signed[..], &me.key.sign(Domain::Event, &signed)].concat();
    assert_eq!(codes(&home.log, &[forged], NOW), ["log_malformed"]);
    assert_eq!(home.log.state().shards(NOW).count(), 0);
    assert_eq!(codes(&home.log, &[good], NOW), [""; 0]);
    assert_eq!(home.log.state().shards(NOW).count(), 1);
}

#[test]
fn an_old_descriptor_is_stale() {
    let home = Home::new();
    let me = founder();
    let (old, new) = (
        me.say(1, NOW, advert(&me.key, 0)),
        me.say(2, NOW + 1, advert(&me.key, 9)),
    );
    assert_eq!(codes(&home.log, std::slice::from_ref(&new), NOW), [""; 0]);
    assert_eq!(
        codes(&home.log, std::slice::from_ref(&old), NOW),
        ["log_stale"]
    );
    let state = home.log.state();
    let advert = state.shards(NOW).next().unwrap();
    assert_eq!(advert.descriptor.queue_depth, 9);
    // After its time it is refused by a log that never heard of the slot.
    let other = Home::new();
    assert_eq!(
        codes(&other.log, &[old, new], NOW + 2 * ADVERT_LIFE_MS),
        ["log_stale", "log_stale"]
    );
}

#[test]
fn an_expired_event_leaves_a_mark_as_long_as_an_older_one_could_come_back() {
    let home = Home::new();
    let me = founder();
    let long = Event {
        seq: 1,
        lane: Lane::Ephemeral {
            slot: "shard:m:0-7".into(),
            expires_ms: NOW + MAX_LIFE_MS,
        },
        ..me.draft(advert(&me.key, 0))
    };
    let long = long.sign(&me.key).unwrap();
    let short = me.say(
        2,
        NOW,
        Body::ShardWithdrawn {
            shard_id: "m:0-7".into(),
        },
    );
    assert_eq!(codes(&home.log, &[long.clone(), short], NOW), [""; 0]);
    let later = NOW + 2 * ADVERT_LIFE_MS;
    assert_eq!(home.log.compact(later).unwrap(), Compacted::default());
    assert_eq!(codes(&home.log, &[long], later), ["log_stale"]);
    assert_eq!(home.log.state().shards(later).count(), 0);
    assert_eq!(home.log.compact(NOW + MAX_LIFE_MS).unwrap().ephemeral, 1);
}

#[test]
fn a_timestamp_ten_years_ahead_is_refused_until_its_time() {
    let home = Home::new();
    let me = founder();
    let ten_years = NOW + 10 * 365 * 86_400_000;
    let ahead = Event {
        time_ms: ten_years,
        ..me.draft(policy(true))
    };
    let raw = ahead.sign(&me.key).unwrap();
    assert_eq!(
        codes(&home.log, std::slice::from_ref(&raw), NOW),
        ["log_time"]
    );
    let edge = ten_years - MAX_AHEAD_MS;
    assert_eq!(
        codes(&home.log, std::slice::from_ref(&raw), edge - 1),
        ["log_time"]
    );
    assert_eq!(codes(&home.log, &[raw], edge), [""; 0]);
    // Lamport times cannot run ahead instead: they are bounded by the event's time.
    let leap = Event {
        lamport: NOW + 1,
        ..me.draft(policy(true))
    };
    assert!(matches!(
        leap.sign(&me.key),
        Err(EventError::Malformed { .. })
    ));
}

#[test]
fn a_leap_of_the_lamport_clock_stops_nobody() {
    let home = Home::new();
    let mut me = founder();
    let leap = Event {
        lamport: NOW + MAX_AHEAD_MS,
        time_ms: NOW + MAX_AHEAD_MS,
        ..me.draft(policy(true))
    };
    let leap = me.sign(&leap);
    assert_eq!(codes(&home.log, &[leap], NOW), [""; 0]);
    // The root comes after it, by a time that others accept within a millisecond.
    home.log.append(&root(), policy(false), NOW).unwrap();
    let other = Home::joining();
    sync(&home.log, &other.log, NOW + 1);
    assert_eq!(other.log.state(), home.log.state());
    assert!(!other.log.state().policy.research);
}

#[test]
fn a_flood_is_cut_off_by_the_quota_of_its_author() {
    let dir = folder();
    let quotas = Quotas {
        events_per_author: 100,
        stranger_events: 20,
        ..Quotas::default()
    };
    drop(EventLog::create(
        dir.path(),
        &root(),
        key(1).id(),
        "Elm Street",
        Policy::default(),
        NOW,
    ));
    let log = EventLog::open_with(dir.path(), quotas).unwrap();
    let mut me = founder();
    let flood: Vec<_> = (0..300).map(|i| me.make(policy(i % 2 == 0))).collect();
    assert_eq!(codes(&log, &flood, NOW), ["log_quota"; 200]);
    let refused = log.append(&key(1), policy(true), NOW).unwrap_err();
    assert_eq!(refused.code(), "log_quota");
    // Strangers share one quota, however many keys they make.
    let strangers: Vec<_> = (100..200)
        .map(|i| Author::new(key(i)).make(invited(50, Level::Member, 1)))
        .collect();
    assert_eq!(codes(&log, &strangers, NOW), ["log_quota"; 80]);
    // Others are not hindered.
    log.append(&root(), policy(true), NOW).unwrap();
    // A day later the strangers' events are gone, and none of the members'.
    let done = log.compact(NOW + 86_400_000).unwrap();
    assert_eq!(done.strangers, 20);
    assert!(log.verify().unwrap().problems.is_empty());
    assert_eq!(log.verify().unwrap().durable, 102);
}

#[test]
fn large_events_use_up_the_quota_of_bytes() {
    let dir = folder();
    let quotas = Quotas {
        bytes_per_author: 20_000,
        ..Quotas::default()
    };
    let log = EventLog::create(
        dir.path(),
        &root(),
        key(1).id(),
        "E",
        Policy::default(),
        NOW,
    );
    drop(log.unwrap());
    let log = EventLog::open_with(dir.path(), quotas).unwrap();
    let mut me = founder();
    let flood: Vec<_> = (0..10)
        .map(|i| {
            me.make(Body::Unknown {
                kind: "notes.written".into(),
                slot: None,
                bytes: vec![i; MAX_BODY_BYTES],
            })
        })
        .collect();
    assert_eq!(codes(&log, &flood, NOW), ["log_quota"; 7]);
}

#[test]
fn slots_are_bounded_and_the_newest_are_kept() {
    let home = Home::new();
    let me = founder();
    let slot = |i: u64| {
        me.say(
            i,
            NOW,
            Body::ShardWithdrawn {
                shard_id: format!("m:{i}-{i}"),
            },
        )
    };
    let max = MAX_SLOTS as u64;
    let flood: Vec<_> = (10..10 + 3 * max).map(slot).collect();
    assert_eq!(codes(&home.log, &flood, NOW), [""; 0]);
    assert_eq!(codes(&home.log, &[slot(1)], NOW), ["log_quota"]);
    assert_eq!(home.log.verify().unwrap().ephemeral, max);
    // In any order the same ones stay.
    let other = Home::new();
    let backwards: Vec<_> = flood.into_iter().rev().collect();
    assert_eq!(
        codes(&other.log, &backwards, NOW),
        vec!["log_quota"; 2 * MAX_SLOTS]
    );
    assert_eq!(
        other.log.state().live_slots(),
        home.log.state().live_slots()
    );
}

#[test]
fn events_of_another_community_are_refused() {
    let home = Home::new();
    let event = Event {
        community: CommunityId::from(key(77).id()),
        ..founder().draft(policy(true))
    };
    let raw = event.sign(&key(1)).unwrap();
    assert_eq!(codes(&home.log, &[raw], NOW), ["log_foreign"]);
    assert_eq!(
        codes(&home.log, &[vec![], vec![7; 99]], NOW),
        ["log_malformed"; 2]
    );
}

#[test]
fn a_revoked_node_cannot_write_itself_into_the_past() {
    let home = Home::new();
    let mut me = founder();
    let mut other = Author::new(key(2));
    let mut events = vec![
        me.make(invited(50, Level::Trusted, 1)),
        me.make(invited(51, Level::Member, 5)),
        me.make(admitted(50, 2, Level::Trusted)),
    ];
    other.lamport = me.lamport;
    events.push(other.make(admitted(51, 3, Level::Member)));
    assert_eq!(codes(&home.log, &events, NOW), [""; 0]);
    // Enough room before the revocation for an event that sorts there.
    me.lamport = 100;
    let revoke = me.make(Body::Revoked {
        node: key(2).id(),
        last_seq: 1,
    });
    assert_eq!(codes(&home.log, &[revoke], NOW), [""; 0]);
    assert!(home.log.state().is_revoked(&key(2).id()));
    assert_eq!(home.level(3), Some(Level::Member));
    let backdated = other.make(admitted(51, 4, Level::Member));
    assert_eq!(
        codes(&home.log, std::slice::from_ref(&backdated), NOW),
        [""; 0]
    );
    assert_eq!(home.level(4), None);
    assert!(home.log.is_consistent());
    // The other way round: the event is there first, and is cut off.
    let second = Home::joining();
    let all = home.log.missing(&second.log.heads(), 99, 1 << 20).unwrap();
    codes(&second.log, &[backdated], NOW);
    codes(&second.log, &all.events, NOW);
    assert_eq!(second.log.state(), home.log.state());
    assert!(second.log.is_consistent());
}

/// Anchors 1 and 2, a trusted member 3 and an open invite of 1; what the two have written.
fn two_anchors() -> (Home, Author, Author) {
    let home = Home::new();
    let (mut me, mut root) = (founder(), Author::new(root()));
    let mut events = vec![
        me.make(invited(50, Level::Trusted, 2)),
        me.make(admitted(50, 2, Level::Trusted)),
        me.make(admitted(50, 3, Level::Trusted)),
        me.make(invited(51, Level::Member, 5)),
    ];
    let created = home
        .log
        .missing(&Heads::empty(home.log.community()), 1, 1 << 20);
    root.prev = EventHash::of(&created.unwrap().events[0]).unwrap();
    root.seq = 1;
    root.lamport = me.lamport;
    events.push(root.make(level_of(2, Level::Anchor, 0)));
    assert_eq!(codes(&home.log, &events, NOW), [""; 0]);
    assert_eq!(home.level(2), Some(Level::Anchor));
    (home, me, root)
}

fn level_of(seed: u8, level: Level, last_seq: u64) -> Body {
    Body::LevelChanged {
        node: key(seed).id(),
        level,
        last_seq: Some(last_seq),
    }
}

#[test]
fn a_demoted_anchor_cannot_write_itself_into_the_past() {
    let (home, _, mut root) = two_anchors();
    let mut demoted = Author::new(key(2));
    demoted.lamport = root.lamport;
    let before = demoted.make(admitted(51, 4, Level::Member));
    assert_eq!(codes(&home.log, &[before], NOW), [""; 0]);
    // Enough room before the demotion for events that sort there.
    root.lamport = 100;
    let demotion = root.make(level_of(2, Level::Trusted, 1));
    assert_eq!(codes(&home.log, &[demotion], NOW), [""; 0]);
    let state = home.log.state();
    let backdated = [
        demoted.make(invited(52, Level::Trusted, 9)),
        demoted.make(admitted(52, 5, Level::Trusted)),
        demoted.make(policy(true)),
        demoted.make(Body::Revoked {
            node: key(3).id(),
            last_seq: 0,
        }),
        demoted.make(level_of(3, Level::Member, 0)),
        demoted.make(Body::InviteWithdrawn {
            invite: key(51).id(),
        }),
    ];
    assert!(demoted.lamport < 100);
    assert_eq!(codes(&home.log, &backdated, NOW), [""; 0]);
    assert_eq!(home.log.state(), state);
    assert_eq!(home.level(4), Some(Level::Member), "what was seen counts");
    // What a trusted member may do, it still may, and no other way round gives another state.
    let allowed = demoted.make(admitted(51, 6, Level::Member));
    assert_eq!(
        codes(&home.log, std::slice::from_ref(&allowed), NOW),
        [""; 0]
    );
    assert_eq!(home.level(6), Some(Level::Member));
    assert!(home.log.is_consistent());
    let second = Home::joining();
    let all = home.log.missing(&second.log.heads(), 99, 1 << 20).unwrap();
    codes(&second.log, &[allowed], NOW);
    codes(&second.log, &backdated, NOW);
    codes(&second.log, &all.events, NOW);
    assert_eq!(second.log.state(), home.log.state());
    assert!(second.log.is_consistent());
}

#[test]
fn a_trusted_member_that_an_anchor_put_down_admits_nobody_in_the_past() {
    let (home, mut me, _) = two_anchors();
    let mut demoted = Author::new(key(3));
    demoted.lamport = me.lamport;
    me.lamport = 100;
    let demotion = me.make(level_of(3, Level::Member, 0));
    let backdated = demoted.make(admitted(51, 4, Level::Member));
    let sybil = Author::new(key(4)).make(Body::Named { name: "4".into() });
    // Before and after the demotion is known: there it has an effect for a while.
    let second = Home::joining();
    let all = home.log.missing(&second.log.heads(), 99, 1 << 20).unwrap();
    codes(&second.log, &all.events, NOW);
    codes(&second.log, &[backdated.clone(), sybil.clone()], NOW);
    assert_eq!(second.level(4), Some(Level::Member));
    codes(&second.log, std::slice::from_ref(&demotion), NOW);
    codes(&home.log, &[demotion, backdated, sybil], NOW);
    for log in [&home.log, &second.log] {
        assert_eq!(log.state().level(&key(4).id()), None);
        assert_eq!(log.state().level(&key(3).id()), Some(Level::Member));
        assert!(log.is_consistent());
    }
    assert_eq!(second.log.state(), home.log.state());
}

#[test]
fn a_change_of_level_without_a_bound_is_read_as_it_was() {
    let (home, mut me, _) = two_anchors();
    let body = Body::LevelChanged {
        node: key(3).id(),
        level: Level::Member,
        last_seq: None,
    };
    let raw = me.make(body.clone());
    assert_eq!(Event::verify(&raw).unwrap().body, body);
    assert_eq!(codes(&home.log, &[raw], NOW), [""; 0]);
    assert_eq!(home.level(3), Some(Level::Member));
}

#[test]
fn the_invite_of_who_is_put_out_lets_nobody_else_in() {
    let (home, mut me, _) = two_anchors();
    let events = [
        me.make(admitted(51, 4, Level::Member)),
        me.make(Body::Revoked {
            node: key(4).id(),
            last_seq: 0,
        }),
        me.make(admitted(51, 5, Level::Member)),
    ];
    assert_eq!(codes(&home.log, &events, NOW), [""; 0]);
    assert_eq!(home.level(5), None);
    let state = home.log.state();
    let invite = state.invites().find(|(key, _)| **key == self::key(51).id());
    assert!(invite.unwrap().1.withdrawn);
    assert!(home.log.is_consistent());
}
