//! A time that is measured in rounds, of which the shortest counts. Pure.
//!
//! Other work makes a measurement longer and never shorter. So three rounds follow each other in
//! successive intervals, and a later one every ten minutes, because machines and links change.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Latest rounds that count, and rounds that follow each other at first.
const ROUNDS: usize = 3;
/// Time between later rounds.
const PAUSE: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Default)]
pub(super) struct Rounds {
    times: VecDeque<Duration>,
    /// Rounds so far, with those that failed.
    tried: usize,
    last: Option<Instant>,
}

impl Rounds {
    /// Adds a round; `None` if it failed. After a failed one, nothing is known any more.
    pub(super) fn add(&mut self, time: Option<Duration>, now: Instant) {
        self.tried = self.tried.saturating_add(1);
        self.last = Some(now);
        let Some(time) = time else {
            self.times.clear();
            return;
        };
        if self.times.len() == ROUNDS {
            self.times.pop_front();
        }
        self.times.push_back(time);
    }

    /// Returns true if another round is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let paused = |last| now.saturating_duration_since(last) >= PAUSE;
        self.tried < ROUNDS || self.last.is_none_or(paused)
    }

    /// Rounds so far, with those that failed.
    pub(super) fn tried(&self) -> usize {
        self.tried
    }

    /// Shortest of the latest rounds.
    pub(super) fn shortest(&self) -> Option<Duration> {
        self.times.iter().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(us: u64) -> Option<Duration> {
        Some(Duration::from_micros(us))
    }

    #[test]
    fn three_rounds_follow_each_other_and_later_ones_wait() {
        let start = Instant::now();
        let mut rounds = Rounds::default();
        rounds.add(us(900), start);
        assert!(rounds.is_due(start));
        rounds.add(None, start);
        assert_eq!((rounds.is_due(start), rounds.shortest()), (true, None));
        rounds.add(us(800), start);
        assert!(!rounds.is_due(start + PAUSE - Duration::from_millis(1)));
        assert!(rounds.is_due(start + PAUSE));
        assert_eq!((rounds.tried(), rounds.shortest()), (3, us(800)));
    }

    #[test]
    fn the_shortest_of_the_latest_rounds_counts() {
        let now = Instant::now();
        let mut rounds = Rounds::default();
        rounds.add(us(500), now);
        for (time, shortest) in [(900, 500), (800, 500), (700, 700), (950, 700)] {
            rounds.add(us(time), now);
            assert_eq!(rounds.shortest(), us(shortest));
        }
    }
}
