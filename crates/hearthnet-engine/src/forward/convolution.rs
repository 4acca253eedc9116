//! Convolution of channels, and the gated short convolution, which has nothing else: see
//! `specs/canonical-arithmetic.md`, section 13.
//!
//! In a row of `qkv`, the latter has the factors before the convolution, those behind it, and its
//! inputs. A unit has some successive rows of one sequence, and some channels.

use std::ops::Range;

use super::stages::LayerRun;
use super::tiling::share;
use crate::kernels::{Convolution, SharedMut, grow};
use crate::layer::{Layer, ShortConvolution};

/// Channels of a unit, about: enough work for a thread, and so few that their rows stay in the L1
/// cache.
const CHANNELS: usize = 256;

#[derive(Default)]
pub(super) struct ConvolutionScratch {
    window: Vec<f32>,
    sums: Vec<f32>,
}

/// Units into which the channels of a segment are split.
pub(super) fn channel_units(convolution: &ShortConvolution) -> usize {
    convolution.width.div_ceil(CHANNELS)
}

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Takes a unit of a gated short convolution from the outputs of the matrix of `qkv` to the
    /// inputs of the output projection, which replace the factors behind the convolution, and
    /// updates the state.
    pub(super) unsafe fn convolve_gated(
        &self,
        layer: &Layer,
        convolution: &ShortConvolution,
        unit: usize,
        scratch: &mut ConvolutionScratch,
    ) {
        let columns = |row: usize, part: usize, channels: &Range<usize>| {
            let first = row * self.widths.qkv + part * convolution.width;
            first + channels.start..first + channels.end
        };
        let input = |row: usize, channels: &Range<usize>, window: &mut Vec<f32>| {
            // SAFETY: no unit writes the inputs, and the factors before the convolution.
            let (factors, inputs) = unsafe {
                (
                    self.qkv.slice(columns(row, 0, channels)),
                    self.qkv.slice(columns(row, 2, channels)),
                )
            };
            window.extend(factors.iter().zip(inputs).map(|(factor, x)| factor * x));
        };
        let output = |row: usize, channels: &Range<usize>, sums: &mut [f32]| {
            // SAFETY: the unit owns the channels of the factors behind the convolution.
            let out = unsafe { self.qkv.slice_mut(columns(row, 1, channels)) };
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out *= *sum);
        };
        // SAFETY: by the contract of all steps.
        unsafe { self.convolve_channels(layer, convolution, unit, scratch, input, output) };
    }

    /// Convolves the channels of a unit, and updates their state, which begins at `layer.state`.
    /// `input` appends the channels of a row to a window, and `output` gets their sums.
    pub(super) unsafe fn convolve_channels(
        &self,
        layer: &Layer,
        convolution: &ShortConvolution,
        unit: usize,
        scratch: &mut ConvolutionScratch,
        input: impl Fn(usize, &Range<usize>, &mut Vec<f32>),
        output: impl Fn(usize, &Range<usize>, &mut [f32]),
    ) {
        let ShortConvolution {
            positions,
            width,
            ref weights,
        } = *convolution;
        let units = channel_units(convolution);
        let (segment, unit) = (&self.segments[unit / units], unit % units);
        let channels = share(width, units, unit);
        // Places of the channels in the state, oldest row first.
        let earlier = (0..positions - 1).map(|row| {
            let row = layer.state + row * width;
            row + channels.start..row + channels.end
        });
        let earlier: Vec<Range<usize>> = earlier.collect();
        let kernel = Convolution {
            weights: &weights[channels.start..],
            stride: width,
            positions,
            channels: channels.len(),
        };
        let ConvolutionScratch { window, sums } = scratch;
        let convolve = |rows: Range<usize>, state: SharedMut<'_, f32>| {
            window.clear();
            for earlier in &earlier {
                // SAFETY: the unit owns the channels of the state.
                window.extend_from_slice(unsafe { state.slice(earlier.clone()) });
            }
            rows.clone().for_each(|row| input(row, &channels, window));
            let count = rows.len() * channels.len();
            grow(sums, count);
            let sums = &mut sums[..count];
            self.context.kernels.convolve(&kernel, window, sums);
            let last = window[count..].chunks_exact(channels.len());
            for (earlier, row) in earlier.iter().zip(last) {
                // SAFETY: the unit owns the channels of the state.
                unsafe { state.slice_mut(earlier.clone()) }.copy_from_slice(row);
            }
            let sums = sums.chunks_exact_mut(channels.len());
            rows.zip(sums)
                .for_each(|(row, sums)| output(row, &channels, sums));
        };
        // SAFETY: the unit owns the channels of all states of the sequence, and of the rows.
        unsafe { self.walk(segment, &earlier, convolve) };
    }
}
