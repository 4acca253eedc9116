//! Model classes of Hugging Face directories, as data: the metadata for each key of `config.json`,
//! the required values of others, and the names of tensors.
//!
//! A class is one constant, listed in [`ALL`]; its [family](crate::families) defines the rest.
//! Keys, names and transformations of tensors are those of llama.cpp's converter (`conversion/`),
//! defaults those of the classes in Hugging Face's `transformers`.

#[derive(Debug)]
pub(super) struct Class {
    /// First element of `architectures`.
    pub(super) name: &'static str,
    /// Accepted values of `model_type`.
    pub(super) model_types: &'static [&'static str],
    /// Family: `general.architecture`.
    pub(super) architecture: &'static str,
    /// Keys that become metadata.
    pub(super) keys: &'static [&'static [Key]],
    /// Keys that must have certain values.
    pub(super) requirements: &'static [&'static [Requirement]],
    /// Keys without influence on the computation, beside [`IGNORED`].
    pub(super) ignored: &'static [&'static str],
    /// Accepted kinds of RoPE beside the default one.
    pub(super) ropes: &'static [&'static str],
    /// Whether YaRN's ramp begins and ends at fractional pairs (`truncate` is false).
    pub(super) yarn_exact: bool,
    /// Whether LongRoPE is never stretched: the context is that of the original training.
    pub(super) long_rope_plain: bool,
    /// Names of a block's tensors: in the model file, and in the directory behind `layers.N.`. Both
    /// omit `.weight` and `.bias` if these are the same. The first match counts; `{}` is the index
    /// of an expert.
    pub(super) names: &'static [&'static [(&'static str, &'static str)]],
    /// Accepted name prefixes: of embedding, last norm and blocks, and of the output matrix.
    pub(super) prefixes: &'static [(&'static str, &'static str)],
    /// Name prefixes of tensors of other parts, such as a vision tower.
    pub(super) others: &'static [&'static str],
    /// Default of `tie_word_embeddings`.
    pub(super) tied: bool,
    /// Whether there is never an output matrix, even if the file has one.
    pub(super) always_tied: bool,
    /// Whether rows of queries and keys are reordered for interleaved RoPE.
    pub(super) permuted: bool,
    /// Whether the experts of a block are stacked in one tensor, gates and ups together, as
    /// columns.
    pub(super) stacked_experts: bool,
    /// Whether norm weights are stored minus 1.
    pub(super) norms_around_zero: bool,
    /// Whether the vocabulary's size is written.
    pub(super) vocab_size: bool,
    /// Rotary dimensions of a head.
    pub(super) rope_dims: RopeDims,
    /// Base of RoPE's frequencies.
    pub(super) rope_base: RopeBase,
    /// Space prefix of SentencePiece texts.
    pub(super) space_prefix: SpacePrefix,
    /// Whether tokens added to a SentencePiece vocabulary keep their text and kind, including those
    /// of `tokenizer.json`.
    pub(super) plain_added: bool,
    /// Special tokens recognised by text if no other key names them.
    pub(super) special: &'static [(&'static str, &'static str)],
    /// Aliases of pre-tokenisers in this class.
    pub(super) pre: &'static [(&'static str, &'static str)],
}

/// Source of `rope.dimension_count`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RopeDims {
    /// Not written: the whole head.
    Omitted,
    /// The whole head, written.
    Head,
    /// The width times `partial_rotary_factor`, divided by the number of heads.
    OfWidth,
    /// The head width times `partial_rotary_factor`, by default one half.
    Half,
}

/// Source of `rope.freq_base`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum RopeBase {
    /// `rope_theta`, which is required.
    Required,
    /// `rope_theta`, or else this value.
    Or(f64),
    /// `rope_theta`, written only if it is not 10,000, the default in model files.
    Unusual,
    /// Not written: `rope_theta` must be 10,000, the default in model files.
    Usual,
}

/// Source of `tokenizer.ggml.add_space_prefix`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SpacePrefix {
    /// Not written.
    Omitted,
    /// `add_prefix_space` of `tokenizer_config.json`, if it is present.
    FromSettings,
    /// Always false.
    Never,
}

/// Key of `config.json` that becomes metadata of the family.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) from: &'static str,
    /// Alternative name if the first is missing; for [`Kind::Sum`] the second summand.
    pub(super) other: Option<&'static str>,
    /// Metadata key after the architecture's prefix.
    pub(super) to: &'static str,
    /// Type, and default value.
    pub(super) kind: Kind,
}

/// Type of a [`Key`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Required integer.
    Integer,
    /// Integer with a default.
    IntegerOr(u32),
    /// Optional integer.
    OptionalInteger,
    /// Sum of the integers under both names, which are required.
    Sum,
    /// Required float.
    Float,
    /// Float with a default.
    FloatOr(f64),
    /// Optional float.
    OptionalFloat,
}

/// Key of `config.json` that must have one of these values.
#[derive(Debug)]
pub(super) struct Requirement {
    pub(super) key: &'static str,
    pub(super) values: &'static [JsonValue],
    /// Whether the key may also be `null` or missing.
    pub(super) optional: bool,
}

/// Value of `config.json`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum JsonValue {
    Bool(bool),
    Text(&'static str),
    Number(f64),
    /// Empty list.
    Empty,
}

const fn key(from: &'static str, to: &'static str, kind: Kind) -> Key {
    Key {
        from,
        other: None,
        to,
        kind,
    }
}

const fn integer(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::Integer)
}

const fn optional(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::OptionalInteger)
}

const fn integer_or(from: &'static str, to: &'static str, or: u32) -> Key {
    key(from, to, Kind::IntegerOr(or))
}

const fn float(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::Float)
}

const fn float_or(from: &'static str, to: &'static str, or: f64) -> Key {
    key(from, to, Kind::FloatOr(or))
}

const fn optional_float(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::OptionalFloat)
}

/// Required key.
const fn require(key: &'static str, values: &'static [JsonValue]) -> Requirement {
    let optional = false;
    Requirement {
        key,
        values,
        optional,
    }
}

/// Key that must have one of these values if it is present.
const fn optional_value(key: &'static str, values: &'static [JsonValue]) -> Requirement {
    let optional = true;
    Requirement {
        key,
        values,
        optional,
    }
}

/// Key that must be false or missing.
const fn off(key: &'static str) -> Requirement {
    optional_value(key, &[JsonValue::Bool(false)])
}

/// Key that must be true or missing.
const fn on(key: &'static str) -> Requirement {
    optional_value(key, &[JsonValue::Bool(true)])
}

/// Window of classes that use it only if `use_sliding_window` is true.
const UNUSED_WINDOW: &[&str] = &["sliding_window"];

/// Keys of every class.
const SIZES: &[Key] = &[
    integer("num_hidden_layers", "block_count"),
    integer("max_position_embeddings", "context_length"),
    integer("hidden_size", "embedding_length"),
    integer("intermediate_size", "feed_forward_length"),
    integer("num_attention_heads", "attention.head_count"),
    optional("num_key_value_heads", "attention.head_count_kv"),
    float("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
];
const HEADS: &[Key] = &[
    optional("head_dim", "attention.key_length"),
    optional("head_dim", "attention.value_length"),
];
const EXPERTS: &[Key] = &[
    Key {
        other: Some("num_experts"),
        ..integer("num_local_experts", "expert_count")
    },
    integer("num_experts_per_tok", "expert_used_count"),
];
const EXPERT_SIZE: &[Key] = &[integer(
    "moe_intermediate_size",
    "expert_feed_forward_length",
)];
const WINDOW: &[Key] = &[optional("sliding_window", "attention.sliding_window")];

const SILU: &[Requirement] = &[require("hidden_act", &[JsonValue::Text("silu")])];
const NO_BIAS: &[Requirement] = &[off("attention_bias"), off("mlp_bias")];
const GELU: &[Requirement] = &[
    off("attention_bias"),
    optional_value("hidden_activation", &[JsonValue::Text("gelu_pytorch_tanh")]),
    // Older name of the same key; if both are present, the other one counts.
    optional_value(
        "hidden_act",
        &[
            JsonValue::Text("gelu_pytorch_tanh"),
            JsonValue::Text("gelu"),
        ],
    ),
    off("use_bidirectional_attention"),
];
const NO_WINDOW: &[Requirement] = &[off("use_sliding_window")];

const ATTENTION: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
];
const FEED_FORWARD: &[(&str, &str)] = &[
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
const FUSED: &[(&str, &str)] = &[("ffn_up", "mlp.gate_up_proj")];
const MIXTRAL: &[(&str, &str)] = &[
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    ("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
    ("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
];
const MLP_EXPERTS: &[(&str, &str)] = &[
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    ("ffn_up_exps", "mlp.experts.{}.up_proj"),
    ("ffn_down_exps", "mlp.experts.{}.down_proj"),
];
const GEMMA_NORMS: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];
const GLM_NORMS: &[(&str, &str)] = &[
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
];
const GPT_OSS_NAMES: &[(&str, &str)] = &[
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
const LATENT: &[(&str, &str)] = &[
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
];

/// Tensor name prefixes in models with a vision tower.
const VISION_PREFIXES: &[(&str, &str)] = &[
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
];
const VISION_TENSORS: &[&str] = &[
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
];

/// Keys of `config.json` without influence on the computation in any class.
pub(super) const IGNORED: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_from_model_config",
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_window_layers",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    // Way in which training split a multiplication; the sums are the same.
    "pretraining_tp",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    // Noise of training.
    "router_jitter_noise",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Keys accepted for every class if their value disables the feature.
pub(super) const NEUTRAL: &[Requirement] = &[
    on("is_causal"),
    off("rope_interleaved"),
    off("use_mrope"),
    off("is_encoder_decoder"),
    off("add_cross_attention"),
    optional_value("chunk_size_feed_forward", &[JsonValue::Number(0.0)]),
];

impl Class {
    /// Common base of the classes: a Llama without reordered rows.
    const BASE: Self = Self {
        name: "",
        model_types: &[],
        architecture: "llama",
        keys: &[SIZES, HEADS],
        requirements: &[SILU, NO_BIAS, NO_WINDOW],
        ignored: &[],
        ropes: &["linear", "yarn"],
        yarn_exact: false,
        long_rope_plain: false,
        names: &[ATTENTION, FEED_FORWARD],
        prefixes: &[("model.", "")],
        others: &[],
        tied: false,
        always_tied: false,
        permuted: false,
        stacked_experts: false,
        norms_around_zero: false,
        vocab_size: false,
        rope_dims: RopeDims::Omitted,
        rope_base: RopeBase::Required,
        space_prefix: SpacePrefix::Omitted,
        plain_added: false,
        special: &[],
        pre: &[],
    };

    /// Classes that the converter treats as Llama.
    const LLAMA: Self = Self {
        name: "LlamaForCausalLM",
        model_types: &["llama"],
        ropes: &["linear", "yarn", "llama3"],
        permuted: true,
        vocab_size: true,
        rope_dims: RopeDims::Head,
        rope_base: RopeBase::Or(10_000.0),
        space_prefix: SpacePrefix::FromSettings,
        ..Self::BASE
    };
}

const MISTRAL: Class = Class {
    name: "MistralForCausalLM",
    model_types: &["mistral"],
    // Unlike llama.cpp, which ignores the window of this class, and its converter, which omits it.
    keys: &[SIZES, HEADS, WINDOW],
    ..Class::LLAMA
};

const MIXTRAL_CLASS: Class = Class {
    name: "MixtralForCausalLM",
    model_types: &["mixtral"],
    keys: &[SIZES, HEADS, WINDOW, EXPERTS],
    names: &[ATTENTION, MIXTRAL, FEED_FORWARD],
    rope_base: RopeBase::Required,
    ..Class::LLAMA
};

const QWEN2: Class = Class {
    name: "Qwen2ForCausalLM",
    model_types: &["qwen2"],
    architecture: "qwen2",
    requirements: &[SILU, NO_WINDOW, &[on("attention_bias")]],
    ignored: UNUSED_WINDOW,
    ..Class::BASE
};

const QWEN3: Class = Class {
    name: "Qwen3ForCausalLM",
    model_types: &["qwen3"],
    architecture: "qwen3",
    ignored: UNUSED_WINDOW,
    ..Class::BASE
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
            require("norm_topk_prob", &[JsonValue::Bool(true)]),
            optional_value("decoder_sparse_step", &[JsonValue::Number(1.0)]),
            optional_value("mlp_only_layers", &[JsonValue::Empty]),
        ],
    ],
    ignored: UNUSED_WINDOW,
    names: &[ATTENTION, MLP_EXPERTS, FEED_FORWARD],
    ..Class::BASE
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
    ..Class::BASE
};

const SMOLLM3: Class = Class {
    name: "SmolLM3ForCausalLM",
    model_types: &["smollm3"],
    architecture: "smollm3",
    ignored: UNUSED_WINDOW,
    ropes: &["linear", "yarn"],
    tied: true,
    rope_base: RopeBase::Required,
    ..Class::LLAMA
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
            optional_value("full_attn_mod", &[JsonValue::Number(1.0)]),
            optional_value("interpolate_factor", &[JsonValue::Number(1.0)]),
        ],
    ],
    ropes: &["longrope", "su"],
    names: &[ATTENTION, FUSED, FEED_FORWARD],
    rope_dims: RopeDims::OfWidth,
    rope_base: RopeBase::Or(10_000.0),
    plain_added: true,
    ..Class::BASE
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
    ..Class::BASE
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
    ignored: &[
        "boi_token_id",
        "boi_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "vision_config",
    ],
    prefixes: VISION_PREFIXES,
    others: VISION_TENSORS,
    ..GEMMA3
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
    ignored: &["head_dim"],
    ropes: &["linear", "yarn"],
    pre: &[("smollm", "refact")],
    ..Class::LLAMA
};

const GLM4: Class = Class {
    name: "Glm4ForCausalLM",
    model_types: &["glm4"],
    architecture: "glm4",
    // The tensors decide whether there are biases.
    requirements: &[
        SILU,
        NO_WINDOW,
        &[optional_value(
            "attention_bias",
            &[JsonValue::Bool(false), JsonValue::Bool(true)],
        )],
    ],
    names: &[ATTENTION, GLM_NORMS, FUSED, FEED_FORWARD],
    rope_dims: RopeDims::Half,
    special: &[
        ("eos", "<|endoftext|>"),
        ("eot", "<|user|>"),
        ("unk", "<|endoftext|>"),
        ("bos", "<|endoftext|>"),
    ],
    pre: &[("llama-bpe", "glm4"), ("dbrx", "chatglm-bpe")],
    ..Class::BASE
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
            optional_value("swiglu_alpha", &[JsonValue::Number(1.702)]),
            optional_value("swiglu_limit", &[JsonValue::Number(7.0)]),
        ],
    ],
    // Aliases of other keys, and leftovers of training.
    ignored: &["experts_per_token", "initial_context_length"],
    ropes: &["yarn"],
    yarn_exact: true,
    names: &[ATTENTION, GPT_OSS_NAMES],
    stacked_experts: true,
    ..Class::BASE
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
            require("scale_emb", &[JsonValue::Number(12.0)]),
            require("scale_depth", &[JsonValue::Number(1.4)]),
            require("dim_model_base", &[JsonValue::Number(256.0)]),
        ],
    ],
    // Implied by the sizes of its parts.
    ignored: &["head_dim", "qk_head_dim"],
    ropes: &["longrope"],
    long_rope_plain: true,
    names: &[ATTENTION, LATENT, FEED_FORWARD],
    tied: true,
    vocab_size: true,
    rope_base: RopeBase::Usual,
    ..Class::BASE
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
    ..Class::LLAMA
};

/// The vision tower is left out.
const MISTRAL3_VISION: Class = Class {
    name: "Mistral3ForConditionalGeneration",
    model_types: &["mistral3", "mistral", "ministral3"],
    ignored: &[
        "image_token_id",
        "image_token_index",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "vision_config",
        "vision_feature_layer",
    ],
    prefixes: VISION_PREFIXES,
    others: VISION_TENSORS,
    ..MINISTRAL3
};

/// Every supported class.
pub(super) const ALL: &[&Class] = &[
    &Class::LLAMA,
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
    &GRANITE,
    &GLM4,
    &GPT_OSS,
    &MINICPM3,
    &MINISTRAL3,
    &MISTRAL3_VISION,
];
