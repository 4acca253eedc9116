//! Capabilities: rights that can be granted, by name and version.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Maximum length of a name in bytes. The names in use have about 40.
const MAX_NAME_BYTES: usize = 64;

/// Right to open a session on a shard host and to run rows through its layers.
pub const SHARD_SERVE: &str = "experimental.distributed_llm.shard.serve@1.0";

/// Right to chat with a model that runs on the community's machines.
pub const CHAT: &str = "experimental.distributed_llm.chat@1.0";

/// Right, as a dotted lower-case name and a version, written and serialised as `name@major.minor`.
///
/// ```
/// # use hearthnet_bus::Capability;
/// let held: Capability = "experimental.distributed_llm.chat@1.2".parse().unwrap();
/// let asked: Capability = "experimental.distributed_llm.chat@1.0".parse().unwrap();
/// assert!(held.satisfies(&asked));
/// assert!(!asked.satisfies(&held));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Capability {
    name: String,
    major: u16,
    minor: u16,
}

/// The text is not a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a capability is written name@major.minor, with a name of at most 64 lower-case letters, \
     digits, dots and underscores"
)]
pub struct CapabilityError;

impl Capability {
    /// Right to use the layers of a shard host, [`SHARD_SERVE`].
    pub fn shard_serve() -> Self {
        Self::first("experimental.distributed_llm.shard.serve")
    }

    /// Right to chat, [`CHAT`].
    pub fn chat() -> Self {
        Self::first("experimental.distributed_llm.chat")
    }

    /// Right to read the recent flight record of a node.
    pub fn diagnose() -> Self {
        Self::first("experimental.distributed_llm.diagnose")
    }

    /// Right to become a member: the only capability that strangers may call.
    pub(crate) fn community_join() -> Self {
        Self::first("community.join")
    }

    /// Right to list the capabilities of a node.
    pub fn bus_describe() -> Self {
        Self::first("bus.describe")
    }

    /// Version 1.0 of the capability with this name.
    fn first(name: &str) -> Self {
        Self {
            name: name.into(),
            major: 1,
            minor: 0,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Major version. Versions with another major number are other capabilities.
    pub fn major(&self) -> u16 {
        self.major
    }

    /// Minor version. A higher one includes all that a lower one allows.
    pub(crate) fn minor(&self) -> u16 {
        self.minor
    }

    /// Returns whether this capability includes `asked`: the same name and major version, and at
    /// least its minor version.
    pub fn satisfies(&self, asked: &Self) -> bool {
        self.name == asked.name && self.major == asked.major && self.minor >= asked.minor
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}.{}", self.name, self.major, self.minor)
    }
}

impl FromStr for Capability {
    type Err = CapabilityError;

    fn from_str(text: &str) -> Result<Self, CapabilityError> {
        let (name, version) = text.split_once('@').ok_or(CapabilityError)?;
        let (major, minor) = version.split_once('.').ok_or(CapabilityError)?;
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'.';
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
            return Err(CapabilityError);
        }
        Ok(Self {
            name: name.into(),
            major: number(major)?,
            minor: number(minor)?,
        })
    }
}

impl Serialize for Capability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Capability {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// Decimal number in its only spelling: no sign, no leading zero.
fn number(text: &str) -> Result<u16, CapabilityError> {
    let value: u16 = text.parse().map_err(|_| CapabilityError)?;
    if value.to_string() == text {
        Ok(value)
    } else {
        Err(CapabilityError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capabilities_are_what_their_names_say() {
        for (text, capability) in [
            (SHARD_SERVE, Capability::shard_serve()),
            (CHAT, Capability::chat()),
            ("community.join@1.0", Capability::community_join()),
            ("bus.describe@1.0", Capability::bus_describe()),
            (
                "experimental.distributed_llm.diagnose@1.0",
                Capability::diagnose(),
            ),
        ] {
            assert_eq!(capability.to_string(), text);
            assert_eq!(text.parse(), Ok(capability));
        }
    }

    #[test]
    fn the_version_rule_is_same_major_and_at_least_the_minor() {
        let of = |text: &str| text.parse::<Capability>().unwrap();
        let asked = of("a.b@2.3");
        for (held, enough) in [
            ("a.b@2.3", true),
            ("a.b@2.4", true),
            ("a.b@2.2", false),
            ("a.b@3.3", false),
            ("a.b@1.9", false),
            ("a.c@2.3", false),
        ] {
            assert_eq!(of(held).satisfies(&asked), enough, "{held}");
        }
    }

    #[test]
    fn other_spellings_are_refused() {
        let long = format!("{}@1.0", "a".repeat(65));
        for text in [
            "",
            "a",
            "a@1",
            "@1.0",
            "a@1.0.0",
            "A@1.0",
            "a b@1.0",
            "a@01.0",
            "a@+1.0",
            "a@1.65536",
            &long,
        ] {
            assert_eq!(text.parse::<Capability>(), Err(CapabilityError), "{text}");
        }
    }
}
