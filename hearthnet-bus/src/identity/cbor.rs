//! Canonical CBOR for signed records: each content has exactly one encoding.
//!
//! The fields of a record's struct stand in the order of their encoded keys (RFC 8949 section
//! 4.2.1: shorter keys first, then bytewise), so that its encoding is deterministic. Decoding
//! encodes the record again and compares the bytes. This refuses other lengths, orders, tags,
//! indefinite lengths and trailing bytes without a second parser.

use ciborium::Value;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum number in records of the log: 2^53 - 1, which SQLite and JSON store exactly. As a time it
/// is the year 287396.
pub const MAX_NUMBER: u64 = (1 << 53) - 1;

/// The bytes are not the canonical encoding of the record that was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotCanonical;

/// Encodes a record.
pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, NotCanonical> {
    let mut bytes = Vec::with_capacity(512);
    ciborium::into_writer(record, &mut bytes).map_err(|_| NotCanonical)?;
    Ok(bytes)
}

/// Returns whether the keys of every map are in the order of their encodings, for assertions.
/// [`decode`] cannot detect that, because it compares with the order of the struct's fields.
/// Descriptors use another order.
pub(crate) fn is_in_order(bytes: &[u8]) -> bool {
    fn walk(value: &Value) -> bool {
        match value {
            Value::Array(items) => items.iter().all(walk),
            Value::Map(entries) => {
                let key = |(key, _): &(Value, Value)| {
                    let mut bytes = Vec::new();
                    ciborium::into_writer(key, &mut bytes).map(|()| bytes).ok()
                };
                let keys: Option<Vec<_>> = entries.iter().map(key).collect();
                keys.is_some_and(|keys| keys.is_sorted_by(|a, b| a < b))
                    && entries.iter().all(|(_, value)| walk(value))
            }
            _ => true,
        }
    }
    ciborium::from_reader(bytes).is_ok_and(|value| walk(&value))
}

/// Decodes a record of at most `depth` nested levels. The caller bounds the length of `bytes`,
/// which bounds the allocations.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_out_of_order_are_seen_at_any_depth() {
        // {"by": null, "name": ""}, at the top level and within an array within a map.
        assert!(is_in_order(b"\xa2\x62by\xf6\x64name\x60"));
        assert!(is_in_order(b"\xa1\x61a\x81\xa2\x62by\xf6\x64name\x60"));
        // {"name": "", "by": null}
        assert!(!is_in_order(b"\xa2\x64name\x60\x62by\xf6"));
        assert!(!is_in_order(b"\xa1\x61a\x81\xa2\x64name\x60\x62by\xf6"));
        // The same key twice.
        assert!(!is_in_order(b"\xa2\x62by\xf6\x62by\xf6"));
    }
}
