//! Which arithmetics an answer may be made with. Pure.
//!
//! Hosts that compute with the exact engine ([`ARITHMETIC`]) give the same bytes, however a model is
//! split and whoever takes over; others (`specs/torch-arithmetic.md`) give nearly the same. A descriptor
//! says which one its host computes with.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use hearthnet_model::ARITHMETIC;
use serde::{Deserialize, Serialize};

use crate::frames::{Frame, RouteHop};

/// What a caller wants of the arithmetics of its hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::exhaustive_enums)] // Each caller decides for all of them.
pub enum Exact {
    /// Exact hosts only.
    Require,
    /// Exact hosts where they have all layers, else others beside them. A sequence that has begun goes on
    /// with the arithmetic that it began with, or not at all.
    #[default]
    Prefer,
    /// Whoever is best, also in the middle of an answer.
    Any,
}

impl Exact {
    /// Its names, in the order of [`Exact`].
    pub const NAMES: [&str; 3] = ["require", "prefer", "any"];

    /// Which arithmetics a route may have: for a sequence that goes on behind a host with the arithmetic
    /// `before`, or for one that begins.
    pub fn allows(self, before: Option<&str>) -> Allowed<'_> {
        match (self, before) {
            (Self::Require, _) => Allowed::Only(ARITHMETIC),
            (Self::Prefer, Some(before)) => Allowed::Only(before),
            (Self::Prefer, None) => Allowed::ExactFirst,
            (Self::Any, _) => Allowed::All,
        }
    }
}

impl FromStr for Exact {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = [Self::Require, Self::Prefer, Self::Any];
        let found = Self::NAMES.iter().zip(all).find(|(own, _)| **own == name);
        found
            .map(|(_, exact)| exact)
            .ok_or_else(|| format!("it is one of {}", Self::NAMES.join(", ")))
    }
}

/// Which arithmetics a route may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The router decides for all of them.
pub enum Allowed<'a> {
    /// This one.
    Only(&'a str),
    /// Any, and no other than the exact one where that will do.
    ExactFirst,
    /// Any, none before another.
    All,
}

impl Allowed<'_> {
    /// Whether a host that computes with `arithmetic` may take part.
    pub fn admits(self, arithmetic: &str) -> bool {
        match self {
            Self::Only(one) => one == arithmetic,
            Self::ExactFirst | Self::All => true,
        }
    }
}

/// Whether an arithmetic is the exact one.
pub fn is_exact(arithmetic: &str) -> bool {
    arithmetic == ARITHMETIC
}

/// The arithmetics that made an answer, by the names that descriptors give them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Arithmetics(BTreeSet<String>);

impl Arithmetics {
    /// Those of a route.
    pub fn of(route: &[RouteHop]) -> Self {
        route.iter().map(|hop| hop.arithmetic.clone()).collect()
    }

    /// Whether all of it is known, and was exact: then the same request always has the same answer.
    pub fn is_exact(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|name| is_exact(name))
    }

    /// Takes in what a frame says of who computes.
    pub fn hear(&mut self, frame: &Frame) {
        match frame {
            Frame::ShardStatus {
                arithmetic: Some(name),
                ..
            } => {
                self.0.insert(name.clone());
            }
            Frame::ShardFailover {
                arithmetic: Some((before, now)),
                ..
            } => {
                self.extend(before.clone());
                self.extend(now.clone());
            }
            _ => {}
        }
    }

    /// These as well.
    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }
}

impl FromIterator<String> for Arithmetics {
    fn from_iter<T: IntoIterator<Item = String>>(names: T) -> Self {
        Self(names.into_iter().collect())
    }
}

/// Their names, with `+` between.
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
    fn names_are_those_of_the_configuration() {
        for name in Exact::NAMES {
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
