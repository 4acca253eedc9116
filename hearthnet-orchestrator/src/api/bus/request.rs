//! Conversion between a request and the parameters of a call. Pure.

use hearthnet_bus::Capability;
use hearthnet_bus::calls::{CallError, CallLimits, CapabilityDescriptor, Kind, Params};
use hearthnet_bus::log::Level;
use hearthnet_files::sampling::{MAX_LOGPROBS, SamplerConfig, SamplingChoice};
use hearthnet_tokens::ChatMessage;
use hearthnet_tokens::grammar::MAX_GRAMMAR_BYTES;
use hearthnet_tokens::tools::MAX_TOOLS;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::fields::Refused;
use crate::api::grammar::GrammarFields;
use crate::api::turn::TurnFields;
use crate::chat::{AnswerOptions, ChatRequest, MAX_CHOICES, Prompt, TurnOptions};
use crate::exact::Exact;

/// Longest prompt or message, in bytes: fits into one bus message, with room for JSON escapes.
pub(super) const MAX_TEXT: usize = 192 * 1024;
/// Maximum number of messages.
const MAX_MESSAGES: usize = 1024;
/// Maximum number of tokens; the model's context may limit it further.
const MAX_TOKENS: i64 = 32_768;
/// Maximum number of stop texts, and their maximum length in bytes.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
/// Maximum seed: JSON readers represent integers exactly up to 53 bits.
pub(super) const MAX_SEED: i64 = (1 << 53) - 1;
/// Maximum bytes of a field with a grammar, with what surrounds a schema in it.
const MAX_GRAMMAR: usize = MAX_GRAMMAR_BYTES + 4096;
/// Maximum duration of an answer, in seconds.
const MAX_SECONDS: u32 = 3600;

/// Descriptor of the capability, for at most `concurrent` running and waiting calls.
pub fn descriptor(concurrent: u32) -> CapabilityDescriptor {
    let number = |min, max| Kind::Number { min, max };
    let integer = |min, max| Kind::Integer { min, max };
    let message = Kind::Object {
        fields: Params::none()
            .required(
                "role",
                Kind::one_of(&["system", "user", "assistant", "tool"]),
            )
            .required("content", Kind::text(MAX_TEXT))
            .optional("reasoning_content", Kind::text(MAX_TEXT))
            .optional("tool_calls", Kind::list(MAX_TOOLS, Kind::json(MAX_TEXT)))
            .optional("tool_call_id", Kind::text(256)),
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
            .optional("n", integer(1, i64::from(MAX_CHOICES)))
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
            .optional("stop", Kind::list(MAX_STOPS, Kind::text(MAX_STOP_BYTES)))
            .optional("exact", Kind::one_of(Exact::NAMES))
            .optional("response_format", Kind::json(MAX_GRAMMAR))
            .optional("structured_outputs", Kind::json(MAX_GRAMMAR))
            .optional("json_schema", Kind::json(MAX_GRAMMAR))
            .optional("grammar", Kind::json(MAX_GRAMMAR))
            .optional("tools", Kind::list(MAX_TOOLS, Kind::json(MAX_TEXT)))
            .optional("tool_choice", Kind::json(1024))
            .optional("parallel_tool_calls", Kind::Flag)
            .optional("reasoning_effort", Kind::text(16))
            .optional("reasoning", Kind::json(1024))
            .optional("thinking_budget", integer(-1, MAX_TOKENS))
            .optional("chat_template_kwargs", Kind::json(8192)),
        ..CapabilityDescriptor::new(
            Capability::chat(),
            "Answers with a model whose layers the community's machines hold.",
            Some(Level::Member),
        )
    }
}

/// Parameters that have passed the schema.
#[derive(Serialize, Deserialize)]
pub(super) struct Given {
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<ChatMessage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u8>,
    #[serde(flatten)]
    chosen: SamplingChoice,
    #[serde(default)]
    stop: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exact: Option<Exact>,
    #[serde(flatten)]
    grammar: GrammarFields,
    #[serde(flatten)]
    turn: TurnFields,
}

impl From<Refused> for CallError {
    fn from(refused: Refused) -> Self {
        Self::bad_request(&refused.field, refused.problem)
    }
}

impl Given {
    /// Converts into a request to a model with the recommended sampling `own`. `drawn` is the seed
    /// if none is given; it is reported with the answer.
    pub(super) fn into_request(
        self,
        own: &SamplingChoice,
        drawn: u64,
    ) -> Result<ChatRequest, CallError> {
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
        let grammar = self.grammar.read()?;
        let turn = self.turn.read()?;
        if turn != TurnOptions::default() && !matches!(prompt, Prompt::Messages(_)) {
            let problem = "tools and reasoning need messages";
            return Err(CallError::bad_request("prompt", problem));
        }
        Ok(ChatRequest {
            prompt,
            sampling: self.chosen.or_models(own).over(SamplerConfig {
                seed: Some(self.seed.unwrap_or(drawn)),
                logprobs: self.logprobs,
                ..SamplerConfig::default()
            }),
            max_tokens: self.max_tokens,
            stop: self.stop,
            exact: self.exact,
            grammar: grammar.map(|asked| asked.grammar),
            turn,
            options: AnswerOptions {
                choices: self.n.unwrap_or(1),
                ..AnswerOptions::default()
            },
        })
    }
}

/// Parameters of a call that gives the same answer as `request`. `None` if the request exceeds a
/// limit or has a setting that the capability lacks.
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
    // Sampling parameters as the service will see them.
    let there = chosen.over(SamplerConfig {
        seed: sampling.seed,
        logprobs: sampling.logprobs,
        ..SamplerConfig::default()
    });
    let options = AnswerOptions {
        choices: request.options.choices,
        ..AnswerOptions::default()
    };
    if there != *sampling || options != request.options {
        return None;
    }
    let (messages, prompt) = match &request.prompt {
        Prompt::Messages(messages) => (Some(messages.clone()), None),
        Prompt::Text(text) => (None, Some(text.clone())),
        Prompt::Tokens(_) => return None,
    };
    let given = Given {
        messages,
        prompt,
        model: Some(model.to_owned()),
        n: (options.choices != 1).then_some(options.choices),
        max_tokens: request.max_tokens,
        seed: sampling.seed,
        logprobs: sampling.logprobs,
        chosen,
        stop: request.stop.clone(),
        exact: request.exact,
        grammar: GrammarFields::of(request.grammar.as_ref()),
        turn: TurnFields::of(&request.turn),
    };
    let params = serde_json::to_value(given).ok()?;
    descriptor(1).params.check(&params).ok()?;
    Some(params)
}
