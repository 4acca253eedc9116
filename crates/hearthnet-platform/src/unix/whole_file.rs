//! Atomic, durable file writes: after a power cut a file is complete or absent. The content reaches
//! the disk before the name does, and the name before the call returns.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{self, BufWriter, IntoInnerError, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

pub use super::files::Access;
use super::files::create_folders;

/// Writes a file, replacing an existing one.
///
/// # Errors
/// The file system's error; the old file then stays unchanged.
pub fn replace(path: &Path, bytes: &[u8], access: Access) -> io::Result<()> {
    filled(path, bytes, access)?.persist(path)?;
    sync_folder(folder_of(path))
}

/// Writes a file that must not exist yet.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if `path` exists, which then stays unchanged; otherwise the
/// file system's error.
pub fn create(path: &Path, bytes: &[u8], access: Access) -> io::Result<()> {
    publish(filled(path, bytes, access)?, path)
}

/// Creates a folder and its missing parents durably.
///
/// # Errors
/// The file system's error.
pub fn make_folder(path: &Path, access: Access) -> io::Result<()> {
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        .collect();
    create_folders(path, access)?;
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

/// Parent folder of a path; `.` for a bare file name.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates an empty temporary file `.NAME.RANDOM.part` beside `target`; removed when dropped.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if `target` has no name; otherwise the file system's error.
pub fn draft(target: &Path, access: Access) -> io::Result<NamedTempFile> {
    let mut prefix = OsString::from(".");
    prefix.push(target.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    prefix.push(".");
    tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".part")
        .permissions(Permissions::from_mode(access.modes().0))
        .tempfile_in(folder_of(target))
}

/// Renames a draft, whose content is on the disk, to `target`, which must not exist.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if `target` exists; otherwise the file system's error.
pub fn publish(draft: NamedTempFile, target: &Path) -> io::Result<()> {
    draft.persist_noclobber(target)?;
    sync_folder(folder_of(target))
}

/// Draft of a file that can be made again, such as a model; with the usual access.
///
/// # Errors
/// As [`draft`].
pub fn begin(target: &Path) -> io::Result<BufWriter<NamedTempFile>> {
    let draft = draft(target, Access::Umask)?;
    Ok(BufWriter::with_capacity(1 << 20, draft))
}

/// Renames the draft to `target` after its content has reached the disk. Replaces an older file. It
/// is no error if the folder cannot be synced.
///
/// # Errors
/// The file system's error; the old file then stays unchanged.
pub fn finish(file: BufWriter<NamedTempFile>, target: &Path) -> io::Result<()> {
    let file = file.into_inner().map_err(IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(target)?;
    let _ = sync_folder(folder_of(target));
    Ok(())
}

/// Writes a file as [`begin`] and [`finish`] do.
///
/// # Errors
/// As [`begin`] and [`finish`].
pub fn write(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = begin(target)?;
    file.write_all(bytes)?;
    finish(file, target)
}

fn filled(target: &Path, bytes: &[u8], access: Access) -> io::Result<NamedTempFile> {
    let mut draft = draft(target, access)?;
    draft.write_all(bytes)?;
    draft.as_file().sync_all()?;
    Ok(draft)
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
        replace(&path, b"one", Access::Owner).unwrap();
        replace(&path, b"two", Access::Owner).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn create_never_overwrites_an_existing_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/a");
        make_folder(path.parent().unwrap(), Access::Owner).unwrap();
        create(&path, b"one", Access::Readable).unwrap();
        let error = create(&path, b"two", Access::Readable).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
