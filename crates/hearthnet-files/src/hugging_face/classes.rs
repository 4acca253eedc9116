//! Model classes of Hugging Face directories, as data: the metadata for each key of `config.json`,
//! the required values of others, and the names of tensors.
//!
//! A class is one constant, listed in [`ALL`]; its [family](crate::families) defines the rest.
//! Keys, names and transformations of tensors are those of llama.cpp's converter (`conversion/`),
//! defaults those of the classes in Hugging Face's `transformers`.

use super::class::{
    Class, Key, Kind, RopeBase, RopeDims, SpacePrefix, float, float_or, integer, integer_or, key,
    optional, optional_float,
};
use super::class_base::*;
use super::encoder_classes::{BERT, NOMIC_BERT};
use super::lfm2::{LFM2, LFM2_MOE};
use super::mamba::{GRANITE_HYBRID, NEMOTRON_H, NEMOTRON_H_MOE};
use super::muse_glimmer::MUSE_GLIMMER;
use super::names::*;
use super::routed_classes::{DEEPSEEK2, DEEPSEEK3, GLM4_MOE, GLM4_MOE_LITE};
use crate::schema::Scalar::{Bool, EmptyList, Number, Text};
use crate::schema::{off, on, optional_value, require};

/// Classes that the converter treats as Llama.
const LLAMA: Class = Class {
    name: "LlamaForCausalLM",
    model_types: &["llama"],
    ropes: &["linear", "yarn", "llama3"],
    permuted: true,
    vocab_size: true,
    rope_dims: RopeDims::Head,
    rope_base: RopeBase::Or(10_000.0),
    space_prefix: SpacePrefix::FromSettings,
    ..BASE
};

const MISTRAL: Class = Class {
    name: "MistralForCausalLM",
    model_types: &["mistral"],
    // Unlike llama.cpp, which ignores the window of this class, and its converter, which omits it.
    keys: &[SIZES, HEADS, WINDOW],
    ..LLAMA
};

const MIXTRAL_CLASS: Class = Class {
    name: "MixtralForCausalLM",
    model_types: &["mixtral"],
    keys: &[SIZES, HEADS, WINDOW, EXPERTS],
    names: &[ATTENTION, MIXTRAL, FEED_FORWARD],
    rope_base: RopeBase::Required,
    ..LLAMA
};

const QWEN2: Class = Class {
    name: "Qwen2ForCausalLM",
    model_types: &["qwen2"],
    architecture: "qwen2",
    requirements: &[SILU, NO_WINDOW, &[on("attention_bias")]],
    ignored: UNUSED_WINDOW,
    ..BASE
};

const QWEN3: Class = Class {
    name: "Qwen3ForCausalLM",
    model_types: &["qwen3"],
    architecture: "qwen3",
    ignored: UNUSED_WINDOW,
    ..BASE
};

const QWEN3_MOE: Class = Class {
    name: "Qwen3MoeForCausalLM",
    model_types: &["qwen3_moe"],
    architecture: "qwen3moe",
    keys: &[SIZES, HEADS, EXPERTS, EXPERT_SIZE],
    requirements: &[
        SILU,
        NO_BIAS,
        NO_WINDOW,
        &[
            require("norm_topk_prob", &[Bool(true)]),
            optional_value("decoder_sparse_step", &[Number(1.0)]),
            optional_value("mlp_only_layers", &[EmptyList]),
        ],
    ],
    ignored: UNUSED_WINDOW,
    names: &[ATTENTION, MLP_EXPERTS, FEED_FORWARD],
    ..BASE
};

const OLMOE: Class = Class {
    name: "OlmoeForCausalLM",
    model_types: &["olmoe"],
    architecture: "olmoe",
    keys: &[SIZES, EXPERTS],
    requirements: &[
        SILU,
        NO_BIAS,
        &[off("norm_topk_prob"), optional_value("clip_qkv", &[])],
    ],
    names: &[ATTENTION, MLP_EXPERTS, FEED_FORWARD],
    pre: &[("gpt-2", "olmo")],
    ..BASE
};

const SMOLLM3: Class = Class {
    name: "SmolLM3ForCausalLM",
    model_types: &["smollm3"],
    architecture: "smollm3",
    ignored: UNUSED_WINDOW,
    ropes: &["linear", "yarn"],
    tied: true,
    rope_base: RopeBase::Required,
    ..LLAMA
};

const PHI3: Class = Class {
    name: "Phi3ForCausalLM",
    model_types: &["phi3"],
    architecture: "phi3",
    keys: &[
        SIZES,
        &[
            integer_or("sliding_window", "attention.sliding_window", 0),
            integer_or(
                "original_max_position_embeddings",
                "rope.scaling.original_context_length",
                4096,
            ),
        ],
    ],
    requirements: &[
        SILU,
        NO_BIAS,
        &[
            off("lm_head_bias"),
            optional_value("full_attn_mod", &[Number(1.0)]),
            optional_value("interpolate_factor", &[Number(1.0)]),
        ],
    ],
    ropes: &["longrope", "su"],
    names: &[ATTENTION, FUSED, FEED_FORWARD],
    rope_dims: RopeDims::OfWidth,
    rope_base: RopeBase::Or(10_000.0),
    plain_added: true,
    ..BASE
};

const GEMMA2: Class = Class {
    name: "Gemma2ForCausalLM",
    model_types: &["gemma2"],
    architecture: "gemma2",
    keys: &[
        SIZES,
        &[
            integer_or("head_dim", "attention.key_length", 256),
            integer_or("head_dim", "attention.value_length", 256),
            float_or("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            float_or("final_logit_softcapping", "final_logit_softcapping", 30.0),
            integer_or("sliding_window", "attention.sliding_window", 4096),
        ],
    ],
    requirements: &[GELU],
    ropes: &[],
    names: &[ATTENTION, GEMMA_NORMS, FEED_FORWARD],
    tied: true,
    always_tied: true,
    norms_around_zero: true,
    rope_base: RopeBase::Unusual,
    space_prefix: SpacePrefix::Never,
    ..BASE
};

const GEMMA3: Class = Class {
    name: "Gemma3ForCausalLM",
    model_types: &["gemma3_text"],
    architecture: "gemma3",
    keys: &[&[
        integer_or("num_hidden_layers", "block_count", 26),
        integer_or("max_position_embeddings", "context_length", 131_072),
        integer_or("hidden_size", "embedding_length", 2304),
        integer_or("intermediate_size", "feed_forward_length", 9216),
        integer_or("num_attention_heads", "attention.head_count", 8),
        integer_or("num_key_value_heads", "attention.head_count_kv", 4),
        integer_or("head_dim", "attention.key_length", 256),
        integer_or("head_dim", "attention.value_length", 256),
        integer_or("sliding_window", "attention.sliding_window", 4096),
        float_or("rms_norm_eps", "attention.layer_norm_rms_epsilon", 1e-6),
        optional_float("final_logit_softcapping", "final_logit_softcapping"),
    ]],
    requirements: &[GELU, &[optional_value("attn_logit_softcapping", &[])]],
    ropes: &["linear"],
    rope_base: RopeBase::Or(1_000_000.0),
    ..GEMMA2
};

/// The vision tower is left out.
const GEMMA3_VISION: Class = Class {
    name: "Gemma3ForConditionalGeneration",
    model_types: &["gemma3", "gemma3_text"],
    ignored: "boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id \
        image_token_index mm_tokens_per_image vision_config",
    prefixes: VISION_PREFIXES,
    others: VISION_TENSORS,
    ..GEMMA3
};

/// EmbeddingGemma. Its window is that of both sides together.
const GEMMA_EMBEDDING: Class = Class {
    name: "Gemma3TextModel",
    architecture: "gemma-embedding",
    requirements: &[&[
        optional_value("hidden_activation", &[Text("gelu_pytorch_tanh")]),
        optional_value("hidden_act", &[Text("gelu_pytorch_tanh"), Text("gelu")]),
        off("attention_bias"),
        optional_value("attn_logit_softcapping", &[]),
        require("use_bidirectional_attention", &[Bool(true)]),
    ]],
    prefixes: &[("", ""), ("model.", "")],
    projection: true,
    ..GEMMA3
};

const GEMMA4: Class = Class {
    name: "Gemma4ForCausalLM",
    model_types: &["gemma4_text"],
    architecture: "gemma4",
    keys: &[&[
        integer("num_hidden_layers", "block_count"),
        integer("max_position_embeddings", "context_length"),
        integer("hidden_size", "embedding_length"),
        integer("num_attention_heads", "attention.head_count"),
        integer("sliding_window", "attention.sliding_window"),
        float_or("rms_norm_eps", "attention.layer_norm_rms_epsilon", 1e-6),
        optional_float("final_logit_softcapping", "final_logit_softcapping"),
    ]],
    requirements: &[&[
        off("attention_bias"),
        optional_value("hidden_activation", &[Text("gelu_pytorch_tanh")]),
        // Of images only.
        optional_value("use_bidirectional_attention", &[Text("vision")]),
    ]],
    ropes: &["proportional"],
    names: &[GEMMA4_NAMES, ATTENTION, GEMMA_NORMS, FEED_FORWARD],
    whole_experts: true,
    window_heads: true,
    norms_around_zero: false,
    rope_dims: RopeDims::Proportional,
    rope_base: RopeBase::Required,
    ..GEMMA3
};

/// The towers of images and sounds are left out.
const GEMMA4_TOWERS_CLASS: Class = Class {
    name: "Gemma4ForConditionalGeneration",
    model_types: &["gemma4", "gemma4_text"],
    ignored: "audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index \
        eoi_token_id image_token_id video_token_id vision_config vision_soft_tokens_per_image",
    prefixes: VISION_PREFIXES,
    others: GEMMA4_TOWERS,
    ..GEMMA4
};

/// Gemma 4 12B.
const GEMMA4_UNIFIED: Class = Class {
    name: "Gemma4UnifiedForConditionalGeneration",
    model_types: &["gemma4_unified", "gemma4_unified_text"],
    ..GEMMA4_TOWERS_CLASS
};

const GRANITE: Class = Class {
    name: "GraniteForCausalLM",
    model_types: &["granite"],
    architecture: "granite",
    keys: &[
        SIZES,
        &[
            optional_float("attention_multiplier", "attention.scale"),
            optional_float("embedding_multiplier", "embedding_scale"),
            optional_float("residual_multiplier", "residual_scale"),
            optional_float("logits_scaling", "logit_scale"),
        ],
    ],
    // Heads always have the width of the residual stream divided by their number.
    ignored: "head_dim",
    ropes: &["linear", "yarn"],
    pre: &[("smollm", "refact")],
    ..LLAMA
};

const GLM4: Class = Class {
    name: "Glm4ForCausalLM",
    model_types: &["glm4"],
    architecture: "glm4",
    // The tensors decide whether there are biases.
    requirements: &[
        SILU,
        NO_WINDOW,
        &[optional_value("attention_bias", &[Bool(false), Bool(true)])],
    ],
    names: &[ATTENTION, GLM_NORMS, FUSED, FEED_FORWARD],
    rope_dims: RopeDims::Half,
    special: &[
        ("eos", "<|endoftext|>"),
        ("eot", "<|user|>"),
        ("unk", "<|endoftext|>"),
        ("bos", "<|endoftext|>"),
    ],
    pre: GLM_PRE,
    ..BASE
};

const GPT_OSS: Class = Class {
    name: "GptOssForCausalLM",
    model_types: &["gpt_oss"],
    architecture: "gpt-oss",
    keys: &[
        SIZES,
        HEADS,
        WINDOW,
        EXPERTS,
        &[integer("intermediate_size", "expert_feed_forward_length")],
    ],
    requirements: &[
        SILU,
        &[
            on("attention_bias"),
            optional_value("swiglu_alpha", &[Number(1.702)]),
            optional_value("swiglu_limit", &[Number(7.0)]),
        ],
    ],
    // Aliases of other keys, and leftovers of training.
    ignored: "experts_per_token initial_context_length",
    ropes: &["yarn"],
    yarn_exact: true,
    names: &[ATTENTION, GPT_OSS_NAMES],
    stacked_experts: true,
    ..BASE
};

const MINICPM3: Class = Class {
    name: "MiniCPM3ForCausalLM",
    model_types: &["minicpm3"],
    architecture: "minicpm3",
    keys: &[
        SIZES,
        &[
            integer("q_lora_rank", "attention.q_lora_rank"),
            integer("kv_lora_rank", "attention.kv_lora_rank"),
            integer("qk_rope_head_dim", "rope.dimension_count"),
            Key {
                other: Some("qk_rope_head_dim"),
                ..key("qk_nope_head_dim", "attention.key_length", Kind::Sum)
            },
        ],
    ],
    requirements: &[
        SILU,
        NO_BIAS,
        // Files omit these keys, and all models have the values of the published one.
        &[
            require("scale_emb", &[Number(12.0)]),
            require("scale_depth", &[Number(1.4)]),
            require("dim_model_base", &[Number(256.0)]),
        ],
    ],
    // Implied by the sizes of its parts.
    ignored: "head_dim qk_head_dim",
    ropes: &["longrope"],
    long_rope_plain: true,
    names: &[ATTENTION, LATENT, FEED_FORWARD],
    tied: true,
    vocab_size: true,
    rope_base: RopeBase::Usual,
    ..BASE
};

const MINISTRAL3: Class = Class {
    name: "Ministral3ForCausalLM",
    model_types: &["ministral3"],
    architecture: "mistral3",
    requirements: &[
        SILU,
        NO_BIAS,
        NO_WINDOW,
        &[optional_value("sliding_window", &[])],
    ],
    ropes: &["yarn"],
    ..LLAMA
};

/// The vision tower is left out.
const MISTRAL3_VISION: Class = Class {
    name: "Mistral3ForConditionalGeneration",
    model_types: &["mistral3", "mistral", "ministral3"],
    ignored: "image_token_id image_token_index multimodal_projector_bias projector_hidden_act \
        spatial_merge_size vision_config vision_feature_layer",
    prefixes: VISION_PREFIXES,
    others: VISION_TENSORS,
    ..MINISTRAL3
};

const DELTA_KEYS: &[Key] = &[
    integer("linear_conv_kernel_dim", "ssm.conv_kernel"),
    integer("linear_key_head_dim", "ssm.state_size"),
    integer("linear_num_key_heads", "ssm.group_count"),
    integer("linear_num_value_heads", "ssm.time_step_rank"),
    Key {
        other: Some("linear_num_value_heads"),
        ..key("linear_value_head_dim", "ssm.inner_size", Kind::Product)
    },
    integer_or("full_attention_interval", "full_attention_interval", 4),
];
const SHARED_EXPERT_SIZE: &[Key] = &[integer(
    "shared_expert_intermediate_size",
    "expert_shared_feed_forward_length",
)];
/// [`SIZES`] of classes whose feed-forward layers are all experts.
const EXPERTS_ONLY_SIZES: &[Key] = &[
    integer("num_hidden_layers", "block_count"),
    integer("max_position_embeddings", "context_length"),
    integer("hidden_size", "embedding_length"),
    optional("intermediate_size", "feed_forward_length"),
    integer("num_attention_heads", "attention.head_count"),
    optional("num_key_value_heads", "attention.head_count_kv"),
    float("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
];
/// Blocks of multi-token prediction are left out, as by the converter's `--no-mtp`.
const PREDICTION: &[&str] = &["mtp.", "model.mtp."];

const QWEN3_5: Class = Class {
    name: "Qwen3_5ForCausalLM",
    model_types: &["qwen3_5_text"],
    architecture: "qwen35",
    image_axes: Some([11, 11, 10, 0]),
    keys: &[SIZES, HEADS, DELTA_KEYS],
    requirements: &[SILU, NO_BIAS, NO_WINDOW, &[on("attn_output_gate")]],
    // The engine computes the recurrence in f32, whatever is asked for.
    ignored: "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    names: &[DELTA, ATTENTION, FEED_FORWARD],
    others: PREDICTION,
    norms_around_zero: true,
    rope_dims: RopeDims::Quarter,
    ..BASE
};

/// The vision tower is left out.
const QWEN3_5_VISION: Class = Class {
    name: "Qwen3_5ForConditionalGeneration",
    model_types: &["qwen3_5", "qwen3_5_text"],
    ignored: "image_token_id mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings \
        video_token_id vision_config vision_end_token_id vision_start_token_id",
    prefixes: VISION_PREFIXES,
    others: QWEN_VISION_TENSORS,
    ..QWEN3_5
};

const QWEN3_5_MOE: Class = Class {
    name: "Qwen3_5MoeForCausalLM",
    model_types: &["qwen3_5_moe_text"],
    architecture: "qwen35moe",
    keys: &[
        EXPERTS_ONLY_SIZES,
        HEADS,
        EXPERTS,
        EXPERT_SIZE,
        SHARED_EXPERT_SIZE,
        DELTA_KEYS,
    ],
    names: &[DELTA, ATTENTION, SHARED_EXPERT, MLP_EXPERTS, FEED_FORWARD],
    stacked_rows: QWEN_STACKS,
    ..QWEN3_5
};

/// The vision tower is left out.
const QWEN3_5_MOE_VISION: Class = Class {
    name: "Qwen3_5MoeForConditionalGeneration",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    ignored: QWEN3_5_VISION.ignored,
    prefixes: VISION_PREFIXES,
    others: QWEN_VISION_TENSORS,
    ..QWEN3_5_MOE
};

const QWEN3_NEXT: Class = Class {
    name: "Qwen3NextForCausalLM",
    model_types: &["qwen3_next"],
    architecture: "qwen3next",
    image_axes: None,
    requirements: QWEN3_MOE.requirements,
    names: &[
        FUSED_DELTA,
        DELTA,
        ATTENTION,
        SHARED_EXPERT,
        MLP_EXPERTS,
        FEED_FORWARD,
    ],
    stacked_rows: &[],
    ..QWEN3_5_MOE
};

const SEED_OSS: Class = Class {
    name: "SeedOssForCausalLM",
    model_types: &["seed_oss"],
    architecture: "seed_oss",
    // The tensors decide whether there are biases.
    requirements: &[
        SILU,
        NO_WINDOW,
        &[
            optional_value("attention_bias", &[Bool(false), Bool(true)]),
            off("attention_out_bias"),
            off("mlp_bias"),
        ],
    ],
    ignored: "residual_dropout",
    names: &[MIDDLE_NORM, ATTENTION, FEED_FORWARD],
    ..BASE
};

/// Every supported class.
pub(super) const ALL: &[&Class] = &[
    &LLAMA,
    &MISTRAL,
    &MIXTRAL_CLASS,
    &QWEN2,
    &QWEN3,
    &QWEN3_MOE,
    &OLMOE,
    &SMOLLM3,
    &PHI3,
    &GEMMA2,
    &GEMMA3,
    &GEMMA3_VISION,
    &GEMMA4,
    &GEMMA4_TOWERS_CLASS,
    &GEMMA4_UNIFIED,
    &GRANITE,
    &GLM4,
    &GPT_OSS,
    &MINICPM3,
    &MINISTRAL3,
    &MISTRAL3_VISION,
    &QWEN3_5,
    &QWEN3_5_VISION,
    &QWEN3_5_MOE,
    &QWEN3_5_MOE_VISION,
    &QWEN3_NEXT,
    &SEED_OSS,
    &GLM4_MOE,
    &DEEPSEEK2,
    &DEEPSEEK3,
    &GLM4_MOE_LITE,
    &GEMMA_EMBEDDING,
    &BERT,
    &NOMIC_BERT,
    &MUSE_GLIMMER,
    &LFM2,
    &LFM2_MOE,
    &GRANITE_HYBRID,
    &NEMOTRON_H_MOE,
    &NEMOTRON_H,
];
