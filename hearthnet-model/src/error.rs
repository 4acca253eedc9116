//! Why a file is not a model that can be run.

use std::io;
use std::path::{Path, PathBuf};

use crate::gguf::{GgufError, MetadataError};

/// Why a model file was refused. Strings that come from the file are quoted and escaped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be read, or is no sound GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A metadata key that the family needs is missing, or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// `general.architecture` names a family that this program does not have.
    #[error("the model's architecture {architecture:?} is not supported; supported are: {known}")]
    UnknownArchitecture {
        /// The architecture in the file.
        architecture: String,
        /// The families there are.
        known: String,
    },
    /// A part of a model that lies in so many files.
    #[error(
        "the file is one of {0} parts of a model: join them first, with `llama-gguf-split --merge FIRST-PART JOINED.gguf` of llama.cpp"
    )]
    Split(u32),
    /// A hyperparameter that is out of range or at odds with another.
    #[error("metadata {key:?}: {reason}")]
    Hyperparameter {
        /// The metadata key.
        key: String,
        /// What it must be.
        reason: &'static str,
    },
    /// The file asks for something that the engine does not compute.
    #[error(
        "{what} is not supported for architecture {architecture}: ignoring it would give wrong answers"
    )]
    Unsupported {
        /// What the file asks for.
        what: String,
        /// The family.
        architecture: &'static str,
    },
    /// A tensor that the family needs is not in the file.
    #[error(
        "tensor {name:?} is missing: the file is incomplete, or not of architecture {architecture}"
    )]
    MissingTensor {
        /// The tensor.
        name: String,
        /// The family.
        architecture: &'static str,
    },
    /// A tensor has another shape than the hyperparameters say.
    #[error("tensor {name:?} has shape {found:?} where the metadata implies {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Shape from the hyperparameters, row length first.
        expected: Vec<u64>,
        /// Shape in the file, row length first.
        found: Vec<u64>,
    },
    /// A tensor has a type that the engine does not compute with.
    #[error(
        "tensor {name:?} is stored as {dtype}, which is not supported; supported here: {supported}"
    )]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: crate::gguf::TensorType,
        /// The types that would do.
        supported: String,
    },
}

impl ModelError {
    /// Whether the system had no memory to map the file: the file may be sound.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Gguf(GgufError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::OutOfMemory)
    }
}

/// Something that failed on a file, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}{}", path.display(), remedy(source))]
pub struct FileError {
    /// What was tried, as in "cannot write".
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl FileError {
    pub(crate) fn new(action: &'static str, path: &Path, source: io::Error) -> Self {
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
