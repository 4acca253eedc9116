//! Attention of a tile of query rows over the paged cache of one key/value head.

use std::ops::Range;

use hearthnet_files::floats::f16_to_f32;

use super::act::grow;
use super::kv::{PAGE, key_cell, value_cell};
use super::lanes::{LANES, Lanes};
use super::math::exp;
use super::shared::TileMut;
use super::{prefetch, rows};

/// Parameters of [`super::Kernels::attention`].
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Values in a head; a multiple of 8.
    pub head_dim: usize,
    /// Query heads of the call, which share the key/value head.
    pub heads: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `cap`: each score `s` becomes `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Attention sinks: per query head, the score of an extra softmax entry without a value.
    pub sinks: Option<&'a [f32]>,
    /// Position of the first query row; row `r` attends to positions 0 to `position + r`
    /// inclusive.
    pub position: usize,
    /// Sliding window: number of latest positions that a row attends to, itself included; not 0.
    /// `None`: all positions.
    pub window: Option<usize>,
    /// Positions of the sequence, if rows also attend to positions after their own: to all or, with
    /// a window, to as many as before it.
    pub both_sides: Option<usize>,
    /// Pages of the sequence for this layer and key/value head, from position 0, of
    /// [`super::page_len`] cells each. All positions that a row attends to are written; other cells
    /// are ignored.
    pub pages: &'a [&'a [u16]],
}

impl Attention<'_> {
    /// Positions that the query at position `own` attends to.
    #[inline(always)]
    fn seen(&self, own: usize) -> Range<usize> {
        let start = self
            .window
            .map_or(0, |window| (own + 1).saturating_sub(window));
        let end = self.both_sides.map_or(own + 1, |end| match self.window {
            Some(window) => end.min(own.saturating_add(window)),
            None => end,
        });
        start..end
    }
}

/// Reusable scratch memory of [`super::Kernels::attention`].
#[derive(Debug, Default)]
pub struct AttentionScratch {
    /// `[query][position]`, positions padded to whole pages.
    scores: Vec<f32>,
    /// Query vectors of a group that is scored together, `[head_dim / STRIP][query][STRIP]`, so
    /// that the kernel needs one pointer for all of them.
    vectors: Vec<f32>,
}

const CACHE_LINE: usize = 64;
/// Adjacent components of a query in [`AttentionScratch::vectors`]; every `head_dim` is a multiple
/// of it.
const STRIP: usize = 8;
/// Maximum of [`Inner::TILE`]. A query is a pair of row and head.
const MAX_QUERIES: usize = 12;
/// Maximum number of accumulator registers in [`Inner::mix`].
const MAX_SUMS: usize = 24;

/// Inner loops for one instruction set. They are not inlined: within the rest of the code, the
/// compiler would spill their accumulators.
pub(super) trait Inner {
    type V: Lanes;
    /// Queries that share a pass over the keys: 6, or 12 with 32 registers.
    const TILE: usize;
    /// Registers of value components per pass over the values: 1 or 4.
    const CHUNKS: usize;

    /// [`score`] for this instruction set.
    ///
    /// # Safety
    /// The CPU has the instruction set, and the contract of that function holds.
    unsafe fn score<const N: usize, const B: usize>(
        page: *const u16,
        a: &Attention<'_>,
        vectors: *const f32,
        to: *mut f32,
        stride: usize,
    );

    /// [`mix`] for this instruction set.
    ///
    /// # Safety
    /// The CPU has the instruction set, and the contract of that function holds.
    unsafe fn mix<const N: usize, const C: usize>(
        a: &Attention<'_>,
        column: usize,
        positions: Range<usize>,
        weights: *const f32,
        stride: usize,
        sums: *mut f32,
    );
}

/// Queries processed together: the positions `starts..limits` that each attends to, and the
/// inverse of its softmax denominator.
struct Queries {
    /// Index of the first query, counted row by row and head by head.
    first: usize,
    count: usize,
    starts: [usize; MAX_QUERIES],
    limits: [usize; MAX_QUERIES],
    inverse: [f32; MAX_QUERIES],
}

/// Computes attention for a tile of queries at a time.
///
/// # Safety
/// The CPU has the instruction set of `K`. `q` and `out` have the same rows, those of `q` `q_stride`
/// values apart, and `heads * head_dim` columns. All pages have the right length and cover the last
/// position.
#[inline(always)]
pub(super) unsafe fn attend<K: Inner>(
    a: &Attention<'_>,
    q: &[f32],
    q_stride: usize,
    scratch: &mut AttentionScratch,
    out: &mut TileMut<'_>,
) {
    let (d, total) = (a.head_dim, out.rows() * a.heads);
    for first in (0..total).step_by(K::TILE) {
        let count = K::TILE.min(total - first);
        let mut queries = Queries {
            first,
            count,
            starts: [0; MAX_QUERIES],
            limits: [0; MAX_QUERIES],
            inverse: [0.0; MAX_QUERIES],
        };
        for i in 0..count {
            let seen = a.seen(a.position + (first + i) / a.heads);
            (queries.starts[i], queries.limits[i]) = (seen.start, seen.end);
        }
        // Positions ascend, so the first query has the lowest start and the last one the highest
        // limit. Scores are stored in whole pages; one more cache line per row keeps the rows in
        // different cache sets.
        let pages = queries.limits[count - 1].div_ceil(PAGE);
        let before = queries.starts[0] / PAGE;
        let stride = pages * PAGE + LANES;
        grow(&mut scratch.scores, count * stride);
        grow(&mut scratch.vectors, count * d);
        let scores = scratch.scores.as_mut_ptr();
        // SAFETY: `scores` has `count` rows of `stride` values, pages `0..pages`
        // exist, and each group of `n` queries has `d * n` values in `vectors`.
        unsafe {
            let mut i = 0;
            while i < count {
                let n = match count - i {
                    12.. if K::TILE >= 12 => 12,
                    6.. => 6,
                    4.. => 4,
                    n => n,
                };
                for j in 0..n {
                    let (row, head) = ((first + i + j) / a.heads, (first + i + j) % a.heads);
                    let vector = &q[row * q_stride + head * d..][..d];
                    let strips = scratch.vectors.chunks_exact_mut(n * STRIP);
                    for (from, to) in vector.chunks_exact(STRIP).zip(strips) {
                        to[j * STRIP..][..STRIP].copy_from_slice(from);
                    }
                }
                let vectors = scratch.vectors.as_ptr();
                for (p, page) in a.pages[..pages].iter().enumerate().skip(before) {
                    // Prefetch for the first tile only: later tiles find the pages in the cache.
                    if first + i == 0
                        && let Some(next) = a.pages.get(p + 1)
                    {
                        fetch(next);
                    }
                    let (page, to) = (page.as_ptr(), scores.add(i * stride + p * PAGE));
                    match n {
                        12 => K::score::<12, 2>(page, a, vectors, to, stride),
                        6 if K::TILE >= 12 => K::score::<6, 2>(page, a, vectors, to, stride),
                        6 => K::score::<6, 1>(page, a, vectors, to, stride),
                        4 if K::TILE >= 12 => K::score::<4, 2>(page, a, vectors, to, stride),
                        4 => K::score::<4, 1>(page, a, vectors, to, stride),
                        3 => K::score::<3, 2>(page, a, vectors, to, stride),
                        2 => K::score::<2, 2>(page, a, vectors, to, stride),
                        _ => K::score::<1, 2>(page, a, vectors, to, stride),
                    }
                }
                i += n;
            }
            for i in 0..count {
                let row = scores.add(i * stride);
                let (start, limit) = (queries.starts[i], queries.limits[i]);
                if let Some(cap) = a.softcap {
                    let row = std::slice::from_raw_parts_mut(row.add(start), limit - start);
                    rows::softcap::<K::V>(row, cap);
                }
                let sink = a.sinks.map(|sinks| sinks[(first + i) % a.heads]);
                queries.inverse[i] = 1.0 / soften::<K::V>(row, start, limit, sink);
            }
            mix_all::<K>(a, &queries, scores, stride, out);
        }
    }
}

#[inline(always)]
fn fetch(page: &[u16]) {
    for line in page.chunks(CACHE_LINE / size_of::<u16>()) {
        prefetch(line.as_ptr().cast());
    }
}

/// Writes the scaled scores of `N` queries with the positions of a page, `B` blocks of 16 at a
/// time.
///
/// # Safety
/// As [`Lanes`]; `vectors` has `d * N` values, `to` has `N` rows of [`PAGE`]
/// values, `stride` apart.
#[inline(always)]
pub(super) unsafe fn score<V: Lanes, const N: usize, const B: usize>(
    page: *const u16,
    a: &Attention<'_>,
    vectors: *const f32,
    to: *mut f32,
    stride: usize,
) {
    let d = a.head_dim;
    // SAFETY: key cells lie in the page for blocks below PAGE / 16 and components
    // below `d`; the contract covers `vectors` and `to`.
    unsafe {
        for block in (0..PAGE / LANES).step_by(B) {
            let keys = page.add(key_cell(d, block * LANES, 0));
            let mut acc = [[V::splat(0.0); B]; N];
            for strip in (0..d).step_by(STRIP) {
                let vectors = vectors.add(strip * N);
                for i in 0..STRIP {
                    let mut k = [V::splat(0.0); B];
                    for b in 0..B {
                        k[b] = V::load_f16(keys.add((b * d + strip + i) * LANES));
                    }
                    for n in 0..N {
                        let x = V::splat(*vectors.add(n * STRIP + i));
                        for b in 0..B {
                            acc[n][b] = k[b].fma(x, acc[n][b]);
                        }
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
}

/// Replaces the scores from `start` to `limit` by `exp(score - max)` and returns the sum of these,
/// including the sink's.
///
/// # Safety
/// As [`Lanes`]; `row` has `limit > start` values.
#[inline(always)]
unsafe fn soften<V: Lanes>(row: *mut f32, start: usize, limit: usize, sink: Option<f32>) -> f32 {
    // Position `p` belongs to lane `p % 16`. Lanes before `start` and from `limit` on are masked
    // with -inf.
    let first = start / LANES * LANES;
    let whole = limit / LANES * LANES;
    let rest = limit - whole;
    // SAFETY: accesses stay below `limit`.
    unsafe {
        for p in first..start {
            *row.add(p) = f32::NEG_INFINITY;
        }
        let mut top = V::splat(f32::NEG_INFINITY);
        for p in (first..whole).step_by(LANES) {
            top = V::load(row.add(p)).max(top);
        }
        let tail = V::load_partial(row.add(whole), rest, f32::NEG_INFINITY);
        let mut highest = sink.unwrap_or(f32::NEG_INFINITY);
        for x in tail.max(top).to_array() {
            highest = if x > highest { x } else { highest };
        }
        let top = V::splat(highest);
        let mut sum = V::splat(0.0);
        for p in (first..whole).step_by(LANES) {
            let e = exp(V::load(row.add(p)).sub(top));
            e.store(row.add(p));
            sum = sum.add(e);
        }
        if rest > 0 {
            // Lanes beyond the limit are exp(-inf) = +0.
            let e = exp(tail.sub(top));
            e.store_partial(row.add(whole), rest);
            sum = sum.add(e);
        }
        match sink {
            Some(sink) => sum.fold() + exp(V::splat(sink).sub(top)).to_array()[0],
            None => sum.fold(),
        }
    }
}

/// Adds the values of `positions` times the weights of `N` queries to
/// `sums[query][register][lane]`, for `C` registers of components starting at `column`.
///
/// # Safety
/// As [`Lanes`]. The pages cover the positions; heads have the components; `weights` has `N` rows,
/// `stride` apart, that cover the positions; `sums` has room for all sums.
#[inline(always)]
pub(super) unsafe fn mix<V: Lanes, const N: usize, const C: usize>(
    a: &Attention<'_>,
    column: usize,
    positions: Range<usize>,
    weights: *const f32,
    stride: usize,
    sums: *mut f32,
) {
    let d = a.head_dim;
    // SAFETY: by the contract.
    unsafe {
        let mut acc = [[V::splat(0.0); C]; N];
        for n in 0..N {
            for c in 0..C {
                acc[n][c] = V::load(sums.add((n * C + c) * LANES));
            }
        }
        let before = positions.start / PAGE;
        let mut start = before * PAGE;
        for page in &a.pages[before..] {
            if start >= positions.end {
                break;
            }
            let values = page.as_ptr().add(value_cell(d, 0, column));
            let slots = positions.start.saturating_sub(start)..PAGE.min(positions.end - start);
            for slot in slots {
                let mut v = [V::splat(0.0); C];
                for c in 0..C {
                    v[c] = V::load_f16(values.add(slot * d + c * LANES));
                }
                for n in 0..N {
                    let w = V::splat(*weights.add(n * stride + start + slot));
                    for c in 0..C {
                        acc[n][c] = v[c].fma(w, acc[n][c]);
                    }
                }
            }
            start += PAGE;
        }
        for n in 0..N {
            for c in 0..C {
                acc[n][c].store(sums.add((n * C + c) * LANES));
            }
        }
    }
}

/// Accumulators of [`Inner::mix`].
#[repr(align(64))]
struct Sums([f32; MAX_SUMS * LANES]);

/// Writes the weighted means of the values for all queries of a tile to `out`.
///
/// # Safety
/// As [`attend`]; `weights` has `queries.count` rows, `stride` apart.
#[inline(always)]
unsafe fn mix_all<K: Inner>(
    a: &Attention<'_>,
    queries: &Queries,
    weights: *const f32,
    stride: usize,
    out: &mut TileMut<'_>,
) {
    let d = a.head_dim;
    let mut sums = Sums([0.0; MAX_SUMS * LANES]);
    let mut done = 0;
    while done < d {
        // If `d` is not a multiple of 16, the last register overlaps the one before. Both write
        // the same values, since a component does not depend on its neighbours.
        let wide = K::CHUNKS == 4 && d - done >= 4 * LANES;
        let column = if wide {
            done
        } else {
            done.min(d.saturating_sub(LANES))
        };
        let columns = if wide { 4 * LANES } else { LANES.min(d) };
        let mut i = 0;
        while i < queries.count {
            let n = match queries.count - i {
                6.. => 6,
                left => left.min(3),
            };
            // Positions that all `n` queries attend to. Empty if the last query's window starts
            // after the first query's limit, and for heads that do not fill a register.
            let limit = queries.limits[i];
            let start = match d < LANES {
                true => limit,
                false => queries.starts[i + n - 1].min(limit),
            };
            let common = start..limit;
            for j in 0..n {
                let sums = &mut sums.0[j * columns..][..columns];
                sums.fill(0.0);
                // SAFETY: `weights` has the query's positions.
                unsafe {
                    let weights = weights.add((i + j) * stride);
                    mix_some::<K::V>(
                        a,
                        queries.starts[i + j]..common.start,
                        column,
                        weights,
                        sums,
                    );
                }
            }
            // SAFETY: each kernel takes the `n` queries starting at `i`, and components
            // that a head has.
            unsafe {
                let weights = weights.add(i * stride);
                let (range, to) = (common.clone(), sums.0.as_mut_ptr());
                match (n, wide) {
                    _ if d < LANES => {}
                    (6, true) => K::mix::<6, 4>(a, column, range, weights, stride, to),
                    (3, true) => K::mix::<3, 4>(a, column, range, weights, stride, to),
                    (2, true) => K::mix::<2, 4>(a, column, range, weights, stride, to),
                    (_, true) => K::mix::<1, 4>(a, column, range, weights, stride, to),
                    (6, false) => K::mix::<6, 1>(a, column, range, weights, stride, to),
                    (3, false) => K::mix::<3, 1>(a, column, range, weights, stride, to),
                    (2, false) => K::mix::<2, 1>(a, column, range, weights, stride, to),
                    (_, false) => K::mix::<1, 1>(a, column, range, weights, stride, to),
                }
                for j in 0..n {
                    let (query, limit) = (queries.first + i + j, queries.limits[i + j]);
                    let sums = &mut sums.0[j * columns..][..columns];
                    // Positions that this query attends to and the first query does not.
                    let weights = weights.add(j * stride);
                    let after = common.end.max(queries.starts[i + j])..limit;
                    mix_some::<K::V>(a, after, column, weights, sums);
                    let at = query % a.heads * d + column;
                    let target = &mut out.row_mut(query / a.heads)[at..at + columns];
                    for (x, sum) in target.iter_mut().zip(sums) {
                        *x = *sum * queries.inverse[i + j];
                    }
                }
            }
            i += n;
        }
        done = column + columns;
    }
}

/// Adds the values of `positions`, starting at component `column`, times a query's weights.
///
/// # Safety
/// As [`Lanes`]; `weights` and the pages cover the positions.
#[inline(always)]
unsafe fn mix_some<V: Lanes>(
    a: &Attention<'_>,
    positions: Range<usize>,
    column: usize,
    weights: *const f32,
    sums: &mut [f32],
) {
    for position in positions {
        let start = value_cell(a.head_dim, position % PAGE, column);
        let values = &a.pages[position / PAGE][start..start + sums.len()];
        // SAFETY: by the contract.
        unsafe { mix_one::<V>(values, *weights.add(position), sums) };
    }
}

/// Adds the values of one position times a weight.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
unsafe fn mix_one<V: Lanes>(values: &[u16], weight: f32, sums: &mut [f32]) {
    let values = values.chunks(LANES);
    for (sums, values) in sums.chunks_mut(LANES).zip(values) {
        if sums.len() == LANES && values.len() == LANES {
            // SAFETY: both have sixteen values; the caller ensures the ISA.
            unsafe {
                let sum = V::load(sums.as_ptr());
                let v = V::load_f16(values.as_ptr());
                v.fma(V::splat(weight), sum).store(sums.as_mut_ptr());
            }
        } else {
            for (sum, v) in sums.iter_mut().zip(values) {
                *sum = f16_to_f32(*v).mul_add(weight, *sum);
            }
        }
    }
}
