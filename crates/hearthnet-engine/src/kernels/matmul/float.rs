//! Panels of F32, F16 and BF16 weights: no quantisation, one fma per weight.

use super::super::lanes::{LANES, Lanes};
use super::super::prefetch_l2;
use super::super::record::record_bytes;
use super::ActRow;
use hearthnet_files::blocks::WeightType;

/// Products of `NP` panels with `NT` rows of plain activations.
///
/// # Safety
/// As [`super::PanelDot::dot`]; `TYPE` is the index of a float type in [`WeightType::ALL`].
#[inline(always)]
pub(in super::super) unsafe fn dot<
    V: Lanes,
    const TYPE: usize,
    const NP: usize,
    const NT: usize,
>(
    panels: [*const u8; NP],
    records: usize,
    rows: [ActRow; NT],
    ahead: usize,
    sums: *mut f32,
) {
    let ty = const { WeightType::ALL[TYPE] };
    // SAFETY: record `k` of each panel and value `k` of each row exist for `k < records`; there is
    // room for all sums; panels are aligned to 32 bytes.
    unsafe {
        let mut acc = [[V::splat(0.0); NT]; NP];
        for k in 0..records {
            if ahead > 0 {
                for p in 0..NP {
                    prefetch_l2(panels[p].wrapping_add(k * record_bytes(ty) + ahead));
                }
            }
            let mut w = [V::splat(0.0); NP];
            for p in 0..NP {
                w[p] = match ty {
                    WeightType::F16 => V::load_f16(panels[p].cast::<u16>().add(k * LANES)),
                    WeightType::BF16 => V::load_bf16(panels[p].cast::<u16>().add(k * LANES)),
                    _ => V::load(panels[p].cast::<f32>().add(k * LANES)),
                };
            }
            for t in 0..NT {
                let x = V::splat(*rows[t].plain.add(k));
                for p in 0..NP {
                    acc[p][t] = w[p].fma(x, acc[p][t]);
                }
            }
        }
        for p in 0..NP {
            for t in 0..NT {
                acc[p][t].store(sums.add((p * NT + t) * LANES));
            }
        }
    }
}
