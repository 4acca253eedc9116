//! How long a chat waits for its reader. Pure.

use std::time::Duration;

/// A frame that is taken makes up for this part of the limit. With a limit of 30 s, a reader that
/// takes a frame every 29 s loses its place soon, and one that takes a frame a second never does.
const FRAME_MAKES_UP: u32 = 30;

/// Ends when a reader takes nothing for as long as the limit, or keeps the chat waiting for so long
/// in sum and takes next to nothing: its place is one that others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlowReaderLimit {
    limit: Duration,
    /// For how long it has waited, less what has been made up for.
    waited: Duration,
}

impl SlowReaderLimit {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            waited: Duration::ZERO,
        }
    }

    /// For how long it waits at most.
    pub(super) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.waited)
    }

    /// A frame was taken, after so long.
    pub(super) fn taken_after(&mut self, waited: Duration) {
        self.waited = (self.waited + waited).saturating_sub(self.limit / FRAME_MAKES_UP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many frames a reader gets who takes one every so many milliseconds.
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
    fn a_reader_who_keeps_up_or_nearly_so_is_never_given_up_for() {
        assert_eq!(frames(0), usize::MAX);
        assert_eq!(frames(1000), usize::MAX);
    }

    #[test]
    fn a_reader_who_takes_next_to_nothing_loses_its_place_soon() {
        assert_eq!(frames(31_000), 0);
        assert_eq!(frames(29_000), 1);
        assert_eq!(frames(2000), 29);
    }

    #[test]
    fn nobody_saves_patience_up() {
        let mut patience = SlowReaderLimit::new(Duration::from_secs(30));
        for _ in 0..100 {
            patience.taken_after(Duration::ZERO);
        }
        assert_eq!(patience.left(), Duration::from_secs(30));
    }
}
