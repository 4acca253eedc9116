//! Confidence interval of a median: percentile bootstrap (B. Efron, R. Tibshirani, *An Introduction
//! to the Bootstrap*, 1993, chapter 13). Pure.

use hearthnet_engine::bench::median;
use serde::Serialize;

/// Resamples with replacement. Their 2.5th and 97.5th percentiles are the interval.
const RESAMPLES: usize = 2_000;
/// Start of the random numbers, so that the same samples give the same interval.
const SEED: u64 = 40;

/// Ratios of two speeds, one of each round.
#[derive(Debug, Serialize)]
pub(super) struct Ratios {
    /// Median of the rounds.
    pub(super) ratio: f64,
    /// 95% confidence interval of the median.
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) ratios: Vec<f64>,
}

impl Ratios {
    /// `rounds`: the speed to compare, and the one that it is divided by.
    pub(super) fn new(rounds: impl Iterator<Item = (f64, f64)>) -> Self {
        let ratios: Vec<f64> = rounds.map(|(a, b)| a / b.max(f64::MIN_POSITIVE)).collect();
        let (low, high) = interval(&ratios);
        Self {
            ratio: median(&ratios),
            low,
            high,
            ratios,
        }
    }
}

/// 95% confidence interval of the median of `samples`.
fn interval(samples: &[f64]) -> (f64, f64) {
    let mut random = SEED;
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let drawn = (0..samples.len()).filter_map(|_| {
                let at = next(&mut random) % samples.len() as u64;
                samples.get(at as usize).copied()
            });
            median(&drawn.collect::<Vec<f64>>())
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let at = |permille: usize| {
        let rank = (medians.len() * permille).div_ceil(1000).max(1);
        medians.get(rank - 1).copied().unwrap_or(f64::NAN)
    };
    (at(25), at(975))
}

/// SplitMix64, without the lowest bits.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_the_median_and_grows_with_the_spread() {
        assert_eq!(interval(&[1.5]), (1.5, 1.5));
        assert_eq!(interval(&[2.0; 9]), (2.0, 2.0));
        let near = [0.98, 0.99, 1.0, 1.0, 1.0, 1.01, 1.02];
        let far = near.map(|ratio| 1.0 + 10.0 * (ratio - 1.0));
        let ((a, b), (c, d)) = (interval(&near), interval(&far));
        assert!(
            (0.98..=1.0).contains(&a) && (1.0..=1.02).contains(&b),
            "{a} {b}"
        );
        assert!(c < a && b < d, "{c} {d}");
        assert_eq!(interval(&near), (a, b), "the same samples");
    }

    #[test]
    fn a_difference_in_every_round_excludes_one() {
        let ratios = [1.1, 1.2, 1.3, 1.15, 1.25, 1.1, 1.4];
        let (low, high) = interval(&ratios);
        assert!(low > 1.0 && high <= 1.4, "{low} {high}");
    }
}
