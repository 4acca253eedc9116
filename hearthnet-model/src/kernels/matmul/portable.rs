//! The portable inner kernels, and the reference for the others.

use super::super::act::BlockMeta;
use super::super::convert::f16_to_f32;
use super::super::lanes::{Array, LANES};
use super::super::pack::{BLOCK, WeightType, quants_at};
use super::{ActRow, PanelDot, float};

/// Weights of the type numbered as in [`WeightType::ALL`].
pub(in super::super) struct Portable<const TYPE: usize>;

impl<const TYPE: usize> PanelDot for Portable<TYPE> {
    const PANELS: usize = 1;
    const ROWS: usize = 4;
    const TOGETHER_FROM: usize = usize::MAX;

    #[inline(always)]
    unsafe fn dot<const NP: usize, const NT: usize>(
        panels: [*const u8; NP],
        records: usize,
        rows: [ActRow; NT],
        _ahead: usize,
        sums: *mut f32,
    ) {
        // SAFETY: as the caller.
        unsafe {
            match const { WeightType::ALL[TYPE] } {
                WeightType::F32 => {
                    float::dot::<Array, false, NP, NT>(panels, records, rows, 0, sums);
                }
                WeightType::F16 => {
                    float::dot::<Array, true, NP, NT>(panels, records, rows, 0, sums);
                }
                _ => {
                    for (p, panel) in panels.into_iter().enumerate() {
                        quantised::<TYPE, NT>(panel, records, rows, sums.add(p * NT * LANES));
                    }
                }
            }
        }
    }
}

/// One panel of quantised weights.
#[inline(never)]
unsafe fn quantised<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: [ActRow; NT],
    sums: *mut f32,
) {
    let ty = const { WeightType::ALL[TYPE] };
    let mut acc = [[0f32; LANES]; NT];
    for b in 0..records {
        // SAFETY: the panel has `records` records, each row as many blocks.
        let (record, blocks): (&[u8], [(&[i8; BLOCK], &BlockMeta); NT]) = unsafe {
            (
                std::slice::from_raw_parts(panel.add(b * ty.record()), ty.record()),
                rows.map(|row| (&*row.quants.add(b * BLOCK).cast(), &*row.meta.add(b))),
            )
        };
        let (fields, quants) = record.split_at(quants_at(ty));
        let field = |i: usize| -> [f32; LANES] {
            std::array::from_fn(|lane| {
                let at = 2 * (i * LANES + lane);
                f16_to_f32(u16::from_le_bytes([fields[at], fields[at + 1]]))
            })
        };
        let scales = field(0);
        let mut dots = [[0i32; LANES]; NT];
        for g in 0..BLOCK / 4 {
            let group = group(ty, quants, g);
            for (dots, (a, _)) in dots.iter_mut().zip(&blocks) {
                let a = [a[4 * g], a[4 * g + 1], a[4 * g + 2], a[4 * g + 3]].map(i32::from);
                for (dot, w) in dots.iter_mut().zip(group.chunks_exact(4)) {
                    *dot += i32::from(w[0]) * a[0]
                        + i32::from(w[1]) * a[1]
                        + i32::from(w[2]) * a[2]
                        + i32::from(w[3]) * a[3];
                }
            }
        }
        for ((acc, dots), (_, meta)) in acc.iter_mut().zip(&dots).zip(&blocks) {
            if ty == WeightType::Q4_1 {
                for (acc, m) in acc.iter_mut().zip(field(1)) {
                    *acc = m.mul_add(meta.ds, *acc);
                }
            }
            for ((acc, dot), scale) in acc.iter_mut().zip(dots).zip(scales) {
                *acc = (*dot as f32).mul_add(scale * meta.d, *acc);
            }
        }
    }
    // SAFETY: room for `NT * 16` sums, by the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(acc.as_ptr().cast(), sums, NT * LANES) };
}

/// The 64 weights of group `g` of a block, as signed integers.
#[inline(always)]
fn group(ty: WeightType, quants: &[u8], g: usize) -> [i8; 4 * LANES] {
    std::array::from_fn(|i| match ty {
        WeightType::Q8_0 => (quants[g * 4 * LANES + i] ^ 0x80) as i8,
        _ => {
            let byte = quants[g % 4 * 4 * LANES + i];
            let nibble = if g < 4 { byte & 15 } else { byte >> 4 } as i8;
            if ty == WeightType::Q4_0 {
                nibble - 8
            } else {
                nibble
            }
        }
    })
}
