//! Paths of this node's files (XDG base directories).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use hearthnet_bus::{KeyFileError, NodeKey};
use hearthnet_platform::files;
use hearthnet_platform::whole_file::{self, Access};

use crate::cli::args::Global;
use crate::cli::{Failure, Kind, failure};
use crate::config::xdg;

/// Name of the node's key file, in the data directory and in a backup.
pub(crate) const NODE_KEY: &str = "node.key";

/// Failure for a key file.
pub(crate) fn key_failure(error: &KeyFileError) -> Failure {
    let another = || "choose another directory for this node's key with --data-dir".to_owned();
    let (kind, hint) = match error {
        KeyFileError::Folder { folder, .. } => (Kind::Refused, close_folder(folder)),
        KeyFileError::Io { source, .. } => (Kind::of_io(source), another()),
        KeyFileError::Randomness(_) => (Kind::Host, "try again later".to_owned()),
        _ => (Kind::Refused, another()),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

/// Hint for a folder that other users may write to.
pub(crate) fn close_folder(folder: &Path) -> String {
    format!(
        "`chmod go-w {}` closes it to other users; look at what they may have put there first",
        folder.display()
    )
}

/// Refuses a data directory in which other users may create files.
pub(crate) fn refuse_open_to_others(folder: &Path) -> Result<(), Failure> {
    match files::writable_by_others(folder) {
        None => Ok(()),
        Some(mode) => Err(failure!(
            Refused,
            "other users may write to the data directory {} (mode {mode:03o})",
            folder.display()
        )
        .hint(close_folder(folder))),
    }
}

/// First of the paths `path(1)`, `path(2)`, ... that does not exist.
pub(crate) fn first_free(path: impl Fn(u32) -> PathBuf) -> Result<PathBuf, Failure> {
    let free = (1..).map(path).find(|path| !path.exists());
    free.ok_or_else(|| Failure::internal("every name for the old data is taken"))
}

/// Replaces a file of the data directory.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    whole_file::replace(path, bytes, Access::Owner)
        .map_err(|e| Failure::file("write", path, &e).of_kind(Kind::of_io(&e)))
}

/// Removes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Failure::file("remove", path, e)),
        _ => Ok(()),
    }
}

impl Global {
    /// Directory of this node's key and records.
    ///
    /// # Errors
    /// Returns an error if neither a flag nor the environment names one.
    pub(crate) fn dir(&self) -> Result<PathBuf, Failure> {
        let usual = || xdg("XDG_DATA_HOME", ".local/share").map(|d| d.join("hearthnet"));
        self.data_dir.clone().or_else(usual).ok_or_else(|| {
            Failure::new(
                Kind::Refused,
                "there is no home directory for this node's key",
            )
            .hint("name one with --data-dir")
        })
    }

    /// This node's key; created on first use.
    pub(crate) fn node_key(&self) -> Result<NodeKey, Failure> {
        NodeKey::load_or_create(&self.dir()?.join(NODE_KEY)).map_err(|e| key_failure(&e))
    }
}
