//! Operations on rows of sequences with a state: convolution, gated delta rule, scan of Mamba-2.

use crate::buffers::{Buffer, View};
use crate::kernels::Kernel;
use crate::step::{Step, fits};

/// Words of a piece: see [`piece`].
pub const PIECE: u32 = 8;

/// Successive rows of one sequence: `rows` of them from row `first` on. `before` is the state before
/// them, or `None` for zeros, `after` the state behind them, which may be the same one, and `copy`
/// gets a copy of that.
pub fn piece(
    (first, rows): (u32, u32),
    before: Option<u32>,
    after: u32,
    copy: Option<u32>,
) -> [u32; PIECE as usize] {
    let none = |state: Option<u32>| state.unwrap_or(u32::MAX);
    [first, rows, none(before), after, none(copy), 0, 0, 0]
}

/// Pieces of different sequences, which are computed beside each other.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    /// All pieces, [`PIECE`] words each.
    pub buffer: &'a Buffer,
    /// Index of the first one.
    pub first: u32,
    pub count: u32,
    /// Rows of the longest.
    pub rows: u32,
}

/// States of one layer: `words` words for each sequence, of which those from `at` on are used.
#[derive(Clone, Copy, Debug)]
pub struct StateView<'a> {
    pub buffer: &'a Buffer,
    pub words: u32,
    pub at: u32,
}

/// Heads of [`Step::delta_rule`] and [`Step::mamba_scan`].
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub heads: u32,
    /// Values of a head: columns of its state.
    pub width: u32,
    /// Values of a head of queries and keys, or of a group's B and C: rows of a state.
    pub rows: u32,
    pub sharing: Sharing,
}

/// Heads of keys that heads of values read.
#[derive(Clone, Copy, Debug)]
pub enum Sharing {
    /// `head / n`
    Blocks(u32),
    /// `head mod n`
    Tiled(u32),
}

impl Step {
    /// Causal convolution of channels of rows: each output is the weighted sum of a row and the
    /// `positions - 1` rows before it. Then the states get the last inputs. Inputs are those of `x`,
    /// times those of `factors`, which lie in the same buffer with the same stride. `weights` has
    /// `positions` rows.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn convolve(
        &mut self,
        x: View<'_>,
        factors: Option<View<'_>>,
        out: View<'_>,
        (positions, channels): (u32, u32),
        weights: &Buffer,
        pieces: Pieces<'_>,
        states: StateView<'_>,
    ) {
        fits(x, 1, channels);
        fits(out, 1, channels);
        assert!(positions > 0 && weights.words() >= u64::from(positions) * u64::from(channels));
        assert!(factors.is_none_or(|factors| factors.stride == x.stride));
        assert!(u64::from(states.at + (positions - 1) * channels) <= u64::from(states.words));
        let parameters = [
            pieces.first,
            x.offset,
            x.stride,
            states.words,
            states.at,
            channels,
            positions,
            factors.map_or(0, |factors| factors.offset),
            u32::from(factors.is_some()),
            out.offset,
            out.stride,
        ];
        let buffers = [x.buffer, pieces.buffer, weights, states.buffer, out.buffer];
        let columns = channels.div_ceil(64);
        let rows = [columns, pieces.rows, pieces.count];
        self.dispatch(Kernel::Convolve, &buffers, &parameters, rows);
        if positions > 1 {
            let each = [columns, 1, pieces.count];
            self.dispatch(Kernel::Keep, &buffers, &parameters, each);
        }
    }

    /// Gated delta rule. `values` are replaced by the outputs; `queries` and `keys` lie in the same
    /// buffer with the same stride. `factors` has, for each row and head, that of the state and that
    /// of the correction.
    pub fn delta_rule(
        &mut self,
        heads: Heads,
        [queries, keys, values]: [View<'_>; 3],
        factors: &Buffer,
        pieces: Pieces<'_>,
        states: StateView<'_>,
    ) {
        let nothing = self.nothing();
        self.recur(
            Kernel::DeltaRule,
            heads,
            [queries, keys, values],
            factors,
            pieces,
            states,
            &nothing,
        );
    }

    /// Scan of Mamba-2. `values` are replaced by the outputs; `write` (B) and `read` (C) lie in the
    /// same buffer with the same stride. `factors` has, for each row and head, that of the state and
    /// that of the values; `skip` has, for each head, that of the values in the output.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn mamba_scan(
        &mut self,
        heads: Heads,
        [write, read, values]: [View<'_>; 3],
        factors: &Buffer,
        skip: &Buffer,
        pieces: Pieces<'_>,
        states: StateView<'_>,
    ) {
        assert!(skip.words() >= u64::from(heads.heads));
        self.recur(
            Kernel::MambaScan,
            heads,
            [write, read, values],
            factors,
            pieces,
            states,
            skip,
        );
    }

    #[allow(clippy::too_many_arguments, reason = "as the formulas have")]
    fn recur(
        &mut self,
        kernel: Kernel,
        heads: Heads,
        [first, second, values]: [View<'_>; 3],
        factors: &Buffer,
        pieces: Pieces<'_>,
        states: StateView<'_>,
        last: &Buffer,
    ) {
        let Heads {
            heads,
            width,
            rows,
            sharing,
        } = heads;
        let of_heads = u64::from(heads) * u64::from(width);
        let cells = of_heads * u64::from(rows);
        assert!(u64::from(states.at) + cells <= u64::from(states.words));
        assert!(first.stride == values.stride && second.stride == values.stride);
        assert!(u64::from(values.offset) + of_heads <= values.buffer.words());
        let (shared, blocks) = match sharing {
            Sharing::Blocks(heads) => (heads, 1),
            Sharing::Tiled(heads) => (heads, 0),
        };
        let parameters = [
            pieces.first,
            values.offset,
            values.stride,
            states.words,
            states.at,
            width,
            rows,
            heads,
            shared.max(1),
            blocks,
            first.offset,
            second.offset,
        ];
        let buffers = [values.buffer, pieces.buffer, factors, states.buffer, last];
        let groups = [width.div_ceil(64), heads, pieces.count];
        self.dispatch(kernel, &buffers, &parameters, groups);
    }
}
