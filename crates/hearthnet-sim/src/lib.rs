//! Deterministic simulation: nodes in one thread and in virtual time, under faults that are drawn
//! from a seed.
//!
//! A run is a function of its seed. All nodes run on a current-thread runtime of tokio whose clock
//! is paused: it jumps to the next timer whenever all tasks wait, so a minute of timeouts takes
//! milliseconds. There are two scenes:
//!
//! | scene | nodes | code of the product | invariants |
//! |---|---|---|---|
//! | answers | three hosts, two callers | pipeline, failover, fallback, receipts, audits, sessions, TLS, WebSocket, stream tables, scheduler, the start from a model file, the exact engine on a tiny model | each row and token of an answer comes once, and is that of the fault-free transcript or follows from a row of a host that lies; hosts compute no other rows; a dispute is proved, and its finding names a host that has lied; no other host is blamed for wrong rows; audits end in time; no answer of an old epoch is taken; a session sends no rows to a host that its caller knows to be revoked; no host starts with a damaged file; credit and step slots stay within their windows; streams, pages, sequences, sessions and tasks are returned; every call ends in time, and with a fallback it is answered |
//! | logs | four members | event log on SQLite, recovery, gossip, TLS, WebSocket | each author has one history, and no fork; logs become equal, and may be written again, in time; no acknowledged event is lost; a revoked member receives no event of a member that knew it |
//!
//! The simulation replaces sockets (`net.rs`), and what a process has around this code: the tasks
//! that connect, listen and start again.
//!
//! # Why not `turmoil`
//!
//! `turmoil` offers its own `TcpStream` and a runtime per host. The transport takes any byte stream
//! (`Io`), so that a stream of ours needs no change below it, and these faults need streams of our
//! own: a one-way partition of bytes that are under way, a damaged bit, a delay per write that
//! reorders connections but not their bytes. `turmoil` advances time in fixed ticks for each host,
//! which is slow where most of a run is waiting for timeouts, and its order of ready tasks depends
//! on `tokio_unstable` as well.
//!
//! # What is repeatable
//!
//! Keys, delays, faults, prompts and tie-breaks come from the seed. Nonces of TLS and session tokens
//! do not, and change no time: every write has a delay of its own, whatever it contains. A trace has
//! no order among actors at one moment.
//!
//! | concept | file |
//! |---|---|
//! | scene of answers; hosts, their engines; callers, their own machines; model, transcripts | `answers.rs`, `host.rs`, `watched.rs`, `caller.rs`, `here.rs`, `model.rs` |
//! | which rows follow from lies; judge of disputes | `lies.rs`, `judge.rs` |
//! | scene of logs; its members | `logs.rs`, `member.rs` |
//! | byte streams, delays, partitions | `net.rs` |
//! | schedules of faults | `faults.rs` |
//! | a run in virtual time; its trace and violations | `run.rs`, `observer.rs` |
//! | random numbers of a seed | `random.rs` |
//!
//! Not simulated: the compute thread's own loop and its busy waits (a host in a simulation has a
//! loop without them; the schedules in `hearthnet-shard/src/tests/schedules.rs` have it), discovery,
//! the daemon, HTTP, transfer of weights. In the scene of answers, clocks do not jump: they are read
//! only to check session tokens. No caller is revoked there, because only a node in a community
//! learns of that.

pub mod answers;
mod caller;
pub mod faults;
mod here;
mod host;
mod judge;
mod lies;
pub mod logs;
mod member;
pub mod model;
mod net;
mod observer;
mod random;
mod run;
mod watched;

pub use observer::Report;
