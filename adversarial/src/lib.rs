//! Attacks that HearthNet must withstand, with a harness and a report.
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
//! | catalogue of cases, with and without an attack | `case.rs` |
//! | attacks and their registry; attacks of one pattern in a table | `attacks/`, `attacks/table.rs` |
//! | registry entry, observations, verdict | `attack.rs` |
//! | test bench of an attack | `bench.rs` |
//! | address, identity and session tokens of the victim | `target.rs` |
//! | attacked host, in its own process | `victim.rs` |
//! | community of the victim | `test_community.rs` |
//! | honest caller, whose answers must not change | `honest.rs` |
//! | chat service with local interfaces, and another user of the machine | `household.rs` |
//! | compromised daemon, in its own process | `intruder.rs` |
//! | the real program, in its own process | `program.rs` |
//! | unique text, and the search for it | `canary.rs` |
//! | caller over hosts that inspect or change rows | `fleet.rs` |
//! | scripted host | `puppet.rs` |
//! | the attacker's events and gossip, byte by byte; its frames are the test kit's | `raw/` |
//! | memory of the victim, and its budget | `memory.rs` |
//! | running an attack and judging it | `trial.rs` |
//! | a core reserved for the attackers during latency measurements | `cores.rs` |
//! | table, JSON, and the page with plots | `report/` |
//! | attacks by group, name or number, with their texts | `selection.rs` |
//! | strength of lies about rows against their detection | `sensitivity/` |
//! | requests until a host that lies in every answer is caught | `detection/` |
//! | new attacks in a checkout | `scaffold.rs` |
//!
//! `README.md` says how to add an attack.

mod attack;
mod attacks;
mod bench;
mod canary;
mod case;
mod cores;
mod detection;
mod fleet;
mod honest;
mod household;
mod intruder;
mod memory;
mod program;
mod puppet;
mod raw;
mod report;
mod scaffold;
mod selection;
mod sensitivity;
mod target;
mod test_community;
mod trial;
mod victim;

pub use attack::{Entry, Observation, Verdict};
pub use attacks::{ATTACKS, TEMPLATE};
pub use case::{CASES, Case};
pub use cores::Cores;
pub use detection::{By, Detections, Found, HostLie, detection};
pub use intruder::{Intrusion, intrude};
pub use memory::Budget;
pub use report::{Conditions, Line, Report, heading, page};
pub use scaffold::{Made, new_attack};
pub use selection::{Listed, explain, list, listed, select};
pub use sensitivity::{
    Bands, FalseAlarms, Lie, Point, Scope, Sensitivity, calibrate, hash_of, sensitivity,
};
pub use trial::{Detection, Effort, Latency, MemoryGrowth, Outcome, Percentiles, Setup, run};
pub use victim::{Model, Pace, Settings as VictimSettings, real_model, serve as serve_victim};

use std::error::Error;
use std::fmt;
use std::panic::Location;

pub(crate) use attack::Findings;
pub(crate) use bench::Bench;

pub(crate) type Result<T, E = HarnessError> = std::result::Result<T, E>;

/// Failure of the harness, which is no verdict on the victim. It does not implement [`Error`], so
/// that `?` can convert every error and record its location.
#[derive(Debug)]
#[non_exhaustive]
pub enum HarnessError {
    /// The victim could not be started, or does not answer.
    Victim(String),
    /// The attacker failed before its attack.
    Attacker(String),
    /// The honest caller could not start.
    Honest(String),
    /// The command line asks for something that does not exist, or that this machine lacks.
    Usage(String),
    /// Any other failure, with its location in the harness.
    Failed(String),
}

impl fmt::Display for HarnessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, why) = match self {
            Self::Victim(why) => ("the victim failed", why),
            Self::Attacker(why) => ("the attacker failed", why),
            Self::Honest(why) => ("the honest caller could not start", why),
            Self::Usage(why) => return f.write_str(why),
            Self::Failed(why) => ("the harness failed", why),
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
    pub(crate) fn usage(why: impl Into<String>) -> Self {
        Self::Usage(why.into())
    }

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
