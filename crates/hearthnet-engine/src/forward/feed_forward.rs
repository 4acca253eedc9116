//! Steps of a dense feed-forward layer, and the gate that experts have, too.

use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::Activation;

use super::stages::LayerRun;
use super::tiles::{EngineContext, Tile};
use crate::kernels::{Act, ActForm, Output, Packed, TileMut};
use crate::layer::{ExpertBias, Ffn, Layer};

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Reads `act`, writes the columns of `panels` in `h`, which has rows of `width` values.
    pub(super) unsafe fn ffn(&self, ffn: &Ffn, width: usize, panels: Range<usize>, tile: Tile<'_>) {
        let (count, buffers) = (tile.rows.count, tile.buffers);
        // SAFETY: no unit writes `act`; the columns of `panels` in `h` and `up` are the unit's.
        unsafe {
            let act = buffers.read_act();
            let columns = ffn.columns(&panels);
            let h = buffers.h.tile_mut(count, width, columns.clone());
            let up = match ffn {
                Ffn::Fused(_) | Ffn::Ungated { .. } => TileMut::new(&mut [], 0, 0, 0),
                Ffn::Split { .. } => buffers.up.tile_mut(count, width, columns),
            };
            self.gate_up(ffn, None, panels, act, h, up);
        }
    }

    /// Writes `activation(gate) * up`, or without a gate `activation(up)`, to `h`. `ups` is scratch
    /// for separate up matrices.
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
            Ffn::Ungated { up, bias } => {
                let columns = ffn.columns(&panels);
                kernels.matmul(up, panels, act, Output::Store, h.reborrow());
                for row in 0..h.rows() {
                    let row = h.row_mut(row);
                    if let Some(bias) = bias {
                        kernels.add_round(row, &bias[columns.clone()], BoundaryDtype::F32);
                    }
                    match spec.activation {
                        Activation::GeluErf => kernels.gelu_erf(row),
                        // All other activations need a gate.
                        _ => kernels.squared_relu(row),
                    }
                }
            }
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

    /// Reads `x`, writes `act`, the input of `matrix`.
    pub(super) unsafe fn prepare_x(&self, matrix: &Packed, tile: Tile<'_>) {
        let width = self.widths.x;
        let values = 0..tile.rows.count * width;
        // SAFETY: the unit owns `act`, and no unit of the phase writes `x`.
        let (x, act) = unsafe { (tile.rows.x.slice(values), tile.buffers.act()) };
        let form = ActForm::of([matrix]);
        self.context.kernels.prepare(x, width, form, act);
    }

    /// Reads `act`, writes the columns of `panels` in `h`: the gate of the per-layer input.
    pub(super) unsafe fn per_layer_gate(
        &self,
        layer: &Layer,
        panels: Range<usize>,
        tile: Tile<'_>,
    ) {
        let Some(own) = &layer.per_layer else {
            return;
        };
        let (count, buffers) = (tile.rows.count, tile.buffers);
        let columns = own.gate.columns(&panels);
        // SAFETY: no unit writes `act`; the columns of `panels` in `h` are the unit's.
        unsafe {
            let (act, kernels) = (buffers.read_act(), self.context.kernels);
            let h = buffers.h.tile_mut(count, own.gate.rows(), columns);
            kernels.matmul(&own.gate, panels, act, Output::Store, h);
        }
    }

    /// Applies the gate in `h` to the per-layer input, writes `act`.
    pub(super) unsafe fn apply_input(&self, index: usize, tile: Tile<'_>) {
        let EngineContext {
            spec,
            kernels,
            layers,
            ..
        } = *self.context;
        let Some(own) = &layers[index].per_layer else {
            return;
        };
        let width = own.gate.rows();
        let first = self.rows.start + tile.rows.first;
        // SAFETY: the unit owns the tile's `h`.
        let h = unsafe { tile.buffers.h.slice_mut(0..tile.rows.count * width) };
        for (row, gate) in (first..).zip(h.chunks_exact_mut(width)) {
            kernels.gate(spec.activation, gate, self.context.input(row, index));
        }
        // SAFETY: the unit owns the tile and its buffers.
        unsafe { self.quantise_h(&own.output, width, tile) };
    }

    /// Reads `h`, which has rows of `width` values, writes `act`.
    pub(super) unsafe fn quantise_h(&self, down: &Packed, width: usize, tile: Tile<'_>) {
        let values = 0..tile.rows.count * width;
        // SAFETY: the unit owns `act`, and no unit of the phase writes `h`.
        let (h, act) = unsafe { (tile.buffers.h.slice(values), tile.buffers.act()) };
        let form = ActForm::of([down]);
        self.context.kernels.prepare(h, width, form, act);
    }
}
