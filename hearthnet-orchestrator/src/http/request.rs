//! Requests as OpenAI's API has them, checked field by field. Pure.
//!
//! A field that would change the answer and is not supported is refused by name, and so is one
//! that nobody knows: a typo must not pass for a setting. Fields that change nothing
//! about the answer are ignored. `null` is the same as leaving a field out.

use hearthnet_model::sampler::{MAX_LOGPROBS, SamplerConfig, SamplingChoice};
use hearthnet_model::{ChatMessage, Role};
use serde_json::{Map, Value};

use super::error::ApiError;
use crate::chat::{ChatRequest, Prompt};

/// Stop texts that a request may have, as OpenAI has it.
const MAX_STOPS: usize = 4;

/// What `/v1/completions` generates unless told otherwise, as OpenAI has it.
const COMPLETION_TOKENS: u32 = 16;

/// Longest `user` that counts for sharing fairly, in characters.
const MAX_USER: usize = 64;

/// Fields that change nothing about the answer.
const IGNORED: &[&str] = &[
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "prediction",
];

/// The same in a message, where they say something about it and are no part of it.
const IGNORED_IN_MESSAGES: &[&str] = &["name", "refusal", "annotations", "id", "status"];

/// Fields that may be there if they ask for nothing.
const REFUSED: &[&str] = &[
    "tools",
    "functions",
    "function_call",
    "logit_bias",
    "audio",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "suffix",
];

/// A request for an answer.
#[derive(Debug, Clone)]
pub(super) struct ApiRequest {
    /// Id of the model to ask.
    pub(super) model: String,
    /// What to answer. Its sampling is what goes for every model.
    pub(super) chat: ChatRequest,
    /// What the caller chose of the rest.
    pub(super) chosen: SamplingChoice,
    /// Whether the answer is wanted as it comes.
    pub(super) stream: bool,
    /// Whether a stream ends with token counts.
    pub(super) include_usage: bool,
    /// Who asks, as the client tells: for sharing fairly only.
    pub(super) user: Option<String>,
}

/// Reads a request of `/v1/chat/completions`. `seed` is used if the request brings none.
pub(super) fn chat(body: &[u8], seed: u64) -> Result<ApiRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.model()?;
    let messages = fields.take("messages").ok_or_else(|| {
        ApiError::field("messages", "`messages` is missing: the conversation so far")
    })?;
    let messages = conversation(messages)?;
    let max_completion = fields.tokens("max_completion_tokens")?;
    let max_tokens = fields.tokens("max_tokens")?;
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, MAX_LOGPROBS.into())?;
    if top.is_some() && !wanted {
        return Err(ApiError::field(
            "top_logprobs",
            "`top_logprobs` needs `logprobs` to be true",
        ));
    }
    let logprobs = wanted.then(|| top.unwrap_or(0) as u8);
    fields.exactly(
        "response_format",
        |value| value.get("type").and_then(Value::as_str) == Some("text"),
        "`response_format` other than {\"type\": \"text\"} is not supported",
    )?;
    fields.exactly(
        "modalities",
        |value| *value == serde_json::json!(["text"]),
        "this server speaks text only",
    )?;
    fields.exactly(
        "tool_choice",
        |value| matches!(value.as_str(), Some("none" | "auto")),
        "tools are not supported",
    )?;
    let prompt = Prompt::Messages(messages);
    // Without a limit the answer may fill the model's context.
    let most = max_completion.or(max_tokens);
    fields.finish(model, prompt, most, logprobs, seed)
}

/// Reads a request of `/v1/completions`. `seed` is used if the request brings none.
pub(super) fn completion(body: &[u8], seed: u64) -> Result<ApiRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.model()?;
    let prompt = fields
        .take("prompt")
        .ok_or_else(|| ApiError::field("prompt", "`prompt` is missing: the text to continue"))?;
    let prompt = text_or_tokens(prompt)?;
    let most = Some(fields.tokens("max_tokens")?.unwrap_or(COMPLETION_TOKENS));
    // OpenAI's limit is 5; ours is the sampler's.
    let logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS.into())?;
    let off = |value: &Value| *value == Value::Bool(false);
    let echo = "`echo` is not supported: put the prompt in front of the answer yourself";
    fields.exactly("echo", off, echo)?;
    let one = |value: &Value| value.as_u64() == Some(1);
    fields.exactly("best_of", one, "`best_of` other than 1 is not supported")?;
    fields.finish(model, prompt, most, logprobs.map(|n| n as u8), seed)
}

/// What is left of a request's fields.
struct Fields(Map<String, Value>);

impl Fields {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|e| ApiError::request("invalid_json", format!("the body is not JSON: {e}")))?;
        match value {
            Value::Object(fields) => Ok(Self(fields)),
            _ => Err(ApiError::request(
                "invalid_json",
                "the body must be a JSON object",
            )),
        }
    }

    /// A field that is there and not null.
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn model(&mut self) -> Result<String, ApiError> {
        match self.take("model") {
            Some(Value::String(model)) => Ok(model),
            _ => Err(ApiError::field(
                "model",
                "`model` must name a model; GET /v1/models lists them",
            )),
        }
    }

    fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(ApiError::field(
                name,
                format!("`{name}` must be true or false"),
            )),
        }
    }

    fn integer(&mut self, name: &str, min: u64, max: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let whole = value.as_u64().filter(|n| (min..=max).contains(n));
        whole.map(Some).ok_or_else(|| {
            let message = format!("`{name}` must be a whole number from {min} to {max}");
            ApiError::field(name, message)
        })
    }

    fn tokens(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        // More than any context is no more than the context.
        let most = self.integer(name, 1, u64::MAX)?;
        Ok(most.map(|n| u32::try_from(n).unwrap_or(u32::MAX)))
    }

    fn number(&mut self, name: &str, min: f64, max: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|x| (min..=max).contains(x));
        number.map(|x| Some(x as f32)).ok_or_else(|| {
            ApiError::field(
                name,
                format!("`{name}` must be a number from {min} to {max}"),
            )
        })
    }

    /// A field that has one meaning here: anything else is refused.
    fn exactly(
        &mut self,
        name: &str,
        is: impl FnOnce(&Value) -> bool,
        message: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is(&value) => Err(ApiError::unsupported(name, message)),
            _ => Ok(()),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        let wrong = || {
            let message =
                format!("`stop` must be a text, or a list of at most {MAX_STOPS}, none empty");
            ApiError::field("stop", message)
        };
        let stops = match self.take("stop") {
            None => Vec::new(),
            Some(Value::String(stop)) => vec![stop],
            Some(Value::Array(stops)) => stops
                .into_iter()
                .map(|stop| match stop {
                    Value::String(stop) => Ok(stop),
                    _ => Err(wrong()),
                })
                .collect::<Result<_, _>>()?,
            Some(_) => return Err(wrong()),
        };
        if stops.len() > MAX_STOPS || stops.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(stops)
    }

    /// What both kinds of request have; nothing that matters may be left over.
    fn finish(
        mut self,
        model: String,
        prompt: Prompt,
        max_tokens: Option<u32>,
        logprobs: Option<u8>,
        seed: u64,
    ) -> Result<ApiRequest, ApiError> {
        let one = |value: &Value| value.as_u64() == Some(1);
        self.exactly(
            "n",
            one,
            "`n` other than 1 is not supported: ask again for another answer",
        )?;
        let stream = self.bool("stream")?.unwrap_or(false);
        let include_usage = self.stream_options(stream)?;
        let own_seed = match self.take("seed") {
            None => None,
            // OpenAI's seeds are signed; the bits are what counts.
            Some(value) => Some(
                value
                    .as_u64()
                    .or_else(|| value.as_i64().map(i64::cast_unsigned))
                    .ok_or_else(|| ApiError::field("seed", "`seed` must be a whole number"))?,
            ),
        };
        let user = match self.take("user") {
            None => None,
            Some(Value::String(user)) => Some(user.chars().take(MAX_USER).collect()),
            Some(_) => return Err(ApiError::field("user", "`user` must be a text")),
        };
        let chosen = SamplingChoice {
            temperature: self.number("temperature", 0.0, 2.0)?,
            top_p: self.number("top_p", 0.0, 1.0)?,
            presence_penalty: self.number("presence_penalty", -2.0, 2.0)?,
            frequency_penalty: self.number("frequency_penalty", -2.0, 2.0)?,
            // As vLLM and llama.cpp name them.
            top_k: self
                .integer("top_k", 0, u32::MAX.into())?
                .map(|k| u32::try_from(k).unwrap_or(0)),
            min_p: self.number("min_p", 0.0, 1.0)?,
            repetition_penalty: self.number("repetition_penalty", 0.0625, 16.0)?,
        };
        let sampling = SamplerConfig {
            seed: Some(own_seed.unwrap_or(seed)),
            logprobs,
            ..SamplerConfig::default()
        };
        let stop = self.stop()?;
        for name in REFUSED {
            let empty = |value: &Value| match value {
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::String(text) => text.is_empty() || text == "none",
                _ => false,
            };
            self.exactly(name, empty, &format!("`{name}` is not supported here"))?;
        }
        let unknown = |(name, value): &(&String, &Value)| {
            !value.is_null() && !IGNORED.contains(&name.as_str())
        };
        if let Some((name, _)) = self.0.iter().find(unknown) {
            let name: String = name.chars().take(100).collect();
            let message = format!("`{name}` is not a field of this request");
            return Err(ApiError::unsupported(&name, message));
        }
        Ok(ApiRequest {
            model,
            chat: ChatRequest {
                prompt,
                sampling,
                max_tokens,
                stop,
            },
            chosen,
            stream,
            include_usage,
            user,
        })
    }

    fn stream_options(&mut self, stream: bool) -> Result<bool, ApiError> {
        let wrong = |message: &str| ApiError::field("stream_options", message);
        let mut options = match self.take("stream_options") {
            None => return Ok(false),
            Some(_) if !stream => {
                return Err(wrong("`stream_options` needs `stream` to be true"));
            }
            Some(Value::Object(options)) => Self(options),
            Some(_) => return Err(wrong("`stream_options` must be an object")),
        };
        let usage = options.bool("include_usage")?.unwrap_or(false);
        // Padding against eavesdroppers, which changes nothing about the answer.
        options.bool("include_obfuscation")?;
        match options.0.is_empty() {
            true => Ok(usage),
            false => Err(wrong("`stream_options` knows `include_usage` only")),
        }
    }
}

fn conversation(messages: Value) -> Result<Vec<ChatMessage>, ApiError> {
    let messages = match messages {
        Value::Array(messages) if !messages.is_empty() => messages,
        _ => {
            return Err(ApiError::field(
                "messages",
                "`messages` must be a list that is not empty",
            ));
        }
    };
    messages
        .into_iter()
        .enumerate()
        .map(|(index, value)| message(&format!("messages[{index}]"), value))
        .collect()
}

fn message(at: &str, value: Value) -> Result<ChatMessage, ApiError> {
    let Value::Object(fields) = value else {
        return Err(ApiError::field(at, format!("`{at}` must be an object")));
    };
    let mut fields = Fields(fields);
    let role = match fields.take("role").as_ref().and_then(Value::as_str) {
        // What OpenAI's newer models call their instructions.
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool" | "function") => {
            let at = format!("{at}.role");
            return Err(ApiError::unsupported(&at, "tools are not supported here"));
        }
        _ => {
            let message = format!("`{at}.role` must be system, developer, user or assistant");
            return Err(ApiError::field(&format!("{at}.role"), message));
        }
    };
    let content = content(&format!("{at}.content"), fields.take("content"))?;
    for (name, value) in &fields.0 {
        let empty = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
        if !empty && !IGNORED_IN_MESSAGES.contains(&name.as_str()) {
            let name: String = name.chars().take(100).collect();
            let message = format!("`{at}.{name}` is not supported here");
            return Err(ApiError::unsupported(&format!("{at}.{name}"), message));
        }
    }
    Ok(ChatMessage::new(role, content))
}

/// A message's text: as it stands, or in parts.
fn content(at: &str, value: Option<Value>) -> Result<String, ApiError> {
    let parts = match value {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        _ => {
            let message = format!("`{at}` must be a text, or a list of text parts");
            return Err(ApiError::field(at, message));
        }
    };
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str);
        match (kind, part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(part)) => text.push_str(part),
            (Some("text") | None, _) => {
                let at = format!("{at}[{index}]");
                let message = format!("`{at}` must be {{\"type\": \"text\", \"text\": ...}}");
                return Err(ApiError::field(&at, message));
            }
            (Some(_), _) => {
                let at = format!("{at}[{index}].type");
                return Err(ApiError::unsupported(&at, "this server reads text only"));
            }
        }
    }
    Ok(text)
}

/// The prompt of a completion: a text, tokens, or one of either in a list.
fn text_or_tokens(value: Value) -> Result<Prompt, ApiError> {
    let wrong = || {
        let message = "`prompt` must be one text, or one list of token ids; ask for each prompt \
                       by itself";
        ApiError::field("prompt", message)
    };
    let mut list = match value {
        Value::String(text) => return Ok(Prompt::Text(text)),
        Value::Array(list) => list,
        _ => return Err(wrong()),
    };
    if list.len() == 1 && !list.iter().any(Value::is_number) {
        return match list.pop() {
            Some(Value::String(text)) => Ok(Prompt::Text(text)),
            Some(Value::Array(ids)) => tokens(&ids).ok_or_else(wrong),
            _ => Err(wrong()),
        };
    }
    tokens(&list).ok_or_else(wrong)
}

fn tokens(ids: &[Value]) -> Option<Prompt> {
    let ids = ids
        .iter()
        .map(|id| u32::try_from(id.as_u64()?).ok())
        .collect::<Option<Vec<u32>>>()?;
    (!ids.is_empty()).then_some(Prompt::Tokens(ids))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn base() -> Value {
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    }

    fn with(extra: Value) -> Result<ApiRequest, ApiError> {
        let mut body = base();
        let (Value::Object(body_map), Value::Object(extra)) = (&mut body, extra) else {
            unreachable!()
        };
        body_map.extend(extra);
        chat(body.to_string().as_bytes(), 99)
    }

    /// Code and param of a refusal.
    fn refusal(result: Result<ApiRequest, ApiError>) -> (String, String) {
        let body = result.expect_err("a refusal").body();
        let text = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
        assert_eq!(body["error"]["type"], "invalid_request_error");
        (text("code"), text("param"))
    }

    #[test]
    fn defaults_are_openais_and_the_models() {
        let request = with(json!({"top_k": null})).unwrap();
        assert!(request.chosen.is_empty());
        let s = &request.chat.sampling;
        assert_eq!((s.seed, s.logprobs), (Some(99), None));
        assert!(!request.stream && !request.include_usage);
        assert_eq!(request.chat.max_tokens, None);
        let text = completion(br#"{"model": "m", "prompt": "p"}"#, 1).unwrap();
        assert_eq!(text.chat.max_tokens, Some(16));
    }

    #[test]
    fn every_supported_field_is_read() {
        let request = with(json!({
            "temperature": 0.5, "top_p": 0.9, "seed": -1, "max_tokens": 7,
            "max_completion_tokens": 9, "stop": ["a", "b"], "presence_penalty": -1,
            "frequency_penalty": 1.5, "logprobs": true, "top_logprobs": 3, "stream": true,
            "stream_options": {"include_usage": true}, "n": 1, "user": "someone",
            "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
        }))
        .unwrap();
        let s = request.chosen.over(request.chat.sampling);
        assert_eq!((s.temperature, s.top_p, s.top_k), (0.5, 0.9, 4));
        assert_eq!((s.presence_penalty, s.frequency_penalty), (-1.0, 1.5));
        assert_eq!((s.seed, s.logprobs), (Some(u64::MAX), Some(3)));
        assert_eq!((s.penalty_window, s.penalise_prompt), (1 << 20, false));
        assert_eq!((s.min_p, s.repetition_penalty), (0.1, 1.1));
        assert_eq!(request.chat.max_tokens, Some(9));
        assert_eq!(request.chat.stop, ["a", "b"]);
        assert!(request.stream && request.include_usage);
        assert_eq!(request.user.as_deref(), Some("someone"));
    }

    #[test]
    fn text_comes_whole_or_in_parts_from_every_role() {
        let messages = json!([
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": null, "refusal": null, "name": "x",
             "audio": null, "annotations": []},
        ]);
        let request = with(json!({"messages": messages})).unwrap();
        let Prompt::Messages(messages) = request.chat.prompt else {
            panic!("messages")
        };
        let read: Vec<(&str, &str)> = messages
            .iter()
            .map(|m| (m.role.as_str(), m.content.as_str()))
            .collect();
        assert_eq!(
            read,
            [
                ("system", "s"),
                ("system", "d"),
                ("user", "ab"),
                ("assistant", "c")
            ]
        );
    }

    #[test]
    fn what_changes_nothing_is_ignored_and_what_asks_for_nothing_too() {
        with(json!({
            "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "tools": [],
            "logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "none",
            "modalities": ["text"], "reasoning_effort": null, "whatever": null,
        }))
        .unwrap();
    }

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (extra, param) in [
            (json!({"tools": [{"type": "function"}]}), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (
                json!({"response_format": {"type": "json_object"}}),
                "response_format",
            ),
            (json!({"logit_bias": {"5": 1}}), "logit_bias"),
            (json!({"n": 2}), "n"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"reasoning_effort": "high"}), "reasoning_effort"),
            (json!({"temprature": 0.1}), "temprature"),
            (
                json!({"messages": [{"role": "tool", "content": "x"}]}),
                "messages[0].role",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content[0].type",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}),
                "messages[0].tool_calls",
            ),
        ] {
            let refused = refusal(with(extra));
            assert_eq!(refused, ("unsupported_parameter".into(), param.into()));
        }
        let echo = br#"{"model": "m", "prompt": "p", "echo": true}"#;
        assert_eq!(refusal(completion(echo, 1)).1, "echo");
    }

    #[test]
    fn values_out_of_range_name_their_field() {
        for (extra, param) in [
            (json!({"temperature": 2.1}), "temperature"),
            (json!({"temperature": "warm"}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (
                json!({"max_completion_tokens": 1.5}),
                "max_completion_tokens",
            ),
            (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
            (json!({"stop": ""}), "stop"),
            (json!({"stop": [1]}), "stop"),
            (json!({"seed": 1.5}), "seed"),
            (
                json!({"logprobs": true, "top_logprobs": 21}),
                "top_logprobs",
            ),
            (json!({"top_logprobs": 1}), "top_logprobs"),
            (json!({"stream": "yes"}), "stream"),
            (
                json!({"stream_options": {"include_usage": true}}),
                "stream_options",
            ),
            (
                json!({"stream": true, "stream_options": {"other": 1}}),
                "stream_options",
            ),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hi"}), "messages"),
            (json!({"messages": ["hi"]}), "messages[0]"),
            (
                json!({"messages": [{"role": "user"}]}),
                "messages[0].content",
            ),
            (
                json!({"messages": [{"role": "king", "content": ""}]}),
                "messages[0].role",
            ),
            (json!({"model": 5}), "model"),
            (json!({"user": 5}), "user"),
        ] {
            assert_eq!(refusal(with(extra)), ("invalid_value".into(), param.into()));
        }
    }

    #[test]
    fn a_completions_prompt_is_one_text_or_one_list_of_tokens() {
        let read = |prompt: Value| {
            let body = json!({"model": "m", "prompt": prompt}).to_string();
            completion(body.as_bytes(), 1).map(|r| match r.chat.prompt {
                Prompt::Text(text) => text,
                Prompt::Tokens(ids) => format!("{ids:?}"),
                Prompt::Messages(_) => unreachable!(),
            })
        };
        assert_eq!(read(json!("p")).unwrap(), "p");
        assert_eq!(read(json!(["p"])).unwrap(), "p");
        assert_eq!(read(json!([1, 2])).unwrap(), "[1, 2]");
        assert_eq!(read(json!([7])).unwrap(), "[7]");
        assert_eq!(read(json!([[1, 2]])).unwrap(), "[1, 2]");
        for wrong in [
            json!(["a", "b"]),
            json!([]),
            json!([[]]),
            json!([-1]),
            json!([1e12]),
            json!(5),
        ] {
            assert!(read(wrong).is_err());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = chat(&body, 1);
            let _ = completion(&body, 1);
        }

        #[test]
        fn no_value_of_any_field_makes_it_panic(
            name in prop::sample::select(&[
                "messages", "model", "stop", "seed", "n", "logprobs", "top_logprobs", "stream",
                "stream_options", "temperature", "max_tokens", "user", "tools", "response_format",
            ][..]),
            value in prop::sample::select(vec![
                json!(null), json!(true), json!(-1), json!(1e300), json!(u64::MAX), json!(""),
                json!([]), json!({}), json!([[]]), json!([{}]), json!({"type": {}}), json!("\u{0}"),
            ]),
        ) {
            let mut body = base();
            body[name] = value;
            let _ = chat(body.to_string().as_bytes(), 1);
            let _ = completion(body.to_string().as_bytes(), 1);
        }
    }
}
