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
//! | registry entry; observations, verdict | `attack.rs`; `findings.rs` |
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
mod error;
mod findings;
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

pub use attack::Entry;
pub use attacks::{ATTACKS, TEMPLATE};
pub use case::{CASES, Case};
pub use cores::Cores;
pub use detection::{By, Detections, Found, HostLie, detection};
pub use error::HarnessError;
pub use findings::{Observation, Verdict};
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

pub(crate) use bench::Bench;
pub(crate) use error::Result;
pub(crate) use findings::Findings;
