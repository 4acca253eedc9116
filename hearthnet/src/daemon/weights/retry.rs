//! Pauses between attempts at something that fails.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Pause after the first failure. Each further one doubles it.
const FIRST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(600);

/// Failures in a row.
#[derive(Default, Debug)]
pub(super) struct Retry {
    failures: u32,
    /// Time of the next attempt.
    at: Option<Instant>,
    /// Last reason.
    why: String,
}

impl Retry {
    /// Records a failure. One long after the last attempt counts as the first. Returns the pause, if
    /// the reason is not that of the failure before.
    pub(super) fn failed(&mut self, now: Instant, why: String) -> Option<Duration> {
        let since = |at: Instant| now.saturating_duration_since(at);
        if self.at.is_some_and(|at| since(at) >= LONGEST) {
            // The last attempt succeeded for a while.
            *self = Self::default();
        }
        let times = 2_u32.saturating_pow(self.failures);
        let pause = FIRST.saturating_mul(times).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        self.at = Some(now + pause);
        let is_new = self.why != why;
        self.why = why;
        is_new.then_some(pause)
    }

    /// Lets the next attempt be made at once.
    pub(super) fn hurry(&mut self) {
        self.failures = 0;
        self.at = None;
    }

    /// Time of the next attempt; `None`: at once.
    pub(super) fn at(&self) -> Option<Instant> {
        self.at
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }
}

/// Resolves at a time; never without one.
pub(super) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_ten_minutes_and_a_reason_is_told_once() {
        let (mut retry, mut now) = (Retry::default(), Instant::now());
        assert!(retry.is_due(now));
        assert_eq!(retry.failed(now, "a".to_owned()), Some(FIRST));
        for seconds in [10, 20, 40, 80, 160, 320, 600, 600] {
            now = retry.at().unwrap();
            assert!(retry.is_due(now));
            assert_eq!(retry.failed(now, "a".to_owned()), None);
            let pause = Duration::from_secs(seconds);
            assert_eq!(retry.at(), Some(now + pause));
            assert!(!retry.is_due(now + pause - Duration::from_millis(1)));
        }
        assert_eq!(retry.failed(now, "b".to_owned()), Some(LONGEST));
        retry.hurry();
        assert!(retry.is_due(now));
        assert_eq!(retry.failed(now, "c".to_owned()), Some(FIRST));
        // Long after the attempt that followed.
        now = retry.at().unwrap() + LONGEST;
        assert_eq!(retry.failed(now, "c".to_owned()), Some(FIRST));
    }
}
