//! Size of a prefill chunk on this machine's engine. Pure: durations in, rows out.
//!
//! A prompt is run in chunks, because only between them cancellation is noticed and other chats are
//! served. The result does not depend on the cut, so the size follows from the measured speed: all
//! waiting chats are served within about [`ROUND`]. This is half of the time that a cancellation
//! may take; the other half covers a chunk that started when fewer chats were waiting.
//!
//! Example: at 1 ms per row a lone prompt is run 64 rows at a time, and beside three other chats
//! 24; at 60 ms per row it is run row by row.

use std::time::Duration;

/// Target time for serving one chunk of every waiting chat.
const ROUND: Duration = Duration::from_millis(100);
/// Maximum rows per chunk: larger chunks do not reduce the cost per row.
const MOST_ROWS: usize = 128;
/// Chunks are multiples of these row counts, if possible: the engine's pass size and the kernels'
/// tile size. A few more rows would cost nearly as much as twice as many.
const GRAINS: [usize; 2] = [64, 8];
/// Rows of the first chunk, before any measurement: few enough for a slow machine.
const FIRST_ROWS: usize = 4;

/// Measured time per prompt row.
#[derive(Debug, Default)]
pub(super) struct ChunkedPrefill {
    us_per_row: Option<f64>,
}

impl ChunkedPrefill {
    /// Rows of the next chunk, at least 1, if `asking` chats wait for the engine.
    pub(super) fn rows(&self, asking: usize) -> usize {
        let Some(us) = self.us_per_row else {
            return FIRST_ROWS;
        };
        let share = ROUND.as_micros() as f64 / asking.max(1) as f64;
        // The cast saturates; an engine that takes no time gets the largest chunk.
        let rows = ((share / us) as usize).clamp(1, MOST_ROWS);
        let grain = GRAINS.into_iter().find(|grain| rows >= *grain);
        rows - rows % grain.unwrap_or(1)
    }

    /// Records a chunk: whether it had the maximum size, its rows and its time.
    ///
    /// A slower pace counts at once, a faster one by half each time: chunks that are too short cost
    /// little and delay no other chat.
    pub(super) fn note(&mut self, whole: bool, rows: usize, took: Duration) {
        // A remainder reads the weights for few rows, so its time per row is misleading, unless it
        // exceeded a whole round.
        if rows == 0 || !whole && took <= ROUND {
            return;
        }
        let now = took.as_micros() as f64 / rows as f64;
        self.us_per_row = Some(match self.us_per_row {
            Some(before) if now < before => f64::midpoint(before, now),
            _ => now,
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Maximum time of a cancellation.
    const LIMIT: Duration = Duration::from_millis(200);

    /// Time of a chunk on an engine with a fixed cost per call.
    fn takes(rows: usize, row: Duration, call: Duration) -> Duration {
        call + row * rows as u32
    }

    proptest! {
        /// For any machine and prompt length, a chunk of several rows takes no longer than a
        /// cancellation may.
        #[test]
        fn a_machine_of_any_speed_looks_up_in_time(
            row_us in 1u64..300_000,
            call_us in 0u64..20_000,
            prompts in prop::collection::vec((1usize..3000, 1usize..6), 1..6),
        ) {
            let (row, call) = (Duration::from_micros(row_us), Duration::from_micros(call_us));
            let mut pieces = ChunkedPrefill::default();
            for (length, asking) in prompts {
                let mut left = length;
                while left > 0 {
                    let most = pieces.rows(asking);
                    let rows = most.min(left);
                    let took = takes(rows, row, call);
                    // The first chunk is a guess that holds down to 50 ms per row.
                    let guess = pieces.us_per_row.is_none() && took > LIMIT;
                    prop_assert!(rows == 1 || guess || took <= LIMIT, "{rows} rows: {took:?}");
                    prop_assert!(!guess || takes(FIRST_ROWS, row, call) > LIMIT);
                    pieces.note(rows == most, rows, took);
                    left -= rows;
                }
            }
        }
    }

    #[test]
    fn all_waiting_chats_are_served_within_a_round() {
        let mut pieces = ChunkedPrefill::default();
        assert_eq!(pieces.rows(1), FIRST_ROWS);
        pieces.note(true, FIRST_ROWS, Duration::from_millis(4));
        assert_eq!(
            [1, 2, 4, 20, 1000].map(|asking| pieces.rows(asking)),
            [64, 48, 24, 5, 1]
        );
        pieces.note(true, 100, Duration::from_secs(6));
        assert_eq!(pieces.rows(1), 1);
    }

    #[test]
    fn a_machine_that_becomes_slower_is_followed_at_once_and_a_faster_one_soon() {
        let mut pieces = ChunkedPrefill::default();
        pieces.note(true, 4, Duration::ZERO);
        assert_eq!(pieces.rows(1), MOST_ROWS);
        pieces.note(true, MOST_ROWS, Duration::from_millis(1280));
        assert_eq!(pieces.rows(1), 8);
        let mut count = 0;
        while pieces.rows(1) < 64 {
            let rows = pieces.rows(1);
            pieces.note(
                true,
                rows,
                takes(rows, Duration::from_millis(1), Duration::ZERO),
            );
            count += 1;
        }
        assert!(count < 10, "{count} pieces");
    }

    #[test]
    fn the_last_chunk_of_a_prompt_counts_only_if_it_is_slow() {
        let mut pieces = ChunkedPrefill::default();
        pieces.note(true, 4, Duration::from_millis(4));
        pieces.note(false, 1, Duration::from_millis(9));
        assert_eq!(pieces.rows(1), 64);
        pieces.note(false, 20, Duration::from_secs(2));
        assert_eq!(pieces.rows(1), 1);
    }
}
