//! View of a block: its parts, and its tensors with their shapes.

use super::{ExpertSpec, LatentSpec, ModelSpec, QkNorm, Rotation};

/// View of one block. Code for blocks reads it instead of [`ModelSpec`], because the blocks of a
/// model may differ.
///
/// A value that becomes different per block moves from [`ModelSpec`] to a field here. Another kind
/// of block is a variant of [`Mixer`] or [`Feed`] with a group of tensors in `families/rules.rs`.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct BlockSpec<'a> {
    /// Values that all blocks share.
    pub model: &'a ModelSpec,
    pub mixer: Mixer,
    pub feed: Feed,
    /// Sliding window: positions that a row attends to, its own included; `None` for all.
    pub window: Option<u32>,
    pub rotation: Rotation,
}

/// Part of a block that combines the rows of a sequence.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Mixer {
    /// Grouped-query attention.
    Attention,
    Latent(LatentSpec),
}

/// Part of a block that computes each row separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Feed {
    Dense,
    Experts(ExpertSpec),
}

impl ModelSpec {
    /// View of block `layer`, counted from 0.
    pub fn block(&self, layer: u32) -> BlockSpec<'_> {
        let latent = self.attention.latent;
        BlockSpec {
            model: self,
            mixer: latent.map_or(Mixer::Attention, Mixer::Latent),
            feed: self.experts.map_or(Feed::Dense, Feed::Experts),
            window: self.window(layer),
            rotation: self.rotation(layer),
        }
    }

    /// [`BlockSpec::window`] of a block.
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
    /// Output projection of attention: `[heads * values, width]`.
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

/// Dimension of a tensor of a block.
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
    /// Outputs of all heads together.
    Attended,
    /// [`LatentSpec::queries`]
    LatentQueries,
    /// [`LatentSpec::keys`]
    LatentKeys,
    /// [`LatentSpec::keys`] plus [`RopeSpec::dims`](super::RopeSpec::dims).
    LatentKeysAndRotary,
    /// Part of the keys without RoPE, and values, of all heads in latent attention.
    KeysAndValues,
    /// Values over which queries are normalised: see [`QkNorm`].
    QueryNorm,
    KeyNorm,
    /// [`ModelSpec::ffn`]
    Ffn,
    TwoFfn,
    /// [`ExpertSpec::count`]
    Experts,
}

impl Dim {
    /// Length of the dimension in a block.
    pub fn of(self, block: &BlockSpec<'_>) -> u64 {
        let spec = block.model;
        let (heads, rotary) = (u64::from(spec.heads), u64::from(spec.rope.dims));
        let (queries, keys, values) = match block.mixer {
            Mixer::Attention => (0, 0, spec.head_dim),
            Mixer::Latent(latent) => (latent.queries, latent.keys, latent.values),
        };
        let per_head = spec.attention.qk_norm == Some(QkNorm::Head);
        match self {
            Self::QueryNorm | Self::KeyNorm if per_head => spec.head_dim.into(),
            Self::Width => spec.width.into(),
            Self::Queries | Self::QueryNorm => spec.query_width().into(),
            Self::Keys | Self::KeyNorm => spec.kv_width().into(),
            Self::Qkv => u64::from(spec.query_width()) + 2 * u64::from(spec.kv_width()),
            Self::Attended => heads * u64::from(values),
            Self::LatentQueries => queries.into(),
            Self::LatentKeys => keys.into(),
            Self::LatentKeysAndRotary => u64::from(keys) + rotary,
            Self::KeysAndValues => {
                let nope = u64::from(spec.head_dim).saturating_sub(rotary);
                heads * (nope + u64::from(values))
            }
            Self::Heads => heads,
            Self::Ffn => spec.ffn.into(),
            Self::TwoFfn => 2 * u64::from(spec.ffn),
            Self::Experts => match block.feed {
                Feed::Dense => 0,
                Feed::Experts(experts) => experts.count.into(),
            },
        }
    }
}
