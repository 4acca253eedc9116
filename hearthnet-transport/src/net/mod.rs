//! The async shell: sockets, TLS, the WebSocket, and the task that drives a session.
//!
//! | file | content |
//! |---|---|
//! | `tls.rs` | the TLS profile and the two verifiers |
//! | `frame_limiter.rs` | checks WebSocket headers below tungstenite, before memory is reserved |
//! | `driver.rs` | the task that drives a socket: reading, timers |
//! | `shared.rs` | what the driver and the handles share: writing, [`Handler`] |
//! | `connection.rs` | [`Connection`], [`Sender`]; a session on a socket |
//! | `peer_socket.rs` | sockets on paths beside the tensor path |
//! | `closer.rs`, `close_handshake.rs` | ending a connection from outside; sending the close code |
//! | `connect.rs` | the calling side's handshakes |
//! | `acceptor.rs`, `admission.rs`, `caps.rs` | the listening side's, with their limits |
//! | `handshake.rs` | phases of a handshake; the tensor path |
//! | `listener.rs` | the accept loop |
//! | `pending_peers.rs` | limits of unauthenticated connections |
//! | `local.rs` | a session of a process with itself, without a socket |
//! | `metrics.rs` | metrics |

mod acceptor;
mod admission;
mod caps;
mod close_handshake;
mod closer;
mod connect;
mod connection;
mod driver;
mod frame_limiter;
mod handshake;
mod listener;
mod local;
mod metrics;
mod peer_socket;
mod pending_peers;
mod shared;
mod tls;

pub use acceptor::{Acceptor, Arrival};
pub use admission::{Admission, BindError, RefusedConnection};
pub use caps::{Caps, Full, Place};
pub use closer::Closer;
pub use connect::{ConnectError, connect, connect_over, connect_path, connect_path_over};
pub use connection::{Connection, SendError, Sender};
pub use frame_limiter::Io;
#[cfg(feature = "fuzzing")]
pub(crate) use frame_limiter::fuzz_frame_limiter;
pub use handshake::{PATH, Phase};
pub use listener::{Listener, accept};
pub use local::connect_here;
pub use peer_socket::{PeerSender, PeerSocket};
pub use pending_peers::subscriber;
pub use shared::{Handler, retry};
