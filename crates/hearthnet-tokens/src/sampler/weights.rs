//! Probabilities as integers.
//!
//! The weight of a token is `exp(x)` in integer units of 2^-40, where `x` is its logit minus the
//! greatest. Integer sums do not depend on their order. So in any order of tokens, top-p cuts at
//! the same token and a draw selects the same one. A token less likely than the best by a factor of
//! 2^41 (e^28) has weight 0.

/// Weight of the likeliest token.
pub(super) const ONE: u64 = 1 << 40;

/// Largest number of tokens whose sum of weights fits into 64 bits.
pub(super) const MAX_TOKENS: usize = 1 << 23;

/// Adding and subtracting this constant rounds a small number to an integer, ties to even. In
/// between, the low bits of the sum are that integer.
const ROUND: f64 = (3_u64 << 51) as f64;

/// `exp(x)` in units of 2^-40, for `x` up to 0; within 1 of the true value.
///
/// Uses only additions and multiplications of binary64, in a fixed order and without branches:
/// equal on every CPU, and vectorisable. `exp(x) = 2^n exp(r)` with `n` the nearest integer to
/// `x / ln 2`, and the Taylor series up to `r^11` (the next term is below 7e-15 for |r| up to
/// `ln 2 / 2`).
#[inline]
pub(super) fn weight(x: f64) -> u64 {
    /// `ln 2` in two parts; the first has 32 trailing zero bits, so that `n` times it is exact.
    const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
    const TAYLOR: [f64; 12] = [
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let x = x.max(-40.0); // Far below half a unit; minus infinity is mapped to it too.
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let series = TAYLOR
        .iter()
        .fold(0.0, |sum, coefficient| sum * r + coefficient);
    // Exponent field: the bias, the unit's 40, and `n` from the low bits of `rounded`.
    let scale = f64::from_bits((rounded.to_bits() << 52).wrapping_add((1023 + 40) << 52));
    let units = series * scale + (1_u64 << 52) as f64;
    units.to_bits() & ((1 << 52) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_ends_of_the_range_are_exact() {
        assert_eq!(weight(0.0), ONE);
        assert_eq!(weight(-0.0), ONE);
        assert_eq!(weight(f64::NEG_INFINITY), 0);
        assert_eq!(weight(-1e300), 0);
        assert_eq!(weight(-28.5), 0);
        assert_eq!(weight(-28.0), 1);
        assert_eq!(weight(-std::f64::consts::LN_2), ONE / 2);
    }

    #[test]
    fn these_values_are_the_same_on_every_machine() {
        let values = [-1e-9, -0.1, -1.0, -2.5, -10.0, -20.0].map(weight);
        // Computed with Python's decimal: int((Decimal(2)**40 * Decimal(x).exp()).to_integral())
        let expected = [
            1_099_511_626_676,
            994_879_262_377,
            404_487_723_188,
            90_253_410_453,
            49_917_751,
            2_266,
        ];
        assert_eq!(values, expected);
    }

    proptest! {
        #[test]
        fn a_weight_is_the_exponential_to_the_unit(x in -45.0_f64..=0.0) {
            let exact = libm::exp(x) * ONE as f64;
            prop_assert!((weight(x) as f64 - exact).abs() <= 0.51, "{} for {exact}", weight(x));
        }

        #[test]
        fn a_greater_logit_never_weighs_less(x in -30.0_f64..=0.0, less in 0.0_f64..1e-6) {
            prop_assert!(weight(x - less) <= weight(x));
        }
    }
}
