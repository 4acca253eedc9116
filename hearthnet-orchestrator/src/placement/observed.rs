//! Input of the planner from the log: measurements, served layers and rights of the members.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{self, Advert, Level, Measured};
use hearthnet_files::WeightsId;

use super::plan::{Community, Layers, Link, Machine};

/// Members with unexpired measurements, as the planner sees them for the model `weights`. Adopted
/// models share the memory of each member equally. `caller` is among the nodes of the plan if it has
/// measured; without it, all nodes see the same community, even if it is too large for a plan.
/// Convicted nodes (`specs/disputes.md` 8) are callers only, as in routes.
pub fn observed_for(
    caller: Option<NodeId>,
    state: &log::Community,
    weights: WeightsId,
    now_ms: u64,
) -> Community {
    let served = served(state, weights, now_ms);
    let machines = measured_machines(state, weights, &served, now_ms);
    Community::for_caller(caller, machines, links(state, now_ms))
}

/// Advertisements of hosts of the model.
fn served(state: &log::Community, weights: WeightsId, now_ms: u64) -> BTreeMap<NodeId, &Advert> {
    let text = weights.to_string();
    let mut served: BTreeMap<NodeId, &Advert> = BTreeMap::new();
    for advert in state.usable_shards(now_ms) {
        if advert.descriptor.weights_sha256 != text {
            continue;
        }
        // A host may still advertise a range that it has left; the larger range counts.
        let kept = served.entry(advert.author).or_insert(advert);
        if length(advert) > length(kept) {
            *kept = advert;
        }
    }
    served
}

/// Members with unexpired measurements, of any model.
fn measured_machines(
    state: &log::Community,
    weights: WeightsId,
    served: &BTreeMap<NodeId, &Advert>,
    now_ms: u64,
) -> Vec<Machine> {
    let sharing = sharing(state, [weights]);
    let busy = state.shards(now_ms);
    let busy = busy.filter(|advert| advert.descriptor.queue_depth > 0);
    let busy: BTreeSet<NodeId> = busy.map(|advert| advert.author).collect();
    let machine = |(node, measured): (&NodeId, &Measured)| {
        let speed = measured.speed_of(&weights.0);
        let range = served.get(node).map(|advert| advert.descriptor.layer_range);
        Machine {
            node: *node,
            memory_bytes: measured.memory_bytes / sharing,
            serves: state.level(node) >= Some(Level::Trusted)
                && !state.reputation(node).is_convicted(),
            layer_us: speed.map_or(0, |model| model.layer_us),
            prefill_row_us: speed.map_or(0, |model| model.prefill_row_us),
            head_us: speed.map_or(0, |model| model.head_us),
            step_us: speed.map_or(0, |model| model.step_us),
            online_permille: measured.online_permille,
            present_s: measured.running_s,
            // Only callers load the head.
            chats: speed.is_some_and(|model| model.head_us > 0),
            is_answering: busy.contains(node),
            is_fixed: false,
            holds: range.map(Layers::from_inclusive),
        }
    };
    state.measured(now_ms).map(machine).collect()
}

/// Number of models that share a node's memory: all adopted ones if each of `models` is one of
/// them, else 1.
pub fn sharing(state: &log::Community, models: impl IntoIterator<Item = WeightsId>) -> u64 {
    let mut models = models.into_iter();
    match models.all(|WeightsId(it)| state.model(&it).is_some()) {
        true => state.models().len().max(1) as u64,
        false => 1,
    }
}

/// Links that members measured, by caller and host.
pub(crate) fn links(
    state: &log::Community,
    now_ms: u64,
) -> impl Iterator<Item = ((NodeId, NodeId), Link)> {
    state.measured(now_ms).flat_map(|(node, measured)| {
        let links = measured.links.iter();
        links.map(|link| {
            let measured = Link {
                delay_us: link.delay_us,
                kbit_s: link.kbit_s,
            };
            ((*node, link.node), measured)
        })
    })
}

/// Members that have measured a layer of the model.
pub fn have_measured(state: &log::Community, weights: WeightsId, now_ms: u64) -> BTreeSet<NodeId> {
    let measured = state.measured(now_ms).filter(|(_, measured)| {
        let speed = measured.speed_of(&weights.0);
        speed.is_some_and(|speed| speed.layer_us > 0)
    });
    measured.map(|(node, _)| *node).collect()
}

/// [`observed_for`] no caller, for the plan of the host `own`. Hosts that have not measured the model
/// keep the ranges that they advertise. `None` if `own` has not measured it or is convicted, or if
/// not all of `reachable` are among the nodes of the plan.
pub fn observed_by_host(
    own: NodeId,
    reachable: &BTreeSet<NodeId>,
    state: &log::Community,
    weights: WeightsId,
    now_ms: u64,
) -> Option<Community> {
    let measured = have_measured(state, weights, now_ms);
    if !measured.contains(&own) || state.reputation(&own).is_convicted() {
        return None;
    }
    let served = served(state, weights, now_ms);
    let mut machines = measured_machines(state, weights, &served, now_ms);
    let mut known = BTreeSet::new();
    for machine in &mut machines {
        let is_host = served.contains_key(&machine.node);
        machine.is_fixed = is_host && !measured.contains(&machine.node);
        known.insert(machine.node);
    }
    let others = served.iter().filter(|(node, _)| !known.contains(*node));
    machines.extend(others.map(|(node, advert)| unmeasured_host(*node, advert)));
    let community = Community::new(machines, links(state, now_ms));
    // Of a large community, not all nodes are planned.
    let mut hosts = reachable.iter().chain([&own]);
    let is_complete = hosts.all(|node| community.machine(*node).is_some());
    is_complete.then_some(community)
}

/// Host of which only its advertisement is known.
fn unmeasured_host(node: NodeId, advert: &Advert) -> Machine {
    Machine {
        serves: true,
        is_answering: advert.descriptor.queue_depth > 0,
        is_fixed: true,
        holds: Some(Layers::from_inclusive(advert.descriptor.layer_range)),
        ..Machine::new(node)
    }
}

fn length(advert: &Advert) -> u32 {
    let (lo, hi) = advert.descriptor.layer_range;
    hi.saturating_sub(lo)
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::log::{Adoption, Body, LinkSpeed, ModelSpeed};
    use hearthnet_bus::testing::{self, Home, id, key};
    use hearthnet_bus::{Descriptor, now_ms};

    use super::*;

    const WEIGHTS: WeightsId = WeightsId([7; 32]);

    fn measured(layer_us: u32, peer: u8) -> Measured {
        Measured {
            links: vec![LinkSpeed {
                node: id(peer),
                kbit_s: 0,
                delay_us: 250,
            }],
            models: vec![ModelSpeed {
                head_us: 900,
                step_us: 0,
                weights: WEIGHTS.0,
                layer_us,
                prefill_row_us: 80,
            }],
            running_s: 30,
            memory_bytes: 5 << 30,
            online_permille: 700,
        }
    }

    fn announce(home: &Home, seed: u8, layer_us: u32, peer: u8) {
        let body = Body::NodeMeasured(measured(layer_us, peer));
        home.log.append(&key(seed), body, now_ms()).unwrap();
    }

    fn advertise(home: &Home, seed: u8) {
        let advert = Descriptor {
            weights_sha256: WEIGHTS.to_string(),
            ..testing::descriptor(id(seed))
        };
        let body = Body::ShardAdvertised(Box::new(advert));
        home.log.append(&key(seed), body, now_ms()).unwrap();
    }

    #[test]
    fn measurements_and_advertisements_become_machines_and_links() {
        let home = Home::founded(key(1), true);
        announce(&home, 1, 400, 2);
        let advert = Descriptor {
            weights_sha256: WEIGHTS.to_string(),
            queue_depth: 1,
            ..testing::descriptor(id(1))
        };
        home.append(Body::ShardAdvertised(Box::new(advert)));
        let now = now_ms();
        let found = observed_for(None, &home.log.state(), WEIGHTS, now);
        let machine = found.machine(id(1)).unwrap();
        assert_eq!(machine.memory_bytes, 5 << 30);
        assert_eq!((machine.layer_us, machine.head_us), (400, 900));
        assert_eq!(machine.holds, Some(Layers::new(0, 8)));
        assert!(machine.chats && machine.is_answering);
        assert_eq!(machine.present_s, 30);
        assert_eq!(found.way(id(2), id(1), 0), (250, 0));
        // Of another model, neither speeds nor layers are known.
        let other = observed_for(None, &home.log.state(), WeightsId([8; 32]), now);
        let machine = other.machine(id(1)).unwrap();
        assert_eq!((machine.head_us, machine.holds), (0, None));
        assert!(!machine.chats);
    }

    #[test]
    fn adopted_models_share_the_memory() {
        let home = Home::founded(key(1), true);
        announce(&home, 1, 400, 2);
        let memory = |weights: u8| {
            let found = observed_for(None, &home.log.state(), WeightsId([weights; 32]), now_ms());
            found.machine(id(1)).unwrap().memory_bytes
        };
        for (adopted, share) in [(7, 5 << 30), (8, 5 << 29)] {
            home.append(Body::ModelAdopted(Adoption {
                head: [1; 32],
                name: format!("model {adopted}"),
                layers: 16,
                pieces: [2; 32],
                sources: Vec::new(),
                weights: [adopted; 32],
                file_bytes: 4_000_000_000,
                head_bytes: 6_000_000,
                manifest_bytes: 30_000,
            }));
            assert_eq!(memory(7), share);
        }
        // A model that is not adopted would have all of it.
        assert_eq!(memory(9), 5 << 30);
    }

    #[test]
    fn a_host_plans_once_it_has_measured_whatever_others_have() {
        let home = Home::founded(key(1), true);
        home.admit(id(2), Level::Trusted);
        let seen_by = |seed: u8| {
            let others = BTreeSet::from([id(3 - seed)]);
            observed_by_host(id(seed), &others, &home.log.state(), WEIGHTS, now_ms())
        };
        assert_eq!(seen_by(1), None);
        announce(&home, 1, 400, 2);
        assert_eq!(seen_by(1), None, "the other one is no host");
        advertise(&home, 2);
        // In the first round node 2 has announced no time, in the second one a time of 0. Neither
        // is a measurement of the model.
        for _ in 0..2 {
            let found = seen_by(1).unwrap();
            let machine = found.machine(id(2)).unwrap();
            assert!(machine.is_fixed && machine.serves);
            assert_eq!(machine.layer_us, 400);
            assert_eq!(machine.holds, Some(Layers::new(0, 8)));
            assert!(!found.machine(id(1)).unwrap().is_fixed);
            assert_eq!(seen_by(2), None);
            announce(&home, 2, 0, 1);
        }
        announce(&home, 2, 300, 1);
        let found = seen_by(1).unwrap();
        assert!(!found.machine(id(2)).unwrap().is_fixed);
        assert_eq!(seen_by(2), Some(found));
    }

    #[test]
    fn a_convicted_node_holds_no_layers_in_a_plan() {
        let home = Home::founded(key(1), true);
        for seed in [2, 3] {
            home.admit(id(seed), Level::Trusted);
            announce(&home, seed, 400, 1);
            advertise(&home, seed);
        }
        let seen = || {
            let found = observed_for(None, &home.log.state(), WEIGHTS, now_ms());
            let machine = found.machine(id(2)).unwrap();
            (machine.serves, machine.holds.is_some())
        };
        let by_host = |own: u8, others: BTreeSet<NodeId>| {
            observed_by_host(id(own), &others, &home.log.state(), WEIGHTS, now_ms())
        };
        assert_eq!(seen(), (true, true));
        assert!(by_host(2, BTreeSet::from([id(3)])).is_some());
        home.convict(&key(3), id(2));
        assert_eq!(seen(), (false, false));
        assert_eq!(by_host(2, BTreeSet::from([id(3)])), None);
        let left = by_host(3, BTreeSet::new()).unwrap();
        assert!(left.machine(id(3)).unwrap().serves);
        assert!(!left.machine(id(2)).unwrap().serves);
    }

    #[test]
    fn a_member_without_the_right_to_serve_is_no_host() {
        let home = Home::founded(key(1), true);
        home.admit(id(2), Level::Member);
        announce(&home, 2, 400, 1);
        let found = observed_for(None, &home.log.state(), WEIGHTS, now_ms());
        let machine = found.machine(id(2)).unwrap();
        assert_eq!((machine.serves, machine.layer_us), (false, 400));
    }
}
