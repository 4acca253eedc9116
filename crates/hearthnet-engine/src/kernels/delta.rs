//! Convolution and gated delta rule: see `specs/canonical-arithmetic.md`, section 13.
//!
//! Rows of a sequence are computed one after another. Lanes are channels, or columns of the state,
//! so that no sum is split. The functions are plain loops; the compiler vectorises them for the
//! instruction set that the caller enables.

/// Widths of the blocks of columns into which the state of a head is split, widest first. A block
/// stays in the L1 cache while the rows of a batch pass.
pub(super) const BLOCKS: [usize; 3] = [64, 16, 1];

/// Weights of the convolution of some channels.
#[derive(Clone, Copy, Debug)]
pub struct Convolution<'a> {
    /// `[positions][stride]`, oldest position first; the channels are the first ones.
    pub weights: &'a [f32],
    pub stride: usize,
    pub positions: usize,
    /// Number of channels.
    pub channels: usize,
}

impl Convolution<'_> {
    pub(super) fn fits(&self, window: usize, out: usize) -> bool {
        let last = self.positions.saturating_sub(1);
        self.channels > 0
            && self.positions > 0
            && out.is_multiple_of(self.channels)
            && window == out + last * self.channels
            && self.weights.len() >= last * self.stride + self.channels
    }
}

/// For each row of `out`, the weighted sum of that row of `window` and the `positions - 1` rows
/// before it, oldest first. `window` begins `positions - 1` rows earlier.
#[inline(always)]
pub(super) fn convolve(convolution: &Convolution<'_>, window: &[f32], out: &mut [f32]) {
    let Convolution {
        weights,
        stride,
        positions,
        channels,
    } = *convolution;
    for (row, out) in out.chunks_exact_mut(channels).enumerate() {
        out.fill(0.0);
        for position in 0..positions {
            let input = &window[(row + position) * channels..][..channels];
            let weights = &weights[position * stride..][..channels];
            for ((sum, weight), x) in out.iter_mut().zip(weights).zip(input) {
                *sum = weight.mul_add(*x, *sum);
            }
        }
    }
}

/// Rows of one head of the delta rule, without their values.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRows<'a> {
    /// `[rows][width]`, normalised and scaled.
    pub queries: &'a [f32],
    /// `[rows][width]`, normalised.
    pub keys: &'a [f32],
    /// Factor of the state for each row.
    pub decay: &'a [f32],
    /// Factor of the correction for each row.
    pub beta: &'a [f32],
}

impl DeltaRows<'_> {
    pub(super) fn fits(&self, state: usize, values: usize) -> bool {
        let rows = self.decay.len();
        let whole = |len: usize| rows > 0 && len > 0 && len.is_multiple_of(rows);
        self.beta.len() == rows
            && self.keys.len() == self.queries.len()
            && whole(self.keys.len())
            && whole(values)
            && state == self.keys.len() / rows * (values / rows)
    }
}

/// Takes the state of a head through rows. `values` has a row per row; outputs replace them.
///
/// The state is `[width of keys][width of values]`, stored block of columns by block of columns.
#[inline(always)]
pub(super) fn rule(rows: &DeltaRows<'_>, state: &mut [f32], values: &mut [f32]) {
    let count = rows.decay.len();
    let (keys, width) = (rows.keys.len() / count, values.len() / count);
    let (mut column, mut rest) = (0, state);
    for block_width in BLOCKS {
        while width - column >= block_width {
            let (block, after) = rest.split_at_mut(keys * block_width);
            match block_width {
                64 => block_rule::<64>(rows, block, column, values),
                16 => block_rule::<16>(rows, block, column, values),
                _ => block_rule::<1>(rows, block, column, values),
            }
            rest = after;
            column += block_width;
        }
    }
}

#[inline(always)]
fn block_rule<const W: usize>(
    rows: &DeltaRows<'_>,
    state: &mut [f32],
    column: usize,
    values: &mut [f32],
) {
    let (state, _) = state.as_chunks_mut::<W>();
    let count = rows.decay.len();
    let keys = rows.keys.chunks_exact(rows.keys.len() / count);
    let queries = rows.queries.chunks_exact(rows.queries.len() / count);
    let factors = rows.decay.iter().zip(rows.beta);
    let values = values.chunks_exact_mut(values.len() / count);
    for ((value, (key, query)), (decay, beta)) in values.zip(keys.zip(queries)).zip(factors) {
        let value = &mut value[column..column + W];
        let mut read = [0.0; W];
        for (cells, key) in state.iter_mut().zip(key) {
            for j in 0..W {
                cells[j] *= decay;
                read[j] = key.mul_add(cells[j], read[j]);
            }
        }
        let mut correction = [0.0; W];
        for j in 0..W {
            correction[j] = (value[j] - read[j]) * beta;
        }
        let mut out = [0.0; W];
        for (cells, (key, query)) in state.iter_mut().zip(key.iter().zip(query)) {
            for j in 0..W {
                cells[j] = key.mul_add(correction[j], cells[j]);
                out[j] = query.mul_add(cells[j], out[j]);
            }
        }
        value.copy_from_slice(&out);
    }
}

/// `softplus(x) = ln(1 + e^x)`, computed in f64; `x` above 20.
pub fn softplus(x: f32) -> f32 {
    match x > 20.0 {
        true => x,
        false => libm::log1p(libm::exp(f64::from(x))) as f32,
    }
}
