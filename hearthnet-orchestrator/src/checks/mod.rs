//! What a host returns is checked at every boundary before anything reads it.
//!
//! A row must have the right shape, hold finite numbers, and have a size that
//! this boundary can produce: its [`magnitude`] lies within a band from the
//! model's catalogue entry. One band holds for all rows, attention sinks included.
//! And it must not be the row that the host was given: one that does no work and
//! sends back what came stays within the band, for neighbouring boundaries have
//! much the same. Nor may it be a row that the same host returned for another one
//! ([`SeenRows`]): "yesterday's rows again" are within the band, too; nor look like the one that
//! was sent at another position (`order.rs`).
//!
//! This catches broken and crude hosts (zeros, garbage, a wrong scale, the input, one row for
//! others, rows in each other's places). It
//! cannot catch a careful liar: that takes a replay on a second host, which the
//! canonical arithmetic makes exact.

mod order;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::sync::Arc;

use hearthnet_model::catalogue::{Band, magnitude};
use hearthnet_model::kernels::Kernels;
use hearthnet_model::{BoundaryDtype, WeightsId};
use hearthnet_transport::Code;
use parking_lot::Mutex;

use self::order::{FROM_LAYER, moved};

/// Why rows are refused. A row is named by its position.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CheckError {
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
    #[error("the row at position {0} holds a value that is not finite")]
    NonFinite(u32),
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
    /// A row is, bit for bit, what this host returned for another row before.
    #[error("the row at position {0} is what the host returned for another one before")]
    Repeated(u32),
    /// A row is, bit for bit, the one that was sent: no block leaves a row as it is.
    #[error("the row at position {0} came back as it was sent")]
    Unchanged(u32),
    /// A row has come of another one of its piece than that which was sent at its position.
    #[error("the row at position {0} is another position's")]
    Moved(u32),
}

impl CheckError {
    /// Stable code of the fault.
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

/// Rows that are remembered, of all hosts together: long conversations with several of them. Some 3 MiB.
const SEEN: usize = 1 << 16;

/// What hosts returned of late, and for which rows: hashes, with a key that nobody else knows.
///
/// A block adds to the row that it is given, so two rows that differ do not come out the same to
/// the last bit. Only the row itself is compared, and not those before it: what they add may be
/// less than what rounding takes away, or fall out of a sliding window, and a prompt that says the
/// same word again and again has equal rows in honesty. The same row again may come out as before
/// (it does, with exact arithmetic and the same rows before it: a replay, a conversation with the
/// same beginning) or otherwise.
#[derive(Debug, Default)]
pub(crate) struct SeenRows {
    key: RandomState,
    /// From what was returned to what it was returned for.
    rows: HashMap<u64, u64>,
    /// The same in the order in which they came.
    order: VecDeque<u64>,
}

impl SeenRows {
    /// Remembers that `by`, a host and a range of layers, returned this for `sent`. `false`: it has
    /// returned it for another row before.
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

/// The check of what one host returns for a range of layers.
#[derive(Debug, Clone)]
pub(crate) struct BoundaryCheck {
    width: usize,
    dtype: BoundaryDtype,
    band: Option<Band>,
    kernels: Kernels,
    /// What comes back, and what was sent, as numbers.
    scratch: [Vec<f32>; 2],
    seen: Arc<Mutex<SeenRows>>,
    /// The host and its layers, among all whose rows were seen.
    by: u64,
    /// Whether rows look like those that were sent: of a model that was measured.
    ordered: bool,
}

impl BoundaryCheck {
    /// A check for rows of `width` values of `host`, for layers `lo` to `hi` of a model. Without a band
    /// only shape and finiteness are checked, that a row is not all zeros, and what is compared with other
    /// rows.
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

    /// Checks `rows` encoded rows, the first of them at `position`. They answer the last
    /// of the rows that were `sent`.
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
        // More rows than were sent are the pipeline's to refuse.
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
        match moved(given, returned, self.width) {
            Some(row) => Err(CheckError::Moved(position.saturating_add(row))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
