//! Memory for packed weights and for the KV cache: few large mappings, on huge pages if the
//! system has them, filled front to back. Decoding a token reads all of it once, so TLB misses
//! would dominate with small pages.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

use super::PackError;

/// Alignment of packed matrices in bytes: a cache line, or a 512-bit register.
const ALIGN: usize = 64;
/// Huge page in bytes on x86-64 and on most AArch64 systems.
const HUGE_PAGE: usize = 2 << 20;

/// Allocator for [`super::Packed`] matrices and for [`F16Buffer`]. A mapping lives as long as any
/// allocation in it.
#[derive(Debug, Default)]
pub struct Arena {
    current: Option<Arc<Mapping>>,
    next: usize,
    /// Minimum bytes of the next mapping.
    step: usize,
}

/// Anonymous mapping, accessed through `base` only.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    _map: MmapMut,
}

// SAFETY: the mapping is plain memory. Its regions do not overlap, and borrowing a region borrows
// its bytes (see `Region`).
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives no access to the bytes; only a region does.
unsafe impl Sync for Mapping {}

impl Arena {
    /// An arena with room for `bytes`; it grows on demand. Pass the sum of
    /// [`super::Packed::bytes_for`] of all matrices to get a single mapping.
    ///
    /// # Errors
    /// [`PackError::OutOfMemory`] when the system refuses the mapping.
    pub fn with_capacity(bytes: usize) -> Result<Self, PackError> {
        let mut arena = Self::default();
        if bytes > 0 {
            arena.map(bytes)?;
        }
        Ok(arena)
    }

    /// An empty arena that grows by at least `step` bytes per mapping.
    pub fn growing_by(step: usize) -> Self {
        Self {
            step,
            ..Self::default()
        }
    }

    /// Allocates `len` zeroed 16-bit cells, aligned to a cache line.
    ///
    /// # Errors
    /// [`PackError::OutOfMemory`] when the system refuses it.
    pub fn f16_buffer(&mut self, len: usize) -> Result<F16Buffer, PackError> {
        let bytes = len.checked_mul(2).ok_or(PackError::TooLarge)?;
        self.take(bytes).map(F16Buffer)
    }

    /// Allocates `len` zero bytes, aligned to 64.
    pub(super) fn take(&mut self, len: usize) -> Result<Region, PackError> {
        let padded = len
            .checked_next_multiple_of(ALIGN)
            .ok_or(PackError::TooLarge)?;
        let mapping = match &self.current {
            Some(mapping) if padded <= mapping.len - self.next => Arc::clone(mapping),
            _ => self.map(padded)?,
        };
        let region = Region {
            mapping,
            offset: self.next,
            len,
        };
        self.next += padded;
        Ok(region)
    }

    fn map(&mut self, bytes: usize) -> Result<Arc<Mapping>, PackError> {
        let bytes = bytes.max(self.step);
        // Small arenas (tests, single matrices) do not need huge pages.
        let huge = bytes >= HUGE_PAGE;
        let slack = if huge { HUGE_PAGE } else { 0 };
        let len = bytes
            .max(ALIGN)
            .checked_next_multiple_of(ALIGN)
            .and_then(|n| n.checked_add(slack))
            .ok_or(PackError::TooLarge)?;
        let mut map = MmapMut::map_anon(len).map_err(PackError::OutOfMemory)?;
        if huge {
            // A failure only costs speed.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let base = NonNull::from(&mut map[..]).cast::<u8>();
        self.next = if huge {
            base.as_ptr().align_offset(HUGE_PAGE).min(slack)
        } else {
            0
        };
        let mapping = Arc::new(Mapping {
            base,
            len,
            _map: map,
        });
        self.current = Some(Arc::clone(&mapping));
        Ok(mapping)
    }
}

/// Part of a mapping that belongs to one allocation. Not `Clone`, so that borrowing a region
/// borrows its bytes.
#[derive(Debug)]
pub(super) struct Region {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl Region {
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `take` keeps offset + len within the mapping, which lives as long
        // as `self`; regions do not overlap, and `&self` excludes `bytes_mut`.
        unsafe { std::slice::from_raw_parts(self.mapping.base.as_ptr().add(self.offset), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `take` keeps the region within the mapping; `&mut self` makes the borrow unique,
        // and the mapping is private, readable and writable.
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.base.as_ptr().add(self.offset), self.len)
        }
    }
}

/// Buffer of 16-bit cells in an [`Arena`]: binary16 values, or bytes of a cache of 8 bits.
#[derive(Debug)]
pub struct F16Buffer(Region);

impl Deref for F16Buffer {
    type Target = [u16];

    fn deref(&self) -> &[u16] {
        bytemuck::cast_slice(self.0.bytes())
    }
}

impl DerefMut for F16Buffer {
    fn deref_mut(&mut self) -> &mut [u16] {
        bytemuck::cast_slice_mut(self.0.bytes_mut())
    }
}
