//! Hyperparameters of a model, as data that an engine interprets.

use serde::{Deserialize, Serialize};

use crate::boundary::BoundaryDtype;

/// Limit of all widths, counts and lengths: above any real model, and far from overflow.
pub const MAX_SIZE: u32 = 1 << 24;
/// Limit of experts per layer; the largest models have some hundreds.
pub const MAX_EXPERTS: u32 = 4096;
/// Limit of experts per row; current models use 2 to 16.
pub const MAX_EXPERTS_USED: u32 = 64;

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
    /// Mixture of experts, each `ffn` values wide; `None` for a dense feed-forward layer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub experts: Option<ExpertSpec>,
    /// Whether the outputs of attention and of the feed-forward layer are normalised before they
    /// are added to the residual stream.
    #[serde(default, skip_serializing_if = "is_default")]
    pub post_norms: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub scales: ScaleSpec,
}

/// Predicate of `skip_serializing_if`. The serialised spec omits default values, so that a new
/// field does not change the identity of models that do not use it.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
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
        self.experts.map_or(Ok(()), |experts| experts.check())
    }

    /// Latent attention requires a key head per query head, and heads with a part without RoPE.
    fn check_latent(&self) -> Result<(), SpecError> {
        let Some(latent) = &self.attention.latent else {
            return Ok(());
        };
        let values = "attention.latent.values";
        size("attention.latent.queries", latent.queries)?;
        size("attention.latent.keys", latent.keys)?;
        size(values, latent.values)?;
        let each = self.kv_heads == self.heads;
        ensure(each, "kv_heads", "must be the number of heads")?;
        let reason = "must not be above the head's width";
        ensure(latent.values <= self.head_dim, values, reason)?;
        let part = self.rope.dims < self.head_dim;
        ensure(part, "rope.dims", "must be below the head's width")?;
        epsilon("attention.latent.norm_eps", latent.norm_eps)
    }

    /// Sliding window of a block: positions that a row attends to, its own included; `None` for
    /// all.
    pub fn window(&self, layer: u32) -> Option<u32> {
        let window = self.attention.window?;
        let global = window
            .global_every
            .is_some_and(|every| (layer + 1).is_multiple_of(every));
        (!global).then_some(window.positions)
    }

    pub fn rotation(&self, layer: u32) -> Rotation {
        match self.rope.skip_every {
            Some(every) if (layer + 1).is_multiple_of(every) => Rotation::None,
            _ if self.rope.local_theta.is_some() && self.window(layer).is_some() => Rotation::Local,
            _ => Rotation::Global,
        }
    }

    /// Width of all query heads together, in values.
    pub fn query_width(&self) -> u32 {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Width of the outputs of all heads together, in values.
    pub fn attended_width(&self) -> u32 {
        let values = self.attention.latent.map_or(self.head_dim, |l| l.values);
        self.heads.saturating_mul(values)
    }

    /// Width of all key (or value) heads together, in values. (In latent attention values are
    /// padded to the width of keys.)
    pub fn kv_width(&self) -> u32 {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    /// Bytes of keys and values of one position in one layer, stored as f16.
    pub fn kv_bytes_per_position_and_layer(&self) -> u64 {
        2 * 2 * u64::from(self.kv_width())
    }
}

/// Error for a hyperparameter that is out of range or inconsistent with another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} {reason}")]
pub struct SpecError {
    /// Path of the field in [`ModelSpec`], for example `rope.dims`.
    pub field: &'static str,
    /// Requirement, for example `must be even`.
    pub reason: &'static str,
}

/// Optional features of attention. The default is Llama's attention.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttentionSpec {
    #[serde(skip_serializing_if = "is_default")]
    pub qkv_bias: bool,
    /// RMSNorm of queries and keys before RoPE.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm: Option<QkNorm>,
    #[serde(skip_serializing_if = "is_default")]
    pub latent: Option<LatentSpec>,
    /// Whether the output projection has a bias.
    #[serde(skip_serializing_if = "is_default")]
    pub output_bias: bool,
    /// Whether each query head has a sink: the score of an extra softmax entry without a value.
    #[serde(skip_serializing_if = "is_default")]
    pub sinks: bool,
    /// Factor of the scores; `None` for `1 / sqrt(head_dim)`.
    #[serde(skip_serializing_if = "is_default")]
    pub scale: Option<f32>,
    /// `cap`: each score `s` becomes `cap * tanh(s / cap)`.
    #[serde(skip_serializing_if = "is_default")]
    pub softcap: Option<f32>,
    #[serde(skip_serializing_if = "is_default")]
    pub window: Option<WindowSpec>,
    /// Factor of the queries that grows with the position.
    #[serde(skip_serializing_if = "is_default")]
    pub temperature: Option<TemperatureSpec>,
}

/// Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): queries, and keys with values,
/// are up-projections of normalised low-rank rows. RoPE rotates only the last [`RopeSpec::dims`]
/// values of a head. For keys, these are common to all heads and do not come from the low-rank row.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentSpec {
    /// Width of the low-rank row of queries (`q_lora_rank`).
    pub queries: u32,
    /// Width of the low-rank row of keys and values (`kv_lora_rank`).
    pub keys: u32,
    /// Width of a value head (`v_head_dim`), at most [`ModelSpec::head_dim`].
    pub values: u32,
    /// Added to the mean square in the norms of the low-rank rows.
    pub norm_eps: f32,
}

/// Factor of the queries at position `p`: `1 + scale * ln(1 + floor(p / positions))`. It increases
/// the differences between scores at large positions.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemperatureSpec {
    /// Growth of the factor per unit of the logarithm.
    pub scale: f32,
    /// First position with a factor above 1.
    pub positions: u32,
}

impl TemperatureSpec {
    pub fn factor(&self, position: usize) -> f32 {
        let times = position / self.positions.max(1) as usize;
        (1.0 + f64::from(self.scale) * libm::log(1.0 + times as f64)) as f32
    }
}

/// Values over which the RMSNorm of queries and keys takes the mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QkNorm {
    /// Each head separately; all heads share the weights, `[head_dim]`.
    Head,
    /// All heads together, with a weight per value.
    Row,
}

/// Sliding window: a row attends to itself and to the `positions - 1` rows before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowSpec {
    pub positions: u32,
    /// Every n-th block (n, 2n, ... counted from 1) has no window; `None`: all blocks have it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub global_every: Option<u32>,
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

/// Mixture of experts: a row goes through the `used` experts that the router scores highest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertSpec {
    pub count: u32,
    /// Experts per row.
    pub used: u32,
    /// Whether the weights of a row's experts add up to 1. If not, they are those of the softmax
    /// over all experts.
    pub normalise: bool,
    /// Whether the router and the matrices of the experts have biases.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bias: bool,
}

impl ExpertSpec {
    fn check(&self) -> Result<(), SpecError> {
        let known = (1..=MAX_EXPERTS).contains(&self.count);
        ensure(known, "experts.count", "must be between 1 and 4096")?;
        let used = (1..=MAX_EXPERTS_USED.min(self.count)).contains(&self.used);
        let reason = "must be between 1 and 64, and at most the number of experts";
        ensure(used, "experts.used", reason)
    }
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

fn ensure(kept: bool, field: &'static str, reason: &'static str) -> Result<(), SpecError> {
    match kept {
        true => Ok(()),
        false => Err(SpecError { field, reason }),
    }
}

fn size(field: &'static str, value: u32) -> Result<(), SpecError> {
    let possible = (1..=MAX_SIZE).contains(&value);
    ensure(possible, field, "must be between 1 and 16777216")
}

/// Checks that a value, if present, is a positive normal binary32 number.
fn positive(field: &'static str, value: Option<impl Into<f64>>) -> Result<(), SpecError> {
    let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
    let possible = value.is_none_or(|value| range.contains(&value.into()));
    ensure(possible, field, "must be a positive number")
}

fn epsilon(field: &'static str, value: f32) -> Result<(), SpecError> {
    let possible = (f32::MIN_POSITIVE..1.0).contains(&value);
    ensure(possible, field, "must lie between 0 and 1")
}

fn base(field: &'static str, value: f64) -> Result<(), SpecError> {
    let possible = (1.0..=f64::from(f32::MAX)).contains(&value);
    ensure(possible, field, "must be a finite number of at least 1")
}

/// Rotary position embedding: rotates value pair `i` of the first `dims` values of a head by
/// `position * theta^(-2i / dims)` radians, modified by `scaling`. The rest of the head stays
/// unchanged. (In latent attention: the last `dims` values, see [`LatentSpec`].)
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    pub kind: RopeKind,
    /// Rotated values of a head: even, at most the head's width.
    pub dims: u32,
    /// Base of the frequencies, at least 1.
    pub theta: f64,
    #[serde(default, skip_serializing_if = "is_default")]
    pub scaling: Option<RopeScaling>,
    /// Base of the frequencies, without scaling, for blocks with a sliding window; `None`: as in
    /// the other blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub local_theta: Option<f64>,
    /// Every n-th block (n, 2n, ... counted from 1) has no RoPE.
    #[serde(default, skip_serializing_if = "is_default")]
    pub skip_every: Option<u32>,
}

impl RopeSpec {
    fn check(&self) -> Result<(), SpecError> {
        base("rope.local_theta", self.local_theta.unwrap_or(1.0))?;
        match self.scaling {
            Some(RopeScaling::Linear { factor }) => positive("rope.scaling.factor", Some(factor)),
            Some(RopeScaling::Long { amplitude, .. }) => {
                positive("rope.scaling.amplitude", Some(amplitude))
            }
            Some(RopeScaling::Yarn(yarn)) => {
                ensure(self.theta > 1.0, "rope.theta", "must be above 1 for YaRN")?;
                yarn.check()
            }
            Some(RopeScaling::Factors) | None => Ok(()),
        }
    }
}

/// Scaling of RoPE frequencies.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// Divides all frequencies by `factor`.
    Linear { factor: f64 },
    /// Divides each frequency by its factor from the tensor `rope_freqs.weight` (Llama 3.1).
    Factors,
    /// Divides each frequency by its factor, and multiplies cosines and sines by `amplitude`
    /// (LongRoPE, Phi-3).
    Long {
        /// Tensor with the factors: `rope_factors_long.weight` if the context exceeds the original
        /// training length, else `rope_factors_short.weight`.
        long: bool,
        amplitude: f64,
    },
    /// Divides slow frequencies, keeps fast frequencies (YaRN).
    Yarn(YarnSpec),
}

/// YaRN ("YaRN: Efficient Context Window Extension of Large Language Models", arXiv 2309.00071).
///
/// A pair that makes many turns within the original context distinguishes neighbours and keeps its
/// frequency. A pair that makes less than one turn encodes absolute positions, and its frequency is
/// divided, so that its angles stay in the trained range. Frequencies between are interpolated.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnSpec {
    /// Divisor of the frequencies of slow pairs, at least 1.
    pub factor: f64,
    /// Context length of the original training, in positions.
    pub original: u32,
    /// Pairs with at least this many turns within `original` are fast.
    pub fast: f64,
    /// Pairs with at most this many turns within `original` are slow; below `fast`.
    pub slow: f64,
    /// Whether the pair indices at which the ramp begins and ends are rounded outwards to whole
    /// numbers.
    pub whole: bool,
    /// Factor of cosines and sines.
    pub amplitude: f64,
}

impl YarnSpec {
    /// The amplitude that the paper recommends, divided by a correction that a model may ask for:
    /// `(0.1 ln(factor) + 1) / (0.1 undo ln(factor) + 1)`.
    pub fn usual_amplitude(factor: f64, undo: f64) -> f64 {
        let log = libm::log(factor);
        (0.1 * log + 1.0) / (0.1 * undo * log + 1.0)
    }

    fn check(&self) -> Result<(), SpecError> {
        let stretched = (1.0..=f64::from(f32::MAX)).contains(&self.factor);
        ensure(
            stretched,
            "rope.scaling.factor",
            "must be at least 1 for YaRN",
        )?;
        size("rope.scaling.original", self.original)?;
        positive("rope.scaling.fast", Some(self.fast))?;
        let slow = (f64::from(f32::MIN_POSITIVE)..self.fast).contains(&self.slow);
        let reason = "must be positive and below beta_fast";
        ensure(slow, "rope.scaling.slow", reason)?;
        positive("rope.scaling.yarn.amplitude", Some(self.amplitude))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rotation {
    /// With [`RopeSpec::theta`] and [`RopeSpec::scaling`].
    Global,
    /// With [`RopeSpec::local_theta`].
    Local,
    /// No RoPE.
    None,
}

/// Pairing of the values that RoPE rotates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeKind {
    /// Neighbours: `2i` and `2i + 1` (ggml's "norm" kind). Llama files use it: their converter has
    /// permuted the rows of the query and key matrices accordingly.
    Interleaved,
    /// `i` and `i + dims / 2` (ggml's "neox" kind).
    Halves,
}

/// Role of a tensor in a block, with its shape (row length first).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum LayerTensor {
    /// RMSNorm before attention: `[width]`.
    AttnNorm,
    /// Queries: `[width, heads * head_dim]`.
    AttnQ,
    /// Bias of the queries: `[heads * head_dim]`.
    AttnQBias,
    /// Keys: `[width, kv_heads * head_dim]`.
    AttnK,
    /// Bias of the keys: `[kv_heads * head_dim]`.
    AttnKBias,
    /// Values: `[width, kv_heads * head_dim]`.
    AttnV,
    /// Bias of the values: `[kv_heads * head_dim]`.
    AttnVBias,
    /// Queries, keys and values in one: `[width, (heads + 2 kv_heads) * head_dim]`.
    AttnQkv,
    /// Down-projection to the low-rank row of queries: `[width, latent.queries]`.
    LatentQ,
    /// RMSNorm of the low-rank row of queries: `[latent.queries]`.
    LatentQNorm,
    /// Up-projection to queries: `[latent.queries, heads * head_dim]`.
    LatentQUp,
    /// Down-projection to the low-rank row of keys and values, followed by the rotary part common
    /// to all key heads: `[width, latent.keys + rope.dims]`.
    LatentKv,
    /// RMSNorm of the low-rank row of keys and values: `[latent.keys]`.
    LatentKvNorm,
    /// Up-projection to the part of the keys without RoPE, and values, head by head:
    /// `[latent.keys, heads * (head_dim - rope.dims + latent.values)]`.
    LatentKvUp,
    /// RMSNorm of the queries: `[head_dim]`, or `[heads * head_dim]`.
    AttnQNorm,
    /// RMSNorm of the keys: `[head_dim]`, or `[kv_heads * head_dim]`.
    AttnKNorm,
    /// Output projection of attention: `[attended_width, width]`.
    AttnOutput,
    /// Bias of the output projection: `[width]`.
    AttnOutputBias,
    /// Sinks of the query heads: `[heads]`.
    AttnSinks,
    /// RMSNorm of the attention output, before the residual stream: `[width]`.
    AttnPostNorm,
    /// RMSNorm before the feed-forward layer: `[width]`.
    FfnNorm,
    /// Gate, to which the activation is applied: `[width, ffn]`.
    FfnGate,
    /// Up projection, multiplied with the activated gate: `[width, ffn]`.
    FfnUp,
    /// Gate, then up, in one: `[width, 2 ffn]`.
    FfnGateUp,
    /// Down projection: `[ffn, width]`.
    FfnDown,
    /// Scores of the experts: `[width, experts]`.
    Router,
    /// Bias of the scores: `[experts]`.
    RouterBias,
    /// Gates of all experts, one after another: `[width, ffn, experts]`.
    ExpertGate,
    /// Biases of the gates: `[ffn, experts]`.
    ExpertGateBias,
    /// Up projections of all experts: `[width, ffn, experts]`.
    ExpertUp,
    /// Biases of the up projections: `[ffn, experts]`.
    ExpertUpBias,
    /// Down projections of all experts: `[ffn, width, experts]`.
    ExpertDown,
    /// Biases of the down projections: `[width, experts]`.
    ExpertDownBias,
    /// RMSNorm of the feed-forward output, before the residual stream: `[width]`.
    FfnPostNorm,
}

impl LayerTensor {
    /// Returns true if a model has this tensor, provided that its family lists it. For example, a
    /// model has either a gate or experts.
    pub fn present(self, spec: &ModelSpec) -> bool {
        match self {
            Self::AttnQBias | Self::AttnKBias | Self::AttnVBias => spec.attention.qkv_bias,
            Self::AttnQNorm | Self::AttnKNorm => spec.attention.qk_norm.is_some(),
            Self::LatentQ
            | Self::LatentQNorm
            | Self::LatentQUp
            | Self::LatentKv
            | Self::LatentKvNorm
            | Self::LatentKvUp => spec.attention.latent.is_some(),
            Self::AttnOutputBias => spec.attention.output_bias,
            Self::AttnSinks => spec.attention.sinks,
            Self::AttnPostNorm | Self::FfnPostNorm => spec.post_norms,
            Self::FfnGate | Self::FfnUp | Self::FfnGateUp | Self::FfnDown => spec.experts.is_none(),
            Self::Router | Self::ExpertGate | Self::ExpertUp | Self::ExpertDown => {
                spec.experts.is_some()
            }
            Self::RouterBias | Self::ExpertGateBias | Self::ExpertUpBias | Self::ExpertDownBias => {
                spec.experts.is_some_and(|experts| experts.bias)
            }
            Self::AttnNorm
            | Self::AttnQ
            | Self::AttnK
            | Self::AttnV
            | Self::AttnQkv
            | Self::AttnOutput
            | Self::FfnNorm => true,
        }
    }
}

/// Dimension of a tensor, in terms of the spec.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Dim {
    /// [`ModelSpec::width`]
    Width,
    /// [`ModelSpec::query_width`]
    Queries,
    /// [`ModelSpec::kv_width`]
    Keys,
    /// Queries, keys and values together.
    Qkv,
    /// [`ModelSpec::heads`]
    Heads,
    /// [`ModelSpec::attended_width`]
    Attended,
    /// [`LatentSpec::queries`]
    LatentQueries,
    /// [`LatentSpec::keys`]
    LatentKeys,
    /// [`LatentSpec::keys`] plus [`RopeSpec::dims`].
    LatentKeysAndRotary,
    /// Part of the keys without RoPE, and values, of all heads in latent attention.
    KeysAndValues,
    /// Values over which queries are normalised: see [`QkNorm`].
    QueryNorm,
    KeyNorm,
    RopePairs,
    /// [`ModelSpec::ffn`]
    Ffn,
    TwoFfn,
    /// [`ExpertSpec::count`]
    Experts,
    /// [`ModelSpec::vocab`]
    Vocab,
}

impl Dim {
    /// Length of the dimension in a model.
    pub fn of(self, spec: &ModelSpec) -> u64 {
        let latent =
            |width: fn(&LatentSpec) -> u32| spec.attention.latent.as_ref().map_or(0, width);
        let per_head = spec.attention.qk_norm == Some(QkNorm::Head);
        match self {
            Self::QueryNorm | Self::KeyNorm if per_head => spec.head_dim.into(),
            Self::Width => spec.width.into(),
            Self::Queries | Self::QueryNorm => spec.query_width().into(),
            Self::Keys | Self::KeyNorm => spec.kv_width().into(),
            Self::Qkv => u64::from(spec.query_width()) + 2 * u64::from(spec.kv_width()),
            Self::Attended => spec.attended_width().into(),
            Self::LatentQueries => latent(|l| l.queries).into(),
            Self::LatentKeys => latent(|l| l.keys).into(),
            Self::LatentKeysAndRotary => u64::from(latent(|l| l.keys)) + u64::from(spec.rope.dims),
            Self::KeysAndValues => {
                let nope = spec.head_dim.saturating_sub(spec.rope.dims);
                let head = u64::from(nope) + u64::from(latent(|l| l.values));
                u64::from(spec.heads) * head
            }
            Self::Heads => spec.heads.into(),
            Self::RopePairs => u64::from(spec.rope.dims / 2),
            Self::Ffn => spec.ffn.into(),
            Self::TwoFfn => 2 * u64::from(spec.ffn),
            Self::Experts => spec.experts.map_or(0, |experts| experts.count.into()),
            Self::Vocab => spec.vocab.into(),
        }
    }
}
