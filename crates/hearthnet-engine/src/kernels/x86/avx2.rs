//! AVX2 inner kernels: a panel is two registers of eight rows.

use std::arch::x86_64::*;

use hearthnet_files::blocks::{Bits, Layout, SubScale, WeightType};

use super::super::act::BlockMeta;
use super::super::lanes::LANES;
use super::super::matmul::{ActRow, PanelDot, UNPACKED_BLOCK, Unpack, float};
use super::super::record::{block_bytes, head_bytes, quantised_bytes, record_bytes};
use super::avx2_dots::{Factors, dots, dots_vnni, unpack_block};
use super::{lanes, prefetch_l2};

/// Defines the kernels of one instruction set.
macro_rules! panel_dot {
    ($(#[$doc:meta])* $name:ident, $half_panels:ident, $rows:literal, $vnni:literal, $features:literal) => {
        $(#[$doc])*
        pub(in super::super) struct $name<const TYPE: usize>;

        impl<const TYPE: usize> PanelDot for $name<TYPE> {
            const PANELS: usize = 1;
            const ROWS: usize = $rows;
            const TOGETHER_FROM: usize = usize::MAX;
            const UNPACK: Option<Unpack> = match unpacks::<TYPE>() {
                true => Some(unpack::<TYPE, $vnni>),
                false => None,
            };

            #[inline(always)]
            unsafe fn dot<const NP: usize, const NT: usize, const U: bool>(
                panels: [*const u8; NP],
                unpacked: *const u8,
                records: usize,
                rows: [ActRow; NT],
                ahead: usize,
                sums: *mut f32,
            ) {
                // SAFETY: by the contract of `dot`; both halves read the records of the panel, and
                // each writes eight of every sixteen sums.
                unsafe {
                    for p in 0..NP {
                        let sums = sums.add(p * NT * LANES);
                        if const { WeightType::ALL[TYPE].quantised() } {
                            let panel = (panels[p], unpacked, records);
                            if const { one_pass::<TYPE>(NT, $vnni) } {
                                $half_panels::<TYPE, NT, 2, U>(panel, 0, &rows, ahead, sums);
                            } else {
                                let ahead = ahead_of::<TYPE>(records, ahead);
                                $half_panels::<TYPE, NT, 1, U>(panel, 0, &rows, ahead, sums);
                                $half_panels::<TYPE, NT, 1, U>(panel, 1, &rows, ahead, sums.add(8));
                            }
                        } else {
                            plain::<TYPE, NT>(panels[p], records, rows, ahead, sums);
                        }
                    }
                }
            }
        }

        /// Not inlined: within the driver, the compiler would spill the accumulators.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn $half_panels<const TYPE: usize, const NT: usize, const H: usize, const U: bool>(
            panel: (*const u8, *const u8, usize),
            first: usize,
            rows: &[ActRow; NT],
            ahead: usize,
            sums: *mut f32,
        ) {
            // SAFETY: the only caller is `dot`, which has the same contract.
            unsafe { half_panels::<TYPE, NT, H, $vnni, U>(panel, first, rows, ahead, sums) }
        }
    };
}

panel_dot!(
    /// Kernel for the weight type `WeightType::ALL[TYPE]`.
    Avx2, half_panels_avx2, 4, false, "avx2,fma,f16c"
);
panel_dot!(
    /// As [`Avx2`], with the dot products of AVX-VNNI.
    AvxVnni, half_panels_vnni, 4, true, "avx2,fma,f16c,avxvnni"
);

/// Whether quants can be unpacked: all but those that are bytes already.
const fn unpacks<const TYPE: usize>() -> bool {
    let ty = WeightType::ALL[TYPE];
    ty.quantised() && !matches!(Layout::of(ty).bits, Bits::Eight)
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const TYPE: usize, const VNNI: bool>(
    panel: *const u8,
    records: usize,
    to: *mut u8,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let first = head_bytes(layout) + LANES * layout.sub_scale.bytes();
    for r in 0..records {
        for s in 0..layout.blocks {
            // SAFETY: the panel has the block, and there is room for all blocks.
            unsafe {
                let quants =
                    panel.add(r * quantised_bytes(layout) + first + s * block_bytes(layout));
                let to = to.add((r * layout.blocks + s) * UNPACKED_BLOCK);
                unpack_block::<TYPE, VNNI>(quants, to);
            }
        }
    }
}

/// Prefetch distance for panels read in two passes: one panel. Each pass prefetches every other
/// cache line of the next panel, so that memory stays busy during the second pass, which reads its
/// panel from the cache.
const fn ahead_of<const TYPE: usize>(records: usize, ahead: usize) -> usize {
    if ahead > 0 {
        records * record_bytes(const { WeightType::ALL[TYPE] })
    } else {
        0
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    // SAFETY: the only caller is `dot`, which has the same contract; the type is a float.
    unsafe { float::dot::<lanes::Avx2, TYPE, 1, NT>([panel], records, rows, ahead, sums) }
}

/// Whether one pass over the records multiplies both halves of a panel, instead of two passes that
/// each read every other cache line.
///
/// With one or two rows, the kernel is memory-bound, and one pass reads memory in order (measured
/// on Zen 3). With more rows, the accumulators of both halves exceed the sixteen registers. One
/// pass then pays only for plain 8-bit weights: their kernel takes the most instructions, and both
/// halves share the broadcast activations.
const fn one_pass<const TYPE: usize>(rows: usize, vnni: bool) -> bool {
    let layout = Layout::of(WeightType::ALL[TYPE]);
    rows <= 2 || (!vnni && !layout.sub_scale.per_16() && matches!(layout.bits, Bits::Eight))
}

/// Multiplies `H` halves (eight rows each) of a panel, starting with half `first`. The panel has its
/// records, unpacked quants and number of records.
///
/// # Safety
/// As [`PanelDot::dot`]; each half needs room for eight of every sixteen sums.
#[inline(always)]
unsafe fn half_panels<
    const TYPE: usize,
    const NT: usize,
    const H: usize,
    const VNNI: bool,
    const U: bool,
>(
    (panel, unpacked, records): (*const u8, *const u8, usize),
    first: usize,
    rows: &[ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: record `r` and its blocks of activations exist for `r < records`. A record has its
    // parts where `pack` puts them; eight rows take 16 bytes of each field, 8 bytes per byte of a
    // sub-scale, and 32 bytes of each run of quants. There is room for all sums.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); NT]; H];
        for r in 0..records {
            let record = panel.add(r * quantised_bytes(layout));
            let mut d = [_mm256_setzero_ps(); H];
            let mut m = d;
            for h in 0..H {
                d[h] = field::<TYPE>(record.add(16 * (first + h)));
                m[h] = d[h];
                if layout.fields == 2 {
                    m[h] = field::<TYPE>(record.add(2 * LANES + 16 * (first + h)));
                }
            }
            for s in 0..layout.blocks {
                let block = record.add(head_bytes(layout) + s * block_bytes(layout));
                if ahead > 0 {
                    let start = if s == 0 { record } else { block };
                    let len = block_bytes(layout) + if s == 0 { head_bytes(layout) } else { 0 };
                    for line in (64 * first..len).step_by(128 / H) {
                        prefetch_l2(start.wrapping_add(ahead + line));
                    }
                }
                let b = r * layout.blocks + s;
                let quants = if U {
                    unpacked.add(b * UNPACKED_BLOCK + 32 * first)
                } else {
                    block.add(LANES * layout.sub_scale.bytes() + 32 * first)
                };
                let mut factors = [Factors::of(d[0], m[0]); H];
                for h in 0..H {
                    let sub_scales = block.add(8 * layout.sub_scale.bytes() * (first + h));
                    factors[h] = Factors::of(d[h], m[h]).by(layout.sub_scale, sub_scales);
                }
                let dots = if VNNI {
                    let mut dots = [[_mm256_setzero_si256(); NT]; H];
                    for h in 0..H {
                        dots[h] =
                            dots_vnni::<TYPE, NT, U>(quants.add(32 * h), rows, b, &factors[h]);
                    }
                    dots
                } else {
                    dots::<TYPE, NT, H, U>(quants, rows, b, &factors)
                };
                for t in 0..NT {
                    let meta: &BlockMeta = &*rows[t].meta.add(b);
                    let ds = _mm256_set1_ps(meta.ds);
                    for h in 0..H {
                        let (factors, acc) = (&factors[h], &mut acc[h][t]);
                        match layout.sub_scale {
                            SubScale::None if layout.fields == 2 => {
                                *acc = _mm256_fmadd_ps(factors.min, ds, *acc);
                            }
                            SubScale::ScaleMin => *acc = _mm256_fnmadd_ps(factors.min, ds, *acc),
                            SubScale::ScaleMin16 => {
                                let half_sums = _mm256_set1_epi32(meta.half_sums);
                                let sum = _mm256_madd_epi16(factors.min_pair, half_sums);
                                let sum = _mm256_cvtepi32_ps(sum);
                                let ds = _mm256_mul_ps(_mm256_set1_ps(meta.d), sum);
                                *acc = _mm256_fnmadd_ps(factors.min, ds, *acc);
                            }
                            _ => {}
                        }
                        let scale = _mm256_mul_ps(factors.scale, _mm256_set1_ps(meta.d));
                        *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[h][t]), scale, *acc);
                    }
                }
            }
        }
        for (h, acc) in acc.iter().enumerate() {
            for t in 0..NT {
                _mm256_storeu_ps(sums.add(t * LANES + 8 * h), acc[t]);
            }
        }
    }
}

/// Eight values of a field, as `f32`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn field<const TYPE: usize>(p: *const u8) -> __m256 {
    // SAFETY: the caller ensures 16 bytes.
    let bits = unsafe { _mm_loadu_si128(p.cast()) };
    if const { Layout::of(WeightType::ALL[TYPE]).bf16_fields } {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    } else {
        _mm256_cvtph_ps(bits)
    }
}
