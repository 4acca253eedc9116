//! The task that drives a socket, whatever the messages on it are.
//!
//! ```text
//!   application                    one mutex                        driver task      peer
//!   send ────────────▶ Protocol::send, poll_transmit ─ WebSocket ──────────────────▶
//!   Handler, recv ◀─── Protocol::take, handle_message ◀─ WebSocket, meter ◀─ reads ◀
//!   Closer, drop ────▶ Protocol::close ─ close handshake ──────────────────────────▶
//! ```
//!
//! A [`Protocol`], its socket and its timers sit behind one mutex. The *driver* task owns the
//! reading: it decodes what arrives and hands each message to the session's [`Handler`], or, where
//! there is none, wakes whoever waits in `recv`. Sending needs no task: whoever sends takes the
//! lock, queues, and writes to the socket itself, with the driver's waker in case the socket is
//! full. So a decode row costs one wake-up on the way in and none on the way out. The lock is held
//! for one message at a time, and never while a handler runs.
//!
//! A peer that sends faster than it is read, turn after turn, is read on the threads that
//! [stand back](crate::background) until that is over: it is still read as fast as this machine can,
//! and whoever sends little, as every chat does, goes first.

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

/// Messages that the driver takes before it lets others run.
const READ_BUDGET: usize = 16;

/// The same in bytes, as soon as they are exceeded.
const READ_BYTES: u64 = 1 << 20;

/// How long a driver stands back after the last turn that did not come to an end of what was there.
const STANDS_BACK: Duration = Duration::from_secs(1);
/// Bytes that a sender writes in its own task; the driver does the rest.
const SENDER_WRITE_BUDGET: usize = 256 * 1024;
/// A year: longer timers than this are cut, and set again when they fire.
const MAX_TIMER_MICROS: u64 = 365 * 86_400 * 1_000_000;

/// What the messages of a session are given to, by the task that reads its socket: nothing waits in
/// between, and nobody has to be woken for it.
pub trait Handler<M = Message>: Send {
    /// A message of the peer. One at a time, in their order, and none after this side has ended the
    /// session. Nothing is read from the peer before this returns, so it must not block.
    ///
    /// # Errors
    /// The code to end the session with.
    fn message(&mut self, message: M) -> Result<(), CloseCode>;

    /// What had come by now has been given.
    fn drained(&mut self) {}

    /// The session is over. Called once, after the last message.
    fn ended(self: Box<Self>, _closed: &SessionClosed) {}
}

struct Inner<P: Protocol> {
    session: P,
    /// `None` once the connection is gone.
    socket: Option<Socket>,
    /// Set by the driver's first poll; gone with it.
    driver: Option<Waker>,
    /// Who waits for a message, ...
    receiver: Option<Waker>,
    /// ... or takes all of them from now on: for the driver to fetch.
    handler: Option<Box<dyn Handler<P::Incoming>>>,
    /// The driver has ended.
    gone: bool,
    /// When the driver's timer fires.
    armed: Time,
    /// Something was written and not flushed.
    dirty: bool,
    close_handshake: CloseHandshake,
}

/// What the driver and the handles of one socket share.
pub(crate) struct Shared<P: Protocol> {
    inner: Mutex<Inner<P>>,
    /// Room to send, something heard, or the end: whoever waits for one of these looks again.
    pub(crate) room: Notify,
    start: Instant,
    pub(crate) peer: NodeId,
    close_deadline: Duration,
}

/// What the caller of [`Inner::write`] has to do next.
#[derive(PartialEq, Eq)]
enum Written {
    All,
    /// The budget ran out: there is more.
    More,
}

/// What [`Inner::read`] has come to.
enum Read {
    /// It took a message; there may be another.
    One,
    /// There is none; with so many bytes of the next one, if anybody looked.
    Nothing(Option<u64>),
}

impl<P: Protocol> Inner<P> {
    /// Writes what there is to send, and flushes.
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

    /// Bytes that have come; 0 once there is no socket any more.
    fn received(&self) -> u64 {
        self.socket
            .as_ref()
            .map_or(0, |socket| socket.get_ref().received())
    }

    /// Takes one message from the socket.
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
            // Counted by the meter, answered by tungstenite.
            Some(Ok(WsMessage::Ping(_) | WsMessage::Pong(_))) => {}
            Some(Ok(WsMessage::Close(frame))) => self.session.connection_lost(closed_by(frame)),
            Some(Ok(WsMessage::Frame(_))) => {
                let raw = CloseCode::WebSocket.violation("a raw frame");
                self.session.fail(raw);
            }
            Some(Err(error)) => match broken_rule(&error) {
                Some(violation) => {
                    self.session.fail(violation);
                    self.close_handshake.deaf = true;
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

    /// Tells the session how far the socket has come.
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

    /// The closing handshake, once the session is over.
    fn finish(&mut self, now: Time, deadline: Duration, cx: &mut Context<'_>) -> Closing {
        let Some(code) = self.session.closed().map(|closed| closed.code) else {
            return Closing::Waits;
        };
        let Some(socket) = &mut self.socket else {
            return Closing::Done;
        };
        // Nothing may follow a close frame.
        let ready = !self.session.has_reply();
        self.close_handshake
            .poll(Pin::new(socket), code, ready, now, deadline, cx)
    }
}

impl<P: Protocol> Shared<P> {
    pub(crate) fn now(&self) -> Time {
        Time::from(self.start.elapsed())
    }

    /// Looks at the session.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&P, Time) -> T) -> T {
        look(&self.inner.lock().session, self.now())
    }

    /// Does something to the session, and writes what comes of it. Nothing that runs under the lock
    /// may leave the session half changed.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut P, Time) -> T) -> T {
        let now = self.now();
        let mut inner = self.inner.lock();
        let changed = change(&mut inner.session, now);
        inner.write_for_driver(now);
        changed
    }

    /// Queues one message, and writes it unless that is left to whoever writes next; or gives it
    /// back.
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

    /// Queues one message when there is room for it. Dropped while it waits, nothing has been sent.
    pub(crate) async fn queue(&self, out: P::Outgoing) -> Result<(), SessionClosed> {
        let mut waiting = Some(out);
        retry(&self.room, || {
            match self.try_queue(waiting.take()?, true) {
                Ok(back) => waiting = back,
                Err(closed) => return Some(Err(closed)),
            }
            waiting.is_none().then_some(Ok(()))
        })
        .await
    }

    /// What `take` finds in the session, as soon as it does, or the end of the session.
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

    /// Gives every message to `handler` from now on, and what had come before it first.
    pub(crate) fn hand_to(&self, mut handler: Box<dyn Handler<P::Incoming>>) {
        let mut inner = self.inner.lock();
        if inner.gone {
            drop(inner);
            self.hand_over(&mut *handler);
            return self.let_go(handler);
        }
        inner.handler = Some(handler);
        if let Some(driver) = &inner.driver {
            driver.wake_by_ref();
        }
    }

    /// Gives the handler what has come. The lock is taken anew for each message, so that none is
    /// given after the session was ended from outside.
    fn hand_over(&self, handler: &mut dyn Handler<P::Incoming>) {
        loop {
            let next = self.inner.lock().session.take();
            let Some(message) = next else { return };
            if let Err(code) = handler.message(message) {
                self.end(code, "", false);
            }
        }
    }

    /// Tells a handler that the session is over.
    fn let_go(&self, handler: Box<dyn Handler<P::Incoming>>) {
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
        self.room.notify_waiters();
    }

    fn closed(&self) -> Option<SessionClosed> {
        self.inner.lock().session.closed().cloned()
    }
}

/// Tries whenever something has moved, until there is an answer.
pub(crate) async fn retry<T>(moved: &Notify, mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        let mut moved = pin!(moved.notified());
        // Before trying, so that nothing is missed that comes in between.
        moved.as_mut().enable();
        if let Some(done) = attempt() {
            return done;
        }
        moved.await;
    }
}

/// What to do when a connection is gone.
pub(crate) type Ended = Box<dyn FnOnce(&SessionClosed) + Send>;

/// Starts driving a socket whose upgrade is done. Times count from `start`.
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
        room: Notify::new(),
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

/// What becomes of a driver.
enum Turn {
    /// The connection is done.
    Done,
    /// It goes on among the threads that stand back, or comes from there.
    Moves,
}

/// The state of a driver task.
struct Driver<P: Protocol> {
    shared: Arc<Shared<P>>,
    handler: Option<Box<dyn Handler<P::Incoming>>>,
    ended: Option<Ended>,
    /// While it stands back: when there was last more to read than a turn reads.
    busy: Option<Time>,
}

impl<P: Protocol> Driver<P> {
    /// Drives the connection to its end, on its own runtime or where threads stand back.
    fn run(mut self, own: Handle) {
        let there = match self.busy {
            None => own.clone(),
            Some(_) => background(),
        };
        there.spawn(async move {
            // A timer belongs to the runtime that it was made in.
            let mut timer = pin!(tokio::time::sleep_until(self.shared.start));
            self.shared.inner.lock().armed = Time::ZERO;
            match poll_fn(|cx| self.poll(cx, timer.as_mut())).await {
                Turn::Done => {}
                Turn::Moves => self.run(own),
            }
        });
    }

    /// One turn.
    fn poll(&mut self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<Turn> {
        let shared = Arc::clone(&self.shared);
        // What was read at once may be the messages of many turns.
        give_way();
        if self
            .busy
            .is_some_and(|since| shared.now() >= since + STANDS_BACK)
        {
            self.busy = None;
            return Poll::Ready(Turn::Moves);
        }
        let stood_back = self.busy.is_some();
        {
            let mut inner = shared.inner.lock();
            match &mut inner.driver {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            self.handler = inner.handler.take().or_else(|| self.handler.take());
        }
        // Taken out, so that one that panics is not told of the end as if nothing had happened.
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

        // The timer is only moved when it would fire too late: early wake-ups are cheap.
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
        // Whoever is behind it need not wait for the closing handshake.
        if closed && let Some(handler) = self.handler.take() {
            shared.let_go(handler);
        }
        shared.room.notify_waiters();
        match closing {
            Closing::Done => return Poll::Ready(Turn::Done),
            Closing::More => self.busy = Some(now),
            Closing::Waits => {}
        }
        if self.busy.is_some() && !stood_back {
            return Poll::Ready(Turn::Moves);
        }
        if timer.poll(cx).is_ready() {
            // It was just set to a moment that has passed: look again.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl<P: Protocol> Drop for Driver<P> {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        // If the runtime has ended before the session did.
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
            self.shared.let_go(handler);
        });
        if let Some(waker) = receiver {
            waker.wake();
        }
        self.shared.room.notify_waiters();
        if let (Some(ended), Some(closed)) = (self.ended.take(), closed) {
            ended(&closed);
        }
    }
}

/// tungstenite's settings: the meter enforces the limits that matter, these are the second line.
pub(crate) fn websocket_config(largest: usize, read_buffer_bytes: usize) -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(read_buffer_bytes)
        .write_buffer_size(64 * 1024)
        .max_write_buffer_size(64 * 1024 + 2 * (largest + 64))
        .max_message_size(Some(largest))
        .max_frame_size(Some(largest))
}
