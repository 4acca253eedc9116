//! Recurrences: what all kinds have in common.
//!
//! A unit has some successive rows of one sequence, and some heads or channels. It reads and writes
//! the parts of the sequence's state that belong to these, row after row: so the result depends
//! neither on batches and tiles, nor on threads.

use std::ops::Range;

use super::convolution::{ConvolutionScratch, channel_units};
use super::delta::DeltaScratch;
use super::mamba::MambaScratch;
use super::stages::LayerRun;
use super::tiles::Tile;
use super::tiling::Segment;
use crate::kernels::{ActForm, SharedMut};
use crate::layer::{Layer, Recurrence};
use crate::state::INTERVAL;

#[derive(Default)]
pub(super) struct RecurrenceScratch {
    delta: DeltaScratch,
    convolution: ConvolutionScratch,
    mamba: MambaScratch,
}

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Number of units of a layer with a recurrence; `None` for a layer with attention.
    pub(super) fn recurrence_units(&self, layer: &Layer) -> Option<usize> {
        let each = layer
            .recurrence
            .as_ref()
            .map(|recurrence| match recurrence {
                Recurrence::Delta(delta) => delta.spec.key_heads as usize,
                Recurrence::Convolution(convolution) => channel_units(convolution),
                Recurrence::Mamba(mamba) => mamba.spec.heads as usize,
            });
        each.map(|each| each * self.segments.len())
    }

    /// Takes a unit from the outputs of the matrices of `qkv` to the inputs of the output
    /// projection, and updates the state.
    pub(super) unsafe fn recur(&self, layer: &Layer, unit: usize, scratch: &mut RecurrenceScratch) {
        // SAFETY: by the contract of all steps.
        unsafe {
            match &layer.recurrence {
                Some(Recurrence::Delta(delta)) => {
                    self.recur_delta(layer, delta, unit, &mut scratch.delta);
                }
                Some(Recurrence::Convolution(convolution)) => {
                    self.convolve_gated(layer, convolution, unit, &mut scratch.convolution);
                }
                Some(Recurrence::Mamba(mamba)) => {
                    self.scan(layer, mamba, unit, &mut scratch.mamba);
                }
                None => {}
            }
        }
    }

    /// Number of units of a phase before the recurrence: the convolution of a layer with Mamba-2,
    /// whose outputs several heads read.
    pub(super) fn convolution_units(&self, layer: &Layer) -> usize {
        match &layer.recurrence {
            Some(Recurrence::Mamba(mamba)) => {
                channel_units(&mamba.convolution) * self.segments.len()
            }
            _ => 0,
        }
    }

    /// Unit of the phase before the recurrence.
    pub(super) unsafe fn convolve_unit(
        &self,
        layer: &Layer,
        unit: usize,
        scratch: &mut RecurrenceScratch,
    ) {
        if let Some(Recurrence::Mamba(mamba)) = &layer.recurrence {
            // SAFETY: by the contract of all steps.
            unsafe { self.convolve_mamba(layer, mamba, unit, &mut scratch.convolution) };
        }
    }

    /// Takes the rows of a segment through its sequence's state, in pieces that end at checkpoints.
    /// `step` gets each piece and the state after the batch. `parts` of the states are the unit's.
    pub(super) unsafe fn walk(
        &self,
        segment: &Segment,
        parts: &[Range<usize>],
        mut step: impl FnMut(Range<usize>, SharedMut<'_, f32>),
    ) {
        let states = &self.states[segment.span];
        let copy = |from: Option<SharedMut<'_, f32>>, to: SharedMut<'_, f32>| {
            for part in parts {
                // SAFETY: the parts are the unit's, and `from` and `to` are different states.
                unsafe {
                    let out = to.slice_mut(part.clone());
                    match from {
                        Some(from) => out.copy_from_slice(from.slice(part.clone())),
                        None => out.fill(0.0),
                    }
                }
            }
        };
        if segment.position == states.begin {
            copy(states.before, states.after);
        }
        let mut row = segment.row;
        let end = segment.row + segment.rows;
        while row < end {
            let position = segment.position + (row - segment.row);
            let rows = (end - row).min(INTERVAL - position % INTERVAL);
            step(row..row + rows, states.after);
            row += rows;
            let mut checkpoints = states.checkpoints.iter();
            if let Some((_, to)) = checkpoints.find(|(at, _)| *at == position + rows) {
                copy(Some(states.after), *to);
            }
        }
    }

    /// Reads the outputs of a recurrence, writes `act`.
    pub(super) unsafe fn quantise_recurrence(
        &self,
        layer: &Layer,
        recurrence: &Recurrence,
        tile: Tile<'_>,
    ) {
        let width = self.widths.qkv;
        let Some(output) = &layer.attn_output else {
            return;
        };
        let first = match recurrence {
            Recurrence::Delta(delta) => delta.spec.channels() as usize,
            // The outputs have replaced the factors behind the convolution.
            Recurrence::Convolution(convolution) => convolution.width,
            // The outputs of Mamba-2 have replaced the gates, which come first.
            Recurrence::Mamba(_) => 0,
        };
        let values = output.cols();
        // SAFETY: the unit owns the tile's `attn` and `act`, and no unit writes the outputs.
        let (out, act) = unsafe {
            let out = tile.buffers.attn.slice_mut(0..tile.rows.count * values);
            for (row, out) in out.chunks_exact_mut(values).enumerate() {
                let columns = row * width + first..row * width + first + values;
                out.copy_from_slice(tile.rows.qkv.slice(columns));
            }
            (out, tile.buffers.act())
        };
        if let Recurrence::Mamba(mamba) = recurrence {
            let eps = self.context.spec.norm_eps;
            let width = values / mamba.spec.groups as usize;
            for row in out.chunks_exact_mut(values) {
                let groups = row.chunks_exact_mut(width);
                for (group, weights) in groups.zip(mamba.norm.chunks_exact(width)) {
                    self.context.kernels.rms_norm_in_place(group, weights, eps);
                }
            }
        }
        let form = ActForm::of([output]);
        self.context.kernels.prepare(out, values, form, act);
    }
}
