//! Exponential and functions derived from it, for sixteen lanes (specs/canonical-arithmetic.md,
//! section 5).

use super::lanes::{Lanes, ROUND_MAGIC};

const LN2_HIGH: f32 = f32::from_bits(0x3f31_7200); // 0x1.62e400p-1
const LN2_LOW: f32 = f32::from_bits(0x35bf_be8e); // 0x1.7f7d1cp-20
/// Coefficients, highest power first, of exp(r) = 1 + r + r²·P(r) for |r| <= ln 2 / 2; relative
/// error below 3.1e-9 before rounding.
const P: [f32; 5] = [
    f32::from_bits(0x3ab5_11e8), // 0x1.6a23d0p-10
    f32::from_bits(0x3c09_1d10), // 0x1.123a20p-7
    f32::from_bits(0x3d2a_ac79), // 0x1.5558f2p-5
    f32::from_bits(0x3e2a_aa49), // 0x1.555492p-3
    f32::from_bits(0x3eff_fffe), // 0x1.fffffcp-2
];
/// 2 * sqrt(2 / pi), and 0.044715 times that.
const GELU_SLOPE: f32 = f32::from_bits(0x3fcc_422a); // 0x1.988454p+0
const GELU_CUBE: f32 = f32::from_bits(0x3d92_2279); // 0x1.2444f2p-4
/// Coefficients, highest power first, of the tail of the normal distribution,
/// `Q(z) = exp(-z²/2) * k * T(k)` with `k = 1 / (1 + z/4)`, for z >= 0; relative error below 8.4e-8
/// before rounding.
const T: [f32; 9] = [
    f32::from_bits(0x3cda_51b7), // 0x1.b4a36ep-6
    f32::from_bits(0xbe21_2cb4), // -0x1.425968p-3
    f32::from_bits(0x3e9c_91ee), // 0x1.3923dcp-2
    f32::from_bits(0xbe5e_569c), // -0x1.bcad38p-3
    f32::from_bits(0x3e56_db0b), // 0x1.adb616p-3
    f32::from_bits(0x3cf0_aa17), // 0x1.e1542ep-6
    f32::from_bits(0x3dd6_6826), // 0x1.acd04cp-4
    f32::from_bits(0x3dc9_7a9c), // 0x1.92f538p-4
    f32::from_bits(0x3dcc_671c), // 0x1.98ce38p-4
];
/// 1.702, the factor of the gate inside the sigmoid of the clamped SwiGLU.
const CLAMPED_SLOPE: f32 = f32::from_bits(0x3fd9_db23); // 0x1.b3b646p+0
/// Upper limit of clamped gates, and limit of the magnitude of the values they multiply.
const CLAMPED_LIMIT: f32 = 7.0;
/// Below this, `exp` returns +0; above [`EXP_TOP`], exp(`EXP_TOP`). Between them the scale 2^n is
/// a normal number.
const EXP_BOTTOM: f32 = -87.0;
const EXP_TOP: f32 = 88.0;

/// e^x; +0 below -87, e^88 above 88, NaN for NaN.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        // This order of operands propagates a NaN.
        let c = V::splat(EXP_TOP).min(x);
        let magic = V::splat(ROUND_MAGIC);
        let rounded = c.fma(V::splat(std::f32::consts::LOG2_E), magic);
        let n = rounded.sub(magic);
        let r = n.fma(V::splat(-LN2_HIGH), c);
        let r = n.fma(V::splat(-LN2_LOW), r);
        let mut p = V::splat(P[0]);
        p = p.fma(r, V::splat(P[1]));
        p = p.fma(r, V::splat(P[2]));
        p = p.fma(r, V::splat(P[3]));
        p = p.fma(r, V::splat(P[4]));
        p = p.fma(r, V::splat(1.0));
        p = p.fma(r, V::splat(1.0));
        x.zero_where_less(V::splat(EXP_BOTTOM), p.mul(rounded.exp2_of_rounded()))
    }
}

/// g / (1 + exp(-g)).
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn silu<V: Lanes>(g: V) -> V {
    // SAFETY: the caller ensures the ISA. `-0.0 - g` negates
    // `g`; it differs from a sign flip for NaN only.
    unsafe { g.div(V::splat(1.0).add(exp(V::splat(-0.0).sub(g)))) }
}

/// 1 / (1 + exp(-g)).
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn sigmoid<V: Lanes>(g: V) -> V {
    // SAFETY: the caller ensures the ISA. As in `silu`, `-0.0 - g` negates.
    unsafe { V::splat(1.0).div(V::splat(1.0).add(exp(V::splat(-0.0).sub(g)))) }
}

/// (u + 1) * g / (1 + exp(-1.702 g)), with g clamped to at most 7 and u to -7..=7.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn clamped<V: Lanes>(g: V, u: V) -> V {
    // SAFETY: the caller ensures the ISA. The order of the
    // operands propagates a NaN.
    unsafe {
        let (one, limit) = (V::splat(1.0), V::splat(CLAMPED_LIMIT));
        let (g, u) = (limit.min(g), V::splat(-CLAMPED_LIMIT).max(limit.min(u)));
        let slope = g.mul(V::splat(CLAMPED_SLOPE));
        let gate = g.div(one.add(exp(V::splat(-0.0).sub(slope))));
        u.add(one).mul(gate)
    }
}

/// tanh(x) = 1 - 2 / (exp(2 x) + 1); absolute error at most 1e-7.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
unsafe fn tanh<V: Lanes>(x: V) -> V {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        let one = V::splat(1.0);
        one.sub(V::splat(2.0).div(exp(x.add(x)).add(one)))
    }
}

/// cap * tanh(x / cap).
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn softcap<V: Lanes>(x: V, cap: V) -> V {
    // SAFETY: the caller ensures the ISA.
    unsafe { tanh(x.div(cap)).mul(cap) }
}

/// Tanh approximation of GELU: g / 2 * (1 + tanh(u)) = g / (1 + exp(-2 u)) with
/// u = sqrt(2 / pi) * (g + 0.044715 g³).
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn gelu<V: Lanes>(g: V) -> V {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        let inner = g
            .mul(g)
            .fma(V::splat(GELU_CUBE), V::splat(GELU_SLOPE))
            .mul(g);
        g.div(V::splat(1.0).add(exp(V::splat(-0.0).sub(inner))))
    }
}

/// GELU by the error function: `max(g, 0) - z Q(z)` with `z = |g|`; absolute error at most 3e-7 for
/// |g| <= 4.
///
/// # Safety
/// See [`Lanes`].
#[inline(always)]
pub(super) unsafe fn gelu_erf<V: Lanes>(g: V) -> V {
    // SAFETY: the caller ensures the ISA. As in `silu`, `-0.0 - g` negates.
    unsafe {
        let (one, zero) = (V::splat(1.0), V::splat(-0.0));
        let z = g.max(zero.sub(g));
        let k = one.div(z.fma(V::splat(0.25), one));
        let mut t = V::splat(T[0]);
        t = t.fma(k, V::splat(T[1]));
        t = t.fma(k, V::splat(T[2]));
        t = t.fma(k, V::splat(T[3]));
        t = t.fma(k, V::splat(T[4]));
        t = t.fma(k, V::splat(T[5]));
        t = t.fma(k, V::splat(T[6]));
        t = t.fma(k, V::splat(T[7]));
        t = t.fma(k, V::splat(T[8]));
        let tail = t.mul(k).mul(exp(z.mul(V::splat(-0.5)).mul(z)));
        zero.sub(z).fma(tail, g.max(V::splat(0.0)))
    }
}
