//! Paged KV cache of all sequences of an exact engine, for the layers that have attention.
//!
//! A page holds 32 positions of one sequence for every layer of the engine. The state of a sequence
//! is its page table. Forking copies only the table; a page of several tables is copied when one
//! of its owners appends to it. Cells at or beyond a sequence's length are never read.
//!
//! Pages are overwritten with zeros when they are freed and when the cache is dropped, so that data
//! of a caller's text does not outlive its sequence.
//!
//! ```text
//! sequence A, length 70     sequence B = fork of A at 70, then 3 appended
//!   [p0] [p1] [p2]            [p0] [p1] [p5]      p0, p1: two owners; p5: copy of p2, written by B
//! ```

use std::ops::Range;

use hearthnet_files::spec::{CacheDtype, ModelSpec};
use zeroize::Zeroize;

use crate::error::EngineError;
use crate::kernels::{Arena, F16Buffer, PAGE, SharedMut, page_len};
use crate::sequence::Footprint;
use crate::sequences::Storage;

/// Minimum allocation of the pool in bytes: a few huge pages. Each token reads all keys and values
/// of its sequence; with small pages, TLB misses would take most of that time.
const STEP: u64 = 4 << 20;

/// Keys and values of a layer in a page: a slab for each KV head.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct KvPlace {
    pub(crate) kv_heads: usize,
    /// Width of a key, and of a value.
    pub(crate) head_dim: usize,
    pub(crate) cache: CacheDtype,
    /// First cell in the page.
    first: usize,
}

impl KvPlace {
    /// Range of a head's slab in a page. `kernels::key_cell` and `value_cell` define its layout.
    pub(crate) fn slab(&self, head: usize) -> Range<usize> {
        let len = page_len(self.head_dim, self.cache);
        let first = self.first + head * len;
        first..first + len
    }

    fn cells(&self) -> usize {
        self.kv_heads * page_len(self.head_dim, self.cache)
    }
}

/// Place of the keys and values that each layer of a range uses.
pub(crate) fn places(spec: &ModelSpec, layers: Range<u32>) -> Vec<KvPlace> {
    let mut places: Vec<KvPlace> = Vec::with_capacity(layers.len());
    let mut first = 0;
    for layer in layers.clone() {
        let block = spec.block(layer);
        let own = KvPlace {
            kv_heads: block.kv_heads as usize,
            head_dim: block.key_width() as usize,
            cache: spec.attention.cache,
            first,
        };
        if block.has_keys() {
            first += own.cells();
        }
        let other = block.keys_of.checked_sub(layers.start);
        let other = other.filter(|_| block.keys_of != layer);
        let shared = other.and_then(|index| places.get(index as usize).copied());
        places.push(shared.unwrap_or(own));
    }
    places
}

/// Size of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    /// 16-bit cells of a page, over all layers; 0 without keys and values.
    page_cells: usize,
}

impl Geometry {
    pub(crate) fn of(spec: &ModelSpec, layers: Range<u32>) -> Self {
        let own = layers.clone().zip(places(spec, layers));
        let own = own.filter(|(layer, _)| spec.block(*layer).has_keys());
        Self {
            page_cells: own.map(|(_, place)| place.cells()).sum(),
        }
    }

    /// Pages of a sequence; none without keys and values.
    fn pages_for(&self, len: u32) -> usize {
        match self.page_cells {
            0 => 0,
            _ => (len as usize).div_ceil(PAGE),
        }
    }

    pub(crate) fn footprint(&self) -> Footprint {
        Footprint {
            per_sequence: 0,
            per_position: 2 * (self.page_cells / PAGE) as u64,
            page: PAGE as u32,
        }
    }
}

/// Pool of reference-counted pages, grown on demand.
pub(crate) struct Pages {
    geometry: Geometry,
    arena: Arena,
    memory: Vec<F16Buffer>,
    /// Reference count of each page: number of page tables that contain it.
    owners: Vec<u32>,
    /// Pages without owners, filled with zeros.
    spare: Vec<usize>,
}

impl Pages {
    /// An empty pool that will take at most `bytes`.
    pub(crate) fn new(geometry: Geometry, bytes: u64) -> Self {
        // A pool with a small limit does not allocate more than that.
        let step = usize::try_from(STEP.min(bytes)).unwrap_or(usize::MAX);
        Self {
            geometry,
            arena: Arena::growing_by(step),
            memory: Vec::new(),
            owners: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Takes a page of zeros, with one owner.
    fn take(&mut self) -> Result<usize, EngineError> {
        let page = match self.spare.pop() {
            Some(page) => page,
            None => {
                let cells = self.geometry.page_cells;
                let memory = self.arena.f16_buffer(cells);
                let bytes = self.footprint().page_bytes();
                let memory = memory.map_err(|_| EngineError::OutOfMemory(bytes))?;
                self.memory.push(memory);
                self.owners.push(0);
                self.memory.len() - 1
            }
        };
        self.owners[page] = 1;
        Ok(page)
    }

    fn is_shared(&self, page: usize) -> bool {
        self.owners[page] > 1
    }

    /// Returns `page` if it has a single owner, otherwise a copy with one owner.
    fn make_own(&mut self, page: usize) -> Result<usize, EngineError> {
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

    /// Pages of some page tables, shared between the threads of a batch.
    pub(crate) fn views(&mut self, tables: &[&Vec<usize>]) -> Vec<Vec<SharedMut<'_, u16>>> {
        let pages = self.memory.iter_mut();
        let pages: Vec<SharedMut<'_, u16>> = pages.map(|page| SharedMut::new(page)).collect();
        let tables = tables.iter();
        tables
            .map(|table| table.iter().map(|page| pages[*page]).collect())
            .collect()
    }
}

impl Storage for Pages {
    /// Page table. Between operations it has exactly the pages of its sequence's positions.
    type State = Vec<usize>;

    fn footprint(&self) -> Footprint {
        self.geometry.footprint()
    }

    fn pages_in_use(&self) -> u64 {
        (self.memory.len() - self.spare.len()) as u64
    }

    fn empty(&self) -> Result<Vec<usize>, EngineError> {
        Ok(Vec::new())
    }

    fn fork(&mut self, table: &Vec<usize>) -> Vec<usize> {
        for &page in table {
            self.owners[page] += 1;
        }
        table.clone()
    }

    fn pages_needed(&self, table: &Vec<usize>, len: u32, end: u32) -> u64 {
        let copy = is_partial(len) && table.last().is_some_and(|page| self.is_shared(*page));
        (self.geometry.pages_for(end) - table.len() + usize::from(copy)) as u64
    }

    fn grow(&mut self, table: &mut Vec<usize>, len: u32, end: u32) -> Result<(), EngineError> {
        if is_partial(len)
            && let Some(last) = table.last_mut()
        {
            *last = self.make_own(*last)?;
        }
        while table.len() < self.geometry.pages_for(end) {
            table.push(self.take()?);
        }
        Ok(())
    }

    fn shrink(&mut self, table: &mut Vec<usize>, len: u32) -> Result<u32, EngineError> {
        let freed = table.split_off(self.geometry.pages_for(len));
        self.free(freed);
        Ok(len)
    }

    fn free(&mut self, table: Vec<usize>) {
        for page in table {
            self.owners[page] -= 1;
            if self.owners[page] == 0 {
                self.memory[page].fill(0);
                self.spare.push(page);
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for page in &mut self.memory {
            page.zeroize();
        }
    }
}

/// Whether the last page of `len` positions has free positions.
fn is_partial(len: u32) -> bool {
    !(len as usize).is_multiple_of(PAGE)
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;
