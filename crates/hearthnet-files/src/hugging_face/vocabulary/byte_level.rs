//! Vocabulary of byte-level BPE in `tokenizer.json`.

use serde_json::Value as Json;

use super::pre_tokenizer;
use super::tokens::{Added, Files, TOKENIZER, Tokens, added, kind_of, listed, write_tokens, wrong};
use crate::byte_alphabet;
use crate::gguf::writer::Writer;
use crate::hugging_face::class::Class;
use crate::hugging_face::error::ImportError;

/// Writes a vocabulary of byte-level BPE.
pub(super) fn write(
    files: &Files,
    class: &Class,
    vocab: u32,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let wrong = |reason: &str| wrong(TOKENIZER, reason);
    let model = files.tokenizer.get("model");
    let model = model.filter(|model| model.is_object());
    let model = model.ok_or_else(|| wrong("it has no model"))?;
    let flag = |key: &str| model.get(key).and_then(Json::as_bool).unwrap_or(false);
    // Files without a type are older than the key.
    if model.get("type").is_some_and(|t| t != "BPE") {
        return Err(wrong("only byte pair encoding is read"));
    }
    if flag("byte_fallback") {
        return Err(wrong(
            "this vocabulary is SentencePiece's, whose scores are in tokenizer.model only: put that file beside it",
        ));
    }
    let list = listed(model)?;
    let pre = pre_tokenizer::name(&files.tokenizer, flag("ignore_merges"))?;
    let same = class.pre.iter().find(|(ours, _)| *ours == pre);
    let pre = same.map_or(pre, |(_, theirs)| theirs);

    let mut tokens = Tokens::normal(list, vocab)?;
    for token in added(files, vocab)?.values() {
        let text = match token.normalised {
            true => token.text.to_owned(),
            false => decoded(token.text),
        };
        let text = Added {
            text: &text,
            ..*token
        };
        let (text, kind) = kind_of(&text, false);
        tokens.set(token.id, &text, 0.0, kind);
    }
    write_tokens(&tokens, "gpt2", pre, writer)?;
    let merges = merges(model)?;
    if !merges.is_empty() {
        writer.set_strings("tokenizer.ggml.merges", merges.iter().map(String::as_str))?;
    }
    Ok(())
}

/// Text of an added token after encoding and decoding: a text in the byte-level alphabet becomes
/// the bytes that it stands for.
fn decoded(text: &str) -> String {
    let bytes: Option<Vec<u8>> = text.chars().map(byte_alphabet::byte_of).collect();
    match bytes {
        Some(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        None => text.to_owned(),
    }
}

/// Merges, best first, in the form `LEFT RIGHT`.
fn merges(model: &Json) -> Result<Vec<String>, ImportError> {
    let bad = || wrong(TOKENIZER, "merges must be texts or pairs of texts");
    let list = match model.get("merges") {
        None => return Ok(Vec::new()),
        Some(list) => list.as_array().ok_or_else(bad)?,
    };
    let merge = |value: &Json| match value {
        Json::String(merge) => Some(merge.clone()),
        Json::Array(pair) => match pair.as_slice() {
            [Json::String(left), Json::String(right)] => {
                let one = |text: &str| text.replace(' ', "\u{120}");
                Some(format!("{} {}", one(left), one(right)))
            }
            _ => None,
        },
        _ => None,
    };
    list.iter().map(|m| merge(m).ok_or_else(bad)).collect()
}
