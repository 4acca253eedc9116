//! The lists of a model file, checked and brought into the form that encoding needs.

use super::error::TokenizerError;
use super::parts::{BOS, EOM, EOS, EOT, TokenizerParts};
use super::special::{END_TEXTS, LEAVE_FILE_TEXTS, TokenKind};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The longest token that is accepted, in bytes. Real ones end at some 300.
pub(super) const MAX_TOKEN_BYTES: usize = 4096;

/// The kind of a token; `Unused` outside the vocabulary.
pub(super) fn kind_of(kinds: &[TokenKind], id: u32) -> TokenKind {
    let kind = usize::try_from(id).ok().and_then(|id| kinds.get(id));
    kind.copied().unwrap_or(TokenKind::Unused)
}

/// The kind of each token, as the file says.
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

/// The id of each text. Tokens without text (unused places in some files) have none.
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

/// The merges of a file, checked.
pub(super) struct Merges {
    /// The two tokens of each merge, best first.
    pub(super) pairs: Vec<(String, String)>,
    /// Whether a merge takes or makes the token, by id: plain text needs it.
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
            // llama.cpp keeps the first of two equal merges, the crate would keep the last.
            if seen.insert((left_id, right_id)) {
                pairs.push((left.to_owned(), right.to_owned()));
            }
        }
        Ok(Self { pairs, used })
    }
}

/// A token's text for a message: a hostile file must not fill the screen.
fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Returns the ids that end a generation, ascending, and corrects `kinds`: the tokens that the file
/// names as beginning and end of a text, a turn or a message, and those of [`END_TEXTS`], are
/// control tokens whatever type the file gives them. A file with wrong types would otherwise have its
/// chat template encoded as plain text, and a typed `<|im_end|>` could end a turn.
///
/// Exceptions are tokens that plain text needs: those that a merge takes or makes (`used`, by id;
/// empty without merges), single characters, and bytes.
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
        // Code models have those of files as words that may be typed.
        if [EOT, EOM].contains(key) {
            make_control(*id);
        }
    }
    for id in END_TEXTS.iter().filter_map(|text| ids.get(text).copied()) {
        if make_control(id) {
            ends.push(id);
        }
    }
    let leave_file = LEAVE_FILE_TEXTS
        .iter()
        .filter_map(|text| ids.get(text).copied());
    ends.extend(leave_file.filter(|id| kind_of(kinds, *id) == TokenKind::Control));
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

/// The tokens that look like marks of a template (`<|start_header_id|>`, `[INST]`) and are plain text by
/// their type, although no merge (`used`, by id; empty without merges) gives them: text that
/// contains one is encoded as its letters. A file with wrong types has such tokens.
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

/// Every character in the texts of control tokens, white space left out, ascending.
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

/// The bytes of all tokens in a row, and where each begins, with the end as the last element.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    starts: Vec<usize>,
}

impl TokenBytes {
    /// `spell` appends the bytes of one token, which depend on how its vocabulary writes text.
    pub(super) fn new(
        tokens: &[&str],
        kinds: &[TokenKind],
        spell: &dyn Fn(&str, TokenKind, &mut Vec<u8>),
    ) -> Self {
        let mut bytes = Vec::with_capacity(tokens.iter().map(|text| text.len()).sum());
        let mut starts = Vec::with_capacity(tokens.len() + 1);
        for (text, kind) in tokens.iter().zip(kinds) {
            starts.push(bytes.len());
            spell(text, *kind, &mut bytes);
        }
        starts.push(bytes.len());
        Self { bytes, starts }
    }

    /// The bytes of a token; `None` outside the vocabulary.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let (start, end) = (self.starts.get(id)?, self.starts.get(id + 1)?);
        self.bytes.get(*start..*end)
    }
}
