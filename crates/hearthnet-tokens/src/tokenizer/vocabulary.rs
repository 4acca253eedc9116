//! Checks the lists of a model file, and converts them for encoding.

use super::error::EncodeError;
use super::special::{END_TEXTS, LEAVE_FILE_TEXTS, TokenKind};
use hearthnet_files::tokenizer_parts::{BOS, EOM, EOS, EOT, TokenizerError, TokenizerParts};
use std::collections::{BTreeSet, HashMap, HashSet};
use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

/// Longest accepted token, in bytes. Real ones have at most about 300.
pub(super) const MAX_TOKEN_BYTES: usize = 4096;

/// Kind of a token; `Unused` outside the vocabulary.
pub(super) fn kind_of(kinds: &[TokenKind], id: u32) -> TokenKind {
    let kind = usize::try_from(id).ok().and_then(|id| kinds.get(id));
    kind.copied().unwrap_or(TokenKind::Unused)
}

/// The tokens that text may become by merging. Control tokens are none of them, so text that is not
/// parsed for control tokens cannot become one.
pub(super) fn mergeable(ids: &HashMap<&str, u32>, kinds: &[TokenKind]) -> Vocab {
    ids.iter()
        .filter(|(_, id)| !kind_of(kinds, **id).is_structure())
        .map(|(text, id)| ((*text).to_owned(), *id))
        .collect()
}

/// Appends the ids of a text whose pairs are merged.
pub(super) fn merge(bpe: &BPE, text: &str, ids: &mut Vec<u32>) -> Result<(), EncodeError> {
    let tokens = bpe
        .tokenize(text)
        .map_err(|error| EncodeError::Bpe(error.to_string()))?;
    ids.extend(tokens.into_iter().map(|token| token.id));
    Ok(())
}

/// Kind of each token, according to the file.
pub(super) fn kinds(parts: &TokenizerParts<'_>) -> Result<Vec<TokenKind>, TokenizerError> {
    let tokens = parts.tokens.len();
    if tokens == 0 {
        let empty = "the model file's `tokenizer.ggml.tokens` is empty";
        return Err(TokenizerError::Malformed(empty.to_owned()));
    }
    let Some(types) = &parts.token_types else {
        return Ok(vec![TokenKind::Normal; tokens]);
    };
    if types.len() != tokens {
        return Err(TokenizerError::Malformed(format!(
            "the model file has {} token types for {tokens} tokens",
            types.len()
        )));
    }
    types
        .iter()
        .zip(0..)
        .map(|(&value, id)| {
            TokenKind::from_gguf(value).ok_or_else(|| {
                TokenizerError::Malformed(format!(
                    "token {id} of the model file has the unknown type {value}"
                ))
            })
        })
        .collect()
}

/// Id of each text. Tokens without text (unused ids in some files) are left out.
pub(super) fn ids_by_text<'a>(tokens: &[&'a str]) -> Result<HashMap<&'a str, u32>, TokenizerError> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (&text, id) in tokens.iter().zip(0..) {
        if text.len() > MAX_TOKEN_BYTES {
            let bytes = text.len();
            return Err(TokenizerError::Malformed(format!(
                "token {id} of the model file is {bytes} bytes long; at most {MAX_TOKEN_BYTES} are \
                 accepted"
            )));
        }
        if text.is_empty() {
            continue;
        }
        if let Some(first) = ids.insert(text, id) {
            return Err(TokenizerError::Malformed(format!(
                "tokens {first} and {id} of the model file have the same text"
            )));
        }
    }
    Ok(ids)
}

/// Checked merges of a file.
#[derive(Default)]
pub(super) struct Merges {
    /// The two tokens of each merge, best first.
    pub(super) pairs: Vec<(String, String)>,
    /// Whether a merge uses or produces the token, by id: plain text needs it.
    pub(super) used: Vec<bool>,
}

impl Merges {
    pub(super) fn check(
        parts: &TokenizerParts<'_>,
        ids: &HashMap<&str, u32>,
        kinds: &[TokenKind],
    ) -> Result<Self, TokenizerError> {
        let mut pairs = Vec::with_capacity(parts.merges.len());
        let mut used = vec![false; kinds.len()];
        let mut seen = HashSet::with_capacity(parts.merges.len());
        let mut whole = String::new();
        for (index, merge) in parts.merges.iter().enumerate() {
            let (left, right) = merge
                .split_once(' ')
                .filter(|(left, right)| !left.is_empty() && !right.is_empty())
                .ok_or_else(|| {
                    TokenizerError::Malformed(format!(
                        "merge {index} of the model file is not a pair of tokens"
                    ))
                })?;
            let id = |text: &str| {
                let unknown = || {
                    TokenizerError::Malformed(format!(
                        "merge {index} of the model file needs the token {:?}, which is not in its \
                         vocabulary",
                        shorten(text)
                    ))
                };
                let id = ids.get(text).copied().ok_or_else(unknown)?;
                if kind_of(kinds, id).is_structure() {
                    return Err(TokenizerError::Malformed(format!(
                        "merge {index} of the model file would let plain text become the control \
                         token {:?}",
                        shorten(text)
                    )));
                }
                Ok(id)
            };
            whole.clear();
            whole.push_str(left);
            whole.push_str(right);
            let (left_id, right_id, whole_id) = (id(left)?, id(right)?, id(&whole)?);
            for id in [left_id, right_id, whole_id] {
                if let Some(used) = usize::try_from(id).ok().and_then(|id| used.get_mut(id)) {
                    *used = true;
                }
            }
            // Of two equal merges llama.cpp keeps the first, but the crate would keep the last.
            if seen.insert((left_id, right_id)) {
                pairs.push((left.to_owned(), right.to_owned()));
            }
        }
        Ok(Self { pairs, used })
    }
}

/// Shortens a token's text for a message, so that a hostile file cannot fill the screen.
fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Returns the ids that end a generation, ascending, and corrects `kinds`. The tokens that the file
/// names as beginning or end of a text, a turn or a message, and those of [`END_TEXTS`], become
/// control tokens whatever their type. Otherwise, a file with wrong types would have its chat
/// template encoded as plain text, and a typed `<|im_end|>` could end a turn.
///
/// Tokens that plain text needs are left unchanged: tokens that a merge uses or produces (`used`,
/// by id; empty without merges), single characters, and bytes.
pub(super) fn ends(
    parts: &TokenizerParts<'_>,
    ids: &HashMap<&str, u32>,
    kinds: &mut [TokenKind],
    used: &[bool],
) -> Result<Vec<u32>, TokenizerError> {
    let tokens = kinds.len();
    let in_range = |key, id: u32| match usize::try_from(id) {
        Ok(index) if index < tokens => Ok(id),
        _ => Err(TokenizerError::Malformed(format!(
            "the model file's `{key}` is {id}, but there are only {tokens} tokens"
        ))),
    };
    let mut make_control = |id: u32| {
        let Ok(index) = usize::try_from(id) else {
            return false;
        };
        let text = parts.tokens.get(index).copied().unwrap_or_default();
        let is_text = used.get(index).copied().unwrap_or(false) || text.chars().nth(1).is_none();
        match kinds.get_mut(index) {
            Some(TokenKind::Byte | TokenKind::Unknown) | None => false,
            Some(_) if is_text => false,
            Some(kind) => {
                *kind = TokenKind::Control;
                true
            }
        }
    };
    if let Some(bos) = parts.bos {
        make_control(in_range(BOS, bos)?);
    }
    let mut ends = Vec::new();
    if let Some(eos) = parts.eos {
        make_control(in_range(EOS, eos)?);
        ends.push(eos);
    }
    for (key, id) in &parts.other_ends {
        ends.push(in_range(key, *id)?);
        // Code models also use the end tokens of files as words that may be typed.
        if [EOT, EOM].contains(key) {
            make_control(*id);
        }
    }
    let named = |texts: &'static str| {
        let ids = texts.split_whitespace().map(move |text| ids.get(text));
        ids.flatten().copied()
    };
    // In Gemma 4, `</s>` is a tag of HTML.
    let tag = ids
        .get("</s>")
        .filter(|_| ids.contains_key("<|tool_response>"));
    for id in named(END_TEXTS).filter(|id| Some(id) != tag) {
        if make_control(id) {
            ends.push(id);
        }
    }
    // In gpt-oss a message ends with `<|end|>`, and the turn may continue with another one.
    let harmony = ["<|end|>", "<|return|>", "<|call|>"].map(|text| ids.get(text).copied());
    if let [Some(end), Some(returns), Some(call)] = harmony {
        ends.retain(|id| *id != end);
        ends.extend([returns, call]);
    }
    let leave_file = named(LEAVE_FILE_TEXTS);
    ends.extend(leave_file.filter(|id| kind_of(kinds, *id) == TokenKind::Control));
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

/// Tokens that look like marks of a template (`<|start_header_id|>`, `[INST]`) but are plain text
/// by type, although no merge produces them (`used`, by id; empty without merges). Text that
/// contains such a mark is encoded letter by letter. Files with wrong types have such tokens.
pub(super) fn unreachable_marks(tokens: &[&str], kinds: &[TokenKind], used: &[bool]) -> Vec<u32> {
    let looks_like_one = |text: &str| {
        let inner = |open, close| text.strip_prefix(open)?.strip_suffix(close);
        let inner = inner('<', '>').or_else(|| inner('[', ']'));
        inner.is_some_and(|inner| !inner.is_empty())
    };
    let plain = |kind| matches!(kind, TokenKind::Normal | TokenKind::Unused);
    let tokens = tokens.iter().zip(kinds).zip(0_u32..);
    let unused = used.iter().copied().chain(std::iter::repeat(false));
    tokens
        .zip(unused)
        .filter(|(((text, kind), _), used)| plain(**kind) && !used && looks_like_one(text))
        .map(|((_, id), _)| id)
        .collect()
}

/// Every character in the texts of control tokens except white space, ascending.
pub(super) fn structure_alphabet(tokens: &[&str], kinds: &[TokenKind]) -> Vec<char> {
    let structure = tokens
        .iter()
        .zip(kinds)
        .filter(|(_, kind)| kind.is_structure());
    let chars = structure
        .flat_map(|(text, _)| text.chars())
        .filter(|c| !c.is_whitespace());
    chars.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Appends the bytes of a token, according to its vocabulary.
pub(super) type AppendTokenBytes = fn(&str, TokenKind, &mut Vec<u8>);

/// Bytes of all tokens in sequence, and the start of each, with the end as the last element.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    starts: Vec<usize>,
}

impl TokenBytes {
    pub(super) fn new(
        tokens: &[&str],
        kinds: &[TokenKind],
        append_token_bytes: AppendTokenBytes,
    ) -> Self {
        let mut bytes = Vec::with_capacity(tokens.iter().map(|text| text.len()).sum());
        let mut starts = Vec::with_capacity(tokens.len() + 1);
        for (text, kind) in tokens.iter().zip(kinds) {
            starts.push(bytes.len());
            append_token_bytes(text, *kind, &mut bytes);
        }
        starts.push(bytes.len());
        Self { bytes, starts }
    }

    /// Bytes of a token; `None` outside the vocabulary.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let (start, end) = (self.starts.get(id)?, self.starts.get(id + 1)?);
        self.bytes.get(*start..*end)
    }
}
