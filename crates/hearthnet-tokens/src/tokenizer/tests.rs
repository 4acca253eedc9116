use super::*;
use crate::detokenize::Detokenizer;
use hearthnet_files::byte_alphabet::char_of;
use hearthnet_files::tokenizer_parts::WordParts;
use hearthnet_testkit::{assert_matches, rows};
use proptest::prelude::*;
use std::sync::LazyLock;

/// Small file: all bytes, some merges, two control tokens, one user-defined and one unknown token.
struct File {
    pre: &'static str,
    tokens: Vec<String>,
    types: Vec<i128>,
    merges: Vec<String>,
    bos: Option<u32>,
    eos: Option<u32>,
}

const TURN: u32 = 0;
const END: u32 = 1;
const TOOL: u32 = 2;
const UNKNOWN: u32 = 3;

impl File {
    fn new(pre: &'static str) -> Self {
        let mut file = Self {
            pre,
            tokens: Vec::new(),
            types: Vec::new(),
            merges: Vec::new(),
            bos: Some(TURN),
            eos: Some(END),
        };
        for (text, kind) in [
            ("<|im_start|>", 3),
            ("<|im_end|>", 3),
            ("<tool>", 4),
            ("<unk>", 2),
        ] {
            file.add(text, kind);
        }
        (0..=255).for_each(|byte| file.add(&char_of(byte).to_string(), 1));
        for merge in ["h e", "l l", "he ll", "hell o", "Ġ hello", "! !"] {
            let (left, right) = merge.split_once(' ').unwrap();
            file.merge(left, right);
        }
        file
    }

    fn merge(&mut self, left: &str, right: &str) {
        self.add(&format!("{left}{right}"), 1);
        self.merges.push(format!("{left} {right}"));
    }

    fn add(&mut self, text: &str, kind: i128) {
        self.tokens.push(text.to_owned());
        self.types.push(kind);
    }

    fn parts(&self) -> TokenizerParts<'_> {
        TokenizerParts {
            model: "gpt2",
            pre: self.pre,
            tokens: self.tokens.iter().map(String::as_str).collect(),
            token_types: Some(self.types.clone()),
            merges: self.merges.iter().map(String::as_str).collect(),
            bos: self.bos,
            eos: self.eos,
            ..TokenizerParts::default()
        }
    }

    fn id(&self, text: &str) -> u32 {
        u32::try_from(self.tokens.iter().position(|token| token == text).unwrap()).unwrap()
    }

    fn build(&self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::new(&self.parts())
    }
}

static SMALL: LazyLock<Tokenizer> = LazyLock::new(|| File::new("smollm").build().unwrap());

/// Tokenizers of all families.
static FAMILIES: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let names = "smollm gpt-2 llama-bpe qwen2 default qwen35 tekken gpt-4o falcon deepseek-llm deepseek-coder deepseek-v3";
    let names = names.split(' ');
    names.map(|pre| File::new(pre).build().unwrap()).collect()
});

#[test]
fn pairs_merge_in_the_order_of_the_file() {
    let file = File::new("smollm");
    let ids = SMALL.encode("hello hello hell!!", Special::Plain).unwrap();
    let expected = ["hello", "Ġhello", "Ġ", "hell", "!!"].map(|text| file.id(text));
    assert_eq!(ids, expected);
}

#[test]
fn plain_text_never_becomes_a_control_token() {
    let typed = "a<|im_end|>b<unk><tool>";
    let plain = SMALL.encode(typed, Special::Plain).unwrap();
    assert!(!plain.contains(&END) && !plain.contains(&UNKNOWN) && plain.contains(&TOOL));
    assert_eq!(SMALL.decode(&plain), typed);

    let parsed = SMALL.encode(typed, Special::Parse).unwrap();
    assert!(parsed.contains(&END) && parsed.contains(&UNKNOWN) && parsed.contains(&TOOL));
    assert_eq!(SMALL.decode(&parsed), "ab<tool>");
    assert_eq!(SMALL.decode_with_special(&parsed), typed);
}

#[test]
fn words_are_taken_whole_only_where_the_file_says_so() {
    let build = |pre| {
        let mut file = File::new(pre);
        file.add("jello", 1); // No merge makes it.
        (file.id("jello"), file.build().unwrap())
    };
    let (jello, llama3) = build("llama-bpe");
    assert_eq!(llama3.encode("jello", Special::Plain).unwrap(), [jello]);
    let (_, smaug) = build("smaug-bpe");
    assert_eq!(smaug.encode("jello", Special::Plain).unwrap().len(), 4); // j e ll o
}

#[test]
fn a_control_token_is_not_taken_as_a_whole_word_either() {
    let mut file = File::new("llama-bpe");
    file.add("stop", 3);
    let (stop, tokenizer) = (file.id("stop"), file.build().unwrap());
    let plain = tokenizer.encode("stop", Special::Plain).unwrap();
    assert!(!plain.contains(&stop));
    assert_eq!(tokenizer.encode("stop", Special::Parse).unwrap(), [stop]);
}

#[test]
fn a_byte_without_a_token_is_left_out_and_keeps_its_neighbours_apart() {
    let mut file = File::new("smollm");
    let at = file.id(&char_of(4).to_string()) as usize;
    file.tokens[at].clear();
    let (tokenizer, bang) = (file.build().unwrap(), file.id("!"));
    let ids = tokenizer.encode("!\u{4}!", Special::Plain).unwrap();
    assert_eq!(ids, [bang, bang]);
    assert!(!tokenizer.encodes("!\u{4}!") && tokenizer.encodes("!!"));
}

#[test]
fn a_document_begins_and_ends_as_the_file_says() {
    let file = File::new("smollm");
    let ids = |add_bos, add_eos| {
        let parts = TokenizerParts {
            add_bos,
            add_eos,
            ..file.parts()
        };
        let tokenizer = Tokenizer::new(&parts).unwrap();
        tokenizer.encode_document("hello", Special::Plain).unwrap()
    };
    let hello = file.id("hello");
    assert_eq!(ids(None, None), [hello]);
    assert_eq!(ids(Some(true), None), [TURN, hello]);
    assert_eq!(ids(Some(true), Some(true)), [TURN, hello, END]);
    // Llama 3 adds it unless the file says otherwise.
    assert!(File::new("llama-bpe").build().unwrap().adds_bos());
}

#[test]
fn known_end_tokens_end_a_generation_whatever_their_type() {
    let mut file = File::new("smollm");
    file.add("<|endoftext|>", 1);
    file.add("<reponame>", 1); // Only as a control token.
    file.add("<|repo_name|>", 3);
    let (end_of_text, repo) = (file.id("<|endoftext|>"), file.id("<|repo_name|>"));
    let tokenizer = file.build().unwrap();
    let mut ends: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
    ends.retain(|id| tokenizer.is_end_of_generation(*id));
    assert_eq!(ends, [END, end_of_text, repo]);
    assert_eq!(tokenizer.token_kind(end_of_text), Some(TokenKind::Control));
    assert!(tokenizer.is_end_of_generation(END) && !tokenizer.is_end_of_generation(TURN));
}

#[test]
fn tokens_named_by_id_are_control_tokens_whatever_their_type() {
    let typed = "<|im_start|>hello<|im_end|><turn>";
    let right = {
        let mut file = File::new("smollm");
        file.add("<turn>", 3);
        file
    };
    let turn = right.id("<turn>");
    let named = |file: &File, token_types| {
        let parts = TokenizerParts {
            other_ends: vec![("tokenizer.ggml.eot_token_id", turn)],
            token_types,
            ..file.parts()
        };
        Tokenizer::new(&parts).unwrap()
    };
    let expected = named(&right, Some(right.types.clone()));
    let ids = [TURN, right.id("hello"), END, turn];
    assert_eq!(expected.encode(typed, Special::Parse).unwrap(), ids);
    // Normal, user-defined, unused, and no types at all.
    for kind in [Some(1), Some(4), Some(5), None] {
        let types = kind.map(|kind| {
            let mut types = right.types.clone();
            for id in [TURN, END, turn] {
                types[id as usize] = kind;
            }
            types
        });
        let tokenizer = named(&right, types);
        for special in [Special::Parse, Special::Plain] {
            // Without types, only `<tool>` and `<unk>` would differ, and they are not in this text.
            let encode = |by: &Tokenizer| by.encode(typed, special).unwrap();
            assert_eq!(
                encode(&tokenizer),
                encode(&expected),
                "{kind:?} {special:?}"
            );
        }
        assert_eq!(tokenizer.decode(&ids), "hello");
        assert!(tokenizer.is_end_of_generation(turn));
    }
}

#[test]
fn a_token_that_plain_text_needs_stays_text_although_the_file_names_it_by_id() {
    let mut file = File::new("smollm");
    let text = "hello hello hell h!";
    let ids = file.build().unwrap().encode(text, Special::Plain).unwrap();
    for named in ["hello", "he", "h", "Ġhello"] {
        let id = file.id(named);
        (file.bos, file.eos) = (Some(id), Some(id));
        let tokenizer = file.build().unwrap();
        assert_eq!(tokenizer.encode(text, Special::Plain).unwrap(), ids);
        assert!(tokenizer.is_end_of_generation(id));
    }
}

#[test]
fn a_known_end_that_merges_make_stays_text() {
    let mut file = File::new("smollm");
    file.merge("<", "/");
    file.merge("</", "s");
    file.merge("</s", ">");
    let tokenizer = file.build().unwrap();
    let id = file.id("</s>");
    assert_eq!(tokenizer.token_kind(id), Some(TokenKind::Normal));
    assert!(!tokenizer.is_end_of_generation(id));
}

#[test]
fn a_token_outside_the_byte_alphabet_is_its_own_text() {
    let mut file = File::new("smollm");
    file.add("日本 語", 1);
    let (id, tokenizer) = (file.id("日本 語"), file.build().unwrap());
    assert_eq!(tokenizer.token_bytes(id), Some("日本 語".as_bytes()));
}

#[test]
fn the_first_of_two_equal_merges_counts() {
    let mut file = File::new("smollm");
    file.merge("a", "b");
    file.merge("b", "c");
    file.merges.push("a b".to_owned());
    let ids = file.build().unwrap().encode("abc", Special::Plain).unwrap();
    assert_eq!(ids, [file.id("ab"), file.id("c")]);
}

#[test]
fn a_text_beyond_the_limit_is_refused() {
    let text = " ".repeat(MAX_TEXT_BYTES + 1);
    let error = SMALL.encode(&text, Special::Plain).unwrap_err();
    assert!(matches!(error, EncodeError::TextTooLong { .. }));
}

/// Error of a file after a change.
fn refusal(change: impl FnOnce(&mut File)) -> TokenizerError {
    let mut file = File::new("smollm");
    change(&mut file);
    file.build().unwrap_err()
}

#[test]
fn broken_files_are_refused_with_the_reason() {
    use TokenizerError as E;
    assert_matches!(refusal(|f| f.pre = "other"), E::Unsupported(why) if why.contains("\"other\""));
    for (error, says) in rows! {
        refusal(|f| f.tokens.clear()) => "`tokenizer.ggml.tokens` is empty";
        refusal(|f| f.types.truncate(5)) => "has 5 token types for 266 tokens";
        refusal(|f| f.types[9] = 77) => "token 9 of the model file has the unknown type 77";
        refusal(|f| f.types[9] = -1) => "token 9 of the model file has the unknown type -1";
        refusal(|f| f.add("<|im_end|>", 1))
            => "tokens 1 and 266 of the model file have the same text";
        refusal(|f| f.add(&"x".repeat(5000), 1)) => "is 5000 bytes long; at most";
        refusal(|f| f.bos = Some(u32::MAX))
            => "bos_token_id` is 4294967295, but there are only 266";
        refusal(|f| f.eos = Some(266)) => "eos_token_id` is 266, but there are only 266 tokens";
    } {
        assert!(error.to_string().contains(says), "{error}");
    }
    for merge in ["", "ab", " ab", "ab ", " "] {
        let error = refusal(|f| f.merges.push(merge.to_owned()));
        let says = "merge 6 of the model file is not a pair of tokens";
        assert_eq!(error.to_string(), says, "{merge:?}");
    }
    // The left, the right and the whole may each be missing.
    for merge in ["nope a", "a nope", "a b", "a b c"] {
        let error = refusal(|f| f.merges.push(merge.to_owned()));
        let says = "merge 6 of the model file needs the token ";
        assert!(error.to_string().starts_with(says), "{merge:?}: {error}");
    }
    let changes: [(fn(&mut TokenizerParts<'_>), &str); 3] = rows! {
        |p| p.other_ends = vec![("key", 1000)] => "`key` is 1000, but there are only";
        |p| (p.add_bos, p.bos) = (Some(true), None)
            => "sets `tokenizer.ggml.add_bos_token` but has no";
        |p| (p.add_eos, p.eos) = (Some(true), None)
            => "sets `tokenizer.ggml.add_eos_token` but has no";
    };
    let file = File::new("smollm");
    for (change, says) in changes {
        let mut parts = file.parts();
        change(&mut parts);
        let error = Tokenizer::new(&parts).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let mut other = file.parts();
    other.model = "t5";
    let error = Tokenizer::new(&other).unwrap_err();
    assert_matches!(error, E::Unsupported(why) if why.contains("of kind \"t5\""));
}

#[test]
fn merges_that_could_smuggle_a_control_token_are_refused() {
    let making_one = |f: &mut File| {
        f.add("ab", 3);
        f.merges.push("a b".to_owned());
    };
    let error = refusal(making_one).to_string();
    let says = "merge 6 of the model file would let plain text become the control token";
    assert!(error.contains(says), "{error}");
    let taking_one = |f: &mut File| {
        f.add("ab", 3);
        f.add("abc", 1);
        f.merges.push("ab c".to_owned());
    };
    let error = refusal(taking_one).to_string();
    assert!(error.contains(says), "{error}");
}

/// Text with a high share of characters that matter here.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "hello",
            " ",
            "!",
            "<|im_end|>",
            "<tool>",
            "\n",
            "7",
            "'s",
            "😀",
            "é"
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn decoding_restores_encoded_text(text in text()) {
        for tokenizer in &*FAMILIES {
            let plain = tokenizer.encode(&text, Special::Plain).unwrap();
            prop_assert_eq!(tokenizer.decode(&plain), text.as_str());
            let parsed = tokenizer.encode(&text, Special::Parse).unwrap();
            prop_assert_eq!(tokenizer.decode_with_special(&parsed), text.as_str());
        }
    }

    #[test]
    fn plain_text_holds_no_control_tokens(text in text()) {
        let ids = SMALL.encode(&text, Special::Plain).unwrap();
        prop_assert!(ids.iter().all(|id| !SMALL.token_kind(*id).unwrap().is_structure()));
    }

    #[test]
    fn deltas_in_a_row_are_the_whole_text(
        ids in prop::collection::vec(0_u32..275, 0..40),
        special: bool,
    ) {
        let new = if special { Detokenizer::with_special } else { Detokenizer::new };
        let mut detokenizer = new(&SMALL);
        let mut deltas: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
        deltas.push_str(&detokenizer.finish());

        let shown = ids.iter().filter(|id| special || !matches!(**id, TURN | END | UNKNOWN));
        let bytes: Vec<u8> = shown
            .flat_map(|id| SMALL.token_bytes(*id).unwrap_or("\u{fffd}".as_bytes()).to_vec())
            .collect();
        prop_assert_eq!(&deltas, &String::from_utf8_lossy(&bytes));
        let whole = if special { SMALL.decode_with_special(&ids) } else { SMALL.decode(&ids) };
        prop_assert_eq!(deltas, whole);
    }

    #[test]
    fn characters_come_out_whole_and_as_soon_as_they_are_complete(text in any::<String>()) {
        // A token for each byte: the hardest case.
        let mut detokenizer = Detokenizer::new(&SMALL);
        let mut out = String::new();
        for (end, byte) in (1..).zip(text.bytes()) {
            out.push_str(&detokenizer.push(4 + u32::from(byte)));
            prop_assert_eq!(out.as_str(), &text[..text.floor_char_boundary(end)]);
        }
        prop_assert_eq!(detokenizer.finish(), "");
    }

    #[test]
    fn hostile_parts_never_panic(
        tokens in prop::collection::vec("[a-cĠ<>é]{0,3}", 0..12),
        types in prop::option::of(prop::collection::vec(-2_i128..9, 0..12)),
        merges in prop::collection::vec("[a-c ]{0,5}", 0..6),
        (bos, eos, end) in (prop::option::of(0_u32..14), prop::option::of(0_u32..14), 0_u32..14),
        (add_bos, add_eos) in (any::<Option<bool>>(), any::<Option<bool>>()),
        text in any::<String>(),
    ) {
        let parts = TokenizerParts {
            model: "gpt2",
            pre: "smollm",
            tokens: tokens.iter().map(String::as_str).collect(),
            token_types: types,
            merges: merges.iter().map(String::as_str).collect(),
            bos,
            eos,
            other_ends: vec![("end", end)],
            add_bos,
            add_eos,
            ..TokenizerParts::default()
        };
        if let Ok(tokenizer) = Tokenizer::new(&parts) {
            for special in [Special::Plain, Special::Parse] {
                let ids = tokenizer.encode_document(&text, special).unwrap();
                prop_assert!(ids.iter().all(|id| tokenizer.token_bytes(*id).is_some()));
                tokenizer.decode(&ids);
            }
        }
    }
}

/// Vocabulary and ids of Hugging Face's `tokenizers` 0.23.3 with Gemma 4's rules: spaces become `▁`,
/// BPE with bytes for characters without a token.
#[test]
fn bpe_of_characters_gives_the_ids_of_hugging_face() {
    let mut texts: Vec<String> = ["<unk>", "<bos>", "<eos>"].map(String::from).to_vec();
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let words = "▁ a b c é \n \n\n \n\n\n ab ▁a ▁ab abc ▁▁ bc ▁▁▁ c▁";
    texts.extend(words.split(' ').map(str::to_owned));
    let merges = "a b;▁ ▁;▁ ab;b c;ab c;▁ a;▁▁ ▁;c ▁;\n \n;\n\n \n";
    let mut types = vec![1; texts.len()];
    types[..3].copy_from_slice(&[2, 3, 3]);
    let tokenizer = Tokenizer::new(&TokenizerParts {
        model: "gemma4",
        tokens: texts.iter().map(String::as_str).collect(),
        token_types: Some(types),
        merges: merges.split(';').collect(),
        bos: Some(1),
        eos: Some(2),
        ..TokenizerParts::default()
    });
    let tokenizer = tokenizer.unwrap();
    let cases: [(&str, &[u32]); 10] = [
        ("ab abc", &[267, 269, 262]),
        ("a  b", &[260, 271, 261]),
        ("   abc", &[271, 269, 262]),
        ("c ab", &[262, 269]),
        ("\n\n\n\na", &[265, 265, 260]),
        ("ab\nc\n\n ab", &[267, 264, 262, 265, 269]),
        ("é ç bc", &[263, 259, 198, 170, 259, 272]),
        ("<bos>", &[63, 261, 114, 118, 65]),
        ("x🙂b", &[123, 243, 162, 156, 133, 261]),
        (" ", &[259]),
    ];
    for (text, expected) in cases {
        let ids = tokenizer.encode(text, Special::Plain).unwrap();
        assert_eq!(ids, expected, "{text:?}");
        assert_eq!(tokenizer.decode(&ids), text);
    }
    assert_eq!(
        tokenizer.encode("<bos>a", Special::Parse).unwrap(),
        [1, 260]
    );
    assert!(tokenizer.adds_bos());
}

/// Vocabulary of WordPiece; `▁` marks the beginning of a word.
fn word_piece(tokens: &[&'static str], kinds: &[i128]) -> TokenizerParts<'static> {
    TokenizerParts {
        model: "bert",
        tokens: tokens.to_vec(),
        token_types: Some(kinds.to_vec()),
        bos: Some(1),
        eos: Some(2),
        add_bos: Some(true),
        add_eos: Some(true),
        words: Some(WordParts {
            unknown: 0,
            lowercase: true,
            strip_accents: true,
        }),
        ..TokenizerParts::default()
    }
}

#[test]
fn word_piece_takes_the_longest_pieces_and_no_control_token_from_text() {
    let tokens = [
        "[UNK]", "[CLS]", "[SEP]", "▁mill", "er", "s", "▁'", "▁the", "▁m", "i", "▁中", "▁hello",
    ];
    let mut kinds = vec![1; tokens.len()];
    kinds[..3].fill(3);
    kinds[11] = 3;
    let tokenizer = Tokenizer::new(&word_piece(&tokens, &kinds)).unwrap();
    let long = "m".repeat(101);
    let cases: [(&str, &[u32]); 9] = [
        ("The millers", &[7, 3, 4, 5]),
        ("Miller's", &[3, 4, 6, 0]),
        ("mi  mí\tMÌ\nMI", &[8, 9, 8, 9, 8, 9, 8, 9]),
        ("中中the", &[10, 10, 7]),
        ("mil\u{7}l", &[3]),
        ("xmill", &[0]),
        (&long, &[0]),
        // A control token of the file, whatever its text.
        ("hello", &[0]),
        (" \u{200d} ", &[]),
    ];
    for (text, expected) in cases {
        let ids = tokenizer.encode(text, Special::Plain).unwrap();
        assert_eq!(ids, expected, "{text:?}");
    }
    let ids = tokenizer
        .encode_document("[CLS] the", Special::Plain)
        .unwrap();
    assert_eq!(ids, [1, 0, 0, 0, 7, 2]);
    let ids = tokenizer.encode("[CLS]the", Special::Parse).unwrap();
    assert_eq!(ids, [1, 7]);
    assert_eq!(tokenizer.decode(&[1, 7, 3, 4, 5, 2]), "the millers");
    let mut parts = word_piece(&tokens, &kinds);
    parts.words.as_mut().unwrap().unknown = 12;
    let error = Tokenizer::new(&parts).unwrap_err().to_string();
    assert!(error.contains("unknown_token_id"), "{error}");
}

proptest! {
    #[test]
    fn word_piece_takes_any_text(text in any::<String>()) {
        let tokens = ["[UNK]", "[CLS]", "[SEP]", "▁a", "b", "▁"];
        let tokenizer = Tokenizer::new(&word_piece(&tokens, &[3, 3, 3, 1, 1, 1])).unwrap();
        let ids = tokenizer.encode(&text, Special::Plain).unwrap();
        prop_assert!(ids.iter().all(|id| ![1, 2].contains(id)));
        tokenizer.decode(&ids);
    }
}
