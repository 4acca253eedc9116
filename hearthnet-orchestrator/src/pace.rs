//! How long a host may take, learnt from the host itself.
//!
//! A fixed bound fits no two machines, so a decode step is measured against the
//! median of the same host's recent ones. Pure: durations go in, verdicts come out.
//!
//! Example: a host that answers in 2 ms is *slow* above 100 ms (the floor is
//! higher than 8 x 2 ms), and *persistently* slow after three such answers in a
//! row. If an answer does not come at all, it is overdue after 2 s (the floor is
//! higher than 16 x 2 ms). A host that always needs 400 ms is slow above 3.2 s,
//! and overdue after 6.4 s.

use std::collections::VecDeque;
use std::time::Duration;

/// Steps that make up the history: long enough to be calm, short enough to follow a
/// machine that got busy for good.
const WINDOW: usize = 64;
/// Steps before anything is concluded.
const LEARNING: usize = 16;
/// A step is slow beyond this many medians.
const SLOW: u32 = 8;
/// And never below this: a scheduler's hiccup is no failure.
const SLOW_FLOOR: Duration = Duration::from_millis(100);
/// An answer is overdue beyond this many medians.
const OVERDUE: u32 = 16;
/// And never below this.
const OVERDUE_FLOOR: Duration = Duration::from_secs(2);
/// Slow steps in a row that make a host degraded.
const PERSISTENT: u32 = 3;

/// The recent decode steps of one host.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    recent: VecDeque<Duration>,
    /// Of `recent`, once there are enough.
    median: Option<Duration>,
    slow_in_a_row: u32,
}

impl Pace {
    /// Notes the round trip of a decode step; says whether the host is persistently slow.
    ///
    /// Slow steps are not learnt from: a host cannot slowly get its caller used to it.
    pub fn record(&mut self, took: Duration) -> bool {
        let slow = self
            .median
            .is_some_and(|median| took > (median * SLOW).max(SLOW_FLOOR));
        if slow {
            self.slow_in_a_row += 1;
            return self.slow_in_a_row >= PERSISTENT;
        }
        self.slow_in_a_row = 0;
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(took);
        if self.recent.len() >= LEARNING {
            let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
            sorted.sort_unstable();
            self.median = sorted.get(sorted.len() / 2).copied();
        }
        false
    }

    /// How long a decode step usually takes; `None` while too little is known.
    pub fn usual(&self) -> Option<Duration> {
        self.median
    }

    /// How long to wait for a decode step before looking for another host; `None`
    /// while too little is known.
    pub fn overdue_after(&self) -> Option<Duration> {
        Some((self.median? * OVERDUE).max(OVERDUE_FLOOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn learnt(step: Duration) -> Pace {
        let mut pace = Pace::default();
        for _ in 0..LEARNING {
            assert!(!pace.record(step));
        }
        pace
    }

    #[test]
    fn nothing_is_concluded_from_a_few_steps() {
        let mut pace = Pace::default();
        for _ in 0..LEARNING - 1 {
            assert_eq!(pace.overdue_after(), None);
            pace.record(ms(1));
        }
        assert_eq!(pace.overdue_after(), None);
    }

    #[test]
    fn the_bounds_follow_the_host_above_their_floors() {
        assert_eq!(learnt(ms(2)).overdue_after(), Some(ms(2000)));
        assert_eq!(learnt(ms(400)).overdue_after(), Some(ms(6400)));
    }

    #[test]
    fn three_slow_steps_in_a_row_are_one_too_many_and_hiccups_are_forgiven() {
        let mut pace = learnt(ms(2));
        for _ in 0..10 {
            assert!(!pace.record(ms(101)));
            assert!(!pace.record(ms(500)));
            assert!(!pace.record(ms(99)), "within the floor");
        }
        assert!(!pace.record(ms(200)));
        assert!(!pace.record(ms(200)));
        assert!(pace.record(ms(200)));
    }

    #[test]
    fn a_host_cannot_get_its_caller_used_to_slowness() {
        let mut pace = learnt(ms(100));
        for _ in 0..1000 {
            pace.record(ms(5000));
        }
        assert_eq!(pace.overdue_after(), Some(ms(2000)));
    }
}
