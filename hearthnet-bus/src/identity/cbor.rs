//! Canonical CBOR for signed records: one content has one encoding.
//!
//! A record is a struct whose fields stand in the order of their encoded keys (RFC 8949
//! section 4.2.1: shorter keys first, then bytewise), so that encoding it yields the
//! deterministic form. Decoding encodes again and compares: other lengths, orders, tags,
//! indefinite lengths and tails are refused without a second parser.

use serde::Serialize;
use serde::de::DeserializeOwned;

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
