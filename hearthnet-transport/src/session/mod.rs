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
//! passed, and the crate's `Protocol::send` for the application. After any of them:
//! [`poll_event`](Session::poll_event) for the application, and
//! [`poll_transmit`](Session::poll_transmit) until it returns `None`.
//!
//! Once [`closed`](Session::closed) returns a cause and all is transmitted, close the WebSocket
//! with the same code.
//!
//! | concept | file |
//! |---|---|
//! | construction, sending, events, end | `mod.rs` |
//! | received frames: state table, rates, answers | `receive.rs` |
//! | keep-alive, progress, deadlines | `timers.rs` |
//! | unanswered steps | `steps.rs` |

mod inbox;
mod outbox;
pub(crate) mod plain;
pub(crate) mod protocol;
pub(crate) mod rate;
mod receive;
mod stats;
mod steps;
mod terms;
mod timers;

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

pub(crate) use outbox::Outgoing;
pub use stats::SessionStats;
pub(crate) use steps::Steps;
pub use terms::Terms;

use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::{CONTROL_MESSAGE_BYTES, Config};
use crate::message::Message;
use crate::secret::Wiped;
use crate::time::Time;
use crate::wire::cbor::Body as _;
use crate::wire::chunk::MAX_CHUNK_HEADER_BYTES;
use crate::wire::control::{self, Bye, Hello, Limits};
use crate::wire::pipeline::RESULT_HEAD_BYTES;
use crate::wire::{FrameBuf, FrameType, HEADER_BYTES};
use inbox::Inbox;
use outbox::Outbox;
use protocol::{Frame, Progress, Protocol, Transmit};
use rate::{ProgressTimer, TokenBucket};

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

/// Reason why [`Session::send_message`] refused a message.
#[cfg(feature = "fuzzing")]
#[derive(Debug)]
pub enum SendRefused {
    /// No free step slot or no space in the send buffer: try again after an event.
    Blocked,
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

/// Observer of a session: is told the statistics after each change, and the cause of the end last.
pub(crate) type Observer = Box<dyn FnMut(&SessionStats, Option<&SessionClosed>) + Send>;

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
    /// Events, each with the tensor whose credit returns when the application takes it.
    events: VecDeque<(Event, Option<u16>)>,
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

    stats: SessionStats,
    pub(crate) observer: Option<Observer>,
}

impl Session {
    fn new(config: &Config, state: State, now: Time) -> Session {
        let bucket = |per_second| TokenBucket::new(per_second, BURST_SECONDS, now);
        Session {
            caller: state == State::HelloSent,
            state,
            closed: None,
            peer_limits: None,
            terms: None,
            sequence_out: 0,
            sequence_in: 0,
            urgent: VecDeque::new(),
            outbox: Outbox::new(0, 0),
            inbox: Inbox::default(),
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
            stats: SessionStats::default(),
            observer: None,
            config: config.clone(),
        }
    }

    /// Session of the connecting side. Its HELLO is the first frame to transmit.
    pub fn caller(config: &Config, hello: &Hello, now: Time) -> Session {
        let mut session = Session::new(config, State::HelloSent, now);
        let hello = control::client_hello(hello, Limits::of(config));
        session.urgent.push_back(hello);
        session
    }

    /// Session of the listening side.
    pub fn host(config: &Config, now: Time) -> Session {
        Session::new(config, State::AwaitHello, now)
    }

    /// Host: admits the caller after its [`Event::Hello`]. Does nothing in any other state.
    pub fn accept(&mut self, now: Time) {
        if let (State::AwaitAdmission, Some(peer)) = (self.state, self.peer_limits) {
            let agent = concat!("hearthnet/", env!("CARGO_PKG_VERSION"));
            let hello = control::server_hello(agent, Limits::of(&self.config));
            self.urgent.push_back(hello);
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
            receipts: own.receipts_with(&peer),
            refuses_receipts: own.receipts > 0 && peer.receipts == 0,
            peer_buffer: peer.recv_buffer_bytes,
        };
        self.outbox = Outbox::new(peer.window_chunks, peer.recv_buffer_bytes);
        self.inbox = Inbox::new(own.window_chunks, chunk_bytes, own.recv_buffer_bytes, zstd);
        self.lifetime = own.lifetime().min(peer.lifetime());
        self.opened_at = now;
        self.peer_limits = Some(peer);
        self.terms = Some(terms);
        self.state = State::Open;
        self.events.push_back((Event::Opened(terms), None));
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

    pub fn stats(&self) -> SessionStats {
        SessionStats {
            steps_in_flight: self.steps.total,
            steps_granted: match (self.caller, self.peer_limits) {
                (_, None) => 0,
                (true, Some(peer)) => peer.max_steps,
                (false, Some(_)) => self.config.max_steps_in_flight,
            },
            credit_available: self.outbox.window.available(),
            credit_granted: self.outbox.window.size,
            queued_bytes: self.outbox.queued_bytes,
            buffered_bytes: self.inbox.used,
            ..self.stats
        }
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
        match self.send(out) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(SendRefused::Blocked),
            Err(_) => Err(SendRefused::NotOpen),
        }
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
        events.retain(|(event, tensor)| {
            let of_stream = matches!(event, Event::Message(m) if m.is_work_of(stream_key));
            if let (true, Some(tensor)) = (of_stream, tensor) {
                inbox.release(*tensor);
            }
            !of_stream
        });
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
        let detail = detail.to_owned();
        self.urgent.push_back(Bye { code, detail }.frame());
    }

    /// The connection is lost, or the peer broke a rule of a lower layer.
    pub fn connection_lost(&mut self, closed: SessionClosed) {
        if self.state != State::Closed {
            self.finish(closed);
        }
    }

    /// Frees everything at the end.
    fn finish(&mut self, closed: SessionClosed) {
        self.state = State::Closed;
        self.closed = Some(closed);
        self.urgent.clear();
        self.outbox = Outbox::new(0, 0);
        self.inbox = Inbox::default();
        self.steps = Steps::default();
        self.ended.clear();
        self.credit_blocked = None;
        self.progress = None;
    }

    /// Next WebSocket binary message to send.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Bytes> {
        let mut frame = self.urgent.pop_front();
        if self.state == State::Open {
            frame = frame.or_else(|| self.inbox.poll());
            frame = frame.or_else(|| self.outbox.poll());
            if frame.is_none() && self.outbox.queued_bulk > 0 {
                self.credit_blocked.get_or_insert(now);
            }
        }
        let frame = frame?;
        // The last sequence number is reserved for the BYE.
        if self.sequence_out == u32::MAX - 1 && self.state == State::Open {
            let detail = "the sequence numbers are used up";
            self.close(CloseCode::SessionExpired, detail);
            return self.poll_transmit(now);
        }
        self.sequence_out = self.sequence_out.saturating_add(1);
        self.stats.frames_sent += 1;
        self.stats.bytes_sent += frame.len() as u64;
        Some(Wiped(frame.into_bytes(self.sequence_out)).into_bytes())
    }

    /// Next event for the application. Taking a tensor returns its credit.
    pub fn poll_event(&mut self) -> Option<Event> {
        let (event, tensor) = self.events.pop_front()?;
        if let Some(id) = tensor {
            self.inbox.release(id);
        }
        Some(event)
    }
}

impl Protocol for Session {
    type Outgoing = Outgoing;
    type Incoming = Message;

    fn closed(&self) -> Option<&SessionClosed> {
        self.closed.as_ref()
    }

    fn close(&mut self, code: CloseCode, detail: &str) {
        Session::close(self, code, detail);
    }

    fn fail(&mut self, violation: Violation) {
        Session::close(self, violation.code, &violation.detail);
    }

    fn connection_lost(&mut self, closed: SessionClosed) {
        Session::connection_lost(self, closed);
    }

    fn drop_waiting(&mut self) {
        while self.poll_event().is_some() {}
    }

    fn message_limit(&self) -> Option<usize> {
        // In an open session, messages may be larger than a HELLO.
        self.is_open().then(|| self.max_message_bytes())
    }

    /// A [`StreamClose`](crate::StreamClose) and a [`StreamError`](crate::StreamError) never wait,
    /// and drop all queued messages of their stream. A [`Leaving`](Message::Leaving) and a
    /// [`Receipt`](crate::Receipt) never wait, and overtake queued messages. A [`Step`](crate::Step) waits for one of the host's step
    /// slots. Tensors wait while the send buffer is full. A [`StepResult`](crate::StepResult)
    /// without an unanswered step is dropped.
    fn send(&mut self, out: Outgoing) -> Result<Option<Outgoing>, SessionClosed> {
        if self.state != State::Open {
            let detail = "the session is not open yet";
            let not_yet = || SessionClosed::by_us(CloseCode::ProtocolState, detail);
            return Err(self.closed.clone().unwrap_or_else(not_yet));
        }
        let slots = self.peer_limits.map_or(0, |peer| peer.max_steps);
        let bulk = self.outbox.queued_bulk;
        let blocked = match out.kind {
            FrameType::StreamClose | FrameType::StreamError => false,
            FrameType::Leaving | FrameType::Receipt => false,
            // Answers are bounded by their steps.
            FrameType::StepResult => false,
            FrameType::Step if self.steps.total >= slots => true,
            _ if out.bulk_bytes() > 0 => {
                bulk > 0 && bulk + out.bulk_bytes() > u64::from(self.config.send_buffer_bytes)
            }
            _ => self.outbox.queued_small >= MAX_QUEUED_SMALL,
        };
        if blocked {
            return Ok(Some(out));
        }
        match out.kind {
            FrameType::Step => self.steps.begin(out.stream_key),
            FrameType::StepResult if !self.steps.finish(out.stream_key) => return Ok(None),
            FrameType::StreamClose | FrameType::StreamError => self.end_stream(out.stream_key),
            _ => {}
        }
        self.outbox.push(out);
        Ok(None)
    }

    fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        let frame = Session::poll_transmit(self, now)?;
        Some(Transmit::Message(Frame::Binary(frame)))
    }

    fn has_reply(&self) -> bool {
        !self.urgent.is_empty() || self.inbox.has_due()
    }

    fn handle_message(&mut self, now: Time, message: Frame) {
        match message {
            Frame::Binary(message) => Session::handle_message(self, now, &message),
            Frame::Text(_) => Session::close(self, CloseCode::WebSocket, "a text message"),
        }
    }

    fn take(&mut self) -> Option<Message> {
        loop {
            // The other events are handled while the session opens.
            if let Event::Message(message) = self.poll_event()? {
                return Some(message);
            }
        }
    }

    fn has_incoming(&self) -> bool {
        !self.events.is_empty()
    }

    fn is_congested(&self) -> bool {
        let step_slots = self.config.max_steps_in_flight as usize;
        self.events.len() >= MAX_UNDELIVERED + 2 * step_slots
    }

    fn handle_progress(&mut self, now: Time, progress: Progress) {
        if let Some(partial) = progress.partial {
            self.handle_partial(now, partial);
        }
        // Called after every change, so that the gauges stay current.
        let stats = self.stats();
        if let Some(observer) = &mut self.observer {
            observer(&stats, None);
        }
    }

    fn poll_timeout(&self) -> Time {
        Session::poll_timeout(self)
    }

    fn handle_timeout(&mut self, now: Time) {
        Session::handle_timeout(self, now);
    }

    fn ended(&mut self) {
        let stats = self.stats();
        if let Some(observer) = &mut self.observer {
            observer(&stats, self.closed.as_ref());
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
