//! Gated short convolution: see `specs/canonical-arithmetic.md`, section 13.
//!
//! A row of `qkv` has the factors before the convolution, those behind it, and its inputs. A unit
//! has some successive rows of one sequence, and some channels.

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
pub(super) fn convolution_units(convolution: &ShortConvolution) -> usize {
    convolution.width.div_ceil(CHANNELS)
}

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Takes a unit from the outputs of the matrix of `qkv` to the inputs of the output projection,
    /// which replace the factors behind the convolution, and updates the state.
    pub(super) unsafe fn convolve_gated(
        &self,
        layer: &Layer,
        convolution: &ShortConvolution,
        unit: usize,
        scratch: &mut ConvolutionScratch,
    ) {
        let units = convolution_units(convolution);
        let (segment, unit) = (&self.segments[unit / units], unit % units);
        let channels = share(convolution.width, units, unit);
        let earlier = (0..convolution.positions - 1).map(|row| {
            let row = layer.state + row * convolution.width;
            row + channels.start..row + channels.end
        });
        let earlier: Vec<Range<usize>> = earlier.collect();
        // SAFETY: the unit owns the channels of all states of the sequence, and of the rows.
        unsafe {
            self.walk(segment, &earlier, |rows, state| {
                self.convolve_rows(convolution, &channels, rows, (&earlier[..], state), scratch);
            });
        }
    }

    /// Convolves channels of some rows, and moves the state behind them. `earlier` are the places
    /// of these channels in the state, oldest row first.
    unsafe fn convolve_rows(
        &self,
        convolution: &ShortConvolution,
        channels: &Range<usize>,
        rows: Range<usize>,
        (earlier, state): (&[Range<usize>], SharedMut<'_, f32>),
        scratch: &mut ConvolutionScratch,
    ) {
        let ConvolutionScratch { window, sums } = scratch;
        let ShortConvolution {
            positions,
            width,
            ref weights,
        } = *convolution;
        let columns = |row: usize, part: usize| {
            let first = row * self.widths.qkv + part * width;
            first + channels.start..first + channels.end
        };
        window.clear();
        for earlier in earlier {
            // SAFETY: the unit owns the channels of the state.
            window.extend_from_slice(unsafe { state.slice(earlier.clone()) });
        }
        for row in rows.clone() {
            // SAFETY: no unit writes the inputs, and the factors before the convolution.
            let (factors, inputs) = unsafe {
                (
                    self.qkv.slice(columns(row, 0)),
                    self.qkv.slice(columns(row, 2)),
                )
            };
            window.extend(factors.iter().zip(inputs).map(|(factor, x)| factor * x));
        }
        let kernel = Convolution {
            weights: &weights[channels.start..],
            stride: width,
            positions,
            channels: channels.len(),
        };
        let count = rows.len() * channels.len();
        grow(sums, count);
        let sums = &mut sums[..count];
        self.context.kernels.convolve(&kernel, window, sums);
        let last = window[count..].chunks_exact(channels.len());
        for (earlier, row) in earlier.iter().zip(last) {
            // SAFETY: the unit owns the channels of the state.
            unsafe { state.slice_mut(earlier.clone()) }.copy_from_slice(row);
        }
        for (row, sums) in rows.zip(sums.chunks_exact(channels.len())) {
            // SAFETY: the unit owns the channels of the factors behind the convolution.
            let out = unsafe { self.qkv.slice_mut(columns(row, 1)) };
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out *= sum);
        }
    }
}
