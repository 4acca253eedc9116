//! Interface between a driver and its session, for any kind of messages.

use std::fmt;

use bytes::Bytes;

use crate::code::{CloseCode, SessionClosed, Violation};
use crate::time::Time;

/// Message of a WebSocket. `Debug` shows its length only.
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

/// Next item to write.
pub(crate) enum Transmit {
    /// A message.
    Message(Frame),
    /// A WebSocket ping, answered by the peer's WebSocket layer.
    Ping,
}

/// State machine of one side, without I/O or clock. Call order as for [`Session`](super::Session).
pub(crate) trait Protocol: Send + 'static {
    /// Encoded message to send, made outside of the lock.
    type Outgoing: Send;
    /// Message for the application.
    type Incoming: Send;

    /// Cause of the end, if the session has ended.
    fn closed(&self) -> Option<&SessionClosed>;
    /// Ends the session and drops the messages for the application.
    fn close(&mut self, code: CloseCode, detail: &str);
    /// Ends the session because the peer broke a rule of a lower layer.
    fn fail(&mut self, violation: Violation);
    /// Ends the session because the connection is lost.
    fn connection_lost(&mut self, closed: SessionClosed);
    /// Drops the queues of both directions.
    fn drop_waiting(&mut self);

    /// New size limit of incoming messages; `None` while the limit of the connection's start holds.
    fn message_limit(&self) -> Option<usize> {
        None
    }

    /// Queues a message, or gives it back if there is no space.
    fn send(&mut self, out: Self::Outgoing) -> Result<Option<Self::Outgoing>, SessionClosed>;
    /// Next message to write.
    fn poll_transmit(&mut self, now: Time) -> Option<Transmit>;
    /// Returns whether an answer to the peer, or a message that must precede the close frame, waits
    /// for [`poll_transmit`](Self::poll_transmit).
    fn has_reply(&self) -> bool;

    /// Handles a message of the peer.
    fn handle_message(&mut self, now: Time, message: Frame);
    /// Takes the next message for the application.
    fn take(&mut self) -> Option<Self::Incoming>;
    /// Returns whether a message waits for the application.
    fn has_incoming(&self) -> bool;
    /// Returns whether the application is so far behind that reading has to pause.
    fn is_congested(&self) -> bool;

    /// Reports the socket's progress, after reading and after writing.
    fn handle_progress(&mut self, now: Time, progress: Progress);
    /// Time of the next call of [`handle_timeout`](Self::handle_timeout).
    fn poll_timeout(&self) -> Time;
    /// Handles all deadlines that have passed.
    fn handle_timeout(&mut self, now: Time);
    /// The connection is gone. Last call.
    fn ended(&mut self) {}
}

/// Progress of a socket.
pub(crate) struct Progress {
    /// Bytes of the incomplete message (0: none begun); `None` if more is left to read.
    pub(crate) partial: Option<u64>,
    /// Bytes received.
    pub(crate) received: u64,
    /// Bytes accepted by the layer below.
    pub(crate) written: u64,
    /// Whether bytes wait for the layer below.
    pub(crate) unflushed: bool,
    /// Time of the last received bytes.
    pub(crate) heard: Time,
}
