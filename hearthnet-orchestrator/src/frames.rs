//! Frames that a caller receives during an answer (`specs/distributed-inference.md` section 5).

use std::borrow::Cow;
use std::fmt;

use hearthnet_tokens::tools::{CallPiece, ToolCall};
use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

use crate::exact::Arithmetics;

/// Span of a route, as `done` reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RouteHop {
    /// `<model_id>:<lo>-<hi>` of the layers.
    pub shard_id: String,
    /// Node id of the host; absent when the layers ran on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// `ADDR:PORT`; absent when the layers ran on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// First and last layer, inclusive.
    pub layers: (u32, u32),
    /// Memory of the layers and the KV budget in MiB: as the host advertises it, or as used here.
    pub memory_mb: u64,
    /// Arithmetic of the host, as its descriptor names it; `canonical-1` is exact.
    #[serde(default)]
    pub arithmetic: String,
    /// Routing policy that chose the host; absent when no host was chosen.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub policy: Cow<'static, str>,
}

/// Time spent at one hop, over the decode steps of an answer.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HopTimes {
    /// Decode steps measured.
    pub steps: u64,
    /// Median of the host's compute time, in microseconds.
    pub compute_us_p50: u32,
    /// Median of the time a step waited in the host's queue, in microseconds.
    pub queue_us_p50: u32,
    /// Median of what remains of the round trip after compute: wire, TLS, queues and wake-ups.
    pub overhead_us_p50: u32,
    /// 95th percentile of the overhead, in microseconds.
    pub overhead_us_p95: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop text appeared.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// The model ended its turn with calls of tools.
    ToolCalls,
}

/// Tokens counted as the OpenAI interface does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Generated tokens, including the one that ended the turn.
    pub completion_tokens: u32,
    /// Sum of prompt and completion tokens.
    pub total_tokens: u32,
    /// Prompt tokens that were taken from the prefix cache.
    pub cached_tokens: u32,
    /// Generated tokens of reasoning.
    #[serde(default)]
    pub reasoning_tokens: u32,
}

/// Durations of the phases of an answer, in milliseconds unless the name says otherwise.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Timings {
    /// From the request to a pipeline that can take rows.
    pub construct_ms: f64,
    /// From the request to the first token.
    pub first_token_ms: f64,
    /// Duration of the prefill.
    pub prefill_ms: f64,
    /// Duration of all tokens after the first.
    pub decode_ms: f64,
    /// Prompt tokens per second of prefill.
    pub prefill_tokens_per_second: f64,
    /// Generated tokens per second after the first one.
    pub tokens_per_second: f64,
    /// Embedding, output matrix and sampling on this machine, per generated token.
    pub head_ms_per_token: f64,
    /// Per hop of the route.
    pub hops: Vec<HopTimes>,
}

/// Vector of a text.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
#[allow(clippy::exhaustive_structs)] // Made by the chat, read by every interface.
pub struct Embedding(pub Vec<f32>);

impl fmt::Debug for Embedding {
    /// Omits the values, which are activations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Embedding({} values)", self.0.len())
    }
}

/// Last frame of an answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Done {
    #[serde(default)]
    pub text: String,
    /// Reasoning before the text.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// Calls behind the text. If a limit ended the answer, the last one may be incomplete.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    #[serde(default)]
    pub token_ids: Vec<u32>,
    /// Vector of the text, if it was to be embedded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<Embedding>,
    pub finish_reason: FinishReason,
    pub usage: Usage,
    /// Seed that reproduces this answer; absent when none was needed or given.
    pub seed: Option<u64>,
    /// Hosts and their layers.
    pub route: Vec<RouteHop>,
    /// Arithmetics of all participants. If it is `canonical-1` alone, the same request always
    /// yields the same answer.
    #[serde(default)]
    pub arithmetic: Arithmetics,
    pub timings: Timings,
}

/// Frame that a caller receives during an answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Frame {
    /// Piece of text. It never ends inside a character.
    TokenDelta {
        /// Number of the answer that it belongs to, from 0.
        #[serde(default, skip_serializing_if = "is_zero")]
        choice: u32,
        /// New text; may be empty while a character or a stop text is incomplete.
        text: String,
        /// New text of the reasoning.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reasoning: String,
        /// New parts of calls.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<CallPiece>,
        token_id: u32,
        /// Natural logarithm of its probability, when asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        logprob: Option<f32>,
        /// The likeliest tokens and their log-probabilities, when asked for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        top_logprobs: Vec<(u32, f32)>,
    },
    /// Progress of a long prefill, sent at most five times a second.
    PromptProgress {
        /// Tokens processed so far, including cached ones.
        done: u32,
        /// Tokens of the prompt.
        total: u32,
    },
    /// Status of a host.
    ShardStatus {
        /// `<model_id>:<lo>-<hi>`.
        shard_id: String,
        /// Node id; absent for this machine.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// `ready`, `waiting` or `degraded`.
        status: Cow<'static, str>,
        /// Stable code of the failure if the host is degraded; `silent` or `busy` if the caller
        /// waits for it.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<Code>,
        /// Arithmetic of the host, if it is ready.
        #[serde(skip_serializing_if = "Option::is_none")]
        arithmetic: Option<String>,
    },
    /// The layers of a host that failed or leaves have moved; the answer continues.
    ShardFailover {
        /// `<model_id>:<lo>-<hi>`.
        shard_id: String,
        /// Node id of the host that failed; absent when this machine took over all layers.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// Stable code of the failure; `leaving` if the host did not fail.
        code: Code,
        /// Node ids of the hosts that took over; empty when this machine did.
        replacements: Vec<String>,
        /// Positions that were computed again.
        replayed: u32,
        /// From the detection of the failure to the next row, in milliseconds.
        recovery_ms: f64,
        /// Arithmetics of the layers before and after, if they differ: the rest of the text is then
        /// not what the first hosts would have produced.
        #[serde(skip_serializing_if = "Option::is_none")]
        arithmetic: Option<(Arithmetics, Arithmetics)>,
    },
    /// The answer ends unfinished: neither another host nor this machine can take over.
    PipelineAborted {
        code: Code,
        /// Sentence for the user.
        message: String,
    },
    /// Tokens of the prompt with their log probabilities, when asked for.
    Prompt { tokens: Vec<PromptToken> },
    /// An answer of several is complete. `done` counts this answer only.
    ChoiceDone { choice: u32, done: Box<Done> },
    /// The answer is complete. Of several answers it is the first one, and the counts are those of
    /// all.
    Done(Box<Done>),
}

/// Token of a prompt.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Built by the chat, read by every interface.
pub struct PromptToken {
    pub id: u32,
    /// Natural logarithm of its probability; absent for the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f32>,
    /// The likeliest tokens in its place and their log-probabilities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top_logprobs: Vec<(u32, f32)>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Arithmetics {
    /// Arithmetics of a route.
    pub fn of(route: &[RouteHop]) -> Self {
        route.iter().map(|hop| hop.arithmetic.clone()).collect()
    }

    /// Adds the arithmetics that a frame names.
    pub fn on_frame(&mut self, frame: &Frame) {
        match frame {
            Frame::ShardStatus {
                arithmetic: Some(name),
                ..
            } => self.extend(Self::from_iter([name.clone()])),
            Frame::ShardFailover {
                arithmetic: Some((before, now)),
                ..
            } => {
                self.extend(before.clone());
                self.extend(now.clone());
            }
            _ => {}
        }
    }
}
