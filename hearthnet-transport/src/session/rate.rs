//! Rates and round trips: small pure estimators.

use std::time::Duration;

use crate::time::Time;

const MICROS: u64 = 1_000_000;

/// Allows `per_second` units over time, and saves up a burst of them.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    per_second: u64,
    /// In millionths of a unit; below zero: in debt.
    level: i128,
    capacity: i128,
    last: Time,
}

impl TokenBucket {
    pub(crate) fn new(per_second: u32, seconds: u32, now: Time) -> TokenBucket {
        let per_second = u64::from(per_second);
        TokenBucket::with_burst(per_second, per_second * u64::from(seconds), now)
    }

    /// A full bucket: `per_second` units over time, at least 1, and `burst` at once.
    pub fn with_burst(per_second: u64, burst: u64, now: Time) -> TokenBucket {
        let capacity = i128::from(burst) * i128::from(MICROS);
        TokenBucket {
            per_second: per_second.max(1),
            level: capacity,
            capacity,
            last: now,
        }
    }

    /// Takes one unit, if one more is within the rate.
    pub fn take(&mut self, now: Time) -> bool {
        self.refill(now);
        let has = self.has(1);
        if has {
            self.spend(1);
        }
        has
    }

    /// Adds what was earned since the last time. A clock that stands still or goes back earns
    /// nothing.
    pub fn refill(&mut self, now: Time) {
        let elapsed = now.0.saturating_sub(self.last.0);
        self.last = now.max(self.last);
        let earned = i128::from(elapsed) * i128::from(self.per_second);
        self.level = (self.level + earned).min(self.capacity);
    }

    /// Takes units that may not be there, for what is known only afterwards.
    pub fn spend(&mut self, units: u64) {
        self.level -= i128::from(units) * i128::from(MICROS);
    }

    /// Whether there are so many units; 0: whether it is out of debt.
    pub fn has(&self, units: u64) -> bool {
        self.level >= i128::from(units) * i128::from(MICROS)
    }

    /// Whether nothing was taken of late.
    pub fn is_full(&self) -> bool {
        self.level >= self.capacity
    }

    /// When there will be so many units, if nothing is taken; [`Time::ZERO`]: there are.
    pub fn ready_at(&self, units: u64) -> Time {
        let lacking = i128::from(units) * i128::from(MICROS) - self.level;
        if lacking <= 0 {
            return Time::ZERO;
        }
        let micros = lacking.unsigned_abs().div_ceil(u128::from(self.per_second));
        Time(
            self.last
                .0
                .saturating_add(u64::try_from(micros).unwrap_or(u64::MAX)),
        )
    }
}

/// Smoothed round-trip time, as RFC 6298 computes it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rtt {
    smoothed: Option<u64>,
    least: Option<u64>,
}

impl Rtt {
    pub(crate) fn sample(&mut self, micros: u64) {
        self.least = Some(self.least.map_or(micros, |least| least.min(micros)));
        self.smoothed = Some(match self.smoothed {
            None => micros,
            Some(smoothed) => smoothed - smoothed / 8 + micros / 8,
        });
    }

    pub(crate) fn smoothed(self) -> Option<u64> {
        self.smoothed
    }

    pub(crate) fn least(self) -> Option<u64> {
        self.least
    }
}

/// Whether something that is under way goes on fast enough: so many bytes in each span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    since: Time,
    bytes: u64,
}

impl Pace {
    /// From `now` on, when `bytes` had passed in all.
    pub(crate) fn new(now: Time, bytes: u64) -> Pace {
        Pace { since: now, bytes }
    }

    /// When the span ends that has begun.
    pub(crate) fn due(self, span: Duration) -> Time {
        self.since + span
    }

    /// Looks at it as of now, and begins the next span when one has ended. `true`: less than
    /// `min_rate` bytes per second passed in it, or none.
    pub(crate) fn is_slow(&mut self, now: Time, bytes: u64, span: Duration, min_rate: u32) -> bool {
        if now < self.due(span) {
            return false;
        }
        let micros = Time::from(now.since(self.since)).0;
        let least = u64::from(min_rate).saturating_mul(micros) / MICROS;
        let passed = bytes.saturating_sub(self.bytes);
        *self = Pace::new(now, bytes);
        passed < least.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_allows_its_burst_and_then_its_rate() {
        let mut bucket = TokenBucket::new(10, 2, Time::ZERO);
        let burst = (0..100).filter(|_| bucket.take(Time::ZERO)).count();
        assert_eq!(burst, 20);
        let later = Time::ZERO + Duration::from_millis(500);
        assert_eq!((0..100).filter(|_| bucket.take(later)).count(), 5);
        let much_later = Time::ZERO + Duration::from_secs(1_000_000);
        assert_eq!((0..100).filter(|_| bucket.take(much_later)).count(), 20);
        // A clock that stands still or goes back earns nothing.
        assert!(!bucket.take(later));
    }

    #[test]
    fn the_round_trip_estimate_follows_its_samples() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.smoothed(), None);
        rtt.sample(800);
        assert_eq!(rtt.smoothed(), Some(800));
        for _ in 0..200 {
            rtt.sample(400);
        }
        let smoothed = rtt.smoothed().unwrap();
        assert!((395..=410).contains(&smoothed), "{smoothed}");
        assert_eq!(rtt.least(), Some(400));
    }
}
