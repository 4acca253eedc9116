//! Attention of a tile of query rows over the paged cache of one key/value head.

use super::kv::{PAGE, key_cell, value_cell};
use super::lanes::{LANES, Lanes};
use super::math::exp;
use super::shared::{Tile, TileMut};

/// What a call to [`super::Kernels::attention`] attends to.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Values in a head; a multiple of 8.
    pub head_dim: usize,
    /// Query heads that share the key/value head.
    pub heads: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Position of the first query row; row `r` attends to the positions from 0 to
    /// `position + r`, itself included.
    pub position: usize,
    /// Pages of the sequence for this layer and key/value head, from position 0
    /// on, each [`super::page_len`] cells. Positions up to the last query row's are
    /// written; what other cells hold has no influence.
    pub pages: &'a [&'a [u16]],
}

/// Scratch memory of [`super::Kernels::attention`], reusable.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    scores: Vec<f32>,
}

/// Most queries (row and head) that are taken together.
const MAX_QUERIES: usize = 12;

/// Queries taken together: where they are, and how many positions each sees.
struct Queries {
    count: usize,
    vectors: [*const f32; MAX_QUERIES],
    limits: [usize; MAX_QUERIES],
    /// 1 / sum of the exponentials.
    inverse: [f32; MAX_QUERIES],
}

/// Attends. `TILE` queries share a pass over the keys (at most 12, a multiple of
/// 6), `CHUNKS` registers of value components a pass over the values.
///
/// # Safety
/// The CPU has the instruction set of `V`. Checked by the caller: `q` and `out`
/// have the same rows and `heads * head_dim` columns; all pages have the right
/// length and cover the last position.
#[inline(always)]
pub(super) unsafe fn attend<V: Lanes, const TILE: usize, const CHUNKS: usize>(
    a: &Attention<'_>,
    q: Tile<'_>,
    scratch: &mut AttentionScratch,
    out: &mut TileMut<'_>,
) {
    let (d, total) = (a.head_dim, q.rows() * a.heads);
    for first in (0..total).step_by(TILE) {
        let count = TILE.min(total - first);
        let mut queries = Queries {
            count,
            vectors: [std::ptr::null(); MAX_QUERIES],
            limits: [0; MAX_QUERIES],
            inverse: [0.0; MAX_QUERIES],
        };
        for i in 0..count {
            let (row, head) = ((first + i) / a.heads, (first + i) % a.heads);
            queries.vectors[i] = q.row(row)[head * d..][..d].as_ptr();
            queries.limits[i] = a.position + row + 1;
        }
        // Rows ascend, so the last query sees most. Scores go in whole pages.
        let pages = queries.limits[count - 1].div_ceil(PAGE);
        let stride = pages * PAGE;
        if scratch.scores.len() < count * stride {
            scratch.scores.resize(count * stride, 0.0);
        }
        let scores = scratch.scores.as_mut_ptr();
        // SAFETY: `scores` has `count` rows of `stride` values, pages `0..pages`
        // exist, query vectors have `d` values.
        unsafe {
            for (p, page) in a.pages[..pages].iter().enumerate() {
                let mut i = 0;
                while i < count {
                    let to = scores.add(i * stride + p * PAGE);
                    let vectors = queries.vectors.as_ptr().add(i);
                    i += match count - i {
                        12.. if TILE >= 12 => score::<V, 12, 2>(page, a, vectors, to, stride),
                        6.. if TILE >= 12 => score::<V, 6, 2>(page, a, vectors, to, stride),
                        6.. => score::<V, 6, 1>(page, a, vectors, to, stride),
                        4.. if TILE >= 12 => score::<V, 4, 2>(page, a, vectors, to, stride),
                        4.. => score::<V, 4, 1>(page, a, vectors, to, stride),
                        3 => score::<V, 3, 2>(page, a, vectors, to, stride),
                        2 => score::<V, 2, 2>(page, a, vectors, to, stride),
                        _ => score::<V, 1, 2>(page, a, vectors, to, stride),
                    };
                }
            }
            for i in 0..count {
                let row = scores.add(i * stride);
                queries.inverse[i] = 1.0 / soften::<V>(row, queries.limits[i]);
            }
            mix_all::<V, CHUNKS>(a, &queries, scores, stride, first, out);
        }
    }
}

/// Scaled scores of `N` queries with the positions of a page, `B` blocks of 16 at
/// a time. Returns `N`.
///
/// # Safety
/// As [`attend`]; `to` has `N` rows of [`PAGE`] values, `stride` apart.
#[inline(always)]
unsafe fn score<V: Lanes, const N: usize, const B: usize>(
    page: &[u16],
    a: &Attention<'_>,
    vectors: *const *const f32,
    to: *mut f32,
    stride: usize,
) -> usize {
    let d = a.head_dim;
    // SAFETY: key cells lie in the page for blocks below PAGE / 16 and components
    // below `d`; vectors have `d` values; `to` by the contract.
    unsafe {
        let vectors: [*const f32; N] = std::array::from_fn(|n| *vectors.add(n));
        for block in (0..PAGE / LANES).step_by(B) {
            let keys = page.as_ptr().add(key_cell(d, block * LANES, 0));
            let mut acc = [[V::splat(0.0); B]; N];
            for i in 0..d {
                let k: [V; B] = std::array::from_fn(|b| V::load_f16(keys.add((b * d + i) * LANES)));
                for n in 0..N {
                    let x = V::splat(*vectors[n].add(i));
                    for b in 0..B {
                        acc[n][b] = k[b].fma(x, acc[n][b]);
                    }
                }
            }
            let scale = V::splat(a.scale);
            for n in 0..N {
                for b in 0..B {
                    acc[n][b]
                        .mul(scale)
                        .store(to.add(n * stride + (block + b) * LANES));
                }
            }
        }
    }
    N
}

/// Turns the first `limit` scores into `exp(score - max)` and returns their sum.
///
/// # Safety
/// As [`Lanes`]; `row` has `limit >= 1` values.
#[inline(always)]
unsafe fn soften<V: Lanes>(row: *mut f32, limit: usize) -> f32 {
    let whole = limit / LANES * LANES;
    let rest = limit - whole;
    // SAFETY: accesses stay below `limit`.
    unsafe {
        let mut top = V::splat(f32::NEG_INFINITY);
        for p in (0..whole).step_by(LANES) {
            top = V::load(row.add(p)).max(top);
        }
        let tail = V::load_partial(row.add(whole), rest, f32::NEG_INFINITY);
        top = tail.max(top);
        let top = top
            .to_array()
            .into_iter()
            .fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m });
        let top = V::splat(top);
        let mut sum = V::splat(0.0);
        for p in (0..whole).step_by(LANES) {
            let e = exp(V::load(row.add(p)).sub(top));
            e.store(row.add(p));
            sum = sum.add(e);
        }
        if rest > 0 {
            // Lanes beyond the limit are exp(-inf) = +0, which adds nothing.
            let e = exp(tail.sub(top));
            e.store_partial(row.add(whole), rest);
            sum = sum.add(e);
        }
        sum.fold()
    }
}

/// Weighted sums of the values for all queries of a tile.
///
/// # Safety
/// As [`attend`]; `weights` has `queries.count` rows, `stride` apart.
#[inline(always)]
unsafe fn mix_all<V: Lanes, const CHUNKS: usize>(
    a: &Attention<'_>,
    queries: &Queries,
    weights: *const f32,
    stride: usize,
    first: usize,
    out: &mut TileMut<'_>,
) {
    let d = a.head_dim;
    let mut column = 0;
    while column < d {
        let mut i = 0;
        while i < queries.count {
            let left = queries.count - i;
            // SAFETY: as the caller; each kernel takes no more queries than are left
            // and no more columns than the head has.
            unsafe {
                let mut go = Mix {
                    a,
                    queries,
                    weights,
                    stride,
                    first,
                    i,
                    column,
                    out,
                };
                i += match (left, (d - column) / LANES) {
                    (_, 0) => go.narrow::<V>(d - column),
                    (6.., n) if n >= CHUNKS => go.mix::<V, 6, CHUNKS>(),
                    (4.., n) if n >= CHUNKS => go.mix::<V, 4, CHUNKS>(),
                    (3.., n) if n >= CHUNKS => go.mix::<V, 3, CHUNKS>(),
                    (2, n) if n >= CHUNKS => go.mix::<V, 2, CHUNKS>(),
                    (1, n) if n >= CHUNKS => go.mix::<V, 1, CHUNKS>(),
                    (6.., _) => go.mix::<V, 6, 1>(),
                    (3.., _) => go.mix::<V, 3, 1>(),
                    _ => go.mix::<V, 1, 1>(),
                };
            }
        }
        column += match (d - column) / LANES {
            0 => d - column,
            n if n >= CHUNKS => CHUNKS * LANES,
            _ => LANES,
        };
    }
}

/// One step of [`mix_all`]: queries from `i` on, columns from `column` on.
struct Mix<'m, 'a, 'o> {
    a: &'m Attention<'a>,
    queries: &'m Queries,
    weights: *const f32,
    stride: usize,
    first: usize,
    i: usize,
    column: usize,
    out: &'m mut TileMut<'o>,
}

impl Mix<'_, '_, '_> {
    /// Where the result of query `n` of this step goes: `len` columns.
    #[inline(always)]
    fn target(&mut self, n: usize, len: usize) -> &mut [f32] {
        let (query, heads) = (self.first + self.i + n, self.a.heads);
        let column = query % heads * self.a.head_dim + self.column;
        &mut self.out.row_mut(query / heads)[column..column + len]
    }

    /// Pointer to the values of `position`, from this step's column on.
    #[inline(always)]
    unsafe fn values(&self, position: usize) -> *const u16 {
        let page = self.a.pages[position / PAGE];
        let cell = value_cell(self.a.head_dim, position % PAGE, self.column);
        // SAFETY: a page has cells for all its slots and columns.
        unsafe { page.as_ptr().add(cell) }
    }

    /// `N` queries, `C` registers of columns. Returns `N`.
    #[inline(always)]
    unsafe fn mix<V: Lanes, const N: usize, const C: usize>(&mut self) -> usize {
        let (d, stride, i) = (self.a.head_dim, self.stride, self.i);
        // SAFETY: positions below the limits are written, columns exist, weights
        // have a row per query.
        unsafe {
            let weights: [*const f32; N] =
                std::array::from_fn(|n| self.weights.add((i + n) * stride));
            let limits: [usize; N] = std::array::from_fn(|n| self.queries.limits[i + n]);
            let mut acc = [[V::splat(0.0); C]; N];
            // Positions that all queries see, page by page ...
            let common = limits[0];
            for start in (0..common).step_by(PAGE) {
                let values = self.values(start);
                for slot in 0..PAGE.min(common - start) {
                    let v: [V; C] =
                        std::array::from_fn(|c| V::load_f16(values.add(slot * d + c * LANES)));
                    for n in 0..N {
                        let w = V::splat(*weights[n].add(start + slot));
                        for c in 0..C {
                            acc[n][c] = v[c].fma(w, acc[n][c]);
                        }
                    }
                }
            }
            // ... and those that only the later rows see.
            for n in 0..N {
                for position in common..limits[n] {
                    let values = self.values(position);
                    let w = V::splat(*weights[n].add(position));
                    for c in 0..C {
                        acc[n][c] = V::load_f16(values.add(c * LANES)).fma(w, acc[n][c]);
                    }
                }
            }
            for n in 0..N {
                let inverse = V::splat(self.queries.inverse[i + n]);
                let target = self.target(n, C * LANES).as_mut_ptr();
                for c in 0..C {
                    acc[n][c].mul(inverse).store(target.add(c * LANES));
                }
            }
        }
        N
    }

    /// One query and the last `cols < 16` columns of a head. Returns 1.
    #[inline(always)]
    unsafe fn narrow<V: Lanes>(&mut self, cols: usize) -> usize {
        // SAFETY: as `mix`; only `cols` cells are read, `cols` values are written.
        unsafe {
            let weights = self.weights.add(self.i * self.stride);
            let mut acc = V::splat(0.0);
            for position in 0..self.queries.limits[self.i] {
                let mut cells = [0u16; LANES];
                std::ptr::copy_nonoverlapping(self.values(position), cells.as_mut_ptr(), cols);
                acc = V::load_f16(cells.as_ptr()).fma(V::splat(*weights.add(position)), acc);
            }
            let acc = acc.mul(V::splat(self.queries.inverse[self.i]));
            acc.store_partial(self.target(0, cols).as_mut_ptr(), cols);
        }
        1
    }
}
