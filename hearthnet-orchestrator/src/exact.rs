//! Rules for the arithmetics that an answer may be computed with. Pure.
//!
//! Hosts with the exact engine ([`ARITHMETIC`]) produce identical bytes, however a model is split
//! and whichever host takes over. Others (`specs/torch-arithmetic.md`) produce nearly the same. A
//! descriptor names the arithmetic of its host.

use std::collections::BTreeSet;
use std::fmt;

use hearthnet_engine::ARITHMETIC;
use serde::{Deserialize, Serialize};

/// Rule for the arithmetics of a caller's hosts.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    Serialize,
    Deserialize,
    strum::EnumString,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", parse_err_ty = String, parse_err_fn = unknown)]
#[allow(clippy::exhaustive_enums)] // Each caller decides for all of them.
pub enum Exact {
    /// Exact hosts only.
    Require,
    /// Exact hosts if they have all layers; otherwise others as well. A running sequence continues
    /// with its own arithmetic, or not at all.
    #[default]
    Prefer,
    /// The best hosts, also in the middle of an answer.
    Any,
}

impl Exact {
    /// Names, in the order of [`Exact`].
    pub const NAMES: &[&str] = <Self as strum::VariantNames>::VARIANTS;

    /// Arithmetics that a route may have. `before`: arithmetic of the replaced host of a running
    /// sequence; `None` for a new one.
    pub fn allows(self, before: Option<&str>) -> Allowed<'_> {
        match (self, before) {
            (Self::Require, _) => Allowed::Only(ARITHMETIC),
            (Self::Prefer, Some(before)) => Allowed::Only(before),
            (Self::Prefer, None) => Allowed::ExactFirst,
            (Self::Any, _) => Allowed::All,
        }
    }
}

fn unknown(_: &str) -> String {
    format!("it is one of {}", Exact::NAMES.join(", "))
}

/// Arithmetics that a route may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The router decides for all of them.
pub enum Allowed<'a> {
    Only(&'a str),
    /// Any; the exact one is preferred.
    ExactFirst,
    /// Any, without preference.
    All,
}

impl Allowed<'_> {
    /// Returns true if a host with `arithmetic` may take part.
    pub fn admits(self, arithmetic: &str) -> bool {
        match self {
            Self::Only(one) => one == arithmetic,
            Self::ExactFirst | Self::All => true,
        }
    }
}

pub fn is_exact(arithmetic: &str) -> bool {
    arithmetic == ARITHMETIC
}

/// Arithmetics that computed an answer, as named by descriptors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Arithmetics(BTreeSet<String>);

impl Arithmetics {
    /// Returns true if all are known and exact: the same request then always has the same answer.
    pub fn is_exact(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|name| is_exact(name))
    }

    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }
}

impl FromIterator<String> for Arithmetics {
    fn from_iter<T: IntoIterator<Item = String>>(names: T) -> Self {
        Self(names.into_iter().collect())
    }
}

/// Names, joined with `+`.
impl fmt::Display for Arithmetics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(String::as_str).collect();
        f.write_str(&names.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_the_configuration() {
        assert_eq!(Exact::NAMES, ["require", "prefer", "any"]);
        for &name in Exact::NAMES {
            let exact: Exact = name.parse().unwrap();
            assert_eq!(serde_json::to_value(exact).unwrap(), name);
        }
        assert!("Any".parse::<Exact>().unwrap_err().contains("prefer"));
    }

    #[test]
    fn only_any_lets_an_answer_go_on_with_another_arithmetic() {
        let other = "torch-cpu-fp32";
        for (exact, begins, goes_on) in [
            (Exact::Require, false, false),
            (Exact::Prefer, true, false),
            (Exact::Any, true, true),
        ] {
            assert_eq!(exact.allows(None).admits(other), begins, "{exact:?}");
            let after = exact.allows(Some(ARITHMETIC));
            assert_eq!(after.admits(other), goes_on, "{exact:?}");
            assert!(after.admits(ARITHMETIC), "{exact:?}");
        }
        assert!(Exact::Prefer.allows(Some(other)).admits(other));
        assert!(!Exact::Prefer.allows(Some(other)).admits(ARITHMETIC));
    }

    #[test]
    fn one_other_host_makes_an_answer_another_one() {
        let of = |names: &[&str]| -> Arithmetics { names.iter().map(|&n| n.to_owned()).collect() };
        assert!(of(&[ARITHMETIC, ARITHMETIC]).is_exact());
        assert!(!of(&[]).is_exact(), "nobody has said");
        let mixed = of(&["torch-mps-fp16", ARITHMETIC]);
        assert!(!mixed.is_exact());
        assert_eq!(mixed.to_string(), "canonical-1+torch-mps-fp16");
    }
}
