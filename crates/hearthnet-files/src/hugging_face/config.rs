//! `config.json` as metadata of a model file.

use serde_json::{Map, Value as Json};

use super::class::{Class, Key, Kind, Mixers};
use super::classes::ALL;
use super::error::ImportError;
use super::gemma4;
use super::json::{bad, object, present, refuse_others, required, shown, typed};
use super::lfm2;
use super::mamba;
use super::modules::{DENSE, Modules};
use crate::families::TYPE_COUNT;
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::pooling::POOLING_KEY;
use crate::schema::{Lookup as _, Requirement, off, on, zero};
use crate::spec::{FeedForwardSpec, MAX_SIZE, Mixer, ModelSpec, Rotation};

/// Keys read by code instead of a class's tables.
const READ: &str = "
    _sliding_window_pattern architectures layer_rope_theta layer_types mlp_layer_types model_type
    no_rope_layer_interval
    no_rope_layers original_max_position_embeddings partial_rotary_factor quantization_config
    query_pre_attn_scalar rope_local_base_freq rope_parameters rope_scaling rope_theta
    sliding_window_pattern text_config tie_word_embeddings v_head_dim vocab_size
";

/// Keys without influence on the computation in any class. `pretraining_tp` is the way in which
/// training split a multiplication; the sums are the same. `router_jitter_noise` is noise of
/// training.
const IGNORED: &str = "
    _attn_implementation _attn_implementation_autoset _commit_hash _from_model_config
    _name_or_path attention_dropout auto_map bos_token_id cache_implementation dtype
    embd_pdrop eos_token_id gradient_checkpointing hidden_dropout id2label initializer_range
    is_llama_config keys_to_ignore_at_inference label2id max_window_layers
    num_logits_to_keep output_attentions output_hidden_states output_router_logits
    pad_token_id pretraining_tp resid_pdrop return_dict router_aux_loss_coef
    router_jitter_noise task_specific_params tokenizer_class torch_dtype
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_cache
";

/// Keys accepted for every class if their value disables the feature.
const NEUTRAL: &[Requirement] = &[
    on("is_causal"),
    off("rope_interleaved"),
    off("use_mrope"),
    off("is_encoder_decoder"),
    off("add_cross_attention"),
    zero("chunk_size_feed_forward"),
];

/// Factor of normalised queries.
const QK_SCALE: &str = "qk_scale_factor";

/// Keys read for classes with token types.
const TYPES: &str = "rotary_emb_base type_vocab_size";

/// Kind of the blocks with a recurrence.
const LINEAR: &str = "linear_attention";

/// Contents of `config.json`, overlaid with its text section.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) values: Map<String, Json>,
    pub(super) class: &'static Class,
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
        Ok(Self { values, class })
    }

    /// Number of embeddings.
    pub(super) fn vocab(&self) -> Result<u32, ImportError> {
        self.values.required_integer("vocab_size")
    }

    /// Whether the output matrix is the embedding.
    pub(super) fn tied(&self) -> Result<bool, ImportError> {
        // Older name in configurations of LFM2.
        let mut keys = ["tie_embedding", "tie_word_embeddings"].into_iter();
        let key = keys.find(|key| present(&self.values, key).is_some());
        let key = key.unwrap_or("tie_word_embeddings");
        let tied = typed(&self.values, key, "must be true or false", Json::as_bool)?;
        Ok(tied.unwrap_or(self.class.tied))
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
    pub(super) fn width(&self) -> Result<u32, ImportError> {
        Ok(self.integer_of("embedding_length")?.unwrap_or(0))
    }

    /// `width` over the number of heads; 0 if that is unknown.
    pub(super) fn over_heads(&self, width: u32) -> Result<u32, ImportError> {
        let heads = self.integer_of("attention.head_count")?;
        Ok(width.checked_div(heads.unwrap_or(0)).unwrap_or(0))
    }

    /// Norms of queries and keys that are computed, by the ends of their names.
    pub(super) fn qk_norms(&self) -> Result<Vec<(&'static str, Vec<f32>)>, ImportError> {
        if !self.class.computed_qk_norm {
            return Ok(Vec::new());
        }
        let dim = self.head_dim()?.min(MAX_SIZE) as usize;
        let scale = required(QK_SCALE, self.values.number(QK_SCALE)?)? as f32;
        Ok(vec![
            (".attn_q_norm.weight", vec![scale; dim]),
            (".attn_k_norm.weight", vec![1.0; dim]),
        ])
    }

    /// Writes how the vector of a text is made.
    pub(super) fn write_modules(
        &self,
        modules: &Modules,
        writer: &mut Writer,
    ) -> Result<(), ImportError> {
        let full = |key: &str| format!("{}.{key}", self.class.architecture);
        if let Some(pooling) = modules.pooling {
            writer.set(&full(POOLING_KEY), Value::U32(pooling.gguf()))?;
        }
        for ((_, name), (inputs, outputs)) in DENSE.iter().zip(&modules.dense) {
            writer.set(&full(&format!("{name}_feat_in")), Value::U32(*inputs))?;
            writer.set(&full(&format!("{name}_feat_out")), Value::U32(*outputs))?;
        }
        Ok(())
    }

    /// Writes the family's metadata, without RoPE.
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
        if let Some(axes) = self.class.image_axes {
            writer.set_i32s(&full("rope.dimension_sections"), &axes)?;
        }
        if self.class.token_types {
            writer.set(&full("attention.causal"), Value::Bool(false))?;
            let types = self.values.integer("type_vocab_size")?.unwrap_or(2);
            writer.set(TYPE_COUNT, Value::U32(types))?;
        }
        if self.class.window_heads {
            gemma4::write(&self.values, self.class.architecture, writer)?;
        }
        match self.class.mixers {
            Mixers::Family => {}
            Mixers::Convolution => lfm2::write(&self.values, self.class, writer)?,
            Mixers::Listed | Mixers::Single { .. } => {
                return mamba::write(&self.values, self.class, writer);
            }
        }
        let kinds = present(&self.values, "layer_types").and_then(Json::as_array);
        if let Some(kinds) = kinds.filter(|_| self.class.window_pattern) {
            let windows = kinds.iter().map(|kind| kind == "sliding_attention");
            writer.set_bools(&full("attention.sliding_window_pattern"), windows)?;
        }
        if let Some(kinds) = kinds.filter(|_| self.is_recurrent()) {
            let kinds = kinds.iter().map(|kind| kind == LINEAR);
            writer.set_bools(&full("attention.recurrent_layers"), kinds)?;
        }
        Ok(())
    }

    /// Blocks for multi-token prediction.
    pub(super) fn prediction(&self) -> Result<u32, ImportError> {
        Ok(self.values.integer(self.class.prediction)?.unwrap_or(0))
    }

    /// Whether some blocks have a recurrence.
    fn is_recurrent(&self) -> bool {
        let mut keys = self.class.keys.iter().copied().flatten();
        keys.any(|key| key.to == "ssm.conv_kernel")
    }

    /// Context length; 0 if unknown.
    pub(super) fn context(&self) -> Result<u32, ImportError> {
        Ok(self.integer_of("context_length")?.unwrap_or(0))
    }

    fn value(&self, key: &Key) -> Result<Option<Value<'static>>, ImportError> {
        let first = key.from;
        let names = [Some(first), key.other].into_iter().flatten();
        let name = names
            .clone()
            .find(|name| present(&self.values, name).is_some());
        let name = name.unwrap_or(first);
        let whole = |name| self.values.integer(name);
        let number = match key.kind {
            Kind::Flag | Kind::FlagIfTrue | Kind::Gating => Ok(None),
            _ => self.values.number(name),
        };
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
            Kind::Product => {
                let mut product = 1u32;
                for name in names {
                    product = product.saturating_mul(required(name, whole(name)?)?);
                }
                Some(Value::U32(product))
            }
            Kind::Always(value) => Some(Value::U32(value)),
            Kind::Flag | Kind::FlagIfTrue => {
                let flag = typed(&self.values, name, "must be true or false", Json::as_bool)?;
                let always = matches!(key.kind, Kind::Flag);
                flag.filter(|flag| *flag || always).map(Value::Bool)
            }
            Kind::Gating => {
                match present(&self.values, name).map(|value| (value, value.as_str())) {
                    None => None,
                    Some((_, Some("softmax"))) => Some(Value::U32(1)),
                    Some((_, Some("sigmoid"))) => Some(Value::U32(2)),
                    Some((value, _)) => return Err(bad(name, value, "must be softmax or sigmoid")),
                }
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
        if self.class.window_heads {
            gemma4::check(&self.values, spec)?;
        }
        let listed = matches!(self.class.mixers, Mixers::Listed | Mixers::Single { .. });
        if listed {
            mamba::check(&self.values, spec)?;
        }
        let kinds = |layer| match (spec.block(layer).mixer, spec.window(layer)) {
            (Mixer::Delta(_), _) => Json::from(LINEAR),
            (Mixer::Convolution { .. }, _) => Json::from(lfm2::CONVOLUTION),
            (_, Some(_)) => Json::from("sliding_attention"),
            (_, None) => Json::from("full_attention"),
        };
        let turns = |layer| match spec.rotation(layer) {
            Rotation::None => Json::from(0),
            _ => Json::from(1),
        };
        let feeds = |layer| match spec.block(layer).feed {
            FeedForwardSpec::Dense | FeedForwardSpec::None => Json::from("dense"),
            FeedForwardSpec::Experts(_) => Json::from("sparse"),
        };
        let bases = |layer| match spec.rotation(layer) {
            Rotation::None => 0.0,
            _ => spec.rope.theta,
        };
        let per_layer: [(&str, &dyn Fn(&Json, u32) -> bool); 4] = [
            ("layer_types", &|value, layer| *value == kinds(layer)),
            ("no_rope_layers", &|value, layer| *value == turns(layer)),
            ("mlp_layer_types", &|value, layer| *value == feeds(layer)),
            ("layer_rope_theta", &|value, layer| {
                value.as_f64() == Some(bases(layer))
            }),
        ];
        // The spec follows a list of mixers.
        for (key, is_expected) in per_layer.into_iter().skip(usize::from(listed)) {
            let Some(value) = present(&self.values, key) else {
                continue;
            };
            let same = value.as_array().is_some_and(|list| {
                list.len() == spec.layers as usize
                    && list.iter().zip(0..).all(|(v, layer)| is_expected(v, layer))
            });
            if !same {
                return Err(bad(key, value, differs));
            }
        }
        let grouped = spec
            .experts
            .is_some_and(|experts| experts.groups.is_some() && !experts.sigmoid);
        let method = present(&self.values, "topk_method")
            .cloned()
            .unwrap_or_default();
        if grouped && method != "group_limited_greedy" {
            let reason = "must be group_limited_greedy if n_group is above 1";
            return Err(bad("topk_method", &method, reason));
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
    let class = first.and_then(Json::as_str).and_then(|name| {
        let has = |key: &str| key.is_empty() || present(values, key).is_some();
        let mut same = ALL.iter().filter(|class| class.name == name);
        same.find(|class| has(class.with))
    });
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
        if !rule.accepts(value.map(Into::into)) {
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
    known.push(class.prediction);
    let own = if class.window_heads { gemma4::READ } else { "" };
    let more = match class.mixers {
        Mixers::Family => "",
        Mixers::Convolution => lfm2::READ,
        Mixers::Listed | Mixers::Single { .. } => mamba::READ,
    };
    let types = if class.token_types { TYPES } else { "" };
    let scale = if class.computed_qk_norm { QK_SCALE } else { "" };
    let others = [IGNORED, READ, class.ignored, own, more, types, scale].into_iter();
    known.extend(others.flat_map(str::split_whitespace));
    let reason = "this key is unknown, and may change the computation";
    refuse_others(values, &known, reason)
}
