//! Knapsack of layers on nodes, without regard to where ranges begin.

use hearthnet_bus::NodeId;

use super::cuts::Cuts;
use super::input::Layers;

/// Node that can take a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Worker {
    pub(super) node: NodeId,
    pub(super) memory: u64,
    pub(super) enter_us: u64,
    pub(super) layer_us: u64,
    pub(super) held: Option<Layers>,
}

impl Worker {
    pub(super) fn cost(&self, layers: u32) -> u64 {
        let compute = self.layer_us.saturating_mul(u64::from(layers));
        self.enter_us.saturating_add(compute)
    }

    /// Time of a stage of a batch pipeline.
    pub(super) fn stage(&self, layers: u32) -> u64 {
        let compute = self.layer_us.saturating_mul(u64::from(layers));
        self.enter_us.max(compute)
    }
}

/// Result of a search: ranges by index of their worker, in layer order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// `None`: no assignment was found.
    pub(super) parts: Option<Vec<(usize, Layers)>>,
    /// False if the search was cut short: a better assignment may exist.
    pub(super) is_proven: bool,
}

/// For each worker, whether it may get so many layers.
pub(super) type Allowed = Vec<Vec<bool>>;

/// Knapsack: the least cost of so many layers on the first so many workers.
pub(super) struct Table {
    /// By worker, then by layers: cost, spans, and layers of the last worker.
    rows: Vec<Vec<Option<(u64, usize, u32)>>>,
    count: u32,
}

impl Table {
    pub(super) fn new(cuts: &Cuts, workers: &[Worker], allowed: &Allowed) -> Self {
        let count = cuts.hosted().count();
        let mut first = vec![None; count as usize + 1];
        if let Some(none) = first.first_mut() {
            *none = Some((0, 0, 0));
        }
        let mut rows: Vec<Vec<Option<(u64, usize, u32)>>> = vec![first];
        for (worker, allowed) in workers.iter().zip(allowed) {
            let before = rows.last().cloned().unwrap_or_default();
            let costs: Vec<(u32, u64)> = allowed
                .iter()
                .zip(0..)
                .skip(1)
                .filter(|(allowed, _)| **allowed)
                .map(|(_, layers)| (layers, worker.cost(layers)))
                .collect();
            let best = |total: u32| {
                let skip = before.get(total as usize).copied().flatten();
                let skip = skip.map(|(cost, spans, _)| (cost, spans, 0));
                let with = costs.iter().filter_map(|&(layers, cost)| {
                    let rest = total.checked_sub(layers)?;
                    let (before, spans, _) = before.get(rest as usize).copied().flatten()?;
                    Some((before.saturating_add(cost), spans + 1, layers))
                });
                with.chain(skip).min()
            };
            rows.push((0..=count).map(best).collect());
        }
        Self { rows, count }
    }

    /// Least cost of `layers` layers on any workers.
    pub(super) fn cost(&self, layers: u32) -> Option<u64> {
        let row = self.rows.last()?;
        row.get(layers as usize)
            .copied()
            .flatten()
            .map(|(cost, ..)| cost)
    }

    /// Layers of each worker, 0 for those left out.
    pub(super) fn best(&self) -> Option<Vec<u32>> {
        let (mut left, mut counts) = (self.count, Vec::new());
        for row in self.rows.iter().skip(1).rev() {
            let (_, _, layers) = row.get(left as usize).copied().flatten()?;
            counts.push(layers);
            left = left.checked_sub(layers)?;
        }
        counts.reverse();
        (left == 0).then_some(counts)
    }
}
