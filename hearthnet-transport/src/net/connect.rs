//! The calling side: TCP, TLS, upgrade, HELLO, each with its deadline and its own error.

use std::fmt;
use std::future::Future;
use std::io;
use std::time::Duration;

use rustls::AlertDescription;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::{TlsConnector, TlsStream};
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error as WsError;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use super::connection::{Connection, start, websocket_config};
use super::guard::{Guarded, Meter, violation_in};
use super::tls::{Refusal, client_config, no_name, refusal_in};
use super::{BoxIo, Io, PATH};
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::{Config, ConfigError};
use crate::identity::{Identity, PeerKey};
use crate::session::{Event, Session, max_message_bytes};
use crate::time::Time;
use crate::wire::control::Hello;

/// The phases of making a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The TCP connection.
    Connect,
    /// The TLS handshake.
    Tls,
    /// The WebSocket upgrade.
    Upgrade,
    /// Waiting for the host's HELLO.
    Hello,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Connect => "the TCP connection",
            Phase::Tls => "the TLS handshake",
            Phase::Upgrade => "the WebSocket upgrade",
            Phase::Hello => "the answer to HELLO",
        })
    }
}

/// Why no session came about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody listens there, or the address is wrong.
    #[error("nobody could be reached at {addr}: {source}")]
    Unreachable {
        /// The address that was tried.
        addr: String,
        /// What the system said.
        source: io::Error,
    },
    /// A phase took longer than its deadline.
    #[error("{0} did not complete in time")]
    Timeout(Phase),
    /// Another node answers at this address than the one that was expected.
    #[error("the node at this address holds another key than expected")]
    IdentityMismatch {
        /// The key that was expected.
        expected: PeerKey,
        /// The key that answered.
        found: PeerKey,
    },
    /// The host does not admit this node's key.
    #[error("the host does not admit this node: ask its owner to admit your node id")]
    NotAdmitted,
    /// What answers is no HearthNet host, or the connection broke during a handshake.
    #[error("{phase} failed: {reason}")]
    Handshake {
        /// Where it failed.
        phase: Phase,
        /// What was seen.
        reason: String,
    },
    /// The host ended the session instead of opening it, or this side did.
    #[error(transparent)]
    Closed(SessionClosed),
    /// The HELLO to send is malformed.
    #[error("the HELLO cannot be sent: {0}")]
    Hello(Violation),
    /// A setting is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl ConnectError {
    /// The close code that describes the failure, where there is one.
    pub fn code(&self) -> Option<CloseCode> {
        match self {
            ConnectError::IdentityMismatch { .. } => Some(CloseCode::IdentityMismatch),
            ConnectError::NotAdmitted => Some(CloseCode::Unauthorized),
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
    expect: PeerKey,
    hello: Hello,
    config: Config,
) -> Result<Connection, ConnectError> {
    config.validate()?;
    hello.check().map_err(ConnectError::Hello)?;
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
    connect_over(Box::new(tcp), addr, identity, expect, hello, config).await
}

/// The same over a byte stream that exists already. `host` goes into the HTTP `Host` header.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect_over(
    io: Box<dyn Io>,
    host: &str,
    identity: &Identity,
    expect: PeerKey,
    hello: Hello,
    config: Config,
) -> Result<Connection, ConnectError> {
    config.validate()?;
    hello.check().map_err(ConnectError::Hello)?;
    let io: BoxIo = io;
    let begin = Instant::now();

    let tls = client_config(identity, expect)
        .map_err(|error| handshake(Phase::Tls, error.to_string()))?;
    let connecting = TlsConnector::from(tls).connect(no_name(), io);
    let stream = within(Phase::Tls, config.deadlines.tls, connecting)
        .await?
        .map_err(|error| tls_error(&error, expect))?;

    let request = format!("ws://{host}{PATH}")
        .into_client_request()
        .map_err(|_| {
            handshake(
                Phase::Upgrade,
                "the address is not valid in a URL".to_owned(),
            )
        })?;
    // The whole limit from the start: the host's first tensor may be right behind its HELLO. (The
    // session itself holds the HELLO to 4 KiB.)
    let largest = max_message_bytes(config.chunk_bytes, config.inline_max);
    let meter = Meter::new(false, largest, Time::ZERO);
    let guarded = Guarded::new(TlsStream::Client(stream), meter, begin);
    let upgrading = client_async_with_config(request, guarded, Some(websocket_config(&config)));
    let (socket, _response) = within(Phase::Upgrade, config.deadlines.upgrade, upgrading)
        .await?
        .map_err(|error| upgrade_error(&error))?;

    let now = Time::from(begin.elapsed());
    let session = Session::caller(&config, &hello, now);
    let mut pending = start(session, socket, expect, begin, &config, Box::new(|_| {}));
    loop {
        match pending.event().await {
            Ok(Event::Opened(terms)) => {
                return pending
                    .open(hello.purpose, terms)
                    .ok_or_else(|| handshake(Phase::Hello, "the session opened twice".to_owned()));
            }
            Ok(_) => {}
            Err(closed) if closed.by_us && closed.code == CloseCode::PipelineStalled => {
                return Err(ConnectError::Timeout(Phase::Hello));
            }
            Err(closed) => return Err(ConnectError::Closed(closed)),
        }
    }
}

fn handshake(phase: Phase, reason: String) -> ConnectError {
    ConnectError::Handshake { phase, reason }
}

fn tls_error(error: &io::Error, expected: PeerKey) -> ConnectError {
    match refusal_in(error) {
        Some(Refusal::Mismatch { found }) => ConnectError::IdentityMismatch {
            expected,
            found: *found,
        },
        _ if is_denied(error) => ConnectError::NotAdmitted,
        _ => handshake(Phase::Tls, error.to_string()),
    }
}

/// In TLS 1.3 the client is done before the server has looked at its certificate: a refusal shows
/// at the first read after the handshake.
fn upgrade_error(error: &WsError) -> ConnectError {
    match error {
        WsError::Io(error) if is_denied(error) => ConnectError::NotAdmitted,
        WsError::Io(error) => match violation_in(error) {
            Some(violation) => handshake(Phase::Upgrade, violation.to_string()),
            None => handshake(Phase::Upgrade, error.to_string()),
        },
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
