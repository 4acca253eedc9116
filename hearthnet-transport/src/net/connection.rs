//! Open sessions: their handles, and the session over a socket.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::closer::{Closer, Ends};
use super::driver::{self, Ended};
use super::frame_limiter::Socket;
use super::metrics::{SessionMetrics, Side};
use super::shared::{Handler, Shared, retry};
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::Config;
use crate::message::Message;
use crate::session::protocol::Protocol as _;
use crate::session::{Event, Outgoing, Session, SessionStats, Terms};
use crate::wire::control::Hello;

/// Error of sending a message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The session has ended.
    #[error(transparent)]
    Closed(#[from] SessionClosed),
    /// The message is invalid: its data does not match its shape, it is larger than the peer's
    /// limits, or only the other side may send it.
    #[error("the message cannot be sent: {0}")]
    Message(#[from] Violation),
}

/// A session on a socket.
pub(crate) type SocketSession = Shared<Session>;

/// A session before the end of the HELLOs. Closed when dropped.
pub(crate) struct Pending(Option<Arc<SocketSession>>);

impl Pending {
    /// Starts driving a session over a socket.
    pub(crate) fn start(
        mut session: Session,
        socket: Socket,
        peer: NodeId,
        begin: Instant,
        config: &Config,
        side: Side,
        ended: Ended,
    ) -> Pending {
        let mut metrics = SessionMetrics::new(side);
        session.observer = Some(Box::new(move |stats, ended| metrics.note(stats, ended)));
        let shared = driver::start(session, socket, peer, begin, config, ended, false);
        Pending(Some(shared))
    }

    /// Waits until the session is open. `hello` is this side's HELLO if it is the caller; otherwise
    /// `admit` checks the caller's HELLO.
    pub(crate) async fn opened(
        mut self,
        mut hello: Hello,
        admit: impl Fn(&Hello) -> Result<(), CloseCode>,
    ) -> Result<Connection, SessionClosed> {
        while let Some(shared) = &self.0 {
            match poll_fn(|cx| shared.poll_take(cx, Session::poll_event)).await? {
                Event::Hello(said) => {
                    let answer = admit(&said);
                    hello = said;
                    shared.change(|s, now| match answer {
                        Ok(()) => s.accept(now),
                        Err(code) => s.reject(code),
                    });
                }
                Event::Opened(terms) => {
                    let Some(link) = self.0.take() else { break };
                    return Ok(Connection::over(link, terms, hello));
                }
                Event::Message(_) => {}
            }
        }
        Err(SessionClosed::by_us(CloseCode::Internal, "already open"))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            shared.end(CloseCode::Normal, "", false);
        }
    }
}

/// Layer below the handles of a session: the driver of a socket, or the other end in this process.
pub(crate) trait Link: Ends {
    fn peer(&self) -> NodeId;

    fn stats(&self) -> SessionStats;

    fn send(&self, message: Message, terms: Terms) -> BoxFuture<'_, Result<(), SendError>>;

    /// Sends a message that need not wait, or gives it back. Without `write` it may stay queued.
    fn try_send(
        &self,
        message: Message,
        terms: &Terms,
        write: bool,
    ) -> Result<Option<Message>, SendError>;

    /// Like [`try_send`](Self::try_send), for several. Returns how many there was no room for.
    fn try_send_all(&self, messages: &[Message], terms: &Terms) -> Result<usize, SendError>;

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<Message, SessionClosed>>;

    /// Hands every message to `handler`.
    fn attend(&self, handler: Box<dyn Handler>);

    /// The socket, if there is one.
    fn socket(&self) -> Option<&SocketSession> {
        None
    }
}

impl Link for SocketSession {
    fn peer(&self) -> NodeId {
        self.peer
    }

    fn stats(&self) -> SessionStats {
        self.look(|s, _| s.stats())
    }

    fn send(&self, message: Message, terms: Terms) -> BoxFuture<'_, Result<(), SendError>> {
        Box::pin(async move {
            // Encode outside of any lock.
            let out = Outgoing::new(&message, &terms)?;
            Ok(self.queue(out).await?)
        })
    }

    fn try_send(
        &self,
        message: Message,
        terms: &Terms,
        write: bool,
    ) -> Result<Option<Message>, SendError> {
        let out = Outgoing::new(&message, terms)?;
        Ok(self.try_queue(out, write)?.map(|_| message))
    }

    fn try_send_all(&self, messages: &[Message], terms: &Terms) -> Result<usize, SendError> {
        let all = messages.iter().map(|message| Outgoing::new(message, terms));
        let all = all.collect::<Result<Vec<Outgoing>, Violation>>()?;
        self.change(|s, _| {
            let mut left = 0;
            for out in all {
                left += usize::from(s.send(out)?.is_some());
            }
            Ok(left)
        })
    }

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<Message, SessionClosed>> {
        self.poll_take(cx, Session::take)
    }

    fn attend(&self, handler: Box<dyn Handler>) {
        self.set_handler(handler);
    }

    fn socket(&self) -> Option<&SocketSession> {
        Some(self)
    }
}

/// An open session. Closed, with the code `normal`, when dropped.
pub struct Connection {
    sender: Sender,
    purpose: String,
    token: Vec<u8>,
    /// Resolves with the cause of the end when the handler is gone.
    attended: Option<oneshot::Receiver<SessionClosed>>,
}

impl Connection {
    pub(crate) fn over(link: Arc<dyn Link>, terms: Terms, hello: Hello) -> Connection {
        Connection {
            sender: Sender { link, terms },
            purpose: hello.purpose,
            token: hello.token,
            attended: None,
        }
    }

    /// The peer's key, proved by the TLS handshake; this process's own key if it is the peer.
    pub fn peer(&self) -> NodeId {
        self.sender.peer()
    }

    /// Returns whether the other end is in this process.
    pub fn is_here(&self) -> bool {
        self.sender.link.socket().is_none()
    }

    /// Purpose in the caller's HELLO.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// Session token of the caller's HELLO, so that its validity can be watched while the session
    /// is open.
    pub fn token(&self) -> &[u8] {
        &self.token
    }

    /// Positions of a stream between two receipts of the host; 0: the host sends none.
    pub fn receipts(&self) -> u32 {
        self.sender.terms.receipts
    }

    /// Returns true if the host sends no receipts although this side asked for them.
    pub fn refuses_receipts(&self) -> bool {
        self.sender.terms.refuses_receipts
    }

    pub fn stats(&self) -> SessionStats {
        self.sender.stats()
    }

    /// Handle for sending, for other tasks and threads.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// Receives the next message. Cancel safe.
    ///
    /// An application that does not receive slows the peer down: tensors in the queue keep their
    /// credit, and a long queue stops the reading altogether.
    ///
    /// # Errors
    /// When the session has ended, after all earlier messages of the peer.
    pub async fn recv(&mut self) -> Result<Message, SessionClosed> {
        poll_fn(|cx| self.sender.link.poll_recv(cx)).await
    }

    /// Hands every message to `handler` from now on, from the task that reads them, instead of
    /// [`recv`](Self::recv). Queued messages come first.
    pub fn attend(&mut self, handler: impl Handler + 'static) {
        let (gone, attended) = oneshot::channel();
        self.attended = Some(attended);
        self.sender.link.attend(Box::new(ObservedHandler {
            handler: Box::new(handler),
            gone,
        }));
    }

    /// Waits for the end of the session and of its handler, and returns the cause. Without a
    /// handler, messages are dropped. Cancel safe.
    pub async fn ended(&mut self) -> SessionClosed {
        if let Some(attended) = &mut self.attended {
            let closed = attended.await;
            self.attended = None;
            return closed.unwrap_or_else(|_| {
                SessionClosed::by_us(CloseCode::Internal, "the session's handler has failed")
            });
        }
        loop {
            if let Err(closed) = self.recv().await {
                return closed;
            }
        }
    }

    /// Handle that ends this session at once.
    pub fn closer(&self) -> Closer {
        let of: Arc<dyn Ends> = self.sender.link.clone();
        Closer {
            peer: self.peer(),
            of: Arc::downgrade(&of),
        }
    }

    /// Ends the session. Queued messages are dropped; the peer receives the code.
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

/// Wraps a handler, to report its end.
struct ObservedHandler {
    handler: Box<dyn Handler>,
    gone: oneshot::Sender<SessionClosed>,
}

impl Handler for ObservedHandler {
    fn message(&mut self, message: Message) -> Result<(), CloseCode> {
        self.handler.message(message)
    }

    fn drained(&mut self) {
        self.handler.drained();
    }

    fn ended(self: Box<Self>, closed: &SessionClosed) {
        let ObservedHandler { handler, gone } = *self;
        handler.ended(closed);
        // A failed send means that no task waits for the end.
        let _ = gone.send(closed.clone());
    }
}

/// Sends messages of one session; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Sender {
    link: Arc<dyn Link>,
    terms: Terms,
}

impl Sender {
    pub fn peer(&self) -> NodeId {
        self.link.peer()
    }

    pub fn stats(&self) -> SessionStats {
        self.link.stats()
    }

    /// Cause of the end, if the session has ended.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.link.closed()
    }

    /// Ends the session, as [`Connection::close`] does.
    pub fn close(&self, code: CloseCode) {
        self.link.end(code, "", false);
    }

    /// Sends a PING, unless one is unanswered. The answer counts as received data: see
    /// [`silent_for`](Self::silent_for).
    pub fn probe(&self) {
        if let Some(shared) = self.link.socket() {
            shared.change(|s, now| s.probe(now));
        }
    }

    /// Time since the last data from the peer. A peer answers a [`probe`](Self::probe) even while
    /// it computes, so a silent one is stopped or disconnected.
    pub fn silent_for(&self) -> Duration {
        match self.link.socket() {
            Some(shared) => shared.look(|s, now| s.silent_for(now)),
            // The peer is this very process.
            None => Duration::ZERO,
        }
    }

    /// Time for which a PING has been unanswered and no other data has come.
    pub fn unanswered_for(&self) -> Option<Duration> {
        let shared = self.link.socket()?;
        shared.look(|s, now| s.unanswered_for(now))
    }

    /// Sends a [`probe`](Self::probe) and waits for the next frame of any kind. Returns `false`
    /// when the session has ended.
    pub async fn answers(&self) -> bool {
        let Some(shared) = self.link.socket() else {
            return self.closed().is_none();
        };
        let before = self.stats().frames_received;
        self.probe();
        let heard = |s: &Session, _| match s.closed() {
            Some(_) => Some(false),
            None => (s.stats().frames_received != before).then_some(true),
        };
        retry(&shared.changed, || shared.look(heard)).await
    }

    /// Sends a message. Returns when it is written or queued within the send buffer; waits for a
    /// step slot or for space. If dropped while it waits, nothing has been sent.
    ///
    /// # Errors
    /// [`SendError::Closed`] when the session has ended, [`SendError::Message`] for an invalid
    /// message.
    pub async fn send(&self, message: Message) -> Result<(), SendError> {
        self.link.send(message, self.terms).await
    }

    /// Sends a message if that needs no waiting; otherwise gives it back. Answers to steps, stream
    /// errors and stream closes never wait. For threads outside of the runtime.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(&self, message: Message) -> Result<Option<Message>, SendError> {
        self.link.try_send(message, &self.terms, true)
    }

    /// Like [`try_send`](Self::try_send), but the message may stay queued until
    /// [`flush`](Self::flush) or until the next send or receive in this session: several queued
    /// messages are written at once.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_queue(&self, message: Message) -> Result<Option<Message>, SendError> {
        self.link.try_send(message, &self.terms, false)
    }

    /// Writes the messages that [`try_queue`](Self::try_queue) has queued.
    pub fn flush(&self) {
        if let Some(shared) = self.link.socket() {
            shared.change(|_, _| ());
        }
    }

    /// Returns whether both senders belong to the same session.
    pub fn is_same_session(&self, other: &Self) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.link), Arc::as_ptr(&other.link))
    }

    /// Sends several messages that need no waiting ([`try_send`](Self::try_send)) at once: in one
    /// TLS record and one system call. Returns how many there was no room for; these are dropped.
    ///
    /// # Errors
    /// As [`send`](Self::send); if one message is invalid, none is sent.
    pub fn try_send_all(&self, messages: &[Message]) -> Result<usize, SendError> {
        self.link.try_send_all(messages, &self.terms)
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender")
            .field("peer", &self.peer())
            .finish_non_exhaustive()
    }
}
