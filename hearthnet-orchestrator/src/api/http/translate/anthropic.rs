//! Anthropic's Messages API: requests to OpenAI's, answers back. Pure.

use axum::http::StatusCode;
use hearthnet_http::{ApiError, ErrorFormat, THREAD_UNSUPPORTED};
use hearthnet_tokens::tools::ToolCall;
use serde_json::{Value, json};

use super::super::fields::Rules;
use super::super::reply::Shape;
use super::common::{
    End, Part, Piece, Stamp, Translated, Translation, add_text, arguments, function, set_stream,
};
use crate::api::fields::{Fields, Refused, unsupported, wrong};

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
        return Err(unsupported("mcp_servers", problem).into());
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
        return Err(wrong("max_tokens", "a whole number, and is needed").into());
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
            return Err(wrong("messages", "a list that is not empty").into());
        }
        Some(Some("assistant")) => {
            let problem = "an answer cannot be begun in `messages`: end with a user's message";
            return Err(unsupported("messages", problem).into());
        }
        Some(_) => {}
    }
    request["messages"] = json!(messages);
    tools(&mut fields, &mut request, &offers, rules)?;
    thinking(&mut fields, &mut request, rules)?;
    if let Some(mut config) = fields.inner("output_config")? {
        if let Some(format) = config.inner("format")? {
            request["response_format"] = output_format(format)?;
        }
        config.move_to(&mut request, &[("effort", "reasoning_effort")]);
        config.nothing_left(&[])?;
    }
    if let Some(format) = fields.inner("output_format")? {
        request["response_format"] = output_format(format)?;
    }
    if let Some(mut metadata) = fields.inner("metadata")? {
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
) -> Result<String, Refused> {
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
fn unread(block: &Fields, kind: &str) -> Refused {
    let (at, kind) = (
        block.path("type"),
        kind.chars().take(40).collect::<String>(),
    );
    let problem = format!(
        "`{at}` {kind:?} is not supported here: this server reads text, and calls of tools and their \
         results"
    );
    unsupported(&at, problem)
}

/// Translates a message into one or several. A system message becomes text of the user: few chat
/// templates take one behind others.
fn message(
    at: &str,
    value: Value,
    conversation: &mut Conversation,
    rules: Rules,
) -> Result<(), Refused> {
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
                calls.push(ToolCall {
                    name: block.needed("name")?,
                    id: block.needed("id")?,
                    arguments: input.to_string(),
                });
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
                let mut tool = block.needed_inner("tool", "an object")?;
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
) -> Result<(), Refused> {
    let mut tools = Vec::new();
    for (index, tool) in fields.list("tools")?.into_iter().enumerate() {
        let mut tool = Fields::object(&format!("tools[{index}]"), tool)?;
        if let Some(kind) = tool.text("type")?
            && kind != "custom"
        {
            let problem = "tools of Anthropic's servers are not supported: describe your own";
            return Err(unsupported(&tool.path("type"), problem));
        }
        let name = tool.needed("name")?;
        let offer = offers.iter().rev().find(|(offered, _)| *offered == name);
        let deferred = tool.bool("defer_loading")? == Some(true);
        let is_offered = offer.map_or(!deferred, |(_, is_offered)| *is_offered);
        let function = function(&name, &mut tool, "input_schema")?;
        tool.nothing_left(rules.ignored(IGNORED_IN_TOOLS))?;
        if is_offered {
            tools.push(function);
        }
    }
    let has_tools = !tools.is_empty();
    if has_tools {
        request["tools"] = json!(tools);
    }
    let Some(mut choice) = fields.inner("tool_choice")? else {
        return Ok(());
    };
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
fn thinking(fields: &mut Fields, request: &mut Value, rules: Rules) -> Result<(), Refused> {
    let Some(mut thinking) = fields.inner("thinking")? else {
        return Ok(());
    };
    match thinking.needed("type")?.as_str() {
        "disabled" => request["reasoning_effort"] = json!("none"),
        "enabled" => thinking.move_to(request, &[("budget_tokens", "thinking_budget")]),
        "adaptive" => {}
        _ => return Err(wrong("thinking.type", "enabled, adaptive or disabled")),
    }
    thinking.nothing_left(rules.ignored(&["budget_tokens", "display"]))
}

/// Translates the format of an answer.
fn output_format(mut format: Fields) -> Result<Value, Refused> {
    if format.needed("type")? != "json_schema" {
        return Err(wrong(&format.path("type"), "json_schema"));
    }
    let schema: Value = format.need("schema", "a JSON schema", |_| true)?;
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
            json!({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments(call)})
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
#[path = "anthropic_tests.rs"]
mod tests;
