//! A socket that carries text messages, whatever it is made of.

use std::future::Future;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, StreamExt as _, unfold};
use futures_util::{Sink, SinkExt as _, Stream};
use hearthnet_transport::{CloseCode, Frame, PeerSocket};
use tokio_tungstenite::tungstenite::Error as WsError;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode as WsCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message};

use hearthnet_transport::Violation;

/// Both directions of a socket. It is closed when it is dropped.
pub struct Wire {
    pub(crate) incoming: BoxStream<'static, Result<String, String>>,
    pub(crate) outgoing: Box<dyn Outgoing>,
}

/// The direction towards the peer.
pub(crate) trait Outgoing: Send {
    /// Sends a message; waits while the peer takes none.
    fn send(&mut self, text: String) -> BoxFuture<'_, Result<(), String>>;

    /// Tells the peer which rule it broke.
    fn close(&mut self, violation: &Violation) -> BoxFuture<'_, ()>;
}

impl From<PeerSocket> for Wire {
    fn from(socket: PeerSocket) -> Self {
        let sender = socket.sender();
        let incoming = unfold(socket, async |mut socket| match socket.recv().await {
            Ok(Frame::Text(text)) => Some((Ok(text), socket)),
            Ok(Frame::Binary(_)) => Some((Err("a binary message came".to_owned()), socket)),
            Err(closed) if closed.code == CloseCode::Normal => None,
            Err(closed) => Some((Err(closed.to_string()), socket)),
        });
        Self {
            incoming: incoming.boxed(),
            outgoing: Box::new(ToPeer(sender)),
        }
    }
}

struct ToPeer(hearthnet_transport::PeerSender);

impl Outgoing for ToPeer {
    fn send(&mut self, text: String) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async {
            let sent = self.0.send(Frame::Text(text)).await;
            sent.map_err(|e| e.to_string())
        })
    }

    fn close(&mut self, violation: &Violation) -> BoxFuture<'_, ()> {
        self.0.close(violation.code);
        Box::pin(std::future::ready(()))
    }
}

impl Wire {
    /// A WebSocket without TLS, for apps on this machine.
    pub(crate) fn websocket<S>(socket: S) -> Self
    where
        S: Stream<Item = Result<Message, WsError>>
            + Sink<Message, Error = WsError>
            + Send
            + Unpin
            + 'static,
    {
        let (sink, stream) = socket.split();
        let incoming = stream.filter_map(async |message| match message {
            Ok(Message::Text(text)) => Some(Ok(text.as_str().to_owned())),
            Ok(Message::Binary(_)) => Some(Err("a binary message came".to_owned())),
            // Pings are answered by the library; a close frame is followed by the end.
            Ok(_) => None,
            Err(error) => Some(Err(error.to_string())),
        });
        Self {
            incoming: incoming.boxed(),
            outgoing: Box::new(ToWebSocket(sink)),
        }
    }

    /// Two ends that are joined in memory.
    pub(crate) fn pair() -> (Self, Self) {
        let end = |receiver, sender| Self {
            incoming: unfold(
                receiver,
                async |mut receiver: tokio::sync::mpsc::Receiver<_>| {
                    receiver.recv().await.map(|text| (Ok(text), receiver))
                },
            )
            .boxed(),
            outgoing: Box::new(ToChannel(sender)),
        };
        let (left, from_left) = tokio::sync::mpsc::channel(4);
        let (right, from_right) = tokio::sync::mpsc::channel(4);
        (end(from_right, left), end(from_left, right))
    }
}

struct ToWebSocket<S>(S);

impl<S: Sink<Message, Error = WsError> + Send + Unpin> Outgoing for ToWebSocket<S> {
    fn send(&mut self, text: String) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async {
            let sent = self.0.send(Message::text(text)).await;
            sent.map_err(|e| e.to_string())
        })
    }

    fn close(&mut self, violation: &Violation) -> BoxFuture<'_, ()> {
        let frame = CloseFrame {
            code: WsCode::Policy,
            reason: violation.code.as_str().into(),
        };
        Box::pin(async {
            // The connection ends either way.
            let _ = self.0.send(Message::Close(Some(frame))).await;
        })
    }
}

struct ToChannel(tokio::sync::mpsc::Sender<String>);

impl Outgoing for ToChannel {
    fn send(&mut self, text: String) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { self.0.send(text).await.map_err(|e| e.to_string()) })
    }

    fn close(&mut self, _: &Violation) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// Waits until `work` is done, or gives it up.
pub(crate) async fn within<T>(
    limit: std::time::Duration,
    work: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err("the other side took nothing in time".to_owned()),
    }
}
