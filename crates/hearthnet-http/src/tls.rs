//! TLS of the listener, with the user's certificate. TLS 1.3 only, as between nodes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_platform::regular_file;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use rustls::{Error, ServerConfig};
use tokio_rustls::TlsAcceptor;
use zeroize::Zeroizing;

use crate::watched::Watched;

/// Longest PEM file, in bytes: far more than any chain of certificates.
const MAX_BYTES: u64 = 1 << 20;

/// Why a certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file holds no certificate, or a damaged one.
    #[error("{} holds no certificate in PEM form", .0.display())]
    NoCertificate(PathBuf),
    /// The file holds no private key, or a damaged one.
    #[error("{} holds no private key in PEM form", .0.display())]
    NoKey(PathBuf),
    /// The key is encrypted with a passphrase.
    #[error("the private key in {} is encrypted", .0.display())]
    Encrypted(PathBuf),
    /// The key does not belong to the first certificate.
    #[error("the private key in {} does not belong to the first certificate in {}", key.display(), certificate.display())]
    OtherKey { certificate: PathBuf, key: PathBuf },
    /// The certificate or the key has a form that is not supported.
    #[error("{} and {} cannot be used: {source}", certificate.display(), key.display())]
    Unusable {
        certificate: PathBuf,
        key: PathBuf,
        /// Reason of the TLS library.
        source: Error,
    },
}

impl TlsError {
    /// What would help.
    pub fn hint(&self) -> String {
        match self {
            Self::File { .. } => {
                "the user that runs HearthNet must be able to read both files".to_owned()
            }
            Self::NoCertificate(_) => {
                "the file must hold the chain: BEGIN CERTIFICATE, this server's own certificate first".to_owned()
            }
            Self::NoKey(_) => {
                "the file must hold one key: BEGIN PRIVATE KEY, BEGIN EC PRIVATE KEY or BEGIN RSA PRIVATE KEY".to_owned()
            }
            Self::Encrypted(path) => format!(
                "decrypt it: (umask 077; openssl pkey -in {} -out plain.key)",
                path.display()
            ),
            Self::OtherKey { certificate, key } => format!(
                "put this server's own certificate first; these must print the same: openssl x509 -in {} -noout -pubkey; openssl pkey -in {} -pubout",
                certificate.display(),
                key.display()
            ),
            Self::Unusable { .. } => {
                "use a certificate of version 3 with an ECDSA P-256, Ed25519 or RSA key of 2048 bits or more".to_owned()
            }
        }
    }
}

/// Certificate chain and key in PEM files. They are read again for the next connection when one of
/// them has changed. Clones share them.
#[derive(Clone)]
pub struct Tls(Arc<Watched<ServerConfig, TlsError>>);

impl Tls {
    /// # Errors
    /// [`TlsError`].
    pub fn open(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let paths = vec![certificate.to_owned(), key.to_owned()];
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        let read = move || config(&certificate, &key);
        Ok(Self(Arc::new(Watched::new(paths, Box::new(read))?)))
    }

    /// Acceptor with the certificate of now.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let config = self.0.get(|error| {
            tracing::warn!(
                "the earlier TLS certificate remains in use: {error}; {}",
                error.hint()
            );
        });
        TlsAcceptor::from(config)
    }
}

/// Omits the key.
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

fn config(certificate: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let (certificate, key) = (certificate.to_owned(), key.to_owned());
    let chain = CertificateDer::pem_slice_iter(&contents(&certificate)?)
        .collect::<Result<Vec<_>, _>>()
        .unwrap_or_default();
    if chain.is_empty() {
        return Err(TlsError::NoCertificate(certificate));
    }
    let pem = Zeroizing::new(contents(&key)?);
    let Ok(secret) = PrivateKeyDer::from_pem_slice(&pem) else {
        let encrypted = b"-----BEGIN ENCRYPTED PRIVATE KEY";
        let is_encrypted = pem.windows(encrypted.len()).any(|words| words == encrypted);
        return Err(match is_encrypted {
            true => TlsError::Encrypted(key),
            false => TlsError::NoKey(key),
        });
    };
    let built = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, secret)
        });
    match built {
        Ok(mut config) => {
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Ok(config)
        }
        Err(Error::InconsistentKeys(_)) => Err(TlsError::OtherKey { certificate, key }),
        Err(source) => Err(TlsError::Unusable {
            certificate,
            key,
            source,
        }),
    }
}

fn contents(path: &Path) -> Result<Vec<u8>, TlsError> {
    regular_file::read(path, MAX_BYTES).map_err(|source| TlsError::File {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    fn pem(label: &str, bytes: &[u8]) -> String {
        let text = STANDARD.encode(bytes);
        format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
    }

    /// Writes a new certificate for `hearth.example` and its key.
    pub(crate) fn pair(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let names = vec!["hearth.example".to_owned()];
        let certificate = CertificateParams::new(names)
            .unwrap()
            .self_signed(&key)
            .unwrap();
        let paths = ["crt", "key"].map(|end| dir.join(format!("{name}.{end}")));
        fs::write(&paths[0], pem("CERTIFICATE", certificate.der())).unwrap();
        fs::write(&paths[1], pem("PRIVATE KEY", &key.serialize_der())).unwrap();
        let [certificate, key] = paths;
        (certificate, key)
    }

    #[test]
    fn a_pair_is_used_and_a_wrong_one_is_refused_with_what_helps() {
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = pair(dir.path(), "a");
        let (_, other) = pair(dir.path(), "b");
        let tls = Tls::open(&certificate, &key).unwrap();
        assert_eq!(tls.acceptor().config().alpn_protocols, [b"http/1.1"]);
        let refused = |certificate: &Path, key: &Path| Tls::open(certificate, key).unwrap_err();
        let mixed = refused(&certificate, &other);
        assert!(matches!(mixed, TlsError::OtherKey { .. }), "{mixed}");
        assert!(mixed.hint().contains("openssl x509"));
        let swapped = refused(&key, &certificate);
        assert!(matches!(swapped, TlsError::NoCertificate(_)), "{swapped}");
        let twice = refused(&certificate, &certificate);
        assert!(matches!(twice, TlsError::NoKey(_)), "{twice}");
        let sealed = dir.path().join("sealed.key");
        let text =
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII=\n-----END ENCRYPTED PRIVATE KEY-----\n";
        fs::write(&sealed, text).unwrap();
        let sealed = refused(&certificate, &sealed);
        assert!(matches!(sealed, TlsError::Encrypted(_)), "{sealed}");
        let missing = refused(&certificate, &dir.path().join("missing"));
        assert!(matches!(missing, TlsError::File { .. }), "{missing}");
    }

    #[test]
    fn a_renewed_pair_is_used_for_the_next_connection_and_half_of_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = pair(dir.path(), "a");
        let (next_certificate, next_key) = pair(dir.path(), "b");
        let tls = Tls::open(&certificate, &key).unwrap();
        let first = tls.acceptor();
        let is_first = |acceptor: &TlsAcceptor| Arc::ptr_eq(first.config(), acceptor.config());
        assert!(is_first(&tls.acceptor()));
        fs::rename(next_certificate, &certificate).unwrap();
        assert!(is_first(&tls.acceptor()));
        fs::rename(next_key, &key).unwrap();
        assert!(!is_first(&tls.acceptor()));
    }
}
