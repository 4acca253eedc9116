//! Attention of a tile of query rows over the paged cache of one key/value head.

use std::ops::Range;

use hearthnet_files::floats::f16_to_f32;
use hearthnet_files::spec::CacheDtype;

use super::act::grow;
use super::kv::{Cells, F16, PAGE, Q8, fetch, fetch_scale, key_cell, value_cell};
use super::lanes::{LANES, Lanes};
use super::math::exp;
use super::rows;
use super::shared::TileMut;

/// Parameters of [`super::Kernels::attention`].
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Values in a head; a multiple of 8, with [`CacheDtype::Q8_0`] of 32.
    pub head_dim: usize,
    /// Number format of the pages.
    pub cache: CacheDtype,
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
    /// Query vectors of each group that is scored together, `[head_dim / STRIP][query][STRIP]`, so
    /// that the kernel needs one pointer for all of them.
    vectors: Vec<f32>,
    /// Weighted sums of values, `[query][component]`, components padded to whole registers.
    sums: Vec<f32>,
}

/// Adjacent components of a query in [`AttentionScratch::vectors`]; every `head_dim` is a multiple
/// of it.
const STRIP: usize = 8;
/// Queries that share a pass over the keys, and one over the values. A query is a pair of row and
/// head.
const MAX_QUERIES: usize = 12;
/// Positions whose values stay in the L1 cache while all queries and components use them.
const CHUNK: usize = 2 * PAGE;

/// Inner loops for one instruction set. They are not inlined: within the rest of the code, the
/// compiler would spill their accumulators.
pub(super) trait Inner {
    type V: Lanes;
    /// Whether the CPU has 32 registers of 16 values rather than 16 registers of 8.
    const WIDE: bool;

    /// [`score`] for this instruction set.
    ///
    /// # Safety
    /// The CPU has the instruction set, and the contract of that function holds.
    unsafe fn score<E: Cells, const N: usize, const B: usize>(
        page: *const u16,
        next: Option<*const u16>,
        a: &Attention<'_>,
        vectors: *const f32,
        to: *mut f32,
        stride: usize,
    );

    /// [`mix`] for this instruction set.
    ///
    /// # Safety
    /// The CPU has the instruction set, and the contract of that function holds.
    unsafe fn mix<E: Cells, const N: usize, const C: usize>(
        a: &Attention<'_>,
        column: usize,
        positions: Range<usize>,
        ahead: bool,
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

/// [`attend_cells`] for the format of the pages.
///
/// # Safety
/// As that function.
#[inline(always)]
pub(super) unsafe fn attend<K: Inner>(
    a: &Attention<'_>,
    q: &[f32],
    q_stride: usize,
    scratch: &mut AttentionScratch,
    out: &mut TileMut<'_>,
) {
    // SAFETY: all have the same contract.
    unsafe {
        match a.cache {
            CacheDtype::F16 => attend_cells::<K, F16>(a, q, q_stride, scratch, out),
            CacheDtype::Q8_0 => attend_cells::<K, Q8>(a, q, q_stride, scratch, out),
        }
    }
}

/// Computes attention for a tile of queries at a time.
///
/// # Safety
/// The CPU has the instruction set of `K`. `q` and `out` have the same rows, those of `q` `q_stride`
/// values apart, and `heads * head_dim` columns. All pages have the right length and cover the last
/// position.
#[inline(always)]
unsafe fn attend_cells<K: Inner, E: Cells>(
    a: &Attention<'_>,
    q: &[f32],
    q_stride: usize,
    scratch: &mut AttentionScratch,
    out: &mut TileMut<'_>,
) {
    let (d, total) = (a.head_dim, out.rows() * a.heads);
    for first in (0..total).step_by(MAX_QUERIES) {
        let count = MAX_QUERIES.min(total - first);
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
        for (i, n) in groups::<K>(count) {
            for j in 0..n {
                let (row, head) = ((first + i + j) / a.heads, (first + i + j) % a.heads);
                let vector = &q[row * q_stride + head * d..][..d];
                let strips = scratch.vectors[i * d..].chunks_exact_mut(n * STRIP);
                for (from, to) in vector.chunks_exact(STRIP).zip(strips) {
                    to[j * STRIP..][..STRIP].copy_from_slice(from);
                }
            }
        }
        // SAFETY: `scores` has `count` rows of `stride` values, pages `0..pages` exist, and each
        // group of `n` queries has `d * n` values in `vectors`.
        unsafe {
            for (p, page) in a.pages[..pages].iter().enumerate().skip(before) {
                for (i, n) in groups::<K>(count) {
                    let vectors = scratch.vectors.as_ptr().add(i * d);
                    let (page, to) = (page.as_ptr(), scores.add(i * stride + p * PAGE));
                    // Prefetch once: later groups and tiles find the pages in the cache.
                    let next = match a.pages.get(p + 1) {
                        Some(next) if first + i == 0 => Some(next.as_ptr()),
                        _ => None,
                    };
                    match n {
                        12 => K::score::<E, 12, 2>(page, next, a, vectors, to, stride),
                        6 if K::WIDE => K::score::<E, 6, 2>(page, next, a, vectors, to, stride),
                        6 => K::score::<E, 6, 1>(page, next, a, vectors, to, stride),
                        4 if K::WIDE => K::score::<E, 4, 2>(page, next, a, vectors, to, stride),
                        4 => K::score::<E, 4, 1>(page, next, a, vectors, to, stride),
                        3 => K::score::<E, 3, 2>(page, next, a, vectors, to, stride),
                        2 => K::score::<E, 2, 2>(page, next, a, vectors, to, stride),
                        _ => K::score::<E, 1, 2>(page, next, a, vectors, to, stride),
                    }
                }
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
            mix_all::<K, E>(a, &queries, scores, stride, &mut scratch.sums, out);
        }
    }
}

/// Groups of queries that are scored together: the first query of each, and the number.
#[inline(always)]
fn groups<K: Inner>(count: usize) -> impl Iterator<Item = (usize, usize)> {
    split(count, |left| match left {
        12.. if K::WIDE => 12,
        6.. => 6,
        4.. => 4,
        left => left,
    })
}

/// Splits `count` items into parts whose sizes `size` takes from the number of items left.
#[inline(always)]
fn split(count: usize, size: impl Fn(usize) -> usize) -> impl Iterator<Item = (usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let n = (done < count).then(|| size(count - done))?;
        done += n;
        Some((done - n, n))
    })
}

/// Writes the scaled scores of `N` queries with the positions of a page, `B` blocks of 16 at a
/// time. Prefetches the keys of the page `next`.
///
/// # Safety
/// As [`Lanes`]; `vectors` has `d * N` values, `to` has `N` rows of [`PAGE`]
/// values, `stride` apart.
#[inline(always)]
pub(super) unsafe fn score<V: Lanes, E: Cells, const N: usize, const B: usize>(
    page: *const u16,
    next: Option<*const u16>,
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
            let first = key_cell(d, block * LANES, 0);
            let mut acc = [[V::splat(0.0); B]; N];
            let mut scales = [V::splat(1.0); B];
            for strip in (0..d).step_by(STRIP) {
                let vectors = vectors.add(strip * N);
                for b in 0..B {
                    let slot = (block + b) * LANES;
                    if strip.is_multiple_of(CacheDtype::BLOCK) {
                        scales[b] = E::key_scales(page, d, slot, strip);
                    }
                    if let Some(next) = next {
                        fetch::<E>(next, first + (b * d + strip) * LANES, STRIP * LANES);
                        fetch_scale::<E>(
                            next,
                            d,
                            key_cell(d / CacheDtype::BLOCK, slot, strip / CacheDtype::BLOCK),
                        );
                    }
                }
                for i in 0..STRIP {
                    let mut k = [V::splat(0.0); B];
                    for b in 0..B {
                        k[b] = E::load(page, first + (b * d + strip + i) * LANES, scales[b]);
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

/// Adds the values of `positions` times the weights of `N` queries to their sums, for `C` registers
/// of components starting at `column`. With `ahead`, prefetches the values [`CHUNK`] positions
/// further on.
///
/// # Safety
/// As [`Lanes`]. The pages cover the positions; heads have the components; `weights` has `N` rows,
/// `stride` apart, that cover the positions; `sums` has `N` rows of `C` registers, as far apart as
/// heads are wide in whole registers.
#[inline(always)]
pub(super) unsafe fn mix<V: Lanes, E: Cells, const N: usize, const C: usize>(
    a: &Attention<'_>,
    column: usize,
    positions: Range<usize>,
    ahead: bool,
    weights: *const f32,
    stride: usize,
    sums: *mut f32,
) {
    let d = a.head_dim;
    let row = d.next_multiple_of(LANES);
    // SAFETY: by the contract.
    unsafe {
        let mut acc = [[V::splat(0.0); C]; N];
        for n in 0..N {
            for c in 0..C {
                acc[n][c] = V::load(sums.add(n * row + c * LANES));
            }
        }
        let mut position = positions.start;
        while position < positions.end {
            let page = position / PAGE;
            let slots = position % PAGE..PAGE.min(positions.end - page * PAGE);
            let values = a.pages[page].as_ptr();
            let next = a.pages.get(page + CHUNK / PAGE).filter(|_| ahead);
            let weights = weights.add(page * PAGE);
            for slot in slots {
                let first = value_cell(d, slot, column);
                if let Some(next) = next {
                    fetch::<E>(next.as_ptr(), first, C * LANES);
                    fetch_scale::<E>(next.as_ptr(), d, first / CacheDtype::BLOCK);
                }
                let mut scale = V::splat(1.0);
                for c in 0..C {
                    // With more registers than one, `column` is the first of a block.
                    if (c * LANES).is_multiple_of(CacheDtype::BLOCK) {
                        scale = E::value_scale(values, d, slot, column + c * LANES);
                    }
                    let v = E::load(values, first + c * LANES, scale);
                    for n in 0..N {
                        let w = V::splat(*weights.add(n * stride + slot));
                        acc[n][c] = v.fma(w, acc[n][c]);
                    }
                }
            }
            position = (page + 1) * PAGE;
        }
        for n in 0..N {
            for c in 0..C {
                acc[n][c].store(sums.add(n * row + c * LANES));
            }
        }
    }
}

/// Writes the weighted means of the values for all queries of a tile to `out`.
///
/// # Safety
/// As [`attend`]; `weights` has `queries.count` rows, `stride` apart.
#[inline(always)]
unsafe fn mix_all<K: Inner, E: Cells>(
    a: &Attention<'_>,
    queries: &Queries,
    weights: *const f32,
    stride: usize,
    sums: &mut Vec<f32>,
    out: &mut TileMut<'_>,
) {
    let d = a.head_dim;
    let row = d.next_multiple_of(LANES);
    grow(sums, queries.count * row);
    sums[..queries.count * row].fill(0.0);
    let groups = || {
        split(queries.count, |left| match left {
            6.. => 6,
            4.. => 4,
            left => left,
        })
    };
    // Positions that all queries of a group attend to. Empty if the last query's window starts
    // after the first query's limit, and for heads that do not fill a register.
    let common = |i: usize, n: usize| {
        let limit = queries.limits[i];
        let start = match d < LANES {
            true => limit,
            false => queries.starts[i + n - 1].min(limit),
        };
        start..limit
    };
    // Every query adds its positions in ascending order: those before, within and after the common
    // ones.
    for (i, n) in groups() {
        for j in i..i + n {
            let before = queries.starts[j]..common(i, n).start;
            // SAFETY: `weights` has the query's positions.
            unsafe {
                mix_some::<K::V, E>(a, before, weights.add(j * stride), &mut sums[j * row..]);
            }
        }
    }
    let (start, end) = (queries.starts[0], queries.limits[queries.count - 1]);
    for start in (start / CHUNK * CHUNK..end).step_by(CHUNK) {
        for (i, n) in groups() {
            let common = common(i, n);
            let range = common.start.max(start)..common.end.min(start + CHUNK);
            if range.is_empty() {
                continue;
            }
            // As many accumulators as registers allow.
            let most = match n {
                6 | 4 if K::WIDE => 4,
                6 | 4 => 1,
                1 if !K::WIDE => 4,
                _ if K::WIDE => 8,
                _ => 2,
            };
            // If `d` is not a multiple of 16, the last register overlaps the one before, and is taken
            // alone. Both get the same values, since a component does not depend on its neighbours.
            let partial = usize::from(d != row);
            let passes = split(row / LANES, |left| match left - partial {
                left if left >= most => most,
                4.. if K::WIDE => 4,
                _ => 1,
            });
            for (register, registers) in passes {
                let done = register * LANES;
                let column = done.min(d - registers * LANES);
                let ahead = queries.first + i == 0;
                let range = range.clone();
                // SAFETY: each kernel takes the `n` queries starting at `i`, and components that a
                // head has.
                unsafe {
                    let weights = weights.add(i * stride);
                    let to = sums.as_mut_ptr().add(i * row + done);
                    match (n, registers) {
                        (6, 4) => K::mix::<E, 6, 4>(a, column, range, ahead, weights, stride, to),
                        (6, _) => K::mix::<E, 6, 1>(a, column, range, ahead, weights, stride, to),
                        (4, 4) => K::mix::<E, 4, 4>(a, column, range, ahead, weights, stride, to),
                        (4, _) => K::mix::<E, 4, 1>(a, column, range, ahead, weights, stride, to),
                        (3, 8) => K::mix::<E, 3, 8>(a, column, range, ahead, weights, stride, to),
                        (3, 4) => K::mix::<E, 3, 4>(a, column, range, ahead, weights, stride, to),
                        (3, 2) => K::mix::<E, 3, 2>(a, column, range, ahead, weights, stride, to),
                        (3, _) => K::mix::<E, 3, 1>(a, column, range, ahead, weights, stride, to),
                        (2, 8) => K::mix::<E, 2, 8>(a, column, range, ahead, weights, stride, to),
                        (2, 4) => K::mix::<E, 2, 4>(a, column, range, ahead, weights, stride, to),
                        (2, 2) => K::mix::<E, 2, 2>(a, column, range, ahead, weights, stride, to),
                        (2, _) => K::mix::<E, 2, 1>(a, column, range, ahead, weights, stride, to),
                        (_, 8) => K::mix::<E, 1, 8>(a, column, range, ahead, weights, stride, to),
                        (_, 4) => K::mix::<E, 1, 4>(a, column, range, ahead, weights, stride, to),
                        (_, _) => K::mix::<E, 1, 1>(a, column, range, ahead, weights, stride, to),
                    }
                }
            }
        }
    }
    for (i, n) in groups() {
        for j in i..i + n {
            let after = common(i, n).end.max(queries.starts[j])..queries.limits[j];
            let sums = &mut sums[j * row..][..row];
            // SAFETY: `weights` has the query's positions.
            unsafe { mix_some::<K::V, E>(a, after, weights.add(j * stride), sums) };
            let query = queries.first + j;
            let at = query % a.heads * d;
            let target = &mut out.row_mut(query / a.heads)[at..at + d];
            for (from, column) in registers(d) {
                let target = &mut target[column..][..LANES.min(d)];
                for (x, sum) in target.iter_mut().zip(&sums[from..]) {
                    *x = *sum * queries.inverse[j];
                }
            }
        }
    }
}

/// First sum and first component of each register of a head.
#[inline(always)]
fn registers(d: usize) -> impl Iterator<Item = (usize, usize)> {
    let firsts = (0..d).step_by(LANES);
    firsts.map(move |first| (first, first.min(d.saturating_sub(LANES))))
}

/// Adds the values of `positions` times a query's weights.
///
/// # Safety
/// As [`Lanes`]; `weights` and the pages cover the positions.
#[inline(always)]
unsafe fn mix_some<V: Lanes, E: Cells>(
    a: &Attention<'_>,
    positions: Range<usize>,
    weights: *const f32,
    sums: &mut [f32],
) {
    let d = a.head_dim;
    for position in positions {
        let (page, slot) = (a.pages[position / PAGE], position % PAGE);
        for (first, column) in registers(d) {
            let sums = &mut sums[first..first + LANES.min(d)];
            let cell = value_cell(d, slot, column);
            // SAFETY: the page has the cells of the slot; `sums` has sixteen values unless the head
            // has fewer.
            unsafe {
                let weight = *weights.add(position);
                if d >= LANES {
                    let scale = E::value_scale(page.as_ptr(), d, slot, column);
                    let v: V = E::load(page.as_ptr(), cell, scale);
                    v.fma(V::splat(weight), V::load(sums.as_ptr()))
                        .store(sums.as_mut_ptr());
                } else {
                    // Only heads of 8 values, which no other format has.
                    for (sum, v) in sums.iter_mut().zip(&page[cell..]) {
                        *sum = f16_to_f32(*v).mul_add(weight, *sum);
                    }
                }
            }
        }
    }
}
