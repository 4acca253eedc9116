//! Steps of Mamba-2: convolution, scan and gate. (The norm follows in `recurrence`, because it takes
//! all heads of a group together.)
//!
//! A row of `qkv` has the gates of all heads, the channels of the convolution (values, B and C), and
//! a step for each head. There are two phases, because all heads of a group read the same B and C:
//!
//! - A unit of the first has some successive rows of one sequence, and some channels. Outputs replace
//!   inputs.
//! - A unit of the second has such rows, and one head. Outputs replace gates.

use std::ops::Range;

use hearthnet_files::spec::Activation;

use super::convolution::ConvolutionScratch;
use super::stages::LayerRun;
use crate::kernels::{MambaRows, softplus};
use crate::layer::{Layer, Mamba};

#[derive(Default)]
pub(super) struct MambaScratch {
    values: Vec<f32>,
    write: Vec<f32>,
    read: Vec<f32>,
    steps: Vec<f32>,
    decay: Vec<f32>,
}

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Convolves some channels, and updates their state.
    pub(super) unsafe fn convolve_mamba(
        &self,
        layer: &Layer,
        mamba: &Mamba,
        unit: usize,
        scratch: &mut ConvolutionScratch,
    ) {
        let columns = |row: usize, channels: &Range<usize>| {
            let first = row * self.widths.qkv + mamba.spec.values() as usize;
            first + channels.start..first + channels.end
        };
        let input = |row: usize, channels: &Range<usize>, window: &mut Vec<f32>| {
            // SAFETY: the unit owns the channels of the rows.
            window.extend_from_slice(unsafe { self.qkv.slice(columns(row, channels)) });
        };
        let output = |row: usize, channels: &Range<usize>, sums: &mut [f32]| {
            let bias = &mamba.convolution_bias[channels.clone()];
            let biased = sums.iter_mut().zip(bias);
            biased.for_each(|(sum, bias)| *sum += bias);
            self.context.kernels.silu(sums);
            // SAFETY: the unit owns the channels of the rows.
            unsafe { self.qkv.slice_mut(columns(row, channels)) }.copy_from_slice(sums);
        };
        // SAFETY: by the contract of all steps.
        unsafe { self.convolve_channels(layer, &mamba.convolution, unit, scratch, input, output) };
    }

    /// Takes a head from the outputs of the convolution to its gated outputs, and updates its state.
    pub(super) unsafe fn scan(
        &self,
        layer: &Layer,
        mamba: &Mamba,
        unit: usize,
        scratch: &mut MambaScratch,
    ) {
        let heads = mamba.spec.heads as usize;
        let (segment, head) = (&self.segments[unit / heads], unit % heads);
        let size = mamba.spec.state();
        let each = size.values as usize / heads;
        let first = layer.state + (size.rows * size.channels) as usize + head * each;
        let part = first..first + each;
        // SAFETY: the unit owns the head's part of all states of the sequence, and its columns.
        unsafe {
            self.walk(segment, std::slice::from_ref(&part), |rows, state| {
                self.scan_rows(mamba, head, rows, state.slice_mut(part.clone()), scratch);
            });
        }
    }

    unsafe fn scan_rows(
        &self,
        mamba: &Mamba,
        head: usize,
        rows: Range<usize>,
        state: &mut [f32],
        scratch: &mut MambaScratch,
    ) {
        let MambaScratch {
            values,
            write,
            read,
            steps,
            decay,
            ..
        } = scratch;
        let (spec, kernels, width) = (&mamba.spec, self.context.kernels, self.widths.qkv);
        let group = spec.group(head as u32) as usize;
        let (own, keys) = (spec.head_width as usize, spec.state_rows as usize);
        let (all, all_keys) = (spec.values() as usize, spec.keys() as usize);
        let gates = head * own..(head + 1) * own;
        let inputs = all + gates.start..all + gates.end;
        let first = 2 * all + group * keys;
        let (writes, reads) = (
            first..first + keys,
            first + all_keys..first + all_keys + keys,
        );
        let step = 2 * all + 2 * all_keys + head;
        for buffer in [
            &mut *values,
            &mut *write,
            &mut *read,
            &mut *steps,
            &mut *decay,
        ] {
            buffer.clear();
        }
        for row in rows.clone() {
            let columns = |part: &Range<usize>| row * width + part.start..row * width + part.end;
            // SAFETY: no unit writes the outputs of the convolution and the steps.
            unsafe {
                values.extend_from_slice(self.qkv.slice(columns(&inputs)));
                write.extend_from_slice(self.qkv.slice(columns(&writes)));
                read.extend_from_slice(self.qkv.slice(columns(&reads)));
                let score = self.qkv.slice(columns(&(step..step + 1)))[0];
                steps.push(softplus(score + mamba.step_bias[head]));
            }
        }
        decay.extend(steps.iter().map(|step| step * mamba.decay[head]));
        kernels.exp(decay);
        let all = MambaRows {
            write,
            read,
            decay,
            steps,
            skip: mamba.skip[head],
        };
        kernels.mamba_scan(&all, state, values);
        for (row, out) in rows.zip(values.chunks_exact(own)) {
            // SAFETY: the unit owns the head's columns of the gates.
            let gate = unsafe {
                let gates = row * width + gates.start..row * width + gates.end;
                self.qkv.slice_mut(gates)
            };
            kernels.gate(Activation::Silu, gate, out);
        }
    }
}
