//! Chat as a capability of the bus, `experimental.distributed_llm.chat@1.0`: handler and client.
//!
//! | concept | where |
//! |---|---|
//! | parameters of a request, and their limits | `request.rs` (pure) |
//! | handler over a [`Service`] | here |
//! | client that restores the frames | `client.rs` |
//!
//! `specs/capability-bus.md` section 9 is the normative text. The frames of an answer become events
//! of the call. A caller that reads none delays its own answer only. If it cancels, the
//! [`Answer`](crate::service::Answer) is dropped with the call.

mod client;
mod request;

use futures_util::future::BoxFuture;
use hearthnet_bus::calls::{CallContext, CallError, FrameSink, Handler};
use serde::Deserialize;
use serde_json::{Value, json};

use self::request::Given;
use crate::chat::Frame;
use crate::error::ChatError;
use crate::service::fair_queue::{OWNER, Principal};
use crate::service::{Caller, Service};

pub use self::client::{Frames, News, Unanswered, answer};
pub use self::request::{descriptor, params};

/// Handles calls of the capability [`descriptor`] with a [`Service`].
#[allow(clippy::exhaustive_structs)] // Built by its callers.
pub struct ChatHandler(pub Service);

impl Handler for ChatHandler {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        out: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        Box::pin(async move {
            let given: Given =
                serde_json::from_value(params).map_err(|e| CallError::bad_request("params", e))?;
            // Seed for a caller that gives none; JSON readers are exact up to 53 bits.
            let drawn = getrandom::u64()
                .map_err(|_| CallError::internal("the system gave no randomness"))?
                >> 11;
            let model = match &given.model {
                Some(id) => self.0.model(id).ok_or_else(|| {
                    let problem = format!("there is no model {id:?} here");
                    failure(&ChatError::BadRequest(problem))
                })?,
                None => {
                    let first = self.0.models().into_iter().next();
                    first.ok_or_else(|| CallError::bad_request("model", "this node has none"))?
                }
            };
            let request = given.into_request(&model.text.sampling, drawn)?;
            let caller = match ctx.is_local {
                true => Caller::from(OWNER),
                // Callers that share a quota are queued fairly among each other as well.
                false => Caller {
                    principal: Principal {
                        identity: ctx.quota_key.to_string(),
                        user: ctx.caller.to_string(),
                    },
                    held_by: ctx.caller.to_string(),
                },
            };
            let asked = self.0.ask(caller, &model.id, request);
            let mut answer = asked.map_err(|error| self.refused(&error))?;
            while let Some(frame) = answer.next().await {
                let (name, data) = event(&frame.map_err(|e| failure(&e))?)?;
                out.send(&name, &data).await?;
            }
            Ok(json!({}))
        })
    }
}

/// Event for a frame. `done` and `choice_done` omit text, calls and tokens already sent, so that
/// their size is bounded.
fn event(frame: &Frame) -> Result<(String, Value), CallError> {
    #[derive(Deserialize)]
    struct Tagged {
        event: String,
        data: Value,
    }
    let tagged = serde_json::to_value(frame).and_then(serde_json::from_value);
    let Tagged { event, mut data } =
        tagged.map_err(|_| CallError::internal("a frame cannot be written as JSON"))?;
    let done = match event.as_str() {
        "done" => Some(&mut data),
        "choice_done" => data.get_mut("done"),
        _ => None,
    };
    if let Some(data) = done.and_then(Value::as_object_mut) {
        for sent in ["text", "token_ids", "reasoning", "tool_calls"] {
            data.remove(sent);
        }
    }
    Ok((event, data))
}

/// Call error of a failed chat, with the same code.
pub fn failure(error: &ChatError) -> CallError {
    CallError::new(error.code(), error.to_string()).with_hint(error.hint())
}

impl ChatHandler {
    /// Call error of a refused chat; if the queue is full, its hint has the retry delay.
    fn refused(&self, error: &ChatError) -> CallError {
        let call_error = failure(error);
        match error {
            ChatError::Busy(_) => {
                let seconds = self.0.retry_after().as_secs();
                call_error.with_hint(format!("repeat the request in {seconds} s"))
            }
            _ => call_error,
        }
    }
}

#[cfg(test)]
mod tests;
