//! Waiting for hosts: whose time is up when, and when an answer is due.

use std::time::{Duration, Instant};

use futures_util::future::OptionFuture;
use hearthnet_transport::Code;
use tokio::time::sleep_until;

use super::ShardedBackend;
use super::failure::HopFailure;
use super::stream::WaitLimits;
use crate::link::Inbound;
use crate::{Cancel, steps};

/// Silence of a host that nobody can replace, after which this machine goes on if it may. The host was
/// asked after 1 s, and its driver answers a PING whatever the engine computes, so a slow host is heard.
const DARK_BEFORE_FALLBACK: Duration = Duration::from_secs(4);
/// The same before the first row is sent: nothing is lost by beginning here.
const DARK_BEFORE_START: Duration = Duration::from_secs(2);

/// Why waiting ended without a message.
pub(super) enum Interrupted {
    Cancelled,
    HopFailure(HopFailure),
    /// A host is being waited for, and this is its code.
    Waiting(usize, Code),
}

impl ShardedBackend {
    /// When the answer to a lone decode step is due.
    fn due(&self) -> Option<Instant> {
        let mut owing = self.hops.iter().filter(|hop| !hop.sent.is_empty());
        let hop = owing.next()?;
        let sent = hop.sent.front()?;
        if owing.next().is_some() || hop.sent.len() > 1 || sent.rows > 1 {
            return None;
        }
        Some(sent.at + hop.hop_timeout.usual()?)
    }

    /// The next message of any host, or the one whose time is up, or something to tell the caller.
    pub(super) async fn receive(&mut self, cancel: &Cancel) -> Result<(u64, Inbound), Interrupted> {
        loop {
            if cancel.is_cancelled() {
                return Err(Interrupted::Cancelled);
            }
            // What has come counts before any judgement of what has not.
            if let Ok(message) = self.inbound.try_recv() {
                return Ok(message);
            }
            let until = self.look(Instant::now())?;
            if let Some(due) = self.due() {
                steps::expect(due);
            }
            let time_is_up = {
                let _context = self.runtime.enter();
                OptionFuture::from(until.map(|at| sleep_until(at.into())))
            };
            let unsent = self.hops.iter().find(|hop| !hop.unsent.is_empty());
            let sent = OptionFuture::from(unsent.map(|hop| async {
                let sent = match hop.unsent.front() {
                    Some(message) => hop.span.link.sender.send(message.clone()).await,
                    None => Ok(()),
                };
                (hop.id, sent)
            }));
            let sent = tokio::select! {
                biased;
                message = self.inbound.recv() => {
                    // This side holds a sender, so the queue cannot close.
                    return message.ok_or(Interrupted::Cancelled);
                }
                () = cancel.cancelled() => return Err(Interrupted::Cancelled),
                Some(sent) = sent => sent,
                Some(()) = time_is_up => continue,
            };
            let (id, sent) = sent;
            if let Some(hop) = self.hops.iter_mut().find(|hop| hop.id == id) {
                hop.unsent.pop_front();
                if let Err(error) = sent {
                    return Err(Interrupted::HopFailure(hop.unsendable(&error)));
                }
            }
        }
    }

    /// Looks at every host that owes something; says when to look again.
    fn look(&mut self, now: Instant) -> Result<Option<Instant>, Interrupted> {
        let limits = WaitLimits {
            health_timeout: self.settings.health_timeout,
            silence: self.settings.give_up_after.map(|_| match self.running {
                true => DARK_BEFORE_FALLBACK,
                false => DARK_BEFORE_START,
            }),
        };
        let mut until: Option<Instant> = None;
        for index in 0..self.hops.len() {
            let oldest = self.hops.get(index).and_then(|hop| hop.sent.front());
            let reference = oldest.and_then(|sent| self.reference(index, sent.rows));
            let Some(hop) = self.hops.get_mut(index) else {
                continue;
            };
            let waits = hop.waits_until(now, limits, reference);
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
