//! Buffers that several threads use at once: non-overlapping rectangles of a row-major matrix
//! ([`TileMut`]), and slices for barrier-separated phases ([`SharedMut`]).

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// Exclusively borrowed rectangle of a row-major `f32` matrix: `rows` rows of `cols` values,
/// `stride` values apart. Threads fill one matrix together through tiles that do not overlap.
#[derive(Debug)]
pub struct TileMut<'a> {
    origin: NonNull<f32>,
    rows: usize,
    cols: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `TileMut` is a unique borrow of its rectangle, like a `&mut [f32]`.
unsafe impl Send for TileMut<'_> {}
// SAFETY: a shared `&TileMut` only gives read access.
unsafe impl Sync for TileMut<'_> {}

impl<'a> TileMut<'a> {
    /// A tile whose row `i` is `data[i * stride..][..cols]`.
    ///
    /// # Panics
    /// When `cols > stride` or `data` is too short.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            fits(data.len(), rows, cols, stride),
            "a tile reaches beyond its buffer"
        );
        let origin = NonNull::from(data).cast();
        Self {
            origin,
            rows,
            cols,
            stride,
            owner: PhantomData,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Reborrows the rectangle for a shorter lifetime.
    pub fn reborrow(&mut self) -> TileMut<'_> {
        TileMut {
            owner: PhantomData,
            ..*self
        }
    }

    /// Pointer to column `cols.start` of row `row`, and the stride. Columns `cols` of `rows` rows
    /// may be read and written through it while `self` is borrowed.
    ///
    /// # Panics
    /// When the tile does not have those cells.
    pub(super) fn cells(
        &mut self,
        row: usize,
        rows: usize,
        cols: &Range<usize>,
    ) -> (*mut f32, usize) {
        assert!(
            rows > 0 && row < self.rows && rows <= self.rows - row,
            "rows beyond the tile"
        );
        assert!(
            cols.start <= cols.end && cols.end <= self.cols,
            "columns beyond the tile"
        );
        // SAFETY: the row exists, and so does its column `cols.start`, or one past the last.
        let first = unsafe { self.origin.as_ptr().add(row * self.stride + cols.start) };
        (first, self.stride)
    }

    /// # Panics
    /// When there is no such row.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "a row beyond the tile");
        // SAFETY: the row lies within this tile's rectangle, which `self` borrows exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.origin.as_ptr().add(row * self.stride), self.cols)
        }
    }
}

/// Returns true if `rows` rows of `cols` values, `stride` apart, lie within `len` values.
pub(super) fn fits(len: usize, rows: usize, cols: usize, stride: usize) -> bool {
    cols <= stride
        && match rows.checked_sub(1) {
            None => true,
            Some(last) => last
                .checked_mul(stride)
                .and_then(|n| n.checked_add(cols))
                .is_some_and(|n| n <= len),
        }
}

/// Slice that several threads use, each in its own part or in phases separated by a barrier. All
/// access is `unsafe`: the caller's schedule has to exclude data races.
#[derive(Debug)]
pub struct SharedMut<'a, T> {
    data: NonNull<T>,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: access is only by unsafe methods, whose contract excludes data races.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: the contract of the methods excludes data races. Several threads use the values, so `T`
// must be Send and Sync.
unsafe impl<T: Send + Sync> Sync for SharedMut<'_, T> {}

impl<T> Clone for SharedMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `data` until `'a` ends.
    pub fn new(data: &'a mut [T]) -> Self {
        Self {
            len: data.len(),
            data: NonNull::from(data).cast(),
            owner: PhantomData,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The elements of `range`, for reading.
    ///
    /// # Safety
    /// No thread writes any of them while the result lives.
    ///
    /// # Panics
    /// When the range reaches beyond the end.
    pub unsafe fn slice(&self, range: Range<usize>) -> &'a [T] {
        let (start, len) = self.checked(&range);
        // SAFETY: within bounds (checked); the caller guarantees that there is no writer.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr().add(start), len) }
    }

    /// The elements of `range`, for writing.
    ///
    /// # Safety
    /// No other reference reads or writes any of them while the result lives.
    ///
    /// # Panics
    /// When the range reaches beyond the end.
    #[allow(clippy::mut_from_ref)] // sound by the contract
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &'a mut [T] {
        let (start, len) = self.checked(&range);
        // SAFETY: within bounds (checked); the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr().add(start), len) }
    }

    /// Part of the slice, shared in the same way.
    ///
    /// # Panics
    /// When the range reaches beyond the end.
    pub fn part(&self, range: Range<usize>) -> Self {
        let (start, len) = self.checked(&range);
        // SAFETY: within bounds (checked).
        let data = unsafe { self.data.add(start) };
        Self {
            data,
            len,
            owner: PhantomData,
        }
    }

    fn checked(&self, range: &Range<usize>) -> (usize, usize) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "a range beyond the buffer"
        );
        (range.start, range.end - range.start)
    }

    /// Pointer to element `index`.
    ///
    /// # Panics
    /// When there is no such element.
    pub(super) fn at(&self, index: usize) -> *mut T {
        assert!(index < self.len, "an index beyond the buffer");
        // SAFETY: within bounds.
        unsafe { self.data.as_ptr().add(index) }
    }
}

impl<'a> SharedMut<'a, f32> {
    /// Columns `cols` of the first `rows` rows, `stride` values apart, for writing.
    ///
    /// # Safety
    /// No other reference reads or writes any value of that rectangle while the result lives.
    ///
    /// # Panics
    /// When the rectangle reaches beyond the end, or `cols` beyond `stride`.
    pub unsafe fn tile_mut(&self, rows: usize, stride: usize, cols: Range<usize>) -> TileMut<'a> {
        assert!(
            cols.start <= cols.end && fits(self.len, rows, cols.end, stride),
            "a tile beyond the buffer"
        );
        let start = if rows == 0 { 0 } else { cols.start };
        // SAFETY: `start` is 0, or the first row's columns lie within the buffer.
        let origin = unsafe { self.data.add(start) };
        TileMut {
            origin,
            rows,
            cols: cols.end - cols.start,
            stride,
            owner: PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<'a> TileMut<'a> {
        /// All of `data` as rows of `cols` values.
        ///
        /// # Panics
        /// When `data.len()` is not a multiple of `cols`.
        pub(crate) fn whole(data: &'a mut [f32], cols: usize) -> Self {
            assert!(
                cols > 0 && data.len().is_multiple_of(cols),
                "a buffer that is not whole rows"
            );
            let rows = data.len() / cols;
            Self::new(data, rows, cols, cols)
        }

        /// The columns before `at`, and those from `at` on.
        ///
        /// # Panics
        /// When `at > cols`.
        pub(crate) fn split_cols(self, at: usize) -> (TileMut<'a>, TileMut<'a>) {
            assert!(at <= self.cols, "a split beyond the tile");
            let right = if self.rows == 0 {
                self.origin
            } else {
                // SAFETY: at <= cols <= stride, within the first row or one past it.
                unsafe { self.origin.add(at) }
            };
            (
                TileMut { cols: at, ..self },
                TileMut {
                    origin: right,
                    cols: self.cols - at,
                    ..self
                },
            )
        }
    }

    #[test]
    fn pieces_of_a_tile_cover_it_without_overlap() {
        let mut data = vec![0.0f32; 5 * 7];
        let (left, right) = TileMut::new(&mut data, 5, 6, 7).split_cols(4);
        for (value, mut piece) in [(1.0, left), (2.0, right)] {
            for row in 0..piece.rows() {
                piece.row_mut(row).iter_mut().for_each(|x| *x += value);
            }
        }
        for row in data.chunks(7) {
            assert_eq!(row, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 0.0]);
        }
    }

    #[test]
    #[should_panic(expected = "beyond its buffer")]
    fn a_tile_that_does_not_fit_is_refused() {
        TileMut::new(&mut [0.0; 10], 2, 5, 6);
    }

    #[test]
    fn the_last_row_of_a_tile_need_not_be_a_whole_stride() {
        let mut data = [0.0; 11];
        assert_eq!(TileMut::new(&mut data, 2, 5, 6).row_mut(1).len(), 5);
    }
}
