//! Tokenizer of a directory, converted to the metadata that llama.cpp's converter writes, with the
//! chat template and recommended sampling settings.

mod byte_level;
mod chat_template;
mod pre_tokenizer;
mod special_tokens;

use std::path::Path;

use serde_json::Value as Json;

use super::class::{Class, SpacePrefix};
use super::config::Config;
#[cfg(feature = "fuzzing")]
use super::config::object;
use super::error::ImportError;
use super::sentencepiece::{CONTROL, Token, UNUSED};
use super::{read, read_json, sentencepiece};
use crate::gguf::Value;
use crate::gguf::writer::Writer;

/// The largest in use, Gemma's, has 33 MB.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
const MAX_SMALL_BYTES: u64 = 4 << 20;

const TOKENIZER: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";
const PIECES: &str = "tokenizer.model";
const ADDED: &str = "added_tokens.json";

// `llama_token_type` of llama.cpp; others are numbered as in SentencePiece.
const NORMAL: i32 = 1;
const USER_DEFINED: i32 = 4;

fn wrong(file: &'static str, reason: impl Into<String>) -> ImportError {
    let reason = reason.into();
    ImportError::Tokenizer { file, reason }
}

/// Tokens of a vocabulary, by id.
struct Tokens(Vec<Token>);

impl Tokens {
    /// `count` unused ids.
    fn unused(count: u32) -> Self {
        let unused = |id| Token {
            text: format!("[PAD{id}]"),
            score: -10_000.0,
            kind: UNUSED,
        };
        Self((0..count).map(unused).collect())
    }

    /// Sets a token; ids beyond the vocabulary are ignored.
    fn set(&mut self, id: u64, text: &str, score: f32, kind: i32) {
        let place = usize::try_from(id).ok().and_then(|id| self.0.get_mut(id));
        if let Some(token) = place {
            text.clone_into(&mut token.text);
            (token.score, token.kind) = (score, kind);
        }
    }
}

/// Token that was added to a vocabulary.
struct Added<'a> {
    id: u64,
    text: &'a str,
    special: bool,
    normalised: bool,
}

impl<'a> Added<'a> {
    fn read(id: Option<u64>, value: &'a Json) -> Option<Self> {
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
struct Files {
    tokenizer: Json,
    settings: Json,
}

/// Writes the tokenizer, if the directory has one, the chat template and related settings. `vocab`
/// is the number of embeddings.
pub(super) fn write(
    directory: &Path,
    config: &Config,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let vocab = config.vocab()?.min(crate::spec::MAX_SIZE);
    let json = |name| read_json(directory, name, MAX_TOKENIZER_BYTES);
    let files = Files {
        tokenizer: json(TOKENIZER)?.map_or(Json::Null, Json::Object),
        settings: json(SETTINGS)?.map_or(Json::Null, Json::Object),
    };
    let pieces = read(directory, PIECES, MAX_TOKENIZER_BYTES)?;
    let gpt2 = match pieces {
        Some(pieces) => {
            let tokens = sentence_piece(directory, &pieces, &files, config.class, vocab)?;
            write_tokens(&tokens, "llama", "default", writer)?;
            let scores: Vec<f32> = tokens.0.iter().map(|token| token.score).collect();
            writer.set_f32s("tokenizer.ggml.scores", &scores)?;
            false
        }
        None if files.tokenizer.is_null() => return refuse_other_forms(directory),
        None => {
            byte_level::write(&files, config.class, vocab, writer)?;
            true
        }
    };
    write_space_prefix(&files, config.class, gpt2, writer)?;
    special_tokens::write(&files, config, vocab, writer)?;
    match files.settings.is_null() {
        true => Ok(()),
        false => chat_template::write(directory, &files.settings, writer),
    }
}

/// A directory may lack a tokenizer, but one in an unsupported form is refused, not ignored.
fn refuse_other_forms(directory: &Path) -> Result<(), ImportError> {
    for file in ["vocab.json", "tekken.json"] {
        if directory.join(file).is_file() {
            return Err(wrong(
                file,
                "only tokenizer.json and tokenizer.model are read",
            ));
        }
    }
    Ok(())
}

fn write_tokens(
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

fn write_space_prefix(
    files: &Files,
    class: &Class,
    gpt2: bool,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let setting = files.settings.get("add_prefix_space");
    let setting = setting.and_then(Json::as_bool);
    let prefix = match class.space_prefix {
        SpacePrefix::Omitted => None,
        SpacePrefix::FromSettings => setting,
        SpacePrefix::Never => Some(false).filter(|_| !gpt2),
    };
    match prefix {
        Some(prefix) => Ok(writer.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix))?),
        None => Ok(()),
    }
}

/// Whether an added token is structure although it is not marked as special.
fn looks_special(text: &str) -> bool {
    let between = |a: &str, b: &str| text.starts_with(a) && text.ends_with(b);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}

fn sentence_piece(
    directory: &Path,
    pieces: &[u8],
    files: &Files,
    class: &Class,
    vocab: u32,
) -> Result<Tokens, ImportError> {
    let pieces = sentencepiece::pieces(pieces).map_err(|reason| wrong(PIECES, reason))?;
    let mut tokens = Tokens::unused(vocab);
    for (piece, id) in pieces.iter().zip(0..) {
        tokens.set(id, &piece.text, piece.score, piece.kind);
    }
    let added = read_json(directory, ADDED, MAX_SMALL_BYTES)?.unwrap_or_default();
    for (text, id) in &added {
        let id = id
            .as_u64()
            .ok_or_else(|| wrong(ADDED, "ids must be integers"))?;
        tokens.set(id, text, -1000.0, USER_DEFINED);
    }
    for added in added_in_settings(files) {
        let (text, kind) = kind_of(&added, class.plain_added);
        tokens.set(added.id, &text, -1000.0, kind);
    }
    if class.plain_added {
        for added in added_in_tokenizer(files) {
            let (text, kind) = kind_of(&added, true);
            tokens.set(added.id, &text, -1000.0, kind);
        }
    }
    Ok(tokens)
}

/// Text and kind of an added token; `plain` keeps the text unchanged.
fn kind_of(added: &Added<'_>, plain: bool) -> (String, i32) {
    match added.special || (!plain && looks_special(added.text)) {
        true => (added.text.to_owned(), CONTROL),
        false if plain => (added.text.to_owned(), USER_DEFINED),
        false => (added.text.replace('\u{2581}', " "), USER_DEFINED),
    }
}

fn added_in_settings(files: &Files) -> Vec<Added<'_>> {
    let list = files.settings.get("added_tokens_decoder");
    let list = list.and_then(Json::as_object);
    list.into_iter()
        .flatten()
        .filter_map(|(id, value)| Added::read(id.parse().ok(), value))
        .collect()
}

fn added_in_tokenizer(files: &Files) -> Vec<Added<'_>> {
    let list = files.tokenizer.get("added_tokens");
    let list = list.and_then(Json::as_array);
    list.into_iter()
        .flatten()
        .filter_map(|value| Added::read(value.get("id").and_then(Json::as_u64), value))
        .collect()
}

/// Recommended sampling settings: key in `generation_config.json`, and in a model file.
const RECOMMENDED: &[(&str, &str)] = &[
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("temperature", "temp"),
    ("repetition_penalty", "penalty_repeat"),
];

/// Writes the recommended sampling settings.
pub(super) fn write_recommended(directory: &Path, writer: &mut Writer) -> Result<(), ImportError> {
    let file = read_json(directory, "generation_config.json", MAX_SMALL_BYTES)?;
    let Some(file) = file else { return Ok(()) };
    let top_k = file.get("top_k").and_then(Json::as_u64);
    if let Some(top_k) = top_k.and_then(|k| u32::try_from(k).ok()) {
        writer.set("general.sampling.top_k", Value::U32(top_k))?;
    }
    for (from, to) in RECOMMENDED {
        if let Some(value) = file.get(*from).and_then(Json::as_f64) {
            writer.set(&format!("general.sampling.{to}"), Value::F32(value as f32))?;
        }
    }
    Ok(())
}

/// Fuzzing: reads bytes as `tokenizer.json` and as `tokenizer_config.json`.
#[cfg(feature = "fuzzing")]
pub(super) fn check(bytes: &[u8]) -> Result<(), ImportError> {
    let config = br#"{"architectures":["LlamaForCausalLM"],"hidden_act":"silu"}"#;
    let config = Config::parse(config)?;
    let files = Files {
        tokenizer: Json::Object(object(TOKENIZER, bytes)?),
        settings: Json::Object(object(SETTINGS, bytes)?),
    };
    let vocab = 512;
    let mut writer = Writer::new();
    let written = byte_level::write(&files, config.class, vocab, &mut writer);
    // Special tokens are read even if the tokens are not.
    special_tokens::write(&files, &config, vocab, &mut writer)?;
    chat_template::write(Path::new(""), &files.settings, &mut writer)?;
    written
}
