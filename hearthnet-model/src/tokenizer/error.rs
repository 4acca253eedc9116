//! What can be wrong with a file's tokenizer, and with a text.

use super::MAX_TEXT_BYTES;
use super::pre::PreTokenizer;
use super::special::MAX_SPECIAL_BYTES;
use super::vocabulary::MAX_TOKEN_BYTES;
use crate::gguf::MetadataError;

/// The tokenizer of a model file is unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A metadata value is of another type than the tokenizer needs, or out of its range.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// The file has no value under a key that every tokenizer needs.
    #[error(
        "the model file has no `{0}`: it carries no tokenizer; convert the model again with a current converter"
    )]
    Missing(&'static str),

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

    /// A list has more elements than any real vocabulary.
    #[error("the model file's `{key}` has {count} elements; at most {limit} are accepted")]
    TooMany {
        /// The metadata key.
        key: &'static str,
        /// The number of elements found.
        count: usize,
        /// The number that is accepted.
        limit: usize,
    },

    /// The vocabulary has no tokens.
    #[error("the model file's `tokenizer.ggml.tokens` is empty")]
    Empty,

    /// A token's text is longer than any real token.
    #[error(
        "token {id} of the model file is {bytes} bytes long; at most {MAX_TOKEN_BYTES} are accepted"
    )]
    TokenTooLong {
        /// The token.
        id: u32,
        /// The length of its text in bytes.
        bytes: usize,
    },

    /// Two tokens have the same text, so a text would have no definite id.
    #[error("tokens {first} and {second} of the model file have the same text")]
    DuplicateToken {
        /// The token that came first.
        first: u32,
        /// The token with the same text.
        second: u32,
    },

    /// There is not exactly one token type for each token.
    #[error("the model file has {types} token types for {tokens} tokens")]
    TypeCount {
        /// Elements of `tokenizer.ggml.token_type`.
        types: usize,
        /// Elements of `tokenizer.ggml.tokens`.
        tokens: usize,
    },

    /// A token type is none of those that the GGUF format defines.
    #[error("token {id} of the model file has the unknown type {value}")]
    UnknownType {
        /// The token.
        id: u32,
        /// Its value in `tokenizer.ggml.token_type`.
        value: i128,
    },

    /// There is not exactly one score for each token.
    #[error("the model file has {scores} token scores for {tokens} tokens")]
    ScoreCount {
        /// Elements of `tokenizer.ggml.scores`.
        scores: usize,
        /// Elements of `tokenizer.ggml.tokens`.
        tokens: usize,
    },

    /// A score has no place in any order.
    #[error("the score of token {0} of the model file is not a number")]
    ScoreNotANumber(u32),

    /// A token that the file calls a byte is not written `<0x00>` to `<0xFF>`.
    #[error("token {0} of the model file should be a byte, and is not written as one")]
    ByteForm(u32),

    /// A SentencePiece vocabulary lacks a token for a byte or for the space, without which some
    /// texts would have no ids, or be lost.
    #[error("the model file has no token {0:?} that text may use")]
    MissingToken(String),

    /// A special id (beginning of sequence, end of turn, ...) is not in the vocabulary.
    #[error("the model file's `{key}` is {id}, but there are only {tokens} tokens")]
    IdOutOfRange {
        /// The metadata key.
        key: &'static str,
        /// Its value.
        id: u32,
        /// The size of the vocabulary.
        tokens: usize,
    },

    /// The file asks for a token at the beginning or end of every text, but names none.
    #[error("the model file sets `{flag}` but has no `{key}`")]
    MissingSpecial {
        /// The flag that asks for the token.
        flag: &'static str,
        /// The key that should name it.
        key: &'static str,
    },

    /// A merge is not two token texts with a space in between.
    #[error("merge {0} of the model file is not a pair of tokens")]
    MergeForm(usize),

    /// A merge takes or makes a token that is not in the vocabulary.
    #[error(
        "merge {index} of the model file needs the token {token:?}, which is not in its vocabulary"
    )]
    MergeUnknownToken {
        /// The position in `tokenizer.ggml.merges`, from 0.
        index: usize,
        /// The text of the token that is missing.
        token: String,
    },

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

    /// The `tokenizers` crate, or one of the searchers, refused what passed our own checks.
    #[error("the tokenizer of the model file cannot be built: {0}")]
    Build(String),
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
