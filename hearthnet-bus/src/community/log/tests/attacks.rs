//! Attacks on the event log. Each is refused with its code, or has no effect.

use super::*;
use crate::{Domain, SIGNATURE_BYTES};

/// Group order of Ed25519, little-endian.
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

/// The founder, positioned after the root's event.
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
    // Another node with the proof made for node 2.
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
    // The highest hash comes first: it takes effect, then the others replace it in the proof.
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
        // Effects from before the fork stay.
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
    // A node that knows only one of the two bodies.
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
fn a_node_cannot_advertise_the_shard_of_another_node() {
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
    // A log that never saw the slot refuses the expired event.
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
    // Lamport times cannot run ahead either: the event's time bounds them.
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
fn a_post_dated_event_does_not_block_other_authors() {
    let home = Home::new();
    let mut me = founder();
    let leap = Event {
        lamport: NOW + MAX_AHEAD_MS,
        time_ms: NOW + MAX_AHEAD_MS,
        ..me.draft(policy(true))
    };
    let leap = me.sign(&leap);
    assert_eq!(codes(&home.log, &[leap], NOW), [""; 0]);
    // The root's next event sorts after it, at a time that others accept within a millisecond.
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
    // Other authors are not affected.
    log.append(&root(), policy(true), NOW).unwrap();
    // A day later the strangers' events are dropped, and none of the members'.
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
    // The same slots stay, in any order of arrival.
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
    // Leaves room before the revocation for a backdated event.
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
    // Reverse order: the event arrives first and is then cut off.
    let second = Home::joining();
    let all = home.log.missing(&second.log.heads(), 99, 1 << 20).unwrap();
    codes(&second.log, &[backdated], NOW);
    codes(&second.log, &all.events, NOW);
    assert_eq!(second.log.state(), home.log.state());
    assert!(second.log.is_consistent());
}

/// Anchors 1 and 2, a trusted member 3 and an open invite of 1. Returns 1 and the root as authors.
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

/// Withdrawal of an invite that names these members.
fn withdrawn(invite: u8, named: Option<&[u8]>) -> Body {
    let named = named.map(|seeds| seeds.iter().map(|seed| key(*seed).id()).collect());
    Body::InviteWithdrawn {
        invite: key(invite).id(),
        members: named,
    }
}

#[test]
fn a_demoted_anchor_cannot_write_itself_into_the_past() {
    let (home, _, mut root) = two_anchors();
    let mut demoted = Author::new(key(2));
    demoted.lamport = root.lamport;
    let before = demoted.make(admitted(51, 4, Level::Member));
    assert_eq!(codes(&home.log, &[before], NOW), [""; 0]);
    // Leaves room before the demotion for backdated events.
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
        demoted.make(withdrawn(51, Some(&[]))),
    ];
    assert!(demoted.lamport < 100);
    assert_eq!(codes(&home.log, &backdated, NOW), [""; 0]);
    assert_eq!(home.log.state(), state);
    assert_eq!(
        home.level(4),
        Some(Level::Member),
        "effects that the root had seen stay"
    );
    // Actions that a trusted member may do still have an effect, and every order gives the same
    // state.
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
fn a_demoted_trusted_member_cannot_back_date_admissions() {
    let (home, mut me, _) = two_anchors();
    let mut demoted = Author::new(key(3));
    demoted.lamport = me.lamport;
    me.lamport = 100;
    let demotion = me.make(level_of(3, Level::Member, 0));
    let backdated = demoted.make(admitted(51, 4, Level::Member));
    let sybil = Author::new(key(4)).make(Body::Named { name: "4".into() });
    // The second node gets the backdated events first. There they have an effect for a while.
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
fn a_back_dated_admission_by_a_withdrawn_invite_has_no_effect() {
    let (home, mut me, _) = two_anchors();
    let mut liar = Author::new(key(3));
    liar.lamport = me.lamport;
    // Node 4 joined by the invite in time. Node 3 has written no event yet, and backdates the
    // admission of node 5.
    assert_eq!(
        codes(&home.log, &[me.make(admitted(51, 4, Level::Member))], NOW),
        [""; 0]
    );
    me.lamport = 100;
    let end = me.make(withdrawn(51, Some(&[4])));
    let admission = liar.make(admitted(51, 5, Level::Member));
    let mut five = Author::new(key(5));
    five.lamport = liar.lamport;
    let past = [admission, five.make(Body::Named { name: "5".into() })];
    // One node gets the admission after the withdrawal, the other before it.
    let second = Home::joining();
    codes(&second.log, &all_of(&home.log), NOW);
    codes(&second.log, &past, NOW);
    assert_eq!(second.level(5), Some(Level::Member));
    codes(&second.log, std::slice::from_ref(&end), NOW);
    codes(
        &home.log,
        &[std::slice::from_ref(&end), &past[..]].concat(),
        NOW,
    );
    for home in [&home, &second] {
        assert_eq!((home.level(4), home.level(5)), (Some(Level::Member), None));
        assert!(home.log.is_consistent());
    }
    assert_eq!(second.log.state(), home.log.state());
    // Node 5 can join by another invite.
    let again = [
        me.make(invited(52, Level::Member, 1)),
        me.make(admitted(52, 5, Level::Member)),
    ];
    assert_eq!(codes(&home.log, &again, NOW), [""; 0]);
    assert_eq!(home.level(5), Some(Level::Member));
}

#[test]
fn a_withdrawal_removes_only_members_that_its_author_may_revoke() {
    let (home, mut me, _) = two_anchors();
    let mut two = Author::new(key(2));
    let mut member = Author::new(key(4));
    let open = Body::PolicyChanged(Policy {
        who_may_invite: Level::Member,
        ..Policy::default()
    });
    let before = [me.make(open), me.make(admitted(51, 4, Level::Member))];
    member.lamport = me.lamport;
    let own = [
        member.make(invited(60, Level::Member, 2)),
        member.make(invited(61, Level::Member, 2)),
    ];
    me.lamport = member.lamport;
    let came = [
        me.make(admitted(60, 5, Level::Member)),
        me.make(admitted(61, 6, Level::Member)),
    ];
    member.lamport = me.lamport;
    two.lamport = me.lamport;
    let ends = [
        // A member with an empty list for its own invite, an anchor with an empty list for an
        // invite of another anchor, and a list that is absent, as in older events.
        member.make(withdrawn(60, Some(&[]))),
        two.make(withdrawn(50, Some(&[]))),
        two.make(withdrawn(61, None)),
    ];
    for events in [&before[..], &own, &came, &ends] {
        assert_eq!(codes(&home.log, events, NOW), [""; 0]);
    }
    let levels = [2, 3, 4, 5, 6].map(|seed| home.level(seed));
    let member = Some(Level::Member);
    // Node 3 joined by invite 50 too, and is below an anchor.
    assert_eq!(levels, [Some(Level::Anchor), None, member, member, member]);
    assert!(home.log.is_consistent());
}

#[test]
fn a_withdrawal_names_all_members_by_the_invite() {
    let (home, mut me, _) = two_anchors();
    let came = [
        me.make(admitted(51, 4, Level::Member)),
        me.make(admitted(51, 5, Level::Member)),
    ];
    assert_eq!(codes(&home.log, &came, NOW), [""; 0]);
    home.log.append(&key(1), withdrawn(51, None), NOW).unwrap();
    let last = all_of(&home.log).pop().unwrap();
    let body = Event::verify(&last).unwrap().body;
    assert_eq!(body, withdrawn(51, Some(&[4, 5])));
    let member = Some(Level::Member);
    assert_eq!((home.level(4), home.level(5)), (member, member));
    // An older event has no list. A list of more than 64 members is refused.
    let old = me.draft(withdrawn(51, None)).sign(&key(1)).unwrap();
    assert_eq!(Event::verify(&old).unwrap().body, withdrawn(51, None));
    let many: Vec<u8> = (1..=65).collect();
    let long = me.draft(withdrawn(51, Some(&many))).sign(&key(1));
    assert!(long.is_err());
}

#[test]
fn a_revocation_closes_the_invite_of_the_revoked_member() {
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

/// Milliseconds of a day.
const DAY: u64 = 86_400_000;

/// All events that a log sends to a peer without events.
fn all_of(log: &EventLog) -> Vec<Vec<u8>> {
    let nothing = Heads::empty(log.community());
    log.missing(&nothing, 4096, 1 << 24).unwrap().events
}

#[test]
fn a_post_dated_event_does_not_post_date_events_of_others() {
    let home = Home::new();
    let mut me = founder();
    let leap = Event {
        lamport: NOW + MAX_AHEAD_MS,
        time_ms: NOW + MAX_AHEAD_MS,
        ..me.draft(policy(true))
    };
    assert_eq!(codes(&home.log, &[me.sign(&leap)], NOW), [""; 0]);
    for n in 0..5 {
        home.log.append(&root(), policy(n % 2 == 0), NOW).unwrap();
    }
    home.log.append(&root(), advert_of(&root()), NOW).unwrap();
    let written: Vec<Event> = all_of(&home.log)
        .iter()
        .map(|raw| Event::decode_stored(raw).unwrap())
        .filter(|event| event.author == root().id())
        .collect();
    assert_eq!(written.len(), 7);
    assert!(written.iter().all(|event| event.time_ms == NOW));
    let said = written.iter().find_map(|event| match event.lane {
        Lane::Ephemeral { expires_ms, .. } => Some(expires_ms),
        Lane::Durable { .. } => None,
    });
    assert_eq!(said, Some(NOW + ADVERT_LIFE_MS));
    // On a clock that is two seconds slow, only the post-dated event is beyond its limit.
    let slow = Home::joining();
    let refused = codes(&slow.log, &all_of(&home.log), NOW - 2_000);
    assert_eq!(refused, ["log_time"]);
    assert_eq!(slow.log.state().state_hash(), home.log.state().state_hash());
}

/// An ephemeral event of the author.
fn advert_of(author: &NodeKey) -> Body {
    Body::NodeSeen {
        endpoints: vec![],
        name: author.id().short(),
        software: "s".into(),
    }
}

#[test]
fn a_post_dated_event_takes_effect_at_its_time_on_every_node() {
    let home = Home::new();
    let mut me = founder();
    let leap = Event {
        lamport: NOW + 60_000,
        time_ms: NOW + 60_000,
        ..me.draft(policy(true))
    };
    let leap = me.sign(&leap);
    let next = Event {
        time_ms: NOW + 60_001,
        ..me.draft(invited(50, Level::Member, 1))
    };
    let next = me.sign(&next);
    assert_eq!(codes(&home.log, &[leap, next], NOW), [""; 0]);
    let other = Home::joining();
    assert_eq!(sync(&home.log, &other.log, NOW), 3);
    for log in [&home.log, &other.log] {
        assert!(!log.state().policy.research);
        assert_eq!(log.state().invites().count(), 0);
        assert!(log.is_consistent());
        log.maintain(&key(9), NOW + 59_999).unwrap();
        assert!(!log.state().policy.research);
        log.maintain(&key(9), NOW + 60_000).unwrap();
        assert!(log.state().policy.research && log.is_consistent());
    }
    home.log
        .append(&root(), policy(false), NOW + 60_001)
        .unwrap();
    other.log.maintain(&key(9), NOW + 60_002).unwrap();
    sync(&home.log, &other.log, NOW + 60_002);
    assert_eq!(home.log.state().invites().count(), 1);
    assert!(!home.log.state().policy.research);
    assert_eq!(other.log.state(), home.log.state());
    assert!(home.log.verify().unwrap().problems.is_empty());
}

#[test]
fn post_dated_events_are_accepted_with_the_next_event_of_a_corrected_clock() {
    let (home, other) = (Home::new(), Home::joining());
    for seed in [50, 51] {
        let body = invited(seed, Level::Member, 1);
        home.log.append(&key(1), body, NOW + DAY).unwrap();
    }
    let before = all_of(&home.log);
    assert_eq!(codes(&other.log, &before, NOW), ["log_time"; 2]);
    // The clock is right again.
    home.log.append(&key(1), policy(true), NOW).unwrap();
    let all = all_of(&home.log);
    assert_eq!(codes(&other.log, &all, NOW), [""; 0]);
    assert_eq!(other.log.state(), home.log.state());
    assert_eq!(other.log.state().invites().count(), 2);
    // Events that arrive first wait for their predecessors.
    let third = Home::joining();
    let (last, rest) = all.split_last().unwrap();
    assert_eq!(codes(&third.log, std::slice::from_ref(last), NOW), [""; 0]);
    assert_eq!(codes(&third.log, &rest[..2], NOW), ["log_time"]);
    assert_eq!(codes(&third.log, &rest[2..], NOW), [""; 0]);
    assert_eq!(codes(&third.log, rest, NOW), [""; 0]);
    assert_eq!(third.log.state(), home.log.state());
    assert!(third.log.is_consistent());
    // Only the event that names it vouches for it, and only with a greater Lamport time.
    let fourth = Home::joining();
    let mut me = founder();
    let ahead = Event {
        time_ms: NOW + DAY,
        ..me.draft(policy(true))
    };
    let ahead = me.sign(&ahead);
    let unrelated = founder().make(policy(false));
    assert_eq!(codes(&fourth.log, &[ahead, unrelated], NOW), ["log_time"]);
}

/// A community with members 2, 3 and 4 at these levels, whose announcements show clocks that are
/// ahead by so many ms.
fn with_clocks(said: [(Level, u64); 3]) -> Home {
    let home = Home::new();
    for (seed, (level, _)) in (2..).zip(said) {
        home.log
            .append(&key(1), invited(48 + seed, level, 1), NOW)
            .unwrap();
        home.log
            .append(&key(1), admitted(48 + seed, seed, level), NOW)
            .unwrap();
    }
    for (seed, (_, ahead)) in (2..).zip(said) {
        let time = NOW + ahead;
        let seen = Author::new(key(seed)).say(time, time, advert_of(&key(seed)));
        home.log.receive(&[seen], key(seed).id(), NOW).unwrap();
    }
    home
}

#[test]
fn nothing_is_written_by_a_clock_that_trusted_members_contradict() {
    use Level::{Member, Trusted};
    let clock = |home: &Home, body| {
        let written = home.log.append(&key(1), body, NOW);
        written.map_err(|error| error.code().to_string())
    };
    let wrong = Err("clock_wrong".to_owned());
    let home = with_clocks([(Trusted, DAY), (Trusted, DAY), (Trusted, 0)]);
    assert_eq!(clock(&home, policy(true)).map(drop), wrong);
    // Ephemeral events are still written: other nodes compare clocks by them.
    assert!(clock(&home, advert_of(&key(1))).is_ok());
    // The node to be revoked does not count; of the remaining two, the nearer clock does.
    let out = |seed| Body::Revoked {
        node: key(seed).id(),
        last_seq: 0,
    };
    assert!(clock(&home, out(2)).is_ok());
    // Plain members do not count if a trusted member was heard.
    let home = with_clocks([(Member, DAY), (Member, DAY), (Trusted, 1000)]);
    assert!(clock(&home, policy(true)).is_ok());
    let home = with_clocks([(Member, DAY), (Member, DAY), (Member, 1000)]);
    assert_eq!(clock(&home, policy(true)).map(drop), wrong);
    // Nine minutes are tolerated, and samples from before the clock was set are ignored.
    let home = with_clocks([(Trusted, 540_000); 3]);
    assert!(clock(&home, policy(true)).is_ok());
    let home = with_clocks([(Trusted, DAY); 3]);
    assert!(home.log.append(&key(1), policy(true), NOW + DAY).is_ok());
}

#[test]
fn clock_set_is_written_once_and_only_if_other_clocks_agree() {
    use Level::Trusted;
    let late = |home: &Home| home.log.append(&key(1), policy(true), NOW + DAY).unwrap();
    let events = |home: &Home| home.log.heads().authors[&key(1).id()].seq;
    let alone = Home::new();
    late(&alone);
    alone.log.maintain(&key(1), NOW).unwrap();
    assert_eq!(events(&alone), 1);
    let home = with_clocks([(Trusted, 0); 3]);
    let before = events(&home);
    home.log.maintain(&key(1), NOW).unwrap();
    assert_eq!(events(&home), before);
    late(&home);
    for _ in 0..3 {
        home.log.maintain(&key(1), NOW).unwrap();
    }
    assert_eq!(events(&home), before + 2);
    let other = Home::joining();
    assert_eq!(codes(&other.log, &all_of(&home.log), NOW), [""; 0]);
    assert_eq!(other.log.state(), home.log.state());
    let wrong = with_clocks([(Trusted, DAY); 3]);
    let before = events(&wrong);
    wrong
        .log
        .append(&key(1), policy(true), NOW + 3 * DAY)
        .unwrap();
    assert!(wrong.log.maintain(&key(1), NOW).is_err());
    assert_eq!(events(&wrong), before + 1);
}

#[test]
fn ephemeral_events_gain_no_life_by_post_dating_and_are_rate_limited() {
    let home = Home::new();
    let me = founder();
    let ahead = me.say(1, NOW + 590_000, advert(&me.key, 0));
    assert_eq!(codes(&home.log, &[ahead], NOW), [""; 0]);
    assert_eq!(home.log.state().shards(NOW + ADVERT_LIFE_MS - 1).count(), 1);
    assert_eq!(home.log.state().shards(NOW + ADVERT_LIFE_MS).count(), 0);

    let home = Home::new();
    let flood: Vec<_> = (1..=300)
        .map(|n| me.say(n, NOW, advert(&me.key, 0)))
        .collect();
    assert_eq!(codes(&home.log, &flood, NOW), ["log_quota"; 44]);
    let more: Vec<_> = (301..=310)
        .map(|n| me.say(n, NOW, advert(&me.key, 0)))
        .collect();
    assert_eq!(codes(&home.log, &more, NOW + 1000), ["log_quota"; 6]);
}

#[test]
fn rework_by_back_dated_events_is_budgeted_and_revocations_do_not_wait() {
    let home = Home::new();
    let mut me = founder();
    let mut all = vec![
        me.make(invited(50, Level::Trusted, 1)),
        me.make(admitted(50, 2, Level::Trusted)),
    ];
    me.lamport = 100_000;
    all.extend((0..400).map(|n| me.make(policy(n % 2 == 0))));
    assert_eq!(codes(&home.log, &all, NOW), [""; 0]);
    let mut attacker = Author {
        lamport: 3,
        ..Author::new(key(2))
    };
    let note = |n: u64| Body::Unknown {
        kind: "notes.written".into(),
        slot: None,
        bytes: n.to_be_bytes().to_vec(),
    };
    for n in 0..400 {
        let event = attacker.make(note(n));
        assert_eq!(codes(&home.log, &[event], NOW), [""; 0]);
    }
    let spent = home.log.reworked();
    assert!((100_000..101_000).contains(&spent), "{spent}");
    // Meanwhile, an event that sorts last takes effect at once.
    let out = Body::Revoked {
        node: key(2).id(),
        last_seq: 400,
    };
    assert_eq!(codes(&home.log, &[me.make(out)], NOW), [""; 0]);
    assert!(home.log.state().is_revoked(&key(2).id()));
    // Once there is budget, all events take effect.
    home.log.maintain(&key(9), NOW + 1000).unwrap();
    assert!(home.log.is_consistent());
    assert!(home.log.reworked() > spent);
}

#[test]
fn a_node_revoked_after_leaving_cannot_rejoin_by_its_invite() {
    let home = Home::new();
    for body in [
        invited(50, Level::Trusted, 3),
        admitted(50, 2, Level::Trusted),
    ] {
        home.log.append(&key(1), body, NOW).unwrap();
    }
    home.log.append(&key(2), Body::Left {}, NOW).unwrap();
    assert_eq!(
        home.log.state().left().copied().collect::<Vec<_>>(),
        [key(2).id()]
    );
    let out = Body::Revoked {
        node: key(2).id(),
        last_seq: 1,
    };
    home.log.append(&key(1), out, NOW).unwrap();
    assert_eq!(home.log.state().left().count(), 0);
    let back = home
        .log
        .append(&key(1), admitted(50, 3, Level::Trusted), NOW);
    assert_eq!(back.unwrap_err().code(), "bad_invite");
    let other = Home::joining();
    sync(&home.log, &other.log, NOW);
    assert_eq!(other.log.state(), home.log.state());
    // A node whose code is used up need not be remembered, and a node that came back is not gone.
    let home = Home::new();
    for body in [
        invited(50, Level::Trusted, 2),
        admitted(50, 2, Level::Trusted),
    ] {
        home.log.append(&key(1), body, NOW).unwrap();
    }
    home.log.append(&key(2), Body::Left {}, NOW).unwrap();
    home.log
        .append(&key(1), admitted(50, 2, Level::Trusted), NOW)
        .unwrap();
    home.log.append(&key(2), Body::Left {}, NOW).unwrap();
    assert!(home.log.is_consistent());
}

/// Syncs both ways until both logs have all events.
fn exchange(a: &EventLog, b: &EventLog) {
    sync(a, b, NOW);
    sync(b, a, NOW);
    assert_eq!(a.state(), b.state());
    assert_eq!(a.heads(), b.heads());
    assert!(a.is_consistent() && b.is_consistent());
    assert_eq!(sync(a, b, NOW) + sync(b, a, NOW), 0);
}

#[test]
fn events_of_a_root_key_used_in_two_places_hold_in_both() {
    let home = Home::new();
    for seed in [2, 3] {
        for body in [
            invited(48 + seed, Level::Member, 1),
            admitted(48 + seed, seed, Level::Member),
        ] {
            home.log.append(&key(1), body, NOW).unwrap();
        }
    }
    let there = Home::joining();
    exchange(&home.log, &there.log);
    let says = |log: &EventLog, body| log.append(&root(), body, NOW).unwrap();
    // The two copies write with the same number at the same moment.
    says(&home.log, level_of(2, Level::Anchor, 0));
    says(&home.log, policy(true));
    says(&there.log, level_of(3, Level::Trusted, 0));
    exchange(&home.log, &there.log);
    let (two, three) = (Some(Level::Anchor), Some(Level::Trusted));
    assert_eq!((home.level(2), home.level(3)), (two, three));
    assert!(home.log.state().policy.research);
    assert_eq!(home.log.state().frozen().count(), 0);
    // The history goes on from there, and forks again.
    says(&home.log, level_of(2, Level::Member, 0));
    says(&there.log, level_of(3, Level::Member, 0));
    says(&there.log, invited(60, Level::Anchor, 1));
    exchange(&home.log, &there.log);
    let member = Some(Level::Member);
    assert_eq!((home.level(2), home.level(3)), (member, member));
    // A new node gets all events, in any batches, and still has them after a restart.
    let new = Home::joining();
    assert!(sync(&home.log, &new.log, NOW) > 0);
    exchange(&home.log, &new.log);
    let found = new.log.verify().unwrap();
    assert_eq!(found.problems, Vec::<String>::new());
    let Home { log, dir } = new;
    drop(log);
    let again = EventLog::open(dir.path()).unwrap();
    assert_eq!(again.state().state_hash(), home.log.state().state_hash());
}

#[test]
fn a_community_that_was_founded_twice_with_one_key_has_one_founding() {
    let (home, other) = (Home::new(), folder());
    let twice = EventLog::create(
        other.path(),
        &root(),
        key(7).id(),
        "Oak Street",
        Policy::default(),
        NOW + 5,
    );
    let twice = twice.unwrap();
    exchange(&home.log, &twice);
    let founders = [1, 7].map(|seed| home.level(seed).is_some());
    assert_eq!(founders.iter().filter(|is| **is).count(), 1, "{founders:?}");
}

#[test]
fn late_and_void_events_are_reported() {
    let (home, _, root_author) = two_anchors();
    let mut two = Author::new(key(2));
    two.lamport = root_author.lamport;
    let quiet = home.log.verify().unwrap();
    assert_eq!((quiet.late.len(), quiet.void.len()), (0, 0));
    assert_eq!(home.log.dated_back().unwrap().len(), 0);
    let one = std::collections::BTreeMap::from([(key(2).id(), 1)]);
    // Node 2 was offline while node 1 wrote.
    home.log.append(&key(1), policy(true), NOW).unwrap();
    home.log.append(&key(1), policy(false), NOW).unwrap();
    let away = two.make(invited(70, Level::Member, 1));
    assert_eq!(codes(&home.log, &[away], NOW), [""; 0]);
    let found = home.log.verify().unwrap();
    assert_eq!(found.problems, Vec::<String>::new());
    assert_eq!(found.late, one, "{found:?}");
    assert_eq!(home.log.dated_back().unwrap(), one);
    // Then it loses its level to a root that had not seen the event.
    home.log
        .append(&root(), level_of(2, Level::Member, 0), NOW)
        .unwrap();
    let found = home.log.verify().unwrap();
    assert_eq!(found.void, one, "{found:?}");
    assert_eq!(found.late.get(&key(2).id()), None);
    assert_eq!(home.log.dated_back().unwrap(), one);
}

#[test]
fn authors_of_post_dated_events_are_reported_until_their_clock_is_set() {
    let day = 86_400_000;
    let (home, other) = (Home::new(), Home::joining());
    sync(&home.log, &other.log, NOW);
    let name = |name: &str| Body::Named { name: name.into() };
    home.log.append(&key(1), name("attic"), NOW + day).unwrap();
    sync(&home.log, &other.log, NOW);
    for log in [&home.log, &other.log] {
        let ahead: Vec<_> = log.dated_ahead(NOW).unwrap().into_iter().collect();
        assert_eq!(ahead, [(key(1).id(), day)]);
        assert_eq!(log.dated_ahead(NOW + day).unwrap().len(), 0);
    }
    home.log.append(&key(1), name("loft"), NOW).unwrap();
    sync(&home.log, &other.log, NOW);
    for log in [&home.log, &other.log] {
        assert_eq!(log.dated_ahead(NOW).unwrap().len(), 0);
    }
}

#[test]
fn a_member_counts_with_its_inviter_unless_that_is_an_anchor() {
    let home = Home::new();
    let open = Policy {
        who_may_invite: Level::Member,
        ..Policy::default()
    };
    let append = |seed: u8, body| home.log.append(&key(seed), body, NOW).map(drop).unwrap();
    append(1, Body::PolicyChanged(open));
    // Nodes 2 and 3 by the anchor, 4 by 3, 5 by 4.
    for (by, seed, level) in [
        (1, 2, Level::Trusted),
        (1, 3, Level::Member),
        (3, 4, Level::Member),
        (4, 5, Level::Member),
    ] {
        append(by, invited(50 + seed, level, 1));
        append(1, admitted(50 + seed, seed, level));
    }
    let answers = || {
        let state = home.log.state();
        [1, 2, 3, 4, 5].map(|seed| state.answers_for(&key(seed).id()))
    };
    let ids = |seeds: [u8; 5]| seeds.map(|seed| key(seed).id());
    assert_eq!(answers(), ids([1, 2, 3, 3, 3]));
    let stranger = key(90).id();
    assert_eq!(home.log.state().answers_for(&stranger), stranger);
    // A demoted anchor answers for the members that it invited.
    home.log
        .append(&root(), level_of(2, Level::Anchor, 0), NOW)
        .unwrap();
    home.log
        .append(&root(), level_of(1, Level::Member, 99), NOW)
        .unwrap();
    assert_eq!(answers(), ids([1, 2, 1, 1, 1]));
    // A revoked member still answers for the members that it invited.
    append(
        2,
        Body::Revoked {
            node: key(3).id(),
            last_seq: 9,
        },
    );
    assert_eq!(answers(), ids([1, 2, 3, 3, 3]));
}

#[test]
fn chains_and_floods_of_invites_make_no_further_quota_groups() {
    let home = Home::new();
    let open = Policy {
        who_may_invite: Level::Member,
        ..Policy::default()
    };
    let append = |by: u8, body| home.log.append(&key(by), body, NOW).map(drop).unwrap();
    append(1, Body::PolicyChanged(open));
    // Node 2 by the anchor, and each following node by the one before it.
    let links = 2..=90u8;
    for seed in links.clone() {
        append(seed - 1, invited(100 + seed, Level::Member, 1));
        append(1, admitted(100 + seed, seed, Level::Member));
    }
    let parties = || {
        let state = home.log.state();
        let all = links.clone().map(|seed| state.answers_for(&key(seed).id()));
        all.collect::<std::collections::BTreeSet<_>>()
    };
    // Nodes near the anchor count with node 2, all others with the root.
    let two = [key(2).id(), root().id()].into_iter().collect();
    assert_eq!(parties(), two);
    // Used invites are removed when others need the room.
    for n in 0..1100u32 {
        let mut secret = [7; 32];
        secret[..4].copy_from_slice(&n.to_le_bytes());
        let invite = NodeKey::from_secret(&secret).id();
        let invited = Body::Invited {
            invite,
            level: Level::Member,
            uses: 1,
            expires_ms: NOW + 1_000_000,
        };
        if home.log.append(&key(1), invited, NOW).is_err() {
            break;
        }
    }
    let state = home.log.state();
    let member = state.member(&key(3).id()).unwrap();
    assert!(
        state.invite(&member.invite.unwrap()).is_none(),
        "it is still there"
    );
    assert_eq!(parties(), two);
}
