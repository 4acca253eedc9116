//! What can be wrong with a file's tokenizer, and with a text.

use super::MAX_TEXT_BYTES;
use super::pre::PreTokenizer;
use super::special::MAX_SPECIAL_BYTES;
use crate::gguf::MetadataError;

/// The tokenizer of a model file is unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A metadata value is of another type than the tokenizer needs, or out of its range.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// `tokenizer.ggml.model` names another algorithm than the two that are known here.
    #[error(
        "the model file's tokenizer is of kind {0:?}; only `gpt2` (byte-level BPE) and `llama` (SentencePiece) are supported"
    )]
    UnsupportedModel(String),

    /// `tokenizer.ggml.pre` names a pre-tokeniser that is not known here. Its rules decide the
    /// token ids, so another one is never put in its place.
    #[error(
        "the model file's pre-tokeniser {0:?} is not supported (known: {known})",
        known = PreTokenizer::names().collect::<Vec<_>>().join(", ")
    )]
    UnsupportedPre(String),

    /// A merge takes or makes a control token: then plain text could turn into that token.
    #[error(
        "merge {index} of the model file would let plain text become the control token {token:?}"
    )]
    MergeControlToken {
        /// The position in `tokenizer.ggml.merges`, from 0.
        index: usize,
        /// The text of the control token.
        token: String,
    },

    /// The special tokens together, of so many bytes, are larger than any real set of them.
    #[error(
        "the special tokens of the model file take {0} bytes; at most {MAX_SPECIAL_BYTES} are accepted"
    )]
    SpecialTooLarge(usize),

    /// What else is missing, too large, or contradicts itself. Texts of the file are quoted.
    #[error("{0}")]
    Malformed(String),
}

impl TokenizerError {
    /// The file has no value under a key that every tokenizer needs.
    pub(super) fn missing(key: &str) -> Self {
        Self::Malformed(format!(
            "the model file has no `{key}`: it carries no tokenizer; convert the model again with a \
             current converter"
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
