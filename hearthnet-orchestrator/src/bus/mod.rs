//! Chat as a capability of the bus: `experimental.distributed_llm.chat@1.0`.
//!
//! `specs/capability-bus.md` section 9 is the normative text. The frames of an answer become
//! events of the call. A caller that takes none holds up its own answer only, and one that
//! gives up ends it: the [`Answer`](crate::service::Answer) is dropped with the call.

mod chat_client;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use hearthnet_bus::Capability;
use hearthnet_bus::calls::{
    CallContext, CallError, CallLimits, CapabilityDescriptor, Code, FrameSink, Handler, Kind,
    Params, Trust,
};
use hearthnet_model::ChatMessage;
use hearthnet_model::sampler::{MAX_LOGPROBS, SamplerConfig, SamplingChoice};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::chat::{ChatRequest, Frame, Prompt};
use crate::error::ChatError;
use crate::service::retries::Mark;
use crate::service::{Refusal, Service};

pub use self::chat_client::{Frames, params};

/// Longest prompt or message, in bytes: what fits into one message of the bus, with room
/// for what JSON adds.
const MAX_TEXT: usize = 192 * 1024;
/// Messages of a conversation.
const MAX_MESSAGES: usize = 1024;
/// Most tokens of an answer, which the model's context bounds further.
const MAX_TOKENS: i64 = 32_768;
/// Texts that end an answer, and their longest, in bytes.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
/// Greatest seed: 53 bits survive every JSON reader.
const MAX_SEED: i64 = (1 << 53) - 1;
/// Longest answer, in seconds.
const MAX_SECONDS: u32 = 3600;

/// Answers calls with a [`Service`].
pub struct ChatHandler {
    service: Service,
}

impl ChatHandler {
    /// A handler for [`descriptor`].
    pub fn new(service: Service) -> Self {
        Self { service }
    }
}

/// The capability, for at most `concurrent` calls at once: those that are answered and those
/// that wait for their turn.
pub fn descriptor(concurrent: u32) -> CapabilityDescriptor {
    let number = |min, max| Kind::Number { min, max };
    let integer = |min, max| Kind::Integer { min, max };
    let message = Kind::Object {
        fields: Params::none()
            .required("role", Kind::one_of(&["system", "user", "assistant"]))
            .required("content", Kind::text(MAX_TEXT)),
    };
    CapabilityDescriptor {
        streaming: true,
        limits: CallLimits {
            concurrent: concurrent.max(1),
            concurrent_per_caller: concurrent.max(1),
            seconds: MAX_SECONDS,
        },
        params: Params::none()
            .optional("messages", Kind::list(MAX_MESSAGES, message))
            .optional("prompt", Kind::text(MAX_TEXT))
            .optional("model", Kind::text(256))
            .optional("max_tokens", integer(1, MAX_TOKENS))
            .optional("temperature", number(0.0, 100.0))
            .optional("seed", integer(0, MAX_SEED))
            .optional("top_k", integer(0, i64::from(u32::MAX)))
            .optional("top_p", number(0.0, 1.0))
            .optional("min_p", number(0.0, 1.0))
            .optional("repetition_penalty", number(0.0625, 16.0))
            .optional("presence_penalty", number(-2.0, 2.0))
            .optional("frequency_penalty", number(-2.0, 2.0))
            .optional("logprobs", integer(0, i64::from(MAX_LOGPROBS)))
            .optional("stop", Kind::list(MAX_STOPS, Kind::text(MAX_STOP_BYTES))),
        ..CapabilityDescriptor::new(
            Capability::chat(),
            "Answers with a model whose layers the community's machines hold.",
            Trust::Member,
        )
    }
}

/// The parameters, once the description has let them through.
#[derive(Deserialize)]
struct Given {
    messages: Option<Vec<ChatMessage>>,
    prompt: Option<String>,
    model: Option<String>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    seed: Option<u64>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logprobs: Option<u8>,
    #[serde(default)]
    stop: Vec<String>,
}

impl Given {
    /// The request, to a model that recommends `own`. `drawn` is the seed of a caller that does
    /// not care; it is reported with the answer.
    fn into_request(self, own: &SamplingChoice, drawn: u64) -> Result<ChatRequest, CallError> {
        let prompt = match (self.messages, self.prompt) {
            (Some(messages), None) if !messages.is_empty() => Prompt::Messages(messages),
            (None, Some(text)) => Prompt::Text(text),
            (Some(_), None) => {
                return Err(CallError::bad_request("messages", "must have at least one"));
            }
            _ => {
                let problem = "give one of messages and prompt";
                return Err(CallError::bad_request("params", problem));
            }
        };
        let chosen = SamplingChoice {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
        };
        Ok(ChatRequest {
            prompt,
            sampling: chosen.or_models(own).over(SamplerConfig {
                seed: Some(self.seed.unwrap_or(drawn)),
                logprobs: self.logprobs,
                ..SamplerConfig::default()
            }),
            max_tokens: self.max_tokens,
            stop: self.stop,
        })
    }
}

impl Handler for ChatHandler {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        out: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        Box::pin(async move {
            let mark = Mark {
                request: self.service.digest(params.to_string().as_bytes()),
                connection: None,
            };
            let given: Given =
                serde_json::from_value(params).map_err(|e| CallError::bad_request("params", e))?;
            let mut drawn = [0; 8];
            getrandom::fill(&mut drawn)
                .map_err(|_| CallError::new(Code::INTERNAL, "the system gave no randomness"))?;
            let model = match (&given.model, self.service.models().first()) {
                (Some(id), _) => self.service.model(id).ok_or_else(|| {
                    let problem = format!("there is no model {id:?} here");
                    failure(&ChatError::BadRequest(problem))
                })?,
                (None, Some(first)) => first,
                (None, None) => {
                    return Err(CallError::bad_request("model", "this node has none"));
                }
            };
            let model = Arc::clone(model);
            let drawn = u64::from_le_bytes(drawn) >> 11;
            let request = given.into_request(&model.text.sampling, drawn)?;
            let caller = ctx.caller.to_string();
            let asked = self.service.ask_as(&caller, &mark, &model.id, request);
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
    let broken = || CallError::new(Code::INTERNAL, "a frame cannot be written as JSON");
    let mut frame = serde_json::to_value(frame).map_err(|_| broken())?;
    let (Some(Value::String(name)), Some(mut data)) = (
        frame.get_mut("event").map(Value::take),
        frame.get_mut("data").map(Value::take),
    ) else {
        return Err(broken());
    };
    if name == "done"
        && let Some(data) = data.as_object_mut()
    {
        data.remove("text");
        data.remove("token_ids");
    }
    Ok((name, data))
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
