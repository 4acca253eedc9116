//! Weights identity.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Identity of a model's weights: the SHA-256 of its manifest. Shown as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightsId(pub [u8; 32]);

impl fmt::Display for WeightsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for WeightsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightsId({self})")
    }
}

/// A text that is not 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a SHA-256 is written as 64 hexadecimal digits")]
pub struct ParseDigestError;

impl FromStr for WeightsId {
    type Err = ParseDigestError;

    fn from_str(s: &str) -> Result<Self, ParseDigestError> {
        let mut out = [0; 32];
        let (pairs, rest) = s.as_bytes().as_chunks::<2>();
        if pairs.len() != out.len() || !rest.is_empty() {
            return Err(ParseDigestError);
        }
        for (byte, pair) in out.iter_mut().zip(pairs) {
            let digit = |c: u8| char::from(c).to_digit(16).ok_or(ParseDigestError);
            // Two digits below 16 fit a byte.
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(out))
    }
}

/// Hexadecimal in formats for people (JSON, TOML), bytes in the others (CBOR).
impl Serialize for WeightsId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for WeightsId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl serde::de::Visitor<'_> for Visitor {
            type Value = WeightsId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a SHA-256, as 64 hexadecimal digits or 32 bytes")
            }

            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<WeightsId, E> {
                v.parse().map_err(E::custom)
            }

            fn visit_bytes<E: serde::de::Error>(self, v: &[u8]) -> Result<WeightsId, E> {
                v.try_into()
                    .map(WeightsId)
                    .map_err(|_| E::invalid_length(v.len(), &self))
            }
        }

        if deserializer.is_human_readable() {
            deserializer.deserialize_str(Visitor)
        } else {
            deserializer.deserialize_bytes(Visitor)
        }
    }
}
