//! The tokenizer's part of a model file, as plain values.

use super::error::TokenizerError;
use crate::gguf::{Array, Gguf, MetadataError};

/// More tokens than any vocabulary has (Gemma 3: 262,144).
const MAX_TOKENS: usize = 1 << 20;
/// More merges than any vocabulary has (Gemma 3: about 515,000).
const MAX_MERGES: usize = 1 << 21;

/// What a tokenizer is made from. Nothing here is checked except the types and the counts:
/// [`Tokenizer::new`](super::Tokenizer::new) does the rest.
#[derive(Debug, Clone, Default)]
#[allow(clippy::exhaustive_structs)] // Tests and tools build it by hand.
pub struct TokenizerParts<'a> {
    /// `tokenizer.ggml.model`: the kind of tokenizer.
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: the name of the pre-tokeniser.
    pub pre: &'a str,
    /// `tokenizer.ggml.tokens`: the text of each token, by id.
    pub tokens: Vec<&'a str>,
    /// `tokenizer.ggml.token_type`: the type of each token, or nothing: all are normal.
    pub token_types: Option<Vec<i128>>,
    /// `tokenizer.ggml.merges`: two tokens with a space in between, best first.
    pub merges: Vec<&'a str>,
    /// `tokenizer.ggml.bos_token_id`: beginning of sequence.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`: end of sequence.
    pub eos: Option<u32>,
    /// Other ids that end a generation: end of turn, end of message, and those with which a
    /// code model leaves the file.
    pub other_ends: Vec<(&'static str, u32)>,
    /// `tokenizer.ggml.add_bos_token`: texts begin with the beginning-of-sequence token.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`: texts end with the end-of-sequence token.
    pub add_eos: Option<bool>,
}

pub(super) const MODEL: &str = "tokenizer.ggml.model";
pub(super) const PRE: &str = "tokenizer.ggml.pre";
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
pub(super) const MERGES: &str = "tokenizer.ggml.merges";
pub(super) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(super) const EOS: &str = "tokenizer.ggml.eos_token_id";
pub(super) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(super) const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
/// The keys of [`TokenizerParts::other_ends`].
const OTHER_ENDS: [&str; 5] = [
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
];

impl<'a> TokenizerParts<'a> {
    /// Reads the metadata of a model file. Nothing is copied but the lists themselves.
    ///
    /// `tokenizer.ggml.add_space_prefix` is not read: it belongs to SentencePiece tokenizers,
    /// and llama.cpp ignores it for byte-level BPE too.
    ///
    /// # Errors
    /// [`TokenizerError`] when a key is missing, has another type, or too many elements.
    pub fn from_gguf(gguf: &'a Gguf) -> Result<Self, TokenizerError> {
        let required = |key| gguf.str(key)?.ok_or(TokenizerError::Missing { key });
        let token_types = match list(gguf, TOKEN_TYPE, MAX_TOKENS)? {
            None => None,
            Some(types) => {
                let types = types
                    .integers()
                    .ok_or_else(|| not_a_list(TOKEN_TYPE, "integers"))?;
                Some(types.collect())
            }
        };
        let mut other_ends = Vec::new();
        for key in OTHER_ENDS {
            other_ends.extend(gguf.u32(key)?.map(|id| (key, id)));
        }
        Ok(Self {
            model: required(MODEL)?,
            pre: required(PRE)?,
            tokens: strings(gguf, TOKENS, MAX_TOKENS)?,
            token_types,
            merges: strings(gguf, MERGES, MAX_MERGES)?,
            bos: gguf.u32(BOS)?,
            eos: gguf.u32(EOS)?,
            other_ends,
            add_bos: gguf.bool(ADD_BOS)?,
            add_eos: gguf.bool(ADD_EOS)?,
        })
    }
}

/// A list of at most `limit` elements, counted before any of them is read.
fn list<'a>(
    gguf: &'a Gguf,
    key: &'static str,
    limit: usize,
) -> Result<Option<Array<'a>>, TokenizerError> {
    let Some(array) = gguf.array(key)? else {
        return Ok(None);
    };
    if array.len() > limit {
        return Err(TokenizerError::TooMany {
            key,
            count: array.len(),
            limit,
        });
    }
    Ok(Some(array))
}

fn strings<'a>(
    gguf: &'a Gguf,
    key: &'static str,
    limit: usize,
) -> Result<Vec<&'a str>, TokenizerError> {
    let array = list(gguf, key, limit)?.ok_or(TokenizerError::Missing { key })?;
    let strings = array.strings().ok_or_else(|| not_a_list(key, "strings"))?;
    Ok(strings.collect())
}

fn not_a_list(key: &str, of: &'static str) -> MetadataError {
    MetadataError::Mismatch {
        key: key.to_owned(),
        expected: if of == "strings" {
            "an array of strings"
        } else {
            "an array of integers"
        },
        found: "an array of another type".to_owned(),
    }
}
