//! Proof that this user's programs wrote some bytes on this machine: HMAC-SHA-256 (RFC 2104) under
//! a key that never leaves the machine.
//!
//! The key (`record.key`, 32 random bytes, mode 0600) lies in this program's directory of the
//! user's cache, and is made on first use. Without it, all records are invalid and files are read
//! again, once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_platform::files::open_to_others;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::cache;

/// Length of a seal in bytes.
pub(super) const MAC_BYTES: usize = 32;
const KEY_BYTES: usize = 32;
const KEY_FILE: &str = "record.key";

/// Seal of some bytes; `None` if no key can be stored. Then records are neither trusted nor
/// written.
pub(super) fn seal(bytes: &[u8]) -> Option<[u8; MAC_BYTES]> {
    under(&key(&cache::directory().ok()?).ok()?, bytes)
}

/// Path of the key, which is made if it is missing. A sandboxed process needs access to this file.
/// `None` if no key can be stored.
pub fn record_key() -> Option<PathBuf> {
    let directory = cache::directory().ok()?;
    key(&directory).ok()?;
    Some(directory.join(KEY_FILE))
}

fn under(key: &[u8; KEY_BYTES], bytes: &[u8]) -> Option<[u8; MAC_BYTES]> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
    mac.update(b"hearthnet record 1");
    mac.update(bytes);
    Some(mac.finalize().into_bytes().into())
}

/// Reads the key in a directory; makes one if there is none that only its user can read.
fn key(directory: &Path) -> io::Result<[u8; KEY_BYTES]> {
    let path = directory.join(KEY_FILE);
    if let Some(key) = read(&path) {
        return Ok(key);
    }
    fs::create_dir_all(directory)?;
    let mut key = [0; KEY_BYTES];
    getrandom::fill(&mut key).map_err(io::Error::other)?;
    // Temporary and final file are readable for the user only; the rename publishes a whole key.
    // A key that others could read, or an invalid one, is replaced; one that another process made
    // in the meantime stays.
    if path.exists() {
        whole_file::replace(&path, &key, Access::Owner)?;
    } else if let Err(error) = whole_file::create(&path, &key, Access::Owner)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    read(&path).ok_or_else(|| io::Error::other("the key cannot be read"))
}

fn read(path: &Path) -> Option<[u8; KEY_BYTES]> {
    if open_to_others(&fs::metadata(path).ok()?).is_some() {
        return None;
    }
    regular_file::read(path, KEY_BYTES as u64)
        .ok()?
        .try_into()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_key_and_another_has_another() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let made = key(&one.path().join("new")).unwrap();
        assert_eq!(key(&one.path().join("new")).unwrap(), made);
        let foreign = key(other.path()).unwrap();
        assert_ne!(under(&made, b"record"), under(&foreign, b"record"));
        assert_ne!(under(&made, b"record"), under(&made, b"recorD"));
    }

    #[cfg(unix)]
    #[test]
    fn a_key_readable_by_others_is_replaced() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(KEY_FILE);
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let made = key(directory.path()).unwrap();
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_ne!(key(directory.path()).unwrap(), made);
        assert_eq!(mode(), 0o600);
        fs::write(&path, "short").unwrap();
        assert_eq!(key(directory.path()).unwrap().len(), KEY_BYTES);
    }
}
