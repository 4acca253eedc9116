//! Kernels for one row at a time: normalisation, quantisation, the gate of the feed-forward
//! block, rotation, rounding. Most are generic over [`Lanes`]; specs/canonical-arithmetic.md
//! defines their results.

use super::act::{Act, BlockMeta};
use super::lanes::{LANES, Lanes, ROUND_MAGIC, fold};
use super::math::{sigmoid, silu};
use super::rope::RopeRow;
use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::BLOCK;
use hearthnet_files::floats::{f16_to_f32, f32_to_f16, round_to_bf16};
use hearthnet_files::spec::{Activation, RopeKind};

/// A block of activations whose largest magnitude is below this is quantised to zeros.
pub(super) const QUANT_FLOOR: f32 = 1e-30;

#[inline(always)]
pub(super) fn round_one(x: f32, dtype: BoundaryDtype) -> f32 {
    match dtype {
        BoundaryDtype::F32 => x,
        BoundaryDtype::F16 => f16_to_f32(f32_to_f16(x)),
        BoundaryDtype::Bf16 => round_to_bf16(x),
    }
}

/// `y = (x * s) * w`, `s = 1 / sqrt(sum(x²) / n + eps)`; `y` may be `x`.
///
/// # Safety
/// As [`Lanes`]; `x` and `y` have `w.len()` values.
#[inline(always)]
unsafe fn rms_norm<V: Lanes>(x: *const f32, w: &[f32], eps: f32, y: *mut f32) {
    let n = w.len();
    let whole = n / LANES * LANES;
    let rest = n - whole;
    // SAFETY: every access is at `i .. i + 16` with `i + 16 <= n`, or partial with
    // exactly the `rest` values left; each sixteen values are read before they are written.
    unsafe {
        let mut squares = V::splat(0.0);
        for i in (0..whole).step_by(LANES) {
            let v = V::load(x.add(i));
            squares = v.fma(v, squares);
        }
        if rest > 0 {
            let v = V::load_partial(x.add(whole), rest, 0.0);
            squares = v.fma(v, squares);
        }
        let s = V::splat(1.0 / (squares.fold() / n as f32 + eps).sqrt());
        for i in (0..whole).step_by(LANES) {
            let v = V::load(x.add(i)).mul(s).mul(V::load(w.as_ptr().add(i)));
            v.store(y.add(i));
        }
        if rest > 0 {
            let v = V::load_partial(x.add(whole), rest, 0.0).mul(s);
            let v = v.mul(V::load_partial(w.as_ptr().add(whole), rest, 0.0));
            v.store_partial(y.add(whole), rest);
        }
    }
}

/// [`rms_norm`] of every row of `x`, in place.
///
/// # Safety
/// As [`Lanes`]; `x` is whole rows of `w.len()` values.
#[inline(always)]
pub(super) unsafe fn rms_norm_in_place<V: Lanes>(x: &mut [f32], w: &[f32], eps: f32) {
    for x in x.chunks_exact_mut(w.len()) {
        let x = x.as_mut_ptr();
        // SAFETY: `x` has a row; the caller ensures the ISA.
        unsafe { rms_norm::<V>(x, w, eps, x) };
    }
}

/// LayerNorm of every row of `x`, in place: `x = (x - mean) * s * w + b`,
/// `s = 1 / sqrt(variance + eps)`.
///
/// # Safety
/// As [`Lanes`]; `x` is whole rows of `w.len()` values, and `b` has as many.
#[inline(always)]
pub(super) unsafe fn layer_norm_in_place<V: Lanes>(x: &mut [f32], w: &[f32], b: &[f32], eps: f32) {
    let n = w.len();
    for row in x.chunks_exact_mut(n) {
        // SAFETY: each chunk has at most sixteen values, and its length is passed; those of `w` and
        // `b` at its place are as many.
        unsafe {
            let mut sum = V::splat(0.0);
            for chunk in row.chunks(LANES) {
                sum = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0).add(sum);
            }
            let mean = V::splat(sum.fold() / n as f32);
            let mut squares = V::splat(0.0);
            for chunk in row.chunks_mut(LANES) {
                let d = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0).sub(mean);
                d.store_partial(chunk.as_mut_ptr(), chunk.len());
                let d = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0);
                squares = d.fma(d, squares);
            }
            let s = V::splat(1.0 / (squares.fold() / n as f32 + eps).sqrt());
            let weights = w.chunks(LANES).zip(b.chunks(LANES));
            for (chunk, (w, b)) in row.chunks_mut(LANES).zip(weights) {
                let d = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0).mul(s);
                let w = V::load_partial(w.as_ptr(), chunk.len(), 0.0);
                let b = V::load_partial(b.as_ptr(), chunk.len(), 0.0);
                d.fma(w, b).store_partial(chunk.as_mut_ptr(), chunk.len());
            }
        }
    }
}

/// Fills `act`, which has its shape, from the rows of `x`; `norm` has the weight and epsilon of a
/// normalisation before it.
///
/// # Safety
/// As [`Lanes`]; `x` has the rows of `act`, and the weight has its columns.
#[inline(always)]
pub(super) unsafe fn prepare<V: Lanes>(x: &[f32], norm: Option<(&[f32], f32)>, act: &mut Act) {
    let (cols, form) = (act.cols, act.form);
    for (row, x) in x.chunks_exact(cols).enumerate() {
        let kept = if form.plain { row * cols } else { 0 };
        let plain = &mut act.plain[kept..kept + cols];
        let values = match norm {
            Some((w, eps)) => {
                // SAFETY: `x`, `w` and `plain` have `cols` values; the caller ensures the ISA.
                unsafe { rms_norm::<V>(x.as_ptr(), w, eps, plain.as_mut_ptr()) };
                &*plain
            }
            None if form.plain => {
                plain.copy_from_slice(x);
                x
            }
            None => x,
        };
        if form.quantised {
            let quants = &mut act.quants[row * cols..][..cols];
            let meta = &mut act.meta[row * (cols / BLOCK)..][..cols / BLOCK];
            // SAFETY: the caller ensures the ISA.
            unsafe { quantise::<V>(values, quants, meta) };
        }
    }
}

/// Quantises a row in blocks of 32.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
unsafe fn quantise<V: Lanes>(x: &[f32], quants: &mut [i8], meta: &mut [BlockMeta]) {
    assert!(x.len() == meta.len() * BLOCK && quants.len() == x.len());
    for (b, meta) in meta.iter_mut().enumerate() {
        // SAFETY: block `b` lies within `x` and `quants`, by the lengths above.
        unsafe {
            let from = x.as_ptr().add(b * BLOCK);
            let to = quants.as_mut_ptr().add(b * BLOCK);
            let (lo, hi) = (V::load(from), V::load(from.add(LANES)));
            let m = f32::from_bits(lo.max_magnitude(hi).top_bits());
            if m >= QUANT_FLOOR && m.is_finite() {
                let inverse = V::splat(127.0 / m);
                let magic = V::splat(ROUND_MAGIC);
                let (lo, hi) = (lo.fma(inverse, magic), hi.fma(inverse, magic));
                lo.store_low_bytes(to);
                hi.store_low_bytes(to.add(LANES));
                // Integers of at most 13 bits, so the sums are exact in any order.
                let (low, high) = (lo.sub(magic).fold(), hi.sub(magic).fold());
                let (s, d) = (low + high, m / 127.0);
                *meta = BlockMeta {
                    d,
                    ds: d * s,
                    neg8s: -8 * s as i32,
                    neg128s: -128 * s as i32,
                    half_sums: (low as i32 & 0xffff) | (high as i32) << 16,
                };
            } else {
                // Zeros. If a value is not finite, the scale is NaN, which reaches every output
                // and is detected there.
                let d = if m.is_finite() { 0.0 } else { f32::NAN };
                *meta = BlockMeta {
                    d,
                    ds: d,
                    neg8s: 0,
                    neg128s: 0,
                    half_sums: 0,
                };
                std::ptr::write_bytes(to, 0, BLOCK);
            }
        }
    }
}

/// `g = activation(g) * u`; [`Activation::Clamped`] has a formula of its own.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn gate<V: Lanes>(activation: Activation, g: &mut [f32], u: &[f32]) {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        match activation {
            Activation::Silu => swiglu::<V>(g, u),
            Activation::Gelu => gated::<V, false>(g, u),
            Activation::GeluErf => {
                gelu_erf::<V>(g);
                g.iter_mut().zip(u).for_each(|(g, u)| *g *= u);
            }
            Activation::SquaredRelu => {
                squared_relu::<V>(g);
                g.iter_mut().zip(u).for_each(|(g, u)| *g *= u);
            }
            Activation::Clamped => gated::<V, true>(g, u),
        }
    }
}

/// `g = silu(g) * u`.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
unsafe fn swiglu<V: Lanes>(g: &mut [f32], u: &[f32]) {
    let (n, h) = (g.len().min(u.len()), g.as_mut_ptr());
    let (g, u) = (h.cast_const(), u.as_ptr());
    let whole = n / LANES * LANES;
    let rest = n - whole;
    // SAFETY: accesses stay below `n`; each sixteen values are read before they are written.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            silu(V::load(g.add(i)))
                .mul(V::load(u.add(i)))
                .store(h.add(i));
        }
        if rest > 0 {
            let (g, u) = (g.add(whole), u.add(whole));
            let v = silu(V::load_partial(g, rest, 0.0)).mul(V::load_partial(u, rest, 0.0));
            v.store_partial(h.add(whole), rest);
        }
    }
}

/// `g = gelu(g) * u`, or with `CLAMPED` `g = clamped(g, u)`: see [`super::math::clamped`].
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
unsafe fn gated<V: Lanes, const CLAMPED: bool>(g: &mut [f32], u: &[f32]) {
    for (g, u) in g.chunks_mut(LANES).zip(u.chunks(LANES)) {
        // SAFETY: both have as many values as the shorter one, at most sixteen.
        unsafe {
            let n = g.len().min(u.len());
            let up = V::load_partial(u.as_ptr(), n, 0.0);
            let gate = V::load_partial(g.as_ptr(), n, 0.0);
            let product = match CLAMPED {
                true => super::math::clamped(gate, up),
                false => super::math::gelu(gate).mul(up),
            };
            product.store_partial(g.as_mut_ptr(), n);
        }
    }
}

/// max(x, 0)^2 in place.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn squared_relu<V: Lanes>(x: &mut [f32]) {
    for chunk in x.chunks_mut(LANES) {
        // SAFETY: `chunk` has at most sixteen values, and its length is passed. This order of
        // operands propagates a NaN.
        unsafe {
            let v = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0);
            let v = V::splat(0.0).max(v);
            v.mul(v).store_partial(chunk.as_mut_ptr(), chunk.len());
        }
    }
}

/// `x = cap * tanh(x / cap)`.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn softcap<V: Lanes>(x: &mut [f32], cap: f32) {
    for chunk in x.chunks_mut(LANES) {
        // SAFETY: `chunk` has at most sixteen values, and its length is passed.
        unsafe {
            let v = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0);
            super::math::softcap(v, V::splat(cap)).store_partial(chunk.as_mut_ptr(), chunk.len());
        }
    }
}

/// `sum = fma(x, factor, sum)`, element by element.
#[inline(always)]
pub(super) fn add_scaled(sum: &mut [f32], x: &[f32], factor: f32) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = x.mul_add(factor, *sum);
    }
}

/// e^x in place.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn exp<V: Lanes>(x: &mut [f32]) {
    for chunk in x.chunks_mut(LANES) {
        // SAFETY: `chunk` has at most sixteen values, and its length is passed.
        unsafe {
            let v = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0);
            super::math::exp(v).store_partial(chunk.as_mut_ptr(), chunk.len());
        }
    }
}

/// silu(x) in place, or with `GATE` sigmoid(x).
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn activate<V: Lanes, const GATE: bool>(x: &mut [f32]) {
    for chunk in x.chunks_mut(LANES) {
        // SAFETY: `chunk` has at most sixteen values, and its length is passed.
        unsafe {
            let v = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0);
            let v = match GATE {
                true => sigmoid(v),
                false => silu(v),
            };
            v.store_partial(chunk.as_mut_ptr(), chunk.len());
        }
    }
}

/// GELU by the error function, in place.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn gelu_erf<V: Lanes>(x: &mut [f32]) {
    for chunk in x.chunks_mut(LANES) {
        // SAFETY: `chunk` has at most sixteen values, and its length is passed.
        unsafe {
            let v = V::load_partial(chunk.as_ptr(), chunk.len(), 0.0);
            super::math::gelu_erf(v).store_partial(chunk.as_mut_ptr(), chunk.len());
        }
    }
}

/// In each row of `width` values, `x = (x * s) * scale`, `s = 1 / sqrt(sum(x²) + eps)`.
#[inline(always)]
pub(super) fn l2_norm(x: &mut [f32], width: usize, eps: f32, scale: f32) {
    for row in x.chunks_exact_mut(width) {
        let mut lanes = [0.0; LANES];
        for chunk in row.chunks(LANES) {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = x.mul_add(*x, *lane);
            }
        }
        let s = 1.0 / (fold(lanes) + eps).sqrt();
        row.iter_mut().for_each(|x| *x = (*x * s) * scale);
    }
}

/// `x = round(x + y)`. Not generic over `Lanes`: the compiler vectorises the loop for the
/// instruction set that the caller enables.
#[inline(always)]
pub(super) fn add_round(x: &mut [f32], y: &[f32], dtype: BoundaryDtype) {
    assert_eq!(x.len(), y.len());
    match dtype {
        BoundaryDtype::F32 => x.iter_mut().zip(y).for_each(|(x, y)| *x += y),
        BoundaryDtype::F16 => {
            x.iter_mut()
                .zip(y)
                .for_each(|(x, y)| *x = round_one(*x + y, BoundaryDtype::F16));
        }
        BoundaryDtype::Bf16 => {
            x.iter_mut()
                .zip(y)
                .for_each(|(x, y)| *x = round_one(*x + y, BoundaryDtype::Bf16));
        }
    }
}

/// Sum of all values in the canonical order: lane `i % 16` adds up the values `i`, then lanes at
/// distance 8, 4, 2, 1 are added.
pub fn fold16(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for chunk in x.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    fold(lanes)
}

/// Returns true if no value is a NaN or an infinity.
#[inline(always)]
pub(super) fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    // No early exit, so that the loop vectorises; the result is nearly always true.
    x.iter()
        .fold(true, |all, v| all & (v.to_bits() & EXPONENT != EXPONENT))
}

/// Rotates every head of `x` (heads of `head_dim` values) in place.
#[inline(always)]
pub(super) fn rope(row: &RopeRow<'_>, x: &mut [f32], head_dim: usize) {
    let pairs = row.cos.len();
    for head in x.chunks_exact_mut(head_dim) {
        match row.kind {
            RopeKind::Interleaved => {
                let rotated = head[..2 * pairs].chunks_exact_mut(2);
                for ((pair, &c), &s) in rotated.zip(row.cos).zip(row.sin) {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a.mul_add(c, -(b * s));
                    pair[1] = a.mul_add(s, b * c);
                }
            }
            RopeKind::NeoX => {
                let (first, second) = head[..2 * pairs].split_at_mut(pairs);
                for (((a, b), &c), &s) in first.iter_mut().zip(second).zip(row.cos).zip(row.sin) {
                    let (x, y) = (*a, *b);
                    *a = x.mul_add(c, -(y * s));
                    *b = x.mul_add(s, y * c);
                }
            }
        }
    }
}
