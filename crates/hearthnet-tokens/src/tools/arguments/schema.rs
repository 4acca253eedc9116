//! Form of an argument according to its schema.

use serde_json::{Map, Value};

/// Types of JSON, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    pub(super) const NULL: Self = Self(1);
    pub(super) const BOOLEAN: Self = Self(2);
    pub(super) const INTEGER: Self = Self(4);
    /// Numbers, integers as well.
    pub(super) const NUMBER: Self = Self(8 | 4);
    pub(super) const STRING: Self = Self(16);
    pub(super) const ARRAY: Self = Self(32);
    pub(super) const OBJECT: Self = Self(64);
    pub(super) const ALL: Self = Self(127);

    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) fn only(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(number) if number.is_f64() => Self::NUMBER,
            Value::Number(_) => Self::INTEGER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// Type of this name. A schema's author who writes another one means any.
    fn named(name: &Value) -> Self {
        match name.as_str() {
            Some("null") => Self::NULL,
            Some("boolean") => Self::BOOLEAN,
            Some("integer") => Self::INTEGER,
            Some("number") => Self::NUMBER,
            Some("string") => Self::STRING,
            Some("array") => Self::ARRAY,
            Some("object") => Self::OBJECT,
            _ => Self::ALL,
        }
    }

    fn union(of: impl Iterator<Item = Self>) -> Self {
        of.fold(Self(0), Self::with)
    }

    /// Types that a schema's own keywords allow.
    pub(super) fn allowed(schema: &Value, root: &Value, depth: usize) -> Self {
        let Value::Object(members) = schema else {
            return Self::ALL;
        };
        if depth == 0 {
            return Self::ALL;
        }
        if let Some(target) = referred(members, root) {
            return Self::allowed(target, root, depth - 1);
        }
        if let Some(values) = listed_values(members) {
            return Self::union(values.iter().map(Self::of));
        }
        match members.get("type") {
            Some(Value::Array(names)) => return Self::union(names.iter().map(Self::named)),
            Some(name) => return Self::named(name),
            None => {}
        }
        match alternatives(members) {
            Some(schemas) => {
                let allowed = |schema| Self::allowed(schema, root, depth - 1);
                Self::union(schemas.iter().map(allowed))
            }
            None => Self::ALL,
        }
    }

    /// Whether a value that is read from text without quotes can be JSON of these types.
    pub(super) fn allows(self, value: &Value) -> bool {
        self.has(Self::of(value))
    }
}

/// Deepest nesting of references and alternatives that is followed.
pub(super) const MAX_DEPTH: usize = 32;

/// Schema to which a schema refers within the root.
pub(super) fn referred<'a>(members: &Map<String, Value>, root: &'a Value) -> Option<&'a Value> {
    let reference = members.get("$ref")?.as_str()?;
    root.pointer(reference.strip_prefix('#')?)
}

/// Schemas one of which a value follows.
pub(super) fn alternatives(members: &Map<String, Value>) -> Option<&Vec<Value>> {
    let either = members.get("anyOf").or_else(|| members.get("oneOf"));
    either?.as_array()
}

/// The only values that a schema allows, if it lists them.
pub(super) fn listed_values(members: &Map<String, Value>) -> Option<&[Value]> {
    let one = members.get("const").map(std::slice::from_ref);
    let listed = members.get("enum").and_then(Value::as_array);
    one.or(listed.map(Vec::as_slice))
}

/// Limits of a text.
#[derive(Debug, Default)]
pub(super) struct TextLimits {
    pub(super) least: u64,
    pub(super) most: Option<u64>,
    /// The only texts, if the schema lists them.
    pub(super) choices: Option<Vec<String>>,
    /// True if the value may also be null.
    pub(super) nullable: bool,
}

/// Limits of lengths above this are not enforced: no answer is so long.
const MAX_LENGTH: u64 = 1 << 16;

impl TextLimits {
    /// Limits by a schema of texts. `None` if it is one of something else, or has limits that only
    /// JSON enforces.
    pub(super) fn of(schema: &Value, root: &Value, depth: usize) -> Option<Self> {
        let members = schema.as_object().filter(|_| depth > 0)?;
        if let Some(target) = referred(members, root) {
            return Self::of(target, root, depth - 1);
        }
        if let Some(schemas) = alternatives(members) {
            let is_null = |schema: &&Value| Types::allowed(schema, root, depth) == Types::NULL;
            let mut others = schemas.iter().filter(|schema| !is_null(schema));
            let (Some(text), None) = (others.next(), others.next()) else {
                return None;
            };
            let mut limits = Self::of(text, root, depth - 1)?;
            limits.nullable |= schemas.len() > 1;
            return Some(limits);
        }
        let types = Types::allowed(schema, root, depth);
        let other = ["pattern", "format", "allOf", "not", "if"];
        if !types.has(Types::STRING)
            || !types.only(Types::STRING.with(Types::NULL))
            || other.iter().any(|keyword| members.contains_key(*keyword))
        {
            return None;
        }
        let length = |keyword: &str| {
            let length = members.get(keyword).and_then(Value::as_u64);
            length.filter(|length| *length <= MAX_LENGTH)
        };
        let texts = |values: &[Value]| {
            let texts = values.iter().filter_map(Value::as_str);
            texts.map(str::to_owned).collect()
        };
        Some(Self {
            least: length("minLength").unwrap_or(0),
            most: length("maxLength"),
            choices: listed_values(members).map(texts),
            nullable: types.has(Types::NULL),
        })
    }
}

/// How an argument is written in a form whose texts have no quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A text, or the word `null` if that is allowed.
    Text { nullable: bool },
    /// JSON if it can be read as JSON of these types, else a text.
    Any(Types),
    /// JSON; a text has quotes.
    Json,
}

/// Keywords that say nothing about a value beside its type.
const FREE: &[&str] = &[
    "type",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
];

impl Kind {
    pub(super) fn of(schema: &Value, root: &Value) -> Self {
        if let Some(limits) = TextLimits::of(schema, root, MAX_DEPTH) {
            return Self::Text {
                nullable: limits.nullable,
            };
        }
        let types = Types::allowed(schema, root, MAX_DEPTH);
        match types.has(Types::STRING) && is_free(schema) {
            true => Self::Any(types),
            false => Self::Json,
        }
    }
}

/// Whether a schema limits nothing but the type.
fn is_free(schema: &Value) -> bool {
    let Value::Object(members) = schema else {
        return true;
    };
    members.iter().all(|(keyword, value)| match value {
        Value::Array(schemas) if matches!(keyword.as_str(), "anyOf" | "oneOf") => {
            schemas.iter().all(is_free)
        }
        _ => FREE.contains(&keyword.as_str()),
    })
}

/// Maximum number of members of a tool's objects in a form that is not JSON. In objects beyond it,
/// names are not enforced: the library compiles a list of members by recursion.
pub(super) const MAX_MEMBERS: usize = 1000;

/// Members of an object, by its schema.
#[derive(Debug, Default)]
pub(super) struct Members {
    /// Name, schema, and whether it is required.
    pub(super) named: Vec<(String, Value, bool)>,
    /// Schema of the others; `None` if there are none.
    pub(super) others: Option<Value>,
}

impl Members {
    /// Members by a schema, which may be a reference.
    pub(super) fn of(schema: &Value, root: &Value) -> Self {
        let mut schema = schema;
        for _ in 0..MAX_DEPTH {
            let target = schema.as_object().and_then(|own| referred(own, root));
            schema = target.unwrap_or(schema);
        }
        let required = schema.get("required").and_then(Value::as_array);
        let required: Vec<&str> = required
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let properties = schema.get("properties").and_then(Value::as_object);
        let mut named: Vec<(String, Value, bool)> = properties
            .into_iter()
            .flatten()
            .map(|(name, schema)| {
                let is_required = required.contains(&name.as_str());
                (name.clone(), schema.clone(), is_required)
            })
            .collect();
        for name in required {
            if !named.iter().any(|(known, ..)| known == name) {
                named.push((name.into(), Value::Bool(true), true));
            }
        }
        let others = match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            Some(others) => Some(others.clone()),
            None => Some(Value::Bool(true)),
        };
        Self { named, others }
    }

    /// The same, or any members if the count is above [`MAX_MEMBERS`].
    pub(super) fn limited(self, count: usize) -> Self {
        if count <= MAX_MEMBERS {
            return self;
        }
        Self {
            named: Vec::new(),
            others: Some(Value::Bool(true)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_testkit::rows;
    use serde_json::json;

    #[test]
    fn a_text_has_quotes_only_if_it_could_be_misread_or_has_limits_of_json() {
        let text = |nullable| Kind::Text { nullable };
        for (schema, kind) in rows! {
            json!({"type": "string", "maxLength": 3}) => text(false);
            json!({"enum": ["a", "b"]}) => text(false);
            json!({"type": ["string", "null"]}) => text(true);
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}) => text(true);
            json!({"$ref": "#/$defs/t"}) => text(false);
            json!({}) => Kind::Any(Types::ALL);
            json!({"type": "date"}) => Kind::Any(Types::ALL);
            json!({"type": "string", "format": "date"}) => Kind::Json;
            json!({"type": "string", "pattern": "a"}) => Kind::Json;
            json!({"type": ["string", "integer"], "maximum": 3}) => Kind::Json;
            json!({"type": "integer"}) => Kind::Json;
            json!({"type": "array", "items": {"type": "string"}}) => Kind::Json;
            json!({"$ref": "#/$defs/loop"}) => Kind::Json;
        } {
            let root = json!({"$defs": {
                "t": {"type": "string"},
                "loop": {"$ref": "#/$defs/loop"},
            }});
            assert_eq!(Kind::of(&schema, &root), kind, "{schema}");
        }
    }
}
