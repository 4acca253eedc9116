//! X08 tensor transport: tensors over mutually authenticated, flow-controlled WebSocket frames.

pub mod bench;
mod code;
mod compress;
mod config;
mod credit;
mod identity;
mod message;
mod net;
pub mod pair;
mod secret;
pub mod session;
mod tensor;
mod time;
pub mod wire;

pub use code::{CloseCode, SessionClosed, Violation};
pub use config::{Config, ConfigError, Deadlines};
pub use identity::{Identity, IdentityError, PeerKey};
pub use message::{
    Message, Step, StepResult, StreamClose, StreamError, StreamOpen, StreamOpened, Truncate, Want,
};
pub use net::{
    Acceptor, Admission, BindError, ConnectError, Connection, Io, Listener, ListenerStats, PATH,
    Phase, RefusedConnection, SendError, Sender, connect, connect_over,
};
pub use session::{SessionStats, Terms};
pub use tensor::{DType, Dims, MAX_RANK, Tensor};
pub use time::Time;
pub use wire::control::Hello;
