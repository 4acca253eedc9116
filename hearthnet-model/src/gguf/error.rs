//! What can be wrong with a GGUF file.

use std::path::PathBuf;

/// Why a file is not a GGUF file that this program reads.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be opened or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file does not begin with `GGUF`, but with these bytes, at most four.
    #[error("magic: not a GGUF file, {}", begins(.0))]
    Magic(Vec<u8>),
    /// What is wrong with which field, by its name in the GGUF specification. Strings that come
    /// from the file are quoted and escaped.
    #[error("{0}")]
    Malformed(String),
}

/// What a file that does not begin with `GGUF` seems to be.
fn begins(found: &[u8]) -> String {
    match found {
        b"" => "it is empty".to_owned(),
        b"vers" => {
            "it seems to be a pointer of Git LFS: `git lfs pull` fetches the file itself".to_owned()
        }
        b"<!DO" | b"<!do" | b"<htm" | b"<HTM" => {
            "it seems to be a web page: download the file itself".to_owned()
        }
        other => format!("it begins with {other:02x?} instead of \"GGUF\""),
    }
}

/// A metadata value that is missing, or not of the kind that its key calls for.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The key is not in the file.
    #[error("metadata {0:?} is missing")]
    Missing(String),
    /// The key has a value of another type, or a number outside the expected range.
    #[error("metadata {key:?} must be {expected}, the file has {found}")]
    Mismatch {
        /// The key.
        key: String,
        /// What was asked for.
        expected: &'static str,
        /// What the file has: its type and, for numbers, its value.
        found: String,
    },
}
