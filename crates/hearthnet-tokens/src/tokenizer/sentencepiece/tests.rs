use super::super::{
    MAX_TEXT_BYTES, Special, TokenKind, Tokenizer, TokenizerError, TokenizerParts,
    sentencepiece_basics,
};
use crate::detokenize::Detokenizer;
use hearthnet_testkit::rows;
use proptest::prelude::*;
use std::sync::LazyLock;

/// Small file: structure, a user-defined token, all bytes, the space, and some merges.
struct File {
    tokens: Vec<String>,
    types: Vec<i128>,
    scores: Vec<f32>,
    name: &'static str,
    add_space_prefix: Option<bool>,
}

const UNKNOWN: u32 = 0;
const BOS: u32 = 1;
const EOS: u32 = 2;
const TOOL: u32 = 3;

impl File {
    fn new() -> Self {
        let mut file = Self {
            tokens: Vec::new(),
            types: Vec::new(),
            scores: Vec::new(),
            name: "",
            add_space_prefix: None,
        };
        for (text, kind) in [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<tool>", 4)] {
            file.add(text, kind, 0.0);
        }
        for (text, kind) in sentencepiece_basics() {
            file.add(&text, kind, 0.0);
        }
        let words = "h e l o he ll hell hello ▁hello ▁▁ é".split(' ');
        let scores = [
            -10.0, -10.0, -10.0, -10.0, -3.0, -2.0, -1.0, -4.0, -5.0, -6.0, -7.0,
        ];
        for (text, score) in words.zip(scores) {
            file.add(text, 1, score);
        }
        file
    }

    fn without_prefix() -> Self {
        Self {
            add_space_prefix: Some(false),
            ..Self::new()
        }
    }

    fn add(&mut self, text: &str, kind: i128, score: f32) {
        self.tokens.push(text.to_owned());
        self.types.push(kind);
        self.scores.push(score);
    }

    fn id(&self, text: &str) -> u32 {
        u32::try_from(self.tokens.iter().position(|token| token == text).unwrap()).unwrap()
    }

    fn ids(&self, texts: &[&str]) -> Vec<u32> {
        texts.iter().map(|text| self.id(text)).collect()
    }

    fn parts(&self) -> TokenizerParts<'_> {
        TokenizerParts {
            model: "llama",
            name: self.name,
            tokens: self.tokens.iter().map(String::as_str).collect(),
            token_types: Some(self.types.clone()),
            scores: self.scores.clone(),
            bos: Some(BOS),
            eos: Some(EOS),
            add_space_prefix: self.add_space_prefix,
            ..TokenizerParts::default()
        }
    }

    fn build(&self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::new(&self.parts())
    }
}

static SMALL: LazyLock<Tokenizer> = LazyLock::new(|| File::new().build().unwrap());
static WITHOUT_PREFIX: LazyLock<Tokenizer> =
    LazyLock::new(|| File::without_prefix().build().unwrap());

fn plain(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, Special::Plain).unwrap()
}

#[test]
fn the_space_prefix_is_added_by_encoding_and_removed_by_decoding() {
    let file = File::new();
    assert_eq!(plain(&SMALL, "hello"), file.ids(&["▁hello"]));
    assert_eq!(plain(&SMALL, " hello"), file.ids(&["▁", "▁hello"]));
    assert_eq!(SMALL.decode(&plain(&SMALL, "hello hello")), "hello hello");
    assert_eq!(plain(&WITHOUT_PREFIX, "hello"), file.ids(&["hello"]));
    assert!(plain(&SMALL, "").is_empty());
}

#[test]
fn the_highest_score_merges_first_and_the_leftmost_of_equals() {
    let mut file = File::without_prefix();
    for text in ["a", "b", "c", "ab", "bc", "ba"] {
        file.add(text, 1, -1.0);
    }
    file.add("cc", 1, 5.0);
    let tokenizer = file.build().unwrap();
    assert_eq!(plain(&tokenizer, "abc"), file.ids(&["ab", "c"]));
    assert_eq!(plain(&tokenizer, "babc"), file.ids(&["ba", "bc"]));
    assert_eq!(plain(&tokenizer, "abcc"), file.ids(&["ab", "cc"]));
    assert_eq!(plain(&tokenizer, "ccc"), file.ids(&["cc", "c"]));
}

#[test]
fn characters_that_are_no_tokens_may_merge_into_one() {
    let mut file = File::without_prefix();
    file.add("xy", 1, -1.0);
    let tokenizer = file.build().unwrap();
    assert_eq!(plain(&tokenizer, "xyx"), file.ids(&["xy", "<0x78>"]));
}

#[test]
fn characters_without_a_token_become_bytes() {
    let file = File::new();
    let expected = file.ids(&["é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0x0A>"]);
    assert_eq!(plain(&WITHOUT_PREFIX, "é😀\n"), expected);
    assert_eq!(SMALL.token_bytes(file.id("<0x0A>")), Some(&b"\n"[..]));
    assert_eq!(SMALL.token_bytes(file.id("▁hello")), Some(&b" hello"[..]));
    assert_eq!(SMALL.token_kind(file.id("<0xF0>")), Some(TokenKind::Byte));
}

#[test]
fn the_zeros_are_equal() {
    let mut file = File::without_prefix();
    file.add("ab", 1, -0.0);
    file.add("bc", 1, 0.0);
    let tokenizer = file.build().unwrap();
    assert_eq!(plain(&tokenizer, "abc"), file.ids(&["ab", "<0x63>"]));
}

#[test]
fn a_document_begins_with_its_token_unless_the_file_says_otherwise() {
    let file = File::new();
    let hello = file.id("▁hello");
    let ids = SMALL.encode_document("hello", Special::Plain).unwrap();
    assert_eq!(ids, [BOS, hello]);
    let mut parts = file.parts();
    (parts.add_bos, parts.add_eos) = (Some(false), Some(true));
    let tokenizer = Tokenizer::new(&parts).unwrap();
    let ids = tokenizer.encode_document("hello", Special::Plain).unwrap();
    assert_eq!(ids, [hello, EOS]);
}

#[test]
fn text_behind_a_special_token_begins_anew() {
    let file = File::new();
    let hello = file.id("▁hello");
    let parsed = SMALL.encode("<s>hello</s>hello", Special::Parse).unwrap();
    assert_eq!(parsed, [BOS, hello, EOS, hello]);
    assert_eq!(SMALL.decode_with_special(&parsed), "<s>hello</s>hello");
    assert_eq!(SMALL.decode(&parsed), "hellohello");
    assert_eq!(plain(&SMALL, "<tool>hello"), [TOOL, hello]);
    assert!(!SMALL.encodes("<tool>hello") && WITHOUT_PREFIX.encodes("<tool>hello"));
}

#[test]
fn a_continuation_keeps_its_space() {
    let hello = File::new().id("▁hello");
    assert_eq!(Detokenizer::new(&SMALL).push(hello), "hello");
    assert_eq!(Detokenizer::continuing(&SMALL).push(hello), " hello");
    let mut answer = Detokenizer::new(&SMALL);
    assert_eq!(answer.push(hello) + &answer.push(hello), "hello hello");
}

#[test]
fn merges_never_reach_a_control_token_or_a_byte() {
    let mut file = File::without_prefix();
    // llama.cpp would merge these.
    for text in ["</", "s>", "<s", "<0x0", "A>", "<0"] {
        file.add(text, 1, -1.0);
    }
    let tokenizer = file.build().unwrap();
    for text in ["</s>", "<s>", "<unk>", "<0x0A>"] {
        let ids = plain(&tokenizer, text);
        assert!(ids.iter().all(|id| !matches!(*id, UNKNOWN | BOS | EOS)));
        assert_eq!(tokenizer.decode(&ids), text);
    }
    assert_eq!(tokenizer.encode("</s>", Special::Parse).unwrap(), [EOS]);
}

#[test]
fn a_known_end_that_the_file_calls_text_ends_a_generation_and_is_out_of_reach() {
    let mut file = File::without_prefix();
    file.add("<end_of_turn>", 1, -1.0);
    file.add("<end_of_turn", 1, -1.0);
    let (end, tokenizer) = (file.id("<end_of_turn>"), file.build().unwrap());
    assert!(tokenizer.is_end_of_generation(end));
    assert!(!plain(&tokenizer, "<end_of_turn>").contains(&end));
}

#[test]
fn a_model_called_phi_3_drops_white_space_behind_special_tokens() {
    let mut file = File {
        name: "My Phi3 model",
        ..File::new()
    };
    file.add("<|end|>", 3, 0.0);
    let (end, hello) = (file.id("<|end|>"), file.id("▁hello"));
    let text = "<s> hello<|end|> \n\u{b}hello<|end|>\n";
    let parsed = file.build().unwrap().encode(text, Special::Parse).unwrap();
    let space = file.id("▁");
    assert_eq!(parsed, [BOS, space, hello, end, hello, end]);
    assert!(!file.build().unwrap().encodes("<tool> x"));

    file.name = "Phil";
    let parsed = file.build().unwrap().encode(text, Special::Parse).unwrap();
    assert!(parsed.len() > 6);
}

#[test]
fn files_without_types_are_read() {
    let file = File::new();
    let mut parts = file.parts();
    parts.token_types = None;
    let (tokenizer, text) = (Tokenizer::new(&parts).unwrap(), "hello\n😀");
    assert_eq!(tokenizer.decode(&plain(&tokenizer, text)), text);
}

/// Error of a file after a change.
fn refusal(change: impl FnOnce(&mut File)) -> TokenizerError {
    let mut file = File::new();
    change(&mut file);
    file.build().unwrap_err()
}

#[test]
fn broken_files_are_refused_with_the_reason() {
    for (error, says) in rows! {
        refusal(|f| f.scores.clear()) => "has no `tokenizer.ggml.scores`";
        refusal(|f| f.scores.truncate(7)) => "has 7 token scores for";
        refusal(|f| f.scores[9] = f32::NAN)
            => "the score of token 9 of the model file is not a number";
        refusal(|f| f.add("hello", 1, 0.0)) => "have the same text";
        refusal(|f| f.add("<0x0a", 6, 0.0)) => "should be a byte, and is not written as one";
    } {
        assert!(error.to_string().contains(says), "{error}");
    }
    for text in ["<0x0A>", "▁"] {
        let id = File::new().id(text) as usize;
        // Nor may it be a control token: text would become structure.
        for error in [
            refusal(|f| f.tokens[id].clear()),
            refusal(|f| f.types[id] = 3),
        ] {
            let says = format!("has no token {text:?} that text may use");
            assert!(error.to_string().contains(&says), "{error}");
        }
    }
    let file = File::new();
    let mut no_bos = file.parts();
    no_bos.bos = None;
    let error = Tokenizer::new(&no_bos).unwrap_err().to_string();
    let says = "sets `tokenizer.ggml.add_bos_token` but has no";
    assert!(error.contains(says), "{error}");
}

/// Vocabulary in which a run of one letter merges as far as possible.
fn greedy() -> Tokenizer {
    let mut file = File::new();
    for length in 1..=64 {
        file.add(&"a".repeat(length), 1, length as f32);
    }
    file.build().unwrap()
}

#[test]
fn one_word_as_long_as_a_text_may_be_is_merged() {
    // A loop over all pairs for each merge would take days.
    let ids = plain(&greedy(), &"a".repeat(MAX_TEXT_BYTES));
    assert!(ids.len() < MAX_TEXT_BYTES / 32, "{}", ids.len());
    assert!(plain(&greedy(), &" ".repeat(MAX_TEXT_BYTES)).len() > MAX_TEXT_BYTES / 4);
}

/// Text with a high share of characters that matter here.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "hello", "hell", " ", "  ", "<tool>", "<s>", "</s>", "<0x0A>", "\n", "é", "😀", "▁",
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn decoding_restores_encoded_text(text in text()) {
        for tokenizer in [&*SMALL, &*WITHOUT_PREFIX] {
            let ids = plain(tokenizer, &text);
            let structure = |id: &u32| tokenizer.token_kind(*id).unwrap().is_structure();
            prop_assert!(!ids.iter().any(structure));
            if tokenizer.encodes(&text) {
                prop_assert_eq!(tokenizer.decode(&ids), text.as_str());
                let parsed = tokenizer.encode(&text, Special::Parse).unwrap();
                prop_assert_eq!(tokenizer.decode_with_special(&parsed), text.as_str());
            }
        }
        let spaces = text.replace('▁', " ");
        let ids = plain(&WITHOUT_PREFIX, &text);
        prop_assert_eq!(WITHOUT_PREFIX.decode(&ids), spaces);
    }

    #[test]
    fn merging_is_that_of_the_plain_rule(
        text in "[abc▁]{0,12}",
        scores in prop::collection::vec(-2_i8..3, 18),
        across_words: bool,
    ) {
        let mut file = File::without_prefix();
        let tokens = [
            "a", "b", "ab", "ba", "aa", "bb", "bc", "ca", "abc", "bca", "cab", "aab", "aba", "abab",
            "▁a", "▁▁a", if across_words { "b▁" } else { "bbb" }, if across_words { "b▁a" } else { "▁b" },
        ];
        for (token, score) in tokens.iter().zip(scores) {
            file.add(token, 1, f32::from(score));
        }
        let mut pieces: Vec<String> = text.chars().map(String::from).collect();
        let score = |pair: &[String]| {
            let at = file.tokens.iter().position(|token| *token == pair.concat())?;
            Some(file.scores[at])
        };
        // Step by step: of all neighbours that make a token, the first of the best.
        while let Some((at, _)) = pieces
            .windows(2)
            .enumerate()
            .filter_map(|(at, pair)| Some((at, score(pair)?)))
            .reduce(|best, next| if next.1 > best.1 { next } else { best })
        {
            let right = pieces.remove(at + 1);
            pieces[at].push_str(&right);
        }
        let name = |piece: &String| if piece == "c" { "<0x63>".to_owned() } else { piece.clone() };
        let expected: Vec<u32> = pieces.iter().map(|piece| file.id(&name(piece))).collect();
        prop_assert_eq!(plain(&file.build().unwrap(), &text), expected);
    }
}
