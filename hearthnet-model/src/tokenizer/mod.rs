//! Text to token ids and back, from the metadata of a model file.
//!
//! There are two kinds of vocabulary: byte-level BPE (`byte_level`; GPT-2's, Llama 3's, Qwen's) and
//! SentencePiece (`sentencepiece`; Llama 2's, Mistral's, Phi-3's, Gemma's). Special tokens are cut out of
//! a text first (`special`), the same way for both; the vocabulary encodes what lies between.
//! All of it gives exactly what llama.cpp gives for the same file: `tests/vocabularies.rs` runs
//! llama.cpp's own tests, `tests/tokenizer_parity.rs` compares the two on a stored corpus.
//!
//! # Text that nobody may smuggle in
//!
//! [`Special::Parse`] turns the text of a control token, such as `<|im_end|>`, into that token:
//! right for a template, wrong for what a person typed. [`Special::Plain`] never makes a control
//! token: merging does not know them (a file whose list of merges asks for one is refused), and the
//! text stays what it looks like. [`ChatTemplate::prompt_ids`](crate::template::ChatTemplate::prompt_ids)
//! combines both, so that a message cannot end its own turn.
//!
//! # Where llama.cpp drops text, so do we
//!
//! Some byte-level vocabularies lack bytes. SmolLM2's has none for U+0004, U+0006, U+0013, U+0014, U+0016,
//! U+001D and for the lead bytes of the unassigned planes 4 to 11. llama.cpp leaves such bytes
//! out without a word, and equal ids are the contract here. SentencePiece writes a space as `▁`
//! (U+2581), so a `▁` that somebody typed comes back as a space. Phi-3 drops white space behind
//! special tokens ([`Tokenizer::new`]). [`Tokenizer::encodes`] tells whether a text comes back whole:
//! then decoding gives exactly what was encoded.
//!
//! # The space that nobody wrote
//!
//! Most SentencePiece vocabularies encode `Hello` as `▁Hello`, at the beginning of a text and behind
//! every special token: there `▁Hello` says no more than `Hello`. So
//! [`Detokenizer::new`](crate::Detokenizer::new) takes one space off a token at the beginning and behind a control token;
//! that is the inverse of encoding. llama.cpp's `token_to_piece`, by which it streams, leaves
//! the space (so its answers begin with one after Llama 2's `[/INST]`), and its `detokenize` takes it
//! off the very first token only, unless that is the beginning-of-sequence token. An answer in a
//! chat is a text of its own, so it is read from its beginning; what continues a given text
//! is not ([`Detokenizer::continuing`](crate::Detokenizer::continuing)): there the space stands between two words.
//! Behind a user-defined token, where the space may be meant as well, it stays, as in llama.cpp.
//! [`Tokenizer::token_bytes`] always has it.
//!
//! # The file is hostile
//!
//! Counts, lengths, ids and references are checked, and every failure is a [`TokenizerError`].

pub(crate) mod alphabet;
mod byte_level;
mod error;
mod parts;
mod pre;
mod sentencepiece;
mod special;
mod vocabulary;

pub use error::{EncodeError, MAX_TEXT_BYTES, TokenizerError};
pub use parts::TokenizerParts;
pub use special::TokenKind;

use crate::gguf::Gguf;
use byte_level::ByteLevel;
use parts::{ADD_BOS, ADD_EOS, Algorithm, BOS, EOS};
use sentencepiece::SentencePiece;
pub(crate) use special::drops_space;
use special::{Piece, SpecialFinder, dropping_space_behind};
use std::fmt;
use std::sync::Arc;
use vocabulary::{
    Merges, TokenBytes, ends, ids_by_text, kinds, structure_alphabet, unreachable_marks,
};

/// What the text of a control token means in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // There is no third way.
pub enum Special {
    /// The token: for templates and other text that is trusted.
    Parse,
    /// Just text: for what people and peers write. (User-defined tokens, which are whole words
    /// and not structure, are found all the same, as llama.cpp and Hugging Face do.)
    Plain,
}

/// The tokenizer of one model file. Cheap to clone, and shared between threads.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

/// What encodes the text between special tokens.
enum Vocabulary {
    ByteLevel(Box<ByteLevel>),
    SentencePiece(Box<SentencePiece>),
}

struct Inner {
    vocabulary: Vocabulary,
    /// All special tokens.
    structure_and_words: SpecialFinder,
    /// Only those that plain text may contain.
    words: SpecialFinder,
    /// Only those that plain text must not become.
    structure: SpecialFinder,
    structure_alphabet: Vec<char>,
    /// Special tokens behind which white space is dropped, ascending.
    dropping_space: Vec<u32>,
    kinds: Vec<TokenKind>,
    bytes: TokenBytes,
    /// Tokens that look like marks of a template, and that no text becomes.
    marks: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Ids that end a generation, ascending.
    ends: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.0.bos)
            .field("ends", &self.0.ends)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// The tokenizer in the metadata of a model file.
    ///
    /// # Errors
    /// [`TokenizerError`] when the file has none, or one that is broken or not supported.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::new(&TokenizerParts::from_gguf(gguf)?)
    }

    /// A tokenizer from its parts.
    ///
    /// In a model whose name says that it is Phi-3, white space behind special tokens is dropped.
    /// Its converter has no other place for that, and llama.cpp goes by the name as well.
    ///
    /// # Errors
    /// [`TokenizerError`] when the parts do not fit together or are not supported.
    pub fn new(parts: &TokenizerParts<'_>) -> Result<Self, TokenizerError> {
        let algorithm = Algorithm::named(parts.model)?;
        let mut kinds = kinds(parts)?;
        let ids = ids_by_text(&parts.tokens)?;
        let (vocabulary, ends, bytes, add_bos, marks) = match algorithm {
            Algorithm::ByteLevelBpe => {
                let merges = Merges::check(parts, &ids, &kinds)?;
                let ends = ends(parts, &ids, &mut kinds, &merges.used)?;
                let marks = unreachable_marks(&parts.tokens, &kinds, &merges.used);
                let vocabulary = ByteLevel::new(parts, &ids, &kinds, merges.pairs)?;
                let bytes = TokenBytes::new(&parts.tokens, &kinds, &byte_level::spell);
                let add_bos = vocabulary.adds_bos();
                (
                    Vocabulary::ByteLevel(Box::new(vocabulary)),
                    ends,
                    bytes,
                    add_bos,
                    marks,
                )
            }
            Algorithm::SentencePiece => {
                let ends = ends(parts, &ids, &mut kinds, &[])?;
                let vocabulary = SentencePiece::new(parts, &ids, &mut kinds)?;
                let bytes = TokenBytes::new(&parts.tokens, &kinds, &sentencepiece::spell);
                let marks = unreachable_marks(&parts.tokens, &kinds, &[]);
                (
                    Vocabulary::SentencePiece(Box::new(vocabulary)),
                    ends,
                    bytes,
                    true,
                    marks,
                )
            }
        };

        let special_tokens = |wanted: &dyn Fn(TokenKind) -> bool| {
            let tokens = parts.tokens.iter().zip(0..).zip(&kinds);
            let tokens: Vec<_> = tokens
                .filter(|((text, _), kind)| !text.is_empty() && wanted(**kind))
                .map(|((text, id), _)| (*text, id))
                .collect();
            SpecialFinder::new(&tokens)
        };
        let add_bos = parts.add_bos.unwrap_or(add_bos);
        let add_eos = parts.add_eos.unwrap_or(false);
        for (add, id, flag, key) in [
            (add_bos, parts.bos, ADD_BOS, BOS),
            (add_eos, parts.eos, ADD_EOS, EOS),
        ] {
            if add && id.is_none() {
                return Err(TokenizerError::Malformed(format!(
                    "the model file sets `{flag}` but has no `{key}`"
                )));
            }
        }
        Ok(Self(Arc::new(Inner {
            vocabulary,
            structure_and_words: special_tokens(&|kind| kind.is_verbatim())?,
            words: special_tokens(&|kind| kind == TokenKind::UserDefined)?,
            structure: special_tokens(&|kind| kind.is_structure())?,
            structure_alphabet: structure_alphabet(&parts.tokens, &kinds),
            dropping_space: dropping_space_behind(parts, &kinds),
            kinds,
            bytes,
            marks,
            bos: parts.bos,
            eos: parts.eos,
            ends,
            add_bos,
            add_eos,
        })))
    }

    /// The ids of `text`, without any token at its beginning or end.
    ///
    /// # Errors
    /// [`EncodeError::TextTooLong`] for more than [`MAX_TEXT_BYTES`].
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        self.encode_into(text, special, &mut ids)?;
        Ok(ids)
    }

    /// The ids of a whole text: with the tokens at its beginning and end that the file asks for.
    ///
    /// # Errors
    /// [`EncodeError::TextTooLong`] for more than [`MAX_TEXT_BYTES`].
    pub fn encode_document(&self, text: &str, special: Special) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        ids.extend(self.bos().filter(|_| self.adds_bos()));
        self.encode_into(text, special, &mut ids)?;
        ids.extend(self.eos().filter(|_| self.adds_eos()));
        Ok(ids)
    }

    /// Whether decoding gives `text` back whole, when it was encoded as [`Special::Plain`].
    pub fn encodes(&self, text: &str) -> bool {
        let changes_space = self.adds_space_prefix() || !self.0.dropping_space.is_empty();
        if changes_space && self.0.words.occurs_in(text) {
            return false;
        }
        match &self.0.vocabulary {
            Vocabulary::ByteLevel(_) => text.bytes().all(|byte| self.encodes_byte(byte)),
            Vocabulary::SentencePiece(_) => !text.contains(sentencepiece::SPACE),
        }
    }

    /// Whether `byte` has a token.
    pub fn encodes_byte(&self, byte: u8) -> bool {
        match &self.0.vocabulary {
            Vocabulary::ByteLevel(vocabulary) => vocabulary.encodes_byte(byte),
            Vocabulary::SentencePiece(_) => true,
        }
    }

    /// The first `limit` tokens, quoted, that are written in `prompt` and that it is not encoded as,
    /// although they look like the marks of a template: the file gives them the type of plain text.
    pub(crate) fn unreachable_marks_in(&self, prompt: &str, limit: usize) -> Vec<String> {
        let marks = self.0.marks.iter();
        let named = |id: &u32| Some((str::from_utf8(self.0.bytes.get(*id)?).ok()?, *id));
        let marks: Vec<(&str, u32)> = marks.filter_map(named).collect();
        // More marks than a searcher takes have no vocabulary but a hostile one.
        let Ok(finder) = SpecialFinder::new(&marks) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for piece in finder.pieces(prompt, &[]) {
            match piece {
                Piece::Token(id) if found.len() < limit && !found.contains(&id) => found.push(id),
                _ => {}
            }
        }
        let name = |id| String::from_utf8_lossy(self.0.bytes.get(id).unwrap_or_default());
        found
            .into_iter()
            .map(|id| format!("{:?}", name(id)))
            .collect()
    }

    /// The number of tokens: ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.0.kinds.len()
    }

    /// The bytes that a token stands for, which need not be whole characters; `None` outside the
    /// vocabulary. A control token's are its name in the file.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.0.bytes.get(id)
    }

    /// What a token is; `None` outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.0.kinds.get(usize::try_from(id).ok()?).copied()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.0.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.0.eos
    }

    /// Whether a generation ends when `id` is sampled: end of sequence, of turn, of message, and
    /// those with which a code model leaves the file.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.0.ends.binary_search(&id).is_ok()
    }

    /// Whether texts begin with the beginning-of-sequence token.
    pub fn adds_bos(&self) -> bool {
        self.0.add_bos
    }

    /// Whether texts end with the end-of-sequence token.
    pub fn adds_eos(&self) -> bool {
        self.0.add_eos
    }

    /// Whether text begins with a space that nobody wrote: at the beginning, and behind every
    /// special token.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        match &self.0.vocabulary {
            Vocabulary::ByteLevel(_) => false,
            Vocabulary::SentencePiece(vocabulary) => vocabulary.adds_space_prefix(),
        }
    }

    fn encode_into(
        &self,
        text: &str,
        special: Special,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(EncodeError::TextTooLong(text.len()));
        }
        let finder = match special {
            Special::Parse => &self.0.structure_and_words,
            Special::Plain => &self.0.words,
        };
        for piece in self.pieces(finder, text) {
            match (piece, &self.0.vocabulary) {
                (Piece::Token(id), _) => ids.push(id),
                (Piece::Text(text), Vocabulary::ByteLevel(vocabulary)) => {
                    vocabulary.encode(text, ids)?;
                }
                // Every piece stands at the beginning or behind a special token.
                (Piece::Text(text), Vocabulary::SentencePiece(vocabulary)) => {
                    vocabulary.encode(text, ids);
                }
            }
        }
        Ok(())
    }

    /// The text as special tokens and what lies between them, less the white space that some
    /// models drop there.
    fn pieces<'t>(&self, finder: &SpecialFinder, text: &'t str) -> Vec<Piece<'t>> {
        finder.pieces(text, &self.0.dropping_space)
    }
}

/// The tokens that every SentencePiece vocabulary has, with their types: bytes and the space.
#[cfg(feature = "fuzzing")]
pub(crate) fn sentencepiece_basics() -> impl Iterator<Item = (String, i128)> {
    let bytes = (0..=255_u8).map(|byte| (format!("<0x{byte:02X}>"), 6));
    bytes.chain([(sentencepiece::SPACE.into(), 1)])
}

/// How byte-level vocabularies write a byte.
#[cfg(feature = "fuzzing")]
pub(crate) fn written_byte(byte: u8) -> String {
    alphabet::char_of(byte).into()
}

/// The control tokens, for those who build prompts.
impl Tokenizer {
    /// Whether the text of a control token occurs in `text`.
    pub(crate) fn has_structure(&self, text: &str) -> bool {
        self.0.structure.occurs_in(text)
    }

    /// The control tokens whose text occurs in `text`, in order.
    pub(crate) fn structure_in(&self, text: &str) -> Vec<u32> {
        let pieces = self.pieces(&self.0.structure, text);
        let ids = pieces.into_iter().filter_map(|piece| match piece {
            Piece::Token(id) => Some(id),
            Piece::Text(_) => None,
        });
        ids.collect()
    }

    /// Every character in the texts of control tokens, white space left out, ascending.
    pub(crate) fn structure_alphabet(&self) -> &[char] {
        &self.0.structure_alphabet
    }

    /// The ids of `text`: control tokens are found in the text as it is, and what lies between
    /// them goes through `undo` first.
    pub(crate) fn encode_through(
        &self,
        text: &str,
        undo: &dyn Fn(&str) -> String,
    ) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        for piece in self.pieces(&self.0.structure, text) {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(text) => self.encode_into(&undo(text), Special::Plain, &mut ids)?,
            }
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests;
