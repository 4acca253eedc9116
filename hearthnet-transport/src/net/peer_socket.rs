//! A plain socket on another path of the listener: text and binary messages of the application's
//! own protocol, in order and unchanged.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use tokio::time::Instant;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::closer::{Closer, Ends};
use super::connection::SendError;
use super::driver::{self, Ended, websocket_config};
use super::frame_limiter::{FrameLimiter, LimitedStream, Socket};
use super::pending_peers::PendingPeer;
use super::shared::Shared;
use crate::NodeId;
use crate::code::{CloseCode, SessionClosed};
use crate::config::{Config, PathRule};
use crate::session::plain::PlainSession;
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
    /// Slot of a stranger.
    stranger: Option<Arc<PendingPeer>>,
}

/// Starts driving a socket after the upgrade.
pub(crate) fn start(
    socket: Socket,
    peer: NodeId,
    rule: PathRule,
    begin: Instant,
    config: &Config,
    ended: Ended,
    stranger: Option<Arc<PendingPeer>>,
) -> PeerSocket {
    let rule = Arc::new(rule);
    let session = PlainSession::new(Arc::clone(&rule), config, Time::from(begin.elapsed()));
    let low_priority = rule.low_priority;
    let shared = driver::start(session, socket, peer, begin, config, ended, low_priority);
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

    /// Path of the upgrade request.
    pub fn path(&self) -> &'static str {
        self.sender.rule.path
    }

    /// Receives the next message. Cancel safe.
    ///
    /// An application that does not receive slows the peer down, and cannot notice that the peer is
    /// gone. The peer closes a socket whose messages are not read for a minute.
    ///
    /// # Errors
    /// When the socket is closed, after all earlier messages of the peer.
    pub async fn recv(&mut self) -> Result<Frame, SessionClosed> {
        poll_fn(|cx| self.sender.shared.poll_take(cx, PlainSession::take)).await
    }

    /// Sends a message: see [`PeerSender::send`].
    ///
    /// # Errors
    /// As [`PeerSender::send`].
    pub async fn send(&self, frame: Frame) -> Result<(), SendError> {
        self.sender.send(frame).await
    }

    /// Handle for sending.
    pub fn sender(&self) -> PeerSender {
        self.sender.clone()
    }

    /// Handle that ends this socket at once.
    pub fn closer(&self) -> Closer {
        self.sender.closer()
    }

    /// Cause of the end, if the socket has ended.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.sender.closed()
    }

    /// Closes the socket. Queued messages are still sent, if the peer reads; no more are received.
    pub fn close(&self, code: CloseCode) {
        self.sender.close(code);
    }

    /// Two sockets joined in memory, each with the key of the other. The WebSocket and its limiter
    /// are real; there is no TLS. For tests.
    pub async fn pair(keys: [NodeId; 2], rule: &PathRule) -> (PeerSocket, PeerSocket) {
        let (left, right) = tokio::io::duplex(64 * 1024);
        let config = Config::default();
        let begin = Instant::now();
        let join = async |io, role, peer| {
            let limiter =
                FrameLimiter::upgraded(role == Role::Server, rule.max_message_bytes, rule.text);
            let websocket = websocket_config(rule.max_message_bytes, config.read_buffer_bytes);
            let limited = LimitedStream::new(Box::new(io), limiter, begin);
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
    pub fn peer(&self) -> NodeId {
        self.shared.peer
    }

    /// Marks the peer as about to become a [member](super::Admission::belongs): its socket is no
    /// longer closed in favour of other strangers.
    pub fn is_invited(&self) {
        if let Some(stranger) = &self.stranger {
            stranger.mark_member(self.peer());
        }
    }

    /// Checks a message against the path's rule.
    fn check(&self, frame: &Frame) -> Result<(), SendError> {
        let (len, largest) = (frame.len(), self.rule.max_message_bytes);
        let violation = match frame {
            _ if len > largest => CloseCode::FrameTooBig
                .violation(format!("it has {len} bytes, and the limit is {largest}")),
            Frame::Text(_) if !self.rule.text => {
                CloseCode::WebSocket.violation("this path carries binary messages only")
            }
            _ => return Ok(()),
        };
        Err(SendError::Message(violation))
    }

    /// Queues a message; waits while the queue is full. If dropped while it waits, nothing has been
    /// sent.
    ///
    /// # Errors
    /// [`SendError::Closed`] when the socket is closed, [`SendError::Message`] for a message beyond
    /// the path's limit, or a text message on a binary path.
    pub async fn send(&self, frame: Frame) -> Result<(), SendError> {
        self.check(&frame)?;
        Ok(self.shared.queue(frame).await?)
    }

    /// Queues a message if there is space; otherwise gives it back.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(&self, frame: Frame) -> Result<Option<Frame>, SendError> {
        self.check(&frame)?;
        Ok(self.shared.try_queue(frame, true)?)
    }

    /// Cause of the end, if the socket has ended.
    pub fn closed(&self) -> Option<SessionClosed> {
        self.shared.closed()
    }

    /// Closes the socket, as [`PeerSocket::close`] does.
    pub fn close(&self, code: CloseCode) {
        self.shared.end(code, "", false);
    }

    /// Handle that ends the socket at once.
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
