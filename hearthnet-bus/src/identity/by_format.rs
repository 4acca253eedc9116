//! Serde adapters (`#[serde(with)]`) for hashes that people read as text and records hold as bytes.
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
