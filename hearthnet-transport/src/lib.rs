//! X08 tensor transport: tensors over mutually authenticated, flow-controlled WebSocket frames.
//!
//! Two nodes that know each other's Ed25519 keys open a *session*: TLS 1.3 in which each side's
//! certificate is its node key, a WebSocket over it, and one frame per binary message. A session
//! carries the steps of the inference pipeline, and tensors of any size. The wire format is
//! `specs/x08-tensor-transport.md`; this crate knows nothing of models or communities.
//!
//! ```no_run
//! use hearthnet_transport::*;
//! # async fn example(own: Identity, host: NodeId, token: Vec<u8>, step: Step) -> Result<(), Box<dyn std::error::Error>> {
//! let hello = Hello::new("pipeline", token);
//! let mut session = connect("192.0.2.7:4710", &own, host, hello, Config::default()).await?;
//! let sender = session.sender(); // for other tasks, and threads
//! sender.send(Message::Step(step)).await?;
//! while let Message::StepResult(result) = session.recv().await? {
//!     println!("{} rows from position {}", result.rows, result.position);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # How it is built
//!
//! The protocol is a state machine without I/O, clock or randomness ([`session`]): messages and
//! times go in, messages, events and deadlines come out. A thin shell ([`connect`], [`Listener`])
//! drives it over sockets; `pair::Pair` joins two of them in virtual time for tests.
//!
//! | concept | file |
//! |---|---|
//! | frame header, types, flags; bodies | `wire/` |
//! | messages: steps, results, streams | `message.rs`, `fields.rs` |
//! | HELLO, sending, events, end of a session | `session/mod.rs`, `session/terms.rs` |
//! | state table, received frames | `session/receive.rs` |
//! | timers; steps in flight | `session/timers.rs`, `session/steps.rs` |
//! | send queue: order, fairness, cancelling | `session/outbox.rs` |
//! | tensors coming in; reassembly, buffer, refusal | `session/inbox.rs` |
//! | the credit window | `credit.rs` |
//! | zstd into buffers of a known size | `compress.rs` |
//! | close codes and error codes | `code.rs` |
//! | limits and deadlines; other paths of a listener | `config.rs` |
//! | node ids | `node_id.rs` |
//! | node keys as certificates; TLS profile | `identity.rs`, `net/tls.rs` |
//! | WebSocket limits that tungstenite lacks | `net/frame_limiter.rs` |
//! | plain messages, for the other paths | `session/plain.rs` |
//! | the driver task, and all socket I/O | `net/driver.rs`, `net/shared.rs` |
//! | handshakes, admission, caps | `net/connect.rs`, `net/acceptor.rs`, `net/admission.rs` |
//! | limits of unauthenticated connections | `net/pending_peers.rs` |
//! | sockets on the other paths of a listener | `net/peer_socket.rs` |
//! | low-priority threads | `background.rs` |
//!
//! # Invariants
//!
//! - No input of a peer can cause a panic, or make this side reserve more than its limits allow.
//! - Each broken rule ends the session with its own [`CloseCode`], here and in the peer's log.
//! - Credit, step slots and buffers are freed on every path: finish, cancel, error, timeout, end.
//! - A decode step is one message each way, of a size that depends on the width alone.
//! - No row, token or tensor is printed by `Debug` or logged at any level. Buffers of this crate
//!   that held rows are wiped when dropped; those of TLS, WebSocket and kernel are out of reach.

mod background;
mod code;
mod compress;
mod config;
mod credit;
mod fields;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod message;
mod net;
mod node_id;
#[cfg(feature = "fuzzing")]
pub mod pair;
mod secret;
pub mod session;
mod tensor;
mod time;
pub mod wire;

pub use background::{background, give_way, run_blocking, threads_can_start};
pub use code::{CloseCode, Code, MAX_NAME, SessionClosed, Violation, is_name};
pub use config::{Config, ConfigError, Deadlines, PathRule};
pub use identity::{Identity, IdentityError};
pub use message::{
    Fork, Message, Receipt, Step, StepResult, StreamClose, StreamError, StreamOpen, StreamOpened,
    Truncate, Truncated, Want,
};
pub use net::{
    Acceptor, Admission, Arrival, BindError, Caps, Closer, ConnectError, Connection, Full, Handler,
    Io, Listener, PATH, PeerSender, PeerSocket, Phase, Place, RefusedConnection, SendError, Sender,
    accept, connect, connect_here, connect_over, connect_path, connect_path_over, retry,
    subscriber,
};
pub use node_id::{NodeId, NodeIdError};
pub use session::protocol::Frame;
pub use session::rate::{KeyedBuckets, TokenBucket};
pub use session::{SessionStats, Terms};
pub use tensor::{DType, Dims, MAX_RANK, Tensor};
pub use time::Time;
pub use wire::control::Hello;
