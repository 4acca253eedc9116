//! The community's event log: signed events, the state that follows from them, and their store.
//!
//! `specs/event-log.md` is the normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | one signed event | [`Event`] | `event.rs` |
//! | kinds of events and their bodies | [`Body`] | `body.rs` |
//! | models that a community adopts | [`Adoption`] | `adoption.rs` |
//! | disputes, verdicts, reputation | [`Dispute`], [`Reputation`] | `dispute.rs` |
//! | measurements of a node | [`Measured`] | `measured.rs` |
//! | what a member gave to others | [`Gave`] | `gave.rs` |
//! | which events are kept | [`Quotas`] | `merge.rs`, in memory: `view.rs` |
//! | membership, by the durable events | [`NoEffect`] | `fold/` |
//! | the view for the rest of the program | [`Community`] | `community.rs` |
//! | summary that two nodes compare | [`Heads`] | `heads.rs` |
//! | events that a peer lacks | [`Batch`] | `batch.rs` |
//! | the file | [`EventLog`] | `store.rs`, tables: `db/` |
//! | writing of own events, and its conditions | [`EventLog::append`] | `append.rs` |
//! | events from peers | [`Received`] | `receive.rs`, post-dated: `early.rs` |
//! | recovery after a crash | [`Recovery`] | `recover.rs` |
//! | check of this machine's clock | [`EventLog::clock_offset`] | `clocks.rs` |
//! | backup of the log and more in one file | [`backup`] | `backup.rs` |
//! | reports and exports for people | [`Record`], [`Verified`] | `audit.rs` |
//!
//! There are two lanes. *Durable* events define the community; those of one author form a chain
//! without holes and are kept for ever. *Ephemeral* events state what holds at the moment (a shard
//! is served here, a node listens there). Of each author and slot, the newest is kept until it
//! expires, so running costs no disk space.
//!
//! These files touch the disk: `store.rs` (its thread retries writing after the disk was full),
//! `db/`, `recover.rs`, `backup.rs` and `audit.rs`. `append.rs`, `receive.rs`, `early.rs`,
//! `merge.rs`, `view.rs` and `batch.rs` work within a transaction that these opened. All other
//! files are pure. No file reads the clock: the time is an argument.

mod adoption;
mod append;
mod audit;
pub mod backup;
mod batch;
mod body;
mod clocks;
mod community;
mod db;
mod dispute;
mod early;
mod error;
mod event;
mod fold;
mod gave;
mod heads;
mod measured;
mod merge;
mod receive;
mod recover;
mod store;
mod view;

pub use crate::identity::cbor::MAX_NUMBER;
pub use adoption::{
    Adoption, MAX_HEAD_BYTES, MAX_MANIFEST_BYTES, MAX_MODEL_LAYERS, MAX_SOURCE_BYTES, MAX_SOURCES,
};
pub use audit::{Record, Status, Verified};
pub use batch::Batch;
pub use body::{
    Body, EventError, Level, MAX_BODY_BYTES, MAX_ENDPOINTS, MAX_KIND_BYTES, MAX_LINE_BYTES,
    MAX_NAMED, MAX_SLOT_BYTES, MAX_USES, Policy,
};
pub use community::{Advert, Community, Fork, Member, OpenInvite, Revocation, Sighting};
pub use dispute::{
    Case, Dispute, Finding, MAX_DISPUTES, MAX_JUDGES, MAX_OPEN_DISPUTES, Reputation,
};
pub use error::{LogError, LogHealth, Refusal};
pub use event::{
    Event, EventHash, EventId, Lane, MAX_AHEAD_MS, MAX_EVENT_BYTES, MAX_LIFE_MS, Position,
};
pub use fold::{MAX_INVITES, MAX_MEMBERS, MAX_MODELS, NoEffect};
pub use gave::{Gave, day_of};
pub use heads::{ForkHead, Head, Heads, MAX_HEADS_BYTES, MAX_SLOTS, SlotHead};
pub use measured::{LinkSpeed, MAX_LINK_SPEEDS, MAX_MODEL_SPEEDS, Measured, ModelSpeed};
pub use merge::{Compacted, Quotas};
pub use receive::Received;
pub use recover::Recovery;
pub use store::{ADVERT_LIFE_MS, EventLog, FILE_NAME};

#[cfg(test)]
mod tests;
