//! Files that are there whole or not at all, and folders that one process at a time writes to.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::FileError;

/// A file that gets its name when it is complete. Until then it lies beside it as
/// `.NAME.PID.part`, and it is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    file: File,
    unfinished: PathBuf,
    target: PathBuf,
    done: bool,
}

impl AtomicFile {
    /// Begins a file that will be called `target`.
    pub(crate) fn create(target: &Path) -> io::Result<Self> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut unfinished = OsString::from(".");
        unfinished.push(name);
        // Two threads of one process may write the same file: the counter keeps them apart.
        static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        unfinished.push(format!(".{}-{count}.part", std::process::id()));
        let unfinished = target.with_file_name(unfinished);
        let file = File::create(&unfinished)?;
        Ok(Self {
            file,
            unfinished,
            target: target.to_owned(),
            done: false,
        })
    }

    /// Gives the file its name, after its contents have reached the disk. An older file of that
    /// name is replaced.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.unfinished, &self.target)?;
        self.done = true;
        sync_directory(&self.target);
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.unfinished);
        }
    }
}

/// Makes a rename in the file's directory durable, where the system offers that.
pub(crate) fn sync_directory(path: &Path) {
    if let Some(directory) = path.parent()
        && let Ok(directory) = File::open(directory)
    {
        let _ = directory.sync_all();
    }
}

/// How often a wait for a lock looks whether to go on.
const TICK: Duration = Duration::from_millis(100);

/// Waits until no other process works in `folder`, as long as `wait`, asked before each look but
/// the first, says so. The lock ends with the file.
pub(crate) fn lock(
    folder: &Path,
    mut wait: impl FnMut() -> bool,
) -> Result<Option<File>, FileError> {
    let path = folder.join(".lock");
    let failed = |source| FileError::new("lock", &path, source);
    let mut options = File::options();
    let file = options.create(true).append(true).open(&path);
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

/// Writes a whole file.
pub(crate) fn write(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create(target)?;
    file.write_all(bytes)?;
    file.finish()
}
