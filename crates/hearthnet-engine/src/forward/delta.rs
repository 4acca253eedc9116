//! Steps of a gated delta rule: convolution, recurrence, norm and gate.
//!
//! A unit has some successive rows of one sequence, and one key head with its value heads. It reads
//! and writes the parts of the sequence's state that belong to these heads, row after row: so the
//! result depends neither on batches and tiles, nor on threads.

use std::ops::Range;

use hearthnet_files::spec::{Activation, DeltaSpec};

use super::stages::LayerRun;
use super::tiles::Tile;
use crate::kernels::{ActForm, Convolution, DeltaRows, SharedMut, grow, softplus};
use crate::layer::{Delta, Layer};
use crate::state::INTERVAL;

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
    /// Number of units of a layer.
    pub(super) fn delta_units(&self, delta: &Delta) -> usize {
        self.segments.len() * delta.spec.key_heads as usize
    }

    /// Takes a unit from the outputs of the matrices of `qkv` to the inputs of the output
    /// projection, which replace the gates, and updates the state.
    pub(super) unsafe fn recur(
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
        let states = &self.states[segment.span];
        // SAFETY: the unit owns its parts of all states of the sequence.
        unsafe {
            if segment.position == states.begin {
                unit.copy(states.before, states.after);
            }
            let mut row = segment.row;
            let end = segment.row + segment.rows;
            while row < end {
                let position = segment.position + (row - segment.row);
                let rows = (end - row).min(INTERVAL - position % INTERVAL);
                self.recur_rows(delta, &unit, row..row + rows, states.after, scratch);
                row += rows;
                let mut checkpoints = states.checkpoints.iter();
                if let Some((_, to)) = checkpoints.find(|(at, _)| *at == position + rows) {
                    unit.copy(Some(states.after), *to);
                }
            }
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
            weights: &delta.convolution[columns.start..],
            stride: delta.spec.channels() as usize,
            positions: delta.spec.convolution as usize,
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

    /// Reads the gated outputs, writes `act`.
    pub(super) unsafe fn quantise_delta(&self, layer: &Layer, delta: &Delta, tile: Tile<'_>) {
        let (width, values) = (self.widths.qkv, delta.spec.values() as usize);
        let first = delta.spec.channels() as usize;
        // SAFETY: the unit owns the tile's `attn` and `act`, and no unit writes the outputs.
        let (out, act) = unsafe {
            let out = tile.buffers.attn.slice_mut(0..tile.rows.count * values);
            for (row, out) in out.chunks_exact_mut(values).enumerate() {
                let columns = row * width + first..row * width + first + values;
                out.copy_from_slice(tile.rows.qkv.slice(columns));
            }
            (out, tile.buffers.act())
        };
        let form = ActForm::of([&layer.attn_output]);
        self.context.kernels.prepare(out, values, form, act);
    }
}

/// Parts of a row and of a layer's state that belong to a key head and its value heads.
struct Unit<'a> {
    spec: &'a DeltaSpec,
    /// First value of the layer's state.
    state: usize,
    key_head: usize,
}

#[allow(unsafe_code)]
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

    /// Copies the unit's parts of a state.
    ///
    /// # Safety
    /// No other unit of the phase uses these parts.
    unsafe fn copy(&self, from: Option<SharedMut<'_, f32>>, to: SharedMut<'_, f32>) {
        let mut parts: Vec<Range<usize>> = self.value_heads().map(|h| self.head_state(h)).collect();
        let columns = self.value_heads().map(|head| self.value_columns(head));
        for columns in self.key_columns().into_iter().chain(columns) {
            parts.extend(self.earlier(&columns));
        }
        for part in parts {
            // SAFETY: by the contract, and `from` and `to` are different states.
            unsafe {
                let out = to.slice_mut(part.clone());
                match from {
                    Some(from) => out.copy_from_slice(from.slice(part)),
                    None => out.fill(0.0),
                }
            }
        }
    }
}
