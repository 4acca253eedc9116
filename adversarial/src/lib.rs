//! Attacks that HearthNet must hold against, with a harness and a report.
//!
//! ```text
//!              +------------- Bench ----------------------------------------+
//!  attack ---> |  raw::Peer  == TLS, own bytes ==>  Victim: a real shard    |
//!              |  Honest     == the real client ==> host, another process   |
//!              +-------------------------------------------------------------+
//! ```
//!
//! | concept | file |
//! |---|---|
//! | the cases, built or not | `case.rs` |
//! | the attacks and their registry; those of one kind in a table | `attacks/`, `attacks/table.rs` |
//! | what an attack is, observations, verdicts | `attack.rs` |
//! | what an attack gets to work with | `bench.rs` |
//! | where the attacked host is, and the keys to its door | `target.rs` |
//! | the attacked host, in its own process | `victim.rs` |
//! | its community, where it is in one | `test_community.rs` |
//! | the attacked caller, in its own process | `caller.rs` |
//! | the caller that must not notice | `honest.rs` |
//! | a chat service and its doors to this machine, and another user of it | `household.rs` |
//! | a daemon that was taken over, in its own process | `intruder.rs` |
//! | the real program, in its own process | `program.rs` |
//! | a text that is nowhere else, and the search for it | `canary.rs` |
//! | a host that follows a script | `puppet.rs` |
//! | the attacker's events and gossip, byte by byte; its frames are the test kit's | `raw/` |
//! | memory of the victim, and what it may be | `memory.rs` |
//! | running an attack and judging it | `trial.rs` |
//! | a core for the attackers alone, where latency is measured | `cores.rs` |
//! | table and JSON | `report.rs` |
//!
//! `README.md` says how to add an attack.

mod attack;
mod attacks;
mod bench;
mod caller;
mod canary;
mod case;
mod cores;
mod fleet;
mod honest;
mod household;
mod intruder;
mod memory;
mod program;
mod puppet;
mod raw;
mod report;
mod target;
mod test_community;
mod trial;
mod victim;

pub use attack::{Entry, Observation, Verdict};
pub use attacks::ATTACKS;
pub use caller::{Called, call};
pub use case::{CASES, Case};
pub use cores::Cores;
pub use intruder::{Intrusion, intrude};
pub use memory::Budget;
pub use report::Report;
pub use trial::{Effort, Latency, MemoryGrowth, Outcome, Setup, run};
pub use victim::{Pace, Settings as VictimSettings, serve as serve_victim};

use std::error::Error;
use std::fmt;
use std::panic::Location;

pub(crate) use attack::Findings;
pub(crate) use bench::Bench;

/// The harness could not do its work: no verdict on the victim. It is no [`Error`], so that `?` can
/// make one of every error and say where that was.
#[derive(Debug)]
#[non_exhaustive]
pub enum HarnessError {
    /// The victim could not be started, or does not answer its questions.
    Victim(String),
    /// The attacker could not get as far as its attack.
    Attacker(String),
    /// The honest caller could not begin.
    Honest(String),
    /// What else failed, and at which place of the harness.
    Failed(String),
}

impl fmt::Display for HarnessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, why) = match self {
            Self::Victim(why) => ("the victim could not be used", why),
            Self::Attacker(why) => ("the attacker could not attack", why),
            Self::Honest(why) => ("the honest caller could not begin", why),
            Self::Failed(why) => ("the harness could not go on", why),
        };
        write!(f, "{what}: {why}")
    }
}

impl<E: Error> From<E> for HarnessError {
    #[track_caller]
    fn from(error: E) -> Self {
        Self::Failed(format!("{error}, at {}", Location::caller()))
    }
}

impl HarnessError {
    pub(crate) fn victim(error: impl fmt::Display) -> Self {
        Self::Victim(error.to_string())
    }

    pub(crate) fn attacker(error: impl fmt::Display) -> Self {
        Self::Attacker(error.to_string())
    }

    pub(crate) fn honest(error: impl fmt::Display) -> Self {
        Self::Honest(error.to_string())
    }
}
