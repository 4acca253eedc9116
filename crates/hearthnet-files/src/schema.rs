//! Schemas of keys: metadata of a model file, and JSON of a directory.
//!
//! A key is read, must have a certain value, or has no influence. Any other key may change the
//! computation, so it is an error.

use serde_json::Value as Json;

use crate::gguf::Value;

/// Value of a key, as far as requirements distinguish it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Scalar<'a> {
    Bool(bool),
    /// Stored as integer or float.
    Number(f64),
    Text(&'a str),
    EmptyList,
    Other,
}

impl<'a> From<Value<'a>> for Scalar<'a> {
    fn from(value: Value<'a>) -> Self {
        let number = value.as_integer().map(|n| n as f64).or(value.as_float());
        match value {
            Value::Bool(value) => Self::Bool(value),
            Value::String(text) => Self::Text(text),
            Value::Array(list) if list.is_empty() => Self::EmptyList,
            _ => number.map_or(Self::Other, Self::Number),
        }
    }
}

impl<'a> From<&'a Json> for Scalar<'a> {
    fn from(value: &'a Json) -> Self {
        match value {
            Json::Bool(value) => Self::Bool(*value),
            Json::String(text) => Self::Text(text),
            Json::Array(list) if list.is_empty() => Self::EmptyList,
            other => other.as_f64().map_or(Self::Other, Self::Number),
        }
    }
}

/// Key that must have one of these values.
#[derive(Debug)]
pub(crate) struct Requirement {
    pub(crate) key: &'static str,
    pub(crate) values: &'static [Scalar<'static>],
    /// The key may be missing.
    pub(crate) optional: bool,
}

impl Requirement {
    pub(crate) fn accepts(&self, value: Option<Scalar<'_>>) -> bool {
        value.map_or(self.optional, |value| self.values.contains(&value))
    }
}

/// Required key.
pub(crate) const fn require(key: &'static str, values: &'static [Scalar<'static>]) -> Requirement {
    Requirement {
        key,
        values,
        optional: false,
    }
}

/// Key that must have one of these values if it is present.
pub(crate) const fn optional_value(
    key: &'static str,
    values: &'static [Scalar<'static>],
) -> Requirement {
    Requirement {
        key,
        values,
        optional: true,
    }
}

/// Key that must be false or missing.
pub(crate) const fn off(key: &'static str) -> Requirement {
    optional_value(key, &[Scalar::Bool(false)])
}

/// Key that must be true or missing.
pub(crate) const fn on(key: &'static str) -> Requirement {
    optional_value(key, &[Scalar::Bool(true)])
}

/// Key that must be 0 or missing.
pub(crate) const fn zero(key: &'static str) -> Requirement {
    optional_value(key, &[Scalar::Number(0.0)])
}

/// Key that must be 1 or missing.
pub(crate) const fn one(key: &'static str) -> Requirement {
    optional_value(key, &[Scalar::Number(1.0)])
}

/// Values by key.
pub(crate) trait Lookup {
    type Error;

    /// Integer from 0 to 2^32 - 1; `None` if the key is missing.
    fn integer(&self, key: &str) -> Result<Option<u32>, Self::Error>;

    /// Finite number; `None` if the key is missing.
    fn number(&self, key: &str) -> Result<Option<f64>, Self::Error>;

    /// Error for a missing key.
    fn missing(&self, key: &str) -> Self::Error;

    fn required_integer(&self, key: &str) -> Result<u32, Self::Error> {
        self.integer(key)?.ok_or_else(|| self.missing(key))
    }

    fn required_number(&self, key: &str) -> Result<f64, Self::Error> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }
}
