//! What a model computes, as data that an engine interprets.

use serde::{Deserialize, Serialize};

use crate::boundary::BoundaryDtype;

/// Longest row, column, list or sequence: far beyond any model, far from any overflow.
pub const MAX_SIZE: u32 = 1 << 24;
/// Most experts of a layer; the largest mixtures have some hundreds.
pub const MAX_EXPERTS: u32 = 4096;
/// Most experts that a row asks for; today's mixtures ask for 2 to 16.
pub const MAX_EXPERTS_USED: u32 = 64;

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
    /// What attention has beyond that of Llama.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention: AttentionSpec,
    /// What is applied to the gate of the feed-forward layer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub activation: Activation,
    /// The feed-forward layer as a mixture of experts, which then have `ffn` values each; `None`
    /// for a single one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub experts: Option<ExpertSpec>,
    /// Whether the outputs of attention and of the feed-forward layer are normalised before they
    /// are added to the residual stream.
    #[serde(default, skip_serializing_if = "is_default")]
    pub post_norms: bool,
    /// Constant factors.
    #[serde(default, skip_serializing_if = "is_default")]
    pub scales: ScaleSpec,
}

/// Whether a field says nothing: it is then left out, so that models which have no use for it
/// keep the identity that they had before the field was there.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ModelSpec {
    /// Checks that the values are possible and fit one another. (Whether tensors fit them is
    /// checked with the tensors.)
    ///
    /// # Errors
    /// Names the first field that is wrong.
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
        let reason = "the heads together must not be wider than 16777216";
        ensure(self.query_width() <= MAX_SIZE, "heads", reason)?;
        let turned = self.rope.dims <= self.head_dim && self.rope.dims.is_multiple_of(2);
        ensure(
            turned,
            "rope.dims",
            "must be even and at most the head's width",
        )?;
        base("rope.theta", self.rope.theta)?;
        epsilon("norm_eps", self.norm_eps)?;
        self.rope.check()?;
        self.check_latent()?;
        self.experts.map_or(Ok(()), |experts| experts.check())
    }

    /// Latent attention has a key head for each query head, of which a part is not turned.
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

    /// Positions that a row of a block attends to, its own included; `None` for all.
    pub fn window(&self, layer: u32) -> Option<u32> {
        let window = self.attention.window?;
        let global = window
            .global_every
            .is_some_and(|every| (layer + 1).is_multiple_of(every));
        (!global).then_some(window.positions)
    }

    /// How queries and keys of a block are turned.
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

    /// Width of what all heads give together, in values.
    pub fn attended_width(&self) -> u32 {
        let values = self.attention.latent.map_or(self.head_dim, |l| l.values);
        self.heads.saturating_mul(values)
    }

    /// Width of all key (or value) heads together, in values. (In latent attention values are
    /// padded to the width of keys.)
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

/// What attention has beyond that of Llama. Each field's default is Llama's.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttentionSpec {
    /// Whether queries, keys and values have biases.
    #[serde(skip_serializing_if = "is_default")]
    pub qkv_bias: bool,
    /// RMSNorm of queries and keys before they are turned.
    #[serde(skip_serializing_if = "is_default")]
    pub qk_norm: Option<QkNorm>,
    /// Queries, keys and values by way of narrow rows.
    #[serde(skip_serializing_if = "is_default")]
    pub latent: Option<LatentSpec>,
    /// Whether what attention gives has a bias.
    #[serde(skip_serializing_if = "is_default")]
    pub output_bias: bool,
    /// Whether each query head has a sink: a score of a position without a value, which takes its
    /// part of the softmax.
    #[serde(skip_serializing_if = "is_default")]
    pub sinks: bool,
    /// Factor of the scores, if not `1 / sqrt(head_dim)`.
    #[serde(skip_serializing_if = "is_default")]
    pub scale: Option<f32>,
    /// Scores `s` become `cap * tanh(s / cap)`.
    #[serde(skip_serializing_if = "is_default")]
    pub softcap: Option<f32>,
    /// Sliding window.
    #[serde(skip_serializing_if = "is_default")]
    pub window: Option<WindowSpec>,
    /// Factor of the queries that grows with the position.
    #[serde(skip_serializing_if = "is_default")]
    pub temperature: Option<TemperatureSpec>,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, and keys with values, are
/// made of narrow normalised rows. Only the last [`RopeSpec::dims`] values of a head are turned;
/// those of the keys are the same for all heads and do not come from the narrow row.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentSpec {
    /// Width of the row that queries are made of.
    pub queries: u32,
    /// Width of the row that keys and values are made of.
    pub keys: u32,
    /// Values per head of the values, at most [`ModelSpec::head_dim`].
    pub values: u32,
    /// Added to the mean square in the norm of the narrow rows.
    pub norm_eps: f32,
}

/// Queries at position p are multiplied with `1 + scale * ln(1 + p / positions)`, the quotient as a
/// whole number: far into a text, where there is more to choose from, scores differ more.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemperatureSpec {
    /// How much the factor grows.
    pub scale: f32,
    /// The first position at which it does.
    pub positions: u32,
}

impl TemperatureSpec {
    /// The factor of the queries at a position.
    pub fn factor(&self, position: usize) -> f32 {
        let times = position / self.positions.max(1) as usize;
        (1.0 + f64::from(self.scale) * libm::log(1.0 + times as f64)) as f32
    }
}

/// What RMSNorm of queries and keys takes the mean over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QkNorm {
    /// Each head by itself; all heads have the same weights, `[head_dim]`.
    Head,
    /// All heads together, with weights for each value.
    Row,
}

/// Sliding window: a row attends to itself and to the `positions - 1` before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowSpec {
    /// How many positions a row sees, its own included.
    pub positions: u32,
    /// Every n-th block (n, 2n, ... counted from 1) has no window; `None`: all have it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub global_every: Option<u32>,
}

/// What is applied to the gate of a feed-forward layer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// `g / (1 + exp(-g))`
    #[default]
    Silu,
    /// GELU in its approximation by tanh.
    Gelu,
    /// SwiGLU of numbers that are cut at 7, `(u + 1) * g / (1 + exp(-1.702 g))`.
    Clamped,
}

/// A mixture of experts: a row goes through the few that its router scores highest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertSpec {
    /// Experts of a layer.
    pub count: u32,
    /// Experts that a row goes through.
    pub used: u32,
    /// Whether the weights of those that a row goes through add up to 1. If not, they are their
    /// part of the softmax over all experts.
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
    /// Of the embedding.
    #[serde(skip_serializing_if = "is_default")]
    pub embedding: Option<f32>,
    /// Of what attention and the feed-forward layer add to the residual stream.
    #[serde(skip_serializing_if = "is_default")]
    pub residual: Option<f32>,
    /// By which logits are divided.
    #[serde(skip_serializing_if = "is_default")]
    pub logits: Option<f32>,
    /// Logits `l` become `cap * tanh(l / cap)`, after the division.
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

/// A number for arithmetic in binary32, if there is one.
fn positive(field: &'static str, value: Option<impl Into<f64>>) -> Result<(), SpecError> {
    let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
    let possible = value.is_none_or(|value| range.contains(&value.into()));
    ensure(possible, field, "must be a positive number")
}

fn epsilon(field: &'static str, value: f32) -> Result<(), SpecError> {
    let possible = (f32::MIN_POSITIVE..1.0).contains(&value);
    ensure(possible, field, "must lie between 0 and 1")
}

/// The base of RoPE's frequencies.
fn base(field: &'static str, value: f64) -> Result<(), SpecError> {
    let possible = (1.0..=f64::from(f32::MAX)).contains(&value);
    ensure(possible, field, "must be a finite number of at least 1")
}

/// Rotary position embedding: value pair `i` of the first `dims` values of a head is turned by
/// `position * theta^(-2i / dims)` radians, or what `scaling` makes of it. The rest of the head
/// stays as it is.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Which values form a pair.
    pub kind: RopeKind,
    /// How many values of a head are turned: even, at most the head's width.
    pub dims: u32,
    /// Base of the frequencies, positive.
    pub theta: f64,
    /// How the frequencies differ from those of the base.
    #[serde(default, skip_serializing_if = "is_default")]
    pub scaling: Option<RopeScaling>,
    /// Base of the frequencies, which are then not scaled, in the blocks that have a sliding
    /// window; `None`: the same as in the others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub local_theta: Option<f64>,
    /// Every n-th block (n, 2n, ... counted from 1) does not turn anything.
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

/// How RoPE's frequencies differ from those of its base.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// All are divided by a number.
    Linear {
        /// The number.
        factor: f64,
    },
    /// Each is divided by its own number, from the tensor `rope_freqs.weight` (Llama 3.1).
    Factors,
    /// As `Factors`, and cosines and sines are multiplied by a number (LongRoPE, Phi-3).
    Long {
        /// Which of two tensors: `rope_factors_long.weight` for a context that is longer than the
        /// one of the first training, else `rope_factors_short.weight`.
        long: bool,
        /// The number for cosines and sines.
        amplitude: f64,
    },
    /// Slow ones are divided by a number, fast ones stay (YaRN).
    Yarn(YarnSpec),
}

/// YaRN ("YaRN: Efficient Context Window Extension of Large Language Models", arXiv 2309.00071):
/// a pair that turns often within the context of the first training tells neighbours apart and
/// keeps its frequency; one that turns less than once there tells positions, which are squeezed
/// into the range that the model knows; those between are mixed.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnSpec {
    /// By what the frequencies of slow pairs are divided, at least 1.
    pub factor: f64,
    /// Positions of the first training.
    pub original: u32,
    /// Turns within `original` from which on a pair is fast.
    pub fast: f64,
    /// Turns within `original` up to which a pair is slow, fewer than `fast`.
    pub slow: f64,
    /// Whether the two pairs that these turns belong to are whole numbers, and not where they fall
    /// between two pairs.
    pub whole: bool,
    /// The number for cosines and sines.
    pub amplitude: f64,
}

impl YarnSpec {
    /// The amplitude that the paper recommends, of which a model may want to undo a part:
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
        let reason = "must be a positive number below that of the fast ones";
        ensure(slow, "rope.scaling.slow", reason)?;
        positive("rope.scaling.yarn.amplitude", Some(self.amplitude))
    }
}

/// How a block turns queries and keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rotation {
    /// With [`RopeSpec::theta`] and [`RopeSpec::scaling`].
    Global,
    /// With [`RopeSpec::local_theta`].
    Local,
    /// Not at all.
    None,
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
    /// Added to the queries: `[heads * head_dim]`.
    AttnQBias,
    /// Keys: `[width, kv_heads * head_dim]`.
    AttnK,
    /// Added to the keys: `[kv_heads * head_dim]`.
    AttnKBias,
    /// Values: `[width, kv_heads * head_dim]`.
    AttnV,
    /// Added to the values: `[kv_heads * head_dim]`.
    AttnVBias,
    /// Queries, keys and values in one: `[width, (heads + 2 kv_heads) * head_dim]`.
    AttnQkv,
    /// The narrow row of the queries: `[width, latent.queries]`.
    LatentQ,
    /// RMSNorm of that: `[latent.queries]`.
    LatentQNorm,
    /// Queries of that: `[latent.queries, heads * head_dim]`.
    LatentQUp,
    /// The narrow row of keys and values, then the turned part of all keys:
    /// `[width, latent.keys + rope.dims]`.
    LatentKv,
    /// RMSNorm of the former: `[latent.keys]`.
    LatentKvNorm,
    /// The other part of the keys, and values, of that, head by head:
    /// `[latent.keys, heads * (head_dim - rope.dims + latent.values)]`.
    LatentKvUp,
    /// RMSNorm of the queries: `[head_dim]`, or `[heads * head_dim]`.
    AttnQNorm,
    /// RMSNorm of the keys: `[head_dim]`, or `[kv_heads * head_dim]`.
    AttnKNorm,
    /// Back to the residual stream: `[heads * head_dim, width]`.
    AttnOutput,
    /// Added to that: `[width]`.
    AttnOutputBias,
    /// The heads' sinks: `[heads]`.
    AttnSinks,
    /// RMSNorm of what attention adds to the residual stream: `[width]`.
    AttnPostNorm,
    /// RMSNorm before the feed-forward layer: `[width]`.
    FfnNorm,
    /// Gate, to which the activation is applied: `[width, ffn]`.
    FfnGate,
    /// What the gate is multiplied with: `[width, ffn]`.
    FfnUp,
    /// Gate, then up, in one: `[width, 2 ffn]`.
    FfnGateUp,
    /// Back to the residual stream: `[ffn, width]`.
    FfnDown,
    /// Scores of the experts: `[width, experts]`.
    Router,
    /// Added to them: `[experts]`.
    RouterBias,
    /// The gates of all experts, one after another: `[width, ffn, experts]`.
    ExpertGate,
    /// Added to the gates: `[ffn, experts]`.
    ExpertGateBias,
    /// What the gates are multiplied with: `[width, ffn, experts]`.
    ExpertUp,
    /// Added to that: `[ffn, experts]`.
    ExpertUpBias,
    /// Back to the residual stream: `[ffn, width, experts]`.
    ExpertDown,
    /// Added to that: `[width, experts]`.
    ExpertDownBias,
    /// RMSNorm of what the feed-forward layer adds to the residual stream: `[width]`.
    FfnPostNorm,
}

impl LayerTensor {
    /// Whether a model of a family that has this tensor has it: of gate and experts, for example,
    /// one or the other.
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
    /// The same with the turned part of the keys.
    LatentKeysAndTurned,
    /// The other part of the keys, and values, of all heads.
    KeysAndValues,
    /// Values over which queries are normalised: see [`QkNorm`].
    QueryNorm,
    /// Values over which keys are normalised.
    KeyNorm,
    /// Pairs that RoPE turns.
    RopePairs,
    /// [`ModelSpec::ffn`]
    Ffn,
    /// Gate and up together.
    TwoFfn,
    /// [`ExpertSpec::count`]
    Experts,
    /// [`ModelSpec::vocab`]
    Vocab,
}

impl Dim {
    /// The dimension's length in a model.
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
            Self::LatentKeysAndTurned => u64::from(latent(|l| l.keys)) + u64::from(spec.rope.dims),
            Self::KeysAndValues => {
                let still = spec.head_dim.saturating_sub(spec.rope.dims);
                let head = u64::from(still) + u64::from(latent(|l| l.values));
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
