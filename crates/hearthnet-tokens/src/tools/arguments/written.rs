//! Arguments in a family's form, for templates that do not write calls, and for lists of values.

use serde_json::{Map, Value};

use super::form::{Arguments, Listed, QUOTE};

impl Arguments {
    /// The arguments, with the text that ends them. What is no JSON object stays as it is.
    pub(in crate::tools) fn written(&self, arguments: &str) -> String {
        match (self, serde_json::from_str::<Map<String, Value>>(arguments)) {
            (Self::Listed(form), Ok(members)) => listed(form, &members),
            (Self::Gemma, Ok(members)) => gemma(&Value::Object(members)),
            _ => arguments.to_owned(),
        }
    }
}

fn listed(form: &Listed, members: &Map<String, Value>) -> String {
    let argument = |(name, value): (&String, &Value)| {
        let value = match value {
            Value::String(text) if form.raw => text.clone(),
            value => value.to_string(),
        };
        let before = form.value.concat();
        format!("{}{name}{before}{value}{}", form.name, form.behind)
    };
    let arguments: Vec<String> = members.iter().map(argument).collect();
    format!("{}{}", arguments.join(form.between), form.end)
}

/// Order of names in Gemma 4's template.
pub(super) fn sort_key(name: &str) -> String {
    name.to_lowercase()
}

/// A value in Gemma 4's notation.
pub(super) fn gemma(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{QUOTE}{text}{QUOTE}"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(gemma).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(members) => {
            let mut members: Vec<(&String, &Value)> = members.iter().collect();
            members.sort_by_key(|(name, _)| sort_key(name));
            let member = |(name, value): (&String, &Value)| format!("{name}:{}", gemma(value));
            let members: Vec<String> = members.into_iter().map(member).collect();
            format!("{{{}}}", members.join(","))
        }
        other => other.to_string(),
    }
}
