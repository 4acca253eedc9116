//! Best plan of a community, and what is missing if there is none.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

use super::assign;
use super::copies;
use super::cost::best_route;
use super::cuts::{Cuts, runs};
use super::input::{Community, Layers, MAX_LAYERS, Model, Span, Task};
use super::table::Worker;

const MIB: u64 = 1 << 20;

/// Placement of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// Range of each node that is to hold layers. Ranges overlap where layers are held twice.
    pub ranges: BTreeMap<NodeId, Layers>,
    /// Best route over [`Self::ranges`], in layer order. It covers all hosted layers.
    pub spans: Vec<Span>,
    /// Layers that two or more nodes hold, as runs.
    pub twice: Vec<Layers>,
    /// False if the search for layers of unlike size was cut short: a better plan may exist.
    pub is_optimal: bool,
}

/// Reason that no plan exists, and what would help.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unplannable {
    /// The memory of the nodes does not hold the layers.
    #[error(
        "the layers need {needed} bytes of memory, and the nodes give {given}; {more} bytes more \
         on {on}, or another node that gives {new_node} bytes, would suffice"
    )]
    Memory {
        needed: u64,
        /// Memory for layers on all nodes together.
        given: u64,
        /// Node that gives most.
        on: NodeId,
        /// Additional memory of that node with which a plan exists.
        more: u64,
        /// Memory of an additional node with which a plan exists.
        new_node: u64,
    },
    #[error("no node takes part in the plan; start `hearthnet up` on at least one")]
    NoMachine,
    #[error("the model leaves no layer to hosts, or has more than {MAX_LAYERS}")]
    Layers,
}

/// Computes the best placement, regardless of the ranges that nodes hold.
///
/// # Errors
/// [`Unplannable`], with the memory that is missing.
pub fn plan(community: &Community, model: &Model, task: Task) -> Result<Plan, Unplannable> {
    let cuts = Cuts::new(model).ok_or(Unplannable::Layers)?;
    let (mut ranges, is_optimal) = primary(community, model, task, &cuts)?;
    let first = best_route(community, model, task, cuts.hosted(), &ranges);
    copies::add(community, model, &cuts, &mut ranges, u64::MAX);
    let with = best_route(community, model, task, cuts.hosted(), &ranges);
    let route = [first, with]
        .into_iter()
        .flatten()
        .min_by_key(|(_, cost)| *cost);
    Ok(described(&cuts, ranges, route, is_optimal))
}

/// Best placement without copies, and whether it is optimal.
pub(super) fn primary(
    community: &Community,
    model: &Model,
    task: Task,
    cuts: &Cuts,
) -> Result<(BTreeMap<NodeId, Layers>, bool), Unplannable> {
    let workers = workers(community, model, task, cuts);
    if workers.is_empty() {
        return Err(Unplannable::NoMachine);
    }
    let found = assign::assign(cuts, &workers, task.purpose);
    let Some(parts) = found.parts else {
        return Err(shortfall(cuts, &workers));
    };
    let ranges = parts
        .into_iter()
        .filter_map(|(i, layers)| Some((workers.get(i)?.node, layers)));
    Ok((ranges.collect(), found.is_proven))
}

/// Plan with these ranges and this route.
pub(super) fn described(
    cuts: &Cuts,
    ranges: BTreeMap<NodeId, Layers>,
    route: Option<(Vec<Span>, u64)>,
    is_optimal: bool,
) -> Plan {
    let twice = runs(cuts.hosted(), |layer| {
        ranges.values().filter(|r| r.holds(layer)).count() > 1
    });
    Plan {
        ranges,
        spans: route.map(|(spans, _)| spans).unwrap_or_default(),
        twice,
        is_optimal,
    }
}

/// Smallest additional memory with which a plan exists, on the node that gives most and on a new
/// one, rounded up to 1 MiB.
fn shortfall(cuts: &Cuts, workers: &[Worker]) -> Unplannable {
    let needed = cuts.bytes(cuts.hosted());
    let Some((index, largest)) = workers
        .iter()
        .enumerate()
        .max_by_key(|(i, w)| (w.memory, Reverse(*i)))
    else {
        return Unplannable::NoMachine;
    };
    let more = least(needed.saturating_sub(largest.memory), |more| {
        let mut with = workers.to_vec();
        if let Some(worker) = with.get_mut(index) {
            worker.memory = worker.memory.saturating_add(more);
        }
        assign::fits(cuts, &with)
    });
    let new_node = least(needed, |memory| {
        let mut with = workers.to_vec();
        with.push(Worker {
            memory,
            ..largest.clone()
        });
        assign::fits(cuts, &with)
    });
    Unplannable::Memory {
        needed,
        given: workers
            .iter()
            .fold(0, |sum, w| w.memory.saturating_add(sum)),
        on: largest.node,
        more,
        new_node,
    }
}

/// Smallest multiple of 1 MiB that is enough, if `most` is.
fn least(most: u64, mut is_enough: impl FnMut(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most.div_ceil(MIB).max(1));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match is_enough(middle.saturating_mul(MIB)) {
            true => high = middle,
            false => low = middle,
        }
    }
    high.saturating_mul(MIB)
}

/// Nodes with memory for at least one piece between two legal cuts.
fn workers(community: &Community, model: &Model, task: Task, cuts: &Cuts) -> Vec<Worker> {
    let free = community.machines().filter(|machine| !machine.is_fixed);
    let workers = free.map(|machine| {
        let (enter_us, layer_us) = community.span_us(model, task, machine);
        Worker {
            node: machine.node,
            memory: community.free(model, machine),
            enter_us,
            layer_us,
            held: machine.holds,
        }
    });
    let (some, none): (Vec<Worker>, Vec<Worker>) =
        workers.partition(|worker| cuts.smallest() <= worker.memory);
    // With none, the shortfall is computed over all.
    if some.is_empty() { none } else { some }
}
