//! Ollama's `/api/chat` and `/api/generate`: requests to OpenAI's, answers back; requests of
//! `/api/embed`. Pure.

use std::collections::VecDeque;

use hearthnet_http::{ApiError, ErrorFormat};
use hearthnet_tokens::tools::ToolCall;
use serde_json::{Value, json};

use super::super::embeddings::{EmbeddingsRequest, MAX_INPUTS, VectorFormat};
use super::super::fields::Rules;
use super::super::reply::Shape;
use super::common::{End, Part, Piece, Stamp, Translated, Translation, arguments, set_stream};
use super::date::rfc3339;
use crate::api::fields::{Fields, Refused, unsupported, with, wrong};
use crate::chat::Prompt;

/// Options that do not change the answer of this server: they are about memory and processors of
/// Ollama's. The context is always the model's own.
const IGNORED_OPTIONS: &[&str] = &[
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "numa",
    "f16_kv",
    "mirostat_eta",
    "mirostat_tau",
];

/// Fields with another name in OpenAI's API: that name, and Ollama's.
const NAMES: &[(&str, &str)] = &[
    ("max_tokens", "options.num_predict"),
    ("temperature", "options.temperature"),
    ("top_p", "options.top_p"),
    ("top_k", "options.top_k"),
    ("min_p", "options.min_p"),
    ("seed", "options.seed"),
    ("stop", "options.stop"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("presence_penalty", "options.presence_penalty"),
    ("frequency_penalty", "options.frequency_penalty"),
    ("response_format", "format"),
    ("reasoning_effort", "think"),
];

/// Endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::api::http) enum Endpoint {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
}

/// A request after translation.
pub(in crate::api::http) enum Asked {
    Answer(Translated),
    /// A request without a prompt, which loads or unloads a model: the model, and the answer if
    /// it is there.
    Load(String, Value),
}

/// Translates a request.
pub(in crate::api::http) fn request(
    body: &[u8],
    endpoint: Endpoint,
    stamp: Stamp,
    rules: Rules,
) -> Result<Asked, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut request = json!({});
    let model = without_tag(fields.needed("model")?);
    request["model"] = json!(model);
    let stream = fields.bool("stream")?.unwrap_or(true);
    set_stream(&mut request, stream);
    options(&mut fields, &mut request, rules)?;
    format(&mut fields, &mut request)?;
    match fields.take("think") {
        None => {}
        Some(Value::Bool(false)) => request["reasoning_effort"] = json!("none"),
        // Models that reason do so by default.
        Some(Value::Bool(true)) => {}
        Some(effort @ Value::String(_)) => request["reasoning_effort"] = effort,
        Some(_) => return Err(wrong("think", "true, false, or an effort").into()),
    }
    // Not a field of Ollama's.
    fields.move_to(&mut request, &[("exact", "exact")]);
    // The model stays loaded.
    let unloads = matches!(&fields.take("keep_alive"), Some(time) if *time == json!(0));
    let answer = Answer {
        endpoint,
        model: model.clone(),
        created: rfc3339(stamp.created_ms),
        call: None,
    };
    let (shape, is_empty) = match endpoint {
        Endpoint::Chat => (Shape::Chat, chat(&mut fields, &mut request, rules)?),
        Endpoint::Generate => generate(&mut fields, &mut request)?,
    };
    fields.nothing_left(&[])?;
    if is_empty {
        let reason = if unloads { "unload" } else { "load" };
        let mut value = answer.object("", json!({}));
        value["done"] = json!(true);
        value["done_reason"] = json!(reason);
        return Ok(Asked::Load(model, value));
    }
    Ok(Asked::Answer(Translated {
        shape,
        stops: Vec::new(),
        request,
        names: NAMES,
        translation: Box::new(answer),
    }))
}

/// Reads a request of `/api/embed`, or of the older `/api/embeddings`. Without a text it has no
/// inputs, and loads a model.
pub(in crate::api::http) fn embed(
    body: &[u8],
    format: VectorFormat,
    rules: Rules,
) -> Result<EmbeddingsRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = without_tag(fields.needed("model")?);
    // Options of the sampler are read, and have no effect on a vector.
    options(&mut fields, &mut json!({}), rules)?;
    fields.take("keep_alive");
    let (mut truncate, mut dimensions) = (true, None);
    let (field, given) = match format {
        VectorFormat::OlderOllama => ("prompt", fields.text("prompt")?.map(Value::String)),
        _ => {
            truncate = fields.bool("truncate")?.unwrap_or(true);
            dimensions = fields.read("dimensions", "a whole number from 0", |_: &u64| true)?;
            ("input", fields.take("input"))
        }
    };
    let must = format!("a text, or a list of at most {MAX_INPUTS} texts");
    let is_list = matches!(given, Some(Value::Array(_)));
    let texts: Vec<String> = match given {
        None => Vec::new(),
        Some(Value::String(text)) if text.is_empty() => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(list) => serde_json::from_value(list).map_err(|_| wrong(field, &must))?,
    };
    if texts.len() > MAX_INPUTS {
        return Err(wrong(field, &must).into());
    }
    // Not a field of Ollama's.
    let exact = fields.exact()?;
    fields.nothing_left(&[])?;
    let request = EmbeddingsRequest {
        model,
        inputs: texts.into_iter().map(Prompt::Text).collect(),
        field,
        is_list,
        dimensions: dimensions.filter(|asked| *asked != 0),
        truncate,
        exact,
        user: String::new(),
        format,
    };
    request.no_empty_input()?;
    Ok(request)
}

/// Id of the model that a request of `/api/show` names.
pub(in crate::api::http) fn shown(body: &[u8], rules: Rules) -> Result<String, ApiError> {
    let mut fields = Fields::parse(body)?;
    let (model, older) = (fields.text("model")?, fields.text("name")?);
    fields.nothing_left(rules.ignored(&["verbose", "system", "template", "options"]))?;
    let model = model.or(older);
    Ok(without_tag(model.ok_or_else(|| wrong("model", "a text"))?))
}

/// Id of a model without the tag that Ollama's clients add to a name without one.
fn without_tag(model: String) -> String {
    match model.strip_suffix(":latest") {
        Some(name) => name.to_owned(),
        None => model,
    }
}

/// Reads the fields of `/api/chat`. True if there are no messages.
fn chat(fields: &mut Fields, request: &mut Value, rules: Rules) -> Result<bool, Refused> {
    fields.move_to(request, &[("tools", "tools")]);
    let (mut messages, mut calls) = (Vec::new(), Calls::default());
    for (index, value) in fields.list("messages")?.into_iter().enumerate() {
        let at = format!("messages[{index}]");
        messages.push(message(&at, value, &mut calls, rules)?);
    }
    let is_empty = messages.is_empty();
    request["messages"] = json!(messages);
    Ok(is_empty)
}

/// Calls of tools that have no result yet. Ollama's messages have no ids: results follow in the
/// order of the calls.
#[derive(Default)]
struct Calls {
    count: usize,
    open: VecDeque<String>,
}

fn message(at: &str, value: Value, calls: &mut Calls, rules: Rules) -> Result<Value, Refused> {
    let mut fields = Fields::object(at, value)?;
    let role = fields.needed("role")?;
    let content = fields.text("content")?.unwrap_or_default();
    no_images(&mut fields)?;
    let mut message = json!({"role": role, "content": content});
    let mut called = Vec::new();
    for (index, call) in fields.list("tool_calls")?.into_iter().enumerate() {
        let at = format!("{at}.tool_calls[{index}]");
        let mut call = Fields::object(&at, call)?;
        let mut function = call.needed_inner("function", "an object")?;
        let arguments = function.take("arguments").unwrap_or_else(|| json!({}));
        let id = match call.text("id")? {
            Some(id) => id,
            None => format!("call_{}", calls.count),
        };
        calls.count += 1;
        calls.open.push_back(id.clone());
        called.push(ToolCall {
            id,
            name: function.needed("name")?,
            arguments: arguments.to_string(),
        });
    }
    if !called.is_empty() {
        message["tool_calls"] = json!(called);
    }
    if role == "tool" {
        let expected = calls.open.pop_front();
        let id = match fields.text("tool_call_id")? {
            Some(id) => id,
            None => expected.unwrap_or_default(),
        };
        message["tool_call_id"] = json!(id);
    }
    // Reasoning of earlier turns is not part of the prompt, and a result's call names its tool.
    for name in ["thinking", "tool_name"] {
        fields.take(name);
    }
    fields.nothing_left(rules.ignored(&["name"]))?;
    Ok(message)
}

fn no_images(fields: &mut Fields) -> Result<(), Refused> {
    match fields.list("images")?.is_empty() {
        true => Ok(()),
        false => {
            let at = fields.path("images");
            let problem = format!("`{at}` is not supported: this server reads text only");
            Err(unsupported(&at, problem))
        }
    }
}

/// Reads the fields of `/api/generate`. True if there is no prompt.
fn generate(fields: &mut Fields, request: &mut Value) -> Result<(Shape, bool), Refused> {
    no_images(fields)?;
    for name in ["suffix", "template"] {
        if fields.text(name)?.is_some_and(|text| !text.is_empty()) {
            let problem = format!("`{name}` is not supported here; `raw` leaves the template out");
            return Err(unsupported(name, problem));
        }
    }
    if !fields.list("context")?.is_empty() {
        let problem = "`context` is not supported here: send the conversation to /api/chat";
        return Err(unsupported("context", problem));
    }
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let is_empty = prompt.is_empty();
    let system = fields.text("system")?.filter(|system| !system.is_empty());
    if fields.bool("raw")?.unwrap_or(false) {
        if system.is_some() {
            return Err(unsupported(
                "system",
                "`system` and `raw` exclude each other",
            ));
        }
        request["prompt"] = json!(prompt);
        if request.get("max_tokens").is_none() {
            // The default of OpenAI's completions is 16.
            request["max_tokens"] = json!(u32::MAX);
        }
        return Ok((Shape::Text, is_empty));
    }
    let system = system.map(|system| json!({"role": "system", "content": system}));
    let messages: Vec<Value> = system
        .into_iter()
        .chain([json!({"role": "user", "content": prompt})])
        .collect();
    request["messages"] = json!(messages);
    Ok((Shape::Chat, is_empty))
}

/// Reads `options`.
fn options(fields: &mut Fields, request: &mut Value, rules: Rules) -> Result<(), Refused> {
    let Some(mut options) = fields.inner("options")? else {
        return Ok(());
    };
    match options.take("num_predict") {
        None => {}
        // As many as the context holds.
        Some(all) if all == json!(-1) || all == json!(-2) => {}
        Some(most) => request["max_tokens"] = most,
    }
    options.move_to(
        request,
        &[
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("min_p", "min_p"),
            ("seed", "seed"),
            ("repeat_penalty", "repetition_penalty"),
            ("presence_penalty", "presence_penalty"),
            ("frequency_penalty", "frequency_penalty"),
        ],
    );
    match options.take("stop") {
        // Some clients send an empty list.
        Some(stops) if stops == json!([]) => {}
        Some(stops) => request["stop"] = stops,
        None => {}
    }
    // Settings of samplers that this server does not have, where they switch them off. Penalties
    // always count the last 64 tokens.
    for (name, off) in [
        ("mirostat", json!(0)),
        ("typical_p", json!(1.0)),
        ("tfs_z", json!(1.0)),
        ("repeat_last_n", json!(64)),
    ] {
        let value = options.take(name);
        if value.is_some_and(|value| value.as_f64() != off.as_f64()) {
            let at = options.path(name);
            let problem = format!("`{at}` other than {off} is not supported here");
            return Err(unsupported(&at, problem));
        }
    }
    options.nothing_left(rules.ignored(IGNORED_OPTIONS))
}

/// Reads `format`.
fn format(fields: &mut Fields, request: &mut Value) -> Result<(), Refused> {
    let format = match fields.take("format") {
        None => return Ok(()),
        Some(Value::String(text)) if text.is_empty() => return Ok(()),
        Some(Value::String(text)) if text == "json" => json!({"type": "json_object"}),
        Some(schema @ Value::Object(_)) => {
            json!({"type": "json_schema", "json_schema": {"schema": schema}})
        }
        Some(_) => return Err(wrong("format", "\"json\", or a JSON schema")),
    };
    request["response_format"] = format;
    Ok(())
}

/// Answer of either endpoint.
struct Answer {
    endpoint: Endpoint,
    model: String,
    /// Time of the request.
    created: String,
    /// Call whose arguments are arriving. Ollama's objects have whole calls.
    call: Option<ToolCall>,
}

impl Answer {
    /// Object with a piece of text, and other members of the message.
    fn object(&self, text: &str, more: Value) -> Value {
        let mut message = match self.endpoint {
            Endpoint::Chat => {
                let message = json!({"role": "assistant", "content": text});
                json!({"message": with(message, more)})
            }
            Endpoint::Generate => with(json!({"response": text}), more),
        };
        message["done"] = json!(false);
        with(
            json!({"model": self.model, "created_at": self.created}),
            message,
        )
    }

    /// Part with the call whose arguments are complete.
    fn call(&mut self) -> Option<Part> {
        let call = self.call.take()?;
        let object = self.object("", json!({"tool_calls": calls(&[call])}));
        Some(Part::of(&object))
    }

    /// Last object, with more members of its message.
    fn last(&self, text: &str, more: Value, end: &End) -> Value {
        let ns = |ms: f64| (ms * 1e6) as u64;
        let reason = match end.reason.as_str() {
            "length" => "length",
            _ => "stop",
        };
        let (prompt, _) = end.prompt_tokens();
        let about = json!({
            "done": true,
            "done_reason": reason,
            "total_duration": u64::try_from(end.total.as_nanos()).unwrap_or(u64::MAX),
            "load_duration": ns(end.timings.construct_ms),
            "prompt_eval_count": prompt,
            "prompt_eval_duration": ns(end.timings.prefill_ms),
            "eval_count": end.completion_tokens(),
            "eval_duration": ns(end.timings.decode_ms),
        });
        with(self.object(text, more), about)
    }
}

/// Calls in Ollama's form.
fn calls(calls: &[ToolCall]) -> Value {
    let calls = calls.iter().enumerate().map(|(index, call)| {
        let function = json!({"index": index, "name": call.name, "arguments": arguments(call)});
        json!({"id": call.id, "function": function})
    });
    calls.collect()
}

impl Translation for Answer {
    fn begin(&mut self) -> Vec<Part> {
        Vec::new()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<Part> {
        if let (Piece::Arguments(text), Some(call)) = (piece, &mut self.call) {
            call.arguments.push_str(text);
            return Vec::new();
        }
        let mut parts = Vec::from_iter(self.call());
        match piece {
            Piece::Text(text) => parts.push(Part::of(&self.object(text, json!({})))),
            Piece::Reasoning(text) => {
                let object = self.object("", json!({"thinking": text}));
                parts.push(Part::of(&object));
            }
            Piece::Call { id, name } => {
                self.call = Some(ToolCall {
                    id: id.clone(),
                    name: name.clone(),
                    arguments: String::new(),
                });
            }
            Piece::Arguments(_) => {}
        }
        parts
    }

    fn end(&mut self, end: &End) -> Vec<Part> {
        let mut parts = Vec::from_iter(self.call());
        parts.push(Part::of(&self.last("", json!({}), end)));
        parts
    }

    fn failed(&mut self, error: &ApiError) -> Part {
        Part::of(&error.body_in(ErrorFormat::Ollama))
    }

    fn whole(&mut self, end: &End) -> Value {
        let answered = &end.answered;
        let mut more = json!({});
        if !answered.reasoning.is_empty() {
            more["thinking"] = json!(answered.reasoning);
        }
        if !answered.calls.is_empty() {
            more["tool_calls"] = calls(&answered.calls);
        }
        self.last(&answered.text, more, end)
    }
}

#[cfg(test)]
#[path = "ollama_tests.rs"]
mod tests;
