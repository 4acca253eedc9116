//! The signed envelope of a call: caller, audience, capability, time, and hash of the parameters.
//!
//! `specs/capability-bus.md` section 4 is the normative text. As with session grants,
//! the signature is over the exact bytes received, and one envelope has one encoding.

use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;
use sha2::{Digest as _, Sha256};

use super::error::CallError;
use crate::identity::cbor;
use crate::{Capability, Domain, NodeId, NodeKey, SIGNATURE_BYTES};

/// Longest envelope, in bytes. Real ones have about 260.
pub const MAX_ENVELOPE_BYTES: usize = 512;

/// Largest difference between an envelope's time and the receiver's clock, in milliseconds. Clocks
/// of homes are set over the network, or by hand.
pub const MAX_CALL_SKEW_MS: u64 = 120_000;

const VERSION: u8 = 1;

/// Signed description of a call. It holds the hash of the parameters, not the parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The calling node, which signs.
    pub caller: NodeId,
    /// The called node.
    pub audience: NodeId,
    /// The capability, with the lowest acceptable minor version.
    pub capability: Capability,
    /// Random id, used once per caller.
    pub id: [u8; 16],
    /// Time of the call by the caller's clock, in Unix milliseconds.
    pub at_ms: u64,
    /// SHA-256 of the parameters' exact bytes.
    pub params_sha256: [u8; 32],
}

/// Why an envelope is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvelopeError {
    /// Too long, too short, or not the canonical map of an envelope.
    #[error("the call's envelope cannot be read: {0}")]
    Malformed(&'static str),
    /// The signature does not match the caller and these bytes.
    #[error("the signature of the call is not valid")]
    Signature,
    /// The parameters differ from the signed ones.
    #[error("the parameters are not the ones that the caller signed")]
    Params,
    /// The signer is not the node that sent the call.
    #[error("the call was signed by {0}, which is not the node that sent it")]
    Caller(NodeId),
    /// The envelope is for another node.
    #[error("the call is for {0}, not for this node")]
    Audience(NodeId),
    /// The time differs too much from this node's clock.
    #[error("the call was made {off_s} s {when} by this node's clock; compare the two clocks")]
    Time {
        /// Absolute difference, in seconds.
        off_s: u64,
        /// `ago` or `ahead`.
        when: &'static str,
    },
}

impl EnvelopeError {
    pub fn code(&self) -> Code {
        match self {
            Self::Malformed(_) => Code::BAD_REQUEST,
            Self::Signature | Self::Params => Code::INVALID_SIGNATURE,
            Self::Caller(_) | Self::Audience(_) => Code::UNAUTHORIZED,
            Self::Time { .. } => Code::CALL_EXPIRED,
        }
    }
}

impl From<EnvelopeError> for CallError {
    fn from(error: EnvelopeError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

impl Envelope {
    /// The envelope of a call. `params` must be sent with exactly these bytes.
    pub fn new(
        caller: NodeId,
        audience: NodeId,
        capability: Capability,
        params: &str,
        id: [u8; 16],
        at_ms: u64,
    ) -> Self {
        Self {
            caller,
            audience,
            capability,
            id,
            at_ms,
            params_sha256: Sha256::digest(params.as_bytes()).into(),
        }
    }

    /// Encodes and signs with the caller's `key`.
    ///
    /// # Errors
    /// [`EnvelopeError::Caller`] if `key` is not the caller's.
    pub fn sign(&self, key: &NodeKey) -> Result<Vec<u8>, EnvelopeError> {
        if key.id() != self.caller {
            return Err(EnvelopeError::Caller(self.caller));
        }
        let mut bytes = Body::of(self).encode()?;
        let signature = key.sign(Domain::Call, &bytes);
        bytes.extend_from_slice(&signature);
        Ok(bytes)
    }

    /// Decodes and verifies an envelope: its form, that `sender` (proved by the TLS handshake)
    /// signed it for `own`, that `params` are the signed ones, and that its time is within
    /// [`MAX_CALL_SKEW_MS`] of `now_ms`.
    ///
    /// The caller has to check it against a replay cache.
    ///
    /// # Errors
    /// [`EnvelopeError`].
    pub fn open(
        bytes: &[u8],
        params: &str,
        sender: NodeId,
        own: NodeId,
        now_ms: u64,
    ) -> Result<Self, EnvelopeError> {
        if bytes.len() > MAX_ENVELOPE_BYTES {
            return Err(EnvelopeError::Malformed("it is too long"));
        }
        let (body, signature) = bytes
            .split_last_chunk::<SIGNATURE_BYTES>()
            .ok_or(EnvelopeError::Malformed("it is too short"))?;
        let envelope = Body::read(body)?;
        if envelope.caller != sender {
            return Err(EnvelopeError::Caller(envelope.caller));
        }
        if envelope.audience != own {
            return Err(EnvelopeError::Audience(envelope.audience));
        }
        let off_ms = envelope.at_ms.abs_diff(now_ms);
        if off_ms > MAX_CALL_SKEW_MS {
            return Err(EnvelopeError::Time {
                off_s: off_ms / 1000,
                when: if envelope.at_ms < now_ms {
                    "ago"
                } else {
                    "ahead"
                },
            });
        }
        Domain::Call
            .verify(&sender, body, signature)
            .map_err(|_| EnvelopeError::Signature)?;
        if envelope.params_sha256[..] != Sha256::digest(params.as_bytes())[..] {
            return Err(EnvelopeError::Params);
        }
        Ok(envelope)
    }

    /// First millisecond at which [`Envelope::open`] refuses the envelope as too old.
    pub(crate) fn expires_at_ms(&self) -> u64 {
        self.at_ms.saturating_add(MAX_CALL_SKEW_MS + 1)
    }
}

/// The signed map, its fields in the order of their encoded keys (RFC 8949 section 4.2.1).
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    v: u8,
    at: u64,
    id: ByteArray<16>,
    aud: ByteArray<32>,
    cap: String,
    iss: ByteArray<32>,
    sha: ByteArray<32>,
}

impl Body {
    fn of(envelope: &Envelope) -> Self {
        Self {
            v: VERSION,
            at: envelope.at_ms,
            id: ByteArray::new(envelope.id),
            aud: ByteArray::new(*envelope.audience.as_bytes()),
            cap: envelope.capability.to_string(),
            iss: ByteArray::new(*envelope.caller.as_bytes()),
            sha: ByteArray::new(envelope.params_sha256),
        }
    }

    fn encode(&self) -> Result<Vec<u8>, EnvelopeError> {
        cbor::encode(self).map_err(|_| EnvelopeError::Malformed("it cannot be encoded"))
    }

    fn read(bytes: &[u8]) -> Result<Envelope, EnvelopeError> {
        // The map is flat; the limit of two levels is one more than it needs.
        let it: Self = cbor::decode(bytes, 2)
            .map_err(|_| EnvelopeError::Malformed("it is not the canonical map of an envelope"))?;
        if it.v != VERSION {
            return Err(EnvelopeError::Malformed("its version is unknown"));
        }
        let node = |key: ByteArray<32>, what| {
            NodeId::from_bytes(&key).map_err(|_| EnvelopeError::Malformed(what))
        };
        Ok(Envelope {
            caller: node(it.iss, "its caller is not a usable key")?,
            audience: node(it.aud, "its audience is not a usable key")?,
            capability: it
                .cap
                .parse()
                .map_err(|_| EnvelopeError::Malformed("it names no capability"))?,
            id: *it.id,
            at_ms: it.at,
            params_sha256: *it.sha,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{id, key};
    use crate::vectors_tests::hex_blocks;

    const NOW: u64 = 1_750_000_000_000;
    const PARAMS: &str = r#"{"prompt":"Hi"}"#;

    /// An envelope from key 1 to node 2.
    fn sample() -> Envelope {
        Envelope::new(
            id(1),
            id(2),
            "experimental.distributed_llm.chat@1.0".parse().unwrap(),
            PARAMS,
            *b"0123456789abcdef",
            NOW,
        )
    }

    fn open(bytes: &[u8], params: &str, now_ms: u64) -> Result<Envelope, EnvelopeError> {
        Envelope::open(bytes, params, id(1), id(2), now_ms)
    }

    #[test]
    fn the_worked_example_of_the_specification_is_what_this_code_makes() {
        let spec = include_str!("../../../../specs/capability-bus.md");
        let expected = hex_blocks(spec).next().unwrap();
        assert_eq!(hex::encode(sample().sign(&key(1)).unwrap()), expected);
    }

    #[test]
    fn a_call_comes_through_within_the_skew_and_not_beyond() {
        let bytes = sample().sign(&key(1)).unwrap();
        for now in [NOW - MAX_CALL_SKEW_MS, NOW, NOW + MAX_CALL_SKEW_MS] {
            assert_eq!(open(&bytes, PARAMS, now), Ok(sample()));
        }
        for now in [NOW - MAX_CALL_SKEW_MS - 1, sample().expires_at_ms()] {
            let expired = open(&bytes, PARAMS, now).unwrap_err();
            assert_eq!(expired.code(), Code::CALL_EXPIRED);
        }
    }

    #[test]
    fn other_parameters_another_sender_or_another_node_are_refused() {
        let bytes = sample().sign(&key(1)).unwrap();
        let code = |r: Result<Envelope, EnvelopeError>| r.unwrap_err().code();
        // The same value in another spelling has another hash.
        let respelled = open(&bytes, r#"{"prompt": "Hi"}"#, NOW);
        assert_eq!(code(respelled), Code::INVALID_SIGNATURE);
        let relayed = Envelope::open(&bytes, PARAMS, id(3), id(2), NOW);
        assert_eq!(code(relayed), Code::UNAUTHORIZED);
        let elsewhere = Envelope::open(&bytes, PARAMS, id(1), id(3), NOW);
        assert_eq!(code(elsewhere), Code::UNAUTHORIZED);
        assert!(sample().sign(&key(3)).is_err());
    }

    #[test]
    fn a_signature_from_another_domain_is_worth_nothing() {
        let body = Body::of(&sample()).encode().unwrap();
        let signature = key(1).sign(Domain::SessionGrant, &body);
        let bytes = [&body[..], &signature].concat();
        assert_eq!(open(&bytes, PARAMS, NOW), Err(EnvelopeError::Signature));
    }

    proptest! {
        #[test]
        fn any_change_is_refused(at in 0usize..300, to: u8) {
            let good = sample().sign(&key(1)).unwrap();
            let mut bytes = good.clone();
            if let Some(b) = bytes.get_mut(at) { *b = to; }
            prop_assert_eq!(open(&bytes, PARAMS, NOW).is_ok(), bytes == good);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(open(&bytes, PARAMS, NOW).is_err());
        }
    }
}
