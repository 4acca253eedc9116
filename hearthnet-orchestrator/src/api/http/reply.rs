//! Responses in the format of OpenAI's API, whole or in chunks. Pure.
//!
//! If log-probabilities are requested, the entry of a token is sent with the text that it
//! completed, and only once the token is certain to be part of the answer. Tokens of a stop text,
//! and the one that ended the model's turn, are not. The entries of an answer thus spell its text.

use std::collections::VecDeque;
use std::ops::Range;

use hearthnet_files::WeightsId;
use hearthnet_tokens::tools::CallPiece;
use hearthnet_tokens::{Detokenizer, Tokenizer};
use serde_json::{Map, Value, json};

use crate::chat::{Done, FinishReason, Frame, PromptToken, Usage};
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

/// `system_fingerprint`: exact answers depend on the weights only, not on the machines.
pub(super) fn fingerprint(weights: WeightsId, arithmetic: &Arithmetics) -> String {
    let weights = weights.to_string();
    match arithmetic.is_exact() {
        true => format!("fp_{weights:.16}"),
        false => format!("fp_{weights:.16}-{arithmetic}"),
    }
}

/// Token with its log-probability.
#[derive(Clone)]
struct Entry {
    id: u32,
    /// `None` for the first token of a prompt.
    logprob: Option<f32>,
    top: Vec<(u32, f32)>,
    /// Byte offset of the token in the answer.
    start: usize,
    /// Offset in characters (code points) of `text`.
    offset: usize,
}

/// State of an answer, of which a reply can have several.
struct Choice {
    /// Bytes of text sent so far, and bytes spelt by the tokens so far.
    given: usize,
    spelt: usize,
    speller: Detokenizer,
    /// Characters spelt by the tokens so far, with those of an echoed prompt.
    spelt_chars: usize,
    pending: VecDeque<Entry>,
    /// If it is not streamed: all of its entries, and the answer once it is complete.
    entries: Vec<Entry>,
    whole: Option<Value>,
}

/// Converts the frames of all answers to one request into API objects. The answers are numbered by
/// prompt, then by choice.
pub(super) struct Reply {
    header: Header,
    tokenizer: Tokenizer,
    include_usage: bool,
    logprobs: bool,
    choices: Vec<Choice>,
    /// Answers to each prompt.
    each: usize,
    /// Texts of the prompts, if the answers begin with them; else empty.
    echo: Vec<String>,
    /// Prompts whose first chunks were sent, and number of prompts without a complete answer.
    opened: Vec<bool>,
    left: usize,
    /// Counts of the complete answers.
    usage: Option<Usage>,
    /// Arithmetics known so far, and those of the complete answers.
    arithmetic: Arithmetics,
    made_with: Arithmetics,
    /// True once a chunk was sent.
    streams: bool,
    /// True if the answer may have reasoning or calls. Then the tokens do not spell its text, and
    /// only those that complete text have entries.
    has_parts: bool,
}

impl Reply {
    /// Creates the reply to a request with one prompt and one answer.
    pub(super) fn new(
        header: Header,
        tokenizer: Tokenizer,
        include_usage: bool,
        logprobs: bool,
    ) -> Self {
        let mut reply = Self {
            header,
            tokenizer,
            include_usage,
            logprobs,
            choices: Vec::new(),
            each: 1,
            echo: Vec::new(),
            opened: Vec::new(),
            left: 0,
            usage: None,
            arithmetic: Arithmetics::default(),
            made_with: Arithmetics::default(),
            streams: false,
            has_parts: false,
        };
        reply.expect(1, 1, Vec::new());
        reply
    }

    /// `each` answers to each of some prompts, which begin with the texts in `echo`, if there are
    /// any.
    pub(super) fn expect(&mut self, prompts: usize, each: usize, echo: Vec<String>) {
        (self.each, self.left, self.opened) = (each, prompts, vec![false; prompts]);
        let choices = (0..prompts * each).map(|index| Choice {
            given: 0,
            spelt: 0,
            // Same detokenizer as in `Conversation::answer`.
            speller: match self.header.shape {
                Shape::Chat => Detokenizer::new(&self.tokenizer),
                Shape::Text => Detokenizer::continuing(&self.tokenizer),
            },
            spelt_chars: echo
                .get(index / each.max(1))
                .map_or(0, |text| text.chars().count()),
            pending: VecDeque::new(),
            entries: Vec::new(),
            whole: None,
        });
        self.choices = choices.collect();
        self.echo = echo;
    }

    /// The answer may have reasoning and calls.
    pub(super) fn expect_parts(&mut self) {
        self.has_parts = true;
    }

    /// Returns true once all answers are complete.
    pub(super) fn is_complete(&self) -> bool {
        self.left == 0
    }

    /// Chunks for a frame of the stream of a prompt.
    pub(super) fn chunks(&mut self, prompt: usize, frame: &Frame) -> Vec<Value> {
        self.learn(frame);
        let mut chunks = Vec::new();
        // Wait until all hosts have reported their arithmetic.
        if !matches!(frame, Frame::ShardStatus { .. }) {
            self.streams = true;
            chunks.extend(self.first_chunks(prompt));
        }
        match frame {
            Frame::Prompt { tokens } => {
                let (text, entries) = (self.echo_of(prompt).to_owned(), self.scored(tokens));
                for index in self.indices(prompt) {
                    let logprobs = self.logprobs_of(&entries);
                    chunks.push(self.chunk(index, json!(text), logprobs, None));
                }
            }
            Frame::TokenDelta {
                choice,
                text,
                reasoning,
                tool_calls,
                ..
            } => {
                let index = self.index(prompt, *choice);
                let entries = self.on_token(index, frame);
                if !reasoning.is_empty() {
                    let delta = json!({"reasoning_content": reasoning});
                    chunks.push(self.chunk(index, delta, Value::Null, None));
                }
                if !text.is_empty() || !entries.is_empty() {
                    let logprobs = self.logprobs_of(&entries);
                    let delta = match self.header.shape {
                        Shape::Chat => json!({"content": text}),
                        Shape::Text => json!(text),
                    };
                    chunks.push(self.chunk(index, delta, logprobs, None));
                }
                if !tool_calls.is_empty() {
                    let calls: Value = tool_calls.iter().map(call_piece).collect();
                    let delta = json!({"tool_calls": calls});
                    chunks.push(self.chunk(index, delta, Value::Null, None));
                }
            }
            Frame::ChoiceDone { choice, done } => {
                chunks.push(self.last_chunk(prompt, *choice, done));
            }
            Frame::Done(done) => {
                if self.each == 1 {
                    chunks.push(self.last_chunk(prompt, 0, done));
                }
                self.count(done);
                if self.include_usage && self.is_complete() {
                    chunks.push(self.object(true, json!([]), self.usage.as_ref().map(usage)));
                }
            }
            _ => {}
        }
        chunks
    }

    /// The whole response, once the last frame of all prompts has arrived.
    pub(super) fn whole(&mut self, prompt: usize, frame: &Frame) -> Option<Value> {
        self.learn(frame);
        match frame {
            Frame::Prompt { tokens } => {
                let entries = self.scored(tokens);
                for index in self.indices(prompt) {
                    if let Some(choice) = self.choices.get_mut(index) {
                        choice.entries.extend(entries.iter().cloned());
                    }
                }
            }
            Frame::TokenDelta { choice, .. } => {
                let index = self.index(prompt, *choice);
                let entries = self.on_token(index, frame);
                if let Some(choice) = self.choices.get_mut(index) {
                    choice.entries.extend(entries);
                }
            }
            Frame::ChoiceDone { choice, done } => self.keep(prompt, *choice, done),
            Frame::Done(done) => {
                if self.each == 1 {
                    self.keep(prompt, 0, done);
                }
                self.count(done);
            }
            _ => {}
        }
        self.is_complete().then(|| {
            let all = self.choices.iter_mut();
            let choices: Value = all.filter_map(|choice| choice.whole.take()).collect();
            self.object(false, choices, self.usage.as_ref().map(usage))
        })
    }

    /// Keeps a complete answer for the whole response.
    fn keep(&mut self, prompt: usize, choice: u32, done: &Done) {
        let index = self.index(prompt, choice);
        let rest = self.on_end(index, done);
        let Some(state) = self.choices.get_mut(index) else {
            return;
        };
        state.entries.extend(rest);
        let entries = std::mem::take(&mut state.entries);
        let mut choice = json!({
            "index": index,
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
            Shape::Text => choice["text"] = json!(format!("{}{}", self.echo_of(prompt), done.text)),
        }
        if let Some(state) = self.choices.get_mut(index) {
            state.whole = Some(choice);
        }
    }

    fn index(&self, prompt: usize, choice: u32) -> usize {
        prompt * self.each + choice as usize
    }

    /// Numbers of the answers to a prompt.
    fn indices(&self, prompt: usize) -> Range<usize> {
        prompt * self.each..(prompt + 1) * self.each
    }

    /// Text of a prompt, if the answers begin with it.
    fn echo_of(&self, prompt: usize) -> &str {
        self.echo.get(prompt).map_or("", String::as_str)
    }

    /// Entries of the tokens of a prompt.
    fn scored(&self, tokens: &[PromptToken]) -> Vec<Entry> {
        let mut speller = Detokenizer::new(&self.tokenizer);
        let mut offset = 0;
        let entries = tokens.iter().map(|token| {
            let entry = Entry {
                id: token.id,
                logprob: token.logprob,
                top: token.top_logprobs.clone(),
                start: 0,
                offset,
            };
            offset += speller.push(token.id).chars().count();
            entry
        });
        entries.collect()
    }

    /// Chunks that precede all others of a prompt's answers.
    fn first_chunks(&mut self, prompt: usize) -> Vec<Value> {
        let opened = self.opened.get_mut(prompt);
        if opened.is_none_or(|opened| std::mem::replace(opened, true)) {
            return Vec::new();
        }
        let delta = match self.header.shape {
            Shape::Chat => json!({"role": "assistant", "content": "", "refusal": null}),
            // With log-probabilities, the prompt comes with them.
            Shape::Text if !self.logprobs && !self.echo_of(prompt).is_empty() => {
                json!(self.echo_of(prompt))
            }
            Shape::Text => return Vec::new(),
        };
        let chunk = |index| self.chunk(index, delta.clone(), Value::Null, None);
        self.indices(prompt).map(chunk).collect()
    }

    /// Last chunk of an answer.
    fn last_chunk(&mut self, prompt: usize, choice: u32, done: &Done) -> Value {
        let index = self.index(prompt, choice);
        let entries = self.on_end(index, done);
        let logprobs = match entries.is_empty() {
            true => Value::Null,
            false => self.logprobs_of(&entries),
        };
        let delta = match self.header.shape {
            Shape::Chat => json!({}),
            Shape::Text => json!(""),
        };
        self.chunk(index, delta, logprobs, Some(done.finish_reason))
    }

    /// Learns of the arithmetics that a frame names.
    fn learn(&mut self, frame: &Frame) {
        self.arithmetic.on_frame(frame);
        if let Frame::Done(done) = frame {
            self.made_with.extend(done.arithmetic.clone());
            // A stream cannot take back arithmetics that it has sent.
            if !self.streams {
                self.arithmetic = Arithmetics::default();
            }
            self.arithmetic.extend(self.made_with.clone());
        }
    }

    /// Adds the counts of the answers to a prompt.
    fn count(&mut self, done: &Done) {
        self.left = self.left.saturating_sub(1);
        let one = &done.usage;
        match &mut self.usage {
            None => self.usage = Some(*one),
            Some(all) => {
                all.prompt_tokens += one.prompt_tokens;
                all.completion_tokens += one.completion_tokens;
                all.total_tokens += one.total_tokens;
                all.cached_tokens += one.cached_tokens;
                all.reasoning_tokens += one.reasoning_tokens;
            }
        }
    }

    /// Processes a token. Returns the entries of tokens that are now certain to be part of the
    /// answer.
    fn on_token(&mut self, index: usize, frame: &Frame) -> Vec<Entry> {
        let (
            Frame::TokenDelta {
                text,
                token_id,
                logprob,
                top_logprobs,
                ..
            },
            Some(choice),
        ) = (frame, self.choices.get_mut(index))
        else {
            return Vec::new();
        };
        choice.given += text.len();
        let wanted = self.logprobs && !(self.has_parts && text.is_empty());
        // With a prompt, there is one for each token: programs that score texts count them.
        let ends = self.tokenizer.is_end_of_generation(*token_id) && self.echo.is_empty();
        if logprob.is_some() && wanted && !ends {
            choice.pending.push_back(Entry {
                id: *token_id,
                logprob: *logprob,
                top: top_logprobs.clone(),
                start: choice.spelt,
                offset: choice.spelt_chars,
            });
            let spelt = choice.speller.push(*token_id);
            choice.spelt += spelt.len();
            choice.spelt_chars += spelt.chars().count();
        }
        choice.certain(self.has_parts)
    }

    /// Entries at the end of an answer. Without a matched stop text, the text that was held back is
    /// part of it.
    fn on_end(&mut self, index: usize, done: &Done) -> Vec<Entry> {
        let last = done.token_ids.last();
        let ended = last.is_some_and(|&id| self.tokenizer.is_end_of_generation(id));
        let all = ended || done.finish_reason == FinishReason::Length || self.has_parts;
        let choice = self.choices.get_mut(index);
        choice.map_or_else(Vec::new, |choice| choice.certain(all))
    }

    /// Object of the API with its common fields, choices, and optionally token counts.
    fn object(&self, chunk: bool, choices: Value, usage: Option<Value>) -> Value {
        let header = &self.header;
        let id = header.id;
        let (prefix, kind) = match (header.shape, chunk) {
            (Shape::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Shape::Chat, false) => ("chatcmpl", "chat.completion"),
            // Chunks of the older API use the name of the whole object.
            (Shape::Text, _) => ("cmpl", "text_completion"),
        };
        let fingerprint = fingerprint(header.weights, &self.arithmetic);
        let mut object = json!({
            "id": format!("{prefix}-{id:032x}"), "object": kind, "created": header.created,
            "model": header.model, "system_fingerprint": fingerprint, "choices": choices,
        });
        if let Some(usage) = usage {
            object["usage"] = usage;
        }
        object
    }

    fn chunk(
        &self,
        index: usize,
        delta: Value,
        logprobs: Value,
        reason: Option<FinishReason>,
    ) -> Value {
        let content = match self.header.shape {
            Shape::Chat => "delta",
            Shape::Text => "text",
        };
        let choice = json!({
            "index": index, content: delta, "logprobs": logprobs, "finish_reason": reason,
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
                        let top = entry.top.iter().map(|&(id, p)| self.token(id, Some(p)));
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
    fn token(&self, id: u32, logprob: Option<f32>) -> Value {
        let bytes = self.bytes(id);
        json!({
            "token": String::from_utf8_lossy(bytes),
            "logprob": logprob.map(|logprob| logprob.max(LEAST_LOGPROB)),
            "bytes": bytes,
        })
    }

    /// Log-probabilities in the format of `/v1/completions`: parallel lists.
    fn older(&self, entries: &[Entry]) -> Value {
        let top = |entry: &Entry| {
            if entry.logprob.is_none() {
                return Value::Null;
            }
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
            "token_logprobs": list(&|entry| {
                entry.logprob.map(|logprob| logprob.max(LEAST_LOGPROB)).into()
            }),
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

impl Choice {
    /// Removes the entries of tokens that are certain to be part of the answer: those of the text
    /// sent so far, or `all`.
    fn certain(&mut self, all: bool) -> Vec<Entry> {
        let sure = |entry: &&Entry| all || entry.start < self.given;
        let count = self.pending.iter().take_while(sure).count();
        self.pending.drain(..count).collect()
    }
}

/// Fields of a frame about the hosts and the speed of an answer, without any text of the answer.
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

fn usage(usage: &Usage) -> Value {
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
