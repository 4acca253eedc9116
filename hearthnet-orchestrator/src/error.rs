//! Errors of a chat, with their stable codes.

use hearthnet_tokens::grammar::GrammarError;
use hearthnet_transport::Code;

/// Reason that a chat ended without an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// Distributed inference is switched off on this node.
    #[error("distributed inference is switched off: policy.research.enable is false")]
    ExperimentalDisabled,
    /// No set of hosts covers the model, or a host refused or was lost.
    #[error("{0}")]
    ShardUnavailable(String),
    /// A host made no progress within the health timeout, or returned implausible rows.
    #[error("{0}")]
    PipelineStalled(String),
    /// A host holds other weights than this chat needs.
    #[error("{0}")]
    WeightsMismatch(String),
    /// The available hosts compute with an arithmetic that this chat does not allow.
    #[error("{0}")]
    ArithmeticMismatch(String),
    /// The request is invalid for this model.
    #[error("{0}")]
    BadRequest(String),
    /// The grammar of the answer is refused, or cannot be followed any further.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// An activation leaves the range of the boundary dtype. No host is at fault: every exact
    /// engine reports it for this text. A host can report it falsely, so this machine computes the
    /// step again if it can.
    #[error("{0}")]
    BoundaryOverflow(String),
    /// The prompt alone exceeds the model's context.
    #[error("the prompt has {tokens} tokens, this model reads at most {context}")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Longest sequence of the model.
        context: u32,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The queue of this node is full, or its chats use all of its memory.
    #[error("{0}")]
    Busy(String),
    /// The hosts have the layers, but no free stream or memory.
    #[error("{0}")]
    HostsFull(String),
    /// This node is shutting down and accepts no more chats.
    #[error("this node is shutting down")]
    ShuttingDown,
    /// The engine on this machine failed.
    #[error("the local engine failed: {0}")]
    Engine(String),
}

impl ChatError {
    /// Stable code, HTTP status and hint for the user.
    fn facts(&self) -> (&'static str, u16, &'static str) {
        match self {
            Self::ExperimentalDisabled => (
                "experimental_disabled",
                403,
                "set policy.research.enable = true in the configuration, or add \
                 --set policy.research.enable=true; --local needs neither",
            ),
            Self::ShardUnavailable(_) => (
                "shard_unavailable",
                503,
                "`hearthnet plan` says what is missing, and `hearthnet up` on another machine serves \
                 it; --local answers on this machine alone, if the whole model is here",
            ),
            Self::PipelineStalled(_) => (
                "pipeline_stalled",
                503,
                "ask again; `hearthnet status` shows whether the named host is there, and --local \
                 answers on this machine alone, if the whole model is here",
            ),
            Self::WeightsMismatch(_) => (
                "weights_mismatch",
                503,
                "every host must serve the same model file: compare `hearthnet model inspect` on \
                 each machine",
            ),
            Self::ArithmeticMismatch(_) => (
                "arithmetic_mismatch",
                503,
                "`hearthnet up` on a machine with the exact engine (the default) serves the layers; \
                 exact = \"any\" accepts other hosts as well",
            ),
            Self::BadRequest(_) | Self::TooLong { .. } => {
                ("bad_request", 400, "change the request and ask again")
            }
            Self::Grammar(_) => (
                "bad_request",
                400,
                "change the grammar or schema, or ask without it",
            ),
            Self::BoundaryOverflow(_) => (
                "boundary_overflow",
                400,
                "rephrase the prompt, or set \
                 research.distributed_inference.activation_dtype = \"fp32\" here and on the hosts",
            ),
            // The client is still listening, so another component has cancelled the chat.
            Self::Cancelled => ("cancelled", 503, "ask again"),
            Self::Busy(_) => ("busy", 429, "wait a little and ask again"),
            Self::HostsFull(_) => (
                "busy",
                429,
                "wait a little and ask again; for more room, add a host for these layers, or raise \
                 max_concurrent_streams and kv_budget_mb on the hosts",
            ),
            Self::ShuttingDown => {
                let hint = "ask another node, or this one when it is back";
                ("shutting_down", 503, hint)
            }
            Self::Engine(_) => {
                let hint = "check the memory and the model file of this machine";
                ("engine_failed", 500, hint)
            }
        }
    }

    pub fn code(&self) -> Code {
        Code::new(self.facts().0)
    }

    pub fn http_status(&self) -> u16 {
        self.facts().1
    }

    /// Returns true if a participating host caused the failure, or may have reported it falsely:
    /// this machine may be able to answer.
    pub fn blames_host(&self) -> bool {
        matches!(
            self,
            Self::ShardUnavailable(_)
                | Self::PipelineStalled(_)
                | Self::WeightsMismatch(_)
                | Self::ArithmeticMismatch(_)
                | Self::BoundaryOverflow(_)
                | Self::HostsFull(_)
        )
    }

    /// Advice for the user.
    pub fn hint(&self) -> &'static str {
        self.facts().2
    }
}
