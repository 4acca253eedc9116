//! [`Lanes`] in two AVX2 registers and in one AVX-512 register.

use std::arch::x86_64::*;

use super::super::lanes::{LANES, Lanes};

/// Needs AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(__m256, __m256);

/// Needs AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(__m512);

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

impl Lanes for Avx2 {
    // MAXPS and MINPS return the second operand for a NaN and for two zeros, as the trait
    // requires.
    methods! {
        splat(x: f32) -> Self = Self(_mm256_set1_ps(x), _mm256_set1_ps(x));
        load(p: *const f32) -> Self = Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
        store(self, p: *mut f32) = {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        };
        load_f16(p: *const u16) -> Self = Self(
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
        );
        load_bf16(p: *const u16) -> Self = {
            let widen = |p: *const u16| {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            };
            Self(widen(p), widen(p.add(8)))
        };
        load_i8(p: *const i8) -> Self = {
            let bytes = _mm_loadu_si128(p.cast());
            let widen = |bytes| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            Self(widen(bytes), widen(_mm_unpackhi_epi64(bytes, bytes)))
        };
        store_f16(self, p: *mut u16) = {
            let lo = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            let hi = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
            _mm_storeu_si128(p.cast(), lo);
            _mm_storeu_si128(p.add(8).cast(), hi);
        };
        round_f16(self) -> Self = Self(
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)),
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1)),
        );
        add(self, b: Self) -> Self = Self(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1));
        sub(self, b: Self) -> Self = Self(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1));
        mul(self, b: Self) -> Self = Self(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1));
        div(self, b: Self) -> Self = Self(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1));
        fma(self, b: Self, c: Self) -> Self = Self(
            _mm256_fmadd_ps(self.0, b.0, c.0),
            _mm256_fmadd_ps(self.1, b.1, c.1),
        );
        max(self, b: Self) -> Self = Self(_mm256_max_ps(self.0, b.0), _mm256_max_ps(self.1, b.1));
        min(self, b: Self) -> Self = Self(_mm256_min_ps(self.0, b.0), _mm256_min_ps(self.1, b.1));
        zero_where_less(self, bound: Self, value: Self) -> Self = Self(
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0), value.0),
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.1, bound.1), value.1),
        );
        max_magnitude(self, b: Self) -> Self
            = Self(max_magnitude8(self.0, b.0), max_magnitude8(self.1, b.1));
        top_bits(self) -> u32 = {
            let x = _mm256_max_epu32(_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            let x = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x));
            _mm_cvtsi128_si32(x).cast_unsigned()
        };
        exp2_of_rounded(self) -> Self = Self(exp2_of_rounded8(self.0), exp2_of_rounded8(self.1));
        store_low_bytes(self, p: *mut i8) = {
            let low = _mm256_set1_epi32(0xff);
            let lo = _mm256_and_si256(_mm256_castps_si256(self.0), low);
            let hi = _mm256_and_si256(_mm256_castps_si256(self.1), low);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(lo, hi));
            let a = _mm256_castsi256_si128(words);
            let b = _mm256_extracti128_si256::<1>(words);
            _mm_storeu_si128(p.cast(), _mm_packus_epi16(a, b));
        };
        fold(self) -> f32 = fold8(_mm256_add_ps(self.0, self.1));
    }
}

/// Mask of the first `n <= 16` lanes.
#[inline(always)]
fn first(n: usize) -> __mmask16 {
    ((1u32 << n.min(LANES)) - 1) as __mmask16
}

impl Lanes for Avx512 {
    // In partial loads and stores, masked lanes are not accessed.
    methods! {
        splat(x: f32) -> Self = Self(_mm512_set1_ps(x));
        load(p: *const f32) -> Self = Self(_mm512_loadu_ps(p));
        store(self, p: *mut f32) = _mm512_storeu_ps(p, self.0);
        load_f16(p: *const u16) -> Self = Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())));
        load_bf16(p: *const u16) -> Self = {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        };
        load_i8(p: *const i8) -> Self = {
            let bytes = _mm_loadu_si128(p.cast());
            Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
        };
        store_f16(self, p: *mut u16) = {
            let h = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm256_storeu_si256(p.cast(), h);
        };
        round_f16(self) -> Self
            = Self(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)));
        add(self, b: Self) -> Self = Self(_mm512_add_ps(self.0, b.0));
        sub(self, b: Self) -> Self = Self(_mm512_sub_ps(self.0, b.0));
        mul(self, b: Self) -> Self = Self(_mm512_mul_ps(self.0, b.0));
        div(self, b: Self) -> Self = Self(_mm512_div_ps(self.0, b.0));
        fma(self, b: Self, c: Self) -> Self = Self(_mm512_fmadd_ps(self.0, b.0, c.0));
        max(self, b: Self) -> Self = Self(_mm512_max_ps(self.0, b.0));
        min(self, b: Self) -> Self = Self(_mm512_min_ps(self.0, b.0));
        zero_where_less(self, bound: Self, value: Self) -> Self = {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Self(_mm512_maskz_mov_ps(!less, value.0))
        };
        max_magnitude(self, b: Self) -> Self = {
            let x = _mm512_castps_si512(_mm512_abs_ps(self.0));
            let y = _mm512_castps_si512(_mm512_abs_ps(b.0));
            Self(_mm512_castsi512_ps(_mm512_max_epu32(x, y)))
        };
        top_bits(self) -> u32 = _mm512_reduce_max_epu32(_mm512_castps_si512(self.0));
        exp2_of_rounded(self) -> Self = {
            let biased = _mm512_add_epi32(_mm512_castps_si512(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        };
        store_low_bytes(self, p: *mut i8)
            = _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(self.0)));
        fold(self) -> f32 = {
            let (lo, hi) = (_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            fold8(_mm256_add_ps(lo, hi))
        };
        load_partial(p: *const f32, n: usize, fill: f32) -> Self
            = Self(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(n), p));
        store_partial(self, p: *mut f32, n: usize) = _mm512_mask_storeu_ps(p, first(n), self.0);
    }
}
