//! Words of a vocabulary to which grammars lead.

use super::{GrammarError, GrammarVocabulary, TokenKind, Tokenizer};
use crate::tools::MARKS;
use std::sync::Arc;

impl Tokenizer {
    /// The vocabulary for grammars. The first call builds it.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`] if the vocabulary is larger than that of any model.
    pub fn grammar_vocabulary(&self) -> Result<Arc<GrammarVocabulary>, GrammarError> {
        let build = || {
            let ids = 0..u32::try_from(self.vocab_size()).unwrap_or(u32::MAX);
            let words = ids.map(|id| self.grammar_word(id).to_vec());
            let mut words: Vec<Vec<u8>> = words.collect();
            let ends = self.0.ends.clone();
            let marks = self.control_tokens(MARKS);
            for mark in &marks {
                if let Some(word) = words.get_mut(*mark as usize) {
                    *word = self.token_bytes(*mark).unwrap_or_default().to_vec();
                }
            }
            GrammarVocabulary::new(words, ends, &marks, self.adds_space_prefix()).map(Arc::new)
        };
        self.0.grammar_vocabulary.get_or_init(build).clone()
    }

    /// Whether [`Self::grammar_vocabulary`] has been built.
    pub fn has_grammar_vocabulary(&self) -> bool {
        self.0.grammar_vocabulary.get().is_some()
    }

    /// Control tokens with these texts, except those that end a generation.
    pub(crate) fn control_tokens(&self, texts: &[&str]) -> Vec<u32> {
        let ids = self.structure_in(&texts.concat()).into_iter();
        ids.filter(|id| !self.is_end_of_generation(*id)).collect()
    }

    /// Bytes of a token that is plain text; of others none.
    fn grammar_word(&self, id: u32) -> &[u8] {
        match self.token_kind(id) {
            Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte)
                if !self.is_end_of_generation(id) =>
            {
                self.token_bytes(id).unwrap_or_default()
            }
            _ => &[],
        }
    }
}
