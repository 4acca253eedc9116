//! TLS without checks: any certificate with any key, and any peer.

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

/// Accepts any server: the host's checks are under test, not the peer's.
#[derive(Debug)]
struct AcceptAnyServer;

impl ServerCertVerifier for AcceptAnyServer {
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

/// Credentials that a peer presents in the TLS handshake.
#[derive(Clone)]
pub struct Credentials {
    /// Certificate (public), if the peer presents one.
    pub certificate: Option<Vec<u8>>,
    /// PKCS #8 key that signs the handshake; it need not belong to the certificate.
    pub key: Vec<u8>,
}

impl Credentials {
    /// Valid credentials of a node.
    ///
    /// # Panics
    /// If the certificate cannot be made.
    #[allow(clippy::expect_used, reason = "for tests")]
    pub fn of(secret: &[u8; 32]) -> Credentials {
        let identity = Identity::from_secret(secret).expect("a certificate");
        Credentials::forged(identity.certificate(), secret)
    }

    /// Certificate, and an Ed25519 secret that need not belong to it.
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

    /// No certificate.
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

/// TLS client that accepts any server.
///
/// # Errors
/// The key is unusable.
pub fn connector(credentials: &Credentials) -> Result<TlsConnector, Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyServer));
    let mut config = match credentials.certified()? {
        None => builder.with_no_client_auth(),
        Some(certified) => builder.with_client_cert_resolver(certified),
    };
    config.enable_sni = false;
    Ok(TlsConnector::from(Arc::new(config)))
}

/// TLS server that asks for no client certificate.
///
/// # Errors
/// The certificate is missing, or the key is unusable.
pub fn acceptor(credentials: &Credentials) -> Result<TlsAcceptor, Error> {
    let certified = credentials.certified()?;
    let certified = certified.ok_or_else(|| Error::General("no certificate to show".to_owned()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(certified);
    Ok(TlsAcceptor::from(Arc::new(config)))
}
