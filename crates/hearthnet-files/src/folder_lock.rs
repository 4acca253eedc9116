//! A lock per folder.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::Duration;

use hearthnet_platform::regular_file;

use crate::error::FileError;

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
