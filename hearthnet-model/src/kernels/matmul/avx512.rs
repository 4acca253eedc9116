//! AVX-512 inner kernels: a panel is one register, VNNI's `vpdpbusd` multiplies
//! four unsigned weights of 16 rows with four signed activations.

use std::arch::x86_64::*;

use super::super::act::BlockMeta;
use super::super::lanes_x86;
use super::super::pack::{BLOCK, WeightType, quants_at};
use super::{ActRow, LANES, PanelDot, float, prefetch};

/// Weights of the type numbered as in [`WeightType::ALL`].
pub(in super::super) struct Avx512<const TYPE: usize>;

impl<const TYPE: usize> PanelDot for Avx512<TYPE> {
    const PANELS: usize = 2;
    const ROWS: usize = 4;
    const TOGETHER_FROM: usize = 5;

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
            match const { WeightType::ALL[TYPE] } {
                WeightType::F32 => plain::<false, NP, NT>(panels, records, rows, ahead, sums),
                WeightType::F16 => plain::<true, NP, NT>(panels, records, rows, ahead, sums),
                _ => quantised::<TYPE, NP, NT>(panels, records, rows, ahead, sums),
            }
        }
    }
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn plain<const HALF: bool, const NP: usize, const NT: usize>(
    panels: [*const u8; NP],
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    // SAFETY: as the caller.
    unsafe { float::dot::<lanes_x86::Avx512, HALF, NP, NT>(panels, records, rows, ahead, sums) }
}

/// Not inlined: in the driver's context the accumulators would be spilled.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn quantised<const TYPE: usize, const NP: usize, const NT: usize>(
    panels: [*const u8; NP],
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let ty = const { WeightType::ALL[TYPE] };
    // SAFETY: record and block `b` exist for `b < records`; a record has its fields
    // where `pack` puts them; room for all sums. A prefetch may point anywhere.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); NT]; NP];
        for b in 0..records {
            let mut weights = [[_mm512_setzero_si512(); BLOCK / 4]; NP];
            let mut scales = [_mm512_setzero_ps(); NP];
            let mut minima = [_mm512_setzero_ps(); NP];
            for p in 0..NP {
                let record = panels[p].add(b * ty.record());
                if ahead > 0 {
                    for line in (0..ty.record()).step_by(64) {
                        prefetch(record.wrapping_add(ahead + line));
                    }
                }
                weights[p] = unpack::<TYPE>(record.add(quants_at(ty)));
                scales[p] = half(record);
                if ty == WeightType::Q4_1 {
                    minima[p] = half(record.add(2 * LANES));
                }
            }
            for t in 0..NT {
                let quants = rows[t].quants.add(b * BLOCK);
                let meta: &BlockMeta = &*rows[t].meta.add(b);
                let start = match ty {
                    WeightType::Q4_0 => _mm512_set1_epi32(meta.neg8s),
                    WeightType::Q8_0 => _mm512_slli_epi32::<4>(_mm512_set1_epi32(meta.neg8s)),
                    _ => _mm512_setzero_si512(),
                };
                let mut dots = [start; NP];
                for g in 0..BLOCK / 4 {
                    let four = quants.add(4 * g).cast::<i32>().read_unaligned();
                    let four = _mm512_set1_epi32(four);
                    for p in 0..NP {
                        dots[p] = _mm512_dpbusd_epi32(dots[p], weights[p][g], four);
                    }
                }
                let (d, ds) = (_mm512_set1_ps(meta.d), _mm512_set1_ps(meta.ds));
                for p in 0..NP {
                    if ty == WeightType::Q4_1 {
                        acc[p][t] = _mm512_fmadd_ps(minima[p], ds, acc[p][t]);
                    }
                    let scale = _mm512_mul_ps(scales[p], d);
                    acc[p][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p]), scale, acc[p][t]);
                }
            }
        }
        for p in 0..NP {
            for t in 0..NT {
                _mm512_storeu_ps(sums.add((p * NT + t) * LANES), acc[p][t]);
            }
        }
    }
}

/// Sixteen binary16 values, widened.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn half(p: *const u8) -> __m512 {
    // SAFETY: the caller vouches for 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

/// The eight groups of a block as unsigned bytes (Q8_0: plus 128).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const TYPE: usize>(quants: *const u8) -> [__m512i; BLOCK / 4] {
    let low = _mm512_set1_epi8(15);
    let mut groups = [low; BLOCK / 4];
    // SAFETY: the caller vouches for the quants of a record.
    unsafe {
        if const { matches!(WeightType::ALL[TYPE], WeightType::Q8_0) } {
            for g in 0..BLOCK / 4 {
                groups[g] = _mm512_loadu_si512(quants.add(64 * g).cast());
            }
        } else {
            for i in 0..BLOCK / 8 {
                let run = _mm512_loadu_si512(quants.add(64 * i).cast());
                groups[i] = _mm512_and_si512(run, low);
                groups[i + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(run), low);
            }
        }
    }
    groups
}
