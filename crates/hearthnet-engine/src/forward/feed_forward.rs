//! Steps of a dense feed-forward layer, and the gate that experts have, too.

use std::ops::Range;

use hearthnet_files::BoundaryDtype;

use super::stages::LayerRun;
use super::tiles::{EngineContext, Tile};
use crate::kernels::{Act, ActForm, Output, Packed, TileMut};
use crate::layer::{ExpertBias, Ffn};

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

    /// Reads `h`, which has rows of `width` values, writes `act`.
    pub(super) unsafe fn quantise_h(&self, down: &Packed, width: usize, tile: Tile<'_>) {
        let values = 0..tile.rows.count * width;
        // SAFETY: the unit owns `act`, and no unit of the phase writes `h`.
        let (h, act) = unsafe { (tile.buffers.h.slice(values), tile.buffers.act()) };
        let form = ActForm::of([down]);
        self.context.kernels.prepare(h, width, form, act);
    }
}
