//! Offset of the neighbours' clocks from this machine's clock. Pure code.
//!
//! A node announces itself every 40 s, and each announcement bears the time of its author's clock.
//! An announcement that arrives from its author is up to 40 s old. Therefore, of a neighbour's last
//! few samples, the one nearest to this machine's clock is used. Of several neighbours the median
//! is used, so that one wrong clock among three has no influence.

use std::collections::{BTreeMap, VecDeque};

use crate::NodeId;

/// Samples kept per neighbour.
const MAX_SAMPLES: usize = 3;
/// Maximum number of neighbours: more than a median needs.
const MAX_NEIGHBOURS: usize = 64;
/// Validity of a sample in ms: the time in which three announcements arrive. If this machine's
/// clock is set, forwards or backwards, older samples are out of this range, and only newer ones
/// count.
const SAMPLE_LIFE_MS: u64 = 120_000;

#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Offset of the neighbour's clock in ms; positive: it is ahead.
    offset_ms: i64,
    heard_ms: u64,
}

/// Recent samples of the neighbours' clocks.
#[derive(Debug, Default)]
pub(super) struct Clocks(BTreeMap<NodeId, VecDeque<Sample>>);

impl Clocks {
    /// Records that a neighbour's announcement bore `time_ms` when this clock showed `now_ms`.
    pub(super) fn note(&mut self, neighbour: NodeId, time_ms: u64, now_ms: u64) {
        if self.0.len() >= MAX_NEIGHBOURS && !self.0.contains_key(&neighbour) {
            self.0
                .retain(|_, samples| samples.iter().any(|sample| sample.is_fresh(now_ms)));
            if self.0.len() >= MAX_NEIGHBOURS {
                return;
            }
        }
        let of = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        let samples = self.0.entry(neighbour).or_default();
        samples.push_back(Sample {
            offset_ms: of(time_ms).saturating_sub(of(now_ms)),
            heard_ms: now_ms,
        });
        if samples.len() > MAX_SAMPLES {
            samples.pop_front();
        }
    }

    /// Median offset of the neighbours that pass `count`, and their number.
    pub(super) fn offset(
        &self,
        now_ms: u64,
        count: impl Fn(&NodeId) -> bool,
    ) -> Option<(i64, usize)> {
        let heard = self.0.iter().filter(|(node, _)| count(node));
        let mut all: Vec<i64> = heard
            .filter_map(|(_, samples)| {
                let fresh = samples.iter().filter(|sample| sample.is_fresh(now_ms));
                fresh
                    .map(|sample| sample.offset_ms)
                    .min_by_key(|ms| ms.unsigned_abs())
            })
            .collect();
        all.sort_unstable_by_key(|ms| ms.unsigned_abs());
        // Of two, the smaller offset: a single wrong clock must not outvote this machine's.
        let middle = *all.get(all.len().checked_sub(1)? / 2)?;
        Some((middle, all.len()))
    }
}

impl Sample {
    fn is_fresh(&self, now_ms: u64) -> bool {
        self.heard_ms.abs_diff(now_ms) <= SAMPLE_LIFE_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::id as node;

    fn offset(clocks: &Clocks, now_ms: u64) -> Option<(i64, usize)> {
        clocks.offset(now_ms, |_| true)
    }

    #[test]
    fn the_median_neighbour_and_the_nearest_sample_of_each_count() {
        let mut clocks = Clocks::default();
        assert_eq!(offset(&clocks, 1_040_000), None);
        // Sent 39 s ago, then just now.
        clocks.note(node(1), 1_000_000, 1_039_000);
        assert_eq!(offset(&clocks, 1_040_000), Some((-39_000, 1)));
        clocks.note(node(1), 1_040_000, 1_040_010);
        assert_eq!(offset(&clocks, 1_040_000), Some((-10, 1)));
        // A wrong clock of another node does not make this clock wrong.
        clocks.note(node(2), 9_000_000, 1_040_020);
        assert_eq!(offset(&clocks, 1_040_000), Some((-10, 2)));
        clocks.note(node(3), 1_040_000, 1_040_030);
        assert_eq!(offset(&clocks, 1_040_000), Some((-30, 3)));
    }

    #[test]
    fn a_clock_that_was_set_counts_again_after_three_samples() {
        let mut clocks = Clocks::default();
        for _ in 0..3 {
            clocks.note(node(1), 5_000_000, 1_000_000);
        }
        assert_eq!(offset(&clocks, 1_000_000), Some((4_000_000, 1)));
        clocks.note(node(1), 5_000_000, 5_000_000);
        assert_eq!(offset(&clocks, 5_000_000), Some((0, 1)));
        for _ in 0..5 {
            clocks.note(node(1), 1_000_000, 5_000_000);
        }
        assert_eq!(offset(&clocks, 5_000_000), Some((-4_000_000, 1)));
    }

    #[test]
    fn excluded_neighbours_and_samples_of_another_time_are_ignored() {
        let mut clocks = Clocks::default();
        for (seed, ahead_ms) in [(1, 0), (2, 900_000), (3, 900_000)] {
            clocks.note(node(seed), 5_000_000 + ahead_ms, 5_000_000);
        }
        let but = |seed| clocks.offset(5_000_000, move |who| *who != node(seed));
        assert_eq!(offset(&clocks, 5_000_000), Some((900_000, 3)));
        assert_eq!(but(2), Some((0, 2)));
        // The clock was set since, by a quarter of an hour in either direction.
        assert_eq!(offset(&clocks, 5_900_000), None);
        assert_eq!(offset(&clocks, 4_100_000), None);
    }

    #[test]
    fn absurd_times_and_many_neighbours_do_no_harm() {
        let mut clocks = Clocks::default();
        for seed in 0..=255 {
            clocks.note(node(seed), u64::MAX, 0);
            clocks.note(node(seed), 0, u64::MAX);
        }
        assert_eq!(clocks.0.len(), MAX_NEIGHBOURS);
        assert!(offset(&clocks, 0).is_some());
    }
}
