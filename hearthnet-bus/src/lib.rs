//! Node identity, the community's event log and gossip, and the running node.
//!
//! Three modules. Each imports only modules above it in this table; the repository's
//! `tests/architecture.rs` checks that there is no circle:
//!
//! | module | contents | I/O |
//! |---|---|---|
//! | `identity/` | keys, signatures, ids, session grants | `key_file.rs` (files), `unix_time.rs` (clock) |
//! | `community/` | event log, gossip, invites, descriptors | `log/{store,db,recover,backup,audit}.rs` (SQLite, one thread), `sync/link.rs` (a socket) |
//! | `node/` | a running node: calls, discovery, flight record, access, dialling | `mod.rs`, `tasks.rs`, `reach.rs`, `by_root.rs`, `access.rs` (sockets, tasks); `weights/{server,client}` (sockets, tasks), `weights/pace.rs` (clock); `calls/{wire,client,server,frame_sink,local_api,local_client}`; `discovery/{mod,mdns}.rs` (mDNS), `discovery/local.rs` (interfaces); `flight/mod.rs` (one ring per process, clocks); `joining/` |
//!
//! All other files are pure: time and randomness come in as arguments.
//!
//! | concept | where |
//! |---|---|
//! | node identity | [`NodeId`], [`NodeKey`] |
//! | session tokens | [`Grant`], [`ReplayCache`] (`specs/session-grant.md`) |
//! | receipts of hosts | [`receipt`] (`specs/receipts.md`) |
//! | evidence of a dispute about rows | [`evidence`], [`sealed`] (`specs/disputes.md`) |
//! | community and its event log | [`CommunityId`], [`log`] (`specs/event-log.md`) |
//! | synchronising logs | [`sync`] (`specs/gossip.md`) |
//! | joining | [`invite`], [`joining`] |
//! | what a shard host offers | [`Descriptor`] |
//! | capabilities of a node, and calls | [`calls`] (`specs/capability-bus.md`) |
//! | addresses of nodes | [`discovery`] (`specs/discovery.md`) |
//! | transfer of weights | [`node::weights`] (`specs/weights-transfer.md`) |
//! | recent events of this process | [`flight`] (`specs/flight-record.md`) |
//! | the running node | [`node`] |
//! | a community for tests | `testing` (feature of that name) |

mod community;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod identity;
pub mod node;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(test)]
mod vectors_tests;

pub use community::{
    Descriptor, DescriptorError, MAX_ENCODED, MAX_LAYERS, MAX_TEXT, evidence, invite, log, sync,
};
pub use hearthnet_transport::{NodeId, NodeIdError};
pub use identity::receipt;
pub use identity::sealed::{self, MAX_SEALED_BYTES};
pub use identity::{
    CHAT, Capability, CapabilityError, CommunityId, CommunityIdError, Domain, Expectation, Grant,
    GrantError, InvalidSignature, KeyFileError, MAX_CLOCK_SKEW_SECS, MAX_GRANT_BYTES,
    MAX_GRANT_LIFETIME_SECS, NodeKey, RandomnessError, ReplayCache, SHARD_SERVE, SIGNATURE_BYTES,
    now_ms,
};
pub use node::{calls, discovery, flight, joining};
