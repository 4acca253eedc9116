//! A socket for text messages, over any transport.

use std::future::{Future, ready};
use std::pin::Pin;

use futures_util::sink::{self, SinkExt as _};
use futures_util::stream::{BoxStream, StreamExt as _, unfold};
use futures_util::{Sink, Stream};
use hearthnet_transport::{CloseCode, Frame, PeerSender, PeerSocket, Violation};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Error as WsError;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode as WsCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message};

/// Both directions of a socket. Dropping it closes the socket.
pub struct Wire {
    pub(crate) incoming: BoxStream<'static, Result<String, String>>,
    /// Ready at the pace at which the peer receives.
    pub(crate) outgoing: Pin<Box<dyn Sink<Out, Error = String> + Send>>,
    /// Sender of the same socket, if it belongs to a peer.
    pub(crate) peer: Option<PeerSender>,
}

pub(crate) enum Out {
    Text(String),
    /// The peer violated the protocol: close the connection.
    Broken(Violation),
}

impl From<PeerSocket> for Wire {
    fn from(socket: PeerSocket) -> Self {
        let peer = socket.sender();
        let outgoing = sink::unfold(peer.clone(), |sender, out| async {
            match out {
                Out::Text(text) => sender.send(Frame::Text(text)).await,
                Out::Broken(violation) => {
                    sender.close(violation.code);
                    Ok(())
                }
            }
            .map_err(|e| e.to_string())?;
            Ok(sender)
        });
        let incoming = unfold(socket, async |mut socket| match socket.recv().await {
            Ok(Frame::Text(text)) => Some((Ok(text), socket)),
            Ok(Frame::Binary(_)) => Some((Err("a binary message came".to_owned()), socket)),
            Err(closed) if closed.code == CloseCode::Normal => None,
            Err(closed) => Some((Err(closed.to_string()), socket)),
        });
        Self {
            incoming: incoming.boxed(),
            outgoing: Box::pin(outgoing),
            peer: Some(peer),
        }
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
            // The library answers pings; a close frame is followed by the end of the stream.
            Ok(_) => None,
            Err(error) => Some(Err(error.to_string())),
        });
        let message = |out| match out {
            Out::Text(text) => Message::text(text),
            Out::Broken(violation) => Message::Close(Some(CloseFrame {
                code: WsCode::Policy,
                reason: violation.code.as_str().into(),
            })),
        };
        let outgoing = sink.with(move |out| ready(Ok::<_, WsError>(message(out))));
        Self {
            incoming: incoming.boxed(),
            outgoing: Box::pin(outgoing.sink_map_err(|e| e.to_string())),
            peer: None,
        }
    }

    /// Two ends joined in memory.
    pub(crate) fn pair() -> (Self, Self) {
        let end = |receiver, sender: mpsc::Sender<String>| {
            let incoming = unfold(receiver, async |mut receiver: mpsc::Receiver<_>| {
                receiver.recv().await.map(|text| (Ok(text), receiver))
            });
            let outgoing = sink::unfold(sender, |sender, out| async {
                if let Out::Text(text) = out {
                    sender.send(text).await.map_err(|e| e.to_string())?;
                }
                Ok(sender)
            });
            Self {
                incoming: incoming.boxed(),
                outgoing: Box::pin(outgoing),
                peer: None,
            }
        };
        let (left, from_left) = mpsc::channel(4);
        let (right, from_right) = mpsc::channel(4);
        (end(from_right, left), end(from_left, right))
    }
}

/// Runs `work` with a time limit.
pub(crate) async fn within<T>(
    limit: std::time::Duration,
    work: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err("the other side did not read in time".to_owned()),
    }
}
