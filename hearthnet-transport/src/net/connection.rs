//! An open session and the task that drives it.
//!
//! A session, its socket and its timers sit behind one mutex. The *driver* task owns the reading:
//! it decodes what arrives and wakes whoever waits in [`Connection::recv`], once. Sending needs no
//! task: [`Sender::send`] encodes the message outside the lock, takes the lock, and writes to the
//! socket itself, with the driver's waker in case the socket is full. So a decode row costs one
//! wake-up on the way in and none on the way out. The lock is held for one message at a time.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::{Sink, Stream};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::Message as WsMessage;

use super::BoxIo;
use super::close_handshake::{CloseHandshake, broken_rule, closed_by, lost};
use super::closer::Closer;
use super::frame_limiter::Limited;
use super::local;
use super::metrics::{SessionMetrics, Side};
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::Config;
use crate::cpu_latency;
use crate::message::Message;
use crate::session::{Event, Outgoing, SendRefused, Session, SessionStats, Terms};
use crate::time::Time;
use crate::wire::control::Hello;

pub(crate) type Socket = WebSocketStream<Limited<TlsStream<BoxIo>>>;

/// Messages that the driver takes before it lets others run.
const READ_BUDGET: usize = 16;
/// Bytes that a sender writes in its own task; the driver does the rest.
const SENDER_WRITE_BUDGET: usize = 256 * 1024;

/// Why a message could not be sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The session is over.
    #[error(transparent)]
    Closed(#[from] SessionClosed),
    /// The message is wrong in itself: its data does not have the size that its shape says, it is
    /// larger than the peer could ever take, or it is for the other side to send.
    #[error("the message cannot be sent: {0}")]
    Message(Violation),
}

struct Inner {
    session: Session,
    /// `None` once the connection is gone.
    socket: Option<Socket>,
    /// Set by the driver's first poll.
    driver: Option<Waker>,
    receiver: Option<Waker>,
    /// When the driver's timer fires.
    armed: Time,
    /// Something was written and not flushed.
    dirty: bool,
    close_handshake: CloseHandshake,
    numbers: SessionMetrics,
}

/// What the driver, the connection and its senders share.
pub(crate) struct Shared {
    inner: Mutex<Inner>,
    /// Slots, credit or the end of the session: whoever waits to send tries again.
    room: Notify,
    start: Instant,
    peer: NodeId,
    close_deadline: Duration,
}

/// What the caller of [`Inner::write`] has to do next.
#[derive(PartialEq, Eq)]
enum Written {
    All,
    /// The budget ran out: there is more.
    More,
}

impl Inner {
    /// Queues one message, or gives it back.
    fn queue(&mut self, out: Outgoing) -> Result<Option<Outgoing>, SessionClosed> {
        match self.session.send(out) {
            Ok(()) => Ok(None),
            Err(SendRefused::Blocked(out)) => Ok(Some(out)),
            Err(SendRefused::NotOpen | SendRefused::Impossible(_)) => {
                Err(self.session.closed().cloned().unwrap_or_else(|| {
                    SessionClosed::by_us(CloseCode::ProtocolState, "the session is not open yet")
                }))
            }
        }
    }

    /// Writes what the session has to send, and flushes.
    fn write(&mut self, now: Time, cx: &mut Context<'_>, mut budget: usize) -> Written {
        let Some(socket) = &mut self.socket else {
            return Written::All;
        };
        let mut socket = Pin::new(socket);
        let result = loop {
            match socket.as_mut().poll_ready(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => break Err(error),
                Poll::Pending => return Written::All,
            }
            if budget == 0 {
                break Ok(Written::More);
            }
            let Some(frame) = self.session.poll_transmit(now) else {
                break Ok(Written::All);
            };
            budget = budget.saturating_sub(frame.len());
            self.numbers.sent(frame.len());
            self.dirty = true;
            if let Err(error) = socket.as_mut().start_send(WsMessage::Binary(frame)) {
                break Err(error);
            }
        };
        let result = result.and_then(|written| {
            if !self.dirty {
                return Ok(written);
            }
            match socket.poll_flush(cx) {
                Poll::Ready(Ok(())) => {
                    self.dirty = false;
                    Ok(written)
                }
                Poll::Ready(Err(error)) => Err(error),
                Poll::Pending => Ok(written),
            }
        });
        // Whatever came or was queued, writing follows: the gauges are right from here on.
        self.numbers.note(&self.session.stats());
        match result {
            Ok(written) => written,
            Err(error) => {
                self.session.connection_lost(lost(&error));
                self.socket = None;
                Written::All
            }
        }
    }

    /// Writes from outside of the driver, which is woken when it has to go on.
    fn write_for_driver(&mut self, now: Time) {
        // Before the driver's first poll there is nothing to hand on to; it will write then.
        let Some(waker) = self.driver.clone() else {
            return;
        };
        let written = self.write(now, &mut Context::from_waker(&waker), SENDER_WRITE_BUDGET);
        let earlier_deadline = self.session.poll_timeout() < self.armed;
        if written == Written::More || earlier_deadline || self.session.closed().is_some() {
            waker.wake();
        }
    }

    /// Takes one message from the socket. `true`: there may be another.
    fn read(&mut self, now: Time, cx: &mut Context<'_>) -> bool {
        if self.session.is_congested() {
            return false;
        }
        let Some(socket) = &mut self.socket else {
            return false;
        };
        let item = match Pin::new(&mut *socket).poll_next(cx) {
            Poll::Ready(item) => item,
            Poll::Pending => {
                let partial = socket.get_ref().limiter.partial();
                self.session.handle_partial(now, partial);
                return false;
            }
        };
        match item {
            Some(Ok(WsMessage::Binary(message))) => {
                self.numbers.received(message.len());
                self.session.handle_message(now, &message);
                true
            }
            // Counted by the guard, answered by tungstenite.
            Some(Ok(WsMessage::Ping(_) | WsMessage::Pong(_))) => true,
            Some(Ok(WsMessage::Close(frame))) => {
                self.session.connection_lost(closed_by(frame));
                true
            }
            Some(Ok(WsMessage::Text(_) | WsMessage::Frame(_))) => {
                self.session.close(CloseCode::WebSocket, "a text message");
                true
            }
            Some(Err(error)) => {
                match broken_rule(&error) {
                    Some(violation) => {
                        self.session.close(violation.code, &violation.detail);
                        self.close_handshake.deaf = true;
                    }
                    None => {
                        self.session.connection_lost(lost(&error));
                        self.socket = None;
                    }
                }
                false
            }
            None => {
                let ended = SessionClosed::by_peer(CloseCode::Lost, "the connection ended");
                self.session.connection_lost(ended);
                self.socket = None;
                false
            }
        }
    }

    /// Once the session is open, messages may be larger than a HELLO.
    fn set_message_limit(&mut self) {
        if let (Some(socket), true) = (&mut self.socket, self.session.is_open()) {
            socket
                .get_mut()
                .limiter
                .set_limit(self.session.max_message_bytes());
        }
    }

    /// The closing handshake, once the session is over. `true`: the connection is done.
    fn finish(&mut self, now: Time, deadline: Duration, cx: &mut Context<'_>) -> bool {
        let Some(code) = self.session.closed().map(|closed| closed.code) else {
            return false;
        };
        let Some(socket) = &mut self.socket else {
            return true;
        };
        // Not before the BYE: nothing may follow a close frame.
        let ready = !self.session.has_reply();
        self.close_handshake
            .poll(Pin::new(socket), code, ready, now, deadline, cx)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing that runs under the lock leaves the session half changed.
        self.inner.lock()
    }

    fn now(&self) -> Time {
        Time::from(self.start.elapsed())
    }

    /// Queues and writes one message, or gives it back.
    fn try_send(&self, out: Outgoing) -> Result<Option<Outgoing>, SessionClosed> {
        let now = self.now();
        cpu_latency::touch();
        let mut inner = self.lock();
        let back = inner.queue(out)?;
        if back.is_none() {
            inner.write_for_driver(now);
        }
        Ok(back)
    }

    /// Queues one message, or gives it back, and leaves the writing to whoever writes next.
    fn try_queue(&self, out: Outgoing) -> Result<Option<Outgoing>, SessionClosed> {
        self.lock().queue(out)
    }

    /// Writes what is queued.
    fn flush(&self) {
        let now = self.now();
        cpu_latency::touch();
        self.lock().write_for_driver(now);
    }

    /// Queues several messages and writes them together. How many there was no room for.
    fn try_send_all(&self, all: Vec<Outgoing>) -> Result<usize, SessionClosed> {
        let now = self.now();
        cpu_latency::touch();
        let mut inner = self.lock();
        let mut left = 0;
        for out in all {
            left += usize::from(inner.queue(out)?.is_some());
        }
        inner.write_for_driver(now);
        Ok(left)
    }

    fn close(&self, code: CloseCode, detail: &str) {
        self.end(code, detail, false);
    }

    /// Ends the session from outside: what had come and was not taken is dropped.
    pub(crate) fn cut(&self, code: CloseCode) {
        self.end(code, "", true);
    }

    fn end(&self, code: CloseCode, detail: &str, cut: bool) {
        let now = self.now();
        let mut inner = self.lock();
        inner.session.close(code, detail);
        while cut && inner.session.poll_event().is_some() {}
        inner.write_for_driver(now);
        let receiver = inner.receiver.take();
        drop(inner);
        if let Some(waker) = receiver {
            waker.wake();
        }
        self.room.notify_waiters();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().session.closed().is_some()
    }

    /// The next event, or the end of the session.
    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<Result<Event, SessionClosed>> {
        let now = self.now();
        let mut inner = self.lock();
        let was_congested = inner.session.is_congested();
        if let Some(event) = inner.session.poll_event() {
            if inner.session.has_reply() {
                inner.write_for_driver(now);
            }
            if was_congested && let Some(driver) = &inner.driver {
                driver.wake_by_ref();
            }
            return Poll::Ready(Ok(event));
        }
        if let Some(closed) = inner.session.closed() {
            return Poll::Ready(Err(closed.clone()));
        }
        match &mut inner.receiver {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// One turn of the driver. Ready when the connection is done.
    fn poll_drive(&self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<()> {
        for turn in 0.. {
            if turn == READ_BUDGET {
                cx.waker().wake_by_ref();
                break;
            }
            let now = self.now();
            let mut inner = self.lock();
            if turn == 0 {
                match &mut inner.driver {
                    Some(waker) => waker.clone_from(cx.waker()),
                    none => *none = Some(cx.waker().clone()),
                }
            }
            if inner.session.closed().is_some() || !inner.read(now, cx) {
                break;
            }
        }
        let now = self.now();
        let mut inner = self.lock();
        inner.session.handle_timeout(now);
        if inner.write(now, cx, usize::MAX) == Written::More {
            cx.waker().wake_by_ref();
        }
        let done = inner.finish(now, self.close_deadline, cx);
        if done {
            inner.socket = None;
        }

        // The timer is only moved when it would fire too late: early wake-ups are cheap.
        let mut deadline = inner.session.poll_timeout();
        if let Some(since) = inner.close_handshake.since {
            deadline = deadline.min(since + self.close_deadline);
        }
        let fired = now >= inner.armed;
        if !done && (deadline < inner.armed || fired) {
            inner.armed = deadline;
            let at = Duration::from_micros(deadline.0.min(MAX_TIMER_MICROS));
            timer.as_mut().reset(self.start + at);
        }
        let receiver = match inner.session.has_event() || inner.session.closed().is_some() {
            true => inner.receiver.take(),
            false => None,
        };
        drop(inner);
        if let Some(waker) = receiver {
            waker.wake();
        }
        self.room.notify_waiters();
        if done {
            return Poll::Ready(());
        }
        if timer.poll(cx).is_ready() {
            // It was just set to a moment that has passed: look again.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

/// A year: longer timers than this are cut, and set again when they fire.
pub(crate) const MAX_TIMER_MICROS: u64 = 365 * 86_400 * 1_000_000;

/// What to do when a connection is gone.
pub(crate) type Ended = Box<dyn FnOnce(&SessionClosed) + Send>;

/// Starts driving a session over a socket.
pub(crate) fn start(
    session: Session,
    socket: Socket,
    peer: NodeId,
    start: Instant,
    config: &Config,
    side: Side,
    ended: Ended,
) -> Pending {
    let shared = Arc::new(Shared {
        inner: Mutex::new(Inner {
            session,
            socket: Some(socket),
            driver: None,
            receiver: None,
            armed: Time::ZERO,
            dirty: false,
            close_handshake: CloseHandshake::default(),
            numbers: SessionMetrics::new(side),
        }),
        room: Notify::new(),
        start,
        peer,
        close_deadline: config.deadlines.close,
    });
    let driven = shared.clone();
    tokio::spawn(async move {
        let mut timer = pin!(tokio::time::sleep_until(driven.start));
        poll_fn(|cx| driven.poll_drive(cx, timer.as_mut())).await;
        // The driver only ends with the session.
        let mut inner = driven.lock();
        let closed = inner.session.closed().cloned();
        if let Some(closed) = closed {
            inner.numbers.end(&closed);
            drop(inner);
            ended(&closed);
        }
    });
    Pending {
        shared: Some(shared),
    }
}

/// A session whose HELLOs are still under way. Closed when dropped.
pub(crate) struct Pending {
    shared: Option<Arc<Shared>>,
}

impl Pending {
    /// The next event of the handshake, or the end.
    pub(crate) async fn event(&mut self) -> Result<Event, SessionClosed> {
        match &self.shared {
            Some(shared) => poll_fn(|cx| shared.poll_event(cx)).await,
            None => Err(SessionClosed::by_us(CloseCode::Internal, "already open")),
        }
    }

    /// Answers the caller's HELLO.
    pub(crate) fn answer(&self, answer: Result<(), CloseCode>) {
        let Some(shared) = &self.shared else { return };
        let now = shared.now();
        let mut inner = shared.lock();
        match answer {
            Ok(()) => inner.session.accept(now),
            Err(code) => inner.session.reject(code),
        }
        inner.set_message_limit();
        inner.write_for_driver(now);
    }

    /// The open connection.
    pub(crate) fn open(mut self, hello: Hello, terms: Terms) -> Option<Connection> {
        let shared = self.shared.take()?;
        let sender = Sender::over(Link::Socket(shared), terms);
        Some(Connection::over(sender, hello.purpose, hello.token))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            shared.close(CloseCode::Normal, "");
        }
    }
}

/// An open session. Closed, with the code `normal`, when dropped.
pub struct Connection {
    sender: Sender,
    purpose: String,
    token: Vec<u8>,
}

impl Connection {
    pub(crate) fn over(sender: Sender, purpose: String, token: Vec<u8>) -> Connection {
        Connection {
            sender,
            purpose,
            token,
        }
    }

    /// The peer's key, proved by the TLS handshake; this process's own, if it is the peer.
    pub fn peer(&self) -> NodeId {
        self.sender.peer()
    }

    /// Whether the other end is in this process.
    pub fn is_here(&self) -> bool {
        matches!(self.sender.link, Link::Local(_))
    }

    /// What the caller's HELLO said the session is for.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// The session token of the caller's HELLO, so that its right can be watched while the session
    /// is open.
    pub fn token(&self) -> &[u8] {
        &self.token
    }

    /// What was agreed on in HELLO.
    pub fn terms(&self) -> Terms {
        self.sender.terms
    }

    /// Counters and gauges.
    pub fn stats(&self) -> SessionStats {
        self.sender.stats()
    }

    /// A handle for sending, for other tasks and threads.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// The next message. May be dropped and called again; nothing is lost.
    ///
    /// Not receiving is how the application slows a peer down: tensors that it has not taken keep
    /// their credit, and far too many untaken messages stop the reading altogether.
    ///
    /// # Errors
    /// When the session is over, and whatever the peer sent before has been taken.
    pub async fn recv(&mut self) -> Result<Message, SessionClosed> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The same, for hand-written futures.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Message, SessionClosed>> {
        let shared = match &self.sender.link {
            Link::Socket(shared) => shared,
            Link::Local(end) => return end.poll_recv(cx),
        };
        loop {
            match std::task::ready!(shared.poll_event(cx)) {
                Ok(Event::Message(message)) => return Poll::Ready(Ok(message)),
                Ok(_) => {}
                Err(closed) => return Poll::Ready(Err(closed)),
            }
        }
    }

    /// A handle that ends this session at once.
    pub fn closer(&self) -> Closer {
        match &self.sender.link {
            Link::Socket(shared) => Closer::session(shared.peer, Arc::downgrade(shared)),
            Link::Local(end) => Closer::local(end.peer(), end.weak()),
        }
    }

    /// Lets the peer have `grant` more chunks in flight, for the rest of the session.
    ///
    /// # Errors
    /// `credit_overflow` when the window would exceed 1,024 chunks.
    pub fn widen_window(&self, grant: u32) -> Result<(), Violation> {
        let Link::Socket(shared) = &self.sender.link else {
            // Nothing is in chunks there.
            return Ok(());
        };
        let now = shared.now();
        let mut inner = shared.lock();
        inner.session.widen_window(grant)?;
        inner.write_for_driver(now);
        Ok(())
    }

    /// Ends the session. What is queued is dropped; the peer learns the code.
    pub fn close(&self, code: CloseCode) {
        self.sender.close(code);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.sender.close(CloseCode::Normal);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer())
            .field("purpose", &self.purpose)
            .finish_non_exhaustive()
    }
}

/// Below a connection: a socket, or the other end in this process.
#[derive(Clone)]
pub(crate) enum Link {
    Socket(Arc<Shared>),
    Local(local::End),
}

/// Sends messages of one session; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Sender {
    link: Link,
    terms: Terms,
}

/// A message on its way, as its link takes it.
enum Leaving {
    Socket(Outgoing),
    Local(Message),
}

impl Sender {
    pub(crate) fn over(link: Link, terms: Terms) -> Sender {
        Sender { link, terms }
    }

    /// The peer's key.
    pub fn peer(&self) -> NodeId {
        match &self.link {
            Link::Socket(shared) => shared.peer,
            Link::Local(end) => end.peer(),
        }
    }

    /// Counters and gauges.
    pub fn stats(&self) -> SessionStats {
        match &self.link {
            Link::Socket(shared) => shared.lock().session.stats(),
            Link::Local(end) => end.stats(),
        }
    }

    /// How the session ended, if it has.
    pub fn closed(&self) -> Option<SessionClosed> {
        match &self.link {
            Link::Socket(shared) => shared.lock().session.closed().cloned(),
            Link::Local(end) => end.closed(),
        }
    }

    fn close(&self, code: CloseCode) {
        match &self.link {
            Link::Socket(shared) => shared.close(code, ""),
            Link::Local(end) => end.close(code, ""),
        }
    }

    /// Makes a message ready to leave. What it costs is paid here, outside of any lock.
    fn leaving(&self, message: Message) -> Result<Leaving, SendError> {
        match &self.link {
            Link::Socket(_) => Outgoing::new(&message, &self.terms).map(Leaving::Socket),
            Link::Local(_) => {
                Outgoing::check(&message, &self.terms).map(|()| Leaving::Local(message))
            }
        }
        .map_err(SendError::Message)
    }

    /// Lets it leave, or gives it back.
    fn try_leave(&self, message: Leaving) -> Result<Option<Leaving>, SessionClosed> {
        match (&self.link, message) {
            (Link::Socket(shared), Leaving::Socket(out)) => {
                Ok(shared.try_send(out)?.map(Leaving::Socket))
            }
            (Link::Local(end), Leaving::Local(message)) => {
                Ok(end.try_send(message)?.map(Leaving::Local))
            }
            // A link takes what was made for it.
            (_, other) => Ok(Some(other)),
        }
    }

    /// Asks the peer for a sign of life (PING), unless it has been asked and has not answered yet.
    /// The answer counts as something heard: see [`silent_for`](Self::silent_for).
    pub fn probe(&self) {
        let Link::Socket(shared) = &self.link else {
            return;
        };
        let now = shared.now();
        let mut inner = shared.lock();
        inner.session.probe(now);
        inner.write_for_driver(now);
    }

    /// For how long nothing has come from the peer. Its connection answers a [`probe`](Self::probe)
    /// whatever it computes: a peer that is silent all the same is stopped, or cut off.
    pub fn silent_for(&self) -> Duration {
        let Link::Socket(shared) = &self.link else {
            // Its connection is this very process.
            return Duration::ZERO;
        };
        let now = shared.now();
        Duration::from_micros(shared.lock().session.silent_for(now))
    }

    /// For how long a PING has been unanswered, while nothing else came either.
    pub fn unanswered_for(&self) -> Option<Duration> {
        let Link::Socket(shared) = &self.link else {
            return None;
        };
        let now = shared.now();
        let asked = shared.lock().session.unanswered_for(now);
        asked.map(Duration::from_micros)
    }

    /// Asks for a sign of life as [`probe`](Self::probe) does, and resolves with the next thing that
    /// comes, whatever it is; `false` when the session is over.
    pub async fn answers(&self) -> bool {
        let shared = match &self.link {
            Link::Socket(shared) => shared,
            Link::Local(end) => return end.closed().is_none(),
        };
        let before = self.stats().frames_received;
        self.probe();
        loop {
            let mut moved = pin!(shared.room.notified());
            // Before looking, so that nothing is missed that comes in between.
            moved.as_mut().enable();
            {
                let inner = shared.lock();
                if inner.session.closed().is_some() {
                    return false;
                }
                if inner.session.stats().frames_received != before {
                    return true;
                }
            }
            moved.await;
        }
    }

    /// Sends a message. Returns when it is written or queued within the send buffer; waits for a
    /// step slot or for room. Dropped while it waits, nothing has been sent.
    ///
    /// # Errors
    /// [`SendError::Closed`] when the session is over, [`SendError::Message`] for a message that
    /// contradicts itself.
    pub async fn send(&self, message: Message) -> Result<(), SendError> {
        let mut out = self.leaving(message)?;
        let freed = match &self.link {
            Link::Socket(shared) => &shared.room,
            Link::Local(end) => end.room(),
        };
        loop {
            let mut room = pin!(freed.notified());
            // Before trying, so that room that comes in between is not missed.
            room.as_mut().enable();
            match self.try_leave(out)? {
                None => return Ok(()),
                Some(back) => out = back,
            }
            room.await;
        }
    }

    /// Sends a message if that needs no waiting; otherwise gives it back. Answers to steps, stream
    /// errors and stream closes never wait. For threads outside of the runtime.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(&self, message: Message) -> Result<Option<Message>, SendError> {
        match &self.link {
            Link::Socket(shared) => {
                let out = Outgoing::new(&message, &self.terms).map_err(SendError::Message)?;
                Ok(shared.try_send(out)?.map(|_| message))
            }
            Link::Local(end) => {
                Outgoing::check(&message, &self.terms).map_err(SendError::Message)?;
                Ok(end.try_send(message)?)
            }
        }
    }

    /// As [`try_send`](Self::try_send), but the message may stay here until [`flush`](Self::flush),
    /// or until anything else is sent or received in this session: several that are queued go out in
    /// one piece.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_queue(&self, message: Message) -> Result<Option<Message>, SendError> {
        let Link::Socket(shared) = &self.link else {
            return self.try_send(message);
        };
        let out = Outgoing::new(&message, &self.terms).map_err(SendError::Message)?;
        Ok(shared.try_queue(out)?.map(|_| message))
    }

    /// Writes what [`try_queue`](Self::try_queue) has left here.
    pub fn flush(&self) {
        if let Link::Socket(shared) = &self.link {
            shared.flush();
        }
    }

    /// Whether the other one sends in the same session.
    pub fn is_same_session(&self, other: &Self) -> bool {
        match (&self.link, &other.link) {
            (Link::Socket(one), Link::Socket(other)) => Arc::ptr_eq(one, other),
            (Link::Local(one), Link::Local(other)) => one.is_same(other),
            _ => false,
        }
    }

    /// Sends several messages that need no waiting ([`try_send`](Self::try_send)) in one piece: one
    /// TLS record and one system call instead of as many. Returns how many there was no room for;
    /// these are dropped.
    ///
    /// # Errors
    /// As [`send`](Self::send); a message that cannot be sent keeps the others from being sent.
    pub fn try_send_all(&self, messages: &[Message]) -> Result<usize, SendError> {
        let shared = match &self.link {
            Link::Socket(shared) => shared,
            Link::Local(end) => {
                for message in messages {
                    Outgoing::check(message, &self.terms).map_err(SendError::Message)?;
                }
                let mut left = 0;
                for message in messages {
                    left += usize::from(end.try_send(message.clone())?.is_some());
                }
                return Ok(left);
            }
        };
        let all: Result<Vec<Outgoing>, Violation> = messages
            .iter()
            .map(|message| Outgoing::new(message, &self.terms))
            .collect();
        Ok(shared.try_send_all(all.map_err(SendError::Message)?)?)
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender")
            .field("peer", &self.peer())
            .finish_non_exhaustive()
    }
}
