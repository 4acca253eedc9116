//! Ollama's `/api/chat` and `/api/generate`: requests to OpenAI's, answers back; requests of
//! `/api/embed`. Pure.

use std::collections::VecDeque;

use hearthnet_http::{ApiError, ErrorFormat};
use serde_json::{Value, json};

use super::super::embeddings::{EmbeddingsRequest, MAX_INPUTS, VectorFormat};
use super::super::fields::Rules;
use super::super::reply::Shape;
use super::common::{
    End, Fields, Part, Piece, Stamp, ToolCall, Translated, Translation, set_stream, unsupported,
    wrong,
};
use super::date::rfc3339;
use crate::chat::Prompt;
use crate::exact::Exact;

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
        Some(_) => return Err(wrong("think", "true, false, or an effort")),
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
        let mut value = answer.object("", Vec::new());
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
            dimensions = fields.take("dimensions").filter(|value| *value != json!(0));
            ("input", fields.take("input"))
        }
    };
    let dimensions = dimensions.map(|value| {
        let whole = value.as_u64();
        whole.ok_or_else(|| wrong("dimensions", "a whole number from 0"))
    });
    let must = format!("a text, or a list of at most {MAX_INPUTS} texts");
    let is_list = matches!(given, Some(Value::Array(_)));
    let texts: Vec<String> = match given {
        None => Vec::new(),
        Some(Value::String(text)) if text.is_empty() => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(list) => serde_json::from_value(list).map_err(|_| wrong(field, &must))?,
    };
    if texts.len() > MAX_INPUTS {
        return Err(wrong(field, &must));
    }
    // Not a field of Ollama's.
    let exact = fields.take("exact").map(|exact| {
        let names = format!("one of {}", Exact::NAMES.join(", "));
        serde_json::from_value(exact).map_err(|_| wrong("exact", &names))
    });
    fields.nothing_left(&[])?;
    let request = EmbeddingsRequest {
        model,
        inputs: texts.into_iter().map(Prompt::Text).collect(),
        field,
        is_list,
        dimensions: dimensions.transpose()?,
        truncate,
        exact: exact.transpose()?,
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
fn chat(fields: &mut Fields, request: &mut Value, rules: Rules) -> Result<bool, ApiError> {
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

fn message(at: &str, value: Value, calls: &mut Calls, rules: Rules) -> Result<Value, ApiError> {
    let mut fields = Fields::object(at, value)?;
    let role = fields.needed("role")?;
    let content = fields.text("content")?.unwrap_or_default();
    no_images(&mut fields)?;
    let mut message = json!({"role": role, "content": content});
    let mut called = Vec::new();
    for (index, call) in fields.list("tool_calls")?.into_iter().enumerate() {
        let at = format!("{at}.tool_calls[{index}]");
        let mut call = Fields::object(&at, call)?;
        let function = call.take("function").unwrap_or_default();
        let mut function = Fields::object(&format!("{at}.function"), function)?;
        let arguments = function.take("arguments").unwrap_or_else(|| json!({}));
        let id = match call.text("id")? {
            Some(id) => id,
            None => format!("call_{}", calls.count),
        };
        calls.count += 1;
        calls.open.push_back(id.clone());
        let function =
            json!({"name": function.needed("name")?, "arguments": arguments.to_string()});
        called.push(json!({"id": id, "type": "function", "function": function}));
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

fn no_images(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.list("images")?.is_empty() {
        true => Ok(()),
        false => {
            let at = fields.path("images");
            let problem = format!("`{at}` is not supported: this server reads text only");
            Err(unsupported(&at, &problem))
        }
    }
}

/// Reads the fields of `/api/generate`. True if there is no prompt.
fn generate(fields: &mut Fields, request: &mut Value) -> Result<(Shape, bool), ApiError> {
    no_images(fields)?;
    for name in ["suffix", "template"] {
        if fields.text(name)?.is_some_and(|text| !text.is_empty()) {
            let problem = format!("`{name}` is not supported here; `raw` leaves the template out");
            return Err(unsupported(name, &problem));
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
fn options(fields: &mut Fields, request: &mut Value, rules: Rules) -> Result<(), ApiError> {
    let Some(options) = fields.take("options") else {
        return Ok(());
    };
    let mut options = Fields::object("options", options)?;
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
            return Err(unsupported(
                &at,
                &format!("`{at}` other than {off} is not supported here"),
            ));
        }
    }
    options.nothing_left(rules.ignored(IGNORED_OPTIONS))
}

/// Reads `format`.
fn format(fields: &mut Fields, request: &mut Value) -> Result<(), ApiError> {
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
    fn object(&self, text: &str, more: Vec<(&str, Value)>) -> Value {
        let mut object = json!({"model": self.model, "created_at": self.created});
        let message = match self.endpoint {
            Endpoint::Chat => {
                object["message"] = json!({"role": "assistant", "content": text});
                &mut object["message"]
            }
            Endpoint::Generate => {
                object["response"] = json!(text);
                &mut object
            }
        };
        for (name, value) in more {
            message[name] = value;
        }
        object["done"] = json!(false);
        object
    }

    /// Part with the call whose arguments are complete.
    fn call(&mut self) -> Option<Part> {
        let call = self.call.take()?;
        let object = self.object("", vec![("tool_calls", calls(&[call]))]);
        Some(Part::of(&object))
    }

    /// Last object, with more members of its message.
    fn last(&self, text: &str, more: Vec<(&str, Value)>, end: &End) -> Value {
        let ns = |ms: f64| (ms * 1e6) as u64;
        let mut object = self.object(text, more);
        let (prompt, _) = end.prompt_tokens();
        object["done"] = json!(true);
        object["done_reason"] = json!(match end.reason.as_str() {
            "length" => "length",
            _ => "stop",
        });
        object["total_duration"] = json!(u64::try_from(end.total.as_nanos()).unwrap_or(u64::MAX));
        object["load_duration"] = json!(ns(end.timings.construct_ms));
        object["prompt_eval_count"] = json!(prompt);
        object["prompt_eval_duration"] = json!(ns(end.timings.prefill_ms));
        object["eval_count"] = json!(end.completion_tokens());
        object["eval_duration"] = json!(ns(end.timings.decode_ms));
        object
    }
}

/// Calls in Ollama's form.
fn calls(calls: &[ToolCall]) -> Value {
    let calls = calls.iter().enumerate().map(|(index, call)| {
        let function = json!({"index": index, "name": call.name, "arguments": call.input()});
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
            Piece::Text(text) => parts.push(Part::of(&self.object(text, Vec::new()))),
            Piece::Reasoning(text) => {
                let object = self.object("", vec![("thinking", json!(text))]);
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
        parts.push(Part::of(&self.last("", Vec::new(), end)));
        parts
    }

    fn failed(&mut self, error: &ApiError) -> Part {
        Part::of(&error.body_in(ErrorFormat::Ollama))
    }

    fn whole(&mut self, end: &End) -> Value {
        let answered = &end.answered;
        let mut more = Vec::new();
        if !answered.reasoning.is_empty() {
            more.push(("thinking", json!(answered.reasoning)));
        }
        if !answered.calls.is_empty() {
            more.push(("tool_calls", calls(&answered.calls)));
        }
        self.last(&answered.text, more, end)
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::Answered;
    use super::super::common::tests::{end, stream, text_and_call};
    use super::*;

    fn read_by(rules: Rules, endpoint: Endpoint, body: &Value) -> Result<Asked, ApiError> {
        let stamp = Stamp {
            random: 1,
            created_ms: 0,
        };
        request(body.to_string().as_bytes(), endpoint, stamp, rules)
    }

    fn read(endpoint: Endpoint, body: Value) -> Result<Asked, ApiError> {
        read_by(Rules::default(), endpoint, &body)
    }

    fn asked(endpoint: Endpoint, body: Value) -> Translated {
        match read(endpoint, body).unwrap() {
            Asked::Answer(asked) => asked,
            Asked::Load(model, _) => panic!("no prompt for {model}"),
        }
    }

    fn hi() -> Value {
        json!([{"role": "user", "content": "hi"}])
    }

    #[test]
    fn a_chat_becomes_one_of_openais() {
        let asked = asked(
            Endpoint::Chat,
            json!({
                "model": "m:latest", "messages": hi(), "stream": false, "keep_alive": "5m",
                "format": {"type": "object"}, "think": false,
                "options": {"num_predict": 7, "temperature": 0, "top_k": 4, "seed": 5,
                            "stop": ["x"], "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 0},
            }),
        );
        assert_eq!(
            asked.request,
            json!({
                "model": "m", "messages": hi(), "reasoning_effort": "none",
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
                "max_tokens": 7, "temperature": 0, "top_k": 4, "seed": 5, "stop": ["x"],
                "repetition_penalty": 1.1,
            })
        );
    }

    #[test]
    fn a_strict_server_refuses_what_others_ignore() {
        let strict = Rules {
            strict: true,
            ..Rules::default()
        };
        let named = json!([{"role": "user", "content": "hi", "name": "n"}]);
        for (body, param) in [
            (json!({"options": {"num_ctx": 4096}}), "options.num_ctx"),
            (json!({"messages": named}), "messages[0].name"),
        ] {
            let mut asked = json!({"model": "m", "messages": hi()});
            for (name, value) in body.as_object().unwrap() {
                asked[name] = value.clone();
            }
            let refused = read_by(strict, Endpoint::Chat, &asked).err().unwrap();
            assert_eq!(refused.body()["error"]["param"], param);
            read(Endpoint::Chat, asked).unwrap();
        }
        // Results of tools name their tool, and turns their reasoning.
        let turns = json!([{"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "thinking": "t",
             "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "r", "tool_name": "f"}]);
        let asked = json!({"model": "m", "messages": turns, "options": {"temperature": 0}});
        read_by(strict, Endpoint::Chat, &asked).unwrap();
        let embed = |options: Value| {
            let body = json!({"model": "m", "input": "t", "options": options}).to_string();
            embed(body.as_bytes(), VectorFormat::Ollama, strict)
        };
        assert!(embed(json!({"num_ctx": 4096})).is_err());
        embed(json!({"temperature": 0})).unwrap();
        assert!(shown(br#"{"model": "m", "verbose": true}"#, strict).is_err());
    }

    #[test]
    fn a_prompt_is_a_conversation_unless_it_is_raw() {
        let body = |raw: bool| json!({"model": "m", "prompt": "hi", "raw": raw, "format": "json"});
        let chat = asked(Endpoint::Generate, body(false));
        assert_eq!(chat.request["messages"], hi());
        assert_eq!(chat.request["stream"], true);
        let format = json!({"type": "json_object"});
        assert_eq!(chat.request["response_format"], format);
        let raw = asked(Endpoint::Generate, body(true));
        assert_eq!(raw.shape, Shape::Text);
        assert_eq!(raw.request["prompt"], "hi");
        assert_eq!(raw.request["max_tokens"], u32::MAX);
    }

    #[test]
    fn without_a_prompt_a_model_is_loaded() {
        let body = json!({"model": "m", "keep_alive": 0});
        for (endpoint, member) in [
            (Endpoint::Chat, "message"),
            (Endpoint::Generate, "response"),
        ] {
            let Asked::Load(model, value) = read(endpoint, body.clone()).unwrap() else {
                panic!("an answer")
            };
            assert_eq!(
                (model.as_str(), &value["done_reason"]),
                ("m", &json!("unload"))
            );
            assert!(value.get(member).is_some());
        }
    }

    #[test]
    fn results_of_tools_have_the_ids_of_their_calls() {
        let function = json!({"name": "weather", "arguments": {"city": "Rome"}});
        let asked = asked(
            Endpoint::Chat,
            json!({"model": "m", "messages": [
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
                {"role": "tool", "content": "sun", "tool_name": "weather"},
            ]}),
        );
        let messages = &asked.request["messages"];
        assert_eq!(
            messages[1]["tool_calls"][0]["id"],
            messages[2]["tool_call_id"]
        );
        let function = json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"});
        assert_eq!(messages[1]["tool_calls"][0]["function"], function);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (endpoint, extra, param) in [
            (
                Endpoint::Chat,
                json!({"options": {"mirostat": 2}}),
                "options.mirostat",
            ),
            (
                Endpoint::Chat,
                json!({"options": {"heat": 2}}),
                "options.heat",
            ),
            (Endpoint::Chat, json!({"format": "xml"}), "format"),
            (Endpoint::Chat, json!({"think": 5}), "think"),
            (Endpoint::Chat, json!({"prompt": "p"}), "prompt"),
            (Endpoint::Generate, json!({"suffix": "s"}), "suffix"),
            (Endpoint::Generate, json!({"context": [1]}), "context"),
            (Endpoint::Generate, json!({"images": ["x"]}), "images"),
        ] {
            let mut body = json!({"model": "m"});
            for (name, value) in extra.as_object().unwrap() {
                body[name] = value.clone();
            }
            let refused = read(endpoint, body).err().unwrap().body();
            assert_eq!(refused["error"]["param"], param);
        }
    }

    #[test]
    fn texts_to_embed_are_read_and_none_loads_a_model() {
        let read = |format: VectorFormat, mut body: Value| {
            body["model"] = json!("m:latest");
            embed(body.to_string().as_bytes(), format, Rules::default())
        };
        let new = |body: Value| read(VectorFormat::Ollama, body);
        let asked = new(
            json!({"input": ["a", "b"], "truncate": false, "dimensions": 0,
                               "options": {"num_ctx": 8}, "keep_alive": 5}),
        );
        let asked = asked.unwrap();
        assert_eq!((asked.model.as_str(), asked.inputs.len()), ("m", 2));
        assert_eq!((asked.truncate, asked.dimensions), (false, None));
        let asked = read(VectorFormat::OlderOllama, json!({"prompt": "a"})).unwrap();
        assert!(asked.truncate && asked.inputs.len() == 1);
        for nothing in [json!({}), json!({"input": ""}), json!({"input": []})] {
            assert!(new(nothing).unwrap().inputs.is_empty());
        }
        for (body, param) in [
            (json!({"input": ["a", ""]}), "input[1]"),
            (json!({"input": [1]}), "input"),
            (json!({"input": {}}), "input"),
            (json!({"input": vec!["a"; 2049]}), "input"),
            (json!({"input": "a", "dimensions": -1}), "dimensions"),
            (json!({"input": "a", "truncate": 1}), "truncate"),
            (json!({"input": "a", "prompt": "a"}), "prompt"),
        ] {
            let refused = new(body).err().unwrap().body();
            assert_eq!(refused["error"]["param"], param);
        }
        let older = read(VectorFormat::OlderOllama, json!({"prompt": ["a"]}));
        assert_eq!(older.err().unwrap().body()["error"]["param"], "prompt");
    }

    #[test]
    fn a_stream_is_objects_of_which_the_last_has_times() {
        let mut translation = asked(Endpoint::Chat, json!({"model": "m", "messages": hi()}));
        let events = stream(&mut *translation.translation, &text_and_call(), "stop");
        let texts: Vec<&str> = events
            .iter()
            .filter_map(|(_, object)| object["message"]["content"].as_str())
            .collect();
        assert_eq!(texts, ["Let me", " look.", "", ""]);
        let call = &events[2].1["message"]["tool_calls"][0]["function"];
        assert_eq!(call["arguments"], json!({"city": "Rome"}));
        let (_, last) = &events[3];
        assert_eq!(
            (&last["done"], &last["done_reason"]),
            (&json!(true), &json!("stop"))
        );
        assert_eq!(last["total_duration"], 1_500_000_000);
        assert_eq!(
            (&last["prompt_eval_count"], &last["eval_count"]),
            (&json!(20), &json!(7))
        );
        assert_eq!(last["created_at"], "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn an_answer_in_one_piece_has_all_of_it() {
        let mut answered = Answered::default();
        for piece in text_and_call() {
            answered.add(&piece);
        }
        let mut chat = asked(Endpoint::Chat, json!({"model": "m", "messages": hi()}));
        let whole = chat.translation.whole(&end(answered.clone(), "length"));
        assert_eq!(whole["message"]["content"], "Let me look.");
        assert_eq!(whole["done_reason"], "length");
        let mut text = asked(Endpoint::Generate, json!({"model": "m", "prompt": "hi"}));
        let whole = text.translation.whole(&end(answered, "stop"));
        assert_eq!(whole["response"], "Let me look.");
    }
}
