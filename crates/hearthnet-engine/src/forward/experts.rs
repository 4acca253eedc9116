//! Steps of a mixture of experts.

use hearthnet_files::BoundaryDtype;

use std::ops::Range;

use super::moe::{Chunk, choose};
use super::stages::LayerRun;
use super::tiles::{EngineContext, Tile, Widths};
use super::tiling::share;
use crate::kernels::{Act, ActForm, Output, TileMut, grow};
use crate::layer::{Expert, ExpertNorms, FeedForward, Ffn, Router, SharedExpert};

#[derive(Default)]
pub(super) struct ExpertScratch {
    gathered: Vec<f32>,
    act: Act,
    up: Vec<f32>,
}

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Reads `act`, writes the columns of `panels` in the scores of the experts.
    pub(super) unsafe fn score_experts(
        &self,
        router: &Router,
        panels: Range<usize>,
        tile: Tile<'_>,
    ) {
        let Tile { rows, buffers } = tile;
        let columns = router.matrix.columns(&panels);
        // SAFETY: no unit writes `act`; the columns of `panels` are the unit's.
        unsafe {
            let act = buffers.read_act();
            let scores = buffers.scores;
            let out = scores.tile_mut(rows.count, self.widths.experts, columns);
            let kernels = self.context.kernels;
            kernels.matmul(&router.matrix, panels, act, Output::Store, out);
        }
    }

    /// Reads `act` and the scores; writes the routes, the experts' input and the weight of the
    /// shared expert of each row of a tile.
    pub(super) unsafe fn route(
        &self,
        router: &Router,
        shared: Option<&SharedExpert>,
        tile: Tile<'_>,
    ) {
        let (kernels, widths, pairs) = (self.context.kernels, &self.widths, self.pairs);
        let Tile { rows, buffers } = tile;
        let count = rows.count;
        // SAFETY: no unit writes `act`; the unit owns the tile's rows and their routes.
        unsafe {
            let act = buffers.read_act();
            let normed = rows.first * widths.x..(rows.first + count) * widths.x;
            pairs.normed.slice_mut(normed).copy_from_slice(act.plain());
            if let Some(shared) = shared {
                let weights = pairs.shared_weights.part(rows.first..rows.first + count);
                match &shared.score {
                    Some(score) => {
                        let out = weights.tile_mut(count, 1, 0..1);
                        kernels.matmul(score, 0..1, act, Output::Store, out);
                        kernels.sigmoid(weights.slice_mut(0..count));
                    }
                    // The output is added as it is.
                    None => weights.slice_mut(0..count).fill(1.0),
                }
            }
        }
        // SAFETY: by the contract of all steps.
        unsafe { self.choose(router, tile) };
    }

    /// As [`Self::route`] where router and experts have norms of their own: reads `x` and the
    /// scores.
    pub(super) unsafe fn route_normed(&self, router: &Router, norms: &ExpertNorms, tile: Tile<'_>) {
        let EngineContext { spec, kernels, .. } = *self.context;
        let (rows, x) = (tile.rows, self.widths.x);
        let all = rows.first * x..(rows.first + rows.count) * x;
        // SAFETY: no unit of the phase writes `x`; the unit owns the tile's rows and buffers.
        unsafe {
            self.choose(router, tile);
            let normed = self.pairs.normed.slice_mut(all);
            normed.copy_from_slice(rows.x.slice(0..rows.count * x));
            kernels.rms_norm_in_place(normed, &norms.input, spec.norm_eps);
        }
    }

    /// Reads the scores, writes the routes of each row of a tile.
    unsafe fn choose(&self, router: &Router, tile: Tile<'_>) {
        let (kernels, widths, pairs) = (self.context.kernels, &self.widths, self.pairs);
        let Some(spec) = &self.context.spec.experts else {
            return;
        };
        let Tile { rows, buffers } = tile;
        let (count, experts, used) = (rows.count, widths.experts, widths.used);
        // SAFETY: all scores are written; the unit owns the tile's rows and their routes.
        unsafe {
            let scores = buffers.scores.slice_mut(0..count * experts);
            let routes = rows.first * used..(rows.first + count) * used;
            let routes = pairs.routes.slice_mut(routes);
            let rows = scores.chunks_exact_mut(experts);
            for (scores, routes) in rows.zip(routes.chunks_exact_mut(used)) {
                choose(kernels, scores, spec, &router.vectors, routes);
            }
        }
    }

    /// Reads `act`, writes the columns of `panels` in the output of the shared expert.
    pub(super) unsafe fn shared_down(
        &self,
        shared: &SharedExpert,
        panels: Range<usize>,
        tile: Tile<'_>,
    ) {
        let (x, Tile { rows, buffers }) = (self.widths.x, tile);
        let out = self.pairs.shared;
        let out = out.part(rows.first * x..(rows.first + rows.count) * x);
        let columns = shared.down.columns(&panels);
        // SAFETY: no unit writes `act`; the columns of `panels` are the unit's.
        unsafe {
            let (act, out) = (buffers.read_act(), out.tile_mut(rows.count, x, columns));
            let kernels = self.context.kernels;
            kernels.matmul(&shared.down, panels, act, Output::Store, out);
        }
    }

    /// Reads the routes of all rows of the pass; writes the plan.
    pub(super) unsafe fn group(&self) {
        let Widths { experts, used, .. } = self.widths;
        let (pairs, rows) = (self.pairs, self.rows.len());
        // SAFETY: all routes are written, and one unit plans; there is one plan.
        let (plan, routes) = unsafe {
            (
                &mut pairs.plan.slice_mut(0..1)[0],
                pairs.routes.slice(0..rows * used),
            )
        };
        plan.fill(routes, experts);
    }

    /// Gate and up of a unit: reads `normed`, writes the unit's part of `h`.
    pub(super) unsafe fn expert_gate_up(
        &self,
        experts: &[Expert],
        unit: usize,
        scratch: &mut ExpertScratch,
    ) {
        let (Widths { x, ffn, used, .. }, pairs) = (self.widths, self.pairs);
        // SAFETY: no unit of the phase writes the plan; there is one.
        let plan = unsafe { &pairs.plan.slice(0..1)[0] };
        let Some((Chunk { expert, places }, parts, part)) = pairs.unit(plan, unit) else {
            return;
        };
        let Expert {
            ffn: gates, bias, ..
        } = &experts[*expert];
        let panels = share(gates.panels(), parts, part);
        if panels.is_empty() {
            return;
        }
        let count = places.len();
        grow(&mut scratch.gathered, count * x);
        let gathered = &mut scratch.gathered[..count * x];
        for (&pair, to) in plan.pairs[places.clone()]
            .iter()
            .zip(gathered.chunks_exact_mut(x))
        {
            let row = pair / used;
            // SAFETY: no unit of the phase writes `normed`.
            to.copy_from_slice(unsafe { pairs.normed.slice(row * x..(row + 1) * x) });
        }
        let act = &mut scratch.act;
        self.context.kernels.prepare(gathered, x, gates.form(), act);
        let columns = gates.columns(&panels);
        let up = match gates {
            Ffn::Fused(_) | Ffn::Ungated { .. } => TileMut::new(&mut [], 0, 0, 0),
            Ffn::Split { .. } => {
                grow(&mut scratch.up, count * columns.len());
                TileMut::new(&mut scratch.up, count, columns.len(), columns.len())
            }
        };
        let h = pairs.h.part(places.start * ffn..places.end * ffn);
        // SAFETY: units have separate places or panels, and so separate parts of `h`.
        let h = unsafe { h.tile_mut(count, ffn, columns) };
        self.gate_up(gates, bias.as_ref(), panels, act, h, up);
    }

    /// Down of a unit: reads `h`, writes the unit's part of `out`.
    pub(super) unsafe fn expert_down(
        &self,
        experts: &[Expert],
        unit: usize,
        scratch: &mut ExpertScratch,
    ) {
        let (Widths { x, ffn, .. }, pairs) = (self.widths, self.pairs);
        // SAFETY: no unit of the phase writes the plan; there is one.
        let plan = unsafe { &pairs.plan.slice(0..1)[0] };
        let Some((Chunk { expert, places }, parts, part)) = pairs.unit(plan, unit) else {
            return;
        };
        let Expert { down, bias, .. } = &experts[*expert];
        let panels = share(down.panels(), parts, part);
        if panels.is_empty() {
            return;
        }
        let (kernels, act) = (self.context.kernels, &mut scratch.act);
        // SAFETY: no unit of the phase writes `h`.
        let h = unsafe { pairs.h.slice(places.start * ffn..places.end * ffn) };
        kernels.prepare(h, ffn, ActForm::of([down]), act);
        let out = pairs.out.part(places.start * x..places.end * x);
        let columns = down.columns(&panels);
        // SAFETY: units have separate places or panels, and so separate parts of `out`.
        let mut out = unsafe { out.tile_mut(places.len(), x, columns.clone()) };
        kernels.matmul(down, panels, act, Output::Store, out.reborrow());
        if let Some(bias) = bias {
            for row in 0..out.rows() {
                let bias = &bias.down[columns.clone()];
                kernels.add_round(out.row_mut(row), bias, BoundaryDtype::F32);
            }
        }
    }

    /// Adds up the weighted outputs of each row of a tile, in `branch`; the shared expert is last.
    pub(super) unsafe fn combine(&self, index: usize, tile: Tile<'_>) {
        let (Widths { x, used, .. }, pairs) = (self.widths, self.pairs);
        let EngineContext {
            spec,
            kernels,
            layers,
            ..
        } = *self.context;
        let norms = match &layers[index].feed_forward {
            FeedForward::Experts { norms, .. } => norms.as_deref(),
            FeedForward::Dense { .. } | FeedForward::None => None,
        };
        let Tile { rows, buffers } = tile;
        // SAFETY: no unit writes the plan; the unit owns the tile's rows of `branch`.
        let (plan, sums) = unsafe {
            (
                &pairs.plan.slice(0..1)[0],
                buffers.branch.slice_mut(0..rows.count * x),
            )
        };
        sums.fill(0.0);
        for (row, sum) in sums.chunks_exact_mut(x).enumerate() {
            let first = (rows.first + row) * used;
            for pair in first..first + used {
                let place = plan.places[pair];
                // SAFETY: no unit of the phase writes routes or outputs.
                let (route, out) = unsafe {
                    (
                        pairs.routes.slice(pair..pair + 1)[0],
                        pairs.out.slice(place * x..(place + 1) * x),
                    )
                };
                self.context.kernels.add_scaled(sum, out, route.weight);
            }
            if let Some(norms) = norms {
                let row = rows.first + row;
                // SAFETY: the unit owns the tile's rows.
                let out = unsafe { pairs.shared.slice_mut(row * x..(row + 1) * x) };
                kernels.rms_norm_in_place(sum, &norms.output, spec.norm_eps);
                kernels.rms_norm_in_place(out, &norms.shared_output, spec.norm_eps);
                kernels.add_round(sum, out, BoundaryDtype::F32);
            } else if self.widths.shared > 0 {
                let row = rows.first + row;
                // SAFETY: no unit of the phase writes weights or outputs.
                let (weight, out) = unsafe {
                    (
                        pairs.shared_weights.slice(row..row + 1)[0],
                        pairs.shared.slice(row * x..(row + 1) * x),
                    )
                };
                self.context.kernels.add_scaled(sum, out, weight);
            }
        }
    }
}
