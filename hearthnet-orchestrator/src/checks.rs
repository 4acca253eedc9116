//! What a host returns is checked at every boundary before anything reads it.
//!
//! A row must have the right shape, hold finite numbers, and have a size that
//! this boundary can produce: its [`magnitude`] lies within a band from the
//! model's catalogue entry. One band holds for all rows, attention sinks included.
//!
//! The band catches broken and crude hosts (zeros, garbage, a wrong scale). It
//! cannot catch a careful liar: that takes a replay on a second host, which the
//! canonical arithmetic makes exact.

use hearthnet_model::BoundaryDtype;
use hearthnet_model::catalogue::{Band, magnitude};

/// Why rows are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The bytes are not whole rows of this width.
    #[error("{bytes} bytes are not {rows} rows of {width} values")]
    Shape {
        /// Bytes received.
        bytes: usize,
        /// Rows announced.
        rows: u32,
        /// Values per row.
        width: usize,
    },
    /// A value is NaN or infinite.
    #[error("the row at position {position} holds a value that is not finite")]
    NonFinite {
        /// Position of the row.
        position: u32,
    },
    /// A row is smaller or larger than this boundary can produce.
    #[error("the row at position {position} has magnitude {magnitude:e}, outside {lo:e} to {hi:e}")]
    Band {
        /// Position of the row.
        position: u32,
        /// Magnitude found.
        magnitude: f32,
        /// Lower bound.
        lo: f32,
        /// Upper bound.
        hi: f32,
    },
}

impl CheckError {
    /// Stable code of the fault.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Shape { .. } => "tensor_shape",
            Self::NonFinite { .. } => "tensor_nonfinite",
            Self::Band { .. } => "tensor_band",
        }
    }
}

/// The check of one boundary.
#[derive(Debug, Clone)]
pub struct BoundaryCheck {
    width: usize,
    dtype: BoundaryDtype,
    band: Option<Band>,
    scratch: Vec<f32>,
}

impl BoundaryCheck {
    /// A check for rows of `width` values. Without a band only shape and
    /// finiteness are checked, and that a row is not all zeros.
    pub fn new(width: usize, dtype: BoundaryDtype, band: Option<Band>) -> Self {
        Self {
            width,
            dtype,
            band,
            scratch: Vec::new(),
        }
    }

    /// Checks `rows` encoded rows, the first of them at `position`.
    ///
    /// # Errors
    /// The first [`CheckError`] found.
    pub fn check(&mut self, position: u32, rows: u32, data: &[u8]) -> Result<(), CheckError> {
        let shape = CheckError::Shape {
            bytes: data.len(),
            rows,
            width: self.width,
        };
        let expected = (rows as usize)
            .checked_mul(self.width)
            .and_then(|n| n.checked_mul(self.dtype.bytes_per_value()));
        if expected != Some(data.len()) {
            return Err(shape);
        }
        self.scratch.clear();
        self.dtype
            .decode(data, &mut self.scratch)
            .map_err(|_| shape)?;
        for (position, row) in (position..).zip(self.scratch.chunks_exact(self.width)) {
            if !row.iter().all(|v| v.is_finite()) {
                return Err(CheckError::NonFinite { position });
            }
            let magnitude = magnitude(row);
            let band = match self.band {
                Some(band) => band,
                None if row.iter().any(|&v| v != 0.0) => continue,
                None => Band {
                    lo: f32::MIN_POSITIVE,
                    hi: f32::MAX,
                },
            };
            if !band.contains(magnitude) {
                let Band { lo, hi } = band;
                return Err(CheckError::Band {
                    position,
                    magnitude,
                    lo,
                    hi,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(band: Option<Band>, position: u32, rows: &[f32]) -> Result<(), CheckError> {
        let mut bytes = Vec::new();
        BoundaryDtype::F16.encode(rows, &mut bytes);
        BoundaryCheck::new(4, BoundaryDtype::F16, band).check(
            position,
            (rows.len() / 4) as u32,
            &bytes,
        )
    }

    const BAND: Band = Band { lo: 0.5, hi: 5.0 };

    #[test]
    fn honest_rows_pass_and_so_do_attention_sinks() {
        let plain = [1.0, -1.0, 2.0, 0.0];
        let sink = [1.0, -20_000.0, 2.0, 0.5];
        check(Some(BAND), 0, &[sink, plain].concat()).unwrap();
        let large = [100.0; 4];
        assert_eq!(
            check(Some(BAND), 0, &large).unwrap_err().code(),
            "tensor_band"
        );
    }

    #[test]
    fn nan_and_infinity_are_found_wherever_they_stand() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..8 {
                let mut rows = [1.0f32; 8];
                rows[at] = bad;
                let position = 7 + (at / 4) as u32;
                assert_eq!(
                    check(None, 7, &rows).unwrap_err(),
                    CheckError::NonFinite { position }
                );
            }
        }
    }

    #[test]
    fn zeros_never_pass() {
        assert_eq!(check(None, 3, &[0.0; 4]).unwrap_err().code(), "tensor_band");
        assert_eq!(
            check(Some(BAND), 3, &[0.0; 4]).unwrap_err().code(),
            "tensor_band"
        );
    }

    #[test]
    fn a_row_a_hundred_times_too_large_is_refused() {
        assert_eq!(
            check(Some(BAND), 3, &[100.0; 4]).unwrap_err().code(),
            "tensor_band"
        );
    }

    #[test]
    fn bytes_that_are_not_whole_rows_are_refused() {
        let mut c = BoundaryCheck::new(4, BoundaryDtype::F16, None);
        for (rows, bytes) in [(1, 7), (1, 9), (2, 8), (u32::MAX, 8), (0, 8)] {
            assert_eq!(
                c.check(0, rows, &vec![1; bytes]).unwrap_err().code(),
                "tensor_shape"
            );
        }
    }

    #[test]
    fn huge_fp32_rows_are_not_mistaken_for_nan() {
        let mut bytes = Vec::new();
        BoundaryDtype::F32.encode(&[1e30f32; 4], &mut bytes);
        let mut c = BoundaryCheck::new(4, BoundaryDtype::F32, None);
        assert_eq!(c.check(0, 1, &bytes), Ok(()));
    }
}
