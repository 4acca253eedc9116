//! The portable inner kernels, and the reference for the others.

use super::super::act::BlockMeta;
use super::super::block::{BLOCK, Code, Layout, Step, WeightType};
use super::super::lanes::{Array, LANES};
use super::super::pack::quant;
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
        // SAFETY: what this asks its callers for is all that each of these asks for.
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

/// One panel of quantised weights.
#[inline(never)]
unsafe fn quantised<const TYPE: usize, const NT: usize>(
    panel: *const u8,
    records: usize,
    rows: &[ActRow; NT],
    sums: *mut f32,
) {
    let layout = const { Layout::of(WeightType::ALL[TYPE]) };
    let mut acc = [[0f32; LANES]; NT];
    for r in 0..records {
        // SAFETY: the panel has `records` records.
        let record: &[u8] =
            unsafe { std::slice::from_raw_parts(panel.add(r * layout.record()), layout.record()) };
        let (head, blocks) = record.split_at(layout.head());
        let field = |i: usize| -> [f32; LANES] {
            std::array::from_fn(|lane| {
                let at = 2 * (i * LANES + lane);
                layout.field(u16::from_le_bytes([head[at], head[at + 1]]))
            })
        };
        let scales = field(0);
        let minima = if layout.fields == 2 { field(1) } else { scales };
        for s in 0..layout.blocks {
            let block = &blocks[s * layout.block_bytes()..][..layout.block_bytes()];
            let (steps, runs) = block.split_at(LANES * layout.step.bytes());
            let b = r * layout.blocks + s;
            // SAFETY: a row has as many blocks as its panel.
            let acts: [(&[i8; BLOCK], &BlockMeta); NT] =
                unsafe { rows.map(|row| (&*row.quants.add(b * BLOCK).cast(), &*row.meta.add(b))) };
            // Of the first and the second 16 inputs, where they have factors of their own.
            let mut dots = [[[0i32; LANES]; 2]; NT];
            for g in 0..BLOCK / 4 {
                let half = if layout.step.halves() { g / 4 } else { 0 };
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
                    let bytes = layout.step.bytes();
                    let step = |i: usize| steps[lane * bytes + i];
                    let signed = |i: usize| i32::from(step(i) as i8);
                    let (d, m) = (scales[lane], minima[lane]);
                    let acc = &mut acc[lane];
                    let (dot, scale) = match layout.step {
                        Step::None => {
                            if layout.fields == 2 {
                                *acc = m.mul_add(meta.ds, *acc);
                            }
                            (first[lane], d)
                        }
                        Step::Scale => (first[lane], d * signed(0) as f32),
                        Step::ScaleMin => {
                            *acc = (-(m * f32::from(step(1)))).mul_add(meta.ds, *acc);
                            (first[lane], d * f32::from(step(0)))
                        }
                        Step::Halves => (first[lane] * signed(0) + second[lane] * signed(1), d),
                        Step::HalvesMin => {
                            let [low, high] = [meta.halves as i16, (meta.halves >> 16) as i16];
                            let sum = i32::from(step(0) >> 4) * i32::from(low)
                                + i32::from(step(1) >> 4) * i32::from(high);
                            *acc = (-m).mul_add(meta.d * sum as f32, *acc);
                            let factor = |i: usize| i32::from(step(i) & 15);
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

/// The 64 weights of group `g` of 32 inputs, as signed integers.
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
