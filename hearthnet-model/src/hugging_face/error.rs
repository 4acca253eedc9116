//! What is wrong with a directory.

use std::path::PathBuf;

use crate::error::{FileError, ModelError};
use crate::gguf::TensorType;
use crate::gguf::writer::WriteError;
use crate::quantize::QuantizeError;

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
    /// A directory without hyperparameters.
    #[error("{} is no model: it has no config.json", .0.display())]
    NoConfig(PathBuf),
    /// A link that leads to a file of somebody else.
    #[error(
        "{0:?} is a link that leads out of the directory: put the file itself there, if it is \
         yours"
    )]
    Outside(String),
    /// A directory, a pipe or a device where a file should be.
    #[error("{0:?} is no file")]
    NoFile(String),
    /// A file that is longer than any of its kind.
    #[error("{file} has {bytes} bytes; at most {limit} are read")]
    TooLong {
        /// Its name.
        file: String,
        /// Its length.
        bytes: u64,
        /// The longest that is read.
        limit: u64,
    },
    /// What Git leaves where Git LFS has not fetched a file.
    #[error(
        "{0:?} is a pointer of Git LFS, not the file itself: `git lfs pull` in the directory \
         fetches it"
    )]
    Pointer(String),
    /// A file that is not JSON, or JSON of another structure.
    #[error("{file} cannot be read: {reason}")]
    Json {
        /// Its name.
        file: String,
        /// What the JSON parser found.
        reason: String,
    },
    /// A class of models that is not known here.
    #[error("config.json says that the model is {found}; known are {known}")]
    Architecture {
        /// What it says, quoted.
        found: String,
        /// What it could say.
        known: String,
    },
    /// A key that could change what the model computes and that is not known, or that has a value
    /// which is not computed here.
    #[error("config.json: {key} = {value}: {reason}")]
    Config {
        /// The key.
        key: String,
        /// Its value as JSON, shortened.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A key without which the model is not known.
    #[error("config.json does not say {0:?}")]
    MissingKey(String),
    /// Weights that somebody has quantised already: how, shortened.
    #[error(
        "config.json says that the weights are quantised ({0}); directories are read in fp16, \
         bf16 and fp32"
    )]
    Quantised(String),
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
    /// A tensor is not where the index says.
    #[error("tensor {tensor:?} is not in {file:?}, where model.safetensors.index.json puts it")]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
    },
    /// A shard holds a tensor that the index does not name, or that another shard has, too.
    #[error(
        "{file:?} holds tensor {tensor:?}, which model.safetensors.index.json does not put there"
    )]
    NotInIndex {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
    },
    /// The header's length leads out of the file or is beyond any header's.
    #[error("{file:?} says that its header has {header} bytes; the file has {bytes}")]
    HeaderLength {
        /// The file.
        file: String,
        /// What it says.
        header: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// The header is not JSON, or its tensors overlap, leave gaps, or are of another size than
    /// their shape and type say.
    #[error("{file:?} is no sound safetensors file: {reason}")]
    Header {
        /// The file.
        file: String,
        /// What is wrong with its header.
        reason: String,
    },
    /// The file is shorter than its header says.
    #[error("{file:?} is cut off: it should have {expected} bytes and has {found}")]
    Truncated {
        /// The file.
        file: String,
        /// Bytes that its header promises.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The file is longer than its header says.
    #[error(
        "{file:?} should have {expected} bytes and has {found}: something lies behind its tensors"
    )]
    Trailing {
        /// The file.
        file: String,
        /// Bytes that its header promises.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
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
    /// A row length that a type cannot hold.
    #[error("tensor {tensor:?} cannot be stored as {dtype}: {source}")]
    Quantize {
        /// The tensor.
        tensor: String,
        /// The type it should have had.
        dtype: TensorType,
        /// What is wrong.
        source: QuantizeError,
    },
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
