//! Grammar of a request, in the fields that clients send: OpenAI's `response_format`, vLLM's
//! `structured_outputs`, and `json_schema` and `grammar` of llama.cpp. Pure.

use hearthnet_tokens::{Grammar, grammar};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::fields::{Fields, Refused, invalid, unsupported, wrong};

/// Mark at the beginning of a Lark grammar in llama.cpp's field.
const LARK_MARK: &str = "%llguidance";

/// Fields of a request that ask for a grammar, at most one of them.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct GrammarFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) response_format: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) structured_outputs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) json_schema: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grammar: Option<Value>,
}

/// Grammar, and the field that asks for it.
#[derive(Debug, Clone)]
pub(super) struct AskedGrammar {
    pub(super) field: &'static str,
    pub(super) grammar: Grammar,
}

impl GrammarFields {
    /// Fields that ask for a grammar.
    pub(super) fn of(grammar: Option<&Grammar>) -> Self {
        let vllms = |name: &str, text: &str| Self {
            structured_outputs: Some(json!({name: text})),
            ..Self::default()
        };
        match grammar {
            Some(Grammar::JsonSchema(schema)) => Self {
                json_schema: Some(schema.clone()),
                ..Self::default()
            },
            Some(Grammar::Regex(regex)) => vllms("regex", regex),
            Some(Grammar::Lark(lark)) => vllms("grammar", lark),
            _ => Self::default(),
        }
    }

    /// Takes the fields out of a request.
    pub(super) fn take(fields: &mut Fields) -> Self {
        Self {
            response_format: fields.take("response_format"),
            structured_outputs: fields.take("structured_outputs"),
            json_schema: fields.take("json_schema"),
            grammar: fields.take("grammar"),
        }
    }

    /// The grammar, if the fields ask for one.
    pub(super) fn read(self) -> Result<Option<AskedGrammar>, Refused> {
        let mut asked: Option<AskedGrammar> = None;
        type Read = fn(Value) -> Result<Option<Grammar>, Refused>;
        let fields: [(&'static str, Option<Value>, Read); 4] = [
            ("response_format", self.response_format, response_format),
            (
                "structured_outputs",
                self.structured_outputs,
                structured_outputs,
            ),
            ("json_schema", self.json_schema, |schema| {
                json_schema("json_schema", schema).map(Some)
            }),
            ("grammar", self.grammar, |grammar| {
                llama_cpps(grammar).map(Some)
            }),
        ];
        for (field, value, read) in fields {
            let Some(grammar) = value.map(read).transpose()?.flatten() else {
                continue;
            };
            if let Some(other) = &asked {
                let problem = format!("`{field}` and `{}` exclude each other", other.field);
                return Err(invalid(field, problem));
            }
            asked = Some(AskedGrammar { field, grammar });
        }
        Ok(asked)
    }
}

/// OpenAI's field. llama.cpp has the schema beside the type.
fn response_format(value: Value) -> Result<Option<Grammar>, Refused> {
    let at = "response_format";
    let must = "an object whose `type` is text, json_object or json_schema";
    let mut format = Fields::object_with(at, value, must)?;
    let kind = format.take("type");
    let beside = format.take("schema");
    let given = format.take("json_schema");
    let grammar = match (kind.as_ref().and_then(Value::as_str), given, beside) {
        (Some("text"), None, None) => None,
        (Some("json_object"), None, None) => Some(Grammar::json_object()),
        (Some("json_object" | "json_schema"), None, Some(schema)) => {
            Some(json_schema("response_format.schema", schema)?)
        }
        (Some("json_schema"), Some(given), None) => Some(openais_schema(given)?),
        (Some("json_schema"), None, None) => {
            return Err(wrong(
                "response_format.json_schema",
                "an object with `schema`",
            ));
        }
        (Some("text" | "json_object" | "json_schema") | None, ..) => return Err(wrong(at, must)),
        (Some(_), ..) => {
            let at = "response_format.type";
            let problem = format!("`{at}` must be text, json_object or json_schema");
            return Err(unsupported(at, problem));
        }
    };
    format.nothing_left(&[])?;
    Ok(grammar)
}

/// Member `json_schema` of OpenAI's field.
fn openais_schema(value: Value) -> Result<Grammar, Refused> {
    let at = "response_format.json_schema";
    let mut given = Fields::object_with(at, value, "an object with `schema`")?;
    for name in ["name", "description"] {
        given.text(name)?;
    }
    // An answer always follows its schema.
    given.bool("strict")?;
    let at = given.path("schema");
    let schema = given.need("schema", "a JSON schema", |_| true)?;
    given.nothing_left(&[])?;
    json_schema(&at, schema)
}

/// vLLM's field.
fn structured_outputs(value: Value) -> Result<Option<Grammar>, Refused> {
    let at = "structured_outputs";
    let must = "an object with one of json, regex, choice, grammar and json_object";
    let mut given = Fields::object_with(at, value, must)?;
    let mut found = Vec::new();
    for name in ["json", "regex", "choice", "grammar", "json_object"] {
        if let Some(value) = given.take(name) {
            found.push((given.path(name), name, value));
        }
    }
    given.nothing_left(&[])?;
    let mut found = found.into_iter();
    let (Some((at_part, name, value)), None) = (found.next(), found.next()) else {
        return Err(wrong(at, must));
    };
    let grammar = match (name, value) {
        // A schema may be given as its text.
        ("json", Value::String(text)) => match serde_json::from_str(&text) {
            Ok(schema) => json_schema(&at_part, schema)?,
            Err(_) => return Err(wrong(&at_part, "a JSON schema, or its text")),
        },
        ("json", schema) => json_schema(&at_part, schema)?,
        ("regex", Value::String(regex)) => Grammar::Regex(regex),
        ("grammar", Value::String(text)) => lark(&at_part, text)?,
        ("choice", choices) => {
            let texts: Option<Vec<String>> = serde_json::from_value(choices).ok();
            let fits =
                |texts: &Vec<String>| !texts.is_empty() && !texts.iter().any(String::is_empty);
            let texts = texts.filter(fits);
            Grammar::choice(&texts.ok_or_else(|| wrong(&at_part, "a list of texts, none empty"))?)
        }
        ("json_object", Value::Bool(true)) => Grammar::json_object(),
        ("json_object", _) => return Err(wrong(&at_part, "true")),
        _ => return Err(wrong(&at_part, "a text")),
    };
    Ok(Some(grammar))
}

/// llama.cpp's field: GBNF, or Lark behind a mark.
fn llama_cpps(value: Value) -> Result<Grammar, Refused> {
    match value {
        Value::String(text) => lark("grammar", text),
        _ => Err(wrong("grammar", "a text")),
    }
}

fn lark(at: &str, text: String) -> Result<Grammar, Refused> {
    // The sign after the name of a GBNF rule.
    let is_gbnf = |line: &str| {
        let rule = line.split_once("::=").map(|(name, _)| name.trim());
        let in_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        rule.is_some_and(|name| !name.is_empty() && name.chars().all(in_name))
    };
    if text.lines().any(is_gbnf) {
        let problem = format!(
            "`{at}` must be a Lark grammar, with the rule `start`; GBNF grammars (`::=`) are not supported"
        );
        return Err(unsupported(at, problem));
    }
    // The mark may have options behind it, and then it is part of the grammar.
    let rest = text.trim_start().strip_prefix(LARK_MARK);
    let alone = rest.filter(|rest| !rest.trim_start_matches([' ', '\t']).starts_with('{'));
    Ok(Grammar::Lark(alone.map(str::to_owned).unwrap_or(text)))
}

fn json_schema(at: &str, mut schema: Value) -> Result<Grammar, Refused> {
    match schema {
        Value::Object(_) | Value::Bool(true) => {
            grammar::close(&mut schema);
            Ok(Grammar::JsonSchema(schema))
        }
        _ => Err(wrong(at, "a JSON schema, which is an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::fields::tests::cases;

    fn read(fields: Value) -> Result<Option<Grammar>, Refused> {
        let fields: GrammarFields = serde_json::from_value(fields).unwrap();
        Ok(fields.read()?.map(|asked| asked.grammar))
    }

    #[test]
    fn every_clients_field_is_read() {
        let schema = json!({
            "type": "object", "properties": {"z": {}, "a": {}}, "additionalProperties": true,
        });
        let text = schema.to_string();
        let wanted = Some(Grammar::JsonSchema(schema.clone()));
        let named = json!({"name": "n", "description": "d", "strict": true, "schema": schema});
        for fields in [
            json!({"response_format": {"type": "json_schema", "json_schema": named}}),
            json!({"response_format": {"type": "json_schema", "schema": schema}}),
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"structured_outputs": {"json": schema, "regex": null}}),
            json!({"structured_outputs": {"json": text}}),
            json!({"json_schema": schema, "response_format": {"type": "text"}, "grammar": null}),
        ] {
            let grammar = read(fields).unwrap();
            assert!(grammar == wanted);
            // Properties keep their order, in which they are written.
            let Some(Grammar::JsonSchema(schema)) = grammar else {
                panic!("{grammar:?}");
            };
            assert_eq!(schema.to_string(), text);
        }
        let is = |fields: Value, grammar: Grammar| assert!(read(fields).unwrap() == Some(grammar));
        // Objects have no other properties, unless the schema says something about them.
        let open = json!({"json_schema": {"properties": {"a": {}}}});
        let closed = json!({"properties": {"a": {}}, "additionalProperties": false});
        is(open, Grammar::JsonSchema(closed));
        let object = json!({"response_format": {"type": "json_object"}});
        is(object, Grammar::json_object());
        let object = json!({"structured_outputs": {"json_object": true}});
        is(object, Grammar::json_object());
        let regex = json!({"structured_outputs": {"regex": "a+"}});
        is(regex, Grammar::Regex("a+".into()));
        let choice = json!({"structured_outputs": {"choice": ["a", "b"]}});
        is(choice, Grammar::Regex("a|b".into()));
        let lark = "start: \"::=\"";
        let grammar = json!({"structured_outputs": {"grammar": lark}});
        is(grammar, Grammar::Lark(lark.into()));
        let marked = json!({"grammar": format!("%llguidance\n{lark}")});
        is(marked, Grammar::Lark(format!("\n{lark}")));
        let options = format!("%llguidance {{}}\n{lark}");
        is(json!({"grammar": options}), Grammar::Lark(options.clone()));
        assert!(
            read(json!({"response_format": {"type": "text"}}))
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_grammar_is_the_same_at_the_other_end() {
        for grammar in [
            None,
            Some(Grammar::json_object()),
            Some(Grammar::Regex("a".into())),
            Some(Grammar::Lark("start: \"a\"".into())),
        ] {
            let there = serde_json::to_value(GrammarFields::of(grammar.as_ref())).unwrap();
            assert!(read(there).unwrap() == grammar);
        }
    }

    #[test]
    fn wrong_and_unsupported_values_name_their_field() {
        let schema = || json!({"type": "object"});
        for (fields, field, is_unsupported) in cases::<(Value, String, bool)>(json!([
            [{"response_format": "json"}, "response_format", false],
            [{"response_format": {"type": 5}}, "response_format", false],
            [{"response_format": {"type": "structural_tag"}}, "response_format.type", true],
            [{"response_format": {"type": "json_schema"}}, "response_format.json_schema", false],
            [{"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
             "response_format.json_schema.schema", false],
            [{"response_format": {"type": "json_object", "strict": true}},
             "response_format.strict", true],
            [{"structured_outputs": {}}, "structured_outputs", false],
            [{"structured_outputs": {"regex": "a", "json": schema()}}, "structured_outputs", false],
            [{"structured_outputs": {"regex": 1}}, "structured_outputs.regex", false],
            [{"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", false],
            [{"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
             "structured_outputs.whitespace_pattern", true],
            [{"json_schema": 5}, "json_schema", false],
            [{"grammar": "root ::= \"a\""}, "grammar", true],
            [{"grammar": "start: \"a\"", "json_schema": schema()}, "grammar", false],
        ])) {
            let refused = read(fields).unwrap_err();
            let found = (refused.field.as_str(), refused.is_unsupported);
            assert_eq!(found, (field.as_str(), is_unsupported));
            assert!(refused.problem.contains(&field), "{}", refused.problem);
        }
    }
}
