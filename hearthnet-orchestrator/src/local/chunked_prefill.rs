//! How much of a prompt the engine takes at a time. Pure: durations go in, rows come out.
//!
//! A prompt is run in pieces, because only between them a chat that was given up is noticed, and
//! others have their turn. How it is cut has no influence on what comes out, so the length of a
//! piece follows from how fast the engine was: all who ask for it have a turn within about
//! [`ROUND`]. That is half of what giving up may take, for the other half may be what began
//! before there were so many.
//!
//! Example: at 1 ms a row a lone prompt is run 64 rows at a time, and beside three other chats
//! 24; at 60 ms a row it is run row by row.

use std::time::Duration;

/// What a turn of each who asks may take, all together.
const ROUND: Duration = Duration::from_millis(100);
/// Most rows of a piece: beyond this, more make a row no cheaper.
const MOST_ROWS: usize = 128;
/// Whole numbers of these are run, if there are as many: what the engine takes through its layers
/// at once, and what its kernels take. A few more rows would cost nearly as much as twice as many.
const GRAINS: [usize; 2] = [64, 8];
/// Rows of the first piece, before anything was measured: few enough for a slow machine.
const FIRST_ROWS: usize = 4;

/// How long a row of a prompt takes here.
#[derive(Debug, Default)]
pub(super) struct ChunkedPrefill {
    us_per_row: Option<f64>,
}

impl ChunkedPrefill {
    /// Rows of the next piece, at least 1, when so many ask for the engine.
    pub(super) fn rows(&self, asking: usize) -> usize {
        let Some(us) = self.us_per_row else {
            return FIRST_ROWS;
        };
        let share = ROUND.as_micros() as f64 / asking.max(1) as f64;
        // The cast saturates; an engine that takes no time gets the largest piece.
        let rows = ((share / us) as usize).clamp(1, MOST_ROWS);
        let grain = GRAINS.into_iter().find(|grain| rows >= *grain);
        rows - rows % grain.unwrap_or(1)
    }

    /// Takes note of a piece: whether it was as long as it might have been, its rows, and how long
    /// they took.
    ///
    /// A slower pace counts at once, a faster one by half each time: pieces that are too short
    /// cost little, and nobody waits for them.
    pub(super) fn note(&mut self, whole: bool, rows: usize, took: Duration) {
        // A remainder reads the weights for few rows: its rows seem slow and are not, unless it
        // took longer than it would have taken as a whole.
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

    /// What giving up may take.
    const LIMIT: Duration = Duration::from_millis(200);

    /// An engine of which a call takes so long besides its rows.
    fn takes(rows: usize, row: Duration, call: Duration) -> Duration {
        call + row * rows as u32
    }

    proptest! {
        /// Whatever the machine and however long the prompts: no piece takes longer than giving up
        /// may, or else it is one row.
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
                    // Before anything was measured it is a guess, which holds down to 50 ms a row.
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
    fn all_who_ask_have_a_turn_within_a_round() {
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
    fn what_remains_of_a_prompt_tells_nothing_unless_it_is_slow() {
        let mut pieces = ChunkedPrefill::default();
        pieces.note(true, 4, Duration::from_millis(4));
        pieces.note(false, 1, Duration::from_millis(9));
        assert_eq!(pieces.rows(1), 64);
        pieces.note(false, 20, Duration::from_secs(2));
        assert_eq!(pieces.rows(1), 1);
    }
}
