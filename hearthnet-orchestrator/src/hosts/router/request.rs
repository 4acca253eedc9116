//! Input and output of the router: candidates, requirements, spans, errors.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};

use hearthnet_bus::{Descriptor, NodeId};

use super::policy_name::PolicyName;
use crate::error::ChatError;
use crate::exact::{Allowed, is_exact};
use crate::hosts::health::Standing;
use crate::hosts::tie_breaker::TieBreaker;

/// Host that may take part.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Validated descriptor.
    pub descriptor: Descriptor,
    /// Distance to the host: 0 in this process, 1 on the same LAN, 2 beyond.
    pub hop_weight: u32,
    pub is_self: bool,
    /// Rating by the caller, over all its calls.
    pub standing: Standing,
    /// Measured round trip of a decode step through one layer, in milliseconds; `None` without
    /// recent measurements.
    pub ms_per_layer: Option<f64>,
    /// Layers that such a step ran; 0 if it was of another model.
    pub seen_layers: u32,
    /// Number of recent streams that this caller gave it.
    pub streams: u32,
    /// By verdicts, its node has accused others falsely.
    pub is_false_accuser: bool,
}

impl Candidate {
    /// Candidate without any measurements.
    pub fn new(descriptor: Descriptor, hop_weight: u32, is_self: bool) -> Self {
        Self {
            descriptor,
            hop_weight,
            is_self,
            standing: Standing::Good,
            ms_per_layer: None,
            seen_layers: 0,
            streams: 0,
            is_false_accuser: false,
        }
    }

    pub(super) fn holds(&self, layer: u32) -> bool {
        let (lo, hi) = self.descriptor.layer_range;
        lo <= layer && layer <= hi
    }

    pub(super) fn is_exact(&self) -> bool {
        is_exact(&self.descriptor.arithmetic)
    }
}

/// Index of a usable candidate, and the candidate.
pub type Usable<'a> = (usize, &'a Candidate);

/// Contiguous layers on one candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index into the given candidates.
    pub candidate: usize,
    /// First layer.
    pub lo: u32,
    /// Last layer.
    pub hi: u32,
    /// Policy that chose it.
    pub policy: PolicyName,
}

/// Requirements of a route.
#[derive(Debug, Clone)]
pub struct RouteRequest<'a> {
    pub model_id: &'a str,
    /// Identity of the required weights, 64 hex digits.
    pub weights_sha256: &'a str,
    /// Required data type of the residual stream.
    pub boundary_dtype: &'a str,
    /// Allowed arithmetics.
    pub arithmetic: Allowed<'a>,
    /// Layers to cover: `0..=n-1` for a whole pipeline, one span for a replacement.
    pub layers: RangeInclusive<u32>,
    /// Number of layers of the whole model.
    pub total_layers: u32,
    /// Last layers of the model that one host must run together: some of them use keys and values of
    /// others. Empty if the model may be cut anywhere.
    pub together: Range<u32>,
    /// Maximum number of spans.
    pub max_shards: usize,
    /// True if the caller's own node may serve; as first shard only if no other is as good.
    pub allow_self: bool,
    pub exclude: &'a BTreeSet<NodeId>,
    /// Orders hosts that are otherwise equal.
    pub tie_breaker: &'a TieBreaker,
}

/// Reason that no route exists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// No usable shard holds this layer.
    #[error("no shard covers layer {layer} of {model_id}")]
    Uncovered {
        /// First layer without a shard.
        layer: u32,
        model_id: String,
    },
    /// No usable shard holds all layers that must run together.
    #[error(
        "no shard covers layers {first} to {last} of {model_id} together: the last ones use keys and \
         values of the first, so one host must hold them all"
    )]
    Together {
        first: u32,
        last: u32,
        model_id: String,
    },
    /// All shards of this model hold other weights.
    #[error("the shards on offer hold weights {found}, this chat needs {wanted}")]
    WeightsMismatch {
        wanted: String,
        /// Identity that a shard advertises.
        found: String,
    },
    /// All shards with the layers compute with another arithmetic.
    #[error(
        "the hosts of layer {layer} compute with {found}, but this chat needs {wanted}: its answer \
         would differ"
    )]
    ArithmeticMismatch {
        /// First layer without a usable shard.
        layer: u32,
        wanted: String,
        /// Arithmetic that a shard advertises.
        found: String,
    },
    /// All shards with the layers use another data type for rows.
    #[error("the hosts of layer {layer} pass rows on as {found}, and this chat needs {wanted}")]
    DtypeMismatch {
        /// First layer without a usable shard.
        layer: u32,
        wanted: String,
        /// Data type that a shard advertises.
        found: String,
    },
    /// The cover takes more spans than allowed.
    #[error("covering the model takes more than {max} shards")]
    TooManyShards { max: usize },
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
