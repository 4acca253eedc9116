//! Descriptors of capabilities.

use serde::{Deserialize, Serialize};

use super::params::Params;
use crate::Capability;
use crate::community::log::Level;

/// Name prefix of experimental capabilities.
pub const EXPERIMENTAL: &str = "experimental.";

/// Descriptor of a capability: name, version, required level, limits and parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CapabilityDescriptor {
    pub capability: Capability,
    /// Purpose, in one sentence.
    pub summary: String,
    pub stability: Stability,
    /// Minimum level of a caller.
    pub trust: Trust,
    /// True if it sends events before its result.
    pub streaming: bool,
    pub limits: CallLimits,
    pub params: Params,
}

/// Compatibility promise of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stability {
    /// Breaking changes only with a new major version.
    Stable,
    /// May change with any version; refused while experiments are switched off.
    Experimental,
}

/// Trust level of a caller; each level includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// A node that is not a member, or is one no longer.
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

/// Concurrency and time limits of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallLimits {
    /// Concurrent calls of all callers; at least 1.
    pub concurrent: u32,
    /// Concurrent calls of one caller; at least 1.
    pub concurrent_per_caller: u32,
    /// Seconds after which a call ends with `timeout`; at least 1.
    pub seconds: u32,
}

impl Default for CallLimits {
    /// For short calls: 16 at once, 4 per caller, 10 seconds.
    fn default() -> Self {
        Self {
            concurrent: 16,
            concurrent_per_caller: 4,
            seconds: 10,
        }
    }
}

impl CapabilityDescriptor {
    /// A capability for `trust` and above, without parameters, with the default limits. A name that
    /// begins with [`EXPERIMENTAL`] makes it experimental.
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
