//! Input of the planner from the log: measurements, served layers and rights of the members.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{self, Advert, Level, Measured};
use hearthnet_files::WeightsId;

use super::plan::{Community, Layers, Link, Machine};

/// Members with unexpired measurements, as the planner sees them for the model `weights`. Adopted
/// models share the memory of each member equally.
pub fn observed(state: &log::Community, weights: WeightsId, now_ms: u64) -> Community {
    observed_for(None, state, weights, now_ms)
}

/// [`observed`], with `caller` among the nodes of the plan if it has measured. Other nodes may see
/// another community if it is too large for a plan.
pub fn observed_for(
    caller: Option<NodeId>,
    state: &log::Community,
    weights: WeightsId,
    now_ms: u64,
) -> Community {
    let text = weights.to_string();
    let sharing = match state.model(&weights.0) {
        Some(_) => state.models().len().max(1) as u64,
        None => 1,
    };
    let mut served: BTreeMap<NodeId, &Advert> = BTreeMap::new();
    let mut busy: BTreeSet<NodeId> = BTreeSet::new();
    for advert in state.shards(now_ms) {
        if advert.descriptor.queue_depth > 0 {
            busy.insert(advert.author);
        }
        if advert.descriptor.weights_sha256 != text {
            continue;
        }
        // A host may still advertise a range that it has left; the larger range counts.
        let kept = served.entry(advert.author).or_insert(advert);
        if length(advert) > length(kept) {
            *kept = advert;
        }
    }
    let machine = |(node, measured): (&NodeId, &Measured)| {
        let speed = measured.speed_of(&weights.0);
        let range = served.get(node).map(|advert| advert.descriptor.layer_range);
        Machine {
            node: *node,
            memory_bytes: measured.memory_bytes / sharing,
            serves: state.level(node) >= Some(Level::Trusted),
            layer_us: speed.map_or(0, |model| model.layer_us),
            prefill_row_us: speed.map_or(0, |model| model.prefill_row_us),
            head_us: speed.map_or(0, |model| model.head_us),
            online_permille: measured.online_permille,
            present_s: measured.running_s,
            // Only callers load the head.
            chats: speed.is_some_and(|model| model.head_us > 0),
            is_answering: busy.contains(node),
            is_fixed: false,
            holds: range.map(Layers::from_inclusive),
        }
    };
    let machines = state.measured(now_ms).map(machine);
    Community::for_caller(caller, machines, links(state, now_ms))
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

/// [`observed`], if each of these hosts has measured the model.
pub fn observed_by_all(
    state: &log::Community,
    weights: WeightsId,
    hosts: &BTreeSet<NodeId>,
    now_ms: u64,
) -> Option<Community> {
    if !hosts.is_subset(&have_measured(state, weights, now_ms)) {
        return None;
    }
    let community = observed(state, weights, now_ms);
    // Of a large community, not all nodes are planned.
    let is_complete = hosts.iter().all(|node| community.machine(*node).is_some());
    is_complete.then_some(community)
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
                weights: WEIGHTS.0,
                layer_us,
                prefill_row_us: 80,
            }],
            running_s: 30,
            memory_bytes: 5 << 30,
            online_permille: 700,
        }
    }

    #[test]
    fn measurements_and_advertisements_become_machines_and_links() {
        let home = Home::founded(key(1), true);
        home.append(Body::NodeMeasured(measured(400, 2)));
        let advert = Descriptor {
            weights_sha256: WEIGHTS.to_string(),
            queue_depth: 1,
            ..testing::descriptor(id(1))
        };
        home.append(Body::ShardAdvertised(Box::new(advert)));
        let now = now_ms();
        let found = observed(&home.log.state(), WEIGHTS, now);
        let machine = found.machine(id(1)).unwrap();
        assert_eq!(machine.memory_bytes, 5 << 30);
        assert_eq!((machine.layer_us, machine.head_us), (400, 900));
        assert_eq!(machine.holds, Some(Layers::new(0, 8)));
        assert!(machine.chats && machine.is_answering);
        assert_eq!(machine.present_s, 30);
        assert_eq!(found.way(id(2), id(1), 0), (250, 0));
        // Of another model, neither speeds nor layers are known.
        let other = observed(&home.log.state(), WeightsId([8; 32]), now);
        let machine = other.machine(id(1)).unwrap();
        assert_eq!((machine.head_us, machine.holds), (0, None));
        assert!(!machine.chats);
    }

    #[test]
    fn adopted_models_share_the_memory() {
        let home = Home::founded(key(1), true);
        home.append(Body::NodeMeasured(measured(400, 2)));
        let memory = |weights: u8| {
            let found = observed(&home.log.state(), WeightsId([weights; 32]), now_ms());
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
    fn hosts_plan_only_if_all_of_them_have_measured_the_model() {
        let home = Home::founded(key(1), true);
        home.admit(id(2), Level::Trusted);
        home.append(Body::NodeMeasured(measured(400, 2)));
        let both = BTreeSet::from([id(1), id(2)]);
        let all = |weights, hosts: &BTreeSet<NodeId>| {
            observed_by_all(&home.log.state(), weights, hosts, now_ms()).is_some()
        };
        assert!(all(WEIGHTS, &BTreeSet::from([id(1)])) && !all(WEIGHTS, &both));
        let body = Body::NodeMeasured(measured(0, 1));
        home.log.append(&key(2), body, now_ms()).unwrap();
        assert!(!all(WEIGHTS, &both));
        let body = Body::NodeMeasured(measured(300, 1));
        home.log.append(&key(2), body, now_ms()).unwrap();
        assert!(all(WEIGHTS, &both) && !all(WeightsId([8; 32]), &both));
    }

    #[test]
    fn a_member_without_the_right_to_serve_is_no_host() {
        let home = Home::founded(key(1), true);
        home.admit(id(2), Level::Member);
        let now = now_ms();
        let body = Body::NodeMeasured(measured(400, 1));
        home.log.append(&key(2), body, now).unwrap();
        let found = observed(&home.log.state(), WEIGHTS, now_ms());
        let machine = found.machine(id(2)).unwrap();
        assert_eq!((machine.serves, machine.layer_us), (false, 400));
    }
}
