//! A peer that keeps no rules but its own, byte by byte: TLS with any certificate, WebSocket and
//! frames with any field wrong, and the table of rules that can be broken with them.
//!
//! It shares nothing with the transport's own encoder, but is written from the specification: an
//! error in the one would otherwise hide itself in the other. The transport's tests and the attacks
//! of `adversarial/` are made of it.

mod frame;
mod peer;
mod tls;
pub mod violations;
mod websocket;

pub use frame::{Frame, Hello, Step, cbor, chunk, dtype, flag, kind, life, stream_open};
pub use peer::{Arrived, Came, Ending, Failed, Flood, Outgoing, Peer, SWITCHING};
pub use tls::{Credentials, acceptor, connector};
pub use websocket::{Message, opcode};
