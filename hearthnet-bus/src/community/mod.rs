//! What a community agreed on, how its members come to know it, and how one is asked to join.
//! Imports `identity` and the transport.
//!
//! | concept | type | file |
//! |---|---|---|
//! | what a shard host offers | [`Descriptor`] | `descriptor.rs` |
//! | how one is asked to join | [`invite`] | `invite/` |
//! | what was agreed on, and its store | [`log`] | `log/` (normative: `specs/event-log.md`) |
//! | how logs become the same | [`sync`] | `sync/` (normative: `specs/gossip.md`) |
//!
//! `log/` says which of its files touch the disk; `sync/link.rs` is the one that uses a socket.

mod descriptor;
pub mod invite;
pub mod log;
pub mod sync;

pub use descriptor::{Descriptor, DescriptorError, MAX_ENCODED, MAX_LAYERS, MAX_TEXT};
