//! Vocabulary of WordPiece in `tokenizer.json`, as of BERT.

use serde_json::Value as Json;

use super::tokens::{Files, TOKENIZER, Tokens, added, kind_of, listed, write_tokens, wrong};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::hugging_face::error::ImportError;
use crate::hugging_face::json::shown;
use crate::hugging_face::sentencepiece::CONTROL;
use crate::tokenizer_parts::{LOWERCASE, STRIP_ACCENTS};

/// Mark of a piece within a word.
const WITHIN: &str = "##";
/// Mark of a piece at the beginning of a word, in model files.
const BEGIN: char = '\u{2581}';

/// Whether `tokenizer.json` has such a vocabulary.
pub(super) fn is_used(files: &Files) -> bool {
    let model = files.tokenizer.get("model");
    model.and_then(|model| model.get("type")) == Some(&Json::from("WordPiece"))
}

/// Writes the vocabulary.
pub(super) fn write(files: &Files, vocab: u32, writer: &mut Writer) -> Result<(), ImportError> {
    let model = files.tokenizer.get("model").unwrap_or(&Json::Null);
    for (key, expected) in [
        ("continuing_subword_prefix", Json::from(WITHIN)),
        ("max_input_chars_per_word", Json::from(100)),
    ] {
        if let Some(value) = model.get(key).filter(|value| **value != expected) {
            let reason = format!("{key} is {}; only {expected} is read", shown(value));
            return Err(wrong(TOKENIZER, reason));
        }
    }
    let mut tokens = Tokens::normal(listed(model)?, vocab)?;
    for token in added(files, vocab)?.values() {
        let (text, kind) = kind_of(token, false);
        tokens.set(token.id, &text, 0.0, kind);
    }
    for token in tokens.0.iter_mut().filter(|token| token.kind != CONTROL) {
        token.text = match token.text.strip_prefix(WITHIN) {
            Some(within) => within.to_owned(),
            None => format!("{BEGIN}{}", token.text),
        };
    }
    // The name of the pre-tokeniser changes nothing.
    write_tokens(&tokens, "bert", "bert-bge", writer)?;
    write_normaliser(&files.tokenizer, writer)
}

/// Writes how texts are normalised before they are split.
fn write_normaliser(tokenizer: &Json, writer: &mut Writer) -> Result<(), ImportError> {
    let of_bert = |key: &str, kind: &str| {
        let value = tokenizer.get(key).unwrap_or(&Json::Null);
        match value.get("type") == Some(&Json::from(kind)) {
            true => Ok(value),
            false => {
                let shown = shown(value);
                Err(wrong(
                    TOKENIZER,
                    format!("this {key} is not supported: {shown}"),
                ))
            }
        }
    };
    of_bert("pre_tokenizer", "BertPreTokenizer")?;
    let normaliser = of_bert("normalizer", "BertNormalizer")?;
    for key in ["clean_text", "handle_chinese_chars"] {
        if normaliser.get(key) == Some(&Json::Bool(false)) {
            let reason = format!("the normalizer's {key} is false; only true is supported");
            return Err(wrong(TOKENIZER, reason));
        }
    }
    for (key, to) in [("lowercase", LOWERCASE), ("strip_accents", STRIP_ACCENTS)] {
        if let Some(flag) = normaliser.get(key).and_then(Json::as_bool) {
            writer.set(to, Value::Bool(flag))?;
        }
    }
    Ok(())
}
