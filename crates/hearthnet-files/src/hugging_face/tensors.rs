//! Tensors of the model file, each assembled from rows of the directory's tensors.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;
use safetensors::Dtype;

use super::classes::Class;
use super::config::Config;
use super::error::ImportError;
use super::shards::{Shards, Stored, wrong_type};
use crate::convert::stored_as;
use crate::families::{EMBEDDING, Family, OUTPUT, OUTPUT_NORM, ROUTER};
use crate::gguf::writer::{WriteError, Writer};
use crate::gguf::{TensorInfo, TensorType};
use crate::quantize;
use crate::spec::{Dim, ModelSpec};

/// Bytes of a tensor that are read at a time.
const PART_BYTES: usize = 1 << 20;
/// Values per scale in MXFP4.
const GROUP: u64 = 32;

/// Tensor to be written.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) dims: Vec<u64>,
    /// Type that llama.cpp's converter gives it.
    pub(super) base: TensorType,
    /// Type in the result.
    pub(super) dtype: TensorType,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// Computed from the hyperparameters.
    Values(Vec<f32>),
    /// Rows of these tensors, in order.
    Rows {
        parts: Vec<(Stored, TensorType)>,
        change: Change,
    },
    /// Rows of MXFP4 whose codes and scales lie in separate tensors.
    SplitMxfp4 {
        codes: Stored,
        scales: Stored,
        pick: Pick,
    },
}

/// Selects row `index` of each group of `of` rows: two matrices may be interleaved in one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pick {
    index: usize,
    of: usize,
}

impl Pick {
    /// Rows of an expert tensor of the model file within the directory's stacked tensor.
    fn of_experts(name: &str) -> Self {
        let (index, of) = match name.rsplit_once(".ffn_") {
            Some((_, rest)) if rest.starts_with("gate_exps.") => (0, 2),
            Some((_, rest)) if rest.starts_with("up_exps.") => (1, 2),
            _ => (0, 1),
        };
        Self { index, of }
    }

    /// Appends the selected rows, of `row` bytes each, to `out`.
    fn rows(self, bytes: &[u8], row: usize, out: &mut Vec<u8>) {
        let rows = bytes.chunks(row).skip(self.index).step_by(self.of);
        rows.for_each(|row| out.extend_from_slice(row));
    }
}

/// Transformation of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Nothing,
    /// Adds 1 to each value.
    AddOne,
    /// In each head, interleaves the rows of the second half with those of the first.
    Interleave {
        heads: u32,
    },
    /// Selects values, each a row of its own.
    Some(Pick),
    /// Selects columns of each expert's matrix, as rows.
    Columns(Pick),
}

/// Finds the tensors of a directory.
pub(super) struct Finder<'a> {
    pub(super) shards: &'a Shards,
    pub(super) class: &'static Class,
    /// Name prefix of its tensors, and of the output matrix.
    prefix: (&'static str, &'static str),
    used: BTreeSet<String>,
}

impl<'a> Finder<'a> {
    pub(super) fn new(shards: &'a Shards, class: &'static Class) -> Result<Self, ImportError> {
        let embedding = |model: &str| format!("{model}embed_tokens.weight");
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
        match name {
            EMBEDDING => return Some(format!("{model}embed_tokens.weight")),
            OUTPUT_NORM => return Some(format!("{model}norm.weight")),
            OUTPUT => return Some(format!("{head}lm_head.weight")),
            _ => {}
        }
        let (layer, rule) = name.strip_prefix("blk.")?.split_once('.')?;
        let (stem, ending) = rule.rsplit_once('.')?;
        let mut names = self.class.names.iter().copied().flatten();
        let (ours, theirs) = names.find(|(ours, _)| [rule, stem].contains(ours))?;
        let theirs = theirs.replace("{}", &expert.to_string());
        let full = format!("{model}layers.{layer}.{theirs}");
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
    /// directory are an error.
    pub(super) fn plan(
        mut self,
        family: &'static Family,
        spec: &ModelSpec,
        computed: &[(&'static str, Vec<f32>)],
    ) -> Result<Vec<Planned>, ImportError> {
        let mut planned = Vec::new();
        // A hostile layer count ends at the first missing layer.
        for (name, dims) in family.tensors(spec) {
            let lengths: Vec<u64> = dims.iter().map(|dim| dim.of(spec)).collect();
            let values = computed.iter().find(|(computed, _)| *computed == name);
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
                None => self.rows(&name, dims, &lengths, spec)?,
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
        self.refuse_others()?;
        let base = common_type(&planned);
        for tensor in &mut planned {
            if !is_kept_exact(tensor) && tensor.base != TensorType::MXFP4 {
                tensor.base = base;
            }
            tensor.dtype = tensor.base;
        }
        Ok(planned)
    }

    fn rows(
        &mut self,
        name: &str,
        dims: &[Dim],
        lengths: &[u64],
        spec: &ModelSpec,
    ) -> Result<Source, ImportError> {
        let unknown = || missing(name);
        if self.class.stacked_experts && name.contains("_exps.") {
            let theirs = self.name_of(name, 0).ok_or_else(unknown)?;
            return self.stacked(&theirs, lengths, Pick::of_experts(name));
        }
        let (experts, lengths) = match (dims, lengths) {
            (&[.., Dim::Experts], [row, rows, experts]) => {
                (*experts as u32, [*row, *rows].to_vec())
            }
            _ => (1, lengths.to_vec()),
        };
        let mut parts = Vec::new();
        for expert in 0..experts {
            let theirs = self.name_of(name, expert).ok_or_else(unknown)?;
            parts.push(self.find(&theirs, &lengths)?);
        }
        let heads = match name.rsplit_once(".attn_") {
            Some((_, "q.weight" | "q.bias")) => spec.heads,
            Some((_, "k.weight" | "k.bias")) => spec.kv_heads,
            _ => 0,
        };
        let change = if self.class.permuted && heads > 0 {
            Change::Interleave { heads }
        } else if self.class.norms_around_zero && name.ends_with("norm.weight") {
            Change::AddOne
        } else {
            Change::Nothing
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

    fn refuse_others(&self) -> Result<(), ImportError> {
        let output = self.name_of(OUTPUT, 0).filter(|_| self.class.always_tied);
        let belongs = |name: &str| {
            self.used.contains(name)
                || output.as_deref() == Some(name)
                // Constants in old checkpoints.
                || name.ends_with(".rotary_emb.inv_freq")
                || self.class.others.iter().any(|other| name.starts_with(other))
        };
        match self.shards.names_of_tensors().find(|name| !belongs(name)) {
            None => Ok(()),
            Some(name) => Err(ImportError::ForeignTensor {
                tensor: name.to_owned(),
                class: self.class.name,
            }),
        }
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
        let len = bytes_of(a, a.dtype(one)?);
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

fn missing(tensor: &str) -> ImportError {
    ImportError::MissingTensor(tensor.to_owned())
}

fn bytes_of(stored: &Stored, dtype: TensorType) -> u64 {
    let bytes = u64::from(dtype.block_bytes());
    stored.values().saturating_mul(bytes)
}

/// Vectors, and expert routers, which are small and affect much.
fn is_kept_exact(tensor: &Planned) -> bool {
    let name = &tensor.name;
    tensor.dims.len() == 1 || name.ends_with(ROUTER) || name.ends_with(".bias")
}

/// Common type of all matrices; F32, which holds all values of both others, if they differ.
fn common_type(planned: &[Planned]) -> TensorType {
    let matrices = planned.iter().filter(|tensor| !is_kept_exact(tensor));
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

impl Planned {
    /// Sets the type that `convert` to `dtype` would choose.
    pub(super) fn quantize(&mut self, dtype: TensorType) {
        let info = TensorInfo {
            name: self.name.clone(),
            dims: self.dims.clone(),
            dtype: self.base,
            offset: 0,
            bytes: 0,
        };
        self.dtype = stored_as(&info, dtype);
    }

    /// Adds the tensor to the header.
    pub(super) fn add_to(&self, writer: &mut Writer) -> Result<(), WriteError> {
        writer.tensor(&self.name, &self.dims, self.dtype)
    }

    /// Bytes read from the directory.
    pub(super) fn source_bytes(&self) -> u64 {
        match &self.source {
            Source::Values(_) => 0,
            Source::Rows { parts, .. } => parts
                .iter()
                .map(|(stored, dtype)| bytes_of(stored, *dtype))
                .sum(),
            Source::SplitMxfp4 { codes, scales, .. } => codes.values() + scales.values(),
        }
    }

    /// Writes the data piece by piece.
    pub(super) fn write(
        &self,
        shards: &Shards,
        out: &mut dyn Write,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ImportError> {
        let (parts, change) = match &self.source {
            Source::Values(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                out.write_all(&bytes).map_err(WriteError::Io)?;
                return Ok(());
            }
            Source::Rows { parts, change } => (parts, *change),
            Source::SplitMxfp4 {
                codes,
                scales,
                pick,
            } => {
                return self.write_split_mxfp4(
                    shards,
                    [codes, scales],
                    *pick,
                    out,
                    cancel,
                    progress,
                );
            }
        };
        let mut buffers = Buffers::default();
        for (stored, dtype) in parts {
            let (row, unit) = self.unit(*dtype, change);
            let total = bytes_of(stored, *dtype);
            let step = unit.saturating_mul((PART_BYTES / unit).max(1));
            for from in (0..total).step_by(step) {
                if cancel.load(Ordering::Relaxed) {
                    return Err(ImportError::Cancelled);
                }
                let len = (total - from).min(step as u64) as usize;
                buffers.read.resize(len, 0);
                shards.read(stored, from, &mut buffers.read)?;
                buffers.reorder(*dtype, change, [row, unit]);
                let bytes = self.stored(*dtype, change, &mut buffers)?;
                out.write_all(bytes).map_err(WriteError::Io)?;
                progress(len as u64);
            }
        }
        Ok(())
    }

    /// Writes rows of MXFP4 with separate codes and scales, piece by piece.
    fn write_split_mxfp4(
        &self,
        shards: &Shards,
        [codes, scales]: [&Stored; 2],
        pick: Pick,
        out: &mut dyn Write,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ImportError> {
        let group = (GROUP / 2) as usize;
        let groups = self.dims.first().map_or(1, |row| row / GROUP).max(1) as usize;
        let unit = groups.saturating_mul(group).saturating_mul(pick.of);
        let step = unit.saturating_mul((PART_BYTES / unit).max(1));
        let total = codes.values();
        let mut buffers = Buffers::default();
        let mut exponents = Vec::new();
        for from in (0..total).step_by(step) {
            if cancel.load(Ordering::Relaxed) {
                return Err(ImportError::Cancelled);
            }
            let len = (total - from).min(step as u64) as usize;
            let Buffers { read, ordered, .. } = &mut buffers;
            read.resize(len / group, 0);
            shards.read(scales, from / group as u64, read)?;
            exponents.clear();
            pick.rows(read, groups, &mut exponents);
            read.resize(len, 0);
            shards.read(codes, from, read)?;
            ordered.clear();
            pick.rows(read, groups * group, ordered);
            read.clear();
            let (picked, _) = ordered.as_chunks();
            for (codes, exponent) in picked.iter().zip(&exponents) {
                read.push(*exponent);
                read.extend(regroup_nibbles(codes));
            }
            let bytes = self.stored(TensorType::MXFP4, Change::Nothing, &mut buffers)?;
            out.write_all(bytes).map_err(WriteError::Io)?;
            progress((len + len / group) as u64);
        }
        Ok(())
    }

    /// Source bytes of a row, and of the unit that is read as a whole: a row, a head, or an expert.
    fn unit(&self, dtype: TensorType, change: Change) -> (usize, usize) {
        let bytes = u64::from(dtype.block_bytes());
        let all = |rows: u64, pick: Pick| rows.saturating_mul(pick.of as u64);
        let row = match (self.dims.as_slice(), change) {
            (_, Change::Some(_)) => 1,
            // The values of a bias are rows of one.
            ([_], Change::Interleave { .. }) => 1,
            ([_, rows, ..], Change::Columns(pick)) => all(*rows, pick),
            ([first, ..], _) => *first,
            ([], _) => 1,
        };
        let rows = match change {
            Change::Some(pick) => pick.of as u64,
            Change::Columns(_) => self.dims.first().copied().unwrap_or(1),
            Change::Interleave { heads } => {
                let rows = match *self.dims.as_slice() {
                    [rows] | [_, rows, ..] => rows,
                    [] => 1,
                };
                rows / u64::from(heads.max(1))
            }
            Change::Nothing | Change::AddOne => 1,
        };
        // The tensor's data lies in a file, and an expert of it is far smaller than memory.
        let row = row.saturating_mul(bytes) as usize;
        (row.max(1), row.saturating_mul(rows as usize).max(1))
    }

    /// Converts source data to the stored type.
    fn stored<'b>(
        &self,
        dtype: TensorType,
        change: Change,
        buffers: &'b mut Buffers,
    ) -> Result<&'b [u8], ImportError> {
        let failed = |error| {
            let (tensor, dtype) = (&self.name, self.dtype);
            ImportError::Unsound(format!(
                "tensor {tensor:?} cannot be stored as {dtype}: {error}"
            ))
        };
        quantize::check_finite(dtype, &buffers.read).map_err(failed)?;
        if dtype == self.dtype && change != Change::AddOne {
            return Ok(&buffers.read);
        }
        buffers.values.clear();
        buffers.written.clear();
        quantize::decode(dtype, &buffers.read, &mut buffers.values).map_err(failed)?;
        if change == Change::AddOne {
            for value in &mut buffers.values {
                *value += 1.0;
                // The converter adds in the source type, except for BF16.
                if dtype == TensorType::F16 {
                    *value = f16::from_f32(*value).to_f32();
                }
            }
        }
        quantize::encode(self.dtype, &buffers.values, &mut buffers.written).map_err(failed)?;
        Ok(&buffers.written)
    }
}

#[derive(Default)]
struct Buffers {
    read: Vec<u8>,
    ordered: Vec<u8>,
    values: Vec<f32>,
    written: Vec<u8>,
}

impl Buffers {
    /// Brings source data into the stored order; `row` and `unit` come from [`Planned::unit`].
    fn reorder(&mut self, dtype: TensorType, change: Change, [row, unit]: [usize; 2]) {
        let Self { read, ordered, .. } = self;
        ordered.clear();
        match change {
            Change::Nothing | Change::AddOne => return,
            Change::Interleave { .. } => interleave(read, unit, row, ordered),
            Change::Some(pick) => pick.rows(read, row, ordered),
            Change::Columns(pick) => {
                let value = dtype.block_bytes() as usize;
                let experts = read.chunks(unit);
                experts.for_each(|expert| columns(expert, row, value, pick, ordered));
            }
        }
        std::mem::swap(read, ordered);
    }
}

/// Appends the selected columns of an expert's matrix to `out`, as rows. The matrix has rows of
/// `row` bytes, of values of `value` bytes.
fn columns(expert: &[u8], row: usize, value: usize, pick: Pick, out: &mut Vec<u8>) {
    for at in (pick.index * value..row).step_by(pick.of * value) {
        for row in expert.chunks(row) {
            let value = row.get(at..at + value);
            debug_assert!(value.is_some(), "an expert is whole rows");
            out.extend_from_slice(value.unwrap_or_default());
        }
    }
}

/// Codes of a block in the order of model files: the first half of the values in the low four bits,
/// the second half in the high ones. The source has neighbours side by side.
fn regroup_nibbles(codes: &[u8; (GROUP / 2) as usize]) -> impl Iterator<Item = u8> {
    let (first, second) = codes.split_at(codes.len() / 2);
    let code = |byte: u8, odd: bool| if odd { byte >> 4 } else { byte & 15 };
    first
        .iter()
        .zip(second)
        .flat_map(move |(a, b)| [false, true].map(|odd| code(*a, odd) | code(*b, odd) << 4))
}

/// Rows of each head of `head` bytes in the order of interleaved RoPE: row `i` of the first half,
/// row `i` of the second, row `i + 1` of the first.
fn interleave(bytes: &[u8], head: usize, row: usize, out: &mut Vec<u8>) {
    out.clear();
    for head in bytes.chunks(head) {
        let (first, second) = head.split_at(head.len() / 2);
        for (a, b) in first.chunks(row).zip(second.chunks(row)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
}
