//! Hyperparameters of a model file, read as its family prescribes.

use super::BOUNDARY_KEY;
use super::family::{Family, Presence, Yarn};
use super::keys::{Keys, LAYER_NORM_EPS, ORIGINAL_CONTEXT, PER_LAYER, RECURRENT, key_of};
use super::per_block::{Mixers, Windows, convolution, ffn, shared_keys};
use super::rules::{CORRECTION, EMBEDDING, OUTPUT, ROPE_FACTORS, ROPE_FACTORS_LONG};
use crate::error::ModelError;
use crate::gguf::{Gguf, Value};
use crate::schema::Lookup as _;
use crate::spec::{
    AttentionSpec, CacheDtype, DeltaSpec, ExpertSpec, GroupSpec, LatentSpec, LayerTensor,
    LeadingSpec, MAX_SIZE, MambaSpec, ModelSpec, PerLayerSpec, PredictionTables, RopeScaling,
    RopeSpec, ScaleSpec, SharedExpertSpec, TemperatureSpec, WindowSpec, YarnSpec,
};

/// Widths of keys and values of a head in absorbed latent attention.
const KEY_LENGTH: &str = "attention.key_length_mla";
const VALUE_LENGTH: &str = "attention.value_length_mla";
const YARN_CORRECTION: &str = "rope.scaling.yarn_log_multiplier";

impl Family {
    /// The hyperparameters of a file of this family.
    ///
    /// # Errors
    /// When a key is missing, of the wrong type, out of range or inconsistent with another, or when
    /// the file needs a feature that the engine does not implement.
    pub fn spec(&self, gguf: &Gguf) -> Result<ModelSpec, ModelError> {
        let keys = Keys { gguf, family: self };
        keys.refuse_unknown()?;

        let blocks = keys.required_integer("block_count")?;
        let prediction = keys.integer("nextn_predict_layers")?.unwrap_or(0);
        let layers = blocks
            .checked_sub(prediction)
            .ok_or_else(|| keys.bad("nextn_predict_layers", "must be below block_count"))?;
        let width = keys.required_integer("embedding_length")?;
        let heads = keys.required_integer("attention.head_count")?;
        let absorbed = keys.integer(KEY_LENGTH)?;
        let head_dim = match absorbed.or(keys.integer("attention.key_length")?) {
            Some(head_dim) => head_dim,
            None if heads > 0 && width.is_multiple_of(heads) => width / heads,
            None => return Err(keys.bad("attention.head_count", "must divide embedding_length")),
        };
        if self.latent_norm_eps.is_none()
            && keys
                .integer("attention.value_length")?
                .is_some_and(|dim| dim != head_dim)
        {
            return Err(keys.bad("attention.value_length", "must equal attention.key_length"));
        }
        let has = |layer, rule: &str| gguf.tensor(&format!("blk.{layer}.{rule}")).is_some();
        let experts = self.experts(&keys)?;
        let windows = Windows::read(&keys, layers)?;
        let mixers = Mixers::read(&keys, layers)?;
        let shared_keys = match mixers {
            Some(_) => None,
            None => shared_keys(&keys, layers)?,
        };
        let (kv_heads, convolution) = match &mixers {
            Some(mixers) => (mixers.kv_heads, None),
            None if self.convolution => convolution(&keys, layers)?,
            None => (windows.kv_heads(&keys, layers, false)?, None),
        };
        let expert_ffn = match experts {
            Some(_) => keys.integer("expert_feed_forward_length")?,
            None => None,
        };
        let mut rope = self.rope(&keys, head_dim)?;
        if rope.skip_every.is_some() {
            rope.skip_every = windows.global_every.or(rope.skip_every);
        }
        let mut attention = self.attention(&keys, &windows, (layers, width, heads))?;
        if attention.scale.is_none() {
            attention.scale = self.corrected_scale(&keys, &rope, head_dim)?;
        }
        let spec = ModelSpec {
            architecture: self.architecture.to_owned(),
            layers,
            width,
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim,
            ffn: match (expert_ffn, &mixers) {
                (Some(ffn), _) => ffn,
                (None, Some(mixers)) => mixers.ffn,
                (None, None) => ffn(&keys, layers)?,
            },
            vocab: vocab(gguf, &keys)?,
            context: keys.required_integer("context_length")?,
            norm_eps: self.norm_eps(&keys)?,
            rope,
            boundary: match gguf.str(BOUNDARY_KEY)? {
                None => self.boundary,
                Some(name) => name.parse().map_err(|_| ModelError::Hyperparameter {
                    key: BOUNDARY_KEY.to_owned(),
                    reason: "must be f16, bf16 or f32",
                })?,
            },
            tied_embedding: gguf.tensor(OUTPUT).is_none(),
            attention,
            activation: self.activation,
            experts,
            post_norms: self.lists(LayerTensor::AttnPostNorm),
            post_norm_eps: self.post_norm_eps,
            embedding_norm: self.embedding_norm,
            scales: self.scales(&keys, width, layers)?,
            delta: self.delta(&keys)?,
            convolution,
            mamba: self.mamba(&keys)?,
            mixers: mixers.map(|mixers| mixers.letters).unwrap_or_default(),
            single: self.mamba.is_some_and(|mamba| mamba.single),
            prediction,
            prediction_tables: match prediction {
                0 => PredictionTables::default(),
                // The check of the tensors requires that all of these blocks are alike.
                _ => PredictionTables {
                    embedding: has(layers, "nextn.embed_tokens.weight"),
                    output: has(layers, "nextn.shared_head_head.weight"),
                },
            },
            shared_keys,
            block_scale: self.lists(LayerTensor::BlockScale),
            per_layer: keys
                .integer(PER_LAYER)?
                .filter(|width| *width > 0)
                .map(|width| PerLayerSpec { width }),
            encoder: self.encoder(&keys, width)?,
        };
        spec.check().map_err(|error| {
            let key = match error.field {
                "norm_eps" => self.norm_eps_key(),
                "head_dim" if absorbed.is_some() => KEY_LENGTH,
                "attention.latent.values" if absorbed.is_some() => VALUE_LENGTH,
                field => key_of(field),
            };
            keys.bad(key, error.reason)
        })?;
        check_absorbed(&keys, &spec)?;
        check_kinds(&keys, &spec)?;
        Ok(spec)
    }

    /// Epsilon of the norms. Some files have it under another name, or under both.
    fn norm_eps(&self, keys: &Keys<'_>) -> Result<f32, ModelError> {
        let key = self.norm_eps_key();
        match (keys.float32(key)?, keys.float32(LAYER_NORM_EPS)?) {
            (Some(eps), Some(other)) if eps != other => {
                Err(keys.bad(key, "must equal attention.layer_norm_epsilon"))
            }
            (eps, other) => eps.or(other).ok_or_else(|| keys.missing(key)),
        }
    }

    fn norm_eps_key(&self) -> &'static str {
        match self.lists(LayerTensor::AttnSumNorm) {
            true => LAYER_NORM_EPS,
            false => "attention.layer_norm_rms_epsilon",
        }
    }

    fn attention(
        &self,
        keys: &Keys<'_>,
        windows: &Windows,
        (layers, width, heads): (u32, u32, u32),
    ) -> Result<AttentionSpec, ModelError> {
        let window = keys
            .integer("attention.sliding_window")?
            .filter(|positions| *positions > 0)
            .map(|positions| WindowSpec {
                // Files of encoders state the positions on both sides together.
                positions: match self.encoder {
                    Some(_) => positions / 2 + 1,
                    None => positions,
                },
                global_every: windows.global_every.or(self.global_every),
                heads: None,
            });
        let window = match window {
            Some(window) => Some(WindowSpec {
                heads: windows.heads(keys, layers)?,
                ..window
            }),
            None => None,
        };
        Ok(AttentionSpec {
            qkv_bias: match self.qkv_bias {
                Presence::Never => false,
                Presence::Always => true,
                // The check of the tensors requires all of them.
                Presence::IfStored => keys.gguf.tensor("blk.0.attn_q.bias").is_some(),
            },
            qk_norm: self.qk_norm.filter(|_| {
                let stored = || keys.gguf.tensor("blk.0.attn_q_norm.weight").is_some();
                !self.qk_norm_if_stored || stored()
            }),
            latent: self.latent(keys, width, heads)?,
            output_bias: self.lists(LayerTensor::AttnOutputBias),
            output_gate: self.output_gate,
            gate_matrix: self.lists(LayerTensor::AttnGate),
            sinks: self.lists(LayerTensor::AttnSinks),
            scale: match self.scaled_by_width.contains(&layers) && heads > 0 {
                true => Some(1.0 / ((width / heads) as f32).sqrt()),
                false => keys.float32("attention.scale")?.or(self.attention_scale),
            },
            softcap: keys.float32("attn_logit_softcapping")?,
            window,
            temperature: match keys.float32("attention.temperature_scale")? {
                None | Some(0.0) => None,
                Some(scale) => Some(TemperatureSpec {
                    scale,
                    positions: keys.required_integer(ORIGINAL_CONTEXT)?,
                }),
            },
            value_norm: self.value_norm,
            // The check of the tensors requires the same of all these blocks.
            keys_as_values: windows.global_every.is_some_and(|every| {
                let name = format!("blk.{}.attn_v.weight", every - 1);
                keys.gguf.tensor(&name).is_none()
            }),
            cache: CacheDtype::F16,
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
        let absorbed = keys.integer(KEY_LENGTH)?.is_some();
        let values = match absorbed {
            true => Some(keys.required_integer(VALUE_LENGTH)?),
            false => keys.integer("attention.value_length")?,
        };
        let rank = "attention.q_lora_rank";
        Ok(Some(LatentSpec {
            queries: match self.lists(LayerTensor::AttnQ) {
                true => keys.integer(rank)?.filter(|rank| *rank > 0),
                false => Some(keys.required_integer(rank)?),
            },
            keys: keys.required_integer("attention.kv_lora_rank")?,
            values: values.unwrap_or(width.checked_div(heads).unwrap_or(0)),
            norm_eps,
            absorbed,
        }))
    }

    /// Factor of the scores with YaRN's correction, if the family has it and the file asks for it.
    fn corrected_scale(
        &self,
        keys: &Keys<'_>,
        rope: &RopeSpec,
        head_dim: u32,
    ) -> Result<Option<f32>, ModelError> {
        let Some(RopeScaling::Yarn(yarn)) = rope.scaling.filter(|_| self.yarn_scales_scores) else {
            return Ok(None);
        };
        let growth = keys.number(YARN_CORRECTION)?.unwrap_or(0.0);
        let factor = 1.0 + growth * libm::log(yarn.factor);
        let scale = factor * factor / f64::from(head_dim).sqrt();
        Ok(Some(scale as f32).filter(|_| growth != 0.0))
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
                None if self.logits_multiplied => {
                    let divisor = |scale: f32| (1.0 / f64::from(scale)) as f32;
                    factor("logit_scale")?.map(divisor)
                }
                None => factor("logit_scale")?,
            },
            logit_softcap: keys.float32("final_logit_softcapping")?,
        })
    }

    fn experts(&self, keys: &Keys<'_>) -> Result<Option<ExpertSpec>, ModelError> {
        let count = keys.integer("expert_count")?.unwrap_or(0);
        let used = match (count, keys.integer("expert_used_count")?) {
            (0, None | Some(0)) => return Ok(None),
            (0, Some(_)) => {
                return Err(keys.bad("expert_used_count", "must be 0 without experts"));
            }
            (_, None) => return Err(keys.missing("expert_used_count")),
            (_, Some(used)) => used,
        };
        let correction = match self.correction {
            Presence::Never => false,
            Presence::Always => true,
            Presence::IfStored => {
                let mut names = keys.gguf.tensors().iter().map(|info| &info.name);
                names.any(|name| name.ends_with(CORRECTION))
            }
        };
        let leading = keys.integer("leading_dense_block_count")?.unwrap_or(0);
        let groups = keys.integer("expert_group_count")?.unwrap_or(0);
        Ok(Some(ExpertSpec {
            count,
            used,
            normalise: keys
                .flag("expert_weights_norm")?
                .unwrap_or(self.experts_normalised),
            bias: self.lists(LayerTensor::RouterBias),
            shared: self.shared_expert(keys)?,
            leading: match leading {
                0 => None,
                blocks => Some(LeadingSpec {
                    blocks,
                    ffn: keys.required_integer("feed_forward_length")?,
                }),
            },
            // llama.cpp's numbers. Files of GLM-4.7 omit the key.
            sigmoid: match keys.integer("expert_gating_func")? {
                None | Some(0) => correction,
                Some(1) => false,
                Some(2) => true,
                Some(_) => return Err(keys.bad("expert_gating_func", "must be 1 or 2")),
            },
            correction,
            groups: match groups {
                0 | 1 => None,
                count => Some(GroupSpec {
                    count,
                    used: keys.required_integer("expert_group_used_count")?,
                }),
            },
            scale: keys
                .float32("expert_weights_scale")?
                .filter(|scale| ![0.0, 1.0].contains(scale)),
            norms: self.lists(LayerTensor::ExpertNorm),
        }))
    }

    fn shared_expert(&self, keys: &Keys<'_>) -> Result<Option<SharedExpertSpec>, ModelError> {
        if !self.lists(LayerTensor::SharedUp) {
            return Ok(None);
        }
        let own = "expert_shared_feed_forward_length";
        if self.lists(LayerTensor::ExpertNorm) {
            let ffn = keys.required_integer("feed_forward_length")?;
            return Ok(Some(SharedExpertSpec { ffn, plain: true }));
        }
        if self.lists(LayerTensor::SharedScore) {
            let ffn = keys.required_integer(own)?;
            return Ok(Some(SharedExpertSpec { ffn, plain: false }));
        }
        if self.reads_key(own) {
            let ffn = keys.integer(own)?.filter(|ffn| *ffn > 0);
            return Ok(ffn.map(|ffn| SharedExpertSpec { ffn, plain: true }));
        }
        // Several experts that all rows go through are stored side by side, as one.
        let each = keys.required_integer("expert_feed_forward_length")?;
        let experts = keys.required_integer("expert_shared_count")?;
        let ffn = each.checked_mul(experts).filter(|ffn| *ffn <= MAX_SIZE);
        let reason = "must be at most 16777216 divided by expert_feed_forward_length";
        match ffn.ok_or_else(|| keys.bad("expert_shared_count", reason))? {
            0 => Ok(None),
            ffn => Ok(Some(SharedExpertSpec { ffn, plain: true })),
        }
    }

    fn delta(&self, keys: &Keys<'_>) -> Result<Option<DeltaSpec>, ModelError> {
        let Some(family) = self.delta else {
            return Ok(None);
        };
        let (value_heads, value_width) = recurrent_heads(keys)?;
        Ok(Some(DeltaSpec {
            // llama.cpp's default.
            attention_every: keys.integer("full_attention_interval")?.unwrap_or(4),
            convolution: keys.required_integer("ssm.conv_kernel")?,
            key_heads: keys.required_integer("ssm.group_count")?,
            value_heads,
            key_width: keys.required_integer("ssm.state_size")?,
            value_width,
            tiled: family.tiled,
            norm_eps: family.norm_eps,
        }))
    }

    fn mamba(&self, keys: &Keys<'_>) -> Result<Option<MambaSpec>, ModelError> {
        if self.mamba.is_none() {
            return Ok(None);
        }
        let (heads, head_width) = recurrent_heads(keys)?;
        Ok(Some(MambaSpec {
            convolution: keys.required_integer("ssm.conv_kernel")?,
            heads,
            groups: keys.required_integer("ssm.group_count")?,
            head_width,
            state_rows: keys.required_integer("ssm.state_size")?,
        }))
    }

    fn rope(&self, keys: &Keys<'_>, head_dim: u32) -> Result<RopeSpec, ModelError> {
        let factor = keys.number("rope.scaling.factor")?;
        let unsupported = |key: &str, value: &str| {
            let value: String = value.chars().take(60).collect();
            Err(ModelError::Unsupported {
                what: format!("metadata {:?} = {value:?}", keys.full(key)),
                architecture: self.architecture,
            })
        };
        let stored = match self.rope_factors {
            Presence::Never => false,
            // The check of the tensors requires them.
            Presence::Always => true,
            Presence::IfStored => keys.gguf.tensor(ROPE_FACTORS).is_some(),
        };
        let long = self.long_rope && keys.gguf.tensor(ROPE_FACTORS_LONG).is_some();
        let scaling = match keys.gguf.str(&keys.full("rope.scaling.type"))? {
            None | Some("none" | "longrope") if long => {
                let context = keys.required_integer("context_length")?;
                let key = ORIGINAL_CONTEXT;
                let original = match self.latent_norm_eps {
                    // The converter of these models omits the key; llama.cpp uses the context.
                    Some(_) => keys.integer(key)?.unwrap_or(context),
                    None => keys.required_integer(key)?,
                };
                Some(RopeScaling::Long {
                    long: context > original,
                    amplitude: keys.number("rope.scaling.attn_factor")?.unwrap_or(1.0),
                })
            }
            None | Some("none") => match factor {
                None | Some(1.0) => stored.then_some(RopeScaling::Factors),
                Some(factor) => {
                    return unsupported("rope.scaling.factor", &factor.to_string());
                }
            },
            Some("linear") if !stored => {
                let factor = keys.required_number("rope.scaling.factor")?;
                (factor != 1.0).then_some(RopeScaling::Linear { factor })
            }
            Some("yarn") if !stored && self.yarn != Yarn::Never => {
                let yarn = self.yarn(keys)?;
                let neutral = yarn.factor == 1.0 && yarn.amplitude == 1.0;
                (!neutral).then_some(RopeScaling::Yarn(yarn))
            }
            Some(other) => return unsupported("rope.scaling.type", other),
        };
        // llama.cpp's switch for RoPE in this family.
        let switch = "rope.scaling.finetuned";
        if self.reads_key(switch) && keys.flag(switch)? != Some(false) {
            return Err(keys.bad(
                switch,
                "must be false: RoPE is not supported in this family",
            ));
        }
        let local_theta = keys.number("rope.freq_base_swa")?;
        Ok(RopeSpec {
            kind: self.rope,
            dims: keys.integer("rope.dimension_count")?.unwrap_or(head_dim),
            // llama.cpp's default.
            theta: keys.number("rope.freq_base")?.unwrap_or(10_000.0),
            scaling,
            local_theta: local_theta.or(self.rope_local_theta),
            skip_every: self.rope_skip_every,
        })
    }

    fn yarn(&self, keys: &Keys<'_>) -> Result<YarnSpec, ModelError> {
        let factor = keys.required_number("rope.scaling.factor")?;
        let undo = keys.number(YARN_CORRECTION)?.unwrap_or(0.0);
        let usual = match self.yarn_scales_scores && undo != 0.0 {
            true => 1.0,
            false => YarnSpec::usual_amplitude(factor, undo),
        };
        Ok(YarnSpec {
            factor,
            original: keys.required_integer(ORIGINAL_CONTEXT)?,
            // Defaults from the YaRN paper, which all implementations use.
            fast: keys.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            slow: keys.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            whole: self.yarn == Yarn::Whole,
            amplitude: keys
                .number("rope.scaling.yarn_attn_factor")?
                .unwrap_or(usual),
        })
    }
}

/// Heads of a recurrence, and values per head.
fn recurrent_heads(keys: &Keys<'_>) -> Result<(u32, u32), ModelError> {
    let heads = keys.required_integer("ssm.time_step_rank")?;
    let values = keys.required_integer("ssm.inner_size")?;
    match heads > 0 && values.is_multiple_of(heads) {
        true => Ok((heads, values / heads)),
        false => Err(keys.bad("ssm.inner_size", "must be a multiple of ssm.time_step_rank")),
    }
}

/// Compares the widths of the cache that a file states for absorbed latent attention with those
/// that follow.
fn check_absorbed(keys: &Keys<'_>, spec: &ModelSpec) -> Result<(), ModelError> {
    let Some(latent) = spec.attention.latent.filter(|latent| latent.absorbed) else {
        return Ok(());
    };
    for (key, width, reason) in [
        (
            "attention.key_length",
            spec.block(0).key_width(),
            "must be the sum of attention.kv_lora_rank and rope.dimension_count",
        ),
        (
            "attention.value_length",
            latent.keys,
            "must equal attention.kv_lora_rank",
        ),
    ] {
        if keys.integer(key)?.is_some_and(|stated| stated != width) {
            return Err(keys.bad(key, reason));
        }
    }
    Ok(())
}

/// Compares the kinds of blocks that a file lists with those that its family derives.
fn check_kinds(keys: &Keys<'_>, spec: &ModelSpec) -> Result<(), ModelError> {
    let Some(listed) = keys.gguf.get(&keys.full(RECURRENT)) else {
        return Ok(());
    };
    let same = match listed {
        Value::Array(list) => {
            let blocks = spec.layers.saturating_add(spec.prediction);
            let kinds = (0..blocks).map(|layer| Value::Bool(spec.block(layer).is_recurrent()));
            list.len() == blocks as usize && list.iter().eq(kinds)
        }
        _ => false,
    };
    match same {
        true => Ok(()),
        false => Err(keys.bad(RECURRENT, "must follow full_attention_interval")),
    }
}

/// Vocabulary size: from the metadata, or else from the embedding tensor. (The check of the shapes
/// verifies that the two agree.)
fn vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<u32, ModelError> {
    let from_tensor = match gguf.tensor(EMBEDDING).map(|info| info.dims.as_slice()) {
        Some(&[_, rows]) => u32::try_from(rows).ok(),
        _ => None,
    };
    let from_metadata = keys.integer("vocab_size")?;
    from_metadata
        .or(from_tensor)
        .ok_or_else(|| keys.missing("vocab_size"))
}
