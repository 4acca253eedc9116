//! Waiting for hosts: timeouts, and when the next answer is due.

use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::{Instant, sleep_until};

use super::ShardedBackend;
use super::failure::Interrupted;
use super::stream::Hop;
use crate::Cancel;
use crate::hosts::link::Inbound;
use crate::steps::chat_loop;

/// Silence after which this machine continues, if it may and no other host has the layers. The host
/// was probed after 1 s, and its driver answers a PING even while the engine computes, so a slow
/// host is not silent.
const SILENCE_BEFORE_FALLBACK: Duration = Duration::from_secs(4);
/// Silence before the first row is sent after which this machine starts. Nothing is lost by
/// starting here.
const SILENCE_BEFORE_START: Duration = Duration::from_secs(2);

impl ShardedBackend {
    fn due(&self) -> Option<Instant> {
        let mut owing = self.hops.iter().filter(|hop| !hop.sent.is_empty());
        let hop = owing.next()?;
        let sent = hop.sent.front()?;
        if owing.next().is_some() || hop.sent.len() > 1 || sent.rows > 1 {
            return None;
        }
        Some(sent.at + hop.hop_timeout.usual()?)
    }

    /// Returns the next message of any host, a host that timed out, or a status for the caller.
    pub(super) async fn receive(&mut self, cancel: &Cancel) -> Result<(u64, Inbound), Interrupted> {
        loop {
            if cancel.is_cancelled() {
                return Err(Interrupted::Cancelled);
            }
            // Messages that have arrived count before any timeout.
            if let Ok(message) = self.inbound.try_recv() {
                return Ok(message);
            }
            let until = self.look(Instant::now())?;
            if let Some(due) = self.due() {
                chat_loop::expect(due);
            }
            let time_is_up = {
                let _context = self.runtime.enter();
                OptionFuture::from(until.map(sleep_until))
            };
            let unsent = self.hops.iter().find(|hop| !hop.unsent.is_empty());
            let sent = OptionFuture::from(unsent.map(|hop| async {
                let sent = match hop.unsent.front() {
                    Some(message) => hop.span.link.sender.send(message.clone()).await,
                    None => Ok(()),
                };
                (hop.id, sent)
            }));
            let (id, sent) = tokio::select! {
                biased;
                message = self.inbound.recv() => {
                    // `self.inbox` is a sender, so the queue cannot close.
                    return message.ok_or(Interrupted::Cancelled);
                }
                () = cancel.cancelled() => return Err(Interrupted::Cancelled),
                Some(sent) = sent => sent,
                Some(()) = time_is_up => continue,
            };
            if let Some(hop) = self.hops.iter_mut().find(|hop| hop.id == id) {
                hop.unsent.pop_front();
                if let Err(error) = sent {
                    return Err(Interrupted::HopFailure(hop.unsendable(&error)));
                }
            }
        }
    }

    /// Checks the timeouts of all hosts with pending steps; returns the time of the next check.
    fn look(&mut self, now: Instant) -> Result<Option<Instant>, Interrupted> {
        let health_timeout = self.settings.health_timeout;
        // If this machine may not continue, only the health timeout applies.
        let silence = self.settings.give_up_after.map(|_| match self.running {
            true => SILENCE_BEFORE_FALLBACK,
            false => SILENCE_BEFORE_START,
        });
        let mut until: Option<Instant> = None;
        for index in 0..self.hops.len() {
            let oldest = self.hops.get(index).and_then(Hop::pending);
            let reference = oldest.and_then(|(_, rows)| self.reference(index, rows));
            let Some(hop) = self.hops.get_mut(index) else {
                continue;
            };
            let waits = hop.waits_until(now, health_timeout, silence, reference);
            let Some(at) = waits.map_err(Interrupted::HopFailure)? else {
                continue;
            };
            until = Some(until.map_or(at, |until| until.min(at)));
            if let Some(code) = hop.waited_for(now) {
                return Err(Interrupted::Waiting(index, code));
            }
        }
        Ok(until)
    }
}
