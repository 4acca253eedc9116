//! Streams that return in a moment, and whether a batch waits for them.

use std::time::Duration;

use super::snapshot::{Kind, SHORT_ROWS, comes_back};

/// Returns whether to wait for more decode rows: fewer wait than are expected in a moment. Once
/// half of them are there, they are better computed while the others are at the next host.
///
/// `streams` gives, for each stream, the rows of its next step if one waits, and its last event.
pub(crate) fn may_grow(
    streams: impl Iterator<Item = (Option<u32>, Duration)>,
    now: Duration,
) -> bool {
    let (mut ready, mut expected) = (0, 0);
    for (rows, active) in streams {
        match rows {
            Some(rows) if rows <= SHORT_ROWS => ready += 1,
            // A prefill step can be computed meanwhile.
            Some(_) => return false,
            None => expected += u32::from(comes_back(active, now)),
        }
    }
    (1..expected).contains(&ready)
}

/// Tracks whether a stream's next decode step arrives at once after an answer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReturnEstimator {
    /// Time of the last answer, if that step was short and none has come since.
    answered: Option<Duration>,
    /// Number of late returns in a row; `None` before the first return.
    late: Option<u32>,
}

/// After this many late returns in a row, a stream is not waited for at every batch.
pub(super) const MAX_LATE_RETURNS: u32 = 4;
/// Every 17th batch waits for late streams again: a caller that shares a core with this host cannot
/// return while it computes. All streams share the same batches, so that the cost does not grow
/// with their number. Odd, since every second batch may be prefill.
pub(super) const REPROBE_EVERY: u64 = 17;

impl ReturnEstimator {
    /// Records the answer to a step of `rows` rows, when no other step waits.
    pub(crate) fn answered(&mut self, rows: u32, now: Duration) {
        self.answered = (Kind::of_rows(rows) == Kind::Decode).then_some(now);
    }

    /// Records the arrival of a step. `at_once` is the limit of an immediate return.
    pub(crate) fn came(&mut self, rows: u32, at: Duration, at_once: Duration) {
        if let Some(answered) = self.answered.take()
            && Kind::of_rows(rows) == Kind::Decode
        {
            self.late = Some(match at <= answered + at_once {
                true => 0,
                false => self.late.unwrap_or(0).saturating_add(1),
            });
        }
    }

    /// Remaining time to wait for the next step before this batch, up to `at_once` after the
    /// answer.
    pub(crate) fn awaited(&self, at_once: Duration, now: Duration, turn: u64) -> Option<Duration> {
        let until = self.answered? + at_once;
        let waited_for = self.late? < MAX_LATE_RETURNS || turn.is_multiple_of(REPROBE_EVERY);
        (waited_for && now < until).then(|| until - now)
    }
}
