//! Atomically written files, and a lock per folder.

use std::ffi::OsString;
use std::fs::{File, Permissions, TryLockError};
use std::io::{self, BufWriter, IntoInnerError, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use tempfile::NamedTempFile;

use crate::error::FileError;
use crate::regular_file;

/// Creates a temporary file `.NAME.RANDOM.part` beside `target`. [`finish`] renames it to `target`;
/// dropping it removes it.
pub fn create(target: &Path) -> io::Result<BufWriter<NamedTempFile>> {
    let mut prefix = OsString::from(".");
    prefix.push(target.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    prefix.push(".");
    let file = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".part")
        // Default mode of new files, subject to the user's umask.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(target.parent().unwrap_or(Path::new("")))?;
    Ok(BufWriter::with_capacity(1 << 20, file))
}

/// Renames the file to `target` after its contents have reached the disk. Replaces an older file.
pub fn finish(file: BufWriter<NamedTempFile>, target: &Path) -> io::Result<()> {
    let file = file.into_inner().map_err(IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(target)?;
    sync_directory(target);
    Ok(())
}

/// Makes a rename in the file's directory durable, if the system supports that.
pub fn sync_directory(path: &Path) {
    if let Some(directory) = path.parent()
        && let Ok(directory) = File::open(directory)
    {
        let _ = directory.sync_all();
    }
}

/// Polling interval while waiting for a lock.
const TICK: Duration = Duration::from_millis(100);

/// Locks `folder` against other processes until the returned file is dropped. While the lock is
/// taken, `wait` is called before each further attempt; `Ok(None)` once it returns false.
pub fn lock(folder: &Path, mut wait: impl FnMut() -> bool) -> Result<Option<File>, FileError> {
    let path = folder.join(".lock");
    let failed = |source| FileError::new("lock", &path, source);
    let mut options = File::options();
    let file = regular_file::open_with(options.create(true).append(true), &path);
    let file = file.map_err(failed)?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        if !wait() {
            return Ok(None);
        }
        std::thread::sleep(TICK);
    }
}

/// Writes a whole file atomically.
pub fn write(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create(target)?;
    file.write_all(bytes)?;
    finish(file, target)
}
