//! Time, as an argument.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time.
pub(crate) trait Clock: Send + Sync {
    /// Monotonic: since a start that does not change.
    fn now(&self) -> Duration;

    /// Of day: seconds of Unix time.
    fn unix_secs(&self) -> u64;
}

/// The system's monotonic clock, counted from when this was made.
#[derive(Debug)]
pub(crate) struct SystemClock(Instant);

impl SystemClock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn unix_secs(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs())
    }
}
