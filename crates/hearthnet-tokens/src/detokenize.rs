//! Streaming conversion of token ids to text, in whole characters.

use crate::tokenizer::{TokenKind, Tokenizer};
use std::fmt;

/// Converts a stream of tokens to a stream of text.
///
/// A token's bytes need not be whole characters: an emoji is often three or four tokens.
/// [`push`](Self::push) returns whole characters only. It holds an unfinished character until it is
/// complete or known to be invalid, and then returns U+FFFD, as [`String::from_utf8_lossy`] does.
///
/// The pieces together equal [`Tokenizer::decode`] of all tokens; for a stream that
/// [continues](Self::continuing) a text, the rest of it. The space prefix that some vocabularies
/// add is removed: see [there](crate::tokenizer#the-space-prefix).
///
/// ```text
/// push(" 👋")  first three bytes  ->  " "       (F0 9F 91 held)
/// push(last byte)                 ->  "👋"
/// finish()                        ->  ""
/// ```
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    special: bool,
    /// The next token begins with the vocabulary's space prefix.
    space_prefix: bool,
    /// Control tokens that produce their names.
    shown: Vec<u32>,
    /// Beginning of a character: at most three bytes between calls.
    held: Vec<u8>,
}

/// Omits the text, so that it cannot enter a log.
impl fmt::Debug for Detokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detokenizer")
            .field("special", &self.special)
            .field("held_bytes", &self.held.len())
            .finish_non_exhaustive()
    }
}

impl Detokenizer {
    /// Starts at the beginning of a text. Control tokens produce no text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            space_prefix: tokenizer.adds_space_prefix(),
            ..Self::continuing(tokenizer)
        }
    }

    /// Starts in the middle of a text. Control tokens produce no text.
    pub fn continuing(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            special: false,
            space_prefix: false,
            shown: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Control tokens with these texts produce them.
    #[must_use]
    pub fn showing(mut self, texts: &[&str]) -> Self {
        self.shown = self.tokenizer.control_tokens(texts);
        self
    }

    /// True if every character is complete.
    pub fn is_whole(&self) -> bool {
        self.held.is_empty()
    }

    /// Control tokens produce their names.
    pub fn with_special(tokenizer: &Tokenizer) -> Self {
        Self {
            special: true,
            ..Self::new(tokenizer)
        }
    }

    /// Returns the text that `id` completes: often the token's own text, sometimes none yet. An id
    /// outside the vocabulary becomes U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        let kind = self.tokenizer.token_kind(id);
        let structure = matches!(kind, Some(TokenKind::Control | TokenKind::Unknown));
        if self.special || !structure || self.shown.contains(&id) {
            let bytes = self.tokenizer.token_bytes(id);
            let mut bytes = bytes.unwrap_or("\u{fffd}".as_bytes());
            if self.space_prefix && !structure {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
            self.held.extend_from_slice(bytes);
        }
        self.space_prefix = structure && self.tokenizer.adds_space_prefix();
        self.take_whole()
    }

    /// Returns the held bytes at the end of the stream: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }

    fn whole(mut self, ids: &[u32]) -> String {
        let mut text: String = ids.iter().map(|id| self.push(*id)).collect();
        text.push_str(&self.finish());
        text
    }

    /// Removes all bytes but an incomplete character at the end.
    fn take_whole(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, broken) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(len) = error.error_len() else {
                // The bytes end within a character that is valid so far.
                self.held = broken.to_vec();
                return text;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = broken.get(len..).unwrap_or_default();
        }
        text.push_str(&String::from_utf8_lossy(rest));
        self.held.clear();
        text
    }
}

impl Tokenizer {
    /// Decodes `ids` without control tokens. Invalid UTF-8 and ids outside the vocabulary become
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        Detokenizer::new(self).whole(ids)
    }

    /// Decodes `ids` with the names of control tokens.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        Detokenizer::with_special(self).whole(ids)
    }
}
