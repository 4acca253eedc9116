//! A TLS client and WebSocket that keep no rules but their own: what an attacker has.

use std::sync::Arc;

use futures_util::{SinkExt, StreamExt};
use hearthnet_transport::wire::{Flags, FrameType, Header};
use hearthnet_transport::{Identity, Io, PATH};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message as WsMessage;

/// Believes everything.
#[derive(Debug)]
struct Gullible;

impl ServerCertVerifier for Gullible {
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

/// The PKCS #8 form of an Ed25519 secret.
pub(crate) fn pkcs8(secret: &[u8; 32]) -> PrivateKeyDer<'static> {
    let mut der = vec![
        0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20,
    ];
    der.extend_from_slice(secret);
    PrivatePkcs8KeyDer::from(der).into()
}

/// TLS with any certificate and key, or none.
pub(crate) async fn tls(
    io: Box<dyn Io>,
    auth: Option<(Vec<u8>, PrivateKeyDer<'static>)>,
) -> std::io::Result<TlsStream<Box<dyn Io>>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible));
    let config = match auth {
        // `with_client_auth_cert` would check that the two belong together.
        Some((certificate, key)) => {
            let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
            let chain = vec![CertificateDer::from(certificate)];
            let certified = rustls::sign::CertifiedKey::new(chain, key);
            let only = rustls::sign::SingleCertAndKey::from(certified);
            builder.with_client_cert_resolver(Arc::new(only))
        }
        None => builder.with_no_client_auth(),
    };
    let name = ServerName::try_from("any.example").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, io).await
}

/// An attacker after the WebSocket upgrade.
pub(crate) struct Raw {
    pub(crate) socket: WebSocketStream<TlsStream<Box<dyn Io>>>,
    sequence: u32,
}

impl Raw {
    pub(crate) async fn connect(io: Box<dyn Io>, identity: &Identity, secret: &[u8; 32]) -> Raw {
        Raw::connect_to(PATH, io, identity, secret).await
    }

    pub(crate) async fn connect_to(
        path: &str,
        io: Box<dyn Io>,
        identity: &Identity,
        secret: &[u8; 32],
    ) -> Raw {
        let auth = (identity.certificate().to_vec(), pkcs8(secret));
        let stream = tls(io, Some(auth)).await.unwrap();
        let url = format!("ws://host{path}");
        let (socket, _) = tokio_tungstenite::client_async(url, stream).await.unwrap();
        Raw {
            socket,
            sequence: 0,
        }
    }

    pub(crate) async fn frame(&mut self, kind: FrameType, body: &[u8]) {
        self.sequence += 1;
        let length = u32::try_from(body.len()).unwrap();
        let header = Header {
            kind,
            sequence: self.sequence,
            length,
            flags: Flags::NONE,
        };
        let mut message = header.encode().to_vec();
        message.extend_from_slice(body);
        self.send(WsMessage::Binary(message.into())).await;
    }

    pub(crate) async fn send(&mut self, message: WsMessage) {
        self.socket.send(message).await.unwrap();
    }

    /// Says HELLO and waits for the host's.
    pub(crate) async fn hello(&mut self, purpose: &str) {
        let mut body = vec![0xa2, 0x68];
        body.extend_from_slice(b"versions");
        body.extend_from_slice(&[0x81, 0x01, 0x67]);
        body.extend_from_slice(b"purpose");
        body.push(0x60 + u8::try_from(purpose.len()).unwrap());
        body.extend_from_slice(purpose.as_bytes());
        self.frame(FrameType::Hello, &body).await;
        let answer = self.socket.next().await.unwrap().unwrap();
        let WsMessage::Binary(answer) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(Header::decode(&answer).unwrap().0.kind, FrameType::Hello);
    }

    /// The WebSocket close code that the host ends with.
    pub(crate) async fn close_code(mut self) -> u16 {
        loop {
            match self.socket.next().await {
                Some(Ok(WsMessage::Close(Some(frame)))) => return frame.code.into(),
                Some(Ok(_)) => {}
                other => panic!("no close frame but {other:?}"),
            }
        }
    }
}
