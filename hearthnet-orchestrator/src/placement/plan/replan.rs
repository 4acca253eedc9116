//! Next plan from the ranges that nodes hold, with few moves.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

use super::best::{Plan, Unplannable, described, primary};
use super::copies::{self, SETTLED_S};
use super::cost::best_route;
use super::cuts::{Cuts, Sums, runs};
use super::input::{Community, Layers, Machine, Model, Task};

/// A plan is kept unless another one's cost is below this share of its cost.
const WORTH_MOVING_PERMILLE: u64 = 900;

/// Bytes that nodes loaded to move, in this community.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Moved {
    pub in_last_hour: u64,
    /// Limit per hour. Moves for speed and copies use at most half of it, so that the other half
    /// remains for missing layers.
    pub limit: u64,
}

/// Range that a node is to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Move {
    pub node: NodeId,
    pub from: Option<Layers>,
    /// `None`: the node gives up its range.
    pub to: Option<Layers>,
    /// Weights to load.
    pub bytes: u64,
}

/// Next plan.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replanned {
    /// Without spans if layers stay uncovered.
    pub plan: Plan,
    /// In the order of the node ids.
    pub moves: Vec<Move>,
    /// Missing memory, if no placement covers the layers.
    pub missing: Option<Unplannable>,
    /// True if layers stay uncovered because of the limit of bytes, or of nodes that compute for an
    /// answer.
    pub waits: bool,
}

type Ranges = BTreeMap<NodeId, Layers>;

/// Computes the next plan. The previous one is [`Machine::holds`] of every node, so that all nodes
/// that see the same advertisements agree.
///
/// # Errors
/// [`Unplannable::Layers`].
pub fn replan(
    community: &Community,
    model: &Model,
    task: Task,
    moved: Moved,
) -> Result<Replanned, Unplannable> {
    let cuts = Cuts::new(model).ok_or(Unplannable::Layers)?;
    let kept = kept(community, model, &cuts);
    let left = moved.limit.saturating_sub(moved.in_last_hour);
    let left_for_speed = (moved.limit / 2).saturating_sub(moved.in_last_hour);
    let route = |ranges: &Ranges| best_route(community, model, task, cuts.hosted(), ranges);
    let bytes = |ranges: &Ranges| loads(community, model, ranges);
    let is_free = |ranges: &Ranges| keeps_answering(community, &kept, ranges);

    let (mut ranges, missing, mut is_optimal) = if let Some((_, cost)) = route(&kept) {
        let better = fresh(&community.settled(), model, task, &cuts, &kept).ok();
        let better = better.filter(|(fresh, _)| {
            let faster = route(fresh).is_some_and(|(_, fresh)| {
                fresh.saturating_mul(1000) < cost.saturating_mul(WORTH_MOVING_PERMILLE)
            });
            faster && bytes(fresh) <= left_for_speed && is_free(fresh)
        });
        let (ranges, is_optimal) = better.unwrap_or((kept, true));
        (ranges, None, is_optimal)
    } else {
        let repaired = repaired(community, model, &cuts, &kept, left);
        let fresh = fresh(community, model, task, &cuts, &kept);
        let missing = fresh.as_ref().err().cloned();
        // The first ranges of a model are no moves.
        let limit = if kept.is_empty() { u64::MAX } else { left };
        let fresh = fresh.ok().filter(|(f, _)| bytes(f) <= limit && is_free(f));
        let repair = route(&repaired).map(|_| bytes(&repaired));
        match (fresh, repair) {
            (Some((fresh, is_optimal)), repair)
                if kept.is_empty() || repair.is_none_or(|repair| bytes(&fresh) < repair) =>
            {
                (fresh, None, is_optimal)
            }
            (_, Some(_)) => (repaired, None, true),
            _ => (repaired, missing, true),
        }
    };
    let is_covered = route(&ranges).is_some();
    if is_covered {
        // The moves above count first.
        let budget = left_for_speed.saturating_sub(bytes(&ranges));
        copies::add(community, model, &cuts, &mut ranges, budget);
    } else {
        is_optimal = false;
    }
    let waits = !is_covered && missing.is_none();
    let moves = moves(community, model, &ranges);
    let spans = route(&ranges);
    Ok(Replanned {
        plan: described(&cuts, ranges, spans, is_optimal),
        moves,
        missing,
        waits,
    })
}

/// Ranges that nodes hold, cut to what is hosted, legal, and fits their memory.
fn kept(community: &Community, model: &Model, cuts: &Cuts) -> Ranges {
    let of = |machine: &Machine| {
        let held = machine.holds?.within(cuts.hosted());
        let memory = community.free(model, machine);
        let stays = machine.is_answering || machine.is_fixed;
        let fits = |layers: &Layers| stays || cuts.bytes(*layers) <= memory;
        let kept = cuts
            .ranges()
            .filter(|layers| held.within(*layers) == *layers);
        let kept = kept.filter(fits);
        let kept = kept.max_by_key(|layers| (layers.count(), std::cmp::Reverse(layers.first)))?;
        Some((machine.node, kept))
    };
    community.machines().filter_map(of).collect()
}

/// Best plan without copies, and the kept ranges of nodes that it leaves out.
fn fresh(
    community: &Community,
    model: &Model,
    task: Task,
    cuts: &Cuts,
    kept: &Ranges,
) -> Result<(Ranges, bool), Unplannable> {
    let (mut ranges, is_optimal) = primary(community, model, task, cuts)?;
    for (&node, &layers) in kept {
        ranges.entry(node).or_insert(layers);
    }
    Ok((ranges, is_optimal))
}

/// Adds missing layers to the kept ranges with few bytes. A node keeps the layers that only it
/// holds. Each step takes the range with the most missing layers, then the one that loads least.
fn repaired(
    community: &Community,
    model: &Model,
    cuts: &Cuts,
    kept: &Ranges,
    mut left: u64,
) -> Ranges {
    let mut ranges = kept.clone();
    let weights = Sums::new(model.layer_bytes.iter().copied());
    loop {
        let holders = |layer: u32| ranges.values().filter(|r| r.holds(layer)).count();
        let missing = runs(cuts.hosted(), |layer| holders(layer) == 0);
        if missing.is_empty() {
            return ranges;
        }
        let mut best = None;
        let free = community.machines();
        for machine in free.filter(|m| !m.is_answering && !m.is_fixed) {
            let own = ranges.get(&machine.node).copied();
            let memory = community.free(model, machine);
            let only = runs(own.unwrap_or(Layers::new(0, 0)), |layer| {
                holders(layer) == 1
            });
            let only = only.first().zip(only.last());
            let only = only.map(|(first, last)| Layers::new(first.first, last.end));
            for layers in cuts.ranges() {
                if only.is_some_and(|only| only.within(layers) != only)
                    || cuts.bytes(layers) > memory
                {
                    continue;
                }
                let closed: u32 = missing.iter().map(|run| run.within(layers).count()).sum();
                if closed == 0 {
                    continue;
                }
                let load = weights.new_in(own.or(machine.holds), layers);
                let key = (closed, std::cmp::Reverse((load, layers, machine.node)));
                if load <= left && best.is_none_or(|known| known < key) {
                    best = Some(key);
                }
            }
        }
        let Some((_, std::cmp::Reverse((load, layers, node)))) = best else {
            return ranges;
        };
        left = left.saturating_sub(load);
        ranges.insert(node, layers);
    }
}

/// True if nodes that compute for an answer keep their ranges.
fn keeps_answering(community: &Community, kept: &Ranges, ranges: &Ranges) -> bool {
    let answering = community.machines().filter(|m| m.is_answering);
    let mut nodes = answering.map(|m| m.node);
    nodes.all(|node| kept.get(&node) == ranges.get(&node))
}

fn moves(community: &Community, model: &Model, ranges: &Ranges) -> Vec<Move> {
    let weights = Sums::new(model.layer_bytes.iter().copied());
    let of = |machine: &Machine| {
        let to = ranges.get(&machine.node).copied();
        let bytes = to.map_or(0, |to| weights.new_in(machine.holds, to));
        (to != machine.holds).then_some(Move {
            node: machine.node,
            from: machine.holds,
            to,
            bytes,
        })
    };
    community.machines().filter_map(of).collect()
}

fn loads(community: &Community, model: &Model, ranges: &Ranges) -> u64 {
    let moves = moves(community, model, ranges);
    moves.iter().fold(0, |sum, m| m.bytes.saturating_add(sum))
}

impl Community {
    /// Without nodes that joined a moment ago. They keep what they hold.
    fn settled(&self) -> Self {
        self.only(|m| m.present_s >= SETTLED_S)
    }
}
