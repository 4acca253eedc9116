//! Random numbers, tokens and noise.

use super::dot;

/// Random numbers, the same in every run.
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        let token = |_| (self.next() % vocab as u64) as u32;
        (0..count).map(token).collect()
    }

    /// Adds random signs to rows. `strength`: their norm as a part of the row's.
    pub(crate) fn disturb(&mut self, rows: &mut [f32], width: usize, strength: f32) {
        for row in rows.chunks_exact_mut(width) {
            let size = strength * dot(row, row).sqrt() / (width as f32).sqrt();
            for value in row {
                *value += if self.next().is_multiple_of(2) {
                    size
                } else {
                    -size
                };
            }
        }
    }

    /// Draws a token by its logit.
    pub(crate) fn draw(&mut self, logits: &[f32]) -> u32 {
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from((l - most).exp())).sum();
        let mut left = (self.next() >> 11) as f64 / (1u64 << 53) as f64 * sum;
        for (id, logit) in (0u32..).zip(logits) {
            left -= f64::from((logit - most).exp());
            if left <= 0.0 {
                return id;
            }
        }
        0
    }
}
