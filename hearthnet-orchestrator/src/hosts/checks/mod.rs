//! Checks of the rows that a host returns, before anything reads them.
//!
//! A row must have the right shape and finite values, and its [`magnitude`] must lie within the
//! band of its boundary from the model's catalogue entry. One band holds for all rows, including
//! attention sinks. Three further checks catch values within the band: a row must differ from the
//! row that was sent; it must not be one that the same host returned for another row
//! ([`SeenRows`]); and it must not belong to another position of the chunk (`order.rs`).
//!
//! These checks catch broken and crude hosts (zeros, garbage, a wrong scale, the input, repeated or
//! permuted rows). They cannot catch a careful liar: that takes a replay on a second host, which
//! the canonical arithmetic makes exact.

mod order;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::sync::Arc;

use hearthnet_engine::kernels::Kernels;
use hearthnet_files::magnitude::{Band, magnitude};
use hearthnet_files::{BoundaryDtype, WeightsId};
use hearthnet_transport::Code;
use parking_lot::Mutex;

use self::order::{FROM_LAYER, permuted};

/// Reason that rows are rejected. A row is named by its position.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CheckError {
    /// The bytes are not whole rows of this width.
    #[error("{bytes} bytes are not {rows} rows of {width} values")]
    Shape {
        bytes: usize,
        rows: u32,
        /// Values per row.
        width: usize,
    },
    /// A value is NaN or infinite.
    #[error("the row at position {0} holds a value that is not finite")]
    NonFinite(u32),
    /// The magnitude of a row lies outside the band.
    #[error("the row at position {position} has magnitude {magnitude:e}, outside {lo:e} to {hi:e}")]
    Band {
        position: u32,
        magnitude: f32,
        lo: f32,
        hi: f32,
    },
    /// A row is bit-identical to one that this host returned for another row.
    #[error("the row at position {0} equals one that the host returned for another row")]
    Repeated(u32),
    /// A row is bit-identical to the one that was sent: no block leaves a row unchanged.
    #[error("the row at position {0} came back as it was sent")]
    Unchanged(u32),
    /// A row was computed from another row of the chunk than the one at its position.
    #[error("the row at position {0} belongs to another position")]
    Moved(u32),
}

impl CheckError {
    /// Stable code of the error.
    pub(crate) fn code(&self) -> Code {
        Code::new(match self {
            Self::Shape { .. } => "tensor_shape",
            Self::NonFinite(_) => "tensor_nonfinite",
            Self::Band { .. } | Self::Unchanged(_) | Self::Repeated(_) | Self::Moved(_) => {
                "tensor_band"
            }
        })
    }
}

/// Maximum number of remembered rows over all hosts: several long conversations. About 3 MiB.
const SEEN: usize = 1 << 16;

/// Recently returned rows and the rows that they answered, as hashes with a secret key.
///
/// A block adds to its input row, so two different rows do not have bit-identical outputs. Only the
/// row itself is compared, not its predecessors. Their contribution may be lost in rounding or fall
/// out of a sliding window, and a prompt that repeats a word has honestly equal rows. The same row
/// may have the same output again (exact arithmetic after the same rows, as in a replay or a
/// conversation with the same beginning) or another one.
#[derive(Debug, Default)]
pub(crate) struct SeenRows {
    key: RandomState,
    /// Hash of the sent row by hash of the returned row.
    rows: HashMap<u64, u64>,
    /// Keys of `rows`, oldest first.
    order: VecDeque<u64>,
}

impl SeenRows {
    /// Records that `by`, a host and a range of layers, returned this row for `sent`. Returns false
    /// if it has returned the row for another one before.
    fn note(&mut self, by: u64, sent: &[u8], returned: &[u8]) -> bool {
        let (sent, returned) = (self.key.hash_one(sent), self.key.hash_one((by, returned)));
        if let Some(before) = self.rows.get(&returned) {
            return *before == sent;
        }
        if self.order.len() >= SEEN
            && let Some(oldest) = self.order.pop_front()
        {
            self.rows.remove(&oldest);
        }
        self.order.push_back(returned);
        self.rows.insert(returned, sent);
        true
    }
}

/// Checks the rows that one host returns for a range of layers.
#[derive(Debug, Clone)]
pub(crate) struct BoundaryCheck {
    width: usize,
    dtype: BoundaryDtype,
    band: Option<Band>,
    kernels: Kernels,
    /// Decoded returned and sent rows.
    scratch: [Vec<f32>; 2],
    seen: Arc<Mutex<SeenRows>>,
    /// Hash of the host and its layers.
    by: u64,
    /// True if row order is checked: the model has bands, and the span starts late enough.
    ordered: bool,
}

impl BoundaryCheck {
    /// Creates a check for rows of `width` values of `host`, for layers `lo` to `hi` of a model.
    /// Without a band, shape, finiteness, all-zero rows and equality with other rows are checked.
    pub(crate) fn new(
        (width, dtype, band): (usize, BoundaryDtype, Option<Band>),
        seen: Arc<Mutex<SeenRows>>,
        host: impl Hash,
        (weights, lo, hi): (WeightsId, u32, u32),
    ) -> Self {
        let by = seen.lock().key.hash_one((host, weights, lo, hi));
        Self {
            width,
            dtype,
            band,
            kernels: Kernels::best(),
            scratch: Default::default(),
            seen,
            by,
            ordered: band.is_some() && lo >= FROM_LAYER,
        }
    }

    /// Checks `rows` encoded rows, the first of them at `position`. They answer the last of the
    /// `sent` rows.
    ///
    /// # Errors
    /// The first [`CheckError`] found.
    pub(crate) fn check(
        &mut self,
        position: u32,
        rows: u32,
        sent: &[u8],
        data: &[u8],
    ) -> Result<(), CheckError> {
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
        let [returned, given] = &mut self.scratch;
        returned.clear();
        self.dtype
            .decode(data, returned)
            .map_err(|_| shape.clone())?;
        for (position, row) in (position..).zip(returned.chunks_exact(self.width)) {
            if !self.kernels.all_finite(row) {
                return Err(CheckError::NonFinite(position));
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
        // The pipeline rejects more rows than were sent.
        let first = sent.len().checked_sub(data.len());
        let sent = first.and_then(|at| sent.get(at..)).unwrap_or_default();
        let row_bytes = self.width * self.dtype.bytes_per_value();
        let pairs = sent
            .chunks_exact(row_bytes)
            .zip(data.chunks_exact(row_bytes));
        for (position, (sent, row)) in (position..).zip(pairs) {
            if sent == row {
                return Err(CheckError::Unchanged(position));
            }
            if !self.seen.lock().note(self.by, sent, row) {
                return Err(CheckError::Repeated(position));
            }
        }
        if !self.ordered {
            return Ok(());
        }
        given.clear();
        self.dtype.decode(sent, given).map_err(|_| shape)?;
        match permuted(given, returned, self.width) {
            Some(row) => Err(CheckError::Moved(position.saturating_add(row))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
