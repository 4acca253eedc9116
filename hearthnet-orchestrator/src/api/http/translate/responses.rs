//! OpenAI's Responses API: requests to the chat completions, answers back. Pure.

use axum::http::StatusCode;
use hearthnet_http::ApiError;
use serde_json::{Value, json};

use super::super::fields::Rules;
use super::super::reply::Shape;
use super::common::{
    End, Fields, Part, Piece, Stamp, Translated, Translation, set_stream, unsupported,
};
use super::response_input::input;
use super::response_tools::{Namespaces, tools};

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
    if let Some(text) = fields.take("text") {
        let mut text = Fields::object("text", text)?;
        if let Some(format) = text.take("format") {
            request["response_format"] = response_format(format)?;
        }
        text.nothing_left(rules.ignored(&["verbosity"]))?;
    }
    if let Some(reasoning) = fields.take("reasoning") {
        let mut reasoning = Fields::object("reasoning", reasoning)?;
        reasoning.move_to(&mut request, &[("effort", "reasoning_effort")]);
        let ignored = &["summary", "generate_summary", "context"];
        reasoning.nothing_left(rules.ignored(ignored))?;
    }
    for (name, value) in [("background", json!(false)), ("top_logprobs", json!(0))] {
        if fields.take(name).is_some_and(|given| given != value) {
            let problem = format!("`{name}` other than {value} is not supported here");
            return Err(unsupported(name, &problem));
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
fn response_format(format: Value) -> Result<Value, ApiError> {
    let mut format = Fields::object("text.format", format)?;
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
        let content = || {
            if done {
                json!([self.part()])
            } else {
                json!([])
            }
        };
        match self {
            Self::Reasoning(_) => json!({
                "id": id, "type": "reasoning", "summary": [], "content": content(),
                "status": status,
            }),
            Self::Message(_) => json!({
                "id": id, "type": "message", "status": status, "role": "assistant",
                "content": content(),
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
        let mut response = json!({
            "id": id(self.stamp.random), "object": "response",
            "created_at": self.stamp.created_ms / 1000, "status": status, "error": null,
            "incomplete_details": null, "output": self.output, "usage": null,
        });
        if let Value::Object(echo) = &self.echo {
            for (name, value) in echo {
                response[name] = value.clone();
            }
        }
        response
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
        let with = |more: Value| {
            let mut event = about.clone();
            if let Value::Object(more) = more {
                for (name, value) in more {
                    event[name] = value;
                }
            }
            event
        };
        let mut parts = Vec::new();
        match &item {
            Item::Reasoning(text) => {
                let event = with(json!({"content_index": 0, "text": text}));
                parts.push(self.event("response.reasoning_text.done", event));
            }
            Item::Message(text) => {
                let event = with(json!({"content_index": 0, "text": text, "logprobs": []}));
                parts.push(self.event("response.output_text.done", event));
            }
            Item::Call {
                name, arguments, ..
            } => {
                let event = with(json!({"name": name, "arguments": arguments}));
                parts.push(self.event("response.function_call_arguments.done", event));
            }
        }
        let part = item.part();
        if !part.is_null() {
            let event = with(json!({"content_index": 0, "part": part}));
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
        let mut parts = match begin {
            Some(item) => self.begin_item(item),
            None => Vec::new(),
        };
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
mod tests {
    use super::super::super::request::chat;
    use super::super::common::Answered;
    use super::super::common::tests::{end, stream, text_and_call};
    use super::*;

    fn read(body: Value) -> Result<Translated, ApiError> {
        read_by(Rules::default(), &body)
    }

    fn read_by(rules: Rules, body: &Value) -> Result<Translated, ApiError> {
        let stamp = Stamp {
            random: 1,
            created_ms: 5000,
        };
        let earlier = |user: &str, id: &str| {
            let messages = vec![
                json!({"role": "user", "content": "one"}),
                json!({"role": "assistant", "content": "two"}),
            ];
            (user == "u" && id == "resp_known").then_some(messages)
        };
        request(body.to_string().as_bytes(), stamp, rules, &earlier)
    }

    /// The request with which Codex 0.171.0 begins, without its texts and most of its tools.
    fn codex() -> Value {
        serde_json::from_str(include_str!("../tests/codex_request.json")).unwrap()
    }

    fn translation() -> Box<dyn Translation> {
        read(json!({"model": "m", "input": "hi"}))
            .unwrap()
            .translation
    }

    #[test]
    fn a_request_becomes_a_chat_completion() {
        let asked = read(json!({
            "model": "m", "instructions": "Be short.", "max_output_tokens": 9, "temperature": 0,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "three"}]}],
            "previous_response_id": "resp_known", "user": "u", "metadata": {"a": "b"},
            "text": {"format": {"type": "json_schema", "name": "n", "strict": true,
                                "schema": {"type": "object"}}},
            "store": true, "stream": true, "truncation": "disabled", "include": [],
        }));
        let mut asked = asked.unwrap();
        let schema = json!({"name": "n", "strict": true, "schema": {"type": "object"}});
        assert_eq!(
            asked.request,
            json!({
                "model": "m", "max_completion_tokens": 9, "temperature": 0, "user": "u",
                "messages": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "two"},
                    {"role": "user", "content": "three"},
                ],
                "response_format": {"type": "json_schema", "json_schema": schema},
                "stream": true, "stream_options": {"include_usage": true},
                "truncation": "disabled",
            })
        );
        // Instructions do not carry over to the next response.
        let mut answered = Answered::default();
        answered.add(&Piece::Text("four".into()));
        let conversation = asked
            .translation
            .conversation(&end(answered, "stop"))
            .unwrap();
        let texts: Vec<&str> = conversation
            .iter()
            .filter_map(|message| message["content"].as_str())
            .collect();
        assert_eq!(texts, ["one", "two", "three", "four"]);
    }

    #[test]
    fn a_response_that_is_not_to_be_stored_is_not() {
        let body = json!({"model": "m", "input": "hi", "store": false});
        let mut asked = read(body).unwrap();
        let ended = end(Answered::default(), "stop");
        assert!(asked.translation.conversation(&ended).is_none());
    }

    #[test]
    fn calls_of_functions_and_results_become_messages() {
        let asked = read(json!({
            "model": "m",
            "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"},
                       "strict": true}],
            "tool_choice": {"type": "function", "name": "weather"},
            "input": [
                {"role": "user", "content": "Rome?"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                 "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}]},
                {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather",
                 "arguments": "{\"city\":\"Rome\"}", "status": "completed"},
                {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
            ],
        }));
        let request = asked.unwrap().request;
        let named = json!({"type": "function", "function": {"name": "weather"}});
        assert_eq!(request["tool_choice"], named);
        assert_eq!(request["tools"][0]["function"]["strict"], true);
        let function = json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"});
        assert_eq!(
            request["messages"],
            json!([
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "Let me look.",
                 "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            ])
        );
    }

    #[test]
    fn codex_begins_and_goes_on_behind_a_call_of_a_function_in_a_namespace() {
        let begun = read(codex()).unwrap();
        let names = |request: &Value| -> Vec<String> {
            let tools = request["tools"].as_array().unwrap().iter();
            let names = tools.map(|tool| tool["function"]["name"].as_str().unwrap().to_owned());
            names.collect()
        };
        assert_eq!(
            names(&begun.request),
            [
                "exec_command",
                "multi_agent_v1__close_agent",
                "multi_agent_v1__send_input",
                "mcp__town__get_weather",
                "update_goal",
            ]
        );
        // Most chat templates want one message of each role.
        let messages = json!([
            {"role": "system", "content": "t\ntt"}, {"role": "user", "content": "t\nt"},
        ]);
        assert_eq!(begun.request["messages"], messages);
        let body = begun.request.to_string();
        chat(body.as_bytes(), Rules::default()).unwrap();

        let call = [
            Piece::Call {
                id: "c1".into(),
                name: "mcp__town__get_weather".into(),
            },
            Piece::Arguments("{\"town\": \"Oslo\"}".into()),
        ];
        let mut translation = begun.translation;
        let events = stream(&mut *translation, &call, "tool_calls");
        let (name, event) = &events[events.len() - 2];
        assert_eq!(*name, Some("response.output_item.done"));
        let called = event["item"].clone();
        assert_eq!(called["name"], "get_weather");
        assert_eq!(called["namespace"], "mcp__town");
        // Clients read from here that a turn is over, and what it cost.
        let (name, event) = &events[events.len() - 1];
        assert_eq!(*name, Some("response.completed"));
        assert!(event["response"]["id"].is_string());
        assert_eq!(event["response"]["usage"]["total_tokens"], 27);

        let mut next = codex();
        let items = next["input"].as_array_mut().unwrap();
        items.push(
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [],
                          "encrypted_content": null}),
        );
        items.push(
            json!({"type": "web_search_call", "id": "ws_1", "status": "completed",
                          "action": {"type": "search", "query": "t"}}),
        );
        items.push(called);
        let output = json!([{"type": "input_text", "text": "20 "},
                            {"type": "input_text", "text": "degrees"}]);
        items.push(
            json!({"type": "function_call_output", "id": "fco_1", "call_id": "c1",
                          "output": output}),
        );
        items.push(
            json!({"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch",
                          "input": "t", "status": "completed"}),
        );
        items.push(json!({"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}));
        items.push(json!({"type": "additional_tools", "role": "developer",
                          "tools": [{"type": "function", "name": "more"}]}));
        let next = read(next).unwrap().request;
        assert_eq!(names(&next).last().unwrap(), "more");
        let messages = next["messages"].as_array().unwrap();
        let function = &messages[2]["tool_calls"][0]["function"];
        let named = json!({"name": "mcp__town__get_weather", "arguments": "{\"town\": \"Oslo\"}"});
        assert_eq!(*function, named);
        let result = json!({"role": "tool", "tool_call_id": "c1", "content": "20 degrees"});
        assert_eq!(messages[3], result);
        let patch = &messages[4]["tool_calls"][0]["function"];
        assert_eq!(patch["arguments"], "{\"input\":\"t\"}");
        assert_eq!(messages[5]["content"], "done");
        chat(next.to_string().as_bytes(), Rules::default()).unwrap();
    }

    #[test]
    fn a_strict_server_refuses_what_others_ignore() {
        let strict = Rules {
            strict: true,
            ..Rules::default()
        };
        for (extra, param) in [
            (json!({"include": []}), "include"),
            (
                json!({"reasoning": {"summary": "auto"}}),
                "reasoning.summary",
            ),
            (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        ] {
            let mut body = json!({"model": "m", "input": "hi"});
            for (name, value) in extra.as_object().unwrap() {
                body[name] = value.clone();
            }
            let refused = read_by(strict, &body).err().unwrap().body();
            assert_eq!(refused["error"]["code"], "unsupported_parameter");
            assert_eq!(refused["error"]["param"], param);
            read(body).unwrap();
        }
        // The items of an answer come back.
        let answered = json!([
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [], "status": "completed"},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}]},
            {"role": "user", "content": "hi"},
        ]);
        read_by(strict, &json!({"model": "m", "input": answered})).unwrap();
    }

    #[test]
    fn system_messages_stand_at_the_beginning() {
        let asked = read(json!({
            "model": "m", "instructions": "a",
            "input": [
                {"role": "developer", "content": "b"}, {"role": "system", "content": "c"},
                {"role": "user", "content": "d"}, {"role": "developer", "content": "e"},
                {"role": "assistant", "content": "f"}, {"role": "developer", "content": "g"},
            ],
        }));
        assert_eq!(
            asked.unwrap().request["messages"],
            json!([
                {"role": "system", "content": "a\nb\nc"}, {"role": "user", "content": "d\ne"},
                {"role": "assistant", "content": "f"}, {"role": "user", "content": "g"},
            ])
        );
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (extra, param) in [
            (json!({"input": null}), "input"),
            (
                json!({"input": [{"type": "item_reference", "id": "x"}]}),
                "input[0].type",
            ),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
                "input[0].content[0].type",
            ),
            (
                json!({"input": [{"type": "compaction", "encrypted_content": "x"}]}),
                "input[0].type",
            ),
            (json!({"background": true}), "background"),
            (json!({"conversation": "c"}), "conversation"),
            (
                json!({"previous_response_id": "resp_other"}),
                "previous_response_id",
            ),
            (json!({"temprature": 1}), "temprature"),
        ] {
            let mut body = json!({"model": "m", "input": "hi"});
            for (name, value) in extra.as_object().unwrap() {
                body[name] = value.clone();
            }
            let refused = read(body).err().unwrap().body();
            assert_eq!(refused["error"]["param"], param);
        }
    }

    #[test]
    fn a_stream_has_items_that_begin_and_end() {
        let events = stream(&mut *translation(), &text_and_call(), "tool_calls");
        let names: Vec<&str> = events
            .iter()
            .filter_map(|(name, _)| name.and_then(|name| name.strip_prefix("response.")))
            .collect();
        assert_eq!(
            names.join(" "),
            "created in_progress \
             output_item.added content_part.added output_text.delta output_text.delta \
             output_text.done content_part.done output_item.done \
             output_item.added function_call_arguments.delta function_call_arguments.delta \
             function_call_arguments.done output_item.done completed"
        );
        for (index, (name, event)) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], index);
            assert_eq!(event["type"].as_str(), *name);
        }
        let response = &events[14].1["response"];
        let mut answered = Answered::default();
        for piece in text_and_call() {
            answered.add(&piece);
        }
        // The same object as without a stream.
        assert_eq!(*response, translation().whole(&end(answered, "tool_calls")));
        let text = &response["output"][0]["content"][0]["text"];
        assert_eq!(text, "Let me look.");
        assert_eq!(response["output"][1]["arguments"], "{\"city\":\"Rome\"}");
        assert_eq!(
            response["usage"]["input_tokens_details"]["cached_tokens"],
            5
        );
        assert_eq!(response["created_at"], 5);
    }

    #[test]
    fn an_answer_that_is_cut_is_incomplete() {
        let whole = translation().whole(&end(Answered::default(), "length"));
        assert_eq!(whole["status"], "incomplete");
        let reason = json!({"reason": "max_output_tokens"});
        assert_eq!(whole["incomplete_details"], reason);
    }
}
