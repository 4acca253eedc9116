//! Time, as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Clock of a host. Tests set it by hand.
pub(crate) trait Clock: Send + Sync {
    /// Monotonic time since a fixed start.
    fn now(&self) -> Duration;
}

/// System's monotonic clock, counted from its creation. In a simulation, the virtual one.
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
