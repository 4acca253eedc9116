//! Tensors of the model file, each assembled from rows of the directory's tensors.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::error::ImportError;
use super::shards::{PART_BYTES, Shards, Stored};
use crate::convert::{is_kept_exact, stored_as};
use crate::gguf::TensorType;
use crate::gguf::writer::{WriteError, Writer};
use crate::quantize;

/// Values per scale in MXFP4.
pub(super) const GROUP: u64 = 32;

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
        let mut buffers = Buffers::default();
        let mut exponents = Vec::new();
        for piece in pieces(codes.values(), unit, cancel) {
            let (from, len) = piece?;
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
