//! An open session: its handles, and the session over a socket.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::closer::{Closer, Ends};
use super::driver::{self, Ended, Handler, Shared, retry};
use super::frame_limiter::Socket;
use super::metrics::{SessionMetrics, Side};
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::Config;
use crate::cpu_latency;
use crate::message::Message;
use crate::session::protocol::{Frame, Progress, Protocol, Transmit};
use crate::session::{Event, Outgoing, SendRefused, Session, SessionStats, Terms};
use crate::time::Time;
use crate::wire::control::Hello;

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
    Message(#[from] Violation),
}

/// A session on a socket, with what is counted of it.
pub(crate) struct SocketSession {
    session: Session,
    metrics: SessionMetrics,
}

impl Protocol for SocketSession {
    type Outgoing = Outgoing;
    type Incoming = Message;

    fn closed(&self) -> Option<&SessionClosed> {
        self.session.closed()
    }

    fn close(&mut self, code: CloseCode, detail: &str) {
        self.session.close(code, detail);
    }

    fn fail(&mut self, violation: Violation) {
        self.session.close(violation.code, &violation.detail);
    }

    fn connection_lost(&mut self, closed: SessionClosed) {
        self.session.connection_lost(closed);
    }

    fn drop_waiting(&mut self) {
        while self.session.poll_event().is_some() {}
    }

    fn message_limit(&self) -> Option<usize> {
        // Once the session is open, messages may be larger than a HELLO.
        let open = self.session.is_open();
        open.then(|| self.session.max_message_bytes())
    }

    fn send(&mut self, out: Outgoing) -> Result<Option<Outgoing>, SessionClosed> {
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

    fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        let frame = self.session.poll_transmit(now)?;
        self.metrics.sent(frame.len());
        Some(Transmit::Message(Frame::Binary(frame)))
    }

    fn has_reply(&self) -> bool {
        self.session.has_reply()
    }

    fn handle_message(&mut self, now: Time, message: Frame) {
        match message {
            Frame::Binary(message) => {
                self.metrics.received(message.len());
                self.session.handle_message(now, &message);
            }
            Frame::Text(_) => self.session.close(CloseCode::WebSocket, "a text message"),
        }
    }

    fn take(&mut self) -> Option<Message> {
        loop {
            // The others are taken while the session opens.
            if let Event::Message(message) = self.session.poll_event()? {
                return Some(message);
            }
        }
    }

    fn has_incoming(&self) -> bool {
        self.session.has_event()
    }

    fn is_congested(&self) -> bool {
        self.session.is_congested()
    }

    fn handle_progress(&mut self, now: Time, progress: Progress) {
        if let Some(partial) = progress.partial {
            self.session.handle_partial(now, partial);
        }
        // Whatever came or was queued, this follows: the gauges are right from here on.
        self.metrics.note(&self.session.stats());
    }

    fn poll_timeout(&self) -> Time {
        self.session.poll_timeout()
    }

    fn handle_timeout(&mut self, now: Time) {
        self.session.handle_timeout(now);
    }

    fn ended(&mut self) {
        if let Some(closed) = self.session.closed() {
            self.metrics.end(closed);
        }
    }
}

/// A session whose HELLOs are still under way. Closed when dropped.
pub(crate) struct Pending(Option<Arc<Shared<SocketSession>>>);

impl Pending {
    /// Starts driving a session over a socket.
    pub(crate) fn start(
        session: Session,
        socket: Socket,
        peer: NodeId,
        begin: Instant,
        config: &Config,
        side: Side,
        ended: Ended,
    ) -> Pending {
        let metrics = SessionMetrics::new(side);
        let session = SocketSession { session, metrics };
        let shared = driver::start(session, socket, peer, begin, config, ended);
        Pending(Some(shared))
    }

    /// The open connection. `hello` is what this side has said, if it is the caller; otherwise
    /// `admit` judges what the caller says.
    pub(crate) async fn opened(
        mut self,
        mut hello: Hello,
        admit: impl Fn(&Hello) -> Result<(), CloseCode>,
    ) -> Result<Connection, SessionClosed> {
        while let Some(shared) = &self.0 {
            match poll_fn(|cx| shared.poll_take(cx, |s| s.session.poll_event())).await? {
                Event::Hello(said) => {
                    let answer = admit(&said);
                    hello = said;
                    shared.change(|s, now| match answer {
                        Ok(()) => s.session.accept(now),
                        Err(code) => s.session.reject(code),
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

/// What is below the handles of a session: the driver of a socket, or the other end in this process.
pub(crate) trait Link: Ends {
    fn peer(&self) -> NodeId;

    fn stats(&self) -> SessionStats;

    fn send(&self, message: Message, terms: Terms) -> BoxFuture<'_, Result<(), SendError>>;

    /// Sends a message that need not wait, or gives it back. Unless `write`, it may stay here.
    fn try_send(
        &self,
        message: Message,
        terms: &Terms,
        write: bool,
    ) -> Result<Option<Message>, SendError>;

    /// As [`try_send`](Self::try_send), all or none. For how many there was no room.
    fn try_send_all(&self, messages: &[Message], terms: &Terms) -> Result<usize, SendError>;

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<Message, SessionClosed>>;

    /// Gives every message to `handler`.
    fn attend(&self, handler: Box<dyn Handler>);

    /// The socket, where there is one.
    fn socket(&self) -> Option<&Shared<SocketSession>>;
}

impl Link for Shared<SocketSession> {
    fn peer(&self) -> NodeId {
        self.peer
    }

    fn stats(&self) -> SessionStats {
        self.look(|s, _| s.session.stats())
    }

    fn send(&self, message: Message, terms: Terms) -> BoxFuture<'_, Result<(), SendError>> {
        Box::pin(async move {
            // What it costs to encode is paid here, outside of any lock.
            let out = Outgoing::new(&message, &terms)?;
            cpu_latency::touch();
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
        cpu_latency::touch();
        Ok(self.try_queue(out, write)?.map(|_| message))
    }

    fn try_send_all(&self, messages: &[Message], terms: &Terms) -> Result<usize, SendError> {
        let all = messages.iter().map(|message| Outgoing::new(message, terms));
        let all = all.collect::<Result<Vec<Outgoing>, Violation>>()?;
        cpu_latency::touch();
        self.change(|s, _| {
            let mut left = 0;
            for out in all {
                left += usize::from(s.send(out)?.is_some());
            }
            Ok(left)
        })
    }

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<Message, SessionClosed>> {
        self.poll_take(cx, SocketSession::take)
    }

    fn attend(&self, handler: Box<dyn Handler>) {
        self.hand_to(handler);
    }

    fn socket(&self) -> Option<&Shared<SocketSession>> {
        Some(self)
    }
}

/// An open session. Closed, with the code `normal`, when dropped.
pub struct Connection {
    sender: Sender,
    purpose: String,
    token: Vec<u8>,
    /// Tells when the handler is gone, and why.
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

    /// The peer's key, proved by the TLS handshake; this process's own, if it is the peer.
    pub fn peer(&self) -> NodeId {
        self.sender.peer()
    }

    /// Whether the other end is in this process.
    pub fn is_here(&self) -> bool {
        self.sender.link.socket().is_none()
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
    pub(crate) fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Message, SessionClosed>> {
        self.sender.link.poll_recv(cx)
    }

    /// Gives every message to `handler` from now on, from the task that reads them, in place of
    /// [`recv`](Self::recv); those that wait already come first.
    pub fn attend(&mut self, handler: impl Handler + 'static) {
        let (gone, attended) = oneshot::channel();
        self.attended = Some(attended);
        self.sender.link.attend(Box::new(Attending {
            handler: Box::new(handler),
            gone,
        }));
    }

    /// How the session ended, once it has and the handler has been let go. Without a handler, what
    /// comes is dropped. May be dropped and called again.
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

    /// A handle that ends this session at once.
    pub fn closer(&self) -> Closer {
        let of: Arc<dyn Ends> = self.sender.link.clone();
        Closer {
            peer: self.peer(),
            of: Arc::downgrade(&of),
        }
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

/// A handler, and who waits for its end.
struct Attending {
    handler: Box<dyn Handler>,
    gone: oneshot::Sender<SessionClosed>,
}

impl Handler for Attending {
    fn message(&mut self, message: Message) -> Result<(), CloseCode> {
        self.handler.message(message)
    }

    fn drained(&mut self) {
        self.handler.drained();
    }

    fn ended(self: Box<Self>, closed: &SessionClosed) {
        let Attending { handler, gone } = *self;
        handler.ended(closed);
        // Nobody need wait for it.
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
    /// The peer's key.
    pub fn peer(&self) -> NodeId {
        self.link.peer()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> SessionStats {
        self.link.stats()
    }

    /// How the session ended, if it has.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.link.closed()
    }

    /// Ends the session, as [`Connection::close`] does.
    pub fn close(&self, code: CloseCode) {
        self.link.end(code, "", false);
    }

    /// Asks the peer for a sign of life (PING), unless it has been asked and has not answered yet.
    /// The answer counts as something heard: see [`silent_for`](Self::silent_for).
    pub fn probe(&self) {
        if let Some(shared) = self.link.socket() {
            shared.change(|s, now| s.session.probe(now));
        }
    }

    /// For how long nothing has come from the peer. Its connection answers a [`probe`](Self::probe)
    /// whatever it computes: a peer that is silent all the same is stopped, or cut off.
    pub fn silent_for(&self) -> Duration {
        match self.link.socket() {
            Some(shared) => shared.look(|s, now| s.session.silent_for(now)),
            // Its connection is this very process.
            None => Duration::ZERO,
        }
    }

    /// For how long a PING has been unanswered, while nothing else came either.
    pub fn unanswered_for(&self) -> Option<Duration> {
        let shared = self.link.socket()?;
        shared.look(|s, now| s.session.unanswered_for(now))
    }

    /// Asks for a sign of life as [`probe`](Self::probe) does, and resolves with the next thing that
    /// comes, whatever it is; `false` when the session is over.
    pub async fn answers(&self) -> bool {
        let Some(shared) = self.link.socket() else {
            return self.closed().is_none();
        };
        let before = self.stats().frames_received;
        self.probe();
        let heard = |s: &SocketSession, _| match s.session.closed() {
            Some(_) => Some(false),
            None => (s.session.stats().frames_received != before).then_some(true),
        };
        retry(&shared.room, || shared.look(heard)).await
    }

    /// Sends a message. Returns when it is written or queued within the send buffer; waits for a
    /// step slot or for room. Dropped while it waits, nothing has been sent.
    ///
    /// # Errors
    /// [`SendError::Closed`] when the session is over, [`SendError::Message`] for a message that
    /// contradicts itself.
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

    /// As [`try_send`](Self::try_send), but the message may stay here until [`flush`](Self::flush),
    /// or until anything else is sent or received in this session: several that are queued go out in
    /// one piece.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_queue(&self, message: Message) -> Result<Option<Message>, SendError> {
        self.link.try_send(message, &self.terms, false)
    }

    /// Writes what [`try_queue`](Self::try_queue) has left here.
    pub fn flush(&self) {
        if let Some(shared) = self.link.socket() {
            cpu_latency::touch();
            shared.change(|_, _| ());
        }
    }

    /// Whether the other one sends in the same session.
    pub fn is_same_session(&self, other: &Self) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.link), Arc::as_ptr(&other.link))
    }

    /// Sends several messages that need no waiting ([`try_send`](Self::try_send)) in one piece: one
    /// TLS record and one system call instead of as many. Returns how many there was no room for;
    /// these are dropped.
    ///
    /// # Errors
    /// As [`send`](Self::send); a message that cannot be sent keeps the others from being sent.
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
