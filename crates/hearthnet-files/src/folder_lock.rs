//! A lock per folder.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::time::Duration;

use hearthnet_platform::files::inode;
use hearthnet_platform::regular_file;

use crate::error::FileError;

/// Polling interval while waiting for a lock.
const TICK: Duration = Duration::from_millis(100);

/// Locks `folder` against other processes until the returned file is dropped. While the lock is
/// taken, `wait` is called before each further attempt; `Ok(None)` once it returns false.
pub fn lock(folder: &Path, mut wait: impl FnMut() -> bool) -> Result<Option<File>, FileError> {
    let path = folder.join(".lock");
    let failed = |source| FileError::new("lock", &path, source);
    let open = || {
        let mut options = File::options();
        regular_file::open_with(options.create(true).append(true), &path).map_err(failed)
    };
    let mut file = open()?;
    loop {
        match file.try_lock() {
            Ok(()) if is_at(&file, &path) => return Ok(Some(file)),
            // It was removed with its folder, and another process may hold a new one.
            Ok(()) => {
                file = open()?;
                continue;
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        if !wait() {
            return Ok(None);
        }
        std::thread::sleep(TICK);
    }
}

/// Whether `lock` is the lock of `folder` now, which may have been removed and made again.
pub fn is_of(lock: &File, folder: &Path) -> bool {
    is_at(lock, &folder.join(".lock"))
}

fn is_at(file: &File, path: &Path) -> bool {
    let number = |info: io::Result<fs::Metadata>| info.ok().map(|info| inode(&info));
    number(fs::metadata(path)).is_some_and(|there| number(file.metadata()) == Some(there))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_whose_file_was_removed_meanwhile_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = lock(dir.path(), || false).unwrap();
        assert!(first.is_some());
        let removes = || {
            fs::remove_file(dir.path().join(".lock")).unwrap();
            drop(first.take());
            true
        };
        let second = lock(dir.path(), removes).unwrap();
        assert!(second.is_some());
        assert!(lock(dir.path(), || false).unwrap().is_none());
    }
}
