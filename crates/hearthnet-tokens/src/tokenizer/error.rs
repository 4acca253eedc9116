//! Errors of encoding.

/// Longest text that is tokenised at once, in bytes: eight contexts of 131,072 tokens at four bytes
/// per token. Merging takes about 80 bytes of memory per byte.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

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
