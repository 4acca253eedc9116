//! HTTP server and metrics of a process: a listener that many clients cannot exhaust, and its
//! counters.
//!
//! | concept | where |
//! |---|---|
//! | connections, deadlines, shutdown | `server.rs` |
//! | eviction of connections at the limit | `connections.rs` |
//! | access control | `auth.rs` |
//! | keys; limits and use of named ones | `keys.rs` |
//! | TLS with the user's certificate | `tls.rs` |
//! | values of files that change | `watched.rs` |
//! | files for browsers | `pages.rs` |
//! | request bodies left unread by a refusal | `unread.rs` |
//! | errors and their statuses | `error.rs` |
//! | table of metrics | `metrics/` |
//! | `/metrics`, and the server of a process without another use for HTTP | `endpoint.rs` |
//!
//! The orchestrator serves the OpenAI API with it, a shard host only its metrics.
//! `specs/http-api.md` is the normative text.

mod auth;
mod connections;
mod endpoint;
mod error;
mod keys;
mod metrics;
mod pages;
mod server;
mod tls;
mod unread;
mod watched;

pub use hearthnet_platform::peer::User;

pub use self::auth::{Admitted, Client};
pub use self::connections::hold_until_sent;
pub use self::endpoint::{Health, metrics_route, serve_metrics};
pub use self::error::{ApiError, ErrorFormat, THREAD_UNSUPPORTED, json_response};
pub use self::keys::{
    ApiKey, KeyLimits, KeyUse, MIN_KEY_BYTES, NamedKey, NamedKeys, OverLimit, PresentedKey,
};
pub use self::metrics::{Metrics, OtherRecorder, Part};
pub use self::pages::Page;
pub use self::server::{HttpError, HttpServer, HttpSettings, SocketSettings};
pub use self::tls::{Tls, TlsError};
