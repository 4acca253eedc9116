//! Vector of sixteen `f32` lanes, used by every floating-point kernel. [`Lanes`] is implemented
//! by a plain array (the portable path and the reference), by two AVX2 registers and by one
//! AVX-512 register. Each operation is a single IEEE operation per lane, so a kernel that is
//! generic over `Lanes` gives the same bits on all of them.

/// Number of lanes; also rows of a weight panel and positions of a key block.
pub const LANES: usize = 16;

/// 1.5 * 2^23: adding it to a value of at most 2^22 in magnitude rounds the value
/// to an integer, nearest even, and leaves that integer in the low bits.
pub(super) const ROUND_MAGIC: f32 = 12_582_912.0;

/// Defines methods of [`Lanes`], each by an expression.
macro_rules! methods {
    ($(
        $name:ident($($argument:ident $(: $type:ty)?),*) $(-> $result:ty)? = $value:expr;
    )*) => {
        $(
            #[inline(always)]
            #[allow(unused_unsafe)] // Plain Rust needs it for pointers only.
            unsafe fn $name($($argument $(: $type)?),*) $(-> $result)? {
                // SAFETY: the caller ensures the ISA, and sixteen elements behind each pointer.
                unsafe { $value }
            }
        )*
    };
}

/// Sixteen `f32` values and the operations on them.
///
/// # Safety
/// The CPU has the instruction set of the implementation; [`super::Kernels`] checks it. Pointers
/// of loads and stores have sixteen valid elements, without alignment.
pub(super) trait Lanes: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Sixteen binary16 values, widened (exact).
    unsafe fn load_f16(p: *const u16) -> Self;
    /// Sixteen bfloat16 values, widened (exact).
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// Sixteen integers, widened (exact).
    unsafe fn load_i8(p: *const i8) -> Self;
    /// Stores sixteen values rounded to binary16, ties to even.
    unsafe fn store_f16(self, p: *mut u16);
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Per lane `if self > b { self } else { b }`: with a NaN on either side, `b`.
    unsafe fn max(self, b: Self) -> Self;
    /// Per lane `if self < b { self } else { b }`: with a NaN on either side, `b`.
    unsafe fn min(self, b: Self) -> Self;
    /// Per lane `if self < bound { +0 } else { value }`.
    unsafe fn zero_where_less(self, bound: Self, value: Self) -> Self;
    /// Per lane the larger of the bit patterns of `|self|` and `|b|`, as integers:
    /// a NaN is larger than infinity, so it is never dropped.
    unsafe fn max_magnitude(self, b: Self) -> Self;
    /// The largest bit pattern of all lanes, as an integer.
    unsafe fn top_bits(self) -> u32;
    /// `2^n` where each lane is `ROUND_MAGIC + n`, `-126 <= n <= 127`.
    unsafe fn exp2_of_rounded(self) -> Self;
    /// Stores the low byte of each lane's bits: the integer after adding `ROUND_MAGIC`.
    unsafe fn store_low_bytes(self, p: *mut i8);
    /// Rounded to binary16 (nearest even) and widened again.
    #[inline(always)]
    unsafe fn round_f16(self) -> Self {
        let mut cells = [0u16; LANES];
        // SAFETY: `cells` has sixteen elements; the caller ensures the ISA.
        unsafe {
            self.store_f16(cells.as_mut_ptr());
            Self::load_f16(cells.as_ptr())
        }
    }
    /// The lanes as an array, lane 0 first.
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: `out` has sixteen elements; the caller ensures the ISA.
        unsafe { self.store(out.as_mut_ptr()) };
        out
    }
    /// Sum of all lanes in the canonical order: distance 8, 4, 2, 1.
    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        // SAFETY: the caller ensures the ISA.
        fold(unsafe { self.to_array() })
    }
    /// The first `n <= 16` values at `p`, the other lanes `fill`.
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize, fill: f32) -> Self {
        let mut lanes = [fill; LANES];
        // SAFETY: the caller ensures `n` values at `p`, and `n <= 16`.
        unsafe {
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n.min(LANES));
            Self::load(lanes.as_ptr())
        }
    }
    /// Stores the first `n <= 16` lanes.
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize) {
        // SAFETY: the caller ensures room for `n` values at `p`, and `n <= 16`.
        unsafe {
            let lanes = self.to_array();
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n.min(LANES));
        }
    }
}

/// Sum of sixteen lanes in the canonical order: distance 8, 4, 2, 1.
#[inline(always)]
pub(super) fn fold(mut l: [f32; LANES]) -> f32 {
    for distance in [8, 4, 2, 1] {
        for i in 0..distance {
            l[i] += l[i + distance];
        }
    }
    l[0]
}
