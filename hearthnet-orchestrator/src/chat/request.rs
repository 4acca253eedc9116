//! Requests of chats, and the model that the caller asks.

use hearthnet_files::Pooling;
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_tokens::{ChatMessage, ChatTemplate, Grammar, Tokenizer};

use super::turn::TurnOptions;
use crate::exact::Exact;
use crate::steps::logits_batcher::LogitsBatcher;

#[derive(Debug, Clone)]
pub enum Prompt {
    /// Conversation, rendered with the model's chat template.
    Messages(Vec<ChatMessage>),
    /// Text to continue as it is.
    Text(String),
    /// Token ids to continue as they are.
    Tokens(Vec<u32>),
}

/// Request for one answer.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    pub prompt: Prompt,
    /// Sampling parameters. Reproducible answers need a seed.
    pub sampling: SamplerConfig,
    /// Maximum number of generated tokens; the context may end the answer earlier. 0: the prompt is
    /// run, and the answer is empty. `None`: up to the context.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Rule for the arithmetics; `None` for the configured one. It decides which hosts a
    /// conversation runs on and which idle one may be taken over.
    pub exact: Option<Exact>,
    /// Grammar that the answer follows. A stop text or a limit may end the answer earlier.
    pub grammar: Option<Grammar>,
    /// Tools and reasoning. Only a chat has them.
    pub turn: TurnOptions,
    pub options: AnswerOptions,
}

/// Options of a request about its prompt, and the number of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built with `..AnswerOptions::default()`.
pub struct AnswerOptions {
    /// Answers to the prompt, 1 to [`MAX_CHOICES`]. Only a service gives more than one.
    pub choices: u32,
    /// Reports the log probabilities of the prompt's tokens ([`Frame::Prompt`](crate::frames::Frame::Prompt)). The prompt is then
    /// not taken from a kept conversation.
    pub prompt_logprobs: bool,
    /// Leaves the oldest turns of a conversation out that is too long for the context.
    pub drop_oldest: bool,
}

impl Default for AnswerOptions {
    fn default() -> Self {
        Self {
            choices: 1,
            prompt_logprobs: false,
            drop_oldest: false,
        }
    }
}

/// Maximum number of answers to one prompt: as many as a host has streams, by default.
pub const MAX_CHOICES: u32 = 8;

impl ChatRequest {
    /// Request for one of its choices alone.
    pub(crate) fn choice(&self, index: u32) -> Self {
        let mut request = self.clone();
        request.options.choices = 1;
        if index > 0 {
            let seed = request.sampling.seed.unwrap_or_default();
            request.sampling.seed = Some(choice_seed(seed, index));
            request.options.prompt_logprobs = false;
        }
        request
    }
}

/// Seed of a choice, from that of the request: the step is that of SplitMix64. Part of the interface
/// (`specs/http-api.md` 3).
pub fn choice_seed(seed: u64, index: u32) -> u64 {
    seed.wrapping_add(u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Caller's side of a model: everything except the blocks.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    /// Chat template, if the model file has one.
    pub template: Option<ChatTemplate>,
    /// Embedding, final norm and output matrix, shared by all chats with this model.
    pub head: LogitsBatcher,
    /// Longest sequence, in positions.
    pub context: u32,
    /// How the vectors of texts are made.
    pub pooling: Pooling,
    /// Sampling parameters of the model, for requests without their own.
    pub sampling: SamplingChoice,
}
