//! RoPE in `config.json`, in both of its formats.

use serde_json::{Map, Value as Json};

use super::class::{Class, RopeBase, RopeDims};
use super::config::Config;
use super::error::ImportError;
use super::gemma4;
use super::json::{bad, present, refuse_others, required, typed};
use crate::families::{ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::schema::Lookup as _;

/// Largest number of RoPE factors per head.
const MAX_FACTORS: usize = 1 << 12;

type Object = Map<String, Json>;

/// RoPE settings of a directory.
#[derive(Clone, PartialEq, Default, Debug)]
pub(super) struct Rope {
    /// Base of the frequencies.
    pub(super) theta: Option<f64>,
    /// Fraction of a head that is rotated.
    pub(super) partial: Option<f64>,
    /// Further metadata, with keys after the architecture's prefix.
    pub(super) metadata: Vec<(&'static str, Value<'static>)>,
    /// Tensors of RoPE factors: name and values.
    pub(super) tensors: Vec<(&'static str, Vec<f32>)>,
}

/// Accepted keys: for all kinds of RoPE, and for each kind.
const COMMON: &[&str] = &["partial_rotary_factor", "rope_theta", "rope_type", "type"];
/// Keys for positions in images; those of text are the same on all axes.
const IMAGES: &[&str] = &["mrope_interleaved", "mrope_section"];
const YARN: &[(&str, &str)] = &[
    ("extrapolation_factor", "rope.scaling.yarn_ext_factor"),
    ("attention_factor", "rope.scaling.yarn_attn_factor"),
    ("attn_factor", "rope.scaling.yarn_attn_factor"),
    ("beta_fast", "rope.scaling.yarn_beta_fast"),
    ("beta_slow", "rope.scaling.yarn_beta_slow"),
];

/// Whether YaRN's ramp begins and ends at whole pairs.
const TRUNCATE: &str = "truncate";
/// RoPE type of models whose attention temperature grows with the position, their keys beside
/// YaRN's, and the defaults of a model file.
const GROWING: &str = "ministral3";
const GROWTH: &[(&str, &str)] = &[
    ("mscale_all_dim", "rope.scaling.yarn_log_multiplier"),
    ("llama_4_scaling_beta", "attention.temperature_scale"),
];
const MSCALE: &str = "mscale";
/// YaRN's correction of classes in which it multiplies the scores.
const MSCALE_ALL: &str = "mscale_all_dim";

impl Rope {
    /// Reads RoPE from a configuration whose other keys are known.
    pub(super) fn read(config: &Config) -> Result<Self, ImportError> {
        let Config { values, class, .. } = config;
        let object = |key: &str| typed(values, key, "must be an object", Json::as_object);
        let empty = Map::new();
        let outer = match (object("rope_parameters")?, object("rope_scaling")?) {
            (Some(new), Some(old)) if !same(new, old) => {
                let reason = "differs from rope_parameters: leave one of the two in config.json";
                return Err(bad("rope_scaling", &Json::Object(old.clone()), reason));
            }
            (Some(map), _) | (None, Some(map)) => map,
            (None, None) => &empty,
        };
        let (global, local) = parts(outer)?;
        let or_outside = |key: &str| match global.number(key)? {
            Some(value) => Ok(Some(value)),
            None => values.number(key),
        };
        let original = global.integer(ORIGINAL)?.or(values.integer(ORIGINAL)?);
        let local_theta = match local {
            Some(local) => local.number("rope_theta")?,
            None => values.number("rope_local_base_freq")?,
        };
        let mut rope = Self {
            theta: match or_outside("rope_theta")? {
                Some(theta) => Some(theta),
                None => values.number("rotary_emb_base")?,
            },
            partial: partial(or_outside("partial_rotary_factor")?, class)?,
            ..Self::default()
        };
        if let Some(theta) = local_theta {
            rope.says("rope.freq_base_swa", theta);
        }
        rope.scale(global, config, original)?;
        Ok(rope)
    }

    /// Writes the metadata of RoPE.
    pub(super) fn write(&self, config: &Config, writer: &mut Writer) -> Result<(), ImportError> {
        let full = |key: &str| format!("{}.{key}", config.class.architecture);
        let dims = self.dims(config)?;
        if let Some(dims) = dims {
            writer.set(&full("rope.dimension_count"), Value::U32(dims))?;
        }
        let theta = match (config.class.rope_base, self.theta) {
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
        for (key, value) in &self.metadata {
            writer.set(&full(key), *value)?;
        }
        Ok(())
    }

    /// Rotary dimensions of a head, if they are written.
    fn dims(&self, config: &Config) -> Result<Option<u32>, ImportError> {
        let partial = self.partial;
        let head = config.head_dim()?;
        let part = |of: u32, partial: f64| (f64::from(of) * partial) as u32;
        Ok(match config.class.rope_dims {
            RopeDims::Omitted => None,
            RopeDims::Head => Some(head),
            RopeDims::Proportional => Some(gemma4::global_head_dim(&config.values)?),
            RopeDims::Half => Some(part(head, partial.unwrap_or(0.5))),
            RopeDims::Quarter => Some(part(head, partial.unwrap_or(0.25))),
            RopeDims::OfWidth => {
                Some(config.over_heads(part(config.width()?, partial.unwrap_or(1.0)))?)
            }
        })
    }

    fn says(&mut self, key: &'static str, number: f64) {
        self.metadata.push((key, Value::F32(number as f32)));
    }

    /// Reads the scaling of the frequencies.
    fn scale(
        &mut self,
        rope: &Object,
        config: &Config,
        original: Option<u32>,
    ) -> Result<(), ImportError> {
        let Config { values, class, .. } = config;
        let kind = match present(rope, "rope_type").or_else(|| present(rope, "type")) {
            None => "default",
            Some(value) => match value.as_str() {
                Some(kind) if kind == "default" || class.ropes.contains(&kind) => kind,
                _ => {
                    let reason = "this kind of RoPE is not supported";
                    return Err(bad("rope_type", value, reason));
                }
            },
        };
        let needs = |key: &str| required(format!("rope_scaling.{key}"), rope.number(key)?);
        let needs_original = || required(ORIGINAL, original.filter(|n| *n > 0));
        let grows = present(values, "model_type").is_some_and(|t| t == GROWING);
        if grows && kind != "yarn" {
            let reason = format!("models of the type {GROWING} require YaRN");
            return Err(bad("rope_type", &Json::from(kind), reason));
        }
        let mut known = vec![ORIGINAL];
        let kind_key = "rope.scaling.type";
        match kind {
            "linear" => {
                known.push("factor");
                self.metadata.push((kind_key, Value::String("linear")));
                self.says("rope.scaling.factor", needs("factor")?);
            }
            "llama3" => {
                known.extend(["factor", "low_freq_factor", "high_freq_factor"]);
                let numbers = [
                    needs("factor")?,
                    needs("low_freq_factor")?,
                    needs("high_freq_factor")?,
                    f64::from(needs_original()?),
                ];
                let factors = llama3(config.head_dim()?, self.theta.unwrap_or(10_000.0), numbers);
                self.tensors.push((ROPE_FACTORS, factors));
            }
            "proportional" => {
                let dims = gemma4::global_head_dim(&config.values)?;
                let factors = proportional(dims, self.partial.unwrap_or(1.0));
                self.tensors.push((ROPE_FACTORS, factors));
            }
            _ if class.rope_dims == RopeDims::Proportional => {
                let reason = format!("must be \"proportional\" for {}", class.name);
                return Err(bad("rope_type", &Json::from(kind), reason));
            }
            "longrope" | "su" => {
                known.extend(["short_factor", "long_factor"]);
                self.tensors
                    .push((ROPE_FACTORS_SHORT, factors(rope, "short_factor")?));
                self.tensors
                    .push((ROPE_FACTORS_LONG, factors(rope, "long_factor")?));
                let context = config.context()?;
                match original {
                    Some(original) if class.long_rope_plain && original != context => {
                        let reason = format!("must be max_position_embeddings, {context}");
                        return Err(bad(ORIGINAL, &Json::from(original), reason));
                    }
                    _ if class.long_rope_plain => {}
                    original => {
                        let factor = long_amplitude(context, original.unwrap_or(4096));
                        self.says("rope.scaling.attn_factor", factor);
                    }
                }
            }
            "yarn" => {
                known.push("factor");
                known.extend(YARN.iter().map(|(key, _)| *key));
                self.metadata.push((kind_key, Value::String("yarn")));
                self.says("rope.scaling.factor", needs("factor")?);
                let key = "rope.scaling.original_context_length";
                self.metadata.push((key, Value::U32(needs_original()?)));
                for (from, to) in YARN {
                    let taken = self.metadata.iter().any(|(key, _)| key == to);
                    if let Some(value) = rope.number(from)?.filter(|_| !taken) {
                        self.says(to, value);
                    }
                }
                if grows {
                    known.push(MSCALE);
                    known.extend(GROWTH.iter().map(|(key, _)| *key));
                    for (from, to) in GROWTH {
                        self.says(to, needs(from)?);
                    }
                    let mscale = needs(MSCALE)?;
                    if mscale != 1.0 {
                        return Err(bad(MSCALE, &Json::from(mscale), "must be 1"));
                    }
                }
                if class.yarn_scales_scores {
                    known.extend([MSCALE, MSCALE_ALL]);
                    let (own, all) = (rope.number(MSCALE)?, rope.number(MSCALE_ALL)?);
                    if own != all {
                        let reason = "must equal mscale_all_dim: model files cannot state it";
                        return Err(bad(MSCALE, &Json::from(own), reason));
                    }
                    if let Some(all) = all {
                        self.says("rope.scaling.yarn_log_multiplier", 0.1 * all);
                    }
                }
                known.push(TRUNCATE);
                let whole = present(rope, TRUNCATE);
                let (accepted, shown) = match whole {
                    None => (!class.yarn_exact, Json::Null),
                    Some(whole) => (*whole == Json::Bool(!class.yarn_exact), whole.clone()),
                };
                if !accepted {
                    let reason = format!("this value is not supported for {}", class.name);
                    return Err(bad(TRUNCATE, &shown, reason));
                }
            }
            _ => {}
        }
        if class.rope_dims == RopeDims::Quarter {
            known.extend(IMAGES);
        }
        known.extend(COMMON);
        let reason = format!("this key is unknown for RoPE of the kind {kind:?}");
        refuse_others(rope, &known, &reason)
    }
}

const ORIGINAL: &str = "original_max_position_embeddings";

/// Whether `rope_parameters` and `rope_scaling`, its older name, agree. If both exist,
/// `transformers` uses the latter, and llama.cpp's converter the former.
fn same(new: &Object, old: &Object) -> bool {
    let plain = |map: &Object| -> Object {
        let entries = map.iter().filter(|(_, value)| !value.is_null());
        let entries = entries.map(|(key, value)| match key.as_str() {
            "type" => ("rope_type".to_owned(), value.clone()),
            key => (key.to_owned(), value.clone()),
        });
        entries.collect()
    };
    let (mut new, old) = (plain(new), plain(old));
    // Older files have these at the top level.
    for key in ["rope_theta", "partial_rotary_factor"] {
        if !old.contains_key(key) {
            new.remove(key);
        }
    }
    new == old
}

/// Settings of blocks without and with a window, if the file distinguishes them.
fn parts(outer: &Object) -> Result<(&Object, Option<&Object>), ImportError> {
    let (global, local) = ("full_attention", "sliding_attention");
    let part = |key: &str| match required(format!("rope_parameters.{key}"), outer.get(key))? {
        Json::Object(map) => Ok(map),
        other => Err(bad(key, other, "must be an object")),
    };
    if !outer.contains_key(global) && !outer.contains_key(local) {
        return Ok((outer, None));
    }
    let inner = part(local)?;
    let plain = |key: &str, value: &Json| match key {
        "rope_theta" => true,
        _ => value.is_null() || value.as_str() == Some("default"),
    };
    match inner.iter().find(|(key, value)| !plain(key, value)) {
        Some((key, value)) => {
            let reason = "RoPE in blocks with a window is not scaled here";
            Err(bad(key, value, reason))
        }
        None => Ok((part(global)?, Some(inner))),
    }
}

/// Fraction of a head that is rotated, if the class has one.
fn partial(fraction: Option<f64>, class: &Class) -> Result<Option<f64>, ImportError> {
    let has = matches!(
        class.rope_dims,
        RopeDims::OfWidth | RopeDims::Half | RopeDims::Quarter | RopeDims::Proportional
    );
    match fraction {
        Some(1.0) if !has => Ok(None),
        Some(part) if !has || !(0.0..=1.0).contains(&part) => {
            let reason = "must be from 0 to 1, and 1 in classes without partial RoPE";
            Err(bad("partial_rotary_factor", &Json::from(part), reason))
        }
        part => Ok(part),
    }
}

fn factors(rope: &Object, key: &str) -> Result<Vec<f32>, ImportError> {
    let value = required(format!("rope_scaling.{key}"), present(rope, key))?;
    let list = value.as_array().filter(|list| list.len() <= MAX_FACTORS);
    let numbers = list.and_then(|list| {
        let numbers = list.iter().map(|n| n.as_f64().filter(|n| n.is_finite()));
        numbers.map(|n| Some(n? as f32)).collect()
    });
    numbers.ok_or_else(|| bad(key, value, "must be a list of numbers, one for each pair"))
}

/// LongRoPE's factor of sines and cosines.
fn long_amplitude(context: u32, original: u32) -> f64 {
    let scale = f64::from(context) / f64::from(original.max(1));
    match scale > 1.0 {
        true => (1.0 + scale.ln() / f64::from(original).ln()).sqrt(),
        false => 1.0,
    }
}

/// Llama 3.1's divisors of the pairs' frequencies: 1 for fast pairs, `factor` for slow ones,
/// interpolated in between. In f32, as the converter computes it.
fn llama3(dims: u32, theta: f64, [factor, low, high, original]: [f64; 4]) -> Vec<f32> {
    let turn = 2.0 * std::f64::consts::PI;
    let longest = (original / low) as f32;
    let shortest = (original / high) as f32;
    let of_pair = |pair: u32| {
        let exponent = (2 * pair) as f32 / dims as f32;
        let frequency = 1.0 / (theta.powf(f64::from(exponent)) as f32);
        let wave = turn as f32 / frequency;
        if wave < shortest {
            1.0
        } else if wave > longest {
            factor as f32
        } else {
            let smooth = (original as f32 / wave - low as f32) / (high - low) as f32;
            1.0 / ((1.0 - smooth) / factor as f32 + smooth)
        }
    };
    (0..(dims / 2).min(MAX_FACTORS as u32))
        .map(of_pair)
        .collect()
}

/// Divisors of the pairs' frequencies: 1 for the first ones, and for the others, which do not
/// rotate, the converter's number.
fn proportional(dims: u32, partial: f64) -> Vec<f32> {
    let rotated = (f64::from(dims) * partial / 2.0) as u32;
    let of_pair = |pair: u32| if pair < rotated { 1.0 } else { 1e30 };
    (0..(dims / 2).min(MAX_FACTORS as u32))
        .map(of_pair)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3s_factors_are_the_converters() {
        // From Llama 3.2 (64 wide) and 3.1 (128 wide), by the converter under torch 2.15.
        let of_3_2: &[f32] = &[1.651_329_3, 3.292_262_8, 9.666_731];
        let of_3_1: &[f32] = &[
            1.207_483_9,
            1.553_414_6,
            2.026_313,
            2.694_53,
            3.684_253_2,
            5.257_327,
        ];
        for (dims, factor, between) in [(64, 32.0, of_3_2), (128, 8.0, of_3_1)] {
            let factors = llama3(dims, 500_000.0, [factor, 1.0, 4.0, 8192.0]);
            let found: Vec<f32> = factors
                .iter()
                .copied()
                .filter(|f| ![1.0, factor as f32].contains(f))
                .collect();
            assert_eq!(found, between);
            assert_eq!(factors.len(), dims as usize / 2);
        }
    }
}
