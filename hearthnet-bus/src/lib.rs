//! Nodes, their community and what they can be asked to do.
//!
//! Three rooms; each imports only those above it, and `tests/rooms.rs` sees to that:
//!
//! | room | what | I/O |
//! |---|---|---|
//! | `identity/` | keys, signatures, ids, session grants | `key_file.rs`, `regular_file.rs`, `whole_file.rs` (files), `unix_time.rs` (clock) |
//! | `community/` | event log, gossip, invites, descriptors | `log/{store,db,recover,backup,audit}.rs` (SQLite, one thread), `sync/link.rs` (a socket) |
//! | `node/` | a running node: calls, discovery, flight record, access, dialling | `mod.rs`, `tasks.rs`, `reach.rs`, `by_root.rs`, `access.rs` (sockets, tasks); `calls/{wire,client,server,frame_sink,local_api,local_client}`; `discovery/{mod,mdns}.rs` (mDNS), `discovery/local.rs` (interfaces); `flight/mod.rs` (one ring per process, clocks); `joining/` |
//!
//! What is not named there is pure: time and randomness come in as arguments.
//!
//! | concept | where |
//! |---|---|
//! | who a node is | [`NodeId`], [`NodeKey`] |
//! | session tokens | [`Grant`], [`ReplayCache`] (`specs/session-grant.md`) |
//! | which community, and what it agreed on | [`CommunityId`], [`log`] (`specs/event-log.md`) |
//! | how logs become the same | [`sync`] (`specs/gossip.md`) |
//! | joining | [`invite`], [`joining`] |
//! | what a shard host offers | [`Descriptor`] |
//! | what a node can be asked to do | [`calls`] (`specs/capability-bus.md`) |
//! | who may be where | [`discovery`] (`specs/discovery.md`) |
//! | what happened of late | [`flight`] (`specs/flight-record.md`) |
//! | all of it at work | [`node`] |
//! | a community for tests | `testing` (feature of that name) |

mod community;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod identity;
pub mod node;
#[cfg(feature = "testing")]
pub mod testing;

pub use community::{
    Descriptor, DescriptorError, MAX_ENCODED, MAX_LAYERS, MAX_TEXT, invite, log, sync,
};
pub use hearthnet_transport::{NodeId, NodeIdError};
pub use identity::{
    CHAT, Capability, CapabilityError, CommunityId, CommunityIdError, Domain, Expectation, Grant,
    GrantError, InvalidSignature, KeyFileError, MAX_CLOCK_SKEW_SECS, MAX_GRANT_BYTES,
    MAX_GRANT_LIFETIME_SECS, NodeKey, RandomnessError, ReplayCache, SHARD_SERVE, SIGNATURE_BYTES,
    now_ms, regular_file, whole_file,
};
pub use node::{calls, discovery, flight, joining};
