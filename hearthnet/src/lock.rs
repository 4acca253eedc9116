//! One data directory is one node: the lock of the node that runs on it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use hearthnet_bus::regular_file;

use crate::failure::{Failure, Kind};

/// Held by the node that runs on a data directory.
const LOCK_FILE: &str = "node.lock";

/// The number of a process in decimal digits.
const MAX_ID_BYTES: u64 = 10;

/// How often the lock is tried, and how long between: a look at it takes microseconds.
const LOOKS: u32 = 5;
const LOOK: Duration = Duration::from_millis(20);

/// How often it is tried where only commands hold it, which write one event each: 5 s.
const LOOKS_AT_COMMANDS: u32 = 250;

/// The right to be the one node that runs on a data directory. Free again when dropped, or
/// when the process ends, however it does.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Takes it.
    ///
    /// # Errors
    /// If a node runs on `dir` already.
    pub(crate) fn take(dir: &Path) -> Result<Self, Failure> {
        for look in 0..LOOKS_AT_COMMANDS {
            if let Some(mut lock) = Self::try_take(dir, File::try_lock, true)? {
                // For messages only: where the disk is full they say less.
                let id = std::process::id().to_string();
                let _ = lock
                    .0
                    .set_len(0)
                    .and_then(|()| lock.0.write_all(id.as_bytes()));
                return Ok(lock);
            }
            // Somebody may be looking whether it is held, which takes a moment.
            if look >= LOOKS && Self::is_held(dir) {
                break;
            }
            std::thread::sleep(LOOK);
        }
        Err(Failure::new(
            Kind::Host,
            format!("a node runs on {} already", dir.display()),
        )
        .code("node_runs")
        .hint("`hearthnet status` shows it; one data directory is one node, and --data-dir names another one"))
    }

    /// Keeps a node from starting on `dir` while a command writes there itself; other commands may
    /// as well. `None` if a node runs.
    ///
    /// # Errors
    /// If the lock's file cannot be used.
    pub(crate) fn keep_free(dir: &Path) -> Result<Option<Self>, Failure> {
        Self::try_take(dir, File::try_lock_shared, true)
    }

    /// Whether a node runs on `dir` now. Those who look do not see each other.
    pub(crate) fn is_held(dir: &Path) -> bool {
        matches!(Self::try_take(dir, File::try_lock_shared, false), Ok(None))
    }

    /// The process that runs a node on `dir`, if one does and its lock says which.
    pub(crate) fn process(dir: &Path) -> Option<u32> {
        if !Self::is_held(dir) {
            return None;
        }
        let mut id = String::new();
        let file = File::open(dir.join(LOCK_FILE)).ok()?;
        file.take(MAX_ID_BYTES).read_to_string(&mut id).ok()?;
        id.parse().ok()
    }

    fn try_take(
        dir: &Path,
        lock: impl FnOnce(&File) -> Result<(), TryLockError>,
        create: bool,
    ) -> Result<Option<Self>, Failure> {
        let path = dir.join(LOCK_FILE);
        let fail = |e: std::io::Error| {
            Failure::file("use", &path, &e)
                .of_kind(Kind::of_io(&e))
                .hint("--data-dir names another directory")
        };
        let mut options = OpenOptions::new();
        // A look at the lock must not create its file.
        options.write(true).create(create).truncate(false);
        let file = regular_file::open_with(options.mode(0o600), &path).map_err(fail)?;
        match lock(&file) {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(fail(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_node_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!Lock::is_held(dir.path()));
        assert!(!dir.path().join(LOCK_FILE).exists());
        let first = Lock::take(dir.path()).unwrap();
        assert!(Lock::is_held(dir.path()));
        assert_eq!(Lock::process(dir.path()), Some(std::process::id()));
        assert_eq!(Lock::take(dir.path()).unwrap_err().kind, Kind::Host);
        assert!(Lock::keep_free(dir.path()).unwrap().is_none());
        drop(first);
        assert_eq!(Lock::process(dir.path()), None);
        Lock::take(dir.path()).unwrap();
    }

    #[test]
    fn commands_write_beside_each_other_and_a_node_that_starts_waits_for_them() {
        let dir = tempfile::tempdir().unwrap();
        let one = Lock::keep_free(dir.path()).unwrap().unwrap();
        let two = Lock::keep_free(dir.path()).unwrap().unwrap();
        assert!(!Lock::is_held(dir.path()));
        std::thread::scope(|scope| {
            let node = scope.spawn(|| Lock::take(dir.path()));
            drop(one);
            assert!(!node.is_finished());
            drop(two);
            node.join().unwrap().unwrap();
        });
    }
}
