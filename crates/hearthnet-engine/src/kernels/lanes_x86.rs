//! [`Lanes`] in two AVX2 registers and in one AVX-512 register.

use std::arch::x86_64::*;

use super::lanes::{LANES, Lanes};

/// Needs AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

/// Needs AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

/// Sum of eight lanes at distance 4, 2, 1; the caller has added distance 8.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
unsafe fn fold8(x: __m256) -> f32 {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// Eight lanes of [`Lanes::max_magnitude`].
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn max_magnitude8(x: __m256, y: __m256) -> __m256 {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        let abs = _mm256_set1_epi32(0x7fff_ffff);
        let x = _mm256_and_si256(_mm256_castps_si256(x), abs);
        let y = _mm256_and_si256(_mm256_castps_si256(y), abs);
        _mm256_castsi256_ps(_mm256_max_epu32(x, y))
    }
}

/// Eight lanes of [`Lanes::exp2_of_rounded`].
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn exp2_of_rounded8(x: __m256) -> __m256 {
    // SAFETY: the caller ensures the ISA.
    unsafe {
        let biased = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
}

/// Defines operations that are one instruction per register.
macro_rules! each_register {
    ($registers:tt $($name:ident($($operand:ident),*) = $instruction:ident;)*) => {
        $(each_register!(@one $registers $name ($($operand),*) $instruction);)*
    };
    (@one (0) $name:ident ($($operand:ident),*) $instruction:ident) => {
        #[inline(always)]
        unsafe fn $name(self, $($operand: Self),*) -> Self {
            // SAFETY: the caller ensures the ISA.
            unsafe { Self($instruction(self.0, $($operand.0),*)) }
        }
    };
    (@one (0, 1) $name:ident ($($operand:ident),*) $instruction:ident) => {
        #[inline(always)]
        unsafe fn $name(self, $($operand: Self),*) -> Self {
            // SAFETY: the caller ensures the ISA.
            unsafe {
                Self($instruction(self.0, $($operand.0),*), $instruction(self.1, $($operand.1),*))
            }
        }
    };
}

// By the contract of `Lanes`, callers ensure the instruction set and sixteen valid elements behind
// each pointer.
impl Lanes for Avx2 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            let widen = |p: *const u16| {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            };
            Self(widen(p), widen(p.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            let (lo, hi) = (
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            );
            _mm_storeu_si128(p.cast(), lo);
            _mm_storeu_si128(p.add(8).cast(), hi);
        }
    }
    #[inline(always)]
    unsafe fn round_f16(self) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)),
                _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1)),
            )
        }
    }
    // MAXPS and MINPS return the second operand for a NaN and for two zeros, as the trait
    // requires.
    each_register! {
        (0, 1)
        add(b) = _mm256_add_ps;
        sub(b) = _mm256_sub_ps;
        mul(b) = _mm256_mul_ps;
        div(b) = _mm256_div_ps;
        fma(b, c) = _mm256_fmadd_ps;
        max(b) = _mm256_max_ps;
        min(b) = _mm256_min_ps;
        max_magnitude(b) = max_magnitude8;
        exp2_of_rounded() = exp2_of_rounded8;
    }
    #[inline(always)]
    unsafe fn zero_where_less(self, bound: Self, value: Self) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            Self(
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0), value.0),
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.1, bound.1), value.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn top_bits(self) -> u32 {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            let x = _mm256_max_epu32(_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            let x = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x));
            _mm_cvtsi128_si32(x).cast_unsigned()
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut i8) {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            let low = _mm256_set1_epi32(0xff);
            let lo = _mm256_and_si256(_mm256_castps_si256(self.0), low);
            let hi = _mm256_and_si256(_mm256_castps_si256(self.1), low);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(lo, hi));
            let (a, b) = (
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(p.cast(), _mm_packus_epi16(a, b));
        }
    }
    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        // SAFETY: the caller ensures the ISA.
        unsafe { fold8(_mm256_add_ps(self.0, self.1)) }
    }
}

/// Mask of the first `n <= 16` lanes.
#[inline(always)]
fn first(n: usize) -> __mmask16 {
    ((1u32 << n.min(LANES)) - 1) as __mmask16
}

impl Lanes for Avx512 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe { Self(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            let h = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm256_storeu_si256(p.cast(), h);
        }
    }
    #[inline(always)]
    unsafe fn round_f16(self) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            Self(_mm512_cvtph_ps(
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            ))
        }
    }
    each_register! {
        (0)
        add(b) = _mm512_add_ps;
        sub(b) = _mm512_sub_ps;
        mul(b) = _mm512_mul_ps;
        div(b) = _mm512_div_ps;
        fma(b, c) = _mm512_fmadd_ps;
        max(b) = _mm512_max_ps;
        min(b) = _mm512_min_ps;
    }
    #[inline(always)]
    unsafe fn zero_where_less(self, bound: Self, value: Self) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Self(_mm512_maskz_mov_ps(!less, value.0))
        }
    }
    #[inline(always)]
    unsafe fn max_magnitude(self, b: Self) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            let x = _mm512_castps_si512(_mm512_abs_ps(self.0));
            let y = _mm512_castps_si512(_mm512_abs_ps(b.0));
            Self(_mm512_castsi512_ps(_mm512_max_epu32(x, y)))
        }
    }
    #[inline(always)]
    unsafe fn top_bits(self) -> u32 {
        // SAFETY: the caller ensures the ISA.
        unsafe { _mm512_reduce_max_epu32(_mm512_castps_si512(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_of_rounded(self) -> Self {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_castps_si512(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut i8) {
        // SAFETY: the caller ensures the ISA, and sixteen elements at `p`.
        unsafe {
            _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(self.0)));
        }
    }
    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        // SAFETY: the caller ensures the ISA.
        unsafe {
            let (lo, hi) = (
                _mm512_castps512_ps256(self.0),
                _mm512_extractf32x8_ps::<1>(self.0),
            );
            fold8(_mm256_add_ps(lo, hi))
        }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize, fill: f32) -> Self {
        // SAFETY: masked lanes are not read.
        unsafe { Self(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(n), p)) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize) {
        // SAFETY: masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(p, first(n), self.0) }
    }
}
