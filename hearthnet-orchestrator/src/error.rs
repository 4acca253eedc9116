//! What can go wrong in a chat, with the stable codes of M26 section 6.

use crate::router::RouteError;
use hearthnet_transport::Code;

/// Who caused a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// This program or this machine.
    Us,
    /// A host that takes part.
    Peer,
    /// The caller's request.
    User,
}

/// Why a chat ended without an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// Distributed inference is switched off on this node.
    #[error("distributed inference is switched off: policy.research.enable is false")]
    ExperimentalDisabled,
    /// No set of hosts covers the model, or a host refused or was lost.
    #[error("{0}")]
    ShardUnavailable(String),
    /// A host made no progress within the health timeout, or returned numbers that cannot be right.
    #[error("{0}")]
    PipelineStalled(String),
    /// A host holds other weights than this chat needs.
    #[error("{0}")]
    WeightsMismatch(String),
    /// The hosts that have the layers compute with another arithmetic than this chat may have.
    #[error("{0}")]
    ArithmeticMismatch(String),
    /// The request makes no sense for this model.
    #[error("{0}")]
    BadRequest(String),
    /// What a block of the model computes from this text leaves the range of the boundary dtype. No host is
    /// at fault: every exact engine says the same.
    #[error("{0}")]
    BoundaryOverflow(String),
    /// The prompt alone does not fit into what the model reads.
    #[error("the prompt has {tokens} tokens, this model reads at most {context}")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Longest sequence of the model.
        context: u32,
    },
    /// The caller gave up.
    #[error("cancelled")]
    Cancelled,
    /// As many chats run and wait as this node allows, or its memory is taken by them.
    #[error("{0}")]
    Busy(String),
    /// The hosts have the layers, and no room: as many chats run there as may.
    #[error("{0}")]
    HostsFull(String),
    /// This node is about to stop and takes no more chats.
    #[error("this node is shutting down")]
    ShuttingDown,
    /// The engine on this machine failed.
    #[error("the local engine failed: {0}")]
    Engine(String),
}

impl ChatError {
    /// What everybody says alike of a failure: its stable code (as M26 section 6 names it), HTTP's
    /// status for it, who caused it, and what the user can do.
    fn facts(&self) -> (&'static str, u16, Blame, &'static str) {
        use Blame::{Peer, Us, User};
        match self {
            Self::ExperimentalDisabled => (
                "experimental_disabled",
                403,
                User,
                "set policy.research.enable = true in the configuration, or add \
                 --set policy.research.enable=true; --local needs neither",
            ),
            Self::ShardUnavailable(_) => (
                "shard_unavailable",
                503,
                Peer,
                "start hosts for the missing layers with `hearthnet shard serve`, or answer on \
                 this machine alone with --local",
            ),
            Self::PipelineStalled(_) => (
                "pipeline_stalled",
                503,
                Peer,
                "look at the named host, then ask again; --local answers on this machine alone",
            ),
            Self::WeightsMismatch(_) => (
                "weights_mismatch",
                503,
                Peer,
                "every host must serve the same model file: compare `hearthnet model inspect` on \
                 each machine",
            ),
            Self::ArithmeticMismatch(_) => (
                "arithmetic_mismatch",
                503,
                Peer,
                "hosts with the exact engine answer exactly (`hearthnet shard serve` without \
                 --backend); exact = \"any\" takes others as well",
            ),
            Self::BadRequest(_) | Self::TooLong { .. } => {
                ("bad_request", 400, User, "change the request and ask again")
            }
            // A host may claim it, so this machine computes it again if it can.
            Self::BoundaryOverflow(_) => (
                "boundary_overflow",
                400,
                Peer,
                "ask in other words, or set research.distributed_inference.activation_dtype = \"fp32\" \
                 here and on the hosts",
            ),
            // Whoever gave the chat up was not the client, which is still listening.
            Self::Cancelled => ("cancelled", 503, User, "ask again"),
            Self::Busy(_) => ("busy", 429, Us, "wait a little and ask again"),
            Self::HostsFull(_) => (
                "busy",
                429,
                Peer,
                "wait a little and ask again; another host for these layers, or \
                 max_concurrent_streams and kv_budget_mb on the hosts, make more room",
            ),
            Self::ShuttingDown => {
                let hint = "ask another node, or this one when it is back";
                ("shutting_down", 503, Us, hint)
            }
            Self::Engine(_) => {
                let hint = "check the memory and the model file of this machine";
                ("engine_failed", 500, Us, hint)
            }
        }
    }

    /// Stable code.
    pub fn code(&self) -> Code {
        Code::new(self.facts().0)
    }

    /// HTTP's status for it.
    pub fn http_status(&self) -> u16 {
        self.facts().1
    }

    /// Who caused it.
    pub fn blame(&self) -> Blame {
        self.facts().2
    }

    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        self.facts().3
    }
}

impl From<RouteError> for ChatError {
    fn from(error: RouteError) -> Self {
        match error {
            RouteError::WeightsMismatch { .. } => Self::WeightsMismatch(error.to_string()),
            RouteError::ArithmeticMismatch { .. } => Self::ArithmeticMismatch(error.to_string()),
            _ => Self::ShardUnavailable(error.to_string()),
        }
    }
}
