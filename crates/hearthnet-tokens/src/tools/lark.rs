//! Texts and regular expressions as parts of a Lark grammar. Pure.

/// White space between two texts of a call.
pub(super) const SPACE: &str = "[ \\n]{0,8}";

/// Terminals of texts with white space before each.
pub(super) fn sequence(texts: &[&str]) -> String {
    let one = texts.iter().map(|part| terminal(part));
    one.collect::<Vec<_>>().join(" ")
}

/// A text with white space before it, as one terminal: the lexer does not go back.
pub(super) fn terminal(part: &str) -> String {
    let part = part.trim_start_matches([' ', '\n']);
    format!("/{SPACE}{}/", escape(part))
}

/// Regular expression for what has one of the texts in it. One expression for many texts: the
/// library handles the intersection of many complements slowly.
pub(super) fn contains(parts: &[&str]) -> String {
    let parts: Vec<String> = parts.iter().map(|part| escape(part)).collect();
    format!("/(?s:.*)({})(?s:.*)/", parts.join("|"))
}

/// Intersection of an expression with the complements of others.
pub(super) fn without(expression: &str, not: &[String]) -> String {
    let not: String = not.iter().map(|not| format!(" & ~{not}")).collect();
    format!("{expression}{not}")
}

/// Text in a regular expression between slashes.
pub(super) fn escape(part: &str) -> String {
    regex::escape(part).replace('/', "\\/").replace('\n', "\\n")
}

/// Text as a literal of Lark.
pub(super) fn text(part: &str) -> String {
    // Lark's literals are those of JSON, without this character.
    let literal = serde_json::Value::from(part).to_string();
    literal.replace('\u{7f}', "\\u007f")
}
