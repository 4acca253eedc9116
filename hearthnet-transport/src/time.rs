//! Time as an argument: the protocol core reads no clock.

use std::ops::Add;
use std::time::Duration;

/// Microseconds since the connection was made.
///
/// A `u64` of microseconds lasts 584,000 years; additions saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The time at which the connection was made.
    pub const ZERO: Time = Time(0);
    /// Later than every deadline.
    pub(crate) const NEVER: Time = Time(u64::MAX);

    pub fn from_millis(ms: u64) -> Time {
        Time(ms.saturating_mul(1000))
    }

    /// Duration since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl From<Duration> for Time {
    fn from(elapsed: Duration) -> Time {
        Time(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, after: Duration) -> Time {
        Time(self.0.saturating_add(Time::from(after).0))
    }
}
