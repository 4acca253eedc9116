//! Serde adapters (`#[serde(with)]`) for values that people read as text and records hold as bytes.
//! The serialiser says which of the two it writes.

/// SHA-256: 64 hexadecimal digits, or 32 bytes.
pub(crate) mod hash {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
    use serde_bytes::ByteArray;

    pub(crate) fn serialize<S: Serializer>(
        hash: &[u8; 32],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => hex::serialize(hash, serializer),
            false => ByteArray::new(*hash).serialize(serializer),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<[u8; 32], D::Error> {
        match deserializer.is_human_readable() {
            true => hex::deserialize(deserializer),
            false => ByteArray::deserialize(deserializer).map(ByteArray::into_array),
        }
    }
}

/// Several hashes, each as [`hash`].
pub(crate) mod hashes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(transparent)]
    struct Hash(#[serde(with = "super::hash")] [u8; 32]);

    pub(crate) fn serialize<S: Serializer>(
        hashes: &[[u8; 32]],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(hashes.iter().copied().map(Hash))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<[u8; 32]>, D::Error> {
        let hashes: Vec<Hash> = Vec::deserialize(deserializer)?;
        Ok(hashes.into_iter().map(|hash| hash.0).collect())
    }
}

/// Node id that may be absent, as [`node`].
pub(crate) mod optional_node {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::NodeId;

    #[derive(Serialize, Deserialize)]
    #[serde(transparent)]
    struct Node(#[serde(with = "super::node")] NodeId);

    pub(crate) fn serialize<S: Serializer>(
        node: &Option<NodeId>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        node.map(Node).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<NodeId>, D::Error> {
        let node: Option<Node> = Option::deserialize(deserializer)?;
        Ok(node.map(|node| node.0))
    }
}

/// Node id: its text, or the raw key ([`raw_keys`](crate::identity::raw_keys)).
pub(crate) mod node {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use crate::NodeId;
    use crate::identity::raw_keys;

    pub(crate) fn serialize<S: Serializer>(
        node: &NodeId,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => node.serialize(serializer),
            false => raw_keys::serialize(node, serializer),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<NodeId, D::Error> {
        match deserializer.is_human_readable() {
            true => NodeId::deserialize(deserializer),
            false => raw_keys::deserialize(deserializer),
        }
    }
}
