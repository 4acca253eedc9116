//! Hosts one contiguous range of layers for authenticated peers.
//!
//! ```text
//!  caller ==TLS==> the transport's driver of the socket           compute thread
//!                  Session --> StreamTable: refuses at once --> channel --> Scheduler --> engine
//!                  Sender <------------------------------ ResponseSink <----- answers
//! ```
//!
//! A step changes threads once on its way in: the transport's driver of the socket calls the
//! session's handler (`stream_table.rs`), which wakes the compute thread. On its way out it does not:
//! the compute thread writes the answer to the socket.
//!
//! | concept | file |
//! |---|---|
//! | admission of peers, session tokens | `admission.rs` |
//! | checks that need no engine | `stream_table.rs` |
//! | stream slots, one epoch of a stream | `stream_handle.rs` |
//! | order of refused callers when slots are scarce | `claims.rs` (pure) |
//! | content of the next batch, fairness, page eviction | `plan/` (pure) |
//! | length of prefill chunks | `chunked_prefill.rs` (pure) |
//! | streams, steps, timeouts, eviction | `sched/`, `stream.rs` (no I/O, no clock of their own) |
//! | a batch through the engine, isolation of faults | `batch.rs` |
//! | the compute thread, its queue | `compute.rs`, `inbox.rs` |
//! | a host in a simulation: sessions over given byte streams, batches in a task | `simulated.rs` |
//! | receipts: hashes of rows, signatures | `notary.rs` |
//! | sessions, and the echo for benchmarks | `session.rs` |
//! | metrics, flight record and log | `events.rs` |
//! | pace of decode batches | `pace.rs` (pure) |
//! | start, descriptor, shutdown | `host.rs` |
//! | error codes | `fault.rs` |
//! | engine trait | `engine.rs`, implemented by the exact engine in `model.rs` |
//! | layers on two devices | `joined.rs` |
//! | exact engine in a process of its own | `child/` |
//!
//! Invariants:
//!
//! - At most `max_concurrent_streams` streams are open; a further one is refused at once.
//! - KV is overcommitted, by whole pages, and never beyond its budget. When it is short, the host
//!   ends an idle stream with `preempted`, or the least progressed stream of the callers beyond
//!   their fair share. It never preempts the most progressed stream of a caller within its share.
//! - While two callers wait for the same kind of batch, they are given the same number of rows, up
//!   to two of the largest chunks, however many streams each has.
//! - When a stream ends (by caller, host, lost connection, timeout or shutdown), its slot is free
//!   at once and its KV before the next batch. Its waiting steps are never computed.
//! - A row's result depends on its stream alone, so timing can decide which streams share a batch
//!   and how a step is cut into chunks.
//! - Rows are never logged, and are wiped after use where this crate owns the buffer.

mod admission;
mod batch;
mod child;
mod chunked_prefill;
mod claims;
mod clock;
mod compute;
mod config;
mod device;
mod engine;
mod events;
#[cfg(any(test, feature = "fuzzing"))]
mod fake;
mod fault;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod inbox;
mod joined;
mod memory;
mod model;
mod notary;
mod pace;
mod plan;
mod sched;
mod session;
mod simulated;
mod stream;
mod stream_handle;
mod stream_table;
mod sync;

pub use admission::{BENCH, PIPELINE};
pub use child::{Connect, load_on_processor, serve_engine};
pub use config::ServeConfig;
pub use device::{Device, NoDevice};
pub use engine::{
    EngineSource, Footprint, LayerEngine, LoadFault, LoadPhase, Served, Span, StartProgress,
};
pub use events::Stats;
pub use fault::{Resource, StartError, StreamFault};
pub use host::{Place, RunningHost, ShardHost, ShutdownReport, check_kv_budget};
pub use joined::Joined;
pub use memory::MemoryReport;
pub use model::ShardConfig;
pub use simulated::Simulated;

#[cfg(test)]
mod tests;
