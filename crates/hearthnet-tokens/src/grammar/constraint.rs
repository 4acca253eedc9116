//! State of one answer within its grammar.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;
use llguidance::api::GrammarWithLexer;
use llguidance::toktrie::SimpleVob;
use serde_json::json;

use super::error::GrammarError;
use super::vocabulary::Vocabulary;
use super::{Grammar, MAX_GRAMMAR_BYTES, schema};

/// Tokens that may come next.
#[derive(Clone)]
pub struct Allowed(SimpleVob);

/// Omits the tokens, which the answer so far decides.
impl fmt::Debug for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allowed").finish_non_exhaustive()
    }
}

impl Allowed {
    /// Returns true if no token may follow: the answer is complete, and the vocabulary has no token
    /// to say so.
    pub fn is_none(&self) -> bool {
        self.0.is_zero()
    }

    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.0.len() && self.0.is_allowed(id)
    }

    /// Only this token, of a vocabulary of `size` tokens.
    pub fn only(id: u32, size: usize) -> Self {
        let mut tokens = SimpleVob::alloc(size);
        if (id as usize) < size {
            tokens.allow_token(id);
        }
        Self(tokens)
    }

    /// Rules out all other tokens: their logits become minus infinity.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        let words = self.0.as_slice().iter().copied();
        // Rows beyond the tokens are padding.
        let words = words.chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(32).zip(words) {
            match word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if (word >> bit) & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

/// An answer in progress, and what its grammar allows next.
pub struct Constraint {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    /// Whether marks that are control tokens are text.
    marks: bool,
}

/// Whether a grammar may be replaced by a weaker one.
fn is_lenient(grammar: &Grammar) -> bool {
    matches!(grammar, Grammar::LenientJsonSchema(_))
}

/// The grammar, or any value of its type instead of a lenient schema that cannot be compiled.
fn compilable<'a>(vocabulary: &Vocabulary, grammar: &'a Grammar) -> Cow<'a, Grammar> {
    let compiles = |grammar: &Grammar| vocabulary.compile(vec![named("answer", grammar)?]);
    let Grammar::LenientJsonSchema(schema) = grammar else {
        return Cow::Borrowed(grammar);
    };
    if compiles(grammar).is_ok() {
        return Cow::Borrowed(grammar);
    }
    let kind = schema.get("type").map(|kind| json!({"type": kind}));
    let typed = kind.map(Grammar::JsonSchema);
    let typed = typed.filter(|typed| compiles(typed).is_ok());
    Cow::Owned(typed.unwrap_or_else(|| Grammar::JsonSchema(json!({}))))
}

/// A grammar under a name, for the library.
fn named(name: &str, grammar: &Grammar) -> Result<GrammarWithLexer, GrammarError> {
    let mut named = match grammar {
        Grammar::JsonSchema(schema) => {
            GrammarWithLexer::from_json_schema(schema::checked(schema, false)?)
        }
        Grammar::LenientJsonSchema(schema) => {
            GrammarWithLexer::from_json_schema(schema::checked(schema, true)?)
        }
        Grammar::Regex(regex) => GrammarWithLexer::from_regex(regex),
        Grammar::Lark(lark) | Grammar::Turn { lark, .. } => {
            GrammarWithLexer::from_lark(lark.clone())
        }
    };
    named.name = Some(name.into());
    Ok(named)
}

/// Omits the answer, so that it cannot enter a log.
impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl Constraint {
    /// Compiles a grammar. `begins`: the answer is a text of its own, not the continuation of one.
    ///
    /// A hostile grammar may take long, and up to 64 MiB of stack.
    ///
    /// # Errors
    /// Any [`GrammarError`].
    pub fn new(
        vocabulary: Arc<Vocabulary>,
        grammar: &Grammar,
        begins: bool,
    ) -> Result<Self, GrammarError> {
        let bytes = grammar.bytes();
        if bytes > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooComplex(format!(
                "the grammar has {bytes} bytes; at most {MAX_GRAMMAR_BYTES} are accepted"
            )));
        }
        let mut grammars = Vec::new();
        // A turn's grammar has the white space at its beginning.
        let is_turn = matches!(grammar, Grammar::Turn { .. });
        if begins && !is_turn && vocabulary.has_space_prefix() {
            grammars.push(GrammarWithLexer {
                lark_grammar: Some(r#"start: " " @answer"#.into()),
                ..GrammarWithLexer::default()
            });
        }
        grammars.push(named("answer", grammar)?);
        let Grammar::Turn { parts, refused, .. } = grammar else {
            let matcher = vocabulary.compile(grammars)?;
            return Ok(Self {
                matcher,
                vocabulary,
                marks: false,
            });
        };
        if !refused.is_empty() {
            return Err(GrammarError::keywords(refused));
        }
        let all = |lenient: bool| -> Result<Vec<GrammarWithLexer>, GrammarError> {
            let mut all = grammars.clone();
            for part in parts {
                all.push(match lenient {
                    true => named(&part.name, &compilable(&vocabulary, &part.grammar))?,
                    false => named(&part.name, &part.grammar)?,
                });
            }
            Ok(all)
        };
        let matcher = match all(false).and_then(|all| vocabulary.compile(all)) {
            Err(_) if parts.iter().any(|part| is_lenient(&part.grammar)) => {
                vocabulary.compile(all(true)?)?
            }
            result => result?,
        };
        Ok(Self {
            matcher,
            vocabulary,
            marks: true,
        })
    }

    /// Tokens that may come next. The work is limited: some 20 ms at most.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`]; [`GrammarError::TooComplex`] if the work exceeds its limit.
    pub fn allowed(&mut self) -> Result<Allowed, GrammarError> {
        let may_end = self.matcher.is_accepting().map_err(failed)?;
        if may_end && self.matcher.is_stopped() {
            return self.limited(self.vocabulary.none(), true);
        }
        match self.matcher.compute_mask() {
            Ok(tokens) => {
                // Some Lark rules extend to the end of the answer, and end with it.
                let end = self.vocabulary.ends().first();
                let ends = end.is_some_and(|end| tokens.is_allowed(*end));
                self.limited(tokens, may_end || ends)
            }
            // Without a token for the end, nothing is left.
            Err(_) if may_end => self.limited(self.vocabulary.none(), true),
            Err(error) => Err(failed(error)),
        }
    }

    fn limited(&self, mut tokens: SimpleVob, may_end: bool) -> Result<Allowed, GrammarError> {
        self.vocabulary.limit(&mut tokens, may_end, self.marks);
        if tokens.is_zero() && !may_end {
            return Err(GrammarError::Stuck);
        }
        Ok(Allowed(tokens))
    }

    /// Adds a token to the answer. A token that ends a generation changes nothing.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`] for a token that was not allowed; [`GrammarError::TooComplex`].
    pub fn accept(&mut self, id: u32) -> Result<(), GrammarError> {
        if self.vocabulary.ends().contains(&id) {
            return Ok(());
        }
        self.matcher.consume_token(id).map_err(failed)
    }
}

/// Failure in the middle of an answer. The library's message may quote it.
fn failed(error: impl fmt::Display) -> GrammarError {
    match GrammarError::of(&error) {
        GrammarError::TooComplex(_) => {
            let problem = "the grammar leaves too many ways to continue the answer";
            GrammarError::TooComplex(problem.into())
        }
        _ => GrammarError::Stuck,
    }
}
