//! Why a host did not start, and why a stream was refused or ended.

use hearthnet_bus::DescriptorError;
use hearthnet_model::engine::EngineError;
use hearthnet_transport::{BindError, Code, IdentityError, StreamClose, StreamError};

use crate::engine::Resource;

/// Why a host did not start. Nothing is left running or half open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The model file cannot be read, or is none.
    #[error(transparent)]
    Model(#[from] hearthnet_model::ModelError),
    /// The model does not have these layers.
    #[error(
        "layers {lo}-{hi} do not exist: the model has {total}, so choose a range from 0 to {}",
        .total.saturating_sub(1)
    )]
    LayerRange {
        /// First layer asked for.
        lo: u32,
        /// Last layer asked for.
        hi: u32,
        /// Layers of the model.
        total: u32,
    },
    /// The file holds other weights than those that it was to hold.
    #[error("the model file holds weights {found}, not {expected}: fetch the right one")]
    WeightsMismatch {
        /// Identity that was expected.
        expected: String,
        /// Identity of the file's weights.
        found: String,
    },
    /// The weights could not be loaded.
    #[error("the layers could not be loaded: {reason}")]
    Load {
        /// What went wrong.
        reason: String,
    },
    /// The system gave too little memory, or no thread. The file is sound.
    #[error("this machine cannot load the layers at the moment: {reason}")]
    TooLittle {
        /// Of what.
        resource: Resource,
        /// What the system refused.
        reason: String,
    },
    /// The address is taken or not this machine's, or the transport is misconfigured.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// The node key makes no certificate.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The name of the model or the endpoint makes no valid descriptor.
    #[error("the host cannot be described to others: {0}; choose other names")]
    Descriptor(#[source] DescriptorError),
    /// A setting is out of its range.
    #[error("{setting} {rule}")]
    Setting {
        /// The field of the configuration.
        setting: &'static str,
        /// What it has to satisfy.
        rule: &'static str,
    },
    /// The KV budget, or the part of it that one caller may hold, is less than one page.
    #[error(
        "{budget} bytes of memory for context hold not one page of {page} positions for a caller: \
         these layers need {needed} bytes at least"
    )]
    KvBudget {
        /// Bytes of the budget.
        budget: u64,
        /// Bytes that it would have to be.
        needed: u64,
        /// Positions of a page.
        page: u32,
    },
    /// The system gave no thread.
    #[error("the system gave no thread to compute on: {0}")]
    Thread(#[source] std::io::Error),
}

impl StartError {
    /// The stable code, for machines.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::Model(_) => "model_unusable",
            Self::LayerRange { .. } => "layer_range",
            Self::WeightsMismatch { .. } => "weights_mismatch",
            Self::Load { .. } | Self::TooLittle { .. } => "weights_unavailable",
            Self::Listen(_) => "listen",
            Self::Setting { .. } | Self::KvBudget { .. } => "bad_request",
            Self::Descriptor(_) => "bad_descriptor",
            Self::Identity(_) | Self::Thread(_) => "internal",
        })
    }
}

/// Why the host refused or gave up a stream. Each has its own stable code, which the
/// caller receives in a [`StreamError`] together with the sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamFault {
    /// The caller asked for other weights than the ones hosted here.
    #[error("this host serves weights {served}, not those asked for; use the same model file")]
    WeightsMismatch {
        /// Identity of the weights served, in hex.
        served: String,
    },
    /// A layer range that no model of this depth has.
    #[error("layers {lo}-{hi} do not exist in a model of {total} layers")]
    BadDescriptor {
        /// First layer asked for.
        lo: u32,
        /// Last layer asked for.
        hi: u32,
        /// Layers of the model.
        total: u32,
    },
    /// A sensible range, but not all of it is hosted here.
    #[error("this host serves layers {lo}-{hi} only; choose another one for the rest")]
    LayerRange {
        /// First layer served.
        lo: u32,
        /// Last layer served.
        hi: u32,
    },
    /// As many streams are open as the host allows to all callers together.
    #[error("all {max} streams that this host allows are taken; choose another host")]
    StreamLimit {
        /// The limit that was reached.
        max: u32,
    },
    /// As many streams are open as the host allows to this caller.
    #[error(
        "this host serves one caller at most {max} streams at once; close one, or choose another host"
    )]
    StreamQuota {
        /// The limit that was reached.
        max: u32,
    },
    /// The caller opens streams faster, over all its sessions, than it may.
    #[error("this caller opens streams too fast; keep one, or come back in a moment")]
    StreamChurn,
    /// The stream number is in use in this life or a later one.
    #[error("stream {stream} has already reached epoch {current}; open it with a later one")]
    StaleOpen {
        /// The caller's stream number.
        stream: u32,
        /// The epoch that it has reached.
        current: u32,
    },
    /// The message belongs to an earlier life of the stream.
    #[error("the stream has reached epoch {current}; what an earlier one asked is dropped")]
    StaleEpoch {
        /// The epoch that it has reached.
        current: u32,
    },
    /// The stream was never opened in this life, or was closed.
    #[error("there is no such stream here; open it first")]
    UnknownStream,
    /// The stream has ended; this was on its way before the caller could know.
    #[error("the stream has ended; what was still on its way is dropped")]
    StreamEnded,
    /// A step or truncation beyond the stream's end.
    #[error(
        "position {position} lies beyond the stream's {length} positions; replay what is missing"
    )]
    PositionGap {
        /// The position asked for.
        position: u32,
        /// Positions that the stream holds.
        length: u32,
    },
    /// Rows of another width or element type than the model's, or none at all.
    #[error("the rows do not fit this model: {what}")]
    TensorShape {
        /// What does not fit.
        what: String,
    },
    /// The rows contain NaN or an infinity.
    #[error("the rows contain values that are not finite; the host before this one is at fault")]
    TensorNonFinite,
    /// More positions than the stream was opened for, or than the host allows.
    #[error(
        "the stream may hold {max} positions, and no more; open it with more, or shorten the text"
    )]
    ContextFull {
        /// Positions allowed.
        max: u32,
    },
    /// The KV budget, or the part of it that one caller may hold, could never hold the stream.
    #[error(
        "this host's memory for context holds a stream of {holds} positions, not of {asked}; \
         choose another host, or raise kv_budget_mb on this one"
    )]
    KvTooSmall {
        /// Positions asked for.
        asked: u32,
        /// Positions that one stream could have.
        holds: u32,
    },
    /// No page of KV is left for the stream to begin with.
    #[error("the host's memory for context is taken; choose another host, or come back later")]
    KvFull,
    /// Its caller holds all of the budget that one caller may.
    #[error(
        "one caller may hold {percent} % of this host's memory for context; close a stream, or choose another host"
    )]
    KvQuota {
        /// Share of the budget that one caller may hold, in percent.
        percent: u32,
    },
    /// The running streams outgrew the KV budget, and this one had to go.
    #[error("the host needed the stream's memory for others; open it again later, and replay it")]
    Preempted,
    /// More steps or rows wait than the stream may have waiting.
    #[error("too many steps of the stream are waiting; send the next when one was answered")]
    QueueFull,
    /// More steps wait, of all streams of the caller, than one caller may have waiting.
    #[error(
        "{max} steps of this caller are waiting, and no more may; send the next when one was answered"
    )]
    StepQuota {
        /// The limit that was reached.
        max: u32,
    },
    /// Nothing happened on the stream for too long.
    #[error("the stream was idle for {seconds} s and has been closed")]
    IdleTimeout {
        /// The limit.
        seconds: u64,
    },
    /// A block's output left the range of the boundary dtype. Not a sign of a broken
    /// host: the model needs a wider boundary dtype for this input.
    #[error("the output of layer {layer} left the range of the model's boundary dtype")]
    BoundaryOverflow {
        /// The block, counted from 0 in the whole model.
        layer: u32,
    },
    /// The weights had been put away and could not be loaded again.
    #[error("the host could not load its weights again: {reason}")]
    WeightsUnavailable {
        /// What went wrong.
        reason: String,
    },
    /// The host is shutting down.
    #[error("the host is shutting down; choose another one")]
    ShuttingDown,
    /// The engine failed in a way that it should not.
    #[error("the host's engine failed: {reason}")]
    Internal {
        /// What it said.
        reason: String,
    },
}

impl StreamFault {
    /// The stable code, as the wire, counters and logs spell it.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::WeightsMismatch { .. } => "weights_mismatch",
            Self::BadDescriptor { .. } => "bad_descriptor",
            Self::LayerRange { .. } => "layer_range",
            Self::StreamLimit { .. } => "stream_limit",
            Self::StreamQuota { .. } => "stream_quota",
            Self::StreamChurn => "stream_churn",
            Self::StaleOpen { .. } | Self::StaleEpoch { .. } => "stale_epoch",
            Self::UnknownStream => "unknown_stream",
            Self::StreamEnded => "stream_ended",
            Self::PositionGap { .. } => "position_gap",
            Self::TensorShape { .. } => "tensor_shape",
            Self::TensorNonFinite => "tensor_nonfinite",
            Self::ContextFull { .. } => "context_full",
            Self::KvTooSmall { .. } => "kv_too_small",
            Self::KvFull => "kv_full",
            Self::KvQuota { .. } => "kv_quota",
            Self::Preempted => "preempted",
            Self::QueueFull => "queue_full",
            Self::StepQuota { .. } => "step_quota",
            Self::IdleTimeout { .. } => "idle_timeout",
            Self::BoundaryOverflow { .. } => "boundary_overflow",
            Self::WeightsUnavailable { .. } => "weights_unavailable",
            Self::ShuttingDown => "shutting_down",
            Self::Internal { .. } => "internal",
        })
    }

    /// The message that tells the caller, for one life of a stream.
    pub(crate) fn message(&self, of: StreamClose, position: Option<u32>) -> StreamError {
        StreamError {
            stream: of.stream,
            epoch: of.epoch,
            position,
            code: self.code(),
            message: self.to_string(),
        }
    }
}

impl From<EngineError> for StreamFault {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::PositionGap { position, len, .. } => Self::PositionGap {
                position,
                length: len,
            },
            EngineError::ContextFull { limit, .. } => Self::ContextFull { max: limit },
            EngineError::KvFull { .. } | EngineError::OutOfMemory { .. } => Self::KvFull,
            EngineError::InputNotFinite { .. } => Self::TensorNonFinite,
            EngineError::BoundaryOverflow { layer, .. } => Self::BoundaryOverflow { layer },
            other => Self::Internal {
                reason: other.to_string(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_specification_lists_every_code_and_no_other() {
        let text = String::new;
        let faults = [
            StreamFault::WeightsMismatch { served: text() },
            StreamFault::BadDescriptor {
                lo: 1,
                hi: 0,
                total: 1,
            },
            StreamFault::LayerRange { lo: 0, hi: 1 },
            StreamFault::StreamLimit { max: 1 },
            StreamFault::StreamQuota { max: 1 },
            StreamFault::StreamChurn,
            StreamFault::StaleOpen {
                stream: 1,
                current: 1,
            },
            StreamFault::StaleEpoch { current: 1 },
            StreamFault::UnknownStream,
            StreamFault::StreamEnded,
            StreamFault::PositionGap {
                position: 1,
                length: 0,
            },
            StreamFault::TensorShape { what: text() },
            StreamFault::TensorNonFinite,
            StreamFault::ContextFull { max: 1 },
            StreamFault::KvTooSmall { asked: 2, holds: 1 },
            StreamFault::KvFull,
            StreamFault::KvQuota { percent: 1 },
            StreamFault::Preempted,
            StreamFault::QueueFull,
            StreamFault::StepQuota { max: 1 },
            StreamFault::IdleTimeout { seconds: 1 },
            StreamFault::BoundaryOverflow { layer: 1 },
            StreamFault::WeightsUnavailable { reason: text() },
            StreamFault::ShuttingDown,
            StreamFault::Internal { reason: text() },
        ];
        let codes: Vec<Code> = faults.iter().map(StreamFault::code).collect();
        let codes: BTreeSet<&str> = codes.iter().map(Code::as_str).collect();
        let spec = include_str!("../../specs/shard-host.md");
        let table = spec
            .split("## 4.")
            .nth(1)
            .and_then(|rest| rest.split("## 5.").next())
            .unwrap();
        let listed: BTreeSet<&str> = table
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
            .collect();
        assert_eq!(codes, listed);
    }
}
