//! Statistics of measured times. Pure.

use std::time::Duration;

use crate::frames::HopTimes;

/// Times of one hop's decode steps, in microseconds.
#[derive(Debug, Default)]
pub(crate) struct HopClock {
    compute: Vec<u32>,
    queue: Vec<u32>,
    overhead: Vec<u32>,
}

impl HopClock {
    pub(crate) fn record(&mut self, round_trip: Duration, compute_us: u32, queue_us: u32) {
        let round_trip = u32::try_from(round_trip.as_micros()).unwrap_or(u32::MAX);
        self.compute.push(compute_us);
        self.queue.push(queue_us);
        self.overhead.push(round_trip.saturating_sub(compute_us));
    }

    pub(crate) fn summary(&self) -> HopTimes {
        HopTimes {
            steps: self.compute.len() as u64,
            compute_us_p50: percentile(self.compute.iter().copied(), 50),
            queue_us_p50: percentile(self.queue.iter().copied(), 50),
            overhead_us_p50: percentile(self.overhead.iter().copied(), 50),
            overhead_us_p95: percentile(self.overhead.iter().copied(), 95),
        }
    }
}

/// Nearest-rank percentile; 0 for no values.
pub(crate) fn percentile<T: Copy + Default + Ord>(
    values: impl IntoIterator<Item = T>,
    percent: usize,
) -> T {
    let mut sorted: Vec<T> = values.into_iter().collect();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

/// Whole milliseconds, the unit of the flight record.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The median; of an even number, the longer of the two middle values.
pub(crate) fn median(durations: impl Iterator<Item = Duration>) -> Option<Duration> {
    let mut sorted: Vec<Duration> = durations.collect();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_follow_the_nearest_rank() {
        assert_eq!(percentile([0u32; 0], 50), 0);
        assert_eq!(percentile([7], 95), 7);
        let values = || (1..=100).rev();
        assert_eq!(
            (percentile(values(), 50), percentile(values(), 95)),
            (50, 95)
        );
    }

    #[test]
    fn overhead_is_the_round_trip_less_compute() {
        let mut clock = HopClock::default();
        clock.record(Duration::from_micros(500), 300, 20);
        // A host that claims more than the whole round trip cannot make it negative.
        clock.record(Duration::from_micros(100), 900, 0);
        let times = clock.summary();
        assert_eq!(
            (times.steps, times.overhead_us_p50, times.overhead_us_p95),
            (2, 0, 200)
        );
    }
}
