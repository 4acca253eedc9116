//! Rates: small pure estimators.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::time::Time;

const MICROS: u64 = 1_000_000;

/// Allows `per_second` units over time, and a burst.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    per_second: u64,
    /// In millionths of a unit; negative: debt.
    level: i128,
    capacity: i128,
    last: Time,
}

impl TokenBucket {
    pub(crate) fn new(per_second: u32, seconds: u32, now: Time) -> TokenBucket {
        let per_second = u64::from(per_second);
        TokenBucket::with_burst(per_second, per_second * u64::from(seconds), now)
    }

    /// Full bucket: `per_second` units over time, at least 1, and `burst` at once.
    pub fn with_burst(per_second: u64, burst: u64, now: Time) -> TokenBucket {
        let capacity = i128::from(burst) * i128::from(MICROS);
        TokenBucket {
            per_second: per_second.max(1),
            level: capacity,
            capacity,
            last: now,
        }
    }

    /// Takes one unit. `false` if the rate is exceeded.
    pub fn take(&mut self, now: Time) -> bool {
        self.refill(now);
        let has = self.has(1);
        if has {
            self.spend(1);
        }
        has
    }

    /// Adds the units since the last call. A clock that stands still or goes back adds none.
    pub fn refill(&mut self, now: Time) {
        let elapsed = now.0.saturating_sub(self.last.0);
        self.last = now.max(self.last);
        let earned = i128::from(elapsed) * i128::from(self.per_second);
        self.level = (self.level + earned).min(self.capacity);
    }

    /// Takes units even if they are not there, for costs that are known only afterwards.
    pub fn spend(&mut self, units: u64) {
        self.level -= i128::from(units) * i128::from(MICROS);
    }

    /// Returns whether `units` units are there; 0: whether there is no debt.
    pub fn has(&self, units: u64) -> bool {
        self.level >= i128::from(units) * i128::from(MICROS)
    }

    /// Returns whether no units are missing.
    pub fn is_full(&self) -> bool {
        self.level >= self.capacity
    }

    /// Time at which `units` units will be there, if none is taken; [`Time::ZERO`] if they are now.
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

/// A [`TokenBucket`] for each key, all with the same rate and burst, in bounded memory.
///
/// A key without a bucket in memory has a full one. So at `max` buckets, full ones are dropped for
/// a new key. If none is full, the fullest is dropped: its key gains the least.
#[derive(Clone, Debug)]
pub struct KeyedBuckets<K> {
    per_second: u64,
    burst: u64,
    max: usize,
    all: BTreeMap<K, TokenBucket>,
}

impl<K: Ord + Clone> KeyedBuckets<K> {
    /// Buckets like [`TokenBucket::with_burst`], at most `max` of them.
    pub fn new(per_second: u64, burst: u64, max: usize) -> KeyedBuckets<K> {
        KeyedBuckets {
            per_second,
            burst,
            max,
            all: BTreeMap::new(),
        }
    }

    /// Bucket of a key, refilled up to `now`.
    pub fn of(&mut self, key: &K, now: Time) -> &mut TokenBucket {
        if self.all.len() >= self.max && !self.all.contains_key(key) {
            self.make_room(now);
        }
        let full = || TokenBucket::with_burst(self.per_second, self.burst, now);
        let bucket = self.all.entry(key.clone()).or_insert_with(full);
        bucket.refill(now);
        bucket
    }

    /// Takes one unit of a key. `false` if its rate is exceeded.
    pub fn take(&mut self, key: &K, now: Time) -> bool {
        self.of(key, now).take(now)
    }

    /// Number of buckets in memory.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether no bucket is in memory.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn make_room(&mut self, now: Time) {
        self.all.retain(|_, bucket| {
            bucket.refill(now);
            !bucket.is_full()
        });
        if self.all.len() >= self.max {
            let fullest = self.all.iter().max_by_key(|(_, bucket)| bucket.level);
            if let Some(key) = fullest.map(|(key, _)| key.clone()) {
                self.all.remove(&key);
            }
        }
    }
}

/// Checks that a transfer makes progress: a minimum of bytes in each span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgressTimer {
    since: Time,
    bytes: u64,
}

impl ProgressTimer {
    /// Starts a span at `now`, after `bytes` bytes in total.
    pub(crate) fn new(now: Time, bytes: u64) -> ProgressTimer {
        ProgressTimer { since: now, bytes }
    }

    /// End of the present span.
    pub(crate) fn due(self, span: Duration) -> Time {
        self.since + span
    }

    /// Checks the present span, and starts the next one when it has ended. `true`: less than
    /// `min_rate` bytes per second, or none, came in the ended span.
    pub(crate) fn is_slow(&mut self, now: Time, bytes: u64, span: Duration, min_rate: u32) -> bool {
        if now < self.due(span) {
            return false;
        }
        let micros = Time::from(now.since(self.since)).0;
        let least = u64::from(min_rate).saturating_mul(micros) / MICROS;
        let passed = bytes.saturating_sub(self.bytes);
        *self = ProgressTimer::new(now, bytes);
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
        // A clock that stands still or goes back adds no units.
        assert!(!bucket.take(later));
    }

    #[test]
    fn each_key_has_its_own_rate() {
        let mut buckets = KeyedBuckets::new(1, 3, 8);
        for key in 0..4 {
            let taken = (0..100).filter(|_| buckets.take(&key, Time::ZERO)).count();
            assert_eq!(taken, 3);
        }
        assert!(!buckets.take(&0, Time::from_millis(999)));
        assert!(buckets.take(&0, Time::from_millis(1000)));
    }

    #[test]
    fn buckets_that_are_full_again_make_room_for_new_keys() {
        let mut buckets = KeyedBuckets::new(4, 256, 100);
        for key in 0..10_000u64 {
            // 40 new keys a second, each of which takes one unit: 10 of them are not yet full
            // again.
            assert!(buckets.take(&key, Time::from_millis(key * 25)));
            assert!(buckets.len() <= 100);
        }
        let late = Time::from_millis(1_000_000);
        (0..100).for_each(|key| assert!(buckets.take(&key, late)));
        assert_eq!(buckets.len(), 100);
        let later = Time::from_millis(1_000_250);
        assert!(buckets.take(&100, later));
        assert_eq!(buckets.len(), 1);
    }

    #[test]
    fn many_keys_neither_grow_the_map_nor_reset_the_largest_debt() {
        let mut buckets = KeyedBuckets::new(1, 3, 4);
        (0..4).for_each(|n| assert_eq!(buckets.take(&0, Time::ZERO), n < 3));
        for key in 1..1000 {
            assert!(buckets.take(&key, Time::ZERO));
            assert!(buckets.len() <= 4);
        }
        assert!(!buckets.take(&0, Time::ZERO));
    }
}
