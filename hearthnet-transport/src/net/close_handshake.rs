//! End of a WebSocket: meaning of its errors, and delivery of the close code to the peer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Sink, Stream};
use tokio_tungstenite::tungstenite::error::{CapacityError, Error as WsError, ProtocolError};
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode as WsCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message as WsMessage};

use super::frame_limiter::{Socket, violation_in};
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::time::Time;

/// Messages, or reads, that are dropped before the task yields.
const READ_BUDGET: usize = 16;

/// State of a closing handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// The connection can be dropped.
    Done,
    /// Waiting for the peer.
    Waits,
    /// More input is to be dropped, and the task has been woken for it.
    More,
}

/// Closing handshake of one connection.
#[derive(Debug, Default)]
pub(crate) struct CloseHandshake {
    pub(crate) since: Option<Time>,
    /// The close frame has been queued.
    sent: bool,
    /// The peer broke the WebSocket rules: its further bytes cannot be parsed.
    pub(crate) discard_input: bool,
}

impl CloseHandshake {
    /// Continues the handshake. `ready`: no message is left to write before the close frame.
    pub(crate) fn poll(
        &mut self,
        mut socket: Pin<&mut Socket>,
        code: CloseCode,
        ready: bool,
        now: Time,
        deadline: Duration,
        cx: &mut Context<'_>,
    ) -> Closing {
        let since = *self.since.get_or_insert(now);
        // If the peer does not read, the close frame has to wait for buffer space.
        if !self.sent && ready {
            match socket.as_mut().poll_ready(cx) {
                Poll::Ready(Ok(())) => {
                    let close = code.is_sendable().then(|| CloseFrame {
                        code: WsCode::from(code.number()),
                        reason: code.as_str().into(),
                    });
                    // If it fails, the peer learns of the close from the end of the connection.
                    let _ = socket.as_mut().start_send(WsMessage::Close(close));
                    self.sent = true;
                }
                Poll::Ready(Err(_)) => return Closing::Done,
                Poll::Pending => {}
            }
        }
        let flushed = socket.as_mut().poll_flush(cx);
        if matches!(flushed, Poll::Ready(Err(_))) || now >= since + deadline {
            return Closing::Done;
        }
        // Further messages are ignored. But they are read, because closing a connection with unread
        // bytes sends a reset, which can overtake the close code.
        for _ in 0..READ_BUDGET {
            if self.discard_input {
                match socket.as_mut().get_mut().get_mut().poll_drop(cx) {
                    Poll::Ready(true) => return Closing::Done,
                    Poll::Ready(false) => continue,
                    Poll::Pending => return Closing::Waits,
                }
            }
            match socket.as_mut().poll_next(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(error))) if broken_rule(&error).is_some() => {
                    self.discard_input = true;
                }
                Poll::Ready(Some(Err(_)) | None) => return Closing::Done,
                Poll::Pending => return Closing::Waits,
            }
        }
        cx.waker().wake_by_ref();
        Closing::More
    }
}

/// Returns the rule that the peer broke, if the error of the socket is about one.
pub(crate) fn broken_rule(error: &WsError) -> Option<Violation> {
    match error {
        WsError::Io(error) => violation_in(error),
        WsError::Protocol(ProtocolError::ResetWithoutClosingHandshake) => None,
        WsError::Protocol(_) | WsError::Utf8(_) => {
            Some(CloseCode::WebSocket.violation("the WebSocket rules were broken"))
        }
        WsError::Capacity(CapacityError::MessageTooLong { .. }) => {
            Some(CloseCode::FrameTooBig.violation("a message above the limit"))
        }
        _ => None,
    }
}

/// Cause for a broken connection.
pub(crate) fn lost(error: &WsError) -> SessionClosed {
    let detail = match error {
        WsError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the connection ended".to_owned()
        }
        error => error.to_string(),
    };
    SessionClosed::by_peer(CloseCode::Lost, detail)
}

/// Cause for a close frame from the peer.
pub(crate) fn closed_by(frame: Option<CloseFrame>) -> SessionClosed {
    match frame {
        Some(frame) => {
            let code = CloseCode::from_repr(frame.code.into()).unwrap_or(CloseCode::Lost);
            SessionClosed::by_peer(code, "")
        }
        None => SessionClosed::by_peer(CloseCode::Lost, "a WebSocket close without a code"),
    }
}
