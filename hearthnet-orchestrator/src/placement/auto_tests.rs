use super::super::plan::tests::{self as plans, CHAT, model};
use super::super::plan::{Machine, plan};
use super::*;
use crate::tests::{held, node};

fn gone(names: &[&str]) -> BTreeSet<NodeId> {
    names.iter().map(|name| node(name)).collect()
}

/// Host that has measured, with memory for so many layers.
fn machine(held: Held, layers: u64, layer_us: u32) -> Machine {
    Machine {
        node: held.node,
        holds: Some(Layers::from_inclusive(held.range)),
        ..plans::machine(0, layers, layer_us)
    }
}

/// Decision of the first of these hosts, each with memory for so many layers, when some are gone.
fn planned(hosts: &[(Held, u64)], room: u32, away: &[&str]) -> Option<Wish> {
    planned_after(0, hosts, room, away)
}

/// [`planned`], after so many hosts did not take the missing layers.
fn planned_after(
    passed_over: u32,
    hosts: &[(Held, u64)],
    room: u32,
    away: &[&str],
) -> Option<Wish> {
    let machines = hosts.iter().map(|(held, n)| machine(*held, *n, 500));
    let (community, model) = (Community::new(machines, []), model(12));
    let others: Vec<Held> = hosts.iter().skip(1).map(|(held, _)| *held).collect();
    let away = gone(away);
    let situation = Situation {
        room,
        passed_over,
        measured: Some((&community, &model)),
        ..of_twelve(hosts[0].0, &others, &away)
    };
    situation.wish()
}

/// Situation of a host of a model of 12 layers, with room for all and without measurements.
fn of_twelve<'a>(mine: Held, others: &'a [Held], gone: &'a BTreeSet<NodeId>) -> Situation<'a> {
    Situation {
        total: 12,
        room: 12,
        mine,
        others,
        gone,
        passed_over: 0,
        measured: None,
    }
}

fn wish(lo: u32, hi: u32, cause: Cause) -> Option<Wish> {
    let range = (lo, hi);
    Some(Wish { range, cause })
}

#[test]
fn a_host_without_its_link_is_gone_after_the_grace_and_there_when_it_returns() {
    let mut links = LostLinks::default();
    let both = gone(&["a", "b"]);
    let only_a = gone(&["a"]);
    assert_eq!(links.look(0, &both), gone(&[]));
    assert_eq!(links.look(1_000, &only_a), gone(&[]));
    assert_eq!(links.look(3_999, &only_a), gone(&[]));
    assert_eq!(links.look(4_000, &only_a), gone(&["b"]));
    assert_eq!(links.look(4_500, &both), gone(&[]));
    // The grace begins again.
    assert_eq!(links.look(5_000, &only_a), gone(&[]));
    assert_eq!(links.look(7_999, &only_a), gone(&[]));
}

#[test]
fn a_host_is_left_alone_when_its_last_link_has_ended_and_it_knew_another_host() {
    let others = [held("b", 6, 11)];
    let mut together = Together::default();
    let mut has_ended =
        |linked: &[&str], others: &[Held]| together.has_ended(0, &gone(linked), others, true);
    assert!(!has_ended(&[], &others), "it was never linked");
    assert!(
        !has_ended(&["c"], &others) && !has_ended(&[], &others),
        "c is no host"
    );
    assert!(!has_ended(&["b", "c"], &others));
    assert!(!has_ended(&["c"], &others));
    assert!(has_ended(&[], &others));
    // Its advertisement has expired.
    assert!(has_ended(&[], &[]));
    assert!(!has_ended(&["c"], &[]));

    // A neighbour that goes away as soon as it serves was linked before.
    let mut together = Together::default();
    assert!(!together.has_ended(0, &gone(&["b"]), &[], true));
    assert!(together.has_ended(1, &gone(&[]), &others, true));
}

#[test]
fn a_host_that_finds_no_member_after_its_start_is_left_alone() {
    let (none, member) = (gone(&[]), gone(&["c"]));
    let mut founder = Together::default();
    assert!(!founder.has_ended(29_999, &none, &[], false));
    assert!(founder.has_ended(30_000, &none, &[], false));
    // Its first neighbour has joined, and restarts.
    assert!(!founder.has_ended(40_000, &member, &[], true));
    assert!(!founder.has_ended(159_999, &none, &[], true));
    let mut together = Together::default();
    assert!(!together.has_ended(119_999, &none, &[], true));
    assert!(together.has_ended(120_000, &none, &[], true));
    assert!(!together.has_ended(150_000, &member, &[], true));
    assert!(!together.has_ended(269_999, &none, &[], true));
    assert!(together.has_ended(270_000, &none, &[], true));
}

#[test]
fn a_host_that_is_left_alone_takes_all_layers_or_stays() {
    let all = wish(0, 11, Cause::LeftAlone);
    for mine in [(0, 5), (3, 8), (6, 11)] {
        assert_eq!(left_alone(12, 12, mine), all);
        assert_eq!(left_alone(12, 99, mine), all);
        // Some of the missing layers would not help.
        assert_eq!(left_alone(12, 11, mine), None);
    }
    assert_eq!(left_alone(12, 12, (0, 11)), None);
    assert_eq!(left_alone(0, 12, (0, 0)), None);
}

#[test]
fn a_short_loss_of_the_network_moves_nothing() {
    let there = Some((0, 11));
    let (alone, all) = (left_alone(12, 12, (0, 5)), gone(&["b"]));
    let (mut together, mut limits) = (Together::default(), WaitLimits::new(0));
    let mut look = |now, linked: &BTreeSet<NodeId>| {
        let is_alone = together.has_ended(now, linked, &[held("b", 6, 11)], true);
        limits.look(now, alone.filter(|_| is_alone))
    };
    let mut now = 0;
    // The line fails for 19 s, ten times.
    for _ in 0..10 {
        assert_eq!(look(now, &all), None);
        for _ in 0..19 {
            now += 1_000;
            assert_eq!(look(now, &gone(&[])), None, "{now}");
        }
        now += 1_000;
    }
    assert_eq!(look(now, &all), None);
    assert_eq!(look(now + 1_000, &gone(&[])), None);
    assert_eq!(look(now + 20_999, &gone(&[])), None);
    assert_eq!(look(now + 21_000, &gone(&[])), there);

    // Layers were missing before the last link ended.
    let mut limits = WaitLimits::new(0);
    assert_eq!(limits.look(60_000, wish(0, 8, Cause::Lost)), None);
    assert_eq!(limits.look(61_000, alone), None);
    assert_eq!(limits.look(80_999, alone), None);
    assert_eq!(limits.look(81_000, alone), there);
}

#[test]
fn without_measurements_a_spare_host_replaces_the_one_that_is_gone() {
    let others = [held("a", 0, 5), held("b", 6, 11)];
    let none = BTreeSet::new();
    let lost = gone(&["b"]);
    let mut situation = of_twelve(held("c", 0, 3), &others, &none);
    assert_eq!(situation.wish(), None);
    situation.gone = &lost;
    assert_eq!(situation.wish(), wish(6, 11, Cause::Lost));
    // The same gap without a lost link waits for a restart.
    situation.others = &others[..1];
    assert_eq!(situation.wish(), wish(6, 11, Cause::Missing));
}

#[test]
fn the_plan_gives_missing_layers_to_a_host_that_can_take_them() {
    let (a, b, c) = (held("a", 0, 5), held("b", 6, 11), held("c", 0, 3));
    // No room beside its own six layers, which only it has.
    assert_eq!(planned(&[(a, 6), (b, 6), (c, 6)], 6, &["b"]), None);
    let to = wish(6, 11, Cause::Lost);
    assert_eq!(planned(&[(c, 6), (a, 6), (b, 6)], 6, &["b"]), to);
    // A host of unique layers extends its range.
    let to = wish(0, 11, Cause::Lost);
    assert_eq!(planned(&[(a, 12), (b, 6)], 12, &["b"]), to);
}

#[test]
fn all_hosts_of_one_plan_agree_on_the_host_that_moves() {
    let hosts = [
        (held("a", 0, 5), 12),
        (held("b", 6, 11), 12),
        (held("c", 0, 5), 12),
        (held("d", 0, 5), 12),
    ];
    let moves = [0, 2, 3].map(|first: usize| {
        let mut all = hosts.to_vec();
        all.swap(0, first);
        planned(&all, 12, &["b"])
    });
    let now = moves.iter().flatten().filter(|w| w.cause == Cause::Lost);
    assert_eq!(now.count(), 1, "{moves:?}");
}

/// Ranges of the linked hosts after the moves that they make within seconds.
fn after(hosts: &[(Held, u64)], away: &[&str]) -> Vec<(u32, u32)> {
    let lost = gone(away);
    let there = (0..hosts.len()).filter(|&n| !lost.contains(&hosts[n].0.node));
    let of = |n: usize| {
        let mut all = hosts.to_vec();
        all.swap(0, n);
        let (mine, room) = all[0];
        let found = planned(&all, u32::try_from(room).unwrap(), away);
        let found = found.filter(|wish| wish.cause == Cause::Lost);
        found.map_or(mine.range, |wish| wish.range)
    };
    there.map(of).collect()
}

#[test]
fn linked_hosts_take_over_the_layers_of_one_or_two_that_are_gone() {
    let all = |room: u64| {
        let all = [("a", 0), ("b", 4), ("c", 8), ("d", 0)];
        all.map(|(name, lo)| (held(name, lo, lo + 3), room))
    };
    for (room, hosts, away) in [
        (12, 3, &["c"][..]),
        (12, 3, &["b"][..]),
        (8, 3, &["c"][..]),
        (12, 4, &["b", "c"][..]),
        (12, 4, &["a", "c"][..]),
    ] {
        let ranges = after(&all(room)[..hosts], away);
        assert_eq!(missing(12, &ranges), [], "{away:?}: {ranges:?}");
        let moved = ranges.iter().filter(|(lo, hi)| hi - lo > 3).count();
        assert_eq!(moved, 1, "{away:?}: {ranges:?}");
    }
    // No memory for what is missing.
    assert_eq!(after(&all(4)[..3], &["c"]), [(0, 3), (4, 7)]);
}

#[test]
fn a_host_that_returns_to_one_with_all_layers_makes_at_most_one_copy() {
    for (room, copies) in [(6_u32, 0), (12, 1)] {
        let (all, mut back) = ((held("a", 0, 11), 12), (held("b", 6, 11), u64::from(room)));
        let mut moves = 0;
        for _ in 0..4 {
            assert_eq!(planned(&[all, back], 12, &[]), None, "it gives up layers");
            let Some(better) = planned(&[back, all], room, &[]) else {
                break;
            };
            assert_eq!(better.cause, Cause::Better);
            back.0.range = better.range;
            moves += 1;
        }
        assert_eq!(moves, copies, "room for {room}");
    }
}

#[test]
fn hosts_named_one_after_the_other_have_time_to_take_missing_layers() {
    let mut missing = MissingSince::default();
    let (none, both, one) = (vec![], vec![(6, 11)], vec![(6, 8)]);
    assert_eq!(missing.look(1_000, none), 0);
    assert_eq!(missing.look(2_000, both.clone()), 0);
    assert_eq!(missing.look(31_999, both.clone()), 0);
    assert_eq!(missing.look(32_000, both), 1);
    // Some were taken.
    assert_eq!(missing.look(91_999, one.clone()), 1);
    assert_eq!(missing.look(92_000, one), 2);
    // Others are lost.
    assert_eq!(missing.look(92_500, vec![(5, 8)]), 0);
    assert_eq!(missing.look(122_500, vec![(5, 8)]), 1);
}

#[test]
fn a_host_that_does_not_take_the_layers_that_are_missing_is_passed_over() {
    let hosts = [
        (held("liar", 0, 5), 99),
        (held("a", 0, 5), 6),
        (held("c", 0, 5), 6),
        (held("b", 6, 11), 6),
    ];
    let moves = |passed_over: u32| -> Vec<Wish> {
        let wishes = [1, 2].map(|first: usize| {
            let mut all = hosts.to_vec();
            all.swap(0, first);
            planned_after(passed_over, &all, 6, &["b"])
        });
        let wishes = wishes.into_iter().flatten();
        wishes.filter(|w| w.cause == Cause::Lost).collect()
    };
    assert_eq!(moves(0), [], "the plan names the liar");
    let expected = wish(6, 11, Cause::Lost);
    for passed_over in 1..9 {
        // The other one stays: the liar does not count as a holder of their layers.
        let moves = moves(passed_over);
        assert_eq!((moves.len(), moves.first().copied()), (1, expected));
    }
}

#[test]
fn a_planned_move_relies_on_an_unmeasured_host_only_if_rule_3_keeps_that_in_place() {
    let mut pair = [held("a", 0, 5), held("c", 0, 5)];
    pair.sort_by_key(|held| held.node);
    let [first, second] = pair;
    let b = held("b", 6, 11);
    let lost = gone(&["b"]);
    let decide = |mine: Held, unmeasured: Held| {
        let fixed = Machine {
            is_fixed: true,
            ..machine(unmeasured, 0, 0)
        };
        let machines = [machine(mine, 6, 500), machine(b, 6, 500), fixed];
        let (community, model) = (Community::new(machines, []), model(12));
        let others = [unmeasured, b];
        let situation = Situation {
            room: 6,
            measured: Some((&community, &model)),
            ..of_twelve(mine, &others, &lost)
        };
        situation.wish()
    };
    // Rule 3 moves the second one of equal hosts.
    assert_eq!(decide(second, first), wish(6, 11, Cause::Lost));
    assert_eq!(decide(first, second), None);
}

#[test]
fn a_host_takes_no_more_than_its_room_and_keeps_what_only_it_holds() {
    let (a, b) = (held("a", 0, 5), held("b", 6, 11));
    let to = wish(0, 7, Cause::Lost);
    assert_eq!(planned(&[(a, 12), (b, 6)], 8, &["b"]), to);
    // It is full.
    assert_eq!(planned(&[(a, 12), (b, 6)], 6, &["b"]), None);
}

#[test]
fn a_host_that_announces_the_memory_for_its_room_gets_no_more_layers() {
    let model = Model {
        kv_bytes_per_token_per_layer: 4_096,
        kv_tokens: 4_096,
        ..model(12)
    };
    let room = |name, layers, layer_us| Machine {
        memory_bytes: model.memory_of_any(layers),
        holds: None,
        ..machine(held(name, 0, 0), 0, layer_us)
    };
    let caller = room("a", 5, 500);
    let caller = Machine {
        memory_bytes: caller.memory_bytes + model.head_bytes,
        chats: true,
        ..caller
    };
    let community = Community::new([caller, room("b", 12, 900)], []);
    let found = plan(&community, &model, CHAT).unwrap();
    assert_eq!(found.ranges[&node("a")].count(), 5);
}

#[test]
fn while_all_layers_are_served_a_host_of_unique_layers_stays() {
    let (a, b) = (held("a", 0, 5), held("b", 6, 11));
    assert_eq!(planned(&[(a, 12), (b, 12)], 12, &[]), None);
    // A copy may become a larger copy.
    let c = held("c", 0, 3);
    let found = planned(&[(c, 12), (a, 6), (b, 6)], 12, &[]);
    assert_eq!(found.map(|wish| wish.cause), Some(Cause::Better));
}

#[test]
fn of_hosts_that_move_at_once_the_last_one_keeps_each_layer_served() {
    let all = ["a", "b", "c"].map(|name| held(name, 0, 5));
    let away = Layers::new(6, 12);
    let moves: BTreeMap<NodeId, Layers> = all.iter().map(|h| (h.node, away)).collect();
    let may_go = all.map(|mine| {
        let there: Vec<Held> = all.iter().copied().filter(|h| *h != mine).collect();
        is_safe(mine, (6, 11), &there, &moves, true)
    });
    assert_eq!(may_go, [true, true, false]);
    // A host that stays lets all of them go.
    let with = |mine: Held| is_safe(mine, (6, 11), &[held("d", 0, 5)], &moves, true);
    assert_eq!(all.map(with), [true; 3]);
    // A range that is extended is not served meanwhile.
    let alone = |is_covered| is_safe(all[0], (0, 11), &[], &moves, is_covered);
    assert!(alone(false) && !alone(true));
}

#[test]
fn a_smaller_plan_moves_nothing() {
    // The memory that it measured holds less than it serves.
    let (a, b) = (held("a", 0, 5), held("b", 6, 11));
    assert_eq!(planned(&[(a, 3), (b, 3)], 6, &[]), None);
}

#[test]
fn moves_wait_by_their_cause_and_never_follow_a_passing_wish() {
    let there = Some((6, 11));
    let as_wish = |cause| wish(6, 11, cause);
    let mut early = WaitLimits::new(1_000);
    assert_eq!(early.look(2_000, as_wish(Cause::Missing)), None);
    assert_eq!(early.look(3_499, as_wish(Cause::Missing)), None);
    assert_eq!(early.look(3_500, as_wish(Cause::Missing)), there);

    let mut late = WaitLimits::new(1_000);
    assert_eq!(late.look(60_000, as_wish(Cause::Missing)), None);
    assert_eq!(late.look(70_000, None), None);
    assert_eq!(late.look(71_000, as_wish(Cause::Missing)), None);
    assert_eq!(late.look(90_999, as_wish(Cause::Missing)), None);
    let other = wish(9, 11, Cause::Missing);
    assert_eq!(late.look(91_000, other), Some((9, 11)));

    let mut lost = WaitLimits::new(1_000);
    assert_eq!(lost.look(60_000, as_wish(Cause::Lost)), None);
    assert_eq!(lost.look(61_500, as_wish(Cause::Lost)), there);

    let mut better = WaitLimits::new(1_000);
    assert_eq!(better.look(60_000, as_wish(Cause::Better)), None);
    assert_eq!(better.look(359_999, as_wish(Cause::Better)), None);
    assert_eq!(better.look(360_000, as_wish(Cause::Better)), there);
    // A loss has its own time, however long the plan was better.
    assert_eq!(better.look(360_001, as_wish(Cause::Missing)), None);
}

#[test]
fn a_copy_that_joins_and_leaves_every_ten_seconds_moves_nothing() {
    let (mine, guest) = (held("a", 0, 5), held("c", 6, 11));
    let others = [held("b", 6, 11), guest, held("d", 0, 5)];
    let machines = [(mine, 500), (others[0], 500), (guest, 50), (others[2], 500)];
    let machines = machines.map(|(held, us)| machine(held, 12, us));
    let (community, model) = (Community::new(machines, []), model(12));
    let (all, two) = (gone(&["b", "c", "d"]), gone(&["b", "d"]));
    let (mut links, mut limits) = (LostLinks::default(), WaitLimits::new(0));
    let mut wishes = 0;
    for step in 0..600u64 {
        let now = 20_000 + step * 500;
        let is_away = step / 20 % 2 == 1;
        let away = links.look(now, if is_away { &two } else { &all });
        let situation = Situation {
            measured: Some((&community, &model)),
            ..of_twelve(mine, &others, &away)
        };
        let wish = situation.wish();
        wishes += usize::from(wish.is_some());
        assert_eq!(limits.look(now, wish), None, "{now}");
    }
    // Without the guest it would take more layers.
    assert!(wishes > 0);
}

#[test]
fn the_bytes_of_moves_within_an_hour_are_bounded() {
    let mut loads = Loads::new(100);
    assert!(loads.allows(0, 200, Cause::Better) && !loads.allows(0, 201, Cause::Better));
    loads.add(0, 200);
    assert!(!loads.allows(1_000, 1, Cause::Better));
    assert!(loads.allows(1_000, 200, Cause::Lost));
    loads.add(1_000, 200);
    assert!(!loads.allows(HOUR_MS - 1, 1, Cause::Missing));
    assert!(loads.allows(HOUR_MS, 200, Cause::Missing));
    assert!(!loads.allows(HOUR_MS, 201, Cause::Missing));
}
