//! Reasons for refusing a grammar, from the library's messages.

/// Longest part of the library's message that is shown, in characters.
const MAX_SHOWN: usize = 200;

/// Why a grammar is refused, or cannot be followed any further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The grammar uses a feature that is not enforced. The message names it.
    #[error("{0}")]
    Unsupported(String),

    /// The grammar is malformed, or nothing can match it.
    #[error("{0}")]
    Invalid(String),

    /// The grammar exceeds a limit of size or work.
    #[error("{0}")]
    TooComplex(String),

    /// The vocabulary has no token for what the grammar requires next.
    #[error("no token of this model continues the answer as its grammar requires")]
    Stuck,
}

/// Parts of the library's messages about limits.
const LIMITS: [&str; 9] = [
    "too deeply nested",
    "too big",
    "too large",
    "too complex",
    "too many",
    "limit",
    "exceed",
    "Unable to determine",
    "can't determine",
];

impl GrammarError {
    /// Error of the library.
    pub(super) fn of(error: &dyn std::fmt::Display) -> Self {
        let text = error.to_string();
        // The error of a regular expression quotes it first.
        let told = text.lines().find_map(|line| line.strip_prefix("error: "));
        let line = told.or_else(|| text.lines().next()).unwrap_or_default();
        if let Some(names) = line.strip_prefix("Unimplemented keys: ") {
            let names: Vec<String> = serde_json::from_str(names).unwrap_or_default();
            return Self::keywords(&names);
        }
        if let Some(name) = line.strip_prefix("Unknown format: ") {
            let name: String = name.chars().take(MAX_SHOWN).collect();
            return Self::Unsupported(format!("the schema's format `{name}` is not supported"));
        }
        if line.starts_with("oneOf constraints") {
            return Self::Unsupported(
                "the schema's keyword `oneOf` is supported only if its alternatives visibly exclude \
                 each other, for example by their types; use `anyOf`"
                    .into(),
            );
        }
        if let Some((_, reference)) = line.split_once("'referencing' feature; ref ") {
            let reference: String = reference.chars().take(MAX_SHOWN).collect();
            return Self::Unsupported(format!(
                "the schema's `$ref` {reference} is not supported: write a path from its root, `#/...`"
            ));
        }
        // The library panics if a vocabulary has none.
        if line.contains("special token") {
            let problem = "the grammar names a special token, which is not supported";
            return Self::Unsupported(problem.into());
        }
        let shown: String = line.chars().take(MAX_SHOWN).collect();
        let has = |words: &[&str]| words.iter().any(|word| line.contains(word));
        if has(&["not supported", "only supported"]) {
            Self::Unsupported(format!("the grammar is not supported: {shown}"))
        } else if line.starts_with("panic") {
            // The message of a panic quotes the program.
            Self::TooComplex("the grammar cannot be compiled".into())
        } else if has(&LIMITS) {
            Self::TooComplex(format!("the grammar is too complex: {shown}"))
        } else {
            Self::Invalid(format!("the grammar is not valid: {shown}"))
        }
    }

    /// Error for keywords of a schema that are not enforced.
    pub(super) fn keywords(names: &[String]) -> Self {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let (word, verb) = match names.len() {
            1 => ("keyword", "is"),
            _ => ("keywords", "are"),
        };
        let names = names.join(", ");
        Self::Unsupported(format!("the schema's {word} {names} {verb} not supported"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_testkit::rows;

    #[test]
    fn unsupported_features_are_named() {
        for (said, shown) in rows! {
            r#"Unimplemented keys: ["not"]"# => "the schema's keyword `not` is not supported";
            r#"Unimplemented keys: ["else", "if"]"#
                => "the schema's keywords `else`, `if` are not supported";
            "Unknown format: phone" => "the schema's format `phone` is not supported";
            "regex parse error:\n    (?=a)b\n    ^^^\nerror: look-around is not supported"
                => "the grammar is not supported: look-around is not supported";
        } {
            let error = GrammarError::of(&said);
            assert_eq!(error, GrammarError::Unsupported(shown.into()));
        }
    }

    #[test]
    fn a_panic_of_the_library_shows_nothing_of_the_program() {
        let error = GrammarError::of(&"panic: index 9\n<backtrace>\n/home/me\n</backtrace>");
        let shown = "the grammar cannot be compiled";
        assert_eq!(error, GrammarError::TooComplex(shown.into()));
    }

    #[test]
    fn long_messages_are_cut() {
        let error = GrammarError::of(&"é".repeat(500));
        assert_eq!(error.to_string().matches('é').count(), MAX_SHOWN);
    }
}
