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
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use super::close_handshake::{CloseHandshake, Closing};
use super::frame_limiter::Socket;
use super::shared::{Handler, Inner, Read, Shared, Written};
use crate::NodeId;
use crate::background::{background, give_way};
use crate::code::{CloseCode, SessionClosed};
use crate::config::Config;
use crate::session::protocol::Protocol;
use crate::time::Time;

/// Messages that the driver reads before it yields.
const READ_BUDGET: usize = 16;

/// Bytes after which the driver yields.
const READ_BYTES: u64 = 1 << 20;

/// Time on the low-priority threads after the last turn that left unread input.
const LOW_PRIORITY_TIME: Duration = Duration::from_secs(1);
/// A year: a longer timer is cut, and set again when it fires.
const MAX_TIMER_MICROS: u64 = 365 * 86_400 * 1_000_000;

/// Callback for the end of a connection.
pub(crate) type Ended = Box<dyn FnOnce(&SessionClosed) + Send>;

/// Starts driving a socket after the upgrade. Times count from `start`. With `low_priority` it stays
/// on the low-priority threads.
pub(crate) fn start<P: Protocol>(
    session: P,
    socket: Socket,
    peer: NodeId,
    start: Instant,
    config: &Config,
    ended: Ended,
    low_priority: bool,
) -> Arc<Shared<P>> {
    let shared = Arc::new(Shared {
        inner: Mutex::new(Inner {
            session,
            socket: Some(socket),
            driver: None,
            handler: None,
            gone: false,
            armed: Time::ZERO,
            dirty: false,
            close_handshake: CloseHandshake::default(),
        }),
        receiver: AtomicWaker::new(),
        changed: Notify::new(),
        start,
        peer,
        close_deadline: config.deadlines.close,
    });
    let driver = Driver {
        shared: Arc::clone(&shared),
        handler: None,
        ended: Some(ended),
        low_priority,
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
    /// Stays on the low-priority threads, whatever it reads.
    low_priority: bool,
    /// While on the low-priority threads because of its input: when a turn last left some unread.
    busy: Option<Time>,
}

impl<P: Protocol> Driver<P> {
    /// Drives the connection to its end, on its own runtime or on the low-priority threads.
    fn run(mut self, own: Handle) {
        let there = match self.low_priority || self.busy.is_some() {
            false => own.clone(),
            true => background(),
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
        if !self.low_priority
            && self
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
        let has_news = closed || inner.session.has_incoming();
        drop(inner);
        if has_news {
            shared.receiver.wake();
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
        if self.busy.is_some() && !was_low_priority && !self.low_priority {
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
        let closed = inner.session.closed().cloned();
        drop(inner);
        handlers.into_iter().flatten().for_each(|mut handler| {
            self.shared.hand_over(&mut *handler);
            self.shared.notify_ended(handler);
        });
        self.shared.receiver.wake();
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
