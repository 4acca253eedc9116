//! Pre-tokenisers that are known, by the splitters in `tokenizer.json`.

use serde_json::Value as Json;

use super::tokens::{TOKENIZER, wrong};
use crate::hugging_face::error::ImportError;
use crate::hugging_face::json::shown;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Known pre-tokenisers: the splitter, whether a word that is a token is taken whole, and the name
/// in a model file.
const PRE: &[(Cut<'static>, Option<bool>, &str)] = &[
    (Cut::Words, Some(false), "gpt-2"),
    (Cut::DigitsAndWords, Some(false), "smollm"),
    (Cut::Pattern(GPT2), Some(false), "gpt-2"),
    (Cut::Pattern(LLAMA3), Some(true), "llama-bpe"),
    (Cut::Pattern(LLAMA3), Some(false), "dbrx"),
    (Cut::Pattern(QWEN2), Some(false), "qwen2"),
    (Cut::Pattern(SEED), Some(false), "seed-coder"),
    (Cut::Pattern(TEKKEN), None, "tekken"),
    (Cut::Pattern(GPT4O), None, "gpt-4o"),
];

/// Splitter of texts into words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cut<'a> {
    /// The rule of byte-level BPE.
    Words,
    /// Splits off every digit, then as `Words`.
    DigitsAndWords,
    /// Regular expression.
    Pattern(&'a str),
}

/// Name of the pre-tokeniser.
pub(super) fn name(tokenizer: &Json, whole: bool) -> Result<&'static str, ImportError> {
    let normaliser = tokenizer.get("normalizer").filter(|n| !n.is_null());
    if let Some(normaliser) = normaliser
        && !is_normal_form(normaliser)
    {
        let shown = shown(normaliser);
        return Err(wrong(
            TOKENIZER,
            format!("this normalizer is not supported: {shown}"),
        ));
    }
    let value = tokenizer.get("pre_tokenizer").unwrap_or(&Json::Null);
    let unknown = || {
        let shown: String = value.to_string().chars().take(300).collect();
        wrong(
            TOKENIZER,
            format!("this pre_tokenizer is not supported: {shown}"),
        )
    };
    let cut = cut(value).ok_or_else(unknown)?;
    let known = PRE
        .iter()
        .find(|(known, ignores, _)| *known == cut && ignores.is_none_or(|i| i == whole));
    known.map(|(_, _, name)| *name).ok_or_else(unknown)
}

/// Accepts NFC: nearly all text is composed already, and llama.cpp does not normalise.
fn is_normal_form(normaliser: &Json) -> bool {
    match normaliser.get("type").and_then(Json::as_str) {
        Some("NFC") => true,
        Some("Sequence") => normaliser
            .get("normalizers")
            .and_then(Json::as_array)
            .is_some_and(|list| list.iter().all(is_normal_form)),
        _ => false,
    }
}

fn cut(pre: &Json) -> Option<Cut<'_>> {
    let kind = |value: &Json| value.get("type").and_then(Json::as_str).map(str::to_owned);
    let single = std::slice::from_ref(pre);
    let steps = match kind(pre)?.as_str() {
        "Sequence" => pre.get("pretokenizers")?.as_array()?.as_slice(),
        _ => single,
    };
    let flag = |value: &Json, key: &str, or: bool| value.get(key).map_or(Some(or), Json::as_bool);
    // Byte-level BPE splits texts itself unless it is configured not to.
    let (last, before) = steps.split_last()?;
    if kind(last)? != "ByteLevel" || flag(last, "add_prefix_space", true)? {
        return None;
    }
    match (before, flag(last, "use_regex", true)?) {
        ([], true) => Some(Cut::Words),
        ([digits], true) => {
            let each = kind(digits)? == "Digits" && flag(digits, "individual_digits", false)?;
            each.then_some(Cut::DigitsAndWords)
        }
        ([split], false) => {
            let isolated = kind(split)? == "Split"
                && split.get("behavior")?.as_str()? == "Isolated"
                && !flag(split, "invert", false)?;
            let pattern = split.get("pattern")?.get("Regex")?.as_str()?;
            isolated.then_some(Cut::Pattern(pattern))
        }
        _ => None,
    }
}
