//! Values of JSON objects in a model directory.

use hearthnet_text::sanitize;
use serde_json::{Map, Value as Json};

use super::error::ImportError;
use crate::schema::Lookup;

/// Value for a message: as JSON, on one line, shortened.
pub(super) fn shown(value: &Json) -> String {
    excerpt(&value.to_string(), 80)
}

/// Up to `most` characters of a file's text, for a message.
fn excerpt(text: &str, most: usize) -> String {
    let cut: String = text.chars().take(most).collect();
    sanitize(&cut).into_owned()
}

/// Value of a key, unless it is missing or `null`.
pub(super) fn present<'a>(values: &'a Map<String, Json>, key: &str) -> Option<&'a Json> {
    values.get(key).filter(|value| !value.is_null())
}

/// Error for an unsupported value, which could change the computation.
pub(super) fn bad(key: &str, value: &Json, reason: impl std::fmt::Display) -> ImportError {
    ImportError::Unsound(format!("config.json: {key} = {}: {reason}", shown(value)))
}

/// Value of a required key.
pub(super) fn required<T>(key: impl Into<String>, value: Option<T>) -> Result<T, ImportError> {
    value.ok_or_else(|| ImportError::MissingKey(key.into()))
}

/// Parses a file of the directory as a JSON object.
pub(super) fn object(file: &str, text: &[u8]) -> Result<Map<String, Json>, ImportError> {
    serde_json::from_slice(&with_infinity(text))
        .map_err(|error| ImportError::Unsound(format!("{file} cannot be read: {error}")))
}

/// JSON of text in which Python has written infinite numbers as `Infinity`, which JSON lacks. They
/// become what newer programs write.
fn with_infinity(text: &[u8]) -> Vec<u8> {
    let (bare, number) = (b"Infinity", br#"{"__float__": "Infinity"}"#);
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text);
    let mut in_string = false;
    while let Some((first, after)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(bare).filter(|_| !in_string) {
            out.extend_from_slice(number);
            rest = after;
            continue;
        }
        out.push(*first);
        rest = after;
        match (first, rest.split_first()) {
            // The next character is no end of the string.
            (b'\\', Some((escaped, after))) => {
                out.push(*escaped);
                rest = after;
            }
            (b'"', _) => in_string = !in_string,
            _ => {}
        }
    }
    out
}

/// A value of `null` counts as missing.
impl Lookup for Map<String, Json> {
    type Error = ImportError;

    fn integer(&self, key: &str) -> Result<Option<u32>, ImportError> {
        let integer = |value: &Json| value.as_u64().and_then(|n| u32::try_from(n).ok());
        typed(
            self,
            key,
            "must be an integer from 0 to 4294967295",
            integer,
        )
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ImportError> {
        let number = |value: &Json| value.as_f64().filter(|n| n.is_finite());
        typed(self, key, "must be a number", number)
    }

    fn missing(&self, key: &str) -> ImportError {
        ImportError::MissingKey(key.to_owned())
    }
}

/// Value of a key, converted by `read`; `None` if the key is missing.
pub(super) fn typed<'a, T>(
    values: &'a Map<String, Json>,
    key: &str,
    reason: &str,
    read: impl FnOnce(&'a Json) -> Option<T>,
) -> Result<Option<T>, ImportError> {
    let Some(value) = present(values, key) else {
        return Ok(None);
    };
    let read = read(value).ok_or_else(|| bad(key, value, reason));
    read.map(Some)
}

/// Refuses an object with keys outside of `known`.
pub(super) fn refuse_others(
    values: &Map<String, Json>,
    known: &[&str],
    reason: &str,
) -> Result<(), ImportError> {
    let other =
        |(key, value): &(&String, &Json)| !value.is_null() && !known.contains(&key.as_str());
    match values.iter().find(other) {
        None => Ok(()),
        Some((key, value)) => Err(bad(&excerpt(key, 60), value, reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinite_numbers_are_read_outside_of_texts() {
        let text = br#"{"a": [0.0, Infinity], "b \" Infinity": "Infinity \\"}"#;
        let expected =
            br#"{"a": [0.0, {"__float__": "Infinity"}], "b \" Infinity": "Infinity \\"}"#;
        assert_eq!(with_infinity(text), expected);
        assert_eq!(object("config.json", text).unwrap().len(), 2);
        assert!(object("config.json", br#"{"a": -Infinity}"#).is_err());
    }

    /// Found by fuzzing.
    #[test]
    fn control_characters_of_keys_and_values_are_escaped_in_messages() {
        let values = object("config.json", br#"{"a\r\u009b2J": "\u009b"}"#).unwrap();
        let refused = refuse_others(&values, &[], "unknown").unwrap_err();
        let message = r#"config.json: a\r\u{9b}2J = "\u{9b}": unknown"#;
        assert_eq!(refused.to_string(), message);
    }
}
