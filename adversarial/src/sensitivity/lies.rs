//! Changes of rows by a strength.

use hearthnet_testkit::SplitMix64;
use serde::Serialize;

/// A change that a host makes to a row.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr, strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Lie {
    /// Adds a vector of random signs. The strength is its norm, as a part of the row's.
    Noise,
    /// Adds the same direction to every row. The strength is its norm, as a part of the row's.
    Steering,
    /// Multiplies by the strength.
    Scaling,
}

/// How much of something is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    One,
    All,
}

impl Scope {
    pub(super) const BOTH: [Scope; 2] = [Scope::All, Scope::One];
}

impl Lie {
    /// Name for people.
    pub(super) fn name(self) -> &'static str {
        self.into()
    }

    /// Strengths that are tried.
    pub(super) fn strengths(self) -> &'static [f64] {
        match self {
            Self::Noise | Self::Steering => &[1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0],
            Self::Scaling => &[
                0.5, 0.7, 0.9, 0.99, 1.01, 1.1, 1.5, 2.0, 5.0, 10.0, 30.0, 100.0,
            ],
        }
    }

    /// Changes a row: one value of it, or all.
    pub(super) fn apply(self, row: &mut [f32], strength: f64, values: Scope, random: &mut Random) {
        let one = random.below(row.len());
        let norm = row
            .iter()
            .map(|v| f64::from(*v).powi(2))
            .sum::<f64>()
            .sqrt();
        let changed = match values {
            Scope::One => one..(one + 1).min(row.len()),
            Scope::All => 0..row.len(),
        };
        let size = (strength * norm / (changed.len().max(1) as f64).sqrt()) as f32;
        for (value, at) in row.iter_mut().zip(0..) {
            if !changed.contains(&at) {
                continue;
            }
            match self {
                Self::Noise => *value += [size, -size][random.below(2)],
                Self::Steering => *value += [size, -size][at % 2],
                Self::Scaling => *value *= strength as f32,
            }
        }
    }
}

/// Random numbers that are the same in every run.
pub(super) struct Random(SplitMix64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(SplitMix64(seed))
    }

    /// Number from 0 to `end` - 1; 0 if `end` is 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.0.next() >> 33) as usize % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strength_is_the_norm_of_the_change_as_a_part_of_the_rows() {
        let row: Vec<f32> = (0..64).map(|i| (i - 20) as f32 / 7.0).collect();
        let norm = |row: &[f32]| row.iter().map(|v| v * v).sum::<f32>().sqrt();
        for lie in [Lie::Noise, Lie::Steering] {
            for (values, changed) in [(Scope::One, 1), (Scope::All, 64)] {
                let mut lied = row.clone();
                lie.apply(&mut lied, 0.1, values, &mut Random::new(1));
                let change: Vec<f32> = lied.iter().zip(&row).map(|(a, b)| a - b).collect();
                assert_eq!(change.iter().filter(|v| **v != 0.0).count(), changed);
                assert!((norm(&change) / norm(&row) - 0.1).abs() < 1e-3, "{lie:?}");
            }
        }
        let mut lied = row.clone();
        Lie::Scaling.apply(&mut lied, 2.0, Scope::All, &mut Random::new(1));
        assert!(lied.iter().zip(&row).all(|(a, b)| *a == b * 2.0));
    }
}
