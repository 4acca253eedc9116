//! Special tokens, which are found in a text before byte pair merging.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use hearthnet_files::tokenizer_parts::{TokenizerError, TokenizerParts, drops_space};

/// Kind of a token, from `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenKind {
    /// Text that byte pair merging produces.
    Normal,
    /// Token for unencodable text. No text produces it, and it is displayed as nothing.
    Unknown,
    /// Structure, such as the beginning or end of a turn. Never visible text.
    Control,
    /// Whole text that was added to the vocabulary: found before merging, and visible.
    UserDefined,
    /// Unused id of the vocabulary.
    Unused,
    Byte,
}

impl TokenKind {
    /// Kind of a GGUF token type. The numbers are those of `llama_token_type`.
    pub(super) fn from_gguf(value: i128) -> Option<Self> {
        Some(match value {
            0 | 1 => Self::Normal, // 0 is "undefined", which every reader takes for normal.
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    /// Whether the token is structure: invisible, and never produced by plain text.
    pub(super) fn is_structure(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }

    /// Whether the file has the token's text verbatim, not in the byte-level alphabet.
    pub(super) fn is_verbatim(self) -> bool {
        self.is_structure() || self == Self::UserDefined
    }
}

/// Texts of tokens that end a generation, which llama.cpp recognises without metadata.
/// `<|tool_response>` ends a turn of Gemma 4 with calls.
pub(super) const END_TEXTS: &str = "
    <|eot_id|> <|im_end|> <|end|> <|eom_id|> <|endoftext|> <|end_of_text|> <end_of_turn> <turn|>
    <|tool_response> <end_of_utterance> <EOT> _<EOT> [EOT] [EOS] </s> <｜end▁of▁sentence｜>
";

/// Texts of tokens with which a code model ends the file that it completes. They end a generation
/// too, but only if the file marks them as control tokens.
pub(super) const LEAVE_FILE_TEXTS: &str = "
    <|fim_pad|> <fim-pad> <fim_pad> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>
";

/// Special tokens behind which a model drops white space, ascending: in a model named Phi-3, all
/// but a few. llama.cpp uses the name too.
pub(super) fn dropping_space_behind(parts: &TokenizerParts<'_>, kinds: &[TokenKind]) -> Vec<u32> {
    if !drops_space(parts.name) {
        return Vec::new();
    }
    let drops = |text: &str, kind: TokenKind| {
        text == "</s>" || (kind.is_verbatim() && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>"))
    };
    let tokens = parts.tokens.iter().zip(kinds).zip(0..);
    tokens
        .filter(|((text, kind), _)| drops(text, **kind))
        .map(|(_, id)| id)
        .collect()
}

/// C's `isspace`, which covers less than Unicode's white space.
fn is_c_space(c: char) -> bool {
    matches!(c, ' ' | '\t'..='\r')
}

/// Limit of the total length of all special tokens, in bytes. Gemma's 6,242 take about 70 KiB; the
/// searchers need some hundred bytes for each byte.
const MAX_SPECIAL_BYTES: usize = 1 << 20;

/// Finds special tokens in a text.
///
/// Among tokens that begin at the same position the longest wins, and the search continues behind
/// it. llama.cpp searches the whole text for the longest token first, then for the next. The
/// results differ only if the end of one special token is the beginning of another.
#[derive(Debug)]
pub(super) struct SpecialFinder {
    searcher: Option<AhoCorasick>,
    /// Token of each pattern of the searcher.
    ids: Vec<u32>,
}

pub(super) enum Piece<'t> {
    Token(u32),
    /// Text between special tokens; never empty.
    Text(&'t str),
}

impl SpecialFinder {
    pub(super) fn new(tokens: &[(&str, u32)]) -> Result<Self, TokenizerError> {
        let bytes: usize = tokens.iter().map(|(text, _)| text.len()).sum();
        if bytes > MAX_SPECIAL_BYTES {
            return Err(TokenizerError::Malformed(format!(
                "the special tokens of the model file take {bytes} bytes; at most {MAX_SPECIAL_BYTES} are \
                 accepted"
            )));
        }
        let searcher = if tokens.is_empty() {
            None
        } else {
            // The NFA's size is linear in the patterns; a DFA's is not.
            let searcher = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .kind(Some(AhoCorasickKind::ContiguousNFA))
                .build(tokens.iter().map(|(text, _)| text))
                .map_err(TokenizerError::build)?;
            Some(searcher)
        };
        Ok(Self {
            searcher,
            ids: tokens.iter().map(|&(_, id)| id).collect(),
        })
    }

    /// Whether any of the tokens occurs in `text`.
    pub(super) fn occurs_in(&self, text: &str) -> bool {
        self.searcher
            .as_ref()
            .is_some_and(|searcher| searcher.is_match(text))
    }

    /// Splits the text into special tokens and the text between them, without the white space
    /// behind tokens of `dropping_space`.
    pub(super) fn pieces<'t>(&self, text: &'t str, dropping_space: &[u32]) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
        let mut from = 0;
        let found = self
            .searcher
            .iter()
            .flat_map(|searcher| searcher.find_iter(text));
        for (found, id) in found.filter_map(|found| {
            let id = self.ids.get(found.pattern().as_usize())?;
            Some((found, *id))
        }) {
            push_text(&mut pieces, text.get(from..found.start()), dropping_space);
            pieces.push(Piece::Token(id));
            from = found.end();
        }
        push_text(&mut pieces, text.get(from..), dropping_space);
        pieces
    }
}

fn push_text<'t>(pieces: &mut Vec<Piece<'t>>, text: Option<&'t str>, dropping_space: &[u32]) {
    let mut text = text.unwrap_or_default();
    if let Some(Piece::Token(id)) = pieces.last()
        && dropping_space.binary_search(id).is_ok()
    {
        text = text.trim_start_matches(is_c_space);
    }
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(tokens: &[(&str, u32)], text: &str) -> Vec<String> {
        SpecialFinder::new(tokens)
            .unwrap()
            .pieces(text, &[])
            .iter()
            .map(|piece| match piece {
                Piece::Token(id) => id.to_string(),
                Piece::Text(text) => format!("{text:?}"),
            })
            .collect()
    }

    #[test]
    fn the_longest_token_at_the_first_place_is_taken() {
        let tokens = [("<a>", 1), ("<a><b>", 2), ("<b>", 3)];
        assert_eq!(
            show(&tokens, "x<a><b><a>y<b>"),
            ["\"x\"", "2", "1", "\"y\"", "3"]
        );
    }

    #[test]
    fn a_text_without_special_tokens_is_one_piece_and_an_empty_one_is_none() {
        assert_eq!(show(&[("<a>", 1)], "abc"), ["\"abc\""]);
        assert!(show(&[("<a>", 1)], "").is_empty());
        assert_eq!(show(&[], "abc"), ["\"abc\""]);
    }

    #[test]
    fn a_huge_set_of_special_tokens_is_refused() {
        let text = "x".repeat(MAX_SPECIAL_BYTES + 1);
        let error = SpecialFinder::new(&[(&text, 0)]).unwrap_err();
        assert!(error.to_string().contains("special tokens"), "{error}");
    }
}
