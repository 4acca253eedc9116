//! Byte-level BPE, introduced by GPT-2: `tokenizer.ggml.model` is `gpt2`.
//!
//! A text is split into words (`pre`), the bytes of each word are written in the byte-level
//! alphabet ([`byte_alphabet`]), and the `tokenizers` crate merges pairs inside each word.

use super::error::EncodeError;
use super::pre::PreTokenizer;
use super::special::TokenKind;
use super::vocabulary::{merge, mergeable};
use hearthnet_files::byte_alphabet;
use hearthnet_files::tokenizer_parts::{TokenizerError, TokenizerParts};
use std::collections::HashMap;
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

pub(super) struct ByteLevel {
    pre: PreTokenizer,
    bpe: BPE,
    /// Whether a byte has a token of its own, by byte.
    has_token: [bool; 256],
}

impl ByteLevel {
    /// `merges` are the file's, already checked, best first.
    pub(super) fn new(
        parts: &TokenizerParts<'_>,
        ids: &HashMap<&str, u32>,
        kinds: &[TokenKind],
        merges: Vec<(String, String)>,
    ) -> Result<Self, TokenizerError> {
        let pre = PreTokenizer::new(parts.pre)?;
        let bpe = BPE::builder()
            .vocab_and_merges(mergeable(ids, kinds), merges)
            .ignore_merges(pre.ignore_merges)
            .build()
            .map_err(TokenizerError::build)?;
        let mut has_token = [false; 256];
        for (byte, has_token) in (0..=255_u8).zip(&mut has_token) {
            let written = byte_alphabet::char_of(byte);
            *has_token = bpe.token_to_id(written.encode_utf8(&mut [0; 4])).is_some();
        }
        Ok(Self {
            pre,
            bpe,
            has_token,
        })
    }

    /// Whether texts begin with the beginning-of-sequence token by default.
    pub(super) fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    pub(super) fn encodes_byte(&self, byte: u8) -> bool {
        self.has_token[usize::from(byte)]
    }

    /// Appends the ids of a text without special tokens.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), EncodeError> {
        let mut written = String::new();
        self.pre
            .split(text, &mut |word| self.encode_word(word, &mut written, ids))
    }

    /// Appends the ids of one word. `written` is a buffer to reuse.
    fn encode_word(
        &self,
        word: &str,
        written: &mut String,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        written.clear();
        if word.bytes().all(|byte| self.encodes_byte(byte)) {
            written.extend(word.bytes().map(byte_alphabet::char_of));
            return merge(&self.bpe, written, ids);
        }
        // A byte without a token produces no id and merges with none, but separates its neighbours.
        // The crate would close the gap.
        if self.pre.ignore_merges {
            written.extend(word.bytes().map(byte_alphabet::char_of));
            if let Some(id) = self.bpe.token_to_id(written) {
                ids.push(id);
                return Ok(());
            }
        }
        for run in word.as_bytes().split(|byte| !self.encodes_byte(*byte)) {
            written.clear();
            written.extend(run.iter().copied().map(byte_alphabet::char_of));
            // A part of a word is not a word: it is merged even if words are taken whole.
            merge(&self.bpe, written, ids)?;
        }
        Ok(())
    }
}

/// Appends the bytes of a token.
pub(super) fn append_token_bytes(text: &str, kind: TokenKind, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    if !kind.is_verbatim() {
        bytes.extend(text.chars().map_while(byte_alphabet::byte_of));
        if bytes.len() - start == text.chars().count() {
            return;
        }
        // Not in the byte-level alphabet: the text itself, as Hugging Face decodes it.
        bytes.truncate(start);
    }
    bytes.extend_from_slice(text.as_bytes());
}
