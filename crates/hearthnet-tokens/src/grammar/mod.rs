//! Grammars that an answer must follow: JSON schemas, regular expressions, Lark grammars.
//!
//! The crate `llguidance` parses the grammar and finds the tokens that may come next, byte by byte
//! over a trie of the vocabulary. The set depends on the grammar and the bytes of the answer so
//! far, and on nothing else: no token is forced, so the model's own probabilities choose between
//! the ways to spell a text.
//!
//! | concept | where |
//! |---|---|
//! | trie of a vocabulary, limits of the parser | [`Vocabulary`] |
//! | limits of a schema, keywords that are not enforced | `schema.rs` (pure) |
//! | objects without other properties than the named ones | `closing.rs` (pure) |
//! | reasons for a refusal | [`GrammarError`] |
//! | tokens that may come next | [`Constraint`] |
//!
//! # Which tokens
//!
//! - Only tokens of plain text. A grammar never leads to a control token.
//! - The tokens that end a generation are allowed exactly if the grammar may end.
//! - At the beginning of an answer, some vocabularies put a space before the text, which decoding
//!   removes ([there](crate::tokenizer#the-space-prefix)). There the grammar stands behind a space.
//!
//! # A grammar is hostile
//!
//! Its length, its nesting and the work for a step are limited. A compilation is limited only in
//! what it builds, so a caller runs it on a thread of its own, with a large stack, and stops waiting
//! after a time.

mod closing;
mod constraint;
mod error;
mod schema;
mod vocabulary;

use std::fmt;

use serde_json::Value;

pub use closing::close;
pub use constraint::{Allowed, Constraint};
pub use error::GrammarError;
pub use vocabulary::Vocabulary;

/// Maximum length of a grammar, in bytes (of a schema: without white space). OpenAI's limits, 5,000
/// properties and 120,000 characters of names, are of the same order.
pub const MAX_GRAMMAR_BYTES: usize = 64 << 10;

/// Grammar of an answer.
#[derive(Clone, PartialEq, strum::IntoStaticStr)]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that a JSON schema (draft 2020-12) describes.
    JsonSchema(Value),
    /// As [`Self::JsonSchema`], but what is not enforced is ignored, and not refused.
    LenientJsonSchema(Value),
    /// Text that a regular expression matches as a whole. The syntax is that of the crate `regex`.
    Regex(String),
    /// Grammar in llguidance's form of Lark; its rule `start` is the answer.
    Lark(String),
    /// Turn of a chat: a Lark grammar that refers to its parts by `@name`. Marks of reasoning and
    /// calls that are control tokens are text in it. `refused`: keywords of strict schemas that the
    /// rules do not enforce.
    Turn {
        lark: String,
        parts: Vec<Part>,
        refused: Vec<String>,
    },
}

/// Part of a turn's grammar. It has no parts itself.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Part {
    pub name: String,
    pub grammar: Grammar,
}

/// Omits the grammar, which may quote a conversation, so that it cannot enter a log.
impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.into())
    }
}

impl Grammar {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(serde_json::json!({"type": "object"}))
    }

    /// Exactly one of the listed texts.
    pub fn choice(texts: &[String]) -> Self {
        let texts: Vec<String> = texts.iter().map(|text| regex::escape(text)).collect();
        Self::Regex(texts.join("|"))
    }

    fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(schema) | Self::LenientJsonSchema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) => text.len(),
            // The rules of a turn are written here.
            Self::Turn { parts, .. } => parts.iter().map(|part| part.grammar.bytes()).sum(),
        }
    }
}
