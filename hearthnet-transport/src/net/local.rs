//! A session within one process: messages are moved as values.
//!
//! It serves a home's own chats on its own layers without a wire: no message is encoded, encrypted
//! or copied, and no task runs unless a handler is set. A sender puts the message into the other
//! side's queue, and wakes that side. The rules of a session over a socket hold here as well: the
//! direction of messages, rows that match their shape, step slots, one answer per step, the end of
//! a stream, and the session's lifetime.
//!
//! ```text
//!              Step, StreamOpen, ...                 step slots, room
//!   caller ------------------------> [ to host ] --------------------> host
//!   caller <------------------------ [ to caller ] <------------------ host
//!                                                 StepResult, StreamError, ...
//! ```

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::task::AtomicWaker;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::closer::Ends;
use super::connection::{Connection, Link, SendError};
use super::shared::{Handler, hand_over_when_free};
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed};
use crate::config::Config;
use crate::message::{Message, StreamClose, StreamError};
use crate::session::{Outgoing, SessionStats, Steps, Terms};
use crate::wire::control::{Hello, Limits};

/// Messages in one side's queue before the sender has to wait. Steps are bounded by their slots,
/// and answers by their steps; this bounds the remaining messages.
const MAX_WAITING: usize = 1024;

/// Opens a session of a process with itself, and returns its calling and its hosting end. The
/// host's side has to check beforehand whether it may be opened.
pub fn connect_here(
    key: NodeId,
    hello: &Hello,
    caller: &Config,
    host: &Config,
) -> (Connection, Connection) {
    let limits = [Limits::of(caller), Limits::of(host)];
    let session = Arc::new(Session {
        inner: Mutex::new(Inner {
            sides: Default::default(),
            steps: Steps::default(),
            closed: None,
        }),
        receivers: Default::default(),
        changed: Notify::new(),
        opened: Instant::now(),
        lifetime: caller.session_lifetime.min(host.session_lifetime),
        step_slots: host.max_steps_in_flight,
        peer: key,
    });
    let end = |side: usize| {
        let [own, peer] = [limits[side], limits[1 - side]];
        let terms = Terms {
            caller: side == CALLER,
            chunk_bytes: own.chunk_bytes.min(peer.chunk_bytes),
            inline_max: own.inline_max.min(peer.inline_max),
            compress_above: None,
            // A process needs no proof against itself.
            receipts: 0,
            refuses_receipts: false,
            peer_buffer: peer.recv_buffer_bytes,
        };
        let session = Arc::clone(&session);
        Connection::over(Arc::new(End { session, side }), terms, hello.clone())
    };
    (end(CALLER), end(HOST))
}

/// Side of an [`End`]; also its index in [`Inner::sides`] and [`Session::receivers`].
const CALLER: usize = 0;
const HOST: usize = 1;

/// Queue of one side.
#[derive(Default)]
struct Side {
    waiting: VecDeque<Message>,
    /// Bytes of rows in the queue.
    bytes: u64,
    /// Messages queued so far.
    messages: u64,
}

impl Side {
    fn push(&mut self, message: Message) {
        self.bytes += weight(&message);
        self.messages += 1;
        self.waiting.push_back(message);
    }

    fn pop(&mut self) -> Option<Message> {
        let message = self.waiting.pop_front()?;
        self.bytes = self.bytes.saturating_sub(weight(&message));
        Some(message)
    }

    /// Drops the messages of an ended stream.
    fn purge(&mut self, stream_key: (u32, u32)) {
        self.waiting
            .retain(|message| !message.is_work_of(stream_key));
        self.bytes = self.waiting.iter().map(weight).sum();
    }
}

/// Bytes of rows in a message.
fn weight(message: &Message) -> u64 {
    message.data().map_or(0, |data| data.len() as u64)
}

struct Inner {
    sides: [Side; 2],
    /// Unanswered steps, the same for both sides.
    steps: Steps,
    /// Side that ended the session, and the cause as that side sees it.
    closed: Option<(usize, SessionClosed)>,
}

impl Inner {
    fn end_stream(&mut self, stream_key: (u32, u32)) {
        self.steps.forget(stream_key);
        for side in &mut self.sides {
            side.purge(stream_key);
        }
    }
}

/// State shared by both ends.
pub(crate) struct Session {
    inner: Mutex<Inner>,
    /// Waker of the pending `recv` of each side.
    receivers: [AtomicWaker; 2],
    /// Notified when slots or space are free, and at the end: senders try again.
    changed: Notify,
    opened: Instant,
    lifetime: Duration,
    step_slots: u32,
    peer: NodeId,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Code under the lock leaves no half-changed state.
        let mut inner = self.inner.lock();
        if inner.closed.is_none() && self.opened.elapsed() >= self.lifetime {
            inner.closed = Some((HOST, SessionClosed::by_us(CloseCode::SessionExpired, "")));
        }
        inner
    }
}

#[derive(Clone)]
struct End {
    session: Arc<Session>,
    side: usize,
}

impl Ends for End {
    fn end(&self, code: CloseCode, detail: &str, cut: bool) {
        let mut inner = self.session.lock();
        let closed = (self.side, SessionClosed::by_us(code, detail));
        inner.closed.get_or_insert(closed);
        if cut {
            for side in &mut inner.sides {
                side.waiting.clear();
                side.bytes = 0;
            }
        }
        drop(inner);
        self.session.receivers.iter().for_each(AtomicWaker::wake);
        self.session.changed.notify_waiters();
    }

    fn closed(&self) -> Option<SessionClosed> {
        self.told(&self.session.lock())
    }
}

impl End {
    fn told(&self, inner: &Inner) -> Option<SessionClosed> {
        let (by, mut closed) = inner.closed.clone()?;
        closed.by_us = by == self.side;
        Some(closed)
    }

    /// Hands a message over, or gives it back if that needs waiting.
    fn hand_over(&self, message: Message) -> Result<Option<Message>, SessionClosed> {
        let mut inner = self.session.lock();
        if let Some(closed) = self.told(&inner) {
            return Err(closed);
        }
        let other = 1 - self.side;
        let full = inner.sides[other].waiting.len() >= MAX_WAITING;
        match &message {
            Message::Step(m) => {
                if inner.steps.total >= self.session.step_slots {
                    return Ok(Some(message));
                }
                inner.steps.begin((m.stream, m.epoch));
            }
            // A late answer, to a step that no longer waits, is dropped.
            Message::StepResult(m) if !inner.steps.finish((m.stream, m.epoch)) => return Ok(None),
            Message::StreamClose(StreamClose { stream, epoch })
            | Message::StreamError(StreamError { stream, epoch, .. }) => {
                inner.end_stream((*stream, *epoch));
            }
            Message::StepResult(_) | Message::Leaving { .. } => {}
            _ if full => return Ok(Some(message)),
            _ => {}
        }
        let freed = matches!(message, Message::StepResult(_) | Message::StreamError(_));
        inner.sides[other].push(message);
        drop(inner);
        self.session.receivers[other].wake();
        if freed {
            self.session.changed.notify_waiters();
        }
        Ok(None)
    }
}

impl Link for End {
    fn peer(&self) -> NodeId {
        self.session.peer
    }

    fn stats(&self) -> SessionStats {
        let inner = self.session.lock();
        let (own, other) = (self.side, 1 - self.side);
        SessionStats {
            frames_sent: inner.sides[other].messages,
            frames_received: inner.sides[own].messages,
            steps_in_flight: inner.steps.total,
            steps_granted: self.session.step_slots,
            queued_bytes: inner.sides[other].bytes,
            buffered_bytes: inner.sides[own].bytes,
            ..SessionStats::default()
        }
    }

    fn send(&self, message: Message, terms: Terms) -> BoxFuture<'_, Result<(), SendError>> {
        Box::pin(async move {
            Outgoing::check(&message, &terms)?;
            let hand_over = |message| self.hand_over(message);
            Ok(hand_over_when_free(&self.session.changed, message, hand_over).await?)
        })
    }

    fn try_send(
        &self,
        message: Message,
        terms: &Terms,
        _write: bool,
    ) -> Result<Option<Message>, SendError> {
        Outgoing::check(&message, terms)?;
        Ok(self.hand_over(message)?)
    }

    fn try_send_all(&self, messages: &[Message], terms: &Terms) -> Result<usize, SendError> {
        let mut checked = messages.iter().map(|m| Outgoing::check(m, terms));
        checked.try_for_each(std::convert::identity)?;
        let mut left = 0;
        for message in messages {
            left += usize::from(self.hand_over(message.clone())?.is_some());
        }
        Ok(left)
    }

    /// Returns the next message, or the end of the session after all earlier messages.
    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<Message, SessionClosed>> {
        let mut inner = self.session.lock();
        if let Some(message) = inner.sides[self.side].pop() {
            // The caller's side closes a failed stream as soon as the error is received: later
            // steps may have crossed the error.
            let mut closes = false;
            if let Message::StreamError(StreamError { stream, epoch, .. }) = message
                && inner.closed.is_none()
            {
                inner.end_stream((stream, epoch));
                let close = StreamClose { stream, epoch };
                inner.sides[1 - self.side].push(Message::StreamClose(close));
                closes = true;
            }
            drop(inner);
            if closes {
                self.session.receivers[1 - self.side].wake();
            }
            self.session.changed.notify_waiters();
            return Poll::Ready(Ok(message));
        }
        if let Some(closed) = self.told(&inner) {
            return Poll::Ready(Err(closed));
        }
        // Under the lock, so that no wake-up in between is missed.
        self.session.receivers[self.side].register(cx.waker());
        Poll::Pending
    }

    /// There is no driver task, so the handler gets a task of its own.
    fn attend(&self, mut handler: Box<dyn Handler>) {
        let end = self.clone();
        tokio::spawn(async move {
            let mut next = poll_fn(|cx| end.poll_recv(cx)).await;
            loop {
                match next {
                    Ok(message) => {
                        if let Err(code) = handler.message(message) {
                            end.end(code, "", false);
                        }
                    }
                    Err(closed) => return handler.ended(&closed),
                }
                next = match poll_fn(|cx| end.poll_recv(cx)).now_or_never() {
                    Some(next) => next,
                    None => {
                        handler.drained();
                        poll_fn(|cx| end.poll_recv(cx)).await
                    }
                };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::message::{Step, StreamOpen, StreamOpened, Want};
    use crate::tensor::DType;

    fn pair(slots: u32) -> (Connection, Connection) {
        let host = Config {
            max_steps_in_flight: slots,
            ..Config::default()
        };
        let (key, hello) = (
            NodeId::from_checked([7; 32]),
            Hello::new("pipeline", vec![1]),
        );
        connect_here(key, &hello, &Config::default(), &host)
    }

    fn one_row(position: u32) -> Step {
        Step {
            stream: 1,
            epoch: 0,
            position,
            rows: 1,
            width: 2,
            dtype: DType::F16,
            want: Want::Last,
            data: Bytes::from_static(&[1, 2, 3, 4]),
        }
    }

    fn step(position: u32) -> Message {
        Message::Step(one_row(position))
    }

    fn result(position: u32) -> Message {
        Message::StepResult(one_row(position).echo())
    }

    fn taken(connection: &mut Connection) -> Option<Message> {
        connection.recv().now_or_never().map(|m| m.unwrap())
    }

    #[tokio::test]
    async fn messages_arrive_in_order_and_are_not_copied() {
        let (mut caller, mut host) = pair(4);
        assert_eq!((host.purpose(), host.token()), ("pipeline", &[1][..]));
        let open = Message::StreamOpen(StreamOpen {
            stream: 1,
            epoch: 0,
            weights: [0; 32],
            lo: 0,
            hi: 1,
            max_positions: 8,
            fork: None,
        });
        let rows = one_row(0);
        let (at, sent) = (rows.data.as_ptr(), Message::Step(rows));
        assert_eq!(caller.sender().try_send(open.clone()).unwrap(), None);
        assert_eq!(caller.sender().try_send(sent).unwrap(), None);
        assert_eq!(taken(&mut host), Some(open));
        let Some(Message::Step(got)) = taken(&mut host) else {
            panic!("no step")
        };
        assert_eq!(got.data.as_ptr(), at);
        let (stream, epoch) = (1, 0);
        let opened = Message::StreamOpened(StreamOpened { stream, epoch });
        host.sender().send(opened.clone()).await.unwrap();
        assert_eq!(taken(&mut caller), Some(opened));
        assert_eq!(taken(&mut caller), None);
    }

    #[tokio::test]
    async fn a_step_waits_for_a_slot_and_an_answer_frees_one() {
        let (mut caller, mut host) = pair(1);
        let sender = caller.sender();
        assert_eq!(sender.try_send(step(0)).unwrap(), None);
        assert_eq!(sender.try_send(step(1)).unwrap(), Some(step(1)));
        let waiting = tokio::spawn({
            let sender = sender.clone();
            async move { sender.send(step(1)).await }
        });
        assert_eq!(taken(&mut host), Some(step(0)));
        host.sender().try_send_all(&[result(0)]).unwrap();
        waiting.await.unwrap().unwrap();
        assert_eq!(taken(&mut caller), Some(result(0)));
        assert_eq!(taken(&mut host), Some(step(1)));
        // Answers without a waiting step are dropped.
        host.sender().try_send_all(&[result(1), result(1)]).unwrap();
        assert_eq!(taken(&mut caller), Some(result(1)));
        assert_eq!(taken(&mut caller), None);
        assert_eq!(caller.stats().steps_in_flight, 0);
    }

    #[tokio::test]
    async fn the_end_of_a_stream_drops_what_waits_for_it_and_the_host_hears_of_it() {
        let (mut caller, mut host) = pair(4);
        let (stream, epoch) = (1, 0);
        let close = Message::StreamClose(StreamClose { stream, epoch });
        caller.sender().try_send(step(0)).unwrap();
        caller.sender().try_send(close.clone()).unwrap();
        assert_eq!(taken(&mut host), Some(close.clone()));
        assert_eq!(taken(&mut host), None);

        caller.sender().try_send(step(0)).unwrap();
        let error = Message::StreamError(StreamError {
            stream,
            epoch,
            position: None,
            code: "kv_full".into(),
            message: String::new(),
        });
        host.sender().try_send(error.clone()).unwrap();
        // The step crosses the error.
        caller.sender().try_send(step(1)).unwrap();
        assert_eq!(taken(&mut caller), Some(error));
        assert_eq!(taken(&mut host), Some(close));
        assert_eq!(taken(&mut host), None);
        assert_eq!(caller.stats().steps_in_flight, 0);
    }

    #[tokio::test]
    async fn messages_of_the_other_side_or_of_wrong_shape_are_refused() {
        let (caller, host) = pair(4);
        let refused = |sent: Result<Option<Message>, SendError>| match sent {
            Err(SendError::Message(violation)) => violation.code,
            other => panic!("{other:?}"),
        };
        let short = Step {
            data: Bytes::from_static(&[1]),
            ..one_row(0)
        };
        for (end, sent, code) in [
            (&caller, result(0), CloseCode::ProtocolState),
            (&host, step(0), CloseCode::ProtocolState),
            (&caller, Message::Step(short), CloseCode::TensorShape),
        ] {
            assert_eq!(refused(end.sender().try_send(sent)), code);
        }
    }

    #[tokio::test]
    async fn the_end_reaches_both_sides_after_what_came_before_it() {
        let (mut caller, host) = pair(4);
        let leaving = Message::Leaving { within_ms: 5 };
        host.sender().try_send(leaving.clone()).unwrap();
        let closer = caller.closer();
        assert!(!closer.is_closed());
        drop(host);
        assert!(closer.is_closed());
        assert_eq!(caller.recv().await.unwrap(), leaving);
        let closed = caller.recv().await.unwrap_err();
        assert_eq!((closed.code, closed.by_us), (CloseCode::Normal, false));
        assert!(caller.sender().try_send(step(0)).is_err());

        // The caller of a session that is cut receives no further message.
        let (mut caller, host) = pair(4);
        host.sender().try_send(leaving).unwrap();
        let waits = caller.sender();
        host.closer().close(CloseCode::Revoked);
        let closed = caller.recv().await.unwrap_err();
        assert_eq!((closed.code, closed.by_us), (CloseCode::Revoked, false));
        assert!(waits.closed().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_ends_with_its_lifetime() {
        let (mut caller, _host) = pair(4);
        tokio::time::advance(Config::default().session_lifetime).await;
        let closed = caller.recv().await.unwrap_err();
        assert_eq!(closed.code, CloseCode::SessionExpired);
    }
}
