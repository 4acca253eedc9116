//! Steps of a tile through a layer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{LatentSpec, ModelSpec};

use super::tiling::Segment;
use super::{EngineContext, Overflow};
use crate::kernels::{
    Act, ActForm, Attention, AttentionScratch, LANES, Output, PAGE, Packed, RopeTable, SharedMut,
    Tile, TileMut, grow,
};
use crate::weights::{ExpertBias, FeedForward, Ffn, Latent, Layer, Qkv};

/// Pass of some rows of the batch over the layers.
pub(super) struct LayerRun<'a> {
    pub(super) context: &'a EngineContext<'a>,
    pub(super) widths: Widths,
    pub(super) pages: &'a [Vec<SharedMut<'a, u16>>],
    pub(super) overflow: &'a FirstOverflow,
    /// Index of the pass's first row in the batch.
    pub(super) begin: usize,
}

/// Rows of a tile and their intermediate values. [`decode_pass`] and [`prefill_pass`] decide which
/// thread may access what.
pub(super) struct Rows<'a> {
    /// Index of the first row in the pass.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) segments: &'a [Segment],
    pub(super) x: SharedMut<'a, f32>,
    pub(super) qkv: SharedMut<'a, f32>,
}

/// Buffers of a [`TileBuffers`], shared between threads.
#[derive(Clone, Copy)]
pub(super) struct Buffers<'a> {
    pub(super) act: SharedMut<'a, Act>,
    pub(super) latent: SharedMut<'a, f32>,
    /// Normalised low-rank rows of keys and values. (Those of queries are in `act`.)
    pub(super) latent_kv: SharedMut<'a, Act>,
    pub(super) attn: SharedMut<'a, f32>,
    pub(super) h: SharedMut<'a, f32>,
    pub(super) up: SharedMut<'a, f32>,
    /// Branch output that is changed before it is added to the residual stream.
    pub(super) branch: SharedMut<'a, f32>,
    pub(super) scores: SharedMut<'a, f32>,
}

/// Buffers for the intermediate values of one tile.
#[derive(Default)]
pub(super) struct TileBuffers {
    pub(super) act: Act,
    pub(super) latent: Vec<f32>,
    pub(super) latent_kv: Act,
    pub(super) attn: Vec<f32>,
    pub(super) h: Vec<f32>,
    pub(super) up: Vec<f32>,
    pub(super) branch: Vec<f32>,
    pub(super) scores: Vec<f32>,
}

/// Widths of the intermediate values, in values per row.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) x: usize,
    pub(super) q: usize,
    pub(super) kv: usize,
    pub(super) qkv: usize,
    /// Width of all low-rank rows of latent attention, or 0.
    pub(super) latent: usize,
    pub(super) ffn: usize,
    pub(super) experts: usize,
    /// Experts per row, or 0.
    pub(super) used: usize,
    /// Whether a layer has separate gate and up matrices.
    pub(super) split_ffn: bool,
    /// See [`branches`].
    pub(super) branches: bool,
}

impl Widths {
    pub(super) fn of(context: &EngineContext<'_>) -> Self {
        let spec = context.spec;
        let (q, kv) = (spec.query_width() as usize, spec.kv_width() as usize);
        let split = |layer: &Layer| match &layer.feed_forward {
            FeedForward::Dense { ffn, .. } => matches!(ffn, Ffn::Split { .. }),
            FeedForward::Experts { .. } => false,
        };
        Self {
            x: spec.width as usize,
            q,
            kv,
            qkv: q + 2 * kv,
            latent: spec.attention.latent.map_or(0, |latent| {
                (latent.queries + latent.keys + spec.rope.dims) as usize
            }),
            ffn: spec.ffn as usize,
            experts: spec.experts.map_or(0, |experts| experts.count as usize),
            used: spec.experts.map_or(0, |experts| experts.used as usize),
            split_ffn: context.layers.iter().any(split),
            branches: branches(spec),
        }
    }
}

/// Whether the outputs of attention and feed-forward layer are changed (bias, norm, scale) before
/// they are added to the residual stream.
fn branches(spec: &ModelSpec) -> bool {
    spec.post_norms || spec.scales.residual.is_some() || spec.attention.output_bias
}

impl TileBuffers {
    pub(super) fn buffers(&mut self, widths: &Widths, rows: usize) -> Buffers<'_> {
        let only = |wanted: bool, width: usize| if wanted { rows * width } else { 0 };
        let dense = widths.experts == 0;
        grow(&mut self.latent, rows * widths.latent);
        grow(&mut self.attn, rows * widths.q);
        grow(&mut self.h, only(dense, widths.ffn));
        grow(&mut self.up, only(widths.split_ffn, widths.ffn));
        grow(&mut self.branch, only(widths.branches || !dense, widths.x));
        grow(&mut self.scores, rows * widths.experts);
        Buffers {
            act: SharedMut::new(std::slice::from_mut(&mut self.act)),
            latent: SharedMut::new(&mut self.latent),
            latent_kv: SharedMut::new(std::slice::from_mut(&mut self.latent_kv)),
            attn: SharedMut::new(&mut self.attn),
            h: SharedMut::new(&mut self.h),
            up: SharedMut::new(&mut self.up),
            branch: SharedMut::new(&mut self.branch),
            scores: SharedMut::new(&mut self.scores),
        }
    }
}

pub(super) fn tiles_of<'a>(
    widths: &Widths,
    tiles: &'a [Vec<Segment>],
    size: usize,
    x: &'a mut [f32],
    qkv: &'a mut [f32],
) -> Vec<Rows<'a>> {
    let buffers = x
        .chunks_mut(size * widths.x)
        .zip(qkv.chunks_mut(size * widths.qkv));
    let tiles = tiles.iter().zip(buffers).enumerate();
    tiles
        .map(|(index, (segments, (x, qkv)))| Rows {
            first: index * size,
            rows: x.len() / widths.x,
            segments,
            x: SharedMut::new(x),
            qkv: SharedMut::new(qkv),
        })
        .collect()
}

/// Steps of a tile. All have the same safety contract: the caller's unit of work owns what a step
/// writes, and no other unit of the phase writes what it reads.
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Reads `x`, writes `act`.
    pub(super) unsafe fn attn_norm(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let layer = &self.context.layers[index];
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        unsafe { self.norm(&layer.attn_norm, layer.qkv.form, rows, buffers) };
    }

    /// Reads `x`, writes `act`. In a layer with experts, `act` has the form for the router, and the
    /// plain form for the experts.
    pub(super) unsafe fn ffn_norm(&self, layer: &Layer, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let form = match &layer.feed_forward {
            FeedForward::Dense { ffn, .. } => ffn.form(),
            FeedForward::Experts { router, .. } => ActForm {
                plain: true,
                ..ActForm::of([&router.matrix])
            },
        };
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        unsafe { self.norm(&layer.ffn_norm, form, rows, buffers) };
    }

    pub(super) unsafe fn norm(
        &self,
        weight: &[f32],
        form: ActForm,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        let (x, act) = unsafe { (rows.x.slice(0..rows.rows * self.widths.x), buffers.act()) };
        let eps = self.context.spec.norm_eps;
        self.context.kernels.norm_prepare(x, weight, eps, form, act);
    }

    /// Reads `act`, writes the columns of `panels` in `qkv`, or in `latent` with latent attention.
    /// Panels are counted over all parts.
    pub(super) unsafe fn qkv(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let (out, width) = match layer.latent {
            Some(_) => (buffers.latent, self.widths.latent),
            None => (rows.qkv, self.widths.qkv),
        };
        // SAFETY: no unit of the phase writes `act`.
        let act = unsafe { buffers.read_act() };
        let parts = layer.qkv.parts.iter().map(|part| (part, act));
        // SAFETY: the columns of `panels` are the unit's.
        unsafe { self.side_by_side(parts, panels, rows.rows, out, width) };
    }

    /// Writes the columns of `panels` in `out`, which has rows of `width` values. Panels are
    /// counted over all matrices of `parts`, each paired with its activations.
    unsafe fn side_by_side<'m>(
        &self,
        parts: impl Iterator<Item = (&'m Packed, &'m Act)>,
        panels: Range<usize>,
        rows: usize,
        out: SharedMut<'_, f32>,
        width: usize,
    ) {
        let (mut before, mut column) = (0, 0);
        for (part, act) in parts {
            let end = before + part.panels();
            let own = panels.start.max(before)..panels.end.min(end);
            if own.start < own.end {
                let own = own.start - before..own.end - before;
                let columns = columns(part, &own, column);
                // SAFETY: the columns of `panels` are the unit's.
                let out = unsafe { out.tile_mut(rows, width, columns) };
                self.context
                    .kernels
                    .matmul(part, own, act, Output::Store, out);
            }
            before = end;
            column += part.rows();
        }
    }

    /// Reads `latent`, writes `act` (low-rank rows of queries) and `latent_kv`.
    pub(super) unsafe fn norm_latent(
        &self,
        latent: &Latent,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let Some(LatentSpec { norm_eps, .. }) = spec.attention.latent else {
            return;
        };
        let width = self.widths.latent;
        // SAFETY: the unit owns `act` and `latent_kv`, and no unit writes `latent`.
        let (low_rank, act, kv_act) = unsafe {
            (
                buffers.latent.slice(0..rows.rows * width),
                buffers.act(),
                &mut buffers.latent_kv.slice_mut(0..1)[0],
            )
        };
        let (q, kv) = (latent.q_norm.len(), latent.kv_norm.len());
        let part = |columns: Range<usize>| -> Vec<f32> {
            let rows = low_rank.chunks_exact(width);
            rows.flat_map(|row| &row[columns.clone()])
                .copied()
                .collect()
        };
        let form = ActForm::of([&latent.q]);
        kernels.norm_prepare(&part(0..q), &latent.q_norm, norm_eps, form, act);
        let form = ActForm::of([&latent.kv]);
        kernels.norm_prepare(&part(q..q + kv), &latent.kv_norm, norm_eps, form, kv_act);
    }

    /// Reads `act` and `latent_kv`, writes the columns of `panels` in `qkv`: queries, then keys
    /// and values alternating by head.
    pub(super) unsafe fn expand_latent(
        &self,
        latent: &Latent,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // SAFETY: no unit of the phase writes the activations.
        let (act, kv_act) = unsafe { (buffers.read_act(), &buffers.latent_kv.slice(0..1)[0]) };
        let parts = [(&latent.q, act), (&latent.kv, kv_act)].into_iter();
        // SAFETY: the columns of `panels` in `qkv` are the unit's.
        unsafe { self.side_by_side(parts, panels, rows.rows, rows.qkv, self.widths.qkv) };
    }

    /// Completes a row of `qkv` written by [`Self::expand_latent`]: queries, keys, and values
    /// padded to the width of keys. `rotary` is the rotary part of the keys, common to all heads.
    fn finish_latent_row(
        &self,
        latent: &LatentSpec,
        table: Option<&RopeTable>,
        position: usize,
        row: &mut [f32],
        rotary: &mut [f32],
    ) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let Widths { q, kv, .. } = self.widths;
        let (d, values) = (spec.head_dim as usize, latent.values as usize);
        let nope = d - rotary.len();
        let (queries, rest) = row.split_at_mut(q);
        if let Some(table) = table {
            kernels.rope(table, position, rotary, rotary.len());
            for head in queries.chunks_exact_mut(d) {
                let dims = rotary.len();
                kernels.rope(table, position, &mut head[nope..], dims);
            }
        }
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

    /// Completes queries, keys and values in `qkv` (biases, norms, RoPE; for latent attention
    /// everything after its matrices), and writes keys and values to the pages.
    pub(super) unsafe fn store_kv(&self, layer: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let EngineContext {
            spec,
            kernels,
            ropes,
            geometry,
            first,
            layers,
            ..
        } = *self.context;
        let Layer {
            qkv: Qkv { bias, .. },
            qk_norm,
            rotation,
            ..
        } = &layers[layer];
        let table = ropes.table(*rotation);
        let Widths { q, kv, qkv, .. } = self.widths;
        let d = geometry.head_dim;
        for segment in rows.segments {
            for i in 0..segment.rows {
                let (row, position) = (segment.row + i, segment.position + i);
                // SAFETY: the unit owns the row of `qkv`.
                let values = unsafe { rows.qkv.slice_mut(row * qkv..(row + 1) * qkv) };
                if let Some(bias) = bias {
                    kernels.add_round(values, bias, BoundaryDtype::F32);
                }
                if let Some(norms) = qk_norm {
                    kernels.rms_norm_in_place(&mut values[..q], &norms.q, spec.norm_eps);
                    kernels.rms_norm_in_place(&mut values[q..q + kv], &norms.k, spec.norm_eps);
                }
                if let Some(latent) = &spec.attention.latent {
                    let (width, dims) = (self.widths.latent, spec.rope.dims as usize);
                    let rotary = (row + 1) * width - dims..(row + 1) * width;
                    // SAFETY: the unit owns the row of `latent`.
                    let rotary = unsafe { buffers.latent.slice_mut(rotary) };
                    self.finish_latent_row(latent, table, position, values, rotary);
                } else if let Some(table) = table {
                    kernels.rope(table, position, &mut values[..q + kv], d);
                }
                if let Some(temperature) = &spec.attention.temperature {
                    let factor = temperature.factor(position);
                    values[..q].iter_mut().for_each(|value| *value *= factor);
                }
                let (keys, values) = values[q..].split_at(kv);
                let page = &self.pages[segment.span][position / PAGE];
                for head in 0..geometry.kv_heads {
                    let slab = geometry.slab_range(geometry.slab_index(first + layer, head));
                    let cells = head * d..(head + 1) * d;
                    // SAFETY: a slot belongs to one row, and the unit owns the row.
                    unsafe {
                        kernels.store_kv(
                            page.part(slab),
                            position % PAGE,
                            &keys[cells.clone()],
                            &values[cells],
                        );
                    }
                }
            }
        }
    }

    /// Reads queries and pages, writes the columns of `heads` for the rows of a segment in `attn`.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn attend(
        &self,
        layer: usize,
        rows: &Rows<'_>,
        segment: &Segment,
        kv_head: usize,
        heads: Range<usize>,
        attn: SharedMut<'_, f32>,
        scratch: &mut AttentionScratch,
    ) {
        let EngineContext {
            spec,
            kernels,
            geometry,
            first,
            layers,
            ..
        } = *self.context;
        let Widths { q, qkv, .. } = self.widths;
        let d = geometry.head_dim;
        let slab = geometry.slab_range(geometry.slab_index(first + layer, kv_head));
        let end = (segment.position + segment.rows).div_ceil(PAGE);
        // SAFETY: no unit of the phase writes keys and values of this layer.
        let pages: Vec<&[u16]> = self.pages[segment.span][..end]
            .iter()
            .map(|page| unsafe { page.slice(slab.clone()) })
            .collect();
        let group = self.context.group();
        let heads = kv_head * group + heads.start..kv_head * group + heads.end;
        let columns = heads.start * d..heads.end * d;
        let sinks = layers[layer].sinks.as_ref();
        let attention = Attention {
            head_dim: d,
            heads: heads.len(),
            scale: match spec.attention.scale {
                Some(scale) => scale,
                None => 1.0 / (d as f32).sqrt(),
            },
            softcap: spec.attention.softcap,
            sinks: sinks.map(|sinks| &sinks[heads]),
            position: segment.position,
            window: layers[layer].window,
            pages: &pages,
        };
        // SAFETY: no unit writes queries; the columns of these heads in `attn` are the unit's.
        unsafe {
            let queries = rows
                .qkv
                .slice(segment.row * qkv + columns.start..rows.rows * qkv);
            let queries = Tile::new(queries, segment.rows, columns.len(), qkv);
            let out = attn
                .part(segment.row * q..rows.rows * q)
                .tile_mut(segment.rows, q, columns);
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
        let mut width = self.widths.q;
        // SAFETY: the unit owns the tile's `attn` and `act`.
        let (attn, act) = unsafe { (buffers.attn.slice_mut(0..rows.rows * width), buffers.act()) };
        let mut attn = attn;
        if let Some(latent) = &self.context.spec.attention.latent {
            // Removes the padding of values to the width of keys.
            let (d, values) = (self.context.geometry.head_dim, latent.values as usize);
            for head in 0..attn.len() / d {
                attn.copy_within(head * d..head * d + values, head * values);
            }
            let len = attn.len() / d * values;
            attn = &mut attn[..len];
            width = width / d * values;
        }
        self.context
            .kernels
            .prepare(attn, width, ActForm::of([&layer.attn_output]), act);
    }

    /// Reads `act`, adds its product with `matrix` to the columns of `panels` in `x`, rounded to
    /// `dtype`. With [`Widths::branches`], writes the product to `branch` instead.
    pub(super) unsafe fn add(
        &self,
        matrix: &Packed,
        panels: Range<usize>,
        dtype: BoundaryDtype,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let (out, output) = match self.widths.branches {
            true => (buffers.branch, Output::Store),
            false => (rows.x, Output::Add(dtype)),
        };
        // SAFETY: the columns of `panels` are the unit's, and no unit writes `act`.
        unsafe {
            let columns = columns(matrix, &panels, 0);
            let out = out.tile_mut(rows.rows, self.widths.x, columns);
            self.context
                .kernels
                .matmul(matrix, panels, buffers.read_act(), output, out);
        }
    }

    /// Completes attention: adds `branch` to `x`, unless [`Self::add`] has done so.
    pub(super) unsafe fn end_attention(
        &self,
        layer: &Layer,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        if self.widths.branches {
            let bias = layer.attn_output_bias.as_deref();
            let norm = layer.attn_post_norm.as_deref();
            // SAFETY: the unit owns the tile's rows of `x` and `branch`.
            unsafe { self.end_branch(bias, norm, BoundaryDtype::F32, rows, buffers) };
        }
    }

    /// Completes the block: adds `branch` to `x`, unless [`Self::add`] has done so.
    pub(super) unsafe fn end_feed_forward(
        &self,
        layer: &Layer,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        if self.widths.branches || matches!(layer.feed_forward, FeedForward::Experts { .. }) {
            let norm = layer.ffn_post_norm.as_deref();
            // SAFETY: the unit owns the tile's rows of `x` and `branch`.
            unsafe { self.end_branch(None, norm, self.context.spec.boundary, rows, buffers) };
        }
    }

    unsafe fn end_branch(
        &self,
        bias: Option<&[f32]>,
        norm: Option<&[f32]>,
        dtype: BoundaryDtype,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let values = 0..rows.rows * self.widths.x;
        // SAFETY: the unit owns the tile's rows of `x` and `branch`.
        let (x, branch) = unsafe {
            (
                rows.x.slice_mut(values.clone()),
                buffers.branch.slice_mut(values),
            )
        };
        if let Some(bias) = bias {
            for row in branch.chunks_exact_mut(bias.len()) {
                kernels.add_round(row, bias, BoundaryDtype::F32);
            }
        }
        if let Some(norm) = norm {
            kernels.rms_norm_in_place(branch, norm, spec.norm_eps);
        }
        if let Some(scale) = spec.scales.residual {
            branch.iter_mut().for_each(|value| *value *= scale);
        }
        kernels.add_round(x, branch, dtype);
    }

    /// Reads `act`, writes the columns of `panels` in `h`.
    pub(super) unsafe fn ffn(
        &self,
        ffn: &Ffn,
        panels: Range<usize>,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        let (width, count) = (self.widths.ffn, rows.rows);
        // SAFETY: no unit writes `act`; the columns of `panels` in `h` and `up` are the unit's.
        unsafe {
            let act = buffers.read_act();
            let columns = ffn.columns(&panels);
            let h = buffers.h.tile_mut(count, width, columns.clone());
            let up = match ffn {
                Ffn::Fused(_) => TileMut::new(&mut [], 0, 0, 0),
                Ffn::Split { .. } => buffers.up.tile_mut(count, width, columns),
            };
            self.gate_up(ffn, None, panels, act, h, up);
        }
    }

    /// Writes `activation(gate) * up` to `h`. `ups` is scratch for separate up matrices.
    pub(super) fn gate_up(
        &self,
        ffn: &Ffn,
        bias: Option<&ExpertBias>,
        panels: Range<usize>,
        act: &Act,
        mut h: TileMut<'_>,
        mut ups: TileMut<'_>,
    ) {
        let EngineContext { spec, kernels, .. } = *self.context;
        match ffn {
            Ffn::Fused(both) => kernels.matmul_swiglu(both, panels, act, h),
            Ffn::Split { gate, up } => {
                let store = Output::Store;
                let columns = ffn.columns(&panels);
                kernels.matmul(gate, panels.clone(), act, store, h.reborrow());
                kernels.matmul(up, panels, act, store, ups.reborrow());
                for row in 0..h.rows() {
                    let (gate, up) = (h.row_mut(row), ups.row_mut(row));
                    if let Some(bias) = bias {
                        kernels.add_round(gate, &bias.gate[columns.clone()], BoundaryDtype::F32);
                        kernels.add_round(up, &bias.up[columns.clone()], BoundaryDtype::F32);
                    }
                    kernels.gate(spec.activation, gate, up);
                }
            }
        }
    }

    /// Reads `h`, writes `act`.
    pub(super) unsafe fn quantise_h(&self, down: &Packed, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let width = self.widths.ffn;
        // SAFETY: the unit owns `act`, and no unit of the phase writes `h`.
        let (h, act) = unsafe { (buffers.h.slice(0..rows.rows * width), buffers.act()) };
        self.context
            .kernels
            .prepare(h, width, ActForm::of([down]), act);
    }

    /// Reads `x`, the output of a block, and records a row that is not finite.
    pub(super) unsafe fn check(&self, layer: usize, rows: &Rows<'_>) {
        let width = self.widths.x;
        // SAFETY: no unit of the phase writes the tile's rows of `x`.
        let x = unsafe { rows.x.slice(0..rows.rows * width) };
        if self.context.kernels.all_finite(x) {
            return;
        }
        let bad = x
            .chunks_exact(width)
            .position(|row| !self.context.kernels.all_finite(row));
        self.overflow
            .note(layer, self.begin + rows.first + bad.unwrap_or(0));
    }

    /// Takes a tile from the start of a block to its keys and values.
    pub(super) unsafe fn begin_layer(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        let layer = &self.context.layers[index];
        // SAFETY: the unit owns the tile, its buffers and its slots in the pages.
        unsafe {
            self.attn_norm(index, rows, buffers);
            self.qkv(layer, 0..layer.qkv.panels(), rows, buffers);
            if let Some(latent) = &layer.latent {
                self.norm_latent(latent, rows, buffers);
                self.expand_latent(latent, 0..latent.panels(), rows, buffers);
            }
            self.store_kv(index, rows, buffers);
        }
    }

    /// Takes a tile from attention to the input of the feed-forward layer.
    pub(super) unsafe fn attention(
        &self,
        index: usize,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
        scratch: &mut AttentionScratch,
    ) {
        let layer = &self.context.layers[index];
        let group = self.context.group();
        // SAFETY: the unit owns the tile and its buffers; no unit writes keys and values of this
        // layer.
        unsafe {
            for segment in rows.segments {
                for kv_head in 0..self.context.geometry.kv_heads {
                    self.attend(
                        index,
                        rows,
                        segment,
                        kv_head,
                        0..group,
                        buffers.attn,
                        scratch,
                    );
                }
            }
            self.quantise_attn(layer, rows, buffers);
            let output = &layer.attn_output;
            // The residual stream is rounded to the boundary dtype at the end of a block only.
            let dtype = BoundaryDtype::F32;
            self.add(output, 0..output.panels(), dtype, rows, buffers);
            self.end_attention(layer, rows, buffers);
            self.ffn_norm(layer, rows, buffers);
        }
    }

    /// Takes a tile through a dense feed-forward layer.
    pub(super) unsafe fn feed_forward(
        &self,
        ffn: &Ffn,
        down: &Packed,
        rows: &Rows<'_>,
        buffers: Buffers<'_>,
    ) {
        // SAFETY: the unit owns the tile and its buffers.
        unsafe {
            self.ffn(ffn, 0..ffn.panels(), rows, buffers);
            self.quantise_h(down, rows, buffers);
            let dtype = self.context.spec.boundary;
            self.add(down, 0..down.panels(), dtype, rows, buffers);
        }
    }

    /// Takes a tile from the end of a block to the keys and values of the next.
    pub(super) unsafe fn next_layer(&self, index: usize, rows: &Rows<'_>, buffers: Buffers<'_>) {
        // SAFETY: the unit owns the tile, its buffers and its slots in the pages.
        unsafe {
            self.end_feed_forward(&self.context.layers[index], rows, buffers);
            self.check(index, rows);
            if index + 1 < self.context.layers.len() {
                self.begin_layer(index + 1, rows, buffers);
            }
        }
    }
}

#[allow(unsafe_code)]
impl<'a> Buffers<'a> {
    /// # Safety
    /// No other unit of the phase uses the activations.
    pub(super) unsafe fn act(&self) -> &'a mut Act {
        // SAFETY: there is one element, and by the contract no other unit uses it.
        unsafe { &mut self.act.slice_mut(0..1)[0] }
    }

    /// # Safety
    /// No unit of the phase writes the activations.
    pub(super) unsafe fn read_act(&self) -> &'a Act {
        // SAFETY: there is one element, and by the contract no unit writes it.
        unsafe { &self.act.slice(0..1)[0] }
    }
}

/// Columns of the outputs of `panels`, if the first output of the matrix is column `first`.
pub(super) fn columns(matrix: &Packed, panels: &Range<usize>, first: usize) -> Range<usize> {
    first + panels.start * LANES..first + matrix.rows().min(panels.end * LANES)
}

/// Lowest layer, and lowest row in it, whose output is not finite.
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
