//! Errors of the harness.

use std::error::Error;
use std::fmt;
use std::panic::Location;

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
