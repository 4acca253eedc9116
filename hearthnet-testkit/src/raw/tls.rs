//! TLS without scruples: any certificate with any key, and no interest in those of the other side.

use std::fmt;
use std::sync::Arc;

use hearthnet_transport::Identity;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Takes whoever answers: it is the host's business to be careful.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// What a peer shows of itself in the TLS handshake.
#[derive(Clone)]
pub struct Credentials {
    /// The certificate, which is no secret of anybody; if it shows one at all.
    pub certificate: Option<Vec<u8>>,
    /// The key that signs the handshake, whether or not the certificate is its own: PKCS #8.
    pub key: Vec<u8>,
}

impl Credentials {
    /// The credentials of a node that is who it says.
    ///
    /// # Panics
    /// If there is no certificate for the key.
    pub fn of(secret: &[u8; 32]) -> Credentials {
        let identity = Identity::from_secret(secret).expect("a certificate");
        Credentials::forged(identity.certificate(), secret)
    }

    /// A certificate, and an Ed25519 secret that need not belong to it.
    pub fn forged(certificate: &[u8], secret: &[u8; 32]) -> Credentials {
        // PKCS #8 version 1 of an Ed25519 key (RFC 8410 section 7): a fixed prefix and the seed.
        let mut key = vec![
            0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22,
            0x04, 0x20,
        ];
        key.extend_from_slice(secret);
        Credentials {
            certificate: Some(certificate.to_vec()),
            key,
        }
    }

    /// Somebody who shows nothing.
    pub fn none() -> Credentials {
        Credentials {
            certificate: None,
            key: Vec::new(),
        }
    }

    fn certified(&self) -> Result<Option<Arc<SingleCertAndKey>>, Error> {
        let Some(certificate) = self.certificate.clone() else {
            return Ok(None);
        };
        let key = ring::sign::any_supported_type(&PrivatePkcs8KeyDer::from(&self.key[..]).into())?;
        let certified = CertifiedKey::new(vec![CertificateDer::from(certificate)], key);
        Ok(Some(Arc::new(SingleCertAndKey::from(certified))))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// TLS of somebody who connects, and takes whoever answers.
///
/// # Errors
/// If the key is of no use.
pub fn connector(credentials: &Credentials) -> Result<TlsConnector, Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone));
    let mut config = match credentials.certified()? {
        None => builder.with_no_client_auth(),
        Some(certified) => builder.with_client_cert_resolver(certified),
    };
    config.enable_sni = false;
    Ok(TlsConnector::from(Arc::new(config)))
}

/// TLS of somebody who listens, and asks nobody who he is.
///
/// # Errors
/// If there is no certificate, or the key is of no use.
pub fn acceptor(credentials: &Credentials) -> Result<TlsAcceptor, Error> {
    let certified = credentials.certified()?;
    let certified = certified.ok_or_else(|| Error::General("no certificate to show".to_owned()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(certified);
    Ok(TlsAcceptor::from(Arc::new(config)))
}
