//! TLS profile: version 1.3, Ed25519 keys on both sides, authentication by key comparison only.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ed25519_dalek::{Signature, VerifyingKey};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::time_provider::TimeProvider;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, CommonState, DigitallySignedStruct, DistinguishedName, Error,
    OtherError, PeerMisbehaved, ServerConfig, SignatureScheme,
};

use super::admission::Admission;
use crate::NodeId;
use crate::code::{CloseCode, Violation};
use crate::identity::Identity;

/// Reason why the peer's certificate was refused. rustls prints it with `Debug`, so that is a
/// sentence.
#[derive(thiserror::Error)]
pub(crate) enum Refusal {
    /// The key is not the expected one.
    #[error("the peer holds another key than expected")]
    Mismatch { found: NodeId },
    /// The certificate is not a single Ed25519 certificate.
    #[error("{}", .0.detail)]
    Unusable(Violation),
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(refusal))))
    }
}

/// The error of rustls inside an error of a handshake, if there is one.
pub(crate) fn rustls_error(error: &std::io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// The refusal inside an error of a handshake, if there is one.
pub(crate) fn refusal_in(error: &std::io::Error) -> Option<&Refusal> {
    match rustls_error(error)? {
        Error::InvalidCertificate(CertificateError::Other(other)) => other.0.downcast_ref(),
        _ => None,
    }
}

/// Provider of ring, reduced to what this profile uses.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    // The verifiers below do all of the verification.
    provider.signature_verification_algorithms = WebPkiSupportedAlgorithms {
        all: &[],
        mapping: &[],
    };
    Arc::new(provider)
}

/// Key in the single certificate that a peer presents.
fn key_of(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<NodeId, Error> {
    if !intermediates.is_empty() {
        let chain = CloseCode::InvalidSignature.violation("a chain, not one certificate");
        return Err(Refusal::Unusable(chain).into());
    }
    NodeId::from_certificate(end_entity).map_err(|violation| Refusal::Unusable(violation).into())
}

/// Verifies the signature over the handshake with strict Ed25519: neither keys or points of small
/// order nor a second encoding of a signature pass.
fn verify_handshake(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    if signed.scheme != SignatureScheme::ED25519 {
        return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
    }
    let bad = || Error::InvalidCertificate(CertificateError::BadSignature);
    let key = NodeId::from_certificate(certificate).map_err(|_| bad())?;
    let key = VerifyingKey::from_bytes(key.as_bytes()).map_err(|_| bad())?;
    let signature = Signature::from_slice(signed.signature()).map_err(|_| bad())?;
    key.verify_strict(message, &signature).map_err(|_| bad())?;
    Ok(HandshakeSignatureValid::assertion())
}

/// Methods for signatures, equal in the traits of both verifiers.
macro_rules! signatures {
    () => {
        /// TLS 1.2 is not offered, but the trait requires the method.
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _cert: &CertificateDer<'_>,
            _dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_handshake(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }
    };
}

/// Accepts the host with one particular key, or without one, any host that proves its key.
#[derive(Debug)]
struct Expect(Option<NodeId>);

impl ServerCertVerifier for Expect {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let found = key_of(end_entity, intermediates)?;
        if self.0.is_some_and(|expected| found != expected) {
            return Err(Refusal::Mismatch { found }.into());
        }
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

struct Admit(Arc<dyn Admission>);

impl fmt::Debug for Admit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admit")
    }
}

impl ClientCertVerifier for Admit {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let key = key_of(end_entity, intermediates)?;
        if self.0.admit_peer(&key) {
            Ok(ClientCertVerified::assertion())
        } else {
            // Becomes the alert `access_denied`, which tells a caller why it was refused.
            Err(Error::InvalidCertificate(
                CertificateError::ApplicationVerificationFailure,
            ))
        }
    }

    signatures!();
}

/// Clock of the TLS sessions. This profile checks no dates: certificates only carry keys, and a
/// session grant has its own dates. The clock of rustls panics before 1970.
#[derive(Debug)]
struct AnyTime;

impl TimeProvider for AnyTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::ZERO))
    }
}

/// Client configuration for one expected key, or for any key.
pub(crate) fn client_config(
    identity: &Identity,
    expect: Option<NodeId>,
) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_details(provider(), Arc::new(AnyTime))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Expect(expect)))
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(identity.certified.clone())));
    config.enable_sni = false;
    config.enable_early_data = false;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Server configuration.
pub(crate) fn server_config(
    identity: &Identity,
    admission: Arc<dyn Admission>,
) -> Result<Arc<ServerConfig>, Error> {
    let mut config = ServerConfig::builder_with_details(provider(), Arc::new(AnyTime))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(Admit(admission)))
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(identity.certified.clone())));
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

/// Proved key of the TLS peer.
pub(crate) fn peer_of(connection: &CommonState) -> Option<NodeId> {
    let chain = connection.peer_certificates()?;
    NodeId::from_certificate(chain.first()?).ok()
}

/// Placeholder for the server name that rustls requires.
pub(crate) fn no_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into())
}
