//! Kernels for x86-64.

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

use hearthnet_files::blocks::Layout;

use super::lanes::LANES;
use super::matmul::UNPACKED_BLOCK;
use super::record::{block_bytes, head_bytes, quantised_bytes};

pub(super) mod avx2;
mod avx2_dots;
pub(super) mod avx512;
pub(super) mod lanes;

/// Prefetches the cache line at `p` into L1. `p` may be invalid.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    // SAFETY: a prefetch reads nothing; SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
}

/// Prefetches the cache line at `p` into L2. `p` may be invalid.
#[inline(always)]
pub(super) fn prefetch_l2(p: *const u8) {
    // SAFETY: a prefetch reads nothing; SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
}

/// Quants of each block of a panel, and where `PanelDot::unpack` writes them.
#[inline(always)]
fn blocks_of(
    layout: Layout,
    panel: *const u8,
    records: usize,
    to: *mut u8,
) -> impl Iterator<Item = (*const u8, *mut u8)> {
    let records = (0..records).map(move |r| panel.wrapping_add(r * quantised_bytes(layout)));
    let first = head_bytes(layout) + LANES * layout.sub_scale.bytes();
    let blocks = records.flat_map(move |record| {
        (0..layout.blocks).map(move |s| record.wrapping_add(first + s * block_bytes(layout)))
    });
    let places = (0..).map(move |block| to.wrapping_add(block * UNPACKED_BLOCK));
    blocks.zip(places)
}
