//! OpenAI's Responses API: requests to the chat completions, answers back. Pure.

use axum::http::StatusCode;
use hearthnet_http::ApiError;
use serde_json::{Value, json};

use super::super::fields::Rules;
use super::super::reply::Shape;
use super::common::{End, Part, Piece, Stamp, Translated, Translation, set_stream};
use super::response_input::input;
use super::response_tools::{Namespaces, tools};
use crate::api::fields::{Fields, Refused, unsupported, with};

/// Fields that do not change the answer.
const IGNORED: &[&str] = &[
    "include",
    "max_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "client_metadata",
];

/// Fields with another name in the chat completions: that name, and the one here.
const NAMES: &[(&str, &str)] = &[
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("tool_choice.allowed_tools.mode", "tool_choice.mode"),
    ("tool_choice.allowed_tools.tools", "tool_choice.tools"),
];

/// Prefix of the ids of responses.
const PREFIX: &str = "resp_";

/// Translates a request. `earlier` has the messages of the response that a user's request
/// continues, if it is stored: its arguments are the user and the response's id.
pub(in crate::api::http) fn request(
    body: &[u8],
    stamp: Stamp,
    rules: Rules,
    earlier: &dyn Fn(&str, &str) -> Option<Vec<Value>>,
) -> Result<Translated, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut request = json!({});
    let mut echo = echo(&fields);
    fields.move_to(
        &mut request,
        &[
            ("model", "model"),
            ("max_output_tokens", "max_completion_tokens"),
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("parallel_tool_calls", "parallel_tool_calls"),
            ("user", "user"),
            // Not fields of OpenAI's here.
            ("top_k", "top_k"),
            ("min_p", "min_p"),
            ("repetition_penalty", "repetition_penalty"),
            ("seed", "seed"),
            ("stop", "stop"),
            ("exact", "exact"),
            ("truncation", "truncation"),
        ],
    );
    let user = request["user"].as_str().unwrap_or_default();
    let mut conversation = match fields.text("previous_response_id")? {
        None => Vec::new(),
        Some(id) => earlier(user, &id).ok_or_else(|| unknown(&id))?,
    };
    let added = input(&mut fields, &mut conversation)?;
    let mut messages = conversation.clone();
    if let Some(instructions) = fields.text("instructions")? {
        match messages.first_mut() {
            Some(first) if first["role"] == "system" => {
                let rest = first["content"].as_str().unwrap_or_default();
                first["content"] = json!(format!("{instructions}\n{rest}"));
            }
            _ => messages.insert(0, json!({"role": "system", "content": instructions})),
        }
    }
    request["messages"] = json!(messages);
    let namespaces = tools(&mut fields, added, &mut request, rules)?;
    if let Some(mut text) = fields.inner("text")? {
        if let Some(format) = text.inner("format")? {
            request["response_format"] = response_format(format)?;
        }
        text.nothing_left(rules.ignored(&["verbosity"]))?;
    }
    if let Some(mut reasoning) = fields.inner("reasoning")? {
        reasoning.move_to(&mut request, &[("effort", "reasoning_effort")]);
        let ignored = &["summary", "generate_summary", "context"];
        reasoning.nothing_left(rules.ignored(ignored))?;
    }
    for (name, value) in [("background", json!(false)), ("top_logprobs", json!(0))] {
        if fields.take(name).is_some_and(|given| given != value) {
            let problem = format!("`{name}` other than {value} is not supported here");
            return Err(unsupported(name, problem).into());
        }
    }
    fields.take("metadata");
    let store = fields.bool("store")?.unwrap_or(true);
    echo["store"] = json!(store);
    let stream = fields.bool("stream")?.unwrap_or(false);
    set_stream(&mut request, stream);
    fields.nothing_left(rules.ignored(IGNORED))?;
    let stored = store.then_some(conversation);
    Ok(Translated {
        shape: Shape::Chat,
        stops: Vec::new(),
        request,
        names: NAMES,
        translation: Box::new(Responses {
            stamp,
            echo,
            conversation: stored,
            namespaces,
            open: None,
            output: Vec::new(),
            events: 0,
        }),
    })
}

/// Id of the response with this number.
pub(in crate::api::http) fn id(random: u128) -> String {
    format!("{PREFIX}{random:032x}")
}

/// 400: a response that is not stored.
fn unknown(id: &str) -> ApiError {
    let id: String = id.chars().take(100).collect();
    let text = format!(
        "there is no response {id:?} here: responses are kept in memory, for the client that asked; \
         send the conversation in `input`"
    );
    ApiError::new(StatusCode::BAD_REQUEST, "previous_response_not_found", text)
        .about("previous_response_id")
}

/// 404: a response that a client reads or deletes.
pub(in crate::api::http) fn not_kept() -> ApiError {
    let text = "responses cannot be read or deleted here: only their conversations are kept, in \
                memory, for `previous_response_id`; keep the answer to the request";
    ApiError::new(StatusCode::NOT_FOUND, "response_not_found", text)
}

/// Fields of the request that the response repeats.
fn echo(fields: &Fields) -> Value {
    let mut echo = json!({
        "model": "", "instructions": null, "max_output_tokens": null, "metadata": {},
        "parallel_tool_calls": true, "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null}, "store": true, "temperature": null,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": null,
        "truncation": "disabled", "background": false, "user": null,
    });
    if let Value::Object(members) = &mut echo {
        for (name, member) in members {
            if let Some(value) = fields.get(name) {
                *member = value.clone();
            }
        }
    }
    echo
}

/// Translates `text.format`: members of a schema stand beside its type.
fn response_format(mut format: Fields) -> Result<Value, Refused> {
    let kind = format.needed("type")?;
    let mut translated = json!({"type": kind});
    if kind == "json_schema" {
        let mut schema = json!({});
        let names = ["name", "description", "schema", "strict"].map(|name| (name, name));
        format.move_to(&mut schema, &names);
        translated["json_schema"] = schema;
    }
    format.nothing_left(&[])?;
    Ok(translated)
}

/// Item of the output that is being sent.
enum Item {
    Reasoning(String),
    Message(String),
    Call {
        id: String,
        namespace: Option<String>,
        name: String,
        arguments: String,
    },
}

impl Item {
    /// The item in the API's form; without its content if it is not `done`.
    fn value(&self, id: &str, done: bool) -> Value {
        let status = if done { "completed" } else { "in_progress" };
        let content = Vec::from_iter(done.then(|| self.part()));
        match self {
            Self::Reasoning(_) => json!({
                "id": id, "type": "reasoning", "summary": [], "content": content,
                "status": status,
            }),
            Self::Message(_) => json!({
                "id": id, "type": "message", "status": status, "role": "assistant",
                "content": content,
            }),
            Self::Call {
                id: call,
                namespace,
                name,
                arguments,
            } => {
                let mut item = json!({
                    "id": id, "type": "function_call", "status": status, "call_id": call,
                    "name": name, "arguments": arguments,
                });
                if let Some(namespace) = namespace {
                    item["namespace"] = json!(namespace);
                }
                item
            }
        }
    }

    /// Its part of content so far; null for a call.
    fn part(&self) -> Value {
        match self {
            Self::Reasoning(text) => json!({"type": "reasoning_text", "text": text}),
            Self::Message(text) => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
            Self::Call { .. } => Value::Null,
        }
    }

    /// Prefix of ids.
    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning(_) => "rs",
            Self::Message(_) => "msg",
            Self::Call { .. } => "fc",
        }
    }
}

/// Answer of `/v1/responses`.
struct Responses {
    stamp: Stamp,
    /// Fields of the request that the response repeats.
    echo: Value,
    /// Messages before the answer, if it is to be stored.
    conversation: Option<Vec<Value>>,
    namespaces: Namespaces,
    open: Option<Item>,
    /// Complete items.
    output: Vec<Value>,
    /// Events sent so far.
    events: u64,
}

impl Responses {
    fn event(&mut self, kind: &'static str, mut value: Value) -> Part {
        value["sequence_number"] = json!(self.events);
        self.events += 1;
        Part::event(kind, value)
    }

    /// The response so far.
    fn response(&self, status: &str) -> Value {
        let response = json!({
            "id": id(self.stamp.random), "object": "response",
            "created_at": self.stamp.created_ms / 1000, "status": status, "error": null,
            "incomplete_details": null, "output": self.output, "usage": null,
        });
        with(response, self.echo.clone())
    }

    /// The whole response.
    fn ended(&self, end: &End) -> (&'static str, Value) {
        let is_cut = end.reason == "length";
        let (event, status) = match is_cut {
            true => ("response.incomplete", "incomplete"),
            false => ("response.completed", "completed"),
        };
        let mut response = self.response(status);
        if is_cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let ((prompt, cached), completion) = (end.prompt_tokens(), end.completion_tokens());
        let reasoning = &end.usage["completion_tokens_details"]["reasoning_tokens"];
        response["usage"] = json!({
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning.as_u64().unwrap_or_default()},
            "total_tokens": prompt + completion,
        });
        (event, response)
    }

    /// Id of the item that is being sent.
    fn item_id(&self, item: &Item) -> String {
        let (random, index) = (self.stamp.random, self.output.len());
        format!("{}_{random:032x}{index:02}", item.prefix())
    }

    /// Begins an item, after the end of another one.
    fn begin_item(&mut self, item: Item) -> Vec<Part> {
        let mut parts = self.close();
        let (id, index) = (self.item_id(&item), self.output.len());
        let event = json!({"output_index": index, "item": item.value(&id, false)});
        parts.push(self.event("response.output_item.added", event));
        let part = item.part();
        if !part.is_null() {
            let event = json!({
                "item_id": id, "output_index": index, "content_index": 0, "part": part,
            });
            parts.push(self.event("response.content_part.added", event));
        }
        self.open = Some(item);
        parts
    }

    /// Ends the open item.
    fn close(&mut self) -> Vec<Part> {
        let Some(item) = self.open.take() else {
            return Vec::new();
        };
        let (id, index) = (self.item_id(&item), self.output.len());
        let about = json!({"item_id": id, "output_index": index});
        let (kind, more) = match &item {
            Item::Reasoning(text) => (
                "response.reasoning_text.done",
                json!({"content_index": 0, "text": text}),
            ),
            Item::Message(text) => (
                "response.output_text.done",
                json!({"content_index": 0, "text": text, "logprobs": []}),
            ),
            Item::Call {
                name, arguments, ..
            } => (
                "response.function_call_arguments.done",
                json!({"name": name, "arguments": arguments}),
            ),
        };
        let mut parts = vec![self.event(kind, with(about.clone(), more))];
        let part = item.part();
        if !part.is_null() {
            let event = with(about, json!({"content_index": 0, "part": part}));
            parts.push(self.event("response.content_part.done", event));
        }
        let value = item.value(&id, true);
        let event = json!({"output_index": index, "item": value});
        parts.push(self.event("response.output_item.done", event));
        self.output.push(value);
        parts
    }

    /// More of the open item.
    fn delta(&mut self, kind: &'static str, delta: &str) -> Part {
        let id = self.open.as_ref().map(|item| self.item_id(item));
        let mut event = json!({"item_id": id, "output_index": self.output.len(), "delta": delta});
        if !matches!(self.open, Some(Item::Call { .. })) {
            event["content_index"] = json!(0);
        }
        if matches!(self.open, Some(Item::Message(_))) {
            event["logprobs"] = json!([]);
        }
        self.event(kind, event)
    }
}

impl Translation for Responses {
    fn begin(&mut self) -> Vec<Part> {
        let response = json!({"response": self.response("in_progress")});
        vec![
            self.event("response.created", response.clone()),
            self.event("response.in_progress", response),
        ]
    }

    fn piece(&mut self, piece: &Piece) -> Vec<Part> {
        let begin = match (piece, &self.open) {
            (Piece::Reasoning(_), Some(Item::Reasoning(_)))
            | (Piece::Text(_), Some(Item::Message(_)))
            | (Piece::Arguments(_), _) => None,
            (Piece::Reasoning(_), _) => Some(Item::Reasoning(String::new())),
            (Piece::Text(_), _) => Some(Item::Message(String::new())),
            (Piece::Call { id, name }, _) => {
                let (namespace, name) = self.namespaces.names(name);
                Some(Item::Call {
                    id: id.clone(),
                    namespace,
                    name,
                    arguments: String::new(),
                })
            }
        };
        let mut parts = begin.map_or_else(Vec::new, |item| self.begin_item(item));
        let kind = match (piece, &mut self.open) {
            (Piece::Reasoning(text), Some(Item::Reasoning(whole))) => {
                whole.push_str(text);
                Some(("response.reasoning_text.delta", text))
            }
            (Piece::Text(text), Some(Item::Message(whole))) => {
                whole.push_str(text);
                Some(("response.output_text.delta", text))
            }
            (Piece::Arguments(text), Some(Item::Call { arguments, .. })) => {
                arguments.push_str(text);
                Some(("response.function_call_arguments.delta", text))
            }
            _ => None,
        };
        if let Some((kind, text)) = kind {
            parts.push(self.delta(kind, text));
        }
        parts
    }

    fn end(&mut self, end: &End) -> Vec<Part> {
        let mut parts = self.close();
        let (kind, response) = self.ended(end);
        parts.push(self.event(kind, json!({"response": response})));
        parts
    }

    fn failed(&mut self, error: &ApiError) -> Part {
        let mut response = self.response("failed");
        let body = error.body();
        response["error"] =
            json!({"code": body["error"]["code"], "message": body["error"]["message"]});
        self.event("response.failed", json!({"response": response}))
    }

    fn whole(&mut self, end: &End) -> Value {
        let answered = &end.answered;
        let mut pieces = Vec::new();
        if !answered.reasoning.is_empty() {
            pieces.push(Piece::Reasoning(answered.reasoning.clone()));
        }
        if !answered.text.is_empty() {
            pieces.push(Piece::Text(answered.text.clone()));
        }
        for call in &answered.calls {
            pieces.push(Piece::Call {
                id: call.id.clone(),
                name: call.name.clone(),
            });
            pieces.push(Piece::Arguments(call.arguments.clone()));
        }
        for piece in &pieces {
            self.piece(piece);
        }
        self.close();
        self.ended(end).1
    }

    fn conversation(&mut self, end: &End) -> Option<Vec<Value>> {
        let mut messages = self.conversation.take()?;
        messages.push(end.answered.message());
        Some(messages)
    }
}

#[cfg(test)]
#[path = "responses_tests.rs"]
mod tests;
