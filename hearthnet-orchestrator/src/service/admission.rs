//! Admission of requests to the queue, and their refusal.

use std::collections::BTreeMap;
use std::time::Duration;

use super::fair_queue::{QueueLimits, Refused, quota_key};
use super::retries::{RetryKey, Room};
use super::{Refusal, State};
use crate::Cancel;
use crate::error::ChatError;
use crate::times::whole_ms;

/// Returns true if a chat of this verified caller runs.
pub(super) fn runs(running: &BTreeMap<u64, (Cancel, String)>, caller: &str) -> bool {
    running.values().any(|(_, who)| who == quota_key(caller))
}

impl State {
    /// Admits a request, or records the refusal.
    pub(super) fn admit(
        &mut self,
        limits: QueueLimits,
        caller: &str,
        mark: &RetryKey,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let (turns, running) = (&self.turns, &self.running);
        let left = limits.waiting.saturating_sub(turns.waiting());
        let room = |caller: &str| Room {
            idle: turns.has_place(caller, runs(running, caller)) || turns.is_owed(caller),
            all: left,
            own: left.min(turns.room_of(caller)),
        };
        let Err(ahead) = self.returns.admit(caller, mark, now_ms, room) else {
            return Ok(());
        };
        let why = match turns.room_of(caller) == 0 {
            true => Refused::Caller,
            false => Refused::Queue,
        };
        let after = self.until_turns(ahead + 1);
        let due_ms = now_ms.saturating_add(whole_ms(after));
        self.returns.remember(caller, mark, now_ms, due_ms);
        Err(self.refuse(limits, why, Some(after)))
    }

    pub(super) fn refuse(
        &self,
        limits: QueueLimits,
        why: Refused,
        after: Option<Duration>,
    ) -> Refusal {
        let (running, waiting) = (self.turns.running(), self.turns.waiting());
        let error = ChatError::Busy(match why {
            Refused::Queue if waiting >= limits.waiting => {
                format!("{running} chats run and {waiting} wait, which is the limit")
            }
            Refused::Queue => format!(
                "{running} chats run and {waiting} wait; the free places are reserved for requests \
                 that were refused before"
            ),
            Refused::Caller => format!(
                "{running} chats run, and {} of yours wait, which is the limit",
                limits.waiting_per_caller
            ),
        });
        Refusal {
            retry_after: after.or_else(|| Some(self.until_turns(waiting + 1))),
            ..refused(error)
        }
    }

    /// Estimated time until this many more answers have ended, from recent answer times: 1 to 60
    /// whole seconds.
    pub(super) fn until_turns(&self, answers: usize) -> Duration {
        let rounds = answers as f64 / self.turns.running().max(1) as f64;
        Duration::from_secs_f64((self.answer_ms * rounds / 1e3).ceil().clamp(1.0, 60.0))
    }
}

pub(super) fn refused(error: ChatError) -> Refusal {
    metrics::counter!("hearthnet_refusals_total", "code" => error.code()).increment(1);
    Refusal {
        error,
        retry_after: None,
    }
}
