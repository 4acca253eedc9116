//! Best-first search (A*) for the order and the lengths of ranges, for layers of unlike size.
//!
//! A state is a cut and the set of workers used before it. The knapsack of `table.rs` with the
//! smallest ranges of each length bounds the remaining cost from below. The work is bounded by a
//! count and not by time, so every node stops at the same state.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::cuts::Cuts;
use super::input::Layers;
use super::table::{Allowed, Found, Table, Worker};

/// Ranges that a search may consider: it bounds the time of a plan.
const MAX_TRIED: usize = 50_000;

struct Reached {
    cost: u64,
    at: usize,
    used: u64,
    /// State before, and the range that led here.
    from: Option<(usize, usize, Layers)>,
}

/// Cheapest assignment; `safe` is one that exists, if known.
pub(super) fn search(
    cuts: &Cuts,
    workers: &[Worker],
    allowed: &Allowed,
    table: &Table,
    safe: Option<Vec<(usize, Layers)>>,
) -> Found {
    let count = |parts: &[(usize, Layers)]| -> u64 {
        let costs = parts.iter().filter_map(|(i, layers)| {
            let worker = workers.get(*i)?;
            Some(worker.cost(layers.count()))
        });
        costs.sum()
    };
    let most = safe.as_deref().map_or(u64::MAX, count);
    let left = |at: usize| table.cost(cuts.layers(at, cuts.pieces()).count());
    let mut states = vec![Reached {
        cost: 0,
        at: 0,
        used: 0,
        from: None,
    }];
    let mut best: BTreeMap<(usize, u64), u64> = BTreeMap::new();
    // Least bound first; of equals the furthest, which dives to a solution.
    let mut queue = BinaryHeap::new();
    if let Some(left) = left(0) {
        queue.push(Reverse((left, Reverse(0usize), 0usize)));
    }
    let mut tried = 0;
    while let Some(Reverse((bound, _, index))) = queue.pop() {
        let Some(&Reached { cost, at, used, .. }) = states.get(index) else {
            break;
        };
        if bound >= most {
            break;
        }
        if at == cuts.pieces() {
            return Found {
                parts: Some(path(&states, index)),
                is_proven: true,
            };
        }
        if best.get(&(at, used)).is_some_and(|&known| known < cost) {
            continue;
        }
        for (i, (worker, allowed)) in workers.iter().zip(allowed).enumerate() {
            let bit = 1u64 << (i % 64);
            if used & bit != 0 || is_twin_of_unused(workers, used, i) {
                continue;
            }
            for to in at + 1..=cuts.pieces() {
                if cuts.memory(at, to) > worker.memory {
                    break;
                }
                tried += 1;
                let layers = cuts.layers(at, to);
                if allowed.get(layers.count() as usize) != Some(&true) {
                    continue;
                }
                let cost = cost.saturating_add(worker.cost(layers.count()));
                let bound = match left(to) {
                    Some(left) => cost.saturating_add(left),
                    None => continue,
                };
                let known = best.entry((to, used | bit)).or_insert(u64::MAX);
                if bound >= most || *known <= cost {
                    continue;
                }
                *known = cost;
                queue.push(Reverse((bound, Reverse(to), states.len())));
                states.push(Reached {
                    cost,
                    at: to,
                    used: used | bit,
                    from: Some((index, i, layers)),
                });
            }
        }
        if tried > MAX_TRIED {
            return Found {
                parts: safe.or_else(|| dive(cuts, workers, allowed)),
                is_proven: false,
            };
        }
    }
    // No assignment is cheaper than `safe`.
    Found {
        parts: safe,
        is_proven: true,
    }
}

/// True if an earlier worker with the same costs and memory is unused: taking it instead gives the
/// same assignment.
fn is_twin_of_unused(workers: &[Worker], used: u64, index: usize) -> bool {
    let Some(worker) = workers.get(index) else {
        return true;
    };
    let same = |other: &Worker| {
        (other.memory, other.enter_us, other.layer_us)
            == (worker.memory, worker.enter_us, worker.layer_us)
    };
    let before = workers.iter().take(index).enumerate();
    before
        .into_iter()
        .any(|(i, other)| used & (1u64 << (i % 64)) == 0 && same(other))
}

/// Fills the layers in order, each time with the worker that reaches furthest.
fn dive(cuts: &Cuts, workers: &[Worker], allowed: &Allowed) -> Option<Vec<(usize, Layers)>> {
    let (mut at, mut used, mut parts) = (0, 0u64, Vec::new());
    while at < cuts.pieces() {
        let free = workers.iter().zip(allowed).enumerate();
        let free = free.filter(|(i, _)| used & (1u64 << (i % 64)) == 0);
        let reach = free.filter_map(|(i, (worker, allowed))| {
            let to = (at + 1..=cuts.pieces()).rev().find(|&to| {
                let layers = cuts.layers(at, to).count() as usize;
                cuts.memory(at, to) <= worker.memory && allowed.get(layers) == Some(&true)
            })?;
            let layers = cuts.layers(at, to);
            Some((Reverse(to), worker.cost(layers.count()), i))
        });
        let (Reverse(to), _, index) = reach.min()?;
        parts.push((index, cuts.layers(at, to)));
        used |= 1u64 << (index % 64);
        at = to;
    }
    Some(parts)
}

fn path(states: &[Reached], mut index: usize) -> Vec<(usize, Layers)> {
    let mut parts = Vec::new();
    while let Some((before, worker, layers)) = states.get(index).and_then(|state| state.from) {
        parts.push((worker, layers));
        index = before;
    }
    parts.reverse();
    parts
}
