//! Fields of a request in OpenAI's form, each read by its name. Pure.

use axum::http::StatusCode;
use hearthnet_http::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::api::grammar::Refused;

/// Settings that decide how a request is read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rules {
    /// Seed of a request without one.
    pub(super) seed: u64,
    /// Whether fields without effect are refused.
    pub(super) strict: bool,
}

impl Rules {
    /// The fields of a list that are ignored.
    pub(super) fn ignored(self, names: &'static [&'static str]) -> &'static [&'static str] {
        if self.strict { &[] } else { names }
    }
}

/// Why a strict server refuses a field that others ignore.
pub(super) const NO_EFFECT: &str = "has no effect here, and http.strict refuses such fields";

/// 400: invalid value of a field.
pub(super) fn field(at: &str, message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message).about(at)
}

/// 400: unsupported field that would change the answer.
pub(super) fn unsupported(at: &str, message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(at)
}

/// 400: field that all interfaces read.
pub(super) fn refused(refused: Refused) -> ApiError {
    match refused.is_unsupported {
        true => unsupported(&refused.field, refused.problem),
        false => field(&refused.field, refused.problem),
    }
}

/// Remaining fields of an object.
pub(super) struct Fields(pub(super) Map<String, Value>);

impl Fields {
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let wrong = |why| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", why);
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(wrong("the body must be a JSON object".to_owned())),
            Err(why) => Err(wrong(format!("the body is not JSON: {why}"))),
        }
    }

    /// Removes a field; `None` if it is missing or null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Removes and parses a field. `must` describes the valid values; `fits` checks them.
    pub(super) fn read<T: DeserializeOwned>(
        &mut self,
        name: &str,
        must: &str,
        fits: impl FnOnce(&T) -> bool,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let read = serde_json::from_value(value).ok().filter(fits);
        read.map(Some)
            .ok_or_else(|| field(name, format!("`{name}` must be {must}")))
    }

    pub(super) fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", |_| true)
    }

    pub(super) fn integer(
        &mut self,
        name: &str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, ApiError> {
        let must = format!("a whole number from {min} to {max}");
        self.read(name, &must, |n| (min..=max).contains(n))
    }

    /// Refuses remaining fields that are not in `ignored`; `at` is the prefix of their names.
    pub(super) fn nothing_left(
        self,
        ignored: &[&str],
        at: &str,
        why: &str,
    ) -> Result<(), ApiError> {
        let mut left = self.0.into_iter();
        let matters =
            |(name, value): &(String, Value)| !value.is_null() && !ignored.contains(&name.as_str());
        match left.find(matters) {
            Some((name, _)) => {
                let at: String = at.chars().chain(name.chars().take(100)).collect();
                Err(unsupported(&at, format!("`{at}` {why}")))
            }
            None => Ok(()),
        }
    }
}
