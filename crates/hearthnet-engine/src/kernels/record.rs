//! Sizes of a record of the packed form: `inputs()` weights of 16 rows.

use hearthnet_files::blocks::{Layout, WeightType};

use super::lanes::LANES;

/// Bytes of a record of any type.
pub(super) const fn record_bytes(ty: WeightType) -> usize {
    match ty {
        WeightType::F32 => 64,
        WeightType::F16 | WeightType::BF16 => 32,
        _ => quantised_bytes(Layout::of(ty)),
    }
}

/// Bytes of a record of a quantised type.
pub(super) const fn quantised_bytes(layout: Layout) -> usize {
    head_bytes(layout) + layout.blocks * block_bytes(layout)
}

/// Bytes of the fields of 16 rows, which begin a record.
pub(super) const fn head_bytes(layout: Layout) -> usize {
    2 * LANES * layout.fields
}

/// Bytes for 32 weights of each of 16 rows: sub-scales, then quants.
pub(super) const fn block_bytes(layout: Layout) -> usize {
    LANES * (layout.sub_scale.bytes() + layout.bits.bytes())
}
