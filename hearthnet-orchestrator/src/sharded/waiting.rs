//! Waiting for hosts: whose time is up when, and being awake when an answer is due.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::ShardedBackend;
use super::stream::Trouble;
use crate::Cancel;
use crate::error::ChatError;
use crate::link::Inbound;

/// How often a waiting chat looks whether its caller gave up.
const CANCEL_POLL: Duration = Duration::from_millis(50);

/// How long before an answer is due its chat is awake. A timer may be late by half of it.
const AWAKE_BEFORE: Duration = Duration::from_micros(150);

/// How long after that the chat goes to sleep again.
const AWAKE_AFTER: Duration = Duration::from_micros(100);

/// Whether a chat of this process is awake for an answer.
static ON_WATCH: AtomicBool = AtomicBool::new(false);

/// Why waiting ended without a message.
pub(super) enum Interrupted {
    Cancelled,
    Trouble(Trouble),
}

impl ShardedBackend {
    /// Awaits the answer to a lone decode step awake, when it is due.
    ///
    /// To be woken by the answer would cost the time that a sleeping core takes to come
    /// back, once per hop and token. So this thread wakes by itself shortly before, and
    /// looks for the answer until shortly after.
    fn anticipate(&self) -> Option<(u64, Inbound)> {
        let mut owing = self.hops.iter().filter(|hop| !hop.sent.is_empty());
        let hop = owing.next()?;
        let sent = hop.sent.front()?;
        if owing.next().is_some() || hop.sent.len() > 1 || sent.rows > 1 {
            return None;
        }
        let due = sent.at + hop.pace.usual()?;
        let asleep = due
            .checked_sub(AWAKE_BEFORE)?
            .saturating_duration_since(Instant::now());
        // For a step this long it makes no difference.
        if asleep > CANCEL_POLL {
            return None;
        }
        if let Ok(message) = self.inbound.recv_timeout(asleep) {
            return Some(message);
        }
        // One thread at a time: with many chats at once there is better use for the cores.
        if ON_WATCH.swap(true, Ordering::Acquire) {
            return None;
        }
        let mut message = None;
        while message.is_none() && Instant::now() < due + AWAKE_AFTER {
            message = self.inbound.try_recv().ok();
            std::thread::yield_now();
        }
        ON_WATCH.store(false, Ordering::Release);
        message
    }

    /// The next message of any host, or the one whose time is up.
    pub(super) fn receive(&self, cancel: &Cancel) -> Result<(u64, Inbound), Interrupted> {
        if !cancel.is_cancelled()
            && let Some(message) = self.anticipate()
        {
            return Ok(message);
        }
        loop {
            if cancel.is_cancelled() {
                return Err(Interrupted::Cancelled);
            }
            let next = self
                .hops
                .iter()
                .enumerate()
                .filter_map(|(index, hop)| {
                    let (at, for_good) = hop.deadline(self.settings.health_timeout)?;
                    Some((at, for_good, index))
                })
                .min();
            let left = next.map_or(CANCEL_POLL, |(at, ..)| {
                at.saturating_duration_since(Instant::now())
            });
            match self.inbound.recv_timeout(left.min(CANCEL_POLL)) {
                Ok(message) => return Ok(message),
                // This side holds a sender, so the queue cannot close.
                Err(RecvTimeoutError::Disconnected) => return Err(Interrupted::Cancelled),
                Err(RecvTimeoutError::Timeout) if left > CANCEL_POLL => {}
                Err(RecvTimeoutError::Timeout) => {
                    let Some((_, for_good, index)) = next else {
                        continue;
                    };
                    let seconds = self.settings.health_timeout.as_secs_f32();
                    let mut trouble = if for_good {
                        self.trouble(index, "pipeline_stalled", |host| {
                            ChatError::PipelineStalled(format!(
                                "no progress for {seconds} s: waiting for {host}"
                            ))
                        })
                    } else {
                        self.trouble(index, "degraded", |host| {
                            ChatError::PipelineStalled(format!("{host} is much slower than it was"))
                        })
                    };
                    trouble.may_stay = !for_good;
                    return Err(Interrupted::Trouble(trouble));
                }
            }
        }
    }
}
