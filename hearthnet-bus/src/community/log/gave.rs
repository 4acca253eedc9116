//! Contributions of a member, by its own count.
//!
//! The counts are not proved. Nothing but their display depends on them.

use serde::{Deserialize, Serialize};

use crate::identity::cbor::MAX_NUMBER;

/// Milliseconds of a UTC day.
const DAY_MS: u64 = 86_400_000;
/// Minutes of a UTC day.
const DAY_MINUTES: u64 = 24 * 60;

/// Counters of a member since its admission (`node.gave`). Part of the state hash, so its fields
/// stand in canonical order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gave {
    /// Last UTC day that the counters include, in days since 1970.
    pub day: u64,
    /// Rows of other members' chats that it computed, each as the share of the model's layers that
    /// the row passed: a token through 8 of 32 layers counts 1/4. The sum is rounded down.
    pub tokens: u64,
    /// Time in which it served layers.
    pub minutes: u64,
    /// Weights that it sent to other members.
    pub weights_bytes: u64,
}

/// UTC day of a Unix time.
pub fn day_of(time_ms: u64) -> u64 {
    time_ms / DAY_MS
}

impl Gave {
    /// Checks ranges. The error is the rule that is broken.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let numbers = [self.day, self.tokens, self.minutes, self.weights_bytes];
        match numbers.iter().all(|number| *number <= MAX_NUMBER) {
            true => Ok(()),
            false => Err("a counter of what a node gave is out of its range"),
        }
    }

    /// Returns whether an event with these counters has an effect: no counter falls, one rises, the
    /// day is a later one, and the minutes fit into the days. `before` is the last event of the
    /// author with an effect, `since_ms` the time of its admission, `time_ms` that of the event.
    pub fn follows(&self, before: Option<&Self>, since_ms: u64, time_ms: u64) -> bool {
        let new = self.new_days(before, since_ms);
        let before = before.copied().unwrap_or_default();
        let counters = |it: &Self| [it.tokens, it.minutes, it.weights_bytes];
        let (old, now) = (counters(&before), counters(self));
        new > 0
            && self.day <= day_of(time_ms)
            && old.iter().zip(&now).all(|(old, now)| old <= now)
            && old != now
            && self.minutes.saturating_sub(before.minutes) <= new.saturating_mul(DAY_MINUTES)
    }

    /// Number of days that this event adds to `before`; 0 if its day is not a later one.
    fn new_days(&self, before: Option<&Self>, since_ms: u64) -> u64 {
        match before {
            Some(before) => self.day.saturating_sub(before.day),
            None => self.day.saturating_add(1).saturating_sub(day_of(since_ms)),
        }
    }

    /// Counters to announce at `now_ms`, given what this node counted; `None` if nothing is new, or
    /// the day has not ended. They are counters of whole days, so that each day needs one event.
    pub fn next(counted: Self, before: Option<&Self>, since_ms: u64, now_ms: u64) -> Option<Self> {
        let day = day_of(now_ms).checked_sub(1)?;
        let old = before.copied().unwrap_or_default();
        let mut next = Self {
            day,
            tokens: counted.tokens.max(old.tokens).min(MAX_NUMBER),
            minutes: 0,
            weights_bytes: counted.weights_bytes.max(old.weights_bytes).min(MAX_NUMBER),
        };
        let most = next.new_days(before, since_ms).saturating_mul(DAY_MINUTES);
        let most = old.minutes.saturating_add(most);
        next.minutes = counted.minutes.max(old.minutes).min(most);
        next.follows(before, since_ms, now_ms).then_some(next)
    }
}
