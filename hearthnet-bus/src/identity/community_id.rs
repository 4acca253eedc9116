//! Identity of a community: the public key of its root.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{NodeId, NodeIdError};

/// Prefix of a printed community id.
const PREFIX: &str = "hearth:";
/// Prefix of the printed node id of the same key.
const NODE_PREFIX: &str = "ed25519:";
/// Characters of the key that [`CommunityId::short`] shows.
const SHORT_CHARS: usize = 8;

/// Identity of a community: the Ed25519 public key of its root (32 bytes), checked as strictly as a
/// [`NodeId`]. The root key signs the community's first event, so a joiner needs only the id to
/// verify all other events.
///
/// Printed, parsed and serialised as `hearth:` and 43 characters of base64url without padding. A
/// type of its own, so that it cannot be confused with a node id.
///
/// ```
/// # use hearthnet_bus::{CommunityId, NodeKey};
/// let id = CommunityId::from(NodeKey::from_secret(&[7; 32]).id());
/// assert_eq!(id.to_string().parse::<CommunityId>().unwrap(), id);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommunityId(NodeId);

/// Reason why a text or key is not a community id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommunityIdError {
    /// The text does not begin with `hearth:`.
    #[error("a community id begins with \"hearth:\"; copy it whole")]
    Prefix,
    /// The text after the prefix is not a valid key.
    #[error("the community id is not valid: {0}")]
    Key(#[from] NodeIdError),
}

impl CommunityId {
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }

    /// Root key, for verifying its signatures.
    pub fn root(&self) -> NodeId {
        self.0
    }

    /// Short form for tables and logs: `hearth:` and the first 8 characters of the key.
    pub fn short(&self) -> String {
        self.to_string()
            .chars()
            .take(PREFIX.len() + SHORT_CHARS)
            .collect()
    }
}

impl From<NodeId> for CommunityId {
    fn from(root: NodeId) -> Self {
        Self(root)
    }
}

impl From<CommunityId> for NodeId {
    fn from(id: CommunityId) -> Self {
        id.0
    }
}

impl fmt::Display for CommunityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.0.to_string();
        let key = key.strip_prefix(NODE_PREFIX).unwrap_or(&key);
        write!(f, "{PREFIX}{key}")
    }
}

impl fmt::Debug for CommunityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for CommunityId {
    type Err = CommunityIdError;

    fn from_str(text: &str) -> Result<Self, CommunityIdError> {
        let key = text.strip_prefix(PREFIX).ok_or(CommunityIdError::Prefix)?;
        Ok(Self(format!("{NODE_PREFIX}{key}").parse()?))
    }
}

impl Serialize for CommunityId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CommunityId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::id;

    #[test]
    fn the_printed_form_differs_from_the_node_ids_in_its_prefix_only() {
        let root = id(3);
        let id = CommunityId::from(root);
        let printed = root.to_string().replace("ed25519:", "hearth:");
        assert_eq!(id.to_string(), printed);
        assert_eq!(id.short().len(), "hearth:".len() + 8);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.root(), root);
    }

    #[test]
    fn a_node_id_is_no_community_id() {
        let root = id(3);
        let wrong = root.to_string().parse::<CommunityId>();
        assert_eq!(wrong, Err(CommunityIdError::Prefix));
        for text in ["", "hearth:", "hearth:abc"] {
            assert!(text.parse::<CommunityId>().is_err(), "{text:?}");
        }
    }
}
