//! Names of the routing policies, as in the configuration and in traces.

use std::str::FromStr;

/// Routing policy: the setting of a caller, or the one that chose a span, which is never `Auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_enums)] // The caller decides for all of them.
pub enum PolicyName {
    /// `Planned` where measurements exist, else `Greedy`.
    #[default]
    Auto,
    Greedy,
    Planned,
    PetalsLike,
}

impl PolicyName {
    const ALL: [Self; 4] = [Self::Auto, Self::Greedy, Self::Planned, Self::PetalsLike];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
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
        found.ok_or_else(|| {
            "must be \"auto\", \"greedy\", \"planned\" or \"petals_like\"".to_owned()
        })
    }
}
