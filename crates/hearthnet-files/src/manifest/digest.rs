//! SHA-256 types.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;
use sha2::{Digest as _, Sha256};

/// Text that is not 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a SHA-256 is written as 64 hexadecimal digits")]
pub struct ParseDigestError;

/// Defines a SHA-256 type. It is displayed as 64 lower-case hexadecimal digits, and serialised as
/// those digits in text formats (JSON, TOML) and as 32 bytes in binary ones (CBOR).
macro_rules! sha256_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; 32]);

        impl $name {
            /// Hashes `bytes`.
            pub fn of(bytes: &[u8]) -> Self {
                Self(Sha256::digest(bytes).into())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = ParseDigestError;

            /// Reads 64 hexadecimal digits of either case.
            fn from_str(s: &str) -> Result<Self, ParseDigestError> {
                let mut bytes = [0; 32];
                hex::decode_to_slice(s, &mut bytes).map_err(|_| ParseDigestError)?;
                Ok(Self(bytes))
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    serializer.collect_str(self)
                } else {
                    serializer.serialize_bytes(&self.0)
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                if !deserializer.is_human_readable() {
                    let bytes = ByteArray::<32>::deserialize(deserializer)?;
                    return Ok(Self(bytes.into_array()));
                }
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

sha256_type! {
    /// SHA-256 of a file or of a tensor's data.
    Digest
}

sha256_type! {
    /// Identity of a model's weights: the SHA-256 of the canonical encoding of its
    /// [`Manifest`](super::Manifest).
    WeightsId
}

sha256_type! {
    /// Identity of tokenizer and chat template: see [`Gguf::text_id`](crate::Gguf::text_id).
    TextId
}

impl Digest {
    /// Hashes files one after the other.
    pub fn of_all(files: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        files.iter().for_each(|file| hash.update(file));
        Self(hash.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_written_and_read_as_hexadecimal() {
        // FIPS 180-4, appendix B.1.
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = Digest::of(b"abc");
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
        assert_eq!(text.to_uppercase().parse(), Ok(digest));
        assert_eq!(
            serde_json::to_string(&digest).unwrap(),
            format!("\"{text}\"")
        );
        assert_eq!(
            serde_json::from_str::<Digest>(&format!("\"{text}\"")).unwrap(),
            digest
        );
    }

    #[test]
    fn other_texts_are_no_digests() {
        let text = Digest::of(b"abc").to_string();
        for wrong in [
            "",
            &text[1..],
            &format!("{text}00"),
            &text.replace('b', "g"),
            &"é".repeat(32),
        ] {
            assert_eq!(wrong.parse::<Digest>(), Err(ParseDigestError), "{wrong}");
        }
    }
}
