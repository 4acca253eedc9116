//! State of a community, its synchronisation between members, and joining. Imports `identity` and
//! the transport.
//!
//! | concept | type | file |
//! |---|---|---|
//! | shard that a host offers | [`Descriptor`] | `descriptor.rs` |
//! | evidence of a dispute | [`evidence`] | `evidence.rs` (normative: `specs/disputes.md`) |
//! | invite codes and join requests | [`invite`] | `invite/` |
//! | state of the community, and its store | [`log`] | `log/` (normative: `specs/event-log.md`) |
//! | gossip between members | [`sync`] | `sync/` (normative: `specs/gossip.md`) |
//!
//! `log/` says which of its files touch the disk. Of `sync/`, only `link.rs` uses a socket.

mod descriptor;
pub mod evidence;
pub mod invite;
pub mod log;
pub mod sync;

pub use descriptor::{Descriptor, DescriptorError, MAX_ENCODED, MAX_LAYERS, MAX_TEXT};
