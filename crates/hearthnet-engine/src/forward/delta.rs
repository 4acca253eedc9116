//! Steps of a gated delta rule: convolution, recurrence, norm and gate.
//!
//! A unit has some successive rows of one sequence, and one key head with its value heads. It reads
//! and writes the parts of the sequence's state that belong to these heads, row after row: so the
//! result depends neither on batches and tiles, nor on threads.

use std::ops::Range;

use hearthnet_files::spec::{Activation, DeltaSpec};

use super::stages::LayerRun;
use crate::kernels::{Convolution, DeltaRows, SharedMut, grow, softplus};
use crate::layer::{Delta, Layer};

#[derive(Default)]
pub(super) struct DeltaScratch {
    window: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
}

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Takes a unit from the outputs of the matrices of `qkv` to the inputs of the output
    /// projection, which replace the gates, and updates the state.
    pub(super) unsafe fn recur_delta(
        &self,
        layer: &Layer,
        delta: &Delta,
        unit: usize,
        scratch: &mut DeltaScratch,
    ) {
        let spec = &delta.spec;
        let heads = spec.key_heads as usize;
        let (segment, key_head) = (&self.segments[unit / heads], unit % heads);
        let unit = Unit::of(spec, layer.state, key_head);
        let parts: Vec<Range<usize>> = unit.parts().collect();
        // SAFETY: the unit owns its parts of all states of the sequence, and the rows' columns.
        unsafe {
            self.walk(segment, &parts, |rows, state| {
                self.recur_rows(delta, &unit, rows, state, scratch);
            });
        }
    }

    unsafe fn recur_rows(
        &self,
        delta: &Delta,
        unit: &Unit<'_>,
        rows: Range<usize>,
        state: SharedMut<'_, f32>,
        scratch: &mut DeltaScratch,
    ) {
        let Delta { spec, .. } = delta;
        let (kernels, width) = (self.context.kernels, self.widths.qkv);
        let (keys, values) = (spec.key_width as usize, spec.value_width as usize);
        let scale = 1.0 / (keys as f32).sqrt();
        let count = rows.len();
        for buffer in [&mut scratch.queries, &mut scratch.keys] {
            grow(buffer, count * keys);
        }
        grow(&mut scratch.values, count * values);
        let [queries, key_columns] = unit.key_columns();
        for (columns, out, scale) in [
            (queries, &mut scratch.queries, scale),
            (key_columns, &mut scratch.keys, 1.0),
        ] {
            let out = &mut out[..count * keys];
            // SAFETY: the unit owns the columns and the state.
            unsafe { self.convolve(delta, unit, columns, &rows, state, &mut scratch.window, out) };
            kernels.l2_norm(out, keys, spec.norm_eps, scale);
        }
        for head in unit.value_heads() {
            let out = &mut scratch.values[..count * values];
            let columns = unit.value_columns(head);
            // SAFETY: the unit owns the columns and the state.
            unsafe { self.convolve(delta, unit, columns, &rows, state, &mut scratch.window, out) };
            let (beta, alpha) = delta.scores[head];
            scratch.beta.clear();
            scratch.decay.clear();
            for row in rows.clone() {
                // SAFETY: no unit writes the scores.
                let row = unsafe { self.qkv.slice(row * width..(row + 1) * width) };
                scratch.beta.push(row[beta]);
                let step = softplus(row[alpha] + delta.decay_bias[head]);
                scratch.decay.push(delta.decay[head] * step);
            }
            kernels.sigmoid(&mut scratch.beta);
            kernels.exp(&mut scratch.decay);
            let all = DeltaRows {
                queries: &scratch.queries[..count * keys],
                keys: &scratch.keys[..count * keys],
                decay: &scratch.decay,
                beta: &scratch.beta,
            };
            // SAFETY: the unit owns the head's state.
            let state = unsafe { state.slice_mut(unit.head_state(head)) };
            kernels.delta_rule(&all, state, out);
            kernels.rms_norm_in_place(out, &delta.norm, self.context.spec.norm_eps);
            let gates = unit.gate_columns(head);
            for (row, out) in rows.clone().zip(out.chunks_exact(values)) {
                let gates = row * width + gates.start..row * width + gates.end;
                // SAFETY: the unit owns the head's columns of the gates.
                let gate = unsafe { self.qkv.slice_mut(gates) };
                kernels.gate(Activation::Silu, gate, out);
            }
        }
    }

    /// Convolves columns of some rows, and moves the state of the convolution behind them.
    #[allow(clippy::too_many_arguments)]
    unsafe fn convolve(
        &self,
        delta: &Delta,
        unit: &Unit<'_>,
        columns: Range<usize>,
        rows: &Range<usize>,
        state: SharedMut<'_, f32>,
        window: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let (kernels, width) = (self.context.kernels, self.widths.qkv);
        let channels = columns.len();
        window.clear();
        for earlier in unit.earlier(&columns) {
            // SAFETY: the unit owns the columns of the state.
            window.extend_from_slice(unsafe { state.slice(earlier) });
        }
        for row in rows.clone() {
            let inputs = row * width + columns.start..row * width + columns.end;
            // SAFETY: no unit writes the inputs of the convolution.
            window.extend_from_slice(unsafe { self.qkv.slice(inputs) });
        }
        let convolution = Convolution {
            weights: &delta.convolution.weights[columns.start..],
            stride: delta.convolution.width,
            positions: delta.convolution.positions,
            channels,
        };
        kernels.convolve(&convolution, window, out);
        kernels.silu(out);
        let last = window[rows.len() * channels..].chunks_exact(channels);
        for (earlier, row) in unit.earlier(&columns).zip(last) {
            // SAFETY: the unit owns the columns of the state.
            unsafe { state.slice_mut(earlier) }.copy_from_slice(row);
        }
    }
}

/// Parts of a row and of a layer's state that belong to a key head and its value heads.
struct Unit<'a> {
    spec: &'a DeltaSpec,
    /// First value of the layer's state.
    state: usize,
    key_head: usize,
}

impl<'a> Unit<'a> {
    fn of(spec: &'a DeltaSpec, state: usize, key_head: usize) -> Self {
        Self {
            spec,
            state,
            key_head,
        }
    }

    fn value_heads(&self) -> impl Iterator<Item = usize> + use<> {
        let (spec, key_head) = (*self.spec, self.key_head as u32);
        let heads = (0..spec.value_heads).filter(move |head| spec.key_head(*head) == key_head);
        heads.map(|head| head as usize)
    }

    /// Columns of the queries and of the keys.
    fn key_columns(&self) -> [Range<usize>; 2] {
        let (width, all) = (self.spec.key_width as usize, self.spec.keys() as usize);
        let first = self.key_head * width;
        [first..first + width, all + first..all + first + width]
    }

    fn value_columns(&self, head: usize) -> Range<usize> {
        let width = self.spec.value_width as usize;
        let first = 2 * self.spec.keys() as usize + head * width;
        first..first + width
    }

    fn gate_columns(&self, head: usize) -> Range<usize> {
        let width = self.spec.value_width as usize;
        let first = self.spec.channels() as usize + head * width;
        first..first + width
    }

    /// Earlier inputs of the convolution in the state, oldest first.
    fn earlier(&self, columns: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (size, state, columns) = (self.spec.state(), self.state, columns.clone());
        (0..size.rows as usize).map(move |row| {
            let row = state + row * size.channels as usize;
            row + columns.start..row + columns.end
        })
    }

    fn head_state(&self, head: usize) -> Range<usize> {
        let size = self.spec.state();
        let each = (self.spec.key_width * self.spec.value_width) as usize;
        let first = self.state + (size.rows * size.channels) as usize + head * each;
        first..first + each
    }

    /// The unit's parts of a state.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        let states = self.value_heads().map(|head| self.head_state(head));
        let columns = self.value_heads().map(|head| self.value_columns(head));
        let columns = self.key_columns().into_iter().chain(columns);
        states.chain(columns.flat_map(|columns| self.earlier(&columns)))
    }
}
