//! Special tokens, and which of them begin and end a text.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::tokens::{Files, added_in_tokenizer};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::hugging_face::config::Config;
use crate::hugging_face::error::ImportError;

/// Kinds of special tokens, and their keys in a model file.
const KINDS: &[(&str, &str)] = &[
    ("bos", "tokenizer.ggml.bos_token_id"),
    ("eos", "tokenizer.ggml.eos_token_id"),
    ("unk", "tokenizer.ggml.unknown_token_id"),
    ("sep", "tokenizer.ggml.seperator_token_id"),
    ("pad", "tokenizer.ggml.padding_token_id"),
    ("mask", "tokenizer.ggml.mask_token_id"),
    ("eot", "tokenizer.ggml.eot_token_id"),
];

/// Writes the special tokens by kind, and which of them begin and end a text.
pub(super) fn write(
    files: &Files,
    config: &Config,
    vocab: u32,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let mut texts = texts_of(&files.settings);
    for (kind, of_bert) in [("bos", "cls_token"), ("eos", "sep_token")] {
        if let Some(text) = text_of(&files.settings, of_bert) {
            texts.entry(kind).or_insert(text);
        }
    }
    let mut adds = BTreeMap::new();
    if let Some(processor) = files.tokenizer.get("post_processor") {
        post_processor(processor, &mut texts, &mut adds);
    }
    if files.settings.is_null() {
        // Only the settings name the special tokens.
        texts.clear();
    }
    for kind in ["bos", "eos", "sep"] {
        let setting = files.settings.get(format!("add_{kind}_token"));
        if let Some(setting) = setting.and_then(Json::as_bool) {
            adds.entry(kind).or_insert(setting);
        }
    }
    let added = added_in_tokenizer(files);
    let by_text = |text: &str| added.iter().find(|token| token.text == text);
    for (kind, key) in KINDS {
        let named = texts.get(*kind).and_then(|text| by_text(text));
        let fallback = config.class.special.iter().find(|(k, _)| k == kind);
        let fallback = fallback.and_then(|(_, text)| by_text(text));
        let id = named
            .map(|token| token.id)
            .or_else(|| config.token_id(kind).map(u64::from))
            .or_else(|| fallback.map(|token| token.id));
        let id = id.filter(|id| *id < u64::from(vocab));
        if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
            writer.set(key, Value::U32(id))?;
        }
    }
    // Same check as in the converter: it recognises the small code models whose vocabulary SmolLM
    // uses.
    if config.class.permuted && vocab == 49_152 {
        adds.insert("bos", false);
    }
    for (kind, add) in adds {
        let key = format!("tokenizer.ggml.add_{kind}_token");
        writer.set(&key, Value::Bool(add))?;
    }
    Ok(())
}

/// Texts of special tokens, by kind.
fn texts_of(settings: &Json) -> BTreeMap<&'static str, String> {
    let text = |kind: &str| text_of(settings, &format!("{kind}_token"));
    KINDS
        .iter()
        .filter_map(|(kind, _)| Some((*kind, text(kind)?)))
        .collect()
}

fn text_of(settings: &Json, key: &str) -> Option<String> {
    let entry = settings.get(key)?;
    let text = entry.as_str().or_else(|| entry.get("content")?.as_str())?;
    Some(text.to_owned())
}

/// Tokens that the tokenizer puts before and behind a text.
fn post_processor(
    processor: &Json,
    texts: &mut BTreeMap<&'static str, String>,
    adds: &mut BTreeMap<&'static str, bool>,
) {
    let single = std::slice::from_ref(processor);
    let steps = processor.get("processors").and_then(Json::as_array);
    for step in steps.map_or(single, Vec::as_slice) {
        match step.get("type").and_then(Json::as_str) {
            Some("ByteLevel") => {
                adds.entry("bos").or_insert(false);
                adds.entry("eos").or_insert(false);
            }
            Some("TemplateProcessing") => {
                let template = step.get("single").and_then(Json::as_array);
                let Some([first, .., last]) = template.map(Vec::as_slice) else {
                    continue;
                };
                let token = |part: &Json| special_of(part).map(str::to_owned);
                let (first, last) = (token(first), token(last));
                if let Some(first) = &first {
                    let bos = texts.entry("bos").or_insert_with(|| first.clone());
                    adds.insert("bos", bos == first);
                }
                if let Some(last) = &last {
                    let before = texts.insert("eos", last.clone());
                    if let Some(before) = before.filter(|before| before != last) {
                        texts.entry("eot").or_insert(before);
                    }
                    adds.insert("eos", true);
                }
                let pair = step.get("pair").and_then(Json::as_array);
                if let Some(between) =
                    pair.and_then(|pair| between(pair, first.as_deref(), last.as_deref()))
                {
                    let ends = [texts.get("sep"), texts.get("eos")];
                    let is_end = ends.into_iter().flatten().any(|end| *end == between);
                    adds.insert("sep", is_end && last.is_none());
                }
            }
            _ => {}
        }
    }
}

/// Special token at a position of a post-processor's template.
fn special_of(part: &Json) -> Option<&str> {
    part.get("SpecialToken")?.get("id")?.as_str()
}

/// Special token between two texts, from a template for text pairs; `None` if there is none.
/// `first` and `last` are the tokens at the ends of a single text.
fn between(pair: &[Json], first: Option<&str>, last: Option<&str>) -> Option<String> {
    let strip = |end: Option<&Json>, token: Option<&str>| {
        token.is_some() && end.and_then(special_of) == token
    };
    let from = usize::from(strip(pair.first(), first));
    let to = pair
        .len()
        .checked_sub(usize::from(strip(pair.last(), last)))?;
    let text = |part: &Json| Some(part.get("Sequence")?.get("id")?.as_str()?.to_owned());
    match pair.get(from..to)? {
        [a, middle, .., b] if text(a)? == "A" && text(b)? == "B" => {
            Some(special_of(middle).unwrap_or_default().to_owned())
        }
        _ => None,
    }
}
