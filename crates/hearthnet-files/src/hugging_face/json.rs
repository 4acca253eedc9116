//! Values of JSON objects in a model directory.

use serde_json::{Map, Value as Json};

use super::error::ImportError;
use crate::schema::Lookup;

/// Value for a message: as JSON, on one line, shortened.
pub(super) fn shown(value: &Json) -> String {
    value.to_string().chars().take(80).collect()
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
    serde_json::from_slice(text)
        .map_err(|error| ImportError::Unsound(format!("{file} cannot be read: {error}")))
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
        Some((key, value)) => Err(bad(
            &key.chars().take(60).collect::<String>(),
            value,
            reason,
        )),
    }
}
