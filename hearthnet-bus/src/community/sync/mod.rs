//! Gossip: how the event logs of connected nodes become the same. `specs/gossip.md` is the
//! normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | what is said | [`SyncMessage`] | `message.rs` |
//! | who sends what when, in which bounds | [`SyncSession`], [`SyncConfig`] | `session.rs` |
//! | a session over a socket and a log, what is left of each peer's budget | [`gossip`], [`Accounts`] | `link.rs` |
//!
//! The session does no I/O and knows no log: it says what is to be done ([`Work`]), and is told
//! what came of it.

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod link;
#[cfg(test)]
mod link_tests;
mod message;
mod session;
#[cfg(test)]
mod session_tests;

pub use link::{Accounts, gossip, path_rule};
pub use message::{MAX_BATCH_BYTES, MAX_BATCH_EVENTS, MAX_MESSAGE_BYTES, SyncMessage, VERSION};
pub use session::{Progress, Stored, SyncConfig, SyncSession, WINDOW, Work, cost};

/// Where gossip lives on a node's listener.
pub(crate) const SYNC_PATH: &str = "/sync/v1";
