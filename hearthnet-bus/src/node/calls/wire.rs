//! A socket for text messages, over any transport.

use std::time::Duration;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use hearthnet_transport::{CloseCode, Frame, Io, PeerSender, PeerSocket, Violation};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode as WsCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message};

use super::frame::malformed;
use super::frame_sink::STALL;

/// A WebSocket without TLS, for apps on this machine.
type AppSocket = WebSocketStream<Box<dyn Io>>;

/// Both directions of a socket. Dropping it closes the socket.
pub struct Wire {
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

pub(super) enum Incoming {
    Peer(PeerSocket),
    App(SplitStream<AppSocket>),
    Memory(mpsc::Receiver<String>),
}

pub(super) enum Outgoing {
    Peer(PeerSender),
    App(SplitSink<AppSocket, Message>),
    Memory(mpsc::Sender<String>),
}

/// End of an exchange of messages.
pub(super) enum Ended {
    /// The other side closed the connection.
    Closed,
    /// The connection was lost for this reason, or the other side did not read in time.
    Lost(String),
    /// The other side violated the protocol.
    Broken(Violation),
}

impl From<PeerSocket> for Wire {
    fn from(socket: PeerSocket) -> Self {
        Self {
            outgoing: Outgoing::Peer(socket.sender()),
            incoming: Incoming::Peer(socket),
        }
    }
}

impl From<AppSocket> for Wire {
    fn from(socket: AppSocket) -> Self {
        let (outgoing, incoming) = socket.split();
        Self {
            outgoing: Outgoing::App(outgoing),
            incoming: Incoming::App(incoming),
        }
    }
}

impl Wire {
    /// Two ends joined in memory.
    pub(crate) fn pair() -> (Self, Self) {
        let end = |outgoing, incoming| Self {
            outgoing: Outgoing::Memory(outgoing),
            incoming: Incoming::Memory(incoming),
        };
        let (left, from_left) = mpsc::channel(4);
        let (right, from_right) = mpsc::channel(4);
        (end(left, from_right), end(right, from_left))
    }

    /// Sender of the same socket, if it belongs to a peer.
    pub(super) fn peer(&self) -> Option<PeerSender> {
        match &self.outgoing {
            Outgoing::Peer(sender) => Some(sender.clone()),
            _ => None,
        }
    }

    /// Exchanges messages until the connection ends. Each message is received once `ready` has
    /// resolved. `next` is asked for messages to send, again after each notification of `written`.
    pub(super) async fn exchange<R: Future<Output = ()>>(
        &mut self,
        ready: impl Fn() -> R,
        mut receive: impl FnMut(&str) -> Result<(), Violation>,
        written: &Notify,
        next: impl Fn() -> Option<String>,
    ) -> Ended {
        let (incoming, outgoing) = (&mut self.incoming, &mut self.outgoing);
        let read = async {
            loop {
                ready().await;
                match incoming.next().await {
                    Ok(text) => {
                        if let Err(violation) = receive(&text) {
                            return Ended::Broken(violation);
                        }
                    }
                    Err(ended) => return ended,
                }
            }
        };
        let write = async {
            loop {
                while let Some(text) = next() {
                    match timeout(STALL, outgoing.send(text)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(reason)) => return Ended::Lost(reason),
                        Err(_) => {
                            let reason = "the other side did not read in time";
                            return Ended::Lost(reason.to_owned());
                        }
                    }
                }
                written.notified().await;
            }
        };
        tokio::select! {
            ended = read => ended,
            ended = write => ended,
        }
    }

    /// Closes the connection because the other side violated the protocol.
    pub(super) async fn refuse(self, violation: Violation) {
        match self.outgoing {
            Outgoing::Peer(sender) => sender.close(violation.code),
            Outgoing::App(mut socket) => {
                let close = CloseFrame {
                    code: WsCode::Policy,
                    reason: violation.code.as_str().into(),
                };
                let told = socket.send(Message::Close(Some(close)));
                let _ = timeout(Duration::from_secs(1), told).await;
            }
            Outgoing::Memory(_) => {}
        }
    }
}

impl Incoming {
    /// The next message, or the end of the connection.
    pub(super) async fn next(&mut self) -> Result<String, Ended> {
        let binary = || Err(Ended::Broken(malformed("it is binary")));
        match self {
            Self::Peer(socket) => match socket.recv().await {
                Ok(Frame::Text(text)) => Ok(text),
                Ok(Frame::Binary(_)) => binary(),
                Err(closed) if closed.code == CloseCode::Normal => Err(Ended::Closed),
                Err(closed) => Err(Ended::Lost(reason(closed))),
            },
            Self::App(socket) => loop {
                match socket.next().await {
                    Some(Ok(Message::Text(text))) => return Ok(text.as_str().to_owned()),
                    Some(Ok(Message::Binary(_))) => return binary(),
                    // The library answers pings; a close frame is followed by the end of the
                    // stream.
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(Ended::Lost(reason(error))),
                    None => return Err(Ended::Closed),
                }
            },
            Self::Memory(receiver) => receiver.recv().await.ok_or(Ended::Closed),
        }
    }
}

impl Outgoing {
    /// Sends a message, at the pace at which the other side receives.
    pub(super) async fn send(&mut self, text: String) -> Result<(), String> {
        match self {
            Self::Peer(sender) => sender.send(Frame::Text(text)).await.map_err(reason),
            Self::App(socket) => socket.send(Message::text(text)).await.map_err(reason),
            Self::Memory(sender) => sender.send(text).await.map_err(reason),
        }
    }
}

/// Reason of the loss of a connection.
fn reason(error: impl std::fmt::Display) -> String {
    error.to_string()
}
