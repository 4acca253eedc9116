//! Protocol checks of shard hosts of any implementation.
//!
//! [`run()`] carries out a list of checks on a host, over a peer that shares no encoder with the
//! transport ([`raw`]). The specifications are `specs/x08-tensor-transport.md`,
//! `specs/session-grant.md`, `specs/shard-host.md` and `specs/conformance.md`, which has the list.
//!
//! | concept | file |
//! |---|---|
//! | check: attempts, each a state and a script | `script.rs` |
//! | the list of checks; those of streams and steps | `list.rs`, `streams.rs` |
//! | limits of a host's HELLO | `limits.rs` |
//! | carrying out checks | `run.rs` |
//! | raw peer, and rules that a caller can break | `raw/` |

mod limits;
mod list;
pub mod raw;
mod run;
mod script;
mod streams;

pub use run::{Outcome, Verdict, run};
pub use script::{Host, MakeToken, ReceiptTest, Shard, SignedStep, Test, Token};
