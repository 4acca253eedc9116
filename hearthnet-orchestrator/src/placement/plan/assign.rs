//! Best assignment of the hosted layers: each node gets at most one range.
//!
//! The cost of a range is separable: `enter_us` of its node, plus `layer_us` for each layer. So
//! only the number of layers of each node counts, not the order of the nodes along the layers. If
//! all pieces between legal cuts are alike, the order does not matter for memory either, and a
//! knapsack over (node, pieces) is exact: `nodes * pieces^2` steps. Otherwise ranges of one length
//! differ in memory, and whether nodes fit depends on their order, which is a packing problem. Then
//! the knapsack gives bounds, and `search.rs` searches between them.

use std::collections::BTreeSet;

use hearthnet_bus::NodeId;

use super::cuts::Cuts;
use super::input::{Layers, Purpose};
use super::search;
use super::table::{Allowed, Found, Table, Worker};

/// Best assignment.
pub(super) fn assign(cuts: &Cuts, workers: &[Worker], purpose: Purpose) -> Found {
    if purpose == Purpose::Chat {
        return least_sum(cuts, workers, u64::MAX);
    }
    // The shortest busiest stage; of equal assignments, the one of the shortest sum.
    let count = cuts.hosted().count();
    let stages: BTreeSet<u64> = workers
        .iter()
        .flat_map(|w| (1..=count).map(|n| w.stage(n)))
        .collect();
    let stages: Vec<u64> = stages.into_iter().collect();
    let (mut parts, mut is_proven) = (None, true);
    let (mut low, mut high) = (0, stages.len());
    while low < high {
        let middle = low + (high - low) / 2;
        let limit = stages.get(middle).copied().unwrap_or(u64::MAX);
        let found = least_sum(cuts, workers, limit);
        is_proven &= found.is_proven;
        match found.parts {
            Some(found) => (parts, high) = (Some(found), middle),
            None => low = middle + 1,
        }
    }
    Found { parts, is_proven }
}

/// True if the layers fit. False also if the search for an order found none.
pub(super) fn fits(cuts: &Cuts, workers: &[Worker]) -> bool {
    least_sum(cuts, workers, u64::MAX).parts.is_some()
}

/// Assignment of the least total cost whose stages take at most `limit`.
fn least_sum(cuts: &Cuts, workers: &[Worker], limit: u64) -> Found {
    // Any range of a length fits: always possible. Some range fits: a bound.
    let safe = cuts.are_equally_long().then(|| {
        let allowed = allowed(cuts, workers, limit, |all| all.max());
        Table::new(cuts, workers, &allowed).best()
    });
    let safe = safe
        .flatten()
        .map(|counts| in_order(cuts, workers, &counts));
    if cuts.are_alike() {
        return Found {
            parts: safe,
            is_proven: true,
        };
    }
    let allowed = allowed(cuts, workers, limit, |all| all.min());
    let table = Table::new(cuts, workers, &allowed);
    search::search(cuts, workers, &allowed, &table, safe)
}

/// Numbers of layers that fit each worker, by the memory that `of` selects from the ranges of a
/// length.
fn allowed(
    cuts: &Cuts,
    workers: &[Worker],
    limit: u64,
    of: fn(&mut dyn Iterator<Item = u64>) -> Option<u64>,
) -> Allowed {
    let count = cuts.hosted().count();
    let mut by_length: Vec<Vec<u64>> = vec![Vec::new(); count as usize + 1];
    for from in 0..cuts.pieces() {
        for to in from + 1..=cuts.pieces() {
            let layers = cuts.layers(from, to).count();
            if let Some(all) = by_length.get_mut(layers as usize) {
                all.push(cuts.memory(from, to));
            }
        }
    }
    let memory: Vec<Option<u64>> = by_length
        .into_iter()
        .map(|all| of(&mut all.into_iter()))
        .collect();
    let fits = |w: &Worker| -> Vec<bool> {
        let fit = memory.iter().zip(0..).map(|(memory, layers)| {
            memory.is_some_and(|memory| memory <= w.memory) && w.stage(layers) <= limit
        });
        fit.collect()
    };
    workers.iter().map(fits).collect()
}

/// Ranges of these lengths. Workers that hold layers come in the order of these, to move little.
fn in_order(cuts: &Cuts, workers: &[Worker], counts: &[u32]) -> Vec<(usize, Layers)> {
    let used = workers.iter().zip(counts).enumerate();
    let mut used: Vec<(u32, NodeId, usize, u32)> = used
        .filter(|(_, (_, n))| **n > 0)
        .map(|(i, (w, n))| (w.held.map_or(u32::MAX, |h| h.first), w.node, i, *n))
        .collect();
    used.sort_unstable();
    let mut next = cuts.hosted().first;
    let mut parts = Vec::with_capacity(used.len());
    for (_, _, index, layers) in used {
        parts.push((index, Layers::new(next, next + layers)));
        next += layers;
    }
    parts
}
