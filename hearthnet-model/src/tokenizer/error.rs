//! What can be wrong with a file's tokenizer, and with a text.

use super::parts::MODEL;
use crate::gguf::MetadataError;

/// The longest text that is tokenised at once, in bytes: eight contexts of 131,072 tokens at
/// the usual four bytes per token. Merging takes some 80 bytes of memory for each byte.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// The tokenizer of a model file is unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A metadata value is of another type than the tokenizer needs, or out of its range.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// `tokenizer.ggml.model` or `tokenizer.ggml.pre` names what is not known here. Its rules decide the
    /// token ids, so nothing else is ever put in its place.
    #[error("{0}")]
    Unsupported(String),

    /// Something is missing, too large, or contradicts itself, or would let plain text become a control token. Texts of the file are quoted.
    #[error("{0}")]
    Malformed(String),
}

impl TokenizerError {
    /// The file has no value under a key that its tokenizer needs.
    pub(super) fn missing(key: &str) -> Self {
        let what = match key {
            MODEL => "it carries no tokenizer",
            _ => "its tokenizer is incomplete",
        };
        Self::Malformed(format!(
            "the model file has no `{key}`: {what}; convert the model again with a current converter"
        ))
    }

    /// The `tokenizers` crate, or one of the searchers, refused what passed our own checks.
    pub(crate) fn build(reason: impl std::fmt::Display) -> Self {
        Self::Malformed(format!(
            "the tokenizer of the model file cannot be built: {reason}"
        ))
    }
}

/// A text could not be turned into tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The text, of so many bytes, is longer than any context could hold.
    #[error("the text is {0} bytes long; at most {MAX_TEXT_BYTES} bytes are tokenised at once")]
    TextTooLong(usize),

    /// The `tokenizers` crate refused a word.
    #[error("the text cannot be tokenised: {0}")]
    Bpe(String),
}
