//! Identity and authority of nodes: keys, signatures, ids, grants. Of the workspace, it imports
//! only the transport and the platform.
//!
//! | concept | type | file |
//! |---|---|---|
//! | identity of a node | [`NodeId`](crate::NodeId) | in the transport crate |
//! | its secret key | [`NodeKey`] | `node_key.rs`, on disk: `key_file.rs` |
//! | domain separation of signatures | [`Domain`] | `signature.rs` |
//! | canonical encoding of records | | `cbor.rs`, `raw_keys.rs`, `by_format.rs` |
//! | right that can be granted | [`Capability`] | `capability.rs` |
//! | session token | [`Grant`] | `grant.rs` (normative: `specs/session-grant.md`) |
//! | what a host received and returned, signed | [`receipt`] | `receipt.rs` (normative: `specs/receipts.md`) |
//! | bytes that are encrypted to several nodes | [`sealed`] | `sealed.rs` (normative: `specs/disputes.md`) |
//! | replay detection | [`ReplayCache`] | `replay.rs` |
//! | identity of a community | [`CommunityId`] | `community_id.rs` |
//! | system clock | [`now_ms`] | `unix_time.rs` |
//!
//! `key_file.rs` uses files, `unix_time.rs` reads the clock, and new keys come from the system's
//! randomness. All other code is pure.

pub(crate) mod by_format;
mod capability;
pub(crate) mod cbor;
mod community_id;
mod grant;
mod key_file;
mod node_key;
pub(crate) mod raw_keys;
pub mod receipt;
pub(crate) mod replay;
pub mod sealed;
mod signature;
mod unix_time;

pub use capability::{CHAT, Capability, CapabilityError, SHARD_SERVE};
pub use community_id::{CommunityId, CommunityIdError};
pub use grant::{
    Expectation, Grant, GrantError, MAX_CLOCK_SKEW_SECS, MAX_GRANT_BYTES, MAX_GRANT_LIFETIME_SECS,
};
pub use key_file::KeyFileError;
pub use node_key::{NodeKey, RandomnessError};
pub use replay::ReplayCache;
pub use signature::{Domain, InvalidSignature, SIGNATURE_BYTES};
pub use unix_time::now_ms;
