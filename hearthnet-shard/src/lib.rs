//! Hosts one contiguous range of layers for authenticated peers.
//!
//! ```text
//!  caller ==TLS==> the transport's driver of the socket           compute thread
//!                  Session --> StreamTable: refuses at once --> Inbox --> Scheduler --> engine
//!                  Sender <------------------------------------ Outlet <----- answers
//! ```
//!
//! A step is handed over once on its way in: the transport's driver of the socket calls the session's
//! handler (`session.rs`), which wakes the compute thread. On its way out it is not handed over: the
//! compute thread writes the answer to the socket.
//!
//! | concept | file |
//! |---|---|
//! | who may connect, session tokens | `admission.rs` |
//! | what can be refused without the engine | `stream_table.rs` |
//! | places for streams, one life of a stream | `stream_handle.rs` |
//! | whose turn it is where places are scarce | `claims.rs` (pure) |
//! | what the next batch computes, fair turns, who gives pages back | `plan/` (pure) |
//! | how long a piece of prefill is | `chunked_prefill.rs` (pure) |
//! | streams, steps, timeouts, eviction | `sched.rs`, `stream.rs` (no I/O, no clock of their own) |
//! | a batch through the engine, faults told apart | `batch.rs` |
//! | the thread around it | `compute.rs`, fed by `inbox.rs` |
//! | sessions, and the echo for measuring | `session.rs` |
//! | what metrics, flight record and log hear of all this | `events.rs` |
//! | start, descriptor, shutdown | `host.rs` |
//! | codes of everything that can go wrong | `fault.rs` |
//! | what an engine has to do | `engine.rs`, done by the exact engine in `model.rs` |
//!
//! Invariants:
//!
//! - Streams are never more than `max_concurrent_streams`; one too many is refused at once.
//! - KV is overcommitted, by whole pages, and never beyond its budget. When it is short, an idle
//!   stream ends with `preempted`, or the least progressed one of callers beyond their fair share;
//!   the most progressed stream of a caller within it never does.
//! - While two callers wait for the same kind of turn, they are given the same number of rows, up
//!   to two of the largest pieces, however many streams each has.
//! - Whoever ends a stream (caller, host, lost connection, timeout, shutdown): its place is
//!   free at once, its KV before the next batch, its waiting steps are never computed.
//! - A row's result depends on its stream alone, so what shares a batch with it, and how a
//!   step is cut in pieces, can be decided by timing.
//! - Rows are never logged, and wiped after use where this crate owns the buffer.

mod admission;
mod batch;
mod chunked_prefill;
mod claims;
mod clock;
mod compute;
mod config;
mod engine;
mod events;
mod fault;
mod host;
mod inbox;
mod memory;
mod model;
mod plan;
mod sched;
mod session;
mod stream;
mod stream_handle;
mod stream_table;

pub use admission::{BENCH, PIPELINE};
pub use config::ServeConfig;
pub use engine::{
    EngineSource, Footprint, LayerEngine, LoadFault, LoadPhase, Resource, Served, Span,
    StartProgress,
};
pub use events::Stats;
pub use fault::{StartError, StreamFault};
pub use host::{Place, RunningHost, ShardHost, ShutdownReport, check_kv_budget};
pub use memory::{MemoryReport, resident_bytes};
pub use model::{ModelLayers, Prepared, ShardConfig};

#[cfg(test)]
mod community_tests;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod net_tests;
#[cfg(test)]
mod protocol_tests;
