//! Time limits of a host, learnt from the host itself or from others.
//!
//! A fixed limit fits no two machines. A decode step is compared with the median of the host's
//! recent ones, a prefill chunk with the host's longest time per row so far. If the host has no
//! history, the limit is derived from the time of other hosts for the same work, per layer and row
//! (the *reference*). The less evidence, the wider the limit. Pure: durations in, verdicts out.
//!
//! Example: a host that answers in 2 ms is *slow* above 100 ms (the floor is higher than 8 x 2 ms),
//! and *persistently* slow after three such answers in a row. If an answer does not arrive, it is
//! overdue after 2 s (the floor is higher than 16 x 2 ms). A host that always needs 400 ms is slow
//! above 3.2 s and overdue after 6.4 s. If its first chunk of 24 rows took 10 s, the next may take
//! 320 s. If it has answered nothing yet and other hosts would need 50 ms, it is overdue after 4 s.
//! Without other hosts, only the health timeout applies.
//!
//! [`Silence`] covers another question: whether the host is online at all.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::times::median;

/// Steps in the history: enough for a stable median, few enough to follow a machine that became
/// busy.
const WINDOW: usize = 64;
/// Decode steps before the median is used.
const LEARNING: usize = 16;
/// A step is slow beyond this multiple of the median, or of the reference.
const SLOW: u32 = 8;
/// Minimum limit for slow steps: scheduling delays are no failure.
const SLOW_FLOOR: Duration = Duration::from_millis(100);
/// Minimum limit relative to other hosts, whose layers, machines and load differ.
const SLOW_FLOOR_BESIDE_OTHERS: Duration = Duration::from_millis(500);
/// Limits for a decode step and a prefill chunk without a reference. No user would accept a slower
/// pace if there were another host.
const SLOW_ALONE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));
/// An answer is overdue beyond this multiple of the median.
const OVERDUE: u32 = 16;
/// Multiple of the longest of a few steps, or of the reference.
const OVERDUE_GUESSED: u32 = 32;
/// Minimum limit for overdue answers.
const OVERDUE_FLOOR: Duration = Duration::from_secs(2);
/// Minimum limit based on the reference only: the first step finds caches and memory cold.
const OVERDUE_FLOOR_BESIDE_OTHERS: Duration = Duration::from_secs(4);
/// Slow steps or chunks in a row after which a host is degraded.
const PERSISTENT: u32 = 3;

/// Recent steps of one host.
#[derive(Debug, Clone, Default)]
pub(crate) struct HopTimeout {
    /// Decode steps.
    recent: VecDeque<Duration>,
    /// Median of `recent`, once there are enough.
    median: Option<Duration>,
    /// Longest time per row of a prefill chunk, and longest time of a whole chunk.
    row: Option<Duration>,
    piece: Option<Duration>,
    slow_in_a_row: u32,
    /// Time per row of the last slow or overdue answer.
    late: Option<Duration>,
}

impl HopTimeout {
    /// Records the round trip of a decode step; `reference` is the time of other hosts. Returns
    /// true if the host is persistently slow.
    ///
    /// Slow steps do not enter the history, so that a host cannot raise its own limit gradually.
    pub(crate) fn record(&mut self, took: Duration, reference: Option<Duration>) -> bool {
        let own = self.median.map(|median| (median * SLOW).max(SLOW_FLOOR));
        let beside = reference.map(|others| (others * SLOW).max(SLOW_FLOOR_BESIDE_OTHERS));
        if own.into_iter().chain(beside).any(|bound| took > bound) {
            return self.slow(took, 1, true);
        }
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(took);
        if self.recent.len() >= LEARNING {
            self.median = median(self.recent.iter().copied());
        }
        self.slow(took, 1, reference.is_none() && took > SLOW_ALONE.0)
    }

    /// Records whether the last answer was slow. Returns true if the host is persistently slow.
    fn slow(&mut self, took: Duration, rows: u32, slow: bool) -> bool {
        self.slow_in_a_row = if slow { self.slow_in_a_row + 1 } else { 0 };
        if slow {
            self.overdue(took, rows);
        }
        self.slow_in_a_row >= PERSISTENT
    }

    /// Records that an answer of `rows` rows has been missing for `waited`.
    pub(crate) fn overdue(&mut self, waited: Duration, rows: u32) {
        self.late = Some(waited / rows.max(1));
    }

    /// Minimum time per row of a late host.
    pub(crate) fn late(&self) -> Option<Duration> {
        self.late
    }

    /// Records a prefill chunk of `rows` rows, 2 or more, that took `took`; `reference` is the time
    /// of other hosts. Returns true if the host is persistently slow.
    pub(crate) fn record_piece(
        &mut self,
        took: Duration,
        rows: u32,
        reference: Option<Duration>,
    ) -> bool {
        let longer =
            |known: Option<Duration>, new: Duration| Some(known.map_or(new, |k| k.max(new)));
        self.row = longer(self.row, took / rows.max(1));
        self.piece = longer(self.piece, took);
        let beside = reference.map(|others| (others * SLOW).max(SLOW_FLOOR_BESIDE_OTHERS));
        self.slow(took, rows, took > beside.unwrap_or(SLOW_ALONE.1))
    }

    /// Median time of a decode step; `None` without enough history.
    pub(crate) fn usual(&self) -> Option<Duration> {
        self.median
    }

    /// Estimated time of a step of `rows` rows, from the host's own history; `None` without
    /// history.
    pub(crate) fn typical(&self, rows: u32) -> Option<Duration> {
        match rows {
            0 | 1 => self.median.or_else(|| median(self.recent.iter().copied())),
            rows => self.row.map(|row| row * rows),
        }
    }

    /// Time to wait for a step of `rows` before looking for another host. `None` if nothing is
    /// known. `reference` is the time of other hosts.
    pub(crate) fn overdue_after(&self, rows: u32, reference: Option<Duration>) -> Option<Duration> {
        if let (0 | 1, Some(median)) = (rows, self.median) {
            return Some((median * OVERDUE).max(OVERDUE_FLOOR));
        }
        // A single row takes no longer than a chunk, and several rows no longer than one after the
        // other.
        let longest = self.recent.iter().copied().max();
        let own = match rows {
            0 | 1 => longest.or(self.piece),
            rows => (self.row.map(|row| row * rows)).or(longest.map(|step| step * rows)),
        };
        let guessed = |typical: Duration, floor| (typical * OVERDUE_GUESSED).max(floor);
        match (own, reference) {
            (Some(own), _) => Some(guessed(own, OVERDUE_FLOOR)),
            (None, Some(others)) => Some(guessed(others, OVERDUE_FLOOR_BESIDE_OTHERS)),
            (None, None) => None,
        }
    }
}

/// Silence of a host with pending steps after which it is probed.
pub(crate) const PROBE_AFTER: Duration = Duration::from_secs(1);
/// Silence after which it counts as offline: it was probed, and had twice as long to answer.
pub(crate) const OFFLINE_AFTER: Duration = Duration::from_secs(3);
/// Interval between checks of a silent host.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// How long a host has been silent while this side was listening.
///
/// A caller that was suspended, or had no core, returns to a link that seems silent for as long,
/// with the answers still unread. So the time between two checks counts as at most twice the
/// interval.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Silence {
    looked: Option<Instant>,
    heard_out: Duration,
}

impl Silence {
    /// Checks a host that has been silent for `silent`. Returns the part of it during which this
    /// side was listening.
    pub(crate) fn look(&mut self, now: Instant, silent: Duration) -> Duration {
        let since = match self.looked.replace(now) {
            Some(before) => now
                .saturating_duration_since(before)
                .min(2 * CHECK_INTERVAL),
            None => PROBE_AFTER,
        };
        self.heard_out = (self.heard_out + since).min(silent);
        self.heard_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn learnt(step: Duration) -> HopTimeout {
        let mut hop_timeout = HopTimeout::default();
        for _ in 0..LEARNING {
            assert!(!hop_timeout.record(step, None));
        }
        hop_timeout
    }

    #[test]
    fn without_history_and_reference_there_is_no_limit() {
        let hop_timeout = HopTimeout::default();
        assert_eq!(hop_timeout.overdue_after(1, None), None);
        assert_eq!(hop_timeout.overdue_after(24, None), None);
        assert_eq!(hop_timeout.typical(1), None);
        assert_eq!(hop_timeout.typical(24), None);
    }

    #[test]
    fn the_bounds_follow_the_host_above_their_floors() {
        assert_eq!(learnt(ms(2)).overdue_after(1, None), Some(ms(2000)));
        assert_eq!(learnt(ms(400)).overdue_after(1, None), Some(ms(6400)));
    }

    #[test]
    fn a_few_steps_give_a_wide_bound_and_no_usual_time() {
        let mut hop_timeout = HopTimeout::default();
        for _ in 0..LEARNING - 1 {
            hop_timeout.record(ms(100), None);
            assert_eq!(hop_timeout.overdue_after(1, None), Some(ms(3200)));
            assert_eq!(hop_timeout.usual(), None);
        }
        hop_timeout.record(ms(100), None);
        assert_eq!(hop_timeout.overdue_after(1, None), Some(ms(2000)));
        assert_eq!(hop_timeout.usual(), Some(ms(100)));
    }

    #[test]
    fn a_host_that_honestly_takes_ten_seconds_for_a_piece_may_take_them_again() {
        let mut hop_timeout = HopTimeout::default();
        hop_timeout.record_piece(ms(10_000), 24, None);
        assert!(hop_timeout.overdue_after(24, None).unwrap() > ms(300_000));
        assert!(
            hop_timeout.overdue_after(1, None).unwrap() > ms(300_000),
            "its first token too"
        );
        // Its own history outweighs the reference.
        let bound = hop_timeout.overdue_after(24, Some(ms(50)));
        assert_eq!(bound, hop_timeout.overdue_after(24, None));
    }

    #[test]
    fn the_limits_of_first_token_and_chunks_follow_the_prefill_times() {
        let mut hop_timeout = HopTimeout::default();
        hop_timeout.record_piece(ms(240), 24, None);
        hop_timeout.record_piece(ms(80), 8, None);
        assert_eq!(hop_timeout.overdue_after(1, None), Some(ms(32 * 240)));
        assert_eq!(hop_timeout.overdue_after(48, None), Some(ms(32 * 480)));
        assert_eq!(hop_timeout.overdue_after(2, None), Some(OVERDUE_FLOOR));
    }

    #[test]
    fn a_host_without_history_is_measured_by_the_reference() {
        let hop_timeout = HopTimeout::default();
        assert_eq!(hop_timeout.overdue_after(24, Some(ms(50))), Some(ms(4000)));
        assert_eq!(
            hop_timeout.overdue_after(24, Some(ms(1000))),
            Some(ms(32_000))
        );
    }

    #[test]
    fn a_host_slow_from_its_first_token_is_detected_by_the_reference() {
        let mut hop_timeout = HopTimeout::default();
        let others = Some(ms(20));
        assert!(!hop_timeout.record(ms(1000), others));
        assert!(!hop_timeout.record(ms(1000), others));
        assert!(hop_timeout.record(ms(1000), others));
        // If all hosts are that slow, none counts as slow.
        let mut hop_timeout = HopTimeout::default();
        for _ in 0..100 {
            assert!(!hop_timeout.record(ms(1000), Some(ms(800))));
        }
    }

    #[test]
    fn without_a_reference_an_unusable_pace_counts_as_slow() {
        let (mut hop_timeout, mut late) = (HopTimeout::default(), 0);
        // Just below every timeout, permanently: slow steps must not raise the median.
        for _ in 0..40 {
            late += u32::from(hop_timeout.record(ms(3900), None));
        }
        assert_eq!(late, 38);
        let mut pieces = HopTimeout::default();
        let late = [(); 4].map(|()| pieces.record_piece(ms(29_000), 24, None));
        assert_eq!(late, [false, false, true, true]);
        // An old laptop with a large model is slow, but below the limit.
        let mut honest = HopTimeout::default();
        for _ in 0..40 {
            assert!(!honest.record(ms(1900), None));
            assert!(!honest.record_piece(ms(14_000), 24, None));
        }
    }

    #[test]
    fn prefill_chunks_are_measured_by_the_reference() {
        let mut hop_timeout = HopTimeout::default();
        let others = Some(ms(100));
        let late = [(); 3].map(|()| hop_timeout.record_piece(ms(3900), 24, others));
        assert_eq!(late, [false, false, true]);
        assert_eq!(hop_timeout.late(), Some(ms(3900) / 24));
        for _ in 0..10 {
            // An old machine may be ten times slower per row.
            assert!(!hop_timeout.record_piece(ms(790), 24, others));
            assert!(!hop_timeout.record(ms(400), Some(ms(40))));
        }
    }

    #[test]
    fn three_slow_steps_in_a_row_are_one_too_many_and_hiccups_are_forgiven() {
        let mut hop_timeout = learnt(ms(2));
        for _ in 0..10 {
            assert!(!hop_timeout.record(ms(101), None));
            assert!(!hop_timeout.record(ms(500), None));
            assert!(!hop_timeout.record(ms(99), None), "within the floor");
        }
        assert!(!hop_timeout.record(ms(200), None));
        assert!(!hop_timeout.record(ms(200), None));
        assert!(hop_timeout.record(ms(200), None));
    }

    #[test]
    fn a_host_cannot_get_its_caller_used_to_slowness() {
        let mut hop_timeout = learnt(ms(100));
        for _ in 0..1000 {
            hop_timeout.record(ms(5000), None);
        }
        assert_eq!(hop_timeout.overdue_after(1, None), Some(ms(2000)));
    }

    /// Checks at the regular interval until the host counts as offline; returns the time that took.
    fn gone_after(silence: &mut Silence, mut now: Instant, mut silent: Duration) -> Duration {
        let mut waited = Duration::ZERO;
        while silence.look(now, silent) < OFFLINE_AFTER {
            now += CHECK_INTERVAL;
            silent += CHECK_INTERVAL;
            waited += CHECK_INTERVAL;
        }
        waited
    }

    #[test]
    fn a_silent_host_is_gone_after_three_seconds() {
        let waited = gone_after(&mut Silence::default(), Instant::now(), PROBE_AFTER);
        assert_eq!(PROBE_AFTER + waited, OFFLINE_AFTER);
    }

    #[test]
    fn any_message_ends_the_silence_of_a_host() {
        let (mut silence, now) = (Silence::default(), Instant::now());
        gone_after(&mut silence, now, PROBE_AFTER);
        assert_eq!(silence.look(now + ms(3250), ms(20)), ms(20));
        assert!(gone_after(&mut silence, now + ms(3500), ms(270)) > ms(2500));
    }

    #[test]
    fn a_suspended_caller_does_not_take_its_own_pause_for_silence() {
        let (mut silence, now) = (Silence::default(), Instant::now());
        silence.look(now, PROBE_AFTER);
        let hour = Duration::from_secs(3600);
        assert!(silence.look(now + hour, hour + PROBE_AFTER) < OFFLINE_AFTER);
        // The host is still detected as offline, after a few more checks.
        let waited = gone_after(&mut silence, now + hour, hour + PROBE_AFTER);
        assert!(waited <= OFFLINE_AFTER);
    }
}
