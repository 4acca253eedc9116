//! Bytes that are encrypted to several nodes (`specs/disputes.md` 3).
//!
//! The content has one random key, which is encrypted to each reader: X25519 between a key pair that is
//! used once and the reader's identity key, and ChaCha20-Poly1305. A commitment to the content's key
//! ensures that all readers read the same content, which the cipher alone does not.

use std::collections::BTreeMap;

use chacha20poly1305::aead::{Aead as _, Payload};
use chacha20poly1305::{ChaCha20Poly1305, KeyInit as _, Nonce};
use ed25519_dalek::{SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};
use serde_bytes::{ByteArray, ByteBuf};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::cbor;
use super::raw_keys;
use crate::{NodeId, NodeKey, RandomnessError};

/// Maximum length of sealed bytes: 32 MiB of rows, twice 16,384 claims, and the keys.
pub const MAX_SEALED_BYTES: usize = 36 << 20;
/// Maximum number of readers.
pub const MAX_READERS: usize = 64;

const VERSION: u8 = 1;
const COMMIT: &[u8] = b"hearthnet/evidence-commit/v1\0";
const KEY: &[u8] = b"hearthnet/evidence-key/v1\0";
/// Nesting of the map and its map of keys, with room for one level.
const DEPTH: usize = 3;

/// Reason why sealed bytes cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// They may be in order: other nodes can read them.
    #[error("the evidence is not sealed to this node")]
    OtherReaders,
    /// They cannot have been sealed as specified.
    #[error("the evidence is damaged, or was not sealed correctly")]
    Damaged,
}

/// The sealed map, its fields in the order of their encoded keys.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    v: u8,
    data: ByteBuf,
    #[serde(with = "raw_keys::map")]
    keys: BTreeMap<NodeId, ByteArray<48>>,
    commit: ByteArray<32>,
    sender: ByteArray<32>,
}

/// SHA-256 of sealed bytes, by which they are fetched.
pub fn hash_of(sealed: &[u8]) -> [u8; 32] {
    Sha256::digest(sealed).into()
}

/// Encrypts `content` to the readers, of which there must be at least one. Those beyond
/// [`MAX_READERS`] are left out. `None` if no reader is left, or the result would be too long.
///
/// # Errors
/// [`RandomnessError`].
pub fn seal(
    content: &[u8],
    readers: impl IntoIterator<Item = NodeId>,
) -> Result<Option<Vec<u8>>, RandomnessError> {
    let mut random = Zeroizing::new([[0; 32]; 2]);
    getrandom::fill(random.as_flattened_mut())?;
    let [key, sender] = &*random;
    Ok(sealed(
        content,
        readers,
        key,
        &SigningKey::from_bytes(sender),
    ))
}

/// [`seal`], with its key and its sender.
fn sealed(
    content: &[u8],
    readers: impl IntoIterator<Item = NodeId>,
    key: &[u8; 32],
    sender: &SigningKey,
) -> Option<Vec<u8>> {
    let commit = commitment(key);
    let mut readers: Vec<NodeId> = readers.into_iter().collect();
    readers.sort_unstable();
    readers.dedup();
    readers.truncate(MAX_READERS);
    let public = sender.verifying_key().to_bytes();
    let wrap = |reader: NodeId| {
        let kek = shared(sender, reader.as_bytes(), &public, reader.as_bytes())?;
        let payload = Payload {
            msg: key,
            aad: &commit,
        };
        let wrapped = cipher(&kek).encrypt(&Nonce::default(), payload).ok()?;
        Some((reader, ByteArray::new(wrapped.try_into().ok()?)))
    };
    let keys: BTreeMap<NodeId, ByteArray<48>> = readers.into_iter().filter_map(wrap).collect();
    if keys.is_empty() {
        return None;
    }
    let data = cipher(key).encrypt(&Nonce::default(), content).ok()?;
    let sealed = Sealed {
        v: VERSION,
        data: ByteBuf::from(data),
        keys,
        commit: ByteArray::new(commit),
        sender: ByteArray::new(public),
    };
    let bytes = cbor::encode(&sealed).ok()?;
    (bytes.len() <= MAX_SEALED_BYTES).then_some(bytes)
}

/// Decrypts sealed bytes with the key of a reader.
///
/// # Errors
/// [`OpenError`].
pub fn open(sealed: &[u8], reader: &NodeKey) -> Result<Vec<u8>, OpenError> {
    if sealed.len() > MAX_SEALED_BYTES {
        return Err(OpenError::Damaged);
    }
    let found: Sealed = cbor::decode(sealed, DEPTH).map_err(|_| OpenError::Damaged)?;
    if found.v != VERSION || !(1..=MAX_READERS).contains(&found.keys.len()) {
        return Err(OpenError::Damaged);
    }
    let own = reader.id();
    let wrapped = found.keys.get(&own).ok_or(OpenError::OtherReaders)?;
    let opened = || {
        let kek = shared(
            &reader.signing,
            &found.sender,
            &found.sender,
            own.as_bytes(),
        )?;
        let payload = Payload {
            msg: &wrapped[..],
            aad: &found.commit[..],
        };
        let key = cipher(&kek).decrypt(&Nonce::default(), payload).ok()?;
        let key: Zeroizing<[u8; 32]> = Zeroizing::new(key.try_into().ok()?);
        if commitment(&key)[..] != found.commit[..] {
            return None;
        }
        let data = cipher(&key).decrypt(&Nonce::default(), &found.data[..]);
        data.ok()
    };
    opened().ok_or(OpenError::Damaged)
}

fn cipher(key: &[u8; 32]) -> ChaCha20Poly1305 {
    ChaCha20Poly1305::new(key.into())
}

fn commitment(key: &[u8; 32]) -> [u8; 32] {
    let commit = Sha256::new().chain_update(COMMIT).chain_update(key);
    commit.finalize().into()
}

/// Key between `own` and the public key `other`. `None` if that is no key, or one of small order.
fn shared(
    own: &SigningKey,
    other: &[u8; 32],
    sender: &[u8; 32],
    reader: &[u8; 32],
) -> Option<Zeroizing<[u8; 32]>> {
    let other = VerifyingKey::from_bytes(other).ok()?.to_montgomery();
    let secret = Zeroizing::new(own.to_scalar_bytes());
    let point = Zeroizing::new(other.mul_clamped(*secret).to_bytes());
    if *point == [0; 32] {
        return None;
    }
    let key = Sha256::new()
        .chain_update(KEY)
        .chain_update(*point)
        .chain_update(sender)
        .chain_update(reader);
    Some(Zeroizing::new(key.finalize().into()))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{id, key};

    /// Sealed with the key and the sender of the worked example.
    pub(crate) fn example(content: &[u8], readers: &[u8]) -> Vec<u8> {
        let readers = readers.iter().map(|seed| id(*seed));
        sealed(
            content,
            readers,
            &[7; 32],
            &SigningKey::from_bytes(&[8; 32]),
        )
        .unwrap()
    }

    #[test]
    fn each_reader_reads_it_and_no_other_node_does() {
        let content = b"rows of a prompt";
        let sealed = seal(content, [id(1), id(2), id(1)]).unwrap().unwrap();
        assert!(cbor::is_in_order(&sealed));
        for reader in [1, 2] {
            assert_eq!(open(&sealed, &key(reader)).unwrap(), content);
        }
        assert_eq!(open(&sealed, &key(3)), Err(OpenError::OtherReaders));
        let again = seal(content, [id(1)]).unwrap().unwrap();
        assert!(!again.windows(content.len()).any(|part| part == content));
        assert_eq!(seal(content, []).unwrap(), None);
    }

    #[test]
    fn readers_beyond_the_limit_are_left_out() {
        let sealed = seal(b"x", (1..=80).map(id)).unwrap().unwrap();
        let reads = |seed: &u8| open(&sealed, &key(*seed)).is_ok();
        assert_eq!((1..=80).filter(reads).count(), MAX_READERS);
    }

    #[test]
    fn two_readers_cannot_be_shown_different_keys() {
        // The entry of the second reader holds another key than the commitment fits.
        let sender = SigningKey::from_bytes(&[8; 32]);
        let honest = sealed(b"one", [id(1)], &[7; 32], &sender).unwrap();
        let other = sealed(b"two", [id(2)], &[9; 32], &sender).unwrap();
        let mut mixed: Sealed = cbor::decode(&honest, DEPTH).unwrap();
        let other: Sealed = cbor::decode(&other, DEPTH).unwrap();
        mixed.keys.extend(other.keys);
        let mixed = cbor::encode(&mixed).unwrap();
        assert_eq!(open(&mixed, &key(1)).unwrap(), b"one");
        assert_eq!(open(&mixed, &key(2)), Err(OpenError::Damaged));
    }

    #[test]
    fn a_sender_of_small_order_is_refused() {
        let mut forged: Sealed = cbor::decode(&example(b"x", &[1]), DEPTH).unwrap();
        // The point of order 1.
        forged.sender = ByteArray::new([0; 32]);
        forged.sender[0] = 1;
        let forged = cbor::encode(&forged).unwrap();
        assert_eq!(open(&forged, &key(1)), Err(OpenError::Damaged));
    }

    proptest! {
        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(open(&bytes, &key(1)), Err(OpenError::Damaged));
        }

        #[test]
        fn a_change_of_any_byte_is_found(
            content in proptest::collection::vec(any::<u8>(), 0..50),
            at in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let mut sealed = example(&content, &[1]);
            let at = at.index(sealed.len());
            sealed[at] ^= 1 << bit;
            prop_assert!(open(&sealed, &key(1)).is_err());
            prop_assert!(open(&sealed[..at], &key(1)).is_err());
        }
    }
}
