//! Names of the routing policies, as in the configuration and in traces.

use std::str::FromStr;

/// Routing policy that a caller has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_enums)] // The caller decides for all of them.
pub enum PolicyName {
    #[default]
    Greedy,
    Planned,
    PetalsLike,
}

impl PolicyName {
    const ALL: [Self; 3] = [Self::Greedy, Self::Planned, Self::PetalsLike];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Planned => "planned",
            Self::PetalsLike => "petals_like",
        }
    }
}

impl FromStr for PolicyName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.as_str() == name);
        found.ok_or_else(|| "must be \"greedy\", \"planned\" or \"petals_like\"".to_owned())
    }
}
