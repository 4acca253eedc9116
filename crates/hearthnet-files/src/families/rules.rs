//! Tensors of model files: their names, and the groups that form the blocks of families.

use crate::spec::Dim::{self, *};
use crate::spec::LayerTensor as T;
use crate::spec::{BlockSpec, FeedForwardSpec, LayerTensor, Mixer};

/// Token embedding, `[width, vocab]`.
pub const EMBEDDING: &str = "token_embd.weight";
/// Norm before the output matrix, `[width]`.
pub const OUTPUT_NORM: &str = "output_norm.weight";
/// Output matrix, `[width, vocab]`; a file without it uses the embedding.
pub const OUTPUT: &str = "output.weight";

/// Per-layer embeddings of all blocks, `[layers * per_layer.width, vocab]`.
pub const PER_LAYER_EMBEDDING: &str = "per_layer_token_embd.weight";
/// Projection of a row of the embedding to the per-layer inputs of all blocks,
/// `[width, layers * per_layer.width]`.
pub const PER_LAYER_PROJECTION: &str = "per_layer_model_proj.weight";
/// Norm of the projection, block by block, `[per_layer.width]`.
pub const PER_LAYER_PROJECTION_NORM: &str = "per_layer_proj_norm.weight";

/// Embedding of positions of an encoder, `[width, context]`.
pub const POSITION_EMBEDDING: &str = "position_embd.weight";
/// Embedding of token types of an encoder, `[width, token_types]`.
pub const TYPE_EMBEDDING: &str = "token_types.weight";
/// Norm of the embedding of an encoder, or [`OUTPUT_NORM`] under the name that the converter of
/// some families gives it, `[width]`.
pub const EMBEDDING_NORM: &str = "token_embd_norm.weight";
pub const EMBEDDING_NORM_BIAS: &str = "token_embd_norm.bias";
/// First matrix behind the pooled state, `[width, projection]`.
pub const PROJECTION_UP: &str = "dense_2.weight";
/// Second matrix behind the pooled state, `[projection, width]`.
pub const PROJECTION_DOWN: &str = "dense_3.weight";

/// Router matrix of a block, `[width, experts]`; the prefix is `blk.N.`.
pub const ROUTER: &str = "ffn_gate_inp.weight";
/// Values that correct the choice of experts of a block, `[experts]`; the prefix is `blk.N.`.
pub const CORRECTION: &str = "exp_probs_b.bias";
/// Weights of the convolution of a block, `[positions, channels]`.
const CONVOLUTION: &str = "ssm_conv1d.weight";
/// [`CONVOLUTION`] of a gated short convolution, `[positions, width]`.
const SHORT_CONVOLUTION: &str = "shortconv.conv.weight";
/// Ends of the names of other tensors that are used in full precision whatever their number of
/// dimensions: stacked biases of experts, and numbers of the heads of Mamba-2.
const EXACT: [&str; 4] = [".bias", ".ssm_a", ".ssm_d", ".ssm_norm.weight"];
/// Divisors of RoPE frequencies, `[pairs]`: see
/// [`RopeScaling::Factors`](crate::spec::RopeScaling::Factors).
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
/// LongRoPE divisors for contexts within the original training length, `[pairs]`.
pub const ROPE_FACTORS_SHORT: &str = "rope_factors_short.weight";
/// LongRoPE divisors for longer contexts, `[pairs]`.
pub const ROPE_FACTORS_LONG: &str = "rope_factors_long.weight";

/// Name and shape of a tensor of a block.
#[derive(Debug)]
pub struct Rule {
    pub tensor: LayerTensor,
    /// Name without the prefix `blk.N.`.
    pub name: &'static str,
    /// Shape, row length first: one dimension for a vector, two for a matrix, three for the
    /// matrices of all experts.
    pub dims: &'static [Dim],
}

impl Rule {
    /// Returns true for a matrix or the matrices of all experts.
    pub fn is_matrix(&self) -> bool {
        !is_vector(&self.full_name(0), self.dims.len())
    }

    /// Full tensor name in block `layer`.
    pub fn full_name(&self, layer: u32) -> String {
        format!("blk.{layer}.{}", self.name)
    }
}

/// Returns true for the weights of a convolution.
pub fn is_convolution(name: &str) -> bool {
    [CONVOLUTION, SHORT_CONVOLUTION]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Whether a tensor, of its full name, has no matrix, but values that are used in full precision:
/// vectors, biases, convolutions and others.
pub fn is_vector(name: &str, dims: usize) -> bool {
    dims < 2 || is_convolution(name) || EXACT.iter().any(|end| name.ends_with(end))
}

/// Tensors that a block has all or none of.
#[derive(Debug)]
pub struct Group {
    /// Returns true for a block with these tensors.
    pub present: fn(&BlockSpec<'_>) -> bool,
    pub rules: &'static [Rule],
}

const fn group(present: fn(&BlockSpec<'_>) -> bool, rules: &'static [Rule]) -> Group {
    Group { present, rules }
}

const fn rule(tensor: T, name: &'static str, dims: &'static [Dim]) -> Rule {
    Rule { tensor, name, dims }
}

pub(super) const ATTENTION: Group = group(
    |block| block.attends(),
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(T::AttnQ, "attn_q.weight", &[Width, Queries]),
        rule(T::AttnK, "attn_k.weight", &[Width, Keys]),
        rule(T::AttnV, "attn_v.weight", &[Width, Keys]),
        rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
    ],
);

/// Queries of blocks that may use the keys and values of another block, with their norm.
pub(super) const QUERIES: Group = group(
    |_| true,
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(T::AttnQ, "attn_q.weight", &[Width, Queries]),
        rule(T::AttnQNorm, "attn_q_norm.weight", &[QueryNorm]),
        rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
    ],
);

/// Keys beside [`QUERIES`].
pub(super) const KEYS: Group = group(
    |block| block.has_keys(),
    &[
        rule(T::AttnK, "attn_k.weight", &[Width, Keys]),
        rule(T::AttnKNorm, "attn_k_norm.weight", &[KeyNorm]),
    ],
);

/// Values beside [`KEYS`].
pub(super) const VALUES: Group = group(
    |block| block.has_values(),
    &[rule(T::AttnV, "attn_v.weight", &[Width, Keys])],
);

/// Norm before latent attention. The further tensors follow in the groups `LATENT_*`.
pub(super) const LATENT_NORM: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(_)),
    &[rule(T::AttnNorm, "attn_norm.weight", &[Width])],
);

pub(super) const LATENT_QUERIES: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(latent) if latent.queries.is_some()),
    &[
        rule(T::LatentQ, "attn_q_a.weight", &[Width, LatentQueries]),
        rule(T::LatentQNorm, "attn_q_a_norm.weight", &[LatentQueries]),
        rule(T::LatentQUp, "attn_q_b.weight", &[LatentQueries, Queries]),
    ],
);

/// [`LATENT_QUERIES`] without a low-rank row.
pub(super) const LATENT_PLAIN_QUERIES: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(latent) if latent.queries.is_none()),
    &[rule(T::AttnQ, "attn_q.weight", &[Width, Queries])],
);

pub(super) const LATENT_KEYS: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(_)),
    &[
        rule(
            T::LatentKv,
            "attn_kv_a_mqa.weight",
            &[Width, LatentKeysAndRotary],
        ),
        rule(T::LatentKvNorm, "attn_kv_a_norm.weight", &[LatentKeys]),
    ],
);

pub(super) const LATENT_UP: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(latent) if !latent.absorbed),
    &[rule(
        T::LatentKvUp,
        "attn_kv_b.weight",
        &[LatentKeys, KeysAndValues],
    )],
);

/// [`LATENT_UP`] in absorbed form.
pub(super) const LATENT_ABSORBED: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(latent) if latent.absorbed),
    &[
        rule(
            T::LatentKeyUp,
            "attn_k_b.weight",
            &[KeysWithoutRotary, LatentKeys, Heads],
        ),
        rule(
            T::LatentValueUp,
            "attn_v_b.weight",
            &[LatentKeys, LatentValues, Heads],
        ),
    ],
);

pub(super) const LATENT_OUTPUT: Group = group(
    |block| matches!(block.mixer, Mixer::Latent(_)),
    &[rule(
        T::AttnOutput,
        "attn_output.weight",
        &[Attended, Width],
    )],
);

/// [`ATTENTION`] with queries, keys and values in one matrix.
pub(super) const FUSED_ATTENTION: Group = group(
    |_| true,
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(T::AttnQkv, "attn_qkv.weight", &[Width, Qkv]),
        rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
    ],
);

/// [`ATTENTION`] without a norm before it, as in BERT.
pub(super) const PLAIN_ATTENTION: Group = group(
    |_| true,
    &[
        rule(T::AttnQ, "attn_q.weight", &[Width, Queries]),
        rule(T::AttnK, "attn_k.weight", &[Width, Keys]),
        rule(T::AttnV, "attn_v.weight", &[Width, Keys]),
        rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
    ],
);

/// [`FUSED_ATTENTION`] without a norm before it.
pub(super) const PLAIN_FUSED_ATTENTION: Group = group(
    |_| true,
    &[
        rule(T::AttnQkv, "attn_qkv.weight", &[Width, Qkv]),
        rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
    ],
);

/// [`ATTENTION`] with an output gate, in blocks that have no recurrence.
pub(super) const GATED_ATTENTION: Group = group(
    |block| block.has_keys(),
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(T::AttnQ, "attn_q.weight", &[Width, GatedQueries]),
        rule(T::AttnK, "attn_k.weight", &[Width, Keys]),
        rule(T::AttnV, "attn_v.weight", &[Width, Keys]),
        rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
    ],
);

/// Gates of [`ATTENTION`] with a matrix of their own.
pub(super) const ATTENTION_GATE: Group = group(
    |block| block.model.attention.gate_matrix,
    &[rule(T::AttnGate, "attn_gate.weight", &[Width, Queries])],
);

/// Mamba-2.
pub(super) const MAMBA: Group = group(
    |block| matches!(block.mixer, Mixer::Mamba(_)),
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(T::MambaInput, "ssm_in.weight", &[Width, MambaRow]),
        rule(
            T::MambaConvolution,
            CONVOLUTION,
            &[Dim::MambaConvolution, MambaChannels],
        ),
        rule(T::MambaConvolutionBias, "ssm_conv1d.bias", &[MambaChannels]),
        rule(T::MambaStepBias, "ssm_dt.bias", &[MambaHeads]),
        rule(T::MambaDecay, "ssm_a", &[One, MambaHeads]),
        rule(T::MambaSkip, "ssm_d", &[One, MambaHeads]),
        rule(T::MambaNorm, "ssm_norm.weight", &[MambaGroup, MambaGroups]),
        rule(T::MambaOutput, "ssm_out.weight", &[MambaValues, Width]),
    ],
);

/// Gated delta rule, without the scores of decay and correction.
pub(super) const DELTA: Group = group(
    |block| matches!(block.mixer, Mixer::Delta(_)),
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(T::DeltaQkv, "attn_qkv.weight", &[Width, DeltaChannels]),
        rule(T::DeltaGate, "attn_gate.weight", &[Width, DeltaValues]),
        rule(
            T::DeltaConvolution,
            CONVOLUTION,
            &[Dim::DeltaConvolution, DeltaChannels],
        ),
        rule(T::DeltaDecayBias, "ssm_dt.bias", &[DeltaHeads]),
        rule(T::DeltaDecay, "ssm_a", &[DeltaHeads]),
        rule(T::DeltaNorm, "ssm_norm.weight", &[DeltaWidth]),
        rule(T::DeltaOutput, "ssm_out.weight", &[DeltaValues, Width]),
    ],
);

/// Scores of [`DELTA`] in two matrices.
pub(super) const DELTA_SCORES: Group = group(
    |block| matches!(block.mixer, Mixer::Delta(_)),
    &[
        rule(T::DeltaBeta, "ssm_beta.weight", &[Width, DeltaHeads]),
        rule(T::DeltaAlpha, "ssm_alpha.weight", &[Width, DeltaHeads]),
    ],
);

/// Scores of [`DELTA`] in one matrix.
pub(super) const FUSED_DELTA_SCORES: Group = group(
    |block| matches!(block.mixer, Mixer::Delta(_)),
    &[rule(
        T::DeltaBetaAlpha,
        "ssm_ba.weight",
        &[Width, TwoDeltaHeads],
    )],
);

/// Gated short convolution.
pub(super) const GATED_CONVOLUTION: Group = group(
    |block| matches!(block.mixer, Mixer::Convolution { .. }),
    &[
        rule(T::AttnNorm, "attn_norm.weight", &[Width]),
        rule(
            T::ConvolutionInput,
            "shortconv.in_proj.weight",
            &[Width, ThreeWidth],
        ),
        rule(
            T::Convolution,
            SHORT_CONVOLUTION,
            &[ConvolutionPositions, Width],
        ),
        rule(
            T::ConvolutionOutput,
            "shortconv.out_proj.weight",
            &[Width, Width],
        ),
    ],
);

pub(super) const QKV_BIAS: Group = group(
    |block| block.model.attention.qkv_bias,
    &[
        rule(T::AttnQBias, "attn_q.bias", &[Queries]),
        rule(T::AttnKBias, "attn_k.bias", &[Keys]),
        rule(T::AttnVBias, "attn_v.bias", &[Keys]),
    ],
);

pub(super) const OUTPUT_BIAS: Group = group(
    |block| block.model.attention.output_bias,
    &[rule(T::AttnOutputBias, "attn_output.bias", &[Width])],
);

pub(super) const SINKS: Group = group(
    |block| block.model.attention.sinks,
    &[rule(T::AttnSinks, "attn_sinks.weight", &[Heads])],
);

pub(super) const QK_NORM: Group = group(
    |block| block.model.attention.qk_norm.is_some() && block.has_keys(),
    &[
        rule(T::AttnQNorm, "attn_q_norm.weight", &[QueryNorm]),
        rule(T::AttnKNorm, "attn_k_norm.weight", &[KeyNorm]),
    ],
);

/// Norm before the feed-forward layer.
pub(super) const FEED_NORM: Group =
    group(|_| true, &[rule(T::FfnNorm, "ffn_norm.weight", &[Width])]);

/// [`FEED_NORM`] of converters that name it for its position after attention.
pub(super) const MIDDLE_NORM: Group = group(
    |_| true,
    &[rule(T::FfnNorm, "post_attention_norm.weight", &[Width])],
);

/// [`FEED_NORM`] of blocks that have nothing else; it has the name of the first norm of a block.
pub(super) const ONLY_FEED_NORM: Group = group(
    |block| block.mixer == Mixer::None,
    &[rule(T::FfnNorm, "attn_norm.weight", &[Width])],
);

pub(super) const DENSE: Group = group(
    |block| block.feed == FeedForwardSpec::Dense,
    &[
        rule(T::FfnGate, "ffn_gate.weight", &[Width, Ffn]),
        rule(T::FfnUp, "ffn_up.weight", &[Width, Ffn]),
        rule(T::FfnDown, "ffn_down.weight", &[Ffn, Width]),
    ],
);

/// [`DENSE`] with gate and up in one matrix.
pub(super) const FUSED_DENSE: Group = group(
    |block| block.feed == FeedForwardSpec::Dense,
    &[
        rule(T::FfnGateUp, "ffn_up.weight", &[Width, TwoFfn]),
        rule(T::FfnDown, "ffn_down.weight", &[Ffn, Width]),
    ],
);

/// Biases of [`DENSE`] or [`UNGATED_DENSE`].
pub(super) const DENSE_BIAS: Group = group(
    |block| block.feed == FeedForwardSpec::Dense,
    &[
        rule(T::FfnUpBias, "ffn_up.bias", &[Ffn]),
        rule(T::FfnDownBias, "ffn_down.bias", &[Width]),
    ],
);

/// Norms of the residual stream after each addition.
pub(super) const SUM_NORMS: Group = group(
    |_| true,
    &[
        rule(T::AttnSumNorm, "attn_output_norm.weight", &[Width]),
        rule(T::AttnSumNormBias, "attn_output_norm.bias", &[Width]),
        rule(T::FfnSumNorm, "layer_output_norm.weight", &[Width]),
        rule(T::FfnSumNormBias, "layer_output_norm.bias", &[Width]),
    ],
);

/// [`DENSE`] without a gate.
pub(super) const UNGATED_DENSE: Group = group(
    |block| block.feed == FeedForwardSpec::Dense,
    &[
        rule(T::FfnUp, "ffn_up.weight", &[Width, Ffn]),
        rule(T::FfnDown, "ffn_down.weight", &[Ffn, Width]),
    ],
);

pub(super) const EXPERTS: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(_)),
    &[
        rule(T::Router, ROUTER, &[Width, Experts]),
        rule(
            T::ExpertGate,
            "ffn_gate_exps.weight",
            &[Width, Ffn, Experts],
        ),
        rule(T::ExpertUp, "ffn_up_exps.weight", &[Width, Ffn, Experts]),
        rule(
            T::ExpertDown,
            "ffn_down_exps.weight",
            &[Ffn, Width, Experts],
        ),
    ],
);

/// [`EXPERTS`] without gates.
pub(super) const UNGATED_EXPERTS: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(_)),
    &[
        rule(T::Router, ROUTER, &[Width, Experts]),
        rule(T::ExpertUp, "ffn_up_exps.weight", &[Width, Ffn, Experts]),
        rule(
            T::ExpertDown,
            "ffn_down_exps.weight",
            &[Ffn, Width, Experts],
        ),
    ],
);

pub(super) const EXPERT_BIAS: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(experts) if experts.bias),
    &[
        rule(T::RouterBias, "ffn_gate_inp.bias", &[Experts]),
        rule(T::ExpertGateBias, "ffn_gate_exps.bias", &[Ffn, Experts]),
        rule(T::ExpertUpBias, "ffn_up_exps.bias", &[Ffn, Experts]),
        rule(T::ExpertDownBias, "ffn_down_exps.bias", &[Width, Experts]),
    ],
);

pub(super) const ROUTER_CORRECTION: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(experts) if experts.correction),
    &[rule(T::RouterCorrection, CORRECTION, &[Experts])],
);

/// Score of [`SHARED_EXPERT`].
pub(super) const SHARED_SCORE: Group = group(
    |block| match block.feed {
        FeedForwardSpec::Experts(experts) => experts.shared.is_some_and(|shared| !shared.plain),
        FeedForwardSpec::Dense | FeedForwardSpec::None => false,
    },
    &[rule(
        T::SharedScore,
        "ffn_gate_inp_shexp.weight",
        &[Width, One],
    )],
);

pub(super) const SHARED_EXPERT: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(experts) if experts.shared.is_some()),
    &[
        rule(T::SharedGate, "ffn_gate_shexp.weight", &[Width, SharedFfn]),
        rule(T::SharedUp, "ffn_up_shexp.weight", &[Width, SharedFfn]),
        rule(T::SharedDown, "ffn_down_shexp.weight", &[SharedFfn, Width]),
    ],
);

/// [`SHARED_EXPERT`] without a gate.
pub(super) const UNGATED_SHARED_EXPERT: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(experts) if experts.shared.is_some()),
    &[
        rule(T::SharedUp, "ffn_up_shexp.weight", &[Width, SharedFfn]),
        rule(T::SharedDown, "ffn_down_shexp.weight", &[SharedFfn, Width]),
    ],
);

/// Experts, and an expert that all rows go through, each with norms of its own. The norm before the
/// shared expert is [`FEED_NORM`].
pub(super) const PARALLEL_EXPERTS: Group = group(
    |block| matches!(block.feed, FeedForwardSpec::Experts(experts) if experts.norms),
    &[
        rule(T::Router, ROUTER, &[Width, Experts]),
        rule(T::RouterNorm, "ffn_gate_inp.scale", &[Width]),
        rule(T::ExpertScale, "ffn_down_exps.scale", &[Experts]),
        rule(T::ExpertNorm, "pre_ffw_norm_2.weight", &[Width]),
        rule(
            T::ExpertGateUp,
            "ffn_gate_up_exps.weight",
            &[Width, TwoFfn, Experts],
        ),
        rule(
            T::ExpertDown,
            "ffn_down_exps.weight",
            &[Ffn, Width, Experts],
        ),
        rule(T::ExpertPostNorm, "post_ffw_norm_2.weight", &[Width]),
        rule(T::SharedGate, "ffn_gate.weight", &[Width, SharedFfn]),
        rule(T::SharedUp, "ffn_up.weight", &[Width, SharedFfn]),
        rule(T::SharedDown, "ffn_down.weight", &[SharedFfn, Width]),
        rule(T::SharedPostNorm, "post_ffw_norm_1.weight", &[Width]),
    ],
);

/// Use of the per-layer input of a block.
pub(super) const PER_LAYER_INPUT: Group = group(
    |block| block.model.per_layer.is_some(),
    &[
        rule(T::PerLayerGate, "inp_gate.weight", &[Width, PerLayer]),
        rule(T::PerLayerOutput, "proj.weight", &[PerLayer, Width]),
        rule(T::PerLayerNorm, "post_norm.weight", &[Width]),
    ],
);

pub(super) const BLOCK_SCALE: Group = group(
    |block| block.model.block_scale,
    &[rule(T::BlockScale, "layer_output_scale.weight", &[One])],
);

/// Norms of the outputs that a block adds to the residual stream.
pub(super) const POST_NORMS: Group = group(
    |block| block.model.post_norms,
    &[
        rule(T::AttnPostNorm, "post_attention_norm.weight", &[Width]),
        rule(T::FfnPostNorm, "post_ffw_norm.weight", &[Width]),
    ],
);

/// Tensors of a block for multi-token prediction, beside those of a block with attention.
pub(super) const PREDICTION: Group = group(
    |block| block.predicts,
    &[
        rule(
            T::PredictionInput,
            "nextn.eh_proj.weight",
            &[TwoWidth, Width],
        ),
        rule(T::PredictionEmbeddingNorm, "nextn.enorm.weight", &[Width]),
        rule(T::PredictionHiddenNorm, "nextn.hnorm.weight", &[Width]),
        rule(
            T::PredictionOutputNorm,
            "nextn.shared_head_norm.weight",
            &[Width],
        ),
    ],
);

/// See [`PredictionTables`](crate::spec::PredictionTables).
pub(super) const PREDICTION_EMBEDDING: Group = group(
    |block| block.predicts && block.model.prediction_tables.embedding,
    &[rule(
        T::PredictionEmbedding,
        "nextn.embed_tokens.weight",
        &[Width, Vocab],
    )],
);

/// See [`PredictionTables`](crate::spec::PredictionTables).
pub(super) const PREDICTION_OUTPUT: Group = group(
    |block| block.predicts && block.model.prediction_tables.output,
    &[rule(
        T::PredictionOutput,
        "nextn.shared_head_head.weight",
        &[Width, Vocab],
    )],
);
