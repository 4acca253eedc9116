//! Who a node is and what it may do: keys, signatures, ids, grants. Imports nothing of ours but the
//! transport.
//!
//! | concept | type | file |
//! |---|---|---|
//! | who a node is | [`NodeId`](crate::NodeId) | of the transport |
//! | the secret behind it | [`NodeKey`] | `node_key.rs`, on disk: `key_file.rs` |
//! | what a signature is over | [`Domain`] | `signature.rs` |
//! | records of one encoding | | `cbor.rs`, `raw_keys.rs` |
//! | a right that can be granted | [`Capability`] | `capability.rs` |
//! | a session token | [`Grant`] | `grant.rs` (normative: `specs/session-grant.md`) |
//! | "seen before" | [`ReplayCache`] | `replay.rs` |
//! | which community | [`CommunityId`] | `community_id.rs` |
//! | files that survive a power cut | [`whole_file`] | `whole_file.rs` |
//! | files that are read only if they are regular ones | [`regular_file`] | `regular_file.rs` |
//! | the time of day | [`now_ms`] | `unix_time.rs` |
//!
//! `key_file.rs`, `regular_file.rs` and `whole_file.rs` use files, `unix_time.rs` reads the clock, and keys are made
//! from the system's randomness; all else is pure.

mod capability;
pub(crate) mod cbor;
mod community_id;
mod grant;
mod key_file;
mod node_key;
pub(crate) mod raw_keys;
pub mod regular_file;
pub(crate) mod replay;
mod signature;
mod unix_time;
pub mod whole_file;

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
