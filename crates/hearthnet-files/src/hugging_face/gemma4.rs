//! Configuration of Gemma 4, whose blocks with a window have heads of their own.

use serde_json::{Map, Value as Json};

use super::error::ImportError;
use super::json::{bad, present, typed};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::schema::Lookup as _;
use crate::spec::{MAX_SIZE, ModelSpec};

type Values = Map<String, Json>;

/// Keys that are read here.
pub(super) const READ: &str = "
    attention_k_eq_v enable_moe_block global_head_dim head_dim hidden_size_per_layer_input
    intermediate_size moe_intermediate_size num_experts num_global_key_value_heads
    num_key_value_heads num_kv_shared_layers per_layer_config top_k_experts use_double_wide_mlp
    vocab_size_per_layer_input
";

/// Defaults of `transformers`.
const HEAD_DIM: u32 = 256;
const GLOBAL_HEAD_DIM: u32 = 512;
const GLOBAL_EVERY: u32 = 6;

/// Width of a head in blocks without a window.
pub(super) fn global_head_dim(values: &Values) -> Result<u32, ImportError> {
    Ok(of_global_blocks(values, "global_head_dim", "head_dim")?.unwrap_or(GLOBAL_HEAD_DIM))
}

/// Writes the metadata of heads, feed-forward layers, experts and per-layer embeddings.
pub(super) fn write(
    values: &Values,
    architecture: &str,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let layers = values.required_integer("num_hidden_layers")?;
    if layers > MAX_SIZE {
        let shown = Json::from(layers);
        return Err(bad("num_hidden_layers", &shown, "is too large"));
    }
    let full = |key: &str| format!("{}.{key}", architecture);
    let global = windows(values, layers)?;
    let signed = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);

    let key = full("attention.head_count_kv");
    let kv_heads = values.integer("num_key_value_heads")?.unwrap_or(4);
    let of_global = "num_global_key_value_heads";
    match of_global_blocks(values, of_global, "num_key_value_heads")? {
        Some(of_global) => {
            let heads = global.iter().map(|global| match global {
                true => signed(of_global),
                false => signed(kv_heads),
            });
            writer.set_i32s(&key, &heads.collect::<Vec<_>>())?;
        }
        None => writer.set(&key, Value::U32(kv_heads))?,
    }

    let key = full("feed_forward_length");
    let ffn = values.required_integer("intermediate_size")?;
    let shared = values.integer("num_kv_shared_layers")?.unwrap_or(0);
    let flag = |key: &str| typed(values, key, "must be true or false", Json::as_bool);
    match flag("use_double_wide_mlp")? {
        Some(true) => {
            let own = layers.saturating_sub(shared);
            let widths = (0..layers).map(|layer| match layer < own {
                true => signed(ffn),
                false => signed(ffn.saturating_mul(2)),
            });
            writer.set_i32s(&key, &widths.collect::<Vec<_>>())?;
        }
        _ => writer.set(&key, Value::U32(ffn))?,
    }
    writer.set(&full("attention.shared_kv_layers"), Value::U32(shared))?;

    let head_dim = values.integer("head_dim")?.unwrap_or(HEAD_DIM);
    let wide = global_head_dim(values)?;
    for (key, dim) in [
        ("attention.key_length", wide),
        ("attention.value_length", wide),
        ("attention.key_length_swa", head_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count_swa", head_dim),
    ] {
        writer.set(&full(key), Value::U32(dim))?;
    }
    let windows = global.iter().map(|global| !global);
    writer.set_bools(&full("attention.sliding_window_pattern"), windows)?;

    let per_layer = values.integer("hidden_size_per_layer_input")?.unwrap_or(0);
    let key = full("embedding_length_per_layer_input");
    writer.set(&key, Value::U32(per_layer))?;

    if flag("enable_moe_block")? == Some(true) {
        for (from, to) in [
            ("num_experts", "expert_count"),
            ("top_k_experts", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
        ] {
            let number = values.required_integer(from)?;
            writer.set(&full(to), Value::U32(number))?;
        }
    }
    Ok(())
}

/// Compares keys that have no metadata with what the tensors say.
pub(super) fn check(values: &Values, spec: &ModelSpec) -> Result<(), ImportError> {
    for (key, expected) in [
        (
            "attention_k_eq_v",
            Json::from(spec.attention.keys_as_values),
        ),
        ("vocab_size_per_layer_input", Json::from(spec.vocab)),
    ] {
        let used = key == "attention_k_eq_v" || spec.per_layer.is_some();
        if let Some(value) = present(values, key).filter(|value| used && **value != expected) {
            let reason = format!("the other values and the tensors need {expected}");
            return Err(bad(key, value, reason));
        }
    }
    Ok(())
}

/// Whether each block is global, that is, has no window.
fn windows(values: &Values, layers: u32) -> Result<Vec<bool>, ImportError> {
    let key = "layer_types";
    let Some(value) = present(values, key) else {
        let every = 1..=layers;
        return Ok(every
            .map(|block| block.is_multiple_of(GLOBAL_EVERY))
            .collect());
    };
    let kinds = value
        .as_array()
        .filter(|list| list.len() == layers as usize);
    let kinds = kinds.and_then(|list| {
        let kinds = list.iter().map(|kind| match kind.as_str() {
            Some("full_attention") => Some(true),
            Some("sliding_attention") => Some(false),
            _ => None,
        });
        kinds.collect()
    });
    let reason = "must have \"sliding_attention\" or \"full_attention\" for each layer";
    kinds.ok_or_else(|| bad(key, value, reason))
}

/// Number for all global blocks: of `key`, or of `inner` for these blocks in `per_layer_config`.
fn of_global_blocks(values: &Values, key: &str, inner: &str) -> Result<Option<u32>, ImportError> {
    let outer = "per_layer_config";
    let blocks = typed(values, outer, "must be an object", Json::as_object)?;
    let mut found = values.integer(key)?;
    for block in blocks.into_iter().flat_map(|blocks| blocks.values()) {
        let Json::Object(block) = block else {
            return Err(bad(outer, block, "must have an object for each block"));
        };
        let known = ["head_dim", "num_key_value_heads"];
        super::json::refuse_others(block, &known, "this key of per_layer_config is unknown")?;
        let number = block.integer(inner)?;
        if found.is_some() && number.is_some() && found != number {
            let reason = "must be equal in all global blocks";
            return Err(bad(inner, &Json::Object(block.clone()), reason));
        }
        found = found.or(number);
    }
    Ok(found)
}
