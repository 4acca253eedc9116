//! Errors of GGUF files and their metadata.

use std::path::PathBuf;

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be opened or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The file does not begin with `GGUF`, but with these bytes, at most four.
    #[error("magic: not a GGUF file, {}", begins(.0))]
    Magic(Vec<u8>),
    /// A field, by its name in the GGUF specification, and its problem. Strings from the file are
    /// quoted and escaped.
    #[error("{0}")]
    Malformed(String),
    /// A file of a split model is missing, or not the one that its name says.
    #[error("{0}")]
    Split(String),
}

/// Guesses the format of a file that does not begin with `GGUF`.
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

/// A metadata value is missing, or not of the expected kind.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    #[error("metadata {0:?} is missing")]
    Missing(String),
    /// The key has a value of another type, or a number outside the expected range.
    #[error("metadata {key:?} must be {expected}, the file has {found}")]
    Mismatch {
        key: String,
        /// Expected type or range.
        expected: &'static str,
        /// Type in the file and, for numbers, the value.
        found: String,
    },
}
