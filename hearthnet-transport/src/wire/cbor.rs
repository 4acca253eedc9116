//! CBOR maps in control bodies: strict reading, and the specification's encoding.
//!
//! A body is one map with unique text keys, and no bytes follow it. Its fields are those of a
//! struct ([`Body`]), in that order. Its size is checked before decoding (4 KiB), which bounds the
//! tree that ciborium builds.

use std::borrow::Cow;

use ciborium::Value;
use ciborium::value::Error;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Flags, FrameBuf, FrameType};
use crate::code::{CloseCode, Violation};

/// Limit of nesting: HELLO's lists of versions are the deepest, at 2.
const MAX_DEPTH: usize = 4;
/// Limit of keys in a map.
const MAX_KEYS: usize = 32;

pub(super) fn malformed(detail: impl Into<Cow<'static, str>>) -> Violation {
    CloseCode::BodyMalformed.violation(detail)
}

/// Body of one frame type: a map with exactly the struct's fields as keys.
pub(crate) trait Body: Serialize + DeserializeOwned {
    const KIND: FrameType;

    fn frame(&self) -> FrameBuf {
        frame(Self::KIND, self)
    }

    fn read(body: &[u8]) -> Result<Self, Violation> {
        Map::read(body)?.fields()
    }
}

/// Implements [`Body`] for frame types whose body is a map, each with a struct of the same name.
macro_rules! bodies {
    ($($name:ident),*) => {
        $(impl $crate::wire::cbor::Body for $name {
            const KIND: $crate::wire::FrameType = $crate::wire::FrameType::$name;
        })*
    };
}
pub(super) use bodies;

/// Wraps a map into a frame.
pub(super) fn frame(kind: FrameType, map: &impl Serialize) -> FrameBuf {
    let mut frame = FrameBuf::with_capacity(96);
    // Writing a tree of integers, strings and lists to memory cannot fail.
    let written = ciborium::into_writer(map, frame.body());
    debug_assert!(written.is_ok());
    frame.finish(kind, Flags::NONE)
}

/// A map of valid form; its keys are not checked yet.
pub(super) struct Map(Value);

impl Map {
    pub(super) fn read(mut body: &[u8]) -> Result<Map, Violation> {
        let value: Value = ciborium::de::from_reader_with_recursion_limit(&mut body, MAX_DEPTH)
            .map_err(|_| malformed("the body is not CBOR"))?;
        if !body.is_empty() {
            return Err(malformed("bytes follow the CBOR map"));
        }
        let Value::Map(fields) = &value else {
            return Err(malformed("the body is not a CBOR map"));
        };
        check(fields)?;
        Ok(Map(value))
    }

    /// Reads the fields of a struct.
    pub(super) fn fields<T: DeserializeOwned>(&self) -> Result<T, Violation> {
        self.0.deserialized().map_err(|Error::Custom(problem)| {
            // Other texts of serde may quote the peer.
            match problem.starts_with("missing field `") {
                true => malformed(problem),
                false => malformed("an unknown key, or an invalid value"),
            }
        })
    }
}

/// Checks the keys and values of a map, and of the maps in it. The reader has limited their depth.
fn check(fields: &[(Value, Value)]) -> Result<(), Violation> {
    if fields.len() > MAX_KEYS {
        return Err(malformed("more than 32 keys"));
    }
    for (at, (key, field)) in fields.iter().enumerate() {
        if !key.is_text() {
            return Err(malformed("a key is not text"));
        }
        if fields.iter().take(at).any(|(before, _)| before == key) {
            return Err(malformed("a key occurs twice"));
        }
        // serde would look through a tag, and take null for an absent field.
        if field.is_tag() || field.is_null() {
            return Err(malformed("a value with a tag, or null"));
        }
        if let Value::Map(inner) = field {
            check(inner)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    fn code<T: DeserializeOwned>(body: &[u8]) -> Option<CloseCode> {
        let read = Map::read(body).and_then(|map| map.fields::<T>());
        read.err().map(|violation| violation.code)
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    #[test]
    fn an_empty_map_is_read() {
        assert_eq!(code::<Nothing>(&[0xa0]), None);
    }

    #[test]
    fn bodies_other_than_one_map_are_refused() {
        for body in [
            &[][..],
            &[0x01],                                                 // an integer
            &[0xa0, 0xa0],                                           // two maps
            &[0xa1, 0x61],                                           // cut off
            &[0xa1, 0x01, 0x01],                                     // a key that is no text
            &[0xa2, 0x61, b'a', 0x01, 0x61, b'a', 0x02],             // a key twice
            &[0xa1, 0x61, b'a', 0x01],                               // a key nobody asked for
            &[0xa1, 0x61, b'a', 0xa1, 0x61, b'b', 0xf6],             // null in an inner map
            &[0xbb, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], // 2^64 - 1 entries declared
            &[0x5b, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], // a string of 2^63 bytes
            &[0x81, 0x81, 0x81, 0x81, 0x81, 0x81, 0x80],             // nested deeply
            &[0xc1, 0xa0],                                           // a map with a tag
        ] {
            let code = code::<Nothing>(body);
            assert_eq!(code, Some(CloseCode::BodyMalformed), "{body:02x?}");
        }
    }

    #[test]
    fn a_key_takes_values_of_its_own_kind_and_no_others() {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Number {
            #[expect(dead_code, reason = "only whether it is read is asked")]
            a: Option<u16>,
        }
        let code = |value: &[u8]| code::<Number>(&[b"\xa1\x61a", value].concat());
        assert_eq!(code(&[0x19, 0xff, 0xff]), None);
        for wrong in [
            &[0x1a, 0, 1, 0, 0][..], // one more than it holds
            &[0x20],                 // negative
            &[0xf6],                 // null
            &[0xc1, 0x01],           // with a tag
            &[0xf9, 0x3c, 0x00],     // 1.0
            &[0x61, b'1'],           // text
            &[0x81, 0x01],           // a list
        ] {
            let code = code(wrong);
            assert_eq!(code, Some(CloseCode::BodyMalformed), "{wrong:02x?}");
        }
    }
}
