//! Protocol checks of shard hosts of any implementation.
//!
//! [`run()`] carries out a list of checks on a host, over a peer that shares no encoder with the
//! transport ([`raw`]). The specifications are `specs/x08-tensor-transport.md`,
//! `specs/session-grant.md`, `specs/shard-host.md` and `specs/conformance.md`, which has the list.
//!
//! | concept | file |
//! |---|---|
//! | check: attempts, each a state and a script | `script.rs` |
//! | the list of checks | `list.rs` |
//! | carrying out checks | `run.rs` |
//! | raw peer, and rules that a caller can break | `raw/` |

mod list;
pub mod raw;
mod run;
mod script;

pub use run::{Outcome, Verdict, run};
pub use script::{Host, MakeToken, ReceiptTest, Shard, SignedStep, Test, Token};
