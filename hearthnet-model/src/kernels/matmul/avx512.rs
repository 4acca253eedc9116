//! AVX-512 inner kernels: a panel is one register, VNNI's `vpdpbusd` multiplies
//! four unsigned weights of 16 rows with four signed activations.

use std::arch::x86_64::*;

use super::super::act::BlockMeta;
use super::super::block::{BLOCK, Bits, Code, Layout, Step, WeightType};
use super::super::lanes_x86;
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
        // Constants: what they leave out is not even compiled.
        // SAFETY: what this asks its callers for is all that each of these asks for.
        unsafe {
            if const { !WeightType::ALL[TYPE].quantised() } {
                plain::<TYPE, NP, NT>(panels, records, rows, ahead, sums);
            } else if const { Layout::of(WeightType::ALL[TYPE]).step.halves() } {
                for p in 0..NP {
                    let sums = sums.add(p * NT * LANES);
                    halves::<TYPE, NT>(panels[p], records, &rows, ahead, sums);
                }
            } else {
                quantised::<TYPE, NP, NT>(panels, records, &rows, ahead, sums);
            }
        }
    }
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn plain<const TYPE: usize, const NP: usize, const NT: usize>(
    panels: [*const u8; NP],
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    // SAFETY: `dot` is the caller, and passes on what it is promised; the type is a float.
    unsafe { float::dot::<lanes_x86::Avx512, TYPE, NP, NT>(panels, records, rows, ahead, sums) }
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
    rows: &[ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: record `r` exists for `r < records`, and as many blocks of activations as it has;
    // a record has its parts where `pack` puts them; room for all sums. A prefetch may point
    // anywhere.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); NT]; NP];
        for r in 0..records {
            let mut records = panels;
            for p in 0..NP {
                records[p] = panels[p].add(r * layout.record());
            }
            for s in 0..layout.blocks {
                let b = r * layout.blocks + s;
                let mut blocks = records;
                let mut quants = records;
                for p in 0..NP {
                    blocks[p] = records[p].add(layout.head() + s * layout.block_bytes());
                    quants[p] = blocks[p].add(LANES * layout.step.bytes());
                }
                let mut dots = [[_mm512_setzero_si512(); NT]; NP];
                for t in 0..NT {
                    let meta: &BlockMeta = &*rows[t].meta.add(b);
                    let start = _mm512_set1_epi32(match layout.code {
                        Code::Offset(0) => 0,
                        Code::Offset(8) => meta.neg8s,
                        Code::Offset(16) => meta.neg8s.wrapping_mul(2),
                        // Tables hold their values plus 128, too.
                        _ => meta.neg128s,
                    });
                    for p in 0..NP {
                        dots[p][t] = start;
                    }
                }
                if ahead > 0 {
                    for p in 0..NP {
                        fetch::<TYPE, NT>(records[p], blocks[p], s, ahead);
                    }
                }
                // Groups that share bytes follow each other, so that no register keeps the bytes.
                multiply::<TYPE, 0, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 4, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 1, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 5, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 2, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 6, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 3, NP, NT>(&mut dots, quants, rows, b);
                multiply::<TYPE, 7, NP, NT>(&mut dots, quants, rows, b);
                for p in 0..NP {
                    let (scale, min) = factors::<TYPE>(records[p], blocks[p]);
                    for t in 0..NT {
                        let meta: &BlockMeta = &*rows[t].meta.add(b);
                        let ds = _mm512_set1_ps(meta.ds);
                        acc[p][t] = match layout.step {
                            Step::None if layout.fields == 2 => _mm512_fmadd_ps(min, ds, acc[p][t]),
                            Step::ScaleMin => _mm512_fnmadd_ps(min, ds, acc[p][t]),
                            _ => acc[p][t],
                        };
                        let scale = _mm512_mul_ps(scale, _mm512_set1_ps(meta.d));
                        let dot = _mm512_cvtepi32_ps(dots[p][t]);
                        acc[p][t] = _mm512_fmadd_ps(dot, scale, acc[p][t]);
                    }
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

/// One panel of a type whose halves of 16 weights have factors of their own: each half's
/// dot product is multiplied with its factor before they are added.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn halves<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: &[ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: record `r` exists for `r < records`, with its parts where `pack` puts them, and as
    // many blocks of activations; room for all sums.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); NT];
        for r in 0..records {
            let record = panel.add(r * layout.record());
            for s in 0..layout.blocks {
                let b = r * layout.blocks + s;
                let block = record.add(layout.head() + s * layout.block_bytes());
                if ahead > 0 {
                    fetch::<TYPE, NT>(record, block, s, ahead);
                }
                let steps = _mm256_loadu_si256(block.cast());
                let (pair, min_pair) = match layout.step {
                    Step::HalvesMin => {
                        let both = _mm512_cvtepu8_epi16(steps);
                        let pair = _mm512_and_si512(both, _mm512_set1_epi16(15));
                        (pair, _mm512_srli_epi16::<4>(both))
                    }
                    _ => (_mm512_cvtepi8_epi16(steps), _mm512_setzero_si512()),
                };
                let quants = [block.add(LANES * layout.step.bytes())];
                let mut low = [[_mm512_setzero_si512(); NT]; 1];
                let mut high = low;
                multiply::<TYPE, 0, 1, NT>(&mut low, quants, rows, b);
                multiply::<TYPE, 4, 1, NT>(&mut high, quants, rows, b);
                multiply::<TYPE, 1, 1, NT>(&mut low, quants, rows, b);
                multiply::<TYPE, 5, 1, NT>(&mut high, quants, rows, b);
                multiply::<TYPE, 2, 1, NT>(&mut low, quants, rows, b);
                multiply::<TYPE, 6, 1, NT>(&mut high, quants, rows, b);
                multiply::<TYPE, 3, 1, NT>(&mut low, quants, rows, b);
                multiply::<TYPE, 7, 1, NT>(&mut high, quants, rows, b);
                let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pair));
                let second = _mm512_srai_epi32::<16>(pair);
                let d = field::<TYPE>(record);
                for t in 0..NT {
                    let meta: &BlockMeta = &*rows[t].meta.add(b);
                    let row = _mm512_set1_ps(meta.d);
                    let low = _mm512_mullo_epi32(low[0][t], first);
                    let high = _mm512_mullo_epi32(high[0][t], second);
                    // Less the offset of all quants, times their factors.
                    let sums = || _mm512_madd_epi16(pair, _mm512_set1_epi32(meta.halves));
                    let total = _mm512_add_epi32(low, high);
                    let total = match layout.code {
                        Code::Offset(4) => _mm512_sub_epi32(total, _mm512_slli_epi32::<2>(sums())),
                        Code::Offset(32) => _mm512_sub_epi32(total, _mm512_slli_epi32::<5>(sums())),
                        _ => total,
                    };
                    if matches!(layout.step, Step::HalvesMin) {
                        let m = field::<TYPE>(record.add(2 * LANES));
                        let sum = _mm512_madd_epi16(min_pair, _mm512_set1_epi32(meta.halves));
                        let ds = _mm512_mul_ps(row, _mm512_cvtepi32_ps(sum));
                        acc[t] = _mm512_fnmadd_ps(m, ds, acc[t]);
                    }
                    let dot = _mm512_cvtepi32_ps(total);
                    acc[t] = _mm512_fmadd_ps(dot, _mm512_mul_ps(d, row), acc[t]);
                }
            }
        }
        for t in 0..NT {
            _mm512_storeu_ps(sums.add(t * LANES), acc[t]);
        }
    }
}

/// Scale and minimum of a block of 32 inputs. The fields are read for each block: dot products
/// and accumulators leave no registers to keep them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn factors<const TYPE: usize>(record: *const u8, block: *const u8) -> (__m512, __m512) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller vouches for the record and the block.
    unsafe {
        let d = field::<TYPE>(record);
        let m = match layout.fields {
            2 => field::<TYPE>(record.add(2 * LANES)),
            _ => _mm512_setzero_ps(),
        };
        match layout.step {
            Step::Scale => {
                let sc = _mm512_cvtepi8_epi32(_mm_loadu_si128(block.cast()));
                (_mm512_mul_ps(d, _mm512_cvtepi32_ps(sc)), m)
            }
            Step::ScaleMin => {
                let both = _mm512_cvtepu16_epi32(_mm256_loadu_si256(block.cast()));
                let sc = _mm512_and_si512(both, _mm512_set1_epi32(255));
                let mc = _mm512_srli_epi32::<8>(both);
                (
                    _mm512_mul_ps(d, _mm512_cvtepi32_ps(sc)),
                    _mm512_mul_ps(m, _mm512_cvtepi32_ps(mc)),
                )
            }
            _ => (d, m),
        }
    }
}

/// Asks for what lies `ahead` bytes behind block `s` of a record, and behind its head.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn fetch<const TYPE: usize, const NT: usize>(
    record: *const u8,
    block: *const u8,
    s: usize,
    ahead: usize,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let (start, len) = match s {
        0 => (record, layout.head() + layout.block_bytes()),
        _ => (block, layout.block_bytes()),
    };
    for line in (0..len).step_by(64) {
        fetch_weights::<NT>(start.wrapping_add(ahead + line));
    }
}

/// The weights of group `G`, as unsigned bytes: quants, or for a table its values plus 128.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn group<const TYPE: usize, const G: usize>(quants: *const u8) -> __m512i {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller vouches for the quants of 16 rows.
    unsafe {
        let run = |r: usize| _mm512_loadu_si512(quants.add(64 * r).cast());
        let four = || {
            let nibbles = match G {
                0..4 => run(G),
                _ => _mm512_srli_epi16::<4>(run(G - 4)),
            };
            _mm512_and_si512(nibbles, _mm512_set1_epi8(15))
        };
        let two = |from: usize, at: i32| {
            let by = 2 * (G % 4) as i32 - at;
            moved(run(from + G / 4), by, 3 << at)
        };
        let one = |from: usize, at: i32| moved(run(from), G as i32 - at, 1 << at);
        let quants = match layout.bits {
            Bits::Two => two(0, 0),
            Bits::Three => _mm512_or_si512(two(0, 0), one(2, 2)),
            Bits::Four => four(),
            Bits::Five => _mm512_or_si512(four(), one(4, 4)),
            Bits::Six => _mm512_or_si512(four(), two(4, 4)),
            Bits::Eight => run(G),
        };
        match layout.code {
            Code::Offset(_) => quants,
            Code::Table(table) => {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                let table = _mm512_xor_si512(table, _mm512_set1_epi8(-128));
                _mm512_shuffle_epi8(table, quants)
            }
        }
    }
}

/// Every byte shifted to the right by `by`, or to the left where that is negative, and cut to
/// `mask`. What crosses from byte to byte lies outside of it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn moved(bytes: __m512i, by: i32, mask: i8) -> __m512i {
    // Constant wherever this is inlined: one shift by an immediate.
    let shifted = if by >= 0 {
        _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(by))
    } else {
        _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(-by))
    };
    _mm512_and_si512(shifted, _mm512_set1_epi8(mask))
}

/// Adds the products of the weights of group `G` with four activations of each row, in block
/// `block`. The group is a constant so that shifts by it are.
///
/// # Safety
/// The rows have the block, and `quants` points to those of 16 rows each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<const TYPE: usize, const G: usize, const NP: usize, const NT: usize>(
    dots: &mut [[__m512i; NT]; NP],
    quants: [*const u8; NP],
    rows: &[ActRow; NT],
    block: usize,
) {
    let mut weights = [_mm512_setzero_si512(); NP];
    for p in 0..NP {
        // SAFETY: `quants` points to those of 16 rows, by the contract.
        weights[p] = unsafe { group::<TYPE, G>(quants[p]) };
    }
    let at = block * BLOCK + 4 * G;
    for t in 0..NT {
        // SAFETY: the rows have the block, by the contract.
        let four = unsafe { rows[t].quants.add(at).cast::<i32>().read_unaligned() };
        let four = _mm512_set1_epi32(four);
        for p in 0..NP {
            dots[p][t] = _mm512_dpbusd_epi32(dots[p][t], weights[p], four);
        }
    }
}

/// Sixteen values of a field, widened.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn field<const TYPE: usize>(p: *const u8) -> __m512 {
    // SAFETY: the caller vouches for 32 bytes.
    let bits = unsafe { _mm256_loadu_si256(p.cast()) };
    if const { Layout::of(WeightType::ALL[TYPE]).wide_fields } {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    } else {
        _mm512_cvtph_ps(bits)
    }
}
