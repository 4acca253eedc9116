//! The caller's side: a request as parameters, events as frames. Pure.

use hearthnet_bus::calls::{CallError, Code};
use hearthnet_model::sampler::{SamplerConfig, SamplingChoice};
use serde_json::{Value, json};

use super::descriptor;
use crate::chat::{ChatRequest, Frame, Prompt};

/// The parameters of a call that asks `model` for what `request` asks, to the same answer; `None`
/// if the capability does not take so much, or has no name for it.
pub fn params(model: &str, request: &ChatRequest) -> Option<Value> {
    let sampling = &request.sampling;
    let chosen = SamplingChoice {
        temperature: Some(sampling.temperature),
        top_k: Some(sampling.top_k),
        top_p: Some(sampling.top_p),
        min_p: Some(sampling.min_p),
        repetition_penalty: Some(sampling.repetition_penalty),
        presence_penalty: Some(sampling.presence_penalty),
        frequency_penalty: Some(sampling.frequency_penalty),
    };
    // What it will be there.
    let there = chosen.over(SamplerConfig {
        seed: sampling.seed,
        logprobs: sampling.logprobs,
        ..SamplerConfig::default()
    });
    if there != *sampling {
        return None;
    }
    let mut params = json!(chosen);
    params["model"] = json!(model);
    params["stop"] = json!(request.stop);
    match &request.prompt {
        Prompt::Messages(messages) => params["messages"] = json!(messages),
        Prompt::Text(text) => params["prompt"] = json!(text),
        Prompt::Tokens(_) => return None,
    }
    if let Some(most) = request.max_tokens {
        params["max_tokens"] = json!(most);
    }
    if let Some(seed) = sampling.seed {
        params["seed"] = json!(seed);
    }
    if let Some(logprobs) = sampling.logprobs {
        params["logprobs"] = json!(logprobs);
    }
    descriptor(1).params.check(&params).ok()?;
    Some(params)
}

/// Puts the events of one call together again into the frames of an answer. What the last event
/// leaves out because it was sent before, the text and its tokens, is added to it.
#[derive(Debug, Default)]
pub struct Frames {
    text: String,
    token_ids: Vec<u32>,
}

impl Frames {
    /// The frame of an event; `None` for one of a later version.
    ///
    /// # Errors
    /// If it is the last one and cannot be read: there would be no answer.
    pub fn read(&mut self, event: &str, data: Value) -> Result<Option<Frame>, CallError> {
        let frame = serde_json::from_value(json!({ "event": event, "data": data }));
        let mut frame = match frame {
            Ok(frame) => frame,
            Err(error) if event == "done" => {
                return Err(CallError::new(Code::INTERNAL, error.to_string()));
            }
            Err(_) => return Ok(None),
        };
        match &mut frame {
            Frame::TokenDelta { text, token_id, .. } => {
                self.text.push_str(text);
                self.token_ids.push(*token_id);
            }
            Frame::Done(done) => {
                done.text = std::mem::take(&mut self.text);
                done.token_ids = std::mem::take(&mut self.token_ids);
                // Text that was held back to the end came with the last token once more.
                done.token_ids
                    .truncate(done.usage.completion_tokens as usize);
            }
            _ => {}
        }
        Ok(Some(frame))
    }
}
