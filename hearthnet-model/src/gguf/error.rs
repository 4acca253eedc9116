//! What can be wrong with a GGUF file.

use std::path::PathBuf;

/// Why a file is not a GGUF file that this program reads. Field names are those of the GGUF
/// specification, and all that a variant has that carries a text alone; strings that come from the
/// file are quoted and escaped.
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
    /// A version other than 2 and 3.
    #[error("version: GGUF version {0} is not supported, only 2 and 3 are")]
    Version(u32),
    /// The version reads as 2 or 3 only when its bytes are swapped.
    #[error("version: this is a big-endian GGUF file; convert it to little-endian first")]
    BigEndian,
    /// The file ends inside a field.
    #[error(
        "{field}: needs {needed} bytes where the file has {available} left: it is truncated or damaged"
    )]
    Truncated {
        /// The field.
        field: String,
        /// Bytes that the field takes.
        needed: u64,
        /// Bytes that are left in the file.
        available: u64,
    },
    /// A count, length or size beyond what a sound file has, or beyond what the file can hold.
    #[error(
        "{field}: {value} is too large, at most {limit} is possible here: the file is truncated or damaged"
    )]
    TooLarge {
        /// The field.
        field: String,
        /// The value in the file.
        value: u64,
        /// The largest value that would be accepted.
        limit: u64,
    },
    /// A string that is not UTF-8.
    #[error("{0}: the string is not valid UTF-8")]
    NotUtf8(String),
    /// An empty key or tensor name.
    #[error("{0}: must not be empty")]
    Empty(String),
    /// A metadata value type other than 0 to 12.
    #[error("{field}: {id} is no metadata value type")]
    ValueType {
        /// The field.
        field: String,
        /// The number in the file.
        id: u32,
    },
    /// An array of arrays. The format allows them; no known key uses them, and ggml refuses them.
    #[error("{0}: arrays of arrays are not supported")]
    NestedArray(String),
    /// A boolean that is neither 0 nor 1.
    #[error("{field}: {value} is no boolean, it must be 0 or 1")]
    Bool {
        /// The field.
        field: String,
        /// The byte in the file.
        value: u8,
    },
    /// The same metadata key, or tensor name, twice.
    #[error("{field}: {name:?} occurs twice")]
    Duplicate {
        /// The field.
        field: String,
        /// The repeated name.
        name: String,
    },
    /// `general.alignment` is not a `u32` that is a power of two between 8 and 65,536.
    #[error("general.alignment: must be a power of two between 8 and 65536, stored as u32")]
    Alignment,
    /// A tensor has no dimension, more than four, or one of zero length.
    #[error("{0}: a tensor has one to four dimensions, none of them zero")]
    Dimensions(String),
    /// A tensor type that ggml does not have, or has removed.
    #[error("{field}: ggml has no tensor type {id}; the file may be newer than this program")]
    TensorType {
        /// The field.
        field: String,
        /// The number in the file.
        id: u32,
    },
    /// A tensor whose rows do not fill whole blocks of its type.
    #[error("{field}: rows of {columns} values do not fill whole blocks of {dtype}")]
    Blocks {
        /// The field.
        field: String,
        /// Length of the first dimension.
        columns: u64,
        /// The type's name.
        dtype: &'static str,
    },
    /// The number of elements or bytes of a tensor overflows.
    #[error("{0}: the tensor's size overflows")]
    Overflow(String),
    /// A tensor's data does not begin at a multiple of the alignment.
    #[error("{field}: offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        /// The field.
        field: String,
        /// Offset within the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor's data reaches beyond the end of the file.
    #[error(
        "{field}: the data of tensor {name:?} ends {beyond} bytes beyond the end of the file: it is truncated or damaged"
    )]
    OutOfBounds {
        /// The field.
        field: String,
        /// The tensor.
        name: String,
        /// By how much.
        beyond: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor_infos.offset: the data of tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The tensor that begins earlier.
        first: String,
        /// The tensor that begins inside it.
        second: String,
    },
    /// There is more in the file than its header and the padding of the last tensor: so many bytes.
    #[error("tensor_data: {0} bytes after the last tensor belong to nothing: the file is damaged")]
    TrailingBytes(u64),
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
