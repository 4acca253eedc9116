//! One data directory is one node: the lock of the node that runs on it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::failure::{Failure, Kind};

/// Held by the node that runs on a data directory.
const LOCK_FILE: &str = "node.lock";

/// How often the lock is tried, and how long between: a look at it takes microseconds.
const LOOKS: u32 = 5;
const LOOK: Duration = Duration::from_millis(20);

/// The right to be the one node that runs on a data directory. Free again when dropped, or
/// when the process ends, however it does.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "held, never read")] File);

impl Lock {
    /// Takes it.
    ///
    /// # Errors
    /// If a node runs on `dir` already.
    pub(crate) fn take(dir: &Path) -> Result<Self, Failure> {
        // Somebody may be looking whether it is held, which takes a moment.
        for _ in 0..LOOKS {
            if let Some(lock) = Self::try_take(dir, FlockOperation::NonBlockingLockExclusive)? {
                return Ok(lock);
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

    /// Whether a node runs on `dir` now. Those who look do not see each other.
    pub(crate) fn is_held(dir: &Path) -> bool {
        matches!(
            Self::try_take(dir, FlockOperation::NonBlockingLockShared),
            Ok(None)
        )
    }

    fn try_take(dir: &Path, how: FlockOperation) -> Result<Option<Self>, Failure> {
        let path = dir.join(LOCK_FILE);
        let fail = |e: std::io::Error| {
            Failure::new(Kind::Host, format!("cannot use {}: {e}", path.display()))
                .hint("--data-dir names another directory")
        };
        let file = OpenOptions::new()
            .write(true)
            // Who only looks leaves nothing behind.
            .create(matches!(how, FlockOperation::NonBlockingLockExclusive))
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(fail)?;
        match rustix::fs::flock(&file, how) {
            Ok(()) => Ok(Some(Self(file))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(fail(error.into())),
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
        assert_eq!(Lock::take(dir.path()).unwrap_err().kind, Kind::Host);
        drop(first);
        Lock::take(dir.path()).unwrap();
    }
}
