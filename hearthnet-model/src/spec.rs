//! What a model computes, as data that an engine interprets.

use serde::{Deserialize, Serialize};

use crate::boundary::BoundaryDtype;

/// Hyperparameters of a model: everything besides the tensors that decides its numbers.
///
/// A [family](crate::families) fills it from a file's metadata. Nothing here is decoration: every
/// field is interpreted by the engine, and a feature that the engine does not have has no field
/// but is refused when the file is opened.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ModelSpec {
    /// The family's name, for example `llama`.
    pub architecture: String,
    /// Number of transformer blocks, at least 1.
    pub layers: u32,
    /// Width of the residual stream, in values.
    pub width: u32,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Values per head, even.
    pub head_dim: u32,
    /// Width of the feed-forward layer, in values.
    pub ffn: u32,
    /// Number of tokens that have an embedding.
    pub vocab: u32,
    /// Positions that the model was made for; a longer sequence is refused.
    pub context: u32,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f32,
    /// Rotary position embedding of queries and keys.
    pub rope: RopeSpec,
    /// Format of the residual stream between blocks.
    pub boundary: BoundaryDtype,
    /// Whether the output matrix is the embedding.
    pub tied_embedding: bool,
}

impl ModelSpec {
    /// Width of all query heads together, in values.
    pub fn query_width(&self) -> u32 {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Width of all key (or value) heads together, in values.
    pub fn kv_width(&self) -> u32 {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    /// Keys and values of one position in one layer, in bytes (both are kept as f16).
    pub fn kv_bytes_per_position_and_layer(&self) -> u64 {
        2 * 2 * u64::from(self.kv_width())
    }
}

/// Rotary position embedding: value pair `i` of the first `dims` values of a head is turned by
/// `position * theta^(-2i / dims)` radians. The rest of the head stays as it is.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Which values form a pair.
    pub kind: RopeKind,
    /// How many values of a head are turned: even, at most the head's width.
    pub dims: u32,
    /// Base of the frequencies, positive.
    pub theta: f64,
}

/// Which values of a head form the pairs that RoPE turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeKind {
    /// Neighbours: `2i` and `2i + 1` (ggml's "norm" kind). Llama files are stored for this one:
    /// the converter has permuted the rows of the query and key matrices.
    Interleaved,
    /// `i` and `i + dims / 2` (ggml's "neox" kind).
    Halves,
}

/// A tensor of a block, by what it does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum LayerTensor {
    /// RMSNorm before attention: `[width]`.
    AttnNorm,
    /// Queries: `[width, heads * head_dim]`.
    AttnQ,
    /// Keys: `[width, kv_heads * head_dim]`.
    AttnK,
    /// Values: `[width, kv_heads * head_dim]`.
    AttnV,
    /// Back to the residual stream: `[heads * head_dim, width]`.
    AttnOutput,
    /// RMSNorm before the feed-forward layer: `[width]`.
    FfnNorm,
    /// Gate, to which SiLU is applied: `[width, ffn]`.
    FfnGate,
    /// What the gate is multiplied with: `[width, ffn]`.
    FfnUp,
    /// Back to the residual stream: `[ffn, width]`.
    FfnDown,
}

/// A dimension of a tensor, in terms of the spec.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Dim {
    /// [`ModelSpec::width`]
    Width,
    /// [`ModelSpec::query_width`]
    Queries,
    /// [`ModelSpec::kv_width`]
    Keys,
    /// [`ModelSpec::ffn`]
    Ffn,
    /// [`ModelSpec::vocab`]
    Vocab,
}

impl Dim {
    /// The dimension's length in a model.
    pub fn of(self, spec: &ModelSpec) -> u64 {
        u64::from(match self {
            Self::Width => spec.width,
            Self::Queries => spec.query_width(),
            Self::Keys => spec.kv_width(),
            Self::Ffn => spec.ffn,
            Self::Vocab => spec.vocab,
        })
    }
}
