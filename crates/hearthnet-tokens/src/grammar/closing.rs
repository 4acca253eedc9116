//! Objects of a JSON schema without other properties than the named ones. Pure.
//!
//! By JSON Schema, an object may have any others. Few authors of a schema mean that, and a small
//! model adds properties until its context is full. So llama.cpp and vLLM leave them out as well.

use serde_json::{Map, Value};

/// Keywords with a say in which other properties there are.
const OPEN: &[&str] = &[
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
    "minProperties",
    "dependentRequired",
    "dependentSchemas",
];

/// Keywords that combine an object with other schemas.
const COMBINING: &[&str] = &["anyOf", "oneOf", "$ref", "$dynamicRef", "if"];

/// Lets no object have properties that its `properties` does not name, unless one of its keywords
/// says something about them. A schema that combines several ones for the same object stays as it
/// is: a property that one of them does not name may be one of another's.
pub fn close(schema: &mut Value) {
    if !combines(schema) {
        close_objects(schema);
    }
}

/// Whether the schema may combine several ones for one object.
fn combines(schema: &Value) -> bool {
    match schema {
        Value::Array(items) => items.iter().any(combines),
        Value::Object(members) => {
            let has = |name: &&str| members.contains_key(*name);
            let own = ["properties", "required", "additionalProperties"];
            has(&"allOf")
                || (own.iter().any(has) && COMBINING.iter().any(has))
                || members.values().any(combines)
        }
        _ => false,
    }
}

fn close_objects(schema: &mut Value) {
    let members = match schema {
        Value::Object(members) => members,
        Value::Array(items) => return items.iter_mut().for_each(close_objects),
        _ => return,
    };
    for (keyword, value) in members.iter_mut() {
        match (keyword.as_str(), value) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions",
                Value::Object(named),
            ) => {
                named.values_mut().for_each(close_objects);
            }
            ("items" | "prefixItems" | "additionalProperties" | "anyOf" | "oneOf", value) => {
                close_objects(value);
            }
            _ => {}
        }
    }
    if is_complete(members) {
        members.insert("additionalProperties".into(), Value::Bool(false));
    }
}

/// Whether the object's `properties` can be all that it has.
fn is_complete(members: &Map<String, Value>) -> bool {
    let Some(Value::Object(properties)) = members.get("properties") else {
        return false;
    };
    let named = |name: &Value| {
        name.as_str()
            .is_some_and(|name| properties.contains_key(name))
    };
    let required = members.get("required").and_then(Value::as_array);
    !OPEN.iter().any(|keyword| members.contains_key(*keyword))
        && required.is_none_or(|required| required.iter().all(named))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn closed(mut schema: Value) -> Value {
        close(&mut schema);
        schema
    }

    #[test]
    fn objects_with_named_properties_have_no_others() {
        let inner = json!({"properties": {"a": {}}});
        let within = |inner: &Value| {
            json!({
                "type": "object",
                "properties": {"list": {"items": inner}, "either": {"anyOf": [inner, {}]}},
                "required": ["list"],
                "$defs": {"d": inner},
            })
        };
        let mut expected = within(&json!({"properties": {"a": {}}, "additionalProperties": false}));
        expected["additionalProperties"] = json!(false);
        assert_eq!(closed(within(&inner)), expected);
    }

    #[test]
    fn schemas_that_may_mean_other_properties_stay() {
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
            json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}}),
            json!({"properties": {"a": {}}, "required": ["b"]}),
            json!({"properties": {"a": {}}, "minProperties": 2}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
            json!({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {}]}),
            json!({"$ref": "#/$defs/d", "required": ["b"], "$defs": {"d": {"properties": {"a": {}}}}}),
            json!({"enum": [{"properties": {"a": {}}}]}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
