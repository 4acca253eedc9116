//! Files of a tokenizer, its tokens, and how they are written to a model file.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::hugging_face::error::ImportError;
use crate::hugging_face::sentencepiece::{CONTROL, Token, UNUSED};

/// The largest in use, Gemma's, has 33 MB.
pub(super) const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
pub(super) const MAX_SMALL_BYTES: u64 = 4 << 20;

pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const SETTINGS: &str = "tokenizer_config.json";
pub(super) const PIECES: &str = "tokenizer.model";
pub(super) const ADDED: &str = "added_tokens.json";

// `llama_token_type` of llama.cpp; others are numbered as in SentencePiece.
const NORMAL: i32 = 1;
pub(super) const USER_DEFINED: i32 = 4;

pub(super) fn wrong(file: &'static str, reason: impl Into<String>) -> ImportError {
    let reason = reason.into();
    ImportError::Tokenizer { file, reason }
}

fn beyond() -> ImportError {
    let reason = "a token's id lies beyond the vocabulary that config.json has";
    wrong(TOKENIZER, reason)
}

/// Texts and ids of the tokens that the model in `tokenizer.json` lists.
pub(super) fn listed(model: &Json) -> Result<&Map<String, Json>, ImportError> {
    let list = model.get("vocab").and_then(Json::as_object);
    list.ok_or_else(|| wrong(TOKENIZER, "it has no vocabulary"))
}

/// Tokens of a vocabulary, by id.
pub(super) struct Tokens(pub(super) Vec<Token>);

impl Tokens {
    /// `count` unused ids.
    pub(super) fn unused(count: u32) -> Self {
        let unused = |id| Token {
            text: format!("[PAD{id}]"),
            score: -10_000.0,
            kind: UNUSED,
        };
        Self((0..count).map(unused).collect())
    }

    /// Normal tokens of these texts and ids. The others of `count` ids are unused.
    pub(super) fn normal(list: &Map<String, Json>, count: u32) -> Result<Self, ImportError> {
        let mut tokens = Self::unused(count);
        for (text, id) in list {
            let id = id.as_u64().filter(|id| *id < u64::from(count));
            tokens.set(id.ok_or_else(beyond)?, text, 0.0, NORMAL);
        }
        Ok(tokens)
    }

    /// Sets a token; ids beyond the vocabulary are ignored.
    pub(super) fn set(&mut self, id: u64, text: &str, score: f32, kind: i32) {
        let place = usize::try_from(id).ok().and_then(|id| self.0.get_mut(id));
        if let Some(token) = place {
            text.clone_into(&mut token.text);
            (token.score, token.kind) = (score, kind);
        }
    }
}

/// Token that was added to a vocabulary.
pub(super) struct Added<'a> {
    pub(super) id: u64,
    pub(super) text: &'a str,
    pub(super) special: bool,
    pub(super) normalised: bool,
}

impl<'a> Added<'a> {
    pub(super) fn read(id: Option<u64>, value: &'a Json) -> Option<Self> {
        let flag = |key: &str| value.get(key).and_then(Json::as_bool);
        Some(Self {
            id: id?,
            text: value.get("content")?.as_str()?,
            special: flag("special").unwrap_or(false),
            normalised: flag("normalized").unwrap_or(true),
        })
    }
}

/// The tokenizer's files; `null` if they do not exist.
pub(super) struct Files {
    pub(super) tokenizer: Json,
    pub(super) settings: Json,
}

pub(super) fn write_tokens(
    tokens: &Tokens,
    model: &str,
    pre: &str,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    writer.set("tokenizer.ggml.model", Value::String(model))?;
    writer.set("tokenizer.ggml.pre", Value::String(pre))?;
    let texts = tokens.0.iter().map(|token| token.text.as_str());
    writer.set_strings("tokenizer.ggml.tokens", texts)?;
    let kinds: Vec<i32> = tokens.0.iter().map(|token| token.kind).collect();
    Ok(writer.set_i32s("tokenizer.ggml.token_type", &kinds)?)
}

/// Whether an added token is structure although it is not marked as special.
pub(super) fn looks_special(text: &str) -> bool {
    let between = |a: &str, b: &str| text.starts_with(a) && text.ends_with(b);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}

/// Text and kind of an added token; `plain` keeps the text unchanged.
pub(super) fn kind_of(added: &Added<'_>, plain: bool) -> (String, i32) {
    match added.special || (!plain && looks_special(added.text)) {
        true => (added.text.to_owned(), CONTROL),
        false if plain => (added.text.to_owned(), USER_DEFINED),
        false => (added.text.replace('\u{2581}', " "), USER_DEFINED),
    }
}

pub(super) fn added_in_settings(files: &Files) -> Vec<Added<'_>> {
    let list = files.settings.get("added_tokens_decoder");
    let list = list.and_then(Json::as_object);
    list.into_iter()
        .flatten()
        .filter_map(|(id, value)| Added::read(id.parse().ok(), value))
        .collect()
}

pub(super) fn added_in_tokenizer(files: &Files) -> Vec<Added<'_>> {
    let list = files.tokenizer.get("added_tokens");
    let list = list.and_then(Json::as_array);
    list.into_iter()
        .flatten()
        .filter_map(|value| Added::read(value.get("id").and_then(Json::as_u64), value))
        .collect()
}

/// Added tokens of both files, by id. If both have an id, the token of `tokenizer.json` counts.
pub(super) fn added(files: &Files, vocab: u32) -> Result<BTreeMap<u64, Added<'_>>, ImportError> {
    let mut by_id = BTreeMap::new();
    let both = added_in_settings(files).into_iter();
    for token in both.chain(added_in_tokenizer(files)) {
        if token.id >= u64::from(vocab) {
            return Err(beyond());
        }
        by_id.insert(token.id, token);
    }
    Ok(by_id)
}
