//! Length of prefill chunks (*pieces* in shard-host.md), from the measured speed of the engine.

use std::time::Duration;

use crate::plan::MAX_TURN_ROWS;

/// Minimum rows of a chunk: below this the engine reads the weights for too few rows.
const MIN_CHUNK_ROWS: u32 = 8;
/// Minimum rows of a chunk while other callers decode: they wait for it.
const MIN_ROWS_BETWEEN: u32 = 2;
/// Rows beside the decode steps of other callers may lengthen their batch by this share.
const MIXED_SHARE: f64 = 1.0 / 3.0;
/// Number of such rows before the first measurement.
const FIRST_ROWS_BESIDE: u32 = 4;
/// Rows of the first chunk, before the first measurement.
const FIRST_CHUNK_ROWS: u32 = 32;

/// Measures the time per prefill row, and computes how many rows fit the time limit of a chunk.
/// While only its own caller decodes, the limit is the configured delay of a decode step. While
/// other callers decode, it is a share of the time of a decode batch.
#[derive(Debug, Default)]
pub(crate) struct ChunkedPrefill {
    target_us: f64,
    decode_us: MovingAverage,
    us_per_row: MovingAverage,
    /// For short chunks, whose rows take longer.
    us_per_row_between: MovingAverage,
    /// Batches with decode steps, with or without a chunk.
    turns: LinearFit,
}

/// Time of a batch per layer as a linear function of its rows. Fitted over the last batches; the
/// newest has a weight of 1/32.
#[derive(Debug, Default)]
struct LinearFit {
    noted: bool,
    rows: f64,
    us: f64,
    rows_squared: f64,
    rows_by_us: f64,
    /// Marginal cost of one more row (us). Updated only when batch sizes differ.
    slope: Option<f64>,
}

/// A measurement counts as at most this multiple of the expected time.
const OUTLIER: f64 = 4.0;

impl LinearFit {
    fn note(&mut self, rows: u32, us: f64) {
        let rows = f64::from(rows);
        // A batch during which the machine was busy elsewhere says nothing about the cost of rows.
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

    /// Returns how many rows, beside `beside` others, lengthen a batch by `share`.
    fn rows_within(&self, share: f64, beside: u32) -> Option<u32> {
        let slope = self.slope?;
        let turn = self.us + slope * (f64::from(beside) - self.rows);
        // The cast saturates: if rows cost nothing, any number fits.
        Some((turn.max(0.0) * share / slope.max(f64::MIN_POSITIVE)) as u32)
    }
}

/// Moving average of a time. The newest value has a weight of 1/4, so that one slow batch changes
/// little and a changed load shows within a few batches.
#[derive(Debug, Clone, Copy, Default)]
struct MovingAverage(Option<f64>);

impl MovingAverage {
    fn note(&mut self, now: f64) {
        self.0 = Some(self.0.map_or(now, |old| old + (now - old) / 4.0));
    }

    /// Records the time per row of a batch.
    fn note_rows(&mut self, rows: u32, took: Duration) {
        if rows > 0 {
            self.note(took.as_micros() as f64 / f64::from(rows));
        }
    }
}

impl ChunkedPrefill {
    /// Chunks shall take about `target`.
    pub(crate) fn new(target: Duration) -> Self {
        Self {
            target_us: target.as_micros() as f64,
            ..Self::default()
        }
    }

    /// Rows of the next chunk while no other caller decodes.
    pub(crate) fn chunk_rows(&self) -> u32 {
        // The cast saturates; an engine that takes no time gets the largest chunk.
        match self.us_per_row.0 {
            None => FIRST_CHUNK_ROWS,
            Some(us) => ((self.target_us / us) as u32).clamp(MIN_CHUNK_ROWS, MAX_TURN_ROWS),
        }
    }

    /// Rows of a chunk between decode batches of other callers: it takes as long as such a batch.
    pub(crate) fn rows_between(&self) -> u32 {
        let alone = self.chunk_rows();
        let us_per_row = self.us_per_row_between.0.or(self.us_per_row.0);
        match (self.decode_us.0, us_per_row) {
            (Some(turn), Some(us)) => ((turn / us) as u32).clamp(MIN_ROWS_BETWEEN, alone),
            _ => MIN_CHUNK_ROWS.min(alone),
        }
    }

    /// Rows that may join `short` rows of decode steps: they lengthen the batch by a third.
    pub(crate) fn rows_beside(&self, short: u32) -> u32 {
        let rows = self.turns.rows_within(MIXED_SHARE, short);
        rows.unwrap_or(FIRST_ROWS_BESIDE).min(self.chunk_rows())
    }

    /// Records a batch with a chunk while no other caller decoded.
    pub(crate) fn note(&mut self, rows: u32, took: Duration) {
        self.us_per_row.note_rows(rows, took);
    }

    /// Records a chunk between decode batches of other callers.
    pub(crate) fn note_between(&mut self, rows: u32, took: Duration) {
        self.us_per_row_between.note_rows(rows, took);
    }

    /// Records a batch with decode steps, with or without a chunk. All its rows went through the
    /// same `layers` layers.
    pub(crate) fn note_turn(&mut self, rows: u32, layers: u32, took: Duration) {
        let us = took.as_micros() as f64 / f64::from(layers.max(1));
        self.turns.note(rows, us);
    }

    /// Average time of a decode batch; zero before the first.
    pub(crate) fn decode_turn(&self) -> Duration {
        Duration::from_micros(self.decode_us.0.unwrap_or_default() as u64)
    }

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
        assert_eq!(prefill.chunk_rows(), FIRST_CHUNK_ROWS);
        for _ in 0..40 {
            prefill.note(10, Duration::from_millis(5));
        }
        assert_eq!(prefill.chunk_rows(), 40);
        for _ in 0..40 {
            prefill.note(8, Duration::from_secs(8));
        }
        assert_eq!(prefill.chunk_rows(), MIN_CHUNK_ROWS);
        let mut instant = ChunkedPrefill::new(Duration::from_millis(20));
        instant.note(8, Duration::ZERO);
        assert_eq!(instant.chunk_rows(), MAX_TURN_ROWS);
    }

    #[test]
    fn a_chunk_between_other_callers_decode_batches_takes_as_long_as_one() {
        let mut prefill = ChunkedPrefill::new(Duration::from_millis(20));
        assert_eq!(prefill.rows_between(), MIN_CHUNK_ROWS);
        for _ in 0..40 {
            prefill.note(20, Duration::from_millis(10));
            prefill.note_decode(Duration::from_millis(3));
        }
        assert_eq!((prefill.chunk_rows(), prefill.rows_between()), (40, 6));
        // Rows of short chunks take longer.
        for _ in 0..40 {
            prefill.note_between(6, Duration::from_millis(6));
        }
        assert_eq!((prefill.chunk_rows(), prefill.rows_between()), (40, 3));
        for _ in 0..40 {
            prefill.note_decode(Duration::from_micros(100));
        }
        assert_eq!(prefill.rows_between(), MIN_ROWS_BETWEEN);
        // A slow decode batch does not raise the limit of a chunk.
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
        // Through other layers the cost per layer is the same, and one slow batch counts for
        // little.
        for rows in [1, 3, 6].repeat(100) {
            prefill.note_turn(rows, 5, turn(rows) / 2);
        }
        prefill.note_turn(3, 10, Duration::from_secs(10));
        for rows in [1, 3, 6].repeat(10) {
            prefill.note_turn(rows, 10, turn(rows));
        }
        assert_eq!((prefill.rows_beside(1), prefill.rows_beside(4)), (3, 4));
        // Batches of equal size do not change the known cost of a row.
        for _ in 0..1000 {
            prefill.note_turn(4, 10, turn(4));
        }
        assert_eq!(prefill.rows_beside(4), 4);
        // If only the weights take time, rows cost nothing; the limit is that of a chunk on its
        // own.
        for rows in [1, 8].repeat(500) {
            prefill.note_turn(rows, 10, Duration::from_millis(40));
        }
        assert_eq!(prefill.rows_beside(1), FIRST_CHUNK_ROWS);
        // If only the rows take time, there is no room for another.
        for rows in [1, 8].repeat(500) {
            prefill.note_turn(rows, 10, Duration::from_millis(rows.into()));
        }
        assert_eq!((prefill.rows_beside(1), prefill.rows_beside(5)), (0, 1));
    }
}
