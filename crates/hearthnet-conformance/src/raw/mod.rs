//! Raw peer that can break any rule byte by byte: TLS with any certificate, WebSocket and frames
//! with any field wrong, and a table of violations.
//!
//! The encoder is written from the specification and shares no code with the transport's, since a
//! common error would hide itself. The checks of this crate, the transport's tests and the attacks of
//! `adversarial/` use it.

mod frame;
mod peer;
mod tls;
pub mod violations;
mod websocket;

pub use frame::{
    Frame, Hello, Step, cbor, chunk, dtype, flag, kind, life, stream_open, stream_open_in,
};
pub use peer::{Arrived, Came, Ending, Failed, Flood, Outgoing, Peer, SWITCHING};
pub use tls::{Credentials, acceptor, connector};
pub use websocket::{Message, opcode};
