//! Integer dot products of a block with AVX2, and the factors of a block.
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
use super::super::matmul::ActRow;

/// Groups of four inputs in a block.
const GROUPS: usize = BLOCK / 4;

/// Factors that turn the quants of a block into weights, for eight rows.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub(super) scale: __m256,
    pub(super) min: __m256,
    /// Per row (32 bits): scale factors of the first (low) and the second 16 inputs.
    pair: __m256i,
    /// The minimum is stored like `pair`.
    pub(super) min_pair: __m256i,
}

impl Factors {
    /// Factors of a record whose blocks have no sub-scales.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn of(scale: __m256, min: __m256) -> Self {
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
    pub(super) unsafe fn by(self, sub_scale: SubScale, sub_scales: *const u8) -> Self {
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
pub(super) unsafe fn dots<const TYPE: usize, const NT: usize, const H: usize, const U: bool>(
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
                dots_by_magnitude::<TYPE, NT, H, U>(quants, rows, block)
            } else {
                dots_unsigned::<TYPE, NT, H, U>(quants, rows, block)
            };
        }
        let mut dots = [[_mm256_setzero_si256(); NT]; H];
        for h in 0..H {
            let quants = quants.add(32 * h);
            if const { Layout::of(WeightType::ALL[TYPE]).sub_scale.per_16() } {
                dots[h] = dots_per_16::<TYPE, NT, U>(quants, rows, block, factors[h].pair);
            } else if const { signed_bytes(Layout::of(WeightType::ALL[TYPE])) } {
                [dots[h]] = dots_by_magnitude::<TYPE, NT, 1, U>(quants, rows, block);
            } else {
                [dots[h]] = dots_unsigned::<TYPE, NT, 1, U>(quants, rows, block);
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
pub(super) unsafe fn dots_vnni<const TYPE: usize, const NT: usize, const U: bool>(
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
            let weights = group::<TYPE, true, U>(quants, g);
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
unsafe fn dots_unsigned<const TYPE: usize, const NT: usize, const H: usize, const U: bool>(
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
                weights[h] = group::<TYPE, false, U>(quants.add(32 * h), g);
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
unsafe fn dots_per_16<const TYPE: usize, const NT: usize, const U: bool>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    pair: __m256i,
) -> [__m256i; NT] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller ensures the quants of eight rows, and block `block` of the rows.
    unsafe {
        let mut weights = [pair; GROUPS];
        for g in 0..GROUPS {
            weights[g] = group::<TYPE, false, U>(quants, g);
        }
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
unsafe fn dots_by_magnitude<const TYPE: usize, const NT: usize, const H: usize, const U: bool>(
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
                signed[h] = group::<TYPE, false, U>(quants.add(32 * h), g);
                if matches!(layout.bits, Bits::Eight) {
                    signed[h] = _mm256_xor_si256(signed[h], _mm256_set1_epi8(-128));
                }
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

/// Writes the bytes of all groups of a block, of both halves of a panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack_block<const TYPE: usize, const VNNI: bool>(
    quants: *const u8,
    to: *mut u8,
) {
    for g in 0..GROUPS {
        for half in [0, 32] {
            // SAFETY: the caller ensures the quants of 16 rows, and room for those of a block.
            unsafe {
                let bytes = group::<TYPE, VNNI, false>(quants.add(half), g);
                _mm256_storeu_si256(to.add(64 * g + half).cast(), bytes);
            }
        }
    }
}

/// Bytes of group `g` that are multiplied: quants, or values of a table; for `VNNI` the values plus
/// 128. With `U`, the quants are unpacked.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group<const TYPE: usize, const VNNI: bool, const U: bool>(
    quants: *const u8,
    g: usize,
) -> __m256i {
    // SAFETY: the caller ensures the quants of eight rows.
    unsafe {
        if U {
            return _mm256_loadu_si256(quants.add(64 * g).cast());
        }
        match const { Layout::of(WeightType::ALL[TYPE]).code } {
            Code::Table(table) => {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                let values = _mm256_shuffle_epi8(table, fours(quants, g));
                match VNNI {
                    true => _mm256_xor_si256(values, _mm256_set1_epi8(-128)),
                    false => values,
                }
            }
            Code::Offset(_) => unsigned_group::<TYPE>(quants, g),
        }
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

/// Bits `2 (g % 4)` and `2 (g % 4) + 1` of each byte of the run that has group `g`, moved to bits
/// `AT` and `AT + 1`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn twos<const AT: i32>(runs: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller ensures two runs.
    let bytes = unsafe { _mm256_loadu_si256(runs.add(64 * (g / 4)).cast()) };
    moved(bytes, 2 * (g % 4) as i32 - AT, 3 << AT)
}

/// Bit `g` of each byte of a run (32 bytes), moved to bit `AT`.
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
