//! Errors of parts.

use std::path::{Path, PathBuf};

use super::PIECE_BYTES;
use crate::error::{FileError, ModelError};
use crate::manifest::ManifestError;

/// Failure of an operation on a part.
#[derive(Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum PartError {
    #[error(transparent)]
    File(#[from] FileError),
    /// A stored object is missing, or differs from its hash.
    #[error(
        "the part {} cannot be used: its {what}; fetching the model again repairs it",
        path.display()
    )]
    Damaged {
        path: PathBuf,
        /// Object and fault.
        what: String,
    },
    /// Bytes from a source differ from what was adopted.
    #[error("{0} differs from the adopted model: its source is damaged or lies")]
    Mismatch(String),
    /// The head, the manifest, the piece list and the adoption contradict each other. All are
    /// genuine, so the adoption is faulty.
    #[error("the adopted model contradicts itself: {0}; an anchor must adopt it again")]
    Disagrees(String),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The head describes no model that can be run here.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Another process has the part open for writing.
    #[error(
        "another process uses the part {}: stop it, or let the running daemon do the work",
        .0.display()
    )]
    InUse(PathBuf),
    /// The part is another name of a file that its user has changed since.
    #[error(
        "{} is another name of a file of yours, which has changed since the part was made: restore \
         that file, or remove the part with `hearthnet model rm`, so that the model is fetched",
        .0.display()
    )]
    Shared(PathBuf),
    /// A split model has no single file that could have a second name.
    #[error(
        "the model {} is split into several files, which are offered in pieces only from a joined copy: \
         `hearthnet model adopt` or `hearthnet up --from FILE` on this machine makes one",
        .0.display()
    )]
    Split(PathBuf),
    /// The part was opened with [`Part::open_reading`](super::Part::open_reading).
    #[error("the part is open for reading only")]
    ReadOnly,
    #[error("there is no piece {index}: the model has {count} pieces of up to {PIECE_BYTES} bytes")]
    NoPiece { index: u32, count: u32 },
}

impl PartError {
    pub(super) fn damaged(folder: &Path, what: &str) -> Self {
        Self::Damaged {
            path: folder.to_owned(),
            what: what.to_owned(),
        }
    }

    /// Stable name of the kind of error.
    pub fn code(&self) -> &'static str {
        self.into()
    }
}
