//! Tools of OpenAI's Responses API: functions, also in namespaces. Pure.
//!
//! Clients put functions of one origin into a namespace, as Codex does with the tools of each MCP
//! server. The model knows such a function by one name, `NAMESPACE__NAME`. The client gets back the
//! two names that it gave.
//!
//! Tools of other types are left out: the model would have to run them here, or to write another
//! form than JSON.

use std::collections::BTreeMap;

use hearthnet_tokens::tools::MAX_TOOLS;
use serde_json::{Value, json};

use super::super::fields::{NO_EFFECT, Rules};
use super::common::function;
use crate::api::fields::{Fields, Refused, unsupported, wrong};
use crate::api::turn;

/// Fields of a function that do not change the answer. Nothing searches for tools here, so a
/// function with `defer_loading` is offered from the beginning.
const IGNORED: &[&str] = &["defer_loading", "output_schema", "allowed_callers"];

/// Namespace of a function and its name there, by the name that the model knows.
#[derive(Debug, Clone, Default)]
pub(super) struct Namespaces(BTreeMap<String, (String, String)>);

impl Namespaces {
    /// Namespace and name of a function for the client.
    pub(super) fn names(&self, known: &str) -> (Option<String>, String) {
        match self.0.get(known) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, known.to_owned()),
        }
    }
}

/// Name by which the model knows a function.
fn known_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}__{name}"),
        None => name.to_owned(),
    }
}

/// Removes `name` and `namespace`. Returns the name by which the model knows the function.
pub(super) fn take_name(fields: &mut Fields) -> Result<String, Refused> {
    let (name, namespace) = (fields.needed("name")?, fields.text("namespace")?);
    Ok(known_name(namespace.as_deref(), &name))
}

/// Translates `tools`, those that items of `input` add, each with its path, and `tool_choice`.
pub(super) fn tools(
    fields: &mut Fields,
    added: Vec<(String, Value)>,
    request: &mut Value,
    rules: Rules,
) -> Result<Namespaces, Refused> {
    let mut reader = Reader {
        rules,
        ..Reader::default()
    };
    for (index, tool) in fields.list("tools")?.into_iter().enumerate() {
        reader.read(&format!("tools[{index}]"), tool, None)?;
    }
    reader.replaces = true;
    for (at, tool) in added {
        reader.read(&at, tool, None)?;
    }
    if let Some(choice) = fields.take("tool_choice") {
        request["tool_choice"] = reader.choice(choice)?;
    }
    if !reader.functions.is_empty() {
        request["tools"] = json!(reader.functions);
    }
    Ok(reader.namespaces)
}

#[derive(Default)]
struct Reader {
    rules: Rules,
    /// Functions in OpenAI's older form.
    functions: Vec<Value>,
    namespaces: Namespaces,
    /// Whether a function replaces an earlier one of its name.
    replaces: bool,
    /// Path of the type of the first tool that is left out.
    left_out: Option<String>,
}

impl Reader {
    /// Reads the tool at the path `at`.
    fn read(&mut self, at: &str, tool: Value, namespace: Option<&str>) -> Result<(), Refused> {
        let mut tool = Fields::object(at, tool)?;
        match (tool.needed("type")?.as_str(), namespace) {
            ("function", _) => self.function(at, tool, namespace),
            ("namespace", None) => {
                let name = tool.needed("name")?;
                tool.text("description")?;
                for (index, inner) in tool.list("tools")?.into_iter().enumerate() {
                    let at = tool.path(&format!("tools[{index}]"));
                    self.read(&at, inner, Some(&name))?;
                }
                tool.nothing_left(&[])
            }
            _ => {
                let at = tool.path("type");
                if self.rules.strict {
                    return Err(unsupported(&at, format!("`{at}` {NO_EFFECT}")));
                }
                self.left_out.get_or_insert(at);
                Ok(())
            }
        }
    }

    fn function(
        &mut self,
        at: &str,
        mut tool: Fields,
        namespace: Option<&str>,
    ) -> Result<(), Refused> {
        let name = tool.needed("name")?;
        let known = known_name(namespace, &name);
        let function = function(&known, &mut tool, "parameters")?;
        // Checked here, where the client's path is known: the list may be shorter than the client's.
        turn::tool(at, function.clone()).map_err(|mut error| {
            let inner = format!("{at}.function");
            error.field = error.field.replace(&inner, at);
            error.problem = error.problem.replace(&inner, at);
            error
        })?;
        let is_same = |other: &Value| other["function"]["name"] == *known;
        if let Some(earlier) = self.functions.iter_mut().find(|other| is_same(other)) {
            if !self.replaces {
                return Err(wrong(&tool.path("name"), "a name that no other tool has"));
            }
            *earlier = function;
        } else if self.functions.len() < MAX_TOOLS {
            self.functions.push(function);
        } else {
            return Err(wrong("tools", &format!("at most {MAX_TOOLS} functions")));
        }
        if let Some(namespace) = namespace {
            let names = (namespace.to_owned(), name);
            self.namespaces.0.insert(known, names);
        }
        tool.nothing_left(self.rules.ignored(IGNORED))
    }

    /// Translates `tool_choice`.
    fn choice(&self, choice: Value) -> Result<Value, Refused> {
        if choice.is_string() {
            return match &self.left_out {
                Some(at) if choice == "required" && self.functions.is_empty() => {
                    let problem = format!(
                        "`{at}`: this server has no tools of its own, so nothing can be called; \
                         describe a function"
                    );
                    Err(unsupported(at, problem))
                }
                _ => Ok(choice),
            };
        }
        let mut choice = Fields::object("tool_choice", choice)?;
        let translated = match choice.needed("type")?.as_str() {
            "function" => named(&mut choice)?,
            "allowed_tools" => {
                let (mode, mut allowed) = (choice.needed("mode")?, Vec::new());
                for (index, tool) in choice.list("tools")?.into_iter().enumerate() {
                    let mut tool = Fields::object(&format!("tool_choice.tools[{index}]"), tool)?;
                    // The others are left out of `tools` as well.
                    if tool.needed("type")? == "function" {
                        allowed.push(named(&mut tool)?);
                    }
                }
                match allowed.is_empty() && mode == "auto" {
                    true => json!("none"),
                    false => {
                        let allowed = json!({"mode": mode, "tools": allowed});
                        json!({"type": "allowed_tools", "allowed_tools": allowed})
                    }
                }
            }
            kind => {
                let kind: String = kind.chars().take(40).collect();
                let problem = format!(
                    "`tool_choice.type` {kind:?} is not supported here: this server has no such \
                     tool; choose a function"
                );
                return Err(unsupported("tool_choice.type", problem));
            }
        };
        choice.nothing_left(&[])?;
        Ok(translated)
    }
}

/// Choice of a function, in OpenAI's older form.
fn named(choice: &mut Fields) -> Result<Value, Refused> {
    let function = json!({"name": take_name(choice)?});
    Ok(json!({"type": "function", "function": function}))
}

#[cfg(test)]
mod tests {
    use super::super::super::fields::tests::{STRICT, refusal};
    use super::*;

    fn read(asked: Value, strict: bool) -> Result<Value, (String, String)> {
        let rules = if strict { STRICT } else { Rules::default() };
        let mut fields = Fields::object("", asked).unwrap();
        let mut request = json!({});
        let read = tools(&mut fields, Vec::new(), &mut request, rules);
        read.map(|_| request)
            .map_err(|refused| refusal::<()>(Err(refused.into())))
    }

    fn function(name: &str) -> Value {
        json!({"type": "function", "name": name})
    }

    /// Functions that the model may call, and the choice.
    fn offered(asked: &Value) -> (Vec<String>, Value) {
        let request = read(asked.clone(), false).unwrap();
        let names = request["tools"].as_array().into_iter().flatten();
        let names = names.map(|tool| tool["function"]["name"].as_str().unwrap().to_owned());
        (names.collect(), request["tool_choice"].clone())
    }

    #[test]
    fn tools_that_this_server_does_not_have_are_left_out_unless_they_must_be_called() {
        let others = [
            json!({"type": "web_search", "external_web_access": false}),
            json!({"type": "web_search_preview"}),
            json!({"type": "custom", "name": "c", "format": {"type": "text"}}),
            json!({"type": "local_shell"}),
            json!({"type": "mcp", "server_label": "l"}),
        ];
        for other in others {
            let kind = &other["type"];
            let inside = json!({"type": "namespace", "name": "n", "tools": [other]});
            let both = json!([function("f"), other, inside]);
            for choice in [json!("auto"), json!("none"), json!("required")] {
                let asked = json!({"tools": both, "tool_choice": choice});
                assert_eq!(offered(&asked), (vec!["f".to_owned()], choice));
            }
            let refused = |asked: Value, strict: bool| read(asked, strict).unwrap_err();
            let is = |param: &str| ("unsupported_parameter".to_owned(), param.to_owned());
            let named = json!({"tools": both, "tool_choice": {"type": kind, "name": "c"}});
            assert_eq!(refused(named, false), is("tool_choice.type"));
            let required = json!({"tools": [other], "tool_choice": "required"});
            assert_eq!(refused(required, false), is("tools[0].type"));
            assert_eq!(refused(json!({"tools": both}), true), is("tools[1].type"));
            let inside = json!({"tools": [inside]});
            assert_eq!(refused(inside, true), is("tools[0].tools[0].type"));
        }
    }

    #[test]
    fn a_choice_of_several_tools_is_passed_on() {
        let tools = json!([function("f"), {"type": "web_search"},
                           {"type": "namespace", "name": "n", "tools": [function("g")]}]);
        let choose = |mode: &str, allowed: Value| {
            let choice = json!({"type": "allowed_tools", "mode": mode, "tools": allowed});
            offered(&json!({"tools": tools, "tool_choice": choice})).1
        };
        let inside = json!({"type": "function", "name": "g", "namespace": "n"});
        let chosen = choose(
            "required",
            json!([function("f"), inside, {"type": "web_search"}]),
        );
        assert_eq!(chosen["allowed_tools"]["mode"], "required");
        let names = &chosen["allowed_tools"]["tools"];
        assert_eq!(names[0]["function"]["name"], "f");
        assert_eq!(names[1]["function"]["name"], "n__g");
        assert_eq!(names.as_array().unwrap().len(), 2);
        assert_eq!(choose("auto", json!([{"type": "web_search"}])), "none");
    }

    #[test]
    fn wrong_functions_are_named_by_the_clients_path() {
        let within = |tool: Value| json!({"type": "namespace", "name": "n", "tools": [tool]});
        for (tools, param) in [
            (json!([function("a b")]), "tools[0].name"),
            (
                json!([within(function(&"x".repeat(126)))]),
                "tools[0].tools[0].name",
            ),
            (json!([function("f"), function("f")]), "tools[1].name"),
            (
                json!([{"type": "web_search"},
                       {"type": "function", "name": "f", "parameters": {"type": "string"}}]),
                "tools[1].parameters",
            ),
            (
                json!([{"type": "function", "name": "f", "x": 1}]),
                "tools[0].x",
            ),
        ] {
            let (_, at) = read(json!({"tools": tools}), false).unwrap_err();
            assert_eq!(at, param);
        }
        let deferred = json!({"type": "function", "name": "f", "defer_loading": true});
        let asked = json!({"tools": [within(deferred)]});
        assert_eq!(offered(&asked).0, ["n__f"]);
        let (_, at) = read(asked, true).unwrap_err();
        assert_eq!(at, "tools[0].tools[0].defer_loading");
    }
}
