//! Strict reading and writing of the CBOR maps in control bodies.
//!
//! A body is one map with text keys, each at most once, and nothing after it. Its size is bounded
//! before it is decoded (4 KiB), which bounds the tree that ciborium builds from it.

use ciborium::Value;

use super::{Flags, FrameBuf, FrameType};
use crate::code::{CloseCode, Code, MAX_NAME, Violation};

/// Deepest nesting that is decoded: HELLO's lists of versions are the deepest, at 2.
const MAX_DEPTH: usize = 4;

pub(super) fn malformed(detail: impl Into<std::borrow::Cow<'static, str>>) -> Violation {
    CloseCode::BodyMalformed.violation(detail)
}

/// The map of a body that is being written.
pub(crate) struct MapWriter(Vec<(Value, Value)>);

impl MapWriter {
    pub(crate) fn new() -> MapWriter {
        MapWriter(Vec::with_capacity(8))
    }

    pub(crate) fn uint(self, key: &str, value: impl Into<u64>) -> MapWriter {
        self.value(key, Value::Integer(value.into().into()))
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> MapWriter {
        self.value(key, Value::Bool(value))
    }

    pub(crate) fn text(self, key: &str, value: &str) -> MapWriter {
        self.value(key, Value::Text(value.to_owned()))
    }

    pub(crate) fn bytes(self, key: &str, value: &[u8]) -> MapWriter {
        self.value(key, Value::Bytes(value.to_vec()))
    }

    pub(crate) fn value(mut self, key: &str, value: Value) -> MapWriter {
        self.0.push((Value::Text(key.to_owned()), value));
        self
    }

    /// The whole frame.
    pub(crate) fn frame(self, kind: FrameType) -> FrameBuf {
        let mut frame = FrameBuf::with_capacity(96);
        self.write_to(frame.body());
        frame.finish(kind, Flags::NONE)
    }

    pub(crate) fn write_to(self, out: &mut Vec<u8>) {
        // Writing a tree of integers, strings and lists to memory has no way to fail.
        let written = ciborium::into_writer(&Value::Map(self.0), out);
        debug_assert!(written.is_ok());
    }
}

/// Reads a body whose fields are all known to `fields`.
pub(crate) fn read<T>(
    body: &[u8],
    fields: impl FnOnce(&mut MapReader) -> Result<T, Violation>,
) -> Result<T, Violation> {
    let mut map = MapReader::new(body)?;
    let value = fields(&mut map)?;
    map.end()?;
    Ok(value)
}

/// The map of a body that is being read; each field is taken out once.
pub(crate) struct MapReader(Vec<(String, Value)>);

impl MapReader {
    pub(crate) fn new(mut body: &[u8]) -> Result<MapReader, Violation> {
        let value: Value = ciborium::de::from_reader_with_recursion_limit(&mut body, MAX_DEPTH)
            .map_err(|_| malformed("the body is not CBOR"))?;
        if !body.is_empty() {
            return Err(malformed("bytes follow the CBOR map"));
        }
        let Value::Map(entries) = value else {
            return Err(malformed("the body is not a CBOR map"));
        };
        let mut fields: Vec<(String, Value)> = Vec::with_capacity(entries.len().min(32));
        for (key, value) in entries {
            let Value::Text(key) = key else {
                return Err(malformed("a key is not text"));
            };
            if fields.len() >= 32 {
                return Err(malformed("more than 32 keys"));
            }
            if fields.iter().any(|(have, _)| *have == key) {
                return Err(malformed("a key occurs twice"));
            }
            fields.push((key, value));
        }
        Ok(MapReader(fields))
    }

    pub(crate) fn take(&mut self, key: &'static str) -> Option<Value> {
        let at = self.0.iter().position(|(have, _)| have == key)?;
        Some(self.0.swap_remove(at).1)
    }

    fn required<T>(key: &'static str, value: Option<T>) -> Result<T, Violation> {
        value.ok_or_else(|| malformed(format!("`{key}` is missing")))
    }

    pub(crate) fn opt_u64(&mut self, key: &'static str) -> Result<Option<u64>, Violation> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Integer(value)) => u64::try_from(value)
                .map(Some)
                .map_err(|_| malformed(format!("`{key}` is out of range"))),
            Some(_) => Err(malformed(format!("`{key}` is not an integer"))),
        }
    }

    pub(crate) fn opt_uint<T: TryFrom<u64>>(
        &mut self,
        key: &'static str,
    ) -> Result<Option<T>, Violation> {
        self.opt_u64(key)?
            .map(|value| {
                T::try_from(value).map_err(|_| malformed(format!("`{key}` is out of range")))
            })
            .transpose()
    }

    pub(crate) fn uint<T: TryFrom<u64>>(&mut self, key: &'static str) -> Result<T, Violation> {
        let value = self.opt_uint(key)?;
        MapReader::required(key, value)
    }

    pub(crate) fn opt_bool(&mut self, key: &'static str) -> Result<Option<bool>, Violation> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(malformed(format!("`{key}` is not a boolean"))),
        }
    }

    pub(crate) fn opt_text(
        &mut self,
        key: &'static str,
        max: usize,
    ) -> Result<Option<String>, Violation> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Text(text)) if text.len() <= max => Ok(Some(text)),
            Some(Value::Text(_)) => Err(malformed(format!("`{key}` is longer than {max} bytes"))),
            Some(_) => Err(malformed(format!("`{key}` is not text"))),
        }
    }

    pub(crate) fn text(&mut self, key: &'static str, max: usize) -> Result<String, Violation> {
        let value = self.opt_text(key, max)?;
        MapReader::required(key, value)
    }

    /// The name of a failure.
    pub(crate) fn code(&mut self) -> Result<Code, Violation> {
        let text = self.text("code", MAX_NAME)?;
        Code::parse(&text).ok_or_else(|| malformed("code: not the name of a failure"))
    }

    pub(crate) fn opt_bytes(
        &mut self,
        key: &'static str,
        max: usize,
    ) -> Result<Option<Vec<u8>>, Violation> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bytes(bytes)) if bytes.len() <= max => Ok(Some(bytes)),
            Some(Value::Bytes(_)) => Err(malformed(format!("`{key}` is longer than {max} bytes"))),
            Some(_) => Err(malformed(format!("`{key}` is not a byte string"))),
        }
    }

    /// A byte string of exactly `N` bytes.
    pub(crate) fn array<const N: usize>(
        &mut self,
        key: &'static str,
    ) -> Result<[u8; N], Violation> {
        let bytes = self.opt_bytes(key, N)?;
        let bytes = MapReader::required(key, bytes)?;
        <[u8; N]>::try_from(bytes).map_err(|_| malformed(format!("`{key}` is not {N} bytes")))
    }

    /// Refuses keys that nobody asked for.
    pub(crate) fn end(self) -> Result<(), Violation> {
        match self.0.first() {
            // The key is the peer's text: it is not repeated.
            Some(_) => Err(malformed("a key that this body does not have")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(body: &[u8]) -> Option<CloseCode> {
        MapReader::new(body)
            .and_then(|map| map.end())
            .err()
            .map(|violation| violation.code)
    }

    #[test]
    fn an_empty_map_is_read() {
        assert_eq!(code(&[0xa0]), None);
    }

    #[test]
    fn what_is_not_one_map_is_refused() {
        for body in [
            &[][..],
            &[0x01],                                                 // an integer
            &[0xa0, 0xa0],                                           // two maps
            &[0xa1, 0x61],                                           // cut off
            &[0xa1, 0x01, 0x01],                                     // a key that is no text
            &[0xa2, 0x61, b'a', 0x01, 0x61, b'a', 0x02],             // a key twice
            &[0xa1, 0x61, b'a', 0x01],                               // a key nobody asked for
            &[0xbb, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], // 2^64 - 1 entries declared
            &[0x5b, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], // a string of 2^63 bytes
            &[0x81, 0x81, 0x81, 0x81, 0x81, 0x81, 0x80],             // nested deeply
        ] {
            assert_eq!(code(body), Some(CloseCode::BodyMalformed), "{body:02x?}");
        }
    }
}
