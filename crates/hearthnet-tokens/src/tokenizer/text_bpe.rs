//! BPE over the characters of a text, as in Gemma 4: `tokenizer.ggml.model` is `gemma4`.
//!
//! Spaces are written as `▁` as in SentencePiece vocabularies, pairs are merged in the order of a
//! list as in byte-level ones, and a character without a token becomes the tokens of its bytes.
//! Text is split at runs of line feeds, and a run that is a token is taken whole, as in llama.cpp.

use super::error::EncodeError;
use super::sentencepiece::{self, SPACE};
use super::special::TokenKind;
use super::vocabulary::{merge, mergeable};
use hearthnet_files::tokenizer_parts::{TokenizerError, TokenizerParts};
use std::collections::HashMap;
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

pub(super) struct TextBpe {
    bpe: BPE,
}

impl TextBpe {
    /// `merges` are the file's, already checked, best first. Corrects the kinds of the tokens of
    /// bytes.
    pub(super) fn new(
        parts: &TokenizerParts<'_>,
        ids: &HashMap<&str, u32>,
        kinds: &mut [TokenKind],
        merges: Vec<(String, String)>,
    ) -> Result<Self, TokenizerError> {
        sentencepiece::byte_tokens(parts, ids, kinds)?;
        let bpe = BPE::builder()
            .vocab_and_merges(mergeable(ids, kinds), merges)
            .byte_fallback(true)
            // Lines rarely repeat, and are long.
            .cache_capacity(0)
            .build()
            .map_err(TokenizerError::build)?;
        Ok(Self { bpe })
    }

    /// Appends the ids of a text without special tokens.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), EncodeError> {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let is_break = first == '\n';
            let end = rest.find(|c: char| (c == '\n') != is_break);
            let (run, after) = rest.split_at(end.unwrap_or(rest.len()));
            rest = after;
            if let Some(id) = self.bpe.token_to_id(run).filter(|_| is_break) {
                ids.push(id);
                continue;
            }
            merge(&self.bpe, &run.replace(' ', &SPACE.to_string()), ids)?;
        }
        Ok(())
    }
}
