//! Classes of models whose blocks have Mamba-2 or attention, or only a feed-forward layer, and their
//! configuration.

use serde_json::{Map, Value as Json};

use super::class::{
    Class, Key, Kind, Mixers, RopeBase, RopeDims, StackedRows, float, integer, integer_or, key,
    optional, optional_float,
};
use super::class_base::{BASE, NO_BIAS, SILU};
use super::error::ImportError;
use super::json::{bad, present, typed};
use super::names::{ATTENTION, FEED_FORWARD, GRANITE_HYBRID_NAMES, NEMOTRON_H_NAMES};
use super::planned::Change;
use crate::families::{EMBEDDING, OUTPUT, OUTPUT_NORM};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::schema::Lookup as _;
use crate::schema::Scalar::Text;
use crate::schema::{Requirement, off, on, optional_value};
use crate::spec::{MAX_SIZE, ModelSpec};

type Values = Map<String, Json>;

/// Context that the converter writes: models without RoPE have no limit.
const CONTEXT: Key = key(
    "max_position_embeddings",
    "context_length",
    Kind::Always(1 << 20),
);

const EXPERT_INPUTS: &str = "block_sparse_moe.input_linear.weight";
const EXPERT_OUTPUTS: &str = "block_sparse_moe.output_linear.weight";
const SHARED_INPUTS: &str = "shared_mlp.input_linear.weight";
const SHARED_OUTPUTS: &str = "shared_mlp.output_linear.weight";

const GRANITE_STACKS: StackedRows = &[
    ("ffn_gate_exps.weight", EXPERT_INPUTS, 0, 2),
    ("ffn_up_exps.weight", EXPERT_INPUTS, 1, 2),
    ("ffn_down_exps.weight", EXPERT_OUTPUTS, 0, 1),
    ("ffn_gate_shexp.weight", SHARED_INPUTS, 0, 2),
    ("ffn_up_shexp.weight", SHARED_INPUTS, 1, 2),
    ("ffn_down_shexp.weight", SHARED_OUTPUTS, 0, 1),
    ("ffn_gate.weight", SHARED_INPUTS, 0, 2),
    ("ffn_up.weight", SHARED_INPUTS, 1, 2),
    ("ffn_down.weight", SHARED_OUTPUTS, 0, 1),
];

/// Granite 4 H.
pub(super) const GRANITE_HYBRID: Class = Class {
    name: "GraniteMoeHybridForCausalLM",
    model_types: &["granitemoehybrid"],
    architecture: "granitehybrid",
    keys: &[&[
        integer("num_hidden_layers", "block_count"),
        CONTEXT,
        integer("hidden_size", "embedding_length"),
        integer("intermediate_size", "feed_forward_length"),
        integer("num_attention_heads", "attention.head_count"),
        float("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        optional_float("attention_multiplier", "attention.scale"),
        optional_float("embedding_multiplier", "embedding_scale"),
        optional_float("residual_multiplier", "residual_scale"),
        optional_float("logits_scaling", "logit_scale"),
        integer("num_local_experts", "expert_count"),
        integer("num_experts_per_tok", "expert_used_count"),
        optional(
            "shared_intermediate_size",
            "expert_shared_feed_forward_length",
        ),
        integer_or("mamba_d_conv", "ssm.conv_kernel", 4),
        integer_or("mamba_d_state", "ssm.state_size", 256),
        integer_or("mamba_n_groups", "ssm.group_count", 1),
        integer_or("mamba_n_heads", "ssm.time_step_rank", 128),
        Key {
            other: Some("hidden_size"),
            ..key("mamba_expand", "ssm.inner_size", Kind::Product)
        },
    ]],
    requirements: &[
        SILU,
        NO_BIAS,
        &[
            off("mamba_proj_bias"),
            on("mamba_conv_bias"),
            optional_value("position_embedding_type", &[Text("nope")]),
            optional_value("normalization_function", &[Text("rmsnorm")]),
        ],
    ],
    // The engine has its own chunks; the rest are settings of training.
    ignored: "init_method mamba_chunk_size",
    ropes: &[],
    names: &[GRANITE_HYBRID_NAMES, ATTENTION, FEED_FORWARD],
    stacked_rows: GRANITE_STACKS,
    mixers: Mixers::Listed,
    permuted: true,
    vocab_size: true,
    rope_dims: RopeDims::OfWidth,
    rope_base: RopeBase::Optional,
    ..BASE
};

const NEMOTRON_SIZES: &[Key] = &[
    CONTEXT,
    integer("hidden_size", "embedding_length"),
    integer("num_attention_heads", "attention.head_count"),
    Key {
        other: Some("attention_head_dim"),
        ..integer("head_dim", "attention.key_length")
    },
    Key {
        other: Some("attention_head_dim"),
        ..integer("head_dim", "attention.value_length")
    },
    float("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    Key {
        other: Some("norm_eps"),
        ..optional_float("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    },
    integer_or("conv_kernel", "ssm.conv_kernel", 4),
    integer_or("ssm_state_size", "ssm.state_size", 128),
    integer_or("n_groups", "ssm.group_count", 8),
    integer("mamba_num_heads", "ssm.time_step_rank"),
    Key {
        other: Some("mamba_head_dim"),
        ..key("mamba_num_heads", "ssm.inner_size", Kind::Product)
    },
];
const NEMOTRON_PLAIN: &[Requirement] = &[
    off("mamba_proj_bias"),
    off("use_bias"),
    on("use_conv_bias"),
    optional_value("mamba_hidden_act", &[Text("silu")]),
    optional_value("mlp_hidden_act", &[Text("relu2")]),
    optional_value("sliding_window", &[]),
    optional_value("moe_latent_size", &[]),
];

/// Nemotron-H and Nemotron Nano 2.
pub(super) const NEMOTRON_H: Class = Class {
    name: "NemotronHForCausalLM",
    model_types: &["nemotron_h"],
    architecture: "nemotron_h",
    keys: &[NEMOTRON_SIZES],
    requirements: &[NO_BIAS, NEMOTRON_PLAIN],
    // Settings of training and of other programs; the engine computes the recurrence in f32. Blocks
    // of multi-token prediction are left out.
    ignored: "chunk_size expand hidden_dropout mamba_ssm_cache_dtype moe_shared_expert_overlap \
        mtp_hybrid_override_pattern mtp_layers_block_type num_nextn_predict_layers \
        rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min \
        use_mamba_kernels",
    ropes: &[],
    names: &[NEMOTRON_H_NAMES],
    outer: &[
        (EMBEDDING, "embeddings.weight"),
        (OUTPUT_NORM, "norm_f.weight"),
        (OUTPUT, "lm_head.weight"),
    ],
    prefixes: &[("backbone.", ""), ("model.", "")],
    others: &["mtp."],
    mixers: Mixers::Single { feed: "mlp" },
    ..GRANITE_HYBRID
};

/// Nemotron 3 Nano.
pub(super) const NEMOTRON_H_MOE: Class = Class {
    with: "num_experts_per_tok",
    architecture: "nemotron_h_moe",
    keys: &[
        NEMOTRON_SIZES,
        &[
            integer("n_routed_experts", "expert_count"),
            integer("num_experts_per_tok", "expert_used_count"),
            integer("moe_intermediate_size", "expert_feed_forward_length"),
            integer(
                "moe_shared_expert_intermediate_size",
                "expert_shared_feed_forward_length",
            ),
            integer("n_shared_experts", "expert_shared_count"),
            key("norm_topk_prob", "expert_weights_norm", Kind::Flag),
            float("routed_scaling_factor", "expert_weights_scale"),
            integer_or("n_group", "expert_group_count", 1),
            integer_or("topk_group", "expert_group_used_count", 1),
        ],
    ],
    correction: true,
    mixers: Mixers::Single { feed: "moe" },
    ..NEMOTRON_H
};

/// Keys that are read here.
pub(super) const READ: &str = "
    hybrid_override_pattern intermediate_size layers_block_type mamba_d_head num_hidden_layers
    num_key_value_heads time_step_limit
";

/// Part of a block, as `config.json` names it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Mamba,
    Attention,
    Feed,
}

/// Writes the key heads of each block, which tell those with attention from the others, and the
/// widths of the feed-forward layers.
pub(super) fn write(
    values: &Values,
    class: &Class,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let full = |key: &str| format!("{}.{key}", class.architecture);
    let parts = parts(values, class)?;
    let of = |part: Part, number: u32| -> Vec<i32> {
        let number = i32::try_from(number).unwrap_or(i32::MAX);
        let numbers = parts
            .iter()
            .map(|own| if *own == part { number } else { 0 });
        numbers.collect()
    };
    let kv_heads = match values.integer("num_key_value_heads")? {
        Some(kv_heads) => kv_heads,
        None => values.required_integer("num_attention_heads")?,
    };
    let heads = of(Part::Attention, kv_heads);
    writer.set_i32s(&full("attention.head_count_kv"), &heads)?;
    if let Mixers::Single { feed } = class.mixers {
        let key = match feed {
            "moe" => "moe_intermediate_size",
            _ => "intermediate_size",
        };
        let widths = of(Part::Feed, values.required_integer(key)?);
        writer.set_i32s(&full("feed_forward_length"), &widths)?;
        let blocks = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        writer.set(&full("block_count"), Value::U32(blocks))?;
    }
    // llama.cpp's switch for RoPE.
    Ok(writer.set(&full("rope.scaling.finetuned"), Value::Bool(false))?)
}

/// The part of each block, besides the feed-forward layer that each block of some classes has.
fn parts(values: &Values, class: &Class) -> Result<Vec<Part>, ImportError> {
    let feed = match class.mixers {
        Mixers::Single { feed } => feed,
        _ => "",
    };
    let part = |name: &str| match name {
        "mamba" | "linear_attention" | "M" => Some(Part::Mamba),
        "attention" | "full_attention" | "*" => Some(Part::Attention),
        "-" if feed == "mlp" => Some(Part::Feed),
        "E" if feed == "moe" => Some(Part::Feed),
        name if name == feed => Some(Part::Feed),
        _ => None,
    };
    let keys = [
        "hybrid_override_pattern",
        "layers_block_type",
        "layer_types",
    ];
    let mut stated = keys
        .iter()
        .filter_map(|key| Some((*key, present(values, key)?)));
    let Some((key, value)) = stated.next() else {
        return Err(values.missing("layer_types"));
    };
    let parts: Option<Vec<Part>> = match value {
        Json::String(pattern) => {
            let mut letter = [0; 4];
            let letters = pattern.chars();
            letters.map(|c| part(c.encode_utf8(&mut letter))).collect()
        }
        Json::Array(list) => list.iter().map(|name| part(name.as_str()?)).collect(),
        _ => None,
    };
    let layers = values.integer("num_hidden_layers")?;
    let reason = "must name one kind of part for each layer that this model class has";
    let parts = parts.filter(|parts| {
        let each = layers.is_none_or(|layers| parts.len() == layers as usize);
        each && parts.len() <= MAX_SIZE as usize
    });
    parts.ok_or_else(|| bad(key, value, reason))
}

/// Compares keys that have no metadata with what the others say.
pub(super) fn check(values: &Values, spec: &ModelSpec) -> Result<(), ImportError> {
    let key = "mamba_d_head";
    let width = spec.mamba.map_or(0, |mamba| mamba.head_width);
    let same = |value: &Json| *value == "auto" || *value == width;
    if let Some(value) = present(values, key).filter(|value| !same(value)) {
        let reason = format!("the other values need {width}");
        return Err(bad(key, value, reason));
    }
    let key = "time_step_limit";
    let limits = typed(values, key, "must be a list", Json::as_array)?;
    let unlimited = |limits: &Vec<Json>| {
        let least = limits.first().and_then(Json::as_f64);
        let most = limits.get(1);
        // As `transformers` writes what JSON cannot.
        let most = most.is_some_and(|most| most["__float__"] == "Infinity");
        least == Some(0.0) && most && limits.len() == 2
    };
    match limits.filter(|limits| !unlimited(limits)) {
        None => Ok(()),
        Some(limits) => {
            let shown = Json::from(limits.clone());
            Err(bad(key, &shown, "limits of steps are not supported"))
        }
    }
}

/// Shape in the directory of a tensor of Mamba-2 with these lengths in the model file, row length
/// first, and its change. `None` for another tensor.
pub(super) fn stored(rule: &str, lengths: &[u64]) -> Option<(Vec<u64>, Change)> {
    let all = || vec![lengths.iter().product()];
    Some(match (rule, lengths) {
        ("ssm_a", _) => (all(), Change::MinusExp),
        ("ssm_d" | "ssm_norm.weight", _) => (all(), Change::Nothing),
        _ => return None,
    })
}
