//! `config.json` as metadata of a model file.

use serde_json::{Map, Value as Json};

use super::classes::{
    ALL, Class, IGNORED, JsonValue, Key, Kind, NEUTRAL, Requirement, RopeBase, RopeDims,
};
use super::error::ImportError;
use super::rope::Rope;
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::spec::{ModelSpec, Rotation};

/// Keys read by code instead of a class's tables.
const READ: &[&str] = &[
    "_sliding_window_pattern",
    "architectures",
    "layer_types",
    "model_type",
    "no_rope_layer_interval",
    "no_rope_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window_pattern",
    "text_config",
    "tie_word_embeddings",
    "v_head_dim",
    "vocab_size",
];

/// Contents of `config.json`, overlaid with its text section.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) values: Map<String, Json>,
    pub(super) class: &'static Class,
    pub(super) rope: Rope,
}

/// Value for a message: as JSON, on one line, shortened.
pub(super) fn shown(value: &Json) -> String {
    value.to_string().chars().take(80).collect()
}

/// Value of a key, unless it is missing or `null`.
pub(super) fn present<'a>(values: &'a Map<String, Json>, key: &str) -> Option<&'a Json> {
    values.get(key).filter(|value| !value.is_null())
}

/// Error for an unsupported value, which could change the computation.
pub(super) fn bad(key: &str, value: &Json, reason: impl std::fmt::Display) -> ImportError {
    ImportError::Unsound(format!("config.json: {key} = {}: {reason}", shown(value)))
}

/// Value of a required key.
pub(super) fn required<T>(key: impl Into<String>, value: Option<T>) -> Result<T, ImportError> {
    value.ok_or_else(|| ImportError::MissingKey(key.into()))
}

/// Parses a file of the directory as a JSON object.
pub(super) fn object(file: &str, text: &[u8]) -> Result<Map<String, Json>, ImportError> {
    serde_json::from_slice(text)
        .map_err(|error| ImportError::Unsound(format!("{file} cannot be read: {error}")))
}

/// Finite number; `None` if the key is missing or `null`.
pub(super) fn number(values: &Map<String, Json>, key: &str) -> Result<Option<f64>, ImportError> {
    let Some(value) = present(values, key) else {
        return Ok(None);
    };
    match value.as_f64().filter(|n| n.is_finite()) {
        Some(number) => Ok(Some(number)),
        None => Err(bad(key, value, "must be a number")),
    }
}

/// Integer from 0 to 2^32 - 1; `None` if the key is missing or `null`.
pub(super) fn integer(values: &Map<String, Json>, key: &str) -> Result<Option<u32>, ImportError> {
    let Some(value) = present(values, key) else {
        return Ok(None);
    };
    match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
        Some(number) => Ok(Some(number)),
        None => Err(bad(key, value, "must be an integer from 0 to 4294967295")),
    }
}

impl Requirement {
    fn accepts(&self, value: Option<&Json>) -> bool {
        let Some(value) = value else {
            return self.optional;
        };
        self.values.iter().any(|accepted| match accepted {
            JsonValue::Bool(b) => value.as_bool() == Some(*b),
            JsonValue::Text(text) => value.as_str() == Some(text),
            JsonValue::Number(n) => value.as_f64() == Some(*n),
            JsonValue::Empty => value.as_array().is_some_and(Vec::is_empty),
        })
    }
}

impl Config {
    /// Parses `config.json`, with all checks that need no other file.
    pub(super) fn parse(text: &[u8]) -> Result<Self, ImportError> {
        let mut values = object("config.json", text)?;
        let class = class_of(&values)?;
        if let Some(Json::Object(inner)) = values.remove("text_config") {
            values.extend(inner.into_iter().filter(|(key, _)| key != "architectures"));
        }
        if let Some(value) = present(&values, "model_type")
            && !value
                .as_str()
                .is_some_and(|t| class.model_types.contains(&t))
        {
            let reason = format!("a {} is {}", class.name, class.model_types.join(" or "));
            return Err(bad("model_type", value, reason));
        }
        refuse_quantised(&values, class)?;
        check_only(&values, class)?;
        refuse_unknown(&values, class)?;
        let mut config = Self {
            values,
            class,
            rope: Rope::default(),
        };
        config.rope = Rope::read(&config)?;
        Ok(config)
    }

    /// Number of embeddings.
    pub(super) fn vocab(&self) -> Result<u32, ImportError> {
        let key = "vocab_size";
        required(key, integer(&self.values, key)?)
    }

    /// Whether the output matrix is the embedding.
    pub(super) fn tied(&self) -> Result<bool, ImportError> {
        let key = "tie_word_embeddings";
        match present(&self.values, key) {
            None => Ok(self.class.tied),
            Some(Json::Bool(tied)) => Ok(*tied),
            Some(other) => Err(bad(key, other, "must be true or false")),
        }
    }

    /// Id of a special token; `kind` is a name such as `bos`.
    pub(super) fn token_id(&self, kind: &str) -> Option<u32> {
        let id = self.values.get(&format!("{kind}_token_id"))?.as_u64()?;
        u32::try_from(id).ok()
    }

    fn integer_of(&self, key: &str) -> Result<Option<u32>, ImportError> {
        let mut keys = self.class.keys.iter().copied().flatten();
        let Some(key) = keys.find(|k| k.to == key) else {
            return Ok(None);
        };
        match self.value(key)? {
            Some(Value::U32(value)) => Ok(Some(value)),
            _ => Ok(None),
        }
    }

    /// Width of a head, or its default.
    pub(super) fn head_dim(&self) -> Result<u32, ImportError> {
        if let Some(dim) = self.integer_of("attention.key_length")? {
            return Ok(dim);
        }
        self.over_heads(self.width()?)
    }

    /// Width of the residual stream; 0 if unknown.
    fn width(&self) -> Result<u32, ImportError> {
        Ok(self.integer_of("embedding_length")?.unwrap_or(0))
    }

    fn over_heads(&self, width: u32) -> Result<u32, ImportError> {
        let heads = self.integer_of("attention.head_count")?;
        Ok(width.checked_div(heads.unwrap_or(0)).unwrap_or(0))
    }

    /// Writes the family's metadata.
    pub(super) fn write(&self, writer: &mut Writer) -> Result<(), ImportError> {
        let full = |key: &str| format!("{}.{key}", self.class.architecture);
        writer.set(
            "general.architecture",
            Value::String(self.class.architecture),
        )?;
        for key in self.class.keys.iter().copied().flatten() {
            if let Some(value) = self.value(key)? {
                writer.set(&full(key.to), value)?;
            }
        }
        if self.class.vocab_size {
            writer.set(&full("vocab_size"), Value::U32(self.vocab()?))?;
        }
        let dims = self.rope_dims()?;
        if let Some(dims) = dims {
            writer.set(&full("rope.dimension_count"), Value::U32(dims))?;
        }
        let theta = match (self.class.rope_base, self.rope.theta) {
            (RopeBase::Or(theta), None) => Some(theta),
            (RopeBase::Unusual | RopeBase::Usual, Some(10_000.0)) => None,
            (RopeBase::Usual, Some(theta)) => {
                return Err(bad("rope_theta", &Json::from(theta), "must be 10000"));
            }
            (RopeBase::Required, theta) => Some(required("rope_theta", theta)?),
            (_, theta) => theta,
        };
        if let Some(theta) = theta {
            writer.set(&full("rope.freq_base"), Value::F32(theta as f32))?;
        }
        for (key, value) in &self.rope.metadata {
            writer.set(&full(key), *value)?;
        }
        Ok(())
    }

    /// Context length; 0 if unknown.
    pub(super) fn context(&self) -> Result<u32, ImportError> {
        Ok(self.integer_of("context_length")?.unwrap_or(0))
    }

    /// Rotary dimensions of a head, if they are written.
    pub(super) fn rope_dims(&self) -> Result<Option<u32>, ImportError> {
        let partial = self.rope.partial;
        let head = self.head_dim()?;
        let part = |of: u32, partial: f64| (f64::from(of) * partial) as u32;
        Ok(match self.class.rope_dims {
            RopeDims::Omitted => None,
            RopeDims::Head => Some(head),
            RopeDims::Half => Some(part(head, partial.unwrap_or(0.5))),
            RopeDims::OfWidth => {
                Some(self.over_heads(part(self.width()?, partial.unwrap_or(1.0)))?)
            }
        })
    }

    fn value(&self, key: &Key) -> Result<Option<Value<'static>>, ImportError> {
        let first = key.from;
        let names = [Some(first), key.other].into_iter().flatten();
        let name = names
            .clone()
            .find(|name| present(&self.values, name).is_some());
        let name = name.unwrap_or(first);
        let whole = |name| integer(&self.values, name);
        let number = number(&self.values, name);
        let float = |number: f64| Value::F32(number as f32);
        let is_null = self.values.get(name).is_some_and(Json::is_null);
        Ok(match key.kind {
            Kind::Integer => Some(Value::U32(required(first, whole(name)?)?)),
            Kind::IntegerOr(or) => Some(Value::U32(whole(name)?.unwrap_or(or))),
            Kind::OptionalInteger => whole(name)?.map(Value::U32),
            Kind::Sum => {
                let mut sum = 0u32;
                for name in names {
                    sum = sum.saturating_add(required(name, whole(name)?)?);
                }
                Some(Value::U32(sum))
            }
            Kind::Float => Some(float(required(first, number?)?)),
            // `null` disables the feature.
            Kind::FloatOr(_) if is_null => None,
            Kind::FloatOr(or) => Some(float(number?.unwrap_or(or))),
            Kind::OptionalFloat => number?.filter(|number| *number != 0.0).map(float),
        })
    }

    /// Compares per-layer values of the file with those that the family derives.
    pub(super) fn check_layers(&self, spec: &ModelSpec) -> Result<(), ImportError> {
        let differs = "is not supported for this model class";
        let windows = |layer| match spec.window(layer) {
            Some(_) => Json::from("sliding_attention"),
            None => Json::from("full_attention"),
        };
        let turns = |layer| match spec.rotation(layer) {
            Rotation::None => Json::from(0),
            _ => Json::from(1),
        };
        let per_layer: [(&str, &dyn Fn(u32) -> Json); 2] =
            [("layer_types", &windows), ("no_rope_layers", &turns)];
        for (key, expected) in per_layer {
            let Some(value) = present(&self.values, key) else {
                continue;
            };
            let same = value.as_array().is_some_and(|list| {
                list.len() == spec.layers as usize
                    && list.iter().zip(0..).all(|(v, layer)| *v == expected(layer))
            });
            if !same {
                return Err(bad(key, value, differs));
            }
        }
        let global = spec.attention.window.and_then(|w| w.global_every);
        let values = spec.attention.latent.as_ref().map(|l| l.values);
        let scalar = match spec.attention.scale {
            Some(_) => spec.width.checked_div(spec.heads),
            None => Some(spec.head_dim),
        };
        for (key, expected) in [
            ("_sliding_window_pattern", global),
            ("sliding_window_pattern", global),
            ("no_rope_layer_interval", spec.rope.skip_every),
            ("query_pre_attn_scalar", scalar),
            ("v_head_dim", values),
        ] {
            if let Some(value) = present(&self.values, key)
                && value.as_f64() != expected.map(f64::from)
            {
                return Err(bad(key, value, differs));
            }
        }
        Ok(())
    }
}

fn class_of(values: &Map<String, Json>) -> Result<&'static Class, ImportError> {
    let named = present(values, "architectures");
    let first = named.and_then(|list| list.get(0));
    let class = first
        .and_then(Json::as_str)
        .and_then(|name| ALL.iter().find(|class| class.name == name));
    class.copied().ok_or_else(|| {
        let found = named.map_or_else(|| "of no architecture".to_owned(), shown);
        let known: Vec<_> = ALL.iter().map(|c| c.name).collect();
        ImportError::Unsound(format!(
            "model class {found} in config.json is not supported; supported are {}",
            known.join(", ")
        ))
    })
}

/// Refuses quantised weights, except experts in MXFP4, which their tensors' names reveal.
fn refuse_quantised(values: &Map<String, Json>, class: &Class) -> Result<(), ImportError> {
    let Some(how) = present(values, "quantization_config") else {
        return Ok(());
    };
    let method = how.get("quant_method").unwrap_or(how);
    match class.stacked_experts && method == "mxfp4" {
        true => Ok(()),
        false => Err(ImportError::Unsound(format!(
            "config.json says that the weights are quantised ({}); directories are read in fp16, \
             bf16 and fp32",
            shown(method)
        ))),
    }
}

fn check_only(values: &Map<String, Json>, class: &Class) -> Result<(), ImportError> {
    for rule in class.requirements.iter().copied().flatten().chain(NEUTRAL) {
        let value = present(values, rule.key);
        if !rule.accepts(value) {
            let shown = value.cloned().unwrap_or_default();
            let reason = format!("this value is not supported for {}", class.name);
            return Err(bad(rule.key, &shown, reason));
        }
    }
    Ok(())
}

/// Refuses keys that are neither read nor known to have no influence.
fn refuse_unknown(values: &Map<String, Json>, class: &Class) -> Result<(), ImportError> {
    let keys = class.keys.iter().copied().flatten();
    let mut known: Vec<&str> = keys
        .flat_map(|key| [Some(key.from), key.other])
        .flatten()
        .collect();
    let rules = class.requirements.iter().copied().flatten().chain(NEUTRAL);
    known.extend(rules.map(|rule| rule.key));
    known.extend([IGNORED, READ, class.ignored].into_iter().flatten());
    let reason = "this key is unknown, and may change the computation";
    refuse_others(values, &known, reason)
}

/// Refuses an object with keys outside of `known`.
pub(super) fn refuse_others(
    values: &Map<String, Json>,
    known: &[&str],
    reason: &str,
) -> Result<(), ImportError> {
    let other =
        |(key, value): &(&String, &Json)| !value.is_null() && !known.contains(&key.as_str());
    match values.iter().find(other) {
        None => Ok(()),
        Some((key, value)) => Err(bad(
            &key.chars().take(60).collect::<String>(),
            value,
            reason,
        )),
    }
}
