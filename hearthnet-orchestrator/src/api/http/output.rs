//! An answer in the objects of its API, and the formats of streams. Pure.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Bytes;
use axum::response::sse::Event;
use hearthnet_http::ApiError;
use hearthnet_tokens::Tokenizer;
use parking_lot::Mutex;
use serde_json::Value;

use super::reply::Reply;
use super::stored::StoredResponses;
use super::translate::{Part, Translating};
use crate::chat::Frame;

/// Format of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// Server-sent events.
    Events,
    /// JSON objects, each on a line.
    Lines,
}

/// Answer of another API.
pub(super) struct OtherOutput {
    pub(super) translating: Translating,
    pub(super) format: Format,
    /// Store for the conversation of a complete response.
    pub(super) responses: Arc<Mutex<StoredResponses>>,
    /// Verified identity of the client, with which the store's limits count.
    pub(super) client: String,
    /// Key of the caller's conversations; a request with another key does not find the response.
    pub(super) held_by: String,
    /// Id of the response, by which the client refers to it.
    pub(super) id: String,
}

impl OtherOutput {
    /// Stores the conversation of a complete answer, if the client may refer to it.
    fn store(&mut self) {
        if let Some(messages) = self.translating.conversation() {
            let take = std::mem::take::<String>;
            let (client, held_by) = (take(&mut self.client), take(&mut self.held_by));
            let id = take(&mut self.id);
            self.responses.lock().put(client, held_by, id, &messages);
        }
    }
}

/// Makes objects of an API of an answer's frames.
pub(super) struct Output {
    pub(super) reply: Reply,
    pub(super) tokenizer: Tokenizer,
    pub(super) other: Option<OtherOutput>,
}

impl Output {
    pub(super) fn format(&self) -> Format {
        self.other
            .as_ref()
            .map_or(Format::Events, |other| other.format)
    }

    /// Parts of a stream for a frame of a prompt's answers.
    pub(super) fn parts(&mut self, prompt: usize, frame: &Frame) -> Vec<Part> {
        let chunks = self.reply.chunks(prompt, frame);
        let is_last = self.reply.is_complete();
        let Some(other) = &mut self.other else {
            let mut parts: Vec<Part> = chunks.iter().map(Part::of).collect();
            parts.extend(is_last.then(|| Part::Data(None, "[DONE]".to_owned())));
            return parts;
        };
        let parts = other.translating.parts(frame, &chunks, &self.tokenizer);
        if is_last {
            other.store();
        }
        parts
    }

    /// The whole answer, once the last frame has arrived.
    pub(super) fn whole(&mut self, prompt: usize, frame: &Frame) -> Option<Value> {
        let whole = self.reply.whole(prompt, frame)?;
        let Some(other) = &mut self.other else {
            return Some(whole);
        };
        let whole = other.translating.whole(frame, &whole, &self.tokenizer);
        other.store();
        Some(whole)
    }

    /// Last part of a stream that failed.
    pub(super) fn failed(&mut self, error: &ApiError) -> Part {
        match &mut self.other {
            Some(other) => other.translating.failed(error),
            None => Part::of(&error.body()),
        }
    }
}

/// JSON has no line breaks, so an object is one line of an event.
pub(super) fn event(part: Part) -> Event {
    match part {
        Part::Comment(text) => Event::default().comment(text),
        Part::Data(None, data) => Event::default().data(data),
        Part::Data(Some(name), data) => Event::default().event(name).data(data),
    }
}

/// Line of a stream of lines, which has no comments.
pub(super) fn line(part: Part) -> Option<Result<Bytes, Infallible>> {
    match part {
        Part::Comment(_) => None,
        Part::Data(_, data) => Some(Ok(Bytes::from(data + "\n"))),
    }
}
