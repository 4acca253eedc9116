//! WordPiece, as in BERT: `tokenizer.ggml.model` is `bert`.
//!
//! A text is normalised and split into words and punctuation, and each word is cut into the longest
//! pieces of the vocabulary, from left to right. A word without such a cut, or of more than 100
//! characters, is the unknown token. In the file, `▁` marks a piece that begins a word.
//!
//! The `tokenizers` crate does this, as for the published models. llama.cpp cuts long words, too, and
//! lowercases a few letters differently.

use super::error::EncodeError;
use super::special::TokenKind;
use super::vocabulary::kind_of;
use hearthnet_files::tokenizer_parts::{TokenizerError, TokenizerParts};
use std::collections::HashMap;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece as Model;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    Model as _, NormalizedString, Normalizer as _, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer as _,
};

/// Mark of a piece that begins a word.
const BEGIN: char = '\u{2581}';
/// Mark of any other piece, in the crate's vocabulary.
const WITHIN: &str = "##";
/// Longest word with pieces, in characters: that of the published models.
const MAX_WORD_CHARS: usize = 100;
/// Name of the unknown token in the crate's vocabulary. Normalised text has no such character.
const UNKNOWN: &str = "\0";

pub(super) struct WordPiece {
    normaliser: BertNormalizer,
    pieces: Model,
}

impl WordPiece {
    pub(super) fn new(
        parts: &TokenizerParts<'_>,
        ids: &HashMap<&str, u32>,
        kinds: &[TokenKind],
    ) -> Result<Self, TokenizerError> {
        let key = "tokenizer.ggml.unknown_token_id";
        let words = parts.words.ok_or_else(|| TokenizerError::missing(key))?;
        if words.unknown as usize >= kinds.len() {
            return Err(TokenizerError::Malformed(format!(
                "the model file's `{key}` is {}, but there are only {} tokens",
                words.unknown,
                kinds.len()
            )));
        }
        // Text cannot become a control token.
        let text_kinds = [TokenKind::Normal, TokenKind::UserDefined];
        let texts = ids
            .iter()
            .filter(|(_, id)| text_kinds.contains(&kind_of(kinds, **id)));
        let mut vocabulary: Vocab = texts.map(|(text, id)| (piece(text), *id)).collect();
        vocabulary.insert(UNKNOWN.to_owned(), words.unknown);
        let pieces = Model::builder()
            .vocab(vocabulary)
            .unk_token(UNKNOWN.to_owned())
            .continuing_subword_prefix(WITHIN.to_owned())
            .max_input_chars_per_word(MAX_WORD_CHARS)
            .build()
            .map_err(TokenizerError::build)?;
        Ok(Self {
            normaliser: BertNormalizer::new(true, true, Some(words.strip_accents), words.lowercase),
            pieces,
        })
    }

    /// Appends the ids of a text without special tokens.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), EncodeError> {
        // The crate would keep the origin of each byte of the whole text. It splits at these, too.
        for run in text.split([' ', '\t', '\n', '\r']) {
            self.encode_run(run, ids)
                .map_err(|error| EncodeError::Bpe(error.to_string()))?;
        }
        Ok(())
    }

    fn encode_run(&self, run: &str, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        if run.is_empty() {
            return Ok(());
        }
        let mut normalised = NormalizedString::from(run);
        self.normaliser.normalize(&mut normalised)?;
        let mut words = PreTokenizedString::from(normalised);
        BertPreTokenizer.pre_tokenize(&mut words)?;
        for (word, ..) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            let tokens = self.pieces.tokenize(word)?;
            ids.extend(tokens.into_iter().map(|token| token.id));
        }
        Ok(())
    }
}

/// Piece as the crate writes it.
fn piece(text: &str) -> String {
    match text.strip_prefix(BEGIN) {
        Some(word) if !word.is_empty() => word.to_owned(),
        _ => format!("{WITHIN}{text}"),
    }
}
