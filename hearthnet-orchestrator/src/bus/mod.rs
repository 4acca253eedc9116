//! Chat as a capability of the bus: `experimental.distributed_llm.chat@1.0`, from both sides.
//!
//! | what | where |
//! |---|---|
//! | a request as parameters, and what they may be | `request.rs` (pure) |
//! | answering with a [`Service`] | here |
//! | asking, and putting the answer together | `client.rs` |
//!
//! `specs/capability-bus.md` section 9 is the normative text. The frames of an answer become
//! events of the call. A caller that takes none holds up its own answer only, and one that
//! gives up ends it: the [`Answer`](crate::service::Answer) is dropped with the call.

mod client;
mod request;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use hearthnet_bus::calls::{CallContext, CallError, FrameSink, Handler};
use serde::Deserialize;
use serde_json::{Value, json};

use self::request::Given;
use crate::chat::Frame;
use crate::error::ChatError;
use crate::service::fair_queue::OWNER;
use crate::service::retries::Mark;
use crate::service::{Caller, Refusal, Service};

pub use self::client::{Frames, News, Unanswered, answer};
pub use self::request::{descriptor, params};

/// Answers calls of what [`descriptor`] says with a [`Service`].
#[allow(clippy::exhaustive_structs)] // Made by whoever registers it.
pub struct ChatHandler(pub Service);

impl Handler for ChatHandler {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        out: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        Box::pin(async move {
            let mark = Mark {
                request: self.0.digest(params.to_string().as_bytes()),
                connection: None,
            };
            let given: Given =
                serde_json::from_value(params).map_err(|e| CallError::bad_request("params", e))?;
            // The seed of a caller that does not care: 53 bits survive every JSON reader.
            let drawn = getrandom::u64()
                .map_err(|_| CallError::internal("the system gave no randomness"))?
                >> 11;
            let model = match (&given.model, self.0.models().first()) {
                (Some(id), _) => self.0.model(id).ok_or_else(|| {
                    let problem = format!("there is no model {id:?} here");
                    failure(&ChatError::BadRequest(problem))
                })?,
                (None, Some(first)) => first,
                (None, None) => {
                    return Err(CallError::bad_request("model", "this node has none"));
                }
            };
            let model = Arc::clone(model);
            let request = given.into_request(&model.text.sampling, drawn)?;
            let caller = match ctx.is_local {
                true => Caller::from(OWNER),
                // Among those who count together callers take turns as well.
                false => Caller {
                    name: format!("{}\0{}", ctx.answers, ctx.caller),
                    held_by: ctx.caller.to_string(),
                },
            };
            let asked = self.0.ask_as(&caller, &mark, &model.id, request);
            let mut answer = asked.map_err(|refusal| refused(&refusal))?;
            while let Some(frame) = answer.next().await {
                let (name, data) = event(&frame.map_err(|e| failure(&e))?)?;
                out.send(&name, &data).await?;
            }
            Ok(json!({}))
        })
    }
}

/// A frame as an event. The last one, `done`, leaves out what was sent already, so that it
/// stays small however long the answer was.
fn event(frame: &Frame) -> Result<(String, Value), CallError> {
    #[derive(Deserialize)]
    struct Tagged {
        event: String,
        data: Value,
    }
    let tagged = serde_json::to_value(frame).and_then(serde_json::from_value);
    let Tagged { event, mut data } =
        tagged.map_err(|_| CallError::internal("a frame cannot be written as JSON"))?;
    if event == "done"
        && let Some(data) = data.as_object_mut()
    {
        data.remove("text");
        data.remove("token_ids");
    }
    Ok((event, data))
}

/// A failed chat as the caller hears of it: its codes are codes of the bus.
pub fn failure(error: &ChatError) -> CallError {
    CallError::new(error.code(), error.to_string()).with_hint(error.hint())
}

/// A chat that was refused at once: its caller hears when to come back.
fn refused(refusal: &Refusal) -> CallError {
    let error = failure(&refusal.error);
    match refusal.retry_after {
        Some(after) => error.with_hint(format!(
            "ask the same again in {} s: then it comes before what is asked for the first time",
            after.as_secs()
        )),
        None => error,
    }
}

#[cfg(test)]
mod tests;
