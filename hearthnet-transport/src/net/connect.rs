//! Calling side: TCP, TLS, upgrade, HELLO, each with its deadline and its own error. Paths other
//! than the tensor path have no HELLO.

use std::future::Future;
use std::io;
use std::time::Duration;

use rustls::AlertDescription;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error as WsError;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::StatusCode;

use super::connection::{Connection, Pending};
use super::driver::websocket_config;
use super::frame_limiter::{BoxIo, FrameLimiter, Io, LimitedStream, Socket, violation_in};
use super::handshake::{PATH, Phase, REFUSED_HEADER};
use super::metrics::{self, OpenSocket, Side, tls_cause};
use super::peer_socket::{self, PeerSocket};
use super::tls::{Refusal, client_config, no_name, peer_of, refusal_in, rustls_error};
use crate::NodeId;
use crate::code::{CloseCode, Code, SessionClosed, Violation};
use crate::config::{Config, ConfigError, PathRule};
use crate::identity::Identity;
use crate::session::{Session, max_message_bytes};
use crate::time::Time;
use crate::wire::control::Hello;

/// Error of opening a session or socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The TCP connection failed.
    #[error("no connection to {addr}: {source}")]
    Unreachable { addr: String, source: io::Error },
    /// A phase took longer than its deadline.
    #[error("{0} did not complete in time")]
    Timeout(Phase),
    /// The node at this address has another key than expected.
    #[error("the node at this address holds another key than expected")]
    IdentityMismatch { expected: NodeId, found: NodeId },
    /// The node does not admit this one's key, or not on this path.
    #[error("the node at this address refused this one: {code}")]
    Refused {
        /// Proved key of the node. Names the refusing node if no key was expected.
        by: NodeId,
        code: CloseCode,
    },
    /// The node does not serve this path: it runs another version, or has another purpose.
    #[error(
        "the node at this address does not serve this path; it may run another version of the program"
    )]
    NotServed,
    /// The peer is not a HearthNet host, or the connection broke during a handshake.
    #[error("{phase} failed: {reason}")]
    Handshake { phase: Phase, reason: String },
    /// Either side ended the session before it opened.
    #[error(transparent)]
    Closed(SessionClosed),
    /// The HELLO is malformed.
    #[error("the HELLO cannot be sent: {0}")]
    Hello(Violation),
    /// A setting is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl ConnectError {
    /// Close code that describes the failure, if there is one.
    pub fn code(&self) -> Option<CloseCode> {
        match self {
            ConnectError::IdentityMismatch { .. } => Some(CloseCode::IdentityMismatch),
            ConnectError::Refused { code, .. } => Some(*code),
            ConnectError::Closed(closed) => Some(closed.code),
            ConnectError::Hello(violation) => Some(violation.code),
            ConnectError::Timeout(_) => Some(CloseCode::PipelineStalled),
            _ => None,
        }
    }
}

async fn within<T>(
    phase: Phase,
    deadline: Duration,
    work: impl Future<Output = T>,
) -> Result<T, ConnectError> {
    timeout(deadline, work)
        .await
        .map_err(|_| ConnectError::Timeout(phase))
}

/// Opens a session with the host at `addr` (`host:port`) that holds the key `expect`.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect(
    addr: &str,
    identity: &Identity,
    expect: NodeId,
    hello: Hello,
    config: Config,
) -> Result<Connection, ConnectError> {
    let connector = Connector::new(addr, identity, Some(expect), &config)?;
    hello.check().map_err(ConnectError::Hello)?;
    counted(async { connector.session(connector.dial().await?, hello).await }).await
}

/// Like [`connect`], over an existing byte stream. `host` is for the HTTP `Host` header.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect_over(
    io: Box<dyn Io>,
    host: &str,
    identity: &Identity,
    expect: NodeId,
    hello: Hello,
    config: Config,
) -> Result<Connection, ConnectError> {
    let connector = Connector::new(host, identity, Some(expect), &config)?;
    hello.check().map_err(ConnectError::Hello)?;
    counted(connector.session(io, hello)).await
}

/// Opens a socket on a path other than the tensor path, at `addr` (`host:port`). With `expect`, the
/// node must hold that key. Without it any node is accepted that proves its own key, and the caller
/// has to check [`PeerSocket::peer`] before it sends.
///
/// # Errors
/// See [`ConnectError`]. A refusal of the path comes as [`ConnectError::Refused`] with its code.
pub async fn connect_path(
    addr: &str,
    identity: &Identity,
    expect: Option<NodeId>,
    rule: &PathRule,
    config: &Config,
) -> Result<PeerSocket, ConnectError> {
    let connector = Connector::new(addr, identity, expect, config)?;
    counted(async { connector.peer_socket(connector.dial().await?, rule).await }).await
}

/// Like [`connect_path`], over an existing byte stream. `host` is for the HTTP `Host` header.
///
/// # Errors
/// See [`connect_path`].
pub async fn connect_path_over(
    io: Box<dyn Io>,
    host: &str,
    identity: &Identity,
    expect: Option<NodeId>,
    rule: &PathRule,
    config: &Config,
) -> Result<PeerSocket, ConnectError> {
    let connector = Connector::new(host, identity, expect, config)?;
    counted(connector.peer_socket(io, rule)).await
}

/// Counts a failed attempt.
async fn counted<T>(
    attempt: impl Future<Output = Result<T, ConnectError>>,
) -> Result<T, ConnectError> {
    attempt.await.inspect_err(|error| {
        let code = error.code().map_or(Code::UNREACHABLE, Code::from);
        metrics::refused(Side::Caller, code);
    })
}

/// One attempt to connect with the node at `addr`.
struct Connector<'a> {
    addr: &'a str,
    identity: &'a Identity,
    expect: Option<NodeId>,
    config: &'a Config,
}

impl<'a> Connector<'a> {
    fn new(
        addr: &'a str,
        identity: &'a Identity,
        expect: Option<NodeId>,
        config: &'a Config,
    ) -> Result<Self, ConnectError> {
        config.validate()?;
        Ok(Self {
            addr,
            identity,
            expect,
            config,
        })
    }

    async fn dial(&self) -> Result<BoxIo, ConnectError> {
        let unreachable = |source| ConnectError::Unreachable {
            addr: self.addr.to_owned(),
            source,
        };
        let deadline = self.config.deadlines.connect;
        let tcp = within(Phase::Connect, deadline, TcpStream::connect(self.addr))
            .await?
            .map_err(unreachable)?;
        // Without it a decode step waits 40 ms for a delayed acknowledgement.
        tcp.set_nodelay(true).map_err(unreachable)?;
        Ok(Box::new(tcp))
    }

    /// Opens a session with the host.
    async fn session(&self, io: BoxIo, hello: Hello) -> Result<Connection, ConnectError> {
        // The full limit from the start: the host's first tensor may follow its HELLO at once. (The
        // session itself limits the HELLO to 4 KiB.)
        let config = self.config;
        let largest = max_message_bytes(config.chunk_bytes, config.inline_max);
        let (socket, peer, begin) = self.upgrade(io, PATH, largest, false).await?;
        let session = Session::caller(config, &hello, Time::from(begin.elapsed()));
        let (side, ended) = (Side::Caller, Box::new(|_: &SessionClosed| {}));
        let pending = Pending::start(session, socket, peer, begin, config, side, ended);
        // A caller's session opens with the host's HELLO, so there is no HELLO to admit.
        let opened = pending
            .opened(hello, |_| Err(CloseCode::ProtocolState))
            .await;
        opened.map_err(
            |closed| match closed.by_us && closed.code == CloseCode::PipelineStalled {
                true => ConnectError::Timeout(Phase::Hello),
                false => ConnectError::Closed(closed),
            },
        )
    }

    async fn peer_socket(&self, io: BoxIo, rule: &PathRule) -> Result<PeerSocket, ConnectError> {
        let (path, largest) = (rule.path, rule.max_message_bytes);
        let (socket, peer, begin) = self.upgrade(io, path, largest, rule.text).await?;
        let open = OpenSocket::new(Side::Caller, path);
        let ended = Box::new(move |closed: &SessionClosed| open.end(closed));
        let (rule, config) = (rule.clone(), self.config);
        Ok(peer_socket::start(
            socket, peer, rule, begin, config, ended, None,
        ))
    }

    /// TLS and the upgrade to a WebSocket on `path`, with messages of at most `largest` bytes.
    /// Returns it with the proved key of its peer, and the time at which this began.
    async fn upgrade(
        &self,
        io: BoxIo,
        path: &str,
        largest: usize,
        text: bool,
    ) -> Result<(Socket, NodeId, Instant), ConnectError> {
        let (begin, deadlines) = (Instant::now(), &self.config.deadlines);
        let tls = client_config(self.identity, self.expect)
            .map_err(|error| handshake(Phase::Tls, error.to_string()))?;
        let connecting = TlsConnector::from(tls).connect(no_name(), io);
        let stream = within(Phase::Tls, deadlines.tls, connecting)
            .await
            .inspect_err(|_| metrics::tls_failed(Side::Caller, "timeout"))?
            .map_err(|error| {
                metrics::tls_failed(Side::Caller, tls_cause(&error));
                tls_error(&error, self.expect)
            })?;
        let peer = peer_of(stream.get_ref().1)
            .ok_or_else(|| handshake(Phase::Tls, "the peer has no certificate".to_owned()))?;

        // A URL cannot hold the zone id of a link-local address.
        let (before, after) = self.addr.split_once('%').unwrap_or((self.addr, ""));
        let after = after.find(']').and_then(|end| after.get(end..));
        let request = format!("ws://{before}{}{path}", after.unwrap_or_default())
            .into_client_request()
            .map_err(|_| {
                let reason = "the address is not valid in a URL".to_owned();
                handshake(Phase::Upgrade, reason)
            })?;
        // The first message may arrive in the same read as the answer to the upgrade.
        let mut limiter = FrameLimiter::new(false, largest, Time::ZERO);
        limiter.text = text;
        let limited = LimitedStream::new(Box::new(stream), limiter, begin);
        let websocket = websocket_config(largest, self.config.read_buffer_bytes);
        let upgrading = client_async_with_config(request, limited, Some(websocket));
        let (socket, _response) = within(Phase::Upgrade, deadlines.upgrade, upgrading)
            .await?
            .map_err(|error| upgrade_error(&error, peer))?;
        Ok((socket, peer, begin))
    }
}

fn handshake(phase: Phase, reason: String) -> ConnectError {
    ConnectError::Handshake { phase, reason }
}

fn tls_error(error: &io::Error, expected: Option<NodeId>) -> ConnectError {
    match (refusal_in(error), expected) {
        (Some(Refusal::Mismatch { found }), Some(expected)) => ConnectError::IdentityMismatch {
            expected,
            found: *found,
        },
        _ => handshake(Phase::Tls, error.to_string()),
    }
}

/// Explains an error of the upgrade with `peer`. In TLS 1.3 the client finishes before the server
/// has checked its certificate, so a refusal shows at the first read after the handshake.
fn upgrade_error(error: &WsError, peer: NodeId) -> ConnectError {
    let refused = |code| ConnectError::Refused { by: peer, code };
    match error {
        WsError::Io(error) if is_denied(error) => {
            metrics::tls_failed(Side::Caller, tls_cause(error));
            refused(CloseCode::Unauthorized)
        }
        WsError::Io(error) => match violation_in(error) {
            Some(violation) => handshake(Phase::Upgrade, violation.to_string()),
            None => handshake(Phase::Upgrade, error.to_string()),
        },
        // The answer carries the code.
        WsError::Http(response) => {
            let code = response.headers().get(REFUSED_HEADER);
            let code = code.and_then(|value| value.to_str().ok()?.parse().ok());
            match code {
                Some(code) => refused(code),
                None if response.status() == StatusCode::NOT_FOUND => ConnectError::NotServed,
                None => handshake(Phase::Upgrade, format!("HTTP {}", response.status())),
            }
        }
        error => handshake(Phase::Upgrade, error.to_string()),
    }
}

fn is_denied(error: &io::Error) -> bool {
    matches!(
        rustls_error(error),
        Some(rustls::Error::AlertReceived(AlertDescription::AccessDenied))
    )
}
