//! Waiting for hosts: whose time is up when, and being awake when an answer is due.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::ShardedBackend;
use super::recovery::Cause;
use super::stream::{HopFailure, Verdict, WaitLimits};
use hearthnet_transport::Code;
use tokio::task::JoinHandle;

use crate::Cancel;
use crate::error::ChatError;
use crate::link::Inbound;

/// A step that usually takes longer is not waited for awake: it would make no difference.
const LONG_STEP: Duration = Duration::from_millis(50);
/// How long before an answer is due its chat is awake. A timer may be late by half of it.
const AWAKE_BEFORE: Duration = Duration::from_micros(150);

/// Silence of a host that nobody can replace, after which this machine goes on if it may: enough
/// for a cable that is put back, and for a wireless network that comes back.
const DARK_BEFORE_FALLBACK: Duration = Duration::from_secs(10);

/// How long after that the chat goes to sleep again.
const AWAKE_AFTER: Duration = Duration::from_micros(100);

/// Whether a chat of this process is awake for an answer.
static ON_WATCH: AtomicBool = AtomicBool::new(false);

/// Why waiting ended without a message.
pub(super) enum Interrupted {
    Cancelled,
    HopFailure(HopFailure),
    /// A host is being waited for, and this is its code.
    Waiting(usize, Code),
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
        let due = sent.at + hop.hop_timeout.usual()?;
        let asleep = due
            .checked_sub(AWAKE_BEFORE)?
            .saturating_duration_since(Instant::now());
        if asleep > LONG_STEP {
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

    /// The next message of any host, or the one whose time is up, or something to tell the caller.
    pub(super) fn receive(&mut self, cancel: &Cancel) -> Result<(u64, Inbound), Interrupted> {
        if !cancel.is_cancelled()
            && let Some(message) = self.anticipate()
        {
            return Ok(message);
        }
        loop {
            if cancel.is_cancelled() {
                return Err(Interrupted::Cancelled);
            }
            // What has come counts before any judgement of what has not.
            if let Ok(message) = self.inbound.try_recv() {
                return Ok(message);
            }
            let now = Instant::now();
            let Some(until) = self.look(now)? else {
                // This side holds a sender, so the queue cannot close.
                return self.inbound.recv().map_err(|_| Interrupted::Cancelled);
            };
            match self
                .inbound
                .recv_timeout(until.saturating_duration_since(now))
            {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Disconnected) => return Err(Interrupted::Cancelled),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Looks at every host that owes something; says when to look again.
    fn look(&mut self, now: Instant) -> Result<Option<Instant>, Interrupted> {
        let health_timeout = self.settings.health_timeout;
        let patience = WaitLimits {
            health_timeout,
            silence: self.settings.give_up_after.map(|_| DARK_BEFORE_FALLBACK),
        };
        let mut until: Option<Instant> = None;
        for index in 0..self.hops.len() {
            let Some(hop) = self.hops.get(index) else {
                continue;
            };
            let rows = hop.sent.front().map(|sent| sent.rows);
            let reference = rows.and_then(|rows| self.reference(index, rows));
            let Some(hop) = self.hops.get_mut(index) else {
                continue;
            };
            let hop_failure = match hop.verdict(now, patience, reference) {
                None => continue,
                Some(Verdict::Wait(at)) => {
                    until = Some(until.map_or(at, |until| until.min(at)));
                    None
                }
                Some(Verdict::Overdue) => Some(hop.late()),
                Some(Verdict::Gone) => Some(hop.gone(Cause::Silent)),
                Some(Verdict::Dark) => Some(hop.gone(Cause::Failed)),
                Some(Verdict::Stalled) => {
                    let seconds = health_timeout.as_secs_f32();
                    Some(
                        hop.hop_failure(Code::PIPELINE_STALLED, Cause::Failed, |host| {
                            ChatError::PipelineStalled(format!(
                                "no progress for {seconds} s: waiting for {host}"
                            ))
                        }),
                    )
                }
            };
            if let Some(hop_failure) = hop_failure {
                return Err(Interrupted::HopFailure(hop_failure));
            }
            if let Some(code) = hop.waited_for(now) {
                return Err(Interrupted::Waiting(index, code));
            }
        }
        Ok(until)
    }

    /// Wakes the chat when its caller gives up.
    pub(super) fn watch(&mut self, cancel: &Cancel) {
        if self.watch.is_some() {
            return;
        }
        let (cancel, inbox) = (cancel.clone(), self.inbox.clone());
        self.watch = Some(Watch(self.runtime.spawn(async move {
            cancel.cancelled().await;
            // A chat that is gone needs no waking. No stream has this name.
            let _ = inbox.send((u64::MAX, Inbound::Wake));
        })));
    }
}

/// A task that ends with this.
pub(super) struct Watch(JoinHandle<()>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}
