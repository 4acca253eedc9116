//! Second copies of layers, in memory that the plan leaves free.
//!
//! Each step takes the range whose new copies are worth most: the sum, over the layers that gain a
//! second copy, of the share of time in which their holder is away. A node without a range takes
//! any legal range; a node with one extends it, since a node serves one range.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

use super::cuts::{Cuts, Sums};
use super::input::{Community, Layers, Machine, Model};

/// Nodes present for less time get no copies: a node that keeps joining and leaving moves nothing.
pub(super) const SETTLED_S: u32 = 60;

/// Adds copies that load at most `budget` bytes.
pub(super) fn add(
    community: &Community,
    model: &Model,
    cuts: &Cuts,
    ranges: &mut BTreeMap<NodeId, Layers>,
    mut budget: u64,
) {
    let weights = Sums::new(model.layer_bytes.iter().copied());
    loop {
        let worth = Sums::new(worth(community, cuts, ranges));
        let candidates = community.machines().filter_map(|machine| {
            if machine.present_s < SETTLED_S || machine.is_answering || machine.is_fixed {
                return None;
            }
            let own = ranges.get(&machine.node).copied();
            let memory = community.free(model, machine);
            let (value, layers) = best(machine, own, memory, cuts, &worth, &weights, budget)?;
            let key = (value, machine.online_permille, Reverse(machine.node));
            Some((key, machine, own, layers))
        });
        let Some((_, machine, own, layers)) = candidates.max_by_key(|(key, ..)| *key) else {
            return;
        };
        ranges.insert(machine.node, layers);
        budget = budget.saturating_sub(weights.new_in(own.or(machine.holds), layers));
    }
}

/// Worth of a copy of each layer, from layer 0: 0 if it is held twice, else 1 plus the share of time in
/// which its only holder is away.
fn worth(community: &Community, cuts: &Cuts, ranges: &BTreeMap<NodeId, Layers>) -> Vec<u64> {
    let of = |layer: u32| {
        let mut holders = ranges.iter().filter(|(_, range)| range.holds(layer));
        match (holders.next(), holders.next()) {
            (Some((node, _)), None) => {
                let online = community.machine(*node).map_or(0, |m| m.online_permille);
                1 + u64::from(1000u16.saturating_sub(online))
            }
            _ => 0,
        }
    };
    (0..cuts.hosted().end).map(of).collect()
}

/// Most valuable range for `machine`, which holds `own`; the one that loads least among equals.
fn best(
    machine: &Machine,
    own: Option<Layers>,
    memory: u64,
    cuts: &Cuts,
    worth: &Sums,
    weights: &Sums,
    budget: u64,
) -> Option<(u64, Layers)> {
    let held = own.or(machine.holds);
    let mut best = None;
    for from in 0..cuts.pieces() {
        for to in from + 1..=cuts.pieces() {
            if cuts.memory(from, to) > memory {
                break;
            }
            let layers = cuts.layers(from, to);
            if own.is_some_and(|own| own.within(layers) != own) {
                continue;
            }
            let value = worth.new_in(own, layers);
            let load = weights.new_in(held, layers);
            let key = (value, Reverse((load, layers)));
            if value > 0 && load <= budget && best.is_none_or(|known| known < key) {
                best = Some(key);
            }
        }
    }
    best.map(|(value, Reverse((_, layers)))| (value, layers))
}
