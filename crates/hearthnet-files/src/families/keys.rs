//! Metadata keys of families, without the architecture's prefix.

use super::family::{Family, Yarn};
use crate::error::ModelError;
use crate::gguf::{Gguf, MetadataError, Value};
use crate::pooling::POOLING_KEY;
use crate::schema::{Lookup, Requirement, Scalar, off, on, one, zero};

/// Fields of [`ModelSpec`](crate::spec::ModelSpec), or parts of them, with the keys that are read
/// for every family.
const COMMON: &[(&str, &str)] = &[
    ("layers", "block_count"),
    ("width", "embedding_length"),
    ("heads", "attention.head_count"),
    ("kv_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("ffn", "feed_forward_length"),
    ("vocab", "vocab_size"),
    ("context", "context_length"),
    ("norm_eps", "attention.layer_norm_rms_epsilon"),
    ("attention.latent.values", "attention.value_length"),
    ("rope.dims", "rope.dimension_count"),
    ("rope.theta", "rope.freq_base"),
    ("rope.scaling", "rope.scaling.type"),
    ("rope.scaling.factor", "rope.scaling.factor"),
    ("rope.scaling.original", ORIGINAL_CONTEXT),
];

/// Fields with the keys that are read for families with YaRN.
const YARN: &[(&str, &str)] = &[
    (
        "rope.scaling.yarn.amplitude",
        "rope.scaling.yarn_attn_factor",
    ),
    ("rope.scaling.fast", "rope.scaling.yarn_beta_fast"),
    ("rope.scaling.slow", "rope.scaling.yarn_beta_slow"),
];

/// Fields with the keys that only the families read that list them.
const OTHERS: &[(&str, &str)] = &[
    ("rope.local_theta", "rope.freq_base_swa"),
    ("rope.scaling.amplitude", "rope.scaling.attn_factor"),
    ("experts.count", "expert_count"),
    ("experts.used", "expert_used_count"),
    ("attention.window.positions", "attention.sliding_window"),
    ("attention.window.global_every", WINDOWS),
    ("attention.window.heads.kv_heads", "attention.head_count_kv"),
    (
        "attention.window.heads.head_dim",
        "attention.key_length_swa",
    ),
    (
        "attention.window.heads.rope_dims",
        "rope.dimension_count_swa",
    ),
    ("shared_keys.blocks", SHARED_KEYS),
    ("shared_keys.ffn", "feed_forward_length"),
    ("per_layer.width", PER_LAYER),
    ("attention.latent.queries", "attention.q_lora_rank"),
    ("attention.latent.keys", "attention.kv_lora_rank"),
    ("attention.temperature.scale", "attention.temperature_scale"),
    ("attention.temperature.positions", ORIGINAL_CONTEXT),
    ("attention.softcap", "attn_logit_softcapping"),
    ("prediction", "nextn_predict_layers"),
    ("encoder.token_types", TYPE_COUNT),
    ("encoder.projection", "dense_2_feat_out"),
    ("delta.attention_every", "full_attention_interval"),
    ("delta.convolution", "ssm.conv_kernel"),
    ("delta.key_heads", "ssm.group_count"),
    ("delta.value_heads", "ssm.time_step_rank"),
    ("delta.key_width", "ssm.state_size"),
    ("delta.value_width", "ssm.inner_size"),
    ("convolution.positions", SHORT_CONVOLUTION),
    ("convolution.attention", KEY_HEADS),
    ("mamba.convolution", "ssm.conv_kernel"),
    ("mamba.heads", "ssm.time_step_rank"),
    ("mamba.groups", "ssm.group_count"),
    ("mamba.head_width", "ssm.inner_size"),
    ("mamba.state_rows", "ssm.state_size"),
    ("mixers", KEY_HEADS),
    ("experts.shared.ffn", "expert_shared_feed_forward_length"),
    ("experts.leading.blocks", "leading_dense_block_count"),
    ("experts.leading.ffn", "feed_forward_length"),
    ("experts.sigmoid", "expert_gating_func"),
    ("experts.scale", "expert_weights_scale"),
    ("experts.groups.count", "expert_group_count"),
    ("experts.groups.used", "expert_group_used_count"),
    ("scales.embedding", "embedding_scale"),
    ("scales.residual", "residual_scale"),
    ("scales.logits", "logit_scale"),
    ("scales.logit_softcap", "final_logit_softcapping"),
];

pub(super) const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";

/// Keys of features that a family does not have. They are accepted if their value disables the
/// feature.
const NEUTRAL: &[Requirement] = &[
    one("rope.scale_linear"),
    one("rope.scaling.attn_factor"),
    one("rope.scaling.yarn_ext_factor"),
    zero("expert_count"),
    zero("expert_used_count"),
    zero("expert_shared_count"),
    // The blocks of multi-token prediction.
    zero("nextn_predict_layers"),
    // llama.cpp's number for a softmax.
    one("expert_gating_func"),
    one("expert_weights_scale"),
    zero("attention.sliding_window"),
    zero("attention.clamp_kqv"),
    zero("attention.max_alibi_bias"),
    one("logit_scale"),
    one("residual_scale"),
    one("embedding_scale"),
    zero("attn_logit_softcapping"),
    zero("final_logit_softcapping"),
    on("attention.causal"),
    off("use_parallel_residual"),
];

/// Keys without influence on the arithmetic.
const IGNORED: &[&str] = &[
    "rope.scaling.finetuned",
    // Written by early converters: row order of the converter's *source* file.
    "tensor_data_layout",
    // Parts of a head for the axes of images; a token of text has the same position on all axes.
    "rope.dimension_sections",
    // How a caller makes the vector of a text.
    POOLING_KEY,
];

/// One flag per block: true if its attention has a window.
pub(super) const WINDOWS: &str = "attention.sliding_window_pattern";
/// Number of blocks, at the end, that use keys and values of an earlier block.
pub(super) const SHARED_KEYS: &str = "attention.shared_kv_layers";
/// Values per block of the per-layer embeddings.
pub(super) const PER_LAYER: &str = "embedding_length_per_layer_input";

/// Whether a row attends to earlier rows only.
pub(super) const CAUSAL: &str = "attention.causal";
/// Epsilon of LayerNorm.
pub(super) const LAYER_NORM_EPS: &str = "attention.layer_norm_epsilon";
/// Inputs and outputs of the two matrices behind the pooled state.
pub(super) const PROJECTION: [&str; 4] = [
    "dense_2_feat_in",
    "dense_2_feat_out",
    "dense_3_feat_in",
    "dense_3_feat_out",
];
/// Full key of the number of token types of an encoder.
pub(crate) const TYPE_COUNT: &str = "tokenizer.ggml.token_type_count";

/// Key heads, of each block if it is an array.
pub(super) const KEY_HEADS: &str = "attention.head_count_kv";
/// Positions of gated short convolutions.
pub(super) const SHORT_CONVOLUTION: &str = "shortconv.l_cache";

/// Kinds of the blocks, which families derive: whether each has a recurrence.
pub(super) const RECURRENT: &str = "attention.recurrent_layers";

/// Key from which a field is read.
pub(super) fn key_of(field: &'static str) -> &'static str {
    let mut all = [COMMON, YARN, OTHERS].into_iter().flatten();
    all.find(|(of, _)| *of == field)
        .map_or(field, |(_, key)| *key)
}

/// Reader of a file's keys. Keys that the family does not read count as missing.
pub(super) struct Keys<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) family: &'a Family,
}

impl Lookup for Keys<'_> {
    type Error = ModelError;

    fn integer(&self, key: &str) -> Result<Option<u32>, ModelError> {
        match self.reads(key) {
            true => Ok(self.gguf.u32(&self.full(key))?),
            false => Ok(None),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.reads(key) {
            true => Ok(self.gguf.f64(&self.full(key))?),
            false => Ok(None),
        }
    }

    fn missing(&self, key: &str) -> ModelError {
        MetadataError::Missing(self.full(key)).into()
    }
}

impl Keys<'_> {
    pub(super) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.family.architecture)
    }

    pub(super) fn bad(&self, key: &str, reason: &'static str) -> ModelError {
        ModelError::Hyperparameter {
            key: self.full(key),
            reason,
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.gguf.get(&self.full(key)).filter(|_| self.reads(key)) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(ModelError::Hyperparameter {
                key: self.full(key),
                reason: "must be true or false",
            }),
        }
    }

    /// An integer for each of `blocks` blocks: an array, or one number for all. Empty if the key is
    /// missing.
    pub(super) fn per_block(&self, key: &str, blocks: u32) -> Result<Vec<u32>, ModelError> {
        let array = self.reads(key).then(|| self.gguf.get(&self.full(key)));
        let Some(Some(Value::Array(list))) = array else {
            let one = self.integer(key)?;
            // A hostile number of blocks takes no memory.
            return Ok(one.into_iter().collect());
        };
        let number = |value: Value<'_>| {
            let bit = match value {
                Value::Bool(bit) => Some(i128::from(bit)),
                other => other.as_integer(),
            };
            bit.and_then(|number| u32::try_from(number).ok())
        };
        let numbers = match list.len() == blocks as usize {
            true => list.iter().map(number).collect::<Option<Vec<u32>>>(),
            false => None,
        };
        numbers.ok_or_else(|| self.bad(key, "must have a number for each block"))
    }

    /// A number beyond the range of f32 becomes infinite, which
    /// [`ModelSpec::check`](crate::spec::ModelSpec::check) refuses.
    pub(super) fn float32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.number(key)?.map(|value| value as f32))
    }

    /// Returns true if a key is read for this family.
    fn reads(&self, key: &str) -> bool {
        let among = |keys: &[(&str, &str)]| keys.iter().any(|(_, known)| *known == key);
        let yarn = self.family.yarn != Yarn::Never && among(YARN);
        among(COMMON) || yarn || self.family.reads_key(key)
    }

    pub(super) fn refuse_unknown(&self) -> Result<(), ModelError> {
        let architecture = self.family.architecture;
        for (key, value) in self.gguf.metadata() {
            let rest = key.strip_prefix(architecture);
            let Some(rest) = rest.and_then(|rest| rest.strip_prefix('.')) else {
                continue;
            };
            let neutral =
                |rule: &Requirement| rule.key == rest && rule.accepts(Some(Scalar::from(value)));
            let kinds = rest == RECURRENT && self.family.delta.is_some();
            let known = self.reads(rest) || IGNORED.contains(&rest) || kinds;
            if !known && !NEUTRAL.iter().any(neutral) {
                return Err(ModelError::Unsupported {
                    what: format!("metadata {key:?} = {value}"),
                    architecture,
                });
            }
        }
        Ok(())
    }
}
