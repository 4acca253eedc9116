//! What serves HTTP here, whoever does: a listener that a crowd of clients cannot take over, and the
//! numbers of the process behind it.
//!
//! | concept | where |
//! |---|---|
//! | connections, deadlines, shutdown | `server.rs` |
//! | which connection goes when there are too many | `connections.rs` |
//! | who may come in | `auth.rs` |
//! | bodies that a refusal leaves unread | `unread.rs` |
//! | whose a connection from this machine is | `peer.rs` |
//! | refusals and their statuses | `error.rs` |
//! | numbers: their table | `metrics/` |
//! | `/metrics`, and the server of a process without another use for HTTP | `endpoint.rs` |
//!
//! A caller's answers in OpenAI's shape are the orchestrator's; a host has its numbers only. Both
//! have this listener and this table. `specs/http-api.md` is the normative text.

mod auth;
mod connections;
mod endpoint;
mod error;
mod metrics;
mod peer;
mod server;
mod unread;

pub use self::auth::{Admitted, ApiKey, Client, MIN_KEY_BYTES};
pub use self::connections::held;
pub use self::endpoint::{Health, metrics_route, serve_metrics};
pub use self::error::{ApiError, json_response};
pub use self::metrics::{Metrics, OtherRecorder, Part};
pub use self::peer::User;
pub use self::server::{HttpError, HttpServer, HttpSettings};
