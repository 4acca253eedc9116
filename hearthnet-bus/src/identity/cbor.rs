//! Canonical CBOR for signed records: one content has one encoding.
//!
//! A record is a struct whose fields stand in the order of their encoded keys (RFC 8949
//! section 4.2.1: shorter keys first, then bytewise), so that encoding it yields the
//! deterministic form. Decoding encodes again and compares: other lengths, orders, tags,
//! indefinite lengths and tails are refused without a second parser.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The bytes are not the canonical encoding of the record that was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotCanonical;

/// Encodes a record.
pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, NotCanonical> {
    let mut bytes = Vec::with_capacity(512);
    ciborium::into_writer(record, &mut bytes).map_err(|_| NotCanonical)?;
    Ok(bytes)
}

/// Decodes a record of at most `depth` nested levels. The caller has bounded `bytes`; what is
/// allocated is bounded by them.
pub(crate) fn decode<T: Serialize + DeserializeOwned>(
    bytes: &[u8],
    depth: usize,
) -> Result<T, NotCanonical> {
    let record: T =
        ciborium::de::from_reader_with_recursion_limit(bytes, depth).map_err(|_| NotCanonical)?;
    if encode(&record)? == bytes {
        Ok(record)
    } else {
        Err(NotCanonical)
    }
}

/// Exactly `N` bytes as a CBOR byte string.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bytes<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> Serialize for Bytes<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de, const N: usize> Deserialize<'de> for Bytes<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Blob::deserialize(deserializer)?.0;
        let fits = <[u8; N]>::try_from(bytes.as_slice());
        fits.map(Self).map_err(|_| {
            let expected = format!("{N} bytes");
            de::Error::invalid_length(bytes.len(), &expected.as_str())
        })
    }
}

/// The same for fields that are arrays, for `#[serde(with)]`.
pub(crate) mod bytes {
    use super::{Bytes, Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer, const N: usize>(
        bytes: &[u8; N],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        Bytes(*bytes).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, const N: usize>(
        deserializer: D,
    ) -> Result<[u8; N], D::Error> {
        Bytes::deserialize(deserializer).map(|bytes| bytes.0)
    }
}

/// Borrowed bytes as a CBOR byte string.
pub(crate) struct Slice<'a>(pub(crate) &'a [u8]);

impl Serialize for Slice<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// Any bytes as a CBOR byte string.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Blob(pub(crate) Vec<u8>);

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Blob;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Blob, E> {
                Ok(Blob(bytes.to_vec()))
            }

            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Blob, E> {
                Ok(Blob(bytes))
            }
        }

        deserializer.deserialize_byte_buf(Visitor)
    }
}
