//! The community's event log: signed events, what they mean together, and their store.
//!
//! `specs/event-log.md` is the normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | one signed statement | [`Event`] | `event.rs` |
//! | what it can say | [`Body`] | `body.rs` |
//! | which events are kept | [`Quotas`] | `merge.rs`, in memory: `view.rs` |
//! | who is a member, by the durable events | [`NoEffect`] | `fold.rs` |
//! | the view for the rest of the program | [`Community`] | `community.rs` |
//! | what two nodes compare | [`Heads`] | `heads.rs` |
//! | what a peer lacks | [`Batch`] | `batch.rs` |
//! | the file | [`EventLog`] | `store.rs`, tables: `db/` |
//! | what this node writes, and when it may | [`EventLog::append`] | `append.rs` |
//! | what peers send | [`Received`] | `receive.rs`, dated ahead: `early.rs` |
//! | after a crash | [`Recovery`] | `recover.rs` |
//! | whether this machine's clock is right | [`EventLog::clock_offset`] | `clocks.rs` |
//! | the log and more in one file | [`backup`] | `backup.rs` |
//! | for people | [`Record`], [`Verified`] | `audit.rs` |
//!
//! Two lanes. *Durable* events make the community what it is; each author's form a chain
//! without holes and are kept for ever. *Ephemeral* events say what is so at the moment (a
//! shard is served here, a node listens there); of each author and slot the newest is kept
//! until it expires, so that running costs no space.
//!
//! Files are touched by `store.rs` (whose thread tries to write again after the disk was full), `db/`,
//! `recover.rs`, `backup.rs` and `audit.rs`; `append.rs`, `receive.rs`, `early.rs`, `merge.rs`, `view.rs` and
//! `batch.rs` work within a transaction that these opened. All else is pure, and no clock is read anywhere: time comes with the calls.

mod append;
mod audit;
pub mod backup;
mod batch;
mod body;
mod clocks;
mod community;
mod db;
mod early;
mod error;
mod event;
mod fold;
mod heads;
mod merge;
mod receive;
mod recover;
mod store;
mod view;

pub use audit::{Record, Status, Verified};
pub use batch::Batch;
pub use body::{
    Body, EventError, Level, MAX_BODY_BYTES, MAX_ENDPOINTS, MAX_KIND_BYTES, MAX_LINE_BYTES,
    MAX_NAMED, MAX_SLOT_BYTES, MAX_USES, Policy,
};
pub use community::{Advert, Community, Fork, Member, OpenInvite, Revocation, Sighting};
pub use error::{LogError, LogHealth, Refusal};
pub use event::{
    Event, EventHash, EventId, Lane, MAX_AHEAD_MS, MAX_EVENT_BYTES, MAX_LIFE_MS, MAX_NUMBER,
    Position,
};
pub use fold::{MAX_INVITES, MAX_MEMBERS, NoEffect};
pub use heads::{ForkHead, Head, Heads, MAX_HEADS_BYTES, MAX_SLOTS, SlotHead};
pub use merge::{Compacted, Quotas};
pub use receive::Received;
pub use recover::Recovery;
pub use store::{ADVERT_LIFE_MS, EventLog, FILE_NAME};

#[cfg(feature = "fuzzing")]
pub(crate) use recover::look_at as look_at_wal;

#[cfg(test)]
mod tests;
