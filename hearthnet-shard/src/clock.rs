//! Monotonic time, as an argument.

use std::time::{Duration, Instant};

/// Time since a start that does not change.
pub(crate) trait Clock: Send + Sync {
    fn now(&self) -> Duration;
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
}
