//! Errors of starting a host, and of streams.

use hearthnet_bus::DescriptorError;
use hearthnet_engine::EngineError;
use hearthnet_transport::{BindError, Code, IdentityError, StreamClose, StreamError};

/// System resource that a load can run out of. The process of an engine sends its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
#[allow(clippy::exhaustive_enums)] // A new variant must break the callers, which handle each.
pub enum Resource {
    /// Memory for the weights.
    Memory = 1,
    /// Threads.
    Threads = 2,
}

/// Errors of starting a host. After an error nothing is left running or half open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The model file cannot be read, or is not a model.
    #[error(transparent)]
    Model(#[from] hearthnet_files::ModelError),
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
    /// The file holds other weights than expected.
    #[error("the model file holds weights {found}, not {expected}: fetch the right one")]
    WeightsMismatch { expected: String, found: String },
    /// The weights could not be loaded.
    #[error("the layers could not be loaded: {reason}")]
    Load { reason: String },
    /// The system lacks memory or threads. The file is sound.
    #[error("this machine cannot load the layers at the moment: {reason}")]
    TooLittle { resource: Resource, reason: String },
    /// The address is in use or not this machine's, or the transport is misconfigured.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// No certificate can be made from the node key.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The model's name or the endpoint is not valid in a descriptor.
    #[error("the host's descriptor is invalid: {0}; change the model id or the endpoint")]
    Descriptor(#[source] DescriptorError),
    /// A setting is out of its range.
    #[error("{setting} {rule}")]
    Setting {
        /// Field of the configuration.
        setting: &'static str,
        /// Rule that the value breaks.
        rule: &'static str,
    },
    /// The KV budget, or one caller's share of it, is less than one page.
    #[error(
        "{budget} bytes of memory for context are less than a page of {page} positions per caller: \
         these layers need at least {needed} bytes"
    )]
    KvBudget {
        /// Bytes of the budget.
        budget: u64,
        /// Bytes needed for one page per caller.
        needed: u64,
        /// Positions of a page.
        page: u32,
    },
    /// The system could not create the compute thread.
    #[error("the compute thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
}

impl StartError {
    /// Stable code, for machines.
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

/// Why the host refused or ended a stream. The caller receives the code and the sentence in a
/// [`StreamError`]. The code is the variant's name in snake case, or the one in `serialize`. It is
/// part of the protocol: a variant that is renamed keeps its code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum StreamFault {
    /// The caller asked for other weights than the host serves.
    #[error("this host serves weights {served}, not the requested ones; use the same model file")]
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
    #[error("this host serves layers {lo}-{hi} only; choose another host for the other layers")]
    LayerRange {
        /// First layer served.
        lo: u32,
        /// Last layer served.
        hi: u32,
    },
    /// The host's limit of open streams, for all callers together, is reached.
    #[error("all {max} streams that this host allows are taken; choose another host")]
    StreamLimit { max: u32 },
    /// The host's limit of open streams per caller is reached.
    #[error("this host allows a caller {max} streams at once; close one, or choose another host")]
    StreamQuota { max: u32 },
    /// The caller opens streams faster, over all its sessions, than the host allows.
    #[error("this caller opens streams too fast; reuse an open one, or try again in a moment")]
    StreamChurn,
    /// The stream number is in use in this epoch or a later one.
    #[error("stream {stream} has already reached epoch {current}; use a later epoch")]
    #[strum(serialize = "stale_epoch")]
    StaleOpen {
        /// The caller's stream number.
        stream: u32,
        /// Current epoch of the stream.
        current: u32,
    },
    /// The message belongs to an earlier epoch of the stream.
    #[error("the stream has reached epoch {current}; messages of earlier epochs are dropped")]
    StaleEpoch {
        /// Current epoch of the stream.
        current: u32,
    },
    /// The stream was never opened in this epoch, or was closed.
    #[error("there is no such stream here; open it first")]
    UnknownStream,
    /// The stream has ended; the message crossed the news of it.
    #[error("the stream has ended; a message that came too late was dropped")]
    StreamEnded,
    /// A step or truncation beyond the stream's end.
    #[error(
        "position {position} lies beyond the stream's {length} positions; replay the missing rows"
    )]
    PositionGap {
        /// The position asked for.
        position: u32,
        /// Positions that the stream holds.
        length: u32,
    },
    /// Rows of another width or element type than the model's, or none at all.
    #[error("the rows do not fit this model: {what}")]
    TensorShape { what: String },
    /// The rows contain NaN or an infinity.
    #[error("the rows contain values that are not finite; the previous host is at fault")]
    #[strum(serialize = "tensor_nonfinite")]
    TensorNonFinite,
    /// More positions than the stream was opened for, or than the host allows.
    #[error("the stream is limited to {max} positions; open it with more, or shorten the text")]
    ContextFull {
        /// Positions allowed.
        max: u32,
    },
    /// The KV budget, or one caller's share of it, is smaller than the stream.
    #[error(
        "this host's memory for context holds at most {holds} positions of a stream, not {asked}; \
         choose another host, or raise kv_budget_mb on this one"
    )]
    KvTooSmall {
        asked: u32,
        /// Positions that fit for one stream.
        holds: u32,
    },
    /// No KV page is free for the stream, or the engine is out of memory.
    #[error("the host's memory for context is full; choose another host, or try again later")]
    KvFull,
    /// The caller holds its whole share of the KV budget.
    #[error(
        "one caller may hold {percent} % of this host's memory for context; close a stream, or choose another host"
    )]
    KvQuota {
        /// Share of the budget that one caller may hold, in percent.
        percent: u32,
    },
    /// The streams outgrew the KV budget, and the host ended this one.
    #[error("the host ended the stream to free memory for others; reopen and replay it later")]
    Preempted,
    /// The stream's limit of waiting steps or rows is exceeded.
    #[error("too many steps of the stream are waiting; send the next one after an answer")]
    QueueFull,
    /// The caller's limit of waiting steps, over all its streams, is exceeded.
    #[error(
        "this caller has {max} waiting steps, which is its limit; send the next one after an answer"
    )]
    StepQuota { max: u32 },
    /// The stream was idle for longer than the host allows.
    #[error("the stream was idle for {seconds} s and has been closed")]
    IdleTimeout { seconds: u64 },
    /// A block's output left the range of the boundary dtype. Not a sign of a broken
    /// host: the model needs a wider boundary dtype for this input.
    #[error("the output of layer {layer} left the range of the model's boundary dtype")]
    BoundaryOverflow {
        /// The block, counted from 0 in the whole model.
        layer: u32,
    },
    /// The weights were unloaded and could not be loaded again.
    #[error("the host could not load its weights again: {reason}")]
    WeightsUnavailable { reason: String },
    /// The host is shutting down.
    #[error("the host is shutting down; choose another host")]
    ShuttingDown,
    /// The engine failed unexpectedly.
    #[error("the host's engine failed: {reason}")]
    Internal { reason: String },
}

impl StreamFault {
    /// Stable code, as on the wire, in counters and in logs.
    pub fn code(&self) -> Code {
        Code::new(self.into())
    }

    /// Message for the caller about the stream and epoch in `of`.
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
            EngineError::KvFull { .. }
            | EngineError::OutOfMemory { .. }
            | EngineError::DeviceMemory => Self::KvFull,
            EngineError::InputNotFinite { .. } => Self::TensorNonFinite,
            EngineError::BoundaryOverflow { layer, .. } | EngineError::OutOfRange { layer, .. } => {
                Self::BoundaryOverflow { layer }
            }
            other => Self::Internal {
                reason: other.to_string(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use strum::VariantNames;

    use super::*;

    #[test]
    fn the_specification_lists_every_code_and_no_other() {
        let codes = BTreeSet::from_iter(StreamFault::VARIANTS.iter().copied());
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
