//! The session state machine. It does no I/O and reads no clock.
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
//! Call order: [`Session::caller`] or [`Session::host`]; then, whenever something happens,
//! [`handle_message`](Session::handle_message) for each WebSocket binary message,
//! [`handle_timeout`](Session::handle_timeout) when [`poll_timeout`](Session::poll_timeout) has
//! passed, [`send`](Session::send) for the application; and after any of them
//! [`poll_event`](Session::poll_event) for the application and
//! [`poll_transmit`](Session::poll_transmit) until it returns `None`. When
//! [`closed`](Session::closed) says that the session is over and nothing is left to transmit, the
//! WebSocket is closed with the same code.
//!
//! This file is longer than 600 lines with its documentation because the state table, the timers
//! and the bookkeeping of steps have to be read together.

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
use rate::{Pace, Rtt, TokenBucket};

/// Seconds' worth of events that a peer may save up.
const BURST_SECONDS: u32 = 4;
/// PINGs per second that are answered: a keep-alive needs one in 30 s, a measurement a few.
const PINGS_PER_SECOND: u32 = 4;
/// Messages that wait for the application before reading stops. Steps are bounded by their slots;
/// this bounds the small rest.
const MAX_UNDELIVERED: usize = 512;
/// Ended lives of which a caller remembers how many answers may still come. Such an answer was sent
/// before the host read the STREAM_CLOSE, so only the closes that are on their way count: 1,024 are
/// those of 16 s at the default limit of `stream_opens_per_second`.
const MAX_ENDED: usize = 1024;
/// Small messages that wait to be sent before `send` asks the application to wait.
const MAX_QUEUED_SMALL: usize = 1024;

/// What both sides agreed on in HELLO, as far as making messages depends on it.
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

    /// Row blocks up to this size travel inside their step.
    pub fn inline_max(&self) -> u32 {
        self.inline_max
    }

    /// Whether tensors may be compressed, and above which size this side tries.
    pub fn compress_above(&self) -> Option<u32> {
        self.compress_above
    }
}

/// Largest WebSocket message under a chunk size and an inline limit.
pub(crate) fn max_message_bytes(chunk_bytes: u32, inline_max: u32) -> usize {
    let chunk = MAX_CHUNK_HEADER_BYTES + chunk_bytes as usize;
    let rows = RESULT_HEAD_BYTES + inline_max as usize;
    (HEADER_BYTES + chunk.max(rows)).max(CONTROL_MESSAGE_BYTES)
}

/// What the application has to know.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Host only: a HELLO came; answer with [`Session::accept`] or [`Session::reject`].
    Hello(Hello),
    /// The session is open.
    Opened(Terms),
    /// A message for the application.
    Message(Message),
}

/// Why [`Session::send`] did not take a message now.
#[derive(Debug)]
pub enum SendRefused {
    /// No free step slot or no room in the send buffer: try again after an event.
    Blocked(Outgoing),
    /// The session is not open.
    NotOpen,
    /// The message contradicts itself, is too large, or is for the other side to send.
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

/// Steps without an answer, by the life of their stream.
#[derive(Default)]
pub(crate) struct Steps {
    by_life: BTreeMap<(u32, u32), u32>,
    total: u32,
}

impl Steps {
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn begin(&mut self, life: (u32, u32)) {
        *self.by_life.entry(life).or_default() += 1;
        self.total += 1;
    }

    /// Whether such a step was waiting.
    pub(crate) fn finish(&mut self, life: (u32, u32)) -> bool {
        let Some(count) = self.by_life.get_mut(&life) else {
            return false;
        };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.by_life.remove(&life);
        }
        true
    }

    /// Ends a life; returns how many of its steps had no answer.
    pub(crate) fn forget(&mut self, life: (u32, u32)) -> u32 {
        let unanswered = self.by_life.remove(&life).unwrap_or(0);
        self.total -= unanswered;
        unanswered
    }
}

/// An event, and the tensor whose credit is due when the application takes it.
struct Queued {
    event: Event,
    tensor: Option<u16>,
}

/// One side of a session; see the module documentation for the order of calls.
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
    /// A caller's own steps, or the steps a host owes an answer.
    steps: Steps,
    /// Caller only: lives that ended with unanswered steps, and how many of these steps the host may
    /// have answered before it heard of the end.
    ended: VecDeque<((u32, u32), u32)>,

    opened_at: Time,
    lifetime: Duration,
    last_received: Time,
    ping: Option<(u64, Time)>,
    next_ping: u64,
    credit_blocked: Option<Time>,
    /// How far an incomplete message or tensor has come.
    progress: Option<Pace>,
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

    /// The side that connects. Its HELLO is the first thing to transmit.
    pub fn caller(config: &Config, hello: &Hello, now: Time) -> Session {
        let mut session = Session::new(config, true, now);
        session
            .urgent
            .push_back(control::client_hello(hello, Limits::of(config)));
        session
    }

    /// The side that listens.
    pub fn host(config: &Config, now: Time) -> Session {
        Session::new(config, false, now)
    }

    /// Host: admits the caller whose [`Event::Hello`] came. Does nothing in any other state.
    pub fn accept(&mut self, now: Time) {
        if let (State::AwaitAdmission, Some(peer)) = (self.state, self.peer_limits) {
            let agent = concat!("hearthnet/", env!("CARGO_PKG_VERSION"));
            self.urgent
                .push_back(control::server_hello(agent, Limits::of(&self.config)));
            self.open(peer, now);
        }
    }

    /// Host: turns the caller away.
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
        self.tell(Event::Opened(terms), None);
        if self.caller {
            // A first estimate of the round trip. Callers of another make need not expect one.
            self.send_ping(now);
        }
    }

    /// What was agreed, once the session is open.
    pub fn terms(&self) -> Option<Terms> {
        self.terms
    }

    /// Whether messages can be sent.
    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// How the session ended, if it has.
    pub fn closed(&self) -> Option<&SessionClosed> {
        self.closed.as_ref()
    }

    /// Largest WebSocket message that the peer may send now.
    pub(crate) fn max_message_bytes(&self) -> usize {
        match self.terms {
            Some(terms) => max_message_bytes(terms.chunk_bytes, terms.inline_max),
            None => CONTROL_MESSAGE_BYTES,
        }
    }

    /// Whether the application is so far behind that reading should wait for it.
    pub(crate) fn is_congested(&self) -> bool {
        let step_slots = self.config.max_steps_in_flight as usize;
        self.events.len() >= MAX_UNDELIVERED + 2 * step_slots
    }

    /// Counters and gauges.
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

    /// Takes a message to send.
    ///
    /// A [`StreamClose`] and a [`StreamError`] never wait, and drop whatever is queued for their
    /// stream. A [`Leaving`](Message::Leaving) never waits, and overtakes what does. A [`Step`](crate::Step) waits for one of the host's step slots. Tensors wait while
    /// more than the send buffer is queued. A [`StepResult`](crate::StepResult) that nobody waits
    /// for any more is dropped.
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
            // Answers are bounded by the steps they answer.
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
            FrameType::Step => self.steps.begin(out.life),
            FrameType::StepResult if !self.steps.finish(out.life) => return Ok(()),
            FrameType::StreamClose | FrameType::StreamError => self.end_stream(out.life),
            _ => {}
        }
        self.outbox.push(out);
        Ok(())
    }

    /// Encodes and takes a message in one go; what blocks is given up. For tests and simulation:
    /// encoding is better done where no lock is held.
    ///
    /// # Errors
    /// The violation that makes the message impossible, or why it was not taken.
    pub fn send_message(&mut self, message: &Message) -> Result<(), SendRefused> {
        let terms = self.terms.ok_or(SendRefused::NotOpen)?;
        let out = Outgoing::new(message, &terms).map_err(SendRefused::Impossible)?;
        self.send(out)
    }

    /// One life of a stream is over: frees everything that this side keeps for it.
    fn end_stream(&mut self, life: (u32, u32)) {
        let unanswered = self.steps.forget(life);
        if self.caller && unanswered > 0 {
            if self.ended.len() == MAX_ENDED {
                self.ended.pop_front();
            }
            self.ended.push_back((life, unanswered));
        }
        self.outbox.purge(life);
        self.inbox.refuse(life);
        let Session { events, inbox, .. } = self;
        events.retain(|queued| {
            let of_life = matches!(&queued.event, Event::Message(m) if m.is_work_of(life));
            if let (true, Some(tensor)) = (of_life, queued.tensor) {
                inbox.release(tensor);
            }
            !of_life
        });
    }

    /// Lets the peer have `grant` more chunks in flight for the rest of the session.
    ///
    /// # Errors
    /// `credit_overflow` when the window would exceed 1,024 chunks.
    pub fn widen_window(&mut self, grant: u32) -> Result<(), Violation> {
        if self.state == State::Open {
            self.inbox.widen(grant)?;
            self.urgent.push_back(FlowCtl { grant }.frame());
        }
        Ok(())
    }

    fn send_ping(&mut self, now: Time) {
        let token = self.next_ping;
        self.next_ping = self.next_ping.wrapping_add(1);
        self.ping = Some((token, now));
        self.urgent.push_back(control::ping(FrameType::Ping, token));
    }

    /// Asks the peer for a sign of life, unless it has been asked and has not answered.
    pub fn probe(&mut self, now: Time) {
        if self.state == State::Open && self.ping.is_none() {
            self.send_ping(now);
        }
    }

    /// For how long nothing has come from the peer.
    pub fn silent_for(&self, now: Time) -> Duration {
        now.since(self.last_received)
    }

    /// For how long a PING has been waiting for its PONG, while nothing else came either. `None`
    /// when nothing is waited for, or the peer has been heard since.
    pub fn unanswered_for(&self, now: Time) -> Option<Duration> {
        let (_, asked) = self.ping?;
        (self.last_received <= asked).then(|| now.since(asked))
    }

    /// Ends the session. Whatever is queued is dropped; a BYE is all that is left to transmit.
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
        // What the peer sent before is of no interest to a side that closes.
        self.events.clear();
        self.urgent.push_back(
            Bye {
                code,
                detail: detail.to_owned(),
            }
            .frame(),
        );
    }

    /// The connection is gone, or broke the rules below the level of frames.
    pub fn connection_lost(&mut self, closed: SessionClosed) {
        if self.state != State::Closed {
            self.finish(closed);
        }
    }

    fn fail(&mut self, violation: Violation) {
        self.close(violation.code, &violation.detail);
    }

    /// Frees everything on the way out.
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

    /// The next WebSocket binary message to send, if there is one.
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
        // The last number is for the BYE.
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

    /// Takes one WebSocket binary message. Whatever is wrong with it closes the session.
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
                .map(|()| self.credit_came()),
            FrameType::Nack => {
                let nack = Nack::read(body)?;
                self.stats.tensors_refused += 1;
                self.outbox.nack(nack.tensor).map(|()| self.credit_came())
            }
            FrameType::FlowCtl => {
                self.control_rate(now)?;
                self.outbox
                    .widen(FlowCtl::read(body)?.grant)
                    .map(|()| self.credit_came())
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
                    // The step will never be delivered, so nobody will answer it.
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
                        // Steps may have crossed the error. The host counts them until it hears
                        // that the caller has let go of the stream, which has to be before their
                        // slots are used.
                        self.outbox.close(StreamClose { stream, epoch });
                    }
                    _ => {}
                }
                self.deliver(message);
                Ok(())
            }
        }
    }

    /// The state table: which frame may come when, and from whom.
    fn check_state(&self, kind: FrameType) -> Result<(), Violation> {
        let allowed = match (self.state, kind) {
            (State::HelloSent | State::AwaitHello, FrameType::Hello | FrameType::Bye) => true,
            (State::HelloSent | State::AwaitHello | State::AwaitAdmission | State::Closed, _) => {
                // A caller waits for the host's HELLO before it goes on.
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
            self.tell(Event::Hello(hello), None);
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
        let life = (head.stream, head.epoch);
        let wanted = match head.kind {
            RowsKind::Step { .. } => {
                if self.steps.total >= self.config.max_steps_in_flight {
                    return Err(CloseCode::CreditOverrun.violation(format!(
                        "a step beyond the {} that may wait",
                        self.steps.total
                    )));
                }
                self.steps.begin(life);
                true
            }
            // A large result counts as the answer when its rows are here: see `deliver_tensor`.
            RowsKind::Result { .. } => match place {
                Place::Inline(_) => self.steps.finish(life),
                Place::Tensor(_) => self.steps.by_life.contains_key(&life),
            },
        };
        if !wanted {
            self.expect_late(life)?;
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

    fn tell(&mut self, event: Event, tensor: Option<u16>) {
        self.events.push_back(Queued { event, tensor });
    }

    fn deliver(&mut self, message: Message) {
        self.tell(Event::Message(message), None);
    }

    fn deliver_tensor(&mut self, message: Message, id: u16) -> Result<(), Violation> {
        if let Message::StepResult(result) = &message {
            let life = (result.stream, result.epoch);
            if !self.steps.finish(life) {
                self.inbox.release(id);
                return self.expect_late(life);
            }
        }
        self.tell(Event::Message(message), Some(id));
        Ok(())
    }

    /// Counts a result without a waiting step. It is allowed where it may have crossed the end of its
    /// life; any other is a wrong answer, for another stream or epoch than the caller asked about.
    fn expect_late(&mut self, life: (u32, u32)) -> Result<(), Violation> {
        self.stats.stale_results += 1;
        let may_come = |(ended, left): &&mut ((u32, u32), u32)| *ended == life && *left > 0;
        match self.ended.iter_mut().find(may_come) {
            Some((_, left)) => {
                *left -= 1;
                Ok(())
            }
            None => Err(CloseCode::ProtocolState.violation("a result that no step asked for")),
        }
    }

    /// The next event for the application. Taking a tensor returns its credit.
    pub fn poll_event(&mut self) -> Option<Event> {
        let Queued { event, tensor } = self.events.pop_front()?;
        if let Some(id) = tensor {
            self.inbox.release(id);
        }
        Some(event)
    }

    /// Whether an event waits for the application.
    pub(crate) fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether an answer to the peer, such as an ACK, waits to be sent.
    pub(crate) fn has_reply(&self) -> bool {
        !self.urgent.is_empty() || self.inbox.has_due()
    }

    // ------------------------------------------------------------------- time

    fn credit_came(&mut self) {
        self.credit_blocked = None;
    }

    /// The transport has received `bytes` of a message that is not complete yet (0: none begun).
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

    /// Starts and stops the clock for what is incomplete.
    fn track_progress(&mut self, now: Time) {
        let open = self.state == State::Open;
        let incomplete = self.partial_message > 0 || self.inbox.is_receiving();
        if !(open && incomplete) {
            self.progress = None;
        } else if self.progress.is_none() || self.inbox.withholds() || self.is_congested() {
            // While the application holds credit back, the peer cannot be blamed.
            self.progress = Some(Pace::new(now, self.received_so_far()));
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called next.
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

    /// When to PING, or to give the peer up.
    fn keep_alive_at(&self) -> Time {
        let keep_alive = self.config.keep_alive;
        match self.ping {
            // Asked and not answered: the peer has one more interval.
            Some((_, at)) => at.max(self.last_received) + keep_alive,
            None => self.last_received + keep_alive,
        }
    }

    /// Acts on every deadline that has passed.
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
                // Nothing is read while the application is behind: no sign of death.
                self.last_received = now;
            } else if self.ping.is_some() {
                self.close(CloseCode::KeepAlive, "the peer has fallen silent");
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
