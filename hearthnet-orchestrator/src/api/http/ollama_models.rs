//! Models in the form of Ollama's API. Pure.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::translate::date::rfc3339;
use crate::service::ServedModel;

/// Version of Ollama's API that this server follows. Clients compare it with what they need.
pub(super) const VERSION: &str = "0.12.0";

/// Model in `/api/tags`, under one of its names.
pub(super) fn tag(name: &str, model: &ServedModel) -> Value {
    json!({
        "name": name, "model": name, "modified_at": modified(model),
        "size": model.file.gguf().file_bytes(), "digest": model.weights.to_string(),
        "details": details(model),
    })
}

/// Model in `/api/ps`. A served model is always loaded, and holds no memory of a graphics card here.
pub(super) fn running(model: &ServedModel) -> Value {
    let mut running = tag(&model.id, model);
    running["size_vram"] = json!(0);
    running["context_length"] = json!(model.text.context);
    // It does not expire.
    running["expires_at"] = json!("9999-12-31T23:59:59.000Z");
    running
}

/// Answer of `/api/show`.
pub(super) fn show(model: &ServedModel) -> Value {
    let spec = model.file.spec();
    let architecture = &spec.architecture;
    let mut info = json!({
        "general.architecture": architecture, "general.parameter_count": parameters(model),
    });
    for (name, value) in [
        ("context_length", model.text.context),
        ("embedding_length", spec.width),
        ("block_count", spec.layers),
        ("attention.head_count", spec.heads),
        ("attention.head_count_kv", spec.kv_heads),
        ("vocab_size", spec.vocab),
    ] {
        info[format!("{architecture}.{name}")] = json!(value);
    }
    let template = model.text.template.as_ref();
    let thinks = template.is_some_and(|template| template.turn_format().thinks());
    let mut capabilities = match model.file.spec().encoder {
        Some(_) => vec!["embedding"],
        None => vec!["completion", "tools"],
    };
    capabilities.extend(thinks.then_some("thinking"));
    json!({
        "modelfile": "", "parameters": "", "template": "", "license": "",
        "details": details(model), "model_info": info, "capabilities": capabilities,
        "modified_at": modified(model),
    })
}

fn details(model: &ServedModel) -> Value {
    let family = &model.file.spec().architecture;
    let count = parameters(model) as f64;
    let size = match count >= 1e9 {
        true => format!("{:.1}B", count / 1e9),
        false => format!("{:.0}M", count / 1e6),
    };
    json!({
        "parent_model": "", "format": "gguf", "family": family, "families": [family],
        "parameter_size": size, "quantization_level": main_type(model),
    })
}

/// Type of most of the model's bytes, for example `Q4_K`.
fn main_type(model: &ServedModel) -> String {
    let mut bytes = BTreeMap::<String, u64>::new();
    for tensor in model.file.gguf().tensors() {
        *bytes.entry(tensor.dtype.to_string()).or_default() += tensor.bytes;
    }
    let main = bytes.into_iter().max_by_key(|&(_, bytes)| bytes);
    main.map(|(name, _)| name.to_uppercase())
        .unwrap_or_default()
}

/// Number of the model's parameters.
fn parameters(model: &ServedModel) -> u64 {
    let tensors = model.file.gguf().tensors().iter();
    let values = tensors.map(|tensor| tensor.dims.iter().product::<u64>());
    values.fold(0, u64::saturating_add)
}

/// Time at which the model's file was written.
fn modified(model: &ServedModel) -> String {
    let since = model.file.modified().unwrap_or_default();
    let ms = since.as_millis();
    rfc3339(u64::try_from(ms).unwrap_or(0))
}
