//! Classes of models whose experts are chosen in groups, behind dense blocks.

use super::class::{
    Class, Key, Kind, RopeBase, RopeDims, float_or, integer, key, optional, optional_float,
};
use super::class_base::{BASE, EXPERT_SIZE, GLM_PRE, HEADS, NO_BIAS, NO_WINDOW, SILU, SIZES};
use super::names::*;
use crate::schema::Scalar::{Bool, Number, Text};
use crate::schema::{off, on, optional_value};

/// Experts in groups, behind dense blocks.
const ROUTED_EXPERTS: &[Key] = &[
    integer("n_routed_experts", "expert_count"),
    integer("num_experts_per_tok", "expert_used_count"),
    optional("n_group", "expert_group_count"),
    optional("topk_group", "expert_group_used_count"),
    optional("first_k_dense_replace", "leading_dense_block_count"),
    integer("n_shared_experts", "expert_shared_count"),
    optional_float("routed_scaling_factor", "expert_weights_scale"),
];
const GLM_SPECIAL: &[(&str, &str)] = &[
    ("bos", "[gMASK]"),
    ("eot", "<|user|>"),
    ("unk", "<|endoftext|>"),
    ("eom", "<|observation|>"),
];

pub(super) const GLM4_MOE: Class = Class {
    name: "Glm4MoeForCausalLM",
    model_types: &["glm4_moe"],
    architecture: "glm4moe",
    keys: &[
        SIZES,
        HEADS,
        ROUTED_EXPERTS,
        EXPERT_SIZE,
        &[
            key("n_routed_experts", "expert_gating_func", Kind::Always(2)),
            key("norm_topk_prob", "expert_weights_norm", Kind::Flag),
        ],
    ],
    // The tensors decide whether there are biases and norms of queries and keys.
    requirements: &[
        SILU,
        NO_WINDOW,
        &[
            optional_value("attention_bias", &[Bool(false), Bool(true)]),
            optional_value("use_qk_norm", &[Bool(false), Bool(true)]),
        ],
    ],
    names: &[
        MIDDLE_NORM,
        ATTENTION,
        SHARED_EXPERTS,
        CORRECTION,
        MLP_EXPERTS,
        FEED_FORWARD,
    ],
    prediction: "num_nextn_predict_layers",
    correction: true,
    rope_dims: RopeDims::Half,
    special: GLM_SPECIAL,
    pre: GLM_PRE,
    ..BASE
};

pub(super) const DEEPSEEK2: Class = Class {
    name: "DeepseekV2ForCausalLM",
    model_types: &["deepseek_v2"],
    architecture: "deepseek2",
    keys: &[
        &[
            integer("num_hidden_layers", "block_count"),
            integer("max_position_embeddings", "context_length"),
            integer("hidden_size", "embedding_length"),
            integer("intermediate_size", "feed_forward_length"),
            integer("num_attention_heads", "attention.head_count"),
            // The cache has one key for all heads.
            key(
                "num_key_value_heads",
                "attention.head_count_kv",
                Kind::Always(1),
            ),
            float_or("rms_norm_eps", "attention.layer_norm_rms_epsilon", 1e-6),
            optional("q_lora_rank", "attention.q_lora_rank"),
            integer("kv_lora_rank", "attention.kv_lora_rank"),
            integer("kv_lora_rank", "attention.value_length"),
            integer("qk_rope_head_dim", "rope.dimension_count"),
            Key {
                other: Some("qk_rope_head_dim"),
                ..key("kv_lora_rank", "attention.key_length", Kind::Sum)
            },
            Key {
                other: Some("qk_rope_head_dim"),
                ..key("qk_nope_head_dim", "attention.key_length_mla", Kind::Sum)
            },
            integer("v_head_dim", "attention.value_length_mla"),
            key("norm_topk_prob", "expert_weights_norm", Kind::FlagIfTrue),
            key("scoring_func", "expert_gating_func", Kind::Gating),
        ],
        ROUTED_EXPERTS,
        EXPERT_SIZE,
    ],
    requirements: &[
        SILU,
        NO_BIAS,
        &[
            // Another choice of groups, or none in spite of `n_group`.
            optional_value(
                "topk_method",
                &[Text("group_limited_greedy"), Text("greedy")],
            ),
            // `transformers` ignores it in this class.
            off("norm_topk_prob"),
            optional_value("scoring_func", &[Text("softmax")]),
            optional_value("moe_layer_freq", &[Number(1.0)]),
        ],
    ],
    // Implied by the sizes of its parts, and settings of training.
    ignored: "aux_loss_alpha ep_size head_dim qk_head_dim seq_aux",
    ropes: &["yarn"],
    yarn_scales_scores: true,
    names: &[LATENT, ATTENTION, SHARED_EXPERTS, MLP_EXPERTS, FEED_FORWARD],
    vocab_size: true,
    rope_base: RopeBase::Or(10_000.0),
    ..BASE
};

pub(super) const DEEPSEEK3: Class = Class {
    name: "DeepseekV3ForCausalLM",
    model_types: &["deepseek_v3"],
    requirements: &[
        SILU,
        NO_BIAS,
        &[
            on("rope_interleave"),
            optional_value("topk_method", &[Text("noaux_tc")]),
            optional_value("scoring_func", &[Text("sigmoid")]),
            optional_value("moe_layer_freq", &[Number(1.0)]),
        ],
    ],
    names: &[
        LATENT,
        ATTENTION,
        SHARED_EXPERTS,
        CORRECTION,
        MLP_EXPERTS,
        FEED_FORWARD,
    ],
    prediction: "num_nextn_predict_layers",
    correction: true,
    ..DEEPSEEK2
};

/// GLM-4.7-Flash.
pub(super) const GLM4_MOE_LITE: Class = Class {
    name: "Glm4MoeLiteForCausalLM",
    model_types: &["glm4_moe_lite"],
    special: GLM_SPECIAL,
    pre: GLM_PRE,
    ..DEEPSEEK3
};
