//! Model families as data: metadata keys and tensors of each supported architecture.
//!
//! A family is a constant [`Family`] in `known.rs`, listed in [`ALL`]. It describes the tensors of
//! a block, the kind of RoPE, the differences from Llama, and the metadata keys to read. This
//! module turns a file and its family into a [`ModelSpec`] that the engine interprets.
//! An unknown architecture, hyperparameter or tensor is an error, because ignoring it would give
//! plausible wrong answers.
//!
//! A family that needs no new feature is one constant. For a new feature, first add the tensor to
//! [`LayerTensor`] or the field to [`ModelSpec`], and implement it in the engine.

mod known;
mod rules;

use crate::boundary::BoundaryDtype;
use crate::error::ModelError;
use crate::gguf::{Gguf, MetadataError, Value};
use crate::spec::{
    Activation, AttentionSpec, Dim, ExpertSpec, LatentSpec, LayerTensor, ModelSpec, QkNorm,
    RopeKind, RopeScaling, RopeSpec, ScaleSpec, TemperatureSpec, WindowSpec, YarnSpec,
};

/// All supported families.
pub const ALL: &[&Family] = &[
    &known::LLAMA,
    &known::QWEN2,
    &known::QWEN3,
    &known::QWEN3_MOE,
    &known::OLMOE,
    &known::SMOLLM3,
    &known::PHI3,
    &known::GEMMA2,
    &known::GEMMA3,
    &known::GRANITE,
    &known::GLM4,
    &known::GPT_OSS,
    &known::MINICPM3,
    &known::MISTRAL3,
];

/// Metadata key with which a file overrides its family's boundary dtype (`f16`, `bf16`, `f32`).
pub const BOUNDARY_KEY: &str = "hearthnet.boundary_dtype";

/// Token embedding, `[width, vocab]`.
pub const EMBEDDING: &str = "token_embd.weight";
/// Norm before the output matrix, `[width]`.
pub const OUTPUT_NORM: &str = "output_norm.weight";
/// Output matrix, `[width, vocab]`; a file without it uses the embedding.
pub const OUTPUT: &str = "output.weight";

/// Router matrix of a block, `[width, experts]`; the prefix is `blk.N.`.
pub const ROUTER: &str = "ffn_gate_inp.weight";
/// Divisors of RoPE frequencies, `[pairs]`: see [`RopeScaling::Factors`].
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
/// LongRoPE divisors for contexts within the original training length, `[pairs]`.
pub const ROPE_FACTORS_SHORT: &str = "rope_factors_short.weight";
/// LongRoPE divisors for longer contexts, `[pairs]`.
pub const ROPE_FACTORS_LONG: &str = "rope_factors_long.weight";

/// Tensors outside the blocks, with their shapes.
const HEAD: [(&str, &[Dim]); 3] = [
    (EMBEDDING, &[Dim::Width, Dim::Vocab]),
    (OUTPUT_NORM, &[Dim::Width]),
    (OUTPUT, &[Dim::Width, Dim::Vocab]),
];

/// Tensors outside the blocks that every block uses.
fn shared(spec: &ModelSpec) -> &'static [&'static str] {
    match spec.rope.scaling {
        Some(RopeScaling::Factors) => &[ROPE_FACTORS],
        Some(RopeScaling::Long { .. }) => &[ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG],
        Some(RopeScaling::Linear { .. } | RopeScaling::Yarn(_)) | None => &[],
    }
}

#[derive(Debug)]
pub struct Family {
    /// Value of `general.architecture`, and prefix of the family's metadata keys.
    pub architecture: &'static str,
    /// Pairing of the values that RoPE rotates.
    pub rope: RopeKind,
    /// Format of the residual stream between blocks, unless the file has [`BOUNDARY_KEY`].
    pub boundary: BoundaryDtype,
    /// Groups of tensors that a block can have. [`LayerTensor::present`] selects those of a model.
    pub layer: &'static [&'static [Rule]],
    /// Metadata keys read for this family only, without the architecture's prefix.
    pub reads: &'static [&'static str],
    /// Whether queries, keys and values have biases.
    pub qkv_bias: Presence,
    pub qk_norm: Option<QkNorm>,
    /// Whether the attention output projection has a bias.
    pub output_bias: bool,
    /// Whether query heads have attention sinks.
    pub sinks: bool,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Whether the outputs of attention and feed-forward layer are normalised before they are added
    /// to the residual stream.
    pub post_norms: bool,
    /// Epsilon of the norms in latent attention; `None` for ordinary attention.
    pub latent_norm_eps: Option<f32>,
    /// Default of [`ScaleSpec::embedding`] for files without the key.
    pub embedding_scale: Option<f32>,
    /// `depth_scale / sqrt(layers)` is [`ScaleSpec::residual`]; files do not state it.
    pub depth_scale: Option<f64>,
    /// Base width: logits are divided by `width / logits_by_width`.
    pub logits_by_width: Option<f32>,
    /// Whether the embedding is multiplied by `sqrt(width)`.
    pub scaled_embedding: bool,
    /// Whether the weights of a row's experts add up to 1.
    pub experts_normalised: bool,
    /// Whether the router and the matrices of the experts have biases.
    pub experts_biased: bool,
    /// Whether a file may have [`ROPE_FACTORS`].
    pub rope_factors: bool,
    /// Whether a file may have [`ROPE_FACTORS_SHORT`] and [`ROPE_FACTORS_LONG`].
    pub long_rope: bool,
    pub yarn: Yarn,
    /// Layer counts of the models whose scores are scaled by `1 / sqrt(width / heads)` instead of
    /// `1 / sqrt(head_dim)`. Files do not state it; llama.cpp uses the layer count, too.
    pub scaled_by_width: &'static [u32],
    /// [`RopeSpec::skip_every`]
    pub rope_skip_every: Option<u32>,
    /// Default of [`RopeSpec::local_theta`] for files without the key.
    pub rope_local_theta: Option<f64>,
    /// [`WindowSpec::global_every`]
    pub global_every: Option<u32>,
}

/// Whether the models of a family have a feature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    Never,
    Always,
    /// If the file has its tensors.
    IfStored,
}

/// Whether models of a family may use YaRN, and with which [`YarnSpec::whole`], which files do not
/// state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Yarn {
    Never,
    /// The ramp begins and ends at whole pairs, as in nearly all families.
    Whole,
    /// The ramp begins and ends at fractional pair indices.
    Exact,
}

/// Name and shape of a tensor of a block.
#[derive(Debug)]
pub struct Rule {
    pub tensor: LayerTensor,
    /// Name without the prefix `blk.N.`.
    pub name: &'static str,
    /// Shape, row length first: one dimension for a vector, two for a matrix, three for the
    /// matrices of all experts.
    pub dims: &'static [Dim],
}

impl Rule {
    /// Returns true for a matrix or the matrices of all experts, false for vectors and biases.
    pub fn is_matrix(&self) -> bool {
        self.dims.len() > 1 && !self.name.ends_with(".bias")
    }

    /// Full tensor name in block `layer`.
    pub fn full_name(&self, layer: u32) -> String {
        format!("blk.{layer}.{}", self.name)
    }
}

/// Value that a key of [`NEUTRAL`] must have.
#[derive(Debug)]
enum Only {
    /// A number, stored as integer or float.
    Number(f64),
    Bool(bool),
    /// Any value: the key does not affect the arithmetic.
    Anything,
}

impl Only {
    fn accepts(&self, value: Value<'_>) -> bool {
        match *self {
            Self::Number(n) => match value.as_integer() {
                Some(v) => v as f64 == n,
                None => value.as_float() == Some(n),
            },
            Self::Bool(b) => value.as_bool() == Some(b),
            Self::Anything => true,
        }
    }
}

/// Keys that [`Family::spec`] reads for every family, without the architecture's prefix.
const READ: [&str; 15] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
];

const YARN: [&str; 3] = [
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

/// Keys (without the architecture's prefix) of features that a family does not have. They are
/// accepted if their value disables the feature.
const NEUTRAL: &[(&str, Only)] = &[
    ("rope.scale_linear", Only::Number(1.0)),
    ("rope.scaling.attn_factor", Only::Number(1.0)),
    ("rope.scaling.finetuned", Only::Anything),
    ("rope.scaling.yarn_ext_factor", Only::Number(1.0)),
    ("expert_count", Only::Number(0.0)),
    ("expert_used_count", Only::Number(0.0)),
    ("expert_shared_count", Only::Number(0.0)),
    // llama.cpp's number for a softmax.
    ("expert_gating_func", Only::Number(1.0)),
    ("expert_weights_scale", Only::Number(1.0)),
    ("attention.sliding_window", Only::Number(0.0)),
    ("attention.clamp_kqv", Only::Number(0.0)),
    ("attention.max_alibi_bias", Only::Number(0.0)),
    ("logit_scale", Only::Number(1.0)),
    ("residual_scale", Only::Number(1.0)),
    ("embedding_scale", Only::Number(1.0)),
    ("attn_logit_softcapping", Only::Number(0.0)),
    ("final_logit_softcapping", Only::Number(0.0)),
    ("attention.causal", Only::Bool(true)),
    ("use_parallel_residual", Only::Bool(false)),
    // Written by early converters: row order of the converter's *source* file.
    ("tensor_data_layout", Only::Anything),
];

impl Family {
    /// Base of all families: plain Llama without optional features.
    const BASE: Self = Self {
        architecture: "llama",
        rope: RopeKind::Interleaved,
        boundary: BoundaryDtype::F16,
        layer: &[],
        reads: &[],
        qkv_bias: Presence::Never,
        qk_norm: None,
        output_bias: false,
        sinks: false,
        activation: Activation::Silu,
        post_norms: false,
        latent_norm_eps: None,
        embedding_scale: None,
        depth_scale: None,
        logits_by_width: None,
        scaled_embedding: false,
        experts_normalised: false,
        experts_biased: false,
        rope_factors: false,
        long_rope: false,
        yarn: Yarn::Never,
        scaled_by_width: &[],
        rope_skip_every: None,
        rope_local_theta: None,
        global_every: None,
    };

    pub fn named(architecture: &str) -> Option<&'static Self> {
        ALL.iter()
            .find(|family| family.architecture == architecture)
            .copied()
    }

    /// The family of a file, by its `general.architecture`.
    ///
    /// # Errors
    /// When the key is missing or not a string, or the architecture is not in [`ALL`].
    pub fn of(gguf: &Gguf) -> Result<&'static Self, ModelError> {
        let key = "general.architecture";
        let missing = || MetadataError::Missing(key.to_owned());
        let architecture = gguf.str(key)?.ok_or_else(missing)?;
        Self::named(architecture).ok_or_else(|| ModelError::UnknownArchitecture {
            architecture: architecture.chars().take(60).collect(),
            known: ALL
                .iter()
                .map(|f| f.architecture)
                .collect::<Vec<_>>()
                .join(", "),
        })
    }

    /// The hyperparameters of a file of this family.
    ///
    /// # Errors
    /// When a key is missing, of the wrong type, out of range or inconsistent with another, or when
    /// the file needs a feature that the engine does not implement.
    pub fn spec(&self, gguf: &Gguf) -> Result<ModelSpec, ModelError> {
        self.refuse_unknown_keys(gguf)?;
        let keys = Keys { gguf, family: self };

        let layers = keys.u32("block_count")?;
        let width = keys.u32("embedding_length")?;
        let heads = keys.u32("attention.head_count")?;
        let head_dim = match keys.optional_u32("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if heads > 0 && width.is_multiple_of(heads) => width / heads,
            None => return Err(keys.bad("attention.head_count", "must divide embedding_length")),
        };
        if self.latent_norm_eps.is_none()
            && keys
                .optional_u32("attention.value_length")?
                .is_some_and(|dim| dim != head_dim)
        {
            return Err(keys.bad("attention.value_length", "must equal attention.key_length"));
        }
        let norm_eps = keys.float("attention.layer_norm_rms_epsilon")?;
        let experts = self.experts(&keys)?;
        let expert_ffn = match experts {
            Some(_) => keys.optional_u32("expert_feed_forward_length")?,
            None => None,
        };
        let spec = ModelSpec {
            architecture: self.architecture.to_owned(),
            layers,
            width,
            heads,
            kv_heads: keys
                .optional_u32("attention.head_count_kv")?
                .unwrap_or(heads),
            head_dim,
            ffn: match expert_ffn {
                Some(ffn) => ffn,
                None => keys.u32("feed_forward_length")?,
            },
            vocab: vocab(gguf, &keys)?,
            context: keys.u32("context_length")?,
            norm_eps: norm_eps.ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?
                as f32,
            rope: self.rope(&keys, head_dim)?,
            boundary: match gguf.str(BOUNDARY_KEY)? {
                None => self.boundary,
                Some(name) => name.parse().map_err(|_| ModelError::Hyperparameter {
                    key: BOUNDARY_KEY.to_owned(),
                    reason: "must be f16, bf16 or f32",
                })?,
            },
            tied_embedding: gguf.tensor(OUTPUT).is_none(),
            attention: self.attention(&keys, (layers, width, heads))?,
            activation: self.activation,
            experts,
            post_norms: self.post_norms,
            scales: self.scales(&keys, width, layers)?,
        };
        spec.check()
            .map_err(|error| keys.bad(key_of(error.field), error.reason))?;
        Ok(spec)
    }

    fn attention(
        &self,
        keys: &Keys<'_>,
        (layers, width, heads): (u32, u32, u32),
    ) -> Result<AttentionSpec, ModelError> {
        let window = keys
            .optional_u32("attention.sliding_window")?
            .filter(|positions| *positions > 0)
            .map(|positions| WindowSpec {
                positions,
                global_every: self.global_every,
            });
        Ok(AttentionSpec {
            qkv_bias: match self.qkv_bias {
                Presence::Never => false,
                Presence::Always => true,
                // The check of the tensors requires all of them.
                Presence::IfStored => keys.gguf.tensor("blk.0.attn_q.bias").is_some(),
            },
            qk_norm: self.qk_norm,
            latent: self.latent(keys, width, heads)?,
            output_bias: self.output_bias,
            sinks: self.sinks,
            scale: match self.scaled_by_width.contains(&layers) && heads > 0 {
                true => Some(1.0 / ((width / heads) as f32).sqrt()),
                false => keys.float32("attention.scale")?,
            },
            softcap: keys.float32("attn_logit_softcapping")?,
            window,
            temperature: match keys.float32("attention.temperature_scale")? {
                None | Some(0.0) => None,
                Some(scale) => Some(TemperatureSpec {
                    scale,
                    positions: keys.u32("rope.scaling.original_context_length")?,
                }),
            },
        })
    }

    fn latent(
        &self,
        keys: &Keys<'_>,
        width: u32,
        heads: u32,
    ) -> Result<Option<LatentSpec>, ModelError> {
        let Some(norm_eps) = self.latent_norm_eps else {
            return Ok(None);
        };
        let values = keys.optional_u32("attention.value_length")?;
        Ok(Some(LatentSpec {
            queries: keys.u32("attention.q_lora_rank")?,
            keys: keys.u32("attention.kv_lora_rank")?,
            values: values.unwrap_or(width.checked_div(heads).unwrap_or(0)),
            norm_eps,
        }))
    }

    fn scales(&self, keys: &Keys<'_>, width: u32, layers: u32) -> Result<ScaleSpec, ModelError> {
        // A factor of 1 becomes `None`, so that equivalent files have equal specs.
        let factor = |key| Ok::<_, ModelError>(keys.float32(key)?.filter(|f| *f != 1.0));
        Ok(ScaleSpec {
            embedding: match self.scaled_embedding {
                true => Some((width as f32).sqrt()),
                false => factor("embedding_scale")?.or(self.embedding_scale),
            },
            residual: match self.depth_scale {
                Some(scale) => Some((scale / f64::from(layers).sqrt()) as f32),
                None => factor("residual_scale")?,
            },
            logits: match self.logits_by_width {
                Some(base) => Some(width as f32 / base).filter(|f| *f != 1.0),
                None => factor("logit_scale")?,
            },
            logit_softcap: keys.float32("final_logit_softcapping")?,
        })
    }

    fn experts(&self, keys: &Keys<'_>) -> Result<Option<ExpertSpec>, ModelError> {
        let count = keys.optional_u32("expert_count")?.unwrap_or(0);
        let used = keys.optional_u32("expert_used_count")?;
        match (count, used) {
            (0, None | Some(0)) => Ok(None),
            (0, Some(_)) => Err(keys.bad("expert_used_count", "must be 0 without experts")),
            (_, None) => Err(keys.missing("expert_used_count")),
            (count, Some(used)) => Ok(Some(ExpertSpec {
                count,
                used,
                normalise: self.experts_normalised,
                bias: self.experts_biased,
            })),
        }
    }

    fn rope(&self, keys: &Keys<'_>, head_dim: u32) -> Result<RopeSpec, ModelError> {
        let factor = keys.float("rope.scaling.factor")?;
        let unsupported = |key: &str, value: &str| {
            let value: String = value.chars().take(60).collect();
            Err(ModelError::Unsupported {
                what: format!("metadata {:?} = {value:?}", keys.full(key)),
                architecture: self.architecture,
            })
        };
        let stored = self.rope_factors && keys.gguf.tensor(ROPE_FACTORS).is_some();
        let long = self.long_rope && keys.gguf.tensor(ROPE_FACTORS_LONG).is_some();
        let scaling = match keys.gguf.str(&keys.full("rope.scaling.type"))? {
            None | Some("none" | "longrope") if long => {
                let context = keys.u32("context_length")?;
                let key = "rope.scaling.original_context_length";
                let original = match self.latent_norm_eps {
                    // The converter of these models omits the key; llama.cpp uses the context.
                    Some(_) => keys.optional_u32(key)?.unwrap_or(context),
                    None => keys.u32(key)?,
                };
                Some(RopeScaling::Long {
                    long: context > original,
                    amplitude: keys.float("rope.scaling.attn_factor")?.unwrap_or(1.0),
                })
            }
            None | Some("none") => match factor {
                None | Some(1.0) => stored.then_some(RopeScaling::Factors),
                Some(factor) => {
                    return unsupported("rope.scaling.factor", &factor.to_string());
                }
            },
            Some("linear") if !stored => {
                let factor = factor.ok_or_else(|| keys.missing("rope.scaling.factor"))?;
                (factor != 1.0).then_some(RopeScaling::Linear { factor })
            }
            Some("yarn") if !stored && self.yarn != Yarn::Never => {
                let factor = factor.ok_or_else(|| keys.missing("rope.scaling.factor"))?;
                let yarn = self.yarn(keys, factor)?;
                let neutral = yarn.factor == 1.0 && yarn.amplitude == 1.0;
                (!neutral).then_some(RopeScaling::Yarn(yarn))
            }
            Some(other) => return unsupported("rope.scaling.type", other),
        };
        let local_theta = keys.float("rope.freq_base_swa")?;
        Ok(RopeSpec {
            kind: self.rope,
            dims: keys
                .optional_u32("rope.dimension_count")?
                .unwrap_or(head_dim),
            // llama.cpp's default.
            theta: keys.float("rope.freq_base")?.unwrap_or(10_000.0),
            scaling,
            local_theta: local_theta.or(self.rope_local_theta),
            skip_every: self.rope_skip_every,
        })
    }

    fn yarn(&self, keys: &Keys<'_>, factor: f64) -> Result<YarnSpec, ModelError> {
        let undo = keys.float("rope.scaling.yarn_log_multiplier")?;
        let usual = YarnSpec::usual_amplitude(factor, undo.unwrap_or(0.0));
        Ok(YarnSpec {
            factor,
            original: keys.u32("rope.scaling.original_context_length")?,
            // Defaults from the YaRN paper, which all implementations use.
            fast: keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            slow: keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            whole: self.yarn == Yarn::Whole,
            amplitude: keys
                .float("rope.scaling.yarn_attn_factor")?
                .unwrap_or(usual),
        })
    }

    /// Tensors of a block of a model, in the order of use.
    pub fn rules(&self, spec: &ModelSpec) -> impl Iterator<Item = &'static Rule> {
        let rules = self.layer.iter().flat_map(|group| group.iter());
        rules.filter(|rule| rule.tensor.present(spec))
    }

    /// Name and shape (row length first) of every tensor of a model of this family. Tensors outside
    /// the blocks come first.
    pub fn tensors(&self, spec: &ModelSpec) -> impl Iterator<Item = (String, &'static [Dim])> {
        let layers = (0..spec.layers).flat_map(|layer| {
            self.rules(spec)
                .map(move |rule| (rule.full_name(layer), rule.dims))
        });
        let shared = shared(spec)
            .iter()
            .map(|name| ((*name).to_owned(), &[Dim::RopePairs][..]));
        HEAD.iter()
            .filter(|(name, _)| !(spec.tied_embedding && *name == OUTPUT))
            .map(|(name, dims)| ((*name).to_owned(), *dims))
            .chain(shared)
            .chain(layers)
    }

    /// Names of the tensors outside the blocks that every block uses.
    pub fn shared_tensors(spec: &ModelSpec) -> impl Iterator<Item = &'static str> {
        shared(spec).iter().copied()
    }

    /// Returns true if a key (without the architecture's prefix) is read for this family.
    fn interprets(&self, key: &str) -> bool {
        let yarn = self.yarn != Yarn::Never && YARN.contains(&key);
        READ.contains(&key) || yarn || self.reads.contains(&key)
    }

    fn refuse_unknown_keys(&self, gguf: &Gguf) -> Result<(), ModelError> {
        for (key, value) in gguf.metadata() {
            let Some(rest) = key
                .strip_prefix(self.architecture)
                .and_then(|k| k.strip_prefix('.'))
            else {
                continue;
            };
            if self.interprets(rest) {
                continue;
            }
            match NEUTRAL.iter().find(|(key, _)| *key == rest) {
                Some((_, only)) if only.accepts(value) => {}
                _ => {
                    return Err(ModelError::Unsupported {
                        what: format!("metadata {key:?} = {value}"),
                        architecture: self.architecture,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Metadata key (without the architecture's prefix) from which a field of [`ModelSpec`] is read.
fn key_of(field: &'static str) -> &'static str {
    match field {
        "layers" => "block_count",
        "width" => "embedding_length",
        "heads" => "attention.head_count",
        "kv_heads" => "attention.head_count_kv",
        "head_dim" => "attention.key_length",
        "ffn" => "feed_forward_length",
        "vocab" => "vocab_size",
        "context" => "context_length",
        "norm_eps" => "attention.layer_norm_rms_epsilon",
        "rope.dims" => "rope.dimension_count",
        "rope.theta" => "rope.freq_base",
        "rope.local_theta" => "rope.freq_base_swa",
        "rope.scaling.amplitude" => "rope.scaling.attn_factor",
        "rope.scaling.yarn.amplitude" => "rope.scaling.yarn_attn_factor",
        "rope.scaling.original" => "rope.scaling.original_context_length",
        "rope.scaling.fast" => "rope.scaling.yarn_beta_fast",
        "rope.scaling.slow" => "rope.scaling.yarn_beta_slow",
        "experts.count" => "expert_count",
        "experts.used" => "expert_used_count",
        "attention.window.positions" => "attention.sliding_window",
        "attention.latent.queries" => "attention.q_lora_rank",
        "attention.latent.keys" => "attention.kv_lora_rank",
        "attention.latent.values" => "attention.value_length",
        "attention.temperature.scale" => "attention.temperature_scale",
        "attention.temperature.positions" => "rope.scaling.original_context_length",
        "attention.softcap" => "attn_logit_softcapping",
        "scales.embedding" => "embedding_scale",
        "scales.residual" => "residual_scale",
        "scales.logits" => "logit_scale",
        "scales.logit_softcap" => "final_logit_softcapping",
        other => other,
    }
}

/// Vocabulary size: from the metadata, or else from the embedding tensor. (The check of the shapes
/// verifies that the two agree.)
fn vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<u32, ModelError> {
    let from_tensor = match gguf.tensor(EMBEDDING).map(|info| info.dims.as_slice()) {
        Some(&[_, rows]) => u32::try_from(rows).ok(),
        _ => None,
    };
    let from_metadata = keys.optional_u32("vocab_size")?;
    from_metadata
        .or(from_tensor)
        .ok_or_else(|| keys.missing("vocab_size"))
}

/// Reader of a file's metadata keys. Keys that the family does not read count as missing.
struct Keys<'a> {
    gguf: &'a Gguf,
    family: &'a Family,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.family.architecture)
    }

    fn bad(&self, key: &str, reason: &'static str) -> ModelError {
        ModelError::Hyperparameter {
            key: self.full(key),
            reason,
        }
    }

    fn missing(&self, key: &str) -> ModelError {
        MetadataError::Missing(self.full(key)).into()
    }

    fn u32(&self, key: &str) -> Result<u32, ModelError> {
        self.optional_u32(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        match self.family.interprets(key) {
            true => Ok(self.gguf.u32(&self.full(key))?),
            false => Ok(None),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.family.interprets(key) {
            true => Ok(self.gguf.f64(&self.full(key))?),
            false => Ok(None),
        }
    }

    /// A value beyond the range of f32 becomes infinite, which [`ModelSpec::check`] refuses.
    fn float32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.float(key)?.map(|value| value as f32))
    }
}
