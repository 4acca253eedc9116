//! Task that drives a socket, for any protocol on it.
//!
//! ```text
//!   application                    one mutex                        driver task      peer
//!   send ────────────▶ Protocol::send, poll_transmit ─ WebSocket ──────────────────▶
//!   Handler, recv ◀─── Protocol::take, handle_message ◀ WebSocket, limiter ◀ reads ◀
//!   Closer, drop ────▶ Protocol::close ─ close handshake ──────────────────────────▶
//! ```
//!
//! A [`Protocol`], its socket and its timers sit behind one mutex. The *driver* task reads: it
//! decodes the input and hands each message to the session's [`Handler`] or, without one, wakes the
//! task that waits in `recv`. Sending needs no task: the sending thread takes the lock, queues, and
//! writes to the socket itself, with the driver's waker in case the socket is full. So a decode row
//! costs one wake-up on the way in and none on the way out. The lock is held for one message at a
//! time, and never while a handler runs.
//!
//! If a peer sends faster than it is read, turn after turn, its driver moves to the [low-priority
//! threads](crate::background) until that is over. The peer is still read as fast as this machine
//! can, but peers that send little, as every chat does, go first.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Sink, Stream};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};
use tokio_tungstenite::tungstenite::protocol::{Message as WsMessage, WebSocketConfig};

use super::close_handshake::{CloseHandshake, Closing, broken_rule, closed_by, lost};
use super::closer::Ends;
use super::frame_limiter::Socket;
use crate::NodeId;
use crate::background::{background, give_way};
use crate::code::{CloseCode, SessionClosed};
use crate::config::Config;
use crate::message::Message;
use crate::session::protocol::{Frame, Progress, Protocol, Transmit};
use crate::time::Time;

/// Messages that the driver reads before it yields.
const READ_BUDGET: usize = 16;

/// Bytes after which the driver yields.
const READ_BYTES: u64 = 1 << 20;

/// Time on the low-priority threads after the last turn that left unread input.
const LOW_PRIORITY_TIME: Duration = Duration::from_secs(1);
/// Bytes that a sender writes itself; the driver writes the rest.
const SENDER_WRITE_BUDGET: usize = 256 * 1024;
/// A year: a longer timer is cut, and set again when it fires.
const MAX_TIMER_MICROS: u64 = 365 * 86_400 * 1_000_000;

/// Consumer of a session's messages, called by the task that reads the socket. So no message is
/// queued, and no other task has to be woken.
pub trait Handler<M = Message>: Send {
    /// Handles a message of the peer. Called in order, and never after this side has ended the
    /// session. The peer's socket is not read until this returns, so it must not block.
    ///
    /// # Errors
    /// The code to close the session with.
    fn message(&mut self, message: M) -> Result<(), CloseCode>;

    /// All messages received so far have been handed over.
    fn drained(&mut self) {}

    /// The session has ended. Called once, after the last message.
    fn ended(self: Box<Self>, _closed: &SessionClosed) {}
}

struct Inner<P: Protocol> {
    session: P,
    /// `None` once the connection is gone.
    socket: Option<Socket>,
    /// Set by the driver's first poll; removed at its end.
    driver: Option<Waker>,
    /// Waker of a pending `recv`.
    receiver: Option<Waker>,
    /// Handler that the driver takes at its next poll.
    handler: Option<Box<dyn Handler<P::Incoming>>>,
    /// The driver has ended.
    gone: bool,
    /// Time at which the driver's timer fires.
    armed: Time,
    /// Data is written but not flushed.
    dirty: bool,
    close_handshake: CloseHandshake,
}

/// State shared by the driver and the handles of one socket.
pub(crate) struct Shared<P: Protocol> {
    inner: Mutex<Inner<P>>,
    /// Notified when there is space to send, when data was received, and at the end.
    pub(crate) changed: Notify,
    start: Instant,
    pub(crate) peer: NodeId,
    close_deadline: Duration,
}

/// Result of [`Inner::write`].
#[derive(PartialEq, Eq)]
enum Written {
    All,
    /// The budget is used up and messages remain.
    More,
}

/// Result of [`Inner::read`].
enum Read {
    /// A message was read; there may be another.
    One,
    /// No message is complete. Bytes of the next one, if the socket was read.
    Nothing(Option<u64>),
}

impl<P: Protocol> Inner<P> {
    /// Writes the waiting messages, and flushes.
    fn write(&mut self, now: Time, cx: &mut Context<'_>, mut budget: usize) -> Written {
        let Some(socket) = &mut self.socket else {
            return Written::All;
        };
        if let Some(limit) = self.session.message_limit() {
            socket.get_mut().limiter.set_limit(limit);
        }
        let mut socket = Pin::new(socket);
        let result = loop {
            match socket.as_mut().poll_ready(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => break Err(error),
                Poll::Pending => break Ok(Written::All),
            }
            if budget == 0 {
                break Ok(Written::More);
            }
            let message = match self.session.poll_transmit(now) {
                Some(Transmit::Message(Frame::Binary(bytes))) => WsMessage::Binary(bytes),
                Some(Transmit::Message(Frame::Text(text))) => WsMessage::Text(text.into()),
                Some(Transmit::Ping) => WsMessage::Ping(Bytes::new()),
                None => break Ok(Written::All),
            };
            budget = budget.saturating_sub(message.len());
            self.dirty = true;
            if let Err(error) = socket.as_mut().start_send(message) {
                break Err(error);
            }
        };
        let result = result.and_then(|written| {
            if self.dirty
                && let Poll::Ready(flushed) = socket.poll_flush(cx)
            {
                flushed?;
                self.dirty = false;
            }
            Ok(written)
        });
        let written = result.unwrap_or_else(|error| {
            self.session.connection_lost(lost(&error));
            self.socket = None;
            Written::All
        });
        self.observe(now, None);
        written
    }

    /// Writes on behalf of the driver, and wakes it if it has to continue.
    fn write_for_driver(&mut self, now: Time) {
        // Before its first poll the driver has no waker; it will write then.
        let Some(waker) = self.driver.clone() else {
            return;
        };
        let written = self.write(now, &mut Context::from_waker(&waker), SENDER_WRITE_BUDGET);
        let earlier_deadline = self.session.poll_timeout() < self.armed;
        if written == Written::More || earlier_deadline || self.session.closed().is_some() {
            waker.wake();
        }
    }

    /// Bytes received; 0 once the socket is gone.
    fn received(&self) -> u64 {
        self.socket
            .as_ref()
            .map_or(0, |socket| socket.get_ref().received())
    }

    /// Reads one message from the socket.
    fn read(&mut self, now: Time, cx: &mut Context<'_>) -> Read {
        if self.session.closed().is_some() || self.session.is_congested() {
            return Read::Nothing(None);
        }
        let Some(socket) = &mut self.socket else {
            return Read::Nothing(None);
        };
        let Poll::Ready(item) = Pin::new(&mut *socket).poll_next(cx) else {
            return Read::Nothing(Some(socket.get_ref().limiter.partial()));
        };
        match item {
            Some(Ok(WsMessage::Binary(bytes))) => {
                self.session.handle_message(now, Frame::Binary(bytes));
            }
            Some(Ok(WsMessage::Text(text))) => {
                let text = Frame::Text(text.as_str().to_owned());
                self.session.handle_message(now, text);
            }
            // Counted by the frame limiter, answered by tungstenite.
            Some(Ok(WsMessage::Ping(_) | WsMessage::Pong(_))) => {}
            Some(Ok(WsMessage::Close(frame))) => self.session.connection_lost(closed_by(frame)),
            Some(Ok(WsMessage::Frame(_))) => {
                let raw = CloseCode::WebSocket.violation("a raw frame");
                self.session.fail(raw);
            }
            Some(Err(error)) => match broken_rule(&error) {
                Some(violation) => {
                    self.session.fail(violation);
                    self.close_handshake.discard_input = true;
                }
                None => {
                    self.session.connection_lost(lost(&error));
                    self.socket = None;
                }
            },
            None => {
                let ended = SessionClosed::by_peer(CloseCode::Lost, "the connection ended");
                self.session.connection_lost(ended);
                self.socket = None;
            }
        }
        Read::One
    }

    /// Reports the progress of the socket to the session.
    fn observe(&mut self, now: Time, partial: Option<u64>) {
        let Some(socket) = &self.socket else { return };
        let limited = socket.get_ref();
        let progress = Progress {
            partial,
            received: limited.received(),
            written: limited.written(),
            unflushed: self.dirty,
            heard: limited.heard(),
        };
        self.session.handle_progress(now, progress);
    }

    /// Continues the closing handshake, if the session has ended.
    fn finish(&mut self, now: Time, deadline: Duration, cx: &mut Context<'_>) -> Closing {
        let Some(code) = self.session.closed().map(|closed| closed.code) else {
            return Closing::Waits;
        };
        let Some(socket) = &mut self.socket else {
            return Closing::Done;
        };
        // No frame may follow a close frame.
        let ready = !self.session.has_reply();
        self.close_handshake
            .poll(Pin::new(socket), code, ready, now, deadline, cx)
    }
}

impl<P: Protocol> Shared<P> {
    pub(crate) fn now(&self) -> Time {
        Time::from(self.start.elapsed())
    }

    /// Reads the state of the session.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&P, Time) -> T) -> T {
        look(&self.inner.lock().session, self.now())
    }

    /// Changes the session, and writes the resulting messages. Code under the lock must not leave
    /// the session half changed.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut P, Time) -> T) -> T {
        let now = self.now();
        let mut inner = self.inner.lock();
        let changed = change(&mut inner.session, now);
        inner.write_for_driver(now);
        changed
    }

    /// Queues one message, or gives it back. With `write` it is written at once, otherwise with the
    /// next write.
    pub(crate) fn try_queue(
        &self,
        out: P::Outgoing,
        write: bool,
    ) -> Result<Option<P::Outgoing>, SessionClosed> {
        let now = self.now();
        let mut inner = self.inner.lock();
        let back = inner.session.send(out)?;
        if write && back.is_none() {
            inner.write_for_driver(now);
        }
        Ok(back)
    }

    /// Queues one message when there is space. If dropped while it waits, nothing has been sent.
    pub(crate) async fn queue(&self, out: P::Outgoing) -> Result<(), SessionClosed> {
        let mut waiting = Some(out);
        retry(&self.changed, || {
            match self.try_queue(waiting.take()?, true) {
                Ok(back) => waiting = back,
                Err(closed) => return Some(Err(closed)),
            }
            waiting.is_none().then_some(Ok(()))
        })
        .await
    }

    /// Polls for a value that `take` finds in the session, or for the end of the session.
    pub(crate) fn poll_take<T>(
        &self,
        cx: &mut Context<'_>,
        take: impl FnOnce(&mut P) -> Option<T>,
    ) -> Poll<Result<T, SessionClosed>> {
        let now = self.now();
        let mut inner = self.inner.lock();
        let was_congested = inner.session.is_congested();
        if let Some(taken) = take(&mut inner.session) {
            if inner.session.has_reply() {
                inner.write_for_driver(now);
            }
            if was_congested && let Some(driver) = &inner.driver {
                driver.wake_by_ref();
            }
            return Poll::Ready(Ok(taken));
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

    /// Hands every message to `handler` from now on, earlier ones first.
    pub(crate) fn set_handler(&self, mut handler: Box<dyn Handler<P::Incoming>>) {
        let mut inner = self.inner.lock();
        if inner.gone {
            drop(inner);
            self.hand_over(&mut *handler);
            return self.notify_ended(handler);
        }
        inner.handler = Some(handler);
        if let Some(driver) = &inner.driver {
            driver.wake_by_ref();
        }
    }

    /// Hands the queued messages to the handler. The lock is taken for each message, so that none
    /// is handed over after the session was ended from outside.
    fn hand_over(&self, handler: &mut dyn Handler<P::Incoming>) {
        loop {
            let next = self.inner.lock().session.take();
            let Some(message) = next else { return };
            if let Err(code) = handler.message(message) {
                self.end(code, "", false);
            }
        }
    }

    /// Tells a handler that the session has ended.
    fn notify_ended(&self, handler: Box<dyn Handler<P::Incoming>>) {
        let closed = self.closed();
        debug_assert!(closed.is_some(), "handlers stay until the session is over");
        if let Some(closed) = closed {
            handler.ended(&closed);
        }
    }
}

impl<P: Protocol> Ends for Shared<P> {
    fn end(&self, code: CloseCode, detail: &str, cut: bool) {
        let receiver = {
            let now = self.now();
            let mut inner = self.inner.lock();
            inner.session.close(code, detail);
            if cut {
                inner.session.drop_waiting();
            }
            inner.write_for_driver(now);
            inner.receiver.take()
        };
        if let Some(waker) = receiver {
            waker.wake();
        }
        self.changed.notify_waiters();
    }

    fn closed(&self) -> Option<SessionClosed> {
        self.inner.lock().session.closed().cloned()
    }
}

/// Retries at every notification until `attempt` succeeds.
pub(crate) async fn retry<T>(moved: &Notify, mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        let mut moved = pin!(moved.notified());
        // Enabled before the attempt, so that no notification in between is missed.
        moved.as_mut().enable();
        if let Some(done) = attempt() {
            return done;
        }
        moved.await;
    }
}

/// Callback for the end of a connection.
pub(crate) type Ended = Box<dyn FnOnce(&SessionClosed) + Send>;

/// Starts driving a socket after the upgrade. Times count from `start`.
pub(crate) fn start<P: Protocol>(
    session: P,
    socket: Socket,
    peer: NodeId,
    start: Instant,
    config: &Config,
    ended: Ended,
) -> Arc<Shared<P>> {
    let shared = Arc::new(Shared {
        inner: Mutex::new(Inner {
            session,
            socket: Some(socket),
            driver: None,
            receiver: None,
            handler: None,
            gone: false,
            armed: Time::ZERO,
            dirty: false,
            close_handshake: CloseHandshake::default(),
        }),
        changed: Notify::new(),
        start,
        peer,
        close_deadline: config.deadlines.close,
    });
    let driver = Driver {
        shared: Arc::clone(&shared),
        handler: None,
        ended: Some(ended),
        busy: None,
    };
    driver.run(Handle::current());
    shared
}

/// Outcome of a driver's task.
enum TaskExit {
    /// The connection has ended.
    Done,
    /// The driver moves to the low-priority threads, or back.
    Moved,
}

/// State of a driver task.
struct Driver<P: Protocol> {
    shared: Arc<Shared<P>>,
    handler: Option<Box<dyn Handler<P::Incoming>>>,
    ended: Option<Ended>,
    /// While on the low-priority threads: when a turn last left unread input.
    busy: Option<Time>,
}

impl<P: Protocol> Driver<P> {
    /// Drives the connection to its end, on its own runtime or on the low-priority threads.
    fn run(mut self, own: Handle) {
        let there = match self.busy {
            None => own.clone(),
            Some(_) => background(),
        };
        there.spawn(async move {
            // A timer belongs to the runtime on which it was made.
            let mut timer = pin!(tokio::time::sleep_until(self.shared.start));
            self.shared.inner.lock().armed = Time::ZERO;
            match poll_fn(|cx| self.poll(cx, timer.as_mut())).await {
                TaskExit::Done => {}
                TaskExit::Moved => self.run(own),
            }
        });
    }

    /// Runs one turn.
    fn poll(&mut self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<TaskExit> {
        let shared = Arc::clone(&self.shared);
        // A single read may have brought the messages of many turns.
        give_way();
        if self
            .busy
            .is_some_and(|since| shared.now() >= since + LOW_PRIORITY_TIME)
        {
            self.busy = None;
            return Poll::Ready(TaskExit::Moved);
        }
        let was_low_priority = self.busy.is_some();
        {
            let mut inner = shared.inner.lock();
            match &mut inner.driver {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            self.handler = inner.handler.take().or_else(|| self.handler.take());
        }
        // Taken out, so that a handler that panics is not told of a regular end.
        let mut handler = self.handler.take();
        if let Some(handler) = &mut handler {
            shared.hand_over(&mut **handler);
        }
        let mut partial = None;
        let mut begun = None;
        for turn in 0.. {
            let mut inner = shared.inner.lock();
            let received = inner.received();
            let bytes = received.saturating_sub(*begun.get_or_insert(received));
            if turn == READ_BUDGET || bytes >= READ_BYTES {
                self.busy = Some(shared.now());
                cx.waker().wake_by_ref();
                break;
            }
            let read = inner.read(shared.now(), cx);
            drop(inner);
            match (read, &mut handler) {
                (Read::One, Some(handler)) => shared.hand_over(&mut **handler),
                (Read::One, None) => {}
                (Read::Nothing(bytes), handler) => {
                    partial = bytes;
                    if let Some(handler) = handler {
                        handler.drained();
                    }
                    break;
                }
            }
        }
        self.handler = handler;

        let now = shared.now();
        let mut inner = shared.inner.lock();
        inner.observe(now, partial);
        inner.session.handle_timeout(now);
        if inner.write(now, cx, usize::MAX) == Written::More {
            cx.waker().wake_by_ref();
        }
        let closing = inner.finish(now, shared.close_deadline, cx);

        // The timer is only moved to an earlier time: early wake-ups are cheap.
        let mut deadline = inner.session.poll_timeout();
        if let Some(since) = inner.close_handshake.since {
            deadline = deadline.min(since + shared.close_deadline);
        }
        if deadline < inner.armed || now >= inner.armed {
            inner.armed = deadline;
            let at = Duration::from_micros(deadline.0.min(MAX_TIMER_MICROS));
            timer.as_mut().reset(shared.start + at);
        }
        let closed = inner.session.closed().is_some();
        let receiver = match closed || inner.session.has_incoming() {
            true => inner.receiver.take(),
            false => None,
        };
        drop(inner);
        if let Some(waker) = receiver {
            waker.wake();
        }
        // The handler need not wait for the closing handshake.
        if closed && let Some(handler) = self.handler.take() {
            shared.notify_ended(handler);
        }
        shared.changed.notify_waiters();
        match closing {
            Closing::Done => return Poll::Ready(TaskExit::Done),
            Closing::More => self.busy = Some(now),
            Closing::Waits => {}
        }
        if self.busy.is_some() && !was_low_priority {
            return Poll::Ready(TaskExit::Moved);
        }
        if timer.poll(cx).is_ready() {
            // The timer was set to a time that has passed: poll again.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl<P: Protocol> Drop for Driver<P> {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        // In case the runtime has ended before the session.
        let lost = SessionClosed::by_peer(CloseCode::Lost, "the runtime has ended");
        inner.session.connection_lost(lost);
        inner.session.ended();
        inner.socket = None;
        inner.driver = None;
        inner.gone = true;
        let handlers = [self.handler.take(), inner.handler.take()];
        let receiver = inner.receiver.take();
        let closed = inner.session.closed().cloned();
        drop(inner);
        handlers.into_iter().flatten().for_each(|mut handler| {
            self.shared.hand_over(&mut *handler);
            self.shared.notify_ended(handler);
        });
        if let Some(waker) = receiver {
            waker.wake();
        }
        self.shared.changed.notify_waiters();
        if let (Some(ended), Some(closed)) = (self.ended.take(), closed) {
            ended(&closed);
        }
    }
}

/// Settings of tungstenite. The frame limiter enforces the limits; these are a second line.
pub(crate) fn websocket_config(largest: usize, read_buffer_bytes: usize) -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(read_buffer_bytes)
        .write_buffer_size(64 * 1024)
        .max_write_buffer_size(64 * 1024 + 2 * (largest + 64))
        .max_message_size(Some(largest))
        .max_frame_size(Some(largest))
}
