//! Fields of an object in a request, each read by its name; objects with more members. Pure.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Refused field.
#[derive(Debug)]
pub(super) struct Refused {
    /// Path of the field.
    pub(super) field: String,
    pub(super) problem: String,
    /// True if the value may be right, but is not supported.
    pub(super) is_unsupported: bool,
}

/// Field whose value is none of those that `must` describes.
pub(super) fn wrong(field: &str, must: &str) -> Refused {
    invalid(field, format!("`{field}` must be {must}"))
}

/// Field with a wrong value.
pub(super) fn invalid(field: &str, problem: impl Into<String>) -> Refused {
    Refused {
        field: field.to_owned(),
        problem: problem.into(),
        is_unsupported: false,
    }
}

/// Unsupported field or value that would change the answer.
pub(super) fn unsupported(field: &str, problem: impl Into<String>) -> Refused {
    Refused {
        is_unsupported: true,
        ..invalid(field, problem)
    }
}

/// An object with more members, which replace those of the same names.
pub(super) fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(members), Value::Object(more)) = (&mut object, more) {
        members.extend(more);
    }
    object
}

/// Object of a request, from which fields are taken. `null` is the same as a missing field.
pub(super) struct Fields {
    /// Path of the object, with a dot behind it; empty for the whole request.
    at: String,
    left: Map<String, Value>,
}

impl Fields {
    /// The whole request.
    pub(super) fn new(left: Map<String, Value>) -> Self {
        let at = String::new();
        Self { at, left }
    }

    /// Object at the path `at`.
    pub(super) fn object(at: &str, value: Value) -> Result<Self, Refused> {
        Self::object_with(at, value, "an object")
    }

    /// Object at the path `at`. `must` describes it.
    pub(super) fn object_with(at: &str, value: Value, must: &str) -> Result<Self, Refused> {
        match value {
            Value::Object(left) => Ok(Self {
                at: format!("{at}."),
                left,
            }),
            _ => Err(wrong(at, must)),
        }
    }

    /// Path of a field.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.at)
    }

    /// A field, which stays.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.left.get(name).filter(|value| !value.is_null())
    }

    /// Removes a field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.left.remove(name).filter(|value| !value.is_null())
    }

    /// Removes and parses a field. `must` describes the valid values; `fits` checks them.
    pub(super) fn read<T: DeserializeOwned>(
        &mut self,
        name: &str,
        must: &str,
        fits: impl FnOnce(&T) -> bool,
    ) -> Result<Option<T>, Refused> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let read = serde_json::from_value(value).ok().filter(fits);
        read.map(Some).ok_or_else(|| wrong(&self.path(name), must))
    }

    /// Removes and parses a field that must be there.
    pub(super) fn need<T: DeserializeOwned>(
        &mut self,
        name: &str,
        must: &str,
        fits: impl FnOnce(&T) -> bool,
    ) -> Result<T, Refused> {
        let read = self.read(name, must, fits)?;
        read.ok_or_else(|| wrong(&self.path(name), must))
    }

    /// Removes a text.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, Refused> {
        self.read(name, "a text", |_| true)
    }

    /// Removes a text that must be there.
    pub(super) fn needed(&mut self, name: &str) -> Result<String, Refused> {
        self.need(name, "a text", |_| true)
    }

    pub(super) fn bool(&mut self, name: &str) -> Result<Option<bool>, Refused> {
        self.read(name, "true or false", |_| true)
    }

    pub(super) fn integer(
        &mut self,
        name: &str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, Refused> {
        let must = format!("a whole number from {min} to {max}");
        self.read(name, &must, |n| (min..=max).contains(n))
    }

    /// Removes an object.
    pub(super) fn inner(&mut self, name: &str) -> Result<Option<Self>, Refused> {
        let value = self.take(name);
        value
            .map(|value| Self::object(&self.path(name), value))
            .transpose()
    }

    /// Removes an object that must be there. `must` describes it.
    pub(super) fn needed_inner(&mut self, name: &str, must: &str) -> Result<Self, Refused> {
        let value = self.take(name).unwrap_or_default();
        Self::object_with(&self.path(name), value, must)
    }

    /// Removes a list; an empty one if it is missing.
    pub(super) fn list(&mut self, name: &str) -> Result<Vec<Value>, Refused> {
        Ok(self.read(name, "a list", |_| true)?.unwrap_or_default())
    }

    /// Moves fields to a translated request: their name, and the name there. The reader of the
    /// translated request checks their values.
    pub(super) fn move_to(&mut self, request: &mut Value, names: &[(&str, &str)]) {
        for (theirs, ours) in names {
            if let Some(value) = self.take(theirs) {
                request[*ours] = value;
            }
        }
    }

    /// Removes the fields with this value.
    pub(super) fn remove_all(&mut self, value: &Value) {
        self.left.retain(|_, other| other != value);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Refuses the remaining fields that are not in `ignored`: a typo must not pass for a setting.
    pub(super) fn nothing_left(self, ignored: &[&str]) -> Result<(), Refused> {
        self.nothing_but(ignored, "is not supported here")
    }

    /// Refuses the remaining fields that are not in `names`. The message is the path of the first
    /// such field, and `why`.
    pub(super) fn nothing_but(self, names: &[&str], why: &str) -> Result<(), Refused> {
        let matters =
            |(name, value): &(&String, &Value)| !value.is_null() && !names.contains(&name.as_str());
        match self.left.iter().find(matters) {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(100).collect();
                let at = self.path(&name);
                Err(unsupported(&at, format!("`{at}` {why}")))
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Rows of a table in JSON.
    pub(in crate::api) fn cases<T: DeserializeOwned>(table: Value) -> Vec<T> {
        serde_json::from_value(table).unwrap()
    }
}
