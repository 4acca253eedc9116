//! Lock of a data directory: at most one node runs on it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use hearthnet_platform::files::private;
use hearthnet_platform::regular_file;

use crate::cli::{Failure, Kind, failure};

/// Locked by the node that runs on a data directory.
const LOCK_FILE: &str = "node.lock";

/// Longest process id in decimal digits.
const MAX_ID_BYTES: u64 = 10;

/// Attempts to take the lock, and the delay between them. A test of the lock by another process
/// takes microseconds.
const ATTEMPTS: u32 = 5;
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Attempts if only commands hold the lock, which write one event each: 5 s.
const ATTEMPTS_BESIDE_COMMANDS: u32 = 250;

/// Exclusive lock of the node that runs on a data directory. Released when dropped, or when the
/// process ends.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Takes the lock.
    ///
    /// # Errors
    /// Returns an error if a node already runs on `dir`.
    pub(crate) fn take(dir: &Path) -> Result<Self, Failure> {
        for attempt in 0..ATTEMPTS_BESIDE_COMMANDS {
            if let Some(mut lock) = Self::try_take(dir, File::try_lock, true)? {
                // The id only improves messages, so an error, as on a full disk, is ignored.
                let id = std::process::id().to_string();
                let _ = lock
                    .0
                    .set_len(0)
                    .and_then(|()| lock.0.write_all(id.as_bytes()));
                return Ok(lock);
            }
            // Another process may be testing the lock, which takes a moment.
            if attempt >= ATTEMPTS && Self::is_held(dir) {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Err(failure!(Host, "a node runs on {} already", dir.display())
        .code("node_runs")
        .hint("`hearthnet status` shows it; for another node, choose another directory with --data-dir"))
    }

    /// Takes a shared lock that keeps a node from starting on `dir` while a command writes. Several
    /// commands may hold it. Returns `None` if a node runs.
    ///
    /// # Errors
    /// Returns an error if the lock file cannot be used.
    pub(crate) fn keep_free(dir: &Path) -> Result<Option<Self>, Failure> {
        Self::try_take(dir, File::try_lock_shared, true)
    }

    /// Whether a node runs on `dir`. Uses a shared lock, so that concurrent tests do not see each
    /// other.
    pub(crate) fn is_held(dir: &Path) -> bool {
        matches!(Self::try_take(dir, File::try_lock_shared, false), Ok(None))
    }

    /// Id of the process that runs a node on `dir`, if known.
    pub(crate) fn process(dir: &Path) -> Option<u32> {
        if !Self::is_held(dir) {
            return None;
        }
        let id = regular_file::read_text(&dir.join(LOCK_FILE), MAX_ID_BYTES);
        id.ok()?.parse().ok()
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
                .hint("choose another directory with --data-dir")
        };
        let mut options = OpenOptions::new();
        // A test of the lock must not create its file.
        options.write(true).create(create).truncate(false);
        let file = regular_file::open_with(private(&mut options), &path).map_err(fail)?;
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
    fn commands_share_the_lock_and_a_starting_node_waits() {
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
