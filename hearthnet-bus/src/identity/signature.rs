//! Signatures with domain separation.

use ed25519_dalek::{Signature, Signer as _, VerifyingKey};

use crate::{NodeId, NodeKey};

/// Bytes of an Ed25519 signature.
pub const SIGNATURE_BYTES: usize = 64;

/// Kind of record that a signature covers.
///
/// The signed message is the domain's prefix followed by the exact bytes of the record. A prefix
/// ends in a NUL byte and contains no other, so no prefix is the beginning of another. A signature
/// over one kind of record therefore never verifies for another kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Domain {
    /// The body of a [`crate::Grant`].
    SessionGrant,
    /// A [`crate::community::invite::JoinRequest`].
    JoinRequest,
    /// The fields of a [`crate::community::log::Event`].
    Event,
    /// Statement of a host about the rows of a stream ([`crate::receipt::Statement`]).
    Receipt,
    /// The envelope of a call on the capability bus ([`crate::node::calls::Envelope`]).
    Call,
}

impl Domain {
    pub const fn prefix(self) -> &'static [u8] {
        match self {
            Self::SessionGrant => b"hearthnet/session-grant/v1\0",
            Self::JoinRequest => b"hearthnet/join-request/v1\0",
            Self::Event => b"hearthnet/event/v1\0",
            Self::Receipt => b"hearthnet/receipt/v1\0",
            Self::Call => b"hearthnet/call/v1\0",
        }
    }

    /// Checks a signature by `signer` over the exact bytes of a record.
    ///
    /// Strict (RFC 8032 section 5.1.7 without the cofactor): the scalar must be below the group
    /// order and the commitment must not have a small order. Otherwise a third party could turn one
    /// valid signature into another.
    ///
    /// # Errors
    /// [`InvalidSignature`] for every failure.
    pub fn verify(
        self,
        signer: &NodeId,
        record: &[u8],
        signature: &[u8; SIGNATURE_BYTES],
    ) -> Result<(), InvalidSignature> {
        let key = VerifyingKey::from_bytes(signer.as_bytes()).map_err(|_| InvalidSignature)?;
        key.verify_strict(&self.message(record), &Signature::from_bytes(signature))
            .map_err(|_| InvalidSignature)
    }

    fn message(self, record: &[u8]) -> Vec<u8> {
        [self.prefix(), record].concat()
    }
}

/// The signature was not made by this node over these bytes in this domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the signature is not valid")]
pub struct InvalidSignature;

impl NodeKey {
    /// Signs the exact bytes of a record.
    pub fn sign(&self, domain: Domain, record: &[u8]) -> [u8; SIGNATURE_BYTES] {
        self.signing.sign(&domain.message(record)).to_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::key;

    /// The group order L = 2^252 + 27742317777372353535851937790883648493, little-endian.
    const ORDER: [u8; 32] = [
        0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde,
        0x14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
    ];

    fn add_order(scalar: &mut [u8]) {
        let mut carry = 0u16;
        for (byte, order) in scalar.iter_mut().zip(ORDER) {
            carry += u16::from(*byte) + u16::from(order);
            *byte = carry.to_le_bytes()[0];
            carry >>= 8;
        }
        assert_eq!(carry, 0, "s + L fits 256 bits");
    }

    #[test]
    fn a_signature_says_nothing_about_bytes_without_the_domain() {
        let key = key(5);
        let bare = key.signing.sign(b"record").to_bytes();
        let refused = Domain::SessionGrant.verify(&key.id(), b"record", &bare);
        assert_eq!(refused, Err(InvalidSignature));
    }

    #[test]
    fn prefixes_end_in_their_only_nul() {
        use Domain::{Call, Event, JoinRequest, Receipt, SessionGrant};
        for domain in [SessionGrant, JoinRequest, Event, Call, Receipt] {
            let prefix = domain.prefix();
            assert_eq!(prefix.iter().position(|&b| b == 0), Some(prefix.len() - 1));
        }
    }

    proptest! {
        #[test]
        fn a_signature_verifies_for_its_signer_only(
            secret: [u8; 32], other: [u8; 32], record in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            prop_assume!(secret != other);
            let key = NodeKey::from_secret(&secret);
            let signature = key.sign(Domain::SessionGrant, &record);
            prop_assert_eq!(Domain::SessionGrant.verify(&key.id(), &record, &signature), Ok(()));
            let stranger = NodeKey::from_secret(&other).id();
            prop_assert!(Domain::SessionGrant.verify(&stranger, &record, &signature).is_err());
        }

        #[test]
        fn a_malleable_twin_of_a_signature_is_refused(secret: [u8; 32], record: [u8; 16]) {
            let key = NodeKey::from_secret(&secret);
            let mut signature = key.sign(Domain::SessionGrant, &record);
            add_order(&mut signature[32..]);
            prop_assert!(Domain::SessionGrant.verify(&key.id(), &record, &signature).is_err());
        }

        #[test]
        fn a_commitment_of_small_order_is_refused(secret: [u8; 32], scalar: [u8; 32], record: [u8; 8]) {
            let mut signature = [0; SIGNATURE_BYTES];
            signature[0] = 1; // the identity
            signature[32..].copy_from_slice(&scalar);
            let id = NodeKey::from_secret(&secret).id();
            prop_assert!(Domain::SessionGrant.verify(&id, &record, &signature).is_err());
        }
    }
}
