//! Classes of LFM2, most of whose blocks have a short convolution instead of attention, and their
//! configuration.

use serde_json::{Map, Value as Json};

use super::class::{Class, Key, Kind, Mixers, RopeBase, float_or, integer, integer_or, key};
use super::class_base::{BASE, EXPERT_SIZE, EXPERTS, HEADS};
use super::error::ImportError;
use super::json::{bad, present, typed};
use super::names::{ATTENTION, LFM2_NAMES};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::schema::Scalar::{Number, Text};
use crate::schema::{Lookup as _, Requirement, off, on, optional_value};
use crate::spec::MAX_SIZE;

type Values = Map<String, Json>;

const SIZES: &[Key] = &[
    integer("num_hidden_layers", "block_count"),
    integer("max_position_embeddings", "context_length"),
    integer("hidden_size", "embedding_length"),
    integer("num_attention_heads", "attention.head_count"),
    float_or("norm_eps", "attention.layer_norm_rms_epsilon", 1e-5),
    integer_or("conv_L_cache", "shortconv.l_cache", 3),
];
const PLAIN: &[Requirement] = &[
    optional_value("hidden_act", &[Text("silu")]),
    off("attention_bias"),
    off("conv_bias"),
];

pub(super) const LFM2: Class = Class {
    name: "Lfm2ForCausalLM",
    model_types: &["lfm2"],
    architecture: "lfm2",
    keys: &[SIZES, HEADS],
    requirements: &[PLAIN],
    // Repetitions of other keys, and settings of training.
    ignored: "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu \
        block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta \
        use_pos_enc",
    ropes: &[],
    names: &[LFM2_NAMES, ATTENTION],
    tied: true,
    mixers: Mixers::Convolution,
    vocab_size: true,
    rope_base: RopeBase::Or(1_000_000.0),
    pre: &[("llama-bpe", "lfm2")],
    ..BASE
};

pub(super) const LFM2_MOE: Class = Class {
    name: "Lfm2MoeForCausalLM",
    model_types: &["lfm2_moe"],
    architecture: "lfm2moe",
    keys: &[
        SIZES,
        HEADS,
        EXPERTS,
        EXPERT_SIZE,
        &[
            integer("intermediate_size", FFN),
            integer_or("num_dense_layers", "leading_dense_block_count", 2),
            key("num_experts", "expert_gating_func", Kind::Always(2)),
        ],
    ],
    requirements: &[
        PLAIN,
        &[
            on("norm_topk_prob"),
            on("use_expert_bias"),
            optional_value("routed_scaling_factor", &[Number(1.0)]),
        ],
    ],
    ..LFM2
};

/// Kind of the blocks with a convolution.
pub(super) const CONVOLUTION: &str = "conv";
/// Keys that are read here, and `tie_embedding`.
pub(super) const READ: &str = "
    block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of full_attn_idxs
    intermediate_size num_key_value_heads tie_embedding
";

const FFN: &str = "feed_forward_length";

/// Writes the metadata of key heads, which blocks with a convolution do not have, and of
/// feed-forward layers.
pub(super) fn write(
    values: &Values,
    class: &Class,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let full = |key: &str| format!("{}.{key}", class.architecture);
    let kv_heads = values.required_integer("num_key_value_heads")?;
    let kv_heads = i32::try_from(kv_heads).unwrap_or(i32::MAX);
    let heads = attends(values)?.into_iter();
    let heads = heads.map(|attends| if attends { kv_heads } else { 0 });
    writer.set_i32s(&full("attention.head_count_kv"), &heads.collect::<Vec<_>>())?;
    let mut stated = class.keys.iter().copied().flatten();
    if !stated.any(|key| key.to == FFN) {
        writer.set(&full(FFN), Value::U32(ffn(values)?))?;
    }
    Ok(())
}

/// One flag per block: true if it has attention.
fn attends(values: &Values) -> Result<Vec<bool>, ImportError> {
    let layers = values.required_integer("num_hidden_layers")?;
    if layers > MAX_SIZE {
        let shown = Json::from(layers);
        return Err(bad("num_hidden_layers", &shown, "is too large"));
    }
    let list = |key: &str| typed(values, key, "must be a list", Json::as_array);
    let key = "layer_types";
    if let Some(kinds) = list(key)? {
        let attends = kinds.iter().map(|kind| match kind.as_str() {
            Some("full_attention") => Some(true),
            Some(CONVOLUTION) => Some(false),
            _ => None,
        });
        let attends = attends.collect::<Option<Vec<bool>>>();
        let attends = attends.filter(|attends| attends.len() == layers as usize);
        let reason = "must have \"conv\" or \"full_attention\" for each layer";
        let shown = present(values, key).cloned().unwrap_or_default();
        return attends.ok_or_else(|| bad(key, &shown, reason));
    }
    let key = "full_attn_idxs";
    let numbers = list(key)?.ok_or_else(|| values.missing("layer_types"))?;
    let mut attends = vec![false; layers as usize];
    for number in numbers {
        let index = number.as_u64().and_then(|n| usize::try_from(n).ok());
        match index.and_then(|index| attends.get_mut(index)) {
            Some(attends) => *attends = true,
            None => return Err(bad(key, number, "must be the number of a layer")),
        }
    }
    Ok(attends)
}

/// Width of the feed-forward layers, which the configuration may state before an adjustment.
fn ffn(values: &Values) -> Result<u32, ImportError> {
    let older = values.integer("block_ff_dim")?;
    let stated = match older {
        Some(ffn) => ffn,
        None => values.required_integer("intermediate_size")?,
    };
    let key = "block_auto_adjust_ff_dim";
    if typed(values, key, "must be true or false", Json::as_bool)? == Some(false) {
        return Ok(stated);
    }
    let ffn = u64::from(stated) * 2 / 3;
    let key = "block_ffn_dim_multiplier";
    // `null` also leaves out the rounding to a multiple.
    let ffn = match values.get(key) {
        Some(Json::Null) => ffn,
        _ => {
            let ffn = (values.number(key)?.unwrap_or(1.0) * ffn as f64) as u64;
            let multiple = values.integer("block_multiple_of")?.unwrap_or(256);
            ffn.checked_next_multiple_of(multiple.into()).unwrap_or(0)
        }
    };
    Ok(u32::try_from(ffn).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn widths_of_published_models_are_adjusted_as_by_transformers() {
        let ffn = |value: Json| ffn(value.as_object().unwrap()).unwrap();
        // LFM2 350M, 1.2B and 2.6B.
        assert_eq!(ffn(json!({"block_ff_dim": 6656})), 4608);
        assert_eq!(ffn(json!({"intermediate_size": 12288})), 8192);
        let exact = json!({"intermediate_size": 10752, "block_auto_adjust_ff_dim": false});
        assert_eq!(ffn(exact), 10752);
        let unrounded = json!({"intermediate_size": 100, "block_ffn_dim_multiplier": null});
        assert_eq!(ffn(unrounded), 66);
        let more = json!({"intermediate_size": 150, "block_ffn_dim_multiplier": 1.31,
            "block_multiple_of": 16});
        assert_eq!(ffn(more), 144);
        // Refused later.
        let nothing = json!({"intermediate_size": 150, "block_multiple_of": 0});
        assert_eq!(ffn(nothing), 0);
    }
}
