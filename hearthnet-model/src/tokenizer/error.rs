//! Errors of a file's tokenizer, and of encoding.

use super::parts::MODEL;
use crate::gguf::MetadataError;

/// Longest text that is tokenised at once, in bytes: eight contexts of 131,072 tokens at four bytes
/// per token. Merging takes about 80 bytes of memory per byte.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// Why the tokenizer of a model file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A metadata value has the wrong type or is out of range.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// `tokenizer.ggml.model` or `tokenizer.ggml.pre` has an unknown value. There is no fallback,
    /// because the rules decide the token ids.
    #[error("{0}")]
    Unsupported(String),

    /// A part is missing, too large or inconsistent, or would let plain text become a control
    /// token. Texts of the file are quoted.
    #[error("{0}")]
    Malformed(String),
}

impl TokenizerError {
    /// Error for a missing key.
    pub(super) fn missing(key: &str) -> Self {
        let what = match key {
            MODEL => "it has no tokenizer",
            _ => "its tokenizer is incomplete",
        };
        Self::Malformed(format!(
            "the model file has no `{key}`: {what}; convert the model again with a current converter"
        ))
    }

    /// Error of the `tokenizers` crate or a searcher on input that has passed our own checks.
    pub(crate) fn build(reason: impl std::fmt::Display) -> Self {
        Self::Malformed(format!(
            "the tokenizer of the model file cannot be built: {reason}"
        ))
    }
}

/// Why a text could not be tokenised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The text, of this many bytes, is longer than any context.
    #[error("the text is {0} bytes long; at most {MAX_TEXT_BYTES} bytes are tokenised at once")]
    TextTooLong(usize),

    #[error("the text cannot be tokenised: {0}")]
    Bpe(String),
}
