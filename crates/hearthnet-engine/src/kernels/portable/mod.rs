//! Kernels in plain Rust, for every processor. They are the reference for those of other folders.

pub(super) mod lanes;
pub(super) mod matmul;

/// Without effect: there is no prefetch in plain Rust.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn prefetch(_: *const u8) {}

/// Without effect.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn prefetch_l2(_: *const u8) {}
