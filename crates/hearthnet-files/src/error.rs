//! Errors of model files.

use std::io;
use std::path::{Path, PathBuf};

use crate::gguf::{GgufError, MetadataError};

/// Why a model file was refused. Strings from the file are quoted and escaped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be read, or is not a valid GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A metadata key of the family is missing, or has the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// `general.architecture` names an unsupported family.
    #[error("the model's architecture {architecture:?} is not supported; supported are: {known}")]
    UnknownArchitecture { architecture: String, known: String },
    /// The file is one of this many of a split model, and was opened without the others.
    #[error(
        "the file is one of {0} files of a model: put all of them into one folder, and name the first, NAME-00001-of-{0:05}.gguf"
    )]
    Split(u32),
    /// A hyperparameter is out of range or contradicts another.
    #[error("metadata {key:?}: {reason}")]
    Hyperparameter {
        key: String,
        /// Requirement that the value violates.
        reason: &'static str,
    },
    /// The file requires a feature that the engine does not have.
    #[error(
        "{what} is not supported for architecture {architecture}: ignoring it would give wrong answers"
    )]
    Unsupported {
        what: String,
        architecture: &'static str,
    },
    /// A tensor of the family is missing.
    #[error(
        "tensor {name:?} is missing: the file is incomplete, or not of architecture {architecture}"
    )]
    MissingTensor {
        name: String,
        architecture: &'static str,
    },
    /// The shape of a tensor differs from the hyperparameters.
    #[error("tensor {name:?} has shape {found:?} where the metadata implies {expected:?}")]
    TensorShape {
        name: String,
        /// Shape from the hyperparameters, row length first.
        expected: Vec<u64>,
        /// Shape in the file, row length first.
        found: Vec<u64>,
    },
    /// The embedding or the output matrix does not have a row for each token.
    #[error(
        "tensor {name:?} has {rows} rows, but the model's vocabulary has {wanted} {what}: the two are from different models, so take the file from another source"
    )]
    Vocabulary {
        name: String,
        rows: u64,
        /// Size of the vocabulary.
        wanted: u64,
        /// Name of the things that `wanted` counts.
        what: &'static str,
    },
    /// The engine does not support the type of a tensor.
    #[error(
        "tensor {name:?} is stored as {dtype}, which is not supported; supported here: {supported}"
    )]
    TensorType {
        name: String,
        dtype: crate::gguf::TensorType,
        /// List of the accepted types.
        supported: String,
    },
    /// The file belongs to a part of a model, and the part does not hold this tensor.
    #[error(
        "tensor {0:?} is not on this machine, which holds only a part of the model: fetch its layers first"
    )]
    NotHeld(String),
    /// A tensor of a part differs from the manifest. Its damaged pieces are no longer held.
    #[error(
        "tensor {0:?} of this part of the model is damaged: fetch its layers again, and check the disk"
    )]
    Damaged(String),
    /// The folder of a part cannot be used, or its file was opened as that of a whole model.
    #[error("{0}")]
    Part(String),
}

impl ModelError {
    /// Whether the system lacked memory to map the file; the file may be valid.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Gguf(GgufError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::OutOfMemory)
    }
}

/// Failed operation on a file, with a hint.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}{}", path.display(), remedy(source))]
pub struct FileError {
    /// Completes "cannot", as in "cannot write".
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

impl FileError {
    /// `action` completes "cannot".
    pub fn new(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self {
            action,
            path: path.to_owned(),
            source,
        }
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space there, or choose another place"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose a place that you may write to, or change its permissions"
        }
        _ => "",
    }
}
