//! How long a piece of prefill may be: from how fast the engine was.

use std::time::Duration;

use crate::plan::MAX_TURN_ROWS;

/// Fewest rows of a piece: below this the engine reads weights for too few rows.
const MIN_PIECE_ROWS: u32 = 8;
/// The same between decode turns of others, who wait for it.
const MIN_ROWS_BETWEEN: u32 = 2;
/// By how much of its time a piece may make a turn with decode steps of others longer.
const BESIDE: f64 = 1.0 / 3.0;
/// Rows of the first piece, before anything was measured.
const FIRST_PIECE_ROWS: u32 = 32;

/// How long a prefill row takes here, and how many fit the time that a piece may last: the time that
/// a decode step may be held up by its own caller's prompts; and while somebody else decodes, a share of
/// what a decode turn takes.
#[derive(Debug)]
pub(crate) struct ChunkedPrefill {
    target_us: f64,
    decode_us: Pace,
    /// Rows of the last decode turn.
    decode_rows: u32,
    us_per_row: Pace,
    /// Of short pieces, whose rows take longer.
    us_per_row_between: Pace,
    /// What a turn with decode steps takes more for each row of a piece.
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
            decode_rows: 0,
            us_per_row: Pace::default(),
            us_per_row_between: Pace::default(),
            us_per_row_beside: Pace::default(),
        }
    }

    /// Rows of the next piece while nobody else decodes.
    pub(crate) fn piece_rows(&self) -> u32 {
        // The casts saturate; an engine that takes no time gets the largest piece.
        match self.us_per_row.0 {
            None => FIRST_PIECE_ROWS,
            Some(us) => ((self.target_us / us) as u32).clamp(MIN_PIECE_ROWS, MAX_TURN_ROWS),
        }
    }

    /// Rows of a piece between decode turns of somebody else: it takes as long as one of these.
    pub(crate) fn rows_between(&self) -> u32 {
        let us_per_row = self.us_per_row_between.0.or(self.us_per_row.0);
        self.rows_within(1.0, us_per_row, MIN_ROWS_BETWEEN)
    }

    /// Rows of a piece in one turn with decode steps of somebody else, which takes a third longer by it.
    pub(crate) fn rows_beside(&self) -> u32 {
        self.rows_within(BESIDE, self.us_per_row_beside.0, 1)
    }

    fn rows_within(&self, share: f64, us_per_row: Option<f64>, least: u32) -> u32 {
        let alone = self.piece_rows();
        match (self.decode_us.0, us_per_row) {
            (Some(turn), Some(us)) => ((turn * share / us) as u32).clamp(least, alone),
            _ => MIN_PIECE_ROWS.min(alone),
        }
    }

    /// Takes note of a turn with a piece while nobody else decoded.
    pub(crate) fn note(&mut self, rows: u32, took: Duration) {
        if rows > 0 {
            self.us_per_row
                .note(took.as_micros() as f64 / f64::from(rows));
        }
    }

    /// Takes note of a piece between decode turns of somebody else.
    pub(crate) fn note_between(&mut self, rows: u32, took: Duration) {
        if rows > 0 {
            let now = took.as_micros() as f64 / f64::from(rows);
            self.us_per_row_between.note(now);
        }
    }

    /// Takes note of a turn with a piece and `short` rows of decode steps of somebody else. It says what a
    /// piece costs where there are as many of these as in the last decode turn, or hardly more or fewer.
    pub(crate) fn note_beside(&mut self, rows: u32, short: u32, took: Duration) {
        let alike = short.abs_diff(self.decode_rows) <= self.decode_rows / 4;
        if let Some(turn) = self.decode_us.0.filter(|_| rows > 0 && alike) {
            let more = took.as_micros() as f64 - turn;
            self.us_per_row_beside.note(more.max(0.0) / f64::from(rows));
        }
    }

    /// How long a decode turn takes; nothing before there was one.
    pub(crate) fn decode_turn(&self) -> Duration {
        Duration::from_micros(self.decode_us.0.unwrap_or_default() as u64)
    }

    /// Takes note of a decode turn.
    pub(crate) fn note_decode(&mut self, rows: u32, took: Duration) {
        self.decode_rows = rows;
        self.decode_us.note(took.as_micros() as f64);
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

    #[test]
    fn a_piece_between_somebody_elses_decode_turns_takes_as_long_as_one() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.rows_between(), MIN_PIECE_ROWS);
        for _ in 0..40 {
            prefill.note(20, Duration::from_millis(10));
            prefill.note_decode(4, Duration::from_millis(3));
        }
        assert_eq!((prefill.piece_rows(), prefill.rows_between()), (40, 6));
        // Rows of short pieces take longer.
        for _ in 0..40 {
            prefill.note_between(6, Duration::from_millis(6));
        }
        assert_eq!((prefill.piece_rows(), prefill.rows_between()), (40, 3));
        for _ in 0..40 {
            prefill.note_decode(4, Duration::from_micros(100));
        }
        assert_eq!(prefill.rows_between(), MIN_ROWS_BETWEEN);
        // A slow decode turn makes no piece longer than it may be anyhow.
        for _ in 0..40 {
            prefill.note_decode(4, Duration::from_secs(1));
        }
        assert_eq!(prefill.rows_between(), 40);
    }

    #[test]
    fn a_piece_beside_somebody_elses_decode_steps_makes_their_turn_longer_by_a_third() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.rows_beside(), MIN_PIECE_ROWS);
        for _ in 0..40 {
            prefill.note(20, Duration::from_millis(10));
            prefill.note_decode(4, Duration::from_millis(6));
            // 8 rows more cost 1 ms more.
            prefill.note_beside(8, 4, Duration::from_millis(7));
        }
        assert_eq!(prefill.rows_beside(), 16);
        // What another number of decode steps costs is none of the piece's doing.
        prefill.note_beside(8, 6, Duration::from_secs(1));
        prefill.note_beside(8, 2, Duration::from_millis(3));
        assert_eq!(prefill.rows_beside(), 16);
        // As many as there may be anyhow, where they cost nothing more.
        for _ in 0..40 {
            prefill.note_beside(8, 4, Duration::from_millis(3));
        }
        assert_eq!(prefill.rows_beside(), 40);
        for _ in 0..40 {
            prefill.note_beside(8, 4, Duration::from_secs(1));
        }
        assert_eq!(prefill.rows_beside(), 1);
    }
}
