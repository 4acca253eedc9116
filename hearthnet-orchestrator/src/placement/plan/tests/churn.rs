use std::collections::BTreeSet;

use super::*;
use crate::placement::auto::{Cause, MissingSince, Situation, WaitLimits};
use crate::placement::{Held, missing};

const LIMIT: Moved = Moved {
    in_last_hour: 0,
    limit: 100_000 * MIB,
};

fn next(machines: &[Machine], model: &Model, moved: Moved) -> Replanned {
    let community = Community::new(machines.to_vec(), []);
    replan(&community, model, CHAT, moved).unwrap()
}

/// Nodes load what the plan says.
fn apply(machines: &mut [Machine], replanned: &Replanned) {
    for machine in machines {
        machine.holds = replanned.plan.ranges.get(&machine.node).copied();
    }
}

#[test]
fn a_plan_that_is_carried_out_moves_nothing_more() {
    let mut dice = Dice(7);
    for round in 0..200 {
        let (mut machines, links, model) = dice.community();
        let community = |machines: &[Machine]| Community::new(machines.to_vec(), links.clone());
        let first = replan(&community(&machines), &model, CHAT, LIMIT).unwrap();
        apply(&mut machines, &first);
        // The copies of the first plan have the limit's other half.
        let second = replan(&community(&machines), &model, CHAT, LIMIT).unwrap();
        apply(&mut machines, &second);
        let third = replan(&community(&machines), &model, CHAT, LIMIT).unwrap();
        assert_eq!(third.moves, [], "round {round}");
    }
}

#[test]
fn a_home_that_joins_and_leaves_every_ten_seconds_causes_no_moves() {
    let model = model(12);
    let mut machines = vec![machine(0, 8, 500), machine(1, 8, 500)];
    let first = next(&machines, &model, LIMIT);
    apply(&mut machines, &first);
    let second = next(&machines, &model, LIMIT);
    apply(&mut machines, &second);
    // Faster than all others, with room for everything.
    let mut guest = machine(2, 20, 50);
    for round in 0..100u32 {
        guest.present_s = round * 5 % 10;
        let mut now = machines.clone();
        if round % 4 < 2 {
            now.push(guest.clone());
        }
        assert_eq!(next(&now, &model, LIMIT).moves, [], "round {round}");
    }
    // Nor does it if it serves layers while it is there, from its disk.
    guest.present_s = 5;
    guest.holds = Some(Layers::new(0, 6));
    let mut now = machines.clone();
    now.push(guest.clone());
    assert_eq!(next(&now, &model, LIMIT).moves, []);
    // It is used once it stays.
    guest.present_s = 60;
    machines.push(guest);
    let moves = next(&machines, &model, LIMIT).moves;
    assert!(moves.iter().any(|m| m.node == node(2)));
}

#[test]
fn a_node_that_computes_for_an_answer_keeps_its_range() {
    let model = model(12);
    let mut machines = vec![machine(0, 12, 5_000), machine(1, 12, 100)];
    machines[0].holds = Some(Layers::new(0, 12));
    machines[0].is_answering = true;
    machines[1].holds = Some(Layers::new(0, 3));
    machines[1].is_answering = true;
    assert_eq!(next(&machines, &model, LIMIT).moves, []);
    machines[1].is_answering = false;
    let moves = next(&machines, &model, LIMIT).moves;
    assert_eq!(moves.len(), 1);
    assert_eq!(moves[0].node, node(1));
    assert_eq!(moves[0].to, Some(Layers::new(0, 12)));
    assert_eq!(moves[0].bytes, 900 * MIB);
}

#[test]
fn small_gains_move_nothing() {
    let model = model(10);
    let mut machines = vec![
        machine(0, 5, 1_000),
        machine(1, 5, 1_000),
        machine(2, 5, 950),
    ];
    machines[0].holds = Some(Layers::new(0, 5));
    machines[1].holds = Some(Layers::new(5, 10));
    machines[2].holds = Some(Layers::new(2, 7));
    assert_eq!(next(&machines, &model, LIMIT).moves, []);
    machines[2].layer_us = 300;
    assert_ne!(next(&machines, &model, LIMIT).moves, []);
}

#[test]
fn layers_of_a_node_that_left_go_to_another_one_and_the_rest_stays() {
    let model = model(12);
    let mut machines = vec![machine(0, 4, 500), machine(1, 4, 500), machine(3, 4, 500)];
    machines[0].holds = Some(Layers::new(0, 4));
    machines[1].holds = Some(Layers::new(8, 12));
    machines[2].present_s = 0;
    let found = next(&machines, &model, LIMIT);
    let moves: Vec<_> = found.moves.iter().map(|m| (m.node, m.to)).collect();
    assert_eq!(moves, [(node(3), Some(Layers::new(4, 8)))]);
    assert!(covers(&model, &found.plan.ranges));
    assert!(!found.waits);

    // Not beyond the limit of bytes.
    let spent = Moved {
        in_last_hour: 1_700 * MIB,
        limit: 2_000 * MIB,
    };
    let found = next(&machines, &model, spent);
    assert!(found.moves.iter().map(|m| m.bytes).sum::<u64>() <= 300 * MIB);
    assert!(found.waits);

    // And with too little memory the answer says how much is missing.
    machines.pop();
    let found = next(&machines, &model, LIMIT);
    let Some(Unplannable::Memory { new_node, more, .. }) = found.missing else {
        panic!("{:?}", found.missing);
    };
    assert_eq!((new_node, more), (400 * MIB, 400 * MIB));
    assert_eq!(found.moves, []);
}

#[test]
fn under_churn_moves_stay_below_the_limit_and_layers_stay_covered_whenever_memory_suffices() {
    let mut dice = Dice(11);
    for round in 0..20 {
        let (mut all, links, model) = dice.community();
        let needed = Cuts::new(&model).unwrap().bytes(model.hosted());
        let limit = 3 * needed;
        // A host that has not measured keeps its range whenever it is there.
        let fixed = dice.roll(0, all.len() as u64) as usize;
        let part = Cuts::new(&model).unwrap().layers(0, 1);
        (all[fixed].is_fixed, all[fixed].holds) = (true, Some(part));
        // Bytes of each step; an hour has twelve.
        let mut history: Vec<u64> = Vec::new();
        let mut present: Vec<bool> = vec![true; all.len()];
        for step in 0..40 {
            let who = dice.roll(0, all.len() as u64) as usize;
            if step > 0 {
                present[who] = !present[who];
                all[who].holds = (who == fixed).then_some(part);
            }
            let here = all.iter().zip(&present).filter(|(_, here)| **here);
            let here: Vec<Machine> = here.map(|(m, _)| m.clone()).collect();
            let community = Community::new(here.clone(), links.clone());
            let in_last_hour = history.iter().rev().take(11).sum();
            let moved = Moved {
                in_last_hour,
                limit,
            };
            let found = replan(&community, &model, CHAT, moved).unwrap();
            let bytes: u64 = found.moves.iter().map(|m| m.bytes).sum();
            let is_first = here.iter().all(|m| m.holds.is_none());
            if !is_first {
                let left = limit.saturating_sub(in_last_hour);
                assert!(
                    bytes <= left,
                    "round {round} step {step}: {bytes} of {left}"
                );
            }
            history.push(bytes);
            assert!(found.moves.iter().all(|m| m.node != node(fixed)));
            let kept = found.plan.ranges.get(&node(fixed)).copied();
            assert_eq!(kept, present[fixed].then_some(part));
            let possible = plan(&community, &model, CHAT).is_ok();
            let covered = covers(&model, &found.plan.ranges);
            assert!(
                covered || found.waits || !possible,
                "round {round} step {step}"
            );
            for machine in &mut all {
                machine.holds = found.plan.ranges.get(&machine.node).copied();
            }
        }
    }
}

/// Host of a simulation with moves.
struct Host {
    held: Held,
    room: u32,
    limits: WaitLimits,
    missing: MissingSince,
}

#[test]
fn neither_a_host_that_never_moves_nor_one_that_never_measures_delays_a_repair_by_minutes() {
    let (mut dice, model) = (Dice(13), model(12));
    let ids: Vec<NodeId> = (0..7).map(node).collect();
    for round in 0..40 {
        // The order of the node ids decides between equal hosts.
        let mut order: Vec<usize> = (0..ids.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, dice.roll(0, i as u64 + 1) as usize);
        }
        let id = |n: usize| ids[order[n]];
        let held = |n: usize, lo, hi| Held {
            node: id(n),
            range: (lo, hi),
        };
        // The first one claims much memory and never moves, the second one has not measured, and the
        // last one is gone.
        let (liar, gone) = (held(0, 0, 5), held(6, 6, 11));
        let count = 3 + dice.roll(0, 3) as usize;
        let mut hosts: Vec<Host> = (1..=count)
            .map(|n| Host {
                held: held(n, 0, 5),
                room: dice.roll(6, 13) as u32,
                limits: WaitLimits::new(0),
                missing: MissingSince::default(),
            })
            .collect();
        let away = BTreeSet::from([gone.node]);
        let mut now = 20_000;
        loop {
            let all: Vec<Held> = hosts.iter().map(|host| host.held).chain([liar]).collect();
            let ranges: Vec<(u32, u32)> = all.iter().map(|h| h.range).collect();
            let runs = missing(12, &ranges);
            if runs.is_empty() {
                break;
            }
            assert!(now < 120_000, "round {round}: {runs:?} missing, {all:?}");
            let honest: Vec<(u32, u32)> = hosts.iter().map(|host| host.held.range).collect();
            assert_eq!(
                missing(6, &honest),
                [],
                "round {round}: layers were given up"
            );
            let machine = |h: &Held, memory: u64, layer_us: u32| Machine {
                node: h.node,
                holds: Some(Layers::from_inclusive(h.range)),
                is_fixed: layer_us == 0,
                ..machine(0, memory, layer_us)
            };
            let known = hosts.iter().enumerate().map(|(n, host)| {
                let layer_us = if n == 0 { 0 } else { 500 };
                machine(&host.held, host.room.into(), layer_us)
            });
            let machines = known.chain([machine(&liar, 99, 100), machine(&gone, 6, 500)]);
            let community = Community::new(machines, []);
            for (n, host) in hosts.iter_mut().enumerate() {
                let others = all.iter().filter(|h| h.node != host.held.node);
                let others: Vec<Held> = others.chain([&gone]).copied().collect();
                let may_plan = n > 0 && !host.limits.is_new(now);
                let situation = Situation {
                    total: 12,
                    room: host.room,
                    mine: host.held,
                    others: &others,
                    gone: &away,
                    passed_over: host.missing.look(now, runs.clone()),
                    measured: may_plan.then_some((&community, &model)),
                };
                let wish = situation.wish();
                assert!(wish.is_none_or(|wish| wish.cause != Cause::Missing));
                if let Some(range) = host.limits.look(now, wish) {
                    host.held.range = range;
                    host.limits = WaitLimits::new(now);
                }
            }
            now += 500;
        }
    }
}
