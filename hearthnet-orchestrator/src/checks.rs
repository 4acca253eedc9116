//! What a host returns is checked at every boundary before anything reads it.
//!
//! A row must have the right shape, hold finite numbers, and have a size that
//! this boundary can produce: its [`magnitude`] lies within a band from the
//! model's catalogue entry. One band holds for all rows, attention sinks included.
//! And it must not be the row that the host was given: one that does no work and
//! sends back what came stays within the band, for neighbouring boundaries have
//! much the same. Nor may it be a row that the same host returned for another one
//! ([`SeenRows`]): "yesterday's rows again" are within the band, too.
//!
//! This catches broken and crude hosts (zeros, garbage, a wrong scale, the input). It
//! cannot catch a careful liar: that takes a replay on a second host, which the
//! canonical arithmetic makes exact.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use hearthnet_model::BoundaryDtype;
use hearthnet_model::catalogue::{Band, magnitude};
use hearthnet_model::kernels::Kernels;
use hearthnet_transport::Code;
use parking_lot::Mutex;

/// Why rows are refused.
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
    /// A row is, bit for bit, what this host returned for another row before.
    #[error("the row at position {position} is what the host returned for another one before")]
    Repeated {
        /// Position of the row.
        position: u32,
    },
    /// A row is, bit for bit, the one that was sent: no block leaves a row as it is.
    #[error("the row at position {position} came back as it was sent")]
    Unchanged {
        /// Position of the row.
        position: u32,
    },
}

impl CheckError {
    /// Stable code of the fault.
    pub(crate) fn code(&self) -> Code {
        Code::new(match self {
            Self::Shape { .. } => "tensor_shape",
            Self::NonFinite { .. } => "tensor_nonfinite",
            Self::Band { .. } | Self::Unchanged { .. } | Self::Repeated { .. } => "tensor_band",
        })
    }
}

/// Rows of one boundary that are remembered of a host: a long conversation, or some short ones.
const SEEN: usize = 4096;

/// What one host returned of late for one range of layers, and for which rows: hashes, with a key
/// that nobody else knows.
///
/// A block adds to the row that it is given, so two rows that differ do not come out the same to
/// the last bit. Only the row itself is compared, and not those before it: what they add may be
/// less than what rounding takes away, or fall out of a sliding window, and a prompt that says the
/// same word again and again has equal rows in honesty. The same row again may come out as before
/// (it does, with exact arithmetic and the same rows before it: a replay, a conversation with the
/// same beginning) or otherwise.
#[derive(Debug)]
pub(crate) struct SeenRows {
    key: RandomState,
    /// From what was returned to what it was returned for.
    rows: HashMap<u64, u64>,
    /// The same in the order in which they came.
    order: VecDeque<u64>,
}

impl SeenRows {
    /// None yet.
    pub(crate) fn new(key: RandomState) -> Self {
        Self {
            key,
            rows: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Remembers that `sent` came back as `returned`. `false`: so did another row before.
    fn note(&mut self, sent: &[u8], returned: &[u8]) -> bool {
        let (sent, returned) = (self.key.hash_one(sent), self.key.hash_one(returned));
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

/// The check of one boundary.
#[derive(Debug, Clone)]
pub(crate) struct BoundaryCheck {
    width: usize,
    dtype: BoundaryDtype,
    band: Option<Band>,
    kernels: Kernels,
    scratch: Vec<f32>,
    seen: Arc<Mutex<SeenRows>>,
}

impl BoundaryCheck {
    /// A check for rows of `width` values of one host. Without a band only shape and
    /// finiteness are checked, that a row is not all zeros, and that it is not one `seen` before.
    pub(crate) fn new(
        width: usize,
        dtype: BoundaryDtype,
        band: Option<Band>,
        seen: Arc<Mutex<SeenRows>>,
    ) -> Self {
        Self {
            width,
            dtype,
            band,
            kernels: Kernels::best(),
            scratch: Vec::new(),
            seen,
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
        self.scratch.clear();
        self.dtype
            .decode(data, &mut self.scratch)
            .map_err(|_| shape)?;
        for (position, row) in (position..).zip(self.scratch.chunks_exact(self.width)) {
            if !self.kernels.all_finite(row) {
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
        // More rows than were sent are the pipeline's to refuse.
        let first = sent.len().checked_sub(data.len());
        let sent = first.and_then(|at| sent.get(at..));
        let row_bytes = self.width * self.dtype.bytes_per_value();
        let pairs = sent.unwrap_or_default().chunks_exact(row_bytes);
        for (position, (sent, row)) in (position..).zip(pairs.zip(data.chunks_exact(row_bytes))) {
            if sent == row {
                return Err(CheckError::Unchanged { position });
            }
            if !self.seen.lock().note(sent, row) {
                return Err(CheckError::Repeated { position });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none_seen() -> Arc<Mutex<SeenRows>> {
        Arc::new(Mutex::new(SeenRows::new(RandomState::new())))
    }

    fn check(band: Option<Band>, position: u32, rows: &[f32]) -> Result<(), CheckError> {
        let mut bytes = Vec::new();
        BoundaryDtype::F16.encode(rows, &mut bytes);
        let rows = (rows.len() / 4) as u32;
        BoundaryCheck::new(4, BoundaryDtype::F16, band, none_seen()).check(
            position,
            rows,
            &[],
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
    fn a_row_that_comes_back_as_it_was_sent_is_refused_in_any_place() {
        let encode = |rows: &[[f32; 4]]| {
            let mut bytes = Vec::new();
            BoundaryDtype::F16.encode(&rows.concat(), &mut bytes);
            bytes
        };
        let row = |x: f32| [x, -x, 2.0, 1.0];
        let sent = encode(&[row(1.0), row(1.5), row(2.0)]);
        let mut c = BoundaryCheck::new(4, BoundaryDtype::F16, Some(BAND), none_seen());
        for lie in 0..3 {
            let mut rows = [row(1.25), row(1.75), row(2.25)];
            assert_eq!(c.check(7, 3, &sent, &encode(&rows)), Ok(()));
            rows[lie] = row(1.0 + 0.5 * lie as f32);
            let position = 7 + lie as u32;
            let error = c.check(7, 3, &sent, &encode(&rows)).unwrap_err();
            assert_eq!(error, CheckError::Unchanged { position });
            assert_eq!(error.code(), "tensor_band");
        }
        // Only the last row was asked for: it answers the last one sent, and no other.
        assert_eq!(
            c.check(9, 1, &sent, &encode(&[row(2.0)])),
            Err(CheckError::Unchanged { position: 9 })
        );
        assert_eq!(c.check(9, 1, &sent, &encode(&[row(1.0)])), Ok(()));
        // One value is enough to tell them apart; more rows than were sent are no match.
        assert_eq!(
            c.check(9, 1, &sent, &encode(&[[2.0, -2.0, 2.0, 1.5]])),
            Ok(())
        );
        assert_eq!(c.check(7, 4, &sent, &encode(&[row(1.0); 4])), Ok(()));
    }

    fn encoded(rows: &[f32]) -> Vec<u8> {
        let rows: Vec<f32> = rows.iter().flat_map(|x| [*x, -x, 2.0, 1.0]).collect();
        let mut bytes = Vec::new();
        BoundaryDtype::F16.encode(&rows, &mut bytes);
        bytes
    }

    fn remembering(seen: &Arc<Mutex<SeenRows>>) -> BoundaryCheck {
        BoundaryCheck::new(4, BoundaryDtype::F16, Some(BAND), Arc::clone(seen))
    }

    #[test]
    fn yesterdays_rows_for_other_rows_are_refused_in_this_stream_and_in_any_other() {
        let seen = none_seen();
        let mut yesterday = remembering(&seen);
        let (sent, returned) = (encoded(&[1.0, 1.5]), encoded(&[3.0, 3.5]));
        assert_eq!(yesterday.check(0, 2, &sent, &returned), Ok(()));
        for mut check in [yesterday, remembering(&seen)] {
            // A replay, and the beginning of another conversation.
            assert_eq!(check.check(0, 2, &sent, &returned), Ok(()));
            for again in [3.0, 3.5] {
                let error = check.check(9, 1, &encoded(&[2.0]), &encoded(&[again]));
                assert_eq!(error, Err(CheckError::Repeated { position: 9 }));
                assert_eq!(error.unwrap_err().code(), "tensor_band");
            }
            // The same row comes out otherwise behind other rows, or by chance the same.
            for other in [4.0, 3.0] {
                assert_eq!(
                    check.check(9, 1, &encoded(&[1.0]), &encoded(&[other])),
                    Ok(())
                );
            }
        }
        // Another host has the same numbers, as it should.
        let other = none_seen();
        let (sent, returned) = (encoded(&[2.0]), encoded(&[3.0]));
        assert_eq!(remembering(&other).check(0, 1, &sent, &returned), Ok(()));
    }

    #[test]
    fn one_row_in_several_places_of_a_piece_is_refused_unless_the_piece_says_the_same_again() {
        let seen = none_seen();
        let mut check = remembering(&seen);
        assert_eq!(
            check.check(4, 3, &encoded(&[1.0, 1.5, 2.5]), &encoded(&[3.0, 3.5, 3.0])),
            Err(CheckError::Repeated { position: 6 })
        );
        assert_eq!(
            check.check(4, 3, &encoded(&[0.5; 3]), &encoded(&[4.0; 3])),
            Ok(())
        );
    }

    #[test]
    fn only_so_many_rows_are_remembered_the_latest_ones() {
        let mut seen = SeenRows::new(RandomState::new());
        for n in 0..2 * SEEN as u32 {
            assert!(seen.note(&n.to_le_bytes(), &(n + 1).to_le_bytes()));
        }
        assert_eq!((seen.rows.len(), seen.order.len()), (SEEN, SEEN));
        let (first, last) = (1u32.to_le_bytes(), (2 * SEEN as u32).to_le_bytes());
        assert!(!seen.note(&first, &last));
        assert!(seen.note(&last, &first), "forgotten");
    }

    #[test]
    fn bytes_that_are_not_whole_rows_are_refused() {
        let mut c = BoundaryCheck::new(4, BoundaryDtype::F16, None, none_seen());
        for (rows, bytes) in [(1, 7), (1, 9), (2, 8), (u32::MAX, 8), (0, 8)] {
            assert_eq!(
                c.check(0, rows, &[], &vec![1; bytes]).unwrap_err().code(),
                "tensor_shape"
            );
        }
    }

    #[test]
    fn huge_fp32_rows_are_not_mistaken_for_nan() {
        let mut bytes = Vec::new();
        BoundaryDtype::F32.encode(&[1e30f32; 4], &mut bytes);
        let mut c = BoundaryCheck::new(4, BoundaryDtype::F32, None, none_seen());
        assert_eq!(c.check(0, 1, &[], &bytes), Ok(()));
    }
}
