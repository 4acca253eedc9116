//! Hyperparameters of a model, as data that an engine interprets.
//!
//! | concept | where |
//! |---|---|
//! | a model | this file |
//! | one block of a model, its tensors and their shapes | [`ModelSpec::block`], `block.rs` |
//! | attention, position embedding | `attention.rs`, `rope.rs` |
//! | mixtures of experts | `experts.rs` |
//! | recurrences, and what a sequence keeps for them | `recurrent.rs` |

mod attention;
mod block;
mod check;
mod experts;
mod recurrent;
mod rope;

use serde::{Deserialize, Serialize};

use crate::boundary::BoundaryDtype;
pub use attention::{AttentionSpec, LatentSpec, QkNorm, TemperatureSpec, WindowSpec};
pub use block::{BlockSpec, Dim, Feed, LayerTensor, Mixer};
pub use check::{MAX_SIZE, SpecError};
use check::{base, ensure, epsilon, is_default, positive, size};
pub use experts::{
    ExpertSpec, GroupSpec, LeadingSpec, MAX_EXPERTS, MAX_EXPERTS_USED, SharedExpertSpec,
};
pub use recurrent::{DeltaSpec, MAX_CONVOLUTION, StateSize};
pub use rope::{RopeKind, RopeScaling, RopeSpec, Rotation, YarnSpec};

/// Limit of blocks for multi-token prediction; published models have one.
pub const MAX_PREDICTION: u32 = 16;

/// Hyperparameters of a model: together with the tensors, they determine its results.
///
/// A [family](crate::families) fills it from a file's metadata. The engine interprets every field.
/// A feature without a field is refused when the file is opened.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ModelSpec {
    /// Architecture name of the family, for example `llama`.
    pub architecture: String,
    /// Number of transformer blocks, at least 1.
    pub layers: u32,
    /// Width of the residual stream, in values.
    pub width: u32,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: u32,
    pub kv_heads: u32,
    /// Values per head, even.
    pub head_dim: u32,
    /// Width of the feed-forward layer, in values.
    pub ffn: u32,
    pub vocab: u32,
    /// Context length in positions; longer sequences are refused.
    pub context: u32,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f32,
    pub rope: RopeSpec,
    /// Format of the residual stream between blocks.
    pub boundary: BoundaryDtype,
    pub tied_embedding: bool,
    /// Differences of attention from Llama's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention: AttentionSpec,
    /// Activation of the feed-forward gate.
    #[serde(default, skip_serializing_if = "is_default")]
    pub activation: Activation,
    /// Mixture of experts, each `ffn` values wide; `None` for dense feed-forward layers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub experts: Option<ExpertSpec>,
    /// Whether the outputs of attention and of the feed-forward layer are normalised before they
    /// are added to the residual stream.
    #[serde(default, skip_serializing_if = "is_default")]
    pub post_norms: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub scales: ScaleSpec,
    /// Blocks with a gated delta rule instead of attention; `None`: all blocks have attention.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delta: Option<DeltaSpec>,
    /// Blocks for multi-token prediction behind the last block. They are part of the model, but
    /// nothing uses them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prediction: u32,
    /// Matrices of their own that these blocks have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prediction_tables: PredictionTables,
}

/// Matrices of the vocabulary that each block for multi-token prediction has, beside the model's.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PredictionTables {
    #[serde(skip_serializing_if = "is_default")]
    pub embedding: bool,
    #[serde(skip_serializing_if = "is_default")]
    pub output: bool,
}

impl ModelSpec {
    /// Checks ranges and consistency of the values. (The shapes of tensors are checked separately.)
    ///
    /// # Errors
    /// [`SpecError`] for the first invalid field.
    pub fn check(&self) -> Result<(), SpecError> {
        let (attention, scales) = (&self.attention, &self.scales);
        let (window, temperature) = (attention.window, attention.temperature);
        for (field, value) in [
            ("layers", Some(self.layers)),
            ("width", Some(self.width)),
            ("heads", Some(self.heads)),
            ("kv_heads", Some(self.kv_heads)),
            ("head_dim", Some(self.head_dim)),
            ("ffn", Some(self.ffn)),
            ("vocab", Some(self.vocab)),
            ("context", Some(self.context)),
            ("rope.dims", Some(self.rope.dims)),
            ("rope.skip_every", self.rope.skip_every),
            ("attention.window.positions", window.map(|w| w.positions)),
            (
                "attention.window.global_every",
                window.and_then(|w| w.global_every),
            ),
            (
                "attention.temperature.positions",
                temperature.map(|t| t.positions),
            ),
        ] {
            size(field, value.unwrap_or(1))?;
        }
        for (field, value) in [
            ("attention.scale", attention.scale),
            ("attention.softcap", attention.softcap),
            ("attention.temperature.scale", temperature.map(|t| t.scale)),
            ("scales.embedding", scales.embedding),
            ("scales.residual", scales.residual),
            ("scales.logits", scales.logits),
            ("scales.logit_softcap", scales.logit_softcap),
        ] {
            positive(field, value)?;
        }
        let shared = self.heads.is_multiple_of(self.kv_heads);
        ensure(shared, "kv_heads", "must divide the number of heads")?;
        ensure(self.head_dim.is_multiple_of(2), "head_dim", "must be even")?;
        let reason = "must be at most 16777216 divided by the width of a head";
        ensure(self.query_width() <= MAX_SIZE, "heads", reason)?;
        let valid = self.rope.dims <= self.head_dim && self.rope.dims.is_multiple_of(2);
        ensure(
            valid,
            "rope.dims",
            "must be even and at most the head's width",
        )?;
        base("rope.theta", self.rope.theta)?;
        epsilon("norm_eps", self.norm_eps)?;
        self.rope.check()?;
        self.check_latent()?;
        let few = self.prediction <= MAX_PREDICTION;
        ensure(few, "prediction", "must be at most 16")?;
        let plain = !attention.output_gate || attention.latent.is_none();
        ensure(
            plain,
            "attention.output_gate",
            "must not be combined with latent attention",
        )?;
        self.delta
            .map_or(Ok(()), |delta| delta.check(self.context))?;
        self.experts
            .map_or(Ok(()), |experts| experts.check(self.layers))
    }

    /// Latent attention requires a key head per query head, or a single one if absorbed, and heads
    /// with a part without RoPE.
    fn check_latent(&self) -> Result<(), SpecError> {
        let Some(latent) = &self.attention.latent else {
            return Ok(());
        };
        let values = "attention.latent.values";
        size("attention.latent.queries", latent.queries.unwrap_or(1))?;
        size("attention.latent.keys", latent.keys)?;
        size(values, latent.values)?;
        match latent.absorbed {
            true => {
                ensure(self.kv_heads == 1, "kv_heads", "must be 1")?;
                let reason = "must be at most 16777216 divided by the number of heads";
                let fits =
                    |width: u32| self.heads.checked_mul(width).is_some_and(|w| w <= MAX_SIZE);
                ensure(fits(self.key_width()), "attention.latent.keys", reason)?;
                ensure(fits(latent.values), values, reason)?;
            }
            false => {
                let each = self.kv_heads == self.heads;
                ensure(each, "kv_heads", "must be the number of heads")?;
                let reason = "must not be above the head's width";
                ensure(latent.values <= self.head_dim, values, reason)?;
            }
        }
        let part = self.rope.dims < self.head_dim;
        ensure(part, "rope.dims", "must be below the head's width")?;
        epsilon("attention.latent.norm_eps", latent.norm_eps)
    }

    /// Bytes that a sequence keeps for blocks of a range, whatever its length.
    pub fn state_bytes(&self, layers: std::ops::Range<u32>) -> u64 {
        let states = layers.map(|layer| self.block(layer).state().total());
        4 * states.sum::<u64>()
    }

    /// Width of all query heads together, in values.
    pub fn query_width(&self) -> u32 {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Width of a key in the cache, in values.
    pub fn key_width(&self) -> u32 {
        match self.attention.latent {
            Some(latent) if latent.absorbed => latent.keys.saturating_add(self.rope.dims),
            _ => self.head_dim,
        }
    }

    /// Width of all key (or value) heads together, in values. (In latent attention values are
    /// padded to the width of keys.)
    pub fn kv_width(&self) -> u32 {
        self.kv_heads.saturating_mul(self.key_width())
    }

    /// Bytes of keys and values of one position in one layer, stored as f16.
    pub fn kv_bytes_per_position_and_layer(&self) -> u64 {
        2 * 2 * u64::from(self.kv_width())
    }
}

/// Activation of a feed-forward gate `g`; `u` is the output of the up projection.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// `g / (1 + exp(-g))`
    #[default]
    Silu,
    Gelu,
    /// Clamped SwiGLU: `(u + 1) * g / (1 + exp(-1.702 g))` with `g <= 7` and `-7 <= u <= 7`.
    Clamped,
}

/// Constant factors; `None` is 1.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScaleSpec {
    #[serde(skip_serializing_if = "is_default")]
    pub embedding: Option<f32>,
    /// Factor of the outputs that attention and feed-forward layer add to the residual stream.
    #[serde(skip_serializing_if = "is_default")]
    pub residual: Option<f32>,
    /// Divisor of the logits.
    #[serde(skip_serializing_if = "is_default")]
    pub logits: Option<f32>,
    /// `cap`: after the division, each logit `l` becomes `cap * tanh(l / cap)`.
    #[serde(skip_serializing_if = "is_default")]
    pub logit_softcap: Option<f32>,
}
