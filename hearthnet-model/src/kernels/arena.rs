//! Memory for packed weights, and for keys and values: few large mappings, on huge
//! pages where the system has them, filled front to back. Decoding a token walks
//! through all of it once, so what counts is that addresses are translated quickly.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

use super::PackError;

/// Packed matrices start at multiples of this: a cache line, a 512-bit register.
const ALIGN: usize = 64;
/// Size of a huge page on x86-64 and on most AArch64 systems.
const HUGE_PAGE: usize = 2 << 20;

/// Hands out memory for [`super::Packed`] matrices and for [`Halves`]. The memory
/// lives as long as anything in it.
#[derive(Debug, Default)]
pub struct Arena {
    current: Option<Arc<Mapping>>,
    next: usize,
    reserved: usize,
    /// Least bytes of the next mapping.
    step: usize,
}

/// An anonymous mapping whose bytes are reached through `base` only.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Unmaps on drop.
    _map: MmapMut,
}

// SAFETY: the mapping is plain memory; regions of it are handed out without
// overlap, each behind its own borrow rules (see `Region`).
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping gives out nothing; what is read or written is a region's.
unsafe impl Sync for Mapping {}

impl Arena {
    /// An arena with room for `bytes`; it grows when that is not enough. Reserve
    /// the sum of [`super::Packed::bytes_for`] of all matrices to get one mapping.
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

    /// An empty arena that grows by at least `step` bytes at a time.
    pub fn growing_by(step: usize) -> Self {
        Self {
            step,
            ..Self::default()
        }
    }

    /// Memory for `len` binary16 values, all zero, on a cache line of its own.
    ///
    /// # Errors
    /// [`PackError::OutOfMemory`] when the system refuses it.
    pub fn halves(&mut self, len: usize) -> Result<Halves, PackError> {
        let bytes = len.checked_mul(2).ok_or(PackError::TooLarge)?;
        self.take(bytes).map(Halves)
    }

    /// Bytes mapped so far (address space; pages count once they are written).
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// A fresh region of `len` zero bytes, aligned to 64.
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
        // Small arenas (tests, single matrices) need no huge pages.
        let huge = bytes >= HUGE_PAGE;
        let slack = if huge { HUGE_PAGE } else { 0 };
        let len = bytes
            .max(ALIGN)
            .checked_next_multiple_of(ALIGN)
            .and_then(|n| n.checked_add(slack))
            .ok_or(PackError::TooLarge)?;
        let mut map = MmapMut::map_anon(len).map_err(PackError::OutOfMemory)?;
        if huge {
            // Advice only: without huge pages everything works, more slowly.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let base = NonNull::from(&mut map[..]).cast::<u8>();
        self.next = if huge {
            base.as_ptr().align_offset(HUGE_PAGE).min(slack)
        } else {
            0
        };
        self.reserved += len;
        let mapping = Arc::new(Mapping {
            base,
            len,
            _map: map,
        });
        self.current = Some(Arc::clone(&mapping));
        Ok(mapping)
    }
}

/// The part of a mapping that belongs to one matrix. Not `Clone`: a borrow of
/// the region is a borrow of its bytes.
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
        // SAFETY: `take` keeps the region within the mapping; `&mut self` makes the borrow unique, and the
        // mapping is private, readable and writable.
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.base.as_ptr().add(self.offset), self.len)
        }
    }
}

/// Binary16 values in an arena's memory.
#[derive(Debug)]
pub struct Halves(Region);

impl Deref for Halves {
    type Target = [u16];

    fn deref(&self) -> &[u16] {
        bytemuck::cast_slice(self.0.bytes())
    }
}

impl DerefMut for Halves {
    fn deref_mut(&mut self) -> &mut [u16] {
        bytemuck::cast_slice_mut(self.0.bytes_mut())
    }
}
