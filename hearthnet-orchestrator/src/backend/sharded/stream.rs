//! A span's stream on its host: messages to the host, its failures, waiting for it.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hearthnet_bus::NodeId;
use hearthnet_bus::flight::StreamTrace;
use hearthnet_files::WeightsId;
use hearthnet_text::sanitize;
use hearthnet_transport::{
    CloseCode, Code, Fork, Message, SendError, SessionClosed, StreamOpen, Truncate,
};
use tokio::time::Instant;

use super::failure::{Cause, HopFailure};
use super::hop_timeout::{CHECK_INTERVAL, HopTimeout, OFFLINE_AFTER, PROBE_AFTER, Silence};
use crate::error::ChatError;
use crate::hosts::RoutedSpan;
use crate::hosts::checks::BoundaryCheck;
use crate::hosts::receipts::{RECEIPT_MISMATCH, ReceiptFault, StreamReceipts};
use crate::steps::chat_loop;
use crate::times::HopClock;

/// Codes of a host without room for another stream, or for another one of this caller.
const NO_ROOM: [Code; 5] = [
    Code::STREAM_LIMIT,
    Code::STREAM_QUOTA,
    Code::STREAM_CHURN,
    Code::KV_FULL,
    Code::KV_QUOTA,
];

/// Code of a host whose stream cannot return to a position.
const POSITION_GAP: Code = Code::new("position_gap");

/// Codes of a host that cannot fork a stream.
const NO_SOURCE: [Code; 2] = [Code::new("unknown_stream"), POSITION_GAP];

/// A step that a host has not answered yet.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) at: Instant,
    pub(super) rows: u32,
    /// Residual stream of the rows sent; an answer equal to it is rejected
    /// (`CheckError::Unchanged`).
    pub(super) stream: Bytes,
    /// The rows sent.
    pub(super) data: Bytes,
}

/// Stream of a span on its host.
pub(super) struct Hop {
    /// Distinguishes this stream's messages from those of earlier streams.
    pub(super) id: u64,
    pub(super) span: RoutedSpan,
    /// Shard id of the layers, with this side's model id, so that a host cannot choose the label.
    pub(super) shard_id: String,
    pub(super) stream: u32,
    pub(super) epoch: u32,
    pub(super) opened: bool,
    /// Stream of the same host that it begins with.
    pub(super) fork: Option<Fork>,
    /// Positions requested for the stream.
    pub(super) asked: u32,
    pub(super) check: BoundaryCheck,
    /// `None` if its host sends no receipts.
    pub(super) receipts: Option<Arc<StreamReceipts>>,
    /// True if the end of the stream counts as a failure of the host.
    pub(super) has_failed: bool,
    /// Stream that it replaces, to compare the rows of the replay with.
    pub(super) replaces: Option<Arc<StreamReceipts>>,
    pub(super) sent: VecDeque<Sent>,
    /// When the host was asked to return to an earlier position, until it has answered.
    pub(super) truncated_at: Option<Instant>,
    /// Messages for which the send queue had no room, in order; sent while the chat waits.
    pub(super) unsent: VecDeque<Message>,
    /// When the host last answered, or got its first step after a pause.
    pub(super) progress: Instant,
    pub(super) hop_timeout: HopTimeout,
    /// Duration of its silence while a step is pending.
    pub(super) silence: Silence,
    /// Time of the next search, after no replacement was found for a late or silent host.
    pub(super) retry_search_at: Option<Instant>,
    /// True once the caller was notified of the wait.
    pub(super) notified: bool,
    /// The host is leaving: time of the next search for a replacement.
    pub(super) migrate_at: Option<Instant>,
    /// True for a running sequence: if the host has no room, it is asked again later.
    pub(super) waits_for_capacity: bool,
    pub(super) clock: HopClock,
    /// Histogram of its round trips.
    pub(super) latency: metrics::Histogram,
}

impl Hop {
    pub(super) fn node(&self) -> NodeId {
        self.span.link.descriptor.host
    }

    pub(super) fn trace(&self) -> StreamTrace {
        StreamTrace {
            session: self.span.link.session,
            stream: self.stream,
            epoch: self.epoch,
        }
    }

    pub(super) fn arithmetic(&self) -> &String {
        &self.span.link.descriptor.arithmetic
    }

    fn name(&self) -> String {
        let RoutedSpan { link, lo, hi, .. } = &self.span;
        let (endpoint, node) = (&link.addr.endpoint, link.addr.node.short());
        format!("{endpoint} ({node}, layers {lo}-{hi})")
    }

    /// Closes the stream, so that the host frees its memory at once.
    pub(super) fn release(&self) {
        self.span.link.release(self.stream);
    }

    pub(super) fn hop_failure(
        &self,
        code: Code,
        cause: Cause,
        error: impl FnOnce(String) -> ChatError,
    ) -> HopFailure {
        HopFailure {
            hop: self.id,
            code,
            error: error(self.name()),
            cause,
        }
    }

    /// Failure after the end of the session.
    pub(super) fn lost(&self, closed: &SessionClosed) -> HopFailure {
        use CloseCode::{Revoked, Unauthorized};
        let (code, cause, what) = match (closed.code, closed.by_us) {
            // This node closed the session, because the host lost its authorisation.
            (code @ (Revoked | Unauthorized), true) => {
                return self.hop_failure(code.into(), Cause::Unauthorized, |host| {
                    ChatError::ShardUnavailable(format!(
                        "{host} is not authorised to compute for this node any more"
                    ))
                });
            }
            // The host closed it, because this node lost its authorisation.
            (code @ (Revoked | Unauthorized), false) => (code.into(), Cause::Failed, "lost"),
            // The host violated the protocol.
            (code, true) if code.is_violation() => (code.into(), Cause::Failed, "left"),
            _ => (Code::CONNECTION_LOST, Cause::Lost, "lost"),
        };
        self.hop_failure(code, cause, |host| {
            let why = closed.to_string();
            ChatError::ShardUnavailable(format!("{what} {host}: {}", sanitize(&why)))
        })
    }

    /// Failure after a send error.
    pub(super) fn unsendable(&self, error: &SendError) -> HopFailure {
        match error {
            SendError::Closed(closed) => self.lost(closed),
            other => self.hop_failure(Code::CONNECTION_LOST, Cause::Lost, |host| {
                ChatError::ShardUnavailable(format!("lost {host}: {other}"))
            }),
        }
    }

    /// Queues a message for the next boundary, or for when the send queue has room.
    pub(super) fn send(&mut self, message: Message) -> Result<(), HopFailure> {
        let back = match self.unsent.is_empty() {
            true => chat_loop::send(&self.span.link.sender, message),
            false => Ok(Some(message)),
        };
        self.unsent
            .extend(back.map_err(|error| self.unsendable(&error))?);
        Ok(())
    }

    /// Asks the host to return to `position`, and to tell how many positions it keeps.
    pub(super) fn truncate(&mut self, position: u32) -> Result<(), HopFailure> {
        let now = Instant::now();
        if self.opened {
            self.progressed(now);
        }
        self.truncated_at = Some(now);
        self.send(Message::Truncate(Truncate {
            stream: self.stream,
            epoch: self.epoch,
            position,
            answer: true,
        }))
    }

    /// Time and rows of the oldest pending step. A truncation takes no longer than a row.
    pub(super) fn pending(&self) -> Option<(Instant, u32)> {
        let step = self.sent.front().map(|sent| (sent.at, sent.rows));
        step.or(self.truncated_at.map(|at| (at, 1)))
    }

    /// Failure of a host that broke the protocol on this stream. Ends the session: the message may
    /// have stood in the place of an answer to another chat, which would wait for it in vain.
    pub(super) fn violation(&self, what: impl Display) -> HopFailure {
        self.span.link.closer().close(CloseCode::ProtocolState);
        let code = CloseCode::ProtocolState.into();
        self.hop_failure(code, Cause::Failed, |host| {
            ChatError::ShardUnavailable(format!("{host}: {what}"))
        })
    }

    /// Requests the stream, or more positions for an open one.
    pub(super) fn ask(&mut self, weights: WeightsId) -> Result<(), HopFailure> {
        self.send(Message::StreamOpen(StreamOpen {
            stream: self.stream,
            epoch: self.epoch,
            weights: weights.0,
            lo: self.span.lo,
            hi: self.span.hi,
            max_positions: self.asked,
            fork: self.fork,
        }))
    }

    /// Requests room for this many positions. It does not wait: if the host refuses, the stream
    /// ends.
    pub(super) fn grow(&mut self, weights: WeightsId, positions: u32) -> Result<(), HopFailure> {
        if self.asked >= positions {
            return Ok(());
        }
        self.asked = positions;
        self.ask(weights)
    }

    pub(super) fn bad_receipt(&self, fault: ReceiptFault) -> HopFailure {
        if let Some(receipts) = &self.receipts {
            receipts.note_fault(fault);
        }
        self.hop_failure(RECEIPT_MISMATCH, Cause::Corrupt, |host| {
            ChatError::PipelineStalled(format!("{host} is not honest: {RECEIPT_MISMATCH}: {fault}"))
        })
    }

    pub(super) fn late(&self) -> HopFailure {
        self.hop_failure(Code::DEGRADED, Cause::Late, |host| {
            ChatError::PipelineStalled(format!("{host} is much slower than it should be"))
        })
    }

    pub(super) fn gone(&self, cause: Cause) -> HopFailure {
        self.hop_failure(Code::SILENT, cause, |host| {
            ChatError::PipelineStalled(format!("{host} has fallen silent"))
        })
    }

    pub(super) fn leaving(&self, open: bool) -> HopFailure {
        self.hop_failure(Code::LEAVING, Cause::Leaving { open }, |host| {
            ChatError::ShardUnavailable(format!("{host} is about to stop"))
        })
    }

    /// Tells the host that the stream is idle at `length` positions, so that it is preempted first.
    pub(super) fn rest(&self, length: u32) {
        let truncate = Message::Truncate(Truncate {
            stream: self.stream,
            epoch: self.epoch,
            position: length,
            answer: false,
        });
        // If the queue is full, the host infers it from the silence.
        let _ = self.span.link.sender.try_send(truncate);
    }

    /// Whether the host refused a fork because its source has changed or ended meanwhile. The rows
    /// are replayed, and the host is not at fault.
    fn lacks_source(&self, code: &Code) -> bool {
        self.fork.is_some() && !self.opened && NO_SOURCE.contains(code)
    }

    /// Classifies a host's refusal, or the end of a stream by its host.
    pub(super) fn refused(&self, code: Code, message: &str) -> HopFailure {
        let cause = if code == Code::SHUTTING_DOWN {
            return self.leaving(false);
        } else if [Code::PREEMPTED, Code::STEP_QUOTA, POSITION_GAP].contains(&code)
            || self.lacks_source(&code)
        {
            // A host that answers no truncation may be unable to return to the position of a step.
            Cause::Preempted
        } else if self.opened || !NO_ROOM.contains(&code) {
            Cause::Failed
        } else if self.waits_for_capacity {
            Cause::Preempted
        } else {
            Cause::NoCapacity
        };
        let text = format!("{} refused with {code}: {message}", self.name());
        let error = if code == Code::WEIGHTS_MISMATCH {
            ChatError::WeightsMismatch(text)
        } else if code == Code::BOUNDARY_OVERFLOW {
            ChatError::BoundaryOverflow(text)
        } else if code == Code::CONTEXT_FULL {
            ChatError::BadRequest(text)
        } else if cause == Cause::NoCapacity {
            ChatError::HostsFull(text)
        } else {
            ChatError::ShardUnavailable(text)
        };
        self.hop_failure(code, cause, |_| error)
    }

    /// Returns the time until which this host is waited for; `None` if no step is pending.
    /// `health_timeout` limits the time without progress, `silence` that of complete silence.
    /// `reference` is the time that other hosts need for the oldest pending step.
    ///
    /// # Errors
    /// The failure, if the host has timed out.
    pub(super) fn waits_until(
        &mut self,
        now: Instant,
        health_timeout: Duration,
        silence: Option<Duration>,
        reference: Option<Duration>,
    ) -> Result<Option<Instant>, HopFailure> {
        let oldest = self.pending().filter(|_| self.opened);
        if oldest.is_none() && self.opened {
            return Ok(None);
        }
        let waited = now.saturating_duration_since(self.progress);
        if waited >= health_timeout {
            let seconds = health_timeout.as_secs_f32();
            let code = Code::PIPELINE_STALLED;
            return Err(self.hop_failure(code, Cause::Failed, |host| {
                ChatError::PipelineStalled(format!(
                    "no progress for {seconds} s: waiting for {host}"
                ))
            }));
        }
        let mut until = self.progress + health_timeout;
        let may_move = self.may_move(now);
        if let Some((at, rows)) = oldest
            && may_move
            && let Some(after) = self.hop_timeout.overdue_after(rows, reference)
        {
            let overdue = at.max(self.progress) + after;
            if overdue <= now {
                self.hop_timeout.overdue(waited, rows);
                return Err(self.late());
            }
            until = until.min(overdue);
        }
        if waited < PROBE_AFTER {
            return Ok(Some(until.min(self.progress + PROBE_AFTER)));
        }
        let sender = &self.span.link.sender;
        let silent = self.silence.look(now, sender.silent_for());
        if silent >= PROBE_AFTER {
            sender.probe();
        }
        if silence.is_some_and(|most| silent >= most) {
            return Err(self.gone(Cause::Failed));
        }
        if silent >= OFFLINE_AFTER && may_move {
            return Err(self.gone(Cause::Silent));
        }
        Ok(Some(until.min(now + CHECK_INTERVAL)))
    }

    /// Returns true if a search for a replacement is due, should this host be late.
    pub(super) fn may_move(&self, now: Instant) -> bool {
        self.retry_search_at.is_none_or(|at| at <= now)
    }

    /// Records progress on a pending step.
    pub(super) fn progressed(&mut self, now: Instant) {
        self.progress = now;
        self.silence = Silence::default();
        self.notified = false;
    }

    /// Returns the status code for the caller after a long wait for this host, once per wait.
    pub(super) fn waited_for(&mut self, now: Instant) -> Option<Code> {
        let rows = self.sent.front().map_or(0, |sent| sent.rows);
        let usual = self.hop_timeout.typical(rows).unwrap_or_default();
        let waited = now.saturating_duration_since(self.progress);
        if self.notified || waited < NOTIFY_AFTER.max(2 * usual) {
            return None;
        }
        self.notified = true;
        Some(match self.span.link.sender.silent_for() < PROBE_AFTER {
            true => Code::BUSY,
            false => Code::SILENT,
        })
    }
}

/// Wait after which the caller is notified.
const NOTIFY_AFTER: Duration = Duration::from_millis(1500);
