//! Serde adapters (`#[serde(with)]`) for node ids as raw keys in records. Deserialising does not
//! check the keys: the log checks events before it stores them, and decoders of messages from peers
//! check the keys themselves.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_bytes::ByteArray;

use crate::NodeId;

pub(crate) fn serialize<S: Serializer>(node: &NodeId, serializer: S) -> Result<S::Ok, S::Error> {
    ByteArray::new(*node.as_bytes()).serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NodeId, D::Error> {
    Ok(NodeId::from_checked(*ByteArray::deserialize(deserializer)?))
}

pub(crate) mod community {
    use super::{Deserializer, Serializer};
    use crate::CommunityId;

    pub(crate) fn serialize<S: Serializer>(
        id: &CommunityId,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        super::serialize(&id.root(), serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<CommunityId, D::Error> {
        super::deserialize(deserializer).map(CommunityId::from)
    }
}

pub(crate) mod option {
    use super::{ByteArray, Deserialize, Deserializer, NodeId, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        node: &Option<NodeId>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        node.map(|node| ByteArray::new(*node.as_bytes()))
            .serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<NodeId>, D::Error> {
        let key: Option<ByteArray<32>> = Option::deserialize(deserializer)?;
        Ok(key.map(|key| NodeId::from_checked(*key)))
    }
}

pub(crate) mod option_set {
    use std::collections::BTreeSet;

    use super::{ByteArray, Deserialize, Deserializer, NodeId, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        nodes: &Option<BTreeSet<NodeId>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let keys = nodes.as_ref().map(|nodes| {
            let keys = nodes.iter().map(|node| ByteArray::new(*node.as_bytes()));
            keys.collect::<Vec<_>>()
        });
        keys.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<BTreeSet<NodeId>>, D::Error> {
        let keys: Option<Vec<ByteArray<32>>> = Option::deserialize(deserializer)?;
        let nodes = |keys: Vec<ByteArray<32>>| {
            let nodes = keys.into_iter().map(|key| NodeId::from_checked(*key));
            nodes.collect()
        };
        Ok(keys.map(nodes))
    }
}

pub(crate) mod map {
    use std::collections::BTreeMap;

    use super::{ByteArray, Deserialize, Deserializer, NodeId, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer, V: Serialize>(
        map: &BTreeMap<NodeId, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_map(
            map.iter()
                .map(|(node, v)| (ByteArray::new(*node.as_bytes()), v)),
        )
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, V: Deserialize<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<NodeId, V>, D::Error> {
        let map: BTreeMap<ByteArray<32>, V> = Deserialize::deserialize(deserializer)?;
        let nodes = map.into_iter();
        Ok(nodes
            .map(|(key, v)| (NodeId::from_checked(*key), v))
            .collect())
    }
}
