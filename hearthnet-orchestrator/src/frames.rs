//! What a caller hears while an answer is made (M26 section 4.3; `specs/distributed-inference.md` 5).

use std::borrow::Cow;

use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

use crate::exact::Arithmetics;

/// One piece of the route, as `done` reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RouteHop {
    /// `<model_id>:<lo>-<hi>` of the layers that ran here.
    pub shard_id: String,
    /// Node id of the host; absent when the layers ran on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// `ADDR:PORT`; absent when the layers ran on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// First and last layer, inclusive.
    pub layers: (u32, u32),
    /// What the host says its layers and KV budget take, in MiB; for this machine, what they take.
    pub memory_mb: u64,
    /// What it computes with, as its descriptor names it: `canonical-1` is exact.
    #[serde(default)]
    pub arithmetic: String,
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
    /// 95th percentile of the same.
    pub overhead_us_p95: u32,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop text appeared.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
}

/// Tokens counted as the OpenAI interface does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, the one that ended the turn included.
    pub completion_tokens: u32,
    /// Both.
    pub total_tokens: u32,
    /// Tokens of the prompt that did not have to be run again.
    pub cached_tokens: u32,
}

/// Where the time went. Milliseconds unless said otherwise.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Timings {
    /// From the request to a pipeline that is ready to take rows.
    pub construct_ms: f64,
    /// From the request to the first token.
    pub first_token_ms: f64,
    /// Running the prompt.
    pub prefill_ms: f64,
    /// All tokens after the first.
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

/// The end of an answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Done {
    /// The whole text.
    #[serde(default)]
    pub text: String,
    /// The tokens it was made of.
    #[serde(default)]
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// Seed that reproduces this answer; absent when none was needed or given.
    pub seed: Option<u64>,
    /// Who ran which layers.
    pub route: Vec<RouteHop>,
    /// What the answer was computed with, by all who had a part in it: if that is `canonical-1` alone,
    /// the same request always has the same answer.
    #[serde(default)]
    pub arithmetic: Arithmetics,
    /// Where the time went.
    pub timings: Timings,
}

/// What a caller hears while an answer is made (M26 section 4.3).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Frame {
    /// A piece of text. It never ends inside a character.
    TokenDelta {
        /// New text; may be empty while a character or a stop text is incomplete.
        text: String,
        /// The token that was sampled.
        token_id: u32,
        /// Natural logarithm of its probability, when asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        logprob: Option<f32>,
        /// The likeliest tokens and their log-probabilities, when asked for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        top_logprobs: Vec<(u32, f32)>,
    },
    /// How much of a prompt has been run, where that takes long: at most five times a second.
    PromptProgress {
        /// Tokens that are through, those included that did not have to be run again.
        done: u32,
        /// Tokens of the prompt.
        total: u32,
    },
    /// What became of a host.
    ShardStatus {
        /// `<model_id>:<lo>-<hi>`.
        shard_id: String,
        /// Node id; absent for this machine.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// `ready`, `waiting` or `degraded`.
        status: Cow<'static, str>,
        /// Stable code of what went wrong, when it is degraded; `silent` or `busy` when it is
        /// waited for.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<Code>,
        /// What it computes with, when it is ready.
        #[serde(skip_serializing_if = "Option::is_none")]
        arithmetic: Option<String>,
    },
    /// The layers of a host that failed or leaves run elsewhere; the text goes on where it was.
    ShardFailover {
        /// `<model_id>:<lo>-<hi>`.
        shard_id: String,
        /// Node id of the host that failed; absent when this machine took over all layers.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// Stable code of what went wrong; `leaving` when nothing did.
        code: Code,
        /// Node ids of the hosts that took over; empty when this machine did.
        replacements: Vec<String>,
        /// Positions that were computed again.
        replayed: u32,
        /// From noticing the failure to the next row, in milliseconds.
        recovery_ms: f64,
        /// What the layers were computed with before and from here on, where that is not the same: the
        /// text goes on, but not as it would have.
        #[serde(skip_serializing_if = "Option::is_none")]
        arithmetic: Option<(Arithmetics, Arithmetics)>,
    },
    /// The answer ends here, unfinished: no host can take over, nor may this machine.
    PipelineAborted {
        /// Stable code of the error that follows.
        code: Code,
        /// A sentence for people.
        message: String,
    },
    /// The answer is complete.
    Done(Box<Done>),
}
