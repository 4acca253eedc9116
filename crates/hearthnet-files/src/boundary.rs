//! Number format of the residual stream between blocks and on the wire.

use std::str::FromStr;

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// Format to which the residual stream is rounded after every block, whether or not a network hop
/// follows. So the split of a model over hosts never changes an answer. The format belongs to the
/// model: the family sets a default, which a file may override.
///
/// Encodings are little-endian; rounding is to nearest, ties to even. A value beyond the range
/// becomes an infinity, which the engine reports as boundary overflow.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Debug,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum BoundaryDtype {
    /// IEEE 754 binary16: 11 significant bits, up to 65,504.
    F16,
    /// bfloat16: 8 significant bits, the range of `F32`.
    Bf16,
    /// IEEE 754 binary32.
    F32,
}

/// Values per conversion from or to binary16: processors convert many at once.
const AT_ONCE: usize = 64;

/// The bytes are not a whole number of values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{len} bytes are no whole number of {dtype} values")]
pub struct BoundaryLengthError {
    pub len: usize,
    pub dtype: BoundaryDtype,
}

impl BoundaryDtype {
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    pub fn bytes_per_value(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Name in descriptors: `fp16`, `bf16` or `fp32`.
    pub fn descriptor_name(self) -> &'static str {
        match self {
            Self::F16 => "fp16",
            Self::Bf16 => "bf16",
            Self::F32 => "fp32",
        }
    }

    /// Name in files and messages: `f16`, `bf16` or `f32`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Appends `values`, rounded to this format, to `out`.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        out.reserve(values.len() * self.bytes_per_value());
        match self {
            Self::F16 => {
                let mut buffer = [f16::ZERO; AT_ONCE];
                for values in values.chunks(AT_ONCE) {
                    let narrow = &mut buffer[..values.len()];
                    narrow.convert_from_f32_slice(values);
                    let start = out.len();
                    out.resize(start + 2 * narrow.len(), 0);
                    let (pairs, _) = out[start..].as_chunks_mut::<2>();
                    for (pair, value) in pairs.iter_mut().zip(narrow) {
                        *pair = value.to_le_bytes();
                    }
                }
            }
            Self::Bf16 => {
                out.extend(values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()));
            }
            Self::F32 => out.extend(values.iter().flat_map(|&v| v.to_le_bytes())),
        }
    }

    /// Appends the values encoded in `bytes` to `out`, without rounding.
    ///
    /// # Errors
    /// `bytes` is not a whole number of values; `out` is then unchanged.
    pub fn decode(self, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), BoundaryLengthError> {
        if !bytes.len().is_multiple_of(self.bytes_per_value()) {
            return Err(BoundaryLengthError {
                len: bytes.len(),
                dtype: self,
            });
        }
        let (pairs, _) = bytes.as_chunks::<2>();
        match self {
            Self::F16 => {
                let start = out.len();
                out.resize(start + pairs.len(), 0.0);
                let mut buffer = [f16::ZERO; AT_ONCE];
                for (pairs, values) in pairs.chunks(AT_ONCE).zip(out[start..].chunks_mut(AT_ONCE)) {
                    let narrow = &mut buffer[..pairs.len()];
                    for (narrow, &pair) in narrow.iter_mut().zip(pairs) {
                        *narrow = f16::from_le_bytes(pair);
                    }
                    narrow.convert_to_f32_slice(values);
                }
            }
            Self::Bf16 => out.extend(pairs.iter().map(|&b| bf16::from_le_bytes(b).to_f32())),
            Self::F32 => {
                let (quads, _) = bytes.as_chunks::<4>();
                out.extend(quads.iter().map(|&b| f32::from_le_bytes(b)));
            }
        }
        Ok(())
    }

    /// Rounds each value to the nearest one of this format, ties to even.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Self::F16 => {
                let mut buffer = [f16::ZERO; AT_ONCE];
                for values in values.chunks_mut(AT_ONCE) {
                    let narrow = &mut buffer[..values.len()];
                    narrow.convert_from_f32_slice(values);
                    narrow.convert_to_f32_slice(values);
                }
            }
            Self::Bf16 => values
                .iter_mut()
                .for_each(|v| *v = bf16::from_f32(*v).to_f32()),
            Self::F32 => {}
        }
    }
}

impl FromStr for BoundaryDtype {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        all.find(|dtype| dtype.name() == s)
            .ok_or_else(|| format!("{s:?} is no boundary dtype: use f16, bf16 or f32"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ties_round_to_even() {
        // Around 1 an f16 step is 2^-10 and a bf16 step is 2^-7.
        for (dtype, step) in [
            (BoundaryDtype::F16, 2f32.powi(-10)),
            (BoundaryDtype::Bf16, 2f32.powi(-7)),
        ] {
            let mut x = [
                1.0 + 0.5 * step,
                1.0 + 1.5 * step,
                1.0 + 0.51 * step,
                -(1.0 + 0.5 * step),
            ];
            dtype.round(&mut x);
            assert_eq!(x, [1.0, 1.0 + 2.0 * step, 1.0 + step, -1.0], "{dtype}");
        }
    }

    #[test]
    fn values_beyond_the_range_become_infinite() {
        let mut x = [65_519.9, 65_520.0, -1e9];
        BoundaryDtype::F16.round(&mut x);
        assert_eq!(x, [65_504.0, f32::INFINITY, f32::NEG_INFINITY]);
    }

    #[test]
    fn odd_lengths_are_refused_and_change_nothing() {
        let mut out = vec![1.0];
        for (dtype, len) in [
            (BoundaryDtype::F16, 3),
            (BoundaryDtype::Bf16, 1),
            (BoundaryDtype::F32, 6),
        ] {
            assert_eq!(
                dtype.decode(&vec![0; len], &mut out),
                Err(BoundaryLengthError { len, dtype })
            );
        }
        assert_eq!(out, [1.0]);
    }

    proptest! {
        #[test]
        fn decoding_gives_the_rounded_values_back(bits in prop::collection::vec(any::<u32>(), 0..200)) {
            let values: Vec<f32> =
                bits.into_iter().map(f32::from_bits).filter(|v| !v.is_nan()).collect();
            for dtype in BoundaryDtype::ALL {
                let (mut bytes, mut back, mut rounded) = (Vec::new(), Vec::new(), values.clone());
                dtype.encode(&values, &mut bytes);
                prop_assert_eq!(bytes.len(), values.len() * dtype.bytes_per_value());
                dtype.decode(&bytes, &mut back).unwrap();
                dtype.round(&mut rounded);
                let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&back), bits(&rounded));
                dtype.round(&mut rounded);
                prop_assert_eq!(bits(&back), bits(&rounded), "rounding is idempotent");
            }
        }
    }
}
