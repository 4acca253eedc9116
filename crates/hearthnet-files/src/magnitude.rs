//! Magnitude of residual stream rows, and the bands in which those of a model lie.

use serde::Deserialize;

/// Median magnitude of the values of a residual stream row, the upper one of two; 0 for an empty
/// row. It ignores the few huge values that models use to park attention. The row must be finite.
pub fn magnitude(row: &[f32]) -> f32 {
    // The bits of non-negative floats are ordered as the floats are.
    let mut values: Vec<u32> = row.iter().map(|v| v.abs().to_bits()).collect();
    if values.is_empty() {
        return 0.0;
    }
    let middle = values.len() / 2;
    f32::from_bits(*values.select_nth_unstable(middle).1)
}

/// Closed range of positive numbers.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(from = "[f32; 2]")]
pub struct Band {
    pub lo: f32,
    pub hi: f32,
}

impl Band {
    /// Whether `x` lies in the band; false for NaN.
    pub fn contains(self, x: f32) -> bool {
        self.lo <= x && x <= self.hi
    }
}

impl From<[f32; 2]> for Band {
    fn from([lo, hi]: [f32; 2]) -> Self {
        Self { lo, hi }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_magnitude_of_a_row_follows_its_scale_and_not_its_outliers() {
        let mut row: Vec<f32> = (0..576i16).map(|i| f32::from(i - 288) / 100.0).collect();
        let plain = magnitude(&row);
        assert!((1.43..1.45).contains(&plain), "{plain}");
        row[7] = -60_000.0;
        assert!((magnitude(&row) - plain).abs() < 0.02);
        row.iter_mut().for_each(|v| *v *= 100.0);
        assert!((magnitude(&row) / plain - 100.0).abs() < 2.0);
        assert_eq!(magnitude(&[0.0; 9]), 0.0);
        assert_eq!(magnitude(&[]), 0.0);
    }
}
