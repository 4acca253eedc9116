//! A peer under the attacker's control, byte by byte.
//!
//! It is authenticated like anybody else (that is what makes it dangerous), and shares nothing
//! with the transport's own encoder: the WebSocket is written in `websocket.rs` and the frames in
//! `frame.rs`, from the specification, so that every field can be wrong on purpose.

pub mod event;
mod frame;
mod gossip;
mod impostor;
mod peer;
mod tls;
mod websocket;

pub use frame::{Frame, Step, cbor, chunk, dtype, flag, kind};
pub use gossip::{Gossip, Pushed};
pub use impostor::{Impostor, Trick};
pub use peer::{Arrived, Came, Ending, Flood, Hello, Outgoing, Peer, SWITCHING};
pub use tls::{Papers, Shown};
pub use websocket::{Message, opcode};
