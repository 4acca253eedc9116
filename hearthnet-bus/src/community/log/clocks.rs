//! How far the clocks of neighbours are from this machine's: pure.
//!
//! A node says where it is every 40 s, and each such event bears the time of its author's clock. One
//! that comes from its author itself was made up to 40 s ago, so of the last few the one that is
//! nearest to this machine's clock is taken; of several neighbours the middle one, so that one
//! wrong clock among three is not taken for two wrong ones.

use std::collections::{BTreeMap, VecDeque};

use crate::NodeId;

/// Samples that are kept of a neighbour.
const KEPT: usize = 3;
/// Neighbours that are listened to: more than are needed for a middle.
const MAX_NEIGHBOURS: usize = 64;

/// What neighbours' clocks said.
#[derive(Debug, Default)]
pub(super) struct Clocks(BTreeMap<NodeId, VecDeque<i64>>);

impl Clocks {
    /// A neighbour said `time_ms` when it was `now_ms` here.
    pub(super) fn note(&mut self, neighbour: NodeId, time_ms: u64, now_ms: u64) {
        if self.0.len() >= MAX_NEIGHBOURS && !self.0.contains_key(&neighbour) {
            return;
        }
        let of = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        let samples = self.0.entry(neighbour).or_default();
        samples.push_back(of(time_ms).saturating_sub(of(now_ms)));
        if samples.len() > KEPT {
            samples.pop_front();
        }
    }

    /// How far they are ahead of this machine's, and how many they are.
    pub(super) fn offset(&self) -> Option<(i64, usize)> {
        let mut all: Vec<i64> = self
            .0
            .values()
            .filter_map(|samples| samples.iter().copied().min_by_key(|ms| ms.unsigned_abs()))
            .collect();
        all.sort_unstable_by_key(|ms| ms.unsigned_abs());
        // Of two, the one that is nearer: if the other is wrong, this machine is not.
        let middle = *all.get(all.len().checked_sub(1)? / 2)?;
        Some((middle, all.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeKey;

    fn node(seed: u8) -> NodeId {
        NodeKey::from_secret(&[seed; 32]).id()
    }

    #[test]
    fn the_middle_neighbour_is_believed_and_the_freshest_word_of_each() {
        let mut clocks = Clocks::default();
        assert_eq!(clocks.offset(), None);
        // Said 39 s ago, then just now.
        clocks.note(node(1), 1_000_000, 1_039_000);
        assert_eq!(clocks.offset(), Some((-39_000, 1)));
        clocks.note(node(1), 1_040_000, 1_040_010);
        assert_eq!(clocks.offset(), Some((-10, 1)));
        // One whose clock is wrong does not make this one wrong.
        clocks.note(node(2), 9_000_000, 1_040_020);
        assert_eq!(clocks.offset(), Some((-10, 2)));
        clocks.note(node(3), 1_040_000, 1_040_030);
        assert_eq!(clocks.offset(), Some((-30, 3)));
    }

    #[test]
    fn a_clock_that_was_set_is_believed_again_after_three_words() {
        let mut clocks = Clocks::default();
        for _ in 0..3 {
            clocks.note(node(1), 5_000_000, 1_000_000);
        }
        assert_eq!(clocks.offset(), Some((4_000_000, 1)));
        clocks.note(node(1), 5_000_000, 5_000_000);
        assert_eq!(clocks.offset(), Some((0, 1)));
        for _ in 0..5 {
            clocks.note(node(1), 1_000_000, 5_000_000);
        }
        assert_eq!(clocks.offset(), Some((-4_000_000, 1)));
    }

    #[test]
    fn absurd_times_and_many_neighbours_do_no_harm() {
        let mut clocks = Clocks::default();
        for seed in 0..=255 {
            clocks.note(node(seed), u64::MAX, 0);
            clocks.note(node(seed), 0, u64::MAX);
        }
        assert_eq!(clocks.0.len(), MAX_NEIGHBOURS);
        assert!(clocks.offset().is_some());
    }
}
