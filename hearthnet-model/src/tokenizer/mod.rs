//! Text to token ids and back: byte-level BPE from the metadata of a model file.
//!
//! A text goes through four steps, each of which gives exactly what llama.cpp gives for the
//! same file (`tests/tokenizer_parity.rs` compares the two on a stored corpus):
//!
//! 1. special tokens are cut out (`special`);
//! 2. what lies between is cut into words (`pre`, chosen by `tokenizer.ggml.pre`);
//! 3. each word's bytes are written in the byte-level alphabet (`alphabet`);
//! 4. the `tokenizers` crate merges pairs inside each word.
//!
//! # Text that nobody may smuggle in
//!
//! [`Special::Parse`] turns the text of a control token, such as `<|im_end|>`, into that token:
//! right for a template, wrong for what a person typed. [`Special::Plain`] never makes a control
//! token: the merges cannot reach one (a file whose merges could is refused), and the text
//! stays what it looks like. [`ChatTemplate::prompt_ids`](crate::template::ChatTemplate::prompt_ids)
//! combines both, so that a message cannot end its own turn.
//!
//! # Where llama.cpp drops text, so do we
//!
//! Some vocabularies lack bytes. SmolLM2's has none for U+0004, U+0006, U+0013, U+0014, U+0016,
//! U+001D and for the lead bytes of the unassigned planes 4 to 11. llama.cpp leaves such bytes
//! out without a word, and equal ids are the contract here. [`Tokenizer::encodes`] tells whether
//! a text comes back whole: decoding gives exactly what was encoded, except for those bytes.
//!
//! # The file is hostile
//!
//! Counts, lengths, ids and references are checked, and every failure is a [`TokenizerError`].

pub(crate) mod alphabet;
mod error;
mod parts;
mod pre;
mod special;
mod vocabulary;

pub use error::{EncodeError, TokenizerError};
pub use parts::TokenizerParts;
pub use special::TokenKind;

use crate::detokenize::Detokenizer;
use crate::gguf::Gguf;
use parts::{ADD_BOS, ADD_EOS, BOS, EOS};
use pre::PreTokenizer;
use special::{Piece, SpecialFinder};
use std::fmt;
use std::sync::Arc;
use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};
use vocabulary::{Merges, all_bytes, ends, ids_by_text, kind_of, kinds, structure_alphabet};

/// The longest text that is tokenised at once, in bytes: eight contexts of 131,072 tokens at
/// the usual four bytes per token. Merging takes some 80 bytes of memory for each byte.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

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

struct Inner {
    pre: PreTokenizer,
    bpe: BPE,
    /// Whether a token stands for the byte alone, by byte.
    has_token: [bool; 256],
    /// All special tokens.
    structure_and_words: SpecialFinder,
    /// Only those that plain text may contain.
    words: SpecialFinder,
    /// Only those that plain text must not become.
    structure: SpecialFinder,
    structure_alphabet: Vec<char>,
    kinds: Vec<TokenKind>,
    /// The bytes of all tokens in a row, and where each token's begin.
    bytes: Vec<u8>,
    starts: Vec<usize>,
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
    /// # Errors
    /// [`TokenizerError`] when the parts do not fit together or are not supported.
    pub fn new(parts: &TokenizerParts<'_>) -> Result<Self, TokenizerError> {
        if parts.model != "gpt2" {
            return Err(TokenizerError::UnsupportedModel {
                model: parts.model.to_owned(),
            });
        }
        let pre = PreTokenizer::new(parts.pre)?;
        let mut kinds = kinds(parts)?;
        let ids = ids_by_text(&parts.tokens)?;
        let merges = Merges::check(parts, &ids, &kinds)?;
        let ends = ends(parts, &ids, &mut kinds, &merges.made)?;

        let (bytes, starts) = all_bytes(&parts.tokens, &kinds);
        let special_tokens = |wanted: &dyn Fn(TokenKind) -> bool| {
            let tokens = parts.tokens.iter().zip(0..).zip(&kinds);
            let tokens: Vec<_> = tokens
                .filter(|((text, _), kind)| !text.is_empty() && wanted(**kind))
                .map(|((text, id), _)| (*text, id))
                .collect();
            SpecialFinder::new(&tokens)
        };
        let add_bos = parts.add_bos.unwrap_or(pre.add_bos);
        let add_eos = parts.add_eos.unwrap_or(false);
        if add_bos && parts.bos.is_none() {
            return Err(TokenizerError::MissingSpecial {
                flag: ADD_BOS,
                key: BOS,
            });
        }
        if add_eos && parts.eos.is_none() {
            return Err(TokenizerError::MissingSpecial {
                flag: ADD_EOS,
                key: EOS,
            });
        }
        let structure = special_tokens(&|kind| kind.is_structure())?;
        let words = special_tokens(&|kind| kind == TokenKind::UserDefined)?;
        let structure_and_words = special_tokens(&|kind| kind.is_verbatim())?;

        // Control tokens are not in the vocabulary that merges work with, so that no text that
        // is not parsed for them can become one.
        let vocabulary = ids
            .iter()
            .filter(|(_, id)| !kind_of(&kinds, **id).is_structure())
            .map(|(text, id)| ((*text).to_owned(), *id));
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary.collect::<Vocab>(), merges.pairs)
            .ignore_merges(pre.ignore_merges)
            .build()
            .map_err(|e| TokenizerError::Build(e.to_string()))?;

        let mut has_token = [false; 256];
        for (byte, has_token) in (0..=255_u8).zip(&mut has_token) {
            let written = alphabet::char_of(byte);
            *has_token = bpe.token_to_id(written.encode_utf8(&mut [0; 4])).is_some();
        }
        Ok(Self(Arc::new(Inner {
            pre,
            bpe,
            has_token,
            structure_and_words,
            words,
            structure,
            structure_alphabet: structure_alphabet(&parts.tokens, &kinds),
            kinds,
            bytes,
            starts,
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

    /// The text of `ids`, control tokens left out. Bytes that are no UTF-8 become U+FFFD, and so
    /// does an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_with(Detokenizer::new(self), ids)
    }

    /// The text of `ids`, control tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.decode_with(Detokenizer::with_special(self), ids)
    }

    /// Whether every byte of `text` has a token, so that decoding gives it back whole.
    pub fn encodes(&self, text: &str) -> bool {
        text.bytes().all(|byte| self.encodes_byte(byte))
    }

    /// Whether `byte` has a token.
    pub fn encodes_byte(&self, byte: u8) -> bool {
        self.0
            .has_token
            .get(usize::from(byte))
            .copied()
            .unwrap_or(false)
    }

    /// The number of tokens: ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.0.kinds.len()
    }

    /// The bytes that a token stands for, which need not be whole characters; `None` outside the
    /// vocabulary. A control token's are its name in the file.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let (start, end) = (self.0.starts.get(id)?, self.0.starts.get(id + 1)?);
        self.0.bytes.get(*start..*end)
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

    /// The ids that end a generation, ascending: end of sequence, of turn, of message, and those
    /// with which a code model leaves the file.
    pub fn eos_ids(&self) -> &[u32] {
        &self.0.ends
    }

    /// Whether a generation ends when `id` is sampled.
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

    /// The control tokens, for those who build prompts.
    pub(crate) fn structure(&self) -> Structure<'_> {
        Structure(self)
    }

    fn decode_with(&self, mut detokenizer: Detokenizer, ids: &[u32]) -> String {
        let mut text = String::new();
        for &id in ids {
            text.push_str(&detokenizer.push(id));
        }
        text.push_str(&detokenizer.finish());
        text
    }

    fn encode_into(
        &self,
        text: &str,
        special: Special,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(EncodeError::TextTooLong {
                bytes: text.len(),
                limit: MAX_TEXT_BYTES,
            });
        }
        let finder = match special {
            Special::Parse => &self.0.structure_and_words,
            Special::Plain => &self.0.words,
        };
        let mut written = String::new();
        for piece in finder.pieces(text) {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(text) => self
                    .0
                    .pre
                    .split(text, &mut |word| self.encode_word(word, &mut written, ids))?,
            }
        }
        Ok(())
    }

    /// Appends the ids of one word. `written` is a buffer to reuse.
    fn encode_word(
        &self,
        word: &str,
        written: &mut String,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        written.clear();
        if self.encodes(word) {
            written.extend(word.bytes().map(alphabet::char_of));
            return self.merge(written, ids);
        }
        // A byte without a token merges with nothing and leaves nothing behind, but it keeps its
        // neighbours apart. The crate would close the gap.
        if self.0.pre.ignore_merges {
            written.extend(word.bytes().map(alphabet::char_of));
            if let Some(id) = self.0.bpe.token_to_id(written) {
                ids.push(id);
                return Ok(());
            }
        }
        for run in word.as_bytes().split(|byte| !self.encodes_byte(*byte)) {
            written.clear();
            written.extend(run.iter().copied().map(alphabet::char_of));
            // A part of a word is no word: it is merged even where words are taken whole.
            self.merge(written, ids)?;
        }
        Ok(())
    }

    fn merge(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), EncodeError> {
        let tokens = self
            .0
            .bpe
            .tokenize(word)
            .map_err(|e| EncodeError::Bpe(e.to_string()))?;
        ids.extend(tokens.into_iter().map(|token| token.id));
        Ok(())
    }
}

/// How byte-level vocabularies write a byte.
pub(crate) fn written_byte(byte: u8) -> String {
    alphabet::char_of(byte).into()
}

/// A view of the control tokens of a tokenizer.
#[derive(Clone, Copy)]
pub(crate) struct Structure<'a>(&'a Tokenizer);

impl<'a> Structure<'a> {
    /// Whether the text of a control token occurs in `text`.
    pub(crate) fn occurs_in(self, text: &str) -> bool {
        self.0.0.structure.occurs_in(text)
    }

    /// The control tokens whose text occurs in `text`, in order.
    pub(crate) fn ids_in(self, text: &str) -> Vec<u32> {
        let pieces = self.0.0.structure.pieces(text);
        let ids = pieces.into_iter().filter_map(|piece| match piece {
            Piece::Token(id) => Some(id),
            Piece::Text(_) => None,
        });
        ids.collect()
    }

    /// Every character in the texts of control tokens, white space left out, ascending.
    pub(crate) fn alphabet(self) -> &'a [char] {
        &self.0.0.structure_alphabet
    }

    /// The ids of `text`: control tokens are found in the text as it is, and what lies between
    /// them goes through `undo` first.
    pub(crate) fn encode_through(
        self,
        text: &str,
        undo: &dyn Fn(&str) -> String,
    ) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        for piece in self.0.0.structure.pieces(text) {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(text) => self.0.encode_into(&undo(text), Special::Plain, &mut ids)?,
            }
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests;
