//! Grammar of the arguments of a tool.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::form::{Arguments, Listed, QUOTE};
use super::schema::{
    Kind, MAX_DEPTH, MAX_MEMBERS, Members, TextLimits, Types, alternatives, listed_values, referred,
};
use super::written::{gemma, sort_key};
use crate::grammar::{Grammar, Part};
use crate::tools::lark::{SPACE, contains, escape, terminal, text};
use crate::tools::tool::Tool;

/// Name of an argument that a schema does not name, as a regular expression.
const NAME: &str = "[A-Za-z0-9_.\\-]{1,64}";

/// Keywords about the members of an object that only JSON enforces.
const ONLY_JSON_OBJECTS: &[&str] = &[
    "allOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "$dynamicRef",
];

/// Keywords about other values that only JSON enforces.
const ONLY_JSON: &[&str] = &[
    "allOf",
    "not",
    "if",
    "pattern",
    "format",
    "uniqueItems",
    "prefixItems",
    "contains",
    "unevaluatedItems",
    "$dynamicRef",
];

/// Writes the rules for the arguments of tools.
pub(in crate::tools) struct ArgumentGrammar<'a> {
    form: &'a Arguments,
    /// Rules and terminals in Lark.
    pub(in crate::tools) lark: String,
    /// Grammars that the rules refer to.
    pub(in crate::tools) parts: Vec<Part>,
    /// Keywords of strict schemas that are not enforced.
    pub(in crate::tools) refused: Vec<String>,
    /// Number of rules and terminals.
    count: usize,
    /// Names of terminals and rules, by what they are.
    defined: HashMap<String, String>,
    /// Schema of the tool at hand, and whether it is strict.
    root: Value,
    strict: bool,
    members: usize,
    /// Rules of its references.
    references: HashMap<String, String>,
}

impl<'a> ArgumentGrammar<'a> {
    pub(in crate::tools) fn new(form: &'a Arguments) -> Self {
        Self {
            form,
            lark: String::new(),
            parts: Vec::new(),
            refused: Vec::new(),
            count: 0,
            defined: HashMap::new(),
            root: Value::Null,
            strict: false,
            members: 0,
            references: HashMap::new(),
        }
    }

    /// Expression for the arguments of a tool, with the text that ends them.
    pub(in crate::tools) fn of(&mut self, tool: &Tool) -> String {
        self.root = tool.schema();
        self.strict = tool.strict;
        self.members = 0;
        self.references.clear();
        let root = self.root.clone();
        match self.form {
            Arguments::Json => self.part(root),
            Arguments::Listed(form) => self.listed(form, &root),
            Arguments::Gemma => self.gemma_object(&root, MAX_DEPTH),
        }
    }

    /// A terminal. Equal ones have one name.
    fn terminal(&mut self, definition: String) -> String {
        self.define("T", definition)
    }

    fn rule(&mut self, body: String) -> String {
        self.define("r", body)
    }

    fn define(&mut self, prefix: &str, definition: String) -> String {
        let key = format!("{prefix} {definition}");
        if let Some(name) = self.defined.get(&key) {
            return name.clone();
        }
        let name = format!("{prefix}{}", self.count);
        self.count += 1;
        let _ = writeln!(self.lark, "{name}: {definition}");
        self.defined.insert(key, name.clone());
        name
    }

    /// Reference to the grammar of JSON by a schema within the root.
    fn part(&mut self, schema: Value) -> String {
        let schema = self.whole(schema);
        let grammar = match self.strict {
            true => Grammar::JsonSchema(schema),
            false => Grammar::LenientJsonSchema(schema),
        };
        if let Some(part) = self.parts.iter().find(|part| part.grammar == grammar) {
            return format!("@{}", part.name);
        }
        let name = format!("arguments_{}", self.parts.len());
        let reference = format!("@{name}");
        self.parts.push(Part { name, grammar });
        reference
    }

    /// The schema, with the definitions to which it refers.
    fn whole(&self, mut schema: Value) -> Value {
        let Value::Object(members) = &mut schema else {
            return schema;
        };
        for key in ["$defs", "definitions"] {
            let known = self.root.get(key).and_then(Value::as_object);
            let Some(known) = known.filter(|_| !members.contains_key(key)) else {
                continue;
            };
            let mut used = Map::new();
            add_used(&Value::Object(members.clone()), key, known, &mut used);
            if !used.is_empty() {
                members.insert(key.into(), Value::Object(used));
            }
        }
        schema
    }

    /// Notes keywords that are not enforced.
    fn refuse(&mut self, schema: &Value, keywords: &[&str]) {
        let has = |keyword: &&&str| schema.get(**keyword).is_some();
        if !self.strict {
            return;
        }
        for keyword in keywords.iter().filter(has) {
            if !self.refused.iter().any(|known| known == keyword) {
                self.refused.push((*keyword).into());
            }
        }
    }

    /// Members of an object. Beyond [`MAX_MEMBERS`] none has a name.
    fn members_of(&mut self, schema: &Value) -> Members {
        self.refuse(schema, ONLY_JSON_OBJECTS);
        let members = Members::of(schema, &self.root);
        self.members += members.named.len();
        if self.members > MAX_MEMBERS {
            self.refuse(schema, &["properties"]);
        }
        members.limited(self.members)
    }

    /// Rule for a list in which each item is there once, if required, in their order, and then
    /// any number of `others`.
    fn list(&mut self, items: &[(String, bool)], others: Option<String>, between: &str) -> String {
        let between = match between.is_empty() {
            true => String::new(),
            false => text(between),
        };
        let mut firsts = Vec::new();
        let mut rest = String::new();
        if let Some(others) = others {
            rest = self.rule(format!("({between} {others})*"));
            firsts.push(format!("{others} {rest}"));
        }
        let mut may_be_empty = true;
        for (item, required) in items.iter().rev() {
            if *required {
                firsts.clear();
                may_be_empty = false;
            }
            firsts.push(format!("{item} {rest}"));
            let optional = if *required { "" } else { "?" };
            rest = self.rule(format!("({between} {item}){optional} {rest}"));
        }
        if may_be_empty {
            firsts.push("\"\"".into());
        }
        self.rule(firsts.join(" | "))
    }

    fn listed(&mut self, form: &Listed, schema: &Value) -> String {
        self.refuse(schema, &["anyOf", "oneOf"]);
        let members = self.members_of(schema);
        let value: Vec<String> = form.value.iter().map(|part| escape(part)).collect();
        let value = value.join(SPACE);
        let before = format!("{SPACE}{}", escape(form.name));
        let mut items = Vec::new();
        for (name, schema, required) in &members.named {
            let head = self.terminal(format!("/{before}{}{value}/", escape(name)));
            let value = self.listed_value(form, schema);
            items.push((format!("({head} {value})"), *required));
        }
        let others = members.others.as_ref().map(|schema| {
            let name = other_name(&members);
            let head = self.terminal(format!("/{before}/ {name} /{value}/"));
            let value = self.listed_value(form, schema);
            format!("({head} {value})")
        });
        let list = self.list(&items, others, form.between);
        let end = self.terminal(terminal(form.end));
        format!("{list} {end}")
    }

    /// A value, with the text behind it.
    fn listed_value(&mut self, form: &Listed, schema: &Value) -> String {
        let limits = TextLimits::of(schema, &self.root, MAX_DEPTH);
        let kind = Kind::of(schema, &self.root);
        if !form.raw {
            let json = self.part(schema.clone());
            let single = match (kind, limits) {
                (Kind::Text { .. }, Some(limits)) => single_quoted(&limits),
                (Kind::Any(_), _) => single_quoted(&TextLimits::default()),
                _ => None,
            };
            return match single {
                Some(single) => {
                    let single = self.terminal(single);
                    format!("({json} | {single})")
                }
                None => json,
            };
        }
        match (kind, limits) {
            (Kind::Text { .. }, Some(limits)) => {
                let choices = limits.choices.as_ref().map(|choices| {
                    let mut choices: Vec<String> = choices.iter().map(|one| text(one)).collect();
                    choices.extend(limits.nullable.then(|| text("null")));
                    format!("({})", choices.join(" | "))
                });
                let any = choices.unwrap_or_else(|| match limits.nullable {
                    true => format!("({} | \"null\")", characters(&limits)),
                    false => characters(&limits),
                });
                self.raw(form, &any)
            }
            (Kind::Any(_), _) => self.raw(form, &characters(&TextLimits::default())),
            _ => {
                let json = self.part(schema.clone());
                let behind = self.terminal(terminal(form.behind));
                format!("{json} {behind}")
            }
        }
    }

    /// A text without quotes, and the text behind it, as one terminal: the lexer does not go back.
    fn raw(&mut self, form: &Listed, any: &str) -> String {
        let (inside, behind) = (contains(&[form.behind]), text(form.behind));
        self.terminal(format!("({any} & ~{inside}) {behind}"))
    }

    fn gemma_object(&mut self, schema: &Value, depth: usize) -> String {
        let mut members = self.members_of(schema);
        members.named.sort_by_key(|(name, ..)| sort_key(name));
        let mut items = Vec::new();
        for (name, schema, required) in &members.named {
            let value = self.gemma(schema, depth);
            items.push((
                format!("({} {value})", text(&format!("{name}:"))),
                *required,
            ));
        }
        let others = members.others.as_ref().map(|schema| {
            let name = self.terminal(format!("{} \":\"", other_name(&members)));
            let value = self.gemma(schema, depth);
            format!("({name} {value})")
        });
        let list = self.list(&items, others, ",");
        format!("\"{{\" {list} \"}}\"")
    }

    /// A value in Gemma 4's notation.
    fn gemma(&mut self, schema: &Value, depth: usize) -> String {
        let Value::Object(own) = schema else {
            return self.gemma_any();
        };
        if depth == 0 {
            self.refuse(schema, &["properties", "items", "anyOf", "oneOf", "$ref"]);
            return self.gemma_any();
        }
        if let Some(Value::String(reference)) = own.get("$ref") {
            return self.gemma_reference(reference, depth);
        }
        if let Some(values) = listed_values(own).filter(|values| !values.is_empty()) {
            let values: Vec<String> = values.iter().map(|value| text(&gemma(value))).collect();
            return format!("({})", values.join(" | "));
        }
        let types = Types::allowed(schema, &self.root, MAX_DEPTH);
        let either = alternatives(own).filter(|either| !either.is_empty());
        if let Some(either) = either.filter(|_| !own.contains_key("type")) {
            let either: Vec<String> = either
                .iter()
                .map(|one| self.gemma(one, depth - 1))
                .collect();
            return format!("({})", either.join(" | "));
        }
        self.refuse(schema, &["anyOf", "oneOf"]);
        // Few authors of a schema with `properties` and without a type mean anything else.
        let is_object = types == Types::ALL && own.contains_key("properties");
        let types = if is_object { Types::OBJECT } else { types };
        if types == Types::ALL {
            return self.gemma_any();
        }
        self.refuse(schema, ONLY_JSON);
        let mut either = Vec::new();
        if types.has(Types::STRING) {
            let limits = TextLimits {
                least: length(own, "minLength"),
                most: own.get("maxLength").and_then(Value::as_u64),
                ..TextLimits::default()
            };
            either.push(self.gemma_text(&limits));
        }
        if types.has(Types::ARRAY) {
            either.push(self.gemma_list(own, depth));
        }
        if types.has(Types::OBJECT) {
            either.push(self.gemma_object(schema, depth - 1));
        }
        let scalars = [
            (Types::NUMBER, "number"),
            (Types::INTEGER, "integer"),
            (Types::BOOLEAN, "boolean"),
            (Types::NULL, "null"),
        ];
        let scalars = scalars.iter().filter(|(one, _)| types.has(*one));
        let scalars: Vec<&str> = scalars.map(|(_, name)| *name).collect();
        if !scalars.is_empty() {
            let mut schema = json!({"type": scalars});
            for limit in [
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "exclusiveMaximum",
                "multipleOf",
            ] {
                if let Some(value) = own.get(limit) {
                    schema[limit] = value.clone();
                }
            }
            either.push(self.part(schema));
        }
        format!("({})", either.join(" | "))
    }

    /// Rule of a referred schema, which may refer to itself.
    fn gemma_reference(&mut self, reference: &str, depth: usize) -> String {
        if let Some(rule) = self.references.get(reference) {
            return rule.clone();
        }
        let own = Map::from_iter([("$ref".to_owned(), Value::from(reference))]);
        let Some(target) = referred(&own, &self.root).cloned() else {
            self.refuse(&Value::Object(own), &["$ref"]);
            return self.gemma_any();
        };
        let rule = format!("ref{}", self.count);
        self.count += 1;
        self.references.insert(reference.into(), rule.clone());
        let body = self.gemma(&target, depth - 1);
        let _ = writeln!(self.lark, "{rule}: {body}");
        rule
    }

    fn gemma_text(&mut self, limits: &TextLimits) -> String {
        let (quote, any) = (text(QUOTE), characters(limits));
        self.terminal(format!("{quote} ({any} & ~{}) {quote}", contains(&[QUOTE])))
    }

    fn gemma_list(&mut self, own: &Map<String, Value>, depth: usize) -> String {
        let item = match own.get("items") {
            Some(items) => self.gemma(items, depth - 1),
            None => self.gemma_any(),
        };
        let least = length(own, "minItems");
        let most = own.get("maxItems").and_then(Value::as_u64);
        let most = most.filter(|most| *most <= MAX_MEMBERS as u64);
        let least = least.min(MAX_MEMBERS as u64);
        let more = match most {
            Some(0) => return "\"[]\"".into(),
            Some(1) => String::new(),
            Some(most) => format!("(\",\" {item}){{{},{}}}", least.saturating_sub(1), most - 1),
            None => format!("(\",\" {item}){{{},}}", least.saturating_sub(1)),
        };
        let optional = if least == 0 { "?" } else { "" };
        let items = self.rule(format!("({item} {more}){optional}"));
        format!("(\"[\" {items} \"]\")")
    }

    /// Any value.
    fn gemma_any(&mut self) -> String {
        let any = "any_value";
        if self.defined.contains_key(any) {
            return any.into();
        }
        self.defined.insert(any.into(), any.into());
        let string = self.gemma_text(&TextLimits::default());
        let strict = std::mem::replace(&mut self.strict, true);
        let scalar = self.part(json!({"type": ["number", "boolean", "null"]}));
        self.strict = strict;
        let name = self.terminal(format!("/{NAME}:/"));
        let member = self.rule(format!("{name} {any}"));
        let _ = writeln!(
            self.lark,
            "{any}: {string} | {scalar} | \"{{\" ({member} (\",\" {member})*)? \"}}\" | \"[\" ({any} (\",\" {any})*)? \"]\""
        );
        any.into()
    }
}

/// Expression for the name of a member that the schema does not name.
fn other_name(members: &Members) -> String {
    let named: Vec<String> = members.named.iter().map(|(name, ..)| text(name)).collect();
    match named.is_empty() {
        true => format!("/{NAME}/"),
        false => format!("(/{NAME}/ & ~({}))", named.join(" | ")),
    }
}

fn length(members: &Map<String, Value>, keyword: &str) -> u64 {
    members.get(keyword).and_then(Value::as_u64).unwrap_or(0)
}

/// Regular expression of the texts within the limits of a length.
fn characters(limits: &TextLimits) -> String {
    format!("/(?s:.){}/", times(limits))
}

fn times(limits: &TextLimits) -> String {
    match (limits.least, limits.most) {
        (0, None) => "*".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

/// Terminal of a text in single quotes. `None` if such a text would need escapes.
fn single_quoted(limits: &TextLimits) -> Option<String> {
    let Some(choices) = &limits.choices else {
        return Some(format!(r#"/'([^'\\]|\\['"\\nrt]){}'/"#, times(limits)));
    };
    let plain = |text: &&String| !text.contains(['\'', '\\', '\n']);
    let choices = choices.iter().filter(plain);
    let choices: Vec<String> = choices.map(|one| text(&format!("'{one}'"))).collect();
    (!choices.is_empty()).then(|| choices.join(" | "))
}

/// Adds the definitions to which a value refers, and those to which they refer.
fn add_used(value: &Value, key: &str, known: &Map<String, Value>, used: &mut Map<String, Value>) {
    match value {
        Value::Array(items) => items
            .iter()
            .for_each(|item| add_used(item, key, known, used)),
        Value::Object(members) => {
            let reference = members.get("$ref").and_then(Value::as_str);
            let path = reference.and_then(|reference| reference.strip_prefix("#/"));
            let name = path.and_then(|path| path.strip_prefix(key)?.strip_prefix('/'));
            let name = name.map(|name| name.split('/').next().unwrap_or_default());
            if let Some((name, schema)) = name.and_then(|name| known.get_key_value(name))
                && !used.contains_key(name)
            {
                used.insert(name.clone(), schema.clone());
                add_used(schema, key, known, used);
            }
            members
                .values()
                .for_each(|value| add_used(value, key, known, used));
        }
        _ => {}
    }
}
