//! Vector of a text: the mean of its final hidden states, with length 1. Pure.
//!
//! The arithmetic is that of `specs/canonical-arithmetic.md` 12.

use crate::exact::Exact;
use crate::frames::Embedding;

/// Name of the way in which vectors are made, for clients. A change of one bit needs a new name.
pub const POOLING: &str = "mean-hidden-1";

/// Request for the vectors of some texts.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs)] // Built by its callers.
pub struct EmbedRequest {
    /// Token ids of each text, from [`tokens_of`](super::tokens_of).
    pub inputs: Vec<Vec<u32>>,
    /// As in [`ChatRequest`](super::ChatRequest).
    pub exact: Option<Exact>,
}

/// Sum of the hidden states of a text.
pub(super) struct Pool(Vec<f32>);

impl Pool {
    /// Pool of states of `width` values, at least 1.
    pub(super) fn new(width: usize) -> Self {
        Self(vec![0.0; width])
    }

    /// Adds states, `[n, width]`, in the order of their positions.
    pub(super) fn add(&mut self, states: &[f32]) {
        for state in states.chunks_exact(self.0.len()) {
            for (sum, value) in self.0.iter_mut().zip(state) {
                *sum += value;
            }
        }
    }

    /// Vector of length 1 in the direction of the sum, which is that of the mean. `None` if the
    /// numbers overflow. A sum of zeros stays as it is.
    pub(super) fn finish(self) -> Option<Embedding> {
        let Self(mut values) = self;
        let mut square = 0.0_f32;
        for value in &values {
            square += value * value;
        }
        if square > 0.0 {
            let length = square.sqrt();
            values.iter_mut().for_each(|value| *value /= length);
        }
        square.is_finite().then_some(Embedding(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `rows` states of 20 values, as in the example of the specification.
    fn states(rows: u8) -> Vec<f32> {
        let value = |n: u8| (f32::from(n % 17) - 8.0) / 3.0;
        (0..rows * 20).map(value).collect()
    }

    #[test]
    fn the_example_of_the_specification_has_its_bits() {
        let mut pool = Pool::new(20);
        pool.add(&states(3));
        let sum = [0, 19].map(|at| pool.0[at].to_bits());
        assert_eq!(sum, [0xc0a0_0000, 0xc040_0000]);
        let vector = pool.finish().unwrap();
        let bits = [0, 19].map(|at| vector.0[at].to_bits());
        assert_eq!(bits, [0xbec1_b3cf, 0xbe68_715e]);
    }

    #[test]
    fn a_vector_has_length_1_and_does_not_depend_on_the_pieces() {
        let states = states(7);
        let mut whole = Pool::new(20);
        whole.add(&states);
        let mut pieces = Pool::new(20);
        for piece in states.chunks(40) {
            pieces.add(piece);
        }
        let vector = whole.finish().unwrap();
        assert_eq!(Some(&vector), pieces.finish().as_ref());
        let square: f32 = vector.0.iter().map(|value| value * value).sum();
        assert!((square - 1.0).abs() < 1e-6, "{square}");
    }

    #[test]
    fn zeros_stay_and_an_overflow_is_no_vector() {
        assert_eq!(Pool::new(2).finish(), Some(Embedding(vec![0.0; 2])));
        let mut pool = Pool::new(2);
        pool.add(&[f32::MAX, 1.0]);
        assert_eq!(pool.finish(), None);
    }
}
