//! Limit of the time that a chat waits for its reader. Pure.

use std::time::Duration;

/// Each frame taken restores this fraction of the limit. With 30 s, a reader that takes one frame
/// per 29 s is soon cut off, and one that takes a frame per second never is.
const FRAME_MAKES_UP: u32 = 30;

/// Budget of waiting for a reader. It is used up if the reader takes nothing for the whole limit,
/// or delays the chat that long in total and takes almost nothing; other chats wait for its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlowReaderLimit {
    limit: Duration,
    /// Time waited, less the restored part.
    waited: Duration,
}

impl SlowReaderLimit {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            waited: Duration::ZERO,
        }
    }

    /// Remaining budget.
    pub(super) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.waited)
    }

    /// Records that a frame was taken after `waited`.
    pub(super) fn taken_after(&mut self, waited: Duration) {
        self.waited = (self.waited + waited).saturating_sub(self.limit / FRAME_MAKES_UP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of frames that a reader gets that takes one per `every_ms`.
    fn frames(every_ms: u64) -> usize {
        let mut patience = SlowReaderLimit::new(Duration::from_secs(30));
        let every = Duration::from_millis(every_ms);
        for n in 0..10_000 {
            if patience.left() < every {
                return n;
            }
            patience.taken_after(every);
        }
        usize::MAX
    }

    #[test]
    fn a_reader_that_nearly_keeps_up_is_never_cut_off() {
        assert_eq!(frames(0), usize::MAX);
        assert_eq!(frames(1000), usize::MAX);
    }

    #[test]
    fn a_reader_that_takes_almost_nothing_is_cut_off_soon() {
        assert_eq!(frames(31_000), 0);
        assert_eq!(frames(29_000), 1);
        assert_eq!(frames(2000), 29);
    }

    #[test]
    fn the_budget_of_a_reader_never_exceeds_the_limit() {
        let mut patience = SlowReaderLimit::new(Duration::from_secs(30));
        for _ in 0..100 {
            patience.taken_after(Duration::ZERO);
        }
        assert_eq!(patience.left(), Duration::from_secs(30));
    }
}
