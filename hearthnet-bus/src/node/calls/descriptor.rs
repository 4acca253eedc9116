//! Descriptors of capabilities.

use serde::{Serialize, Serializer};

use super::params::Params;
use crate::Capability;
use crate::community::log::Level;

/// Name prefix of experimental capabilities.
pub const EXPERIMENTAL: &str = "experimental.";

/// Descriptor of a capability: name, version, required level, limits and parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CapabilityDescriptor {
    pub capability: Capability,
    /// Purpose, in one sentence.
    pub summary: String,
    pub stability: Stability,
    /// Minimum level of a caller; `None`: any node, also one that is not a member.
    #[serde(serialize_with = "level_or_anyone")]
    pub trust: Option<Level>,
    /// True if it sends events before its result.
    pub streaming: bool,
    pub limits: CallLimits,
    pub params: Params,
}

/// Compatibility promise of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stability {
    /// Breaking changes only with a new major version.
    Stable,
    /// May change with any version; refused while experiments are switched off.
    Experimental,
}

fn level_or_anyone<S: Serializer>(trust: &Option<Level>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(trust.map_or("anyone", Level::into))
}

/// Concurrency and time limits of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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
    pub fn new(capability: Capability, summary: &str, trust: Option<Level>) -> Self {
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
