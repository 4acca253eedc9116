//! Paths of this node's files (XDG base directories).

use std::path::{Path, PathBuf};

use hearthnet_bus::{KeyFileError, NodeKey, whole_file};

use crate::cli::args::Global;
use crate::cli::failure::{Failure, Kind};
use crate::config::xdg;

/// Failure for a key file.
pub(crate) fn key_failure(error: &KeyFileError) -> Failure {
    let (kind, hint) = match error {
        KeyFileError::Folder { folder, .. } => (Kind::Refused, close_folder(folder)),
        KeyFileError::Io { source, .. } => (Kind::of_io(source), another()),
        KeyFileError::Randomness(_) => (Kind::Host, "try again later".to_owned()),
        _ => (Kind::Refused, another()),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

fn another() -> String {
    "choose another directory for this node's key with --data-dir".to_owned()
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
    match whole_file::writable_by_others(folder) {
        None => Ok(()),
        Some(mode) => Err(Failure::new(
            Kind::Refused,
            format!(
                "other users may write to the data directory {} (mode {mode:03o})",
                folder.display()
            ),
        )
        .hint(close_folder(folder))),
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
        NodeKey::load_or_create(&self.dir()?.join("node.key")).map_err(|e| key_failure(&e))
    }
}
