//! View of a block: its parts, and its tensors with their shapes.

use super::{DeltaSpec, ExpertSpec, LatentSpec, MambaSpec, ModelSpec, QkNorm, Rotation, StateSize};

/// View of one block. Code for blocks reads it instead of [`ModelSpec`], because the blocks of a
/// model may differ.
///
/// A value that becomes different per block moves from [`ModelSpec`] to a field here. Another kind of
/// block is a variant of [`Mixer`] or [`FeedForwardSpec`], with tensors in `families/rules.rs`.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct BlockSpec<'a> {
    /// Values that all blocks share.
    pub model: &'a ModelSpec,
    /// Number of the block, from 0.
    pub layer: u32,
    /// Block whose keys and values it uses: itself, or an earlier one.
    pub keys_of: u32,
    pub kv_heads: u32,
    /// Values per head.
    pub head_dim: u32,
    /// Rotated values of a head.
    pub rope_dims: u32,
    /// Width of the dense feed-forward layer, or of each expert.
    pub ffn: u32,
    pub mixer: Mixer,
    pub feed: FeedForwardSpec,
    /// Whether the block is one for multi-token prediction.
    pub predicts: bool,
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
    /// Gated delta rule.
    Delta(DeltaSpec),
    /// Gated short convolution over so many positions.
    Convolution {
        positions: u32,
    },
    Mamba(MambaSpec),
    /// The block has a feed-forward layer only.
    None,
}

/// Part of a block that computes each row separately.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum FeedForwardSpec {
    Dense,
    Experts(ExpertSpec),
    /// The block has a [`Mixer`] only.
    None,
}

impl BlockSpec<'_> {
    /// Whether a sequence has keys and values in the block, which grow with its length.
    pub fn has_keys(&self) -> bool {
        self.keys_of == self.layer && self.attends()
    }

    pub fn attends(&self) -> bool {
        matches!(self.mixer, Mixer::Attention | Mixer::Latent(_))
    }

    /// Whether a matrix gives the values of a block that has keys.
    pub fn has_values(&self) -> bool {
        self.has_keys() && !(self.model.attention.keys_as_values && self.window.is_none())
    }

    pub fn is_recurrent(&self) -> bool {
        matches!(
            self.mixer,
            Mixer::Delta(_) | Mixer::Convolution { .. } | Mixer::Mamba(_)
        )
    }

    /// Width of all query heads together, in values.
    pub fn query_width(&self) -> u32 {
        self.model.heads.saturating_mul(self.head_dim)
    }

    /// Width of a key in the cache, in values.
    pub fn key_width(&self) -> u32 {
        match self.model.attention.latent {
            Some(latent) if latent.absorbed => latent.keys.saturating_add(self.rope_dims),
            _ => self.head_dim,
        }
    }

    /// Width of all key (or value) heads together, in values. (In latent attention values are
    /// padded to the width of keys.)
    pub fn kv_width(&self) -> u32 {
        self.kv_heads.saturating_mul(self.key_width())
    }

    /// Bytes of keys and values of one position in the cache.
    pub fn kv_bytes_per_position(&self) -> u64 {
        let values = 2 * u64::from(self.has_keys()) * u64::from(self.kv_width());
        self.model.attention.cache.bytes(values)
    }

    /// Size of the state that a sequence keeps for the block, whatever its length.
    pub fn state(&self) -> StateSize {
        match &self.mixer {
            Mixer::Attention | Mixer::Latent(_) | Mixer::None => StateSize::default(),
            Mixer::Delta(delta) => delta.state(),
            Mixer::Convolution { positions } => StateSize {
                rows: positions.saturating_sub(1),
                channels: self.model.width,
                values: 0,
            },
            Mixer::Mamba(mamba) => mamba.state(),
        }
    }
}

impl ModelSpec {
    /// View of block `layer`, counted from 0. Blocks for multi-token prediction follow the others;
    /// they have attention.
    pub fn block(&self, layer: u32) -> BlockSpec<'_> {
        let latent = self.attention.latent;
        let delta = self
            .delta
            .filter(|delta| !(layer + 1).is_multiple_of(delta.attention_every))
            .filter(|_| layer < self.layers);
        let convolution = self.convolution.as_ref().filter(|convolution| {
            layer < self.layers && convolution.attention.binary_search(&layer).is_err()
        });
        let convolution = convolution.map(|convolution| Mixer::Convolution {
            positions: convolution.positions,
        });
        let attention = latent.map_or(Mixer::Attention, Mixer::Latent);
        let listed = self.mixers.as_bytes().get(layer as usize);
        let mixer = match (listed, self.mamba) {
            (Some(b'-'), _) => Mixer::None,
            (Some(b'M'), Some(mamba)) => Mixer::Mamba(mamba),
            _ => (delta.map(Mixer::Delta).or(convolution)).unwrap_or(attention),
        };
        let window = self.window(layer);
        let local = self.attention.window.and_then(|window| window.heads);
        let local = local.filter(|_| window.is_some());
        let shared = self.shared_keys.filter(|_| self.shares_keys(layer));
        let leading = self.experts.and_then(|experts| experts.leading);
        let leading = leading.filter(|leading| layer < leading.blocks);
        let experts = self.experts.filter(|_| leading.is_none());
        let own_ffn = leading.map(|leading| leading.ffn);
        let own_ffn = own_ffn.or(shared.and_then(|shared| shared.ffn));
        BlockSpec {
            model: self,
            layer,
            keys_of: self.keys_of(layer),
            kv_heads: local.map_or(self.kv_heads, |local| local.kv_heads),
            head_dim: local.map_or(self.head_dim, |local| local.head_dim),
            rope_dims: local.map_or(self.rope.dims, |local| local.rope_dims),
            ffn: own_ffn.unwrap_or(self.ffn),
            mixer,
            feed: match self.single && mixer != Mixer::None {
                true => FeedForwardSpec::None,
                false => experts.map_or(FeedForwardSpec::Dense, FeedForwardSpec::Experts),
            },
            predicts: layer >= self.layers,
            window,
            rotation: self.rotation(layer),
        }
    }

    fn shares_keys(&self, layer: u32) -> bool {
        layer < self.layers && layer >= self.first_sharing()
    }

    /// First block that uses keys and values of an earlier one; the number of blocks if none does.
    fn first_sharing(&self) -> u32 {
        let blocks = self.shared_keys.map_or(0, |shared| shared.blocks);
        self.layers.saturating_sub(blocks)
    }

    /// Block whose keys and values a block uses.
    fn keys_of(&self, layer: u32) -> u32 {
        if !self.shares_keys(layer) {
            return layer;
        }
        let kind = |layer| self.window(layer).is_some();
        let mut own = (0..self.first_sharing()).rev();
        // `check` refuses a model without such a block.
        own.find(|&own| kind(own) == kind(layer)).unwrap_or(layer)
    }

    /// Layers that one machine must run together, up to the last one; empty if the model may be cut
    /// anywhere.
    pub fn together(&self) -> std::ops::Range<u32> {
        let origins = (self.first_sharing()..self.layers).map(|layer| self.keys_of(layer));
        origins.min().unwrap_or(self.layers)..self.layers
    }

    /// Checks that the model may be cut between block `layer` and the one before it.
    ///
    /// # Errors
    /// [`CutError`] when a block from `layer` on uses keys and values of a block before it.
    pub fn check_cut(&self, layer: u32) -> Result<(), CutError> {
        if self.shared_keys.is_none() {
            return Ok(());
        }
        let mut readers = layer.max(self.first_sharing())..self.layers;
        let pair = readers.find_map(|reader| {
            let origin = self.keys_of(reader);
            (origin < layer).then_some(CutError {
                layer,
                reader,
                origin,
            })
        });
        pair.map_or(Ok(()), Err)
    }

    /// Checks that a machine may run the blocks of a range, and others the rest.
    ///
    /// # Errors
    /// As for [`Self::check_cut`].
    pub fn check_range(&self, layers: &std::ops::Range<u32>) -> Result<(), CutError> {
        self.check_cut(layers.start)?;
        self.check_cut(layers.end)
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

/// Error for a cut of a model between a block and the block whose keys and values it uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the model cannot be cut before layer {layer}: layer {reader} uses the keys and values of layer \
     {origin}, so one machine must run both"
)]
pub struct CutError {
    /// First layer behind the cut.
    pub layer: u32,
    pub reader: u32,
    /// Layer that makes the keys and values.
    pub origin: u32,
}

/// Role of a tensor in a block, with its shape (row length first).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum LayerTensor {
    /// RMSNorm before attention: `[width]`.
    AttnNorm,
    /// Queries: `[width, heads * head_dim]`; with an output gate, each head's gates follow its
    /// queries: `[width, heads * 2 * head_dim]`.
    AttnQ,
    /// Gates of the output of attention, if they have a matrix: `[width, heads * head_dim]`.
    AttnGate,
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
    /// Transposed up-projection to the part of the keys without RoPE, head by head, in absorbed
    /// latent attention: `[head_dim - rope.dims, latent.keys, heads]`.
    LatentKeyUp,
    /// Up-projection to values, head by head: `[latent.keys, latent.values, heads]`.
    LatentValueUp,
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
    /// Inputs of the convolution of a delta rule, queries, keys, values:
    /// `[width, delta.channels()]`.
    DeltaQkv,
    /// Gate of the output of a delta rule: `[width, delta.values()]`.
    DeltaGate,
    /// Scores of the strength of a correction: `[width, value_heads]`.
    DeltaBeta,
    /// Scores of the decay: `[width, value_heads]`.
    DeltaAlpha,
    /// Both of these scores, for each key head those of its value heads:
    /// `[width, 2 value_heads]`.
    DeltaBetaAlpha,
    /// Weights of the convolution, oldest position first: `[convolution, delta.channels()]`.
    DeltaConvolution,
    /// Bias of the scores of the decay: `[value_heads]`.
    DeltaDecayBias,
    /// Factor of the decay, negative: `[value_heads]`.
    DeltaDecay,
    /// RMSNorm of each head's output: `[value_width]`.
    DeltaNorm,
    /// Output projection of a delta rule: `[delta.values(), width]`.
    DeltaOutput,
    /// Factors before a short convolution, factors behind it, and its inputs before the first
    /// factors: `[width, 3 width]`.
    ConvolutionInput,
    /// Weights of a short convolution, oldest position first: `[positions, width]`.
    Convolution,
    /// Output projection of a short convolution: `[width, width]`.
    ConvolutionOutput,
    /// Gates, inputs of the convolution (values, B, C) and steps of Mamba-2: `[width, mamba.row()]`.
    MambaInput,
    /// Weights of the convolution, oldest position first: `[convolution, mamba.channels()]`.
    MambaConvolution,
    /// Bias of the convolution: `[mamba.channels()]`.
    MambaConvolutionBias,
    /// Bias of the steps: `[heads]`.
    MambaStepBias,
    /// Factor of the decay, negative: `[1, heads]`.
    MambaDecay,
    /// Factor with which values are added to the output: `[1, heads]`.
    MambaSkip,
    /// RMSNorm of each group's output: `[mamba.values() / groups, groups]`.
    MambaNorm,
    /// Output projection of Mamba-2: `[mamba.values(), width]`.
    MambaOutput,
    /// RMSNorm of the attention output, before the residual stream: `[width]`.
    AttnPostNorm,
    /// LayerNorm of the residual stream after the output of attention was added: `[width]`.
    AttnSumNorm,
    AttnSumNormBias,
    /// LayerNorm of the residual stream after the feed-forward output was added: `[width]`.
    FfnSumNorm,
    FfnSumNormBias,
    /// RMSNorm before the feed-forward layer: `[width]`.
    FfnNorm,
    /// Gate, to which the activation is applied: `[width, ffn]`.
    FfnGate,
    /// Up projection, multiplied with the activated gate: `[width, ffn]`.
    FfnUp,
    /// Bias of the up projection of a layer without gate: `[ffn]`.
    FfnUpBias,
    /// Gate, then up, in one: `[width, 2 ffn]`.
    FfnGateUp,
    /// Down projection: `[ffn, width]`.
    FfnDown,
    /// Bias of the down projection: `[width]`.
    FfnDownBias,
    /// Scores of the experts: `[width, experts]`.
    Router,
    /// Bias of the scores: `[experts]`.
    RouterBias,
    /// Values added to the sigmoids of the scores for the choice of experts: `[experts]`.
    RouterCorrection,
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
    /// Gates of an expert, then its ups, one expert after another: `[width, 2 ffn, experts]`.
    ExpertGateUp,
    /// Weight of the norm before the router: `[width]`.
    RouterNorm,
    /// Factors of the weights of the experts: `[experts]`.
    ExpertScale,
    /// RMSNorm before the experts: `[width]`.
    ExpertNorm,
    /// RMSNorm of the output of the experts: `[width]`.
    ExpertPostNorm,
    /// RMSNorm of the output of the shared expert: `[width]`.
    SharedPostNorm,
    /// Score of the shared expert: `[width, 1]`.
    SharedScore,
    /// Gate of the shared expert: `[width, shared.ffn]`.
    SharedGate,
    /// Up projection of the shared expert: `[width, shared.ffn]`.
    SharedUp,
    /// Down projection of the shared expert: `[shared.ffn, width]`.
    SharedDown,
    /// RMSNorm of the feed-forward output, before the residual stream: `[width]`.
    FfnPostNorm,
    /// Gate of the per-layer input of a row: `[width, per_layer.width]`.
    PerLayerGate,
    /// Projection of the gated per-layer input: `[per_layer.width, width]`.
    PerLayerOutput,
    /// RMSNorm of the projected per-layer input: `[width]`.
    PerLayerNorm,
    /// Factor of the output of a block: `[1]`.
    BlockScale,
    /// Multi-token prediction: input of the block, from embedding and residual stream:
    /// `[2 width, width]`.
    PredictionInput,
    /// RMSNorm of the embedding: `[width]`.
    PredictionEmbeddingNorm,
    /// RMSNorm of the residual stream: `[width]`.
    PredictionHiddenNorm,
    /// RMSNorm before the output matrix: `[width]`.
    PredictionOutputNorm,
    /// Embedding: `[width, vocab]`.
    PredictionEmbedding,
    /// Output matrix: `[width, vocab]`.
    PredictionOutput,
}

/// Dimension of a tensor of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Dim {
    /// [`ModelSpec::width`]
    Width,
    TwoWidth,
    ThreeWidth,
    /// [`ModelSpec::vocab`]
    Vocab,
    /// [`BlockSpec::query_width`]
    Queries,
    /// Queries and gates of all heads.
    GatedQueries,
    /// [`BlockSpec::kv_width`]
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
    /// Part of the keys of a head without RoPE.
    KeysWithoutRotary,
    /// [`LatentSpec::values`]
    LatentValues,
    /// Values over which queries are normalised: see [`QkNorm`].
    QueryNorm,
    KeyNorm,
    /// [`BlockSpec::ffn`]
    Ffn,
    TwoFfn,
    /// [`PerLayerSpec::width`](super::PerLayerSpec::width)
    PerLayer,
    /// A single row or value.
    One,
    /// [`ExpertSpec::count`]
    Experts,
    /// [`SharedExpertSpec::ffn`](super::SharedExpertSpec::ffn)
    SharedFfn,
    /// [`DeltaSpec::channels`]
    DeltaChannels,
    /// [`DeltaSpec::values`]
    DeltaValues,
    /// [`DeltaSpec::value_heads`]
    DeltaHeads,
    TwoDeltaHeads,
    /// [`DeltaSpec::value_width`]
    DeltaWidth,
    /// [`DeltaSpec::convolution`]
    DeltaConvolution,
    /// [`ConvolutionSpec::positions`](super::ConvolutionSpec::positions)
    ConvolutionPositions,
    /// [`MambaSpec::row`]
    MambaRow,
    /// [`MambaSpec::convolution`]
    MambaConvolution,
    /// [`MambaSpec::channels`]
    MambaChannels,
    /// [`MambaSpec::values`]
    MambaValues,
    /// [`MambaSpec::heads`]
    MambaHeads,
    /// [`MambaSpec::groups`]
    MambaGroups,
    /// Values of all heads of a group.
    MambaGroup,
}

impl Dim {
    /// Length of the dimension in a block.
    pub fn of(self, block: &BlockSpec<'_>) -> u64 {
        let spec = block.model;
        let (heads, rotary) = (u64::from(spec.heads), u64::from(block.rope_dims));
        let (queries, keys, values) = match block.mixer {
            Mixer::Latent(latent) => {
                let queries = latent.queries.unwrap_or(0);
                (queries, latent.keys, latent.values)
            }
            _ => (0, 0, block.head_dim),
        };
        let of_delta = |size: fn(&DeltaSpec) -> u32| match &block.mixer {
            Mixer::Delta(delta) => size(delta).into(),
            _ => 0,
        };
        let of_mamba = |size: fn(&MambaSpec) -> u32| match &block.mixer {
            Mixer::Mamba(mamba) => size(mamba).into(),
            _ => 0,
        };
        let per_head = spec.attention.qk_norm == Some(QkNorm::Head);
        match self {
            Self::QueryNorm | Self::KeyNorm if per_head => block.head_dim.into(),
            Self::Width => spec.width.into(),
            Self::TwoWidth => 2 * u64::from(spec.width),
            Self::ThreeWidth => 3 * u64::from(spec.width),
            Self::ConvolutionPositions => match block.mixer {
                Mixer::Convolution { positions } => positions.into(),
                _ => 0,
            },
            Self::Queries | Self::QueryNorm => block.query_width().into(),
            Self::Keys | Self::KeyNorm => block.kv_width().into(),
            Self::Qkv => u64::from(block.query_width()) + 2 * u64::from(block.kv_width()),
            Self::Attended => heads * u64::from(values),
            Self::LatentQueries => queries.into(),
            Self::LatentKeys => keys.into(),
            Self::LatentKeysAndRotary => u64::from(keys) + rotary,
            Self::KeysAndValues => {
                let nope = u64::from(block.head_dim).saturating_sub(rotary);
                heads * (nope + u64::from(values))
            }
            Self::KeysWithoutRotary => u64::from(block.head_dim).saturating_sub(rotary),
            Self::LatentValues => values.into(),
            Self::Heads => heads,
            Self::Ffn => block.ffn.into(),
            Self::Vocab => spec.vocab.into(),
            Self::One => 1,
            Self::TwoFfn => 2 * u64::from(block.ffn),
            Self::PerLayer => spec.per_layer.map_or(0, |per_layer| per_layer.width).into(),
            Self::Experts => match block.feed {
                FeedForwardSpec::Experts(experts) => experts.count.into(),
                FeedForwardSpec::Dense | FeedForwardSpec::None => 0,
            },
            Self::SharedFfn => match block.feed {
                FeedForwardSpec::Experts(experts) => {
                    experts.shared.map_or(0, |shared| shared.ffn).into()
                }
                FeedForwardSpec::Dense | FeedForwardSpec::None => 0,
            },
            Self::GatedQueries => 2 * u64::from(block.query_width()),
            Self::DeltaChannels => of_delta(DeltaSpec::channels),
            Self::DeltaValues => of_delta(DeltaSpec::values),
            Self::DeltaHeads => of_delta(|delta| delta.value_heads),
            Self::TwoDeltaHeads => 2 * of_delta(|delta| delta.value_heads),
            Self::DeltaWidth => of_delta(|delta| delta.value_width),
            Self::DeltaConvolution => of_delta(|delta| delta.convolution),
            Self::MambaRow => of_mamba(MambaSpec::row),
            Self::MambaConvolution => of_mamba(|mamba| mamba.convolution),
            Self::MambaChannels => of_mamba(MambaSpec::channels),
            Self::MambaValues => of_mamba(MambaSpec::values),
            Self::MambaHeads => of_mamba(|mamba| mamba.heads),
            Self::MambaGroups => of_mamba(|mamba| mamba.groups),
            Self::MambaGroup => of_mamba(|mamba| mamba.values() / mamba.groups.max(1)),
        }
    }
}
