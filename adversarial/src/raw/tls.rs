//! The attacker's TLS: any certificate, any key, and no interest in those of the host.

use std::sync::Arc;

use hearthnet_bus::NodeKey;
use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::HarnessError;

/// Takes whoever answers: it is the host's business to be careful.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// What a peer shows of itself in the TLS handshake.
#[derive(Clone, Copy, Debug)]
pub struct Papers<'a> {
    /// Whose certificate it shows, if any.
    pub certificate_of: Option<&'a NodeKey>,
    /// The key that it signs the handshake with.
    pub signed_by: &'a NodeKey,
}

impl<'a> Papers<'a> {
    /// The papers of a node that is who it says.
    pub fn of(key: &'a NodeKey) -> Papers<'a> {
        Papers {
            certificate_of: Some(key),
            signed_by: key,
        }
    }
}

/// Shows a certificate to whoever asks, whether or not its key is the one that signs.
#[derive(Debug)]
struct Show(Option<Arc<CertifiedKey>>);

impl ResolvesClientCert for Show {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        self.0.clone()
    }

    fn has_certs(&self) -> bool {
        self.0.is_some()
    }
}

/// What somebody who listens shows: a certificate, and the key that signs the handshake, which
/// need not be the certificate's.
#[derive(Debug)]
pub struct Shown {
    /// The certificate, which is no secret of anybody.
    pub certificate: Vec<u8>,
    /// The key.
    pub signed_by: NodeKey,
}

#[derive(Debug)]
struct ShowAll(Arc<CertifiedKey>);

impl ResolvesServerCert for ShowAll {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// TLS of somebody who listens, and asks nobody who he is.
pub(super) fn acceptor(shown: Shown) -> Result<TlsAcceptor, HarnessError> {
    let certificate = CertificateDer::from(shown.certificate);
    let certified = CertifiedKey::new(vec![certificate], signer(&shown.signed_by)?);
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| HarnessError::Attacker(format!("TLS: {error}")))?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(ShowAll(Arc::new(certified))));
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn signer(key: &NodeKey) -> Result<Arc<dyn SigningKey>, HarnessError> {
    // PKCS #8 version 1 of an Ed25519 key (RFC 8410 section 7): a fixed prefix and the seed.
    let mut pkcs8 = vec![
        0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04,
        0x20,
    ];
    pkcs8.extend_from_slice(key.secret().as_slice());
    ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8))
        .map_err(|error| HarnessError::Attacker(format!("TLS: {error}")))
}

/// TLS with these papers.
pub(super) fn connector(papers: Papers<'_>) -> Result<TlsConnector, HarnessError> {
    let failed = |error: &dyn std::fmt::Display| HarnessError::Attacker(format!("TLS: {error}"));
    let signer = signer(papers.signed_by)?;
    let shown = match papers.certificate_of {
        None => None,
        Some(key) => {
            let identity = key.identity().map_err(|error| failed(&error))?;
            let certificate = CertificateDer::from(identity.certificate().to_vec());
            Some(Arc::new(CertifiedKey::new(vec![certificate], signer)))
        }
    };
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| failed(&error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone))
        .with_client_cert_resolver(Arc::new(Show(shown)));
    config.enable_sni = false;
    Ok(TlsConnector::from(Arc::new(config)))
}
