//! Portable inner kernels, the reference for the other instruction sets.

use hearthnet_files::blocks::{BLOCK, Code, Layout, SubScale, WeightType};

use super::super::act::BlockMeta;
use super::super::lanes::LANES;
use super::super::matmul::{ActRow, PanelDot, float};
use super::super::pack::quant;
use super::super::record::{block_bytes, head_bytes, quantised_bytes};
use super::lanes::Array;

/// Kernel for the weight type `WeightType::ALL[TYPE]`.
pub(in super::super) struct Portable<const TYPE: usize>;

impl<const TYPE: usize> PanelDot for Portable<TYPE> {
    const PANELS: usize = 1;
    const ROWS: usize = 4;
    const TOGETHER_FROM: usize = usize::MAX;

    #[inline(always)]
    unsafe fn dot<const NP: usize, const NT: usize, const U: bool>(
        panels: [*const u8; NP],
        _unpacked: *const u8,
        records: usize,
        rows: [ActRow; NT],
        _ahead: usize,
        sums: *mut f32,
    ) {
        // SAFETY: the callees have the contract of `dot`.
        unsafe {
            if const { WeightType::ALL[TYPE].quantised() } {
                for p in 0..NP {
                    quantised::<TYPE, NT>(panels[p], records, &rows, sums.add(p * NT * LANES));
                }
            } else {
                float::dot::<Array, TYPE, NP, NT>(panels, records, rows, 0, sums);
            }
        }
    }
}

/// Products of one panel of quantised weights with `NT` rows.
#[inline(never)]
unsafe fn quantised<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: &[ActRow; NT],
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let size = quantised_bytes(layout);
    let mut acc = [[0f32; LANES]; NT];
    for r in 0..records {
        // SAFETY: the panel has `records` records.
        let record: &[u8] = unsafe { std::slice::from_raw_parts(panel.add(r * size), size) };
        let (head, blocks) = record.split_at(head_bytes(layout));
        let field = |i: usize| -> [f32; LANES] {
            std::array::from_fn(|lane| {
                let at = 2 * (i * LANES + lane);
                layout.field(u16::from_le_bytes([head[at], head[at + 1]]))
            })
        };
        let scales = field(0);
        let minima = if layout.fields == 2 { field(1) } else { scales };
        for s in 0..layout.blocks {
            let block = &blocks[s * block_bytes(layout)..][..block_bytes(layout)];
            let (sub_scales, runs) = block.split_at(LANES * layout.sub_scale.bytes());
            let b = r * layout.blocks + s;
            // SAFETY: a row has as many blocks as its panel.
            let acts: [(&[i8; BLOCK], &BlockMeta); NT] =
                unsafe { rows.map(|row| (&*row.quants.add(b * BLOCK).cast(), &*row.meta.add(b))) };
            // Index 1 is used by types with factors per 16 inputs only.
            let mut dots = [[[0i32; LANES]; 2]; NT];
            for g in 0..BLOCK / 4 {
                let half = if layout.sub_scale.per_16() { g / 4 } else { 0 };
                let group = group(&layout, runs, g);
                for (dots, (a, _)) in dots.iter_mut().zip(&acts) {
                    let a = [a[4 * g], a[4 * g + 1], a[4 * g + 2], a[4 * g + 3]].map(i32::from);
                    for (dot, w) in dots[half].iter_mut().zip(group.chunks_exact(4)) {
                        *dot += i32::from(w[0]) * a[0]
                            + i32::from(w[1]) * a[1]
                            + i32::from(w[2]) * a[2]
                            + i32::from(w[3]) * a[3];
                    }
                }
            }
            for ((acc, [first, second]), (_, meta)) in acc.iter_mut().zip(&dots).zip(&acts) {
                for lane in 0..LANES {
                    let bytes = layout.sub_scale.bytes();
                    let sub_scale = |i: usize| sub_scales[lane * bytes + i];
                    let signed = |i: usize| i32::from(sub_scale(i) as i8);
                    let (d, m) = (scales[lane], minima[lane]);
                    let acc = &mut acc[lane];
                    let (dot, scale) = match layout.sub_scale {
                        SubScale::None => {
                            if layout.fields == 2 {
                                *acc = m.mul_add(meta.ds, *acc);
                            }
                            (first[lane], d)
                        }
                        SubScale::Scale => (first[lane], d * signed(0) as f32),
                        SubScale::ScaleMin => {
                            *acc = (-(m * f32::from(sub_scale(1)))).mul_add(meta.ds, *acc);
                            (first[lane], d * f32::from(sub_scale(0)))
                        }
                        SubScale::Scale16 => {
                            (first[lane] * signed(0) + second[lane] * signed(1), d)
                        }
                        SubScale::ScaleMin16 => {
                            let [low, high] =
                                [meta.half_sums as i16, (meta.half_sums >> 16) as i16];
                            let sum = i32::from(sub_scale(0) >> 4) * i32::from(low)
                                + i32::from(sub_scale(1) >> 4) * i32::from(high);
                            *acc = (-m).mul_add(meta.d * sum as f32, *acc);
                            let factor = |i: usize| i32::from(sub_scale(i) & 15);
                            (first[lane] * factor(0) + second[lane] * factor(1), d)
                        }
                    };
                    *acc = (dot as f32).mul_add(scale * meta.d, *acc);
                }
            }
        }
    }
    // SAFETY: room for `NT * 16` sums, by the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(acc.as_ptr().cast(), sums, NT * LANES) };
}

/// The 64 weights (16 rows by 4 inputs) of group `g`, as signed integers.
#[inline(always)]
fn group(layout: &Layout, runs: &[u8], g: usize) -> [i8; 4 * LANES] {
    std::array::from_fn(|at| {
        let quant = quant(layout.bits, runs, g, at);
        match layout.code {
            Code::Offset(offset) => (i32::from(quant) - offset) as i8,
            Code::Table(table) => table[usize::from(quant & 15)],
        }
    })
}
