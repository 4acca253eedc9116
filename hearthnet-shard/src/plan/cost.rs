//! Cost of a batch, learnt from the measured ones, and the sizes of batches that follow from it.

use std::time::Duration;

/// Limit of rows per batch: bounds the batch's memory.
pub(crate) const MAX_TURN_ROWS: u32 = 512;
/// Minimum rows of a batch with prefill while no other caller decodes: below this the engine reads
/// the weights for too few rows.
const MIN_CHUNK_ROWS: u32 = 8;
/// Rows of the first such batch, before the first measurement.
const FIRST_CHUNK_ROWS: u32 = 32;
/// Minimum rows of a batch while other callers decode, before the first measurement.
const FIRST_ROWS_BESIDE: u32 = 4;
/// A batch with prefill is at most this many times as large as usual, so that a cost that was learnt
/// from small batches is not trusted for a very large one.
const MAX_GROWTH: f64 = 16.0;
/// While other callers decode, further rows may lengthen a decode batch by this share.
const MIXED_SHARE: f64 = 1.0 / 3.0;
/// Batches that an average covers.
const WINDOW: u32 = 32;
/// A measurement counts as at most this multiple of the expected time: a batch during which the
/// machine was busy elsewhere says nothing about the cost of rows.
const OUTLIER: f64 = 4.0;
/// A row costs at least this share of the average time per row. If the true cost is lower, the share
/// still lets batches grow, and larger ones show it.
const MIN_SLOPE: f64 = 1.0 / 32.0;

/// Time of a batch per layer as a linear function of its rows, `a + b * rows`: the time to read the
/// weights, and the time per row. Fitted by least squares over the last batches.
///
/// All rows of a batch are alike to the engine. It runs them in one pass over the layers, whichever
/// sequences they belong to, so a row of a prompt costs a decode batch `b`, and on its own `a + b`.
#[derive(Debug)]
pub(crate) struct BatchCost {
    /// Time of a batch with prefill while no other caller decodes, in microseconds.
    target_us: f64,
    /// Number of measured batches, up to [`WINDOW`].
    measured: u32,
    // Averages over the last batches.
    rows: f64,
    us: f64,
    rows_squared: f64,
    rows_by_us: f64,
    /// Time of one more row (us). Updated only when batch sizes differ.
    slope: Option<f64>,
}

impl BatchCost {
    /// While no other caller decodes, a batch with prefill shall take about `target`.
    pub(crate) fn new(target: Duration) -> Self {
        Self {
            target_us: target.as_micros() as f64,
            measured: 0,
            rows: 0.0,
            us: 0.0,
            rows_squared: 0.0,
            rows_by_us: 0.0,
            slope: None,
        }
    }

    /// Records a batch whose rows all went through `layers` layers.
    pub(crate) fn note(&mut self, rows: u32, layers: u32, took: Duration) {
        let rows = f64::from(rows);
        let us = took.as_micros() as f64 / f64::from(layers.max(1));
        let us = match self.measured {
            0 => us,
            _ => us.min((self.us_of(rows).max(self.us) * OUTLIER).max(1.0)),
        };
        self.measured = (self.measured + 1).min(WINDOW);
        let weight = 1.0 / f64::from(self.measured);
        self.rows += (rows - self.rows) * weight;
        self.us += (us - self.us) * weight;
        self.rows_squared += (rows * rows - self.rows_squared) * weight;
        self.rows_by_us += (rows * us - self.rows_by_us) * weight;
        let spread = self.rows_squared - self.rows * self.rows;
        if spread > 0.1 {
            self.slope = Some((self.rows_by_us - self.rows * self.us) / spread);
        }
    }

    /// Expected time of a batch of `rows` rows through `layers` layers; zero before the first
    /// measurement.
    pub(crate) fn time(&self, rows: u32, layers: u32) -> Duration {
        let us = self.us_of(f64::from(rows)) * f64::from(layers);
        Duration::from_micros(us as u64)
    }

    /// Rows of a batch with prefill, through `layers` layers, while no other caller decodes.
    pub(super) fn chunk_rows(&self, layers: u32) -> u32 {
        if self.measured == 0 {
            return FIRST_CHUNK_ROWS;
        }
        let usual = self.rows_squared.sqrt();
        let most = (usual * MAX_GROWTH).max(f64::from(FIRST_CHUNK_ROWS));
        let rows = self.rows_in(self.target_us / f64::from(layers.max(1)));
        (rows.min(most) as u32).clamp(MIN_CHUNK_ROWS, MAX_TURN_ROWS)
    }

    /// Rows of a batch that takes a third longer than one of `rows` rows.
    pub(super) fn rows_beside(&self, rows: u32) -> u32 {
        if self.measured == 0 {
            return rows.max(FIRST_ROWS_BESIDE);
        }
        let us = self.us_of(f64::from(rows)) * (1.0 + MIXED_SHARE);
        (self.rows_in(us) as u32).clamp(rows, MAX_TURN_ROWS.max(rows))
    }

    /// Time of one more row. As long as all batches have had the same size, it is the time per row.
    fn slope(&self) -> f64 {
        let average = self.us / self.rows.max(1.0);
        match self.slope {
            Some(slope) => slope.max(average * MIN_SLOPE),
            None => average,
        }
    }

    fn us_of(&self, rows: f64) -> f64 {
        (self.us + self.slope() * (rows - self.rows)).max(0.0)
    }

    /// Inverse of [`Self::us_of`]. If rows cost nothing, any number fits.
    fn rows_in(&self, us: f64) -> f64 {
        self.rows + (us - self.us) / self.slope().max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(target_ms: u64) -> BatchCost {
        BatchCost::new(Duration::from_millis(target_ms))
    }

    #[test]
    fn a_batch_with_prefill_takes_about_its_time() {
        let mut cost = of(20);
        assert_eq!(cost.chunk_rows(1), FIRST_CHUNK_ROWS);
        for _ in 0..40 {
            cost.note(10, 1, Duration::from_millis(5));
        }
        assert_eq!(cost.chunk_rows(1), 40);
        // Twice the layers take twice the time.
        assert_eq!(cost.chunk_rows(2), 20);
        for _ in 0..40 {
            cost.note(8, 1, Duration::from_secs(8));
        }
        assert_eq!(cost.chunk_rows(1), MIN_CHUNK_ROWS);
        let mut instant = of(20);
        for _ in 0..100 {
            instant.note(instant.chunk_rows(1), 1, Duration::ZERO);
        }
        assert_eq!(instant.chunk_rows(1), MAX_TURN_ROWS);
    }

    #[test]
    fn weights_and_rows_are_told_apart() {
        let mut cost = of(20);
        let time = |rows: u32| Duration::from_micros(4000 + 500 * u64::from(rows));
        for _ in 0..100 {
            cost.note(1, 10, time(1));
        }
        // The first chunk shows what a row costs beyond the weights.
        let first = cost.chunk_rows(10);
        assert_eq!(first, MIN_CHUNK_ROWS);
        cost.note(first, 10, time(first));
        assert_eq!(cost.chunk_rows(10), 32);
        assert!(cost.time(4, 10).abs_diff(time(4)) < Duration::from_micros(50));
    }

    #[test]
    fn a_cost_learnt_from_small_batches_is_not_trusted_for_a_very_large_one() {
        let mut cost = of(1000);
        for rows in [1, 2].repeat(50) {
            cost.note(rows, 1, Duration::from_millis(1));
        }
        assert_eq!(cost.chunk_rows(1), FIRST_CHUNK_ROWS);
        cost.note(32, 1, Duration::from_millis(1));
        assert!((64..=128).contains(&cost.chunk_rows(1)));
    }

    #[test]
    fn rows_beside_others_decode_steps_make_their_batch_a_third_longer() {
        let mut cost = of(20);
        assert_eq!((cost.rows_beside(1), cost.rows_beside(5)), (4, 5));
        let time = |rows: u32| Duration::from_micros(850 + 100 * u64::from(rows));
        for rows in [1, 3, 6].repeat(100) {
            cost.note(rows, 10, time(rows));
        }
        // 950 us for one row, 1250 us for four.
        assert_eq!((cost.rows_beside(1), cost.rows_beside(4)), (4, 8));
        // Through other layers the cost per layer is the same, and one slow batch counts for
        // little.
        for rows in [1, 3, 6].repeat(100) {
            cost.note(rows, 5, time(rows) / 2);
        }
        cost.note(3, 10, Duration::from_secs(10));
        for rows in [1, 3, 6].repeat(30) {
            cost.note(rows, 10, time(rows));
        }
        assert_eq!((cost.rows_beside(1), cost.rows_beside(4)), (4, 8));
        // Batches of equal size do not change the known cost of a row.
        for _ in 0..1000 {
            cost.note(4, 10, time(4));
        }
        assert_eq!(cost.rows_beside(4), 8);
        // If only the rows take time, there is no room for another.
        for rows in [1, 8].repeat(500) {
            cost.note(rows, 10, Duration::from_millis(rows.into()));
        }
        assert_eq!((cost.rows_beside(1), cost.rows_beside(5)), (1, 6));
        // If only the weights take time, rows cost nothing.
        for rows in [1, 8].repeat(500) {
            cost.note(rows, 10, Duration::from_millis(40));
        }
        assert!(cost.rows_beside(1) > 20);
    }
}
