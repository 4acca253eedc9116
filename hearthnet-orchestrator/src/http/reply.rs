//! Answers as OpenAI's API shapes them, whole or in chunks. Pure.
//!
//! With log-probabilities, a token's entry is sent with the text that it completed, and only
//! once it is sure that the token is part of the answer: a token of a stop text is not, nor is the
//! one that ended the model's turn. So the entries of an answer spell its text.

use std::collections::VecDeque;

use hearthnet_model::{Detokenizer, Tokenizer};
use serde_json::{Map, Value, json};

use crate::chat::{Done, FinishReason};

/// Stands for a probability of zero, whose logarithm JSON cannot say. OpenAI's number.
const LEAST_LOGPROB: f32 = -9999.0;

/// Which endpoint was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

/// What all objects of one answer say.
#[derive(Debug, Clone)]
pub(super) struct Header {
    /// Which endpoint was asked.
    pub(super) shape: Shape,
    /// A random number that names the answer.
    pub(super) id: u128,
    /// When it was asked for, Unix seconds.
    pub(super) created: u64,
    /// The model.
    pub(super) model: String,
    /// What the answer depends on besides the request.
    pub(super) fingerprint: String,
}

/// One token with its log-probability.
struct Entry {
    id: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
    /// Bytes of the answer that were complete before it.
    start: usize,
}

/// Turns the frames of one answer into objects of the API.
pub(super) struct Reply {
    header: Header,
    tokenizer: Tokenizer,
    include_usage: bool,
    logprobs: bool,
    /// Bytes of text that were given on, and that the tokens so far spell.
    given: usize,
    spelt: usize,
    speller: Detokenizer,
    /// Characters of the tokens whose entries were given on.
    offset: usize,
    pending: VecDeque<Entry>,
    /// Entries of the whole answer, when it is not sent in chunks.
    entries: Vec<Entry>,
}

impl Reply {
    pub(super) fn new(
        header: Header,
        tokenizer: Tokenizer,
        include_usage: bool,
        logprobs: bool,
    ) -> Self {
        // As the conversation reads the answer: see `Conversation::answer`.
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
            offset: 0,
            pending: VecDeque::new(),
            entries: Vec::new(),
            tokenizer,
        }
    }

    /// The chunk before the first text, if this shape has one.
    pub(super) fn opening(&self) -> Option<Value> {
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        (self.header.shape == Shape::Chat).then(|| self.chunk(role, Value::Null, None))
    }

    /// A token: its text, if it completed any, and its entry, when log-probabilities are wanted.
    fn take(&mut self, text: &str, token: u32, logprob: Option<f32>, top: &[(u32, f32)]) {
        self.given += text.len();
        let (true, Some(logprob)) = (self.logprobs, logprob) else {
            return;
        };
        if self.tokenizer.is_end_of_generation(token) {
            return;
        }
        self.pending.push_back(Entry {
            id: token,
            logprob,
            top: top.to_vec(),
            start: self.spelt,
        });
        self.spelt += self.speller.push(token).len();
    }

    /// Entries of tokens that are certainly part of the answer.
    fn sure(&mut self) -> Vec<Entry> {
        let given = self.given;
        let sure = |entry: &&Entry| entry.start < given;
        let count = self.pending.iter().take_while(sure).count();
        self.pending.drain(..count).collect()
    }

    /// Entries that were held back and turn out to be part of the answer.
    fn rest(&mut self, done: &Done) -> Vec<Entry> {
        let ended = done
            .token_ids
            .last()
            .is_some_and(|&id| self.tokenizer.is_end_of_generation(id));
        let mut rest = self.sure();
        if done.finish_reason == FinishReason::Length || ended {
            rest.extend(self.pending.drain(..));
        }
        rest
    }

    /// The chunk for a token, if there is anything to tell.
    pub(super) fn delta(
        &mut self,
        text: &str,
        token: u32,
        logprob: Option<f32>,
        top: &[(u32, f32)],
    ) -> Option<Value> {
        self.take(text, token, logprob, top);
        let entries = self.sure();
        if text.is_empty() && entries.is_empty() {
            return None;
        }
        let logprobs = self.logprobs_of(&entries);
        let delta = match self.header.shape {
            Shape::Chat => json!({"content": text}),
            Shape::Text => Value::from(text),
        };
        Some(self.chunk(delta, logprobs, None))
    }

    /// The chunks that end a stream.
    pub(super) fn ending(&mut self, done: &Done) -> Vec<Value> {
        let rest = self.rest(done);
        let logprobs = match rest.is_empty() {
            true => Value::Null,
            false => self.logprobs_of(&rest),
        };
        let delta = match self.header.shape {
            Shape::Chat => json!({}),
            Shape::Text => Value::from(""),
        };
        let mut chunks = vec![self.chunk(delta, logprobs, Some(done.finish_reason))];
        if self.include_usage {
            let mut counts = self.object(true);
            counts.insert("choices".into(), json!([]));
            counts.insert("usage".into(), usage(done));
            chunks.push(Value::Object(counts));
        }
        chunks
    }

    /// A token of an answer that is sent whole.
    pub(super) fn collect(
        &mut self,
        text: &str,
        token: u32,
        logprob: Option<f32>,
        top: &[(u32, f32)],
    ) {
        self.take(text, token, logprob, top);
        let sure = self.sure();
        self.entries.extend(sure);
    }

    /// The whole answer.
    pub(super) fn whole(mut self, done: &Done) -> Value {
        let rest = self.rest(done);
        self.entries.extend(rest);
        let entries = std::mem::take(&mut self.entries);
        let logprobs = self.logprobs_of(&entries);
        let finish = finish(done.finish_reason);
        let choice = match self.header.shape {
            Shape::Chat => json!({
                "index": 0,
                "message": {
                    "role": "assistant", "content": done.text, "refusal": null, "annotations": [],
                },
                "logprobs": logprobs,
                "finish_reason": finish,
            }),
            Shape::Text => json!({
                "index": 0, "text": done.text, "logprobs": logprobs, "finish_reason": finish,
            }),
        };
        let mut object = self.object(false);
        object.insert("choices".into(), json!([choice]));
        object.insert("usage".into(), usage(done));
        Value::Object(object)
    }

    /// What every object begins with.
    fn object(&self, chunk: bool) -> Map<String, Value> {
        let Header {
            shape,
            id,
            created,
            model,
            fingerprint,
        } = &self.header;
        let (prefix, kind) = match (shape, chunk) {
            (Shape::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Shape::Chat, false) => ("chatcmpl", "chat.completion"),
            // Chunks of the older API have the name of the whole.
            (Shape::Text, _) => ("cmpl", "text_completion"),
        };
        let mut object = Map::new();
        object.insert("id".into(), format!("{prefix}-{id:032x}").into());
        object.insert("object".into(), kind.into());
        object.insert("created".into(), (*created).into());
        object.insert("model".into(), model.as_str().into());
        object.insert("system_fingerprint".into(), fingerprint.as_str().into());
        object
    }

    fn chunk(&self, delta: Value, logprobs: Value, reason: Option<FinishReason>) -> Value {
        let content = match self.header.shape {
            Shape::Chat => "delta",
            Shape::Text => "text",
        };
        let mut choice = Map::new();
        choice.insert("index".into(), 0.into());
        choice.insert(content.into(), delta);
        choice.insert("logprobs".into(), logprobs);
        choice.insert("finish_reason".into(), reason.map_or(Value::Null, finish));
        let mut object = self.object(true);
        object.insert("choices".into(), json!([choice]));
        if self.include_usage {
            object.insert("usage".into(), Value::Null);
        }
        Value::Object(object)
    }

    fn logprobs_of(&mut self, entries: &[Entry]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        match self.header.shape {
            Shape::Chat => {
                let content: Vec<Value> = entries
                    .iter()
                    .map(|entry| {
                        let top: Vec<Value> =
                            entry.top.iter().map(|&(id, p)| self.token(id, p)).collect();
                        let mut token = self.token(entry.id, entry.logprob);
                        if let Value::Object(token) = &mut token {
                            token.insert("top_logprobs".into(), top.into());
                        }
                        token
                    })
                    .collect();
                json!({"content": content, "refusal": null})
            }
            Shape::Text => self.older(entries),
        }
    }

    /// A token with its text and bytes. Half a character has no text of its own, only bytes.
    fn token(&self, id: u32, logprob: f32) -> Value {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        json!({
            "token": String::from_utf8_lossy(bytes),
            "logprob": logprob.max(LEAST_LOGPROB),
            "bytes": bytes,
        })
    }

    /// The shape of `/v1/completions`: lists side by side.
    fn older(&mut self, entries: &[Entry]) -> Value {
        let (mut tokens, mut own, mut top, mut offsets) = (vec![], vec![], vec![], vec![]);
        for entry in entries {
            let text = self.token_name(entry.id);
            offsets.push(Value::from(self.offset));
            self.offset += text.chars().count();
            tokens.push(Value::from(text));
            own.push(Value::from(entry.logprob.max(LEAST_LOGPROB)));
            let mut likeliest = Map::new();
            for &(id, logprob) in &entry.top {
                // Of tokens that read the same the likeliest counts.
                likeliest
                    .entry(self.token_name(id))
                    .or_insert(logprob.max(LEAST_LOGPROB).into());
            }
            top.push(Value::Object(likeliest));
        }
        json!({
            "tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets,
        })
    }

    /// A token's text, or its bytes in the way that OpenAI writes them: `bytes:\xf0\x9f`.
    fn token_name(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| {
                format!("{name}\\x{byte:02x}")
            }),
        }
    }
}

fn finish(reason: FinishReason) -> Value {
    match reason {
        FinishReason::Stop => "stop".into(),
        FinishReason::Length => "length".into(),
    }
}

fn usage(done: &Done) -> Value {
    let usage = &done.usage;
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    })
}
