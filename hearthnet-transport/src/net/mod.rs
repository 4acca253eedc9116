//! The async shell: sockets, TLS, the WebSocket, and the task that drives a session.
//!
//! | file | what |
//! |---|---|
//! | `tls.rs` | the TLS profile and the two verifiers |
//! | `guard.rs` | meters WebSocket headers below tungstenite, so that nothing is reserved on trust |
//! | `connection.rs` | [`Connection`], [`Sender`] and the driver task |
//! | `connect.rs` | the calling side's handshakes |
//! | `listener.rs` | the listening side's, with their limits |

mod connect;
mod connection;
mod guard;
mod listener;
mod tls;

use tokio::io::{AsyncRead, AsyncWrite};

pub use connect::{ConnectError, Phase, connect, connect_over};
pub use connection::{Connection, SendError, Sender};
pub(crate) use guard::fuzz_meter;
pub use listener::{Acceptor, Admission, BindError, Listener, ListenerStats, RefusedConnection};

/// Where the WebSocket lives.
pub const PATH: &str = "/tensor/v1";

/// A byte stream below TLS: a TCP socket, or a pipe in tests.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

pub(crate) type BoxIo = Box<dyn Io>;
