use proptest::prelude::*;

use super::*;

/// Least objective over all orders and lengths of ranges.
fn least(community: &Community, model: &Model, task: Task) -> Option<u64> {
    fn go(
        community: &Community,
        model: &Model,
        task: Task,
        spans: &mut Vec<Span>,
        best: &mut Option<u64>,
    ) {
        let hosted = model.hosted();
        let at = spans.last().map_or(hosted.first, |s| s.layers.end);
        if at == hosted.end {
            let cost = cost(community, model, task, spans);
            *best = Some(best.map_or(cost, |best| best.min(cost)));
            return;
        }
        for machine in community.machines() {
            if spans.iter().any(|s| s.node == machine.node) {
                continue;
            }
            for end in at + 1..=hosted.end {
                let memory: u64 = (at..end).map(|l| model.layer_memory(l)).sum();
                let legal = end == hosted.end || !model.uncut.contains(&end);
                if legal && memory <= community.free(model, machine) {
                    let layers = Layers::new(at, end);
                    spans.push(Span {
                        node: machine.node,
                        layers,
                    });
                    go(community, model, task, spans, best);
                    spans.pop();
                }
            }
        }
    }
    let mut best = None;
    go(community, model, task, &mut Vec::new(), &mut best);
    best
}

fn small() -> impl Strategy<Value = (Community, Model)> {
    let machines = proptest::collection::vec((0u64..900, 1u32..2_000, any::<bool>()), 1..5);
    let sizes = prop_oneof![
        proptest::collection::vec(Just(100u64), 1..7),
        proptest::collection::vec(50u64..250, 1..7),
    ];
    let links = proptest::collection::vec((0usize..4, 0usize..4, 0u32..3_000, 0u32..50_000), 0..8);
    let rest = (
        0u32..2,
        0u32..2,
        proptest::collection::vec(0u32..7, 0..3),
        0u32..9,
    );
    (machines, sizes, links, rest).prop_map(|(machines, sizes, links, rest)| {
        let machines = machines
            .into_iter()
            .enumerate()
            .map(|(n, (mib, us, chats))| Machine {
                memory_bytes: mib * MIB,
                chats,
                ..machine(n, 0, us)
            });
        let links = links
            .into_iter()
            .map(|(a, b, delay_us, kbit_s)| ((node(a), node(b)), Link { delay_us, kbit_s }));
        let (private_first, private_last, uncut, kv_tokens) = rest;
        let model = Model {
            layer_bytes: sizes.into_iter().map(|mib| mib * MIB).collect(),
            head_bytes: 30 * MIB,
            private_first,
            private_last,
            uncut,
            kv_tokens,
            kv_bytes_per_token_per_layer: 1 << 20,
            ..model(1)
        };
        (Community::new(machines, links), model)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]
    #[test]
    fn the_plan_is_the_best_of_all((community, model) in small(), batch: bool) {
        let task = if batch { BATCH } else { CHAT };
        let best = least(&community, &model, task);
        let Some(cuts) = Cuts::new(&model) else {
            prop_assert!(model.hosted().is_empty());
            return Ok(());
        };
        let found = primary(&community, &model, task, &cuts);
        match (found, best) {
            (Ok((ranges, is_optimal)), Some(best)) => {
                prop_assert!(is_optimal);
                prop_assert_eq!(cost(&community, &model, task, &spans_of(&ranges)), best);
                let plan = plan(&community, &model, task).unwrap();
                let used = cost(&community, &model, task, &plan.spans);
                prop_assert!(used <= best, "copies only add choices: {} {}", used, best);
            }
            (Err(Unplannable::Memory { on, more, new_node, .. }), None) => {
                // The memory that the error recommends suffices, and 1 MiB less does not.
                let grown = |by: u64| {
                    let all = community.machines().cloned().map(|mut m| {
                        if m.node == on {
                            let own = if m.chats { model.caller_memory() } else { 0 };
                            m.memory_bytes = m.memory_bytes.max(own) + by;
                        }
                        m
                    });
                    least(&Community::new(all, []), &model, task)
                };
                prop_assert!(grown(more).is_some());
                prop_assert!(more <= MIB || grown(more - MIB).is_none());
                let new = Machine { memory_bytes: new_node, ..machine(9, 0, 100) };
                let all = community.machines().cloned().chain([new]);
                prop_assert!(least(&Community::new(all, []), &model, task).is_some());
            }
            (found, best) => prop_assert!(false, "{:?} {:?}", found, best),
        }
    }

    #[test]
    fn the_route_is_the_cheapest_of_all(
        offers in proptest::collection::vec((0u32..6, 1u32..7, 0u64..50, 1u64..20), 1..5),
        max_spans in 1usize..5,
    ) {
        let offers: Vec<Offer> = offers.into_iter().map(|(first, count, enter_us, layer_us)| Offer {
            layers: Layers::new(first, first + count),
            enter_us,
            layer_us,
        }).collect();
        let layers = Layers::new(1, 6);
        // All sequences of one offer per layer; a change of offer enters it.
        let mut best: Option<u64> = None;
        let choices = offers.len();
        for code in 0..choices.pow(5) {
            let picks: Vec<usize> = (0..5).map(|i| code / choices.pow(i) % choices).collect();
            if !picks.iter().zip(1..).all(|(&o, layer)| offers[o].layers.holds(layer)) {
                continue;
            }
            let (mut sum, mut spans, mut last) = (0, 0, None);
            for &o in &picks {
                if last != Some(o) {
                    sum += offers[o].enter_us;
                    spans += 1;
                }
                sum += offers[o].layer_us;
                last = Some(o);
            }
            if spans <= max_spans {
                best = Some(best.map_or(sum, |b| b.min(sum)));
            }
        }
        let found = shortest(layers, &offers, max_spans);
        prop_assert_eq!(found.as_ref().map(|(_, cost)| *cost), best);
        let by_spans = shortest_by_spans(layers, &offers, max_spans);
        prop_assert!(by_spans.windows(2).all(|w| w[0].0.len() < w[1].0.len()));
        for (route, cost) in by_spans {
            let costs = route.iter().map(|(index, span)| offers[*index].cost(span.count()));
            prop_assert_eq!(costs.sum::<u64>(), cost);
        }
        if let Some((route, _)) = found {
            prop_assert!(route.len() <= max_spans);
            prop_assert!(route.windows(2).all(|w| w[0].1.end == w[1].1.first));
        }
    }
}
