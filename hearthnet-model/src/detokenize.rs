//! Token ids to text, one at a time, never half a character.

use crate::tokenizer::{TokenKind, Tokenizer};
use std::fmt;

/// Turns a stream of tokens into a stream of text.
///
/// A token's bytes need not be whole characters: an emoji is often three or four tokens. What
/// [`push`](Self::push) returns is always whole; an unfinished character is kept until it is
/// finished, or known to be broken (then it becomes U+FFFD, as in
/// [`String::from_utf8_lossy`]). The pieces in a row are exactly [`Tokenizer::decode`] of all
/// tokens, and for a stream that [continues](Self::continuing) a text, the rest of it. The space
/// that some vocabularies put before a text is taken off: see
/// [there](crate::tokenizer#the-space-that-nobody-wrote).
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
    /// The next token begins with a space that nobody wrote.
    space_prefix: bool,
    /// The beginning of a character: at most three bytes between calls.
    held: Vec<u8>,
}

/// Leaves the text out, so that no log can show it.
impl fmt::Debug for Detokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detokenizer")
            .field("special", &self.special)
            .field("held_bytes", &self.held.len())
            .finish_non_exhaustive()
    }
}

impl Detokenizer {
    /// For a text from its beginning. Control tokens give no text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            space_prefix: tokenizer.adds_space_prefix(),
            ..Self::continuing(tokenizer)
        }
    }

    /// For the rest of a text that others have the beginning of. Control tokens give no text.
    pub fn continuing(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            special: false,
            space_prefix: false,
            held: Vec::new(),
        }
    }

    /// Control tokens give their names.
    pub fn with_special(tokenizer: &Tokenizer) -> Self {
        Self {
            special: true,
            ..Self::new(tokenizer)
        }
    }

    /// The text that `id` completes; often its own text, sometimes nothing yet. An id outside
    /// the vocabulary reads as U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        let kind = self.tokenizer.token_kind(id);
        let structure = matches!(kind, Some(TokenKind::Control | TokenKind::Unknown));
        if self.special || !structure {
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

    /// What was held, now that nothing follows: a character that stayed unfinished is U+FFFD.
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

    /// Takes all bytes but those of a character that more bytes could still finish.
    fn take_whole(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, broken) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(len) = error.error_len() else {
                // The end of what there is, and so far the beginning of a character.
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
    /// The text of `ids`, control tokens left out. Bytes that are no UTF-8 become U+FFFD, and so
    /// does an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> String {
        Detokenizer::new(self).whole(ids)
    }

    /// The text of `ids`, control tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        Detokenizer::with_special(self).whole(ids)
    }
}
