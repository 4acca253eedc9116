//! Activations of a tile of rows, in the forms that the matrix kernels read.

use super::pack::Packed;
use hearthnet_files::blocks::BLOCK;

/// Forms of activations: plain values for F32, F16 and BF16 weights, quantised values for all
/// other weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActForm {
    /// `f32` values.
    pub plain: bool,
    /// Signed bytes with a scale per 32.
    pub quantised: bool,
}

impl ActForm {
    /// Forms that any of `matrices` needs.
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

/// Scale and sums of 32 quantised activations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct BlockMeta {
    /// Scale: activation ≈ `d * q`.
    pub(super) d: f32,
    /// `d * S`, with `S` the sum of the quants; factor of the minimum of a weight block.
    pub(super) ds: f32,
    /// `-8 * S`: corrects a dot product with unsigned weights for the offset 8 of Q4_0; doubled,
    /// for the offset 16 of Q5_0.
    pub(super) neg8s: i32,
    /// `-128 * S`, for Q8_0 and tables. Stored, because AVX-512 dot products start with it as a
    /// memory operand.
    pub(super) neg128s: i32,
    /// Sums of the first (low 16 bits) and the second 16 quants, each at most 2032 in magnitude.
    pub(super) half_sums: i32,
}

/// Reusable buffer for the activations of a tile of rows. [`super::Kernels::prepare`] or
/// [`super::Kernels::norm_prepare`] fills it; the matrix kernels read it, also from several
/// threads.
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
    /// The plain values, `[rows][cols]`; empty if that form was not requested.
    pub fn plain(&self) -> &[f32] {
        if self.form.plain {
            &self.plain[..self.rows * self.cols]
        } else {
            &[]
        }
    }

    /// Resizes the buffers for a tile.
    ///
    /// # Panics
    /// When `cols` is 0, or the quantised form is requested and `cols` is not a multiple of 32.
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

/// Extends a reusable buffer to at least `len` elements.
pub(crate) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}
