//! Terms that both sides of a handshake share: its phases, the tensor path, and the header of a
//! refused upgrade.

/// Path of the WebSocket of a tensor session.
pub const PATH: &str = "/tensor/v1";

/// Header of a refused upgrade, with the close code.
pub(super) const REFUSED_HEADER: &str = "x-hearthnet-refused";

/// Phase of making a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
pub enum Phase {
    #[strum(to_string = "the TCP connection")]
    Connect,
    #[strum(to_string = "the TLS handshake")]
    Tls,
    #[strum(to_string = "the WebSocket upgrade")]
    Upgrade,
    #[strum(to_string = "the answer to HELLO")]
    Hello,
}
