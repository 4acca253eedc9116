//! Node identity: keys, node ids and the signed grants that open sessions.
//!
//! | concept | type | file |
//! |---|---|---|
//! | who a node is | [`NodeId`] | of the transport |
//! | the secret behind it | [`NodeKey`] | `node_key.rs`, on disk: `key_file.rs` |
//! | what a signature is over | [`Domain`] | `signature.rs` |
//! | a right that can be granted | [`Capability`] | `capability.rs` |
//! | a session token | [`Grant`] | `grant.rs` (normative: `specs/session-grant.md`) |
//! | what a node can be asked to do | [`calls`] | `calls/` (normative: `specs/capability-bus.md`) |
//! | "seen before" | [`ReplayCache`] | `replay.rs` |
//! | which community | [`CommunityId`] | `community_id.rs` |
//! | how one is asked to join it | [`invite`] | `invite/` |
//! | how one joins it | [`joining`] | `joining/` |
//! | what a shard host offers | [`Descriptor`] | `descriptor.rs` |
//! | who may be where | [`discovery`] | `discovery/` |
//! | what a community agreed on, and its store | [`log`] | `log/` (normative: `specs/event-log.md`) |
//! | how logs become the same | [`sync`] | `sync/` (normative: `specs/gossip.md`) |
//! | all of it at work | [`node`] | `node/` |
//! | files that survive a power cut | [`whole_file`] | `whole_file.rs` |
//! | a community for tests | `testing` (feature of that name) | `testing.rs` |
//! | what happened of late | [`flight`] | `flight/` (normative: `specs/flight-record.md`) |
//!
//! Files, sockets and clocks are in `key_file.rs`, `whole_file.rs`, `log/store.rs`, `discovery/`,
//! `node/` and the shells of `calls/` and `sync/`; all else is pure: time and randomness come in as
//! arguments.

pub mod calls;
mod capability;
mod cbor;
mod community_id;
mod descriptor;
pub mod discovery;
pub mod flight;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod grant;
pub mod invite;
pub mod joining;
mod key_file;
pub mod log;
pub mod node;
mod node_key;
mod replay;
mod signature;
pub mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod unix_time;
pub mod whole_file;

pub use capability::{
    BUS_DESCRIBE, CHAT, COMMUNITY_JOIN, Capability, CapabilityError, DIAGNOSE, SHARD_ADVERTISE,
    SHARD_SERVE,
};
pub use community_id::{CommunityId, CommunityIdError};
pub use descriptor::{Descriptor, DescriptorError, MAX_ENCODED, MAX_LAYERS, MAX_TEXT};
pub use grant::{
    Expectation, Grant, GrantError, MAX_CLOCK_SKEW_SECS, MAX_GRANT_BYTES, MAX_GRANT_LIFETIME_SECS,
};
pub use hearthnet_transport::{NodeId, NodeIdError};
pub use key_file::KeyFileError;
pub use node_key::{NodeKey, RandomnessError};
pub use replay::ReplayCache;
pub use signature::{Domain, InvalidSignature, SIGNATURE_BYTES};
pub use unix_time::now_ms;
