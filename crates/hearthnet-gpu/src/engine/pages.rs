//! Keys and values of all sequences, in pages on the card, and the states of recurrent layers.
//!
//! A page holds 32 positions of one sequence for every layer of the engine, as in the exact engine.
//! Each layer that has keys has one buffer, `[page][key/value head][32 positions]`; a page has the
//! same number in all of them. The buffers grow by half: each is replaced by a larger one, one after
//! the other, so that two of one layer exist at a time.
//!
//! Freed pages and replaced buffers are overwritten with zeros.

use std::ops::Range;

use hearthnet_engine::{EngineError, Footprint, States, Storage, Track, footprint};
use hearthnet_files::spec::ModelSpec;

use super::states::CardStates;
use crate::{Buffer, Gpu, GpuError, StateView};

/// Positions in a page.
pub(super) const PAGE: u32 = 32;
/// Pages of the first buffers.
const FIRST: u32 = 8;

/// Keys and values of one layer.
struct Keys {
    /// `None` before the first page.
    buffer: Option<Buffer>,
    kv_heads: u32,
    head_dim: u32,
}

impl Keys {
    /// Words of a page.
    fn page(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(PAGE) * u64::from(self.head_dim)
    }
}

/// Storage of an engine on a card.
pub struct CardPages {
    gpu: Gpu,
    footprint: Footprint,
    keys: Vec<Keys>,
    /// Index in `keys` of each layer's keys and values, its own or those of another layer.
    of_layer: Vec<Option<usize>>,
    /// Pages that each buffer has room for.
    room: u32,
    /// Maximum of `room`, from the budget and from the largest buffer that the card binds.
    limit: u32,
    /// Reference count of each page: number of page tables that contain it.
    owners: Vec<u32>,
    spare: Vec<u32>,
    states: States<CardStates>,
}

/// State of a sequence on a card.
pub struct CardSequence {
    /// Page table. Between operations it has exactly the pages of its sequence's positions.
    pub(super) table: Vec<u32>,
    pub(super) track: Track,
}

impl CardPages {
    pub(super) fn new(gpu: &Gpu, spec: &ModelSpec, layers: Range<u32>, budget: u64) -> Self {
        let footprint = footprint(spec, layers.clone());
        let (mut keys, mut of_layer) = (Vec::new(), Vec::new());
        for layer in layers.clone() {
            let block = spec.block(layer);
            if block.has_keys() {
                of_layer.push(Some(keys.len()));
                keys.push(Keys {
                    buffer: None,
                    kv_heads: block.kv_heads,
                    head_dim: block.key_width(),
                });
            } else {
                let origin = block.keys_of.checked_sub(layers.start);
                let origin = origin.and_then(|at| of_layer.get(at as usize).copied());
                of_layer.push(origin.flatten());
            }
        }
        let bound = gpu.facts().max_binding_words;
        let by_card = keys.iter().map(|keys| bound / keys.page().max(1)).min();
        let by_budget = budget / footprint.page_bytes().max(1);
        let limit = by_card.unwrap_or(0).min(by_budget);
        Self {
            gpu: gpu.clone(),
            footprint,
            keys,
            of_layer,
            room: 0,
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
            owners: Vec::new(),
            spare: Vec::new(),
            states: States::new(CardStates::new(gpu, spec, layers)),
        }
    }

    /// Keys and values that a layer of the engine uses.
    pub(super) fn buffer(&self, layer: usize) -> Option<&Buffer> {
        let index = (*self.of_layer.get(layer)?)?;
        self.keys.get(index)?.buffer.as_ref()
    }

    /// States of a recurrent layer of the engine: see [`CardStates::layer`].
    pub(super) fn states(&self, layer: usize) -> Option<[StateView<'_>; 2]> {
        self.states.memory().layer(layer)
    }

    fn pages_for(&self, len: u32) -> usize {
        match self.keys.is_empty() {
            true => 0,
            false => len.div_ceil(PAGE) as usize,
        }
    }

    /// Makes room for more pages.
    fn enlarge(&mut self) -> Result<(), EngineError> {
        let room = (self.room + self.room / 2).max(FIRST).min(self.limit);
        if room <= self.room {
            return Err(EngineError::DeviceMemory);
        }
        Ok(self.enlarge_to(room)?)
    }

    /// Makes room for all pages of the budget.
    pub(super) fn reserve(&mut self) -> Result<(), GpuError> {
        self.enlarge_to(self.limit)
    }

    fn enlarge_to(&mut self, room: u32) -> Result<(), GpuError> {
        for keys in &mut self.keys {
            let larger = self.gpu.kv(room, keys.kv_heads, keys.head_dim);
            let larger = larger?;
            let words = u64::from(self.room) * keys.page();
            if let Some(old) = &keys.buffer {
                let mut step = self.gpu.step();
                step.copy_words(old, 0, &larger, 0, words);
                step.clear(old, 0..words);
                step.submit()?;
            }
            keys.buffer = Some(larger);
        }
        self.room = room;
        Ok(())
    }

    /// Takes a page, with one owner.
    fn take(&mut self) -> Result<u32, EngineError> {
        if let Some(page) = self.spare.pop() {
            self.owners[page as usize] = 1;
            return Ok(page);
        }
        let page = self.owners.len() as u32;
        if page >= self.room {
            self.enlarge()?;
        }
        self.owners.push(1);
        Ok(page)
    }

    fn is_shared(&self, page: u32) -> bool {
        self.owners[page as usize] > 1
    }

    /// Gives pages back, with one owner less each.
    fn free_pages(&mut self, table: Vec<u32>) {
        let mut freed = Vec::new();
        for page in table {
            let owners = &mut self.owners[page as usize];
            *owners -= 1;
            if *owners == 0 {
                freed.push(page);
            }
        }
        if freed.is_empty() {
            return;
        }
        freed.sort_unstable();
        let mut step = self.gpu.step();
        for run in freed.chunk_by(|a, b| a + 1 == *b) {
            for keys in &self.keys {
                let start = u64::from(run[0]) * keys.page();
                if let Some(buffer) = &keys.buffer {
                    step.clear(buffer, start..start + keys.page() * run.len() as u64);
                }
            }
        }
        // On a lost device the contents are gone anyway.
        let _ = step.submit();
        self.spare.append(&mut freed);
    }

    /// Returns `page` if it has a single owner, otherwise a copy with one owner.
    fn make_own(&mut self, page: u32) -> Result<u32, EngineError> {
        if !self.is_shared(page) {
            return Ok(page);
        }
        let copy = self.take()?;
        let mut step = self.gpu.step();
        for keys in &self.keys {
            let words = keys.page();
            let [from, to] = [page, copy].map(|page| u64::from(page) * words);
            if let Some(buffer) = &keys.buffer {
                step.copy_words(buffer, from, buffer, to, words);
            }
        }
        if let Err(error) = step.submit() {
            self.free_pages(vec![copy]);
            return Err(error.into());
        }
        self.owners[page as usize] -= 1;
        Ok(copy)
    }
}

impl Storage for CardPages {
    type State = CardSequence;

    fn footprint(&self) -> Footprint {
        self.footprint
    }

    fn pages_in_use(&self) -> u64 {
        (self.owners.len() - self.spare.len()) as u64
    }

    fn empty(&self) -> Result<CardSequence, EngineError> {
        Ok(CardSequence {
            table: Vec::new(),
            track: Track::default(),
        })
    }

    fn fork(&mut self, sequence: &CardSequence) -> CardSequence {
        for &page in &sequence.table {
            self.owners[page as usize] += 1;
        }
        CardSequence {
            table: sequence.table.clone(),
            track: self.states.fork(&sequence.track),
        }
    }

    fn pages_needed(&self, sequence: &CardSequence, len: u32, end: u32) -> u64 {
        let table = &sequence.table;
        let copy = is_partial(len) && table.last().is_some_and(|page| self.is_shared(*page));
        (self.pages_for(end) - table.len() + usize::from(copy)) as u64
    }

    fn grow(&mut self, sequence: &mut CardSequence, len: u32, end: u32) -> Result<(), EngineError> {
        let table = &mut sequence.table;
        if is_partial(len)
            && let Some(last) = table.last_mut()
        {
            *last = self.make_own(*last)?;
        }
        while table.len() < self.pages_for(end) {
            table.push(self.take()?);
        }
        self.states.grow(&mut sequence.track, len, end)
    }

    fn shrink(&mut self, sequence: &mut CardSequence, len: u32) -> Result<u32, EngineError> {
        let kept = self.states.shrink(&mut sequence.track, len);
        let freed = sequence.table.split_off(self.pages_for(kept));
        self.free_pages(freed);
        Ok(kept)
    }

    fn free(&mut self, sequence: CardSequence) {
        self.free_pages(sequence.table);
        self.states.close(&sequence.track);
    }
}

impl Drop for CardPages {
    fn drop(&mut self) {
        let mut step = self.gpu.step();
        for keys in &self.keys {
            if let Some(buffer) = &keys.buffer {
                step.clear(buffer, 0..buffer.words());
            }
        }
        let _ = step.submit();
    }
}

/// Whether the last page of `len` positions has free positions.
fn is_partial(len: u32) -> bool {
    !len.is_multiple_of(PAGE)
}
