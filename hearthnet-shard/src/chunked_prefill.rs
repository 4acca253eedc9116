//! How long a piece of prefill may be: from how fast the engine was.

use std::time::Duration;

use crate::plan::MAX_TURN_ROWS;

/// Fewest rows of a piece: below this the engine reads weights for too few rows.
const MIN_PIECE_ROWS: u32 = 8;
/// Rows of the first piece, before anything was measured.
const FIRST_PIECE_ROWS: u32 = 32;

/// How long a prefill row takes here, and how many fit the time that a piece may last.
#[derive(Debug)]
pub(crate) struct ChunkedPrefill {
    target_us: f64,
    us_per_row: Option<f64>,
}

impl ChunkedPrefill {
    /// Pieces are to last about `target`.
    pub(crate) fn new(target: Duration) -> Self {
        Self {
            target_us: target.as_micros() as f64,
            us_per_row: None,
        }
    }

    /// Rows of the next piece.
    pub(crate) fn piece_rows(&self) -> u32 {
        match self.us_per_row {
            None => FIRST_PIECE_ROWS,
            // The cast saturates; an engine that takes no time gets the largest piece.
            Some(us) => ((self.target_us / us) as u32).clamp(MIN_PIECE_ROWS, MAX_TURN_ROWS),
        }
    }

    /// Takes note of a prefill turn. The newest counts a quarter, so that one slow
    /// turn does not change much and a changed load is followed within a few turns.
    pub(crate) fn note(&mut self, rows: u32, took: Duration) {
        if rows == 0 {
            return;
        }
        let now = took.as_micros() as f64 / f64::from(rows);
        self.us_per_row = Some(self.us_per_row.map_or(now, |old| old + (now - old) / 4.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_keeps_a_piece_near_its_time() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.piece_rows(), FIRST_PIECE_ROWS);
        for _ in 0..40 {
            prefill.note(10, Duration::from_millis(5));
        }
        assert_eq!(prefill.piece_rows(), 40);
        for _ in 0..40 {
            prefill.note(8, Duration::from_secs(8));
        }
        assert_eq!(prefill.piece_rows(), MIN_PIECE_ROWS);
        let mut instant = ChunkedPrefill::new(Duration::from_millis(20));
        instant.note(8, Duration::ZERO);
        assert_eq!(instant.piece_rows(), MAX_TURN_ROWS);
    }
}
