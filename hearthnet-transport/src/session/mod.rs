//! Session state machine, without I/O or clock.
//!
//! ```text
//!   caller                                        host
//!
//!  [HelloSent] --------- HELLO ---------------> [AwaitHello]
//!      |                                             | HELLO is well formed
//!      |                                             v
//!      |                                       [AwaitAdmission]
//!      |                                          |       | reject(code)
//!      |                              accept()    |       v
//!      | <-------------- HELLO -------------------+    [Closed] -- BYE(code) -->
//!      v                                          v
//!   [Open] <--- PING, tensors, steps, ... ---> [Open]
//!      |                                          |
//!      | close(), a violation, BYE, a deadline    |
//!      v                                          v
//!  [Closed]                                    [Closed]
//! ```
//!
//! Call order: [`Session::caller`] or [`Session::host`]; then
//! [`handle_message`](Session::handle_message) for each WebSocket binary message,
//! [`handle_timeout`](Session::handle_timeout) when [`poll_timeout`](Session::poll_timeout) has
//! passed, and [`send`](Session::send) for the application. After any of them:
//! [`poll_event`](Session::poll_event) for the application, and
//! [`poll_transmit`](Session::poll_transmit) until it returns `None`.
//!
//! Once [`closed`](Session::closed) returns a cause and all is transmitted, close the WebSocket
//! with the same code.
//!
//! This file is long because the state table, the timers and the bookkeeping of steps have to be
//! read together.

mod inbox;
mod outbox;
pub(crate) mod plain;
pub(crate) mod protocol;
pub(crate) mod rate;
mod stats;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;

pub use outbox::Outgoing;
pub use stats::SessionStats;

use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::{CONTROL_MESSAGE_BYTES, Config};
use crate::message::{Message, StreamClose, StreamError};
use crate::secret::Wiped;
use crate::time::Time;
use crate::wire::cbor::Body as _;
use crate::wire::chunk::{ChunkHead, MAX_CHUNK_HEADER_BYTES};
use crate::wire::control::{self, Ack, Bye, FlowCtl, Hello, Limits, Nack, TensorEnd};
use crate::wire::pipeline::{self, Place, RESULT_HEAD_BYTES, RowsHead, RowsKind};
use crate::wire::{FrameBuf, FrameType, HEADER_BYTES, Header};
use inbox::Inbox;
use outbox::Outbox;
use rate::{ProgressTimer, Rtt, TokenBucket};

/// Burst of a rate limit, in seconds of its rate.
const BURST_SECONDS: u32 = 4;
/// Rate limit of the peer's PINGs: a keep-alive needs one in 30 s, a measurement a few.
const PINGS_PER_SECOND: u32 = 4;
/// Queued messages for the application at which reading stops. Steps are bounded by their slots;
/// this bounds the other messages.
const MAX_UNDELIVERED: usize = 512;
/// Ended streams for which a caller remembers how many answers may still arrive. The host sent such
/// an answer before it read the STREAM_CLOSE, so only closes in transit count: 1,024 cover 16 s at
/// the default `stream_opens_per_second`.
const MAX_ENDED: usize = 1024;
/// Queued small messages at which `send` makes the application wait.
const MAX_QUEUED_SMALL: usize = 1024;

/// Values negotiated in HELLO that are needed to encode messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub(crate) caller: bool,
    pub(crate) chunk_bytes: u32,
    pub(crate) inline_max: u32,
    pub(crate) compress_above: Option<u32>,
    pub(crate) peer_buffer: u32,
}

impl Terms {
    /// Data bytes per tensor chunk.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Limit of row blocks that travel inside their step, in bytes.
    pub fn inline_max(&self) -> u32 {
        self.inline_max
    }

    /// Size above which this side tries to compress tensors; `None` if compression is off.
    pub fn compress_above(&self) -> Option<u32> {
        self.compress_above
    }
}

/// Largest WebSocket message for a chunk size and an inline limit.
pub(crate) fn max_message_bytes(chunk_bytes: u32, inline_max: u32) -> usize {
    let chunk = MAX_CHUNK_HEADER_BYTES + chunk_bytes as usize;
    let rows = RESULT_HEAD_BYTES + inline_max as usize;
    (HEADER_BYTES + chunk.max(rows)).max(CONTROL_MESSAGE_BYTES)
}

/// Event for the application.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Host only: a HELLO has arrived; answer with [`Session::accept`] or [`Session::reject`].
    Hello(Hello),
    /// The session is open.
    Opened(Terms),
    /// A message for the application.
    Message(Message),
}

/// Reason why [`Session::send`] refused a message.
#[derive(Debug)]
pub enum SendRefused {
    /// No free step slot or no space in the send buffer: try again after an event.
    Blocked(Outgoing),
    /// The session is not open.
    NotOpen,
    /// The message is inconsistent or too large, or only the other side may send it.
    Impossible(Violation),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    HelloSent,
    AwaitHello,
    AwaitAdmission,
    Open,
    Closed,
}

/// Unanswered steps, per stream and epoch.
#[derive(Default)]
pub(crate) struct Steps {
    by_stream: BTreeMap<(u32, u32), u32>,
    total: u32,
}

impl Steps {
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn begin(&mut self, stream_key: (u32, u32)) {
        *self.by_stream.entry(stream_key).or_default() += 1;
        self.total += 1;
    }

    /// Records an answer. Returns `false` if no such step is unanswered.
    pub(crate) fn finish(&mut self, stream_key: (u32, u32)) -> bool {
        let Some(count) = self.by_stream.get_mut(&stream_key) else {
            return false;
        };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.by_stream.remove(&stream_key);
        }
        true
    }

    /// Removes the steps of an ended stream; returns how many were unanswered.
    pub(crate) fn forget(&mut self, stream_key: (u32, u32)) -> u32 {
        let unanswered = self.by_stream.remove(&stream_key).unwrap_or(0);
        self.total -= unanswered;
        unanswered
    }
}

/// An event, and the tensor whose credit returns when the application takes it.
struct Queued {
    event: Event,
    tensor: Option<u16>,
}

/// State machine of one side; see the module documentation for the order of calls.
pub struct Session {
    config: Config,
    caller: bool,
    state: State,
    closed: Option<SessionClosed>,
    peer_limits: Option<Limits>,
    terms: Option<Terms>,

    sequence_out: u32,
    sequence_in: u32,
    urgent: VecDeque<FrameBuf>,
    outbox: Outbox,
    inbox: Inbox,
    events: VecDeque<Queued>,
    /// A caller's own steps, or the steps that a host has to answer.
    steps: Steps,
    /// Caller only: ended streams with unanswered steps, and how many of these the host may have
    /// answered before it received the close.
    ended: VecDeque<((u32, u32), u32)>,

    opened_at: Time,
    lifetime: Duration,
    last_received: Time,
    ping: Option<(u64, Time)>,
    next_ping: u64,
    credit_blocked: Option<Time>,
    /// Progress of an incomplete message or tensor.
    progress: Option<ProgressTimer>,
    partial_message: u64,
    pings: TokenBucket,
    opens: TokenBucket,
    controls: TokenBucket,

    rtt: Rtt,
    stats: SessionStats,
}

impl Session {
    fn new(config: &Config, caller: bool, now: Time) -> Session {
        let bucket = |per_second| TokenBucket::new(per_second, BURST_SECONDS, now);
        Session {
            caller,
            state: if caller {
                State::HelloSent
            } else {
                State::AwaitHello
            },
            closed: None,
            peer_limits: None,
            terms: None,
            sequence_out: 0,
            sequence_in: 0,
            urgent: VecDeque::new(),
            outbox: Outbox::new(0, 0),
            inbox: Inbox::new(0, 0, 0, false),
            events: VecDeque::new(),
            steps: Steps::default(),
            ended: VecDeque::new(),
            opened_at: now,
            lifetime: config.session_lifetime,
            last_received: now,
            ping: None,
            next_ping: 1,
            credit_blocked: None,
            progress: None,
            partial_message: 0,
            pings: bucket(PINGS_PER_SECOND),
            opens: bucket(config.stream_opens_per_second),
            controls: bucket(config.control_frames_per_second),
            rtt: Rtt::default(),
            stats: SessionStats::default(),
            config: config.clone(),
        }
    }

    /// Session of the connecting side. Its HELLO is the first frame to transmit.
    pub fn caller(config: &Config, hello: &Hello, now: Time) -> Session {
        let mut session = Session::new(config, true, now);
        session
            .urgent
            .push_back(control::client_hello(hello, Limits::of(config)));
        session
    }

    /// Session of the listening side.
    pub fn host(config: &Config, now: Time) -> Session {
        Session::new(config, false, now)
    }

    /// Host: admits the caller after its [`Event::Hello`]. Does nothing in any other state.
    pub fn accept(&mut self, now: Time) {
        if let (State::AwaitAdmission, Some(peer)) = (self.state, self.peer_limits) {
            let agent = concat!("hearthnet/", env!("CARGO_PKG_VERSION"));
            self.urgent
                .push_back(control::server_hello(agent, Limits::of(&self.config)));
            self.open(peer, now);
        }
    }

    /// Host: refuses the caller.
    pub fn reject(&mut self, code: CloseCode) {
        self.fail(code.violation("the session was not admitted"));
    }

    fn open(&mut self, peer: Limits, now: Time) {
        let own = Limits::of(&self.config);
        let chunk_bytes = own.chunk_bytes.min(peer.chunk_bytes);
        let zstd = own.zstd && peer.zstd;
        let terms = Terms {
            caller: self.caller,
            chunk_bytes,
            inline_max: own.inline_max.min(peer.inline_max),
            compress_above: self.config.compress_above.filter(|_| zstd),
            peer_buffer: peer.recv_buffer_bytes,
        };
        self.outbox = Outbox::new(peer.window_chunks, peer.recv_buffer_bytes);
        self.inbox = Inbox::new(own.window_chunks, chunk_bytes, own.recv_buffer_bytes, zstd);
        self.lifetime = own.lifetime().min(peer.lifetime());
        self.opened_at = now;
        self.peer_limits = Some(peer);
        self.terms = Some(terms);
        self.state = State::Open;
        self.push_event(Event::Opened(terms), None);
        if self.caller {
            // First estimate of the round trip. Other implementations of a caller need not send it.
            self.send_ping(now);
        }
    }

    /// Negotiated values; `None` before the session is open.
    pub fn terms(&self) -> Option<Terms> {
        self.terms
    }

    /// Returns whether messages can be sent.
    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Cause of the end, if the session has ended.
    pub fn closed(&self) -> Option<&SessionClosed> {
        self.closed.as_ref()
    }

    /// Size limit of the peer's next WebSocket message.
    pub(crate) fn max_message_bytes(&self) -> usize {
        match self.terms {
            Some(terms) => max_message_bytes(terms.chunk_bytes, terms.inline_max),
            None => CONTROL_MESSAGE_BYTES,
        }
    }

    /// Returns whether the application is so far behind that reading should pause.
    pub(crate) fn is_congested(&self) -> bool {
        let step_slots = self.config.max_steps_in_flight as usize;
        self.events.len() >= MAX_UNDELIVERED + 2 * step_slots
    }

    pub fn stats(&self) -> SessionStats {
        SessionStats {
            rtt_us: self.rtt.smoothed(),
            rtt_min_us: self.rtt.least(),
            steps_in_flight: self.steps.total,
            steps_granted: match (self.caller, self.peer_limits) {
                (_, None) => 0,
                (true, Some(peer)) => peer.max_steps,
                (false, Some(_)) => self.config.max_steps_in_flight,
            },
            credit_available: self.outbox.window().available(),
            credit_granted: self.outbox.window().size(),
            queued_bytes: self.outbox.queued_bytes(),
            buffered_bytes: self.inbox.used(),
            ..self.stats
        }
    }

    // ---------------------------------------------------------------- sending

    /// Queues a message.
    ///
    /// A [`StreamClose`] and a [`StreamError`] never wait, and drop all queued messages of their
    /// stream. A [`Leaving`](Message::Leaving) never waits, and overtakes queued messages. A
    /// [`Step`](crate::Step) waits for one of the host's step slots. Tensors wait while the send
    /// buffer is full. A [`StepResult`](crate::StepResult) without an unanswered step is dropped.
    ///
    /// # Errors
    /// [`SendRefused::Blocked`] gives the message back.
    pub fn send(&mut self, out: Outgoing) -> Result<(), SendRefused> {
        if self.state != State::Open {
            return Err(SendRefused::NotOpen);
        }
        let slots = self.peer_limits.map_or(0, |peer| peer.max_steps);
        let bulk = self.outbox.queued_bulk();
        let blocked = match out.kind {
            FrameType::StreamClose | FrameType::StreamError | FrameType::Leaving => false,
            // Answers are bounded by their steps.
            FrameType::StepResult => false,
            FrameType::Step if self.steps.total >= slots => true,
            _ if out.bulk_bytes() > 0 => {
                bulk > 0 && bulk + out.bulk_bytes() > u64::from(self.config.send_buffer_bytes)
            }
            _ => self.outbox.queued_small() >= MAX_QUEUED_SMALL,
        };
        if blocked {
            return Err(SendRefused::Blocked(out));
        }
        match out.kind {
            FrameType::Step => self.steps.begin(out.stream_key),
            FrameType::StepResult if !self.steps.finish(out.stream_key) => return Ok(()),
            FrameType::StreamClose | FrameType::StreamError => self.end_stream(out.stream_key),
            _ => {}
        }
        self.outbox.push(out);
        Ok(())
    }

    /// Encodes and queues a message; a message that would wait is lost. For tests and simulation:
    /// production code encodes outside of the lock.
    ///
    /// # Errors
    /// The violation of an invalid message, or the reason why it was not queued.
    #[cfg(feature = "fuzzing")]
    pub fn send_message(&mut self, message: &Message) -> Result<(), SendRefused> {
        let terms = self.terms.ok_or(SendRefused::NotOpen)?;
        let out = Outgoing::new(message, &terms).map_err(SendRefused::Impossible)?;
        self.send(out)
    }

    /// Frees everything that this side holds for an ended stream.
    fn end_stream(&mut self, stream_key: (u32, u32)) {
        let unanswered = self.steps.forget(stream_key);
        if self.caller && unanswered > 0 {
            if self.ended.len() == MAX_ENDED {
                self.ended.pop_front();
            }
            self.ended.push_back((stream_key, unanswered));
        }
        self.outbox.purge(stream_key);
        self.inbox.refuse(stream_key);
        let Session { events, inbox, .. } = self;
        events.retain(|queued| {
            let of_stream = matches!(&queued.event, Event::Message(m) if m.is_work_of(stream_key));
            if let (true, Some(tensor)) = (of_stream, queued.tensor) {
                inbox.release(tensor);
            }
            !of_stream
        });
    }

    fn send_ping(&mut self, now: Time) {
        let token = self.next_ping;
        self.next_ping = self.next_ping.wrapping_add(1);
        self.ping = Some((token, now));
        self.urgent.push_back(control::ping(FrameType::Ping, token));
    }

    /// Sends a PING, unless one is unanswered.
    pub fn probe(&mut self, now: Time) {
        if self.state == State::Open && self.ping.is_none() {
            self.send_ping(now);
        }
    }

    /// Time since the last data from the peer.
    pub fn silent_for(&self, now: Time) -> Duration {
        now.since(self.last_received)
    }

    /// Time for which a PING has been unanswered. `None` if there is none, or if other data has
    /// come since.
    pub fn unanswered_for(&self, now: Time) -> Option<Duration> {
        let (_, asked) = self.ping?;
        (self.last_received <= asked).then(|| now.since(asked))
    }

    /// Ends the session and drops its queues; only a BYE is left to transmit.
    pub fn close(&mut self, code: CloseCode, detail: &str) {
        if self.state == State::Closed {
            return;
        }
        let code = if code.is_sendable() {
            code
        } else {
            CloseCode::Internal
        };
        self.finish(SessionClosed::by_us(code, detail));
        // A side that closes drops earlier messages of the peer.
        self.events.clear();
        self.urgent.push_back(
            Bye {
                code,
                detail: detail.to_owned(),
            }
            .frame(),
        );
    }

    /// The connection is lost, or the peer broke a rule of a lower layer.
    pub fn connection_lost(&mut self, closed: SessionClosed) {
        if self.state != State::Closed {
            self.finish(closed);
        }
    }

    fn fail(&mut self, violation: Violation) {
        self.close(violation.code, &violation.detail);
    }

    /// Frees everything at the end.
    fn finish(&mut self, closed: SessionClosed) {
        self.state = State::Closed;
        self.closed = Some(closed);
        self.urgent.clear();
        self.outbox.clear();
        self.inbox.clear();
        self.steps = Steps::default();
        self.ended.clear();
        self.credit_blocked = None;
        self.progress = None;
    }

    /// Next WebSocket binary message to send.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Bytes> {
        let frame = match self.urgent.pop_front() {
            Some(frame) => frame,
            None if self.state != State::Open => return None,
            None => match self.inbox.poll() {
                Some(frame) => frame,
                None => {
                    let Some(sent) = self.outbox.poll() else {
                        if self.outbox.queued_bulk() > 0 {
                            self.credit_blocked.get_or_insert(now);
                        }
                        return None;
                    };
                    if let Some((raw, wire)) = sent.chunk {
                        self.stats.chunks_sent += 1;
                        self.stats.chunk_bytes_sent += raw as u64;
                        self.stats.chunk_wire_bytes_sent += wire as u64;
                    }
                    sent.frame
                }
            },
        };
        // The last sequence number is reserved for the BYE.
        if self.sequence_out == u32::MAX - 1 && self.state == State::Open {
            self.close(
                CloseCode::SessionExpired,
                "the sequence numbers are used up",
            );
            return self.poll_transmit(now);
        }
        self.sequence_out = self.sequence_out.saturating_add(1);
        self.stats.frames_sent += 1;
        self.stats.bytes_sent += frame.len() as u64;
        Some(Wiped::from(frame.into_bytes(self.sequence_out)).into_bytes())
    }

    // -------------------------------------------------------------- receiving

    /// Handles one WebSocket binary message. Any violation closes the session.
    pub fn handle_message(&mut self, now: Time, message: &Bytes) {
        if self.state == State::Closed {
            return;
        }
        self.last_received = now;
        self.partial_message = 0;
        self.stats.frames_received += 1;
        self.stats.bytes_received += message.len() as u64;
        if let Err(violation) = self.frame(now, message) {
            self.fail(violation);
        }
        self.track_progress(now);
    }

    fn frame(&mut self, now: Time, message: &Bytes) -> Result<(), Violation> {
        let limit = self.max_message_bytes();
        let too_big = || {
            CloseCode::FrameTooBig.violation(format!(
                "a message of {} bytes, more than the limit",
                message.len()
            ))
        };
        if message.len() > limit {
            return Err(too_big());
        }
        let (header, body) = Header::decode(message)?;
        // (0 never matches: the first frame is number 1.)
        if self.sequence_in.checked_add(1) != Some(header.sequence) {
            return Err(CloseCode::FrameSequence.violation(format!(
                "frame {} after frame {}",
                header.sequence, self.sequence_in
            )));
        }
        self.sequence_in = header.sequence;
        self.check_state(header.kind)?;
        let limit = match (header.kind, self.terms) {
            (FrameType::TensorData, Some(terms)) => {
                MAX_CHUNK_HEADER_BYTES + terms.chunk_bytes as usize
            }
            (FrameType::Step | FrameType::StepResult, Some(terms)) => {
                RESULT_HEAD_BYTES + terms.inline_max as usize
            }
            _ => CONTROL_MESSAGE_BYTES - HEADER_BYTES,
        };
        if body.len() > limit {
            return Err(too_big());
        }
        match header.kind {
            FrameType::Hello => self.hello(body, now),
            FrameType::Bye => {
                let bye = Bye::read(body)?;
                self.finish(SessionClosed::by_peer(bye.code, bye.detail));
                Ok(())
            }
            FrameType::Ping => {
                let token = control::read_ping(body)?;
                if !self.pings.take(now) {
                    return Err(CloseCode::FrameRate.violation("too many PINGs"));
                }
                self.urgent.push_back(control::ping(FrameType::Pong, token));
                Ok(())
            }
            FrameType::Pong => {
                let token = control::read_ping(body)?;
                match self.ping.take() {
                    Some((sent, at)) if sent == token => {
                        self.rtt.sample(now.0.saturating_sub(at.0));
                        Ok(())
                    }
                    _ => Err(CloseCode::ProtocolState.violation("a PONG without its PING")),
                }
            }
            FrameType::Ack => self
                .outbox
                .ack(Ack::read(body)?)
                .map(|()| self.credit_returned()),
            FrameType::Nack => {
                let nack = Nack::read(body)?;
                self.outbox
                    .nack(nack.tensor)
                    .map(|()| self.credit_returned())
            }
            FrameType::FlowCtl => {
                self.control_rate(now)?;
                self.outbox
                    .widen(FlowCtl::read(body)?.grant)
                    .map(|()| self.credit_returned())
            }
            FrameType::TensorEnd => {
                let given_up = self.inbox.end(TensorEnd::read(body)?.tensor)?;
                if let Some(RowsHead {
                    stream,
                    epoch,
                    kind: RowsKind::Step { .. },
                    ..
                }) = given_up
                {
                    // The step will never be delivered or answered.
                    self.steps.finish((stream, epoch));
                }
                Ok(())
            }
            FrameType::TensorData => {
                let (head, data) = ChunkHead::read(body)?;
                let arrived = self.inbox.chunk(head, header.flags, data)?;
                self.stats.chunks_received += 1;
                if let Some(raw) = arrived.raw {
                    self.stats.chunk_bytes_received += raw as u64;
                    self.stats.chunk_wire_bytes_received += data.len() as u64;
                }
                match arrived.message {
                    Some((message, id)) => self.deliver_tensor(message, id),
                    None => Ok(()),
                }
            }
            FrameType::Step | FrameType::StepResult => {
                let (head, place) = RowsHead::read(header.kind, body)?;
                self.rows(head, place, message)
            }
            kind => {
                self.control_rate(now)?;
                if kind == FrameType::StreamOpen && !self.opens.take(now) {
                    return Err(CloseCode::StreamChurn.violation("streams opened too fast"));
                }
                let message = pipeline::read(kind, body)?;
                match message {
                    Message::StreamClose(StreamClose { stream, epoch }) => {
                        self.end_stream((stream, epoch));
                    }
                    Message::StreamError(StreamError { stream, epoch, .. }) => {
                        self.end_stream((stream, epoch));
                        // Later steps may have crossed the error. The host counts them until this
                        // STREAM_CLOSE arrives, which must happen before their slots are used
                        // again.
                        self.outbox.close(StreamClose { stream, epoch });
                    }
                    _ => {}
                }
                self.deliver(message);
                Ok(())
            }
        }
    }

    /// State table: the frames allowed in each state and direction.
    fn check_state(&self, kind: FrameType) -> Result<(), Violation> {
        let allowed = match (self.state, kind) {
            (State::HelloSent | State::AwaitHello, FrameType::Hello | FrameType::Bye) => true,
            (State::HelloSent | State::AwaitHello | State::AwaitAdmission | State::Closed, _) => {
                // A caller must wait for the host's HELLO.
                kind == FrameType::Bye
            }
            (State::Open, FrameType::Hello) => false,
            (State::Open, kind) => kind.is_callers() != Some(self.caller),
        };
        if allowed {
            Ok(())
        } else {
            Err(CloseCode::ProtocolState.violation(format!("{kind:?} in state {:?}", self.state)))
        }
    }

    fn hello(&mut self, body: &[u8], now: Time) -> Result<(), Violation> {
        if self.caller {
            let (_agent, limits) = control::read_server_hello(body)?;
            self.open(limits, now);
        } else {
            let (hello, limits) = control::read_client_hello(body)?;
            self.peer_limits = Some(limits);
            self.state = State::AwaitAdmission;
            self.push_event(Event::Hello(hello), None);
        }
        Ok(())
    }

    fn control_rate(&mut self, now: Time) -> Result<(), Violation> {
        if self.controls.take(now) {
            Ok(())
        } else {
            Err(CloseCode::FrameRate.violation("too many control frames"))
        }
    }

    fn rows(&mut self, head: RowsHead, place: Place<'_>, message: &Bytes) -> Result<(), Violation> {
        let stream_key = (head.stream, head.epoch);
        let wanted = match head.kind {
            RowsKind::Step { .. } => {
                if self.steps.total >= self.config.max_steps_in_flight {
                    return Err(CloseCode::CreditOverrun.violation(format!(
                        "a step beyond the {} that may wait",
                        self.steps.total
                    )));
                }
                self.steps.begin(stream_key);
                true
            }
            // A large result counts as the answer once its rows are complete: see `deliver_tensor`.
            RowsKind::Result { .. } => match place {
                Place::Inline(_) => self.steps.finish(stream_key),
                Place::Tensor(_) => self.steps.by_stream.contains_key(&stream_key),
            },
        };
        if !wanted {
            self.expect_late(stream_key)?;
        }
        match place {
            Place::Inline(rows) if wanted => {
                let rows = message.slice_ref(rows);
                self.deliver(head.into_message(rows));
                Ok(())
            }
            Place::Inline(_) => Ok(()),
            Place::Tensor(id) if wanted => self.inbox.announce(id, head),
            Place::Tensor(id) => self.inbox.announce_unwanted(id),
        }
    }

    fn push_event(&mut self, event: Event, tensor: Option<u16>) {
        self.events.push_back(Queued { event, tensor });
    }

    fn deliver(&mut self, message: Message) {
        self.push_event(Event::Message(message), None);
    }

    fn deliver_tensor(&mut self, message: Message, id: u16) -> Result<(), Violation> {
        if let Message::StepResult(result) = &message {
            let stream_key = (result.stream, result.epoch);
            if !self.steps.finish(stream_key) {
                self.inbox.release(id);
                return self.expect_late(stream_key);
            }
        }
        self.push_event(Event::Message(message), Some(id));
        Ok(())
    }

    /// Counts a result without an unanswered step. It is allowed if it may have crossed the end of
    /// its stream. Any other is wrong: it names a stream or epoch that the caller did not ask for.
    fn expect_late(&mut self, stream_key: (u32, u32)) -> Result<(), Violation> {
        self.stats.stale_results += 1;
        let may_come = |(ended, left): &&mut ((u32, u32), u32)| *ended == stream_key && *left > 0;
        match self.ended.iter_mut().find(may_come) {
            Some((_, left)) => {
                *left -= 1;
                Ok(())
            }
            None => Err(CloseCode::ProtocolState.violation("a result that no step asked for")),
        }
    }

    /// Next event for the application. Taking a tensor returns its credit.
    pub fn poll_event(&mut self) -> Option<Event> {
        let Queued { event, tensor } = self.events.pop_front()?;
        if let Some(id) = tensor {
            self.inbox.release(id);
        }
        Some(event)
    }

    /// Returns whether an event waits for the application.
    pub(crate) fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns whether an answer to the peer, such as an ACK, waits to be sent.
    pub(crate) fn has_reply(&self) -> bool {
        !self.urgent.is_empty() || self.inbox.has_due()
    }

    // ------------------------------------------------------------------- time

    fn credit_returned(&mut self) {
        self.credit_blocked = None;
    }

    /// Reports `bytes` received of an incomplete message (0: none has begun).
    pub fn handle_partial(&mut self, now: Time, bytes: u64) {
        if self.state != State::Closed && bytes != self.partial_message {
            self.partial_message = bytes;
            self.last_received = now;
        }
        self.track_progress(now);
    }

    fn received_so_far(&self) -> u64 {
        self.stats
            .bytes_received
            .saturating_add(self.partial_message)
    }

    /// Starts or stops the timer for incomplete input.
    fn track_progress(&mut self, now: Time) {
        let open = self.state == State::Open;
        let incomplete = self.partial_message > 0 || self.inbox.is_receiving();
        if !(open && incomplete) {
            self.progress = None;
        } else if self.progress.is_none() || self.inbox.withholds() || self.is_congested() {
            // While the application holds credit back, the peer cannot make progress.
            self.progress = Some(ProgressTimer::new(now, self.received_so_far()));
        }
    }

    /// Time of the next call of [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Time {
        let d = &self.config.deadlines;
        match self.state {
            State::Closed => Time::NEVER,
            State::HelloSent | State::AwaitHello | State::AwaitAdmission => {
                self.opened_at + d.hello
            }
            State::Open => {
                let mut next = self.opened_at + self.lifetime;
                next = next.min(self.keep_alive_at());
                if let Some(since) = self.credit_blocked {
                    next = next.min(since + d.credit);
                }
                if let Some(progress) = self.progress {
                    next = next.min(progress.due(d.stall));
                }
                next
            }
        }
    }

    /// Time of the next PING, or of the end of a silent session.
    fn keep_alive_at(&self) -> Time {
        let keep_alive = self.config.keep_alive;
        match self.ping {
            // A PING is unanswered: the peer has one more interval.
            Some((_, at)) => at.max(self.last_received) + keep_alive,
            None => self.last_received + keep_alive,
        }
    }

    /// Handles all deadlines that have passed.
    pub fn handle_timeout(&mut self, now: Time) {
        if now < self.poll_timeout() {
            return;
        }
        let stalled = |detail: &'static str| CloseCode::PipelineStalled.violation(detail);
        if self.state != State::Open {
            self.fail(stalled("no HELLO within the deadline"));
            return;
        }
        let d = &self.config.deadlines;
        if now >= self.opened_at + self.lifetime {
            self.close(
                CloseCode::SessionExpired,
                "the session reached its lifetime",
            );
            return;
        }
        if self
            .credit_blocked
            .is_some_and(|since| now >= since + d.credit)
        {
            self.close(CloseCode::CreditStall, "no credit within the deadline");
            return;
        }
        let (received, stall, min_rate) = (self.received_so_far(), d.stall, d.min_rate);
        if let Some(progress) = &mut self.progress
            && progress.is_slow(now, received, stall, min_rate)
            && !(self.inbox.withholds() || self.is_congested())
        {
            self.fail(stalled("a message or tensor came in too slowly"));
            return;
        }
        if now >= self.keep_alive_at() {
            if self.is_congested() {
                // Reading is paused while the application is behind, so silence proves nothing.
                self.last_received = now;
            } else if self.ping.is_some() {
                self.close(
                    CloseCode::KeepAlive,
                    "the peer was silent for two keep-alive intervals",
                );
            } else {
                self.send_ping(now);
            }
        }
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("caller", &self.caller)
            .field("state", &self.state)
            .field("closed", &self.closed)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
