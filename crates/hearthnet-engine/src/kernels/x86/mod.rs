//! Kernels for x86-64.

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

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
