//! Steps of latent attention: low-rank rows, and the matrices that expand or absorb them.
//!
//! ```text
//! expanded:  low-rank rows --norm, up--> queries; keys and values of each head --> attention
//! absorbed:  low-rank rows --norm, up--> queries --keys of each head--> queries as wide as the
//!            cache, which has one key for all heads --attention--> low-rank outputs --values of
//!            each head--> outputs
//! ```

use std::ops::Range;

use super::stages::{LayerRun, Part};
use super::tiles::{EngineContext, Tile};
use crate::kernels::{Act, ActForm, Packed, RopeTable};
use crate::layer::{LatentUp, Layer};

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Reads `latent`; writes `act` (low-rank rows of queries), and the input of the up-projection
    /// to keys and values. If absorbed, normalises the low-rank rows of keys and values in place.
    pub(super) unsafe fn norm_latent(&self, layer: &Layer, tile: Tile<'_>) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let (Some(latent), Some(of), Some(widths)) =
            (&layer.latent, &spec.attention.latent, self.widths.latent)
        else {
            return;
        };
        let eps = of.norm_eps;
        // SAFETY: the unit owns the tile's buffers.
        let (rows, act, acts) = unsafe {
            (
                tile.buffers
                    .latent
                    .slice_mut(0..tile.rows.count * widths.row),
                tile.buffers.act(),
                tile.buffers.latent_acts.slice_mut(0..1),
            )
        };
        let part = |columns: Range<usize>| columns_of(rows, widths.row, columns);
        if let Some((norm, up)) = &latent.queries {
            let form = ActForm::of([up]);
            kernels.norm_prepare(&part(widths.first()), norm, eps, form, act);
        }
        match &latent.up {
            LatentUp::Expanded(up) => {
                let (keys, form) = (part(widths.keys()), ActForm::of([up]));
                kernels.norm_prepare(&keys, &latent.kv_norm, eps, form, &mut acts[0]);
            }
            LatentUp::Absorbed { keys, .. } => {
                for row in rows.chunks_exact_mut(widths.row) {
                    kernels.rms_norm_in_place(&mut row[widths.keys()], &latent.kv_norm, eps);
                }
                if latent.queries.is_none() {
                    // SAFETY: by the contract of all steps.
                    unsafe { self.quantise_queries(keys, tile) };
                }
            }
        }
    }

    /// Up-projections of the low-rank rows: reads `act` and `latent_acts`; writes the columns of
    /// `panels`, of queries in `latent`, then of keys and values in `qkv`, alternating by head.
    pub(super) unsafe fn expand_latent(&self, layer: &Layer, panels: Range<usize>, tile: Tile<'_>) {
        let (Some(latent), Some(widths)) = (&layer.latent, self.widths.latent) else {
            return;
        };
        let Tile { rows, buffers } = tile;
        // SAFETY: no unit of the phase writes the activations.
        let (act, kv_act) = unsafe { (buffers.read_act(), &buffers.latent_acts.slice(0..1)[0]) };
        let queries = latent.queries.as_ref().map(|(_, matrix)| Part {
            matrix,
            act,
            out: buffers.latent,
            width: widths.row,
            column: widths.queries().start,
        });
        let expanded = match &latent.up {
            LatentUp::Expanded(matrix) => Some(Part {
                matrix,
                act: kv_act,
                out: rows.qkv,
                width: self.widths.qkv,
                column: layer.q,
            }),
            LatentUp::Absorbed { .. } => None,
        };
        let parts = queries.into_iter().chain(expanded);
        // SAFETY: the columns of `panels` are the unit's.
        unsafe { self.side_by_side(parts, panels, rows.count) };
    }

    /// Goes on after [`Self::expand_latent`].
    pub(super) unsafe fn end_latent(&self, index: usize, tile: Tile<'_>) {
        let layer = &self.context.layers[index];
        // SAFETY: by the contract of all steps.
        unsafe {
            match layer.latent.as_ref().map(|latent| &latent.up) {
                Some(LatentUp::Absorbed { keys, .. }) => self.quantise_queries(keys, tile),
                Some(LatentUp::Expanded(_)) | None => self.store_kv(index, tile),
            }
        }
    }

    /// Reads the queries in `latent`; writes the part without RoPE of each head to `latent_acts`.
    unsafe fn quantise_queries(&self, keys: &[Packed], tile: Tile<'_>) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let Some(widths) = self.widths.latent else {
            return;
        };
        let (d, dims) = (spec.head_dim as usize, spec.rope.dims as usize);
        // SAFETY: the unit owns the tile's buffers.
        let (rows, acts) = unsafe {
            (
                tile.buffers.latent.slice(0..tile.rows.count * widths.row),
                tile.buffers.latent_acts.slice_mut(0..keys.len()),
            )
        };
        let first = widths.queries().start;
        for (head, (matrix, act)) in keys.iter().zip(acts).enumerate() {
            let start = first + head * d;
            let part = columns_of(rows, widths.row, start..start + d - dims);
            kernels.prepare(&part, d - dims, ActForm::of([matrix]), act);
        }
    }

    /// Reads `latent_acts`, writes the columns of `panels` in the queries of `qkv`.
    pub(super) unsafe fn absorb(&self, layer: &Layer, panels: Range<usize>, tile: Tile<'_>) {
        let Some(latent) = &layer.latent else {
            return;
        };
        let (keys, _) = latent.absorbed();
        let d = layer.place.head_dim;
        // SAFETY: no unit of the phase writes the activations.
        let acts = unsafe { tile.buffers.latent_acts.slice(0..keys.len()) };
        let parts = keys.iter().zip(acts).enumerate();
        let parts = parts.map(|(head, (matrix, act))| Part {
            matrix,
            act,
            out: tile.rows.qkv,
            width: self.widths.qkv,
            column: head * d,
        });
        // SAFETY: the columns of `panels` are the unit's.
        unsafe { self.side_by_side(parts, panels, tile.rows.count) };
    }

    /// Completes a row of `qkv` from its row of `latent`: rotates queries and keys, and brings
    /// queries, keys, and values padded to the width of keys to their places.
    pub(super) fn finish_latent_row(
        &self,
        layer: &Layer,
        table: Option<&RopeTable>,
        position: usize,
        row: &mut [f32],
        low_rank: &mut [f32],
    ) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let (q, kv) = (layer.q, layer.kv);
        let (Some(widths), Some(latent)) = (self.widths.latent, &spec.attention.latent) else {
            return;
        };
        let (d, dims) = (spec.head_dim as usize, spec.rope.dims as usize);
        let nope = d - dims;
        if let Some(table) = table {
            kernels.rope(table, position, &mut low_rank[widths.rotary()], dims);
            for head in low_rank[widths.queries()].chunks_exact_mut(d) {
                kernels.rope(table, position, &mut head[nope..], dims);
            }
        }
        let (queries, rest) = row.split_at_mut(q);
        let (from, rotary) = (&low_rank[widths.queries()], &low_rank[widths.rotary()]);
        if latent.absorbed {
            let width = layer.place.head_dim;
            let keys = width - dims;
            for (to, from) in queries.chunks_exact_mut(width).zip(from.chunks_exact(d)) {
                to[keys..].copy_from_slice(&from[nope..]);
            }
            for part in rest[..2 * kv].chunks_exact_mut(width) {
                part[..keys].copy_from_slice(&low_rank[widths.keys()]);
                part[keys..].fill(0.0);
            }
            rest[keys..width].copy_from_slice(rotary);
            return;
        }
        queries.copy_from_slice(from);
        let values = latent.values as usize;
        let both = rest[..kv / d * (nope + values)].to_vec();
        let (to_keys, to_values) = rest.split_at_mut(kv);
        let heads = to_keys
            .chunks_exact_mut(d)
            .zip(to_values.chunks_exact_mut(d));
        for ((to_key, to_value), from) in heads.zip(both.chunks_exact(nope + values)) {
            to_key[..nope].copy_from_slice(&from[..nope]);
            to_key[nope..].copy_from_slice(rotary);
            to_value[..values].copy_from_slice(&from[nope..]);
            to_value[values..].fill(0.0);
        }
    }

    /// Reads the low-rank outputs in `attn`; writes those of each head to `latent_acts`.
    pub(super) unsafe fn quantise_latent(&self, layer: &Layer, values: &[Packed], tile: Tile<'_>) {
        let (width, count) = (layer.q, tile.rows.count);
        let d = layer.place.head_dim;
        // SAFETY: the unit owns the tile's buffers.
        let (rows, acts) = unsafe {
            (
                tile.buffers.attn.slice(0..count * width),
                tile.buffers.latent_acts.slice_mut(0..values.len()),
            )
        };
        for (head, (matrix, act)) in values.iter().zip(acts).enumerate() {
            // The rest is the padding of values to the width of keys.
            let part = columns_of(rows, width, head * d..head * d + matrix.cols());
            let form = ActForm::of([matrix]);
            self.context
                .kernels
                .prepare(&part, matrix.cols(), form, act);
        }
    }

    /// Reads `latent_acts`, writes the columns of `panels` of the outputs of all heads in `latent`.
    pub(super) unsafe fn values(&self, layer: &Layer, panels: Range<usize>, tile: Tile<'_>) {
        let (Some(latent), Some(widths)) = (&layer.latent, self.widths.latent) else {
            return;
        };
        let (_, values) = latent.absorbed();
        // SAFETY: no unit of the phase writes the activations.
        let acts = unsafe { tile.buffers.latent_acts.slice(0..values.len()) };
        let parts = values.iter().zip(acts).enumerate();
        let parts = parts.map(|(head, (matrix, act))| Part {
            matrix,
            act,
            out: tile.buffers.latent,
            width: widths.attended,
            column: head * matrix.rows(),
        });
        // SAFETY: the columns of `panels` are the unit's.
        unsafe { self.side_by_side(parts, panels, tile.rows.count) };
    }

    /// Reads the outputs of all heads in `latent`, writes `act`.
    pub(super) unsafe fn quantise_values(&self, layer: &Layer, tile: Tile<'_>) {
        let Some(widths) = self.widths.latent else {
            return;
        };
        // SAFETY: the unit owns the tile's buffers.
        let (rows, act): (_, &mut Act) = unsafe {
            let values = 0..tile.rows.count * widths.attended;
            (tile.buffers.latent.slice(values), tile.buffers.act())
        };
        let form = ActForm::of(&layer.attn_output);
        self.context
            .kernels
            .prepare(rows, widths.attended, form, act);
    }
}

/// Columns of rows of `width` values.
fn columns_of(rows: &[f32], width: usize, columns: Range<usize>) -> Vec<f32> {
    let rows = rows.chunks_exact(width);
    rows.flat_map(|row| &row[columns.clone()])
        .copied()
        .collect()
}
