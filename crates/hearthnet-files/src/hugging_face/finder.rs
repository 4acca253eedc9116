//! Search for the tensors of a model in a directory.

use std::collections::BTreeSet;
use std::ops::Range;

use safetensors::Dtype;

use super::class::Class;
use super::config::Config;
use super::delta;
use super::error::ImportError;
use super::mamba;
use super::planned::{Change, GROUP, Pick, Planned, Source};
use super::shards::{PART_BYTES, Shards, Stored, wrong_type};
use crate::families::{EMBEDDING, Family, OUTPUT, OUTPUT_NORM, in_block, is_convolution};
use crate::gguf::TensorType;
use crate::spec::{DeltaSpec, Mixer, ModelSpec};

/// Finds the tensors of a directory.
pub(super) struct Finder<'a> {
    pub(super) shards: &'a Shards,
    pub(super) class: &'static Class,
    /// Name prefix of its tensors, and of the output matrix.
    prefix: (&'static str, &'static str),
    used: BTreeSet<String>,
    /// Blocks for multi-token prediction.
    left_out: Range<u32>,
}

impl<'a> Finder<'a> {
    pub(super) fn new(shards: &'a Shards, class: &'static Class) -> Result<Self, ImportError> {
        let mut outer = class.outer.iter();
        let own = outer.find(|(ours, _)| *ours == EMBEDDING);
        let own = own.map_or("embed_tokens.weight", |(_, theirs)| *theirs);
        let embedding = |model: &str| format!("{model}{own}");
        let mut prefixes = class.prefixes.iter();
        let found = prefixes.find(|(model, _)| shards.get(&embedding(model)).is_some());
        let Some(prefix) = found.copied() else {
            let tensor = class.prefixes.first().map(|(model, _)| embedding(model));
            return Err(missing(&tensor.unwrap_or_default()));
        };
        Ok(Self {
            shards,
            class,
            prefix,
            used: BTreeSet::new(),
            left_out: 0..0,
        })
    }

    /// Whether the directory has this tensor of the model file.
    pub(super) fn has(&self, name: &str) -> bool {
        self.name_of(name, 0)
            .is_some_and(|name| self.shards.get(&name).is_some())
    }

    /// Whether the model has a separate output matrix.
    pub(super) fn has_output(&self) -> bool {
        !self.class.always_tied && self.has(OUTPUT)
    }

    /// Name of a tensor in the directory; `expert` selects among the tensors of experts.
    fn name_of(&self, name: &str, expert: u32) -> Option<String> {
        let (model, head) = self.prefix;
        if let Some((ours, theirs)) = self.class.outer.iter().find(|(ours, _)| *ours == name) {
            let prefix = match *ours {
                OUTPUT => head,
                _ if theirs.contains('/') => "",
                _ => model,
            };
            return Some(format!("{prefix}{theirs}"));
        }
        let (layer, rule) = in_block(name)?;
        let (stem, ending) = rule.rsplit_once('.').unwrap_or((rule, ""));
        let mut names = self.class.names.iter().copied().flatten();
        let (ours, theirs) = names.find(|(ours, _)| [rule, stem].contains(ours))?;
        let theirs = theirs.replace("{}", &expert.to_string());
        let full = format!("{model}{}.{layer}.{theirs}", self.class.blocks);
        Some(match *ours == rule {
            true => full,
            false => format!("{full}.{ending}"),
        })
    }

    fn stored(&self, name: &str) -> Result<&'a Stored, ImportError> {
        self.shards.get(name).ok_or_else(|| missing(name))
    }

    /// Tensor of this shape, row length first.
    fn find(&mut self, name: &str, dims: &[u64]) -> Result<(Stored, TensorType), ImportError> {
        let stored = self.stored(name)?;
        let dtype = stored.dtype(name)?;
        Ok((self.shaped(name, stored, dims)?, dtype))
    }

    /// Codes or scales of MXFP4, of this shape, row length first.
    fn find_bytes(&mut self, name: &str, dims: &[u64]) -> Result<Stored, ImportError> {
        let stored = self.stored(name)?;
        match stored.dtype {
            Dtype::U8 => self.shaped(name, stored, dims),
            other => Err(wrong_type(name, other)),
        }
    }

    fn shaped(
        &mut self,
        name: &str,
        stored: &'a Stored,
        dims: &[u64],
    ) -> Result<Stored, ImportError> {
        let expected: Vec<u64> = dims.iter().rev().copied().collect();
        if stored.shape != expected {
            return Err(ImportError::Shape {
                tensor: name.to_owned(),
                expected,
                found: stored.shape.clone(),
            });
        }
        self.used.insert(name.to_owned());
        Ok(stored.clone())
    }

    /// Every tensor of the model, in the order of [`Family::tensors`]. Other tensors in the
    /// directory are an error, unless they belong to the blocks for multi-token prediction.
    pub(super) fn plan(
        mut self,
        family: &'static Family,
        spec: &ModelSpec,
        computed: &[(&'static str, Vec<f32>)],
        prediction: u32,
    ) -> Result<Vec<Planned>, ImportError> {
        self.left_out = spec.layers..spec.layers.saturating_add(prediction);
        let mut planned = Vec::new();
        // A hostile layer count ends at the first missing layer.
        for (name, lengths) in family.tensors(spec) {
            let values = computed
                .iter()
                .find(|(computed, _)| match computed.starts_with('.') {
                    // A tensor of each block.
                    true => name.ends_with(computed),
                    false => *computed == name,
                });
            let source = match values {
                Some((_, values)) if lengths == [values.len() as u64] => {
                    Source::Values(values.clone())
                }
                Some((tensor, values)) => {
                    return Err(ImportError::Shape {
                        tensor: (*tensor).to_owned(),
                        expected: lengths,
                        found: vec![values.len() as u64],
                    });
                }
                None => self.rows(&name, &lengths, spec)?,
            };
            planned.push(Planned {
                name,
                dims: lengths,
                base: match source {
                    Source::SplitMxfp4 { .. } => TensorType::MXFP4,
                    _ => TensorType::F32,
                },
                dtype: TensorType::F32,
                source,
            });
        }
        self.refuse_others(spec)?;
        let base = common_type(&planned);
        for tensor in &mut planned {
            if !tensor.is_kept_exact() && tensor.base != TensorType::MXFP4 {
                tensor.base = base;
            }
            tensor.dtype = tensor.base;
        }
        Ok(planned)
    }

    fn rows(
        &mut self,
        name: &str,
        lengths: &[u64],
        spec: &ModelSpec,
    ) -> Result<Source, ImportError> {
        let unknown = || missing(name);
        if self.class.stacked_experts && name.contains("_exps.") {
            let theirs = self.name_of(name, 0).ok_or_else(unknown)?;
            return self.stacked(&theirs, lengths, Pick::of_experts(name));
        }
        if let Some(source) = self.absorbed(name, lengths, spec)? {
            return Ok(source);
        }
        let (lengths, experts) = match *lengths {
            _ if self.class.whole_experts => (lengths.to_vec(), 1),
            // The matrices of all experts, which the directory has one by one.
            [row, rows, experts] => (vec![row, rows], experts as u32),
            _ => (lengths.to_vec(), 1),
        };
        if let Some(parts) = self.stacked_rows(name, &lengths, experts)? {
            let change = Change::Nothing;
            return Ok(Source::Rows { parts, change });
        }
        if let Some((delta, rule)) = of_delta(name, spec) {
            let theirs = self.name_of(name, 0).ok_or_else(unknown)?;
            return self.delta(rule, &theirs, &lengths, delta);
        }
        let block = in_block(name).filter(|_| spec.mamba.is_some());
        if let Some((dims, change)) = block.and_then(|(_, rule)| mamba::stored(rule, &lengths)) {
            let theirs = self.name_of(name, 0).ok_or_else(unknown)?;
            let parts = vec![self.find(&theirs, &dims)?];
            return Ok(Source::Rows { parts, change });
        }
        let dims = match lengths[..] {
            // The directory has a matrix for each channel.
            [row, rows] if is_convolution(name) => vec![row, 1, rows],
            _ => lengths,
        };
        let mut parts = Vec::new();
        for expert in 0..experts {
            let theirs = self.name_of(name, expert).ok_or_else(unknown)?;
            parts.push(self.find(&theirs, &dims)?);
        }
        let heads = match name.rsplit_once(".attn_") {
            Some((_, "q.weight" | "q.bias")) => spec.heads,
            Some((_, "k.weight" | "k.bias")) => spec.kv_heads,
            _ => 0,
        };
        let change = if self.class.permuted && heads > 0 {
            Change::Interleave { heads }
        } else if self.class.norms_around_zero
            && name.ends_with("norm.weight")
            && !(self.class.plain_last_norm && name == OUTPUT_NORM)
        {
            Change::AddOne
        } else {
            Change::Nothing
        };
        Ok(Source::Rows { parts, change })
    }

    /// Matrix, or those of all experts, as rows of another tensor ([`Class::stacked_rows`]). `None` if
    /// the directory has them one by one.
    fn stacked_rows(
        &mut self,
        name: &str,
        lengths: &[u64],
        experts: u32,
    ) -> Result<Option<Vec<(Stored, TensorType)>>, ImportError> {
        let Some((layer, rule)) = in_block(name) else {
            return Ok(None);
        };
        let mut stacks = self.class.stacked_rows.iter();
        let Some((_, theirs, part, of)) = stacks.find(|(ours, ..)| *ours == rule) else {
            return Ok(None);
        };
        let (model, _) = self.prefix;
        let theirs = format!("{model}{}.{layer}.{theirs}", self.class.blocks);
        let [row, rows] = *lengths else {
            return Ok(None);
        };
        if self.shards.get(&theirs).is_none() {
            return Ok(None);
        }
        let mut dims = vec![row, rows.saturating_mul(*of)];
        if rule.contains("_exps.") {
            dims.push(experts.into());
        }
        let (stored, dtype) = self.find(&theirs, &dims)?;
        let parts = (0..u64::from(experts)).map(|expert| {
            let first = (expert * of + part) * rows;
            (
                delta::part(&stored, dtype, row, &(first..first + rows)),
                dtype,
            )
        });
        Ok(Some(parts.collect()))
    }

    /// Up-projections of absorbed latent attention, which the directory has head by head in one
    /// matrix: keys, then values. Those of the keys are transposed.
    fn absorbed(
        &mut self,
        name: &str,
        lengths: &[u64],
        spec: &ModelSpec,
    ) -> Result<Option<Source>, ImportError> {
        let latent = spec.attention.latent.filter(|latent| latent.absorbed);
        let rule = name.rsplit_once(".attn_").map(|(_, rule)| rule);
        let (Some(latent), Some(rule @ ("k_b.weight" | "v_b.weight"))) = (latent, rule) else {
            return Ok(None);
        };
        let theirs = self.name_of(name, 0).ok_or_else(|| missing(name))?;
        let [row, rows, heads] = *lengths else {
            return Err(missing(name));
        };
        let values = u64::from(latent.values);
        let keys = u64::from(spec.head_dim.saturating_sub(spec.rope.dims));
        let (row, first, rows, change) = match rule {
            "k_b.weight" => (rows, 0, row, Change::Columns(Pick::ALL)),
            _ => (row, keys, rows, Change::Nothing),
        };
        let each = keys + values;
        let (stored, dtype) = self.find(&theirs, &[row, each.saturating_mul(heads)])?;
        let parts = (0..heads).map(|head| {
            let from = head * each + first;
            let rows = from..from + rows;
            (delta::part(&stored, dtype, row, &rows), dtype)
        });
        let parts = parts.collect();
        Ok(Some(Source::Rows { parts, change }))
    }

    /// Tensor of a gated delta rule.
    fn delta(
        &mut self,
        rule: &str,
        theirs: &str,
        lengths: &[u64],
        spec: &DeltaSpec,
    ) -> Result<Source, ImportError> {
        let change = match rule {
            "ssm_a" => Change::MinusExp,
            "ssm_out.weight" => Change::Heads(*spec),
            "attn_norm.weight" if self.class.norms_around_zero => Change::AddOne,
            _ => Change::Nothing,
        };
        let rows = delta::rows(spec, rule, theirs);
        let count = rows.as_ref().map(|(_, count)| *count);
        let all = |own: u64| count.unwrap_or(own);
        let (row, dims) = match *lengths {
            [rows] => (1, vec![all(rows)]),
            // The directory has a matrix for each channel.
            [row, rows] if rule == "ssm_conv1d.weight" => (row, vec![row, 1, all(rows)]),
            [row, rows] => (row, vec![row, all(rows)]),
            _ => return Err(missing(theirs)),
        };
        let (stored, dtype) = self.find(theirs, &dims)?;
        let parts = match rows {
            Some((rows, _)) => rows
                .iter()
                .map(|rows| (delta::part(&stored, dtype, row, rows), dtype))
                .collect(),
            None => vec![(stored, dtype)],
        };
        Ok(Source::Rows { parts, change })
    }

    /// Matrices or biases of all experts in one stacked tensor, gates and ups together. Matrices
    /// are stored as columns, or in MXFP4 as rows.
    fn stacked(&mut self, name: &str, lengths: &[u64], pick: Pick) -> Result<Source, ImportError> {
        let all = |rows: u64| rows.saturating_mul(pick.of as u64);
        let codes = format!("{name}_blocks");
        let (parts, change) = match *lengths {
            [row, rows, experts] if self.shards.get(&codes).is_some() => {
                let groups = row / GROUP;
                let dims = [GROUP / 2, groups, all(rows), experts];
                let codes = self.find_bytes(&codes, &dims)?;
                let scales = format!("{name}_scales");
                let scales = self.find_bytes(&scales, &[groups, all(rows), experts])?;
                return Ok(Source::SplitMxfp4 {
                    codes,
                    scales,
                    pick,
                });
            }
            [row, rows, experts] => {
                let found = self.find(name, &[all(rows), row, experts])?;
                (vec![found], Change::Columns(pick))
            }
            [values, experts] => {
                let found = self.find(name, &[all(values), experts])?;
                (vec![found], Change::Some(pick))
            }
            _ => return Err(missing(name)),
        };
        Ok(Source::Rows { parts, change })
    }

    /// Whether nothing uses a tensor: the keys and values of a block that uses those of another one.
    fn is_unused(&self, name: &str, spec: &ModelSpec) -> bool {
        let own = ["k_proj", "v_proj", "k_norm"].map(|part| format!("self_attn.{part}.weight"));
        self.layer_of(name).is_some_and(|(layer, rest)| {
            let shares = layer < spec.layers && spec.block(layer).keys_of != layer;
            shares && own.iter().any(|own| own == rest)
        })
    }

    /// Block of a tensor of the directory, and the rest of its name.
    fn layer_of<'n>(&self, name: &'n str) -> Option<(u32, &'n str)> {
        let (model, _) = self.prefix;
        let rest = name.strip_prefix(model)?.strip_prefix(self.class.blocks)?;
        let rest = rest.strip_prefix('.')?;
        let (layer, rest) = rest.split_once('.')?;
        Some((layer.parse().ok()?, rest))
    }

    fn refuse_others(&self, spec: &ModelSpec) -> Result<(), ImportError> {
        let output = self.name_of(OUTPUT, 0).filter(|_| self.class.always_tied);
        let belongs = |name: &str| {
            self.used.contains(name)
                || output.as_deref() == Some(name)
                // Constants in old checkpoints.
                || name.ends_with(".rotary_emb.inv_freq")
                || self.is_unused(name, spec)
                || self.class.others.iter().any(|other| name.starts_with(other))
                || self.is_left_out(name)
        };
        match self.shards.names_of_tensors().find(|name| !belongs(name)) {
            None => Ok(()),
            Some(name) => Err(ImportError::ForeignTensor {
                tensor: name.to_owned(),
                class: self.class.name,
            }),
        }
    }

    fn is_left_out(&self, name: &str) -> bool {
        let layer = self.layer_of(name);
        layer.is_some_and(|(layer, _)| self.left_out.contains(&layer))
    }

    /// Checks that the output matrix exists unless it is tied, and that a tied one equals the
    /// embedding.
    pub(super) fn check_output(&self, config: &Config) -> Result<(), ImportError> {
        let name = |ours: &str| self.name_of(ours, 0).ok_or_else(|| missing(ours));
        let (tensor, embedding) = (name(OUTPUT)?, name(EMBEDDING)?);
        let tied = self.class.always_tied || config.tied()?;
        match (tied, self.has_output()) {
            (false, false) => Err(missing(&tensor)),
            (true, true) if !self.same(&embedding, &tensor)? => Err(ImportError::NotTied(tensor)),
            _ => Ok(()),
        }
    }

    /// Whether two tensors are byte-identical.
    fn same(&self, one: &str, other: &str) -> Result<bool, ImportError> {
        let (Some(a), Some(b)) = (self.shards.get(one), self.shards.get(other)) else {
            return Ok(false);
        };
        if (a.dtype, &a.shape) != (b.dtype, &b.shape) {
            return Ok(false);
        }
        let len = a.bytes(a.dtype(one)?);
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for from in (0..len).step_by(PART_BYTES) {
            let part = (len - from).min(PART_BYTES as u64) as usize;
            left.resize(part, 0);
            right.resize(part, 0);
            self.shards.read(a, from, &mut left)?;
            self.shards.read(b, from, &mut right)?;
            if left != right {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The gated delta rule of the block of a tensor that belongs to it, and the tensor's name in the
/// block.
fn of_delta<'a>(name: &'a str, spec: &'a ModelSpec) -> Option<(&'a DeltaSpec, &'a str)> {
    let (layer, rule) = in_block(name)?;
    let mixer = spec.block(layer.parse().ok()?).mixer;
    let own = rule.starts_with("ssm_") || rule.starts_with("attn_");
    match mixer {
        Mixer::Delta(_) if own => Some((spec.delta.as_ref()?, rule)),
        _ => None,
    }
}

fn missing(tensor: &str) -> ImportError {
    ImportError::MissingTensor(tensor.to_owned())
}

/// Common type of all matrices; F32, which holds all values of both others, if they differ.
fn common_type(planned: &[Planned]) -> TensorType {
    let matrices = planned.iter().filter(|tensor| !tensor.is_kept_exact());
    let types: BTreeSet<TensorType> = matrices
        .flat_map(|tensor| match &tensor.source {
            Source::Values(_) | Source::SplitMxfp4 { .. } => &[][..],
            Source::Rows { parts, .. } => parts,
        })
        .map(|(_, dtype)| *dtype)
        .collect();
    match (types.first(), types.len()) {
        (Some(only), 1) => *only,
        _ => TensorType::F32,
    }
}
