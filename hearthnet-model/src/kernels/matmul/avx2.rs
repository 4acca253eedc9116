//! AVX2 inner kernels: a panel is two registers of eight rows.
//!
//! Q4: `vpmaddubsw` of weights (0 to 15) and activations (at most 127 in magnitude)
//! adds two products of at most 1905; the eight groups of a block sum to at most
//! 30480, which a 16-bit lane holds, so that one `vpmaddwd` per block suffices.
//!
//! Q8: the magnitude of the weight (at most 128) times the activation with the
//! weight's sign; two products are at most 32512, then widened at once.

use std::arch::x86_64::*;

use super::super::act::BlockMeta;
use super::super::lanes_x86;
use super::super::pack::{BLOCK, WeightType, quants_at};
use super::{ActRow, LANES, PanelDot, fetch_weights, float};

/// Weights of the type numbered as in [`WeightType::ALL`].
pub(in super::super) struct Avx2<const TYPE: usize>;

impl<const TYPE: usize> PanelDot for Avx2<TYPE> {
    const PANELS: usize = 1;
    const ROWS: usize = 4;
    const TOGETHER_FROM: usize = usize::MAX;

    #[inline(always)]
    unsafe fn dot<const NP: usize, const NT: usize>(
        panels: [*const u8; NP],
        records: usize,
        rows: [ActRow; NT],
        ahead: usize,
        sums: *mut f32,
    ) {
        // SAFETY: as the caller.
        unsafe {
            for (p, panel) in panels.into_iter().enumerate() {
                let sums = sums.add(p * NT * LANES);
                match const { WeightType::ALL[TYPE] } {
                    WeightType::F32 => plain::<false, NT>(panel, records, rows, ahead, sums),
                    WeightType::F16 => plain::<true, NT>(panel, records, rows, ahead, sums),
                    _ => quantised::<TYPE, NT>(panel, records, rows, ahead, sums),
                }
            }
        }
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain<const HALF: bool, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    // SAFETY: as the caller.
    unsafe { float::dot::<lanes_x86::Avx2, HALF, 1, NT>([panel], records, rows, ahead, sums) }
}

#[inline(always)]
unsafe fn quantised<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    // Each half fetches every other line of the next panel, so that memory is never
    // idle while the other half works from the cache.
    let ahead = if ahead > 0 {
        records * const { WeightType::ALL[TYPE] }.record()
    } else {
        0
    };
    // SAFETY: as the caller; the halves share the records of the panel and have
    // eight sums of every sixteen each.
    unsafe {
        half_panel::<TYPE, NT>(panel, 0, records, &rows, ahead, sums);
        half_panel::<TYPE, NT>(panel, 1, records, &rows, ahead, sums.add(8));
    }
}

/// Eight rows of a panel: as many as leave registers for the weights of a block.
/// Not inlined: in the driver's context the accumulators would be spilled.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_panel<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    h: usize,
    records: usize,
    rows: &[ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let ty = const { WeightType::ALL[TYPE] };
    // SAFETY: record and block `b` exist for `b < records`; a record has its fields
    // where `pack` puts them, eight rows at 16 bytes of scales, 32 of quants; room
    // for all sums.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); NT];
        for b in 0..records {
            let record = panel.add(b * ty.record());
            if ahead > 0 {
                for line in (64 * h..ty.record()).step_by(128) {
                    fetch_weights::<NT>(record.wrapping_add(ahead + line));
                }
            }
            let quants = record.add(quants_at(ty) + 32 * h);
            let dots = if ty == WeightType::Q8_0 {
                dots_8::<NT>(quants, rows, b)
            } else {
                dots_4::<NT>(quants, rows, b)
            };
            let scales = half(record.add(16 * h));
            for t in 0..NT {
                let meta: &BlockMeta = &*rows[t].meta.add(b);
                let mut dot = dots[t];
                if ty == WeightType::Q4_0 {
                    dot = _mm256_add_epi32(dot, _mm256_set1_epi32(meta.neg8s));
                }
                if ty == WeightType::Q4_1 {
                    let minima = half(record.add(2 * LANES + 16 * h));
                    acc[t] = _mm256_fmadd_ps(minima, _mm256_set1_ps(meta.ds), acc[t]);
                }
                let scale = _mm256_mul_ps(scales, _mm256_set1_ps(meta.d));
                acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, acc[t]);
            }
        }
        for t in 0..NT {
            _mm256_storeu_ps(sums.add(t * LANES), acc[t]);
        }
    }
}

/// Integer dot products of a block of 4-bit weights, as unsigned, with `NT` rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_4<const NT: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
) -> [__m256i; NT] {
    // SAFETY: the caller vouches for the quants of eight rows and block `block`.
    unsafe {
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let mut weights = [low; BLOCK / 4];
        for i in 0..BLOCK / 8 {
            let bytes = _mm256_loadu_si256(quants.add(64 * i).cast());
            weights[i] = _mm256_and_si256(bytes, low);
            weights[i + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
        }
        let mut dots = [ones; NT];
        for t in 0..NT {
            let mut words = _mm256_setzero_si256();
            for g in 0..BLOCK / 4 {
                let x = _mm256_maddubs_epi16(weights[g], four(&rows[t], block, g));
                words = _mm256_add_epi16(words, x);
            }
            dots[t] = _mm256_madd_epi16(words, ones);
        }
        dots
    }
}

/// Integer dot products of a block of 8-bit weights with `NT` rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_8<const NT: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
) -> [__m256i; NT] {
    // SAFETY: the caller vouches for the quants of eight rows and block `block`.
    unsafe {
        let (ones, offset) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
        let mut dots = [_mm256_setzero_si256(); NT];
        for g in 0..BLOCK / 4 {
            let bytes = _mm256_loadu_si256(quants.add(64 * g).cast());
            let signed = _mm256_xor_si256(bytes, offset);
            let magnitude = _mm256_abs_epi8(signed);
            for t in 0..NT {
                let a = _mm256_sign_epi8(four(&rows[t], block, g), signed);
                let x = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, a), ones);
                dots[t] = _mm256_add_epi32(dots[t], x);
            }
        }
        dots
    }
}

/// Group `group` of a block of activations, in every 32-bit lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four(row: &ActRow, block: usize, group: usize) -> __m256i {
    // SAFETY: the caller vouches for the block.
    unsafe {
        let p = row.quants.add(block * BLOCK + 4 * group);
        _mm256_set1_epi32(p.cast::<i32>().read_unaligned())
    }
}

/// Eight binary16 values, widened.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half(p: *const u8) -> __m256 {
    // SAFETY: the caller vouches for 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}
