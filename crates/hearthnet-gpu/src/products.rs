//! Products with matrices.

use std::ops::Range;

use hearthnet_files::blocks::WeightType;

use crate::buffers::{Buffer, Input, Matrix, View};
use crate::device::Gpu;
use crate::kernels::{Arithmetic, Kernel};
use crate::step::{Step, fits};

/// From this number of rows on, matrix units compute products. They take 32 rows at a time.
const TILED_ROWS: u32 = 16;

impl Gpu {
    /// Kernel of products by matrix units, if the card has them and they pass the self-test.
    pub(crate) fn tiles(&self, weight_type: WeightType) -> Option<Kernel> {
        let tile = self.shared.compiler.tile()?;
        let known = self.shared.without_tiles.lock().contains(&weight_type);
        if known || !weight_type.quantised() {
            return None;
        }
        let kernel = Kernel::Tiles {
            weight_type,
            tile,
            units: true,
        };
        if self.pipeline(kernel).is_err() {
            // Other kernels compute the products. They also report a lost card.
            self.shared.without_tiles.lock().insert(weight_type);
            return None;
        }
        Some(kernel)
    }
}

impl Step {
    /// Products of rows with all outputs of a matrix. `out` is none of the operands.
    pub fn matmul(&mut self, matrix: &Matrix, input: Input<'_>, out: View<'_>, rows: u32) {
        self.matmul_panels(matrix, 0..matrix.panels(), input, out, rows);
    }

    /// Products of rows with the outputs of some panels. Column 0 of `out` is the first of them.
    pub fn matmul_panels(
        &mut self,
        matrix: &Matrix,
        panels: Range<u32>,
        input: Input<'_>,
        out: View<'_>,
        rows: u32,
    ) {
        let tiles = match rows >= TILED_ROWS && !matrix.careful {
            true => self.gpu.tiles(matrix.weight_type),
            false => None,
        };
        let together = if rows == 1 { 1 } else { 4 };
        let kernel = tiles.unwrap_or_else(|| self.product(matrix, together, false));
        self.matmul_by(kernel, matrix, panels, input, out, rows);
    }

    /// [`Self::matmul_panels`] by a kernel.
    pub(crate) fn matmul_by(
        &mut self,
        kernel: Kernel,
        matrix: &Matrix,
        panels: Range<u32>,
        input: Input<'_>,
        out: View<'_>,
        rows: u32,
    ) {
        let end = matrix.rows.min(panels.end * 16);
        fits(out, rows, end.saturating_sub(panels.start * 16));
        let together = match kernel {
            Kernel::Matrix { rows, .. } => rows,
            _ => 32,
        };
        let nothing = self.nothing();
        for (held, part) in &matrix.parts {
            let own = panels.start.max(held.start)..panels.end.min(held.end);
            if own.start >= own.end {
                continue;
            }
            let outputs = end.min(own.end * 16) - own.start * 16;
            let shape = [
                outputs,
                own.start - held.start,
                (own.start - panels.start) * 16,
                held.end - held.start,
            ];
            let groups = rows.div_ceil(together);
            self.record_product(
                kernel,
                matrix,
                (part, &nothing),
                input,
                (rows, shape),
                out,
                groups,
            );
        }
    }

    /// Products with experts: pair i (words 2 i and 2 i + 1 of `pairs`) names a row of the input,
    /// one of `rows`, and the first panel of an expert of `outputs` outputs. Their products become
    /// row i of `out`.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn matmul_pairs(
        &mut self,
        matrix: &Matrix,
        outputs: u32,
        pairs: &Buffer,
        input: Input<'_>,
        rows: u32,
        out: View<'_>,
        count: u32,
    ) {
        fits(out, count, outputs);
        assert!(pairs.words() >= u64::from(count) * 2);
        let kernel = self.product(matrix, 1, true);
        for (held, part) in &matrix.parts {
            let first = 0u32.wrapping_sub(held.start);
            let shape = [outputs, first, 0, held.end - held.start];
            self.record_product(
                kernel,
                matrix,
                (part, pairs),
                input,
                (rows, shape),
                out,
                count,
            );
        }
    }

    fn product(&self, matrix: &Matrix, rows: u32, paired: bool) -> Kernel {
        Kernel::Matrix {
            weight_type: matrix.weight_type,
            rows,
            paired,
            careful: matrix.careful && self.gpu.arithmetic() == Arithmetic::Native,
        }
    }

    /// `shape`: outputs, first panel, column, panels of the buffer.
    #[allow(clippy::too_many_arguments, reason = "of a private function")]
    fn record_product(
        &mut self,
        kernel: Kernel,
        matrix: &Matrix,
        (part, pairs): (&Buffer, &Buffer),
        input: Input<'_>,
        (rows, [outputs, panel, column, panels]): (u32, [u32; 4]),
        out: View<'_>,
        groups: u32,
    ) {
        let cols = matrix.cols;
        match input {
            Input::Quantised(act) => {
                assert!(
                    matrix.weight_type.quantised(),
                    "a type with plain activations"
                );
                assert!(act.words() >= u64::from(rows) * u64::from(cols / 32) * 12);
                self.dispatch(
                    kernel,
                    &[part, act, out.buffer, pairs, part],
                    &[
                        rows,
                        cols / 32,
                        outputs,
                        panel,
                        column,
                        panels,
                        out.offset,
                        out.stride,
                    ],
                    [outputs.div_ceil(32), groups, 1],
                );
            }
            Input::Plain(x) => {
                assert!(
                    !matrix.weight_type.quantised(),
                    "a type with quantised activations"
                );
                fits(x, rows, cols);
                self.dispatch(
                    kernel,
                    &[part, x.buffer, out.buffer, pairs, part],
                    &[
                        rows, cols, outputs, panel, column, panels, out.offset, out.stride,
                        x.offset, x.stride,
                    ],
                    [outputs.div_ceil(64), groups, 1],
                );
            }
        }
    }
}
