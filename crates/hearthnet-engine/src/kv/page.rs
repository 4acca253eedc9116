//! KV pages: allocation, reference counts, and layout.

use std::ops::Range;

use zeroize::Zeroize;

use crate::error::EngineError;
use crate::kernels::{Arena, F16Buffer, SharedMut, page_len};

/// Minimum allocation of the pool in bytes: a few huge pages. Each token reads all keys and values
/// of its sequence; with small pages, TLB misses would take most of that time.
const STEP: u64 = 4 << 20;

/// Shape of the keys and values of a position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    pub(crate) first_layer: u32,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Geometry {
    /// Head slabs of a page: one for each KV head of each layer.
    pub(crate) fn head_slabs(&self) -> usize {
        self.layers * self.kv_heads
    }

    /// Index of the slab of a KV head; `layer` counts from the engine's first layer.
    pub(crate) fn slab_index(&self, layer: usize, head: usize) -> usize {
        layer * self.kv_heads + head
    }

    /// Range of a slab in a page. `kernels::key_cell` and `value_cell` define its layout.
    pub(crate) fn slab_range(&self, slab: usize) -> Range<usize> {
        let len = page_len(self.head_dim);
        slab * len..(slab + 1) * len
    }

    pub(crate) fn layer_range(&self) -> Range<u32> {
        // `layers` is the length of a range of u32.
        self.first_layer..self.first_layer.saturating_add(self.layers as u32)
    }

    pub(crate) fn page_values(&self) -> usize {
        self.head_slabs() * page_len(self.head_dim)
    }

    /// Bytes of a page; values are binary16.
    pub(crate) fn page_bytes(&self) -> u64 {
        2 * self.page_values() as u64
    }

    /// Bytes of one position in one layer, keys and values together.
    pub(crate) fn position_bytes(&self) -> u64 {
        2 * 2 * (self.kv_heads * self.head_dim) as u64
    }
}

/// Pool of reference-counted pages, grown on demand up to `limit` pages.
pub(super) struct Pages {
    geometry: Geometry,
    limit: usize,
    arena: Arena,
    memory: Vec<F16Buffer>,
    /// Reference count of each page: number of page tables that contain it.
    owners: Vec<u32>,
    /// Pages without owners, filled with zeros.
    spare: Vec<usize>,
}

impl Pages {
    pub(super) fn new(geometry: Geometry, limit: usize) -> Self {
        // A pool with a small limit does not allocate more than that.
        let most = (limit as u64).saturating_mul(geometry.page_bytes());
        let step = usize::try_from(STEP.min(most)).unwrap_or(usize::MAX);
        Self {
            geometry,
            limit,
            arena: Arena::growing_by(step),
            memory: Vec::new(),
            owners: Vec::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(super) fn in_use(&self) -> usize {
        self.memory.len() - self.spare.len()
    }

    /// Number of pages that can still be taken.
    pub(super) fn free(&self) -> usize {
        self.limit.saturating_sub(self.in_use())
    }

    pub(super) fn is_shared(&self, page: usize) -> bool {
        self.owners[page] > 1
    }

    /// Allocates memory so that the next `count` calls of [`Self::take`] succeed.
    pub(super) fn prepare(&mut self, count: usize) -> Result<(), EngineError> {
        let values = self.geometry.page_values();
        while self.spare.len() < count {
            let bytes = self.geometry.page_bytes();
            let memory = self.arena.f16_buffer(values);
            let memory = memory.map_err(|_| EngineError::OutOfMemory(bytes))?;
            self.spare.push(self.memory.len());
            self.memory.push(memory);
            self.owners.push(0);
        }
        Ok(())
    }

    /// Takes a page of zeros, with one owner.
    pub(super) fn take(&mut self) -> Result<usize, EngineError> {
        self.prepare(1)?;
        let bytes = self.geometry.page_bytes();
        let page = self.spare.pop().ok_or(EngineError::OutOfMemory(bytes))?;
        self.owners[page] = 1;
        Ok(page)
    }

    /// Returns `page` if it has a single owner, otherwise a copy with one owner.
    pub(super) fn make_own(&mut self, page: usize) -> Result<usize, EngineError> {
        if !self.is_shared(page) {
            return Ok(page);
        }
        let copy = self.take()?;
        if let Ok([from, to]) = self.memory.get_disjoint_mut([page, copy]) {
            to.copy_from_slice(from);
        }
        self.owners[page] -= 1;
        Ok(copy)
    }

    pub(super) fn share(&mut self, pages: &[usize]) {
        for &page in pages {
            self.owners[page] += 1;
        }
    }

    /// Decrements the reference count of each of `pages`. Zeroes and frees pages without owners.
    pub(super) fn release(&mut self, pages: impl IntoIterator<Item = usize>) {
        for page in pages {
            self.owners[page] -= 1;
            if self.owners[page] == 0 {
                self.memory[page].fill(0);
                self.spare.push(page);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn slab(&self, page: usize, slab: usize) -> &[u16] {
        &self.memory[page][self.geometry.slab_range(slab)]
    }

    pub(super) fn views(&mut self) -> Vec<SharedMut<'_, u16>> {
        self.memory
            .iter_mut()
            .map(|page| SharedMut::new(page))
            .collect()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for page in &mut self.memory {
            page.zeroize();
        }
    }
}
