//! The classes of models that directories name, as data: what of `config.json` becomes which
//! metadata, what it must say where only one value is computed, and how the tensors are called.
//!
//! A class is one constant, listed in [`ALL`]; the [family](crate::families) that it belongs to
//! says the rest. Keys, names and what is done to the tensors are those of llama.cpp's converter
//! (`conversion/`), defaults those of the classes in Hugging Face's `transformers`.

/// A class of models.
#[derive(Debug)]
pub(super) struct Class {
    /// The first of `architectures`.
    pub(super) name: &'static str,
    /// What `model_type` may be.
    pub(super) model_types: &'static [&'static str],
    /// The family: `general.architecture`.
    pub(super) architecture: &'static str,
    /// What becomes metadata.
    pub(super) keys: &'static [&'static [Key]],
    /// What must have a certain value.
    pub(super) only: &'static [&'static [Only]],
    /// What it may say without a say in what is computed, beside [`SILENT`].
    pub(super) silent: &'static [&'static str],
    /// Kinds of RoPE beside the default one.
    pub(super) ropes: &'static [&'static str],
    /// Whether the ramp of YaRN begins and ends between pairs (`truncate` is false).
    pub(super) yarn_exact: bool,
    /// Whether LongRoPE is never stretched: the context is that of the first training.
    pub(super) long_rope_plain: bool,
    /// Names of a block's tensors: here, and in the directory behind `layers.N.`, both without
    /// `.weight` and `.bias` where those are the same. The first that fits counts; `{}` is the number
    /// of an expert.
    pub(super) names: &'static [&'static [(&'static str, &'static str)]],
    /// What may stand before the names of all tensors: of embedding, last norm and blocks, and of the
    /// output matrix.
    pub(super) prefixes: &'static [(&'static str, &'static str)],
    /// Beginnings of names of tensors that belong to other parts, such as a vision tower.
    pub(super) others: &'static [&'static str],
    /// `tie_word_embeddings` where it is not said.
    pub(super) tied: bool,
    /// Whether there is never an output matrix, even if the file has one.
    pub(super) always_tied: bool,
    /// Whether rows of queries and keys are brought into the order of interleaved RoPE.
    pub(super) permuted: bool,
    /// Whether the experts of a block lie in one tensor, gates and ups together, as columns.
    pub(super) stacked_experts: bool,
    /// Whether norms are stored with 1 subtracted.
    pub(super) norms_around_zero: bool,
    /// Whether the vocabulary's size is written.
    pub(super) vocab_size: bool,
    /// What of a head is turned.
    pub(super) rope_dims: RopeDims,
    /// What is written of RoPE's base.
    pub(super) rope_base: RopeBase,
    /// Whether SentencePiece texts begin with a space.
    pub(super) space_prefix: SpacePrefix,
    /// Whether tokens that were added to a SentencePiece vocabulary are what they say, also those
    /// of `tokenizer.json`.
    pub(super) plain_added: bool,
    /// Special tokens that are known by their texts where nothing names them.
    pub(super) special: &'static [(&'static str, &'static str)],
    /// Names of pre-tokenisers that this class has for those that work the same.
    pub(super) pre: &'static [(&'static str, &'static str)],
}

/// How `rope.dimension_count` is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RopeDims {
    /// It is not written: all of a head.
    Silent,
    /// All of a head, written.
    Head,
    /// The width times `partial_rotary_factor`, over the heads.
    OfWidth,
    /// The head times `partial_rotary_factor`, which is a half where it is not said.
    Half,
}

/// How `rope.freq_base` is written.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum RopeBase {
    /// As it is; it must be said.
    Said,
    /// As it is, else this.
    Or(f64),
    /// Only where it is not 10,000, which is what files without it have.
    Unusual,
    /// Nothing, so it must be that.
    Usual,
}

/// Whether `tokenizer.ggml.add_space_prefix` is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SpacePrefix {
    /// Not at all.
    Silent,
    /// As `add_prefix_space` of `tokenizer_config.json` says, where it does.
    Said,
    /// As false.
    Never,
}

/// A key of `config.json` that becomes metadata of the family.
#[derive(Debug)]
pub(super) struct Key {
    /// Its name.
    pub(super) from: &'static str,
    /// Another name, which counts where the first is not there; of [`Kind::Sum`] what is added.
    pub(super) other: Option<&'static str>,
    /// Metadata key after the architecture's prefix.
    pub(super) to: &'static str,
    /// What it is, and what is written without it.
    pub(super) kind: Kind,
}

/// The type of a [`Key`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// An integer that must be said.
    Integer,
    /// An integer, else this.
    IntegerOr(u32),
    /// An integer, if it is said.
    OptionalInteger,
    /// The sum of both names' integers, which must be said.
    Sum,
    /// A float that must be said.
    Float,
    /// A float, else this.
    FloatOr(f64),
    /// A float, if it is said.
    OptionalFloat,
}

/// A key of `config.json` that must have one of these values.
#[derive(Debug)]
pub(super) struct Only {
    pub(super) key: &'static str,
    pub(super) values: &'static [Said],
    /// Whether it may also be `null`, or not be there.
    pub(super) optional: bool,
}

/// A value of `config.json`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Said {
    Bool(bool),
    Text(&'static str),
    Number(f64),
    /// A list without elements.
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

/// What must be said.
const fn only(key: &'static str, values: &'static [Said]) -> Only {
    let optional = false;
    Only {
        key,
        values,
        optional,
    }
}

/// What must have one of these values where it is said.
const fn if_said(key: &'static str, values: &'static [Said]) -> Only {
    let optional = true;
    Only {
        key,
        values,
        optional,
    }
}

/// What must not be switched on.
const fn off(key: &'static str) -> Only {
    if_said(key, &[Said::Bool(false)])
}

/// What must be switched on, or go without saying.
const fn on(key: &'static str) -> Only {
    if_said(key, &[Said::Bool(true)])
}

/// The window of classes that have one only where `use_sliding_window` says so.
const UNUSED_WINDOW: &[&str] = &["sliding_window"];

/// Of every class.
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

const SILU: &[Only] = &[only("hidden_act", &[Said::Text("silu")])];
const NO_BIAS: &[Only] = &[off("attention_bias"), off("mlp_bias")];
const GELU: &[Only] = &[
    off("attention_bias"),
    if_said("hidden_activation", &[Said::Text("gelu_pytorch_tanh")]),
    // An early name of the same; where both are there the other one counts.
    if_said(
        "hidden_act",
        &[Said::Text("gelu_pytorch_tanh"), Said::Text("gelu")],
    ),
    off("use_bidirectional_attention"),
];
const NO_WINDOW: &[Only] = &[off("use_sliding_window")];

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

/// How models with a vision tower call the tensors of their text.
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

/// Names that are neutral for every class: what stands in `config.json` without a say in what is
/// computed.
pub(super) const SILENT: &[&str] = &[
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
    // How a multiplication was cut up in training; the sums are the same.
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

/// What every class may say as long as it says nothing.
pub(super) const NEUTRAL: &[Only] = &[
    on("is_causal"),
    off("rope_interleaved"),
    off("use_mrope"),
    off("is_encoder_decoder"),
    off("add_cross_attention"),
    if_said("chunk_size_feed_forward", &[Said::Number(0.0)]),
];

impl Class {
    /// What classes differ from: a Llama that is not permuted.
    const BASE: Self = Self {
        name: "",
        model_types: &[],
        architecture: "llama",
        keys: &[SIZES, HEADS],
        only: &[SILU, NO_BIAS, NO_WINDOW],
        silent: &[],
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
        rope_dims: RopeDims::Silent,
        rope_base: RopeBase::Said,
        space_prefix: SpacePrefix::Silent,
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
        space_prefix: SpacePrefix::Said,
        ..Self::BASE
    };
}

const MISTRAL: Class = Class {
    name: "MistralForCausalLM",
    model_types: &["mistral"],
    // The converter leaves the window out, as llama.cpp does without it.
    keys: &[SIZES, HEADS, WINDOW],
    ..Class::LLAMA
};

const MIXTRAL_CLASS: Class = Class {
    name: "MixtralForCausalLM",
    model_types: &["mixtral"],
    keys: &[SIZES, HEADS, WINDOW, EXPERTS],
    names: &[ATTENTION, MIXTRAL, FEED_FORWARD],
    rope_base: RopeBase::Said,
    ..Class::LLAMA
};

const QWEN2: Class = Class {
    name: "Qwen2ForCausalLM",
    model_types: &["qwen2"],
    architecture: "qwen2",
    only: &[SILU, NO_WINDOW, &[on("attention_bias")]],
    silent: UNUSED_WINDOW,
    ..Class::BASE
};

const QWEN3: Class = Class {
    name: "Qwen3ForCausalLM",
    model_types: &["qwen3"],
    architecture: "qwen3",
    silent: UNUSED_WINDOW,
    ..Class::BASE
};

const QWEN3_MOE: Class = Class {
    name: "Qwen3MoeForCausalLM",
    model_types: &["qwen3_moe"],
    architecture: "qwen3moe",
    keys: &[SIZES, HEADS, EXPERTS, EXPERT_SIZE],
    only: &[
        SILU,
        NO_BIAS,
        NO_WINDOW,
        &[
            only("norm_topk_prob", &[Said::Bool(true)]),
            if_said("decoder_sparse_step", &[Said::Number(1.0)]),
            if_said("mlp_only_layers", &[Said::Empty]),
        ],
    ],
    silent: UNUSED_WINDOW,
    names: &[ATTENTION, MLP_EXPERTS, FEED_FORWARD],
    ..Class::BASE
};

const OLMOE: Class = Class {
    name: "OlmoeForCausalLM",
    model_types: &["olmoe"],
    architecture: "olmoe",
    keys: &[SIZES, EXPERTS],
    only: &[
        SILU,
        NO_BIAS,
        &[off("norm_topk_prob"), if_said("clip_qkv", &[])],
    ],
    names: &[ATTENTION, MLP_EXPERTS, FEED_FORWARD],
    pre: &[("gpt-2", "olmo")],
    ..Class::BASE
};

const SMOLLM3: Class = Class {
    name: "SmolLM3ForCausalLM",
    model_types: &["smollm3"],
    architecture: "smollm3",
    silent: UNUSED_WINDOW,
    ropes: &["linear", "yarn"],
    tied: true,
    rope_base: RopeBase::Said,
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
    only: &[
        SILU,
        NO_BIAS,
        &[
            off("lm_head_bias"),
            if_said("full_attn_mod", &[Said::Number(1.0)]),
            if_said("interpolate_factor", &[Said::Number(1.0)]),
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
    only: &[GELU],
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
    only: &[GELU, &[if_said("attn_logit_softcapping", &[])]],
    ropes: &["linear"],
    rope_base: RopeBase::Or(1_000_000.0),
    ..GEMMA2
};

/// With a vision tower, which is left out.
const GEMMA3_VISION: Class = Class {
    name: "Gemma3ForConditionalGeneration",
    model_types: &["gemma3", "gemma3_text"],
    silent: &[
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
    // Heads are as wide as the residual stream divided by their number, whatever it says.
    silent: &["head_dim"],
    ropes: &["linear", "yarn"],
    pre: &[("smollm", "refact")],
    ..Class::LLAMA
};

const GLM4: Class = Class {
    name: "Glm4ForCausalLM",
    model_types: &["glm4"],
    architecture: "glm4",
    // Whether there are biases, the tensors say.
    only: &[
        SILU,
        NO_WINDOW,
        &[if_said(
            "attention_bias",
            &[Said::Bool(false), Said::Bool(true)],
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
    only: &[
        SILU,
        &[
            on("attention_bias"),
            if_said("swiglu_alpha", &[Said::Number(1.702)]),
            if_said("swiglu_limit", &[Said::Number(7.0)]),
        ],
    ],
    // Other names of what is said, too, and left from training.
    silent: &["experts_per_token", "initial_context_length"],
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
    only: &[
        SILU,
        NO_BIAS,
        // Files do not say them, and all have those of the published one.
        &[
            only("scale_emb", &[Said::Number(12.0)]),
            only("scale_depth", &[Said::Number(1.4)]),
            only("dim_model_base", &[Said::Number(256.0)]),
        ],
    ],
    // Said by the sizes of its parts.
    silent: &["head_dim", "qk_head_dim"],
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
    only: &[SILU, NO_BIAS, NO_WINDOW, &[if_said("sliding_window", &[])]],
    ropes: &["yarn"],
    ..Class::LLAMA
};

/// With a vision tower, which is left out.
const MISTRAL3_VISION: Class = Class {
    name: "Mistral3ForConditionalGeneration",
    model_types: &["mistral3", "mistral", "ministral3"],
    silent: &[
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

/// Every class that is read.
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
