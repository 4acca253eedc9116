//! Tools and reasoning of a request, in the fields that clients send: OpenAI's `tools`,
//! `tool_choice`, `parallel_tool_calls` and `reasoning_effort`, OpenRouter's `reasoning`, Qwen's
//! `thinking_budget`, and `chat_template_kwargs` of vLLM and llama.cpp. Pure.

use hearthnet_tokens::tools::{MAX_TOOL_BYTES, MAX_TOOL_NAME, MAX_TOOLS, Tool, ToolChoice, Tools};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::fields::{Fields, Refused, unsupported, wrong};
use crate::chat::TurnOptions;

/// Maximum number of template variables of a request, and the longest name and text of one.
const MAX_VARIABLES: usize = 32;
const MAX_VARIABLE_BYTES: usize = 64;

/// Variables that every chat has.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
];

/// Variables of templates that switch reasoning on and off.
const SWITCHES: &[&str] = &["enable_thinking", "thinking"];

const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Fields of a request about tools and reasoning.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct TurnFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tools: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_choice: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parallel_tool_calls: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_effort: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) thinking_budget: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) chat_template_kwargs: Option<Value>,
}

impl TurnFields {
    /// Fields with the same meaning.
    pub(super) fn of(options: &TurnOptions) -> Self {
        let tools = &options.tools;
        let variables = options.variables.iter().cloned();
        let variables: Map<String, Value> = variables.collect();
        Self {
            tools: (!tools.list.is_empty())
                .then(|| serde_json::to_value(&tools.list).unwrap_or_default()),
            tool_choice: match &tools.choice {
                ToolChoice::Auto => None,
                ToolChoice::None => Some("none".into()),
                ToolChoice::Required => Some("required".into()),
                ToolChoice::Named(name) => {
                    Some(json!({"type": "function", "function": {"name": name}}))
                }
            },
            parallel_tool_calls: tools.one_call.then_some(Value::Bool(false)),
            thinking_budget: options.thinking_tokens.map(Value::from),
            chat_template_kwargs: (!variables.is_empty()).then_some(Value::Object(variables)),
            ..Self::default()
        }
    }

    /// Takes the fields out of a request.
    pub(super) fn take(fields: &mut Fields) -> Self {
        Self {
            tools: fields.take("tools"),
            tool_choice: fields.take("tool_choice"),
            parallel_tool_calls: fields.take("parallel_tool_calls"),
            reasoning_effort: fields.take("reasoning_effort"),
            reasoning: fields.take("reasoning"),
            thinking_budget: fields.take("thinking_budget"),
            chat_template_kwargs: fields.take("chat_template_kwargs"),
        }
    }

    pub(super) fn read(self) -> Result<TurnOptions, Refused> {
        let mut list = self.tools.map_or(Ok(Vec::new()), tools)?;
        let choice = self.tool_choice;
        let choice = choice.map(|choice| tool_choice(choice, &mut list));
        let choice = choice.transpose()?.unwrap_or_default();
        let one_call = match self.parallel_tool_calls {
            None => false,
            Some(Value::Bool(parallel)) => !parallel,
            Some(_) => return Err(wrong("parallel_tool_calls", "true or false")),
        };
        let mut options = TurnOptions {
            tools: Tools {
                // Clients that name a tool expect one call. Small models do not end a list of them.
                one_call: one_call || matches!(choice, ToolChoice::Named(_)),
                choice,
                list,
            },
            ..TurnOptions::default()
        };
        if let Some(given) = self.reasoning {
            reasoning(given, &mut options)?;
        }
        if let Some(given) = self.reasoning_effort {
            effort("reasoning_effort", &given, &mut options)?;
        }
        if let Some(given) = self.thinking_budget {
            options.thinking_tokens = budget("thinking_budget", &given)?;
        }
        if let Some(given) = self.chat_template_kwargs {
            variables(given, &mut options)?;
        }
        Ok(options)
    }
}

fn tools(value: Value) -> Result<Vec<Tool>, Refused> {
    let Value::Array(given) = value else {
        return Err(wrong("tools", "a list of tools"));
    };
    if given.len() > MAX_TOOLS {
        return Err(wrong("tools", &format!("at most {MAX_TOOLS} tools")));
    }
    let mut tools: Vec<Tool> = Vec::new();
    let mut bytes = 0;
    for (index, value) in given.into_iter().enumerate() {
        let at = format!("tools[{index}]");
        let tool = tool(&at, value)?;
        if tools.iter().any(|other| other.name == tool.name) {
            let at = format!("{at}.function.name");
            return Err(wrong(&at, "a name that no other tool has"));
        }
        let schema = tool.parameters.clone().map(Value::Object);
        bytes += schema.map_or(0, |schema| schema.to_string().len());
        tools.push(tool);
    }
    if bytes > MAX_TOOL_BYTES {
        let must = format!("tools whose schemas have at most {MAX_TOOL_BYTES} bytes together");
        return Err(wrong("tools", &must));
    }
    Ok(tools)
}

/// The tool at the path `at`.
pub(super) fn tool(at: &str, value: Value) -> Result<Tool, Refused> {
    let must = "{\"type\": \"function\", \"function\": {\"name\": ...}}";
    let mut given = Fields::object_with(at, value, must)?;
    match given.take("type").as_ref().and_then(Value::as_str) {
        Some("function") => {}
        None => return Err(wrong(at, must)),
        Some(_) => {
            let at = given.path("type");
            let problem = format!("`{at}` must be function: other tools are not supported");
            return Err(unsupported(&at, problem));
        }
    }
    let mut function = given.needed_inner("function", "an object with `name`")?;
    let must = format!("1 to {MAX_TOOL_NAME} letters, digits, `_` and `-`");
    let name = function.need("name", &must, |name: &String| Tool::is_name(name))?;
    let description = function.text("description")?;
    let must = "a JSON schema whose `type` is object";
    let is_object = |schema: &Map<String, Value>| match schema.get("type") {
        None | Some(Value::Null) => true,
        Some(kind) => kind == "object",
    };
    let parameters = function.read("parameters", must, is_object)?;
    let strict = function.bool("strict")?.unwrap_or(false);
    function.nothing_left(&[])?;
    Ok(Tool {
        name,
        description,
        parameters,
        strict,
    })
}

/// Name in a choice of one function.
fn named(choice: &Map<String, Value>) -> Option<&str> {
    choice.get("function")?.get("name")?.as_str()
}

/// Reads `tool_choice`. Tools that it does not allow are removed from the list.
fn tool_choice(value: Value, list: &mut Vec<Tool>) -> Result<ToolChoice, Refused> {
    let at = "tool_choice";
    let must = "none, auto, required, or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    let choice = match value {
        Value::String(word) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(wrong(at, must)),
        },
        Value::Object(given) if given.get("type").is_some_and(|it| it == "allowed_tools") => {
            return allowed_tools(given, list);
        }
        Value::Object(given) => match (given.get("type"), named(&given)) {
            (Some(kind), Some(name)) if kind == "function" => ToolChoice::Named(name.to_owned()),
            (Some(kind), _) if kind == "custom" => {
                let at = "tool_choice.type";
                let problem = format!("`{at}` must be function or allowed_tools");
                return Err(unsupported(at, problem));
            }
            _ => return Err(wrong(at, must)),
        },
        _ => return Err(wrong(at, must)),
    };
    let known = |name: &String| list.iter().any(|tool| tool.name == *name);
    match &choice {
        ToolChoice::Required if list.is_empty() => {
            Err(wrong(at, "none or auto if there are no `tools`"))
        }
        ToolChoice::Named(name) if !known(name) => Err(wrong(at, "the name of one of `tools`")),
        _ => Ok(choice),
    }
}

/// Reads a choice of several tools, and removes the others from the list.
fn allowed_tools(
    mut given: Map<String, Value>,
    list: &mut Vec<Tool>,
) -> Result<ToolChoice, Refused> {
    let at = "tool_choice.allowed_tools";
    let allowed = given.remove("allowed_tools").unwrap_or_default();
    let mut allowed = Fields::object_with(at, allowed, "an object with `mode` and `tools`")?;
    let mode = allowed.take("mode");
    let choice = match mode.as_ref().and_then(Value::as_str) {
        Some("auto") => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        _ => return Err(wrong(&allowed.path("mode"), "auto or required")),
    };
    let tools = allowed.take("tools").unwrap_or_default();
    let tools = tools.as_array().into_iter().flatten();
    let names = tools.map(|tool| tool.as_object().and_then(named));
    let names: Option<Vec<&str>> = names.collect();
    let known = |name: &&str| list.iter().any(|tool| tool.name == *name);
    let names = names.filter(|names| !names.is_empty() && names.iter().all(known));
    let must = "a list of functions of `tools` that is not empty";
    let names = names.ok_or_else(|| wrong(&allowed.path("tools"), must))?;
    list.retain(|tool| names.contains(&tool.name.as_str()));
    allowed.nothing_left(&[])?;
    Ok(choice)
}

/// Sets a variable of the template.
fn set(options: &mut TurnOptions, name: &str, value: Value) {
    options.variables.retain(|(other, _)| other != name);
    options.variables.push((name.to_owned(), value));
}

fn switch(options: &mut TurnOptions, on: bool) {
    for name in SWITCHES {
        set(options, name, on.into());
    }
}

fn effort(at: &str, value: &Value, options: &mut TurnOptions) -> Result<(), Refused> {
    let effort = value.as_str().filter(|effort| EFFORTS.contains(effort));
    let effort = effort.ok_or_else(|| wrong(at, &format!("one of {}", EFFORTS.join(", "))))?;
    switch(options, effort != "none");
    set(options, "reasoning_effort", effort.into());
    Ok(())
}

/// Maximum number of tokens; -1 for no limit.
fn budget(at: &str, value: &Value) -> Result<Option<u32>, Refused> {
    let tokens = value.as_i64().filter(|tokens| *tokens >= -1);
    let must = "a whole number of tokens, or -1 for no limit";
    let tokens = tokens.ok_or_else(|| wrong(at, must))?;
    Ok((tokens >= 0).then(|| u32::try_from(tokens).unwrap_or(u32::MAX)))
}

/// OpenRouter's field.
fn reasoning(value: Value, options: &mut TurnOptions) -> Result<(), Refused> {
    let must = "an object with `effort`, `max_tokens` or `enabled`";
    let mut given = Fields::object_with("reasoning", value, must)?;
    if let Some(on) = given.bool("enabled")? {
        switch(options, on);
    }
    if let Some(value) = given.take("effort") {
        effort(&given.path("effort"), &value, options)?;
    }
    if let Some(value) = given.take("max_tokens") {
        options.thinking_tokens = budget(&given.path("max_tokens"), &value)?;
    }
    given.nothing_left(&[])
}

/// Variables of the chat template. Its control tokens are made of other characters than the texts
/// here, which are not shielded.
fn variables(value: Value, options: &mut TurnOptions) -> Result<(), Refused> {
    let at = "chat_template_kwargs";
    let Value::Object(given) = value else {
        return Err(wrong(at, "an object"));
    };
    if given.len() > MAX_VARIABLES {
        let must = format!("an object with at most {MAX_VARIABLES} members");
        return Err(wrong(at, &must));
    }
    let is_plain = |text: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        text.len() <= MAX_VARIABLE_BYTES && text.chars().all(fits)
    };
    for (name, value) in given {
        if RESERVED.contains(&name.as_str()) || !is_plain(&name) {
            let at: String = format!("{at}.{name}").chars().take(100).collect();
            let problem = format!("`{at}` cannot be set here");
            return Err(unsupported(&at, problem));
        }
        let fits = match &value {
            Value::String(text) => is_plain(text),
            Value::Null | Value::Bool(_) | Value::Number(_) => true,
            Value::Array(_) | Value::Object(_) => false,
        };
        if !fits {
            let must = format!(
                "true, false, a number, or a text of at most {MAX_VARIABLE_BYTES} letters, digits, `_` and `-`"
            );
            return Err(wrong(&format!("{at}.{name}"), &must));
        }
        set(options, &name, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::fields::tests::cases;

    fn read(fields: Value) -> Result<TurnOptions, Refused> {
        let fields: TurnFields = serde_json::from_value(fields).unwrap();
        fields.read()
    }

    fn weather() -> Value {
        json!({"type": "function", "function": {
            "name": "get_weather", "description": "d", "strict": true,
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        }})
    }

    #[test]
    fn tools_and_reasoning_are_read_and_the_same_at_the_other_end() {
        for fields in [
            json!({}),
            json!({"tools": [weather()]}),
            json!({"tools": [weather()], "tool_choice": "required", "parallel_tool_calls": false}),
            json!({"tools": [weather()], "tool_choice": "none"}),
            json!({"tools": [weather()],
                   "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
            json!({"reasoning_effort": "low", "thinking_budget": 100}),
            json!({"reasoning": {"max_tokens": 7, "enabled": false}}),
            json!({"chat_template_kwargs": {"enable_thinking": false, "level": "high", "n": 3}}),
        ] {
            let options = read(fields).unwrap();
            let there = serde_json::to_value(TurnFields::of(&options)).unwrap();
            assert!(read(there).unwrap() == options);
        }
        let named = json!({"type": "function", "function": {"name": "get_weather"}});
        let named = read(json!({"tools": [weather()], "tool_choice": named}));
        assert!(named.unwrap().tools.one_call, "a named tool is called once");
        let options = read(json!({"reasoning_effort": "none"})).unwrap();
        let set = |name: &str| options.variables.iter().find(|(other, _)| other == name);
        assert_eq!(set("enable_thinking").unwrap().1, json!(false));
        assert_eq!(set("reasoning_effort").unwrap().1, json!("none"));
    }

    #[test]
    fn tools_that_the_choice_does_not_allow_are_left_out() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let tools = json!([weather(), named("f"), named("g")]);
        let read = |mode: &str, allowed: Value| {
            let allowed = json!({"mode": mode, "tools": allowed});
            let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
            read(json!({"tools": tools, "tool_choice": choice}))
        };
        let options = read("required", json!([named("g"), named("f")])).unwrap();
        let names: Vec<_> = options.tools.list.iter().map(|tool| &tool.name).collect();
        assert_eq!(names, ["f", "g"]);
        assert_eq!(options.tools.choice, ToolChoice::Required);
        let choice = read("auto", json!([named("f")])).unwrap().tools.choice;
        assert_eq!(choice, ToolChoice::Auto);
        for (mode, allowed, field) in [
            ("none", json!([named("f")]), "mode"),
            ("auto", json!([]), "tools"),
            ("auto", json!([named("h")]), "tools"),
            ("auto", json!([{"type": "image_generation"}]), "tools"),
        ] {
            let refused = read(mode, allowed).unwrap_err();
            assert_eq!(refused.field, format!("tool_choice.allowed_tools.{field}"));
        }
    }

    #[test]
    fn wrong_and_unsupported_values_name_their_field() {
        let named = |name: &str| json!([{"type": "function", "function": {"name": name}}]);
        let many: Vec<Value> = (0..129)
            .map(|n| named(&format!("f{n}"))[0].clone())
            .collect();
        let long = json!({"type": "object", "description": "x".repeat(70_000)});
        for (fields, field, is_unsupported) in cases::<(Value, String, bool)>(json!([
            [{"tools": {}}, "tools", false],
            [{"tools": many}, "tools", false],
            [{"tools": [{"type": "function", "function": {"name": "f", "parameters": long}}]},
             "tools", false],
            [{"tools": [{"type": "web_search"}]}, "tools[0].type", true],
            [{"tools": [{"type": "function"}]}, "tools[0].function", false],
            [{"tools": named("a b")}, "tools[0].function.name", false],
            [{"tools": [weather(), weather()]}, "tools[1].function.name", false],
            [{"tools": [{"type": "function",
                         "function": {"name": "f", "parameters": {"type": "string"}}}]},
             "tools[0].function.parameters", false],
            [{"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
             "tools[0].function.x", true],
            [{"tool_choice": "required"}, "tool_choice", false],
            [{"tool_choice": "sometimes"}, "tool_choice", false],
            [{"tools": named("f"), "tool_choice": {"type": "function", "function": {"name": "g"}}},
             "tool_choice", false],
            [{"tool_choice": {"type": "custom", "custom": {"name": "f"}}},
             "tool_choice.type", true],
            [{"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", false],
            [{"parallel_tool_calls": 1}, "parallel_tool_calls", false],
            [{"reasoning_effort": "huge"}, "reasoning_effort", false],
            [{"thinking_budget": -2}, "thinking_budget", false],
            [{"reasoning": {"summary": "auto"}}, "reasoning.summary", true],
            [{"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", true],
            [{"chat_template_kwargs": {"a": "<|im_end|>"}}, "chat_template_kwargs.a", false],
        ])) {
            let refused = read(fields).unwrap_err();
            let found = (refused.field.as_str(), refused.is_unsupported);
            assert_eq!(found, (field.as_str(), is_unsupported));
            assert!(refused.problem.contains(&field), "{}", refused.problem);
        }
    }
}
