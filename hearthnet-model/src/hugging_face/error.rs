//! What is wrong with a directory.

use std::path::PathBuf;

use crate::error::{FileError, ModelError};
use crate::gguf::TensorType;
use crate::gguf::writer::WriteError;

/// Why a directory could not be read as a model. Nothing is left behind. A variant that carries a
/// text alone has the name of the file, key or tensor in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is a file of the name that the result should get.
    #[error("{} exists already: remove it, or choose another name", .0.display())]
    Exists(PathBuf),
    /// A link that leads to a file of somebody else.
    #[error(
        "{0:?} is a link that leads out of the directory: put the file itself there, if it is \
         yours"
    )]
    Outside(String),
    /// A directory, a pipe or a device where a file should be.
    #[error("{0:?} is no file")]
    NoFile(String),
    /// What Git leaves where Git LFS has not fetched a file.
    #[error(
        "{0:?} is a pointer of Git LFS, not the file itself: `git lfs pull` in the directory \
         fetches it"
    )]
    Pointer(String),
    /// A key without which the model is not known.
    #[error("config.json does not say {0:?}")]
    MissingKey(String),
    /// No weights in a format that is read.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json: only safetensors are \
         read", .0.display()
    )]
    NoWeights(PathBuf),
    /// The index of the shards is not one.
    #[error("model.safetensors.index.json: {0}")]
    Index(String),
    /// A shard that the index names is not there.
    #[error("shard {0:?} is missing: model.safetensors.index.json names it")]
    MissingShard(String),
    /// A tensor that the hyperparameters ask for is not there.
    #[error("tensor {0:?} is missing: config.json asks for it")]
    MissingTensor(String),
    /// A tensor has another shape than the hyperparameters say.
    #[error("tensor {tensor:?} has shape {found:?}, by config.json it should have {expected:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// By config.json, row length last.
        expected: Vec<u64>,
        /// In the file.
        found: Vec<u64>,
    },
    /// A tensor of a type that is not read.
    #[error("tensor {tensor:?} is stored as {dtype}; F32, F16 and BF16 are read")]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
    },
    /// A tensor that models of this class do not have.
    #[error("tensor {tensor:?} has no place in a {class}: it may change what the model computes")]
    ForeignTensor {
        /// The tensor.
        tensor: String,
        /// The class.
        class: &'static str,
    },
    /// An output matrix that config.json says is the embedding, and is not.
    #[error("config.json says that the output matrix is the embedding, but {0:?} differs from it")]
    NotTied(String),
    /// A tokenizer that is not known here.
    #[error("{file}: {reason}")]
    Tokenizer {
        /// The name of its file.
        file: &'static str,
        /// What of it is not known, or cannot be.
        reason: String,
    },
    /// A type that weights cannot be stored as.
    #[error(
        "weights can be stored as {known}, not as {0}",
        known = TensorType::names(TensorType::WRITABLE)
    )]
    Target(TensorType),
    /// What else is wrong with a file: one of no known structure, longer than any of its kind, or at
    /// odds with itself, or with others.
    #[error("{0}")]
    Unsound(String),
    /// The hyperparameters are impossible, or something that the engine does not compute.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The result could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// It was asked to stop.
    #[error("cancelled")]
    Cancelled,
}
