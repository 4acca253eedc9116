use super::*;

/// Same entries in another order.
fn turned<T: Clone>(all: &[T], dice: &mut Dice) -> Vec<T> {
    let mut all = all.to_vec();
    for i in (1..all.len()).rev() {
        all.swap(i, dice.roll(0, i as u64 + 1) as usize);
    }
    all
}

#[test]
fn plans_of_1000_random_communities_are_valid_alike_in_any_order_and_never_slower_than_one_machine()
{
    let mut dice = Dice(40);
    let mut planned = 0;
    for round in 0..1_000 {
        let (machines, links, model) = dice.community();
        let community = Community::new(machines.clone(), links.clone());
        let purpose = [Purpose::Chat, Purpose::Batch][round % 2];
        let caller = [None, Some(node(0))][round / 2 % 2];
        let task = Task { purpose, caller };
        let found = plan(&community, &model, task);
        let other = Community::new(turned(&machines, &mut dice), turned(&links, &mut dice));
        assert_eq!(found, plan(&other, &model, task), "round {round}");

        let cuts = Cuts::new(&model).unwrap();
        let needed = cuts.bytes(model.hosted());
        let single = machines
            .iter()
            .filter(|m| community.free(&model, m) >= needed)
            .map(|m| {
                let layers = model.hosted();
                let node = m.node;
                cost(&community, &model, task, &[Span { node, layers }])
            })
            .min();
        match found {
            Ok(plan) => {
                planned += 1;
                assert!(covers(&model, &plan.ranges));
                for (node, layers) in &plan.ranges {
                    let free = community.free(&model, community.machine(*node).unwrap());
                    assert!(cuts.bytes(*layers) <= free, "round {round}");
                }
                let used = cost(&community, &model, task, &plan.spans);
                assert!(single.is_none_or(|single| used <= single), "round {round}");
                let caller = community.callers(task)[0];
                let predicted = predict(&community, &model, caller, &plan.spans, purpose);
                assert!(predicted.unwrap().speed.token_us > 0);
            }
            Err(Unplannable::Memory { needed, given, .. }) => {
                assert!(single.is_none());
                // Layers of one size leave less than a layer free on each node.
                let lost = machines.len() as u64 * 121 * MIB;
                assert!(given < needed + lost, "round {round}");
            }
            Err(other) => panic!("round {round}: {other}"),
        }
    }
    assert!(planned > 500, "{planned}");
}
