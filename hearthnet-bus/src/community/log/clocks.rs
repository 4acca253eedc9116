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
/// For how long a word counts, in ms: as long as three of them take to come. A clock that was set
/// since has left that time, forwards or backwards, so it is judged by what is said from then on.
const HOLDS_MS: u64 = 120_000;

/// What a neighbour said.
#[derive(Debug, Clone, Copy)]
struct Word {
    /// How far its clock was ahead, in ms; negative: behind.
    offset_ms: i64,
    heard_ms: u64,
}

/// What neighbours' clocks said.
#[derive(Debug, Default)]
pub(super) struct Clocks(BTreeMap<NodeId, VecDeque<Word>>);

impl Clocks {
    /// A neighbour said `time_ms` when it was `now_ms` here.
    pub(super) fn note(&mut self, neighbour: NodeId, time_ms: u64, now_ms: u64) {
        if self.0.len() >= MAX_NEIGHBOURS && !self.0.contains_key(&neighbour) {
            self.0
                .retain(|_, words| words.iter().any(|word| word.holds(now_ms)));
            if self.0.len() >= MAX_NEIGHBOURS {
                return;
            }
        }
        let of = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        let words = self.0.entry(neighbour).or_default();
        words.push_back(Word {
            offset_ms: of(time_ms).saturating_sub(of(now_ms)),
            heard_ms: now_ms,
        });
        if words.len() > KEPT {
            words.pop_front();
        }
    }

    /// How far those who `count` are ahead of this machine's clock, and how many they are.
    pub(super) fn offset(
        &self,
        now_ms: u64,
        count: impl Fn(&NodeId) -> bool,
    ) -> Option<(i64, usize)> {
        let heard = self.0.iter().filter(|(node, _)| count(node));
        let mut all: Vec<i64> = heard
            .filter_map(|(_, words)| {
                let fresh = words.iter().filter(|word| word.holds(now_ms));
                fresh
                    .map(|word| word.offset_ms)
                    .min_by_key(|ms| ms.unsigned_abs())
            })
            .collect();
        all.sort_unstable_by_key(|ms| ms.unsigned_abs());
        // Of two, the one that is nearer: if the other is wrong, this machine is not.
        let middle = *all.get(all.len().checked_sub(1)? / 2)?;
        Some((middle, all.len()))
    }
}

impl Word {
    fn holds(&self, now_ms: u64) -> bool {
        self.heard_ms.abs_diff(now_ms) <= HOLDS_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeKey;

    fn node(seed: u8) -> NodeId {
        NodeKey::from_secret(&[seed; 32]).id()
    }

    fn offset(clocks: &Clocks, now_ms: u64) -> Option<(i64, usize)> {
        clocks.offset(now_ms, |_| true)
    }

    #[test]
    fn the_middle_neighbour_is_believed_and_the_freshest_word_of_each() {
        let mut clocks = Clocks::default();
        assert_eq!(offset(&clocks, 1_040_000), None);
        // Said 39 s ago, then just now.
        clocks.note(node(1), 1_000_000, 1_039_000);
        assert_eq!(offset(&clocks, 1_040_000), Some((-39_000, 1)));
        clocks.note(node(1), 1_040_000, 1_040_010);
        assert_eq!(offset(&clocks, 1_040_000), Some((-10, 1)));
        // One whose clock is wrong does not make this one wrong.
        clocks.note(node(2), 9_000_000, 1_040_020);
        assert_eq!(offset(&clocks, 1_040_000), Some((-10, 2)));
        clocks.note(node(3), 1_040_000, 1_040_030);
        assert_eq!(offset(&clocks, 1_040_000), Some((-30, 3)));
    }

    #[test]
    fn a_clock_that_was_set_is_believed_again_after_three_words() {
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
    fn who_does_not_count_has_no_say_and_what_was_said_by_another_clock_is_void() {
        let mut clocks = Clocks::default();
        for (seed, ahead_ms) in [(1, 0), (2, 900_000), (3, 900_000)] {
            clocks.note(node(seed), 5_000_000 + ahead_ms, 5_000_000);
        }
        let but = |seed| clocks.offset(5_000_000, move |who| *who != node(seed));
        assert_eq!(offset(&clocks, 5_000_000), Some((900_000, 3)));
        assert_eq!(but(2), Some((0, 2)));
        // Set right since, by a quarter of an hour either way.
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
