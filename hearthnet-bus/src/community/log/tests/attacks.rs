//! Attacks on the event log. Each is refused with its code, or has no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::slice::from_ref;

use super::*;
use crate::{Domain, SIGNATURE_BYTES};

/// Group order of Ed25519, little-endian.
const ORDER: [u8; 32] = [
    0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
];

/// An event without its signature.
fn signed_part(raw: &[u8]) -> &[u8] {
    &raw[..raw.len() - SIGNATURE_BYTES]
}

/// Replaces the first occurrence of some bytes by others of the same length.
fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let at = bytes.windows(from.len()).position(|part| part == from);
    bytes[at.unwrap()..][..to.len()].copy_from_slice(to);
}

/// Event with changed content, signed again by its author.
fn forged(raw: &[u8], author: &NodeKey, from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut signed = signed_part(raw).to_vec();
    replace(&mut signed, from, to);
    let signature = author.sign(Domain::Event, &signed);
    [&signed[..], &signature].concat()
}

#[test]
fn an_event_in_anothers_name_is_refused() {
    let home = Home::new();
    let good = founder().make(policy(true));
    let signed = signed_part(&good);
    let with = |signature: &[u8]| [signed, signature].concat();
    let mut changed = good.clone();
    *changed.last_mut().unwrap() ^= 1;
    let events = [
        with(&key(2).sign(Domain::Event, signed)),
        with(&key(1).sign(Domain::JoinRequest, signed)),
        with(&[0; SIGNATURE_BYTES]),
        changed,
    ];
    assert_eq!(codes(&home.log, &events, NOW), ["invalid_signature"; 4]);
    assert!(!home.log.state().policy.research);
    home.takes(&[good]);
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
    let identity: [u8; 32] = std::array::from_fn(|i| u8::from(i == 0));
    let mut commitment = good.clone();
    commitment[scalar - 32..scalar].copy_from_slice(&identity);
    let mut small = commitment.clone();
    replace(&mut small, id(1).as_bytes(), &identity);
    small[scalar..].fill(0);
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
    request.node = id(3);
    let draft = me.draft(Body::Admitted { request, level });
    assert_eq!(draft.sign(&me.key), Err(EventError::Signature));
    let honest = me.make(admitted(50, 2, Level::Member));
    let (two, three) = (id(2), id(3));
    let stolen = forged(&honest, &me.key, two.as_bytes(), three.as_bytes());
    let refused = codes(&home.log, &[invite, stolen], NOW);
    assert_eq!(refused, ["invalid_signature"]);
    assert_eq!(home.level(3), None);
}

#[test]
fn two_bodies_at_one_place_freeze_their_author_and_the_proof_spreads() {
    let home = Home::new();
    let mut me = founder();
    home.takes(&[
        me.make(invited(50, Level::Trusted, 2)),
        me.make(admitted(50, 2, Level::Trusted)),
    ]);
    let other = home.replica();

    let bodies = [policy(true), policy(false), invited(51, Level::Member, 1)];
    let mut twins = bodies.map(|body| me.draft(body).sign(&me.key).unwrap());
    // The highest hash comes first: it takes effect, then the others replace it in the proof.
    twins.sort_by_key(|raw| EventHash::of(raw).unwrap());
    twins.reverse();
    let received = home.log.receive(&twins, id(99), NOW).unwrap();
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
    assert_eq!(codes(&home.log, &[me.sign(&later)], NOW), ["log_fork"]);

    let check = |home: &Home| {
        let state = home.log.state();
        assert!(state.is_frozen(&id(1)));
        assert_eq!(home.level(1), None);
        // Effects from before the fork stay.
        assert_eq!(home.level(2), Some(Level::Trusted));
        assert!(!state.policy.research);
        let (_, fork) = state.frozen().next().unwrap();
        let mut proof: Vec<_> = twins.iter().map(|t| EventHash::of(t).unwrap()).collect();
        proof.sort();
        assert_eq!((fork.seq, &fork.proof[..]), (3, &proof[..2]));
        assert!(home.log.is_consistent());
    };
    check(&home);
    home.refuses(1, policy(true), "log_fork");
    // A node that knows only one of the bodies.
    other.takes(&twins[..1]);
    assert!(sync(&home.log, &other.log, NOW) > 0);
    check(&other);
    home.assert_same(&other);
}

#[test]
fn different_histories_of_one_length_are_noticed_when_heads_are_compared() {
    let home = Home::new();
    let other = home.replica();
    home.takes(&[founder().make(policy(true))]);
    other.takes(&[founder().make(policy(false))]);
    assert_eq!(sync(&home.log, &other.log, NOW), 1);
    assert!(other.log.state().is_frozen(&id(1)));
    sync(&other.log, &home.log, NOW);
    home.assert_same(&other);
}

#[test]
fn a_node_cannot_advertise_the_shard_of_another_node() {
    let home = Home::new();
    let me = founder();
    let good = me.say(1, NOW, advert(&me.key, 0));
    let [mine, other] = [1, 2].map(|seed| id(seed).to_string());
    let stolen = forged(&good, &me.key, mine.as_bytes(), other.as_bytes());
    assert_eq!(codes(&home.log, &[stolen], NOW), ["log_malformed"]);
    assert_eq!(home.log.state().shards(NOW).count(), 0);
    home.takes(&[good]);
    assert_eq!(home.log.state().shards(NOW).count(), 1);
}

#[test]
fn an_old_descriptor_is_stale() {
    let home = Home::new();
    let me = founder();
    let old = me.say(1, NOW, advert(&me.key, 0));
    let new = me.say(2, NOW + 1, advert(&me.key, 9));
    home.takes(from_ref(&new));
    assert_eq!(codes(&home.log, from_ref(&old), NOW), ["log_stale"]);
    let state = home.log.state();
    let advert = state.shards(NOW).next().unwrap();
    assert_eq!(advert.descriptor.queue_depth, 9);
    // A log that never saw the slot refuses the expired event.
    let late = codes(&Home::new().log, &[old, new], NOW + 2 * ADVERT_LIFE_MS);
    assert_eq!(late, ["log_stale", "log_stale"]);
}

#[test]
fn an_expired_event_leaves_a_mark_as_long_as_an_older_one_could_come_back() {
    let home = Home::new();
    let mut me = founder();
    let long = Event {
        seq: 1,
        lane: Lane::Ephemeral {
            slot: "shard:m:0-7".into(),
            expires_ms: NOW + MAX_LIFE_MS,
        },
        ..me.draft(advert(&me.key, 0))
    };
    let long = me.sign(&long);
    let short = me.say(2, NOW, shard_withdrawn("m:0-7"));
    home.takes(&[long.clone(), short]);
    let later = NOW + 2 * ADVERT_LIFE_MS;
    assert_eq!(home.log.compact(later).unwrap(), Compacted::default());
    assert_eq!(codes(&home.log, &[long], later), ["log_stale"]);
    assert_eq!(home.log.state().shards(later).count(), 0);
    assert_eq!(home.log.compact(NOW + MAX_LIFE_MS).unwrap().ephemeral, 1);
}

#[test]
fn a_timestamp_ten_years_ahead_is_refused_until_its_time() {
    let home = Home::new();
    let mut me = founder();
    // Lamport times cannot run ahead: the event's time bounds them.
    let leap = Event {
        lamport: NOW + 1,
        ..me.draft(policy(true))
    };
    let refused = leap.sign(&me.key);
    assert!(matches!(refused, Err(EventError::Malformed { .. })));
    let ten_years = NOW + 10 * 365 * DAY;
    let ahead = Event {
        time_ms: ten_years,
        ..me.draft(policy(true))
    };
    let raw = [me.sign(&ahead)];
    let edge = ten_years - MAX_AHEAD_MS;
    for now in [NOW, edge - 1] {
        assert_eq!(codes(&home.log, &raw, now), ["log_time"]);
    }
    assert_eq!(codes(&home.log, &raw, edge), [""; 0]);
}

#[test]
fn a_flood_is_cut_off_by_the_quota_of_its_author() {
    let home = Home::with_quotas(Quotas {
        events_per_author: 100,
        stranger_events: 20,
        ..Quotas::default()
    });
    let mut me = founder();
    let flood: Vec<_> = (0..300).map(|i| me.make(policy(i % 2 == 0))).collect();
    assert_eq!(codes(&home.log, &flood, NOW), ["log_quota"; 200]);
    home.refuses(1, policy(true), "log_quota");
    // Strangers share one quota, however many keys they make.
    let strangers: Vec<_> = (100..200)
        .map(|i| Author::new(key(i)).make(invited(50, Level::Member, 1)))
        .collect();
    assert_eq!(codes(&home.log, &strangers, NOW), ["log_quota"; 80]);
    // Other authors are not affected.
    home.append(ROOT, policy(true));
    // A day later the strangers' events are dropped, and none of the members'.
    assert_eq!(home.log.compact(NOW + DAY).unwrap().strangers, 20);
    assert_sound(&home.log);
    assert_eq!(home.log.verify().unwrap().durable, 102);
}

#[test]
fn large_events_use_up_the_quota_of_bytes() {
    let home = Home::with_quotas(Quotas {
        bytes_per_author: 20_000,
        ..Quotas::default()
    });
    let mut me = founder();
    let flood: Vec<_> = (0..10)
        .map(|i| me.make(note(vec![i; MAX_BODY_BYTES])))
        .collect();
    assert_eq!(codes(&home.log, &flood, NOW), ["log_quota"; 7]);
}

#[test]
fn slots_are_bounded_and_the_newest_are_kept() {
    let (home, other) = (Home::new(), Home::new());
    let me = founder();
    let slot = |i: u64| me.say(i, NOW, shard_withdrawn(&format!("m:{i}-{i}")));
    let max = MAX_SLOTS as u64;
    let mut flood: Vec<_> = (10..10 + 3 * max).map(slot).collect();
    home.takes(&flood);
    assert_eq!(codes(&home.log, &[slot(1)], NOW), ["log_quota"]);
    assert_eq!(home.log.verify().unwrap().ephemeral, max);
    // The same slots stay, in any order of arrival.
    flood.reverse();
    let refused = codes(&other.log, &flood, NOW);
    assert_eq!(refused, vec!["log_quota"; 2 * MAX_SLOTS]);
    let [ours, theirs] = [&home, &other].map(|home| home.log.state());
    assert!(ours.live.keys().eq(theirs.live.keys()));
}

#[test]
fn events_of_another_community_are_refused() {
    let home = Home::new();
    let event = Event {
        community: CommunityId::from(id(77)),
        ..founder().draft(policy(true))
    };
    let raw = event.sign(&key(1)).unwrap();
    let refused = codes(&home.log, &[raw, vec![], vec![7; 99]], NOW);
    assert_eq!(refused, ["log_foreign", "log_malformed", "log_malformed"]);
}

#[test]
fn a_revoked_node_cannot_write_itself_into_the_past() {
    let home = Home::new();
    let mut me = founder();
    let before = [
        me.make(invited(50, Level::Trusted, 1)),
        me.make(invited(51, Level::Member, 5)),
        me.make(admitted(50, 2, Level::Trusted)),
    ];
    let mut other = Author::after(me.lamport, 2);
    home.takes(&before);
    home.takes(&[other.make(admitted(51, 3, Level::Member))]);
    // Leaves room before the revocation for a backdated event.
    me.lamport = 100;
    home.takes(&[me.make(revoked(2, 1))]);
    assert!(home.log.state().is_revoked(&id(2)));
    assert_eq!(home.level(3), Some(Level::Member));
    let all = home.all();
    let backdated = [other.make(admitted(51, 4, Level::Member))];
    home.takes(&backdated);
    assert_eq!(home.level(4), None);
    // Reverse order: the event arrives first and is then cut off.
    let second = Home::joining();
    codes(&second.log, &backdated, NOW);
    codes(&second.log, &all, NOW);
    home.assert_same(&second);
}

/// Anchors 1 and 2, a trusted member 3 and an open invite of 1. Returns 1 and the root as authors.
pub(super) fn two_anchors() -> (Home, Author, Author) {
    let home = Home::new();
    let mut me = founder();
    home.takes(&[
        me.make(invited(50, Level::Trusted, 2)),
        me.make(admitted(50, 2, Level::Trusted)),
        me.make(admitted(50, 3, Level::Trusted)),
        me.make(invited(51, Level::Member, 5)),
    ]);
    let mut root = home.root_after(me.lamport);
    home.takes(&[root.make(level_of(2, Level::Anchor, 0))]);
    assert_eq!(home.level(2), Some(Level::Anchor));
    (home, me, root)
}

#[test]
fn a_demoted_anchor_cannot_write_itself_into_the_past() {
    let (home, _, mut root) = two_anchors();
    let mut demoted = Author::after(root.lamport, 2);
    home.takes(&[demoted.make(admitted(51, 4, Level::Member))]);
    // Leaves room before the demotion for backdated events.
    root.lamport = 100;
    home.takes(&[root.make(level_of(2, Level::Trusted, 1))]);
    let (state, all) = (home.log.state(), home.all());
    let backdated = [
        demoted.make(invited(52, Level::Trusted, 9)),
        demoted.make(admitted(52, 5, Level::Trusted)),
        demoted.make(policy(true)),
        demoted.make(revoked(3, 0)),
        demoted.make(level_of(3, Level::Member, 0)),
        demoted.make(withdrawn(51, Some(&[]))),
    ];
    assert!(demoted.lamport < 100);
    home.takes(&backdated);
    assert_eq!(home.log.state(), state);
    let member = Some(Level::Member);
    assert_eq!(home.level(4), member, "effects that the root had seen stay");
    // Actions that a trusted member may do still have an effect, and every order gives the same
    // state.
    let allowed = [demoted.make(admitted(51, 6, Level::Member))];
    home.takes(&allowed);
    assert_eq!(home.level(6), member);
    let second = Home::joining();
    for events in [&allowed[..], &backdated, &all] {
        codes(&second.log, events, NOW);
    }
    home.assert_same(&second);
}

#[test]
fn a_demoted_trusted_member_cannot_back_date_admissions() {
    let (home, mut me, _) = two_anchors();
    let mut demoted = Author::after(me.lamport, 3);
    me.lamport = 100;
    let demotion = [me.make(level_of(3, Level::Member, 0))];
    let backdated = [
        demoted.make(admitted(51, 4, Level::Member)),
        Author::new(key(4)).make(named("4")),
    ];
    // The second node gets the backdated events first. There they have an effect for a while.
    let second = home.replica();
    codes(&second.log, &backdated, NOW);
    assert_eq!(second.level(4), Some(Level::Member));
    codes(&second.log, &demotion, NOW);
    codes(&home.log, &[&demotion[..], &backdated].concat(), NOW);
    assert_eq!((home.level(3), home.level(4)), (Some(Level::Member), None));
    home.assert_same(&second);
}

#[test]
fn a_revocation_by_a_node_that_was_revoked_for_the_past_cuts_nothing() {
    let (home, mut me, mut root) = two_anchors();
    let mut two = Author::after(root.lamport, 2);
    // Anchor 2 revokes node 3. The root has seen this and demotes 2 to trusted, and anchor 1, which
    // has not seen it, revokes 2.
    let revocation = two.make(revoked(3, 0));
    root.lamport = two.lamport;
    let demotion = root.make(level_of(2, Level::Trusted, 1));
    me.lamport = root.lamport;
    let undone = me.make(revoked(2, 0));
    let mut three = Author::after(me.lamport, 3);
    let later = three.make(named("attic"));
    let second = home.replica();
    home.takes(&[revocation.clone(), demotion.clone()]);
    assert_eq!(home.level(3), None);
    home.takes(&[undone.clone(), later.clone()]);
    // Node 3 is a member, and is not silenced.
    codes(&second.log, &[later, undone, demotion, revocation], NOW);
    assert_eq!((home.level(2), home.level(3)), (None, Some(Level::Trusted)));
    let state = home.log.state();
    assert_eq!(state.member(&id(3)).unwrap().name, "attic");
    home.assert_same(&second);
}

/// Two logs with events that reached them in opposite orders. Anchor 2 revokes node 3, but anchor 1
/// revokes 2 for the past. So node 3 is the anchor to which the root promotes it.
///
/// Node 3 demotes nodes 20, 21 and so on. Each of them lets a node in, 20 higher, that 3 has not
/// heard of. The next of them is a member only if that node is none. Node 3 also revokes node 40.
fn void_revocation_of_an_anchor(demotions: u8) -> (Home, Home) {
    use Level::{Anchor, Member, Trusted};
    let (home, mut me, mut root) = two_anchors();
    let mut all = home.all();
    let mut two = Author::after(root.lamport, 2);
    all.push(two.make(revoked(3, 0)));
    root.lamport = two.lamport;
    all.push(root.make(level_of(3, Anchor, 0)));
    me.lamport = root.lamport;
    all.extend([
        me.make(open_policy()),
        me.make(invited(60, Trusted, 1)),
        me.make(admitted(60, 20, Trusted)),
    ]);
    for n in 0..demotions {
        let mut demoted = Author::after(me.lamport, 20 + n);
        all.push(demoted.make(invited(70 + n, Member, 1)));
        all.push(demoted.make(admitted(70 + n, 40 + n, Member)));
        me.lamport = demoted.lamport;
        all.push(me.make(admitted(70 + n, 21 + n, Member)));
        all.push(me.make(level_of(21 + n, Trusted, 0)));
    }
    let mut three = Author::after(me.lamport, 3);
    all.extend((0..demotions).map(|n| three.make(level_of(20 + n, Member, 0))));
    all.push(three.make(revoked(40, 0)));
    root.lamport = three.lamport;
    all.push(root.make(level_of(2, Trusted, 1)));
    me.lamport = root.lamport;
    all.push(me.make(revoked(2, 0)));
    let (one, other) = (Home::joining(), Home::joining());
    one.takes(&all);
    all.reverse();
    other.takes(&all);
    one.assert_same(&other);
    assert_eq!((one.level(2), one.level(3)), (None, Some(Anchor)));
    // A replay judges every admission alike.
    let replay = one.log.records(|record| {
        if let Body::Admitted { request, .. } = &record.event.body {
            let is_in = one.log.state().member(&request.node).is_some();
            let was_in = is_in || request.node == id(2);
            assert_eq!(record.status == Status::Effective, was_in, "{record:?}");
        }
        Ok(true)
    });
    replay.unwrap();
    (one, other)
}

#[test]
fn a_demotion_that_a_void_revocation_hid_is_retroactive() {
    let (home, other) = void_revocation_of_an_anchor(1);
    let levels = [20, 21, 40].map(|seed| home.level(seed));
    assert_eq!(levels, [Some(Level::Member), Some(Level::Trusted), None]);
    let void = BTreeMap::from([(id(2), 1), (id(20), 2)]);
    assert_eq!(home.log.verify().unwrap().void, void);
    // The revocation by node 3 had no effect in step 2, and so has none.
    assert!(!home.log.state().is_revoked(&id(40)));
    // It has one as soon as the history of node 2 forks before the void revocation.
    let fork = [Author::new(key(2)).make(named("attic"))];
    for home in [&home, &other] {
        home.takes(&fork);
        assert!(home.log.state().is_revoked(&id(40)));
    }
    home.assert_same(&other);
}

#[test]
fn demotions_that_depend_on_each_other_have_a_bounded_cost() {
    let (home, _) = void_revocation_of_an_anchor(5);
    let levels = [20, 21, 22, 23, 24, 25].map(|seed| home.level(seed));
    let member = Some(Level::Member);
    assert_eq!(levels, [member, member, member, member, None, None]);
    // The last repetition finds the fourth demotion. It holds, but not for earlier events.
    let admitted = [40, 41, 42, 43, 44].map(|seed| home.level(seed));
    assert_eq!(admitted, [None, None, None, member, None]);
}

#[test]
fn a_change_of_level_without_a_bound_is_read_as_it_was() {
    let (home, mut me, _) = two_anchors();
    let body = Body::LevelChanged {
        node: id(3),
        level: Level::Member,
        last_seq: None,
    };
    let raw = me.make(body.clone());
    assert_eq!(Event::verify(&raw).unwrap().body, body);
    home.takes(&[raw]);
    assert_eq!(home.level(3), Some(Level::Member));
}

#[test]
fn a_back_dated_admission_by_a_withdrawn_invite_has_no_effect() {
    let (home, mut me, _) = two_anchors();
    let mut liar = Author::after(me.lamport, 3);
    // Node 4 joined by the invite in time. Node 3 has written no event yet, and backdates the
    // admission of node 5.
    home.takes(&[me.make(admitted(51, 4, Level::Member))]);
    me.lamport = 100;
    let end = [me.make(withdrawn(51, Some(&[4])))];
    let admission = liar.make(admitted(51, 5, Level::Member));
    let past = [admission, Author::after(liar.lamport, 5).make(named("5"))];
    // One node gets the admission after the withdrawal, the other before it.
    let second = home.replica();
    codes(&second.log, &past, NOW);
    assert_eq!(second.level(5), Some(Level::Member));
    codes(&second.log, &end, NOW);
    codes(&home.log, &[&end[..], &past].concat(), NOW);
    assert_eq!((home.level(4), home.level(5)), (Some(Level::Member), None));
    home.assert_same(&second);
    // Node 5 can join by another invite.
    home.takes(&[
        me.make(invited(52, Level::Member, 1)),
        me.make(admitted(52, 5, Level::Member)),
    ]);
    assert_eq!(home.level(5), Some(Level::Member));
}

#[test]
fn a_withdrawal_removes_only_members_that_its_author_may_revoke() {
    let (home, mut me, _) = two_anchors();
    home.takes(&[
        me.make(open_policy()),
        me.make(admitted(51, 4, Level::Member)),
    ]);
    let mut member = Author::after(me.lamport, 4);
    home.takes(&[
        member.make(invited(60, Level::Member, 2)),
        member.make(invited(61, Level::Member, 2)),
    ]);
    me.lamport = member.lamport;
    home.takes(&[
        me.make(admitted(60, 5, Level::Member)),
        me.make(admitted(61, 6, Level::Member)),
    ]);
    let mut two = Author::after(me.lamport, 2);
    home.takes(&[
        // A member with an empty list for its own invite, an anchor with an empty list for an
        // invite of another anchor, and a list that is absent, as in older events.
        member.make(withdrawn(60, Some(&[]))),
        two.make(withdrawn(50, Some(&[]))),
        two.make(withdrawn(61, None)),
    ]);
    let levels = [2, 3, 4, 5, 6].map(|seed| home.level(seed));
    let member = Some(Level::Member);
    // Node 3 joined by invite 50 too, and is below an anchor.
    assert_eq!(levels, [Some(Level::Anchor), None, member, member, member]);
    assert!(home.log.is_consistent());
}

#[test]
fn a_withdrawal_names_all_members_by_the_invite() {
    let (home, mut me, _) = two_anchors();
    home.takes(&[
        me.make(admitted(51, 4, Level::Member)),
        me.make(admitted(51, 5, Level::Member)),
    ]);
    home.append(1, withdrawn(51, None));
    let last = home.all().pop().unwrap();
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
    home.takes(&[
        me.make(admitted(51, 4, Level::Member)),
        me.make(revoked(4, 0)),
        me.make(admitted(51, 5, Level::Member)),
    ]);
    assert_eq!(home.level(5), None);
    assert!(home.log.state().invite(&id(51)).unwrap().withdrawn);
    assert!(home.log.is_consistent());
}

#[test]
fn a_post_dated_event_does_not_block_other_authors() {
    let home = Home::new();
    home.takes(&[founder().make_ahead(MAX_AHEAD_MS, policy(true))]);
    // The root's next event sorts after it, at a time that others accept within a millisecond.
    home.append(ROOT, policy(false));
    let other = Home::joining();
    sync(&home.log, &other.log, NOW + 1);
    assert_eq!(other.log.state(), home.log.state());
    assert!(!other.log.state().policy.research);
}

#[test]
fn a_post_dated_event_does_not_post_date_events_of_others() {
    let home = Home::new();
    home.takes(&[founder().make_ahead(MAX_AHEAD_MS, policy(true))]);
    for n in 0..5 {
        home.append(ROOT, policy(n % 2 == 0));
    }
    home.append(ROOT, seen("root"));
    let written: Vec<Event> = home
        .all()
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
    let refused = codes(&slow.log, &home.all(), NOW - 2_000);
    assert_eq!(refused, ["log_time"]);
    assert_eq!(slow.log.state().state_hash(), home.log.state().state_hash());
}

#[test]
fn a_post_dated_event_takes_effect_at_its_time_on_every_node() {
    let home = Home::new();
    let mut me = founder();
    let leap = me.make_ahead(60_000, policy(true));
    let next = Event {
        time_ms: NOW + 60_001,
        ..me.draft(invited(50, Level::Member, 1))
    };
    home.takes(&[leap, me.sign(&next)]);
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
    assert_sound(&home.log);
}

#[test]
fn post_dated_events_are_accepted_with_the_next_event_of_a_corrected_clock() {
    let (home, other) = (Home::new(), Home::joining());
    for seed in [50, 51] {
        let body = invited(seed, Level::Member, 1);
        home.log.append(&key(1), body, NOW + DAY).unwrap();
    }
    assert_eq!(codes(&other.log, &home.all(), NOW), ["log_time"; 2]);
    // The clock is right again.
    home.append(1, policy(true));
    let all = home.all();
    other.takes(&all);
    assert_eq!(other.log.state(), home.log.state());
    assert_eq!(other.log.state().invites().count(), 2);
    // Events that arrive first wait for their predecessors.
    let third = Home::joining();
    let (last, rest) = all.split_last().unwrap();
    third.takes(from_ref(last));
    assert_eq!(codes(&third.log, &rest[..2], NOW), ["log_time"]);
    third.takes(&rest[2..]);
    third.takes(rest);
    assert_eq!(third.log.state(), home.log.state());
    assert!(third.log.is_consistent());
    // Only the event that names it vouches for it, and only with a greater Lamport time.
    let fourth = Home::joining();
    let mut me = founder();
    let ahead = Event {
        time_ms: NOW + DAY,
        ..me.draft(policy(true))
    };
    let unrelated = founder().make(policy(false));
    let refused = codes(&fourth.log, &[me.sign(&ahead), unrelated], NOW);
    assert_eq!(refused, ["log_time"]);
}

/// A community with members 2, 3 and 4 at these levels, whose announcements show clocks that are
/// ahead by so many ms.
fn with_clocks(said: [(Level, u64); 3]) -> Home {
    let home = Home::new();
    for (seed, (level, _)) in (2..).zip(said) {
        home.admit(seed, level);
    }
    for (seed, (_, ahead)) in (2..).zip(said) {
        let time = NOW + ahead;
        let seen = Author::new(key(seed)).say(time, time, seen("n"));
        home.log.receive(&[seen], id(seed), NOW).unwrap();
    }
    home
}

#[test]
fn nothing_is_written_by_a_clock_that_trusted_members_contradict() {
    use Level::{Member, Trusted};
    let home = with_clocks([(Trusted, DAY), (Trusted, DAY), (Trusted, 0)]);
    home.refuses(1, policy(true), "clock_wrong");
    // Ephemeral events are still written: other nodes compare clocks by them.
    home.append(1, seen("n"));
    // The node to be revoked does not count; of the remaining two, the nearer clock does.
    home.append(1, revoked(2, 0));
    // Plain members do not count if a trusted member was heard.
    with_clocks([(Member, DAY), (Member, DAY), (Trusted, 1000)]).append(1, policy(true));
    let home = with_clocks([(Member, DAY), (Member, DAY), (Member, 1000)]);
    home.refuses(1, policy(true), "clock_wrong");
    // Nine minutes are tolerated, and samples from before the clock was set are ignored.
    with_clocks([(Trusted, 540_000); 3]).append(1, policy(true));
    let home = with_clocks([(Trusted, DAY); 3]);
    assert!(home.log.append(&key(1), policy(true), NOW + DAY).is_ok());
}

#[test]
fn clock_set_is_written_once_and_only_if_other_clocks_agree() {
    use Level::Trusted;
    let late = |home: &Home, at| home.log.append(&key(1), policy(true), at).unwrap();
    let events = |home: &Home| home.log.heads().authors[&id(1)].seq;
    let alone = Home::new();
    late(&alone, NOW + DAY);
    alone.log.maintain(&key(1), NOW).unwrap();
    assert_eq!(events(&alone), 1);
    let home = with_clocks([(Trusted, 0); 3]);
    let before = events(&home);
    home.log.maintain(&key(1), NOW).unwrap();
    assert_eq!(events(&home), before);
    late(&home, NOW + DAY);
    for _ in 0..3 {
        home.log.maintain(&key(1), NOW).unwrap();
    }
    assert_eq!(events(&home), before + 2);
    let other = Home::joining();
    other.takes(&home.all());
    assert_eq!(other.log.state(), home.log.state());
    let wrong = with_clocks([(Trusted, DAY); 3]);
    let before = events(&wrong);
    late(&wrong, NOW + 3 * DAY);
    assert!(wrong.log.maintain(&key(1), NOW).is_err());
    assert_eq!(events(&wrong), before + 1);
}

#[test]
fn ephemeral_events_gain_no_life_by_post_dating_and_are_rate_limited() {
    let home = Home::new();
    let me = founder();
    home.takes(&[me.say(1, NOW + 590_000, advert(&me.key, 0))]);
    assert_eq!(home.log.state().shards(NOW + ADVERT_LIFE_MS - 1).count(), 1);
    assert_eq!(home.log.state().shards(NOW + ADVERT_LIFE_MS).count(), 0);

    let home = Home::new();
    let flood = |numbers: std::ops::RangeInclusive<u64>, now| {
        let said = numbers.map(|n| me.say(n, NOW, advert(&me.key, 0)));
        codes(&home.log, &said.collect::<Vec<_>>(), now)
    };
    assert_eq!(flood(1..=300, NOW), ["log_quota"; 44]);
    assert_eq!(flood(301..=310, NOW + 1000), ["log_quota"; 6]);
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
    home.takes(&all);
    let mut attacker = Author::after(3, 2);
    for n in 0..400_u64 {
        home.takes(&[attacker.make(note(n.to_be_bytes().to_vec()))]);
    }
    let spent = home.log.reworked();
    assert!((100_000..101_000).contains(&spent), "{spent}");
    // Meanwhile, an event that sorts last takes effect at once.
    home.takes(&[me.make(revoked(2, 400))]);
    assert!(home.log.state().is_revoked(&id(2)));
    // Once there is budget, all events take effect.
    home.log.maintain(&key(9), NOW + 1000).unwrap();
    assert!(home.log.is_consistent());
    assert!(home.log.reworked() > spent);
}

#[test]
fn a_node_revoked_after_leaving_cannot_rejoin_by_its_invite() {
    let left = |uses| {
        let home = Home::new();
        home.append(1, invited(50, Level::Trusted, uses));
        home.append(1, admitted(50, 2, Level::Trusted));
        home.append(2, Body::Left {});
        home
    };
    let home = left(3);
    assert!(home.log.state().left().eq([&id(2)]));
    home.append(1, revoked(2, 1));
    assert_eq!(home.log.state().left().count(), 0);
    home.refuses(1, admitted(50, 3, Level::Trusted), "bad_invite");
    home.replica();
    // A node whose code is used up need not be remembered, and a node that came back is not gone.
    let home = left(2);
    home.append(1, admitted(50, 2, Level::Trusted));
    home.append(2, Body::Left {});
    assert!(home.log.is_consistent());
}

/// Syncs both ways until both logs have all events.
fn exchange(a: &Home, b: &Home) {
    sync(&a.log, &b.log, NOW);
    sync(&b.log, &a.log, NOW);
    a.assert_same(b);
    assert_eq!(sync(&a.log, &b.log, NOW) + sync(&b.log, &a.log, NOW), 0);
}

#[test]
fn events_of_a_root_key_used_in_two_places_hold_in_both() {
    let home = Home::new();
    home.admit(2, Level::Member);
    home.admit(3, Level::Member);
    let there = home.replica();
    // The two copies write with the same number at the same moment.
    home.append(ROOT, level_of(2, Level::Anchor, 0));
    home.append(ROOT, policy(true));
    there.append(ROOT, level_of(3, Level::Trusted, 0));
    exchange(&home, &there);
    let (two, three) = (Some(Level::Anchor), Some(Level::Trusted));
    assert_eq!((home.level(2), home.level(3)), (two, three));
    assert!(home.log.state().policy.research);
    assert_eq!(home.log.state().frozen().count(), 0);
    // The history goes on from there, and forks again.
    home.append(ROOT, level_of(2, Level::Member, 0));
    there.append(ROOT, level_of(3, Level::Member, 0));
    there.append(ROOT, invited(60, Level::Anchor, 1));
    exchange(&home, &there);
    let member = Some(Level::Member);
    assert_eq!((home.level(2), home.level(3)), (member, member));
    // A new node gets all events, in any batches, and still has them after a restart.
    let new = Home::joining();
    assert!(sync(&home.log, &new.log, NOW) > 0);
    exchange(&home, &new);
    assert_sound(&new.log);
    let again = new.reopened().log.state();
    assert_eq!(again.state_hash(), home.log.state().state_hash());
}

#[test]
fn a_community_that_was_founded_twice_with_one_key_has_one_founding() {
    let (home, dir) = (Home::new(), folder());
    let (founder, policy) = (id(7), Policy::default());
    let log = EventLog::create(dir.path(), &root(), founder, "Oak Street", policy, NOW + 5);
    let twice = Home {
        log: log.unwrap(),
        dir,
    };
    exchange(&home, &twice);
    let founders = [1, 7].map(|seed| home.level(seed).is_some());
    assert_eq!(founders.iter().filter(|is| **is).count(), 1, "{founders:?}");
}

#[test]
fn late_and_void_events_are_reported() {
    let (home, _, root) = two_anchors();
    let mut two = Author::after(root.lamport, 2);
    let quiet = home.log.verify().unwrap();
    assert_eq!((quiet.late.len(), quiet.void.len()), (0, 0));
    assert_eq!(home.log.dated_back().unwrap().len(), 0);
    let one = BTreeMap::from([(id(2), 1)]);
    // Node 2 was offline while node 1 wrote.
    home.append(1, policy(true));
    home.append(1, policy(false));
    home.takes(&[two.make(invited(70, Level::Member, 1))]);
    assert_sound(&home.log);
    let found = home.log.verify().unwrap();
    assert_eq!(found.late, one, "{found:?}");
    assert_eq!(home.log.dated_back().unwrap(), one);
    // Then it loses its level to a root that had not seen the event.
    home.append(ROOT, level_of(2, Level::Member, 0));
    let found = home.log.verify().unwrap();
    assert_eq!(found.void, one, "{found:?}");
    assert_eq!(found.late.get(&id(2)), None);
    assert_eq!(home.log.dated_back().unwrap(), one);
}

#[test]
fn authors_of_post_dated_events_are_reported_until_their_clock_is_set() {
    let home = Home::new();
    let other = home.replica();
    let write = |name, now| {
        home.log.append(&key(1), named(name), now).unwrap();
        sync(&home.log, &other.log, NOW);
    };
    write("attic", NOW + DAY);
    for log in [&home.log, &other.log] {
        let ahead: Vec<_> = log.dated_ahead(NOW).unwrap().into_iter().collect();
        assert_eq!(ahead, [(id(1), DAY)]);
        assert_eq!(log.dated_ahead(NOW + DAY).unwrap().len(), 0);
    }
    write("loft", NOW);
    for log in [&home.log, &other.log] {
        assert_eq!(log.dated_ahead(NOW).unwrap().len(), 0);
    }
}

#[test]
fn a_member_counts_with_its_inviter_unless_that_is_an_anchor() {
    let home = Home::new();
    home.append(1, open_policy());
    // Nodes 2 and 3 by the anchor, 4 by 3, 5 by 4.
    for (by, seed, level) in [
        (1, 2, Level::Trusted),
        (1, 3, Level::Member),
        (3, 4, Level::Member),
        (4, 5, Level::Member),
    ] {
        home.append(by, invited(50 + seed, level, 1));
        home.append(1, admitted(50 + seed, seed, level));
    }
    let answers = || {
        let state = home.log.state();
        [1, 2, 3, 4, 5].map(|seed| state.answers_for(&id(seed)))
    };
    let ids = |seeds: [u8; 5]| seeds.map(id);
    assert_eq!(answers(), ids([1, 2, 3, 3, 3]));
    let stranger = id(90);
    assert_eq!(home.log.state().answers_for(&stranger), stranger);
    // A demoted anchor answers for the members that it invited.
    home.append(ROOT, level_of(2, Level::Anchor, 0));
    home.append(ROOT, level_of(1, Level::Member, 99));
    assert_eq!(answers(), ids([1, 2, 1, 1, 1]));
    // A revoked member still answers for the members that it invited.
    home.append(2, revoked(3, 9));
    assert_eq!(answers(), ids([1, 2, 3, 3, 3]));
}

#[test]
fn chains_and_floods_of_invites_make_no_further_quota_groups() {
    let home = Home::new();
    home.append(1, open_policy());
    // Node 2 by the anchor, and each following node by the one before it.
    let links = 2..=90u8;
    for seed in links.clone() {
        home.append(seed - 1, invited(100 + seed, Level::Member, 1));
        home.append(1, admitted(100 + seed, seed, Level::Member));
    }
    let parties = || {
        let state = home.log.state();
        let all = links.clone().map(|seed| state.answers_for(&id(seed)));
        all.collect::<BTreeSet<_>>()
    };
    // Nodes near the anchor count with node 2, all others with the root.
    let two = [id(2), root().id()].into_iter().collect();
    assert_eq!(parties(), two);
    // Used invites are removed when others need the room.
    for n in 0..1100u32 {
        let mut secret = [7; 32];
        secret[..4].copy_from_slice(&n.to_le_bytes());
        let invited = Body::Invited {
            invite: NodeKey::from_secret(&secret).id(),
            level: Level::Member,
            uses: 1,
            expires_ms: NOW + 1_000_000,
        };
        if home.log.append(&key(1), invited, NOW).is_err() {
            break;
        }
    }
    let state = home.log.state();
    let invite = state.member(&id(3)).unwrap().invite.unwrap();
    assert!(state.invite(&invite).is_none(), "it is still there");
    assert_eq!(parties(), two);
}
