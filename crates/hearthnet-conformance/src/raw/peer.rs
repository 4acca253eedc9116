//! Connection of a raw peer: TCP, TLS, upgrade and HELLO are correct, later bytes are up to the
//! test.

use std::fmt;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ciborium::Value;
use hearthnet_transport::{CloseCode, Io};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::net::TcpStream;
use tokio::time::{interval, timeout};
use tokio_rustls::client::TlsStream;

use super::frame::{Frame, Hello, kind};
use super::tls::{Credentials, connector};
use super::websocket::{self, Message, opcode};

/// Timeout after which the host counts as hanging: twice its longest deadline (30 s, for withheld
/// credit).
const TIMEOUT: Duration = Duration::from_secs(60);

/// Path of the tensor transport.
const PATH: &str = "/tensor/v1";

const READ_BYTES: usize = 16 * 1024;

/// First characters of the answer that grants an upgrade.
pub const SWITCHING: &str = "HTTP/1.1 101 ";

/// Why a peer could not be set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failed(pub String);

#[derive(Clone, Debug)]
pub enum Outgoing {
    /// X08 frame in a WebSocket message of its own, with the next sequence number.
    Frame(Frame),
    Message(Message),
}

impl From<Frame> for Outgoing {
    fn from(frame: Frame) -> Outgoing {
        Outgoing::Frame(frame)
    }
}

impl From<Message> for Outgoing {
    fn from(message: Message) -> Outgoing {
        Outgoing::Message(message)
    }
}

/// Input from the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrived {
    Frame {
        kind: u8,
        body: Vec<u8>,
    },
    /// Close frame of the WebSocket, with its code.
    Close(Option<u16>),
    /// The connection has ended.
    End,
    /// Timeout of a minute.
    Nothing,
}

impl Arrived {
    /// Text field of the frame's CBOR body.
    pub fn text(&self, key: &str) -> Option<String> {
        self.field(key)?.as_text().map(str::to_owned)
    }

    /// Number in the frame's CBOR body.
    pub fn number(&self, key: &str) -> Option<u32> {
        u32::try_from(self.field(key)?.as_integer()?).ok()
    }

    fn field(&self, key: &str) -> Option<Value> {
        let Arrived::Frame { body, .. } = self else {
            return None;
        };
        let map: Value = ciborium::from_reader(body.as_slice()).ok()?;
        let fields = map.into_map().ok()?;
        let named = |(have, _): &(Value, Value)| have.as_text() == Some(key);
        fields.into_iter().find(named).map(|(_, value)| value)
    }

    /// Whether this is a frame of the wanted type.
    pub fn is(&self, wanted: u8) -> bool {
        matches!(self, Arrived::Frame { kind, .. } if *kind == wanted)
    }
}

/// Input from a WebSocket without X08 frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Came {
    Message(Vec<u8>),
    /// Close frame, with its code.
    Close(Option<u16>),
    /// The connection has ended.
    End,
    /// Timeout of a minute.
    Nothing,
}

/// End of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Code in BYE.
    pub bye: Option<String>,
    /// Code in the WebSocket's close frame.
    pub close: Option<u16>,
    /// Frames received before the end.
    pub frames: u64,
    /// The host did not end the connection within a minute.
    pub hung: bool,
    /// A session opened instead.
    pub opened: bool,
}

impl Ending {
    /// Whether both BYE and the close frame carry this code.
    pub fn is(&self, code: CloseCode) -> bool {
        self.bye.as_deref() == Some(code.as_str()) && self.close == Some(code.number())
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |number| CloseCode::from_repr(number).map(CloseCode::as_str);
        match (&self.bye, self.close) {
            _ if self.hung => write!(f, "the session went on"),
            _ if self.opened => write!(f, "a session opened"),
            (None, None) => write!(f, "the connection ended without a code"),
            (Some(bye), Some(close)) if named(close) == Some(bye) => write!(f, "{bye}"),
            (bye, close) => {
                let bye = bye.as_deref().unwrap_or("none");
                match close {
                    Some(number) => {
                        let name = named(number).unwrap_or("unknown");
                        write!(f, "BYE {bye}, close code {number} {name}")
                    }
                    None => write!(f, "BYE {bye}, no close code"),
                }
            }
        }
    }
}

/// Outcome of a flood.
#[derive(Clone, Debug)]
pub struct Flood {
    /// Pieces written before the host stopped the peer.
    pub written: u64,
    pub ending: Ending,
}

struct Reader {
    half: ReadHalf<TlsStream<Box<dyn Io>>>,
    buffer: Vec<u8>,
}

/// Connection of a raw peer.
pub struct Peer {
    reader: Reader,
    writer: WriteHalf<TlsStream<Box<dyn Io>>>,
    sequence: u32,
}

async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> Result<T, Failed> {
    let late = |_| Failed(format!("{what} did not complete"));
    timeout(TIMEOUT, work).await.map_err(late)
}

impl Peer {
    /// Connects up to TLS. In TLS 1.3 this does not tell yet whether the host accepts the
    /// certificate.
    ///
    /// # Errors
    /// The connection or the handshake fails.
    pub async fn secured(addr: SocketAddr, credentials: &Credentials) -> Result<Peer, Failed> {
        let failed = |error: std::io::Error| Failed(format!("no connection: {error}"));
        let tcp = in_time("TCP", TcpStream::connect(addr))
            .await?
            .map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        Peer::secured_over(Box::new(tcp), credentials).await
    }

    /// Same as [`Peer::secured`], over any transport.
    ///
    /// # Errors
    /// As [`Peer::secured`].
    pub async fn secured_over(io: Box<dyn Io>, credentials: &Credentials) -> Result<Peer, Failed> {
        let connector = connector(credentials).map_err(|error| Failed(format!("TLS: {error}")))?;
        let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
        let stream = in_time("TLS", connector.connect(name, io))
            .await?
            .map_err(|error| Failed(format!("no TLS: {error}")))?;
        let (half, writer) = split(stream);
        let buffer = Vec::new();
        Ok(Peer {
            reader: Reader { half, buffer },
            writer,
            sequence: 0,
        })
    }

    /// Certificate of the other side.
    ///
    /// # Errors
    /// The other side sent none.
    pub fn certificate(self) -> Result<Vec<u8>, Failed> {
        let stream = self.reader.half.unsplit(self.writer);
        let shown = stream.get_ref().1.peer_certificates();
        let first = shown.and_then(<[_]>::first).map(|first| first.to_vec());
        first.ok_or_else(|| Failed("nobody shows a certificate".to_owned()))
    }

    /// Requests the upgrade. Returns the first line of the answer, empty if there is none.
    ///
    /// # Errors
    /// The host neither answers nor ends the connection.
    pub async fn upgrade(&mut self) -> Result<String, Failed> {
        let answer = self.upgrade_at(PATH).await?;
        Ok(answer.lines().next().unwrap_or_default().to_owned())
    }

    /// Requests an upgrade at any path, and returns the head of the answer.
    ///
    /// # Errors
    /// The host neither answers nor ends the connection.
    pub async fn upgrade_at(&mut self, path: &str) -> Result<String, Failed> {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: host\r\nUpgrade: websocket\r\n\
             Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        self.write(request.as_bytes()).await;
        in_time("the upgrade", self.reader.http_head()).await
    }

    /// Upgrades the connection to a WebSocket at a path.
    ///
    /// # Errors
    /// The host refuses.
    pub async fn upgraded_at(mut self, path: &str) -> Result<Peer, Failed> {
        let answer = self.upgrade_at(path).await?;
        match answer.starts_with(SWITCHING) {
            true => Ok(self),
            false => Err(Failed(format!("no upgrade at {path}: {answer}"))),
        }
    }

    /// Connects up to the WebSocket for tensors.
    ///
    /// # Errors
    /// The host refuses the upgrade.
    pub async fn upgraded(addr: SocketAddr, credentials: &Credentials) -> Result<Peer, Failed> {
        Peer::secured(addr, credentials)
            .await?
            .upgraded_at(PATH)
            .await
    }

    /// Sends HELLO, and waits for the host's.
    ///
    /// # Errors
    /// The host does not answer with HELLO.
    pub async fn greeted(mut self, hello: &Hello) -> Result<Peer, Failed> {
        let answer = self.ask(hello.frame()).await;
        if answer.is(kind::HELLO) {
            return Ok(self);
        }
        let ending = self.ending_after(answer).await;
        Err(Failed(format!("no session: {ending}")))
    }

    /// Writes raw bytes into the TLS stream. A connection that the host has closed is no error
    /// here: the next read reports it with the reason.
    pub async fn write(&mut self, bytes: &[u8]) {
        let writing = async {
            self.writer.write_all(bytes).await?;
            self.writer.flush().await
        };
        let _ = timeout(TIMEOUT, writing).await;
    }

    /// Writes bytes one at a time, with a pause after each, until the host ends the connection or
    /// all bytes are written.
    pub async fn trickle(&mut self, bytes: &[u8], pause: Duration) -> Ending {
        let Peer { reader, writer, .. } = self;
        let trickle = async {
            let mut ticks = interval(pause);
            for byte in bytes {
                ticks.tick().await;
                let written = writer.write_all(&[*byte]).await;
                if written.is_err() || writer.flush().await.is_err() {
                    return;
                }
            }
        };
        beside(trickle, reader.ending(None)).await
    }

    pub async fn send(&mut self, what: impl Into<Outgoing>) {
        let bytes = encode(&mut self.sequence, &what.into());
        self.write(&bytes).await;
    }

    /// Sends a frame or a message, and returns the next input from the host.
    pub async fn ask(&mut self, what: impl Into<Outgoing>) -> Arrived {
        self.send(what).await;
        self.receive().await
    }

    /// Next input from the host. WebSocket pings are skipped.
    pub async fn receive(&mut self) -> Arrived {
        self.reader.next().await
    }

    /// Next message from the host, on a path without X08 frames.
    pub async fn message(&mut self) -> Came {
        self.reader.message().await
    }

    /// Reads until the host ends the connection.
    pub async fn ending(&mut self) -> Ending {
        self.reader.ending(None).await
    }

    /// Same as [`Peer::ending`], with an input that was read already.
    pub async fn ending_after(&mut self, first: Arrived) -> Ending {
        self.reader.ending(Some(first)).await
    }

    /// Writes until the pieces are used up, the host stops reading, or it ends the session. Reads
    /// at the same time.
    pub async fn flood<T: Into<Outgoing>>(&mut self, pieces: impl IntoIterator<Item = T>) -> Flood {
        let Peer {
            reader,
            writer,
            sequence,
        } = self;
        let written = AtomicU64::new(0);
        let write = async {
            for piece in pieces {
                if writer
                    .write_all(&encode(sequence, &piece.into()))
                    .await
                    .is_err()
                {
                    return;
                }
                written.fetch_add(1, Ordering::Relaxed);
            }
            let _ = writer.flush().await;
        };
        let ending = beside(write, reader.ending(None)).await;
        let written = written.load(Ordering::Relaxed);
        Flood { written, ending }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

/// Awaits `read` while `write` runs beside it.
async fn beside<T>(write: impl Future<Output = ()>, read: impl Future<Output = T>) -> T {
    let (mut write, mut read) = (pin!(write), pin!(read));
    let mut writing = true;
    loop {
        tokio::select! {
            biased;
            outcome = &mut read => return outcome,
            () = &mut write, if writing => writing = false,
        }
    }
}

fn encode(sequence: &mut u32, what: &Outgoing) -> Vec<u8> {
    match what {
        Outgoing::Message(message) => message.encode(),
        Outgoing::Frame(frame) => {
            *sequence = sequence.wrapping_add(1);
            Message::binary(frame.encode(*sequence)).encode()
        }
    }
}

impl Reader {
    /// Reads more into the buffer. `false`: the connection has ended.
    async fn more(&mut self) -> bool {
        let before = self.buffer.len();
        self.buffer.resize(before + READ_BYTES, 0);
        let space = self.buffer.get_mut(before..).unwrap_or_default();
        let read = self.half.read(space).await.unwrap_or(0);
        self.buffer.truncate(before + read);
        read > 0
    }

    /// Head of the answer to an upgrade; later bytes stay in the buffer.
    async fn http_head(&mut self) -> String {
        loop {
            let end = self.buffer.windows(4).position(|four| four == b"\r\n\r\n");
            if let Some(end) = end {
                let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
                return String::from_utf8_lossy(&head).into_owned();
            }
            if !self.more().await {
                return String::from_utf8_lossy(&self.buffer).into_owned();
            }
        }
    }

    async fn next(&mut self) -> Arrived {
        match self.message().await {
            Came::Message(message) => arrived(&message),
            Came::Close(code) => Arrived::Close(code),
            Came::End => Arrived::End,
            Came::Nothing => Arrived::Nothing,
        }
    }

    async fn message(&mut self) -> Came {
        loop {
            match websocket::take(&mut self.buffer) {
                Ok(Some(frame)) => match frame.opcode {
                    opcode::BINARY => return Came::Message(frame.payload),
                    opcode::CLOSE => {
                        let code = frame.payload.first_chunk().copied();
                        return Came::Close(code.map(u16::from_be_bytes));
                    }
                    _ => {}
                },
                Ok(None) => match timeout(TIMEOUT, self.more()).await {
                    Ok(true) => {}
                    Ok(false) => return Came::End,
                    Err(_) => return Came::Nothing,
                },
                // Invalid input ends the reading, and so shows as a missing code.
                Err(_) => return Came::End,
            }
        }
    }

    async fn ending(&mut self, mut first: Option<Arrived>) -> Ending {
        let mut ending = Ending::default();
        loop {
            let arrived = match first.take() {
                Some(first) => first,
                None => self.next().await,
            };
            match &arrived {
                Arrived::Frame {
                    kind: kind::BYE, ..
                } => ending.bye = arrived.text("code"),
                Arrived::Frame { .. } => ending.frames += 1,
                // No frame may follow the close frame.
                Arrived::Close(code) => {
                    ending.close = *code;
                    return ending;
                }
                Arrived::End => return ending,
                Arrived::Nothing => {
                    ending.hung = true;
                    return ending;
                }
            }
        }
    }
}

/// Frame in a binary message. The host's headers are checked by the transport's tests.
fn arrived(message: &[u8]) -> Arrived {
    Arrived::Frame {
        kind: message.get(1).copied().unwrap_or(0),
        body: message.get(16..).unwrap_or_default().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_counts_only_when_both_codes_agree() {
        let both = |bye: Option<&str>, close| Ending {
            bye: bye.map(str::to_owned),
            close,
            ..Ending::default()
        };
        let code = CloseCode::FrameLength;
        assert!(both(Some("frame_length"), Some(code.number())).is(code));
        for (bye, close) in [
            (Some("frame_length"), None),
            (None, Some(code.number())),
            (Some("frame_length"), Some(CloseCode::FrameRate.number())),
            (None, None),
        ] {
            assert!(!both(bye, close).is(code));
        }
        let text = both(Some("frame_length"), Some(4015)).to_string();
        assert_eq!(text, "BYE frame_length, close code 4015 frame_rate");
    }
}
