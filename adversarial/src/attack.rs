//! Registry entry of an attack.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use crate::Result;
use crate::bench::Bench;
use crate::case::Case;
use crate::findings::Findings;
use crate::memory::Budget;
use crate::victim::Scene;

type Running<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// Carries an attack out. The checks common to all attacks (no panic, memory, honest caller, gauges
/// back to zero) are made by `trial.rs`. An error means that the attack could not be carried out;
/// it is no verdict on the victim.
pub(crate) type Run = for<'a> fn(&'a mut Bench, &'a mut Findings) -> Running<'a>;

/// Attack as the registry lists it.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Name of the file or function: the claim in snake case.
    pub name: &'static str,
    /// Number of the case in [`CASES`](crate::CASES).
    pub case: u8,
    /// Configuration of the victim.
    pub(crate) scene: Scene,
    /// Whether the attack can be repeated on the same victim. False where the victim shuts the
    /// attacker out for good.
    pub(crate) repeats: bool,
    /// Memory by which the victim may grow during this attack, with the reason.
    pub(crate) budget: Budget,
    /// Whether the victim may serve any model. False where the attack makes chats of its own and
    /// needs the model's file.
    pub(crate) any_model: bool,
    pub(crate) source: &'static str,
    pub(crate) run: Run,
}

impl Entry {
    /// Claim that must hold, in words.
    pub fn claim(&self) -> String {
        self.name.replace('_', " ")
    }

    /// Text of the file with the attack.
    pub fn source(&self) -> &'static str {
        self.source
    }

    /// Heading of its case.
    pub fn group(&self) -> &'static str {
        Case::find(self.case).map_or("none", |case| case.group)
    }

    /// Code that the victim must raise or count for this case.
    pub fn code(&self) -> &'static str {
        Case::find(self.case).map_or("unknown", |case| case.code)
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("case", &self.case)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
