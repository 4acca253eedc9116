//! Errors of importing a directory.

use std::path::PathBuf;

use crate::error::{FileError, ModelError};
use crate::gguf::TensorType;
use crate::gguf::writer::WriteError;

/// Why a directory could not be imported. No file is left behind. Variants with only a text name
/// the file, key or tensor in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    #[error(transparent)]
    File(#[from] FileError),
    /// The target exists.
    #[error("{} exists already: remove it, or choose another name", .0.display())]
    Exists(PathBuf),
    /// A link leads out of the directory.
    #[error(
        "{0:?} is a link that leads out of the directory: put the file itself there, if it is \
         yours"
    )]
    Outside(String),
    /// The path is a directory, a pipe or a device.
    #[error("{0:?} is no file")]
    NoFile(String),
    /// The file is a pointer that Git LFS has not replaced by its contents.
    #[error(
        "{0:?} is a pointer of Git LFS, not the file itself: `git lfs pull` in the directory \
         fetches it"
    )]
    Pointer(String),
    /// A required key is missing.
    #[error("config.json has no key {0:?}")]
    MissingKey(String),
    /// There are no weights in a supported format.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json: only safetensors are \
         read", .0.display()
    )]
    NoWeights(PathBuf),
    /// The index of the shards is invalid.
    #[error("model.safetensors.index.json: {0}")]
    Index(String),
    /// A shard of the index is missing.
    #[error("shard {0:?} is missing: model.safetensors.index.json names it")]
    MissingShard(String),
    #[error("tensor {0:?} is missing: config.json asks for it")]
    MissingTensor(String),
    /// The shape of a tensor differs from the hyperparameters.
    #[error("tensor {tensor:?} has shape {found:?}, but config.json implies {expected:?}")]
    Shape {
        tensor: String,
        /// Shape according to config.json, row length last.
        expected: Vec<u64>,
        /// Shape in the file, row length last.
        found: Vec<u64>,
    },
    /// The type of a tensor is not supported.
    #[error("tensor {tensor:?} is stored as {dtype}; F32, F16 and BF16 are read")]
    Dtype { tensor: String, dtype: String },
    /// Models of this class have no such tensor.
    #[error("tensor {tensor:?} is unknown in a {class}, and may change the computation")]
    ForeignTensor { tensor: String, class: &'static str },
    /// config.json says that output matrix and embedding are tied, but they differ.
    #[error("config.json says that the output matrix is the embedding, but {0:?} differs from it")]
    NotTied(String),
    /// The tokenizer is not supported.
    #[error("{file}: {reason}")]
    Tokenizer {
        file: &'static str,
        /// Unknown or invalid part.
        reason: String,
    },
    /// The target type has no encoder.
    #[error(
        "weights can be stored as {known}, not as {0}",
        known = TensorType::names(TensorType::WRITABLE)
    )]
    Target(TensorType),
    /// The directory is read for an adopted model, and is not that model.
    #[error("it is not the adopted model: {0}")]
    Other(String),
    /// Any other defect of a file: an unknown structure, excessive length, or a contradiction.
    #[error("{0}")]
    Unsound(String),
    /// The hyperparameters are invalid, or not supported by the engine.
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("cancelled")]
    Cancelled,
}
