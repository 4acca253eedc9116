//! AVX2 inner kernels: a panel is two registers of eight rows.
//!
//! `vpmaddubsw` multiplies unsigned weights with signed activations (at most 127 in magnitude)
//! and adds pairs of products in 16-bit lanes, which hold at most 32767:
//!
//! | weights | largest pair sum | groups added in a lane before widening |
//! |---|---|---|
//! | 2 to 4 bits | 3810 | 8: 30480 |
//! | 5 bits | 7874 | 4: 31496 |
//! | 6 bits | 16002 | 2: 32004 |
//! | 8 bits and tables of 8 bits, by magnitude | 32512 | 1 |
//!
//! *By magnitude*: the product of the weight's magnitude and the activation with the weight's
//! sign. `vpmaddwd` then widens to 32 bits; if the scale factors apply to 16 weights, it also
//! multiplies with the factor.
//!
//! AVX-VNNI's `vpdpbusd` does all of this in one instruction, also for 8-bit weights.

use std::arch::x86_64::*;

use hearthnet_files::blocks::{BLOCK, Bits, Code, Layout, SubScale, WeightType};

use super::super::act::BlockMeta;
use super::super::lanes_x86;
use super::super::record::{block_bytes, head_bytes, quantised_bytes, record_bytes};
use super::{ActRow, LANES, PanelDot, fetch_weights, float};

/// Groups of four inputs in a block.
const GROUPS: usize = BLOCK / 4;

/// Defines the kernels of one instruction set.
macro_rules! panel_dot {
    ($(#[$doc:meta])* $name:ident, $half_panels:ident, $rows:literal, $vnni:literal, $features:literal) => {
        $(#[$doc])*
        pub(in super::super) struct $name<const TYPE: usize>;

        impl<const TYPE: usize> PanelDot for $name<TYPE> {
            const PANELS: usize = 1;
            const ROWS: usize = $rows;
            const TOGETHER_FROM: usize = usize::MAX;

            #[inline(always)]
            unsafe fn dot<const NP: usize, const NT: usize>(
                panels: [*const u8; NP],
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
                            if const { one_pass::<TYPE>(NT, $vnni) } {
                                $half_panels::<TYPE, NT, 2>(panels[p], 0, records, &rows, ahead, sums);
                            } else {
                                let ahead = ahead_of::<TYPE>(records, ahead);
                                $half_panels::<TYPE, NT, 1>(panels[p], 0, records, &rows, ahead, sums);
                                $half_panels::<TYPE, NT, 1>(panels[p], 1, records, &rows, ahead, sums.add(8));
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
        unsafe fn $half_panels<const TYPE: usize, const NT: usize, const H: usize>(
            panel: *const u8,
            first: usize,
            records: usize,
            rows: &[ActRow; NT],
            ahead: usize,
            sums: *mut f32,
        ) {
            // SAFETY: the only caller is `dot`, which has the same contract.
            unsafe { half_panels::<TYPE, NT, H, $vnni>(panel, first, records, rows, ahead, sums) }
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
    unsafe { float::dot::<lanes_x86::Avx2, TYPE, 1, NT>([panel], records, rows, ahead, sums) }
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

/// Multiplies `H` halves (eight rows each) of a panel, starting with half `first`.
///
/// # Safety
/// As [`PanelDot::dot`]; each half needs room for eight of every sixteen sums.
#[inline(always)]
unsafe fn half_panels<const TYPE: usize, const NT: usize, const H: usize, const VNNI: bool>(
    panel: *const u8,
    first: usize,
    records: usize,
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
                        fetch_weights::<NT>(start.wrapping_add(ahead + line));
                    }
                }
                let quants = block.add(LANES * layout.sub_scale.bytes() + 32 * first);
                let b = r * layout.blocks + s;
                let mut factors = [Factors::of(d[0], m[0]); H];
                for h in 0..H {
                    let sub_scales = block.add(8 * layout.sub_scale.bytes() * (first + h));
                    factors[h] = Factors::of(d[h], m[h]).by(layout.sub_scale, sub_scales);
                }
                let dots = if VNNI {
                    let mut dots = [[_mm256_setzero_si256(); NT]; H];
                    for h in 0..H {
                        dots[h] = dots_vnni::<TYPE, NT>(quants.add(32 * h), rows, b, &factors[h]);
                    }
                    dots
                } else {
                    dots::<TYPE, NT, H>(quants, rows, b, &factors)
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

/// Factors that turn the quants of a block into weights, for eight rows.
#[derive(Clone, Copy)]
struct Factors {
    scale: __m256,
    min: __m256,
    /// Per row (32 bits): scale factors of the first (low) and the second 16 inputs.
    pair: __m256i,
    /// As `pair`, for the minimum.
    min_pair: __m256i,
}

impl Factors {
    /// Factors of a record whose blocks have no sub-scales.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of(scale: __m256, min: __m256) -> Self {
        Self {
            scale,
            min,
            pair: _mm256_setzero_si256(),
            min_pair: _mm256_setzero_si256(),
        }
    }

    /// Applies the sub-scales of a block; `sub_scales` points to those of eight rows.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn by(self, sub_scale: SubScale, sub_scales: *const u8) -> Self {
        let mut of = self;
        // SAFETY: the caller ensures that `sub_scales` has the sub-scales of eight rows.
        unsafe {
            match sub_scale {
                SubScale::None => {}
                SubScale::Scale => {
                    let sc = _mm256_cvtepi8_epi32(_mm_loadl_epi64(sub_scales.cast()));
                    of.scale = _mm256_mul_ps(of.scale, _mm256_cvtepi32_ps(sc));
                }
                SubScale::ScaleMin => {
                    let both = _mm256_cvtepu16_epi32(_mm_loadu_si128(sub_scales.cast()));
                    let sc = _mm256_and_si256(both, _mm256_set1_epi32(255));
                    let mc = _mm256_srli_epi32::<8>(both);
                    of.scale = _mm256_mul_ps(of.scale, _mm256_cvtepi32_ps(sc));
                    of.min = _mm256_mul_ps(of.min, _mm256_cvtepi32_ps(mc));
                }
                SubScale::Scale16 => {
                    of.pair = _mm256_cvtepi8_epi16(_mm_loadu_si128(sub_scales.cast()));
                }
                SubScale::ScaleMin16 => {
                    let both = _mm256_cvtepu8_epi16(_mm_loadu_si128(sub_scales.cast()));
                    of.pair = _mm256_and_si256(both, _mm256_set1_epi16(15));
                    of.min_pair = _mm256_srli_epi16::<4>(both);
                }
            }
        }
        of
    }
}

/// Integer dot products of a block's weights with `NT` rows, including factors per 16 weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<const TYPE: usize, const NT: usize, const H: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    factors: &[Factors; H],
) -> [[__m256i; NT]; H] {
    // The conditions are constants: only one branch of each is compiled.
    // SAFETY: the caller ensures the quants of all halves, and block `block` of the rows.
    unsafe {
        if const { together(Layout::of(WeightType::ALL[TYPE])) } {
            return if const { signed_bytes(Layout::of(WeightType::ALL[TYPE])) } {
                dots_by_magnitude::<TYPE, NT, H>(quants, rows, block)
            } else {
                dots_unsigned::<TYPE, NT, H>(quants, rows, block)
            };
        }
        let mut dots = [[_mm256_setzero_si256(); NT]; H];
        for h in 0..H {
            let quants = quants.add(32 * h);
            if const { Layout::of(WeightType::ALL[TYPE]).sub_scale.per_16() } {
                dots[h] = dots_per_16::<TYPE, NT>(quants, rows, block, factors[h].pair);
            } else if const { signed_bytes(Layout::of(WeightType::ALL[TYPE])) } {
                [dots[h]] = dots_by_magnitude::<TYPE, NT, 1>(quants, rows, block);
            } else {
                [dots[h]] = dots_unsigned::<TYPE, NT, 1>(quants, rows, block);
            }
        }
        dots
    }
}

/// Whether both halves of a panel share each activation group that is loaded into a register. If
/// unpacking a quant takes several instructions, there are too few registers for that, and the
/// halves are processed one after the other.
const fn together(layout: Layout) -> bool {
    !layout.sub_scale.per_16()
        && matches!(
            (layout.bits, layout.code),
            (Bits::Eight, _) | (Bits::Four, Code::Offset(_))
        )
}

/// [`dots`] with `vpdpbusd`, which adds four products to 32 bits at once. Weights are unsigned; the
/// accumulators start with the correction for their offset.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn dots_vnni<const TYPE: usize, const NT: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    factors: &Factors,
) -> [__m256i; NT] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller ensures the quants of eight rows, and block `block` of the rows.
    unsafe {
        let mut dots = [_mm256_setzero_si256(); NT];
        let mut second = dots;
        for t in 0..NT {
            let meta: &BlockMeta = &*rows[t].meta.add(block);
            dots[t] = _mm256_set1_epi32(match layout.code {
                _ if layout.sub_scale.per_16() => 0,
                Code::Offset(0) => 0,
                Code::Offset(8) => meta.neg8s,
                Code::Offset(16) => meta.neg8s.wrapping_mul(2),
                // Table values are offset by 128, too.
                _ => meta.neg128s,
            });
        }
        for g in 0..GROUPS {
            let weights = match layout.code {
                Code::Table(table) => {
                    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                    let table = _mm256_xor_si256(table, _mm256_set1_epi8(-128));
                    _mm256_shuffle_epi8(table, fours(quants, g))
                }
                Code::Offset(_) => unsigned_group::<TYPE>(quants, g),
            };
            for t in 0..NT {
                let a = four(&rows[t], block, g);
                if layout.sub_scale.per_16() && g >= GROUPS / 2 {
                    second[t] = _mm256_dpbusd_avx_epi32(second[t], weights, a);
                } else {
                    dots[t] = _mm256_dpbusd_avx_epi32(dots[t], weights, a);
                }
            }
        }
        if layout.sub_scale.per_16() {
            let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(factors.pair));
            let factor = _mm256_srai_epi32::<16>(factors.pair);
            for t in 0..NT {
                let meta: &BlockMeta = &*rows[t].meta.add(block);
                let low = _mm256_mullo_epi32(dots[t], first);
                let high = _mm256_mullo_epi32(second[t], factor);
                let dot = _mm256_add_epi32(low, high);
                let sums = || _mm256_madd_epi16(factors.pair, _mm256_set1_epi32(meta.half_sums));
                dots[t] = match layout.code {
                    Code::Offset(4) => _mm256_sub_epi32(dot, _mm256_slli_epi32::<2>(sums())),
                    Code::Offset(32) => _mm256_sub_epi32(dot, _mm256_slli_epi32::<5>(sums())),
                    _ => dot,
                };
            }
        }
        dots
    }
}

/// Whether weights need the range of a signed byte.
const fn signed_bytes(layout: Layout) -> bool {
    matches!(layout.bits, Bits::Eight) || matches!(layout.code, Code::Table(_))
}

/// Dot products of unsigned 4-bit or 5-bit weights; the offset is subtracted at the end.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_unsigned<const TYPE: usize, const NT: usize, const H: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
) -> [[__m256i; NT]; H] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let five = matches!(layout.bits, Bits::Five);
    // SAFETY: the caller ensures the quants of all halves, and block `block` of the rows.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        // 16-bit lanes can hold the sum of all groups of 4-bit weights, but only of half the groups
        // of 5-bit weights.
        let mut words = [[[_mm256_setzero_si256(); 2]; NT]; H];
        for g in 0..GROUPS {
            let mut weights = [ones; H];
            for h in 0..H {
                weights[h] = unsigned_group::<TYPE>(quants.add(32 * h), g);
            }
            for t in 0..NT {
                let a = four(&rows[t], block, g);
                for h in 0..H {
                    let word = &mut words[h][t][if five { g / 4 } else { 0 }];
                    *word = _mm256_add_epi16(*word, _mm256_maddubs_epi16(weights[h], a));
                }
            }
        }
        let mut dots = [[ones; NT]; H];
        for t in 0..NT {
            let meta: &BlockMeta = &*rows[t].meta.add(block);
            for h in 0..H {
                let [low, high] = words[h][t];
                let mut dot = _mm256_madd_epi16(low, ones);
                if five {
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(high, ones));
                }
                dots[h][t] = match layout.code {
                    Code::Offset(8) => _mm256_add_epi32(dot, _mm256_set1_epi32(meta.neg8s)),
                    Code::Offset(16) => {
                        _mm256_add_epi32(dot, _mm256_set1_epi32(meta.neg8s.wrapping_mul(2)))
                    }
                    _ => dot,
                };
            }
        }
        dots
    }
}

/// Dot products of 2-bit, 3-bit or 6-bit weights, which have factors per 16 weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_per_16<const TYPE: usize, const NT: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    pair: __m256i,
) -> [__m256i; NT] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller ensures the quants of eight rows, and block `block` of the rows.
    unsafe {
        let weights = unsigned::<TYPE>(quants);
        // A row's factor in both 16-bit halves of its 32 bits.
        let first = _mm256_blend_epi16::<0b1010_1010>(pair, _mm256_slli_epi32::<16>(pair));
        let second = _mm256_blend_epi16::<0b0101_0101>(pair, _mm256_srli_epi32::<16>(pair));
        let mut dots = [pair; NT];
        for t in 0..NT {
            let product = |g: usize| _mm256_maddubs_epi16(weights[g], four(&rows[t], block, g));
            let mut dot = _mm256_setzero_si256();
            for (half, factor) in [first, second].into_iter().enumerate() {
                let g = 4 * half;
                let low = _mm256_add_epi16(product(g), product(g + 1));
                let high = _mm256_add_epi16(product(g + 2), product(g + 3));
                if matches!(layout.bits, Bits::Six) {
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(low, factor));
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(high, factor));
                } else {
                    let words = _mm256_add_epi16(low, high);
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(words, factor));
                }
            }
            let meta: &BlockMeta = &*rows[t].meta.add(block);
            let sums = || _mm256_madd_epi16(pair, _mm256_set1_epi32(meta.half_sums));
            dots[t] = match layout.code {
                Code::Offset(4) => _mm256_sub_epi32(dot, _mm256_slli_epi32::<2>(sums())),
                Code::Offset(32) => _mm256_sub_epi32(dot, _mm256_slli_epi32::<5>(sums())),
                _ => dot,
            };
        }
        dots
    }
}

/// Dot products of 8-bit weights and of table weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_by_magnitude<const TYPE: usize, const NT: usize, const H: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
) -> [[__m256i; NT]; H] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller ensures the quants of all halves, and block `block` of the rows.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut dots = [[_mm256_setzero_si256(); NT]; H];
        for g in 0..GROUPS {
            let mut signed = [ones; H];
            let mut magnitude = signed;
            for h in 0..H {
                let quants = quants.add(32 * h);
                signed[h] = match layout.code {
                    Code::Table(table) => {
                        let table = _mm_loadu_si128(table.as_ptr().cast());
                        let table = _mm256_broadcastsi128_si256(table);
                        _mm256_shuffle_epi8(table, fours(quants, g))
                    }
                    Code::Offset(_) => {
                        let bytes = _mm256_loadu_si256(quants.add(64 * g).cast());
                        _mm256_xor_si256(bytes, _mm256_set1_epi8(-128))
                    }
                };
                magnitude[h] = _mm256_abs_epi8(signed[h]);
            }
            for t in 0..NT {
                let a = four(&rows[t], block, g);
                for h in 0..H {
                    let a = _mm256_sign_epi8(a, signed[h]);
                    let x = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude[h], a), ones);
                    dots[h][t] = _mm256_add_epi32(dots[h][t], x);
                }
            }
        }
        dots
    }
}

/// Quants of all groups of a block, as unsigned bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unsigned<const TYPE: usize>(quants: *const u8) -> [__m256i; GROUPS] {
    // SAFETY: the caller ensures the quants of eight rows.
    unsafe {
        let mut weights = [_mm256_setzero_si256(); GROUPS];
        for g in 0..GROUPS {
            weights[g] = unsigned_group::<TYPE>(quants, g);
        }
        weights
    }
}

/// Quants of group `g` of a block, as unsigned bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unsigned_group<const TYPE: usize>(quants: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller ensures the quants of eight rows.
    unsafe {
        match const { Layout::of(WeightType::ALL[TYPE]).bits } {
            Bits::Two => twos::<0>(quants, g),
            Bits::Three => _mm256_or_si256(twos::<0>(quants, g), ones::<2>(quants.add(128), g)),
            Bits::Four => fours(quants, g),
            Bits::Five => _mm256_or_si256(fours(quants, g), ones::<4>(quants.add(256), g)),
            Bits::Six => _mm256_or_si256(fours(quants, g), twos::<4>(quants.add(256), g)),
            Bits::Eight => _mm256_loadu_si256(quants.add(64 * g).cast()),
        }
    }
}

/// Low four bits of group `g`, from four runs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fours(runs: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller ensures four runs.
    let bytes = unsafe { _mm256_loadu_si256(runs.add(64 * (g % 4)).cast()) };
    let nibbles = if g < 4 {
        bytes
    } else {
        _mm256_srli_epi16::<4>(bytes)
    };
    _mm256_and_si256(nibbles, _mm256_set1_epi8(15))
}

/// Two bits of group `g`, from two runs, placed at bit `AT` of each byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn twos<const AT: i32>(runs: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller ensures two runs.
    let bytes = unsafe { _mm256_loadu_si256(runs.add(64 * (g / 4)).cast()) };
    moved(bytes, 2 * (g % 4) as i32 - AT, 3 << AT)
}

/// One bit of group `g`, from one run, placed at bit `AT` of each byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn ones<const AT: i32>(run: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller ensures the run.
    let bytes = unsafe { _mm256_loadu_si256(run.cast()) };
    moved(bytes, g as i32 - AT, 1 << AT)
}

/// Shifts every byte right by `by` (left if negative) and masks it with `mask`, which also clears
/// the bits shifted in from the neighbouring byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn moved(bytes: __m256i, by: i32, mask: i8) -> __m256i {
    // `by` is a constant after inlining, so this compiles to one shift by an immediate.
    let shifted = if by >= 0 {
        _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(by))
    } else {
        _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(-by))
    };
    _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
}

/// Broadcasts group `group` (four activations) of a block to every 32-bit lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four(row: &ActRow, block: usize, group: usize) -> __m256i {
    // SAFETY: the caller ensures the block.
    unsafe {
        let p = row.quants.add(block * BLOCK + 4 * group);
        _mm256_set1_epi32(p.cast::<i32>().read_unaligned())
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
