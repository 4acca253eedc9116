//! Description of a family, and the tensors of its models.

use super::rules::{
    EMBEDDING, EMBEDDING_NORM, EMBEDDING_NORM_BIAS, Group, OUTPUT, OUTPUT_NORM,
    PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, PER_LAYER_PROJECTION_NORM, POSITION_EMBEDDING,
    PREDICTION, PREDICTION_EMBEDDING, PREDICTION_OUTPUT, PROJECTION_DOWN, PROJECTION_UP,
    ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, Rule, TYPE_EMBEDDING,
};
use crate::boundary::BoundaryDtype;
use crate::spec::{Activation, BlockSpec, LayerTensor, ModelSpec, QkNorm, RopeKind, RopeScaling};

#[derive(Debug)]
pub struct Family {
    /// Value of `general.architecture`, and prefix of the family's metadata keys.
    pub architecture: &'static str,
    /// Pairing of the values that RoPE rotates.
    pub rope: RopeKind,
    /// Format of the residual stream between blocks, unless the file has
    /// [`BOUNDARY_KEY`](super::BOUNDARY_KEY).
    pub boundary: BoundaryDtype,
    /// Groups of tensors that a block can have. [`Group::present`] selects those of a block.
    pub layer: &'static [Group],
    /// Name of the norm before the output matrix.
    pub output_norm: &'static str,
    /// Metadata keys read for this family only, without the architecture's prefix, with spaces
    /// between.
    pub reads: &'static str,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: Presence,
    pub qk_norm: Option<QkNorm>,
    /// Whether only the files that have its tensors have [`Self::qk_norm`].
    pub qk_norm_if_stored: bool,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Epsilon of the norms in latent attention; `None` for ordinary attention.
    pub latent_norm_eps: Option<f32>,
    /// Default of [`ScaleSpec::embedding`](crate::spec::ScaleSpec::embedding) for files without the
    /// key.
    pub embedding_scale: Option<f32>,
    /// `depth_scale / sqrt(layers)` is
    /// [`ScaleSpec::residual`](crate::spec::ScaleSpec::residual); files do not state it.
    pub depth_scale: Option<f64>,
    /// Base width: logits are divided by `width / logits_by_width`.
    pub logits_by_width: Option<f32>,
    /// Whether logits are multiplied by `logit_scale`, not divided.
    pub logits_multiplied: bool,
    /// [`ModelSpec::embedding_norm`](crate::spec::ModelSpec::embedding_norm)
    pub embedding_norm: bool,
    /// [`ModelSpec::post_norm_eps`](crate::spec::ModelSpec::post_norm_eps), which files do not
    /// state.
    pub post_norm_eps: Option<f32>,
    /// Whether the embedding is multiplied by `sqrt(width)`.
    pub scaled_embedding: bool,
    /// Default of [`ExpertSpec::normalise`](crate::spec::ExpertSpec::normalise) for files without
    /// the key.
    pub experts_normalised: bool,
    /// [`ExpertSpec::correction`](crate::spec::ExpertSpec::correction)
    pub correction: Presence,
    /// Whether a file has [`ROPE_FACTORS`].
    pub rope_factors: Presence,
    /// Whether a file may have [`ROPE_FACTORS_SHORT`] and [`ROPE_FACTORS_LONG`].
    pub long_rope: bool,
    pub yarn: Yarn,
    /// Whether YaRN's correction, if a file has one, multiplies the scores of attention, while
    /// cosines and sines stay as they are.
    pub yarn_scales_scores: bool,
    /// Layer counts of the models whose scores are scaled by `1 / sqrt(width / heads)` instead of
    /// `1 / sqrt(head_dim)`. Files do not state it; llama.cpp uses the layer count, too.
    pub scaled_by_width: &'static [u32],
    /// [`RopeSpec::skip_every`](crate::spec::RopeSpec::skip_every); in families whose files state
    /// which blocks have a window, the others are without RoPE.
    pub rope_skip_every: Option<u32>,
    /// Default of [`RopeSpec::local_theta`](crate::spec::RopeSpec::local_theta) for files without
    /// the key.
    pub rope_local_theta: Option<f64>,
    /// [`WindowSpec::global_every`](crate::spec::WindowSpec::global_every)
    pub global_every: Option<u32>,
    /// [`AttentionSpec::output_gate`](crate::spec::AttentionSpec::output_gate)
    pub output_gate: bool,
    /// [`AttentionSpec::scale`](crate::spec::AttentionSpec::scale), which files do not state.
    pub attention_scale: Option<f32>,
    /// [`AttentionSpec::value_norm`](crate::spec::AttentionSpec::value_norm)
    pub value_norm: bool,
    /// Blocks with a gated delta rule; files do not state these two facts about it.
    pub delta: Option<DeltaFamily>,
    /// Whether blocks without key heads have a gated short convolution.
    pub convolution: bool,
    /// Blocks with Mamba-2, which files list.
    pub mamba: Option<MambaFamily>,
    /// Models that make vectors of whole texts.
    pub encoder: Option<EncoderFamily>,
}

/// Facts about the blocks of a family with Mamba-2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MambaFamily {
    /// [`ModelSpec::single`]
    pub single: bool,
}

/// Facts about an encoder that files do not state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EncoderFamily {
    /// [`EncoderSpec::positions`](crate::spec::EncoderSpec::positions)
    pub positions: bool,
    /// Whether a file has [`TYPE_EMBEDDING`].
    pub token_types: bool,
    /// Whether a file may have [`PROJECTION_UP`] and [`PROJECTION_DOWN`].
    pub projection: bool,
}

/// Facts about the gated delta rule of a family.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeltaFamily {
    /// [`DeltaSpec::tiled`](crate::spec::DeltaSpec::tiled)
    pub tiled: bool,
    /// [`DeltaSpec::norm_eps`](crate::spec::DeltaSpec::norm_eps)
    pub norm_eps: f32,
}

/// Whether the models of a family have a feature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    Never,
    Always,
    /// If the file has its tensors.
    IfStored,
}

/// Whether models of a family may use YaRN, and with which
/// [`YarnSpec::whole`](crate::spec::YarnSpec::whole), which files do not state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Yarn {
    Never,
    /// The ramp begins and ends at whole pairs, as in nearly all families.
    Whole,
    /// The ramp begins and ends at fractional pair indices.
    Exact,
}

impl Family {
    /// Base of all families: plain Llama without optional features.
    pub(super) const BASE: Self = Self {
        architecture: "llama",
        rope: RopeKind::Interleaved,
        boundary: BoundaryDtype::F16,
        layer: &[],
        output_norm: OUTPUT_NORM,
        reads: "",
        qkv_bias: Presence::Never,
        qk_norm: None,
        qk_norm_if_stored: false,
        activation: Activation::Silu,
        latent_norm_eps: None,
        embedding_scale: None,
        depth_scale: None,
        logits_by_width: None,
        logits_multiplied: false,
        embedding_norm: false,
        post_norm_eps: None,
        scaled_embedding: false,
        experts_normalised: false,
        correction: Presence::Never,
        rope_factors: Presence::Never,
        long_rope: false,
        yarn: Yarn::Never,
        yarn_scales_scores: false,
        scaled_by_width: &[],
        rope_skip_every: None,
        rope_local_theta: None,
        global_every: None,
        output_gate: false,
        attention_scale: None,
        value_norm: false,
        delta: None,
        convolution: false,
        mamba: None,
        encoder: None,
    };

    /// Returns true if blocks can have a tensor.
    pub(super) fn lists(&self, tensor: LayerTensor) -> bool {
        let mut rules = self.layer.iter().flat_map(|group| group.rules);
        rules.any(|rule| rule.tensor == tensor)
    }

    /// Whether a metadata key is among [`Self::reads`].
    pub(super) fn reads_key(&self, key: &str) -> bool {
        self.reads.split_whitespace().any(|known| known == key)
    }

    /// Tensors of a block, in the order of use.
    pub fn rules(&self, block: BlockSpec<'_>) -> impl Iterator<Item = &'static Rule> {
        let groups = self.layer.iter();
        groups
            .filter(move |group| (group.present)(&block))
            .flat_map(|group| group.rules)
    }

    /// Name and shape (row length first) of every tensor of a model of this family. Tensors outside
    /// the blocks come first.
    pub fn tensors(&self, spec: &ModelSpec) -> impl Iterator<Item = (String, Vec<u64>)> {
        let (width, vocab) = (u64::from(spec.width), u64::from(spec.vocab));
        let mut outer = vec![(EMBEDDING, vec![width, vocab])];
        let encoder = spec.encoder.unwrap_or_default();
        match encoder.layer_norm {
            true => outer.extend([EMBEDDING_NORM, EMBEDDING_NORM_BIAS].map(|n| (n, vec![width]))),
            false => outer.push((self.output_norm, vec![width])),
        }
        if encoder.positions {
            outer.push((POSITION_EMBEDDING, vec![width, spec.context.into()]));
        }
        if encoder.token_types > 0 {
            outer.push((TYPE_EMBEDDING, vec![width, encoder.token_types.into()]));
        }
        if let Some(between) = encoder.projection.map(u64::from) {
            outer.push((PROJECTION_UP, vec![width, between]));
            outer.push((PROJECTION_DOWN, vec![between, width]));
        }
        if !spec.tied_embedding {
            outer.push((OUTPUT, vec![width, vocab]));
        }
        if let Some(per_layer) = spec.per_layer {
            let own = u64::from(per_layer.width);
            let all = own * u64::from(spec.layers);
            outer.push((PER_LAYER_EMBEDDING, vec![all, vocab]));
            outer.push((PER_LAYER_PROJECTION, vec![width, all]));
            outer.push((PER_LAYER_PROJECTION_NORM, vec![own]));
        }
        let pairs = u64::from(spec.rope.dims / 2);
        outer.extend(shared_tensors(spec).iter().map(|name| (*name, vec![pairs])));
        let outer = outer.into_iter();
        let outer = outer.map(|(name, lengths)| (name.to_owned(), lengths));
        let blocks = spec.layers.saturating_add(spec.prediction);
        outer.chain((0..blocks).flat_map(move |layer| {
            let block = spec.block(layer);
            let more = [&PREDICTION, &PREDICTION_EMBEDDING, &PREDICTION_OUTPUT];
            let more = more
                .into_iter()
                .filter(move |group| (group.present)(&block));
            let more = more.flat_map(|group| group.rules);
            self.rules(block).chain(more).map(move |rule| {
                let lengths = rule.dims.iter().map(|dim| dim.of(&block));
                (rule.full_name(layer), lengths.collect::<Vec<_>>())
            })
        }))
    }
}

/// Names of the tensors outside the blocks that every block uses.
pub(crate) fn shared_tensors(spec: &ModelSpec) -> &'static [&'static str] {
    match spec.rope.scaling {
        Some(RopeScaling::Factors) => &[ROPE_FACTORS],
        Some(RopeScaling::Long { .. }) => &[ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG],
        Some(RopeScaling::Linear { .. } | RopeScaling::Yarn(_)) | None => &[],
    }
}
