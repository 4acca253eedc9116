//! Weight matrices, repacked once at load into the order in which the kernels
//! read them.
//!
//! A matrix of `rows` outputs and `cols` inputs is cut into *panels* of 16 output
//! rows; a last panel that is not full is padded with zeros. A panel is one linear
//! run of *records*:
//!
//! | type | one record covers | bytes | contents |
//! |---|---|---|---|
//! | Q4_0 | 32 inputs | 288 | 16 scales (f16), quants |
//! | Q4_1 | 32 inputs | 320 | 16 scales (f16), 16 minima (f16), quants |
//! | Q8_0 | 32 inputs | 544 | 16 scales (f16), quants |
//! | F16 | 1 input | 32 | 16 weights |
//! | F32 | 1 input | 64 | 16 weights |
//!
//! Quants stand in groups of four consecutive inputs: byte `4 * row + j` of the 64
//! bytes of group `g` belongs to row `row` and input `4 * g + j` of the block, so a
//! 32-bit lane holds what one row multiplies with four neighbouring activations.
//! Q8_0 has eight such groups, each quant stored as `q + 128` (unsigned, as dot
//! product instructions want it). Q4 has four 64-byte runs: run `i` has group `i`
//! in its low nibbles and group `i + 4` in its high ones.
//!
//! The packed size is the file's, save for padding: there is one copy of the
//! weights in memory.

use super::PackError;
use super::arena::{Arena, Region};
use super::convert::f16_to_f32;
use super::lanes::LANES;

/// Inputs that share a scale: the block of GGUF's Q4_0, Q4_1 and Q8_0, and of
/// the quantised activations.
pub const BLOCK: usize = 32;

/// Element type of a weight matrix, as in the GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // the names that the format and its users know
pub enum WeightType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// Blocks of 32: scale (f16) and 4-bit quants; weight = d * (q - 8).
    Q4_0,
    /// Blocks of 32: scale, minimum (f16) and 4-bit quants; weight = d * q + m.
    Q4_1,
    /// Blocks of 32: scale (f16) and signed bytes; weight = d * q.
    Q8_0,
}

impl WeightType {
    /// All types that the kernels take.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Q4_0, Self::Q4_1, Self::Q8_0];

    /// Whether inputs are quantised before they meet weights of this type.
    pub fn quantised(self) -> bool {
        !matches!(self, Self::F32 | Self::F16)
    }

    /// Inputs in a record, of the packed form and of the file alike.
    pub(super) fn inputs(self) -> usize {
        if self.quantised() { BLOCK } else { 1 }
    }

    /// Bytes of the file for `inputs()` weights of one row.
    pub(super) fn file_block(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// Bytes of a record: `inputs()` weights of 16 rows.
    pub(super) const fn record(self) -> usize {
        match self {
            Self::F32 => 64,
            Self::F16 => 32,
            Self::Q4_0 => 288,
            Self::Q4_1 => 320,
            Self::Q8_0 => 544,
        }
    }

    /// Bytes of one row of `cols` weights in the file.
    ///
    /// # Errors
    /// [`PackError::Columns`] when `cols` is zero or not whole blocks.
    pub fn row_bytes(self, cols: usize) -> Result<usize, PackError> {
        if cols == 0 || !cols.is_multiple_of(self.inputs()) {
            return Err(PackError::Columns {
                cols,
                block: self.inputs(),
            });
        }
        (cols / self.inputs())
            .checked_mul(self.file_block())
            .ok_or(PackError::TooLarge)
    }
}

/// A weight matrix as it stands in the file: row after row, one row per output.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Element type.
    pub weight_type: WeightType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `rows * weight_type.row_bytes(cols)` bytes.
    pub bytes: &'a [u8],
}

impl Matrix<'_> {
    fn check(&self) -> Result<usize, PackError> {
        let row = self.weight_type.row_bytes(self.cols)?;
        let expected = self.rows.checked_mul(row).ok_or(PackError::TooLarge)?;
        if self.rows == 0 {
            return Err(PackError::NoRows);
        }
        if self.bytes.len() != expected {
            return Err(PackError::Length {
                expected,
                found: self.bytes.len(),
            });
        }
        Ok(row)
    }
}

/// A weight matrix in panels, ready for [`super::Kernels::matmul`].
#[derive(Debug)]
pub struct Packed {
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    gated: bool,
    panel_bytes: usize,
    region: Region,
}

impl Packed {
    /// Bytes that a matrix takes when packed (before alignment to 64).
    ///
    /// # Errors
    /// [`PackError::Columns`] and [`PackError::TooLarge`].
    pub fn bytes_for(ty: WeightType, rows: usize, cols: usize) -> Result<usize, PackError> {
        ty.row_bytes(cols)?;
        (cols / ty.inputs())
            .checked_mul(ty.record())
            .and_then(|panel| panel.checked_mul(rows.div_ceil(LANES)))
            .and_then(|n| n.checked_next_multiple_of(64))
            .ok_or(PackError::TooLarge)
    }

    /// Packs one matrix.
    ///
    /// # Errors
    /// Any [`PackError`] about the matrix, or about memory.
    pub fn pack(arena: &mut Arena, matrix: &Matrix<'_>) -> Result<Self, PackError> {
        Self::pack_stacked(arena, std::slice::from_ref(matrix))
    }

    /// Packs several matrices with the same type and inputs as one, outputs in the
    /// order given (query, key and value of a layer: one pass over the input).
    ///
    /// # Errors
    /// [`PackError::Mismatch`] when types or inputs differ, [`PackError::PartialPanel`]
    /// when any but the last does not have a multiple of 16 rows; then pack them
    /// one by one.
    pub fn pack_stacked(arena: &mut Arena, parts: &[Matrix<'_>]) -> Result<Self, PackError> {
        let Some(first) = parts.first() else {
            return Err(PackError::NoRows);
        };
        let mut rows = 0usize;
        for part in parts {
            part.check()?;
            if (part.weight_type, part.cols) != (first.weight_type, first.cols) {
                return Err(PackError::Mismatch);
            }
            if !rows.is_multiple_of(LANES) {
                return Err(PackError::PartialPanel { rows });
            }
            rows = rows.checked_add(part.rows).ok_or(PackError::TooLarge)?;
        }
        let mut packed = Self::empty(arena, first.weight_type, rows, rows, first.cols, false)?;
        let mut panel = 0;
        for part in parts {
            packed.fill(part, panel, 1)?;
            panel += part.rows / LANES;
        }
        Ok(packed)
    }

    /// Packs the gate and the up projection of a gated feed-forward block with
    /// their panels alternating, for [`super::Kernels::matmul_swiglu`].
    ///
    /// # Errors
    /// [`PackError::Mismatch`] when types or shapes differ; then pack them one by
    /// one and use [`super::Kernels::swiglu`].
    pub fn pack_gate_up(
        arena: &mut Arena,
        gate: &Matrix<'_>,
        up: &Matrix<'_>,
    ) -> Result<Self, PackError> {
        gate.check()?;
        up.check()?;
        if (gate.weight_type, gate.rows, gate.cols) != (up.weight_type, up.rows, up.cols) {
            return Err(PackError::Mismatch);
        }
        let padded = gate
            .rows
            .checked_next_multiple_of(LANES)
            .ok_or(PackError::TooLarge)?;
        let stored = padded.checked_mul(2).ok_or(PackError::TooLarge)?;
        let mut packed = Self::empty(arena, gate.weight_type, gate.rows, stored, gate.cols, true)?;
        packed.fill(gate, 0, 2)?;
        packed.fill(up, 1, 2)?;
        Ok(packed)
    }

    fn empty(
        arena: &mut Arena,
        weight_type: WeightType,
        rows: usize,
        stored_rows: usize,
        cols: usize,
        gated: bool,
    ) -> Result<Self, PackError> {
        let region = arena.take(Self::bytes_for(weight_type, stored_rows, cols)?)?;
        let panel_bytes = cols / weight_type.inputs() * weight_type.record();
        Ok(Self {
            weight_type,
            rows,
            cols,
            gated,
            panel_bytes,
            region,
        })
    }

    /// Writes `matrix` into every `step`-th panel from `first` on.
    fn fill(&mut self, matrix: &Matrix<'_>, first: usize, step: usize) -> Result<(), PackError> {
        let row_bytes = matrix.check()?;
        let (ty, panel_bytes) = (self.weight_type, self.panel_bytes);
        let panels = self.region.bytes_mut().chunks_exact_mut(panel_bytes);
        let sources = matrix.bytes.chunks(row_bytes * LANES);
        for (panel, source) in panels.skip(first).step_by(step).zip(sources) {
            for (lane, row) in source.chunks_exact(row_bytes).enumerate() {
                let blocks = row.chunks_exact(ty.file_block());
                for (record, block) in panel.chunks_exact_mut(ty.record()).zip(blocks) {
                    pack_block(ty, record, lane, block);
                }
            }
        }
        Ok(())
    }

    /// Element type.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Outputs (of a gated pair: of each of the two).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of 16 outputs, the unit in which work is split.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Whether this is a gate and an up projection ([`Packed::pack_gate_up`]).
    pub fn gated(&self) -> bool {
        self.gated
    }

    /// Bytes of memory that the weights take.
    pub fn bytes(&self) -> usize {
        self.region.bytes().len()
    }

    /// Stored panels per 16 outputs.
    pub(super) fn streams(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }

    pub(super) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// The bytes of all panels; panel `i` starts at `i * panel_bytes()`.
    pub(super) fn data(&self) -> &[u8] {
        self.region.bytes()
    }

    /// Writes the weights of output `row` as `f32` (embedding lookup). Exact for
    /// all types but Q4_1, whose `d * q + m` is rounded once. Of a gated pair,
    /// rows of the gate.
    ///
    /// # Panics
    /// When there is no such row, or `out` does not have `cols()` values.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "a row beyond the matrix");
        assert_eq!(
            out.len(),
            self.cols,
            "a row has as many values as the matrix has inputs"
        );
        let (panel, lane) = (row / LANES * self.streams(), row % LANES);
        let records = self.data()[panel * self.panel_bytes..][..self.panel_bytes]
            .chunks_exact(self.weight_type.record());
        for (record, out) in records.zip(out.chunks_mut(self.weight_type.inputs())) {
            unpack_lane(self.weight_type, record, lane, out);
        }
    }
}

/// Offset of the quants in a record.
pub(super) const fn quants_at(ty: WeightType) -> usize {
    match ty {
        WeightType::Q4_0 | WeightType::Q8_0 => 2 * LANES,
        WeightType::Q4_1 => 4 * LANES,
        WeightType::F32 | WeightType::F16 => 0,
    }
}

/// Puts one row's block of the file into its lane of a (zeroed) record.
fn pack_block(ty: WeightType, record: &mut [u8], lane: usize, block: &[u8]) {
    match ty {
        WeightType::F32 => record[4 * lane..4 * lane + 4].copy_from_slice(block),
        WeightType::F16 => record[2 * lane..2 * lane + 2].copy_from_slice(block),
        WeightType::Q4_0 | WeightType::Q4_1 => {
            let (head, quants) = block.split_at(block.len() - BLOCK / 2);
            let (scales, packed) = record.split_at_mut(quants_at(ty));
            for (field, value) in scales.chunks_exact_mut(2 * LANES).zip(head.chunks_exact(2)) {
                field[2 * lane..2 * lane + 2].copy_from_slice(value);
            }
            // The file has input j in the low nibble of byte j, input j + 16 in the
            // high one: the same pairing as groups i and i + 4.
            for (run, four) in packed
                .chunks_exact_mut(4 * LANES)
                .zip(quants.chunks_exact(4))
            {
                run[4 * lane..4 * lane + 4].copy_from_slice(four);
            }
        }
        WeightType::Q8_0 => {
            let (scale, quants) = block.split_at(2);
            let (scales, packed) = record.split_at_mut(quants_at(ty));
            scales[2 * lane..2 * lane + 2].copy_from_slice(scale);
            for (run, four) in packed
                .chunks_exact_mut(4 * LANES)
                .zip(quants.chunks_exact(4))
            {
                for (to, from) in run[4 * lane..].iter_mut().zip(four) {
                    *to = from ^ 0x80;
                }
            }
        }
    }
}

/// The weights of one lane of a record.
fn unpack_lane(ty: WeightType, record: &[u8], lane: usize, out: &mut [f32]) {
    let half = |field: usize| {
        let at = 2 * (LANES * field + lane);
        f16_to_f32(u16::from_le_bytes([record[at], record[at + 1]]))
    };
    // Four inputs of the lane, then the same of the next lane.
    let quants = record[quants_at(ty)..]
        .chunks_exact(4 * LANES)
        .map(|run| &run[4 * lane..4 * lane + 4]);
    match ty {
        WeightType::F32 => {
            let at = 4 * lane;
            out[0] =
                f32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
        }
        WeightType::F16 => out[0] = half(0),
        WeightType::Q4_0 | WeightType::Q4_1 => {
            let d = half(0);
            let min = (ty == WeightType::Q4_1).then(|| half(1));
            let value = |q: u8| match min {
                Some(min) => d * f32::from(q) + min,
                None => d * (f32::from(q) - 8.0),
            };
            let (low, high) = out.split_at_mut(BLOCK / 2);
            let fours = low.chunks_exact_mut(4).zip(high.chunks_exact_mut(4));
            for (four, (low, high)) in quants.zip(fours) {
                for ((&byte, low), high) in four.iter().zip(low).zip(high) {
                    (*low, *high) = (value(byte & 15), value(byte >> 4));
                }
            }
        }
        WeightType::Q8_0 => {
            let d = half(0);
            for (&byte, out) in quants.flatten().zip(out) {
                *out = d * f32::from((byte ^ 0x80) as i8);
            }
        }
    }
}
