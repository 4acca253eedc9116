//! Serde adapters (`#[serde(with)]`) for ids of nodes that people read as text and records hold as
//! raw keys. The serialiser says which of the two it writes. Ids of communities may use them in
//! records only: as text, they would be written as ids of nodes.
//!
//! Deserialising does not check raw keys: the log checks events before it stores them, and decoders
//! of messages from peers check the keys themselves.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_bytes::ByteArray;

use crate::NodeId;

/// Node id that records hold as its raw key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct RawKey(#[serde(with = "crate::identity::raw_keys")] pub(crate) NodeId);

pub(crate) fn serialize<S: Serializer, K: Copy + Into<NodeId>>(
    key: &K,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let node: NodeId = (*key).into();
    match serializer.is_human_readable() {
        true => node.serialize(serializer),
        false => ByteArray::new(*node.as_bytes()).serialize(serializer),
    }
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>, K: From<NodeId>>(
    deserializer: D,
) -> Result<K, D::Error> {
    let node = match deserializer.is_human_readable() {
        true => NodeId::deserialize(deserializer)?,
        false => NodeId::from_checked(*ByteArray::deserialize(deserializer)?),
    };
    Ok(node.into())
}

pub(crate) mod option {
    use super::{Deserialize, Deserializer, NodeId, RawKey, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        node: &Option<NodeId>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        node.map(RawKey).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<NodeId>, D::Error> {
        let key: Option<RawKey> = Option::deserialize(deserializer)?;
        Ok(key.map(|key| key.0))
    }
}

pub(crate) mod option_set {
    use std::collections::BTreeSet;

    use super::{Deserialize, Deserializer, NodeId, RawKey, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        nodes: &Option<BTreeSet<NodeId>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let keys = |nodes: &BTreeSet<NodeId>| nodes.iter().copied().map(RawKey).collect();
        let keys: Option<Vec<RawKey>> = nodes.as_ref().map(keys);
        keys.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<BTreeSet<NodeId>>, D::Error> {
        let keys: Option<Vec<RawKey>> = Option::deserialize(deserializer)?;
        Ok(keys.map(|keys| keys.into_iter().map(|key| key.0).collect()))
    }
}

pub(crate) mod map {
    use std::collections::BTreeMap;

    use super::{Deserialize, Deserializer, NodeId, RawKey, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer, V: Serialize>(
        map: &BTreeMap<NodeId, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_map(map.iter().map(|(node, v)| (RawKey(*node), v)))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, V: Deserialize<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<NodeId, V>, D::Error> {
        let map: BTreeMap<RawKey, V> = Deserialize::deserialize(deserializer)?;
        Ok(map.into_iter().map(|(key, v)| (key.0, v)).collect())
    }
}
