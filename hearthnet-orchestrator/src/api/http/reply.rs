//! Responses in the format of OpenAI's API, whole or in chunks. Pure.
//!
//! If log-probabilities are requested, the entry of a token is sent with the text that it
//! completed, and only once the token is certain to be part of the answer. Tokens of a stop text,
//! and the one that ended the model's turn, are not. The entries of an answer thus spell its text.

use std::collections::VecDeque;

use hearthnet_files::WeightsId;
use hearthnet_tokens::tools::CallPiece;
use hearthnet_tokens::{Detokenizer, Tokenizer};
use serde_json::{Map, Value, json};

use crate::chat::{Done, FinishReason, Frame};
use crate::exact::Arithmetics;

/// Value for a probability of zero, whose logarithm JSON cannot express. OpenAI's number.
const LEAST_LOGPROB: f32 = -9999.0;

/// Requested endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

/// Fields common to all objects of one answer.
#[derive(Debug, Clone)]
pub(super) struct Header {
    pub(super) shape: Shape,
    /// Random id of the answer.
    pub(super) id: u128,
    /// Time of the request, Unix seconds.
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) weights: WeightsId,
}

/// Token with its log-probability.
struct Entry {
    id: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
    /// Byte offset of the token in the answer.
    start: usize,
    /// The same offset in characters (code points).
    offset: usize,
}

/// Converts the frames of one answer into API objects.
pub(super) struct Reply {
    header: Header,
    tokenizer: Tokenizer,
    include_usage: bool,
    logprobs: bool,
    /// Bytes of text sent so far, and bytes spelt by the tokens so far.
    given: usize,
    spelt: usize,
    speller: Detokenizer,
    /// Characters spelt by the tokens so far.
    spelt_chars: usize,
    pending: VecDeque<Entry>,
    /// Entries of the whole answer, if it is not streamed.
    entries: Vec<Entry>,
    /// Arithmetics known so far.
    arithmetic: Arithmetics,
    /// True once the first chunk was sent.
    opened: bool,
    /// True if the answer may have reasoning or calls. Then the tokens do not spell its text, and
    /// only those that complete text have entries.
    has_parts: bool,
}

impl Reply {
    pub(super) fn new(
        header: Header,
        tokenizer: Tokenizer,
        include_usage: bool,
        logprobs: bool,
    ) -> Self {
        // Same detokenizer as in `Conversation::answer`.
        let speller = match header.shape {
            Shape::Chat => Detokenizer::new(&tokenizer),
            Shape::Text => Detokenizer::continuing(&tokenizer),
        };
        Self {
            header,
            include_usage,
            logprobs,
            given: 0,
            spelt: 0,
            speller,
            spelt_chars: 0,
            pending: VecDeque::new(),
            entries: Vec::new(),
            tokenizer,
            arithmetic: Arithmetics::default(),
            opened: false,
            has_parts: false,
        }
    }

    /// The answer may have reasoning and calls.
    pub(super) fn expect_parts(&mut self) {
        self.has_parts = true;
    }

    /// Chunks for a frame of a stream.
    pub(super) fn chunks(&mut self, frame: &Frame) -> Vec<Value> {
        let entries = self.on_frame(frame);
        let mut chunks = Vec::new();
        // Wait until all hosts have reported their arithmetic.
        if !matches!(frame, Frame::ShardStatus { .. })
            && !std::mem::replace(&mut self.opened, true)
            && self.header.shape == Shape::Chat
        {
            let role = json!({"role": "assistant", "content": "", "refusal": null});
            chunks.push(self.chunk(role, Value::Null, None));
        }
        match frame {
            Frame::TokenDelta {
                text,
                reasoning,
                tool_calls,
                ..
            } => {
                if !reasoning.is_empty() {
                    let delta = json!({"reasoning_content": reasoning});
                    chunks.push(self.chunk(delta, Value::Null, None));
                }
                if !text.is_empty() || !entries.is_empty() {
                    let logprobs = self.logprobs_of(&entries);
                    let delta = match self.header.shape {
                        Shape::Chat => json!({"content": text}),
                        Shape::Text => json!(text),
                    };
                    chunks.push(self.chunk(delta, logprobs, None));
                }
                if !tool_calls.is_empty() {
                    let calls: Value = tool_calls.iter().map(call_piece).collect();
                    chunks.push(self.chunk(json!({"tool_calls": calls}), Value::Null, None));
                }
            }
            Frame::Done(done) => {
                let logprobs = match entries.is_empty() {
                    true => Value::Null,
                    false => self.logprobs_of(&entries),
                };
                let delta = match self.header.shape {
                    Shape::Chat => json!({}),
                    Shape::Text => json!(""),
                };
                chunks.push(self.chunk(delta, logprobs, Some(done.finish_reason)));
                if self.include_usage {
                    chunks.push(self.object(true, json!([]), Some(usage(done))));
                }
            }
            _ => {}
        }
        chunks
    }

    /// The whole response, once the last frame has arrived.
    pub(super) fn whole(&mut self, frame: &Frame) -> Option<Value> {
        let entries = self.on_frame(frame);
        self.entries.extend(entries);
        let Frame::Done(done) = frame else {
            return None;
        };
        let entries = std::mem::take(&mut self.entries);
        let mut choice = json!({
            "index": 0,
            "logprobs": self.logprobs_of(&entries),
            "finish_reason": done.finish_reason,
        });
        match self.header.shape {
            Shape::Chat => {
                choice["message"] = json!({
                    "role": "assistant", "content": done.text, "refusal": null, "annotations": [],
                });
                let message = &mut choice["message"];
                if !done.reasoning.is_empty() {
                    message["reasoning_content"] = json!(done.reasoning);
                }
                if !done.tool_calls.is_empty() {
                    message["tool_calls"] = json!(done.tool_calls);
                    if done.text.is_empty() {
                        message["content"] = Value::Null;
                    }
                }
            }
            Shape::Text => choice["text"] = json!(done.text),
        }
        Some(self.object(false, json!([choice]), Some(usage(done))))
    }

    /// Processes a frame. Returns the entries of tokens that are now certain to be part of the
    /// answer.
    fn on_frame(&mut self, frame: &Frame) -> Vec<Entry> {
        let mut all = false;
        self.arithmetic.on_frame(frame);
        match frame {
            Frame::TokenDelta {
                text,
                token_id,
                logprob,
                top_logprobs,
                ..
            } => {
                self.given += text.len();
                if let (true, Some(logprob)) = (
                    self.logprobs && !(self.has_parts && text.is_empty()),
                    *logprob,
                ) && !self.tokenizer.is_end_of_generation(*token_id)
                {
                    self.pending.push_back(Entry {
                        id: *token_id,
                        logprob,
                        top: top_logprobs.clone(),
                        start: self.spelt,
                        offset: self.spelt_chars,
                    });
                    let spelt = self.speller.push(*token_id);
                    self.spelt += spelt.len();
                    self.spelt_chars += spelt.chars().count();
                }
            }
            // Without a matched stop text, the text that was held back is part of the answer.
            Frame::Done(done) => {
                // A stream cannot take back arithmetics that it has sent.
                if !self.opened {
                    self.arithmetic = Arithmetics::default();
                }
                self.arithmetic.extend(done.arithmetic.clone());
                let last = done.token_ids.last();
                let ended = last.is_some_and(|&id| self.tokenizer.is_end_of_generation(id));
                all = ended || done.finish_reason == FinishReason::Length;
            }
            _ => {}
        }
        let all = all || self.has_parts;
        let sure = |entry: &&Entry| all || entry.start < self.given;
        let count = self.pending.iter().take_while(sure).count();
        self.pending.drain(..count).collect()
    }

    /// Object of the API with its common fields, choices, and optionally token counts.
    fn object(&self, chunk: bool, choices: Value, usage: Option<Value>) -> Value {
        let header = &self.header;
        let (id, weights) = (header.id, header.weights.to_string());
        let (prefix, kind) = match (header.shape, chunk) {
            (Shape::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Shape::Chat, false) => ("chatcmpl", "chat.completion"),
            // Chunks of the older API use the name of the whole object.
            (Shape::Text, _) => ("cmpl", "text_completion"),
        };
        // Exact answers depend on the weights only, not on the machines.
        let fingerprint = match self.arithmetic.is_exact() {
            true => format!("fp_{weights:.16}"),
            false => format!("fp_{weights:.16}-{}", self.arithmetic),
        };
        let mut object = json!({
            "id": format!("{prefix}-{id:032x}"), "object": kind, "created": header.created,
            "model": header.model, "system_fingerprint": fingerprint, "choices": choices,
        });
        if let Some(usage) = usage {
            object["usage"] = usage;
        }
        object
    }

    fn chunk(&self, delta: Value, logprobs: Value, reason: Option<FinishReason>) -> Value {
        let content = match self.header.shape {
            Shape::Chat => "delta",
            Shape::Text => "text",
        };
        let choice = json!({
            "index": 0, content: delta, "logprobs": logprobs, "finish_reason": reason,
        });
        let usage = self.include_usage.then_some(Value::Null);
        self.object(true, json!([choice]), usage)
    }

    fn logprobs_of(&self, entries: &[Entry]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        match self.header.shape {
            Shape::Chat => {
                let content: Vec<Value> = entries
                    .iter()
                    .map(|entry| {
                        let top = entry.top.iter().map(|&(id, p)| self.token(id, p));
                        let mut token = self.token(entry.id, entry.logprob);
                        token["top_logprobs"] = top.collect();
                        token
                    })
                    .collect();
                json!({"content": content, "refusal": null})
            }
            Shape::Text => self.older(entries),
        }
    }

    /// Bytes of a token of the vocabulary.
    fn bytes(&self, id: u32) -> &[u8] {
        let bytes = self.tokenizer.token_bytes(id);
        debug_assert!(bytes.is_some(), "token {id} is none of the vocabulary");
        bytes.unwrap_or_default()
    }

    /// Token with its text and bytes. A part of a character has bytes only.
    fn token(&self, id: u32, logprob: f32) -> Value {
        let bytes = self.bytes(id);
        json!({
            "token": String::from_utf8_lossy(bytes),
            "logprob": logprob.max(LEAST_LOGPROB),
            "bytes": bytes,
        })
    }

    /// Log-probabilities in the format of `/v1/completions`: parallel lists.
    fn older(&self, entries: &[Entry]) -> Value {
        let top = |entry: &Entry| {
            let mut likeliest = Map::new();
            for &(id, logprob) in &entry.top {
                // Of tokens with the same text, the most likely one counts.
                let token = likeliest.entry(self.token_name(id));
                token.or_insert(logprob.max(LEAST_LOGPROB).into());
            }
            Value::Object(likeliest)
        };
        let list = |of: &dyn Fn(&Entry) -> Value| -> Value { entries.iter().map(of).collect() };
        json!({
            "tokens": list(&|entry| self.token_name(entry.id).into()),
            "token_logprobs": list(&|entry| entry.logprob.max(LEAST_LOGPROB).into()),
            "top_logprobs": list(&top),
            "text_offset": list(&|entry| entry.offset.into()),
        })
    }

    /// Text of a token, or its bytes in OpenAI's notation: `bytes:\xf0\x9f`.
    fn token_name(&self, id: u32) -> String {
        let bytes = self.bytes(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| {
                format!("{name}\\x{byte:02x}")
            }),
        }
    }
}

/// What a frame tells about the hosts of an answer and its speed, without any text of the answer.
pub(super) fn trace(frame: &Frame) -> Option<Value> {
    match frame {
        Frame::ShardStatus { .. } | Frame::ShardFailover { .. } | Frame::PromptProgress { .. } => {
            serde_json::to_value(frame).ok()
        }
        Frame::Done(done) => Some(json!({
            "event": "done", "data": {"route": done.route, "timings": done.timings},
        })),
        _ => None,
    }
}

/// New part of a call, as OpenAI's streams have it.
fn call_piece(piece: &CallPiece) -> Value {
    let mut call = json!({
        "index": piece.index, "function": {"arguments": piece.arguments},
    });
    if let (Some(id), Some(name)) = (&piece.id, &piece.name) {
        call["id"] = json!(id);
        call["type"] = json!("function");
        call["function"]["name"] = json!(name);
    }
    call
}

fn usage(done: &Done) -> Value {
    let usage = &done.usage;
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens, "audio_tokens": 0,
        },
    })
}
