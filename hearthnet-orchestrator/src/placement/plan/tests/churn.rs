use super::*;

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
        // Bytes of each step; an hour has twelve.
        let mut history: Vec<u64> = Vec::new();
        let mut present: Vec<bool> = vec![true; all.len()];
        for step in 0..40 {
            let who = dice.roll(0, all.len() as u64) as usize;
            if step > 0 {
                present[who] = !present[who];
                all[who].holds = None;
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
