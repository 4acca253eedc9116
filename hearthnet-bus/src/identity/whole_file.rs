//! Atomic, durable file writes: after a power cut a file is complete or absent. The content reaches
//! the disk before the name does, and the name before the call returns.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::Path;

use tempfile::NamedTempFile;

/// Writes a file with the permissions `mode`, replacing an existing one.
///
/// # Errors
/// The file system's error; the old file then stays unchanged.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    filled(path, bytes, mode)?.persist(path)?;
    sync_folder(folder_of(path))
}

/// Writes a file that must not exist yet.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if `path` exists, which then stays unchanged; otherwise the
/// file system's error.
pub fn create(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    publish(filled(path, bytes, mode)?, path)
}

/// Creates a folder and its missing parents durably.
///
/// # Errors
/// The file system's error.
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

/// Makes changes of a folder's entries durable, where the file system supports it.
///
/// # Errors
/// If the file system supports it and fails.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, Unsupported};
    match File::open(folder)?.sync_all() {
        Err(error) if matches!(error.kind(), InvalidInput | Unsupported) => Ok(()),
        synced => synced,
    }
}

/// Returns the permission bits of a folder in which other users may create, replace or remove
/// files; `None` for other folders.
pub fn writable_by_others(folder: &Path) -> Option<u32> {
    let mode = std::fs::metadata(folder).ok()?.permissions().mode() & 0o7777;
    (mode & 0o022 != 0).then_some(mode)
}

/// Parent folder of a path; `.` for a bare file name.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates an empty temporary file with these permissions beside `target`; removed when dropped.
pub(crate) fn draft(target: &Path, mode: u32) -> io::Result<NamedTempFile> {
    let mut prefix = OsString::from(".");
    prefix.push(target.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    prefix.push("-");
    tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(folder_of(target))
}

fn filled(target: &Path, bytes: &[u8], mode: u32) -> io::Result<NamedTempFile> {
    let mut draft = draft(target, mode)?;
    draft.write_all(bytes)?;
    draft.as_file().sync_all()?;
    Ok(draft)
}

/// Renames a draft, whose content is on the disk, to `target`, which must not exist.
pub(crate) fn publish(draft: NamedTempFile, target: &Path) -> io::Result<()> {
    draft.persist_noclobber(target)?;
    sync_folder(folder_of(target))
}

#[cfg(test)]
mod tests {
    use std::fs;
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
    fn create_never_overwrites_an_existing_file() {
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
