//! Pre-tokenisers: split a text into words before byte pairs are merged inside each word.
//!
//! The rules are llama.cpp's for the same `tokenizer.ggml.pre` (`llm_tokenizer_bpe` in
//! `llama-vocab.cpp`), because its converter wrote that name. They run on the `regex` crate, whose
//! time is linear in any text. It has no look-ahead, which the original patterns need in one place:
//! `\s+(?!\S)|\s+`, white space that leaves its last character to the next word.
//! [`Stage::give_back`] does that. (Elsewhere a look-ahead only removes characters from a class:
//! `(?=\p{L})[^a-z]` is written `[\p{L}--[a-z]]` here.)
//!
//! Letters, numbers and punctuation are those of Unicode 15.1, as in llama.cpp, whatever the
//! version in the `regex` crate: a new Unicode version must not change the ids of any text.
//!
//! A file names its rules but cannot bring patterns of its own. The patterns have neither
//! look-around nor references, so each passes over a text once.
//!
//! Hugging Face writes contractions as `(?i:'s|...)`, where Unicode case folding makes `'ſ`
//! (U+017F) a contraction. As in llama.cpp, the patterns here list both ASCII cases instead.

use hearthnet_files::tokenizer_parts::TokenizerError;
use regex::Regex;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
/// As Qwen2, but line breaks do not belong to the punctuation before them.
const SEED: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+";
const QWEN35: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
/// In words with upper and lower case, llama.cpp counts only ASCII letters as having a case; all
/// other letters fit both.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
/// Letters as listed in DeepSeek LLM's pattern.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
/// DeepSeek LLM's punctuation, and its ideographs and syllables. llama.cpp's classes do not match
/// white space beyond ASCII, so U+3000 and similar characters are excluded.
const DEEPSEEK_PUNCTUATION: &str = r"\s?[[!-/:-~！-／：-～‘-‟\u{3000}-。]--[\u{3000}]]+";
const DEEPSEEK_CJK: &str = r"[[一-龥ࠀ-一가-\u{d7ff}]--\s]+";
const DEEPSEEK_V3: &str = r#"[!"\#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"#;

/// Whether a match of white space leaves its last character to the next word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GiveBack {
    /// Matches are kept whole.
    Nothing,
    /// Any white space.
    Space,
    /// White space other than CR and LF. A match that ends in CR or LF came from another
    /// alternative (`\s*[\r\n]+`), which keeps all of it.
    SpaceExceptNewlines,
}

use GiveBack::{Nothing, Space, SpaceExceptNewlines as Spaces};

/// Treatment of a word that is in the vocabulary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Words {
    /// Merged like any other word.
    Merged,
    /// Taken whole, without merging.
    Whole,
    /// Taken whole; and by default texts begin with the beginning-of-sequence token.
    WholeAndBos,
}

use Words::{Merged, Whole, WholeAndBos};

/// Names of `tokenizer.ggml.pre` with the same rules, the patterns in order, and the treatment of
/// words.
type Rules = (&'static str, &'static [(&'static str, GiveBack)], Words);

const RULES: &[Rules] = &[
    // llama.cpp's rules for files with an unknown pre-tokeniser.
    (
        "default",
        &[
            (r"[\p{P}$+<=>^~|]+", Nothing),
            (GPT2, Space),
            (r"\p{N}+", Nothing),
            (r"[0-9][0-9][0-9]", Nothing),
        ],
        Merged,
    ),
    (
        "gpt-2 phi-2 olmo exaone4 mpt jais gigachat mellum a.x-4.0 trillion",
        &[(GPT2, Space)],
        Merged,
    ),
    // Splits off every digit, then as GPT-2.
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
        &[(r"\p{N}", Nothing), (GPT2, Space)],
        Merged,
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        &[(LLAMA3, Spaces)],
        WholeAndBos,
    ),
    ("glm4", &[(LLAMA3, Spaces)], Whole),
    ("smaug-bpe dbrx chatglm-bpe", &[(LLAMA3, Spaces)], Merged),
    // As Llama 3, but splits off every digit.
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan kormo solar-open grok-2",
        &[(QWEN2, Spaces)],
        Merged,
    ),
    // As Qwen2, with combining marks among the letters.
    ("qwen35", &[(QWEN35, Spaces)], Merged),
    ("seed-coder", &[(SEED, Spaces)], Merged),
    // Mistral Nemo: words also end where their case changes.
    ("tekken", &[(TEKKEN, Spaces)], WholeAndBos),
    // As tekken, with contractions and up to three digits.
    ("gpt-4o llama4 kanana2", &[(GPT4O, Spaces)], Merged),
    // Punctuation, GPT-2, three digits.
    (
        "falcon",
        &[
            (r"[\p{P}$+<=>^~|`]+", Nothing),
            (GPT2, Space),
            (r"[0-9][0-9][0-9]", Nothing),
        ],
        Merged,
    ),
    (
        "deepseek-llm",
        &[
            (r"[\r\n]", Nothing),
            (DEEPSEEK_LETTERS, Nothing),
            (DEEPSEEK_PUNCTUATION, Nothing),
            (r"\s+$", Nothing),
            (DEEPSEEK_CJK, Nothing),
            (r"\p{N}+", Nothing),
        ],
        Merged,
    ),
    (
        "deepseek-coder",
        &[
            (r"[\r\n]", Nothing),
            (r"\s?\p{L}+", Nothing),
            (r"\s?\p{P}+", Nothing),
            (DEEPSEEK_CJK, Nothing),
            (r"\p{N}", Nothing),
        ],
        Merged,
    ),
    (
        "deepseek-v3 hunyuan-dense",
        &[
            (r"\p{N}{1,3}", Nothing),
            (r"[一-龥぀-ゟ゠-ヿ]+", Nothing),
            (DEEPSEEK_V3, Spaces),
        ],
        Merged,
    ),
];

/// Pass over the text that splits off the matches of a pattern.
#[derive(Debug)]
struct Stage {
    pattern: Regex,
    give_back: GiveBack,
}

/// Splits texts into words. The words in order are the whole text.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Each stage splits every piece that the previous one left.
    stages: Vec<Stage>,
    /// A word that is a token is taken whole, without merging.
    pub(super) ignore_merges: bool,
    /// By default, texts begin with the beginning-of-sequence token.
    pub(super) add_bos: bool,
}

impl PreTokenizer {
    /// Rules for a value of `tokenizer.ggml.pre`.
    pub(super) fn new(pre: &str) -> Result<Self, TokenizerError> {
        let mut rules = RULES.iter();
        let &(_, stages, words) = rules
            .find(|(names, ..)| names.split(' ').any(|name| name == pre))
            .ok_or_else(|| {
                let known = Self::names().collect::<Vec<_>>().join(", ");
                TokenizerError::Unsupported(format!(
                    "the model file's pre-tokeniser {pre:?} is not supported (known: {known})"
                ))
            })?;
        let stages = stages
            .iter()
            .map(|&(pattern, give_back)| {
                let pattern =
                    Regex::new(&of_unicode_15_1(pattern)).map_err(TokenizerError::build)?;
                Ok(Stage { pattern, give_back })
            })
            .collect::<Result<_, TokenizerError>>()?;
        Ok(Self {
            stages,
            ignore_merges: words != Merged,
            add_bos: words == WholeAndBos,
        })
    }

    /// Every supported value of `tokenizer.ggml.pre`.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        RULES.iter().flat_map(|(names, ..)| names.split(' '))
    }

    /// Calls `word` with the words of `text`, in order; stops at its first error.
    pub(super) fn split<E>(
        &self,
        text: &str,
        word: &mut dyn FnMut(&str) -> Result<(), E>,
    ) -> Result<(), E> {
        run(&self.stages, text, word)
    }
}

/// Limits the pattern's categories to the characters of Unicode 15.1.
fn of_unicode_15_1(pattern: &str) -> String {
    [r"\p{L}", r"\p{N}", r"\p{P}", r"\p{M}", r"\p{S}"]
        .into_iter()
        .fold(pattern.to_owned(), |pattern, category| {
            pattern.replace(category, &format!(r"[{category}&&\p{{age:15.1}}]"))
        })
}

fn run<E>(
    stages: &[Stage],
    text: &str,
    word: &mut dyn FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((stage, later)) = stages.split_first() else {
        return word(text);
    };
    let mut rest = text;
    while let Some((gap, matched, after)) = stage.cut(rest) {
        run(later, gap, word)?;
        run(later, matched, word)?;
        rest = after;
    }
    run(later, rest, word)
}

impl Stage {
    /// Text before the first match, the match, and the rest; `None` without a match. The patterns
    /// have no look-behind, so a search may start anywhere.
    fn cut<'t>(&self, text: &'t str) -> Option<(&'t str, &'t str, &'t str)> {
        let found = self.pattern.find(text).filter(|found| !found.is_empty())?;
        let (gap, from) = text.split_at(found.start());
        let (matched, after) =
            from.split_at(self.give_back(found.as_str(), found.end() < text.len()));
        Some((gap, matched, after))
    }

    /// Length in bytes of the part that a match keeps.
    fn give_back(&self, matched: &str, something_follows: bool) -> usize {
        let mut chars = matched.chars();
        let Some(last) = chars.next_back() else {
            return 0;
        };
        let given = match self.give_back {
            GiveBack::Nothing => false,
            GiveBack::Space => last.is_whitespace(),
            GiveBack::SpaceExceptNewlines => last.is_whitespace() && !matches!(last, '\r' | '\n'),
        };
        // A single white space character stays a word of its own.
        if given && something_follows && !chars.as_str().is_empty() {
            chars.as_str().len()
        } else {
            matched.len()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_testkit::rows;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::sync::LazyLock;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _,
        SplitDelimiterBehavior,
    };

    /// All rules, compiled once.
    static ALL: LazyLock<HashMap<&str, PreTokenizer>> = LazyLock::new(|| {
        let new = |name| (name, PreTokenizer::new(name).unwrap());
        PreTokenizer::names().map(new).collect()
    });

    /// Hugging Face's own splitters, with the look-ahead in the pattern.
    static REFERENCE: LazyLock<HashMap<&str, Vec<Split>>> = LazyLock::new(|| {
        let gpt2 = with_look_ahead(GPT2);
        let families = [
            ("gpt-2", vec![gpt2.clone()]),
            ("smollm", vec![r"\p{N}".to_owned(), gpt2]),
            ("llama-bpe", vec![with_look_ahead(LLAMA3)]),
            ("qwen2", vec![with_look_ahead(QWEN2)]),
            ("qwen35", vec![with_look_ahead(QWEN35)]),
            ("seed-coder", vec![with_look_ahead(SEED)]),
            ("tekken", vec![with_look_ahead(TEKKEN)]),
            ("gpt-4o", vec![with_look_ahead(GPT4O)]),
        ];
        let split = |stage: String| {
            let pattern = SplitPattern::Regex(of_unicode_15_1(&stage));
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap()
        };
        families
            .into_iter()
            .map(|(name, stages)| (name, stages.into_iter().map(split).collect()))
            .collect()
    });

    fn words(pre: &str, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        ALL[pre]
            .split::<()>(text, &mut |word| {
                words.push(word.to_owned());
                Ok(())
            })
            .unwrap();
        words
    }

    fn reference(pre: &str, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        for stage in &REFERENCE[pre] {
            stage.pre_tokenize(&mut pieces).unwrap();
        }
        pieces
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(word, ..)| word.to_owned())
            .collect()
    }

    /// Restores the look-ahead that the shipped patterns omit.
    fn with_look_ahead(pattern: &str) -> String {
        let head = pattern.strip_suffix(r"\s+").unwrap();
        format!(r"{head}\s+(?!\S)|\s+")
    }

    #[test]
    fn white_space_leaves_its_last_character_to_the_next_word() {
        for (pre, text, expected) in rows! {
            "gpt-2", "a   b \n c  " => "a|  | b| \n| c|  ";
            "llama-bpe", "a   b \n c  " => "a|  | b| \n| c|  ";
            "qwen2", "x \n\n  y\tz" => "x| \n\n| | y|\tz";
            "qwen2", "x.\n\ny" => "x|.\n\n|y";
            "seed-coder", "x.\n\ny" => "x|.|\n\n|y";
        } {
            assert_eq!(words(pre, text).join("|"), expected);
        }
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        assert_eq!(words("smollm", "in 2024"), ["in", " ", "2", "0", "2", "4"]);
        assert_eq!(words("gpt-2", "in 2024"), ["in", " 2024"]);
        assert_eq!(words("llama-bpe", "in 2024"), ["in", " ", "202", "4"]);
        assert_eq!(words("qwen2", "in 2024"), ["in", " ", "2", "0", "2", "4"]);
        assert_eq!(words("default", "in 20245"), ["in", " ", "202", "45"]);
    }

    #[test]
    fn letters_are_those_of_unicode_15_1() {
        // U+1C89 has been a letter since Unicode 16; older models do not treat it as one.
        assert_eq!(words("gpt-2", "a\u{1c89}"), ["a", "\u{1c89}"]);
        assert_eq!(words("gpt-2", "a\u{1c88}"), ["a\u{1c88}"]);
    }

    #[test]
    fn an_unknown_pre_tokeniser_is_refused_by_name() {
        let error = PreTokenizer::new("gpt-5").unwrap_err();
        assert!(matches!(&error, TokenizerError::Unsupported(why) if why.contains("\"gpt-5\"")));
        assert!(error.to_string().contains("smollm"));
    }

    #[test]
    fn megabytes_of_white_space_are_cut_in_one_go() {
        let text = format!("a{}b", " ".repeat(3_000_000));
        assert_eq!(words("llama-bpe", &text).len(), 3);
        assert_eq!(words("smollm", &text).len(), 3);
    }

    /// Strings rich in characters that the rules distinguish.
    fn tricky() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => prop::sample::select(vec![
                " ", "  ", "\n", "\r\n", "\t", "\u{a0}", "\u{3000}", "'", "'s", "'LL", "'re", "a", "Z",
                "é", "e\u{301}", "1", "23", "٣", "Ⅷ", "½", "中", "हि", "_", "-", "!?", "😀",
                "\u{200d}", "\u{fe0f}", "\u{85}", "\u{0}", "ſ",
            ]).prop_map(str::to_owned),
            1 => any::<char>().prop_map(String::from),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn the_words_are_the_same_as_with_the_look_ahead(text in tricky()) {
            for pre in REFERENCE.keys() {
                prop_assert_eq!(words(pre, &text), reference(pre, &text));
            }
        }

        #[test]
        fn no_family_drops_or_reorders_anything(text in any::<String>()) {
            for pre in PreTokenizer::names() {
                prop_assert_eq!(words(pre, &text).concat(), text.as_str());
            }
        }
    }
}
