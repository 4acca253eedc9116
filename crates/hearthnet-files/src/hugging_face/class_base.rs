//! Keys, requirements and defaults that several classes of `config.json` share.

use super::class::{Class, Key, Mixers, RopeBase, RopeDims, SpacePrefix, float, integer, optional};
use super::names::{ATTENTION, FEED_FORWARD, OUTER};
use crate::schema::Scalar::Text;
use crate::schema::{Requirement, off, optional_value, require};

/// Window of classes that use it only if `use_sliding_window` is true.
pub(super) const UNUSED_WINDOW: &str = "sliding_window";

/// Keys of every class.
pub(super) const SIZES: &[Key] = &[
    integer("num_hidden_layers", "block_count"),
    integer("max_position_embeddings", "context_length"),
    integer("hidden_size", "embedding_length"),
    integer("intermediate_size", "feed_forward_length"),
    integer("num_attention_heads", "attention.head_count"),
    optional("num_key_value_heads", "attention.head_count_kv"),
    float("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
];
pub(super) const HEADS: &[Key] = &[
    optional("head_dim", "attention.key_length"),
    optional("head_dim", "attention.value_length"),
];
pub(super) const EXPERTS: &[Key] = &[
    Key {
        other: Some("num_experts"),
        ..integer("num_local_experts", "expert_count")
    },
    integer("num_experts_per_tok", "expert_used_count"),
];
pub(super) const EXPERT_SIZE: &[Key] = &[integer(
    "moe_intermediate_size",
    "expert_feed_forward_length",
)];
pub(super) const WINDOW: &[Key] = &[optional("sliding_window", "attention.sliding_window")];

pub(super) const SILU: &[Requirement] = &[require("hidden_act", &[Text("silu")])];
pub(super) const NO_BIAS: &[Requirement] = &[off("attention_bias"), off("mlp_bias")];
pub(super) const GELU: &[Requirement] = &[
    off("attention_bias"),
    optional_value("hidden_activation", &[Text("gelu_pytorch_tanh")]),
    // Older name of the same key; if both are present, the other one counts.
    optional_value("hidden_act", &[Text("gelu_pytorch_tanh"), Text("gelu")]),
    off("use_bidirectional_attention"),
];
pub(super) const NO_WINDOW: &[Requirement] = &[off("use_sliding_window")];

/// Common base of the classes: a Llama without reordered rows.
pub(super) const BASE: Class = Class {
    name: "",
    with: "",
    model_types: &[],
    architecture: "llama",
    image_axes: None,
    keys: &[SIZES, HEADS],
    requirements: &[SILU, NO_BIAS, NO_WINDOW],
    ignored: "",
    ropes: &["linear", "yarn"],
    yarn_exact: false,
    yarn_scales_scores: false,
    long_rope_plain: false,
    names: &[ATTENTION, FEED_FORWARD],
    outer: OUTER,
    blocks: "layers",
    prefixes: &[("model.", "")],
    others: &[],
    prediction: "",
    correction: false,
    tied: false,
    always_tied: false,
    permuted: false,
    stacked_experts: false,
    stacked_rows: &[],
    mixers: Mixers::Family,
    whole_experts: false,
    token_types: false,
    projection: false,
    window_heads: false,
    norms_around_zero: false,
    plain_last_norm: false,
    computed_qk_norm: false,
    window_pattern: false,
    vocab_size: false,
    rope_dims: RopeDims::Omitted,
    rope_base: RopeBase::Required,
    space_prefix: SpacePrefix::Omitted,
    plain_added: false,
    special: &[],
    pre: &[],
};

/// Pre-tokenisers of GLM.
pub(super) const GLM_PRE: &[(&str, &str)] = &[("llama-bpe", "glm4"), ("dbrx", "chatglm-bpe")];
