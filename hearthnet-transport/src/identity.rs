//! Node keys as TLS identities.

use std::fmt;
use std::sync::Arc;

use ed25519_dalek::SigningKey;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ED25519};
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use crate::NodeId;
use crate::code::{CloseCode, Violation};

/// Limit of a certificate's size: a key, a signature and some names fit easily.
const MAX_CERTIFICATE_BYTES: usize = 2048;

/// DER prefix of an Ed25519 subject key in a certificate (RFC 8410, section 4). It is constant,
/// since the algorithm has no parameters.
const ED25519_KEY_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

impl NodeId {
    /// Reads the key of a certificate. Names, dates, issuer, extensions and the certificate's own
    /// signature are ignored; the TLS handshake proves that the peer holds the key.
    ///
    /// # Errors
    /// `invalid_signature` unless it is one DER certificate of at most 2 KiB whose subject key is
    /// Ed25519 and not of small order.
    pub(crate) fn from_certificate(certificate: &[u8]) -> Result<NodeId, Violation> {
        let refuse = |detail| CloseCode::InvalidSignature.violation(detail);
        if certificate.len() > MAX_CERTIFICATE_BYTES {
            return Err(refuse("the certificate is larger than 2 KiB"));
        }
        let certificate = CertificateDer::from(certificate);
        let parsed = ParsedCertificate::try_from(&certificate)
            .map_err(|_| refuse("the certificate is not X.509"))?;
        let key = parsed.subject_public_key_info();
        let key = key
            .strip_prefix(&ED25519_KEY_PREFIX)
            .and_then(|key| <[u8; 32]>::try_from(key).ok())
            .ok_or_else(|| refuse("the certificate's key is not Ed25519"))?;
        NodeId::from_bytes(&key)
            .map_err(|_| refuse("the key is not a point of full order on the curve"))
    }
}

/// A node's own key, with the self-signed certificate that presents it.
#[derive(Clone)]
pub struct Identity {
    key: NodeId,
    pub(crate) certified: Arc<CertifiedKey>,
}

/// Error of making a certificate from a node key.
#[derive(Debug, thiserror::Error)]
#[error("no TLS certificate could be made from the node key: {reason}")]
pub struct IdentityError {
    reason: String,
}

impl Identity {
    /// Makes the identity of a node from its Ed25519 secret key (the 32-byte seed of RFC 8032).
    ///
    /// # Errors
    /// If the cryptographic library fails to sign; independent of the key.
    pub fn from_secret(secret: &[u8; 32]) -> Result<Identity, IdentityError> {
        let fail = |reason: &dyn fmt::Display| IdentityError {
            reason: reason.to_string(),
        };
        let key = NodeId::from_own_key(&SigningKey::from_bytes(secret).verifying_key());

        // PKCS #8 version 1 of an Ed25519 key (RFC 8410, section 7): a fixed prefix and the seed.
        let mut pkcs8 = Zeroizing::new([0u8; 48]);
        let (prefix, seed) = pkcs8.split_at_mut(16);
        prefix.copy_from_slice(&[
            0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22,
            0x04, 0x20,
        ]);
        seed.copy_from_slice(secret);
        let pkcs8 = PrivatePkcs8KeyDer::from(pkcs8.as_slice());

        let mut names = DistinguishedName::new();
        names.push(DnType::CommonName, "hearthnet node");
        let mut params = CertificateParams::default();
        params.distinguished_name = names;
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ED25519)
            .map_err(|error| fail(&error))?;
        let certificate = params.self_signed(&pair).map_err(|error| fail(&error))?;
        let chain = vec![CertificateDer::from(certificate.der().to_vec())];
        let signer = any_eddsa_type(&pkcs8).map_err(|error| fail(&error))?;
        Ok(Identity {
            key,
            certified: Arc::new(CertifiedKey::new(chain, signer)),
        })
    }

    pub fn key(&self) -> NodeId {
        self.key
    }

    /// The certificate that the node presents, in DER.
    pub fn certificate(&self) -> &[u8] {
        self.certified
            .cert
            .first()
            .map_or(&[], |certificate| certificate.as_ref())
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::PKCS_ECDSA_P256_SHA256;

    #[test]
    fn the_certificate_carries_the_node_key() {
        // Test vector 1 of RFC 8032, section 7.1.
        let secret = [
            0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec,
            0x2c, 0xc4, 0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03,
            0x1c, 0xae, 0x7f, 0x60,
        ];
        let identity = Identity::from_secret(&secret).unwrap();
        assert_eq!(identity.key().as_bytes()[..4], [0xd7, 0x5a, 0x98, 0x01]);
        assert_eq!(
            NodeId::from_certificate(identity.certificate()).unwrap(),
            identity.key()
        );
    }

    #[test]
    fn certificates_of_other_kinds_of_key_are_refused() {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let certificate = CertificateParams::default().self_signed(&pair).unwrap();
        let refused = NodeId::from_certificate(certificate.der()).unwrap_err();
        assert_eq!(refused.code, CloseCode::InvalidSignature);
    }

    #[test]
    fn damaged_certificates_are_refused_or_name_another_key() {
        let identity = Identity::from_secret(&[7; 32]).unwrap();
        let good = identity.certificate();
        for cut in 0..good.len() {
            assert!(NodeId::from_certificate(&good[..cut]).is_err());
        }
        for at in 0..good.len() {
            let mut bad = good.to_vec();
            bad[at] ^= 0x55;
            let _ = NodeId::from_certificate(&bad);
        }
        let mut longer = good.to_vec();
        longer.push(0);
        assert!(NodeId::from_certificate(&longer).is_err());
    }

    #[test]
    fn keys_of_small_order_are_refused() {
        // The neutral element, and a point of order 8.
        let mut neutral = [0u8; 32];
        neutral[0] = 1;
        let order_8 = [
            0xc7, 0x17, 0x6a, 0x70, 0x3d, 0x4d, 0xd8, 0x4f, 0xba, 0x3c, 0x0b, 0x76, 0x0d, 0x10,
            0x67, 0x0f, 0x2a, 0x20, 0x53, 0xfa, 0x2c, 0x39, 0xcc, 0xc6, 0x4e, 0xc7, 0xfd, 0x77,
            0x92, 0xac, 0x03, 0x7a,
        ];
        let identity = Identity::from_secret(&[7; 32]).unwrap();
        let (good, own) = (identity.certificate(), identity.key());
        let at = good.windows(32).position(|part| part == own.as_bytes());
        let at = at.unwrap();
        for (key, name) in [(neutral, "1"), (order_8, "8"), (*own.as_bytes(), "full")] {
            let mut certificate = good.to_vec();
            certificate[at..at + 32].copy_from_slice(&key);
            let read = NodeId::from_certificate(&certificate);
            assert_eq!(read.is_ok(), name == "full", "order {name}");
        }
    }
}
