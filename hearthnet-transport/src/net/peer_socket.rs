//! A plain socket on one of the listener's other paths, and the task that drives it.
//!
//! ```text
//!   application                  one mutex                    driver task            peer
//!   PeerSender::send ──────────▶ outbox (bounded) ──────────▶ WebSocket, flush ────▶
//!   PeerSocket::recv ◀────────── inbox (bounded) ◀─────────── meter, WebSocket ◀────
//!   Closer, drop ──────────────▶ closed: why ───────────────▶ close frame ─────────▶
//! ```
//!
//! An inbox that is full stops the reading, so a peer is slowed down by TCP and costs no memory.
//! A message that has begun must make progress, and so must one that is written to the peer; a
//! connection on which nothing is heard is asked with a WebSocket ping, and given up.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Sink, Stream};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::{Message as WsMessage, Role, WebSocketConfig};

use super::close_handshake::{CloseHandshake, broken_rule, closed_by, lost};
use super::closer::Closer;
use super::connection::{Ended, MAX_TIMER_MICROS, SendError};
use super::frame_limiter::{FrameLimiter, Limited};
use super::paths::PathRule;
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::Config;
use crate::time::Time;

/// Messages that are taken or written before others get their turn.
const BUDGET: usize = 32;

/// One message. `Debug` shows its length only.
#[derive(Clone, PartialEq, Eq)]
pub enum Frame {
    /// A text message.
    Text(String),
    /// A binary message.
    Binary(Bytes),
}

impl Frame {
    /// Bytes of payload.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            Frame::Text(text) => text.len(),
            Frame::Binary(bytes) => bytes.len(),
        }
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Frame::Text(_) => "Text",
            Frame::Binary(_) => "Binary",
        };
        write!(f, "{kind}({} bytes)", self.len())
    }
}

/// A queue that is bounded in messages and in bytes.
#[derive(Default)]
struct Queue {
    frames: VecDeque<Frame>,
    bytes: usize,
}

impl Queue {
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

    fn clear(&mut self) {
        *self = Queue::default();
    }
}

#[derive(Default)]
struct State {
    inbox: Queue,
    outbox: Queue,
    /// Set once: why it ended.
    closed: Option<SessionClosed>,
    reader: Option<Waker>,
    driver: Option<Waker>,
}

/// What the driver, the socket and its senders share.
pub(crate) struct Shared {
    peer: NodeId,
    rule: PathRule,
    state: Mutex<State>,
    /// Room in the outbox, or the end.
    room: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock leaves the state half changed.
        self.state.lock()
    }

    /// Ends the socket for `closed`, unless it has ended. `first` is done to it in any case.
    fn end(&self, closed: SessionClosed, first: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        first(&mut state);
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(closed);
        let wakers = [state.reader.take(), state.driver.clone()];
        drop(state);
        wakers.into_iter().flatten().for_each(Waker::wake);
        self.room.notify_waiters();
    }

    /// Ends the socket; what this side has queued is still written, within the closing deadline.
    fn close(&self, code: CloseCode) {
        self.end(SessionClosed::by_us(code, ""), |state| state.inbox.clear());
    }

    /// Ends the socket and drops what is queued.
    pub(crate) fn cut(&self, code: CloseCode) {
        self.end(SessionClosed::by_us(code, ""), |state| {
            state.inbox.clear();
            state.outbox.clear();
        });
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed.is_some()
    }

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<Frame, SessionClosed>> {
        let mut state = self.lock();
        if let Some(frame) = state.inbox.pop() {
            let driver = state.driver.clone();
            drop(state);
            // The driver may have stopped reading for want of room.
            if let Some(driver) = driver {
                driver.wake();
            }
            return Poll::Ready(Ok(frame));
        }
        if let Some(closed) = &state.closed {
            return Poll::Ready(Err(closed.clone()));
        }
        match &mut state.reader {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Queues a message, or gives it back when there is no room.
    fn try_send(&self, frame: Frame) -> Result<Option<Frame>, SendError> {
        let len = frame.len();
        if len > self.rule.max_message_bytes {
            let largest = self.rule.max_message_bytes;
            return Err(SendError::Message(Violation::new(
                CloseCode::FrameTooBig,
                format!("it has {len} bytes where {largest} may be sent"),
            )));
        }
        if matches!(frame, Frame::Text(_)) && !self.rule.text {
            let detail = "this path carries binary messages only";
            return Err(SendError::Message(Violation::new(
                CloseCode::WebSocket,
                detail,
            )));
        }
        let mut state = self.lock();
        if let Some(closed) = &state.closed {
            return Err(closed.clone().into());
        }
        if !state.outbox.has_room(&self.rule, len) {
            return Ok(Some(frame));
        }
        state.outbox.push(frame);
        let driver = state.driver.clone();
        drop(state);
        if let Some(driver) = driver {
            driver.wake();
        }
        Ok(None)
    }
}

/// An open socket on one path: receives, and hands out senders. Closed with the code `normal` when
/// dropped.
pub struct PeerSocket {
    sender: PeerSender,
}

/// Sends on a [`PeerSocket`]; cheap to clone, usable from any task.
#[derive(Clone)]
pub struct PeerSender {
    shared: Arc<Shared>,
}

impl PeerSocket {
    /// The peer's key, proved by the TLS handshake.
    pub fn peer(&self) -> NodeId {
        self.sender.shared.peer
    }

    /// The path that was asked for.
    pub fn path(&self) -> &'static str {
        self.sender.shared.rule.path
    }

    /// The next message. May be dropped and called again; nothing is lost.
    ///
    /// Whoever does not receive slows the peer down, and cannot tell for how long it is still
    /// there: a socket whose messages are not taken for a minute is given up by the peer.
    ///
    /// # Errors
    /// When the socket is closed, and what the peer sent before has been taken.
    pub async fn recv(&mut self) -> Result<Frame, SessionClosed> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The same, for hand-written futures.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Frame, SessionClosed>> {
        self.sender.shared.poll_recv(cx)
    }

    /// Sends a message: see [`PeerSender::send`].
    ///
    /// # Errors
    /// As [`PeerSender::send`].
    pub async fn send(&self, frame: Frame) -> Result<(), SendError> {
        self.sender.send(frame).await
    }

    /// A handle for sending.
    pub fn sender(&self) -> PeerSender {
        self.sender.clone()
    }

    /// A handle that ends this socket at once.
    pub fn closer(&self) -> Closer {
        self.sender.closer()
    }

    /// How it ended, if it has.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.sender.closed()
    }

    /// Closes. What was queued for the peer is still sent, if it reads; nothing more is received.
    pub fn close(&self, code: CloseCode) {
        self.sender.close(code);
    }

    /// Two sockets that are joined in memory, each of which believes to talk to the other's key.
    /// The WebSocket, its meter and its limits are real, TLS is not there. For tests.
    pub async fn pair(keys: [NodeId; 2], rule: &PathRule) -> (PeerSocket, PeerSocket) {
        let (left, right) = tokio::io::duplex(64 * 1024);
        let config = Config::default();
        let begin = Instant::now();
        let join = async |io, role, peer| {
            let limiter =
                FrameLimiter::upgraded(role == Role::Server, rule.max_message_bytes, rule.text);
            let websocket = websocket_config(rule.max_message_bytes, config.read_buffer_bytes);
            let limited = Limited::new(io, limiter, begin);
            let socket = WebSocketStream::from_raw_socket(limited, role, Some(websocket)).await;
            start(socket, peer, rule.clone(), begin, &config, Box::new(|_| {}))
        };
        let [first, second] = keys;
        (
            join(left, Role::Client, second).await,
            join(right, Role::Server, first).await,
        )
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        self.sender.close(CloseCode::Normal);
    }
}

impl fmt::Debug for PeerSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSocket")
            .field("peer", &self.peer())
            .field("path", &self.path())
            .finish_non_exhaustive()
    }
}

impl PeerSender {
    /// The peer's key.
    pub fn peer(&self) -> NodeId {
        self.shared.peer
    }

    /// Queues a message; waits while the queue has no room. Dropped while it waits, nothing has
    /// been sent.
    ///
    /// # Errors
    /// [`SendError::Closed`] when the socket is closed, [`SendError::Message`] for a message that
    /// is larger than the path's limit, or text where there is none.
    pub async fn send(&self, mut frame: Frame) -> Result<(), SendError> {
        loop {
            let mut room = pin!(self.shared.room.notified());
            // Before trying, so that room that comes in between is not missed.
            room.as_mut().enable();
            match self.shared.try_send(frame)? {
                None => return Ok(()),
                Some(back) => frame = back,
            }
            room.await;
        }
    }

    /// Queues a message if there is room; otherwise gives it back.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(&self, frame: Frame) -> Result<Option<Frame>, SendError> {
        self.shared.try_send(frame)
    }

    /// How the socket ended, if it has.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.shared.lock().closed.clone()
    }

    /// Closes the socket, as [`PeerSocket::close`] does.
    pub fn close(&self, code: CloseCode) {
        self.shared.close(code);
    }

    /// A handle that ends the socket at once.
    pub fn closer(&self) -> Closer {
        Closer::socket(self.shared.peer, Arc::downgrade(&self.shared))
    }
}

impl fmt::Debug for PeerSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSender")
            .field("peer", &self.peer())
            .finish_non_exhaustive()
    }
}

/// tungstenite's settings: the guard enforces the limits that matter, these are the second line.
pub(crate) fn websocket_config(largest: usize, read_buffer_bytes: usize) -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(read_buffer_bytes)
        .write_buffer_size(64 * 1024)
        .max_write_buffer_size(64 * 1024 + 2 * (largest + 64))
        .max_message_size(Some(largest))
        .max_frame_size(Some(largest))
}

/// Starts driving a socket whose upgrade is done.
pub(crate) fn start<T: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    socket: WebSocketStream<Limited<T>>,
    peer: NodeId,
    rule: PathRule,
    begin: Instant,
    config: &Config,
    ended: Ended,
) -> PeerSocket {
    let shared = Arc::new(Shared {
        peer,
        rule,
        state: Mutex::default(),
        room: Notify::new(),
    });
    let now = Time::from(begin.elapsed());
    let mut driver = Driver {
        socket,
        shared: shared.clone(),
        begin,
        keep_alive: config.keep_alive,
        stall: config.deadlines.stall,
        unread: config.deadlines.credit,
        min_rate: config.deadlines.min_rate,
        close_deadline: config.deadlines.close,
        close_handshake: CloseHandshake::default(),
        dirty: false,
        heard: now,
        pinged: None,
        reading: None,
        writing: None,
        ended: Some(ended),
    };
    tokio::spawn(async move {
        let mut timer = pin!(tokio::time::sleep_until(begin));
        poll_fn(|cx| driver.poll(cx, timer.as_mut())).await;
    });
    PeerSocket {
        sender: PeerSender { shared },
    }
}

/// Whether something that is under way goes on fast enough: so many bytes in each span.
struct ProgressCheck {
    since: Time,
    bytes: u64,
}

impl ProgressCheck {
    /// Looks at it as of now. `true`: too slow.
    fn is_slow(&mut self, now: Time, bytes: u64, span: Duration, min_rate: u32) -> bool {
        if now < self.since + span {
            return false;
        }
        let least = u64::from(min_rate).saturating_mul(span.as_millis() as u64) / 1000;
        if bytes.saturating_sub(self.bytes) < least {
            return true;
        }
        *self = ProgressCheck { since: now, bytes };
        false
    }
}

/// Owns the WebSocket; moves messages between it and the queues.
struct Driver<T> {
    socket: WebSocketStream<Limited<T>>,
    shared: Arc<Shared>,
    begin: Instant,
    keep_alive: Duration,
    stall: Duration,
    unread: Duration,
    min_rate: u32,
    close_deadline: Duration,
    close_handshake: CloseHandshake,
    /// Something was written and not flushed.
    dirty: bool,
    /// When something last came, or when this side last chose not to read.
    heard: Time,
    /// When a ping was sent.
    pinged: Option<Time>,
    /// The message that is coming in.
    reading: Option<ProgressCheck>,
    /// The bytes that the peer does not take.
    writing: Option<ProgressCheck>,
    ended: Option<Ended>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Driver<T> {
    fn poll(&mut self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<()> {
        {
            let mut state = self.shared.lock();
            match &mut state.driver {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
        }
        let now = Time::from(self.begin.elapsed());
        let mut deadline = Time::NEVER;
        if !self.shared.is_closed() {
            let moved = match self.write(cx) {
                Ok(()) => self.read(now, cx),
                Err(closed) => Err(closed),
            };
            match moved.and_then(|()| self.watch(now, cx)) {
                Ok(next) => deadline = next,
                Err(closed) => self.shared.end(closed, |_| {}),
            }
        }
        let closed = self.shared.lock().closed.clone();
        if let Some(closed) = closed {
            if !closed.by_us {
                // Nothing may follow the peer's close frame but the answer to it.
                self.shared.lock().outbox.clear();
            }
            // What was queued before the end goes first, if the peer takes it.
            let gone = closed.code == CloseCode::Lost || self.write(cx).is_err();
            let ready = self.shared.lock().outbox.frames.is_empty();
            let socket = Pin::new(&mut self.socket);
            if gone
                || self.close_handshake.poll(
                    socket,
                    closed.code,
                    ready,
                    now,
                    self.close_deadline,
                    cx,
                )
            {
                self.finish(closed);
                return Poll::Ready(());
            }
            deadline = self.close_handshake.since.unwrap_or(now) + self.close_deadline;
        }
        let at = Duration::from_micros(deadline.0.min(MAX_TIMER_MICROS));
        timer.as_mut().reset(self.begin + at);
        if timer.poll(cx).is_ready() {
            // It was set to a moment that has passed: look again.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Writes what is queued, and flushes.
    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), SessionClosed> {
        let mut socket = Pin::new(&mut self.socket);
        let mut sent = 0;
        loop {
            match socket.as_mut().poll_ready(cx) {
                Poll::Ready(ready) => ready.map_err(|error| lost(&error))?,
                Poll::Pending => break,
            }
            let Some(frame) = self.shared.lock().outbox.pop() else {
                break;
            };
            let message = match frame {
                Frame::Text(text) => WsMessage::Text(text.into()),
                Frame::Binary(bytes) => WsMessage::Binary(bytes),
            };
            self.dirty = true;
            socket
                .as_mut()
                .start_send(message)
                .map_err(|error| lost(&error))?;
            sent += 1;
            if sent == BUDGET {
                cx.waker().wake_by_ref();
                break;
            }
        }
        if sent > 0 {
            self.shared.room.notify_waiters();
        }
        if self.dirty
            && let Poll::Ready(flushed) = socket.poll_flush(cx)
        {
            flushed.map_err(|error| lost(&error))?;
            self.dirty = false;
        }
        Ok(())
    }

    /// Takes what has come, as long as there is room for it.
    fn read(&mut self, now: Time, cx: &mut Context<'_>) -> Result<(), SessionClosed> {
        for _ in 0..BUDGET {
            let largest = self.shared.rule.max_message_bytes;
            if !self
                .shared
                .lock()
                .inbox
                .has_room(&self.shared.rule, largest)
            {
                // While this side does not read, the peer cannot be blamed for anything.
                self.heard = now;
                self.reading = None;
                return Ok(());
            }
            let Poll::Ready(item) = Pin::new(&mut self.socket).poll_next(cx) else {
                return Ok(());
            };
            let frame = match item {
                Some(Ok(WsMessage::Text(text))) => Frame::Text(text.as_str().to_owned()),
                Some(Ok(WsMessage::Binary(bytes))) => Frame::Binary(bytes),
                // Counted by the guard, answered by tungstenite.
                Some(Ok(WsMessage::Ping(_) | WsMessage::Pong(_))) => continue,
                Some(Ok(WsMessage::Close(frame))) => return Err(closed_by(frame)),
                Some(Ok(WsMessage::Frame(_))) => {
                    return Err(SessionClosed::by_us(CloseCode::WebSocket, "a raw frame"));
                }
                Some(Err(error)) => {
                    return Err(match broken_rule(&error) {
                        Some(violation) => {
                            self.close_handshake.deaf = true;
                            SessionClosed::by_us(violation.code, violation.detail)
                        }
                        None => lost(&error),
                    });
                }
                None => {
                    let detail = "the connection ended";
                    return Err(SessionClosed::by_peer(CloseCode::Lost, detail));
                }
            };
            let mut state = self.shared.lock();
            if state.closed.is_some() {
                return Ok(());
            }
            state.inbox.push(frame);
            let reader = state.reader.take();
            drop(state);
            if let Some(reader) = reader {
                reader.wake();
            }
        }
        cx.waker().wake_by_ref();
        Ok(())
    }

    /// Progress and keep-alive. The moment at which to look again.
    fn watch(&mut self, now: Time, cx: &mut Context<'_>) -> Result<Time, SessionClosed> {
        let guard = self.socket.get_ref();
        let (partial, received, written) =
            (guard.limiter.partial(), guard.received(), guard.written());
        self.heard = self.heard.max(guard.heard());
        let stalled = |detail| SessionClosed::by_us(CloseCode::PipelineStalled, detail);

        let held_back = {
            let state = self.shared.lock();
            !state
                .inbox
                .has_room(&self.shared.rule, self.shared.rule.max_message_bytes)
        };
        let mut next = Time::NEVER;
        if partial == 0 || held_back {
            self.reading = None;
        } else {
            let pace = self.reading.get_or_insert(ProgressCheck {
                since: now,
                bytes: received,
            });
            if pace.is_slow(now, received, self.stall, self.min_rate) {
                return Err(stalled("a message came too slowly"));
            }
            next = next.min(pace.since + self.stall);
        }
        if self.dirty {
            let pace = self.writing.get_or_insert(ProgressCheck {
                since: now,
                bytes: written,
            });
            if pace.is_slow(now, written, self.unread, self.min_rate) {
                return Err(stalled("the peer does not read"));
            }
            next = next.min(pace.since + self.unread);
        } else {
            self.writing = None;
        }

        if now >= self.heard + self.keep_alive * 2 {
            let detail = "nothing was heard for two keep-alive intervals";
            return Err(SessionClosed::by_us(CloseCode::KeepAlive, detail));
        }
        let asked = self.pinged.is_some_and(|pinged| pinged > self.heard);
        if now < self.heard + self.keep_alive {
            return Ok(next.min(self.heard + self.keep_alive));
        }
        if !asked {
            let mut socket = Pin::new(&mut self.socket);
            if socket.as_mut().poll_ready(cx).is_ready() {
                let ping = WsMessage::Ping(Bytes::new());
                let sent = socket.as_mut().start_send(ping);
                sent.map_err(|error| lost(&error))?;
                self.dirty = true;
                if let Poll::Ready(flushed) = socket.poll_flush(cx) {
                    flushed.map_err(|error| lost(&error))?;
                    self.dirty = false;
                }
            }
            self.pinged = Some(now);
        }
        Ok(next.min(self.heard + self.keep_alive * 2))
    }

    fn finish(&mut self, closed: SessionClosed) {
        if let Some(ended) = self.ended.take() {
            ended(&closed);
        }
    }
}

impl<T> Drop for Driver<T> {
    fn drop(&mut self) {
        // The runtime ended before the socket did.
        let lost = SessionClosed::by_peer(CloseCode::Lost, "the runtime has ended");
        self.shared.end(lost.clone(), |_| {});
        if let Some(ended) = self.ended.take() {
            ended(&lost);
        }
        self.shared.lock().driver = None;
    }
}
