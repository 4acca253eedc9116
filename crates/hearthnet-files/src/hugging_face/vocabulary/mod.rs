//! Tokenizer of a directory, converted to the metadata that llama.cpp's converter writes, with the
//! chat template and recommended sampling settings.

mod byte_level;
mod chat_template;
mod pre_tokenizer;
mod special_tokens;
mod tokens;
mod word_piece;

use std::path::Path;

use serde_json::Value as Json;

use tokens::{
    ADDED, Files, MAX_SMALL_BYTES, MAX_TOKENIZER_BYTES, PIECES, SETTINGS, TOKENIZER, Tokens,
    USER_DEFINED, added_in_settings, added_in_tokenizer, kind_of, write_tokens, wrong,
};

use super::class::{Class, SpacePrefix};
use super::config::Config;
use super::directory::{read, read_json};
use super::error::ImportError;
#[cfg(feature = "fuzzing")]
use super::json::object;
use super::sentencepiece;
use crate::gguf::Value;
use crate::gguf::writer::Writer;

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
        None if word_piece::is_used(&files) => {
            word_piece::write(&files, vocab, writer)?;
            false
        }
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
