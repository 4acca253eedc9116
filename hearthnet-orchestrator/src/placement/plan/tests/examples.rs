use super::*;

/// Community of the worked example of `specs/placement.md`.
fn homes() -> Vec<Machine> {
    let mut a = machine(0, 8, 1_000);
    a.chats = true;
    a.memory_bytes += 200 * MIB;
    vec![a, machine(1, 6, 500), machine(2, 12, 4_000)]
}

fn links() -> Vec<((NodeId, NodeId), Link)> {
    let link = Link {
        delay_us: 300,
        kbit_s: 1_000_000,
    };
    vec![((node(0), node(1)), link), ((node(0), node(2)), link)]
}

#[test]
fn the_worked_example_of_the_specification_holds() {
    let model = model(12);
    let community = Community::new(homes(), links());
    let plan = plan(&community, &model, CHAT).unwrap();
    let span = |n, first, end| Span {
        node: node(n),
        layers: Layers::new(first, end),
    };
    assert_eq!(plan.spans, [span(0, 0, 6), span(1, 6, 12)]);
    // The slow node takes no part in the route, and holds a copy of all layers.
    assert_eq!(plan.ranges[&node(2)], Layers::new(0, 12));
    assert_eq!(plan.twice, [Layers::new(0, 12)]);
    let found = predict(&community, &model, node(0), &plan.spans, Purpose::Chat).unwrap();
    // 2000 head, 6 * 1000, 6 * 500, 2 * (300 + 32) for the hop.
    assert_eq!(found.speed.token_us, 11_664);
    assert_eq!(found.speed.tokens_per_1000_s, 85_733);
    // Prompt: 21 chunks of 24 rows. Stages: 24 * 6 * 251 on the first node, 24 * 6 * 126 and the
    // hop 2 * (300 + 786) on the second.
    let (first, second) = (36_144, 18_144 + 2 * (300 + 786));
    assert_eq!(
        found.speed.first_token_us,
        first + second + 20 * first + 2_000
    );
    assert_eq!(found.memory[&node(0)], 800 * MIB);
    assert_eq!(found.alone, None);
}

#[test]
fn one_machine_is_recommended_where_it_is_faster() {
    let model = model(12);
    let mut homes = homes();
    homes[0].memory_bytes += 1_000 * MIB;
    homes[0].layer_us = 550;
    let community = Community::new(homes, links());
    let plan = plan(&community, &model, CHAT).unwrap();
    assert_eq!(plan.spans.len(), 1);
    let found = predict(&community, &model, node(0), &plan.spans, Purpose::Chat).unwrap();
    assert!(found.is_better_alone());
    // For many chats, two machines beside each other are faster than one.
    let batch = super::plan(&community, &model, BATCH).unwrap();
    assert_eq!(batch.spans.len(), 3);
}

#[test]
fn spans_that_leave_a_gap_have_no_prediction() {
    let community = Community::new(homes(), links());
    let span = Span {
        node: node(1),
        layers: Layers::new(1, 12),
    };
    let found = predict(&community, &model(12), node(0), &[span], Purpose::Chat);
    assert_eq!(found, None);
}

#[test]
fn spans_of_nodes_likely_to_leave_are_copied_first() {
    let model = model(8);
    let mut homes = vec![machine(0, 4, 500), machine(1, 4, 500), machine(2, 4, 9_000)];
    homes[1].online_permille = 200;
    let plan = plan(&Community::new(homes, []), &model, CHAT).unwrap();
    assert_eq!(plan.ranges[&node(2)], plan.ranges[&node(1)]);
    assert_eq!(plan.twice, [plan.ranges[&node(1)]]);
}

#[test]
fn a_route_takes_no_hop_for_nothing() {
    // Own layers 0-14, a neighbour with 2-9, another host with 15-29: the neighbour is skipped.
    let offer = |first, end, enter_us| Offer {
        layers: Layers::new(first, end),
        enter_us,
        layer_us: 1_000,
    };
    let offers = [offer(2, 10, 700), offer(0, 15, 0), offer(15, 30, 700)];
    let (route, cost) = shortest(Layers::new(0, 30), &offers, 16).unwrap();
    assert_eq!(route, [(1, Layers::new(0, 15)), (2, Layers::new(15, 30))]);
    assert_eq!(cost, 30_700);
}

#[test]
fn one_false_announcement_does_not_make_unmeasured_nodes_useless() {
    let community = |serves| {
        let liar = Machine {
            serves,
            ..machine(3, 4, u32::MAX)
        };
        let unmeasured = machine(4, 4, 0);
        let homes = [machine(0, 4, 500), machine(1, 4, 800), liar, unmeasured];
        Community::new(homes, [])
    };
    let time = |serves| community(serves).machine(node(4)).unwrap().layer_us;
    assert_eq!(time(false), 800);
    // Four times the median.
    assert_eq!(time(true), 3_200);
    let alone = Community::new([machine(4, 4, 0)], []);
    assert_eq!(alone.machine(node(4)).unwrap().layer_us, 10_000);
}

#[test]
fn claims_of_much_memory_push_out_neither_the_caller_nor_hosts_that_serve() {
    let mut host = machine(61, 1, 500);
    host.holds = Some(Layers::new(0, 4));
    let caller = Machine {
        serves: false,
        ..machine(62, 1, 500)
    };
    let member = Machine {
        serves: false,
        ..machine(63, 99, 500)
    };
    // A 65th node.
    let last = Machine {
        node: NodeKey::from_secret(&[65; 32]).id(),
        ..machine(0, 99, 500)
    };
    let liars = (0..61).map(|n| machine(n, 99, 500));
    let mut homes: Vec<Machine> = liars.collect();
    homes.extend([host, caller, member, last]);
    let found = Community::for_caller(Some(node(62)), homes, []);
    assert_eq!(found.machines().count(), MAX_MACHINES);
    assert!(found.machine(node(61)).is_some());
    assert!(found.machine(node(62)).is_some());
    // Of the rest, members that may not serve are left out first.
    assert!(found.machine(node(63)).is_none());
}
