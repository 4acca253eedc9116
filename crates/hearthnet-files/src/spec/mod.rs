//! Hyperparameters of a model, as data that an engine interprets.
//!
//! | concept | where |
//! |---|---|
//! | a model | this file |
//! | one block of a model, its tensors and their shapes | [`ModelSpec::block`], `block.rs` |
//! | attention, position embedding | `attention.rs`, `rope.rs` |
//! | mixtures of experts | `experts.rs` |
//! | recurrences, and what a sequence keeps for them | `recurrent.rs` |
//! | models that make vectors of texts | `encoder.rs` |

mod attention;
mod block;
mod check;
mod encoder;
mod experts;
mod recurrent;
mod rope;

use serde::{Deserialize, Serialize};

use crate::boundary::BoundaryDtype;
pub use attention::{
    AttentionSpec, CacheDtype, LatentSpec, QkNorm, SharedKeysSpec, TemperatureSpec, WindowHeads,
    WindowSpec,
};
pub use block::{BlockSpec, CutError, Dim, FeedForwardSpec, LayerTensor, Mixer};
pub use check::{MAX_SIZE, SpecError};
use check::{base, ensure, epsilon, is_default, positive, size};
pub use encoder::EncoderSpec;
pub use experts::{
    ExpertSpec, GroupSpec, LeadingSpec, MAX_EXPERTS, MAX_EXPERTS_USED, SharedExpertSpec,
};
pub use recurrent::{ConvolutionSpec, DeltaSpec, MAX_CONVOLUTION, MambaSpec, StateSize};
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
    /// Values per head, even. (Blocks with a window may have other heads: see [`WindowHeads`].)
    pub head_dim: u32,
    /// Width of the feed-forward layer, or of each expert, in values.
    pub ffn: u32,
    pub vocab: u32,
    /// Context length in positions; longer sequences are refused.
    pub context: u32,
    /// Added to the mean square in RMSNorm, to the variance in LayerNorm.
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
    /// Added to the mean square in these norms; `None` for `norm_eps`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub post_norm_eps: Option<f32>,
    /// Whether the embedding of a token is normalised (RMSNorm without weights).
    #[serde(default, skip_serializing_if = "is_default")]
    pub embedding_norm: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub scales: ScaleSpec,
    /// Blocks with a gated delta rule instead of attention; `None`: all blocks have attention.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delta: Option<DeltaSpec>,
    /// Blocks with a gated short convolution instead of attention; not together with `delta`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub convolution: Option<ConvolutionSpec>,
    /// Mamba-2 of the blocks that [`Self::mixers`] names.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mamba: Option<MambaSpec>,
    /// A letter for each block: `M` for Mamba-2, `*` for attention, `-` for neither. Empty if the
    /// other fields tell which block has what.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mixers: String,
    /// Whether a block with Mamba-2 or attention has no feed-forward layer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub single: bool,
    /// Blocks for multi-token prediction behind the last block. They are part of the model, but
    /// nothing uses them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prediction: u32,
    /// Matrices of their own that these blocks have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prediction_tables: PredictionTables,
    /// Blocks that use keys and values of an earlier block; `None`: each block has its own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_keys: Option<SharedKeysSpec>,
    /// Whether the output of each block is multiplied by a stored factor.
    #[serde(default, skip_serializing_if = "is_default")]
    pub block_scale: bool,
    /// Input of each block beside the residual stream, which depends on the row's token only.
    #[serde(default, skip_serializing_if = "is_default")]
    pub per_layer: Option<PerLayerSpec>,
    /// Model that makes vectors of whole texts; `None` for a model that continues texts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub encoder: Option<EncoderSpec>,
}

/// Number formats that a user may choose. All other hyperparameters are those of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct Formats {
    /// Format of the residual stream between blocks.
    pub boundary: BoundaryDtype,
    /// Format of keys and values.
    pub cache: CacheDtype,
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

/// Per-layer embeddings: a second embedding gives `width` values per block for each token. Together
/// with a projection of the first embedding they are the block's per-layer input.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerLayerSpec {
    /// Values per block.
    pub width: u32,
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
            ("shared_keys.ffn", self.shared_keys.and_then(|s| s.ffn)),
            ("per_layer.width", self.per_layer.map(|p| p.width)),
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
        let wide = self.heads.saturating_mul(self.head_dim) <= MAX_SIZE;
        ensure(wide, "heads", reason)?;
        let valid = self.rope.dims <= self.head_dim && self.rope.dims.is_multiple_of(2);
        ensure(
            valid,
            "rope.dims",
            "must be even and at most the head's width",
        )?;
        base("rope.theta", self.rope.theta)?;
        epsilon("norm_eps", self.norm_eps)?;
        if let Some(eps) = self.post_norm_eps {
            epsilon("post_norm_eps", eps)?;
            ensure(self.post_norms, "post_norm_eps", "needs these norms")?;
        }
        let gated = attention.output_gate || !attention.gate_matrix;
        ensure(gated, "attention.gate_matrix", "needs gates")?;
        self.rope.check()?;
        self.check_latent()?;
        self.check_cache()?;
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
        if let Some(convolution) = &self.convolution {
            convolution.check(self.layers, self.context)?;
            let reason = "must not be combined with a gated delta rule";
            ensure(self.delta.is_none(), "convolution.positions", reason)?;
        }
        self.check_mixers()?;
        self.check_windows()?;
        self.check_shared_keys()?;
        self.check_encoder()?;
        let per_layer = self.per_layer.map_or(0, |p| p.width);
        let reason = "must be at most 16777216 divided by the number of layers";
        let wide = per_layer.saturating_mul(self.layers) <= MAX_SIZE;
        ensure(wide, "per_layer.width", reason)?;
        let dense = self.per_layer.is_none() || self.experts.is_none();
        ensure(
            dense,
            "per_layer.width",
            "must not be combined with experts",
        )?;
        self.experts
            .map_or(Ok(()), |experts| experts.check(self.layers))
    }

    pub fn formats(&self) -> Formats {
        Formats {
            boundary: self.boundary,
            cache: self.attention.cache,
        }
    }

    /// Whether some blocks have a recurrence.
    pub fn is_recurrent(&self) -> bool {
        self.delta.is_some() || self.convolution.is_some() || self.mamba.is_some()
    }

    /// Checks Mamba-2, and the list of the blocks that have it.
    fn check_mixers(&self) -> Result<(), SpecError> {
        let Some(mamba) = self.mamba else {
            let plain = self.mixers.is_empty() && !self.single;
            return ensure(plain, "mixers", "must be combined with Mamba-2");
        };
        mamba.check(self.context)?;
        let each = self.mixers.len() == self.layers as usize;
        ensure(each, "mixers", "must have a letter for each block")?;
        let known = if self.single { "M*-" } else { "M*" };
        let known = self.mixers.chars().all(|letter| known.contains(letter));
        let reason = "must be of the letters M and *, and - if blocks have one or the other part";
        ensure(known, "mixers", reason)?;
        let others = self.delta.is_some()
            || self.convolution.is_some()
            || self.attention.latent.is_some()
            || self.shared_keys.is_some()
            || self.per_layer.is_some()
            || self.prediction > 0;
        let reason = "must not be combined with latent attention, another recurrence, shared keys, \
            per-layer inputs or multi-token prediction";
        ensure(!others, "mixers", reason)
    }

    /// Checks the heads of blocks with a window.
    fn check_windows(&self) -> Result<(), SpecError> {
        let attention = &self.attention;
        let grouped = attention.latent.is_none() && !self.is_recurrent();
        let plain = grouped || !(attention.keys_as_values || attention.value_norm);
        let reason = "must not be combined with latent attention or a recurrence";
        ensure(plain, "attention.keys_as_values", reason)?;
        let Some(local) = attention.window.and_then(|window| window.heads) else {
            return Ok(());
        };
        ensure(grouped, "attention.window.heads", reason)?;
        let (heads, dim) = (
            "attention.window.heads.kv_heads",
            "attention.window.heads.head_dim",
        );
        size(heads, local.kv_heads)?;
        size(dim, local.head_dim)?;
        size("attention.window.heads.rope_dims", local.rope_dims)?;
        let shared = self.heads.is_multiple_of(local.kv_heads);
        ensure(shared, heads, "must divide the number of heads")?;
        ensure(local.head_dim.is_multiple_of(2), dim, "must be even")?;
        let reason = "must be at most 16777216 divided by the number of heads";
        let wide = self.heads.saturating_mul(local.head_dim) <= MAX_SIZE;
        ensure(wide, dim, reason)?;
        let valid = local.rope_dims <= local.head_dim && local.rope_dims.is_multiple_of(2);
        let reason = "must be even and at most the head's width";
        ensure(valid, "attention.window.heads.rope_dims", reason)
    }

    /// Encoders have plain blocks.
    fn check_encoder(&self) -> Result<(), SpecError> {
        let exact = self.activation == Activation::GeluErf;
        let plain = self.encoder.is_some_and(|encoder| encoder.plain_ffn);
        let reason = "must be the activation of feed-forward layers without gate, and only of them";
        ensure(exact == plain, "activation", reason)?;
        let Some(encoder) = self.encoder else {
            return Ok(());
        };
        encoder.check()?;
        let plain = self.experts.is_none()
            && !self.is_recurrent()
            && self.shared_keys.is_none()
            && self.per_layer.is_none()
            && self.prediction == 0
            && self.attention.latent.is_none();
        let reason = "must not be combined with experts, recurrences, latent attention, shared keys or \
                      per-layer inputs";
        ensure(plain, "encoder", reason)?;
        let normed_twice = encoder.layer_norm && (self.post_norms || self.block_scale);
        let reason = "must not be combined with norms of branches";
        ensure(!normed_twice, "encoder.layer_norm", reason)
    }

    /// Blocks that use keys of an earlier block need one, with or without a window as they.
    fn check_shared_keys(&self) -> Result<(), SpecError> {
        let Some(shared) = self.shared_keys else {
            return Ok(());
        };
        let field = "shared_keys.blocks";
        let some = (1..self.layers).contains(&shared.blocks);
        let reason = "must be below the number of layers: the first layer has keys of its own";
        ensure(some, field, reason)?;
        let grouped = self.attention.latent.is_none() && !self.is_recurrent();
        let reason = "must not be combined with latent attention or a recurrence";
        ensure(grouped, field, reason)?;
        let plain = !self.attention.qkv_bias;
        ensure(plain, field, "must not be combined with biases of keys")?;
        let dense = shared.ffn.is_none() || self.experts.is_none();
        let reason = "must not differ from that of the other layers in a model with experts";
        ensure(dense, "shared_keys.ffn", reason)?;
        let mut sharing = self.layers - shared.blocks..self.layers;
        let found = sharing.all(|layer| self.block(layer).keys_of < layer);
        let reason =
            "must leave a layer with keys of its own of each kind, with and without window";
        ensure(found, field, reason)
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
                ensure(
                    fits(self.block(0).key_width()),
                    "attention.latent.keys",
                    reason,
                )?;
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

    /// Heads consist of whole blocks of the cache.
    fn check_cache(&self) -> Result<(), SpecError> {
        let attention = &self.attention;
        let (dim, local) = ("head_dim", "attention.window.heads.head_dim");
        let whole =
            |field, width: u32, reason| ensure(attention.cache.fits(width as usize), field, reason);
        let reason = "must be a multiple of 32 with attention.cache q8_0";
        match attention.latent.filter(|latent| latent.absorbed) {
            None => whole(dim, self.head_dim, reason)?,
            Some(latent) => whole(
                "attention.latent.keys",
                latent.keys.saturating_add(self.rope.dims),
                "plus rope.dims must be a multiple of 32 with attention.cache q8_0",
            )?,
        }
        let heads = attention.window.and_then(|window| window.heads);
        heads.map_or(Ok(()), |heads| whole(local, heads.head_dim, reason))
    }

    /// Values of the rows between blocks.
    pub fn row_shape(&self) -> RowShape {
        RowShape {
            width: self.width,
            per_layer: self.per_layer.map_or(0, |per_layer| per_layer.width),
        }
    }

    /// Values of a row before the blocks of a range, see [`RowShape::before`].
    pub fn row_values(&self, layers: &std::ops::Range<u32>) -> usize {
        self.row_shape().before(layers.len())
    }

    /// Bytes that a sequence keeps for blocks of a range, whatever its length.
    pub fn state_bytes(&self, layers: std::ops::Range<u32>) -> u64 {
        let states = layers.map(|layer| self.block(layer).state().total());
        4 * states.sum::<u64>()
    }
}

/// Values of the rows between blocks. Before blocks, a row is the residual stream, then the per-layer
/// inputs of these blocks in order. Behind them, it is the residual stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct RowShape {
    /// Values of the residual stream.
    pub width: u32,
    /// Values of the per-layer input of a block; 0 if the model has none.
    pub per_layer: u32,
}

impl RowShape {
    /// Rows of the residual stream alone.
    pub fn plain(width: u32) -> Self {
        Self {
            width,
            per_layer: 0,
        }
    }

    /// Values of a row before this many blocks.
    pub fn before(self, blocks: usize) -> usize {
        let inputs = (self.per_layer as usize).saturating_mul(blocks);
        (self.width as usize).saturating_add(inputs)
    }

    /// Removes the per-layer inputs from rows that have been through this many blocks.
    pub fn keep_outputs(self, blocks: usize, rows: &mut Vec<f32>) {
        let (values, width) = (self.before(blocks).max(1), self.width as usize);
        if values == width {
            return;
        }
        let count = rows.len() / values;
        for row in 1..count {
            rows.copy_within(row * values..row * values + width, row * width);
        }
        rows.truncate(count * width);
    }
}

/// Activation of a feed-forward gate `g`; `u` is the output of the up projection.
///
/// `Display` gives the name of the kernel on a card, a key of the self-test's digests. A spec has
/// another name for [`Self::SquaredRelu`].
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Default,
    Debug,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumIter,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "snake_case")]
pub enum Activation {
    /// `g / (1 + exp(-g))`
    #[default]
    Silu,
    Gelu,
    /// GELU by the error function: `g / 2 (1 + erf(g / sqrt(2)))`.
    #[serde(rename = "gelu_erf")]
    GeluErf,
    /// `max(u, 0)^2`. Feed-forward layers have no gate.
    #[serde(rename = "relu2")]
    SquaredRelu,
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
