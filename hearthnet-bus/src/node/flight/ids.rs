//! Ids and names in events: short, and safe to print.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use ulid::Ulid;

use crate::now_ms;

/// Longest [`Name`], in bytes. Shard ids of the catalogue have about 40.
pub const MAX_NAME_BYTES: usize = 80;

/// Name of a shard or a purpose: at most [`MAX_NAME_BYTES`] printable ASCII characters without
/// spaces. Other characters become `?`, and the rest is cut off, so that a name cannot control a
/// terminal or look like two names.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct Name(Box<str>);

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        let plain = |c: char| if c.is_ascii_graphic() { c } else { '?' };
        Self(text.chars().take(MAX_NAME_BYTES).map(plain).collect())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

/// Id of one sequence on a chain of hosts, chosen by its caller: 48 bits of time in milliseconds
/// and 80 random bits, printed as a ULID of 26 characters. It is not sent to hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PipelineId(Ulid);

impl PipelineId {
    /// A new id.
    pub fn draw() -> Self {
        let mut random = [0; 16];
        // Without randomness the time alone must do; ids have no security function.
        let _ = getrandom::fill(&mut random);
        Self::from_parts(now_ms(), u128::from_le_bytes(random))
    }

    /// The id of these parts, with the low 80 bits of `random`.
    pub(crate) fn from_parts(unix_ms: u64, random: u128) -> Self {
        Self(Ulid::from_parts(unix_ms, random))
    }
}

impl fmt::Display for PipelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_string())
    }
}

impl fmt::Debug for PipelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a pipeline id has 26 letters and digits; copy it from the output of `diagnose`")]
pub struct PipelineIdError;

impl FromStr for PipelineId {
    type Err = PipelineIdError;

    fn from_str(text: &str) -> Result<Self, PipelineIdError> {
        Ulid::from_string(text)
            .map(Self)
            .map_err(|_| PipelineIdError)
    }
}

/// Id of a tensor session, which both sides derive without exchanging it: the first 8 bytes of the
/// SHA-256 of the session token in HELLO, which is valid for one session. Printed as 16 hex digits.
/// It grants nothing, since a used token is no longer valid.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(#[serde(with = "hex")] [u8; 8]);

impl SessionId {
    /// Id of the session that `token` opens.
    pub fn of_token(token: &[u8]) -> Self {
        let digest: [u8; 32] = Sha256::digest(token).into();
        let [a, b, c, d, e, f, g, h, ..] = digest;
        Self([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(self.0))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
