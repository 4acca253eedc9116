//! Pages: allocation, owners, and where a position's cells lie in a page.

use std::ops::Range;

use zeroize::Zeroize;

use super::super::error::EngineError;
use crate::kernels::{Arena, Halves, SharedMut, page_len};

/// Least memory that the pool takes from the system at a time, in bytes: a few huge pages. An
/// answer's keys and values are read once per token, and with small pages most of that time would
/// go into looking addresses up.
const STEP: u64 = 4 << 20;

/// What a position's keys and values are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    /// First layer of the engine.
    pub(crate) first_layer: u32,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Geometry {
    /// A page is a row of strips, one for each head of each layer.
    pub(crate) fn strips(&self) -> usize {
        self.layers * self.kv_heads
    }

    /// Number of the strip of a head; `layer` counts from the engine's first.
    pub(crate) fn strip_of(&self, layer: usize, head: usize) -> usize {
        layer * self.kv_heads + head
    }

    /// Where in a page a strip lies. What is in it is the kernels' to decide
    /// (`kernels::key_cell` and `value_cell`).
    pub(crate) fn strip(&self, strip: usize) -> Range<usize> {
        let len = page_len(self.head_dim);
        strip * len..(strip + 1) * len
    }

    /// The engine's layers.
    pub(crate) fn layer_range(&self) -> Range<u32> {
        // There are as many as a range of u32 says.
        self.first_layer..self.first_layer.saturating_add(self.layers as u32)
    }

    /// Values of a page.
    pub(crate) fn page_values(&self) -> usize {
        self.strips() * page_len(self.head_dim)
    }

    /// Bytes of a page; every value is an f16.
    pub(crate) fn page_bytes(&self) -> u64 {
        2 * self.page_values() as u64
    }

    /// Bytes of one position in one layer.
    pub(crate) fn position_bytes(&self) -> u64 {
        2 * 2 * (self.kv_heads * self.head_dim) as u64
    }
}

/// A pool of pages, grown one by one up to a limit.
pub(super) struct Pages {
    geometry: Geometry,
    limit: usize,
    arena: Arena,
    memory: Vec<Halves>,
    /// Tables that name each page; 0 for those in `spare`.
    owners: Vec<u32>,
    /// Pages without owners. All their cells are zero.
    spare: Vec<usize>,
}

impl Pages {
    pub(super) fn new(geometry: Geometry, limit: usize) -> Self {
        // No more than it may come to hold.
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

    /// Pages that may still be taken.
    pub(super) fn free(&self) -> usize {
        self.limit.saturating_sub(self.in_use())
    }

    pub(super) fn is_shared(&self, page: usize) -> bool {
        self.owners[page] > 1
    }

    /// Sees to it that `count` pages can be taken.
    pub(super) fn prepare(&mut self, count: usize) -> Result<(), EngineError> {
        let values = self.geometry.page_values();
        while self.spare.len() < count {
            let bytes = self.geometry.page_bytes();
            let memory = self.arena.halves(values);
            let memory = memory.map_err(|_| EngineError::OutOfMemory(bytes))?;
            self.spare.push(self.memory.len());
            self.memory.push(memory);
            self.owners.push(0);
        }
        Ok(())
    }

    /// A page of zeros with one owner.
    pub(super) fn take(&mut self) -> Result<usize, EngineError> {
        self.prepare(1)?;
        let bytes = self.geometry.page_bytes();
        let page = self.spare.pop().ok_or(EngineError::OutOfMemory(bytes))?;
        self.owners[page] = 1;
        Ok(page)
    }

    /// `page` itself if it has one owner only, else a copy of it.
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

    /// One more owner for each of `pages`.
    pub(super) fn share(&mut self, pages: &[usize]) {
        for &page in pages {
            self.owners[page] += 1;
        }
    }

    /// One owner less for each of `pages`.
    pub(super) fn release(&mut self, pages: impl IntoIterator<Item = usize>) {
        for page in pages {
            self.owners[page] -= 1;
            if self.owners[page] == 0 {
                self.memory[page].fill(0);
                self.spare.push(page);
            }
        }
    }

    pub(super) fn strip(&self, page: usize, strip: usize) -> &[u16] {
        &self.memory[page][self.geometry.strip(strip)]
    }

    pub(super) fn strip_mut(&mut self, page: usize, strip: usize) -> &mut [u16] {
        &mut self.memory[page][self.geometry.strip(strip)]
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
