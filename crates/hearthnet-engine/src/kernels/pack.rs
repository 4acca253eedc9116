//! Weight matrices, repacked at load into the order in which the kernels read them.
//!
//! A matrix of `rows` outputs and `cols` inputs is split into *panels* of 16 output rows; the last
//! panel is padded with zeros. A panel is a sequence of *records*. A record holds the weights of
//! 16 rows for some inputs:
//!
//! | type | inputs | bytes | contents |
//! |---|---|---|---|
//! | F32 | 1 | 64 | 16 weights |
//! | F16, BF16 | 1 | 32 | 16 weights |
//! | Q4_0, IQ4_NL, MXFP4 | 32 | 288 | 16 scales, quants |
//! | Q4_1 | 32 | 320 | 16 scales, 16 minima, quants |
//! | Q5_0 | 32 | 352 | 16 scales, quants |
//! | Q5_1 | 32 | 384 | 16 scales, 16 minima, quants |
//! | Q8_0 | 32 | 544 | 16 scales, quants |
//! | Q2_K | 256 | 1344 | 16 scales, 16 minima, 8 times: sub-scales, quants |
//! | Q3_K | 256 | 1824 | 16 scales, 8 times: sub-scales, quants |
//! | Q4_K | 256 | 2368 | 16 scales, 16 minima, 8 times: sub-scales, quants |
//! | Q5_K | 256 | 2880 | 16 scales, 16 minima, 8 times: sub-scales, quants |
//! | Q6_K | 256 | 3360 | 16 scales, 8 times: sub-scales, quants |
//! | IQ4_XS | 256 | 2208 | 16 scales, 8 times: sub-scales, quants |
//!
//! Scales and minima are the file's 16-bit floats. Sub-scales are two bytes (IQ4_XS: one byte) per
//! 32 weights of a row, row after row.
//!
//! The quants of 32 inputs form eight groups of four consecutive inputs. Byte `4 * row + j` of the
//! 64 bytes of a *run* belongs to row `row` and input `4 * g + j`, so a 32-bit lane holds the
//! weights that one row multiplies with four neighbouring activations. Runs by quant width:
//!
//! | bits | runs |
//! |---|---|
//! | 8 | eight: run `g` has group `g`, as unsigned `q + 128` for the dot product instructions |
//! | 4 | four: run `i` has group `i` in its low nibbles and group `i + 4` in its high ones |
//! | 6 | the four of the low bits; two of the high bits: run `r` has group `4 r + p` at bit `2 p` |
//! | 5 | the four of the low bits; one of the high bit: group `g` at bit `g` |
//! | 2 | two: run `r` has group `4 r + p` at bit `2 p` |
//! | 3 | the two of the low bits; one of the high bit: group `g` at bit `g` |
//!
//! Memory holds one copy of the weights, as large as in the file apart from padding. Exceptions:
//! the sub-scales of Q3_K, Q4_K, Q5_K and IQ4_XS take 8 bits instead of 6 (at most 3.7% more), and
//! the scale of MXFP4 takes 16 bits instead of 8 (5.9% more).

use std::ops::Range;

use hearthnet_files::blocks::{BLOCK, Bits, Block, Layout, WeightType, all_finite};
use hearthnet_files::floats::{bf16_to_f32, f16_to_f32};
use rayon::prelude::*;

use super::PackError;
use super::arena::{Arena, Region};
use super::lanes::LANES;
use super::record::{block_bytes, head_bytes, record_bytes};

/// Weight matrix in the layout of a GGUF file: row after row, one row per output.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub weight_type: WeightType,
    pub rows: usize,
    pub cols: usize,
    /// `rows` rows in the layout of the file.
    pub bytes: &'a [u8],
}

impl Matrix<'_> {
    fn check(&self) -> Result<usize, PackError> {
        let row = row_bytes(self.weight_type, self.cols)?;
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

/// Bytes in the file for one row of `cols` weights.
///
/// # Errors
/// [`PackError::Columns`] if `cols` is zero or not whole blocks, and [`PackError::TooLarge`].
pub(super) fn row_bytes(ty: WeightType, cols: usize) -> Result<usize, PackError> {
    if cols == 0 || !cols.is_multiple_of(ty.inputs()) {
        return Err(PackError::Columns {
            cols,
            block: ty.inputs(),
        });
    }
    (cols / ty.inputs())
        .checked_mul(ty.file_block())
        .ok_or(PackError::TooLarge)
}

/// Repacked weight matrix for [`super::Kernels::matmul`].
#[derive(Debug)]
pub struct Packed {
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    gated: bool,
    panel_bytes: usize,
    region: Region,
    not_finite: Option<usize>,
}

impl Packed {
    /// Bytes that a matrix takes when packed (before alignment to 64).
    ///
    /// # Errors
    /// [`PackError::Columns`] and [`PackError::TooLarge`].
    pub fn bytes_for(ty: WeightType, rows: usize, cols: usize) -> Result<usize, PackError> {
        row_bytes(ty, cols)?;
        (cols / ty.inputs())
            .checked_mul(record_bytes(ty))
            .and_then(|panel| panel.checked_mul(rows.div_ceil(LANES)))
            .and_then(|n| n.checked_next_multiple_of(64))
            .ok_or(PackError::TooLarge)
    }

    /// Packs a matrix, or several of the same type and inputs as one, outputs in the given order:
    /// query, key and value of a layer then take one pass over the input.
    ///
    /// # Errors
    /// Any [`PackError`] about a matrix, or about memory. [`PackError::Mismatch`] when types or
    /// inputs differ, [`PackError::PartialPanel`] when a matrix other than the last has a number of
    /// rows that is not a multiple of 16: the caller then packs them one by one.
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
                return Err(PackError::PartialPanel(rows));
            }
            rows = rows.checked_add(part.rows).ok_or(PackError::TooLarge)?;
        }
        let mut packed = Self::empty(arena, first.weight_type, rows, rows, first.cols, false)?;
        let mut panel = 0;
        for (index, part) in parts.iter().enumerate() {
            packed.fill(part, index, panel, 1)?;
            panel += part.rows / LANES;
        }
        Ok(packed)
    }

    /// Packs the gate and the up projection of a gated feed-forward block with
    /// their panels alternating, for [`super::Kernels::matmul_swiglu`].
    ///
    /// # Errors
    /// [`PackError::Mismatch`] when types or shapes differ. The caller then packs them one by one
    /// and uses [`super::Kernels::gate`].
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
        packed.fill(gate, 0, 0, 2)?;
        packed.fill(up, 1, 1, 2)?;
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
        let panel_bytes = cols / weight_type.inputs() * record_bytes(weight_type);
        Ok(Self {
            weight_type,
            rows,
            cols,
            gated,
            panel_bytes,
            region,
            not_finite: None,
        })
    }

    /// Writes `matrix` into every `step`-th panel, starting with panel `first`. `part` is its index
    /// among the matrices that are packed together.
    fn fill(
        &mut self,
        matrix: &Matrix<'_>,
        part: usize,
        first: usize,
        step: usize,
    ) -> Result<(), PackError> {
        let row_bytes = matrix.check()?;
        let (ty, panel_bytes) = (self.weight_type, self.panel_bytes);
        let panels = self.region.bytes_mut().par_chunks_exact_mut(panel_bytes);
        let sources = matrix.bytes.par_chunks(row_bytes * LANES);
        let finite = panels
            .skip(first)
            .step_by(step)
            .zip(sources)
            .map(|(panel, source)| {
                // `pack_panel` reads the same rows, so this check costs no memory bandwidth.
                let finite = all_finite(ty, source);
                pack_panel(ty, panel, source, row_bytes);
                finite
            })
            // Not `all`, which would skip panels.
            .reduce(|| true, |a, b| a & b);
        if !finite {
            self.not_finite.get_or_insert(part);
        }
        Ok(())
    }

    /// Index, among the matrices packed together, of the first that holds a NaN or an infinity.
    pub fn not_finite(&self) -> Option<usize> {
        self.not_finite
    }

    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Outputs. For a gated pair: outputs of each of the two matrices.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of groups of 16 outputs, the unit in which work is split.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Outputs of some panels.
    pub(crate) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        panels.start * LANES..self.rows.min(panels.end * LANES)
    }

    /// Whether this was packed by [`Packed::pack_gate_up`].
    pub fn gated(&self) -> bool {
        self.gated
    }

    /// Bytes of memory of the weights, padding included.
    pub fn bytes(&self) -> usize {
        self.region.bytes().len()
    }

    /// Stored panels per 16 outputs: 2 for a gated pair.
    pub(super) fn streams(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }

    /// Bytes of a panel of 16 rows.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of all panels, which have equal length and follow one another.
    pub fn data(&self) -> &[u8] {
        self.region.bytes()
    }

    /// Writes the weights of output `row` as `f32` (embedding lookup). The result is exact for
    /// types without a minimum; with a minimum, the sum is rounded once. For a gated pair: rows of
    /// the gate.
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
            .chunks_exact(record_bytes(self.weight_type));
        for (record, out) in records.zip(out.chunks_mut(self.weight_type.inputs())) {
            unpack_lane(self.weight_type, record, lane, out);
        }
    }
}

/// Bytes of a panel that all 16 rows fill before the next bytes, so that they stay in the L1 cache.
const STRIP: usize = 4096;

/// Fills a zeroed panel from at most 16 rows of the file.
fn pack_panel(ty: WeightType, panel: &mut [u8], rows: &[u8], row_bytes: usize) {
    let (layout, record, block) = (Layout::of(ty), record_bytes(ty), ty.file_block());
    let strip = (STRIP / record).max(1);
    let mut numbers = Block::EMPTY;
    for (i, records) in panel.chunks_mut(strip * record).enumerate() {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let row = &row[i * strip * block..];
            match ty {
                WeightType::F32 => copy_lane::<4>(records, lane, row),
                WeightType::F16 | WeightType::BF16 => copy_lane::<2>(records, lane, row),
                _ => {
                    let records = records.chunks_exact_mut(record);
                    for (record, block) in records.zip(row.chunks_exact(block)) {
                        numbers.read(ty, block);
                        pack_block(&layout, record, lane, &numbers);
                    }
                }
            }
        }
    }
}

/// Copies one row's weights of `N` bytes into its lane of records.
fn copy_lane<const N: usize>(records: &mut [u8], lane: usize, row: &[u8]) {
    let lanes = records.chunks_exact_mut(N * LANES);
    for (record, weight) in lanes.zip(row.as_chunks::<N>().0) {
        record[N * lane..][..N].copy_from_slice(weight);
    }
}

/// Writes one row's block into its lane of a zeroed record.
fn pack_block(layout: &Layout, record: &mut [u8], lane: usize, block: &Block) {
    let (head, blocks) = record.split_at_mut(head_bytes(*layout));
    for (field, value) in head.chunks_exact_mut(2 * LANES).zip(block.fields) {
        field[2 * lane..2 * lane + 2].copy_from_slice(&value.to_le_bytes());
    }
    let blocks = blocks.chunks_exact_mut(block_bytes(*layout));
    let numbers = block
        .sub_scales
        .iter()
        .zip(block.quants.as_chunks::<BLOCK>().0);
    for (block, (sub_scale, quants)) in blocks.zip(numbers) {
        let bytes = layout.sub_scale.bytes();
        let (sub_scales, runs) = block.split_at_mut(LANES * bytes);
        sub_scales[lane * bytes..][..bytes].copy_from_slice(&sub_scale[..bytes]);
        let (runs, _) = runs.as_chunks_mut::<{ 4 * LANES }>();
        let (groups, _) = quants.as_chunks::<4>();
        match layout.bits {
            Bits::Eight => {
                for (run, group) in runs.iter_mut().zip(groups) {
                    run[4 * lane..4 * lane + 4].copy_from_slice(group);
                }
            }
            Bits::Two => twos(runs, lane, groups, 0),
            Bits::Three => {
                let (low, high) = runs.split_at_mut(2);
                twos(low, lane, groups, 0);
                ones(high, lane, groups, 2);
            }
            Bits::Four => fours(runs, lane, groups),
            Bits::Five => {
                let (low, high) = runs.split_at_mut(4);
                fours(low, lane, groups);
                ones(high, lane, groups, 4);
            }
            Bits::Six => {
                let (low, high) = runs.split_at_mut(4);
                fours(low, lane, groups);
                twos(high, lane, groups, 4);
            }
        }
    }
}

type Run = [u8; 4 * LANES];

/// Writes the four bytes of a lane into a run, the first quant in the lowest byte.
fn put(run: &mut Run, lane: usize, bytes: u32) {
    run[4 * lane..4 * lane + 4].copy_from_slice(&bytes.to_le_bytes());
}

/// Packs four quants, the first in the lowest byte, shifted right and masked with `mask` per byte.
fn cut(group: [u8; 4], shift: u32, mask: u8) -> u32 {
    u32::from_le_bytes(group) >> shift & u32::from_le_bytes([mask; 4])
}

/// Writes the low four bits of each quant to four runs.
fn fours(runs: &mut [Run], lane: usize, groups: &[[u8; 4]]) {
    let (low, high) = groups.split_at(4);
    for ((run, low), high) in runs.iter_mut().zip(low).zip(high) {
        put(run, lane, cut(*low, 0, 15) | cut(*high, 0, 15) << 4);
    }
}

/// Writes two bits of each quant, starting at bit `shift`, to two runs.
fn twos(runs: &mut [Run], lane: usize, groups: &[[u8; 4]], shift: u32) {
    for (run, groups) in runs.iter_mut().zip(groups.as_chunks::<4>().0) {
        let bits = |p: usize| cut(groups[p], shift, 3) << (2 * p);
        put(run, lane, bits(0) | bits(1) | bits(2) | bits(3));
    }
}

/// Writes bit `shift` of each quant to one run.
fn ones(runs: &mut [Run], lane: usize, groups: &[[u8; 4]], shift: u32) {
    if let Some(run) = runs.first_mut() {
        let bits = groups.iter().enumerate();
        let bits = bits.fold(0, |all, (g, group)| all | cut(*group, shift, 1) << g);
        put(run, lane, bits);
    }
}

/// Reads quant `at` (lane `at / 4`, input `at % 4`) of group `g` from the runs of 32 inputs.
#[inline(always)]
pub(super) fn quant(bits: Bits, runs: &[u8], g: usize, at: usize) -> u8 {
    let run = |r: usize| runs[4 * LANES * r + at];
    let four = || run(g % 4) >> (4 * (g / 4)) & 15;
    let two = |from: usize| run(from + g / 4) >> (2 * (g % 4)) & 3;
    let one = |from: usize| run(from) >> g & 1;
    match bits {
        Bits::Two => two(0),
        Bits::Three => two(0) | one(2) << 2,
        Bits::Four => four(),
        Bits::Five => four() | one(4) << 4,
        Bits::Six => four() | two(4) << 4,
        Bits::Eight => run(g),
    }
}

fn unpack_lane(ty: WeightType, record: &[u8], lane: usize, out: &mut [f32]) {
    let half = |field: usize| {
        let at = 2 * (LANES * field + lane);
        u16::from_le_bytes([record[at], record[at + 1]])
    };
    match ty {
        WeightType::F32 => {
            let at = 4 * lane;
            out[0] =
                f32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
        }
        WeightType::F16 => out[0] = f16_to_f32(half(0)),
        WeightType::BF16 => out[0] = bf16_to_f32(half(0)),
        _ => {
            let layout = Layout::of(ty);
            let mut numbers = Block::EMPTY;
            for (i, field) in numbers.fields[..layout.fields].iter_mut().enumerate() {
                *field = half(i);
            }
            let blocks = record[head_bytes(layout)..].chunks_exact(block_bytes(layout));
            let parts = numbers
                .sub_scales
                .iter_mut()
                .zip(numbers.quants.as_chunks_mut::<BLOCK>().0);
            for (block, (sub_scale, quants)) in blocks.zip(parts) {
                let bytes = layout.sub_scale.bytes();
                let (sub_scales, runs) = block.split_at(LANES * bytes);
                sub_scale[..bytes].copy_from_slice(&sub_scales[lane * bytes..][..bytes]);
                for (input, to) in quants.iter_mut().enumerate() {
                    *to = quant(layout.bits, runs, input / 4, 4 * lane + input % 4);
                }
            }
            numbers.values(ty, out);
        }
    }
}
