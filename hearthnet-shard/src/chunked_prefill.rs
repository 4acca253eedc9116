//! How long a piece of prefill may be: from how fast the engine was.

use std::time::Duration;

use crate::plan::MAX_TURN_ROWS;

/// Fewest rows of a piece: below this the engine reads weights for too few rows.
const MIN_PIECE_ROWS: u32 = 8;
/// The same between decode turns of others, who wait for it.
const MIN_ROWS_BETWEEN: u32 = 2;
/// By how much of its time rows beside others' decode steps may make a turn with these longer.
const BESIDE: f64 = 1.0 / 3.0;
/// How many those are before anything was measured.
const FIRST_ROWS_BESIDE: u32 = 4;
/// Rows of the first piece, before anything was measured.
const FIRST_PIECE_ROWS: u32 = 32;

/// How long a prefill row takes here, and how many fit the time that a piece may last: the time that
/// a decode step may be held up by its own caller's prompts; and while somebody else decodes, a share of
/// what a decode turn takes.
#[derive(Debug)]
pub(crate) struct ChunkedPrefill {
    target_us: f64,
    decode_us: Pace,
    us_per_row: Pace,
    /// Of short pieces, whose rows take longer.
    us_per_row_between: Pace,
    /// Turns with decode steps, those with a piece among them.
    turns: Line,
}

/// How long a layer of a turn takes by the rows, as a straight line through the last turns, of which the
/// newest counts a thirty-second part.
#[derive(Debug, Default)]
struct Line {
    noted: bool,
    rows: f64,
    us: f64,
    rows_squared: f64,
    rows_by_us: f64,
    /// What a row more costs, as last known: where all turns are alike nothing is learned of it.
    slope: Option<f64>,
}

/// A turn counts as no longer than so many times what was expected of it.
const OUTLIER: f64 = 4.0;

impl Line {
    fn note(&mut self, rows: u32, us: f64) {
        let rows = f64::from(rows);
        // One turn for which the machine had no time says nothing of rows.
        let expected = self.us + self.slope.unwrap_or(0.0) * (rows - self.rows);
        let us = match self.noted {
            true => us.min(expected.max(self.us) * OUTLIER),
            false => us,
        };
        let weight = if self.noted { 1.0 / 32.0 } else { 1.0 };
        self.noted = true;
        self.rows += (rows - self.rows) * weight;
        self.us += (us - self.us) * weight;
        self.rows_squared += (rows * rows - self.rows_squared) * weight;
        self.rows_by_us += (rows * us - self.rows_by_us) * weight;
        let spread = self.rows_squared - self.rows * self.rows;
        if spread > 0.1 {
            self.slope = Some((self.rows_by_us - self.rows * self.us) / spread);
        }
    }

    /// How many rows beside so many others make a turn longer by a share.
    fn rows_within(&self, share: f64, beside: u32) -> Option<u32> {
        let slope = self.slope?;
        let turn = self.us + slope * (f64::from(beside) - self.rows);
        // The casts saturate: rows that cost nothing are as many as one likes.
        Some((turn.max(0.0) * share / slope.max(f64::MIN_POSITIVE)) as u32)
    }
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
            us_per_row_between: Pace::default(),
            turns: Line::default(),
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
        let alone = self.piece_rows();
        let us_per_row = self.us_per_row_between.0.or(self.us_per_row.0);
        match (self.decode_us.0, us_per_row) {
            (Some(turn), Some(us)) => ((turn / us) as u32).clamp(MIN_ROWS_BETWEEN, alone),
            _ => MIN_PIECE_ROWS.min(alone),
        }
    }

    /// Rows that may go with so many of decode steps: they make the turn a third longer.
    pub(crate) fn rows_beside(&self, short: u32) -> u32 {
        let rows = self.turns.rows_within(BESIDE, short);
        rows.unwrap_or(FIRST_ROWS_BESIDE).min(self.piece_rows())
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

    /// Takes note of a turn with decode steps, all of it through so many layers, the same ones, with or
    /// without a piece.
    pub(crate) fn note_turn(&mut self, rows: u32, layers: u32, took: Duration) {
        let us = took.as_micros() as f64 / f64::from(layers.max(1));
        self.turns.note(rows, us);
    }

    /// How long a decode turn takes; nothing before there was one.
    pub(crate) fn decode_turn(&self) -> Duration {
        Duration::from_micros(self.decode_us.0.unwrap_or_default() as u64)
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
            prefill.note_decode(Duration::from_millis(3));
        }
        assert_eq!((prefill.piece_rows(), prefill.rows_between()), (40, 6));
        // Rows of short pieces take longer.
        for _ in 0..40 {
            prefill.note_between(6, Duration::from_millis(6));
        }
        assert_eq!((prefill.piece_rows(), prefill.rows_between()), (40, 3));
        for _ in 0..40 {
            prefill.note_decode(Duration::from_micros(100));
        }
        assert_eq!(prefill.rows_between(), MIN_ROWS_BETWEEN);
        // A slow decode turn makes no piece longer than it may be anyhow.
        for _ in 0..40 {
            prefill.note_decode(Duration::from_secs(1));
        }
        assert_eq!(prefill.rows_between(), 40);
    }

    #[test]
    fn rows_beside_others_decode_steps_make_their_turn_a_third_longer() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.rows_beside(1), FIRST_ROWS_BESIDE);
        let turn = |rows: u32| Duration::from_micros(850 + 100 * u64::from(rows));
        for rows in [1, 3, 6].repeat(100) {
            prefill.note_turn(rows, 10, turn(rows));
        }
        // 950 us for one row, 1250 us for four.
        assert_eq!((prefill.rows_beside(1), prefill.rows_beside(4)), (3, 4));
        // Through other layers it is as much for each of them, and one slow turn does not count for much.
        for rows in [1, 3, 6].repeat(100) {
            prefill.note_turn(rows, 5, turn(rows) / 2);
        }
        prefill.note_turn(3, 10, Duration::from_secs(10));
        for rows in [1, 3, 6].repeat(10) {
            prefill.note_turn(rows, 10, turn(rows));
        }
        assert_eq!((prefill.rows_beside(1), prefill.rows_beside(4)), (3, 4));
        // Turns that are all alike say nothing new of what a row costs.
        for _ in 0..1000 {
            prefill.note_turn(4, 10, turn(4));
        }
        assert_eq!(prefill.rows_beside(4), 4);
        // Where the weights are all that takes time, rows cost nothing, but for a piece of its own.
        for rows in [1, 8].repeat(500) {
            prefill.note_turn(rows, 10, Duration::from_millis(40));
        }
        assert_eq!(prefill.rows_beside(1), FIRST_PIECE_ROWS);
        // Where the rows are, there is room for none.
        for rows in [1, 8].repeat(500) {
            prefill.note_turn(rows, 10, Duration::from_millis(rows.into()));
        }
        assert_eq!((prefill.rows_beside(1), prefill.rows_beside(5)), (0, 1));
    }
}
