//! Stages of a layer: its matrices, and the steps between them.
//!
//! All steps have the same safety contract: the caller's unit of work owns what a step writes, and
//! no other unit of the phase writes what it reads.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_files::BoundaryDtype;

use super::moe::Pairs;
use super::tiles::{EngineContext, Tile, Widths};
use super::tiling::Segment;
use crate::kernels::{Act, ActForm, Output, Packed, SharedMut};
use crate::layer::{FeedForward, Latent, LatentUp, Layer, LayerNorm};
use crate::state::SequenceState;

/// Pass of some rows of the batch over the layers.
pub(super) struct LayerRun<'a> {
    pub(super) context: &'a EngineContext<'a>,
    pub(super) widths: Widths,
    pub(super) pages: &'a [Vec<SharedMut<'a, u16>>],
    /// `qkv` of all rows of the pass.
    pub(super) qkv: SharedMut<'a, f32>,
    /// Rows of each sequence in the pass.
    pub(super) segments: &'a [Segment],
    /// State of each span; empty without recurrences.
    pub(super) states: &'a [SequenceState<'a>],
    pub(super) pairs: Pairs<'a>,
    pub(super) overflow: &'a FirstOverflow,
    /// Rows of the pass, as indices into the batch.
    pub(super) rows: Range<usize>,
}

/// Matrix of a layer, or several that read the same input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Qkv,
    /// Up-projections of the low-rank rows of latent attention.
    Latent,
    /// Matrices of each head that absorb the up-projection to keys into the queries.
    Absorb,
    /// Up-projections of the output of attention to the values of each head.
    Values,
    /// Output matrix of attention.
    Output,
    /// Dense feed-forward layer.
    GateUp,
    Down,
    /// Use of the per-layer input.
    PerLayerGate,
    PerLayerOutput,
    /// Scores of the experts of a mixture.
    Router,
    /// Shared expert.
    SharedGateUp,
    SharedDown,
}

impl Stage {
    /// Stages before attention.
    pub(super) fn before_attention(layer: &Layer) -> &'static [Self] {
        if !layer.has_mixer() {
            return &[];
        }
        match layer
            .latent
            .as_ref()
            .map(|latent| (&latent.up, &latent.queries))
        {
            None => &[Self::Qkv],
            Some((LatentUp::Expanded(_), _)) => &[Self::Qkv, Self::Latent],
            Some((LatentUp::Absorbed { .. }, Some(_))) => &[Self::Qkv, Self::Latent, Self::Absorb],
            Some((LatentUp::Absorbed { .. }, None)) => &[Self::Qkv, Self::Absorb],
        }
    }

    /// Stages between the attention of a layer, and its end or its experts.
    pub(super) fn after_attention(layer: &Layer) -> &'static [Self] {
        let stages: &[Self] = match &layer.feed_forward {
            FeedForward::Dense { .. } if layer.per_layer.is_some() => &[
                Self::Values,
                Self::Output,
                Self::GateUp,
                Self::Down,
                Self::PerLayerGate,
                Self::PerLayerOutput,
            ],
            FeedForward::Dense { .. } => &[Self::Values, Self::Output, Self::GateUp, Self::Down],
            FeedForward::None => &[Self::Values, Self::Output],
            FeedForward::Experts { shared: None, .. } => {
                &[Self::Values, Self::Output, Self::Router]
            }
            FeedForward::Experts { .. } => &[
                Self::Values,
                Self::Output,
                Self::Router,
                Self::SharedGateUp,
                Self::SharedDown,
            ],
        };
        match layer.latent.as_ref().map(|latent| &latent.up) {
            Some(LatentUp::Absorbed { .. }) => stages,
            None if !layer.has_mixer() => &stages[2..],
            Some(LatentUp::Expanded(_)) | None => &stages[1..],
        }
    }
}

/// Matrix of a stage, with its input and the place of its output.
#[derive(Clone, Copy)]
pub(super) struct Part<'m> {
    pub(super) matrix: &'m Packed,
    pub(super) act: &'m Act,
    pub(super) out: SharedMut<'m, f32>,
    /// Values in a row of `out`.
    pub(super) width: usize,
    /// Column of the first output.
    pub(super) column: usize,
}

#[allow(unsafe_code)]
impl LayerRun<'_> {
    pub(super) fn panels(&self, index: usize, stage: Stage) -> usize {
        let layer = &self.context.layers[index];
        let heads =
            |heads: Option<&[Packed]>| heads.into_iter().flatten().map(Packed::panels).sum();
        match (stage, &layer.feed_forward) {
            (Stage::Qkv, _) => layer.qkv.panels(),
            (Stage::Latent, _) => layer.latent.as_ref().map_or(0, Latent::panels),
            (Stage::Absorb, _) => heads(layer.latent.as_ref().map(|latent| latent.absorbed().0)),
            (Stage::Values, _) => heads(layer.latent.as_ref().map(|latent| latent.absorbed().1)),
            (Stage::Output, _) => layer.attn_output.as_ref().map_or(0, Packed::panels),
            (Stage::PerLayerGate | Stage::PerLayerOutput, _) => {
                let own = layer.per_layer.as_ref();
                let own = own.map(|own| match stage {
                    Stage::PerLayerGate => &own.gate,
                    _ => &own.output,
                });
                own.map_or(0, Packed::panels)
            }
            (Stage::GateUp, FeedForward::Dense { ffn, .. }) => ffn.panels(),
            (Stage::Down, FeedForward::Dense { down, .. }) => down.panels(),
            (Stage::Router, FeedForward::Experts { router, .. }) => router.matrix.panels(),
            (stage, FeedForward::Experts { shared, .. }) => match (stage, shared) {
                (Stage::SharedGateUp, Some(shared)) => shared.ffn.panels(),
                (Stage::SharedDown, Some(shared)) => shared.down.panels(),
                _ => 0,
            },
            (_, FeedForward::Dense { .. } | FeedForward::None) => 0,
        }
    }

    /// Multiplies the input of a stage, which the stage before has finished, with some panels.
    pub(super) unsafe fn multiply(
        &self,
        index: usize,
        stage: Stage,
        panels: Range<usize>,
        tile: Tile<'_>,
    ) {
        let layer = &self.context.layers[index];
        // SAFETY: by the contract of all steps.
        unsafe {
            match (stage, &layer.feed_forward) {
                (Stage::Qkv, _) => self.qkv(layer, panels, tile),
                (Stage::Latent, _) => self.expand_latent(layer, panels, tile),
                (Stage::Absorb, _) => self.absorb(layer, panels, tile),
                (Stage::Values, _) => self.values(layer, panels, tile),
                (Stage::Output, _) => {
                    if let Some(output) = &layer.attn_output {
                        self.add(output, panels, self.attended_dtype(layer), tile);
                    }
                }
                (Stage::PerLayerGate, _) => self.per_layer_gate(layer, panels, tile),
                (Stage::PerLayerOutput, _) => {
                    if let Some(own) = &layer.per_layer {
                        self.add(&own.output, panels, self.context.spec.boundary, tile);
                    }
                }
                (Stage::GateUp, FeedForward::Dense { ffn, down }) => {
                    self.ffn(ffn, down.cols(), panels, tile);
                }
                (Stage::Down, FeedForward::Dense { down, .. }) => {
                    self.add(down, panels, self.context.spec.boundary, tile);
                }
                (Stage::Router, FeedForward::Experts { router, .. }) => {
                    self.score_experts(router, panels, tile);
                }
                (stage, FeedForward::Experts { shared, .. }) => match (stage, shared) {
                    (Stage::SharedGateUp, Some(shared)) => {
                        self.ffn(&shared.ffn, self.widths.shared, panels, tile);
                    }
                    (Stage::SharedDown, Some(shared)) => self.shared_down(shared, panels, tile),
                    _ => {}
                },
                (_, FeedForward::Dense { .. } | FeedForward::None) => {}
            }
        }
    }

    /// Takes a tile from the outputs of a stage to the input of the next one.
    pub(super) unsafe fn finish(&self, index: usize, stage: Stage, tile: Tile<'_>) {
        let layer = &self.context.layers[index];
        // SAFETY: by the contract of all steps.
        unsafe {
            match (stage, &layer.feed_forward) {
                (Stage::Qkv, _) if layer.latent.is_some() => self.norm_latent(layer, tile),
                // The recurrence needs all rows of a sequence.
                (Stage::Qkv, _) if layer.recurrence.is_some() => {}
                (Stage::Latent, _) => self.end_latent(index, tile),
                (Stage::Qkv | Stage::Absorb, _) => self.store_kv(index, tile),
                (Stage::Values, _) => self.quantise_values(layer, tile),
                (Stage::Output, feed_forward) => {
                    self.end_attention(layer, tile);
                    match feed_forward {
                        FeedForward::None => self.end_block(index, tile),
                        _ => self.begin_feed_forward(layer, tile),
                    }
                }
                (Stage::GateUp, FeedForward::Dense { down, .. }) => {
                    self.quantise_h(down, down.cols(), tile);
                }
                (Stage::Down, _) => self.end_feed_forward(index, tile),
                (Stage::PerLayerGate, _) => self.apply_input(index, tile),
                (Stage::PerLayerOutput, _) => {
                    if let Some(own) = &layer.per_layer {
                        let dtype = self.last_dtype(layer);
                        self.end_branch(None, Some(&own.norm), dtype, tile);
                    }
                    self.end_block(index, tile);
                }
                (Stage::Router, FeedForward::Experts { .. }) => self.end_router(layer, tile),
                (Stage::SharedGateUp, FeedForward::Experts { shared, .. }) => {
                    if let Some(shared) = shared {
                        self.quantise_h(&shared.down, self.widths.shared, tile);
                    }
                }
                (Stage::GateUp | Stage::Router | Stage::SharedGateUp | Stage::SharedDown, _) => {}
            }
        }
    }

    /// Reads `x`, writes `act`: the input of the feed-forward layer, or of the router.
    pub(super) unsafe fn begin_feed_forward(&self, layer: &Layer, tile: Tile<'_>) {
        // SAFETY: by the contract of all steps.
        unsafe {
            match &layer.feed_forward {
                FeedForward::Experts {
                    router,
                    norms: Some(norms),
                    ..
                } => self.norm(Some(&norms.router), ActForm::of([&router.matrix]), tile),
                FeedForward::Dense { .. } | FeedForward::Experts { .. } => {
                    self.ffn_norm(layer, tile);
                }
                FeedForward::None => {}
            }
        }
    }

    /// Reads the scores of the experts and `act`; writes the routes and the input of the experts. If
    /// router and experts have norms of their own, reads `x` instead of `act`, and writes `act`.
    unsafe fn end_router(&self, layer: &Layer, tile: Tile<'_>) {
        // SAFETY: by the contract of all steps.
        unsafe {
            match &layer.feed_forward {
                FeedForward::Experts {
                    router,
                    norms: Some(norms),
                    ..
                } => {
                    self.route_normed(router, norms, tile);
                    self.ffn_norm(layer, tile);
                }
                FeedForward::Experts { router, shared, .. } => {
                    self.route(router, shared.as_deref(), tile);
                }
                FeedForward::Dense { .. } | FeedForward::None => {}
            }
        }
    }

    /// Ends a stage, after all tiles are finished: plans the experts of all rows.
    pub(super) unsafe fn conclude(&self, index: usize, stage: Stage) {
        if let (Stage::Router, FeedForward::Experts { .. }) =
            (stage, &self.context.layers[index].feed_forward)
        {
            // SAFETY: all rows have their routes, and one unit concludes a stage.
            unsafe { self.group() };
        }
    }

    /// Takes a tile through whole stages.
    pub(super) unsafe fn through(&self, index: usize, stages: &[Stage], tile: Tile<'_>) {
        for &stage in stages {
            // SAFETY: by the contract of all steps.
            unsafe {
                self.multiply(index, stage, 0..self.panels(index, stage), tile);
                self.finish(index, stage, tile);
            }
        }
    }

    /// Takes a tile from the input of a layer, if there is such a layer, to its keys and values.
    pub(super) unsafe fn before_attention(&self, index: usize, tile: Tile<'_>) {
        if let Some(layer) = self.context.layers.get(index) {
            // SAFETY: by the contract of all steps.
            unsafe { self.through(index, Stage::before_attention(layer), tile) };
        }
    }

    /// Reads `x`, writes `act`, in a layer that begins with attention or a recurrence.
    pub(super) unsafe fn attn_norm(&self, index: usize, tile: Tile<'_>) {
        let layer = &self.context.layers[index];
        if !layer.has_mixer() {
            return;
        }
        let norm = layer.attn_norm.as_deref();
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        unsafe { self.norm(norm, layer.qkv.form, tile) };
    }

    /// Reads `x`, writes `act`. In a layer with experts, `act` has the forms for the router and the
    /// shared expert, and the plain form for the other experts.
    unsafe fn ffn_norm(&self, layer: &Layer, tile: Tile<'_>) {
        let form = match &layer.feed_forward {
            FeedForward::None => return,
            FeedForward::Dense { ffn, .. } => ffn.form(),
            FeedForward::Experts {
                shared: Some(shared),
                norms: Some(_),
                ..
            } => shared.ffn.form(),
            FeedForward::Experts { router, shared, .. } => {
                let score = shared.as_ref().and_then(|shared| shared.score.as_ref());
                let ffn = shared.as_ref().map(|shared| shared.ffn.form());
                let scores = ActForm::of(score.into_iter().chain([&router.matrix]));
                ActForm {
                    plain: true,
                    quantised: scores.quantised || ffn.is_some_and(|form| form.quantised),
                }
            }
        };
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        unsafe { self.norm(layer.ffn_norm.as_deref(), form, tile) };
    }

    pub(super) unsafe fn norm(&self, weight: Option<&[f32]>, form: ActForm, tile: Tile<'_>) {
        let values = 0..tile.rows.count * self.widths.x;
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        let (x, act) = unsafe { (tile.rows.x.slice(values), tile.buffers.act()) };
        let EngineContext { spec, kernels, .. } = *self.context;
        match weight {
            Some(weight) => kernels.norm_prepare(x, weight, spec.norm_eps, form, act),
            None => kernels.prepare(x, self.widths.x, form, act),
        }
    }

    /// Normalises `x`, which then has the format between attention and feed-forward layer, or
    /// between blocks.
    unsafe fn norm_sum(&self, norm: Option<&LayerNorm>, dtype: BoundaryDtype, tile: Tile<'_>) {
        let Some(LayerNorm { weight, bias }) = norm else {
            return;
        };
        let EngineContext { spec, kernels, .. } = *self.context;
        // SAFETY: the unit owns the tile's rows of `x`.
        let x = unsafe { tile.rows.x.slice_mut(0..tile.rows.count * self.widths.x) };
        kernels.layer_norm_in_place(x, weight, bias, spec.norm_eps);
        dtype.round(x);
    }

    /// Writes the columns of `panels` in the outputs of `parts`. Panels are counted over all parts.
    pub(super) unsafe fn side_by_side<'m>(
        &self,
        parts: impl Iterator<Item = Part<'m>>,
        panels: Range<usize>,
        rows: usize,
    ) {
        let mut before = 0;
        for part in parts {
            let end = before + part.matrix.panels();
            let own = panels.start.max(before)..panels.end.min(end);
            if own.start < own.end {
                let own = own.start - before..own.end - before;
                let columns = part.matrix.columns(&own);
                let columns = part.column + columns.start..part.column + columns.end;
                // SAFETY: the columns of `panels` are the unit's.
                let out = unsafe { part.out.tile_mut(rows, part.width, columns) };
                self.context
                    .kernels
                    .matmul(part.matrix, own, part.act, Output::Store, out);
            }
            before = end;
        }
    }

    /// Reads `act`, adds its product with `matrix` to the columns of `panels` in `x`, rounded to
    /// `dtype`. With [`Widths::branches`], writes the product to `branch` instead.
    pub(super) unsafe fn add(
        &self,
        matrix: &Packed,
        panels: Range<usize>,
        dtype: BoundaryDtype,
        tile: Tile<'_>,
    ) {
        let (out, output) = match self.widths.branches {
            true => (tile.buffers.branch, Output::Store),
            false => (tile.rows.x, Output::Add(dtype)),
        };
        let columns = matrix.columns(&panels);
        // SAFETY: the columns of `panels` are the unit's, and no unit writes `act`.
        unsafe {
            let (act, out) = (
                tile.buffers.read_act(),
                out.tile_mut(tile.rows.count, self.widths.x, columns),
            );
            self.context
                .kernels
                .matmul(matrix, panels, act, output, out);
        }
    }

    /// Completes attention: adds `branch` to `x`, unless [`Self::add`] has done so.
    unsafe fn end_attention(&self, layer: &Layer, tile: Tile<'_>) {
        if self.widths.branches {
            let bias = layer.attn_output_bias.as_deref();
            let norm = layer.attn_post_norm.as_deref();
            // SAFETY: the unit owns the tile's rows of `x` and `branch`.
            unsafe {
                self.end_branch(bias, norm, self.attended_dtype(layer), tile);
                self.norm_sum(layer.attn_sum_norm.as_ref(), BoundaryDtype::F32, tile);
            }
        }
    }

    /// Completes a feed-forward layer: adds `branch` to `x`, unless [`Self::add`] has done so. Ends
    /// the block, or prepares `x` for the use of the per-layer input.
    pub(super) unsafe fn end_feed_forward(&self, index: usize, tile: Tile<'_>) {
        let layer = &self.context.layers[index];
        let dtype = match layer.per_layer {
            Some(_) => BoundaryDtype::F32,
            None => self.last_dtype(layer),
        };
        // SAFETY: the unit owns the tile and its buffers.
        unsafe {
            if self.widths.branches || matches!(layer.feed_forward, FeedForward::Experts { .. }) {
                let bias = layer.ffn_bias.as_deref();
                let norm = layer.ffn_post_norm.as_deref();
                self.end_branch(bias, norm, dtype, tile);
                self.norm_sum(
                    layer.ffn_sum_norm.as_ref(),
                    self.context.spec.boundary,
                    tile,
                );
            }
            match &layer.per_layer {
                Some(own) => self.prepare_x(&own.gate, tile),
                None => self.end_block(index, tile),
            }
        }
    }

    /// Format to which the output of attention is rounded: the residual stream is rounded to the
    /// boundary dtype at the end of a block only.
    fn attended_dtype(&self, layer: &Layer) -> BoundaryDtype {
        match layer.feed_forward {
            FeedForward::None => self.last_dtype(layer),
            _ => BoundaryDtype::F32,
        }
    }

    /// Format to which the last addition of a block is rounded.
    fn last_dtype(&self, layer: &Layer) -> BoundaryDtype {
        match layer.scale.is_some() || layer.ffn_sum_norm.is_some() {
            true => BoundaryDtype::F32,
            false => self.context.spec.boundary,
        }
    }

    /// Completes a block: scales and checks `x`, and normalises it for the next layer.
    unsafe fn end_block(&self, index: usize, tile: Tile<'_>) {
        let layer = &self.context.layers[index];
        // SAFETY: the unit owns the tile and its buffers.
        unsafe {
            if let Some(scale) = layer.scale {
                let x = tile.rows.x.slice_mut(0..tile.rows.count * self.widths.x);
                x.iter_mut().for_each(|value| *value *= scale);
                self.context.spec.boundary.round(x);
            }
            self.check(index, tile);
            if index + 1 < self.context.layers.len() {
                self.attn_norm(index + 1, tile);
            }
        }
    }

    unsafe fn end_branch(
        &self,
        bias: Option<&[f32]>,
        norm: Option<&[f32]>,
        dtype: BoundaryDtype,
        tile: Tile<'_>,
    ) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let values = 0..tile.rows.count * self.widths.x;
        // SAFETY: the unit owns the tile's rows of `x` and `branch`.
        let (x, branch) = unsafe {
            (
                tile.rows.x.slice_mut(values.clone()),
                tile.buffers.branch.slice_mut(values),
            )
        };
        if let Some(bias) = bias {
            for row in branch.chunks_exact_mut(bias.len()) {
                kernels.add_round(row, bias, BoundaryDtype::F32);
            }
        }
        if let Some(norm) = norm {
            let eps = spec.post_norm_eps.unwrap_or(spec.norm_eps);
            kernels.rms_norm_in_place(branch, norm, eps);
        }
        if let Some(scale) = spec.scales.residual {
            branch.iter_mut().for_each(|value| *value *= scale);
        }
        kernels.add_round(x, branch, dtype);
    }

    /// Reads `x`, the output of a block, and records a row that is not finite.
    unsafe fn check(&self, layer: usize, tile: Tile<'_>) {
        let (width, kernels) = (self.widths.x, self.context.kernels);
        // SAFETY: no unit of the phase writes the tile's rows of `x`.
        let x = unsafe { tile.rows.x.slice(0..tile.rows.count * width) };
        if kernels.all_finite(x) {
            return;
        }
        let mut rows = x.chunks_exact(width);
        let bad = rows.position(|row| !kernels.all_finite(row));
        let row = self.rows.start + tile.rows.first + bad.unwrap_or(0);
        self.overflow.note(layer, row);
    }
}

/// Location of a block output that is not finite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Overflow {
    /// Index into [`EngineContext::layers`].
    pub(crate) layer: usize,
    pub(crate) row: usize,
}

/// Lowest layer, and lowest row in it, whose output is not finite.
pub(super) struct FirstOverflow(AtomicU64);

impl Default for FirstOverflow {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl FirstOverflow {
    fn note(&self, layer: usize, row: usize) {
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
