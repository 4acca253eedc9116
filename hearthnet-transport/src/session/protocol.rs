//! What a driver needs of a session, whatever its messages are.

use std::fmt;

use bytes::Bytes;

use crate::code::{CloseCode, SessionClosed, Violation};
use crate::time::Time;

/// One message of a WebSocket. `Debug` shows its length only.
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

/// What is to be written next.
pub(crate) enum Transmit {
    /// A message.
    Message(Frame),
    /// A WebSocket ping, which the other side's WebSocket answers.
    Ping,
}

/// The state machine of one side: no I/O, no clock. Call order as for
/// [`Session`](super::Session).
pub(crate) trait Protocol: Send + 'static {
    /// A message to send, made ready where no lock is held.
    type Outgoing: Send;
    /// A message for the application.
    type Incoming: Send;

    /// How it ended, if it has.
    fn closed(&self) -> Option<&SessionClosed>;
    /// Ends it; what the application has not taken is dropped.
    fn close(&mut self, code: CloseCode, detail: &str);
    /// Ends it, because the peer broke a rule below the messages.
    fn fail(&mut self, violation: Violation);
    /// Ends it, because the connection is gone.
    fn connection_lost(&mut self, closed: SessionClosed);
    /// Drops what waits in either direction.
    fn drop_waiting(&mut self);

    /// The largest message that may come, where that has changed since the connection was made.
    fn message_limit(&self) -> Option<usize> {
        None
    }

    /// Queues a message, or gives it back for want of room.
    fn send(&mut self, out: Self::Outgoing) -> Result<Option<Self::Outgoing>, SessionClosed>;
    /// The next message to write.
    fn poll_transmit(&mut self, now: Time) -> Option<Transmit>;
    /// Whether an answer to the peer, or what has to go before the close frame, waits for
    /// [`poll_transmit`](Self::poll_transmit).
    fn has_reply(&self) -> bool;

    /// A message of the peer.
    fn handle_message(&mut self, now: Time, message: Frame);
    /// The next message for the application, which has it from here on.
    fn take(&mut self) -> Option<Self::Incoming>;
    /// Whether there is one.
    fn has_incoming(&self) -> bool;
    /// Whether the application is so far behind that reading has to wait for it.
    fn is_congested(&self) -> bool;

    /// How far the socket has come; after reading, and after writing.
    fn handle_progress(&mut self, now: Time, progress: Progress);
    /// When [`handle_timeout`](Self::handle_timeout) wants to be called next.
    fn poll_timeout(&self) -> Time;
    /// Acts on every deadline that has passed.
    fn handle_timeout(&mut self, now: Time);
    /// The connection is gone; nothing follows.
    fn ended(&mut self) {}
}

/// What a socket has done so far.
pub(crate) struct Progress {
    /// Bytes of a message that is incomplete (0: none begun), if nothing else is left to read.
    pub(crate) partial: Option<u64>,
    /// Bytes that have come.
    pub(crate) received: u64,
    /// Bytes that the layer below has taken.
    pub(crate) written: u64,
    /// Whether there are more for it to take.
    pub(crate) unflushed: bool,
    /// When bytes last came.
    pub(crate) heard: Time,
}
