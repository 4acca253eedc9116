//! Admission of peers to a listener, and the errors of its connections.

use std::io;

use super::handshake::{PATH, Phase};
use crate::NodeId;
use crate::code::{CloseCode, Code, SessionClosed};
use crate::config::ConfigError;
use crate::wire::control::Hello;

/// Decides which peers may connect, and for what.
///
/// Called from the tasks that run the handshakes: must not block.
pub trait Admission: Send + Sync {
    /// Returns whether a node with this key may connect at all. Called during the TLS handshake;
    /// the peer has not yet proved that it holds the key.
    fn admit_peer(&self, key: &NodeId) -> bool;

    /// Returns whether the holder of this proved key is a member. Strangers have few slots of their
    /// own, and never take those of members. By default every admitted peer counts as a member.
    fn belongs(&self, _key: &NodeId) -> bool {
        true
    }

    /// Quota group that sessions and sockets of this peer count with; by default the peer itself.
    fn counts_with(&self, key: &NodeId) -> NodeId {
        *key
    }

    /// Checks whether the holder of this proved key may use a path. Called during the upgrade; a
    /// refusal is answered with HTTP 403 and the code. By default the tensor path is open, since
    /// HELLO follows, and every other path is closed.
    ///
    /// # Errors
    /// The code for the peer, such as `unauthorized` or `revoked`.
    fn admit_path(&self, _key: &NodeId, path: &str) -> Result<(), CloseCode> {
        match path {
            PATH => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        }
    }

    /// Checks the HELLO of a peer with a proved key. `now_unix` is in seconds.
    ///
    /// # Errors
    /// The close code, such as `purpose_unknown` or one of the `token_` codes.
    fn admit_hello(&self, key: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode>;

    /// Reports the end of an admitted peer's connection to the tensor path, even if it never became
    /// a session, so that refusals during the handshakes are counted as well.
    fn session_ended(&self, _key: &NodeId, _closed: &SessionClosed) {}

    /// Reports the end of a connection to another path.
    fn path_ended(&self, _key: &NodeId, _path: &str, _closed: &SessionClosed) {}

    /// Reports a connection that became neither session nor socket. Its peer may be unknown.
    fn connection_refused(&self, _why: &RefusedConnection) {}
}

/// Error of setting up a listener.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address is in use, or not one of this machine's.
    #[error("cannot listen on {addr}: {source}")]
    Address { addr: String, source: io::Error },
    /// The TLS library refused the identity.
    #[error("TLS could not be set up: {0}")]
    Tls(String),
    /// A setting is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Reason why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedConnection {
    /// A phase took longer than its deadline.
    #[error("{0} did not complete in time")]
    Timeout(Phase),
    /// The TLS handshake failed.
    #[error("{} failed: {reason}", Phase::Tls)]
    Tls {
        /// Single word: `not_tls`, `not_admitted`, `broken_off` and some more.
        cause: &'static str,
        reason: String,
    },
    /// The WebSocket upgrade failed.
    #[error("{} failed: {reason}", Phase::Upgrade)]
    Upgrade { reason: String },
    /// The peer may not use the path, or not now.
    #[error("the path {path} was refused: {code}")]
    Path {
        /// Path as served, not as asked for.
        path: &'static str,
        code: CloseCode,
    },
    /// The session ended before it opened.
    #[error(transparent)]
    Closed(SessionClosed),
}

impl RefusedConnection {
    /// Stable code, out of a fixed set.
    pub fn code(&self) -> Code {
        Code::new(match self {
            RefusedConnection::Timeout(_) => "timeout",
            RefusedConnection::Tls { cause, .. } => cause,
            RefusedConnection::Upgrade { .. } => "upgrade_failed",
            RefusedConnection::Path { code, .. } => code.as_str(),
            RefusedConnection::Closed(closed) => closed.code.as_str(),
        })
    }
}
