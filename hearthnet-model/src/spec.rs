//! What a model computes, as data that an engine interprets.

use serde::{Deserialize, Serialize};

use crate::boundary::BoundaryDtype;

/// Longest row, column, list or sequence: far beyond any model, far from any overflow.
pub const MAX_SIZE: u32 = 1 << 24;

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
    /// Checks that the values are possible and fit one another. (Whether tensors fit them is
    /// checked with the tensors.)
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn check(&self) -> Result<(), SpecError> {
        let fail = |field, reason| Err(SpecError { field, reason });
        for (field, value) in [
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("context", self.context),
            ("rope.dims", self.rope.dims),
        ] {
            if !(1..=MAX_SIZE).contains(&value) {
                return fail(field, "must be between 1 and 16777216");
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail("kv_heads", "must divide the number of heads");
        }
        if !self.head_dim.is_multiple_of(2) {
            return fail("head_dim", "must be even");
        }
        if self.query_width() > MAX_SIZE {
            return fail(
                "heads",
                "the heads together must not be wider than 16777216",
            );
        }
        if self.rope.dims > self.head_dim || !self.rope.dims.is_multiple_of(2) {
            return fail("rope.dims", "must be even and at most the head's width");
        }
        if !(1.0..=f64::from(f32::MAX)).contains(&self.rope.theta) {
            return fail("rope.theta", "must be a finite number of at least 1");
        }
        if !(f32::MIN_POSITIVE..1.0).contains(&self.norm_eps) {
            return fail("norm_eps", "must lie between 0 and 1");
        }
        Ok(())
    }

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

/// A hyperparameter that is out of range or at odds with another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} {reason}")]
pub struct SpecError {
    /// The field of [`ModelSpec`], with a dot for those of [`RopeSpec`].
    pub field: &'static str,
    /// What it must be.
    pub reason: &'static str,
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
