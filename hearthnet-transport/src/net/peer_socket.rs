//! A plain socket on one of the listener's other paths: text and binary messages of the
//! application's own protocol, in order, as they are.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::Instant;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::closer::{Closer, Ends};
use super::connection::SendError;
use super::driver::{self, Ended, Shared, websocket_config};
use super::frame_limiter::Socket;
use super::frame_limiter::{FrameLimiter, Limited};
use super::newcomers::Newcomer;
use super::paths::PathRule;
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed};
use crate::config::Config;
use crate::session::plain::{Bounds, PlainSession};
use crate::session::protocol::{Frame, Protocol as _};
use crate::time::Time;

/// An open socket on one path: receives, and hands out senders. Closed with the code `normal` when
/// dropped.
pub struct PeerSocket {
    sender: PeerSender,
}

/// Sends on a [`PeerSocket`]; cheap to clone, usable from any task.
#[derive(Clone)]
pub struct PeerSender {
    shared: Arc<Shared<PlainSession>>,
    rule: Arc<PathRule>,
    /// The place of a peer that does not belong here.
    stranger: Option<Arc<Newcomer>>,
}

/// Starts driving a socket whose upgrade is done.
pub(crate) fn start(
    socket: Socket,
    peer: NodeId,
    rule: PathRule,
    begin: Instant,
    config: &Config,
    ended: Ended,
    stranger: Option<Arc<Newcomer>>,
) -> PeerSocket {
    let bounds = Bounds {
        messages: rule.queue_messages,
        bytes: rule.queue_bytes,
        largest: rule.max_message_bytes,
    };
    let session = PlainSession::new(bounds, config, Time::from(begin.elapsed()));
    let shared = driver::start(session, socket, peer, begin, config, ended);
    let rule = Arc::new(rule);
    PeerSocket {
        sender: PeerSender {
            shared,
            rule,
            stranger,
        },
    }
}

impl PeerSocket {
    /// The peer's key, proved by the TLS handshake.
    pub fn peer(&self) -> NodeId {
        self.sender.peer()
    }

    /// The path that was asked for.
    pub fn path(&self) -> &'static str {
        self.sender.rule.path
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
    pub(crate) fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Frame, SessionClosed>> {
        self.sender.shared.poll_take(cx, PlainSession::take)
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
            let limited = Limited::new(Box::new(io), limiter, begin);
            let socket = WebSocketStream::from_raw_socket(limited, role, Some(websocket)).await;
            let ended = Box::new(|_: &SessionClosed| {});
            start(socket, peer, rule.clone(), begin, &config, ended, None)
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

    /// The peer has shown that it will [belong](super::Admission::belongs) here: its socket gives way to
    /// no other stranger's from here on.
    pub fn is_invited(&self) {
        if let Some(stranger) = &self.stranger {
            stranger.known_as(self.peer());
        }
    }

    /// Whether the path carries such a message.
    fn check(&self, frame: &Frame) -> Result<(), SendError> {
        let (len, largest) = (frame.len(), self.rule.max_message_bytes);
        let violation = match frame {
            _ if len > largest => CloseCode::FrameTooBig
                .violation(format!("it has {len} bytes where {largest} may be sent")),
            Frame::Text(_) if !self.rule.text => {
                CloseCode::WebSocket.violation("this path carries binary messages only")
            }
            _ => return Ok(()),
        };
        Err(SendError::Message(violation))
    }

    /// Queues a message; waits while the queue has no room. Dropped while it waits, nothing has
    /// been sent.
    ///
    /// # Errors
    /// [`SendError::Closed`] when the socket is closed, [`SendError::Message`] for a message that
    /// is larger than the path's limit, or text where there is none.
    pub async fn send(&self, frame: Frame) -> Result<(), SendError> {
        self.check(&frame)?;
        Ok(self.shared.queue(frame).await?)
    }

    /// Queues a message if there is room; otherwise gives it back.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(&self, frame: Frame) -> Result<Option<Frame>, SendError> {
        self.check(&frame)?;
        Ok(self.shared.try_queue(frame, true)?)
    }

    /// How the socket ended, if it has.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.shared.closed()
    }

    /// Closes the socket, as [`PeerSocket::close`] does.
    pub fn close(&self, code: CloseCode) {
        self.shared.end(code, "", false);
    }

    /// A handle that ends the socket at once.
    pub fn closer(&self) -> Closer {
        let of = Arc::downgrade(&self.shared);
        Closer {
            peer: self.peer(),
            of,
        }
    }
}

impl fmt::Debug for PeerSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSender")
            .field("peer", &self.peer())
            .finish_non_exhaustive()
    }
}
