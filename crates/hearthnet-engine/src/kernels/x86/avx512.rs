//! AVX-512 inner kernels. A register holds a panel of 16 rows; VNNI's `vpdpbusd` multiplies
//! four unsigned weights of each row with four signed activations.

use std::arch::x86_64::*;

use hearthnet_files::blocks::{BLOCK, Bits, Code, Layout, SubScale, WeightType};

use super::super::act::BlockMeta;
use super::super::lanes::LANES;
use super::super::matmul::{ActRow, PanelDot, float};
use super::super::record::{block_bytes, head_bytes, quantised_bytes};
use super::{lanes, prefetch_l2};

/// Kernel for the weight type `WeightType::ALL[TYPE]`. It unpacks quants in registers: that takes so few
/// of these instructions that storing unpacked panels would cost more.
pub(in super::super) struct Avx512<const TYPE: usize>;

impl<const TYPE: usize> PanelDot for Avx512<TYPE> {
    const PANELS: usize = 2;
    const ROWS: usize = 6;
    const TOGETHER_FROM: usize = 5;

    #[inline(always)]
    unsafe fn dot<const NP: usize, const NT: usize, const U: bool>(
        panels: [*const u8; NP],
        _unpacked: *const u8,
        records: usize,
        rows: [ActRow; NT],
        ahead: usize,
        sums: *mut f32,
    ) {
        // The conditions are constants: only one branch is compiled.
        // SAFETY: the callees have the contract of `dot`.
        unsafe {
            if const { !WeightType::ALL[TYPE].quantised() } {
                plain::<TYPE, NP, NT>(panels, records, rows, ahead, sums);
            } else if const { Layout::of(WeightType::ALL[TYPE]).sub_scale.per_16() } {
                for p in 0..NP {
                    let sums = sums.add(p * NT * LANES);
                    quantised_per_16::<TYPE, NT>(panels[p], records, &rows, ahead, sums);
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
    // SAFETY: the only caller is `dot`, which has the same contract; the type is a float.
    unsafe { float::dot::<lanes::Avx512, TYPE, NP, NT>(panels, records, rows, ahead, sums) }
}

/// Multiplies a block four inputs at a time, for all panels and rows. `NP * NT` independent
/// chains of `vpdpbusd` hide its latency, and only `NP` registers hold weights.
///
/// Not inlined: within the driver, the compiler would spill the accumulators.
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
    // SAFETY: record `r` and its blocks of activations exist for `r < records`. A record has its
    // parts where `pack` puts them. There is room for all sums. A prefetch may point anywhere.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); NT]; NP];
        for r in 0..records {
            let mut records = panels;
            for p in 0..NP {
                records[p] = panels[p].add(r * quantised_bytes(layout));
            }
            for s in 0..layout.blocks {
                let b = r * layout.blocks + s;
                let mut blocks = records;
                let mut quants = records;
                for p in 0..NP {
                    blocks[p] = records[p].add(head_bytes(layout) + s * block_bytes(layout));
                    quants[p] = blocks[p].add(LANES * layout.sub_scale.bytes());
                }
                let mut dots = [[_mm512_setzero_si512(); NT]; NP];
                for t in 0..NT {
                    let meta: &BlockMeta = &*rows[t].meta.add(b);
                    let start = _mm512_set1_epi32(match layout.code {
                        Code::Offset(0) => 0,
                        Code::Offset(8) => meta.neg8s,
                        Code::Offset(16) => meta.neg8s.wrapping_mul(2),
                        // Table values are offset by 128, too.
                        _ => meta.neg128s,
                    });
                    for p in 0..NP {
                        dots[p][t] = start;
                    }
                }
                if ahead > 0 {
                    for p in 0..NP {
                        fetch::<TYPE>(records[p], blocks[p], s, ahead);
                    }
                }
                // Groups that share bytes follow each other, so that no register has to keep them.
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
                        acc[p][t] = match layout.sub_scale {
                            SubScale::None if layout.fields == 2 => {
                                _mm512_fmadd_ps(min, ds, acc[p][t])
                            }
                            SubScale::ScaleMin => _mm512_fnmadd_ps(min, ds, acc[p][t]),
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

/// Multiplies one panel of a type with factors per 16 weights: the dot product of each 16
/// weights is multiplied with its factor before the two are added.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn quantised_per_16<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: &[ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: record `r` and its blocks of activations exist for `r < records`. A record has its
    // parts where `pack` puts them. There is room for all sums.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); NT];
        for r in 0..records {
            let record = panel.add(r * quantised_bytes(layout));
            for s in 0..layout.blocks {
                let b = r * layout.blocks + s;
                let block = record.add(head_bytes(layout) + s * block_bytes(layout));
                if ahead > 0 {
                    fetch::<TYPE>(record, block, s, ahead);
                }
                let sub_scales = _mm256_loadu_si256(block.cast());
                let (pair, min_pair) = match layout.sub_scale {
                    SubScale::ScaleMin16 => {
                        let both = _mm512_cvtepu8_epi16(sub_scales);
                        let pair = _mm512_and_si512(both, _mm512_set1_epi16(15));
                        (pair, _mm512_srli_epi16::<4>(both))
                    }
                    _ => (_mm512_cvtepi8_epi16(sub_scales), _mm512_setzero_si512()),
                };
                let quants = [block.add(LANES * layout.sub_scale.bytes())];
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
                    // Subtracts the offset of all quants, times their factors.
                    let sums = || _mm512_madd_epi16(pair, _mm512_set1_epi32(meta.half_sums));
                    let total = _mm512_add_epi32(low, high);
                    let total = match layout.code {
                        Code::Offset(4) => _mm512_sub_epi32(total, _mm512_slli_epi32::<2>(sums())),
                        Code::Offset(32) => _mm512_sub_epi32(total, _mm512_slli_epi32::<5>(sums())),
                        _ => total,
                    };
                    if matches!(layout.sub_scale, SubScale::ScaleMin16) {
                        let m = field::<TYPE>(record.add(2 * LANES));
                        let sum = _mm512_madd_epi16(min_pair, _mm512_set1_epi32(meta.half_sums));
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

/// Scale and minimum of a block of 32 inputs. Fields are loaded again for each block, because dot
/// products and accumulators leave no registers to keep them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn factors<const TYPE: usize>(record: *const u8, block: *const u8) -> (__m512, __m512) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller ensures the record and the block.
    unsafe {
        let d = field::<TYPE>(record);
        let m = match layout.fields {
            2 => field::<TYPE>(record.add(2 * LANES)),
            _ => _mm512_setzero_ps(),
        };
        match layout.sub_scale {
            SubScale::Scale => {
                let sc = _mm512_cvtepi8_epi32(_mm_loadu_si128(block.cast()));
                (_mm512_mul_ps(d, _mm512_cvtepi32_ps(sc)), m)
            }
            SubScale::ScaleMin => {
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

/// Prefetches the data `ahead` bytes after block `s` of a record (block 0: including the head).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn fetch<const TYPE: usize>(record: *const u8, block: *const u8, s: usize, ahead: usize) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let (start, len) = match s {
        0 => (record, head_bytes(layout) + block_bytes(layout)),
        _ => (block, block_bytes(layout)),
    };
    for line in (0..len).step_by(64) {
        prefetch_l2(start.wrapping_add(ahead + line));
    }
}

/// Weights of group `G`, as unsigned bytes: quants, or table values plus 128.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn group<const TYPE: usize, const G: usize>(quants: *const u8) -> __m512i {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    // SAFETY: the caller ensures the quants of 16 rows.
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

/// Shifts every byte right by `by` (left if negative) and masks it with `mask`, which also clears
/// the bits shifted in from the neighbouring byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn moved(bytes: __m512i, by: i32, mask: i8) -> __m512i {
    // `by` is a constant after inlining, so this compiles to one shift by an immediate.
    let shifted = if by >= 0 {
        _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(by))
    } else {
        _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(-by))
    };
    _mm512_and_si512(shifted, _mm512_set1_epi8(mask))
}

/// Adds to `dots` the products of the weights of group `G` with the four activations of each row
/// in block `block`. The group is a constant, so that shift counts are constants.
///
/// # Safety
/// The rows have the block, and each of `quants` points to the quants of 16 rows.
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
        // SAFETY: each of `quants` points to the quants of 16 rows, by the contract.
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

/// Sixteen values of a field, as `f32`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn field<const TYPE: usize>(p: *const u8) -> __m512 {
    // SAFETY: the caller ensures 32 bytes.
    let bits = unsafe { _mm256_loadu_si256(p.cast()) };
    if const { Layout::of(WeightType::ALL[TYPE]).bf16_fields } {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    } else {
        _mm512_cvtph_ps(bits)
    }
}
