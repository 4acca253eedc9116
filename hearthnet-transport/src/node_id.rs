//! Node id: the node's Ed25519 public key.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::VerifyingKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Prefix of every printed node id.
const PREFIX: &str = "ed25519:";
/// Base64url characters of 32 bytes, without padding.
const ENCODED_CHARS: usize = 43;
/// Characters of the key that [`NodeId::short`] shows: 48 bits, enough to tell the
/// nodes of a community apart at a glance, and never used to decide anything.
const SHORT_CHARS: usize = 8;

/// A node's identity: a valid Ed25519 public key (32 bytes).
///
/// A value of this type is a canonically encoded point of the prime-order subgroup:
/// small-order points, points with a torsion component and second encodings of the
/// same point cannot be held. So equality of bytes is equality of keys, and a
/// signature that verifies under an id was made by the holder of its secret.
///
/// Printed, parsed and serialised as `ed25519:` and 43 characters of base64url
/// (RFC 4648 section 5) without padding.
///
/// ```
/// # use ed25519_dalek::SigningKey;
/// # use hearthnet_transport::NodeId;
/// let id = NodeId::from_own_key(&SigningKey::from_bytes(&[7; 32]).verifying_key());
/// assert_eq!(id.to_string().parse::<NodeId>().unwrap(), id);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId([u8; 32]);

/// Error of reading a node id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeIdError {
    /// The text does not begin with `ed25519:`.
    #[error("a node id begins with \"ed25519:\"; copy it whole from the other machine's output")]
    Prefix,
    /// The text after the prefix is not 43 characters long.
    #[error("a node id has 43 characters after \"ed25519:\", this one has {found}")]
    Length {
        /// Characters found after the prefix.
        found: usize,
    },
    /// The text is not the one base64url spelling of 32 bytes.
    #[error(
        "the node id is not valid base64url; copy it whole, without spaces or changed characters"
    )]
    Encoding,
    /// The bytes are not a canonically encoded point of the prime-order subgroup.
    #[error("the node id is not a usable Ed25519 public key")]
    Key,
}

impl NodeId {
    /// Checks a raw public key.
    ///
    /// # Errors
    /// [`NodeIdError::Key`] if the bytes are not the canonical encoding of a point in
    /// the prime-order subgroup other than the identity.
    pub fn from_bytes(bytes: &[u8; 32]) -> Result<Self, NodeIdError> {
        let key = VerifyingKey::from_bytes(bytes).map_err(|_| NodeIdError::Key)?;
        let point = key.to_edwards();
        // Decompression accepts y >= p and "negative zero": only the encoding that
        // compression yields is taken, so that one key has one id.
        if point.compress().as_bytes() != bytes || key.is_weak() || !point.is_torsion_free() {
            return Err(NodeIdError::Key);
        }
        Ok(Self(*bytes))
    }

    /// The raw public key.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A form for tables and logs: `ed25519:` and the first 8 characters of the key.
    /// Only for people: two nodes may share it.
    pub fn short(&self) -> String {
        self.to_string()
            .chars()
            .take(PREFIX.len() + SHORT_CHARS)
            .collect()
    }

    /// Wraps the bytes of an id that was checked before it was stored. The check costs a scalar
    /// multiplication, too much for every record of a log that is read again.
    pub const fn from_checked(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Id of a key pair's public half, which is valid by construction.
    pub fn from_own_key(key: &VerifyingKey) -> Self {
        Self(key.to_bytes())
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        f.write_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for NodeId {
    type Err = NodeIdError;

    fn from_str(text: &str) -> Result<Self, NodeIdError> {
        let encoded = text.strip_prefix(PREFIX).ok_or(NodeIdError::Prefix)?;
        let found = encoded.chars().count();
        if found != ENCODED_CHARS {
            return Err(NodeIdError::Length { found });
        }
        let bytes = URL_SAFE_NO_PAD
            .decode(encoded)
            .map_err(|_| NodeIdError::Encoding)?;
        let bytes: [u8; 32] = bytes.try_into().map_err(|_| NodeIdError::Encoding)?;
        Self::from_bytes(&bytes)
    }
}

impl Serialize for NodeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NodeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use proptest::prelude::*;

    use super::*;

    fn id_of(secret: &[u8; 32]) -> NodeId {
        NodeId::from_own_key(&SigningKey::from_bytes(secret).verifying_key())
    }

    /// The points whose order divides 8, canonical and not (RFC 8032's curve; the list
    /// is that of "Taming the many EdDSAs", Chalkias, Garillot, Nikolaenko 2020, table 6c).
    const SMALL_ORDER: [&str; 14] = [
        "0100000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000080",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    ];

    fn unhex(text: &str) -> [u8; 32] {
        <[u8; 32] as hex::FromHex>::from_hex(text).unwrap()
    }

    #[test]
    fn keys_of_small_order_are_refused_in_every_encoding() {
        for text in SMALL_ORDER {
            let read = NodeId::from_bytes(&unhex(text));
            assert_eq!(read, Err(NodeIdError::Key), "{text}");
        }
    }

    #[test]
    fn a_key_with_a_torsion_component_is_refused() {
        // An honest key plus a point of order 8 verifies some signatures and not others,
        // depending on the library: it must not become an identity.
        let honest = VerifyingKey::from_bytes(id_of(&[3; 32]).as_bytes());
        let torsion = VerifyingKey::from_bytes(&unhex(SMALL_ORDER[10])).unwrap();
        let mixed = (honest.unwrap().to_edwards() + torsion.to_edwards()).compress();
        assert_eq!(NodeId::from_bytes(mixed.as_bytes()), Err(NodeIdError::Key));
    }

    #[test]
    fn the_printed_form_of_a_known_key_never_changes() {
        // RFC 8032 section 7.1, test 1.
        let secret = unhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
        let id = id_of(&secret);
        let key = unhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
        assert_eq!(id.as_bytes(), &key);
        let printed = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        assert_eq!(id.to_string(), printed);
        assert_eq!(id.short(), "ed25519:11qYAYKx");
        assert_eq!(format!("{id:?}"), id.to_string());
    }

    #[test]
    fn text_that_is_not_the_one_spelling_of_an_id_is_refused() {
        let good = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        let (key, all_but_last) = (&good[PREFIX.len()..], &good[..good.len() - 1]);
        let cases = [
            (String::new(), NodeIdError::Prefix),
            (key.to_owned(), NodeIdError::Prefix),
            (format!("ED25519:{key}"), NodeIdError::Prefix),
            (PREFIX.to_owned(), NodeIdError::Length { found: 0 }),
            (format!("{good}="), NodeIdError::Length { found: 44 }),
            // Standard alphabet; a last character with bits beyond the 256th; a space.
            (good.replace('_', "/"), NodeIdError::Encoding),
            (format!("{all_but_last}p"), NodeIdError::Encoding),
            (format!("{all_but_last} "), NodeIdError::Encoding),
        ];
        assert!(good.parse::<NodeId>().is_ok());
        for (text, error) in cases {
            assert_eq!(text.parse::<NodeId>(), Err(error), "{text}");
        }
    }

    #[test]
    fn serde_uses_the_printed_form_and_its_checks() {
        #[derive(Serialize, Deserialize, PartialEq, Debug)]
        struct Holder {
            id: NodeId,
        }
        let id = id_of(&[1; 32]);
        let holder = Holder { id };
        let mut bytes = Vec::new();
        ciborium::into_writer(&holder, &mut bytes).unwrap();
        let read: Holder = ciborium::from_reader(&bytes[..]).unwrap();
        assert_eq!(read, holder);
        // The last character carries two unused bits: setting one makes a second spelling.
        *bytes.last_mut().unwrap() += 1;
        assert!(ciborium::from_reader::<Holder, _>(&bytes[..]).is_err());
    }

    proptest! {
        #[test]
        fn every_generated_key_has_an_id_that_survives_text(secret: [u8; 32]) {
            let id = id_of(&secret);
            prop_assert_eq!(NodeId::from_bytes(id.as_bytes()), Ok(id));
            prop_assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
        }

        #[test]
        fn parsing_never_panics(text in any::<String>(), tail in ".{0,60}") {
            let _ = text.parse::<NodeId>();
            let _ = format!("ed25519:{tail}").parse::<NodeId>();
        }

        #[test]
        fn accepted_bytes_are_canonical(bytes: [u8; 32]) {
            if let Ok(id) = NodeId::from_bytes(&bytes) {
                prop_assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
                prop_assert_eq!(id.as_bytes(), &bytes);
            }
        }
    }
}
