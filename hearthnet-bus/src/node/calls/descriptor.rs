//! What a node says about a thing that it can be asked to do.

use serde::{Deserialize, Serialize};

use super::params::Params;
use crate::Capability;
use crate::community::log::Level;

/// What the name of an experiment begins with.
pub const EXPERIMENTAL: &str = "experimental.";

/// A capability of a node: its name and version, who may call it, with what, how often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CapabilityDescriptor {
    /// Name and version.
    pub capability: Capability,
    /// What it does, in a sentence.
    pub summary: String,
    /// Whether its contract may still change.
    pub stability: Stability,
    /// Who may call it.
    pub trust: Trust,
    /// Whether it sends events before its result.
    pub streaming: bool,
    /// What it bears.
    pub limits: CallLimits,
    /// What it takes.
    pub params: Params,
}

/// Whether a contract may still change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stability {
    /// It only changes with the major version.
    Stable,
    /// It may change with any version, and is refused while experiments are switched off.
    Experimental,
}

/// How far a caller is trusted; each level includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// Nothing is known of it but its key: no member, or one no longer.
    Anyone,
    /// A member of the community.
    Member,
    /// A member who may serve and advertise shards.
    Trusted,
    /// A member who may invite and promote.
    Anchor,
}

impl From<Option<Level>> for Trust {
    fn from(level: Option<Level>) -> Self {
        match level {
            None => Self::Anyone,
            Some(Level::Member) => Self::Member,
            Some(Level::Trusted) => Self::Trusted,
            Some(Level::Anchor) => Self::Anchor,
        }
    }
}

/// What a capability bears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallLimits {
    /// Calls that run at once, of all callers; at least 1.
    pub concurrent: u32,
    /// Calls of one caller that run at once; at least 1.
    pub concurrent_per_caller: u32,
    /// Seconds after which a call is ended with `timeout`; at least 1.
    pub seconds: u32,
}

impl Default for CallLimits {
    /// For short questions: 16 at once, 4 per caller, 10 seconds.
    fn default() -> Self {
        Self {
            concurrent: 16,
            concurrent_per_caller: 4,
            seconds: 10,
        }
    }
}

impl CapabilityDescriptor {
    /// A capability for `trust` and above, without parameters, with the default limits.
    /// It is experimental if its name says so.
    pub fn new(capability: Capability, summary: &str, trust: Trust) -> Self {
        let stability = if capability.name().starts_with(EXPERIMENTAL) {
            Stability::Experimental
        } else {
            Stability::Stable
        };
        Self {
            capability,
            summary: summary.into(),
            stability,
            trust,
            streaming: false,
            limits: CallLimits::default(),
            params: Params::none(),
        }
    }
}
