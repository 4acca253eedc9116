//! Time, as an argument.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Clock of a host. Tests set it by hand.
pub(crate) trait Clock: Send + Sync {
    /// Monotonic time since a fixed start.
    fn now(&self) -> Duration;

    /// Unix time in seconds.
    fn unix_secs(&self) -> u64;
}

/// System's monotonic clock, counted from its creation.
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
