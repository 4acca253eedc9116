//! Scan of Mamba-2: see `specs/canonical-arithmetic.md`, section 16.
//!
//! Rows of a sequence are computed one after another. Lanes are columns of the state, so that no sum
//! is split. The functions are plain loops; the compiler vectorises them for the instruction set that
//! the caller enables.

use super::delta::BLOCKS;

/// Rows of one head, without their values.
#[derive(Clone, Copy, Debug)]
pub struct MambaRows<'a> {
    /// B, `[rows][rows of the state]`.
    pub write: &'a [f32],
    /// C, `[rows][rows of the state]`.
    pub read: &'a [f32],
    /// Factor of the state for each row.
    pub decay: &'a [f32],
    /// Factor of the values for each row.
    pub steps: &'a [f32],
    /// Factor of the values that are added to the output.
    pub skip: f32,
}

impl MambaRows<'_> {
    pub(super) fn fits(&self, state: usize, values: usize) -> bool {
        let rows = self.decay.len();
        let whole = |len: usize| rows > 0 && len > 0 && len.is_multiple_of(rows);
        self.steps.len() == rows
            && self.write.len() == self.read.len()
            && whole(self.write.len())
            && whole(values)
            && state == self.write.len() / rows * (values / rows)
    }
}

/// Takes the state of a head through rows. `values` has a row per row; outputs replace them.
///
/// The state is `[rows of the state][values of a head]`, stored block of columns by block of columns.
#[inline(always)]
pub(super) fn scan(rows: &MambaRows<'_>, state: &mut [f32], values: &mut [f32]) {
    let count = rows.decay.len();
    let (keys, width) = (rows.write.len() / count, values.len() / count);
    let (mut column, mut rest) = (0, state);
    for block_width in BLOCKS {
        while width - column >= block_width {
            let (block, after) = rest.split_at_mut(keys * block_width);
            match block_width {
                64 => block_scan::<64>(rows, block, column, values),
                16 => block_scan::<16>(rows, block, column, values),
                _ => block_scan::<1>(rows, block, column, values),
            }
            rest = after;
            column += block_width;
        }
    }
}

#[inline(always)]
fn block_scan<const W: usize>(
    rows: &MambaRows<'_>,
    state: &mut [f32],
    column: usize,
    values: &mut [f32],
) {
    let (state, _) = state.as_chunks_mut::<W>();
    let count = rows.decay.len();
    let write = rows.write.chunks_exact(rows.write.len() / count);
    let read = rows.read.chunks_exact(rows.read.len() / count);
    let factors = rows.decay.iter().zip(rows.steps);
    let values = values.chunks_exact_mut(values.len() / count);
    for ((value, (write, read)), (decay, step)) in values.zip(write.zip(read)).zip(factors) {
        let value = &mut value[column..column + W];
        let mut input = [0.0; W];
        for j in 0..W {
            input[j] = value[j] * step;
        }
        let mut out = [0.0; W];
        for (cells, (b, c)) in state.iter_mut().zip(write.iter().zip(read)) {
            for j in 0..W {
                cells[j] = b.mul_add(input[j], cells[j] * decay);
                out[j] = c.mul_add(cells[j], out[j]);
            }
        }
        for j in 0..W {
            value[j] = rows.skip.mul_add(value[j], out[j]);
        }
    }
}
