//! State of a file on disk, to notice changes without reading it.

use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use hearthnet_platform::files::{changed_ns, inode};
use serde::{Deserialize, Serialize};

use crate::gguf::files_of;

/// Distinguishes states of a file without reading it. Its `Debug` form, with the `Option`s, is part
/// of the paths of imported models ([`place`](crate::hugging_face::place)): another one imports
/// every directory again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Stamp {
    pub(crate) bytes: u64,
    /// Since 1970-01-01 UTC.
    modified_ns: u64,
    /// Change time of the inode in nanoseconds, if the system has one. Unlike the modification
    /// time, programs cannot set it.
    changed_ns: Option<i128>,
    inode: Option<u64>,
}

impl Stamp {
    /// State of several files: a change of one of them changes it, because the change time of that
    /// inode is then the latest. Order matters.
    fn with(self, next: &Self) -> Self {
        let inode = self.inode.zip(next.inode);
        Self {
            bytes: self.bytes.saturating_add(next.bytes),
            modified_ns: self.modified_ns.max(next.modified_ns),
            changed_ns: self.changed_ns.max(next.changed_ns),
            inode: inode.map(|(all, next)| all.wrapping_mul(1_000_003).wrapping_add(next)),
        }
    }

    /// Modification time, since 1970-01-01 UTC.
    pub(crate) fn modified(&self) -> Duration {
        Duration::from_nanos(self.modified_ns)
    }

    /// Whether this is the same file with the same content, as far as its owner does not hide a
    /// change. A second name of the file, as parts have, changes only the time of the inode.
    pub(crate) fn has_contents_of(&self, other: &Self) -> bool {
        Self {
            changed_ns: None,
            ..*self
        } == Self {
            changed_ns: None,
            ..*other
        }
    }
}

/// Current state of a file, or of all files of a split model, by the first; `None` if one is missing.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let files = files_of(path);
    let mut stamps = files.iter().map(|path| stamp_of_one(path));
    let first = stamps.next()??;
    stamps.try_fold(first, |all, next| Some(all.with(&next?)))
}

fn stamp_of_one(path: &Path) -> Option<Stamp> {
    let info = fs::metadata(path).ok()?;
    let modified = info.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Stamp {
        bytes: info.len(),
        modified_ns: u64::try_from(modified.as_nanos()).ok()?,
        changed_ns: Some(changed_ns(&info)),
        inode: Some(inode(&info)),
    })
}
