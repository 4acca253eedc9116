//! Table of cosines and sines for rotary position embedding (RoPE).

use std::f64::consts::PI;

use hearthnet_files::spec::{RopeKind, YarnSpec};

/// Cosines and sines by position. Angles are computed in `f64` with the portable `libm` crate, so
/// that tables are equal on all machines, and then rounded to `f32`.
#[derive(Clone, Debug)]
pub struct RopeTable {
    kind: RopeKind,
    frequencies: Vec<f64>,
    amplitude: f64,
    positions: usize,
    /// `[positions][pairs]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RopeRow<'a> {
    pub(super) kind: RopeKind,
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
}

impl RopeTable {
    /// Unscaled frequencies: `theta^(-2 i / dims)` radians per position for pair `i` of
    /// `dims / 2`.
    pub fn frequencies(dims: usize, theta: f64) -> Vec<f64> {
        (0..dims / 2)
            .map(|i| libm::pow(theta, -(2.0 * i as f64) / dims as f64))
            .collect()
    }

    /// Applies YaRN scaling to the [`Self::frequencies`] of base `theta`.
    pub fn stretch(frequencies: &mut [f64], theta: f64, yarn: &YarnSpec) {
        let dims = (2 * frequencies.len()) as f64;
        // Fractional index of the pair that makes `turns` turns within the original context.
        let pair = |turns: f64| {
            let wavelength = f64::from(yarn.original) / (turns * 2.0 * PI);
            dims * libm::log(wavelength) / (2.0 * libm::log(theta))
        };
        let (low, high) = (pair(yarn.fast), pair(yarn.slow));
        let (low, high) = match yarn.whole {
            true => (low.floor(), high.ceil()),
            false => (low, high),
        };
        let (low, high) = (low.max(0.0), high.min(dims - 1.0));
        let width = (high - low).max(0.001);
        for (i, frequency) in frequencies.iter_mut().enumerate() {
            let slow = ((i as f64 - low) / width).clamp(0.0, 1.0);
            *frequency = *frequency / yarn.factor * slow + *frequency * (1.0 - slow);
        }
    }

    /// An empty table. `frequencies` has one value per rotated pair, already scaled; `amplitude`
    /// multiplies cosines and sines (1 for most models).
    pub fn new(kind: RopeKind, frequencies: Vec<f64>, amplitude: f64) -> Self {
        Self {
            kind,
            frequencies,
            amplitude,
            positions: 0,
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Number of leading values of a head that are rotated.
    pub fn dims(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Extends the table to cover at least `positions` positions.
    pub fn cover(&mut self, positions: usize) {
        for position in self.positions..positions {
            for frequency in &self.frequencies {
                let (sin, cos) = libm::sincos(position as f64 * frequency);
                self.cos.push((cos * self.amplitude) as f32);
                self.sin.push((sin * self.amplitude) as f32);
            }
        }
        self.positions = self.positions.max(positions);
    }

    /// Cosines and sines of a position, one of each per pair, or `None` if the table does not cover
    /// the position.
    pub fn angles(&self, position: usize) -> Option<(&[f32], &[f32])> {
        (position < self.positions).then(|| {
            let RopeRow { cos, sin, .. } = self.row(position);
            (cos, sin)
        })
    }

    /// # Panics
    /// When the table does not cover `position`.
    pub(super) fn row(&self, position: usize) -> RopeRow<'_> {
        assert!(
            position < self.positions,
            "a position beyond the rotation table"
        );
        let pairs = self.frequencies.len();
        let range = position * pairs..(position + 1) * pairs;
        RopeRow {
            kind: self.kind,
            cos: &self.cos[range.clone()],
            sin: &self.sin[range],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_does_not_depend_on_how_it_grew() {
        let frequencies = RopeTable::frequencies(64, 1e5);
        let mut at_once = RopeTable::new(RopeKind::NeoX, frequencies.clone(), 1.0);
        at_once.cover(100);
        let mut in_steps = RopeTable::new(RopeKind::NeoX, frequencies, 1.0);
        for n in [1, 7, 3, 64, 100] {
            in_steps.cover(n);
        }
        assert_eq!((at_once.cos, at_once.sin), (in_steps.cos, in_steps.sin));
    }

    #[test]
    fn angles_agree_with_the_standard_library_to_f32_precision() {
        let mut table = RopeTable::new(RopeKind::NeoX, RopeTable::frequencies(64, 1e5), 1.0);
        table.cover(8192);
        for position in [0usize, 1, 100, 8191] {
            let row = table.row(position);
            for (i, (c, s)) in row.cos.iter().zip(row.sin).enumerate() {
                let angle = position as f64 * 1e5f64.powf(-2.0 * i as f64 / 64.0);
                assert!((f64::from(*c) - angle.cos()).abs() < 1e-7);
                assert!((f64::from(*s) - angle.sin()).abs() < 1e-7);
            }
        }
    }
}
