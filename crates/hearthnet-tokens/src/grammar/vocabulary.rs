//! Trie of a vocabulary, and the compiler of grammars over it.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};

use super::error::GrammarError;

/// Longest token that a grammar leads to, in bytes. The trie takes up to 1,024.
const MAX_TOKEN_BYTES: usize = 512;
/// Maximum number of tokens, and of their bytes together. The trie has 22 bits for its nodes; the
/// largest vocabularies, of 256,000 tokens, have 2 MB.
const MAX_TOKENS: usize = 1 << 20;
const MAX_BYTES: usize = 4_000_000;
/// First byte of a special token in the trie. No text in UTF-8 has it.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Maximum number of lexer states of an answer, of 1 to 2 kB each. Large schemas need thousands.
const MAX_LEXER_STATES: usize = 25_000;
/// Maximum number of symbols of a compiled grammar. The schema of FHIR, with 600 types, has 200,000.
const MAX_SYMBOLS: usize = 250_000;

/// Vocabulary of a model, for grammars. For 150,000 tokens, building it takes half a second, and it has
/// 60 MB.
pub struct Vocabulary {
    factory: ParserFactory,
    /// Tokens of plain text.
    plain: SimpleVob,
    /// Tokens of plain text, and marks that are control tokens.
    plain_and_marks: SimpleVob,
    /// Tokens that end a generation.
    ends: Vec<u32>,
    /// Whether an answer begins with a space that is not part of its text.
    space_prefix: bool,
}

impl Vocabulary {
    /// Builds the trie. `words` are the bytes of the tokens by id, empty for all but plain text
    /// and `marks`: control tokens that are text in a turn's grammar.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`] if the vocabulary is larger than that of any model.
    pub(crate) fn new(
        mut words: Vec<Vec<u8>>,
        ends: Vec<u32>,
        marks: &[u32],
        space_prefix: bool,
    ) -> Result<Self, GrammarError> {
        for word in &mut words {
            if word.len() > MAX_TOKEN_BYTES || word.first() == Some(&SPECIAL) {
                word.clear();
            }
        }
        let bytes: usize = words.iter().map(Vec::len).sum();
        let size = u32::try_from(words.len()).unwrap_or(u32::MAX);
        if words.len() > MAX_TOKENS || bytes > MAX_BYTES {
            return Err(GrammarError::TooComplex(format!(
                "the model's vocabulary of {size} tokens with {bytes} bytes is too large for grammars"
            )));
        }
        let end = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let trie = TokTrie::from(&TokRxInfo::new(size, end), &words);
        let mut plain = trie.alloc_token_set();
        for (id, word) in (0..size).zip(&words) {
            if !word.is_empty() {
                plain.allow_token(id);
            }
        }
        let plain_and_marks = plain.clone();
        for mark in marks {
            plain.disallow_token(*mark);
        }
        // Not canonical: no token is forced.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let able = InferenceCapabilities::default();
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, able, &slices).map_err(|error| GrammarError::of(&error))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.max_grammar_size = MAX_SYMBOLS;
        // Errors must not quote the answer.
        limits.verbose_errors = false;
        Ok(Self {
            factory,
            plain,
            plain_and_marks,
            ends,
            space_prefix,
        })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// Any [`GrammarError`].
    pub(super) fn compile(&self, grammars: Vec<GrammarWithLexer>) -> Result<Matcher, GrammarError> {
        let parser = self.factory.create_parser(TopLevelGrammar {
            grammars,
            max_tokens: None,
        });
        let parser = parser.map_err(|error| GrammarError::of(&error))?;
        Ok(Matcher::new(Ok(parser)))
    }

    pub(super) fn has_space_prefix(&self) -> bool {
        self.space_prefix
    }

    /// Leaves the tokens of plain text, those that end a generation if `may_end`, and marks.
    pub(super) fn limit(&self, tokens: &mut SimpleVob, may_end: bool, marks: bool) {
        tokens.and(match marks {
            true => &self.plain_and_marks,
            false => &self.plain,
        });
        if may_end {
            for end in &self.ends {
                tokens.allow_token(*end);
            }
        }
    }

    /// No tokens.
    pub(super) fn none(&self) -> SimpleVob {
        self.factory.tok_env().tok_trie().alloc_token_set()
    }

    /// Tokens that end a generation.
    pub(super) fn ends(&self) -> &[u32] {
        &self.ends
    }
}
