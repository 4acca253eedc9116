//! AVX-512 inner kernels: a panel is one register, VNNI's `vpdpbusd` multiplies
//! four unsigned weights of 16 rows with four signed activations.

use std::arch::x86_64::*;

use super::super::act::BlockMeta;
use super::super::lanes_x86;
use super::super::pack::{BLOCK, WeightType, quants_at};
use super::{ActRow, LANES, PanelDot, fetch_weights, float};

/// Weights of the type numbered as in [`WeightType::ALL`].
pub(in super::super) struct Avx512<const TYPE: usize>;

impl<const TYPE: usize> PanelDot for Avx512<TYPE> {
    const PANELS: usize = 2;
    const ROWS: usize = 6;
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

/// Works through a block four inputs at a time, for all panels and rows: there are
/// `NP * NT` chains of `vpdpbusd` side by side, which hides its latency, and only `NP`
/// registers hold weights.
///
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
            let mut dots = [[_mm512_setzero_si512(); NT]; NP];
            for t in 0..NT {
                let meta: &BlockMeta = &*rows[t].meta.add(b);
                let start = match ty {
                    WeightType::Q4_0 => _mm512_set1_epi32(meta.neg8s),
                    WeightType::Q8_0 => _mm512_set1_epi32(meta.neg128s),
                    _ => _mm512_setzero_si512(),
                };
                for p in 0..NP {
                    dots[p][t] = start;
                }
            }
            let records = panels.map(|panel| panel.add(b * ty.record()));
            if ahead > 0 {
                for record in records {
                    for line in (0..ty.record()).step_by(64) {
                        fetch_weights::<NT>(record.wrapping_add(ahead + line));
                    }
                }
            }
            let runs = records.map(|record| record.add(quants_at(ty)));
            if ty == WeightType::Q8_0 {
                for g in 0..BLOCK / 4 {
                    let weights = runs.map(|run| _mm512_loadu_si512(run.add(64 * g).cast()));
                    multiply(&mut dots, weights, &rows, b * BLOCK + 4 * g);
                }
            } else {
                // Run `i` has group `i` in its low nibbles, group `i + 4` in its high ones.
                let low = _mm512_set1_epi8(15);
                for i in 0..BLOCK / 8 {
                    let both = runs.map(|run| _mm512_loadu_si512(run.add(64 * i).cast()));
                    let weights = both.map(|both| _mm512_and_si512(both, low));
                    multiply(&mut dots, weights, &rows, b * BLOCK + 4 * i);
                    let weights =
                        both.map(|both| _mm512_and_si512(_mm512_srli_epi16::<4>(both), low));
                    multiply(&mut dots, weights, &rows, b * BLOCK + 4 * (i + 4));
                }
            }
            let scales = records.map(|record| half(record));
            for t in 0..NT {
                let meta: &BlockMeta = &*rows[t].meta.add(b);
                let d = _mm512_set1_ps(meta.d);
                for p in 0..NP {
                    if ty == WeightType::Q4_1 {
                        let minima = half(records[p].add(2 * LANES));
                        acc[p][t] = _mm512_fmadd_ps(minima, _mm512_set1_ps(meta.ds), acc[p][t]);
                    }
                    let (dot, scale) =
                        (_mm512_cvtepi32_ps(dots[p][t]), _mm512_mul_ps(scales[p], d));
                    acc[p][t] = _mm512_fmadd_ps(dot, scale, acc[p][t]);
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

/// Adds the products of one group of weights with four activations of each row, from
/// input `at` on.
///
/// # Safety
/// The rows have quants there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<const NP: usize, const NT: usize>(
    dots: &mut [[__m512i; NT]; NP],
    weights: [__m512i; NP],
    rows: &[ActRow; NT],
    at: usize,
) {
    for t in 0..NT {
        // SAFETY: the caller's.
        let four = unsafe { rows[t].quants.add(at).cast::<i32>().read_unaligned() };
        let four = _mm512_set1_epi32(four);
        for p in 0..NP {
            dots[p][t] = _mm512_dpbusd_epi32(dots[p][t], weights[p], four);
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
