//! Shared by the translations of all APIs: pieces and ends of answers. Pure.

use std::time::Duration;

use hearthnet_http::ApiError;
use hearthnet_tokens::tools::ToolCall;
use serde_json::{Value, json};

use super::super::reply::Shape;
use crate::api::fields::{Fields, Refused};
use crate::chat::Timings;

/// Request of another API, as one of OpenAI's older two.
pub(in crate::api::http) struct Translated {
    pub(in crate::api::http) shape: Shape,
    /// Body for `/v1/chat/completions` or `/v1/completions`.
    pub(in crate::api::http) request: Value,
    /// Texts that end the answer.
    pub(in crate::api::http) stops: Vec<String>,
    /// Names of fields that differ: that of `request`, and the client's.
    pub(in crate::api::http) names: &'static [(&'static str, &'static str)],
    pub(in crate::api::http) translation: Box<dyn Translation>,
}

/// Ids and time of an answer.
#[derive(Debug, Clone, Copy)]
pub(in crate::api::http) struct Stamp {
    /// Random number, unique to the answer.
    pub(in crate::api::http) random: u128,
    /// Time of the request, ms since 1970.
    pub(in crate::api::http) created_ms: u64,
}

/// Part of an answer in an API's own objects.
pub(in crate::api::http) trait Translation: Send {
    /// Parts before the first piece.
    fn begin(&mut self) -> Vec<Part>;

    /// Parts for a piece.
    fn piece(&mut self, piece: &Piece) -> Vec<Part>;

    /// Parts at the end of a complete answer.
    fn end(&mut self, end: &End) -> Vec<Part>;

    /// Last part of an answer that failed.
    fn failed(&mut self, error: &ApiError) -> Part;

    /// Answer in one object.
    fn whole(&mut self, end: &End) -> Value;

    /// Messages of the conversation, as in OpenAI's `messages`, if the client may refer to it
    /// later.
    fn conversation(&mut self, _end: &End) -> Option<Vec<Value>> {
        None
    }
}

/// Part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::api::http) enum Part {
    /// Comment for people. Formats without comments leave it out.
    Comment(String),
    /// Object, with the name of its event.
    Data(Option<&'static str>, String),
}

impl Part {
    /// Object whose member `type` is the name of its event.
    pub(super) fn event(kind: &'static str, mut value: Value) -> Self {
        value["type"] = json!(kind);
        Self::Data(Some(kind), value.to_string())
    }

    /// Object without a name.
    pub(in crate::api::http) fn of(value: &Value) -> Self {
        Self::Data(None, value.to_string())
    }
}

/// Piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::api::http) enum Piece {
    Reasoning(String),
    Text(String),
    /// A call of a tool begins.
    Call {
        id: String,
        name: String,
    },
    /// More of the arguments of the last call, which are JSON.
    Arguments(String),
}

/// Answer so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::api::http) struct Answered {
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) calls: Vec<ToolCall>,
}

impl Answered {
    /// Adds a piece.
    pub(super) fn add(&mut self, piece: &Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(text),
            Piece::Text(text) => self.text.push_str(text),
            Piece::Call { id, name } => self.calls.push(ToolCall {
                id: id.clone(),
                name: name.clone(),
                arguments: String::new(),
            }),
            Piece::Arguments(text) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(text);
                }
            }
        }
    }

    /// The answer as a message of OpenAI's.
    pub(super) fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.text});
        if !self.calls.is_empty() {
            message["tool_calls"] = json!(self.calls);
        }
        message
    }
}

/// Arguments of a call as an object; text that is no object becomes one with the member `arguments`.
pub(super) fn arguments(call: &ToolCall) -> Value {
    match serde_json::from_str(&call.arguments) {
        Ok(Value::Object(arguments)) => Value::Object(arguments),
        _ if call.arguments.trim().is_empty() => json!({}),
        _ => json!({"arguments": call.arguments}),
    }
}

/// Pieces in a choice of OpenAI's: its `delta`, `message` or `text`.
pub(super) fn pieces(choice: &Value) -> Vec<Piece> {
    let text = |value: &Value| {
        value
            .as_str()
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
    };
    let mut pieces = Vec::new();
    pieces.extend(text(&choice["text"]).map(Piece::Text));
    let message = match &choice["delta"] {
        Value::Null => &choice["message"],
        delta => delta,
    };
    pieces.extend(text(&message["reasoning_content"]).map(Piece::Reasoning));
    pieces.extend(text(&message["content"]).map(Piece::Text));
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        // Further pieces of a call have arguments only.
        if let Some(id) = text(&call["id"]) {
            let name = text(&call["function"]["name"]).unwrap_or_default();
            pieces.push(Piece::Call { id, name });
        }
        pieces.extend(text(&call["function"]["arguments"]).map(Piece::Arguments));
    }
    pieces
}

/// End of a complete answer.
#[derive(Debug, Clone)]
pub(in crate::api::http) struct End {
    pub(super) answered: Answered,
    /// `finish_reason` of OpenAI's.
    pub(super) reason: String,
    /// Stop text that ended the answer.
    pub(super) stop: Option<String>,
    /// `usage` of OpenAI's.
    pub(super) usage: Value,
    pub(super) timings: Timings,
    /// Time since the request.
    pub(super) total: Duration,
}

impl End {
    /// Number of tokens of the prompt, and of those the cached ones.
    pub(super) fn prompt_tokens(&self) -> (u64, u64) {
        let cached = &self.usage["prompt_tokens_details"]["cached_tokens"];
        let all = self.usage["prompt_tokens"].as_u64().unwrap_or_default();
        (all, cached.as_u64().unwrap_or_default())
    }

    pub(super) fn completion_tokens(&self) -> u64 {
        self.usage["completion_tokens"].as_u64().unwrap_or_default()
    }
}

/// Function for OpenAI's `tools`, of a tool whose schema has the name `schema`.
pub(super) fn function(name: &str, tool: &mut Fields, schema: &str) -> Result<Value, Refused> {
    let mut function = json!({"name": name});
    tool.move_to(
        &mut function,
        &[("description", "description"), (schema, "parameters")],
    );
    if let Some(strict) = tool.bool("strict")? {
        function["strict"] = json!(strict);
    }
    Ok(json!({"type": "function", "function": function}))
}

/// Adds a message of the user or the system. It continues the last one, behind a line feed, if that
/// has the same role: many chat templates refuse consecutive ones.
pub(super) fn add_text(messages: &mut Vec<Value>, role: &str, text: &str) {
    match messages.last_mut() {
        Some(last) if last["role"] == role => {
            let before = last["content"].as_str().unwrap_or_default();
            last["content"] = json!(format!("{before}\n{text}"));
        }
        _ => messages.push(json!({"role": role, "content": text})),
    }
}

/// Asks for a stream that ends with token counts.
pub(super) fn set_stream(request: &mut Value, stream: bool) {
    if stream {
        request["stream"] = json!(true);
        request["stream_options"] = json!({"include_usage": true});
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::api::fields::with;

    /// End of an answer with 20 tokens of prompt, 5 of them cached, and 7 of text.
    pub(in crate::api::http::translate) fn end(answered: Answered, reason: &str) -> End {
        End {
            answered,
            reason: reason.to_owned(),
            stop: None,
            usage: json!({
                "prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27,
                "prompt_tokens_details": {"cached_tokens": 5},
                "completion_tokens_details": {"reasoning_tokens": 0},
            }),
            timings: Timings::default(),
            total: Duration::from_millis(1500),
        }
    }

    /// Streamed answer of these pieces: names and objects of the events.
    pub(in crate::api::http::translate) fn stream(
        translation: &mut dyn Translation,
        pieces: &[Piece],
        reason: &str,
    ) -> Vec<(Option<&'static str>, Value)> {
        let mut answered = Answered::default();
        let mut parts = translation.begin();
        for piece in pieces {
            answered.add(piece);
            parts.extend(translation.piece(piece));
        }
        parts.extend(translation.end(&end(answered, reason)));
        let read = parts.into_iter().map(|part| match part {
            Part::Data(name, data) => (name, serde_json::from_str(&data).unwrap()),
            Part::Comment(text) => panic!("a comment: {text}"),
        });
        read.collect()
    }

    /// Text, and a call in two pieces.
    pub(in crate::api::http::translate) fn text_and_call() -> Vec<Piece> {
        vec![
            Piece::Text("Let me".into()),
            Piece::Text(" look.".into()),
            Piece::Call {
                id: "call_1".into(),
                name: "weather".into(),
            },
            Piece::Arguments("{\"city\":".into()),
            Piece::Arguments("\"Rome\"}".into()),
        ]
    }

    #[test]
    fn pieces_of_chunks_add_up_to_the_message() {
        let call = |index: u32, rest: Value| {
            let call = with(json!({"index": index}), rest);
            json!({"delta": {"tool_calls": [call]}})
        };
        let chunks = [
            json!({"delta": {"role": "assistant", "content": ""}}),
            json!({"delta": {"reasoning_content": "Hm."}}),
            json!({"delta": {"content": "Let me"}}),
            json!({"delta": {"content": " look."}}),
            call(
                0,
                json!({"id": "call_1", "type": "function",
                "function": {"name": "weather", "arguments": ""}}),
            ),
            call(0, json!({"function": {"arguments": "{\"city\":"}})),
            call(0, json!({"function": {"arguments": "\"Rome\"}"}})),
            json!({"delta": {}, "finish_reason": "tool_calls"}),
        ];
        let mut streamed = Answered::default();
        for piece in chunks.iter().flat_map(pieces) {
            streamed.add(&piece);
        }
        let message = json!({
            "role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function",
                "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}}],
        });
        let mut whole = Answered::default();
        for piece in pieces(&json!({"message": message})) {
            whole.add(&piece);
        }
        assert_eq!(streamed, whole);
        assert_eq!(arguments(&whole.calls[0]), json!({"city": "Rome"}));
        assert_eq!(whole.message()["tool_calls"], message["tool_calls"]);
        assert_eq!(pieces(&json!({"text": "raw"})), [Piece::Text("raw".into())]);
    }
}
