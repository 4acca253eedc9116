//! Activations of a tile of rows in the form in which matrices take them.

use super::block::BLOCK;
use super::pack::Packed;

/// Which forms of the activations are wanted: plain values for F32, F16 and BF16
/// weights, quantised ones for all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActForm {
    /// `f32` values.
    pub plain: bool,
    /// Signed bytes with a scale per 32.
    pub quantised: bool,
}

impl ActForm {
    /// What all of `matrices` need together.
    pub fn of<'a>(matrices: impl IntoIterator<Item = &'a Packed>) -> Self {
        let mut form = Self::default();
        for matrix in matrices {
            if matrix.weight_type().quantised() {
                form.quantised = true;
            } else {
                form.plain = true;
            }
        }
        form
    }
}

/// What the kernels need to know of 32 quantised activations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct BlockMeta {
    /// Scale: the activation is about `d * q`.
    pub(super) d: f32,
    /// `d * S`, S the sum of the quants: what a minimum of weights is multiplied with.
    pub(super) ds: f32,
    /// `-8 * S`: takes the offset 8 of Q4_0 out of a dot product with unsigned weights, and twice
    /// of it that of Q5_0.
    pub(super) neg8s: i32,
    /// `-128 * S`, for Q8_0 and for tables. Not made from `neg8s` by the kernels: with AVX-512 a
    /// dot product begins with it, straight from memory.
    pub(super) neg128s: i32,
    /// The sums of the first and the second 16 quants, at most 2032 in magnitude, as two 16-bit
    /// integers, the first one low.
    pub(super) halves: i32,
}

/// The activations of a tile of rows, reusable from call to call. Filled by
/// [`super::Kernels::prepare`] or [`super::Kernels::norm_prepare`], read by the
/// matrix kernels; threads may share a filled one.
#[derive(Debug, Default)]
pub struct Act {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) form: ActForm,
    /// `[rows][cols]`; also the scratch row of a normalisation.
    pub(super) plain: Vec<f32>,
    /// `[rows][cols]`.
    pub(super) quants: Vec<i8>,
    /// `[rows][cols / 32]`.
    pub(super) meta: Vec<BlockMeta>,
}

impl Act {
    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Forms held.
    pub fn form(&self) -> ActForm {
        self.form
    }

    /// The plain values, `[rows][cols]`; empty when that form was not asked for.
    pub fn plain(&self) -> &[f32] {
        if self.form.plain {
            &self.plain[..self.rows * self.cols]
        } else {
            &[]
        }
    }

    /// Sizes the buffers for a tile.
    ///
    /// # Panics
    /// When the quantised form is wanted and `cols` is not a multiple of 32.
    pub(super) fn shape(&mut self, rows: usize, cols: usize, form: ActForm) {
        assert!(cols > 0, "activations without columns");
        assert!(
            !form.quantised || cols.is_multiple_of(BLOCK),
            "columns must be whole blocks of 32"
        );
        (self.rows, self.cols, self.form) = (rows, cols, form);
        grow(&mut self.plain, if form.plain { rows * cols } else { cols });
        if form.quantised {
            grow(&mut self.quants, rows * cols);
            grow(&mut self.meta, rows * (cols / BLOCK));
        }
    }
}

/// Makes a reusable buffer at least `len` long.
pub(crate) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}
