//! Names of the tensors of a block: in a model file, and in a directory. See
//! [`Class::names`](super::class::Class::names).

use super::class::StackedRows;
use crate::families::{
    EMBEDDING, EMBEDDING_NORM, OUTPUT, OUTPUT_NORM, PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION,
    PER_LAYER_PROJECTION_NORM, PROJECTION_DOWN, PROJECTION_UP,
};

pub(super) type Names = &'static [(&'static str, &'static str)];

/// Tensors outside the blocks. The output matrix may have another prefix than the others; files in
/// folders of their own have none.
pub(super) const OUTER: Names = &[
    (EMBEDDING, "embed_tokens.weight"),
    (OUTPUT_NORM, "norm.weight"),
    (EMBEDDING_NORM, "embedding_norm.weight"),
    (OUTPUT, "lm_head.weight"),
    (PER_LAYER_EMBEDDING, "embed_tokens_per_layer.weight"),
    (PER_LAYER_PROJECTION, "per_layer_model_projection.weight"),
    (
        PER_LAYER_PROJECTION_NORM,
        "per_layer_projection_norm.weight",
    ),
    (PROJECTION_UP, "2_Dense/linear.weight"),
    (PROJECTION_DOWN, "3_Dense/linear.weight"),
];

pub(super) const ATTENTION: Names = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
];
pub(super) const FEED_FORWARD: Names = &[
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
pub(super) const FUSED: Names = &[("ffn_up", "mlp.gate_up_proj")];
pub(super) const MIXTRAL: Names = &[
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    ("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
    ("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
];
pub(super) const MLP_EXPERTS: Names = &[
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    ("ffn_up_exps", "mlp.experts.{}.up_proj"),
    ("ffn_down_exps", "mlp.experts.{}.down_proj"),
];
pub(super) const GEMMA_NORMS: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];
/// Beside [`GEMMA_NORMS`], before them.
pub(super) const GEMMA4_NAMES: Names = &[
    ("layer_output_scale.weight", "layer_scalar"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_gate_inp", "router.proj"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
];
/// Norm before the feed-forward layer, in families that name it for its position.
pub(super) const MIDDLE_NORM: Names = &[("post_attention_norm", "post_attention_layernorm")];
pub(super) const GLM_NORMS: Names = &[
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
];
pub(super) const GPT_OSS_NAMES: Names = &[
    ("attn_sinks.weight", "self_attn.sinks"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_gate_inp", "mlp.router"),
    ("ffn_gate_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_gate_exps.bias", "mlp.experts.gate_up_proj_bias"),
    ("ffn_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_up_exps.bias", "mlp.experts.gate_up_proj_bias"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
    ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
];
pub(super) const DELTA: Names = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
];
/// Rows of the experts of Qwen3.5.
pub(super) const QWEN_STACKS: StackedRows = &[
    ("ffn_gate_exps.weight", "mlp.experts.gate_up_proj", 0, 2),
    ("ffn_up_exps.weight", "mlp.experts.gate_up_proj", 1, 2),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", 0, 1),
];
pub(super) const GRANITE_HYBRID_NAMES: Names = &[
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_dt.bias", "mamba.dt_bias"),
    ("ssm_a", "mamba.A_log"),
    ("ssm_d", "mamba.D"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
    ("ffn_gate_inp", "block_sparse_moe.router.layer"),
];
pub(super) const NEMOTRON_H_NAMES: Names = &[
    ("attn_norm", "norm"),
    ("attn_q", "mixer.q_proj"),
    ("attn_k", "mixer.k_proj"),
    ("attn_v", "mixer.v_proj"),
    ("attn_output", "mixer.o_proj"),
    ("ssm_in", "mixer.in_proj"),
    ("ssm_conv1d", "mixer.conv1d"),
    ("ssm_dt.bias", "mixer.dt_bias"),
    ("ssm_a", "mixer.A_log"),
    ("ssm_d", "mixer.D"),
    ("ssm_norm", "mixer.norm"),
    ("ssm_out", "mixer.out_proj"),
    ("ffn_up", "mixer.up_proj"),
    ("ffn_down", "mixer.down_proj"),
    ("ffn_gate_inp", "mixer.gate"),
    ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ("ffn_up_exps", "mixer.experts.{}.up_proj"),
    ("ffn_down_exps", "mixer.experts.{}.down_proj"),
    ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
];
/// Beside [`DELTA`], before it.
pub(super) const FUSED_DELTA: Names = &[
    ("attn_qkv", "linear_attn.in_proj_qkvz"),
    ("attn_gate", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
];
pub(super) const SHARED_EXPERT: Names = &[
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];
/// Several experts that all rows go through, side by side as one, without a score.
pub(super) const SHARED_EXPERTS: Names = &[
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];
pub(super) const CORRECTION: Names = &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")];
pub(super) const LATENT: Names = &[
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.kv_b_proj"),
    ("attn_v_b", "self_attn.kv_b_proj"),
];
/// Before [`ATTENTION`].
pub(super) const LFM2_NAMES: Names = &[
    ("attn_norm", "operator_norm"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("attn_output", "self_attn.out_proj"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ffn_norm", "ffn_norm"),
    ("ffn_gate", "feed_forward.w1"),
    ("ffn_up", "feed_forward.w3"),
    ("ffn_down", "feed_forward.w2"),
    ("ffn_gate_inp", "feed_forward.gate"),
    ("exp_probs_b.bias", "feed_forward.expert_bias"),
    ("ffn_gate_exps", "feed_forward.experts.{}.w1"),
    ("ffn_up_exps", "feed_forward.experts.{}.w3"),
    ("ffn_down_exps", "feed_forward.experts.{}.w2"),
];

/// Tensor name prefixes in models with a vision tower.
pub(super) const VISION_PREFIXES: Names = &[
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
];
pub(super) const QWEN_VISION_TENSORS: &[&str] = &["visual.", "model.visual.", "mtp.", "model.mtp."];
pub(super) const GEMMA4_TOWERS: &[&str] = &[
    "model.vision_tower.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
];
pub(super) const VISION_TENSORS: &[&str] = &[
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
];
