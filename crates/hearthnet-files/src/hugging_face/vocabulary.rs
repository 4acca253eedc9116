//! Tokenizer of a directory, converted to the metadata that llama.cpp's converter writes, with the
//! chat template and recommended sampling settings.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::classes::{Class, SpacePrefix};
use super::config::Config;
#[cfg(feature = "fuzzing")]
use super::config::object;
use super::error::ImportError;
use super::sentencepiece::{CONTROL, Token, UNUSED};
use super::{read, read_json, sentencepiece};
use crate::byte_alphabet;
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

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
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

/// The tokenizer's files, if they exist.
struct Files {
    tokenizer: Option<Map<String, Json>>,
    settings: Option<Map<String, Json>>,
}

/// Writes the tokenizer, if the directory has one, the chat template and related settings. `vocab`
/// is the number of embeddings.
pub(super) fn write(
    directory: &Path,
    config: &Config,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let vocab = config.vocab()?.min(crate::spec::MAX_SIZE);
    let files = Files {
        tokenizer: read_json(directory, TOKENIZER, MAX_TOKENIZER_BYTES)?,
        settings: read_json(directory, SETTINGS, MAX_TOKENIZER_BYTES)?,
    };
    let pieces = read(directory, PIECES, MAX_TOKENIZER_BYTES)?;
    let gpt2 = match (pieces, &files.tokenizer) {
        (Some(pieces), _) => {
            let tokens = sentence_piece(directory, &pieces, &files, config.class, vocab)?;
            write_tokens(&tokens, "llama", "default", writer)?;
            let scores: Vec<f32> = tokens.0.iter().map(|token| token.score).collect();
            writer.set_f32s("tokenizer.ggml.scores", &scores)?;
            false
        }
        (None, Some(tokenizer)) => {
            write_byte_level(tokenizer, &files, config.class, vocab, writer)?;
            true
        }
        (None, None) => return refuse_other_forms(directory),
    };
    write_space_prefix(&files, config.class, gpt2, writer)?;
    write_special(directory, files, config, vocab, writer)
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
    let settings = files.settings.as_ref();
    let setting = settings.and_then(|s| s.get("add_prefix_space")?.as_bool());
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
        for added in added_in_tokenizer(files.tokenizer.as_ref()) {
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
    let list = files.settings.as_ref();
    let list = list.and_then(|s| s.get("added_tokens_decoder")?.as_object());
    list.into_iter()
        .flatten()
        .filter_map(|(id, value)| Added::read(id.parse().ok(), value))
        .collect()
}

fn added_in_tokenizer(tokenizer: Option<&Map<String, Json>>) -> Vec<Added<'_>> {
    let list = tokenizer.and_then(|t| t.get("added_tokens")?.as_array());
    list.into_iter()
        .flatten()
        .filter_map(|value| Added::read(value.get("id").and_then(Json::as_u64), value))
        .collect()
}

fn write_byte_level(
    tokenizer: &Map<String, Json>,
    files: &Files,
    class: &Class,
    vocab: u32,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let wrong = |reason: &str| wrong(TOKENIZER, reason);
    let model = tokenizer.get("model").and_then(Json::as_object);
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
    let list = model.get("vocab").and_then(Json::as_object);
    let list = list.ok_or_else(|| wrong("it has no vocabulary"))?;
    let pre = pre_tokenizer(tokenizer, flag("ignore_merges"))?;
    let same = class.pre.iter().find(|(ours, _)| *ours == pre);
    let pre = same.map_or(pre, |(_, theirs)| theirs);

    let mut tokens = Tokens::unused(vocab);
    let beyond = || wrong("a token's id lies beyond the vocabulary that config.json has");
    let in_range = |id: u64| id < u64::from(vocab);
    for (text, id) in list {
        let id = id.as_u64().filter(|id| in_range(*id)).ok_or_else(beyond)?;
        tokens.set(id, text, 0.0, NORMAL);
    }
    let mut added: BTreeMap<u64, Added<'_>> = BTreeMap::new();
    let both = added_in_settings(files).into_iter();
    for token in both.chain(added_in_tokenizer(Some(tokenizer))) {
        if !in_range(token.id) {
            return Err(beyond());
        }
        added.insert(token.id, token);
    }
    for token in added.values() {
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
fn merges(model: &Map<String, Json>) -> Result<Vec<String>, ImportError> {
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

/// Name of the pre-tokeniser.
fn pre_tokenizer(tokenizer: &Map<String, Json>, whole: bool) -> Result<&'static str, ImportError> {
    let normaliser = tokenizer.get("normalizer").filter(|n| !n.is_null());
    if let Some(normaliser) = normaliser
        && !is_normal_form(normaliser)
    {
        let shown = super::config::shown(normaliser);
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

/// Writes the special tokens by kind, which of them begin and end a text, and the chat template.
fn write_special(
    directory: &Path,
    files: Files,
    config: &Config,
    vocab: u32,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let mut texts = texts_of(files.settings.as_ref());
    let mut adds = BTreeMap::new();
    if let Some(processor) = files
        .tokenizer
        .as_ref()
        .and_then(|t| t.get("post_processor"))
    {
        post_processor(processor, &mut texts, &mut adds);
    }
    if files.settings.is_none() {
        // Only the settings name the special tokens.
        texts.clear();
    }
    for kind in ["bos", "eos", "sep"] {
        let settings = files.settings.as_ref();
        let setting = settings.and_then(|s| s.get(&format!("add_{kind}_token"))?.as_bool());
        if let Some(setting) = setting {
            adds.entry(kind).or_insert(setting);
        }
    }
    let added = added_in_tokenizer(files.tokenizer.as_ref());
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
    match files.settings {
        Some(settings) => write_template(directory, &settings, writer),
        None => Ok(()),
    }
}

/// Texts of special tokens, by kind.
fn texts_of(settings: Option<&Map<String, Json>>) -> BTreeMap<&'static str, String> {
    let text = |kind: &str| {
        let entry = settings?.get(&format!("{kind}_token"))?;
        let text = entry.as_str().or_else(|| entry.get("content")?.as_str())?;
        Some(text.to_owned())
    };
    KINDS
        .iter()
        .filter_map(|(kind, _)| Some((*kind, text(kind)?)))
        .collect()
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

/// Writes the default chat template, and others by name.
fn write_template(
    directory: &Path,
    settings: &Map<String, Json>,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let key = "tokenizer.chat_template";
    let template = match settings.get("chat_template") {
        Some(template) => Some(template.clone()),
        None => template_file(directory)?,
    };
    match template {
        Some(Json::String(template)) => Ok(writer.set(key, Value::String(&template))?),
        Some(Json::Array(list)) => {
            let text = |entry: &Json, key: &str| Some(entry.get(key)?.as_str()?.to_owned());
            let mut names = Vec::new();
            for entry in &list {
                let (Some(name), Some(template)) = (text(entry, "name"), text(entry, "template"))
                else {
                    continue;
                };
                let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
                let name: String = name.chars().map(plain).collect();
                let full = match name.as_str() {
                    "default" => key.to_owned(),
                    name => format!("{key}.{name}"),
                };
                writer.set(&full, Value::String(&template))?;
                names.extend(Some(name).filter(|name| name != "default"));
            }
            match names.is_empty() {
                true => Ok(()),
                false => Ok(writer
                    .set_strings("tokenizer.chat_templates", names.iter().map(String::as_str))?),
            }
        }
        _ => Ok(()),
    }
}

fn template_file(directory: &Path) -> Result<Option<Json>, ImportError> {
    let name = "chat_template.jinja";
    if let Some(text) = read(directory, name, MAX_SMALL_BYTES)? {
        let text = String::from_utf8(text).map_err(|_| wrong(name, "this is not UTF-8"))?;
        return Ok(Some(Json::String(text)));
    }
    let file = read_json(directory, "chat_template.json", MAX_SMALL_BYTES)?;
    Ok(file.and_then(|mut file| file.remove("chat_template")))
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
        tokenizer: Some(object(TOKENIZER, bytes)?),
        settings: Some(object(SETTINGS, bytes)?),
    };
    let vocab = 512;
    let mut writer = Writer::new();
    let cut = files.tokenizer.as_ref().map_or(Ok(()), |tokenizer| {
        write_byte_level(tokenizer, &files, config.class, vocab, &mut writer)
    });
    // Special tokens are read even if the tokens are not.
    write_special(Path::new(""), files, &config, vocab, &mut writer)?;
    cut
}
