//! AVX2 inner kernels: a panel is two registers of eight rows.
//!
//! `vpmaddubsw` multiplies unsigned weights with signed activations (at most 127 in magnitude)
//! and adds pairs of products in 16-bit lanes, which hold at most 32767:
//!
//! | weights | a pair, at most | groups that a lane holds before it is widened |
//! |---|---|---|
//! | 2 to 4 bits | 3810 | 8: 30480 |
//! | 5 bits | 7874 | 4: 31496 |
//! | 6 bits | 16002 | 2: 32004 |
//! | 8 bits and tables of 8 bits, by magnitude | 32512 | 1 |
//!
//! *By magnitude*: the magnitude of the weight times the activation with the weight's sign.
//! `vpmaddwd` then widens to 32 bits; where 16 weights have a factor of their own, it multiplies
//! with it on the way.
//!
//! AVX-VNNI's `vpdpbusd` does all of this in one instruction, for weights of 8 bits too.

use std::arch::x86_64::*;

use super::super::act::BlockMeta;
use super::super::block::{BLOCK, Bits, Code, Layout, Step, WeightType};
use super::super::lanes_x86;
use super::{ActRow, LANES, PanelDot, fetch_weights, float};

/// Groups of four inputs in a block.
const GROUPS: usize = BLOCK / 4;

/// Defines the kernels of one instruction set.
macro_rules! panel_dot {
    ($(#[$doc:meta])* $name:ident, $halves:ident, $rows:literal, $vnni:literal, $features:literal) => {
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
                // SAFETY: what `dot` asks its callers for; the halves share the records of the panel and have
                // eight sums of every sixteen each.
                unsafe {
                    for p in 0..NP {
                        let sums = sums.add(p * NT * LANES);
                        if const { WeightType::ALL[TYPE].quantised() } {
                            if const { one_pass::<TYPE>(NT, $vnni) } {
                                $halves::<TYPE, NT, 2>(panels[p], 0, records, &rows, ahead, sums);
                            } else {
                                let ahead = ahead_of::<TYPE>(records, ahead);
                                $halves::<TYPE, NT, 1>(panels[p], 0, records, &rows, ahead, sums);
                                $halves::<TYPE, NT, 1>(panels[p], 1, records, &rows, ahead, sums.add(8));
                            }
                        } else {
                            plain::<TYPE, NT>(panels[p], records, rows, ahead, sums);
                        }
                    }
                }
            }
        }

        /// Not inlined: in the driver's context the accumulators would be spilled.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn $halves<const TYPE: usize, const NT: usize, const H: usize>(
            panel: *const u8,
            first: usize,
            records: usize,
            rows: &[ActRow; NT],
            ahead: usize,
            sums: *mut f32,
        ) {
            // SAFETY: `dot` is the caller, and passes on what it is promised.
            unsafe { halves::<TYPE, NT, H, $vnni>(panel, first, records, rows, ahead, sums) }
        }
    };
}

panel_dot!(
    /// Weights of the type numbered as in [`WeightType::ALL`].
    Avx2, halves_avx2, 4, false, "avx2,fma,f16c"
);
panel_dot!(
    /// The same with the dot products of AVX-VNNI.
    AvxVnni, halves_vnni, 4, true, "avx2,fma,f16c,avxvnni"
);

/// Distance of the prefetch where a panel is read in two passes: the next panel. Each pass fetches
/// every other line of it, so that memory stays busy during the second pass, which works from the
/// cache.
const fn ahead_of<const TYPE: usize>(records: usize, ahead: usize) -> usize {
    if ahead > 0 {
        records * const { WeightType::ALL[TYPE] }.record()
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
    // SAFETY: `dot` is the caller, and passes on what it is promised; the type is a float.
    unsafe { float::dot::<lanes_x86::Avx2, TYPE, 1, NT>([panel], records, rows, ahead, sums) }
}

/// Whether both halves of a panel are multiplied in one pass over its records, instead of in two
/// passes that each read every other cache line.
///
/// With one or two rows the kernel is bound by memory, and one pass reads it in order. Measured on
/// Zen 3. With more rows the accumulators of both halves exceed the sixteen registers. Only for
/// plain 8-bit weights one pass pays there: their kernel takes the most instructions, and both
/// halves share the broadcast activations.
const fn one_pass<const TYPE: usize>(rows: usize, vnni: bool) -> bool {
    let layout = Layout::of(WeightType::ALL[TYPE]);
    rows <= 2 || (!vnni && !layout.step.halves() && matches!(layout.bits, Bits::Eight))
}

/// `H` halves of a panel from `first` on, of eight rows each.
///
/// # Safety
/// As [`PanelDot::dot`], with room for eight sums of every sixteen for each half.
#[inline(always)]
unsafe fn halves<const TYPE: usize, const NT: usize, const H: usize, const VNNI: bool>(
    panel: *const u8,
    first: usize,
    records: usize,
    rows: &[ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: record `r` exists for `r < records`, and as many blocks of activations as it has;
    // a record has its parts where `pack` puts them: of eight rows 16 bytes of each field, 8 of
    // each byte of a step, 32 of each run of quants; room for all sums.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); NT]; H];
        for r in 0..records {
            let record = panel.add(r * layout.record());
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
                let block = record.add(layout.head() + s * layout.block_bytes());
                if ahead > 0 {
                    let start = if s == 0 { record } else { block };
                    let len = layout.block_bytes() + if s == 0 { layout.head() } else { 0 };
                    for line in (64 * first..len).step_by(128 / H) {
                        fetch_weights::<NT>(start.wrapping_add(ahead + line));
                    }
                }
                let quants = block.add(LANES * layout.step.bytes() + 32 * first);
                let b = r * layout.blocks + s;
                let mut factors = [Factors::of(d[0], m[0]); H];
                for h in 0..H {
                    let steps = block.add(8 * layout.step.bytes() * (first + h));
                    factors[h] = Factors::of(d[h], m[h]).by(layout.step, steps);
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
                        match layout.step {
                            Step::None if layout.fields == 2 => {
                                *acc = _mm256_fmadd_ps(factors.min, ds, *acc);
                            }
                            Step::ScaleMin => *acc = _mm256_fnmadd_ps(factors.min, ds, *acc),
                            Step::HalvesMin => {
                                let halves = _mm256_set1_epi32(meta.halves);
                                let sum = _mm256_madd_epi16(factors.min_pair, halves);
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

/// What turns the quants of a block of eight rows into weights.
#[derive(Clone, Copy)]
struct Factors {
    scale: __m256,
    min: __m256,
    /// In each row's 32 bits, the factors of the first and the second 16 inputs.
    pair: __m256i,
    /// The same of the minimum.
    min_pair: __m256i,
}

impl Factors {
    /// Those of a record whose blocks have none of their own.
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

    /// The same for a block, whose `steps` for eight rows are given.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn by(self, step: Step, steps: *const u8) -> Self {
        let mut of = self;
        // SAFETY: the caller vouches for the steps of eight rows.
        unsafe {
            match step {
                Step::None => {}
                Step::Scale => {
                    let sc = _mm256_cvtepi8_epi32(_mm_loadl_epi64(steps.cast()));
                    of.scale = _mm256_mul_ps(of.scale, _mm256_cvtepi32_ps(sc));
                }
                Step::ScaleMin => {
                    let both = _mm256_cvtepu16_epi32(_mm_loadu_si128(steps.cast()));
                    let sc = _mm256_and_si256(both, _mm256_set1_epi32(255));
                    let mc = _mm256_srli_epi32::<8>(both);
                    of.scale = _mm256_mul_ps(of.scale, _mm256_cvtepi32_ps(sc));
                    of.min = _mm256_mul_ps(of.min, _mm256_cvtepi32_ps(mc));
                }
                Step::Halves => {
                    of.pair = _mm256_cvtepi8_epi16(_mm_loadu_si128(steps.cast()));
                }
                Step::HalvesMin => {
                    let both = _mm256_cvtepu8_epi16(_mm_loadu_si128(steps.cast()));
                    of.pair = _mm256_and_si256(both, _mm256_set1_epi16(15));
                    of.min_pair = _mm256_srli_epi16::<4>(both);
                }
            }
        }
        of
    }
}

/// Integer dot products of a block's weights with `NT` rows, factors of halves included.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<const TYPE: usize, const NT: usize, const H: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    factors: &[Factors; H],
) -> [[__m256i; NT]; H] {
    // The conditions are constants: only one branch of each is compiled.
    // SAFETY: the caller vouches for the quants of all halves and block `block`.
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
            if const { Layout::of(WeightType::ALL[TYPE]).step.halves() } {
                dots[h] = dots_of_halves::<TYPE, NT>(quants, rows, block, factors[h].pair);
            } else if const { signed_bytes(Layout::of(WeightType::ALL[TYPE])) } {
                [dots[h]] = dots_by_magnitude::<TYPE, NT, 1>(quants, rows, block);
            } else {
                [dots[h]] = dots_unsigned::<TYPE, NT, 1>(quants, rows, block);
            }
        }
        dots
    }
}

/// Whether both halves of a panel share each group of activations that is brought into a register.
/// Where a quant takes several instructions to unpack, there are too few registers for that, and
/// one half of a block follows the other.
const fn together(layout: Layout) -> bool {
    !layout.step.halves()
        && matches!(
            (layout.bits, layout.code),
            (Bits::Eight, _) | (Bits::Four, Code::Offset(_))
        )
}

/// The same with `vpdpbusd`, which adds four products to 32 bits at once: unsigned weights, whose
/// offset is taken out at the start.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn dots_vnni<const TYPE: usize, const NT: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    factors: &Factors,
) -> [__m256i; NT] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller vouches for the quants of eight rows and block `block`.
    unsafe {
        let mut dots = [_mm256_setzero_si256(); NT];
        let mut second = dots;
        for t in 0..NT {
            let meta: &BlockMeta = &*rows[t].meta.add(block);
            dots[t] = _mm256_set1_epi32(match layout.code {
                _ if layout.step.halves() => 0,
                Code::Offset(0) => 0,
                Code::Offset(8) => meta.neg8s,
                Code::Offset(16) => meta.neg8s.wrapping_mul(2),
                // Tables hold their values plus 128, too.
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
                if layout.step.halves() && g >= GROUPS / 2 {
                    second[t] = _mm256_dpbusd_avx_epi32(second[t], weights, a);
                } else {
                    dots[t] = _mm256_dpbusd_avx_epi32(dots[t], weights, a);
                }
            }
        }
        if layout.step.halves() {
            let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(factors.pair));
            let factor = _mm256_srai_epi32::<16>(factors.pair);
            for t in 0..NT {
                let meta: &BlockMeta = &*rows[t].meta.add(block);
                let low = _mm256_mullo_epi32(dots[t], first);
                let high = _mm256_mullo_epi32(second[t], factor);
                let dot = _mm256_add_epi32(low, high);
                let sums = || _mm256_madd_epi16(factors.pair, _mm256_set1_epi32(meta.halves));
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

/// Whether weights take a signed byte each.
const fn signed_bytes(layout: Layout) -> bool {
    matches!(layout.bits, Bits::Eight) || matches!(layout.code, Code::Table(_))
}

/// Weights of 4 or 5 bits, as unsigned; the offset is taken out at the end.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_unsigned<const TYPE: usize, const NT: usize, const H: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
) -> [[__m256i; NT]; H] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let five = matches!(layout.bits, Bits::Five);
    // SAFETY: the caller vouches for the quants of all halves and block `block`.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        // What 16 bits hold: all groups of 4-bit weights, half of them of 5-bit ones.
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

/// Weights of 2, 3 or 6 bits, whose halves have factors.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_of_halves<const TYPE: usize, const NT: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
    pair: __m256i,
) -> [__m256i; NT] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller vouches for the quants of eight rows and block `block`.
    unsafe {
        let weights = unsigned::<TYPE>(quants);
        // A row's factor in both halves of its 32 bits.
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
            let sums = || _mm256_madd_epi16(pair, _mm256_set1_epi32(meta.halves));
            dots[t] = match layout.code {
                Code::Offset(4) => _mm256_sub_epi32(dot, _mm256_slli_epi32::<2>(sums())),
                Code::Offset(32) => _mm256_sub_epi32(dot, _mm256_slli_epi32::<5>(sums())),
                _ => dot,
            };
        }
        dots
    }
}

/// Weights of 8 bits, and those that stand in a table.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_by_magnitude<const TYPE: usize, const NT: usize, const H: usize>(
    quants: *const u8,
    rows: &[ActRow; NT],
    block: usize,
) -> [[__m256i; NT]; H] {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller vouches for the quants of all halves and block `block`.
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

/// All groups of a block, as unsigned bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unsigned<const TYPE: usize>(quants: *const u8) -> [__m256i; GROUPS] {
    // SAFETY: the caller vouches for the quants of eight rows.
    unsafe {
        let mut weights = [_mm256_setzero_si256(); GROUPS];
        for g in 0..GROUPS {
            weights[g] = unsigned_group::<TYPE>(quants, g);
        }
        weights
    }
}

/// Group `g` of a block, as unsigned bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unsigned_group<const TYPE: usize>(quants: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller vouches for the quants of eight rows.
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

/// The nibbles of group `g`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fours(runs: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller vouches for four runs.
    let bytes = unsafe { _mm256_loadu_si256(runs.add(64 * (g % 4)).cast()) };
    let nibbles = if g < 4 {
        bytes
    } else {
        _mm256_srli_epi16::<4>(bytes)
    };
    _mm256_and_si256(nibbles, _mm256_set1_epi8(15))
}

/// The two bits of group `g` that stand in two runs, at bit `AT` of each byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn twos<const AT: i32>(runs: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller vouches for two runs.
    let bytes = unsafe { _mm256_loadu_si256(runs.add(64 * (g / 4)).cast()) };
    moved(bytes, 2 * (g % 4) as i32 - AT, 3 << AT)
}

/// The bit of group `g` that stands in one run, at bit `AT` of each byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn ones<const AT: i32>(run: *const u8, g: usize) -> __m256i {
    // SAFETY: the caller vouches for the run.
    let bytes = unsafe { _mm256_loadu_si256(run.cast()) };
    moved(bytes, g as i32 - AT, 1 << AT)
}

/// Every byte shifted to the right by `by`, or to the left where that is negative, and cut to
/// `mask`. What crosses from byte to byte lies outside of it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn moved(bytes: __m256i, by: i32, mask: i8) -> __m256i {
    // Constant wherever this is inlined: one shift by an immediate.
    let shifted = if by >= 0 {
        _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(by))
    } else {
        _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(-by))
    };
    _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
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

/// Eight values of a field, widened.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn field<const TYPE: usize>(p: *const u8) -> __m256 {
    // SAFETY: the caller vouches for 16 bytes.
    let bits = unsafe { _mm_loadu_si128(p.cast()) };
    if const { Layout::of(WeightType::ALL[TYPE]).wide_fields } {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    } else {
        _mm256_cvtph_ps(bits)
    }
}
