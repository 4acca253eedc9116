//! A node key on disk.
//!
//! The file holds one line of text: `ed25519-secret:` and the base64url of the 32 secret bytes. The
//! prefix tells a reader that the content is secret. The file is written atomically and is readable
//! by its owner only. A file that others can read is refused, because its secret may be known.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hearthnet_platform::files;
use hearthnet_platform::whole_file::{self, Access};
use zeroize::Zeroizing;

use crate::{NodeKey, RandomnessError};

/// Prefix of the file's only line.
const PREFIX: &str = "ed25519-secret:";
/// Bytes read of any file before it is checked; a key file has 59.
const MAX_FILE_BYTES: u64 = 256;

/// Reason why a key file could not be read or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyFileError {
    #[error("there is no node key at {}; start once without naming it, or copy the key there", path.display())]
    NotFound { path: PathBuf },
    /// The path is a symbolic link, which could point to any file.
    #[error("the node key {} is a symbolic link; name the file itself", path.display())]
    SymbolicLink { path: PathBuf },
    /// The path is a folder, pipe, device or socket.
    #[error("the node key {} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    /// The file belongs to another user, who can read and replace it.
    #[error("the node key {} belongs to another user (uid {owner}); make a key of your own", path.display())]
    Owner {
        path: PathBuf,
        /// User id of the owner.
        owner: u32,
    },
    /// Group or others may read or write the file.
    #[error(
        "the node key {} is open to other users (mode {mode:03o}), so its secret may be known; \
         delete it to get a new identity, or, if you are sure that nobody read it, chmod 600 it",
        path.display()
    )]
    Permissions {
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// Group or others may write to the folder and could replace the key.
    #[error("other users may write to {} (mode {mode:03o}), which holds a secret key", folder.display())]
    Folder {
        folder: PathBuf,
        /// Permission bits of the folder.
        mode: u32,
    },
    /// The content is not one line with one key.
    #[error(
        "{} is not a node key (expected one line, \"ed25519-secret:\" and 43 characters); \
         restore it from a copy, or move it away to get a new identity",
        path.display()
    )]
    Format { path: PathBuf },
    /// A file system operation failed.
    #[error("could not {action} the node key {}: {source}", path.display())]
    Io {
        /// The failed operation, as a verb for the message.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The system provided no randomness for a new key.
    #[error(transparent)]
    Randomness(#[from] RandomnessError),
}

impl NodeKey {
    /// Reads a key file.
    ///
    /// # Errors
    /// Every variant of [`KeyFileError`] but `Randomness`. A file that is a link, belongs to
    /// another user or is open to others is refused before its content is used.
    pub fn load(path: &Path) -> Result<Self, KeyFileError> {
        private_folder(path)?;
        let file = open_private(path)?;
        let mut text = Zeroizing::new(String::with_capacity(MAX_FILE_BYTES as usize));
        match file.take(MAX_FILE_BYTES).read_to_string(&mut text) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                return Err(KeyFileError::Format { path: path.into() });
            }
            Err(e) => return Err(io_error("read", path, e)),
        }
        let secret = parse(&text).ok_or_else(|| KeyFileError::Format { path: path.into() })?;
        Ok(Self::from_secret(&secret))
    }

    /// Reads a key file, or generates a key and writes it there (mode 0600; missing folders get
    /// mode 0700). Processes that do this at the same time all return the same key.
    ///
    /// # Errors
    /// As [`NodeKey::load`], except for the missing file. If a new key cannot be written
    /// completely, no file is left behind.
    pub fn load_or_create(path: &Path) -> Result<Self, KeyFileError> {
        match Self::load(path) {
            Err(KeyFileError::NotFound { .. }) => {}
            loaded => return loaded,
        }
        let key = Self::generate()?;
        match key.write_new(path) {
            Ok(()) => Ok(key),
            // Another process created the file first: use its key.
            Err(KeyFileError::Io { source, .. })
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                Self::load(path)
            }
            Err(e) => Err(e),
        }
    }

    /// Writes the key to a file that must not exist yet.
    ///
    /// # Errors
    /// [`KeyFileError::Io`]; with [`io::ErrorKind::AlreadyExists`] if `path` exists, which then
    /// stays unchanged.
    pub fn write_new(&self, path: &Path) -> Result<(), KeyFileError> {
        whole_file::make_folder(whole_file::folder_of(path), Access::Owner)
            .map_err(|e| io_error("make the folder of", path, e))?;
        private_folder(path)?;
        let secret = self.secret();
        let mut text = Zeroizing::new(String::with_capacity(MAX_FILE_BYTES as usize));
        text.push_str(PREFIX);
        URL_SAFE_NO_PAD.encode_string(secret.as_slice(), &mut text);
        text.push('\n');

        whole_file::create(path, text.as_bytes(), Access::Owner)
            .map_err(|e| io_error("write", path, e))
    }
}

/// Refuses a folder in which other users can replace the key.
fn private_folder(path: &Path) -> Result<(), KeyFileError> {
    let folder = whole_file::folder_of(path);
    match files::writable_by_others(folder) {
        None => Ok(()),
        Some(mode) => Err(KeyFileError::Folder {
            folder: folder.into(),
            mode,
        }),
    }
}

/// Opens a file that only its owner, this user, can read.
fn open_private(path: &Path) -> Result<File, KeyFileError> {
    let file = files::open_no_link(path).map_err(|e| {
        if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(path).is_err() {
            KeyFileError::NotFound { path: path.into() }
        } else if fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink()) {
            KeyFileError::SymbolicLink { path: path.into() }
        } else {
            io_error("open", path, e)
        }
    })?;
    let meta = file.metadata().map_err(|e| io_error("inspect", path, e))?;
    if !meta.is_file() {
        return Err(KeyFileError::NotAFile { path: path.into() });
    }
    if let Some(owner) = files::foreign_owner(&meta) {
        return Err(KeyFileError::Owner {
            path: path.into(),
            owner,
        });
    }
    if let Some(mode) = files::open_to_others(&meta) {
        return Err(KeyFileError::Permissions {
            path: path.into(),
            mode,
        });
    }
    Ok(file)
}

fn parse(text: &str) -> Option<Zeroizing<[u8; 32]>> {
    let line = text.strip_suffix('\n').unwrap_or(text);
    let encoded = line.strip_prefix(PREFIX)?;
    let bytes = Zeroizing::new(URL_SAFE_NO_PAD.decode(encoded).ok()?);
    let secret: &[u8; 32] = bytes.as_slice().try_into().ok()?;
    Some(Zeroizing::new(*secret))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> KeyFileError {
    KeyFileError::Io {
        action,
        path: path.into(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;
    use crate::testing::key;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn write(path: &Path, content: impl AsRef<[u8]>, mode: u32) {
        fs::write(path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn text_of(key: &NodeKey) -> String {
        format!(
            "{PREFIX}{}\n",
            URL_SAFE_NO_PAD.encode(key.secret().as_slice())
        )
    }

    #[test]
    fn a_folder_that_others_may_write_to_holds_no_key() {
        let dir = folder();
        let path = dir.path().join("key");
        let mode =
            |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        for open in [0o777, 0o1777, 0o770, 0o702] {
            mode(open);
            let refused = NodeKey::load_or_create(&path).unwrap_err();
            assert!(matches!(refused, KeyFileError::Folder { mode, .. } if mode == open));
            assert!(!path.exists());
        }
        mode(0o755);
        NodeKey::load_or_create(&path).unwrap();
        mode(0o777);
        let refused = NodeKey::load(&path);
        assert!(matches!(refused, Err(KeyFileError::Folder { .. })));
    }

    #[test]
    fn a_made_key_is_private_and_comes_back() {
        let dir = folder();
        let path = dir.path().join("deep/er/node.key");
        let made = NodeKey::load_or_create(&path).unwrap();
        for (path, mode) in [(&path, 0o600), (&dir.path().join("deep"), 0o700)] {
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, mode);
        }
        assert_eq!(NodeKey::load_or_create(&path).unwrap().id(), made.id());
        assert_eq!(NodeKey::load(&path).unwrap().id(), made.id());
        // The folder holds only the key.
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn loading_alone_never_makes_a_key() {
        let path = folder().path().join("node.key");
        let missing = NodeKey::load(&path);
        assert!(matches!(missing, Err(KeyFileError::NotFound { .. })));
        assert!(!path.exists());
    }

    #[test]
    fn a_key_that_others_can_read_is_refused_and_left_alone() {
        let dir = folder();
        let path = dir.path().join("node.key");
        let text = text_of(&key(9));
        for mode in [0o604, 0o640, 0o602, 0o620, 0o644, 0o610] {
            write(&path, &text, mode);
            let error = NodeKey::load_or_create(&path).unwrap_err();
            assert!(matches!(error, KeyFileError::Permissions { mode: m, .. } if m == mode));
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        write(&path, &text, 0o400);
        assert!(NodeKey::load(&path).is_ok());
    }

    #[test]
    fn a_link_is_refused_even_to_a_good_key_or_to_nothing() {
        let dir = folder();
        let [real, target] = ["real", "target"].map(|name| dir.path().join(name));
        NodeKey::load_or_create(&real).unwrap();
        for (name, to) in [("link", &real), ("dangling", &target)] {
            let link = dir.path().join(name);
            std::os::unix::fs::symlink(to, &link).unwrap();
            let refused = NodeKey::load_or_create(&link);
            assert!(matches!(refused, Err(KeyFileError::SymbolicLink { .. })));
        }
        assert!(!target.exists());
    }

    #[test]
    fn a_folder_or_pipe_is_refused_without_blocking() {
        let dir = folder();
        let [inner, pipe] = ["folder", "pipe"].map(|name| dir.path().join(name));
        fs::create_dir(&inner).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [inner, pipe] {
            let refused = NodeKey::load(&path);
            assert!(matches!(refused, Err(KeyFileError::NotAFile { .. })));
        }
    }

    #[test]
    fn garbage_and_wrong_lengths_are_refused_with_a_way_out() {
        let dir = folder();
        let path = dir.path().join("node.key");
        let good = text_of(&key(9));
        let long = format!("{}{}", good.trim_end(), "A".repeat(400));
        let (short, twice) = (&good[..good.len() - 2], good.repeat(2));
        let texts = ["", "\n", "garbage", short, &long, &twice].map(str::as_bytes);
        for bytes in texts.into_iter().chain([&[0xff; 59][..]]) {
            write(&path, bytes, 0o600);
            let error = NodeKey::load_or_create(&path).unwrap_err();
            let is_format = matches!(error, KeyFileError::Format { .. });
            assert!(is_format, "{bytes:?}: {error}");
            assert!(error.to_string().contains("new identity"));
        }
    }

    #[test]
    fn an_existing_key_is_never_replaced() {
        let dir = folder();
        let path = dir.path().join("node.key");
        let first = NodeKey::load_or_create(&path).unwrap();
        let error = key(1).write_new(&path).unwrap_err();
        assert!(matches!(error, KeyFileError::Io { source, .. }
            if source.kind() == io::ErrorKind::AlreadyExists));
        assert_eq!(NodeKey::load(&path).unwrap().id(), first.id());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn processes_that_start_together_agree_on_one_key() {
        let dir = folder();
        let path = dir.path().join("node.key");
        let ids: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| NodeKey::load_or_create(&path).unwrap().id()))
                .collect();
            starts.into_iter().map(|s| s.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]));
    }
}
