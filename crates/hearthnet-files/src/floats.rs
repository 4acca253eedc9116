//! Branch-free conversions of 16-bit float formats, rounding to nearest even, so that compilers
//! vectorise the loops around them. Results equal those of the hardware (F16C, AVX-512, NEON)
//! except for NaN payloads.

/// The `f32` with the value of the IEEE binary16 whose bits are `h` (exact).
#[inline(always)]
pub fn f16_to_f32(h: u16) -> f32 {
    const TWO_POW_112: f32 = f32::from_bits(0x7780_0000);
    let h = u32::from(h);
    // Exponent and fraction in their f32 places are 2^-112 times the value,
    // subnormals included, so one exact multiplication rebiases all of them.
    let scaled = f32::from_bits((h & 0x7fff) << 13) * TWO_POW_112;
    let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | ((h & 0x8000) << 16))
}

/// The bits of the IEEE binary16 nearest to `x`, ties to even. Magnitudes of 65520 or more become
/// infinity; a NaN becomes a quiet NaN.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    // Adding 0.5 to a value below 2^-14 rounds it to a multiple of 2^-24, the spacing of f16
    // subnormals, and leaves the multiple in the low bits.
    const HALF: f32 = 0.5;
    let bits = x.to_bits();
    let abs = bits & 0x7fff_ffff;
    let subnormal = (f32::from_bits(abs) + HALF)
        .to_bits()
        .wrapping_sub(HALF.to_bits());
    let odd = (abs >> 13) & 1;
    let normal = abs.wrapping_add(0xfff + odd).wrapping_sub(112 << 23) >> 13;
    let special = if abs > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    let magnitude = if abs >= 0x4780_0000 {
        special
    } else if abs < 0x3880_0000 {
        subnormal
    } else {
        normal
    };
    (magnitude | ((bits >> 16) & 0x8000)) as u16
}

/// The `f32` with the value of the bfloat16 whose bits are `b` (exact).
#[inline(always)]
pub fn bf16_to_f32(b: u16) -> f32 {
    f32::from_bits(u32::from(b) << 16)
}

/// `x` rounded to the nearest bfloat16 value, ties to even.
#[inline(always)]
pub fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // A carry from rounding must not turn a NaN into an infinity or a zero.
    let quiet = (bits | 0x0040_0000) & 0xffff_0000;
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 {
        quiet
    } else {
        rounded
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_converts_as_the_half_crate_does() {
        for h in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(h), half::f16::from_bits(h).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{h:04x}"
            );
        }
    }

    #[test]
    fn rounding_to_f16_and_bf16_agrees_with_the_half_crate() {
        // All f32 whose low bits are near the rounding borders of either format.
        let mut low = vec![0u32, 1, 0x7ff, 0x7fff, 0x8000, 0x8001, 0xffff];
        low.extend(
            (0..16).flat_map(|i| [0xfff + (i << 12), 0x1000 + (i << 12), 0x1001 + (i << 12)]),
        );
        for high in 0..=u16::MAX {
            for low in &low {
                let x = f32::from_bits((u32::from(high) << 16) | (low & 0xffff));
                let theirs = half::f16::from_f32(x);
                let ours = half::f16::from_bits(f32_to_f16(x));
                assert!(
                    ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                    "{x:e}"
                );
                let theirs = half::bf16::from_f32(x).to_f32();
                let ours = round_to_bf16(x);
                assert!(
                    ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                    "{x:e}"
                );
            }
        }
    }

    #[test]
    fn the_smallest_values_that_overflow_become_infinite() {
        assert_eq!(f16_to_f32(f32_to_f16(65519.996)), 65504.0);
        assert_eq!(f16_to_f32(f32_to_f16(65520.0)), f32::INFINITY);
        assert_eq!(f16_to_f32(f32_to_f16(-65520.0)), f32::NEG_INFINITY);
    }
}
