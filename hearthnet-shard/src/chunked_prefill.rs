//! How long a piece of prefill may be: from how fast the engine was.

use std::time::Duration;

use crate::plan::MAX_TURN_ROWS;

/// Fewest rows of a piece: below this the engine reads weights for too few rows.
const MIN_PIECE_ROWS: u32 = 8;
/// The same while somebody else decodes, who waits for it: more than a decode step has.
const MIN_ROWS_BESIDE: u32 = 2;
/// Rows of the first piece, before anything was measured.
const FIRST_PIECE_ROWS: u32 = 32;

/// How long a prefill row takes here, and how many fit the time that a piece may last: the time that
/// a decode step may be held up by its own caller's prompts; and while somebody else decodes, no
/// longer than a decode turn takes, so that neither has more of the engine than the other.
#[derive(Debug)]
pub(crate) struct ChunkedPrefill {
    target_us: f64,
    decode_us: Pace,
    us_per_row: Pace,
    /// Of short pieces, whose rows take longer.
    us_per_row_beside: Pace,
}

/// A time that is measured again and again. The newest counts a quarter, so that one slow turn does
/// not change much and a changed load is followed within a few turns.
#[derive(Debug, Clone, Copy, Default)]
struct Pace(Option<f64>);

impl Pace {
    fn note(&mut self, now: f64) {
        self.0 = Some(self.0.map_or(now, |old| old + (now - old) / 4.0));
    }
}

impl ChunkedPrefill {
    /// Pieces are to last about `target`.
    pub(crate) fn new(target: Duration) -> Self {
        Self {
            target_us: target.as_micros() as f64,
            decode_us: Pace::default(),
            us_per_row: Pace::default(),
            us_per_row_beside: Pace::default(),
        }
    }

    /// Rows of the next piece; `beside`: somebody else decodes.
    pub(crate) fn piece_rows(&self, beside: bool) -> u32 {
        // The casts saturate; an engine that takes no time gets the largest piece.
        let alone = match self.us_per_row.0 {
            None => FIRST_PIECE_ROWS,
            Some(us) => ((self.target_us / us) as u32).clamp(MIN_PIECE_ROWS, MAX_TURN_ROWS),
        };
        if !beside {
            return alone;
        }
        let pace = self.us_per_row_beside.0.or(self.us_per_row.0);
        match (self.decode_us.0, pace) {
            (Some(turn), Some(us)) => ((turn / us) as u32).clamp(MIN_ROWS_BESIDE, alone),
            _ => MIN_PIECE_ROWS.min(alone),
        }
    }

    /// Takes note of a prefill turn; `beside`: its piece was made while somebody else decoded.
    pub(crate) fn note(&mut self, rows: u32, took: Duration, beside: bool) {
        if rows == 0 {
            return;
        }
        let now = took.as_micros() as f64 / f64::from(rows);
        match beside {
            true => self.us_per_row_beside.note(now),
            false => self.us_per_row.note(now),
        }
    }

    /// Takes note of a decode turn.
    pub(crate) fn note_decode(&mut self, took: Duration) {
        self.decode_us.note(took.as_micros() as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_keeps_a_piece_near_its_time() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.piece_rows(false), FIRST_PIECE_ROWS);
        for _ in 0..40 {
            prefill.note(10, Duration::from_millis(5), false);
        }
        assert_eq!(prefill.piece_rows(false), 40);
        for _ in 0..40 {
            prefill.note(8, Duration::from_secs(8), false);
        }
        assert_eq!(prefill.piece_rows(false), MIN_PIECE_ROWS);
        let mut instant = ChunkedPrefill::new(Duration::from_millis(20));
        instant.note(8, Duration::ZERO, false);
        assert_eq!(instant.piece_rows(false), MAX_TURN_ROWS);
    }

    #[test]
    fn a_piece_beside_somebody_elses_decode_takes_as_long_as_that() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.piece_rows(true), MIN_PIECE_ROWS);
        for _ in 0..40 {
            prefill.note(20, Duration::from_millis(10), false);
            prefill.note_decode(Duration::from_millis(3));
        }
        assert_eq!(
            (prefill.piece_rows(false), prefill.piece_rows(true)),
            (40, 6)
        );
        // Rows of short pieces take longer.
        for _ in 0..40 {
            prefill.note(6, Duration::from_millis(6), true);
        }
        assert_eq!(
            (prefill.piece_rows(false), prefill.piece_rows(true)),
            (40, 3)
        );
        for _ in 0..40 {
            prefill.note_decode(Duration::from_micros(100));
        }
        assert_eq!(prefill.piece_rows(true), MIN_ROWS_BESIDE);
        // A slow decode turn makes no piece longer than it may be anyhow.
        for _ in 0..40 {
            prefill.note_decode(Duration::from_secs(1));
        }
        assert_eq!(prefill.piece_rows(true), 40);
    }
}
