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
use super::frame_limiter::{FrameLimiter, LimitedStream, Socket, violation_in};
use super::handshake::{Phase, REFUSED_HEADER};
use super::metrics::{self, OpenSocket, Side, tls_cause};
use super::paths::PathRule;
use super::peer_socket::{self, PeerSocket};
use super::tls::{Refusal, client_config, no_name, peer_of, refusal_in};
use super::{BoxIo, Io, PATH};
use crate::NodeId;
use crate::code::{CloseCode, Code, SessionClosed, Violation};
use crate::config::{Config, ConfigError};
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
    /// The node does not serve this path: it is of an older version, or has another purpose.
    #[error(
        "the node at this address does not serve this path; it may run an older version of the program"
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
    config.validate()?;
    hello.check().map_err(ConnectError::Hello)?;
    let tcp = counted(dial(addr, &config).await)?;
    connect_over(Box::new(tcp), addr, identity, expect, hello, config).await
}

/// Counts a failed attempt.
fn counted<T>(result: Result<T, ConnectError>) -> Result<T, ConnectError> {
    if let Err(error) = &result {
        let code = error.code().map_or(Code::UNREACHABLE, Code::from);
        metrics::refused(Side::Caller, code);
    }
    result
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
    config.validate()?;
    hello.check().map_err(ConnectError::Hello)?;
    counted(open_session(io, host, identity, expect, hello, &config).await)
}

async fn open_session(
    io: BoxIo,
    host: &str,
    identity: &Identity,
    expect: NodeId,
    hello: Hello,
    config: &Config,
) -> Result<Connection, ConnectError> {
    // The full limit from the start: the host's first tensor may follow its HELLO at once. (The
    // session itself limits the HELLO to 4 KiB.)
    let largest = max_message_bytes(config.chunk_bytes, config.inline_max);
    let opened = upgrade(
        io,
        host,
        identity,
        Some(expect),
        PATH,
        largest,
        false,
        config,
    )
    .await?;
    let (socket, begin) = (opened.socket, opened.begin);

    let now = Time::from(begin.elapsed());
    let session = Session::caller(config, &hello, now);
    let pending = Pending::start(
        session,
        socket,
        expect,
        begin,
        config,
        Side::Caller,
        Box::new(|_| {}),
    );
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
    config.validate()?;
    let tcp = counted(dial(addr, config).await)?;
    let largest = rule.max_message_bytes;
    let (path, text) = (rule.path, rule.text);
    let opened = upgrade(
        Box::new(tcp),
        addr,
        identity,
        expect,
        path,
        largest,
        text,
        config,
    )
    .await;
    let opened = counted(opened)?;
    let (socket, peer, begin) = (opened.socket, opened.peer, opened.begin);
    let open = OpenSocket::new(Side::Caller, path);
    let ended = Box::new(move |closed: &SessionClosed| open.end(closed));
    Ok(peer_socket::start(
        socket,
        peer,
        rule.clone(),
        begin,
        config,
        ended,
        None,
    ))
}

async fn dial(addr: &str, config: &Config) -> Result<TcpStream, ConnectError> {
    let unreachable = |source| ConnectError::Unreachable {
        addr: addr.to_owned(),
        source,
    };
    let deadline = config.deadlines.connect;
    let tcp = within(Phase::Connect, deadline, TcpStream::connect(addr))
        .await?
        .map_err(unreachable)?;
    // Without it a decode step waits 40 ms for a delayed acknowledgement.
    tcp.set_nodelay(true).map_err(unreachable)?;
    Ok(tcp)
}

/// A WebSocket with the proved key of its peer.
struct Opened {
    socket: Socket,
    peer: NodeId,
    begin: Instant,
}

/// TLS and the upgrade to a WebSocket on `path`, with messages of at most `largest` bytes.
async fn upgrade(
    io: BoxIo,
    host: &str,
    identity: &Identity,
    expect: Option<NodeId>,
    path: &str,
    largest: usize,
    text: bool,
    config: &Config,
) -> Result<Opened, ConnectError> {
    let begin = Instant::now();
    let tls = client_config(identity, expect)
        .map_err(|error| handshake(Phase::Tls, error.to_string()))?;
    let connecting = TlsConnector::from(tls).connect(no_name(), io);
    let stream = within(Phase::Tls, config.deadlines.tls, connecting)
        .await
        .inspect_err(|_| metrics::tls_failed(Side::Caller, "timeout"))?
        .map_err(|error| {
            metrics::tls_failed(Side::Caller, tls_cause(&error));
            tls_error(&error, expect)
        })?;
    let peer = peer_of(stream.get_ref().1)
        .ok_or_else(|| handshake(Phase::Tls, "the peer has no certificate".to_owned()))?;

    // A URL cannot hold the zone id of a link-local address.
    let (before, after) = host.split_once('%').unwrap_or((host, ""));
    let after = after.find(']').and_then(|end| after.get(end..));
    let request = format!("ws://{before}{}{path}", after.unwrap_or_default())
        .into_client_request()
        .map_err(|_| {
            handshake(
                Phase::Upgrade,
                "the address is not valid in a URL".to_owned(),
            )
        })?;
    // The first message may arrive in the same read as the answer to the upgrade.
    let mut limiter = FrameLimiter::new(false, largest, Time::ZERO);
    limiter.allow_text(text);
    let limited = LimitedStream::new(Box::new(stream), limiter, begin);
    let websocket = websocket_config(largest, config.read_buffer_bytes);
    let upgrading = client_async_with_config(request, limited, Some(websocket));
    let (socket, _response) = within(Phase::Upgrade, config.deadlines.upgrade, upgrading)
        .await?
        .map_err(|error| upgrade_error(&error, peer))?;
    Ok(Opened {
        socket,
        peer,
        begin,
    })
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
            let code = code.and_then(|value| CloseCode::from_name(value.to_str().ok()?));
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
    let tls = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(
        tls,
        Some(rustls::Error::AlertReceived(AlertDescription::AccessDenied))
    )
}
