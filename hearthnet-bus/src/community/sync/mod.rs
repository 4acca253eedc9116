//! Gossip: synchronises the event logs of connected nodes. `specs/gossip.md` is the normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | messages | [`SyncMessage`] | `message.rs` |
//! | protocol state machine | [`SyncSession`] | `session.rs` |
//! | its limits; cost of work, budgets per peer | [`SyncConfig`], [`cost`] | `budget.rs` |
//! | driver of a session over a socket and a log | [`gossip`], [`Accounts`] | `link.rs` |
//!
//! The session does no I/O and does not know the log: it asks for work ([`Work`]) and is given the
//! results.

mod budget;
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

pub use budget::{Stored, SyncConfig, cost};
pub use link::{Accounts, Clock, gossip, path_rule};
pub use message::{MAX_BATCH_BYTES, MAX_BATCH_EVENTS, MAX_MESSAGE_BYTES, SyncMessage, VERSION};
pub use session::{Progress, SyncSession, WINDOW, Work};

/// Path of gossip on a node's listener.
pub(crate) const SYNC_PATH: &str = "/sync/v1";
