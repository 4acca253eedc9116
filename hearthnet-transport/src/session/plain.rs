//! State machine of a plain socket: two bounded queues, and the deadlines of the connection. Like
//! [`Session`](super::Session) it does no I/O and reads no clock.
//!
//! A full inbox stops the reading, so TCP slows the peer down, without further memory here. An
//! incomplete incoming message must make progress, and so must data written to the peer. A silent
//! connection gets a WebSocket ping, and is closed if it stays silent.

use std::collections::VecDeque;
use std::sync::Arc;

use super::protocol::{Frame, Progress, Protocol, Transmit};
use super::rate::ProgressTimer;
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::{Config, PathRule};
use crate::time::Time;

#[derive(Default)]
struct Queue {
    frames: VecDeque<Frame>,
    bytes: usize,
}

impl Queue {
    /// Returns whether a message of `len` bytes fits; a single message always does.
    fn has_room(&self, rule: &PathRule, len: usize) -> bool {
        self.frames.is_empty()
            || (self.frames.len() < rule.queue_messages
                && self.bytes.saturating_add(len) <= rule.queue_bytes)
    }

    fn push(&mut self, frame: Frame) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    fn pop(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len();
        Some(frame)
    }
}

pub(crate) struct PlainSession {
    rule: Arc<PathRule>,
    config: Config,
    inbox: Queue,
    outbox: Queue,
    closed: Option<SessionClosed>,
    /// Time of the last received data, or of the last decision not to read.
    heard: Time,
    /// Time of the last ping.
    pinged: Option<Time>,
    /// Whether that ping is still to be sent.
    owes_ping: bool,
    received: u64,
    written: u64,
    /// Progress of the incomplete incoming message.
    reading: Option<ProgressTimer>,
    /// Progress of written data that is not flushed.
    writing: Option<ProgressTimer>,
}

impl PlainSession {
    pub(crate) fn new(rule: Arc<PathRule>, config: &Config, now: Time) -> PlainSession {
        PlainSession {
            rule,
            config: config.clone(),
            inbox: Queue::default(),
            outbox: Queue::default(),
            closed: None,
            heard: now,
            pinged: None,
            owes_ping: false,
            received: 0,
            written: 0,
            reading: None,
            writing: None,
        }
    }

    /// Returns whether a ping is unanswered.
    fn is_asked(&self) -> bool {
        self.pinged.is_some_and(|pinged| pinged > self.heard)
    }
}

impl Protocol for PlainSession {
    type Outgoing = Frame;
    type Incoming = Frame;

    fn closed(&self) -> Option<&SessionClosed> {
        self.closed.as_ref()
    }

    /// Queued messages for the peer may still be transmitted.
    fn close(&mut self, code: CloseCode, detail: &str) {
        self.inbox = Queue::default();
        self.fail(code.violation(detail.to_owned()));
    }

    /// The application may still take earlier messages.
    fn fail(&mut self, violation: Violation) {
        let closed = SessionClosed::by_us(violation.code, violation.detail);
        self.closed.get_or_insert(closed);
        self.owes_ping = false;
    }

    fn connection_lost(&mut self, closed: SessionClosed) {
        if self.closed.is_none() {
            // Only the answer may follow the peer's close frame.
            self.outbox = Queue::default();
            self.owes_ping = false;
            self.closed = Some(closed);
        }
    }

    fn drop_waiting(&mut self) {
        self.inbox = Queue::default();
        self.outbox = Queue::default();
    }

    fn send(&mut self, frame: Frame) -> Result<Option<Frame>, SessionClosed> {
        if let Some(closed) = &self.closed {
            return Err(closed.clone());
        }
        if !self.outbox.has_room(&self.rule, frame.len()) {
            return Ok(Some(frame));
        }
        self.outbox.push(frame);
        Ok(None)
    }

    fn poll_transmit(&mut self, _now: Time) -> Option<Transmit> {
        if std::mem::take(&mut self.owes_ping) {
            return Some(Transmit::Ping);
        }
        self.outbox.pop().map(Transmit::Message)
    }

    fn has_reply(&self) -> bool {
        !self.outbox.frames.is_empty()
    }

    fn handle_message(&mut self, _now: Time, frame: Frame) {
        self.inbox.push(frame);
    }

    fn take(&mut self) -> Option<Frame> {
        self.inbox.pop()
    }

    fn has_incoming(&self) -> bool {
        !self.inbox.frames.is_empty()
    }

    fn is_congested(&self) -> bool {
        !self.inbox.has_room(&self.rule, self.rule.max_message_bytes)
    }

    fn handle_progress(&mut self, now: Time, progress: Progress) {
        let (received, written) = (progress.received, progress.written);
        self.heard = self.heard.max(progress.heard);
        if self.is_congested() {
            // While this side does not read, the peer cannot make progress.
            self.heard = now;
            self.reading = None;
        } else if let Some(partial) = progress.partial {
            let begun = self.reading.unwrap_or(ProgressTimer::new(now, received));
            self.reading = (partial > 0).then_some(begun);
        }
        let begun = self.writing.unwrap_or(ProgressTimer::new(now, written));
        self.writing = progress.unflushed.then_some(begun);
        (self.received, self.written) = (received, written);
    }

    fn poll_timeout(&self) -> Time {
        if self.closed.is_some() {
            return Time::NEVER;
        }
        let (d, keep_alive) = (&self.config.deadlines, self.config.keep_alive);
        let silence = keep_alive * if self.is_asked() { 2 } else { 1 };
        [
            Some(self.heard + silence),
            self.reading.map(|pace| pace.due(d.stall)),
            self.writing.map(|pace| pace.due(d.credit)),
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(Time::NEVER)
    }

    fn handle_timeout(&mut self, now: Time) {
        if now < self.poll_timeout() {
            return;
        }
        let (d, keep_alive) = (&self.config.deadlines, self.config.keep_alive);
        let (received, written, rate) = (self.received, self.written, d.min_rate);
        let slow = |pace: &mut Option<ProgressTimer>, bytes, span| {
            let pace = pace.as_mut();
            pace.is_some_and(|pace| pace.is_slow(now, bytes, span, rate))
        };
        let stalled = |detail| CloseCode::PipelineStalled.violation(detail);
        if slow(&mut self.reading, received, d.stall) {
            self.fail(stalled("a message came too slowly"));
        } else if slow(&mut self.writing, written, d.credit) {
            self.fail(stalled("the peer does not read"));
        } else if now >= self.heard + keep_alive * 2 {
            let detail = "the peer was silent for two keep-alive intervals";
            self.fail(CloseCode::KeepAlive.violation(detail));
        } else if now >= self.heard + keep_alive && !self.is_asked() {
            self.pinged = Some(now);
            self.owes_ping = true;
        }
    }
}
