//! Tokenizer metadata of a model file, as plain values. A host hashes them
//! ([`Gguf::text_id`]) and has no tokenizer.

use serde::Serialize;

use crate::gguf::{Array, Gguf, MetadataError};

/// Above any vocabulary (Gemma 3: 262,144).
const MAX_TOKENS: usize = 1 << 20;
/// Above any list of merges (Gemma 3: about 515,000).
const MAX_MERGES: usize = 1 << 21;

/// Tokenizer algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Byte pairs inside words, merged in the order of a list.
    ByteLevelBpe,
    /// Characters of whole texts, merged by the score of the result.
    SentencePiece,
    /// Characters of whole texts, merged in the order of a list.
    TextBpe,
    /// The longest pieces of words, from left to right.
    WordPiece,
}

impl Algorithm {
    /// Algorithm for a value of `tokenizer.ggml.model`.
    pub fn named(model: &str) -> Result<Self, TokenizerError> {
        match model {
            "gpt2" => Ok(Self::ByteLevelBpe),
            "llama" => Ok(Self::SentencePiece),
            "gemma4" => Ok(Self::TextBpe),
            "bert" => Ok(Self::WordPiece),
            _ => Err(TokenizerError::Unsupported(format!(
                "the model file's tokenizer is of kind {model:?}; only `gpt2` (byte-level BPE), \
                 `llama` (SentencePiece), `gemma4` (BPE of characters) and `bert` (WordPiece) are supported"
            ))),
        }
    }
}

/// Input of a tokenizer. Only types and counts are checked here; the tokenizer checks the rest.
#[derive(Debug, Clone, Default)]
pub struct TokenizerParts<'a> {
    /// `tokenizer.ggml.model`: the kind of tokenizer.
    pub model: &'a str,
    /// `general.name`: name of the model. See [`drops_space`].
    pub name: &'a str,
    /// `tokenizer.ggml.pre`: the name of the pre-tokeniser. Byte-level BPE only.
    pub pre: &'a str,
    /// `tokenizer.ggml.tokens`: the text of each token, by id.
    pub tokens: Vec<&'a str>,
    /// `tokenizer.ggml.token_type`: the type of each token; `None` if all are normal.
    pub token_types: Option<Vec<i128>>,
    /// `tokenizer.ggml.merges`: two tokens with a space in between, best first. BPE
    /// only.
    pub merges: Vec<&'a str>,
    /// `tokenizer.ggml.scores`: merge priority of each token, by id; the highest merges first.
    /// SentencePiece only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.add_space_prefix`: a space is put before each text. SentencePiece only.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.bos_token_id`: beginning of sequence.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`: end of sequence.
    pub eos: Option<u32>,
    /// Other ids that end a generation: end of turn, end of message, and tokens of code models that
    /// end a file.
    pub other_ends: Vec<(&'static str, u32)>,
    /// `tokenizer.ggml.add_bos_token`: texts begin with the beginning-of-sequence token.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`: texts end with the end-of-sequence token.
    pub add_eos: Option<bool>,
    /// Only of WordPiece.
    pub words: Option<WordParts>,
}

/// Parts of a WordPiece vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WordParts {
    /// `tokenizer.ggml.unknown_token_id`: token of a word that has no pieces.
    pub unknown: u32,
    /// `tokenizer.ggml.normalizer.lowercase`: text becomes lower case.
    pub lowercase: bool,
    /// `tokenizer.ggml.normalizer.strip_accents`: letters lose their accents.
    pub strip_accents: bool,
}

const MODEL: &str = "tokenizer.ggml.model";
const NAME: &str = "general.name";
const PRE: &str = "tokenizer.ggml.pre";
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
pub const SCORES: &str = "tokenizer.ggml.scores";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
pub const BOS: &str = "tokenizer.ggml.bos_token_id";
pub const EOS: &str = "tokenizer.ggml.eos_token_id";
pub const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
pub const EOT: &str = "tokenizer.ggml.eot_token_id";
pub const EOM: &str = "tokenizer.ggml.eom_token_id";
/// Default ids of `<s>` and `</s>` in SentencePiece vocabularies.
const SENTENCEPIECE_BOS: u32 = 1;
const SENTENCEPIECE_EOS: u32 = 2;
const CLS: &str = "tokenizer.ggml.cls_token_id";
const SEP: &str = "tokenizer.ggml.seperator_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
pub(crate) const LOWERCASE: &str = "tokenizer.ggml.normalizer.lowercase";
pub(crate) const STRIP_ACCENTS: &str = "tokenizer.ggml.normalizer.strip_accents";
/// Default ids of `[CLS]`, `[SEP]` and `[UNK]` in WordPiece vocabularies.
const WORD_PIECE_CLS: u32 = 101;
const WORD_PIECE_SEP: u32 = 102;
const WORD_PIECE_UNK: u32 = 100;
/// Keys of [`TokenizerParts::other_ends`].
const OTHER_ENDS: [&str; 5] = [
    EOT,
    EOM,
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
];

/// Why the tokenizer of a model file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A metadata value has the wrong type or is out of range.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// `tokenizer.ggml.model` or `tokenizer.ggml.pre` has an unknown value. There is no fallback,
    /// because the rules decide the token ids.
    #[error("{0}")]
    Unsupported(String),

    /// A part is missing, too large or inconsistent, or would let plain text become a control
    /// token. Texts of the file are quoted.
    #[error("{0}")]
    Malformed(String),
}

impl TokenizerError {
    /// Error for a missing key.
    pub fn missing(key: &str) -> Self {
        let what = match key {
            MODEL => "it has no tokenizer",
            _ => "its tokenizer is incomplete",
        };
        Self::Malformed(format!(
            "the model file has no `{key}`: {what}; convert the model again with a current converter"
        ))
    }

    /// Error of the `tokenizers` crate or a searcher on input that has passed our own checks.
    pub fn build(reason: impl std::fmt::Display) -> Self {
        Self::Malformed(format!(
            "the tokenizer of the model file cannot be built: {reason}"
        ))
    }
}

impl<'a> TokenizerParts<'a> {
    /// Reads the metadata of a model file. Only the lists themselves are copied.
    ///
    /// Like llama.cpp, this ignores `tokenizer.ggml.add_space_prefix` for byte-level BPE, and
    /// `tokenizer.ggml.remove_extra_whitespaces` for both algorithms.
    ///
    /// # Errors
    /// [`TokenizerError`] if a key is missing, has another type, or too many elements.
    pub fn from_gguf(gguf: &'a Gguf) -> Result<Self, TokenizerError> {
        let required = |key| gguf.str(key)?.ok_or_else(|| TokenizerError::missing(key));
        let model = required(MODEL)?;
        let mut parts = Self {
            model,
            name: gguf.str(NAME)?.unwrap_or_default(),
            tokens: strings(gguf, TOKENS, MAX_TOKENS)?,
            token_types: token_types(gguf)?,
            bos: gguf.u32(BOS)?,
            eos: gguf.u32(EOS)?,
            add_bos: gguf.bool(ADD_BOS)?,
            add_eos: gguf.bool(ADD_EOS)?,
            ..Self::default()
        };
        for key in OTHER_ENDS {
            parts.other_ends.extend(gguf.u32(key)?.map(|id| (key, id)));
        }
        match Algorithm::named(model)? {
            Algorithm::ByteLevelBpe => {
                parts.pre = required(PRE)?;
                parts.merges = strings(gguf, MERGES, MAX_MERGES)?;
            }
            Algorithm::TextBpe => parts.merges = strings(gguf, MERGES, MAX_MERGES)?,
            Algorithm::WordPiece => {
                let lowercase = gguf.bool(LOWERCASE)?.unwrap_or(true);
                parts.words = Some(WordParts {
                    unknown: gguf.u32(UNKNOWN)?.unwrap_or(WORD_PIECE_UNK),
                    lowercase,
                    strip_accents: gguf.bool(STRIP_ACCENTS)?.unwrap_or(lowercase),
                });
                // As llama.cpp: every text has these two, whatever the file says about adding them.
                parts.bos = gguf.u32(CLS)?.or(parts.bos).or(Some(WORD_PIECE_CLS));
                parts.eos = gguf.u32(SEP)?.or(parts.eos).or(Some(WORD_PIECE_SEP));
                (parts.add_bos, parts.add_eos) = (Some(true), Some(true));
            }
            Algorithm::SentencePiece => {
                parts.scores = scores(gguf)?;
                parts.add_space_prefix = gguf.bool(ADD_SPACE_PREFIX)?;
                let known = |id: u32| usize::try_from(id).is_ok_and(|id| id < parts.tokens.len());
                parts.bos = parts
                    .bos
                    .or(Some(SENTENCEPIECE_BOS).filter(|id| known(*id)));
                parts.eos = parts
                    .eos
                    .or(Some(SENTENCEPIECE_EOS).filter(|id| known(*id)));
            }
        }
        Ok(parts)
    }
}

/// Whether a model of this name drops white space behind special tokens: Phi-3 does. The
/// metadata has no key for that, and llama.cpp uses the name too.
pub fn drops_space(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("phi-3") || name.contains("phi3")
}

/// Reads a list of at most `limit` elements, counted before any of them is read; `None` if the key
/// is missing.
fn list<'a, T>(
    gguf: &'a Gguf,
    key: &'static str,
    limit: usize,
    expected: &'static str,
    read: impl FnOnce(Array<'a>) -> Option<T>,
) -> Result<Option<T>, TokenizerError> {
    let Some(array) = gguf.array(key)? else {
        return Ok(None);
    };
    if array.len() > limit {
        return Err(TokenizerError::Malformed(format!(
            "the model file's `{key}` has {} elements; at most {limit} are accepted",
            array.len()
        )));
    }
    let mismatch = || MetadataError::Mismatch {
        key: key.to_owned(),
        expected,
        found: "an array of another type".to_owned(),
    };
    Ok(Some(read(array).ok_or_else(mismatch)?))
}

fn strings<'a>(
    gguf: &'a Gguf,
    key: &'static str,
    limit: usize,
) -> Result<Vec<&'a str>, TokenizerError> {
    let read = |array: Array<'a>| Some(array.strings()?.collect());
    let strings = list(gguf, key, limit, "an array of strings", read)?;
    strings.ok_or_else(|| TokenizerError::missing(key))
}

fn token_types(gguf: &Gguf) -> Result<Option<Vec<i128>>, TokenizerError> {
    let read = |array: Array<'_>| Some(array.integers()?.collect());
    list(gguf, TOKEN_TYPE, MAX_TOKENS, "an array of integers", read)
}

fn scores(gguf: &Gguf) -> Result<Vec<f32>, TokenizerError> {
    #[allow(clippy::cast_possible_truncation)] // Scores are f32 wherever they are used.
    let read = |array: Array<'_>| Some(array.floats()?.map(|score| score as f32).collect());
    let scores = list(gguf, SCORES, MAX_TOKENS, "an array of floats", read)?;
    scores.ok_or_else(|| TokenizerError::missing(SCORES))
}
