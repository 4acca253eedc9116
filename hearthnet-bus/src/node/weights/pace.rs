//! Pace of the transfer while this node answers or computes: a rate in bytes per second, from the
//! best rate that was measured while it did not.

use std::collections::VecDeque;
use std::time::Duration;

use hearthnet_transport::Time;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Lowest rate while the node is busy, in bytes per second.
const MIN_RATE: u64 = 1024 * 1024;
/// Assumed best rate before any was measured, in bytes per second.
const ASSUMED_BEST: u64 = 8 * 1024 * 1024;
/// Number of measured seconds that are kept.
const SECONDS: usize = 60;
/// Unused time that may be caught up: timers are 1 ms late on average.
const SLACK: Duration = Duration::from_millis(2);

/// Rates of the last seconds, and the time up to which the pace is used up. Pure.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Bytes of the last seconds in which the node was not busy and bytes passed.
    measured: VecDeque<u64>,
    /// The second that is being measured, with its bytes; `None` if the node was busy in it.
    second: u64,
    bytes: Option<u64>,
    /// Time at which the bytes passed so far have had their share of the pace.
    free_at: Time,
}

impl Pace {
    /// Counts `bytes` bytes that are about to pass. Returns how long they have to wait.
    pub(super) fn reserve(&mut self, bytes: usize, busy: bool, now: Time) -> Duration {
        let bytes = bytes as u64;
        let second = now.0 / 1_000_000;
        if second != self.second {
            if let Some(bytes) = self.bytes.filter(|bytes| *bytes > 0) {
                self.measured.push_back(bytes);
                while self.measured.len() > SECONDS {
                    self.measured.pop_front();
                }
            }
            (self.second, self.bytes) = (second, Some(0));
        }
        if !busy {
            self.bytes = self.bytes.map(|sum| sum.saturating_add(bytes));
            self.free_at = now;
            return Duration::ZERO;
        }
        // A second in which the pace was limited says nothing about the link.
        self.bytes = None;
        let micros = bytes.saturating_mul(1_000_000) / self.rate();
        let earliest = Time::from(now.since(Time::from(SLACK)));
        self.free_at = self.free_at.max(earliest) + Duration::from_micros(micros);
        self.free_at.since(now)
    }

    /// Bytes per second while the node is busy: half of the best measured rate.
    fn rate(&self) -> u64 {
        let best = self.measured.iter().max().copied();
        (best.unwrap_or(ASSUMED_BEST) / 2).max(MIN_RATE)
    }
}

/// [`Pace`] with a clock, shared by all connections of a direction.
#[derive(Debug)]
pub(super) struct Pacer {
    begin: Instant,
    pace: Mutex<Pace>,
}

impl Pacer {
    pub(super) fn new() -> Pacer {
        Pacer {
            begin: Instant::now(),
            pace: Mutex::default(),
        }
    }

    /// Waits until `bytes` bytes may pass.
    pub(super) async fn wait(&self, bytes: usize, busy: bool) {
        let now = Time::from(self.begin.elapsed());
        let wait = self.pace.lock().reserve(bytes, busy, now);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1024 * 1024;

    /// Sends parts of 16 KiB for a second from `begin` on, and returns the number of bytes.
    fn busy_second(pace: &mut Pace, begin: Duration) -> usize {
        let (mut now, mut sent) = (begin, 0);
        while now < begin + Duration::from_secs(1) {
            now += pace.reserve(16 * 1024, true, Time::from(now));
            sent += 16 * 1024;
        }
        sent
    }

    fn about(bytes: usize, expected: usize) -> bool {
        bytes.abs_diff(expected) <= expected / 20
    }

    #[test]
    fn a_node_that_is_not_busy_never_waits() {
        let mut pace = Pace::default();
        for n in 0..1000 {
            let wait = pace.reserve(MIB, false, Time::from_millis(n));
            assert_eq!(wait, Duration::ZERO);
        }
    }

    #[test]
    fn a_busy_node_sends_at_half_of_the_best_measured_rate() {
        let mut pace = Pace::default();
        let at = Duration::from_secs;
        assert!(about(busy_second(&mut pace, at(0)), 4 * MIB), "assumed");
        // Seconds with 10, 30 and 20 MiB.
        for (second, bytes) in [(2, 10), (3, 30), (4, 20), (5, 0)] {
            pace.reserve(bytes * MIB, false, at(second).into());
        }
        assert!(about(busy_second(&mut pace, at(6)), 15 * MIB));
        // The rate of busy seconds is not taken for that of the link.
        for second in 7..200 {
            assert!(about(busy_second(&mut pace, at(second)), 15 * MIB));
        }
        // The best second is forgotten after 60 later ones.
        for second in 200..262 {
            pace.reserve(2 * MIB, false, at(second).into());
        }
        // Never slower than 1 MiB/s.
        assert!(about(busy_second(&mut pace, at(263)), MIB));
        for second in 264..326 {
            pace.reserve(1000, false, at(second).into());
        }
        assert!(about(busy_second(&mut pace, at(327)), MIB));
    }

    #[test]
    fn unused_time_gives_no_burst() {
        let mut pace = Pace::default();
        pace.reserve(16 * 1024, true, Time::from_millis(0));
        let hour = Time::from_millis(3_600_000);
        // 2 ms at 4 MiB/s are 8 KiB, so the first part of 16 KiB waits already.
        assert!(pace.reserve(16 * 1024, true, hour) > Duration::ZERO);
        // A clock that stands still makes the waits longer, one after the other.
        let waits: Vec<_> = (0..9).map(|_| pace.reserve(4096, true, hour)).collect();
        assert!(waits.is_sorted() && waits[0] < waits[8]);
    }
}
