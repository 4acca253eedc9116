//! The attacker's TLS: a proper certificate over a key of its own, and no interest in the host's.

use std::sync::Arc;

use hearthnet_bus::NodeKey;
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use tokio_rustls::TlsConnector;

use crate::Trouble;

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

/// TLS as the node that holds `key`.
pub(super) fn connector(key: &NodeKey) -> Result<TlsConnector, Trouble> {
    let failed = |error: &dyn std::fmt::Display| Trouble::Attacker(format!("TLS: {error}"));
    let identity = key.identity().map_err(|error| failed(&error))?;
    let certificate = CertificateDer::from(identity.certificate().to_vec());
    // PKCS #8 version 1 of an Ed25519 key (RFC 8410 section 7): a fixed prefix and the seed.
    let mut pkcs8 = vec![
        0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04,
        0x20,
    ];
    pkcs8.extend_from_slice(key.secret().as_slice());
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(pkcs8));
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| failed(&error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone))
        .with_client_auth_cert(vec![certificate], private)
        .map_err(|error| failed(&error))?;
    config.enable_sni = false;
    Ok(TlsConnector::from(Arc::new(config)))
}
