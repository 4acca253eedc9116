//! Parameter descriptions of capabilities, and the check of given parameters.
//!
//! The description is a small subset of JSON Schema, written as JSON:
//!
//! ```
//! # use hearthnet_bus::calls::Params;
//! let params: Params = serde_json::from_str(r#"{
//!     "prompt":      {"type": "text", "max_bytes": 1000, "required": true},
//!     "temperature": {"type": "number", "min": 0, "max": 2},
//!     "stop":        {"type": "list", "max_items": 2, "items": {"type": "text", "max_bytes": 64}}
//! }"#)?;
//! assert!(params.check(&serde_json::json!({"prompt": "Hi", "temperature": 0.5})).is_ok());
//! let refused = params.check(&serde_json::json!({"prompt": "Hi", "temperature": 3})).unwrap_err();
//! assert_eq!(refused.to_string(), "temperature: must lie between 0 and 2");
//! # Ok::<(), serde_json::Error>(())
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The parameters of a capability, by name. Unknown names are refused.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Params(BTreeMap<String, Param>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Param {
    #[serde(flatten)]
    pub kind: Kind,
    /// True if a call without it is refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub required: bool,
}

/// Type and range of a parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    Flag,
    /// An integer, written without point or exponent.
    Integer {
        min: i64,
        max: i64,
    },
    /// A finite number.
    Number {
        min: f64,
        max: f64,
    },
    Text {
        /// Upper bound of UTF-8 bytes.
        max_bytes: usize,
        /// The accepted texts; empty: any.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        one_of: Vec<String>,
    },
    List {
        max_items: usize,
        items: Box<Kind>,
    },
    Object {
        /// Fields by name; others are refused.
        fields: Params,
    },
    /// Any JSON value; the capability checks it further.
    Json {
        /// Upper bound of its bytes, without white space.
        max_bytes: usize,
    },
}

/// The first invalid parameter, and the problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ParamError {
    /// Path, as in `messages[2].role`; `params` for the whole object.
    pub field: String,
    pub problem: String,
}

impl Params {
    pub fn none() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn required(self, name: &str, kind: Kind) -> Self {
        self.with(name, kind, true)
    }

    #[must_use]
    pub fn optional(self, name: &str, kind: Kind) -> Self {
        self.with(name, kind, false)
    }

    fn with(mut self, name: &str, kind: Kind, required: bool) -> Self {
        self.0.insert(name.into(), Param { kind, required });
        self
    }

    /// Checks that `params` is an object with all required parameters, no unknown one, and only
    /// allowed values.
    ///
    /// # Errors
    /// [`ParamError`] for the first problem.
    pub fn check(&self, params: &Value) -> Result<(), ParamError> {
        let Value::Object(given) = params else {
            return Err(wrong("must be an object").at("params"));
        };
        self.check_object(given).map_err(|mut error| {
            error.field.remove(0);
            error
        })
    }

    /// Paths in errors begin with a dot.
    fn check_object(&self, given: &Map<String, Value>) -> Result<(), ParamError> {
        if let Some(name) = given.keys().find(|name| !self.0.contains_key(*name)) {
            // The caller chose this name: shorten it.
            let name: String = name.chars().take(40).collect();
            return Err(wrong("is not a parameter of this capability").at(format!(".{name}")));
        }
        self.0.iter().try_for_each(|(name, param)| {
            let checked = match given.get(name) {
                Some(value) => param.kind.check(value),
                None if param.required => Err(wrong("is required")),
                None => Ok(()),
            };
            checked.map_err(|error| error.at(format!(".{name}")))
        })
    }
}

impl Kind {
    /// Text of at most `max_bytes` bytes.
    pub fn text(max_bytes: usize) -> Self {
        Self::Text {
            max_bytes,
            one_of: Vec::new(),
        }
    }

    pub fn one_of(texts: &[&str]) -> Self {
        Self::Text {
            max_bytes: texts.iter().map(|t| t.len()).max().unwrap_or(0),
            one_of: texts.iter().map(|&t| t.to_owned()).collect(),
        }
    }

    /// A list of at most `max_items` items.
    pub fn list(max_items: usize, items: Self) -> Self {
        Self::List {
            max_items,
            items: Box::new(items),
        }
    }

    /// Any JSON value of at most `max_bytes` bytes.
    pub fn json(max_bytes: usize) -> Self {
        Self::Json { max_bytes }
    }

    fn check(&self, value: &Value) -> Result<(), ParamError> {
        let problem = match (self, value) {
            (Self::Flag, Value::Bool(_)) => return Ok(()),
            (Self::Flag, _) => "must be true or false".to_owned(),
            (Self::Integer { min, max }, Value::Number(n)) => match n.as_i64() {
                Some(n) if (*min..=*max).contains(&n) => return Ok(()),
                _ => format!("must be a whole number from {min} to {max}"),
            },
            (Self::Integer { .. }, _) => "must be a whole number".to_owned(),
            (Self::Number { min, max }, Value::Number(n)) => match n.as_f64() {
                Some(n) if (*min..=*max).contains(&n) => return Ok(()),
                _ => format!("must lie between {min} and {max}"),
            },
            (Self::Number { .. }, _) => "must be a number".to_owned(),
            (Self::Text { max_bytes, one_of }, Value::String(text)) => match one_of.as_slice() {
                [] if text.len() <= *max_bytes => return Ok(()),
                [] => format!("must have at most {max_bytes} bytes"),
                some if some.contains(text) => return Ok(()),
                some => format!("must be one of {}", some.join(", ")),
            },
            (Self::Text { .. }, _) => "must be text".to_owned(),
            (Self::List { max_items, items }, Value::Array(given)) => {
                if given.len() <= *max_items {
                    return given.iter().enumerate().try_for_each(|(n, item)| {
                        items
                            .check(item)
                            .map_err(|error| error.at(format!("[{n}]")))
                    });
                }
                format!("must have at most {max_items} items")
            }
            (Self::List { .. }, _) => "must be a list".to_owned(),
            (Self::Object { fields }, Value::Object(given)) => return fields.check_object(given),
            (Self::Object { .. }, _) => "must be an object".to_owned(),
            (Self::Json { max_bytes }, value) if value.to_string().len() <= *max_bytes => {
                return Ok(());
            }
            (Self::Json { max_bytes }, _) => format!("must have at most {max_bytes} bytes"),
        };
        Err(wrong(problem))
    }
}

/// A problem with the current value; the enclosing values add the path with [`ParamError::at`].
fn wrong(problem: impl Into<String>) -> ParamError {
    ParamError {
        field: String::new(),
        problem: problem.into(),
    }
}

impl ParamError {
    /// Prepends one step to the path.
    fn at(mut self, step: impl AsRef<str>) -> Self {
        self.field.insert_str(0, step.as_ref());
        self
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn sample() -> Params {
        let message = Kind::Object {
            fields: Params::none()
                .required("role", Kind::one_of(&["system", "user", "assistant"]))
                .required("content", Kind::text(10)),
        };
        Params::none()
            .required("messages", Kind::list(2, message))
            .optional("seed", Kind::Integer { min: 0, max: 9 })
            .optional("top_p", Kind::Number { min: 0.0, max: 1.0 })
            .optional("stream", Kind::Flag)
            .optional("like", Kind::json(9))
    }

    #[test]
    fn allowed_parameters_are_accepted() {
        for good in [
            json!({"messages": []}),
            json!({"messages": [{"role": "user", "content": "0123456789"}], "seed": 9, "top_p": 1}),
            json!({"messages": [], "stream": true, "top_p": 0.25}),
            json!({"messages": [], "like": {"a": [1]}}),
        ] {
            assert_eq!(sample().check(&good), Ok(()), "{good}");
        }
    }

    #[test]
    fn every_refusal_names_the_field() {
        for case in [
            r#"[] -> params: must be an object"#,
            r#"{} -> messages: is required"#,
            r#"{"messages": 1} -> messages: must be a list"#,
            r#"{"messages": [1]} -> messages[0]: must be an object"#,
            r#"{"messages": [{}, {}, {}]} -> messages: must have at most 2 items"#,
            r#"{"messages": [{"role": "user", "content": "x"}, {"role": "root", "content": ""}]}
                -> messages[1].role: must be one of system, user, assistant"#,
            r#"{"messages": [{"role": "user", "content": "0123456789a"}]}
                -> messages[0].content: must have at most 10 bytes"#,
            r#"{"messages": [{"role": "user", "content": "", "name": "x"}]}
                -> messages[0].name: is not a parameter of this capability"#,
            r#"{"messages": [], "sed": 1} -> sed: is not a parameter of this capability"#,
            r#"{"messages": [], "seed": 10} -> seed: must be a whole number from 0 to 9"#,
            r#"{"messages": [], "seed": 1.0} -> seed: must be a whole number from 0 to 9"#,
            r#"{"messages": [], "seed": 18446744073709551615}
                -> seed: must be a whole number from 0 to 9"#,
            r#"{"messages": [], "seed": "1"} -> seed: must be a whole number"#,
            r#"{"messages": [], "top_p": -0.1} -> top_p: must lie between 0 and 1"#,
            r#"{"messages": [], "top_p": null} -> top_p: must be a number"#,
            r#"{"messages": [], "stream": 1} -> stream: must be true or false"#,
            r#"{"messages": [], "like": {"a": [10]}} -> like: must have at most 9 bytes"#,
        ] {
            let (bad, says) = case.split_once("-> ").unwrap();
            let bad: Value = serde_json::from_str(bad).unwrap();
            assert_eq!(sample().check(&bad).unwrap_err().to_string(), says, "{bad}");
        }
    }

    #[test]
    fn a_description_survives_json() {
        let text = serde_json::to_string(&sample()).unwrap();
        assert_eq!(serde_json::from_str::<Params>(&text).unwrap(), sample());
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(
                    (
                        prop_oneof!["messages|role|content|seed|top_p", "[a-z]{1,4}"],
                        inner
                    ),
                    0..4
                )
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_value_gets_an_answer(value in values()) {
            if sample().check(&value).is_ok() {
                prop_assert!(value.get("messages").is_some_and(Value::is_array));
            }
        }
    }
}
