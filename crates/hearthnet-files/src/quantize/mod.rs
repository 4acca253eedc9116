//! Conversion of weights to and from ggml's block formats, value by value.
//!
//! Used for conversion and tests; the engine has packed layouts and kernels of its own.
//! [`TensorType`] describes the layouts. Blocks of 32 use the formulas of `quantize_row_*_ref` in
//! ggml's `ggml-quants.c`, computed in binary32 without fused operations. Blocks of 256 use a
//! search of our own. Decoding follows `dequantize_row_*`.

mod k_quants;

use half::f16;

use crate::blocks::{self, WeightType};
use crate::gguf::TensorType;
use k_quants::{inverse, of_largest_magnitude};

/// Values per block of the smaller formats.
const BLOCK: usize = 32;

/// Why values could not be stored or read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The type has no encoder here.
    #[error(
        "there is no encoder for {0}; values can be stored as {stored}",
        stored = TensorType::names(TensorType::WRITABLE)
    )]
    Unsupported(TensorType),
    #[error("it holds a NaN or an infinity: the source is damaged, or was converted badly")]
    NotFinite,
    /// A value exceeds the range of the type.
    #[error("it holds a value that is beyond the range of {0}")]
    Range(TensorType),
    /// The values or bytes do not fill whole blocks.
    #[error("{len} do not fill whole blocks of {dtype}")]
    Length {
        dtype: TensorType,
        /// Number of values (encoding) or of bytes (decoding).
        len: usize,
    },
}

/// Appends `values`, encoded as `dtype`, to `out`.
///
/// # Errors
/// The type is not in [`TensorType::WRITABLE`], `values` do not fill whole blocks, or a value is
/// not finite or too large for the type. `out` is then unchanged.
pub fn encode(dtype: TensorType, values: &[f32], out: &mut Vec<u8>) -> Result<(), QuantizeError> {
    if !values.len().is_multiple_of(dtype.block_values() as usize) {
        return Err(QuantizeError::Length {
            dtype,
            len: values.len(),
        });
    }
    // The formulas would store NaN as zero. A maximum, unlike a search, is vectorised.
    let magnitudes = values.iter().map(|value| value.to_bits() & !(1 << 31));
    let largest = f32::from_bits(magnitudes.fold(0, u32::max));
    if !largest.is_finite() {
        return Err(QuantizeError::NotFinite);
    }
    // Beyond these limits the search for scales would overflow. For the other types, an excessive
    // value shows in the scale.
    let limit = match dtype {
        TensorType::Q6_K => f16::MAX.to_f32() * 127.0 * 32.0,
        TensorType::Q4_K => f16::MAX.to_f32() * 63.0,
        _ => f32::MAX,
    };
    if largest > limit {
        return Err(QuantizeError::Range(dtype));
    }
    let start = out.len();
    let (blocks, _) = values.as_chunks::<BLOCK>();
    let (large, _) = values.as_chunks();
    match dtype {
        TensorType::F32 => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        TensorType::F16 => out.extend(values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes())),
        TensorType::Q8_0 => blocks.iter().for_each(|block| encode_q8_0(block, out)),
        TensorType::Q4_1 => blocks.iter().for_each(|block| encode_q4_1(block, out)),
        TensorType::Q4_0 => blocks.iter().for_each(|block| encode_q4_0(block, out)),
        TensorType::Q6_K => large.iter().for_each(|b| k_quants::encode_q6_k(b, out)),
        TensorType::Q4_K => large.iter().for_each(|b| k_quants::encode_q4_k(b, out)),
        other => return Err(QuantizeError::Unsupported(other)),
    }
    let stored = out.get(start..).unwrap_or_default();
    if check_finite(dtype, stored).is_err() {
        out.truncate(start);
        return Err(QuantizeError::Range(dtype));
    }
    Ok(())
}

/// Checks that no value in `bytes`, whole blocks of `dtype`, is NaN or infinite.
///
/// # Errors
/// [`QuantizeError::NotFinite`].
pub(crate) fn check_finite(dtype: TensorType, bytes: &[u8]) -> Result<(), QuantizeError> {
    match WeightType::of(dtype) {
        Some(ty) if !blocks::all_finite(ty, bytes) => Err(QuantizeError::NotFinite),
        _ => Ok(()),
    }
}

/// Decodes `bytes` as `dtype`, and appends the values to `out`.
///
/// # Errors
/// The type is not supported, or `bytes` are not whole blocks; `out` is then unchanged.
pub fn decode(dtype: TensorType, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), QuantizeError> {
    if !bytes.len().is_multiple_of(dtype.block_bytes() as usize) {
        return Err(QuantizeError::Length {
            dtype,
            len: bytes.len(),
        });
    }
    let ty = WeightType::of(dtype).ok_or(QuantizeError::Unsupported(dtype))?;
    blocks::decode(ty, bytes, out);
    Ok(())
}

/// Symmetric: the largest magnitude becomes 127.
fn encode_q8_0(block: &[f32; BLOCK], out: &mut Vec<u8>) {
    let d = block.iter().fold(0f32, |max, v| max.max(v.abs())) / 127.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    // The cast saturates, and rounding aside the value is at most 127.
    out.extend(block.iter().map(|&v| ((v * id).round() as i8) as u8));
}

/// Affine: the minimum becomes 0, the maximum 15.
fn encode_q4_1(block: &[f32; BLOCK], out: &mut Vec<u8>) {
    let min = block.iter().copied().fold(f32::MAX, f32::min);
    let max = block.iter().copied().fold(f32::MIN, f32::max);
    let d = (max - min) / 15.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(f16::from_f32(min).to_le_bytes());
    nibbles(block, out, |v| (v - min) * id + 0.5);
}

/// Signed: the value of largest magnitude becomes -8, whatever its sign.
fn encode_q4_0(block: &[f32; BLOCK], out: &mut Vec<u8>) {
    let d = of_largest_magnitude(block) / -8.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    nibbles(block, out, |v| v * id + 8.5);
}

/// Stores `scaled(value)`, truncated and limited to 15, two per byte: `j` low, `j + 16` high.
fn nibbles(block: &[f32; BLOCK], out: &mut Vec<u8>, scaled: impl Fn(f32) -> f32) {
    let (low, high) = block.split_at(BLOCK / 2);
    let nibble = |v: f32| (scaled(v) as u8).min(15);
    out.extend(
        low.iter()
            .zip(high)
            .map(|(&a, &b)| nibble(a) | nibble(b) << 4),
    );
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use TensorType::{F16, F32, IQ1_S, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};

    fn encoded(dtype: TensorType, values: &[f32]) -> Vec<u8> {
        let mut out = Vec::new();
        encode(dtype, values, &mut out).unwrap();
        out
    }

    fn decoded(dtype: TensorType, bytes: &[u8]) -> Vec<f32> {
        let mut out = Vec::new();
        decode(dtype, bytes, &mut out).unwrap();
        out
    }

    #[test]
    fn blocks_have_the_documented_layout() {
        let ramp: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();

        let q4_0 = encoded(Q4_0, &ramp);
        assert_eq!(q4_0.len(), 18);
        assert_eq!(q4_0[..2], f16::from_f32(2.0).to_le_bytes(), "-16 / -8");
        // Value 0 is -16, nibble 0; value 16 is 0, nibble 8.
        assert_eq!(q4_0[2], 0x80);

        let q4_1 = encoded(Q4_1, &ramp);
        assert_eq!(q4_1.len(), 20);
        assert_eq!(q4_1[..2], f16::from_f32(31.0 / 15.0).to_le_bytes());
        assert_eq!(q4_1[2..4], f16::from_f32(-16.0).to_le_bytes());
        assert_eq!((q4_1[4] & 15, q4_1[19] >> 4), (0, 15));

        let q8_0 = encoded(Q8_0, &ramp);
        assert_eq!(q8_0.len(), 34);
        assert_eq!(q8_0[..2], f16::from_f32(16.0 / 127.0).to_le_bytes());
        assert_eq!((q8_0[2] as i8, q8_0[33] as i8), (-127, 119));
    }

    #[test]
    fn partial_blocks_and_other_types_are_refused_and_change_nothing() {
        let (mut bytes, mut values) = (vec![7], vec![7.0]);
        assert_eq!(
            encode(Q4_1, &[0.0; 31], &mut bytes),
            Err(QuantizeError::Length {
                dtype: Q4_1,
                len: 31
            })
        );
        assert_eq!(
            encode(Q6_K, &[0.0; 128], &mut bytes),
            Err(QuantizeError::Length {
                dtype: Q6_K,
                len: 128
            })
        );
        assert_eq!(
            encode(Q5_K, &[0.0; 256], &mut bytes),
            Err(QuantizeError::Unsupported(Q5_K))
        );
        assert_eq!(
            decode(Q8_0, &[0; 33], &mut values),
            Err(QuantizeError::Length {
                dtype: Q8_0,
                len: 33
            })
        );
        assert_eq!(
            decode(IQ1_S, &[0; 50], &mut values),
            Err(QuantizeError::Unsupported(IQ1_S))
        );
        assert_eq!((bytes, values), (vec![7], vec![7.0]));
    }

    #[test]
    fn blocks_are_read_as_the_gguf_package_reads_them() {
        #[derive(serde::Deserialize)]
        struct Case {
            blocks: String,
            values: String,
        }
        let stored = include_str!("../../tests/data/parity/blocks.json");
        let cases: std::collections::BTreeMap<String, Case> = serde_json::from_str(stored).unwrap();
        let known = |dtype: &TensorType| cases.contains_key(dtype.name());
        let missing: Vec<TensorType> = TensorType::supported().filter(|t| !known(t)).collect();
        assert_eq!(missing, [F32, F16]);
        for (name, case) in &cases {
            let wanted = hex::decode(&case.values).unwrap();
            let wanted = wanted
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| u32::from_le_bytes(*b));
            let blocks = hex::decode(&case.blocks).unwrap();
            let found = decoded(name.parse().unwrap(), &blocks);
            let found: Vec<u32> = found.iter().map(|v| v.to_bits()).collect();
            let differ = found.iter().zip(wanted).filter(|(a, b)| *a != b).count();
            assert_eq!((found.len(), differ), (512, 0), "{name}");
        }
    }

    /// Root mean squared error, relative to that of the values.
    fn relative_error(dtype: TensorType, values: &[f32]) -> f64 {
        let square = |values: &mut dyn Iterator<Item = f32>| -> f64 {
            values.map(|v| f64::from(v).powi(2)).sum()
        };
        let back = decoded(dtype, &encoded(dtype, values));
        let error = square(&mut values.iter().zip(&back).map(|(a, b)| a - b));
        (error / square(&mut values.iter().copied())).sqrt()
    }

    #[test]
    fn errors_of_large_blocks_stay_within_measured_bounds() {
        // SplitMix64, and values of several distributions drawn from it.
        let mut state = 5u64;
        let mut unit = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
        };
        let mut many = |of: fn(f32) -> f32| -> Vec<f32> {
            let mut normal = || (0..12).map(|_| unit()).sum::<f32>() - 6.0;
            (0..256 * 64).map(|_| of(normal())).collect()
        };
        let bell = many(|x| x);
        let tails = many(|x| 0.02 * x.powi(3));
        let shifted = many(|x| 3.0 + x);
        // Measured with other values of the distributions, plus 5 %.
        for (name, values, q6_k, q4_k) in [
            ("bell", &bell, 0.0183, 0.076),
            ("tails", &tails, 0.0256, 0.094),
            ("shifted", &shifted, 0.0124, 0.0293),
        ] {
            for (dtype, bound) in [(Q6_K, q6_k), (Q4_K, q4_k)] {
                let error = relative_error(dtype, values);
                assert!(error < bound, "{name} in {dtype}: {error:.5}");
                assert!(
                    error > bound / 2.0,
                    "{name} in {dtype}: {error:.5} is too good"
                );
            }
        }
        // Fewer bits, but better chosen scales.
        assert!(relative_error(Q4_K, &bell) < relative_error(Q4_1, &bell));
        assert!(relative_error(Q4_K, &tails) < relative_error(Q4_0, &tails));
    }

    #[test]
    fn large_blocks_of_one_value_come_back() {
        for value in [0.0f32, 1.0, -1.0, 0.1, -3e3] {
            for dtype in [Q6_K, Q4_K] {
                for back in decoded(dtype, &encoded(dtype, &[value; 256])) {
                    // Scales are f16.
                    let error = (back - value).abs();
                    assert!(error <= value.abs() / 200.0, "{dtype}: {back} for {value}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn decoded_values_are_within_half_a_step(
            values in prop::collection::vec(-100f32..100.0, 64),
            shift in -50f32..50.0,
        ) {
            let values: Vec<f32> = values.into_iter().map(|v| v + shift).collect();
            prop_assert_eq!(&decoded(F32, &encoded(F32, &values)), &values);
            for (dtype, steps) in [(F16, 0.0), (Q8_0, 0.5), (Q4_1, 0.5), (Q4_0, 1.0)] {
                let back = decoded(dtype, &encoded(dtype, &values));
                prop_assert_eq!(back.len(), values.len());
                for (block, back) in values.chunks(32).zip(back.chunks(32)) {
                    let max = block.iter().fold(f32::MIN, |a, &b| a.max(b));
                    let min = block.iter().fold(f32::MAX, |a, &b| a.min(b));
                    let largest = max.abs().max(min.abs());
                    let step = match dtype {
                        Q8_0 => largest / 127.0,
                        Q4_1 => (max - min) / 15.0,
                        _ => largest / 8.0,
                    };
                    // Scales and minima are stored as f16: 11 bits, over up to 15 steps or 127.
                    let slack = largest / 512.0;
                    for (v, b) in block.iter().zip(back) {
                        prop_assert!((v - b).abs() <= steps * step + slack, "{dtype}: {v} {b}");
                    }
                }
            }
        }

        #[test]
        fn no_value_makes_it_panic(
            bits in prop::collection::vec(any::<u32>(), 256),
            // All values, only finite ones, only those below 2.
            mask in prop::sample::select(vec![u32::MAX, 0xff7f_ffff, 0xbfff_ffff]),
        ) {
            let values = bits.into_iter().map(|bits| f32::from_bits(bits & mask));
            let values: Vec<f32> = values.collect();
            for dtype in TensorType::WRITABLE {
                let mut bytes = Vec::new();
                match encode(dtype, &values, &mut bytes) {
                    Err(QuantizeError::NotFinite) if mask == u32::MAX => continue,
                    Err(QuantizeError::Range(_)) if mask != 0xbfff_ffff => continue,
                    encoded => encoded.unwrap(),
                }
                prop_assert_eq!(Some(bytes.len() as u64), dtype.row_bytes(256));
                prop_assert_eq!(decoded(dtype, &bytes).len(), 256);
            }
        }
    }
}
