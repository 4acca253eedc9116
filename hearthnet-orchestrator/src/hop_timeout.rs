//! How long a host may take: learnt from the host itself, or from those beside it.
//!
//! A fixed bound fits no two machines. A decode step is measured against the median of the same
//! host's recent ones; a piece of a prompt against what a row took it before; and where nothing is
//! known of the host yet, against what the same work takes the other hosts of the sequence, layer
//! for layer and row for row (the *reference*). The less a bound rests on, the wider it is. Pure:
//! durations go in, verdicts come out.
//!
//! Example: a host that answers in 2 ms is *slow* above 100 ms (the floor is
//! higher than 8 x 2 ms), and *persistently* slow after three such answers in a
//! row. If an answer does not come at all, it is overdue after 2 s (the floor is
//! higher than 16 x 2 ms). A host that always needs 400 ms is slow above 3.2 s,
//! and overdue after 6.4 s. One whose first piece of 24 rows took 10 s may take 320 s for the
//! next. One that has answered nothing yet, beside hosts that would need 50 ms for it, is overdue
//! after 4 s; without any beside it nothing is known, and it has until the health timeout.
//!
//! [`Silence`] is about the other question: not how long the work takes, but whether the host is
//! there at all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::times::median;

/// Steps that make up the history: long enough to be calm, short enough to follow a
/// machine that got busy for good.
const WINDOW: usize = 64;
/// Decode steps before a median is trusted.
const LEARNING: usize = 16;
/// A step is slow beyond this many medians, or this many times what it takes others.
const SLOW: u32 = 8;
/// And never below this: a scheduler's hiccup is no failure.
const SLOW_FLOOR: Duration = Duration::from_millis(100);
/// The same beside others, whose layers, machines and neighbours are not the same.
const SLOW_FLOOR_BESIDE_OTHERS: Duration = Duration::from_millis(500);
/// A decode step, and a piece of a prompt, that are slow where nothing tells what they take others:
/// nobody converses at that pace who has another host to try.
const SLOW_ALONE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));
/// An answer is overdue beyond this many medians.
const OVERDUE: u32 = 16;
/// The same times the longest of a few steps, or what others take.
const OVERDUE_GUESSED: u32 = 32;
/// And never below this.
const OVERDUE_FLOOR: Duration = Duration::from_secs(2);
/// Where nothing is known but what others take: the first step finds caches and memory cold.
const OVERDUE_FLOOR_BESIDE_OTHERS: Duration = Duration::from_secs(4);
/// Slow steps, or pieces, in a row that make a host degraded.
const PERSISTENT: u32 = 3;

/// The recent steps of one host.
#[derive(Debug, Clone, Default)]
pub(crate) struct HopTimeout {
    /// Decode steps.
    recent: VecDeque<Duration>,
    /// Of `recent`, once there are enough.
    median: Option<Duration>,
    /// Most that a row of a prompt's piece took, and that a whole piece did.
    row: Option<Duration>,
    piece: Option<Duration>,
    slow_in_a_row: u32,
    /// What a row took, of the last answer that was slow or that is overdue.
    late: Option<Duration>,
}

impl HopTimeout {
    /// Notes the round trip of a decode step, which takes others `reference`, if that is known;
    /// says whether the host is persistently slow.
    ///
    /// Slow steps are not learnt from: a host cannot slowly get its caller used to it.
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

    /// Whether a host is persistently slow, whose last answer was `slow`, or not.
    fn slow(&mut self, took: Duration, rows: u32, slow: bool) -> bool {
        self.slow_in_a_row = if slow { self.slow_in_a_row + 1 } else { 0 };
        if slow {
            self.overdue(took, rows);
        }
        self.slow_in_a_row >= PERSISTENT
    }

    /// An answer of so many rows has not come for so long.
    pub(crate) fn overdue(&mut self, waited: Duration, rows: u32) {
        self.late = Some(waited / rows.max(1));
    }

    /// What a row takes a host that is late, at least.
    pub(crate) fn late(&self) -> Option<Duration> {
        self.late
    }

    /// Notes a piece of a prompt: `rows`, 2 or more, that the host was at for `took`, and that take
    /// others `reference`; says whether the host is persistently slow.
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

    /// How long a decode step usually takes; `None` while too little is known.
    pub(crate) fn usual(&self) -> Option<Duration> {
        self.median
    }

    /// About how long a step of so many rows takes the host, as far as it has shown; `None` while
    /// it has answered none of its kind.
    pub(crate) fn typical(&self, rows: u32) -> Option<Duration> {
        match rows {
            0 | 1 => self.median.or_else(|| median(self.recent.iter().copied())),
            rows => self.row.map(|row| row * rows),
        }
    }

    /// How long to wait for a step of `rows` before looking for another host; `None` while too
    /// little is known. `reference` is what such a step takes others.
    pub(crate) fn overdue_after(&self, rows: u32, reference: Option<Duration>) -> Option<Duration> {
        if let (0 | 1, Some(median)) = (rows, self.median) {
            return Some((median * OVERDUE).max(OVERDUE_FLOOR));
        }
        // A row alone takes no longer than a piece with others in it, nor several of them longer
        // than one after the other.
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

/// Silence of a host that owes something after which it is asked whether it is there.
pub(crate) const ASK_AFTER: Duration = Duration::from_secs(1);
/// Silence after which it is not: it was asked, and had twice as long again.
pub(crate) const GONE_AFTER: Duration = Duration::from_secs(3);
/// How often a host is looked after that is silent.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// For how long a host has been silent while this side listened.
///
/// A caller that was stopped itself, or had no core, comes back to a link that seems silent for
/// just as long, with the answers still unread. So what passes between two looks counts for no
/// more than twice what should.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Silence {
    looked: Option<Instant>,
    heard_out: Duration,
}

impl Silence {
    /// Looks at a host from which nothing has come for `silent`; for how long it has been silent
    /// for certain.
    pub(crate) fn look(&mut self, now: Instant, silent: Duration) -> Duration {
        let since = match self.looked.replace(now) {
            Some(before) => now.saturating_duration_since(before).min(2 * LOOK_EVERY),
            None => ASK_AFTER,
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
    fn of_a_host_alone_that_has_answered_nothing_nothing_is_concluded() {
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
        // Whatever others do: what it has shown itself counts more.
        let bound = hop_timeout.overdue_after(24, Some(ms(50)));
        assert_eq!(bound, hop_timeout.overdue_after(24, None));
    }

    #[test]
    fn the_first_token_is_bounded_by_what_the_prompt_took_and_a_piece_by_its_rows() {
        let mut hop_timeout = HopTimeout::default();
        hop_timeout.record_piece(ms(240), 24, None);
        hop_timeout.record_piece(ms(80), 8, None);
        assert_eq!(hop_timeout.overdue_after(1, None), Some(ms(32 * 240)));
        assert_eq!(hop_timeout.overdue_after(48, None), Some(ms(32 * 480)));
        assert_eq!(hop_timeout.overdue_after(2, None), Some(OVERDUE_FLOOR));
    }

    #[test]
    fn a_host_that_has_answered_nothing_is_measured_by_those_beside_it() {
        let hop_timeout = HopTimeout::default();
        assert_eq!(hop_timeout.overdue_after(24, Some(ms(50))), Some(ms(4000)));
        assert_eq!(
            hop_timeout.overdue_after(24, Some(ms(1000))),
            Some(ms(32_000))
        );
    }

    #[test]
    fn a_host_that_is_slow_from_its_first_token_is_told_by_those_beside_it() {
        let mut hop_timeout = HopTimeout::default();
        let others = Some(ms(20));
        assert!(!hop_timeout.record(ms(1000), others));
        assert!(!hop_timeout.record(ms(1000), others));
        assert!(hop_timeout.record(ms(1000), others));
        // Where all are that slow nobody is.
        let mut hop_timeout = HopTimeout::default();
        for _ in 0..100 {
            assert!(!hop_timeout.record(ms(1000), Some(ms(800))));
        }
    }

    #[test]
    fn a_host_that_nobody_tells_anything_of_is_slow_at_a_pace_that_nobody_converses_at() {
        let (mut hop_timeout, mut late) = (HopTimeout::default(), 0);
        // Just under any timeout, for ever: its own median gets nobody used to it.
        for _ in 0..40 {
            late += u32::from(hop_timeout.record(ms(3900), None));
        }
        assert_eq!(late, 38);
        let mut pieces = HopTimeout::default();
        let late = [(); 4].map(|()| pieces.record_piece(ms(29_000), 24, None));
        assert_eq!(late, [false, false, true, true]);
        // An old laptop, and a large model: slow, and not that slow.
        let mut honest = HopTimeout::default();
        for _ in 0..40 {
            assert!(!honest.record(ms(1900), None));
            assert!(!honest.record_piece(ms(14_000), 24, None));
        }
    }

    #[test]
    fn pieces_of_a_prompt_are_measured_by_what_they_take_others() {
        let mut hop_timeout = HopTimeout::default();
        let others = Some(ms(100));
        let late = [(); 3].map(|()| hop_timeout.record_piece(ms(3900), 24, others));
        assert_eq!(late, [false, false, true]);
        assert_eq!(hop_timeout.late(), Some(ms(3900) / 24));
        for _ in 0..10 {
            // Honest, and a tenth as fast on an old machine for a row at a time.
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

    /// Looks as often as it should until the host is gone; how long that took.
    fn gone_after(silence: &mut Silence, mut now: Instant, mut silent: Duration) -> Duration {
        let mut waited = Duration::ZERO;
        while silence.look(now, silent) < GONE_AFTER {
            now += LOOK_EVERY;
            silent += LOOK_EVERY;
            waited += LOOK_EVERY;
        }
        waited
    }

    #[test]
    fn a_silent_host_is_gone_after_three_seconds() {
        let waited = gone_after(&mut Silence::default(), Instant::now(), ASK_AFTER);
        assert_eq!(ASK_AFTER + waited, GONE_AFTER);
    }

    #[test]
    fn whatever_it_says_brings_a_host_back() {
        let (mut silence, now) = (Silence::default(), Instant::now());
        gone_after(&mut silence, now, ASK_AFTER);
        assert_eq!(silence.look(now + ms(3250), ms(20)), ms(20));
        assert!(gone_after(&mut silence, now + ms(3500), ms(270)) > ms(2500));
    }

    #[test]
    fn a_caller_that_was_stopped_itself_blames_nobody_for_what_it_did_not_hear() {
        let (mut silence, now) = (Silence::default(), Instant::now());
        silence.look(now, ASK_AFTER);
        let hour = Duration::from_secs(3600);
        assert!(silence.look(now + hour, hour + ASK_AFTER) < GONE_AFTER);
        // But the host is not there for all that: it takes a few looks more.
        let waited = gone_after(&mut silence, now + hour, hour + ASK_AFTER);
        assert!(waited <= GONE_AFTER);
    }
}
