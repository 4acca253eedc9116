//! Checks of a JSON schema before it is compiled. Pure.
//!
//! The library limits the size of what it builds. The limits here are on parts of a schema of which
//! a few bytes cost much time, or much stack.

use serde_json::{Map, Value, json};

use super::error::GrammarError;

/// White space between two parts of an answer: none, a space, or a line feed with indentation.
/// Models tend to repeat white space for ever where a grammar lets them.
const WHITE_SPACE: &str = r"[ ]|\n[ \t]{0,20}";

/// Key of the library's own options in a schema.
const OPTIONS: &str = "x-guidance";

/// Maximum number of patterns of property names in a schema: each is compared with each other one.
const MAX_PATTERNS: usize = 64;
/// Maximum number of references: a chain of them is followed by recursion.
const MAX_REFERENCES: usize = 1000;
/// Maximum number of properties, as OpenAI has it.
const MAX_PROPERTIES: usize = 5000;

/// Schema for the library, with its options. `lenient`: keywords that are not enforced are ignored.
pub(super) fn checked(schema: &Value, lenient: bool) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => {
            let nothing = "the schema `false` allows no answer";
            return Err(GrammarError::Invalid(nothing.into()));
        }
        Value::Object(members) => members.clone(),
        _ => {
            let must = "a JSON schema is an object, or true";
            return Err(GrammarError::Invalid(must.into()));
        }
    };
    if schema.contains_key(OPTIONS) {
        return Err(GrammarError::keywords(&[OPTIONS.into()]));
    }
    let mut counts = Counts::default();
    for value in schema.values() {
        counts.add(value)?;
    }
    counts.add_members(&schema);
    for (count, most, what) in [
        (counts.patterns, MAX_PATTERNS, "patterns of property names"),
        (counts.references, MAX_REFERENCES, "references"),
        (counts.properties, MAX_PROPERTIES, "properties"),
    ] {
        if count > most {
            let problem = format!("the schema has {count} {what}; at most {most} are accepted");
            return Err(GrammarError::TooComplex(problem));
        }
    }
    let options = json!({"whitespace_pattern": WHITE_SPACE, "lenient": lenient});
    schema.insert(OPTIONS.into(), options);
    Ok(Value::Object(schema))
}

#[derive(Default)]
struct Counts {
    patterns: usize,
    references: usize,
    properties: usize,
}

impl Counts {
    /// Counts within a value below the root. JSON is nested at most 128 deep when it is read.
    fn add(&mut self, value: &Value) -> Result<(), GrammarError> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.add(item)),
            Value::Object(members) => {
                // References in such a part would be relative to it.
                if members.get("$id").is_some_and(Value::is_string) {
                    return Err(GrammarError::keywords(&["$id".into()]));
                }
                self.add_members(members);
                members.values().try_for_each(|value| self.add(value))
            }
            _ => Ok(()),
        }
    }

    fn add_members(&mut self, members: &Map<String, Value>) {
        let count = |name: &str| {
            let named = members.get(name).and_then(Value::as_object);
            named.map_or(0, Map::len)
        };
        self.patterns += count("patternProperties");
        self.properties += count("properties");
        self.references += usize::from(members.contains_key("$ref"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(schema: &Value) -> String {
        checked(schema, false).unwrap_err().to_string()
    }

    #[test]
    fn costly_parts_are_counted_wherever_they_are() {
        let many = |count: usize, name: &str, value: &Value| {
            let members = (0..count).map(|n| (format!("{name}{n}"), value.clone()));
            Value::Object(members.collect())
        };
        let inside = |key: &str, value: Value| json!({"anyOf": [{"items": {key: value}}]});
        let patterns = |n| inside("patternProperties", many(n, "^", &json!({})));
        assert!(checked(&patterns(64), false).is_ok());
        assert!(refused(&patterns(65)).contains("65 patterns"));
        let to = json!({"$ref": "#"});
        assert!(refused(&inside("allOf", many(1001, "a", &to))).contains("1001 references"));
        let properties = json!({"properties": many(5001, "p", &json!(true))});
        assert!(refused(&properties).contains("5001 properties"));
    }

    #[test]
    fn the_librarys_options_and_nested_ids_are_refused_by_name() {
        assert!(refused(&json!({"x-guidance": {}})).contains("`x-guidance`"));
        assert!(refused(&json!({"items": {"$id": "other"}})).contains("`$id`"));
        // An id of the whole, and a property of this name.
        assert!(checked(&json!({"$id": "it", "properties": {"$id": {}}}), false).is_ok());
        assert!(refused(&json!(5)).contains("object"));
        assert!(refused(&json!(false)).contains("no answer"));
    }
}
