//! State behind the mutex of one socket, and what its handles do with it. `driver.rs` reads the
//! socket; the drawing there shows both.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use futures_util::{Sink, Stream};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::protocol::Message as WsMessage;

use super::close_handshake::{CloseHandshake, Closing, broken_rule, closed_by, lost};
use super::closer::Ends;
use super::frame_limiter::Socket;
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed};
use crate::message::Message;
use crate::session::protocol::{Frame, Progress, Protocol, Transmit};
use crate::time::Time;

/// Bytes that a sender writes itself; the driver writes the rest.
const SENDER_WRITE_BUDGET: usize = 256 * 1024;

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

pub(super) struct Inner<P: Protocol> {
    pub(super) session: P,
    /// `None` once the connection is gone.
    pub(super) socket: Option<Socket>,
    /// Set by the driver's first poll; removed at its end.
    pub(super) driver: Option<Waker>,
    /// Handler that the driver takes at its next poll.
    pub(super) handler: Option<Box<dyn Handler<P::Incoming>>>,
    /// The driver has ended.
    pub(super) gone: bool,
    /// Time at which the driver's timer fires.
    pub(super) armed: Time,
    /// Data is written but not flushed.
    pub(super) dirty: bool,
    pub(super) close_handshake: CloseHandshake,
}

/// State shared by the driver and the handles of one socket.
pub(crate) struct Shared<P: Protocol> {
    pub(super) inner: Mutex<Inner<P>>,
    /// Waker of a pending `recv`.
    pub(super) receiver: AtomicWaker,
    /// Notified when there is space to send, when data was received, and at the end.
    pub(crate) changed: Notify,
    pub(super) start: Instant,
    pub(crate) peer: NodeId,
    pub(super) close_deadline: Duration,
}

/// Result of [`Inner::write`].
#[derive(PartialEq, Eq)]
pub(super) enum Written {
    All,
    /// The budget is used up and messages remain.
    More,
}

/// Result of [`Inner::read`].
pub(super) enum Read {
    /// A message was read; there may be another.
    One,
    /// No message is complete. Bytes of the next one, if the socket was read.
    Nothing(Option<u64>),
}

impl<P: Protocol> Inner<P> {
    /// Writes the waiting messages, and flushes.
    pub(super) fn write(&mut self, now: Time, cx: &mut Context<'_>, mut budget: usize) -> Written {
        let Some(socket) = &mut self.socket else {
            return Written::All;
        };
        if let Some(limit) = self.session.message_limit() {
            socket.get_mut().limiter.limit = limit;
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
    pub(super) fn received(&self) -> u64 {
        self.socket
            .as_ref()
            .map_or(0, |socket| socket.get_ref().received)
    }

    /// Reads one message from the socket.
    pub(super) fn read(&mut self, now: Time, cx: &mut Context<'_>) -> Read {
        if self.session.closed().is_some() || self.session.is_congested() {
            return Read::Nothing(None);
        }
        let Some(socket) = &mut self.socket else {
            return Read::Nothing(None);
        };
        let Poll::Ready(item) = Pin::new(&mut *socket).poll_next(cx) else {
            return Read::Nothing(Some(socket.get_ref().limiter.partial));
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
    pub(super) fn observe(&mut self, now: Time, partial: Option<u64>) {
        let Some(socket) = &self.socket else { return };
        let limited = socket.get_ref();
        let progress = Progress {
            partial,
            received: limited.received,
            written: limited.written,
            unflushed: self.dirty,
            heard: limited.heard,
        };
        self.session.handle_progress(now, progress);
    }

    /// Continues the closing handshake, if the session has ended.
    pub(super) fn finish(
        &mut self,
        now: Time,
        deadline: Duration,
        cx: &mut Context<'_>,
    ) -> Closing {
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
        hand_over_when_free(&self.changed, out, |out| self.try_queue(out, true)).await
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
        // Under the lock, so that no wake-up in between is missed.
        self.receiver.register(cx.waker());
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
    pub(super) fn hand_over(&self, handler: &mut dyn Handler<P::Incoming>) {
        loop {
            let next = self.inner.lock().session.take();
            let Some(message) = next else { return };
            if let Err(code) = handler.message(message) {
                self.end(code, "", false);
            }
        }
    }

    /// Tells a handler that the session has ended.
    pub(super) fn notify_ended(&self, handler: Box<dyn Handler<P::Incoming>>) {
        let closed = self.closed();
        debug_assert!(closed.is_some(), "handlers stay until the session is over");
        if let Some(closed) = closed {
            handler.ended(&closed);
        }
    }
}

impl<P: Protocol> Ends for Shared<P> {
    fn end(&self, code: CloseCode, detail: &str, cut: bool) {
        let now = self.now();
        let mut inner = self.inner.lock();
        inner.session.close(code, detail);
        if cut {
            inner.session.drop_waiting();
        }
        inner.write_for_driver(now);
        drop(inner);
        self.receiver.wake();
        self.changed.notify_waiters();
    }

    fn closed(&self) -> Option<SessionClosed> {
        self.inner.lock().session.closed().cloned()
    }
}

/// Hands a message to `hand_over` until that does not give it back.
pub(super) async fn hand_over_when_free<M>(
    changed: &Notify,
    message: M,
    mut hand_over: impl FnMut(M) -> Result<Option<M>, SessionClosed>,
) -> Result<(), SessionClosed> {
    let mut waiting = Some(message);
    retry(changed, || {
        match hand_over(waiting.take()?) {
            Ok(back) => waiting = back,
            Err(closed) => return Some(Err(closed)),
        }
        waiting.is_none().then_some(Ok(()))
    })
    .await
}

/// Retries at every notification until `attempt` succeeds.
pub async fn retry<T>(moved: &Notify, mut attempt: impl FnMut() -> Option<T>) -> T {
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
