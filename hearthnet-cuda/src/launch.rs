//! Launches as data: which kernel runs in what shape over which buffers.
//!
//! A card and the emulation of one in tests run the same launches. Each says how many bytes of a buffer
//! its kernel may touch, so that whoever runs it can check that they are there.
//!
//! Buffers are whatever the runner takes for one (`B`). Rows of activations are `f32` one after another,
//! `[rows][cols]`, unless something else is said.

use hearthnet_model::BoundaryDtype;
use hearthnet_model::RopeKind;
use hearthnet_model::kernels::{PAGE, Packed, WeightType, page_len};
use hearthnet_model::spec::Activation;

/// Threads of kernels that take a value, an output or a pair each.
const THREADS: u32 = 128;
/// Threads of kernels that take a row together: 8 warps, of which one folds.
const ROW_THREADS: u32 = 256;
/// Inputs that are quantised together, by the threads of a warp.
const BLOCK: usize = 32;
const WARP: usize = 32;
/// Outputs of a panel.
const PANEL: usize = 16;
/// Outputs, and rows, of the products that a warp takes from the tensor cores.
const PRODUCT: usize = 8;
/// What a card takes along x, and along the others.
const MOST_X: usize = 0x7fff_ffff;
const MOST_Y: usize = 0xffff;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg<B> {
    /// The first bytes of a buffer.
    Buffer {
        /// Which buffer.
        buffer: B,
        /// How many bytes of it the kernel may touch.
        bytes: usize,
    },
    /// No buffer where there might be one.
    Null,
    /// An `int`.
    Int(i32),
    /// A `float`.
    Float(f32),
}

/// A kernel, its shape and its arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch<B> {
    /// Name of the kernel in [`crate::SOURCE`].
    pub kernel: String,
    /// Blocks along x, y and z; at least one each.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// In the order of the kernel's parameters.
    pub args: Vec<Arg<B>>,
}

/// Why something cannot be launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A count is zero, or one is not the multiple of another that it must be.
    #[error("a launch with {0}")]
    Shape(&'static str),
    /// A count is beyond what a card, or an `int`, takes.
    #[error("a launch that is too large for a card; use fewer rows at a time")]
    TooLarge,
}

/// What launching gives.
pub type Result<B> = std::result::Result<Launch<B>, LaunchError>;

/// Quantised activations.
#[derive(Clone, Copy, Debug)]
pub struct Quantised<B> {
    /// Signed bytes, `[rows][cols]`.
    pub quants: B,
    /// A scale (`f32`) for each 32 of them.
    pub scales: B,
    /// For each 32 two `i32`: the sums of the first and the second 16.
    pub sums: B,
}

/// A matrix in a buffer, as [`Packed::data`] has it.
#[derive(Clone, Copy, Debug)]
pub struct Weights<B> {
    /// Where the panels are.
    pub buffer: B,
    /// Type of the weights.
    pub weight_type: WeightType,
    /// Number of outputs.
    pub outputs: usize,
    /// Number of inputs.
    pub inputs: usize,
}

/// Keys and values of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Cache<B> {
    /// Pages of `page_len(head_dim)` 16-bit cells.
    pub cells: B,
    /// How many pages there are.
    pub pages: usize,
    /// Numbers of a sequence's pages as `i32`, `[kv_heads][table_pages]`.
    pub table: B,
    /// Pages of the sequence per key/value head.
    pub table_pages: usize,
}

/// What attention is over: consecutive positions of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values in a head.
    pub head_dim: usize,
    /// Position of the first row.
    pub position: usize,
    /// Number of rows.
    pub rows: usize,
    /// Last positions that a row attends to; `None` for all.
    pub window: Option<usize>,
}

/// `y = norm(x, w)`; `y` may be `x`. Heads are rows of `head_dim`.
///
/// # Errors
/// See [`LaunchError`]; so of all that follow.
pub fn rms_norm<B>(x: B, w: B, eps: f32, rows: usize, cols: usize, y: B) -> Result<B> {
    let bytes = size([rows, cols, 4])?;
    Builder::new("rms_norm")
        .buffer(x, bytes)
        .buffer(w, size([cols, 4])?)
        .float(eps)
        .int(cols)
        .buffer(y, bytes)
        .launch([rows, 1, 1], ROW_THREADS)
}

/// Activations in the form that [`matvec`] and [`matmul`] read.
///
/// # Errors
/// When `cols` is not a multiple of 32.
pub fn quantise<B>(x: B, rows: usize, cols: usize, to: Quantised<B>) -> Result<B> {
    if !cols.is_multiple_of(BLOCK) {
        return Err(LaunchError::Shape(
            "columns that are not whole blocks of 32",
        ));
    }
    let blocks = size([rows, cols / BLOCK])?;
    let warps = ROW_THREADS as usize / WARP;
    Builder::new("quantise")
        .buffer(x, size([blocks, BLOCK, 4])?)
        .int(blocks)
        .buffer(to.quants, size([blocks, BLOCK])?)
        .buffer(to.scales, size([blocks, 4])?)
        .buffer(to.sums, size([blocks, 8])?)
        .launch([blocks.div_ceil(warps), 1, 1], ROW_THREADS)
}

/// Turns the heads of rows at `shape.position` and after. `cosines` and `sines` are `[position][pairs]`.
///
/// # Errors
/// When the pairs are more than a head has.
pub fn rope<B>(
    x: B,
    (cosines, sines): (B, B),
    kind: RopeKind,
    heads: usize,
    pairs: usize,
    shape: &Heads,
) -> Result<B> {
    if 2 * pairs > shape.head_dim {
        return Err(LaunchError::Shape("a rotation wider than the head"));
    }
    let angles = size([shape.end()?, pairs, 4])?;
    let kind = match kind {
        RopeKind::Interleaved => 0,
        RopeKind::Halves => 1,
    };
    Builder::new("rope")
        .buffer(x, size([shape.rows, heads, shape.head_dim, 4])?)
        .buffer(cosines, angles)
        .buffer(sines, angles)
        .int(kind)
        .int(heads)
        .int(shape.head_dim)
        .within(heads.saturating_mul(shape.head_dim))
        .int(pairs)
        .int(shape.position)
        .each([heads * pairs, shape.rows, 1])
}

/// `g = activation(g) * u`, of `n` values.
///
/// # Errors
/// See [`LaunchError`].
pub fn gate<B>(g: B, u: B, activation: Activation, n: usize) -> Result<B> {
    let kind = match activation {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::Clamped => 2,
    };
    Builder::new("gate")
        .buffer(g, size([n, 4])?)
        .buffer(u, size([n, 4])?)
        .int(kind)
        .int(n)
        .each([n, 1, 1])
}

/// `x = round(x + y)`; `y` has one row, which is added to each of `x`, or as many as `x`.
///
/// # Errors
/// See [`LaunchError`].
pub fn add_round<B>(
    x: B,
    y: B,
    dtype: BoundaryDtype,
    rows: usize,
    cols: usize,
    bias: bool,
) -> Result<B> {
    let n = size([rows, cols])?;
    let again = if bias { cols } else { n };
    Builder::new("add_round")
        .buffer(x, size([n, 4])?)
        .buffer(y, size([again, 4])?)
        .int(dtype_number(dtype))
        .int(again)
        .int(n)
        .each([n, 1, 1])
}

/// `x = round(x * factor)`, of `n` values.
///
/// # Errors
/// See [`LaunchError`].
pub fn multiply<B>(x: B, factor: f32, dtype: BoundaryDtype, n: usize) -> Result<B> {
    Builder::new("multiply")
        .buffer(x, size([n, 4])?)
        .float(factor)
        .int(dtype_number(dtype))
        .int(n)
        .each([n, 1, 1])
}

/// `x = x / divisor`, of `n` values.
///
/// # Errors
/// See [`LaunchError`].
pub fn divide<B>(x: B, divisor: f32, n: usize) -> Result<B> {
    Builder::new("divide")
        .buffer(x, size([n, 4])?)
        .float(divisor)
        .int(n)
        .each([n, 1, 1])
}

/// `x = tanh(x / cap) * cap`, of `n` values.
///
/// # Errors
/// See [`LaunchError`].
pub fn softcap<B>(x: B, cap: f32, n: usize) -> Result<B> {
    Builder::new("softcap")
        .buffer(x, size([n, 4])?)
        .float(cap)
        .int(n)
        .each([n, 1, 1])
}

/// `sum = fma(x, factor, sum)`, of `n` values: the output of an expert.
///
/// # Errors
/// See [`LaunchError`].
pub fn add_scaled<B>(sum: B, x: B, factor: f32, n: usize) -> Result<B> {
    Builder::new("add_scaled")
        .buffer(sum, size([n, 4])?)
        .buffer(x, size([n, 4])?)
        .float(factor)
        .int(n)
        .each([n, 1, 1])
}

/// Writes 1 into the place (`i32`) of each row that has an infinity or a NaN.
///
/// # Errors
/// See [`LaunchError`].
pub fn mark_overflow<B>(x: B, rows: usize, cols: usize, marks: B) -> Result<B> {
    let n = size([rows, cols])?;
    Builder::new("mark_overflow")
        .buffer(x, size([n, 4])?)
        .int(cols)
        .int(n)
        .buffer(marks, size([rows, 4])?)
        .each([n, 1, 1])
}

/// Few rows of quantised activations with a matrix of quantised weights: `[rows][outputs]`.
///
/// # Errors
/// When the weights want plain activations.
pub fn matvec<B>(weights: Weights<B>, act: Quantised<B>, rows: usize, out: B) -> Result<B> {
    let panels = weights.outputs.div_ceil(PANEL);
    quantised("matvec", weights, act, rows)?
        .buffer_of_rows(out, rows)?
        .launch([panels, rows, 1], ROW_THREADS)
}

/// As [`matvec`], for many rows: on tensor cores.
///
/// # Errors
/// When the weights want plain activations.
pub fn matmul<B>(weights: Weights<B>, act: Quantised<B>, rows: usize, out: B) -> Result<B> {
    let tiles = 2 * weights.outputs.div_ceil(PANEL);
    let rows_of_block = THREADS as usize / WARP * PRODUCT;
    quantised("matmul", weights, act, rows)?
        .int(rows)
        .buffer_of_rows(out, rows)?
        .launch([tiles, rows.div_ceil(rows_of_block), 1], THREADS)
}

/// Rows of plain activations with a matrix of F32, F16 or BF16: `[rows][outputs]`.
///
/// # Errors
/// When the weights want quantised activations.
pub fn plain<B>(weights: Weights<B>, x: B, rows: usize, out: B) -> Result<B> {
    if weights.weight_type.quantised() {
        return Err(LaunchError::Shape(
            "weights that want quantised activations",
        ));
    }
    let outputs = weights.outputs;
    let inputs = weights.inputs;
    Builder::of("plain", weights)?
        .buffer(x, size([rows, inputs, 4])?)
        .int(inputs)
        .int(outputs)
        .buffer_of_rows(out, rows)?
        .each([outputs, rows, 1])
}

/// Rows of the embedding matrix `weights`, one output for each token of the vocabulary: `[count][inputs]`.
/// `tokens` are `i32`; one that the matrix does not have gives NaN.
///
/// # Errors
/// See [`LaunchError`].
pub fn embed<B>(weights: Weights<B>, tokens: B, count: usize, out: B) -> Result<B> {
    let (vocabulary, cols) = (weights.outputs, weights.inputs);
    Builder::of("embed", weights)?
        .buffer(tokens, size([count, 4])?)
        .int(vocabulary)
        .int(cols)
        .buffer(out, size([count, cols, 4])?)
        .each([cols, count, 1])
}

/// Rounds keys and values, `[rows][kv_heads * head_dim]`, into the cache.
///
/// # Errors
/// See [`LaunchError`].
pub fn store_kv<B>(keys: B, values: B, shape: &Heads, cache: Cache<B>) -> Result<B> {
    let width = size([shape.kv_heads, shape.head_dim])?;
    shape.end()?;
    let bytes = size([shape.rows, width, 4])?;
    let Cache {
        cells,
        pages,
        table,
        table_pages,
    } = cache;
    Builder::new("store_kv")
        .buffer(keys, bytes)
        .buffer(values, bytes)
        .int(shape.kv_heads)
        .int(shape.head_dim)
        .int(shape.position)
        .buffer(table, size([shape.kv_heads, table_pages, 4])?)
        .int(table_pages)
        .int(pages)
        .cells(cells, pages, shape.head_dim)?
        .each([width, shape.rows, 1])
}

/// Scores of all positions that rows attend to, `[rows][heads][stride]`; `stride` is at least the
/// positions up to the last row's. With `softcap`, capped.
///
/// # Errors
/// See [`LaunchError`].
pub fn attention_scores<B>(
    q: B,
    shape: &Heads,
    (scale, softcap): (f32, Option<f32>),
    cache: Cache<B>,
    (scores, stride): (B, usize),
) -> Result<B> {
    let positions = shape.check(stride)?;
    let Cache {
        cells,
        pages,
        table,
        table_pages,
    } = cache;
    Builder::new("attention_scores")
        .buffer(q, shape.query_bytes()?)
        .int(shape.heads)
        .int(shape.kv_heads)
        .int(shape.head_dim)
        .int(shape.position)
        .int(shape.window.unwrap_or(0))
        .float(scale)
        .float(softcap.unwrap_or(0.0))
        .buffer(table, size([shape.kv_heads, table_pages, 4])?)
        .int(table_pages)
        .int(pages)
        .cells(cells, pages, shape.head_dim)?
        .int(stride)
        .buffer(scores, size([shape.rows, shape.heads, stride, 4])?)
        .each([positions, shape.heads, shape.rows])
}

/// Turns scores into `exp(score - top)`, and writes `1 / Z` as `[rows][heads]`. `sinks` has a score for
/// each head.
///
/// # Errors
/// See [`LaunchError`].
pub fn attention_softmax<B>(
    (scores, stride): (B, usize),
    shape: &Heads,
    sinks: Option<B>,
    inverse: B,
) -> Result<B> {
    shape.check(stride)?;
    let sink_bytes = size([shape.heads, 4])?;
    Builder::new("attention_softmax")
        .buffer(scores, size([shape.rows, shape.heads, stride, 4])?)
        .int(shape.heads)
        .int(shape.position)
        .int(shape.window.unwrap_or(0))
        .optional(sinks, sink_bytes)
        .int(stride)
        .buffer(inverse, size([shape.rows, shape.heads, 4])?)
        .launch([shape.heads, shape.rows, 1], ROW_THREADS)
}

/// What rows read of the values, `[rows][heads * head_dim]`.
///
/// # Errors
/// See [`LaunchError`].
pub fn attention_mix<B>(
    (scores, stride): (B, usize),
    inverse: B,
    shape: &Heads,
    cache: Cache<B>,
    out: B,
) -> Result<B> {
    shape.check(stride)?;
    let Cache {
        cells,
        pages,
        table,
        table_pages,
    } = cache;
    Builder::new("attention_mix")
        .buffer(scores, size([shape.rows, shape.heads, stride, 4])?)
        .buffer(inverse, size([shape.rows, shape.heads, 4])?)
        .int(shape.heads)
        .int(shape.kv_heads)
        .int(shape.head_dim)
        .int(shape.position)
        .int(shape.window.unwrap_or(0))
        .buffer(table, size([shape.kv_heads, table_pages, 4])?)
        .int(table_pages)
        .int(pages)
        .cells(cells, pages, shape.head_dim)?
        .int(stride)
        .buffer(out, shape.query_bytes()?)
        .each([shape.head_dim, shape.heads, shape.rows])
}

impl Heads {
    /// Pages that the rows and all before them take, per key/value head.
    pub fn pages(&self) -> usize {
        (self.position + self.rows).div_ceil(PAGE)
    }

    /// The position after the last row's.
    fn end(&self) -> std::result::Result<usize, LaunchError> {
        let end = self.position.checked_add(self.rows);
        end.filter(|end| *end <= MOST_X)
            .ok_or(LaunchError::TooLarge)
    }

    fn query_bytes(&self) -> std::result::Result<usize, LaunchError> {
        size([self.rows, self.heads, self.head_dim, 4])
    }

    /// The positions that the last row attends to, from 0 on.
    fn check(&self, stride: usize) -> std::result::Result<usize, LaunchError> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(LaunchError::Shape(
                "heads that do not share key/value heads evenly",
            ));
        }
        if self.window == Some(0) {
            return Err(LaunchError::Shape("a window without positions"));
        }
        let positions = self.end()?;
        if stride < positions {
            return Err(LaunchError::Shape(
                "less room for scores than there are positions",
            ));
        }
        Ok(positions)
    }
}

fn dtype_number(dtype: BoundaryDtype) -> usize {
    match dtype {
        BoundaryDtype::F16 => 0,
        BoundaryDtype::Bf16 => 1,
        BoundaryDtype::F32 => 2,
    }
}

/// The product of counts, none of which is 0.
fn size<const N: usize>(counts: [usize; N]) -> std::result::Result<usize, LaunchError> {
    if counts.contains(&0) {
        return Err(LaunchError::Shape("nothing to do"));
    }
    let product = counts
        .iter()
        .try_fold(1usize, |product, count| product.checked_mul(*count));
    product.ok_or(LaunchError::TooLarge)
}

/// The beginning of both products with quantised weights.
fn quantised<B>(
    kernel: &str,
    weights: Weights<B>,
    act: Quantised<B>,
    rows: usize,
) -> std::result::Result<Builder<B>, LaunchError> {
    if !weights.weight_type.quantised() {
        return Err(LaunchError::Shape("weights that want plain activations"));
    }
    let (outputs, blocks) = (weights.outputs, weights.inputs / BLOCK);
    let all = size([rows, blocks])?;
    Ok(Builder::of(kernel, weights)?
        .buffer(act.quants, size([all, BLOCK])?)
        .buffer(act.scales, size([all, 4])?)
        .buffer(act.sums, size([all, 8])?)
        .int(blocks)
        .int(outputs))
}

struct Builder<B> {
    kernel: String,
    args: Vec<Arg<B>>,
    outputs: usize,
    fits: bool,
}

impl<B> Builder<B> {
    fn new(kernel: &str) -> Self {
        Self {
            kernel: kernel.to_owned(),
            args: Vec::new(),
            outputs: 0,
            fits: true,
        }
    }

    /// The kernel for a type of weights, which are its first argument.
    fn of(kernel: &str, weights: Weights<B>) -> std::result::Result<Self, LaunchError> {
        let Weights {
            buffer,
            weight_type,
            outputs,
            inputs,
        } = weights;
        size([outputs, inputs])?;
        // Two panels are whole cache lines of every type, and so as long as they say.
        let two = Packed::bytes_for(weight_type, 2 * PANEL, inputs);
        let two = two.map_err(|_| LaunchError::Shape("inputs that are not whole blocks"))?;
        let mut builder = Self::new(&format!("{kernel}_{weight_type:?}"));
        builder.outputs = outputs;
        let padded = outputs.saturating_add(PANEL);
        Ok(builder
            .within(padded)
            .buffer(buffer, size([outputs.div_ceil(PANEL), two / 2])?))
    }

    fn buffer(mut self, buffer: B, bytes: usize) -> Self {
        self.args.push(Arg::Buffer { buffer, bytes });
        self
    }

    /// Rows of the outputs of [`Self::of`].
    fn buffer_of_rows(self, buffer: B, rows: usize) -> std::result::Result<Self, LaunchError> {
        let bytes = size([rows, self.outputs, 4])?;
        Ok(self.buffer(buffer, bytes))
    }

    fn cells(
        self,
        cells: B,
        pages: usize,
        head_dim: usize,
    ) -> std::result::Result<Self, LaunchError> {
        // A page that an `int` counts: the length of any other would wrap around.
        if head_dim > MOST_X / page_len(1) {
            return Err(LaunchError::TooLarge);
        }
        Ok(self.buffer(cells, size([pages, page_len(head_dim), 2])?))
    }

    fn optional(mut self, buffer: Option<B>, bytes: usize) -> Self {
        let arg = buffer.map_or(Arg::Null, |buffer| Arg::Buffer { buffer, bytes });
        self.args.push(arg);
        self
    }

    fn int(mut self, number: usize) -> Self {
        let number = i32::try_from(number);
        self.fits &= number.is_ok();
        self.args.push(Arg::Int(number.unwrap_or_default()));
        self
    }

    /// What the kernel computes as an `int`.
    fn within(mut self, number: usize) -> Self {
        self.fits &= i32::try_from(number).is_ok();
        self
    }

    fn float(mut self, value: f32) -> Self {
        self.args.push(Arg::Float(value));
        self
    }

    /// A thread for each of `counts` along x.
    fn each(self, counts: [usize; 3]) -> Result<B> {
        let [x, y, z] = counts;
        self.launch([x.div_ceil(THREADS as usize), y, z], THREADS)
    }

    fn launch(self, blocks: [usize; 3], threads: u32) -> Result<B> {
        size(blocks)?;
        let [x, y, z] = blocks;
        if !self.fits || x > MOST_X || y > MOST_Y || z > MOST_Y {
            return Err(LaunchError::TooLarge);
        }
        Ok(Launch {
            kernel: self.kernel,
            grid: [x as u32, y as u32, z as u32],
            threads,
            args: self.args,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_card_does_not_take_is_refused() {
        let much = MOST_Y + 1;
        let act = Quantised {
            quants: 0,
            scales: 0,
            sums: 0,
        };
        let weights = Weights {
            buffer: 0,
            weight_type: WeightType::Q4_0,
            outputs: 16,
            inputs: 32,
        };
        assert_eq!(matvec(weights, act, much, 0), Err(LaunchError::TooLarge));
        assert_eq!(softcap(0, 1.0, 1 << 31), Err(LaunchError::TooLarge));
        assert_eq!(softcap(0, 1.0, usize::MAX), Err(LaunchError::TooLarge));
    }

    #[test]
    fn shapes_that_do_not_fit_together_are_refused() {
        let act = Quantised {
            quants: 0,
            scales: 0,
            sums: 0,
        };
        let weights = |weight_type, inputs| Weights {
            buffer: 0,
            weight_type,
            outputs: 16,
            inputs,
        };
        let refused = |launch: Result<i32>| matches!(launch, Err(LaunchError::Shape(_)));
        assert!(refused(softcap(0, 1.0, 0)));
        assert!(refused(quantise(0, 1, 33, act)));
        assert!(refused(matvec(weights(WeightType::F16, 32), act, 1, 0)));
        assert!(refused(plain(weights(WeightType::Q8_0, 32), 0, 1, 0)));
        assert!(refused(matvec(weights(WeightType::Q4_K, 32), act, 1, 0)));
        let shape = Heads {
            heads: 3,
            kv_heads: 2,
            head_dim: 8,
            position: 0,
            rows: 1,
            window: None,
        };
        assert!(refused(attention_softmax((0, 1), &shape, None, 0)));
        let shape = Heads {
            heads: 4,
            position: 9,
            ..shape
        };
        assert!(refused(attention_softmax((0, 9), &shape, None, 0)));
        assert!(attention_softmax((0, 10), &shape, None, 0).is_ok());
    }
}
