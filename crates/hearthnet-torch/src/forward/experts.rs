//! The feed-forward layer of a mixture of experts.
//!
//! Experts are chosen on the processor, by fp32 scores, in the exact engine's order. Rows of a
//! batch with the same expert go through its weights together. Experts without rows are not
//! touched.

use std::collections::BTreeMap;

use hearthnet_files::spec::ExpertSpec;
use tch::{Kind, Tensor};

use super::{Pass, Result, download, upload};
use crate::weights::{Ffn, Linear};

/// Rows routed to an expert, and the weights of its outputs.
#[derive(Default, PartialEq, Debug)]
struct Routed {
    rows: Vec<i64>,
    weights: Vec<f32>,
}

impl Pass<'_> {
    /// `normed` holds normalised fp32 rows.
    pub(super) fn experts(
        &self,
        router: &Linear,
        experts: &[Ffn],
        normed: &Tensor,
    ) -> Result<Tensor> {
        let scores: Vec<f32> = download(&router.apply(normed)?)?;
        let x = normed.f_to_kind(self.kind)?;
        let mut sum = normed.f_zeros_like()?;
        let Some(spec) = &self.spec.experts else {
            return Ok(sum);
        };
        for (expert, Routed { rows, weights }) in choose(&scores, spec) {
            let Some(ffn) = experts.get(expert) else {
                continue;
            };
            let count = rows.len() as i64;
            let rows = upload(&rows, &[count], self.device)?;
            let weights = upload(&weights, &[count, 1], self.device)?;
            let out = self.ffn(ffn, &x.f_index_select(0, &rows)?)?;
            let out = out.f_to_kind(Kind::Float)?.f_mul(&weights)?;
            let _ = sum.f_index_add_(0, &rows, &out)?;
        }
        Ok(sum)
    }
}

/// Rows and weights per expert. `scores` holds the scores of all experts, row by row.
fn choose(scores: &[f32], spec: &ExpertSpec) -> BTreeMap<usize, Routed> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(used: u32, normalise: bool) -> ExpertSpec {
        ExpertSpec {
            count: 4,
            used,
            normalise,
            bias: false,
        }
    }

    fn experts(scores: &[f32; 4], used: u32) -> Vec<usize> {
        choose(scores, &spec(used, true)).into_keys().collect()
    }

    #[test]
    fn rows_go_to_the_best_experts_the_lower_number_where_they_tie_and_nan_last() {
        assert_eq!(experts(&[1.0, 3.0, 2.0, 0.0], 2), [1, 2]);
        assert_eq!(experts(&[2.0, 5.0, 2.0, 5.0], 3), [0, 1, 3]);
        assert_eq!(experts(&[-0.0, 0.0, -1.0, -2.0], 1), [0]);
        assert_eq!(experts(&[f32::NAN, -5.0, f32::NAN, -6.0], 3), [0, 1, 3]);
    }

    #[test]
    fn weights_are_parts_of_the_softmax_of_all_scores_or_of_those_chosen() {
        let scores = [0.0, 0.0, f32::ln(2.0), f32::NEG_INFINITY];
        let of = |normalise| {
            let chosen = choose(&scores, &spec(2, normalise));
            let weight = |routed: &Routed| routed.weights[0];
            chosen.values().map(weight).collect::<Vec<f32>>()
        };
        for (normalise, expected) in [(true, [1.0 / 3.0, 2.0 / 3.0]), (false, [0.25, 0.5])] {
            let found = of(normalise);
            let close = found
                .iter()
                .zip(expected)
                .all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(close && found.len() == 2, "{found:?}");
        }
    }
}
