//! Conversion of text to token ids and back, from the metadata of a model file.
//!
//! There are four kinds of vocabulary: byte-level BPE (`byte_level`; GPT-2, Llama 3, Qwen),
//! SentencePiece (`sentencepiece`; Llama 2, Mistral, Phi-3, Gemma), BPE of characters (`text_bpe`;
//! Gemma 4) and WordPiece (`word_piece`; BERT). For all of them, special tokens are
//! split off first (`special`), and the vocabulary encodes the text between them. The results equal
//! llama.cpp's for the same file: `tests/vocabularies.rs` runs llama.cpp's own tests,
//! `tests/tokenizer_parity.rs` compares a stored corpus.
//!
//! # Control tokens in untrusted text
//!
//! [`Special::Parse`] turns the text of a control token, such as `<|im_end|>`, into that token:
//! right for a template, wrong for user input. [`Special::Plain`] never produces a control token:
//! merging does not know them (a file whose merges would make one is refused), and the text stays
//! text. [`ChatTemplate::prompt_ids`](crate::template::ChatTemplate::prompt_ids) combines both, so
//! that a message cannot end its own turn.
//!
//! # Dropped text
//!
//! Some byte-level vocabularies lack bytes. SmolLM2's has no token for U+0004, U+0006, U+0013,
//! U+0014, U+0016, U+001D and for the lead bytes of the unassigned planes 4 to 11. llama.cpp drops
//! such bytes silently, and equal ids are the contract here. SentencePiece writes a space as `▁`
//! (U+2581), so a typed `▁` is decoded as a space. Phi-3 drops white space behind special tokens
//! ([`Tokenizer::new`]). `Tokenizer::encodes`, for tests, tells whether decoding restores a text.
//!
//! # The space prefix
//!
//! Most SentencePiece vocabularies encode `Hello` as `▁Hello`, at the beginning of a text and
//! behind every special token. The inverse removes that space:
//! [`Detokenizer::new`](crate::Detokenizer::new) drops one space at the beginning and behind a
//! control token.
//!
//! llama.cpp's `token_to_piece`, which it streams with, keeps the space, so its answers begin with
//! one after Llama 2's `[/INST]`. Its `detokenize` drops it only from the very first token, unless
//! that is the beginning-of-sequence token.
//!
//! An answer in a chat is a text of its own, so it is decoded from its beginning. A continuation of
//! a given text is not ([`Detokenizer::continuing`](crate::Detokenizer::continuing)): there the
//! space separates two words. Behind a user-defined token, where the space may be intended, it
//! stays, as in llama.cpp. [`Tokenizer::token_bytes`] always includes it.
//!
//! # The file is hostile
//!
//! Counts, lengths, ids and references are checked, and every failure is a [`TokenizerError`].

mod byte_level;
mod error;
mod grammar_words;
mod pre;
mod sentencepiece;
mod special;
mod text_bpe;
mod vocabulary;
mod word_piece;

pub use error::{EncodeError, MAX_TEXT_BYTES};
use hearthnet_files::gguf::Gguf;
use hearthnet_files::tokenizer_parts::{
    ADD_BOS, ADD_EOS, Algorithm, BOS, EOS, TokenizerError, TokenizerParts,
};
pub use special::TokenKind;

use crate::grammar::{GrammarError, Vocabulary as GrammarVocabulary};
use byte_level::ByteLevel;
use sentencepiece::SentencePiece;
use special::{Piece, SpecialFinder, dropping_space_behind};
use std::fmt;
use std::sync::{Arc, OnceLock};
use text_bpe::TextBpe;
use vocabulary::{
    Merges, TokenBytes, ends, ids_by_text, kinds, structure_alphabet, unreachable_marks,
};
use word_piece::WordPiece;

/// Meaning of a control token's text within a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// For templates and other trusted text.
    Parse,
    /// Plain text: for input of users and peers. User-defined tokens, which are whole words and not
    /// structure, are still found, as in llama.cpp and Hugging Face.
    Plain,
}

/// Tokenizer of a model file. Cheap to clone, and shared between threads.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

/// Encoder of the text between special tokens.
enum Vocabulary {
    ByteLevel(Box<ByteLevel>),
    SentencePiece(Box<SentencePiece>),
    TextBpe(Box<TextBpe>),
    WordPiece(Box<WordPiece>),
}

struct Inner {
    vocabulary: Vocabulary,
    /// All special tokens.
    structure_and_words: SpecialFinder,
    /// Special tokens that plain text may contain.
    words: SpecialFinder,
    /// Special tokens that plain text must not become.
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
    /// The vocabulary for grammars, once an answer needed it.
    grammar_vocabulary: OnceLock<Result<Arc<GrammarVocabulary>, GrammarError>>,
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
    /// Reads the tokenizer in the metadata of a model file.
    ///
    /// # Errors
    /// [`TokenizerError`] if the tokenizer is missing, broken or not supported.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::new(&TokenizerParts::from_gguf(gguf)?)
    }

    /// Builds a tokenizer from its parts.
    ///
    /// In a model named Phi-3, white space behind special tokens is dropped. The metadata has no
    /// key for that, and llama.cpp uses the name too.
    ///
    /// # Errors
    /// [`TokenizerError`] if the parts do not fit together or are not supported.
    pub fn new(parts: &TokenizerParts<'_>) -> Result<Self, TokenizerError> {
        let algorithm = Algorithm::named(parts.model)?;
        let mut kinds = kinds(parts)?;
        let ids = ids_by_text(&parts.tokens)?;
        let merges = match algorithm {
            Algorithm::ByteLevelBpe | Algorithm::TextBpe => Merges::check(parts, &ids, &kinds)?,
            Algorithm::SentencePiece | Algorithm::WordPiece => Merges::default(),
        };
        let ends = ends(parts, &ids, &mut kinds, &merges.used)?;
        let vocabulary = match algorithm {
            Algorithm::ByteLevelBpe => {
                let vocabulary = ByteLevel::new(parts, &ids, &kinds, merges.pairs)?;
                Vocabulary::ByteLevel(Box::new(vocabulary))
            }
            Algorithm::TextBpe => {
                let vocabulary = TextBpe::new(parts, &ids, &mut kinds, merges.pairs)?;
                Vocabulary::TextBpe(Box::new(vocabulary))
            }
            Algorithm::SentencePiece => {
                let vocabulary = SentencePiece::new(parts, &ids, &mut kinds)?;
                Vocabulary::SentencePiece(Box::new(vocabulary))
            }
            Algorithm::WordPiece => {
                Vocabulary::WordPiece(Box::new(WordPiece::new(parts, &ids, &kinds)?))
            }
        };
        let append_token_bytes: vocabulary::AppendTokenBytes = match algorithm {
            Algorithm::ByteLevelBpe => byte_level::append_token_bytes,
            Algorithm::TextBpe | Algorithm::SentencePiece | Algorithm::WordPiece => {
                sentencepiece::append_token_bytes
            }
        };
        let bytes = TokenBytes::new(&parts.tokens, &kinds, append_token_bytes);
        let marks = unreachable_marks(&parts.tokens, &kinds, &merges.used);
        let add_bos = match &vocabulary {
            Vocabulary::ByteLevel(vocabulary) => vocabulary.adds_bos(),
            Vocabulary::SentencePiece(_) | Vocabulary::TextBpe(_) | Vocabulary::WordPiece(_) => {
                true
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
            grammar_vocabulary: OnceLock::new(),
        })))
    }

    /// Ids of `text`, without a token at its beginning or end.
    ///
    /// # Errors
    /// [`EncodeError::TextTooLong`] for more than [`MAX_TEXT_BYTES`].
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        self.encode_into(text, special, &mut ids)?;
        Ok(ids)
    }

    /// Ids of a whole text, with the tokens at its beginning and end that the file requires.
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

    /// Whether decoding restores `text` after encoding as [`Special::Plain`].
    #[cfg(feature = "fuzzing")]
    pub fn encodes(&self, text: &str) -> bool {
        let changes_space = self.adds_space_prefix() || !self.0.dropping_space.is_empty();
        if changes_space && self.0.words.occurs_in(text) {
            return false;
        }
        match &self.0.vocabulary {
            Vocabulary::ByteLevel(_) => text.bytes().all(|byte| self.encodes_byte(byte)),
            Vocabulary::SentencePiece(_) | Vocabulary::TextBpe(_) => {
                !text.contains(sentencepiece::SPACE)
            }
            // Words lose their case and the space between them.
            Vocabulary::WordPiece(_) => false,
        }
    }

    #[cfg(feature = "fuzzing")]
    pub fn encodes_byte(&self, byte: u8) -> bool {
        match &self.0.vocabulary {
            Vocabulary::ByteLevel(vocabulary) => vocabulary.encodes_byte(byte),
            Vocabulary::SentencePiece(_) | Vocabulary::TextBpe(_) => true,
            Vocabulary::WordPiece(_) => false,
        }
    }

    /// Up to `limit` tokens in `prompt`, quoted, that look like marks of a template but are encoded
    /// as other tokens, because the file gives them the type of plain text.
    pub(crate) fn unreachable_marks_in(&self, prompt: &str, limit: usize) -> Vec<String> {
        let marks = self.0.marks.iter();
        let named = |id: &u32| Some((str::from_utf8(self.0.bytes.get(*id)?).ok()?, *id));
        let marks: Vec<(&str, u32)> = marks.filter_map(named).collect();
        // Only a hostile vocabulary has more marks than a searcher accepts.
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

    /// Number of tokens; all ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.0.kinds.len()
    }

    /// Bytes of a token, which need not be whole characters; `None` outside the vocabulary. For a
    /// control token, the bytes of its name in the file.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.0.bytes.get(id)
    }

    /// Kind of a token; `None` outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.0.kinds.get(usize::try_from(id).ok()?).copied()
    }

    /// Beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.0.bos
    }

    /// End-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.0.eos
    }

    /// Whether a generation ends when `id` is sampled: end of sequence, turn or message, and the
    /// tokens of code models that end a file.
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

    /// Whether encoding puts a space before text: at the beginning, and behind every special token.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        match &self.0.vocabulary {
            Vocabulary::ByteLevel(_) | Vocabulary::TextBpe(_) => false,
            Vocabulary::SentencePiece(vocabulary) => vocabulary.adds_space_prefix(),
            Vocabulary::WordPiece(_) => true,
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
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(text) => match &self.0.vocabulary {
                    Vocabulary::ByteLevel(vocabulary) => vocabulary.encode(text, ids)?,
                    Vocabulary::TextBpe(vocabulary) => vocabulary.encode(text, ids)?,
                    Vocabulary::WordPiece(vocabulary) => vocabulary.encode(text, ids)?,
                    // Every piece stands at the beginning or behind a special token.
                    Vocabulary::SentencePiece(vocabulary) => vocabulary.encode(text, ids),
                },
            }
        }
        Ok(())
    }

    /// Splits the text into special tokens and the text between them, without the white space that
    /// some models drop there.
    fn pieces<'t>(&self, finder: &SpecialFinder, text: &'t str) -> Vec<Piece<'t>> {
        finder.pieces(text, &self.0.dropping_space)
    }
}

/// Tokens that every SentencePiece vocabulary has, with their types: bytes and the space.
#[cfg(feature = "fuzzing")]
pub(crate) fn sentencepiece_basics() -> impl Iterator<Item = (String, i128)> {
    let bytes = (0..=255_u8).map(|byte| (format!("<0x{byte:02X}>"), 6));
    bytes.chain([(sentencepiece::SPACE.into(), 1)])
}

/// Byte in the alphabet of byte-level vocabularies.
#[cfg(feature = "fuzzing")]
pub(crate) fn written_byte(byte: u8) -> String {
    hearthnet_files::byte_alphabet::char_of(byte).into()
}

/// Access to control tokens for building prompts.
impl Tokenizer {
    /// Whether the text of a control token occurs in `text`.
    pub(crate) fn has_structure(&self, text: &str) -> bool {
        self.0.structure.occurs_in(text)
    }

    /// Control tokens whose text occurs in `text`, in order.
    pub(crate) fn structure_in(&self, text: &str) -> Vec<u32> {
        let pieces = self.pieces(&self.0.structure, text);
        let ids = pieces.into_iter().filter_map(|piece| match piece {
            Piece::Token(id) => Some(id),
            Piece::Text(_) => None,
        });
        ids.collect()
    }

    /// Every character in the texts of control tokens except white space, ascending.
    pub(crate) fn structure_alphabet(&self) -> &[char] {
        &self.0.structure_alphabet
    }

    /// Ids of `text`: control tokens are found in the text as it is; the text between them is
    /// passed through `undo` before encoding.
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
