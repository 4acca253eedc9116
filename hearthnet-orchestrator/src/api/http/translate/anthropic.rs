//! Anthropic's Messages API: requests to OpenAI's, answers back. Pure.

use axum::http::StatusCode;
use hearthnet_http::{ApiError, ErrorFormat, THREAD_UNSUPPORTED};
use serde_json::{Value, json};

use super::super::fields::Rules;
use super::super::reply::Shape;
use super::common::{
    End, Fields, Part, Piece, Stamp, Translated, Translation, add_text, function, set_stream,
    unsupported, wrong,
};

/// Fields that do not change the answer.
const IGNORED: &[&str] = &[
    "cache_control",
    "container",
    "context_management",
    "inference_geo",
    "service_tier",
];

/// Fields of a block of content that do not change the answer.
const IGNORED_IN_BLOCKS: &[&str] = &["cache_control", "citations"];

/// Fields of a tool that do not change the answer.
const IGNORED_IN_TOOLS: &[&str] = &[
    "cache_control",
    "input_examples",
    "eager_input_streaming",
    "allowed_callers",
];

/// Fields with another name in OpenAI's API: that name, and Anthropic's.
const NAMES: &[(&str, &str)] = &[
    ("stop", "stop_sequences"),
    ("response_format", "output_config"),
    ("thinking_budget", "thinking.budget_tokens"),
];

/// Purpose of a request: an answer, or the number of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::api::http) enum Purpose {
    /// `/v1/messages`.
    Answer,
    /// `/v1/messages/count_tokens`, which needs no `max_tokens`.
    Count,
}

/// Translates a request.
pub(in crate::api::http) fn request(
    body: &[u8],
    purpose: Purpose,
    stamp: Stamp,
    rules: Rules,
) -> Result<Translated, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut request = json!({});
    if fields.take("thread").is_some() {
        let problem = "threads of messages are not kept here: send the whole conversation";
        let status = StatusCode::BAD_REQUEST;
        return Err(ApiError::new(status, THREAD_UNSUPPORTED, problem).about("thread"));
    }
    if fields
        .take("mcp_servers")
        .is_some_and(|servers| servers != json!([]))
    {
        let problem = "`mcp_servers` is not supported here: this server connects to no others; \
                       connect the client, and describe their tools in `tools`";
        return Err(unsupported("mcp_servers", problem));
    }
    fields.move_to(
        &mut request,
        &[
            ("model", "model"),
            ("max_tokens", "max_tokens"),
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("stop_sequences", "stop"),
            // Not fields of Anthropic's.
            ("seed", "seed"),
            ("exact", "exact"),
        ],
    );
    if purpose == Purpose::Answer && request.get("max_tokens").is_none() {
        return Err(wrong("max_tokens", "a whole number, and is needed"));
    }
    let mut conversation = Conversation::default();
    if let Some(system) = fields.take("system") {
        let content = text("system", system, None, rules)?;
        add_text(&mut conversation.messages, "system", &content);
    }
    for (index, value) in fields.list("messages")?.into_iter().enumerate() {
        let at = format!("messages[{index}]");
        message(&at, value, &mut conversation, rules)?;
    }
    let Conversation { messages, offers } = conversation;
    match messages.last().map(|last| last["role"].as_str()) {
        None | Some(Some("system")) => {
            return Err(wrong("messages", "a list that is not empty"));
        }
        Some(Some("assistant")) => {
            let problem = "an answer cannot be begun in `messages`: end with a user's message";
            return Err(unsupported("messages", problem));
        }
        Some(_) => {}
    }
    request["messages"] = json!(messages);
    tools(&mut fields, &mut request, &offers, rules)?;
    thinking(&mut fields, &mut request, rules)?;
    if let Some(config) = fields.take("output_config") {
        let mut config = Fields::object("output_config", config)?;
        if let Some(format) = config.take("format") {
            request["response_format"] = output_format("output_config.format", format)?;
        }
        config.move_to(&mut request, &[("effort", "reasoning_effort")]);
        config.nothing_left(&[])?;
    }
    if let Some(format) = fields.take("output_format") {
        request["response_format"] = output_format("output_format", format)?;
    }
    if let Some(metadata) = fields.take("metadata") {
        let mut metadata = Fields::object("metadata", metadata)?;
        metadata.move_to(&mut request, &[("user_id", "user")]);
    }
    let stream = fields.bool("stream")?.unwrap_or(false);
    set_stream(&mut request, stream);
    fields.nothing_left(rules.ignored(IGNORED))?;
    let stops = request["stop"].as_array().into_iter().flatten();
    let stops = stops.filter_map(|stop| stop.as_str().map(str::to_owned));
    let model = request["model"].as_str().unwrap_or_default().to_owned();
    Ok(Translated {
        shape: Shape::Chat,
        stops: stops.collect(),
        request,
        names: NAMES,
        translation: Box::new(Messages {
            id: format!("msg_{:032x}", stamp.random),
            model,
            open: None,
            blocks: 0,
        }),
    })
}

/// Messages of a request, translated.
#[derive(Default)]
struct Conversation {
    messages: Vec<Value>,
    offers: Offers,
}

/// Names of tools that messages offer (true) or withdraw (false), in order.
type Offers = Vec<(String, bool)>;

/// Text given as one text, or in blocks. Blocks are separated by a line feed, as Anthropic's models
/// read them apart. With `offers`, blocks may name tools.
fn text(
    at: &str,
    value: Value,
    mut offers: Option<&mut Offers>,
    rules: Rules,
) -> Result<String, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(text),
        Value::Array(blocks) => blocks,
        _ => return Err(wrong(at, "a text, or a list of text blocks")),
    };
    let texts = blocks.into_iter().enumerate().map(|(index, block)| {
        let mut block = Fields::object(&format!("{at}[{index}]"), block)?;
        let text = match (block.needed("type")?.as_str(), &mut offers) {
            ("text", _) => block.needed("text")?,
            ("tool_reference", Some(offers)) => {
                let name = block.needed("tool_name")?;
                let text = format!("The tool {name} can be called now.");
                offers.push((name, true));
                text
            }
            (kind, _) => return Err(unread(&block, kind)),
        };
        block.nothing_left(rules.ignored(IGNORED_IN_BLOCKS))?;
        Ok(text)
    });
    Ok(texts.collect::<Result<Vec<String>, _>>()?.join("\n"))
}

/// Refusal of a block. Anthropic's errors name no field, so the message does.
fn unread(block: &Fields, kind: &str) -> ApiError {
    let (at, kind) = (
        block.path("type"),
        kind.chars().take(40).collect::<String>(),
    );
    let problem = format!(
        "`{at}` {kind:?} is not supported here: this server reads text, and calls of tools and their \
         results"
    );
    unsupported(&at, &problem)
}

/// Translates a message into one or several. A system message becomes text of the user: few chat
/// templates take one behind others.
fn message(
    at: &str,
    value: Value,
    conversation: &mut Conversation,
    rules: Rules,
) -> Result<(), ApiError> {
    let mut fields = Fields::object(at, value)?;
    let role = fields.needed("role")?;
    if !["user", "assistant", "system"].contains(&role.as_str()) {
        return Err(wrong(&fields.path("role"), "user, assistant or system"));
    }
    let Conversation { messages, offers } = conversation;
    let at = fields.path("content");
    let content = fields.take("content");
    fields.nothing_left(&[])?;
    let blocks = match content {
        Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
        Some(Value::Array(blocks)) => blocks,
        _ => return Err(wrong(&at, "a text, or a list of blocks")),
    };
    let (mut texts, mut calls) = (Vec::new(), Vec::new());
    for (index, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::object(&format!("{at}[{index}]"), block)?;
        let kind = block.needed("type")?;
        match (role.as_str(), kind.as_str()) {
            (_, "text") => texts.push(block.needed("text")?),
            ("assistant", "tool_use") => {
                let input = block.take("input").unwrap_or_else(|| json!({}));
                let function =
                    json!({"name": block.needed("name")?, "arguments": input.to_string()});
                calls.push(json!({
                    "id": block.needed("id")?, "type": "function", "function": function,
                }));
            }
            // Reasoning of earlier turns is not part of the prompt.
            ("assistant", "thinking" | "redacted_thinking") => continue,
            ("user", "tool_result") => {
                let at = block.path("content");
                let content = match block.take("content") {
                    Some(content) => text(&at, content, Some(offers), rules)?,
                    None => String::new(),
                };
                // Whether a tool failed is in its words.
                block.bool("is_error")?;
                let id = block.needed("tool_use_id")?;
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            ("system", "tool_addition" | "tool_removal") => {
                let at = block.path("tool");
                let mut tool = Fields::object(&at, block.take("tool").unwrap_or_default())?;
                if tool.needed("type")? != "tool_reference" {
                    let problem = "name a tool of `tools`, as a `tool_reference`";
                    return Err(unsupported(&tool.path("type"), problem));
                }
                offers.push((tool.needed("name")?, kind == "tool_addition"));
                tool.nothing_left(&[])?;
            }
            (_, kind) => return Err(unread(&block, kind)),
        }
        block.nothing_left(rules.ignored(IGNORED_IN_BLOCKS))?;
    }
    let (text, has_text) = (texts.join("\n"), !texts.is_empty());
    if role == "assistant" && (has_text || !calls.is_empty()) {
        let mut message = json!({"role": role, "content": text});
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        messages.push(message);
    } else if has_text {
        // Anthropic's API combines consecutive messages of the user.
        add_text(messages, "user", &text);
    }
    Ok(())
}

/// Translates `tools` and `tool_choice`. A tool with `defer_loading` is left out until a message
/// offers it.
fn tools(
    fields: &mut Fields,
    request: &mut Value,
    offers: &Offers,
    rules: Rules,
) -> Result<(), ApiError> {
    let mut tools = Vec::new();
    for (index, tool) in fields.list("tools")?.into_iter().enumerate() {
        let mut tool = Fields::object(&format!("tools[{index}]"), tool)?;
        if let Some(kind) = tool.text("type")?
            && kind != "custom"
        {
            let problem = "tools of Anthropic's servers are not supported: describe your own";
            return Err(unsupported(&tool.path("type"), problem));
        }
        let (name, description) = (tool.needed("name")?, tool.take("description"));
        let offer = offers.iter().rev().find(|(offered, _)| *offered == name);
        let deferred = tool.bool("defer_loading")? == Some(true);
        let is_offered = offer.map_or(!deferred, |(_, is_offered)| *is_offered);
        let mut function = function(name, description, tool.take("input_schema"));
        if let Some(strict) = tool.bool("strict")? {
            function["function"]["strict"] = json!(strict);
        }
        tool.nothing_left(rules.ignored(IGNORED_IN_TOOLS))?;
        if is_offered {
            tools.push(function);
        }
    }
    let has_tools = !tools.is_empty();
    if has_tools {
        request["tools"] = json!(tools);
    }
    let Some(choice) = fields.take("tool_choice") else {
        return Ok(());
    };
    let mut choice = Fields::object("tool_choice", choice)?;
    request["tool_choice"] = match choice.needed("type")?.as_str() {
        "auto" => json!("auto"),
        "none" => json!("none"),
        "any" => json!("required"),
        "tool" => json!({"type": "function", "function": {"name": choice.needed("name")?}}),
        _ => return Err(wrong("tool_choice.type", "auto, any, tool or none")),
    };
    if choice.bool("disable_parallel_tool_use")? == Some(true) {
        request["parallel_tool_calls"] = json!(false);
    }
    choice.nothing_left(&[])
}

/// Translates `thinking`. Models that reason do so by default, and `adaptive` changes nothing.
fn thinking(fields: &mut Fields, request: &mut Value, rules: Rules) -> Result<(), ApiError> {
    let Some(thinking) = fields.take("thinking") else {
        return Ok(());
    };
    let mut thinking = Fields::object("thinking", thinking)?;
    match thinking.needed("type")?.as_str() {
        "disabled" => request["reasoning_effort"] = json!("none"),
        "enabled" => thinking.move_to(request, &[("budget_tokens", "thinking_budget")]),
        "adaptive" => {}
        _ => return Err(wrong("thinking.type", "enabled, adaptive or disabled")),
    }
    thinking.nothing_left(rules.ignored(&["budget_tokens", "display"]))
}

/// Translates the format of an answer.
fn output_format(at: &str, format: Value) -> Result<Value, ApiError> {
    let mut format = Fields::object(at, format)?;
    if format.needed("type")? != "json_schema" {
        return Err(wrong(&format.path("type"), "json_schema"));
    }
    let schema = format.take("schema");
    let schema = schema.ok_or_else(|| wrong(&format.path("schema"), "a JSON schema"))?;
    format.nothing_left(&[])?;
    Ok(json!({"type": "json_schema", "json_schema": {"schema": schema}}))
}

/// Kind of a block of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

/// Answer of `/v1/messages`.
struct Messages {
    id: String,
    model: String,
    /// Block that is being sent.
    open: Option<Block>,
    /// Number of blocks that have begun.
    blocks: usize,
}

impl Messages {
    /// The message, without what is known at its end only.
    fn message(&self, content: &[Value]) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": null, "stop_sequence": null,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        })
    }

    /// Ends the open block.
    fn close(&mut self) -> Option<Part> {
        let block = self.open.take()?;
        debug_assert!(self.blocks > 0, "{block:?} has begun");
        let index = self.blocks.saturating_sub(1);
        Some(Part::event("content_block_stop", json!({"index": index})))
    }

    /// Begins a block, after the end of another one.
    fn begin_block(&mut self, block: Block, value: Value) -> Vec<Part> {
        let mut parts = Vec::from_iter(self.close());
        let event = json!({"index": self.blocks, "content_block": value});
        parts.push(Part::event("content_block_start", event));
        self.blocks += 1;
        self.open = Some(block);
        parts
    }

    /// More of the open block.
    fn delta(&self, delta: Value) -> Part {
        let index = self.blocks.saturating_sub(1);
        Part::event(
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        )
    }
}

impl Translation for Messages {
    fn begin(&mut self) -> Vec<Part> {
        let started = json!({"message": self.message(&[])});
        vec![
            Part::event("message_start", started),
            Part::event("ping", json!({})),
        ]
    }

    fn piece(&mut self, piece: &Piece) -> Vec<Part> {
        let (block, empty, delta) = match piece {
            Piece::Reasoning(text) => (
                Block::Thinking,
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": text}),
            ),
            Piece::Text(text) => (
                Block::Text,
                json!({"type": "text", "text": ""}),
                json!({"type": "text_delta", "text": text}),
            ),
            Piece::Call { id, name } => {
                let call = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                return self.begin_block(Block::ToolUse, call);
            }
            Piece::Arguments(text) => {
                let delta = json!({"type": "input_json_delta", "partial_json": text});
                return vec![self.delta(delta)];
            }
        };
        let mut parts = match self.open {
            Some(open) if open == block => Vec::new(),
            _ => self.begin_block(block, empty),
        };
        parts.push(self.delta(delta));
        parts
    }

    fn end(&mut self, end: &End) -> Vec<Part> {
        let mut parts = Vec::from_iter(self.close());
        let delta = json!({"stop_reason": stop_reason(end), "stop_sequence": end.stop});
        let event = json!({"delta": delta, "usage": usage(end)});
        parts.push(Part::event("message_delta", event));
        parts.push(Part::event("message_stop", json!({})));
        parts
    }

    fn failed(&mut self, error: &ApiError) -> Part {
        Part::event("error", error.body_in(ErrorFormat::Anthropic))
    }

    fn whole(&mut self, end: &End) -> Value {
        let answered = &end.answered;
        let mut content = Vec::new();
        if !answered.reasoning.is_empty() {
            content.push(json!({
                "type": "thinking", "thinking": answered.reasoning, "signature": "",
            }));
        }
        if !answered.text.is_empty() {
            content.push(json!({"type": "text", "text": answered.text}));
        }
        content.extend(answered.calls.iter().map(|call| {
            json!({"type": "tool_use", "id": call.id, "name": call.name, "input": call.input()})
        }));
        let mut message = self.message(&content);
        message["stop_reason"] = json!(stop_reason(end));
        message["stop_sequence"] = json!(end.stop);
        message["usage"] = usage(end);
        message
    }
}

fn stop_reason(end: &End) -> &'static str {
    match end.reason.as_str() {
        "length" => "max_tokens",
        "tool_calls" => "tool_use",
        _ if end.stop.is_some() => "stop_sequence",
        _ => "end_turn",
    }
}

/// Anthropic counts cached tokens apart from the others.
fn usage(end: &End) -> Value {
    let (prompt, cached) = end.prompt_tokens();
    json!({
        "input_tokens": prompt.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": end.completion_tokens(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::common::Answered;
    use super::super::common::tests::{end, stream, text_and_call};
    use super::*;

    fn read_by(rules: Rules, body: &Value) -> Result<Translated, ApiError> {
        let stamp = Stamp {
            random: 1,
            created_ms: 0,
        };
        request(body.to_string().as_bytes(), Purpose::Answer, stamp, rules)
    }

    fn read(body: Value) -> Result<Translated, ApiError> {
        read_by(Rules::default(), &body)
    }

    fn base(extra: Value) -> Value {
        let mut body = json!({
            "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
        });
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    }

    fn translation() -> Box<dyn Translation> {
        read(base(json!({}))).unwrap().translation
    }

    #[test]
    fn a_request_becomes_one_of_openais() {
        let asked = read(base(json!({
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                       {"type": "text", "text": "b"}],
            "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"], "stream": true,
            "metadata": {"user_id": "u"}, "service_tier": "auto",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        })));
        let asked = asked.unwrap();
        assert_eq!(asked.stops, ["x"]);
        assert_eq!(
            asked.request,
            json!({
                "model": "m", "max_tokens": 9, "temperature": 0.5, "top_k": 3, "stop": ["x"],
                "messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}],
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
                "thinking_budget": 1024,
                "user": "u", "stream": true, "stream_options": {"include_usage": true},
            })
        );
    }

    #[test]
    fn tools_and_their_results_become_openais() {
        let asked = read(base(json!({
            "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true},
            "messages": [
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "call_1",
                     "content": [{"type": "text", "text": "sun"}], "is_error": false},
                    {"type": "text", "text": "Well?"},
                ]},
            ],
        })));
        let request = asked.unwrap().request;
        let named = json!({"type": "function", "function": {"name": "weather"}});
        assert_eq!(request["tool_choice"], named);
        assert_eq!(request["parallel_tool_calls"], false);
        let function =
            json!({"name": "weather", "description": "d", "parameters": {"type": "object"}});
        assert_eq!(
            request["tools"],
            json!([{"type": "function", "function": function}])
        );
        let function = json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"});
        assert_eq!(
            request["messages"],
            json!([
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "Let me look.",
                 "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
                {"role": "user", "content": "Well?"},
            ])
        );
    }

    #[test]
    fn system_messages_continue_the_users_turn_and_offer_tools() {
        let tool = |name: &str, deferred: bool| json!({"name": name, "defer_loading": deferred});
        let named = |name: &str| json!({"type": "tool_reference", "name": name});
        let asked = read(base(json!({
            "tools": [tool("a", false), tool("b", true), tool("c", true), tool("d", true)],
            "messages": [
                {"role": "user", "content": "Rome?"},
                {"role": "system", "content": [{"type": "text", "text": "Today is Monday."}]},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "call_1", "name": "search", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "call_1",
                     "content": [{"type": "tool_reference", "tool_name": "b"}]}]},
                {"role": "system", "content": [
                    {"type": "tool_addition", "tool": named("c")},
                    {"type": "tool_removal", "tool": named("a")}]},
                {"role": "user", "content": "Well?"},
                {"role": "user", "content": "Answer."},
            ],
        })));
        let request = asked.unwrap().request;
        let messages = &request["messages"];
        assert_eq!(messages[0]["content"], "Rome?\nToday is Monday.");
        assert_eq!(messages[2]["content"], "The tool b can be called now.");
        assert_eq!(
            messages[3],
            json!({"role": "user", "content": "Well?\nAnswer."})
        );
        assert_eq!(messages.as_array().map(Vec::len), Some(4));
        let tools = request["tools"].as_array().unwrap();
        let names: Vec<&Value> = tools.iter().map(|tool| &tool["function"]["name"]).collect();
        assert_eq!(names, ["b", "c"]);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let image = json!([{"type": "image", "source": {}}]);
        for (extra, param) in [
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"messages": []}), "messages"),
            (
                json!({"messages": [{"role": "assistant", "content": "Once"}]}),
                "messages",
            ),
            (
                json!({"messages": [{"role": "user", "content": image}]}),
                "messages[0].content[0].type",
            ),
            (
                json!({"messages": [{"role": "tool", "content": "x"}]}),
                "messages[0].role",
            ),
            (json!({"system": 5}), "system"),
            (
                json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
                "tools[0].type",
            ),
            (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
            (json!({"thinking": {"type": "deep"}}), "thinking.type"),
            (json!({"temprature": 1}), "temprature"),
            (json!({"thread": {"type": "create"}}), "thread"),
            (
                json!({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}),
                "mcp_servers",
            ),
        ] {
            let refused = read(base(extra)).err().unwrap().body();
            assert_eq!(refused["error"]["param"], param);
        }
    }

    #[test]
    fn a_strict_server_refuses_what_others_ignore() {
        let cached = json!({"type": "ephemeral"});
        let block = json!({"type": "text", "text": "hi", "cache_control": cached});
        let tool = json!({"name": "f", "cache_control": cached});
        let strict = Rules {
            strict: true,
            ..Rules::default()
        };
        for (extra, param) in [
            (json!({"service_tier": "auto"}), "service_tier"),
            (json!({"cache_control": cached}), "cache_control"),
            (json!({"system": [block]}), "system[0].cache_control"),
            (
                json!({"messages": [{"role": "user", "content": [block]}]}),
                "messages[0].content[0].cache_control",
            ),
            (json!({"tools": [tool]}), "tools[0].cache_control"),
            (
                json!({"thinking": {"type": "adaptive", "display": "omitted"}}),
                "thinking.display",
            ),
        ] {
            let body = base(extra);
            let refused = read_by(strict, &body).err().unwrap().body();
            assert_eq!(refused["error"]["code"], "unsupported_parameter");
            assert_eq!(refused["error"]["param"], param);
            read(body).unwrap();
        }
        read_by(strict, &base(json!({"mcp_servers": []}))).unwrap();
    }

    #[test]
    fn a_stream_has_blocks_that_begin_and_end() {
        let events = stream(&mut *translation(), &text_and_call(), "tool_calls");
        let names: Vec<&str> = events.iter().filter_map(|(name, _)| *name).collect();
        assert_eq!(
            names.join(" "),
            "message_start ping \
             content_block_start content_block_delta content_block_delta content_block_stop \
             content_block_start content_block_delta content_block_delta content_block_stop \
             message_delta message_stop"
        );
        for (name, event) in &events {
            assert_eq!(event["type"].as_str(), *name);
        }
        assert_eq!(events[6].1["index"], 1);
        assert_eq!(events[6].1["content_block"]["name"], "weather");
        let partial = json!({"type": "input_json_delta", "partial_json": "{\"city\":"});
        assert_eq!(events[7].1["delta"], partial);
        let (_, last) = &events[10];
        assert_eq!(last["delta"]["stop_reason"], "tool_use");
        assert_eq!(last["usage"]["input_tokens"], 15);
        assert_eq!(last["usage"]["cache_read_input_tokens"], 5);
        assert_eq!(last["usage"]["output_tokens"], 7);
    }

    #[test]
    fn an_answer_in_one_piece_has_the_same_blocks() {
        let mut answered = Answered::default();
        answered.add(&Piece::Reasoning("Hm.".into()));
        for piece in text_and_call() {
            answered.add(&piece);
        }
        let whole = translation().whole(&end(answered, "tool_calls"));
        assert_eq!(
            whole["content"],
            json!([
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
            ])
        );
        assert_eq!(whole["stop_reason"], "tool_use");
        for (reason, stop, is) in [
            ("stop", None, "end_turn"),
            ("stop", Some("x"), "stop_sequence"),
            ("length", None, "max_tokens"),
        ] {
            let mut end = end(Answered::default(), reason);
            end.stop = stop.map(str::to_owned);
            let whole = translation().whole(&end);
            assert_eq!(whole["stop_reason"], is);
            assert_eq!(whole["stop_sequence"], json!(stop));
            assert_eq!(whole["content"], json!([]));
        }
    }
}
