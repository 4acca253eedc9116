//! Choice of the experts of each row: on the processor, by fp32 scores, in the exact engine's order.
//!
//! `tests/parts.rs` includes this file, because it needs no device and nothing of this crate.

use std::collections::BTreeMap;

use hearthnet_files::spec::ExpertSpec;

/// Rows routed to an expert, and the weights of its outputs.
#[derive(Default, PartialEq, Debug)]
pub(super) struct Routed {
    pub(super) rows: Vec<i64>,
    pub(super) weights: Vec<f32>,
}

/// Rows and weights per expert. `scores` holds the scores of all experts, row by row.
pub(super) fn choose(scores: &[f32], spec: &ExpertSpec) -> BTreeMap<usize, Routed> {
    let (count, used) = (spec.count.max(1) as usize, spec.used as usize);
    let mut chosen: BTreeMap<usize, Routed> = BTreeMap::new();
    for (row, scores) in scores.chunks_exact(count).enumerate() {
        let mut best: Vec<(usize, f32)> = scores.iter().copied().enumerate().collect();
        // Larger scores first, NaN last. Ties go to the lower index, because the sort is stable.
        // Adding 0 makes -0 equal to 0.
        best.sort_by(|(_, a), (_, b)| {
            let scores = (b + 0.0).total_cmp(&(a + 0.0));
            a.is_nan().cmp(&b.is_nan()).then(scores)
        });
        let top = best.first().map_or(0.0, |(_, score)| *score);
        let exp = |score: f32| libm::expf(score - top);
        let sum: f32 = match spec.normalise {
            true => best.iter().take(used).map(|(_, s)| exp(*s)).sum(),
            false => best.iter().map(|(_, s)| exp(*s)).sum(),
        };
        for (expert, score) in best.into_iter().take(used) {
            let routed = chosen.entry(expert).or_default();
            routed.rows.push(row as i64);
            routed.weights.push(exp(score) / sum);
        }
    }
    chosen
}
