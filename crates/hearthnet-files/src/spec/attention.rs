//! Optional features of attention.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::check::is_default;

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
    /// Whether the output of each head is multiplied by the sigmoid of a gate, value by value. The
    /// query matrix then has the gates of a head behind its queries.
    #[serde(skip_serializing_if = "is_default")]
    pub output_gate: bool,
    /// Whether the gates have a matrix of their own instead; only with `output_gate`.
    #[serde(skip_serializing_if = "is_default")]
    pub gate_matrix: bool,
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
    /// RMSNorm of each head of the values, without weights.
    #[serde(skip_serializing_if = "is_default")]
    pub value_norm: bool,
    /// Whether blocks without a window have no matrix of values: their values are the keys before
    /// norm and RoPE.
    #[serde(skip_serializing_if = "is_default")]
    pub keys_as_values: bool,
    /// Number format of cached keys and values.
    #[serde(skip_serializing_if = "is_default")]
    pub cache: CacheDtype,
}

/// Number format of cached keys and values. No GGUF file states it: the user who runs or adopts the
/// model chooses it. It is part of the manifest, so another format gives another weights id.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    Debug,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
)]
pub enum CacheDtype {
    /// IEEE 754 binary16.
    #[default]
    #[serde(rename = "f16")]
    #[strum(serialize = "f16")]
    F16,
    /// Blocks of [`Self::BLOCK`] 8-bit integers with a common factor: 17/32 of the bytes of `F16`.
    #[serde(rename = "q8_0")]
    #[strum(serialize = "q8_0")]
    Q8_0,
}

impl CacheDtype {
    pub const ALL: [Self; 2] = [Self::F16, Self::Q8_0];
    /// Adjacent values of a head with a common factor in [`Self::Q8_0`].
    pub const BLOCK: usize = 32;

    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether `width` values are whole blocks.
    pub const fn fits(self, width: usize) -> bool {
        match self {
            Self::F16 => true,
            Self::Q8_0 => width.is_multiple_of(Self::BLOCK),
        }
    }

    /// Bytes of `values` values, which are whole blocks.
    pub const fn bytes(self, values: u64) -> u64 {
        match self {
            Self::F16 => 2 * values,
            Self::Q8_0 => values + 2 * (values / Self::BLOCK as u64),
        }
    }
}

impl FromStr for CacheDtype {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        all.find(|dtype| dtype.name() == s)
            .ok_or_else(|| format!("{s:?} is no format of keys and values: use f16 or q8_0"))
    }
}

/// Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): queries, and keys with values,
/// are up-projections of normalised low-rank rows. RoPE rotates only the last
/// [`RopeSpec::dims`](super::RopeSpec::dims) values of a head. For keys, these are common to all
/// heads and do not come from the low-rank row.
///
/// If `absorbed`, the cache holds one key for all heads, of the normalised low-rank row of keys and
/// values, and the rotary part; the row is also the value. Queries are multiplied with the
/// up-projection of the keys, and the output of each head with that of the values.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentSpec {
    /// Width of the low-rank row of queries (`q_lora_rank`); `None` if they have none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub queries: Option<u32>,
    /// Width of the low-rank row of keys and values (`kv_lora_rank`).
    pub keys: u32,
    /// Width of a value head (`v_head_dim`), at most
    /// [`ModelSpec::head_dim`](super::ModelSpec::head_dim) unless `absorbed`.
    pub values: u32,
    /// Added to the mean square in the norms of the low-rank rows.
    pub norm_eps: f32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub absorbed: bool,
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

/// Sliding window: a row attends to itself and to the `positions - 1` rows before it; in an
/// [encoder](super::EncoderSpec), also to the `positions - 1` rows after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowSpec {
    pub positions: u32,
    /// Every n-th block (n, 2n, ... counted from 1) has no window; `None`: all blocks have it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub global_every: Option<u32>,
    /// Heads of the blocks with a window; `None`: as in the other blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub heads: Option<WindowHeads>,
}

/// Heads of the blocks with a window. Each block has
/// [`ModelSpec::heads`](super::ModelSpec::heads) query heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowHeads {
    /// Divides the number of query heads.
    pub kv_heads: u32,
    /// Values per head, even.
    pub head_dim: u32,
    /// Rotated values of a head: even, at most `head_dim`.
    pub rope_dims: u32,
}

/// The last blocks of a model use keys and values of an earlier block: of the last block with keys
/// of its own that has a window, or has none, as they.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedKeysSpec {
    /// Number of these blocks.
    pub blocks: u32,
    /// Width of their feed-forward layers; `None` for [`ModelSpec::ffn`](super::ModelSpec::ffn).
    #[serde(default, skip_serializing_if = "is_default")]
    pub ffn: Option<u32>,
}
