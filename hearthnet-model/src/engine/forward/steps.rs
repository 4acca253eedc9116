//! The steps of a tile through a layer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::plan::Piece;
use super::{Overflow, Parts};
use crate::BoundaryDtype;
use crate::engine::weights::{Ffn, Layer};
use crate::kernels::{
    Act, ActForm, Attention, AttentionScratch, LANES, Output, PAGE, Packed, SharedMut, Tile,
};
use crate::spec::ModelSpec;

/// A pass of some rows over the layers.
pub(super) struct Pass<'a> {
    pub(super) parts: &'a Parts<'a>,
    pub(super) widths: Widths,
    pub(super) pages: &'a [Vec<SharedMut<'a, u16>>],
    pub(super) overflow: &'a FirstOverflow,
    /// First row of the pass in the batch.
    pub(super) begin: usize,
}

/// A tile's rows and intermediate values. Which member may touch what is the business of [`wide`]
/// and [`tall`].
pub(super) struct Rows<'a> {
    /// Counted over the pass.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) pieces: &'a [Piece],
    pub(super) x: SharedMut<'a, f32>,
    pub(super) qkv: SharedMut<'a, f32>,
}

/// Buffers of a [`Work`], shared.
#[derive(Clone, Copy)]
pub(super) struct Buffers<'a> {
    pub(super) act: SharedMut<'a, Act>,
    pub(super) attn: SharedMut<'a, f32>,
    pub(super) h: SharedMut<'a, f32>,
    pub(super) up: SharedMut<'a, f32>,
}

/// Intermediate values of one tile.
#[derive(Default)]
pub(super) struct Work {
    pub(super) act: Act,
    pub(super) attn: Vec<f32>,
    pub(super) h: Vec<f32>,
    pub(super) up: Vec<f32>,
}

/// Widths of the intermediate values.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) x: usize,
    pub(super) q: usize,
    pub(super) kv: usize,
    pub(super) qkv: usize,
    pub(super) ffn: usize,
}

impl Widths {
    pub(super) fn of(spec: &ModelSpec) -> Self {
        let (q, kv) = (spec.query_width() as usize, spec.kv_width() as usize);
        Self {
            x: spec.width as usize,
            q,
            kv,
            qkv: q + 2 * kv,
            ffn: spec.ffn as usize,
        }
    }
}

impl Work {
    pub(super) fn buffers(&mut self, widths: &Widths, rows: usize, ffn: bool) -> Buffers<'_> {
        grow(&mut self.attn, rows * widths.q);
        grow(&mut self.h, rows * widths.ffn);
        grow(&mut self.up, if ffn { rows * widths.ffn } else { 0 });
        Buffers {
            act: SharedMut::new(std::slice::from_mut(&mut self.act)),
            attn: SharedMut::new(&mut self.attn),
            h: SharedMut::new(&mut self.h),
            up: SharedMut::new(&mut self.up),
        }
    }
}

pub(super) fn tiles_of<'a>(
    widths: &Widths,
    tiles: &'a [Vec<Piece>],
    size: usize,
    x: &'a mut [f32],
    qkv: &'a mut [f32],
) -> Vec<Rows<'a>> {
    let buffers = x
        .chunks_mut(size * widths.x)
        .zip(qkv.chunks_mut(size * widths.qkv));
    let tiles = tiles.iter().zip(buffers).enumerate();
    tiles
        .map(|(index, (pieces, (x, qkv)))| Rows {
            first: index * size,
            rows: x.len() / widths.x,
            pieces,
            x: SharedMut::new(x),
            qkv: SharedMut::new(qkv),
        })
        .collect()
}

/// The steps of a tile. All of them are unsafe in the same way: what they write belongs to the
/// caller's unit of work, and what they read is written by no other unit of the phase.
#[allow(unsafe_code)]
impl Pass<'_> {
    pub(super) fn split_ffn(&self) -> bool {
        self.parts
            .layers
            .iter()
            .any(|layer| matches!(layer.ffn, Ffn::Split { .. }))
    }

    /// Reads `x`, writes `act`.
    pub(super) unsafe fn attn_norm(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let layer = &self.parts.layers[index];
        // SAFETY: the caller's.
        unsafe { self.norm(&layer.attn_norm, layer.qkv.form, rows, buffers) };
    }

    /// Reads `x`, writes `act`.
    pub(super) unsafe fn ffn_norm(&self, layer: &Layer, rows: &Rows<'_>, buffers: Buffers<'_>) {
        // SAFETY: the caller's.
        unsafe { self.norm(&layer.ffn_norm, layer.ffn.form(), rows, buffers) };
    }

    pub(super) unsafe fn norm(
        &self,
        weight: &[f32],
        form: ActForm,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // SAFETY: the caller's.
        let (x, act) = unsafe { (rows.x.slice(0..rows.rows * self.widths.x), buffers.act()) };
        let eps = self.parts.spec.norm_eps;
        self.parts.kernels.norm_prepare(x, weight, eps, form, act);
    }

    /// Reads `act`, writes the columns of `panels` in `qkv`; panels are counted over all parts.
    pub(super) unsafe fn qkv(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let (mut before, mut column) = (0, 0);
        for part in &layer.qkv.parts {
            let end = before + part.panels();
            let own = panels.start.max(before)..panels.end.min(end);
            if own.start < own.end {
                let own = own.start - before..own.end - before;
                // SAFETY: the caller's.
                unsafe {
                    let columns = columns(part, &own, column);
                    let out = rows.qkv.tile_mut(rows.rows, self.widths.qkv, columns);
                    self.parts
                        .kernels
                        .matmul(part, own, buffers.read_act(), Output::Store, out);
                }
            }
            before = end;
            column += part.rows();
        }
    }

    /// Turns queries and keys in `qkv`, and writes keys and values to the pages.
    pub(super) unsafe fn place(&self, layer: usize, rows: &Rows<'_>) {
        let Parts {
            kernels,
            rope,
            geometry,
            first,
            ..
        } = *self.parts;
        let Widths { q, kv, qkv, .. } = self.widths;
        let d = geometry.head_dim;
        for piece in rows.pieces {
            for i in 0..piece.rows {
                let (row, position) = (piece.row + i, piece.position + i);
                // SAFETY: the caller's.
                let values = unsafe { rows.qkv.slice_mut(row * qkv..(row + 1) * qkv) };
                kernels.rope(rope, position, &mut values[..q + kv], d);
                let (keys, values) = values[q..].split_at(kv);
                let page = &self.pages[piece.span][position / PAGE];
                for head in 0..geometry.kv_heads {
                    let strip = geometry.strip(geometry.strip_of(first + layer, head));
                    let cells = head * d..(head + 1) * d;
                    // SAFETY: the caller's; a slot belongs to one row.
                    unsafe {
                        kernels.store_kv(
                            page.part(strip),
                            position % PAGE,
                            &keys[cells.clone()],
                            &values[cells],
                        );
                    }
                }
            }
        }
    }

    /// Reads queries and pages, writes the columns of some heads of a piece in `attn`.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn attend(
        &self,
        layer: usize,
        rows: &Rows<'_>,
        piece: &Piece,
        kv_head: usize,
        heads: Range<usize>,
        attn: SharedMut<'_, f32>,
        scratch: &mut AttentionScratch,
    ) {
        let Parts {
            kernels,
            geometry,
            first,
            ..
        } = *self.parts;
        let Widths { q, qkv, .. } = self.widths;
        let d = geometry.head_dim;
        let strip = geometry.strip(geometry.strip_of(first + layer, kv_head));
        let end = (piece.position + piece.rows).div_ceil(PAGE);
        // SAFETY: the caller's.
        let pages: Vec<&[u16]> = self.pages[piece.span][..end]
            .iter()
            .map(|page| unsafe { page.slice(strip.clone()) })
            .collect();
        let group = self.parts.group();
        let columns = (kv_head * group + heads.start) * d..(kv_head * group + heads.end) * d;
        let attention = Attention {
            head_dim: d,
            heads: heads.len(),
            scale: 1.0 / (d as f32).sqrt(),
            position: piece.position,
            pages: &pages,
        };
        // SAFETY: the caller's.
        unsafe {
            let queries = rows
                .qkv
                .slice(piece.row * qkv + columns.start..rows.rows * qkv);
            let queries = Tile::new(queries, piece.rows, columns.len(), qkv);
            let out = attn
                .part(piece.row * q..rows.rows * q)
                .tile_mut(piece.rows, q, columns);
            kernels.attention(&attention, queries, scratch, out);
        }
    }

    /// Reads `attn`, writes `act`.
    pub(super) unsafe fn quantise_attn(
        &self,
        layer: &Layer,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let width = self.widths.q;
        // SAFETY: the caller's.
        let (attn, act) = unsafe { (buffers.attn.slice(0..rows.rows * width), buffers.act()) };
        self.parts
            .kernels
            .prepare(attn, width, ActForm::of([&layer.attn_output]), act);
    }

    /// Reads `act`, adds to the columns of `panels` in `x`.
    pub(super) unsafe fn attn_output(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // Not the end of a block: the sum stays as it is.
        let output = Output::Add(BoundaryDtype::F32);
        // SAFETY: the caller's.
        unsafe { self.add(&layer.attn_output, panels, output, rows, buffers) };
    }

    pub(super) unsafe fn add(
        &self,
        matrix: &Packed,
        panels: Range<usize>,
        output: Output,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let columns = columns(matrix, &panels, 0);
            let out = rows.x.tile_mut(rows.rows, self.widths.x, columns);
            self.parts
                .kernels
                .matmul(matrix, panels, buffers.read_act(), output, out);
        }
    }

    /// Reads `act`, writes the columns of `panels` in `h`.
    pub(super) unsafe fn ffn(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let kernels = self.parts.kernels;
        let (width, count) = (self.widths.ffn, rows.rows);
        // SAFETY: the caller's.
        unsafe {
            let act = buffers.read_act();
            match &layer.ffn {
                Ffn::Fused(both) => {
                    let out = buffers.h.tile_mut(count, width, columns(both, &panels, 0));
                    kernels.matmul_swiglu(both, panels, act, out);
                }
                Ffn::Split { gate, up } => {
                    let columns = columns(gate, &panels, 0);
                    let mut gates = buffers.h.tile_mut(count, width, columns.clone());
                    let mut ups = buffers.up.tile_mut(count, width, columns);
                    let store = Output::Store;
                    kernels.matmul(gate, panels.clone(), act, store, gates.reborrow());
                    kernels.matmul(up, panels, act, store, ups.reborrow());
                    for row in 0..count {
                        kernels.swiglu(gates.row_mut(row), ups.row(row));
                    }
                }
            }
        }
    }

    /// Reads `h`, writes `act`.
    pub(super) unsafe fn quantise_h(&self, layer: &Layer, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let width = self.widths.ffn;
        // SAFETY: the caller's.
        let (h, act) = unsafe { (buffers.h.slice(0..rows.rows * width), buffers.act()) };
        self.parts
            .kernels
            .prepare(h, width, ActForm::of([&layer.ffn_down]), act);
    }

    /// Reads `act`, adds to the columns of `panels` in `x`, and rounds them: the block is done.
    pub(super) unsafe fn ffn_down(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let output = Output::Add(self.parts.spec.boundary);
        // SAFETY: the caller's.
        unsafe { self.add(&layer.ffn_down, panels, output, rows, buffers) };
    }

    /// Reads `x`, a block's output.
    pub(super) unsafe fn check(&self, layer: usize, rows: &Rows<'_>) {
        let width = self.widths.x;
        // SAFETY: the caller's.
        let x = unsafe { rows.x.slice(0..rows.rows * width) };
        if self.parts.kernels.all_finite(x) {
            return;
        }
        let bad = x
            .chunks_exact(width)
            .position(|row| !self.parts.kernels.all_finite(row));
        self.overflow
            .note(layer, self.begin + rows.first + bad.unwrap_or(0));
    }

    /// A tile up to its keys and values.
    pub(super) unsafe fn begin_layer(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let layer = &self.parts.layers[index];
        // SAFETY: the caller's.
        unsafe {
            self.attn_norm(index, rows, buffers);
            self.qkv(layer, 0..layer.qkv.panels(), rows, buffers);
            self.place(index, rows);
        }
    }

    /// A tile from attention to the end of the block.
    pub(super) unsafe fn end_layer(
        &self,
        index: usize,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
        scratch: &mut AttentionScratch,
    ) {
        let layer = &self.parts.layers[index];
        let group = self.parts.group();
        // SAFETY: the caller's.
        unsafe {
            for piece in rows.pieces {
                for kv_head in 0..self.parts.geometry.kv_heads {
                    self.attend(index, rows, piece, kv_head, 0..group, buffers.attn, scratch);
                }
            }
            self.quantise_attn(layer, rows, buffers);
            self.attn_output(layer, 0..layer.attn_output.panels(), rows, buffers);
            self.ffn_norm(layer, rows, buffers);
            self.ffn(layer, 0..layer.ffn.panels(), rows, buffers);
            self.quantise_h(layer, rows, buffers);
            self.ffn_down(layer, 0..layer.ffn_down.panels(), rows, buffers);
            self.check(index, rows);
        }
    }
}

#[allow(unsafe_code)]
impl<'a> Buffers<'a> {
    /// # Safety
    /// No other unit of the phase uses the activations.
    pub(super) unsafe fn act(&self) -> &'a mut Act {
        // SAFETY: the caller's. There is one.
        unsafe { &mut self.act.slice_mut(0..1)[0] }
    }

    /// # Safety
    /// No unit of the phase writes the activations.
    pub(super) unsafe fn read_act(&self) -> &'a Act {
        // SAFETY: the caller's. There is one.
        unsafe { &self.act.slice(0..1)[0] }
    }
}

/// Columns of the outputs of some panels of a matrix whose first output is column `first`.
pub(super) fn columns(matrix: &Packed, panels: &Range<usize>, first: usize) -> Range<usize> {
    first + panels.start * LANES..first + matrix.rows().min(panels.end * LANES)
}

/// The lowest layer, and in it the lowest row, whose output was out of range.
pub(super) struct FirstOverflow(AtomicU64);

impl Default for FirstOverflow {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl FirstOverflow {
    pub(super) fn note(&self, layer: usize, row: usize) {
        self.0
            .fetch_min(((layer as u64) << 32) | row as u64, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Option<Overflow> {
        let first = self.0.load(Ordering::Relaxed);
        let (layer, row) = (
            (first >> 32) as usize,
            (first & u64::from(u32::MAX)) as usize,
        );
        (first != u64::MAX).then_some(Overflow { layer, row })
    }
}

pub(super) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_overflow_is_the_one_of_the_lowest_layer_and_row() {
        let first = FirstOverflow::default();
        assert_eq!(first.get(), None);
        for (layer, row) in [(3, 1), (2, 9), (2, 4), (7, 0)] {
            first.note(layer, row);
        }
        assert_eq!(first.get(), Some(Overflow { layer: 2, row: 4 }));
    }
}
