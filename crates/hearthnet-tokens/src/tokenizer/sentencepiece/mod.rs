//! SentencePiece vocabularies (Llama 2, Mistral, Mixtral, Phi-3, Gemma): `tokenizer.ggml.model`
//! is `llama`.
//!
//! Spaces are written `▁` (U+2581), and most vocabularies put one before a text that has none. Then
//! adjacent symbols merge, starting from characters: of all pairs whose joint text is a token, the
//! pair with the highest score, the leftmost of equals, until no pair is left. A character without
//! a token is written as the tokens of its bytes, `<0xF0>` and so on.
//!
//! These are llama.cpp's rules (`llm_tokenizer_spm` in `llama-vocab.cpp`), which reads no other
//! metadata. No model of the `tokenizers` crate gives the same ids. Its BPE merges by the rank of a
//! list, which a file does not have, and breaks ties by rank instead of position. It cannot begin
//! with a character without a token. Its Unigram searches the best whole segmentation, not the best
//! next step.
//!
//! # Differences from llama.cpp
//!
//! - In llama.cpp, text can merge into a control token if its parts are tokens. Here it cannot.
//! - In llama.cpp, the typed text `<0x0A>` could merge into the token of a line feed. Here a byte
//!   token stands only for a byte, as in SentencePiece itself.
//!
//! No vocabulary that was examined has the intermediate tokens for either merge.

use super::special::TokenKind;
use super::vocabulary::kind_of;
use hearthnet_files::tokenizer_parts::{SCORES, TokenizerError, TokenizerParts};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

/// Written form of a space.
pub(super) const SPACE: char = '\u{2581}';

pub(super) struct SentencePiece {
    /// Tokens that text may become.
    tokens: HashMap<Box<str>, Token>,
    /// Length of the longest of these tokens, in bytes.
    longest: usize,
    /// Token of each byte.
    bytes: [u32; 256],
    /// Whether a space is put before each text.
    space_prefix: bool,
    /// No token continues beyond the end of a word, so words merge separately, which is faster.
    words_apart: bool,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    id: u32,
    score: Score,
}

/// Score with a total order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Score(i32);

impl Score {
    /// `None` for NaN. The two zeros are equal.
    fn new(score: f32) -> Option<Self> {
        if score.is_nan() {
            return None;
        }
        // The bits of floats are in order among the positive, and reversed among the negative.
        let bits = (score + 0.0).to_bits().cast_signed();
        Some(Self(if bits < 0 { bits ^ i32::MAX } else { bits }))
    }
}

impl SentencePiece {
    /// Marks byte tokens in `kinds` if the file does not.
    pub(super) fn new(
        parts: &TokenizerParts<'_>,
        ids: &HashMap<&str, u32>,
        kinds: &mut [TokenKind],
    ) -> Result<Self, TokenizerError> {
        let bytes = byte_tokens(parts, ids, kinds)?;
        let scores = scores(parts)?;
        let mut tokens = HashMap::with_capacity(ids.len());
        for (text, score) in parts.tokens.iter().zip(scores) {
            let Some(&id) = ids.get(text) else {
                continue; // Without text.
            };
            let kind = kind_of(kinds, id);
            if !kind.is_structure() && kind != TokenKind::Byte {
                tokens.insert(Box::from(*text), Token { id, score });
            }
        }
        let space = String::from(SPACE);
        if !tokens.contains_key(space.as_str()) {
            return Err(missing(&space));
        }
        Ok(Self {
            longest: tokens.keys().map(|text| text.len()).max().unwrap_or(0),
            words_apart: tokens.keys().all(|text| first_word(text).1.is_empty()),
            tokens,
            bytes,
            space_prefix: parts.add_space_prefix.unwrap_or(true),
        })
    }

    /// Whether a space is put before each text.
    pub(super) fn adds_space_prefix(&self) -> bool {
        self.space_prefix
    }

    /// Appends the ids of a text at the beginning or behind a special token.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut written = String::with_capacity(text.len() + SPACE.len_utf8());
        if self.space_prefix {
            written.push(SPACE);
        }
        written.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let mut rest = written.as_str();
        while !rest.is_empty() {
            let (word, after) = match self.words_apart {
                true => first_word(rest),
                false => (rest, ""),
            };
            self.encode_written(word, ids);
            rest = after;
        }
    }

    /// Appends the ids of a text whose spaces are written as `▁`.
    fn encode_written(&self, text: &str, ids: &mut Vec<u32>) {
        let mut merging = Merging::new(self, text);
        merging.run();
        for symbol in merging.symbols {
            let text = text.get(symbol.range());
            debug_assert!(text.is_some(), "symbols are whole characters of the text");
            let text = text.unwrap_or_default();
            match self.token(text) {
                Some(token) => ids.push(token.id),
                None => ids.extend(text.bytes().map(|byte| self.byte_token(byte))),
            }
        }
    }

    fn token(&self, text: &str) -> Option<Token> {
        if text.len() > self.longest {
            return None;
        }
        self.tokens.get(text).copied()
    }

    fn byte_token(&self, byte: u8) -> u32 {
        self.bytes[usize::from(byte)]
    }
}

/// Splits a text before the spaces of its second word.
fn first_word(text: &str) -> (&str, &str) {
    let mut in_word = false;
    for (at, c) in text.char_indices() {
        if c == SPACE && in_word {
            return text.split_at(at);
        }
        in_word = c != SPACE;
    }
    (text, "")
}

/// Appends the bytes of a token.
///
/// llama.cpp shows user-defined tokens verbatim. Spaces may merge into them too, so they are
/// decoded like all others here.
pub(super) fn append_token_bytes(text: &str, kind: TokenKind, bytes: &mut Vec<u8>) {
    match byte_of(text).filter(|_| kind == TokenKind::Byte) {
        Some(byte) => bytes.push(byte),
        None if kind.is_structure() => bytes.extend_from_slice(text.as_bytes()),
        None => bytes.extend_from_slice(text.replace(SPACE, " ").as_bytes()),
    }
}

/// Byte of a text such as `<0x0A>`.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|c| c.is_ascii_hexdigit());
    is_byte.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Token of each byte.
pub(super) fn byte_tokens(
    parts: &TokenizerParts<'_>,
    ids: &HashMap<&str, u32>,
    kinds: &mut [TokenKind],
) -> Result<[u32; 256], TokenizerError> {
    let mut found = [0; 256];
    for (byte, found) in (0..=255_u8).zip(&mut found) {
        let token = format!("<0x{byte:02X}>");
        let Some(&id) = ids.get(token.as_str()) else {
            return Err(missing(&token));
        };
        let kind = usize::try_from(id).ok().and_then(|id| kinds.get_mut(id));
        match kind {
            // A file without types marks all tokens as normal.
            Some(kind @ (TokenKind::Byte | TokenKind::Normal)) => *kind = TokenKind::Byte,
            _ => return Err(missing(&token)),
        }
        *found = id;
    }
    for ((text, kind), id) in parts.tokens.iter().zip(kinds).zip(0..) {
        if *kind == TokenKind::Byte && byte_of(text).is_none() {
            return Err(TokenizerError::Malformed(format!(
                "token {id} of the model file should be a byte, and is not written as one"
            )));
        }
    }
    Ok(found)
}

/// Score of each token, by id.
fn scores(parts: &TokenizerParts<'_>) -> Result<Vec<Score>, TokenizerError> {
    let (scores, tokens) = (parts.scores.len(), parts.tokens.len());
    if scores == 0 {
        return Err(TokenizerError::missing(SCORES));
    }
    if scores != tokens {
        return Err(TokenizerError::Malformed(format!(
            "the model file has {scores} token scores for {tokens} tokens"
        )));
    }
    let scores = parts.scores.iter().zip(0..);
    let no_number = |id: u32| format!("the score of token {id} of the model file is not a number");
    scores
        .map(|(&score, id)| {
            Score::new(score).ok_or_else(|| TokenizerError::Malformed(no_number(id)))
        })
        .collect()
}

/// Error for a vocabulary without a token for a byte or for the space: some texts would have no
/// ids.
fn missing(token: &str) -> TokenizerError {
    TokenizerError::Malformed(format!(
        "the model file has no token {token:?} that text may use"
    ))
}

/// Text while its symbols merge.
struct Merging<'t> {
    vocabulary: &'t SentencePiece,
    text: &'t str,
    /// Initially one per character. A symbol that merged into its left neighbour is empty.
    symbols: Vec<Symbol>,
    /// The best pair is on top.
    queue: BinaryHeap<Pair>,
}

/// Piece of the text with its non-empty neighbours: positions in [`Merging::symbols`], or
/// [`NO_SYMBOL`].
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: u32,
    end: u32,
    before: u32,
    after: u32,
}

const NO_SYMBOL: u32 = u32::MAX;

impl Symbol {
    fn range(self) -> Range<usize> {
        // A u32 fits into the usize of every machine that holds a model.
        self.start as usize..self.end as usize
    }

    fn is_empty(self) -> bool {
        self.start == self.end
    }
}

/// Two neighbours whose joint text is a token. Ordered by merge priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    score: Score,
    left: Reverse<u32>,
    right: u32,
    /// End of the right symbol when the pair was queued.
    end: u32,
}

impl<'t> Merging<'t> {
    fn new(vocabulary: &'t SentencePiece, text: &'t str) -> Self {
        let mut symbols = Vec::with_capacity(text.len());
        // Texts end at MAX_TEXT_BYTES, and writing spaces at most triples them.
        for (start, c) in text.char_indices() {
            let (at, start) = (symbols.len() as u32, start as u32);
            symbols.push(Symbol {
                start,
                end: start + c.len_utf8() as u32,
                before: at.checked_sub(1).unwrap_or(NO_SYMBOL),
                after: at + 1,
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.after = NO_SYMBOL;
        }
        Self {
            vocabulary,
            text,
            symbols,
            queue: BinaryHeap::new(),
        }
    }

    fn run(&mut self) {
        for left in 0..self.symbols.len() as u32 {
            self.consider(left, left + 1);
        }
        while let Some(pair) = self.queue.pop() {
            self.merge(pair);
        }
    }

    fn symbol(&self, at: u32) -> Option<Symbol> {
        self.symbols.get(at as usize).copied()
    }

    fn change(&mut self, at: u32, change: impl FnOnce(&mut Symbol)) {
        if let Some(symbol) = self.symbols.get_mut(at as usize) {
            change(symbol);
        }
    }

    /// Queues two neighbours if both exist and their joint text is a token.
    fn consider(&mut self, left: u32, right: u32) {
        let (Some(l), Some(r)) = (self.symbol(left), self.symbol(right)) else {
            return;
        };
        let text = self.text.get(l.start as usize..r.end as usize);
        if let Some(token) = text.and_then(|text| self.vocabulary.token(text)) {
            self.queue.push(Pair {
                score: token.score,
                left: Reverse(left),
                right,
                end: r.end,
            });
        }
    }

    /// Merges a pair, unless one of its symbols has merged otherwise in the meantime.
    fn merge(&mut self, pair: Pair) {
        let left = pair.left.0;
        let (Some(l), Some(r)) = (self.symbol(left), self.symbol(pair.right)) else {
            return;
        };
        if l.is_empty() || r.is_empty() || l.end != r.start || r.end != pair.end {
            return;
        }
        self.change(pair.right, |right| right.end = right.start);
        self.change(r.after, |after| after.before = left);
        self.change(left, |left| (left.end, left.after) = (r.end, r.after));
        self.consider(l.before, left);
        self.consider(left, r.after);
    }
}

#[cfg(test)]
mod tests;
