//! Tensors of the model file, each assembled from rows of the directory's tensors.

use std::io::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::delta;
use super::error::ImportError;
use super::shards::{PART_BYTES, Shards, Stored};
use crate::convert::{is_kept_exact, stored_as};
use crate::gguf::TensorType;
use crate::gguf::writer::{WriteError, Writer};
use crate::quantize;
use crate::spec::DeltaSpec;

/// Values per scale in MXFP4.
pub(super) const GROUP: u64 = 32;
/// Bytes of the codes of a scale, in a tensor of their own.
const SPLIT_GROUP: usize = (GROUP / 2) as usize;

/// Tensor to be written.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) dims: Vec<u64>,
    /// Type that llama.cpp's converter gives it.
    pub(super) base: TensorType,
    /// Type in the result.
    pub(super) dtype: TensorType,
    pub(super) source: Source,
}

#[derive(Debug)]
pub(super) enum Source {
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
pub(super) struct Pick {
    index: usize,
    pub(super) of: usize,
}

impl Pick {
    /// All rows.
    pub(super) const ALL: Self = Self { index: 0, of: 1 };

    /// Rows of an expert tensor of the model file within the directory's stacked tensor.
    pub(super) fn of_experts(name: &str) -> Self {
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
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Change {
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
    /// `-exp(x)` of each value.
    MinusExp,
    /// In each row, brings the columns of value heads into the order of the model file.
    Heads(DeltaSpec),
}

impl Change {
    /// Values of the source per stored value.
    fn share(self) -> u64 {
        match self {
            Self::Some(pick) | Self::Columns(pick) => (pick.of as u64).max(1),
            Self::Nothing
            | Self::AddOne
            | Self::Interleave { .. }
            | Self::MinusExp
            | Self::Heads(_) => 1,
        }
    }
}

/// Source data that is read and converted together.
struct Step {
    /// Number of the first value that it yields.
    first: u64,
    /// Ranges of bytes, read one after the other.
    spans: Vec<Range<u64>>,
    /// Source bytes of a row, and of the unit in which rows are reordered.
    unit: [usize; 2],
}

impl Planned {
    /// See [`is_kept_exact`].
    pub(super) fn is_kept_exact(&self) -> bool {
        is_kept_exact(&self.name, &self.dims)
    }

    /// Sets the type that `convert` to `dtype` would choose.
    pub(super) fn quantize(&mut self, dtype: TensorType) {
        self.dtype = stored_as(&self.name, &self.dims, self.base, dtype);
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
                .map(|(stored, dtype)| stored.bytes(*dtype))
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
            for piece in pieces(stored.bytes(*dtype), unit, cancel) {
                let (from, len) = piece?;
                let span = from..from + len as u64;
                buffers.fill(shards, stored, &[span])?;
                buffers.reorder(*dtype, change, [row, unit]);
                let bytes = self.stored(*dtype, change, &mut buffers)?;
                out.write_all(bytes).map_err(WriteError::Io)?;
                progress(len as u64);
            }
        }
        Ok(())
    }

    /// Bytes of the stored tensor. Reads the source of the blocks that hold them; where values change
    /// their places, of pairs of rows or whole experts.
    pub(super) fn read_range(
        &self,
        shards: &Shards,
        range: Range<u64>,
    ) -> Result<Vec<u8>, ImportError> {
        let mut out = Vec::new();
        let mut buffers = Buffers::default();
        match &self.source {
            Source::Values(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                take(&bytes, 0, &range, &mut out);
            }
            Source::Rows { parts, change } => {
                let mut end = 0;
                for (stored, dtype) in parts {
                    let begin = end;
                    end += self.bytes_of(stored.values() / change.share());
                    let part = range.start.max(begin)..range.end.min(end);
                    if part.is_empty() {
                        continue;
                    }
                    let values = self.values_of(part.start - begin..part.end - begin);
                    for step in self.steps(*dtype, *change, values) {
                        buffers.fill(shards, stored, &step.spans)?;
                        buffers.reorder(*dtype, *change, step.unit);
                        let bytes = self.stored(*dtype, *change, &mut buffers)?;
                        take(bytes, begin + self.bytes_of(step.first), &range, &mut out);
                    }
                }
            }
            Source::SplitMxfp4 {
                codes,
                scales,
                pick,
            } => {
                let row = self.dims.first().copied().unwrap_or(GROUP).max(1);
                let values = self.values_of(range.clone());
                let (first, end) = (values.start / row, values.end.div_ceil(row));
                let unit = self.split_mxfp4_unit(*pick) as u64;
                let source = first * unit..(end * unit).min(codes.values());
                let sources = [codes, scales];
                let bytes = self.split_mxfp4(shards, sources, *pick, source, &mut buffers)?;
                take(bytes, self.bytes_of(first * row), &range, &mut out);
            }
        }
        match out.len() as u64 == range.end.saturating_sub(range.start) {
            true => Ok(out),
            false => Err(ImportError::Other(format!(
                "tensor {:?} has no bytes {} to {}",
                self.name, range.start, range.end
            ))),
        }
    }

    /// Bytes of whole blocks of the stored type.
    fn bytes_of(&self, values: u64) -> u64 {
        values / u64::from(self.dtype.block_values()) * u64::from(self.dtype.block_bytes())
    }

    /// Values of the blocks that hold some bytes of the stored type.
    fn values_of(&self, bytes: Range<u64>) -> Range<u64> {
        let (values, block) = (self.dtype.block_values(), self.dtype.block_bytes());
        let (values, block) = (u64::from(values), u64::from(block));
        bytes.start / block * values..bytes.end.div_ceil(block) * values
    }

    /// Source of a range of values of one part.
    fn steps(&self, dtype: TensorType, change: Change, values: Range<u64>) -> Vec<Step> {
        let value = u64::from(dtype.block_bytes());
        let (row, unit) = self.unit(dtype, change);
        let bytes = |values: Range<u64>| values.start * value..values.end * value;
        match change {
            Change::Nothing | Change::AddOne | Change::MinusExp => vec![Step {
                first: values.start,
                spans: vec![bytes(values)],
                unit: [row, unit],
            }],
            Change::Heads(_) => {
                let columns = (row as u64 / value).max(1);
                let rows = values.start / columns..values.end.div_ceil(columns);
                vec![Step {
                    first: rows.start * columns,
                    spans: vec![bytes(rows.start * columns..rows.end * columns)],
                    unit: [row, unit],
                }]
            }
            Change::Interleave { .. } => {
                let (columns, head) = (row as u64 / value, unit / row);
                let columns = columns.max(1);
                let rows = values.start / columns..values.end.div_ceil(columns);
                let steps = interleaved(rows, head as u64).into_iter();
                let step = |(first, spans, rows): (u64, Vec<Range<u64>>, u64)| Step {
                    first: first * columns,
                    spans: spans
                        .into_iter()
                        .map(|rows| bytes(rows.start * columns..rows.end * columns))
                        .collect(),
                    unit: [row, row.saturating_mul(rows as usize)],
                };
                steps.map(step).collect()
            }
            Change::Some(pick) | Change::Columns(pick) => {
                let source = (unit as u64 / value).max(1);
                let stored = (source / pick.of as u64).max(1);
                let units = values.start / stored..values.end.div_ceil(stored);
                vec![Step {
                    first: units.start * stored,
                    spans: vec![bytes(units.start * source..units.end * source)],
                    unit: [row, unit],
                }]
            }
        }
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
        let mut buffers = Buffers::default();
        let unit = self.split_mxfp4_unit(pick);
        for piece in pieces(codes.values(), unit, cancel) {
            let (from, len) = piece?;
            let source = from..from + len as u64;
            let bytes = self.split_mxfp4(shards, [codes, scales], pick, source, &mut buffers)?;
            out.write_all(bytes).map_err(WriteError::Io)?;
            progress((len + len / SPLIT_GROUP) as u64);
        }
        Ok(())
    }

    /// Bytes of codes of the rows from which one is picked.
    fn split_mxfp4_unit(&self, pick: Pick) -> usize {
        let groups = self.groups();
        groups.saturating_mul(SPLIT_GROUP).saturating_mul(pick.of)
    }

    /// Scales of a row of MXFP4.
    fn groups(&self) -> usize {
        self.dims.first().map_or(1, |row| row / GROUP).max(1) as usize
    }

    /// Converts a range of codes, of whole units, with their scales.
    fn split_mxfp4<'b>(
        &self,
        shards: &Shards,
        [codes, scales]: [&Stored; 2],
        pick: Pick,
        source: Range<u64>,
        buffers: &'b mut Buffers,
    ) -> Result<&'b [u8], ImportError> {
        let group = SPLIT_GROUP as u64;
        let groups = self.groups();
        let of_scales = source.start / group..source.end / group;
        buffers.fill(shards, scales, &[of_scales])?;
        let mut exponents = Vec::new();
        pick.rows(&buffers.read, groups, &mut exponents);
        buffers.fill(shards, codes, &[source])?;
        let Buffers { read, ordered, .. } = &mut *buffers;
        ordered.clear();
        pick.rows(read, groups * SPLIT_GROUP, ordered);
        read.clear();
        let (picked, _) = ordered.as_chunks();
        for (codes, exponent) in picked.iter().zip(&exponents) {
            read.push(*exponent);
            read.extend(regroup_nibbles(codes));
        }
        self.stored(TensorType::MXFP4, Change::Nothing, buffers)
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
            Change::Nothing | Change::AddOne | Change::MinusExp | Change::Heads(_) => 1,
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
        let compute: Option<fn(f32) -> f32> = match change {
            Change::AddOne => Some(|value| value + 1.0),
            Change::MinusExp => Some(|value| -(libm::exp(f64::from(value)) as f32)),
            _ => None,
        };
        if dtype == self.dtype && compute.is_none() {
            return Ok(&buffers.read);
        }
        buffers.values.clear();
        buffers.written.clear();
        quantize::decode(dtype, &buffers.read, &mut buffers.values).map_err(failed)?;
        if let Some(compute) = compute {
            for value in &mut buffers.values {
                *value = compute(*value);
                // The converter computes in the source type, except for BF16.
                if dtype == TensorType::F16 {
                    *value = f16::from_f32(*value).to_f32();
                }
            }
        }
        quantize::encode(self.dtype, &buffers.values, &mut buffers.written).map_err(failed)?;
        Ok(&buffers.written)
    }
}

/// Offset and length of each piece of `total` bytes: whole units, about [`PART_BYTES`].
fn pieces(
    total: u64,
    unit: usize,
    cancel: &AtomicBool,
) -> impl Iterator<Item = Result<(u64, usize), ImportError>> {
    let step = unit.saturating_mul((PART_BYTES / unit).max(1));
    (0..total).step_by(step).map(move |from| {
        let len = (total - from).min(step as u64) as usize;
        match cancel.load(Ordering::Relaxed) {
            true => Err(ImportError::Cancelled),
            false => Ok((from, len)),
        }
    })
}

#[derive(Default)]
struct Buffers {
    read: Vec<u8>,
    ordered: Vec<u8>,
    values: Vec<f32>,
    written: Vec<u8>,
}

impl Buffers {
    /// Reads ranges of a tensor, one after the other.
    fn fill(
        &mut self,
        shards: &Shards,
        stored: &Stored,
        spans: &[Range<u64>],
    ) -> Result<(), ImportError> {
        self.read.clear();
        for span in spans {
            let at = self.read.len();
            let len = span.end.saturating_sub(span.start) as usize;
            self.read.resize(at + len, 0);
            if let Some(out) = self.read.get_mut(at..) {
                shards.read(stored, span.start, out)?;
            }
        }
        Ok(())
    }

    /// Brings source data into the stored order; `row` and `unit` come from [`Planned::unit`].
    fn reorder(&mut self, dtype: TensorType, change: Change, [row, unit]: [usize; 2]) {
        let Self { read, ordered, .. } = self;
        ordered.clear();
        match change {
            Change::Nothing | Change::AddOne | Change::MinusExp => return,
            Change::Interleave { .. } => interleave(read, unit, row, ordered),
            Change::Some(pick) => pick.rows(read, row, ordered),
            Change::Heads(spec) => {
                let head = spec.value_width as usize * dtype.block_bytes() as usize;
                for row in read.chunks(row) {
                    for from in delta::heads(&spec) {
                        let from = from as usize * head;
                        ordered.extend_from_slice(row.get(from..from + head).unwrap_or_default());
                    }
                }
            }
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
fn regroup_nibbles(codes: &[u8; SPLIT_GROUP]) -> impl Iterator<Item = u8> {
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

/// Source of rows in the order of interleaved RoPE: for each step its first row, the source rows to
/// read, and the rows of the head that [`interleave`] sees. Heads that are needed in part are read
/// as smaller heads of pairs of rows.
fn interleaved(rows: Range<u64>, head: u64) -> Vec<(u64, Vec<Range<u64>>, u64)> {
    let head = head.max(2);
    let (mut at, end) = (rows.start / 2 * 2, rows.end.next_multiple_of(2));
    let mut steps = Vec::new();
    while at < end {
        let (start, from) = (at / head * head, at % head);
        let whole = (end - start) / head * head;
        let next = match from {
            0 if whole > 0 => {
                steps.push((at, std::iter::once(at..at + whole).collect(), head));
                start + whole
            }
            _ => {
                let to = (end - start).min(head);
                let half = start + head / 2;
                let first = start + from / 2..start + to / 2;
                let second = half + from / 2..half + to / 2;
                steps.push((at, vec![first, second], to - from));
                start + to
            }
        };
        at = next;
    }
    steps
}

/// Appends those of `bytes`, the first of which has position `at`, that lie in `range`.
fn take(bytes: &[u8], at: u64, range: &Range<u64>, out: &mut Vec<u8>) {
    let place = |position: u64| position.saturating_sub(at).min(bytes.len() as u64) as usize;
    let taken = bytes.get(place(range.start)..place(range.end));
    out.extend_from_slice(taken.unwrap_or_default());
}
