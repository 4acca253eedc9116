//! The community's root key on disk: plain, or sealed with a passphrase.
//!
//! A sealed key is a line of JSON in place of the key's own line: format and version, the public
//! key, the key derivation (Argon2id, with its costs and salt), and the secret, encrypted with
//! XChaCha20-Poly1305. The other fields are authenticated with the secret, so that an attacker can
//! change neither the costs nor the key's id. The file has the permissions of any key file and is
//! checked like one.

use std::path::Path;

use argon2::{Algorithm, Argon2, Params, Version};
use chacha20poly1305::aead::{Aead as _, Payload};
use chacha20poly1305::{KeyInit as _, XChaCha20Poly1305};
use hearthnet_bus::{KeyFileError, NodeId, NodeKey};
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::cli::{Failure, Kind, failure};

/// Name and version of the only format.
const FORMAT: &str = "hearthnet-sealed-root-key-1";
/// Largest file that is read: a sealed key has about 500 bytes.
const MAX_BYTES: u64 = 4096;
/// Shortest passphrase, in characters. Argon2id makes guesses slow, but not few: shorter
/// passphrases are found even with slow guesses.
const LEAST_CHARS: usize = 8;

/// Costs of Argon2id: the second choice of RFC 9106 (section 4), for machines that cannot spare 2
/// GiB: 64 MiB, three passes, four lanes. About a second on a small board.
const COSTS: Costs = Costs {
    memory_kib: 64 * 1024,
    passes: 3,
    lanes: 4,
};
/// Highest costs that a file may demand, since it may come from an untrusted backup: 1 GiB, and
/// about a minute.
const MOST: Costs = Costs {
    memory_kib: 1024 * 1024,
    passes: 16,
    lanes: 16,
};

/// Content of a root key file.
#[derive(Debug)]
pub(crate) enum RootKey {
    /// Unprotected key.
    Plain(NodeKey),
    /// Key that needs the passphrase.
    Sealed(Sealed),
}

/// Encrypted key in the format of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sealed {
    header: Header,
    /// Encrypted secret of 32 bytes, and the tag over it and the header.
    #[serde(with = "hex")]
    secret: Vec<u8>,
}

/// Unencrypted fields of a sealed key.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    /// Public key, which is the community's id.
    key: NodeId,
    argon2id: Costs,
    #[serde(with = "hex")]
    salt: [u8; 16],
    #[serde(with = "hex")]
    nonce: [u8; 24],
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Costs {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

impl RootKey {
    /// Reads a root key file; `None` if it does not exist.
    ///
    /// # Errors
    /// Returns an error as for any key file, or if the file holds neither a key nor a sealed one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, Failure> {
        let error = match NodeKey::load(path) {
            Ok(key) => return Ok(Some(Self::Plain(key))),
            Err(KeyFileError::NotFound { .. }) => return Ok(None),
            Err(error) => error,
        };
        // The file is private to this user, but holds no plain key.
        if let KeyFileError::Format { .. } = error
            && let Some(sealed) = Sealed::read(path)
        {
            return Ok(Some(Self::Sealed(sealed)));
        }
        if let KeyFileError::Folder { .. } = error {
            return Err(crate::home::paths::key_failure(&error));
        }
        Err(Failure::new(Kind::Refused, error.to_string())
            .hint("restore root.key from a copy: the community depends on it"))
    }

    pub(crate) fn id(&self) -> NodeId {
        match self {
            Self::Plain(key) => key.id(),
            Self::Sealed(sealed) => sealed.header.key,
        }
    }

    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self, Self::Sealed(_))
    }

    /// Returns the secret key.
    ///
    /// # Errors
    /// Returns `wrong_passphrase` if the passphrase does not open the key.
    pub(crate) fn open(self, passphrase: Option<&str>) -> Result<NodeKey, Failure> {
        match (self, passphrase) {
            (Self::Plain(key), _) => Ok(key),
            (Self::Sealed(sealed), Some(passphrase)) => sealed.open(passphrase),
            (Self::Sealed(_), None) => Err(Failure::new(
                Kind::Host,
                "the root key is sealed with a passphrase, and none was given",
            )
            .code("wrong_passphrase")
            .hint("repeat the command at a terminal, or with --passphrase-file")),
        }
    }
}

/// Writes a root key, sealed if there is a passphrase, and replaces the existing one.
///
/// # Errors
/// Returns an error if the passphrase is too short, or if the file cannot be written; the old file
/// is then unchanged.
pub(crate) fn write(path: &Path, key: &NodeKey, passphrase: Option<&str>) -> Result<(), Failure> {
    let fail = |e: &dyn std::fmt::Display| Failure::file("write", path, e);
    if let Some(passphrase) = passphrase {
        let text = Sealed::seal(key, passphrase)?;
        return whole_file::replace(path, text.as_bytes(), Access::Owner).map_err(|e| fail(&e));
    }
    let draft = path.with_extension("key.new");
    // Left over from an interrupted attempt.
    let _ = std::fs::remove_file(&draft);
    key.write_new(&draft).map_err(|e| fail(&e))?;
    std::fs::rename(&draft, path).map_err(|e| fail(&e))?;
    whole_file::sync_folder(whole_file::folder_of(path)).map_err(|e| fail(&e))
}

/// Checks the length of a passphrase.
pub(crate) fn check(passphrase: &str) -> Result<(), Failure> {
    match passphrase.chars().count() >= LEAST_CHARS {
        true => Ok(()),
        false => Err(
            failure!(Config, "a passphrase has at least {LEAST_CHARS} characters")
                .hint("four or five unrelated words are easy to remember"),
        ),
    }
}

impl Sealed {
    fn seal(key: &NodeKey, passphrase: &str) -> Result<String, Failure> {
        check(passphrase)?;
        let (mut salt, mut nonce) = ([0; 16], [0; 24]);
        getrandom::fill(&mut salt).map_err(Failure::internal)?;
        getrandom::fill(&mut nonce).map_err(Failure::internal)?;
        let header = Header {
            format: FORMAT.to_owned(),
            key: key.id(),
            argon2id: COSTS,
            salt,
            nonce,
        };
        let secret = key.secret();
        let aad = header.bytes()?;
        let message = Payload {
            msg: secret.as_slice(),
            aad: &aad,
        };
        let sealed = header.cipher(passphrase)?.encrypt(&nonce.into(), message);
        let secret = sealed.map_err(|_| Failure::internal("the root key cannot be sealed"))?;
        let text = serde_json::to_string(&Self { header, secret }).map_err(Failure::internal)?;
        Ok(text + "\n")
    }

    /// Returns `None` if the file has another format.
    fn read(path: &Path) -> Option<Self> {
        let text = regular_file::read(path, MAX_BYTES).ok()?;
        let sealed: Self = serde_json::from_slice(&text).ok()?;
        (sealed.header.format == FORMAT).then_some(sealed)
    }

    fn open(&self, passphrase: &str) -> Result<NodeKey, Failure> {
        let aad = self.header.bytes()?;
        let message = Payload {
            msg: &self.secret,
            aad: &aad,
        };
        let cipher = self.header.cipher(passphrase)?;
        let secret = cipher.decrypt(&self.header.nonce.into(), message);
        let secret = secret.ok().map(Zeroizing::new);
        let secret = secret.as_ref().and_then(|secret| secret.first_chunk());
        secret.map(NodeKey::from_secret).ok_or_else(|| {
            Failure::new(
                Kind::Host,
                "the root key is sealed with another passphrase, or its file is damaged",
            )
            .code("wrong_passphrase")
            .hint("try again; the key cannot be opened without its passphrase")
        })
    }
}

impl Header {
    /// Bytes that are authenticated with the secret.
    fn bytes(&self) -> Result<Vec<u8>, Failure> {
        serde_json::to_vec(self).map_err(Failure::internal)
    }

    fn cipher(&self, passphrase: &str) -> Result<XChaCha20Poly1305, Failure> {
        let costs = self.argon2id;
        let refuse = |why: &dyn std::fmt::Display| {
            failure!(Host, "the sealed root key cannot be used: {why}")
                .code("bad_root_key")
                .hint("restore root.key from a copy")
        };
        if costs.memory_kib > MOST.memory_kib
            || costs.passes > MOST.passes
            || costs.lanes > MOST.lanes
        {
            return Err(refuse(
                &"it demands more memory or time than this program accepts",
            ));
        }
        let params = Params::new(costs.memory_kib, costs.passes, costs.lanes, Some(32));
        let argon2 = params.map(|params| Argon2::new(Algorithm::Argon2id, Version::V0x13, params));
        let mut key = Zeroizing::new([0; 32]);
        argon2
            .and_then(|argon2| {
                argon2.hash_password_into(passphrase.as_bytes(), &self.salt, &mut *key)
            })
            .map_err(|e| refuse(&e))?;
        Ok(XChaCha20Poly1305::new((&*key).into()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const WORDS: &str = "correct horse battery staple";

    #[test]
    fn a_sealed_key_opens_only_with_its_passphrase() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("root.key");
        assert!(RootKey::read(&path).unwrap().is_none());
        let key = NodeKey::generate().unwrap();
        write(&path, &key, Some(WORDS)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&hex::encode(key.secret().as_slice())));
        let read = || RootKey::read(&path).unwrap().unwrap();
        assert!(read().is_sealed());
        assert_eq!(read().id(), key.id());
        assert_eq!(read().open(Some(WORDS)).unwrap().id(), key.id());
        for wrong in [None, Some("Correct horse battery staple"), Some("")] {
            let refused = read().open(wrong).unwrap_err();
            assert!(refused.has_code("wrong_passphrase"), "{refused}");
        }
        write(&path, &key, None).unwrap();
        assert!(!read().is_sealed());
        assert_eq!(*read().open(None).unwrap().secret(), *key.secret());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_changed_sealed_key_does_not_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("root.key");
        let (key, other) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
        write(&path, &key, Some(WORDS)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let changed = |from: &str, to: &str| {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text);
            std::fs::write(&path, changed).unwrap();
            RootKey::read(&path).and_then(|read| read.unwrap().open(Some(WORDS)))
        };
        for (from, to) in [
            ("\"passes\":3", "\"passes\":2"),
            ("\"memory_kib\":65536", "\"memory_kib\":64"),
            (&key.id().to_string(), &other.id().to_string()),
            ("\"secret\":\"", "\"secret\":\"00"),
        ] {
            let refused = changed(from, to).unwrap_err();
            assert!(refused.has_code("wrong_passphrase"), "{from}: {refused}");
        }
        // Excessive costs are refused without an attempt.
        for (from, to) in [
            ("\"passes\":3", "\"passes\":4000000000"),
            ("\"memory_kib\":65536", "\"memory_kib\":4000000000"),
        ] {
            assert!(changed(from, to).unwrap_err().has_code("bad_root_key"));
        }
        // Another version of the format is no key.
        assert_eq!(
            changed("key-1\"", "key-2\"").unwrap_err().kind,
            Kind::Refused
        );
    }

    #[test]
    fn a_passphrase_that_is_too_short_seals_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("root.key");
        let key = NodeKey::generate().unwrap();
        write(&path, &key, None).unwrap();
        assert_eq!(
            write(&path, &key, Some("horse")).unwrap_err().kind,
            Kind::Config
        );
        assert!(!RootKey::read(&path).unwrap().unwrap().is_sealed());
    }
}
