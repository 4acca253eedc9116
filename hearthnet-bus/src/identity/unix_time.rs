//! System clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Unix time in ms by the system clock; 0 before 1970. Pure code takes the time as an argument.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}
