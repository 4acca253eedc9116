//! Terms that both sides of a handshake share: its phases, the tensor path, and the header of a
//! refused upgrade.

use std::fmt;

/// Path of the WebSocket of a tensor session.
pub const PATH: &str = "/tensor/v1";

/// Header of a refused upgrade, with the close code.
pub(super) const REFUSED_HEADER: &str = "x-hearthnet-refused";

/// Phase of making a connection.
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
