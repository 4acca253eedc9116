//! Pages of keys and values, for the layers that have attention.
//!
//! A page holds 32 positions of one sequence for every layer of the engine. The state of a sequence
//! has a page table: see [`PagedSequence`](super::PagedSequence). Forking copies only the table; a
//! page of several tables is copied when one of its owners appends to it. Cells at or beyond a
//! sequence's length are never read.
//!
//! Pages are overwritten with zeros when they are freed and when [`HostPages`] is dropped, so that
//! data of a caller's text does not outlive its sequence.
//!
//! ```text
//! sequence A, length 70     sequence B = fork of A at 70, then 3 appended
//!   [p0] [p1] [p2]            [p0] [p1] [p5]      p0, p1: two owners; p5: copy of p2, written by B
//! ```

use std::ops::Range;

use hearthnet_files::spec::{CacheDtype, ModelSpec};
use zeroize::Zeroize;

use crate::error::EngineError;
use crate::kernels::{Arena, F16Buffer, PAGE, page_len};
use crate::pool::PoolMemory;
use crate::sequence::Footprint;

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
    pub(super) first: usize,
}

impl KvPlace {
    /// Range of a head's slab in a page. `kernels::key_cell` and `value_cell` define its layout.
    pub(crate) fn slab(&self, head: usize) -> Range<usize> {
        let len = page_len(self.head_dim, self.cache);
        let first = self.first + head * len;
        first..first + len
    }

    pub(super) fn cells(&self) -> usize {
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
    pub(super) page_cells: usize,
}

impl Geometry {
    pub(crate) fn of(spec: &ModelSpec, layers: Range<u32>) -> Self {
        let own = layers.clone().zip(places(spec, layers));
        let own = own.filter(|(layer, _)| spec.block(*layer).has_keys());
        Self {
            page_cells: own.map(|(_, place)| place.cells()).sum(),
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

/// Memory of pages on a device.
pub trait PageMemory: PoolMemory {
    /// Copies a page.
    ///
    /// # Errors
    /// Errors of the device.
    fn copy(&mut self, from: usize, to: usize) -> Result<(), EngineError>;
}

/// Pages in this machine's memory.
pub struct HostPages {
    geometry: Geometry,
    arena: Arena,
    pub(super) pages: Vec<F16Buffer>,
}

impl HostPages {
    /// Memory that will take at most `bytes`.
    pub(crate) fn new(geometry: Geometry, bytes: u64) -> Self {
        // A pool with a small limit does not allocate more than that.
        let step = usize::try_from(STEP.min(bytes)).unwrap_or(usize::MAX);
        Self {
            geometry,
            arena: Arena::growing_by(step),
            pages: Vec::new(),
        }
    }
}

impl PoolMemory for HostPages {
    fn is_empty(&self) -> bool {
        self.geometry.page_cells == 0
    }

    fn add(&mut self) -> Result<(), EngineError> {
        let page = self.arena.f16_buffer(self.geometry.page_cells);
        let bytes = self.geometry.footprint().page_bytes();
        let page = page.map_err(|_| EngineError::OutOfMemory(bytes))?;
        self.pages.push(page);
        Ok(())
    }

    fn clear(&mut self, pages: &[usize]) {
        for &page in pages {
            self.pages[page].fill(0);
        }
    }
}

impl PageMemory for HostPages {
    fn copy(&mut self, from: usize, to: usize) -> Result<(), EngineError> {
        if let Ok([from, to]) = self.pages.get_disjoint_mut([from, to]) {
            to.copy_from_slice(from);
        }
        Ok(())
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        for page in &mut self.pages {
            page.zeroize();
        }
    }
}
