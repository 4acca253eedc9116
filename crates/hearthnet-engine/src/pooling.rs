//! Vector of a text, made of its final hidden states, with length 1. Pure.
//!
//! The arithmetic is that of `specs/canonical-arithmetic.md` 12.

use hearthnet_files::Pooling;

/// Hidden states of a text, pooled as they come.
pub struct Pool {
    pooling: Pooling,
    /// Sum of the states that count.
    values: Vec<f32>,
    is_empty: bool,
}

impl Pool {
    /// Pool of states of `width` values, at least 1.
    pub fn new(pooling: Pooling, width: usize) -> Self {
        Self {
            pooling,
            values: vec![0.0; width],
            is_empty: true,
        }
    }

    /// Adds states, `[n, width]`, in the order of their positions.
    pub fn add(&mut self, states: &[f32]) {
        for state in states.chunks_exact(self.values.len()) {
            match self.pooling {
                Pooling::First if !self.is_empty => {}
                Pooling::First | Pooling::Last => self.values.copy_from_slice(state),
                Pooling::Mean => {
                    for (sum, value) in self.values.iter_mut().zip(state) {
                        *sum += value;
                    }
                }
            }
            self.is_empty = false;
        }
    }

    /// Changes the pooled state.
    pub fn change(&mut self, change: impl FnOnce(&mut [f32])) {
        change(&mut self.values);
    }

    /// Vector of length 1 in the direction of the pooled state. `None` if the numbers overflow. Zeros
    /// stay as they are.
    pub fn finish(self) -> Option<Vec<f32>> {
        let mut values = self.values;
        let mut square = 0.0_f32;
        for value in &values {
            square += value * value;
        }
        if square > 0.0 {
            let length = square.sqrt();
            values.iter_mut().for_each(|value| *value /= length);
        }
        square.is_finite().then_some(values)
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
        let mut pool = Pool::new(Pooling::Mean, 20);
        pool.add(&states(3));
        let sum = [0, 19].map(|at| pool.values[at].to_bits());
        assert_eq!(sum, [0xc0a0_0000, 0xc040_0000]);
        let vector = pool.finish().unwrap();
        let bits = [0, 19].map(|at| vector[at].to_bits());
        assert_eq!(bits, [0xbec1_b3cf, 0xbe68_715e]);
    }

    #[test]
    fn a_vector_has_length_1_and_does_not_depend_on_the_pieces() {
        let states = states(7);
        let mut whole = Pool::new(Pooling::Mean, 20);
        whole.add(&states);
        let mut pieces = Pool::new(Pooling::Mean, 20);
        for piece in states.chunks(40) {
            pieces.add(piece);
        }
        let vector = whole.finish().unwrap();
        assert_eq!(Some(&vector), pieces.finish().as_ref());
        let square: f32 = vector.iter().map(|value| value * value).sum();
        assert!((square - 1.0).abs() < 1e-6, "{square}");
    }

    #[test]
    fn zeros_stay_and_an_overflow_is_no_vector() {
        assert_eq!(Pool::new(Pooling::Mean, 2).finish(), Some(vec![0.0; 2]));
        let mut pool = Pool::new(Pooling::Mean, 2);
        pool.add(&[f32::MAX, 1.0]);
        assert_eq!(pool.finish(), None);
    }

    #[test]
    fn the_first_and_the_last_state_do_not_depend_on_the_others() {
        let states = states(5);
        for (pooling, own) in [(Pooling::First, 0), (Pooling::Last, 4)] {
            let mut pool = Pool::new(pooling, 20);
            for piece in states.chunks(40) {
                pool.add(piece);
            }
            let mut alone = Pool::new(Pooling::Mean, 20);
            alone.add(&states[own * 20..][..20]);
            assert_eq!(pool.finish(), alone.finish(), "{pooling:?}");
        }
    }
}
