//! Files that are there whole or not at all, also after the power was cut: the contents reach
//! the disk before the name does, and the name before the call returns.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Writes a file, in place of one that may be there. `mode` is for its permissions.
///
/// # Errors
/// What the file system says; then the file is what it was.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let draft = Draft::filled(path, bytes, mode)?;
    fs::rename(&draft.path, path)?;
    sync_folder(folder_of(path))
}

/// Writes a file that must not exist yet.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if there is something at `path`, which then stays as it is;
/// else what the file system says.
pub fn create(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    Draft::filled(path, bytes, mode)?.publish(path)
}

/// Makes a folder and what is missing above it, so that they outlast a power cut.
///
/// # Errors
/// What the file system says.
pub fn make_folder(path: &Path, mode: u32) -> io::Result<()> {
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        .collect();
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    for made in missing {
        sync_folder(folder_of(made))?;
    }
    Ok(())
}

/// Makes what was named, renamed or removed in a folder durable, where the file system can.
///
/// # Errors
/// If it tried and failed.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error)
            if !matches!(
                error.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
            ) =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// A file beside its future name, removed when dropped.
pub(crate) struct Draft {
    pub(crate) path: PathBuf,
}

impl Draft {
    /// An empty one of these permissions.
    pub(crate) fn beside(target: &Path, mode: u32) -> io::Result<(Self, File)> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let tag = getrandom::u64().map_err(io::Error::from)?;
        let mut draft = std::ffi::OsString::from(".");
        draft.push(name);
        draft.push(format!("-{tag:016x}.tmp"));
        let path = folder_of(target).join(draft);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)?;
        Ok((Self { path }, file))
    }

    fn filled(target: &Path, bytes: &[u8], mode: u32) -> io::Result<Self> {
        let (draft, mut file) = Self::beside(target, mode)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(draft)
    }

    /// Gives it its name, which must be free: its content is on the disk.
    pub(crate) fn publish(self, target: &Path) -> io::Result<()> {
        // A hard link is the one portable way to put a finished file at a name that must be free:
        // a rename would replace what is there.
        fs::hard_link(&self.path, target)?;
        drop(self);
        sync_folder(folder_of(target))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After a rename it is gone, and nothing can be done about a failure here.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        replace(&path, b"one", 0o600).unwrap();
        replace(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_there_is_never_overwritten_by_a_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/a");
        make_folder(path.parent().unwrap(), 0o700).unwrap();
        create(&path, b"one", 0o644).unwrap();
        let error = create(&path, b"two", 0o644).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
