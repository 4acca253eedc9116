//! APIs other than OpenAI's completions. Each request becomes one of those, and each answer is made
//! of the answer to it, so one code path reads requests and runs chats. Pure.
//!
//! Requests stay JSON here: a field that is not supported must be refused by its name, and the types
//! of crates for these APIs drop fields that they do not know.
//!
//! | API | where |
//! |---|---|
//! | Anthropic's messages | `anthropic.rs` |
//! | Ollama's chat and generate | `ollama.rs` |
//! | OpenAI's responses; items and tools of their requests | `responses.rs`; `response_input.rs`, `response_tools.rs` |
//! | pieces and ends, for all of them | `common.rs` |
//! | dates | `date.rs` |
//! | an answer on its way through a translation | here |

pub(super) mod anthropic;
mod common;
pub(super) mod date;
pub(super) mod ollama;
mod response_input;
mod response_tools;
pub(super) mod responses;
pub(super) mod vllm;

use std::time::Instant;

use hearthnet_http::ApiError;
use hearthnet_tokens::Tokenizer;
use serde_json::Value;

use self::common::{Answered, End, Piece, pieces};
pub(super) use self::common::{Part, Stamp, Translated, Translation};
use crate::chat::{Done, FinishReason, Frame, Timings};

/// Answer on its way into the objects of another API.
pub(super) struct Translating {
    translation: Box<dyn Translation>,
    /// Texts that end the answer.
    stops: Vec<String>,
    began: Instant,
    /// True once the first parts were sent.
    opened: bool,
    end: End,
}

impl Translating {
    /// `began` is the time of the request.
    pub(super) fn new(
        translation: Box<dyn Translation>,
        stops: Vec<String>,
        began: Instant,
    ) -> Self {
        let end = End {
            answered: Answered::default(),
            reason: String::new(),
            stop: None,
            usage: Value::Null,
            timings: Timings::default(),
            total: began.elapsed(),
        };
        Self {
            translation,
            stops,
            began,
            opened: false,
            end,
        }
    }

    /// Parts of a stream for a frame and OpenAI's chunks of it.
    pub(super) fn parts(
        &mut self,
        frame: &Frame,
        chunks: &[Value],
        tokenizer: &Tokenizer,
    ) -> Vec<Part> {
        let mut parts = Vec::new();
        for chunk in chunks {
            if !std::mem::replace(&mut self.opened, true) {
                parts.extend(self.translation.begin());
            }
            for piece in self.read(chunk) {
                parts.extend(self.translation.piece(&piece));
            }
        }
        if let Frame::Done(done) = frame {
            self.on_done(done, tokenizer);
            parts.extend(self.translation.end(&self.end));
        }
        parts
    }

    /// The whole answer, for the last frame and OpenAI's object.
    pub(super) fn whole(&mut self, frame: &Frame, object: &Value, tokenizer: &Tokenizer) -> Value {
        self.read(object);
        if let Frame::Done(done) = frame {
            self.on_done(done, tokenizer);
        }
        self.translation.whole(&self.end)
    }

    /// Last part of an answer that failed.
    pub(super) fn failed(&mut self, error: &ApiError) -> Part {
        self.translation.failed(error)
    }

    /// Messages to store, once the answer is complete.
    pub(super) fn conversation(&mut self) -> Option<Vec<Value>> {
        self.translation.conversation(&self.end)
    }

    /// Reads a chunk, or a whole object. Returns its pieces.
    fn read(&mut self, object: &Value) -> Vec<Piece> {
        if !object["usage"].is_null() {
            self.end.usage = object["usage"].clone();
        }
        let choice = &object["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.end.reason = reason.to_owned();
        }
        let pieces = pieces(choice);
        for piece in &pieces {
            self.end.answered.add(piece);
        }
        pieces
    }

    fn on_done(&mut self, done: &Done, tokenizer: &Tokenizer) {
        self.end.stop = matched_stop(done, &self.stops, tokenizer);
        self.end.timings = done.timings.clone();
        self.end.total = self.began.elapsed();
    }
}

/// Stop text that ended an answer: the tokens go on with it behind the text.
fn matched_stop(done: &Done, stops: &[String], tokenizer: &Tokenizer) -> Option<String> {
    if stops.is_empty() || done.finish_reason != FinishReason::Stop {
        return None;
    }
    let all = tokenizer.decode(&done.token_ids);
    let rest = all.strip_prefix(done.text.as_str())?;
    let fits = stops.iter().filter(|stop| rest.starts_with(stop.as_str()));
    // Of several, the one that ended first.
    fits.min_by_key(|stop| stop.len()).cloned()
}
