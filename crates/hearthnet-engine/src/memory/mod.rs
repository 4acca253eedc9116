//! Memory of the sequences of an exact engine: keys and values in pages, and states of recurrent
//! layers.

mod pages;

use std::ops::Range;

use hearthnet_files::spec::ModelSpec;

use crate::error::EngineError;
use crate::kernels::SharedMut;
use crate::pool::{Pool, PoolMemory};
use crate::sequence::{Footprint, Span};
use crate::sequences::Storage;
use crate::state::{HostStates, SequenceState, States, Track, bytes_per_sequence};
use pages::{Geometry, HostPages};

pub use pages::PageMemory;
pub(crate) use pages::{KvPlace, places};

/// Memory that sequences take in a half-open range of layers on the exact engine.
pub fn footprint(spec: &ModelSpec, layers: Range<u32>) -> Footprint {
    let values = state_values(spec, layers.clone());
    Footprint {
        per_sequence: bytes_per_sequence(values),
        ..Geometry::of(spec, layers).footprint()
    }
}

/// Values of the states of a sequence.
fn state_values(spec: &ModelSpec, layers: Range<u32>) -> u64 {
    layers.map(|layer| spec.block(layer).state().total()).sum()
}

/// Storage of an exact engine, with pages and states in the memory of a device.
pub struct Memory<P, S> {
    footprint: Footprint,
    pages: Pool<P>,
    states: States<S>,
}

/// Storage on this machine.
pub(crate) type HostMemory = Memory<HostPages, HostStates>;

/// State of a sequence.
pub struct PagedSequence {
    /// Page table. Between operations it has exactly the pages of the sequence's positions.
    pub table: Vec<usize>,
    pub track: Track,
}

/// Views of the memory of some sequences, shared between the threads of a batch.
pub(crate) struct Views<'a> {
    pub(crate) pages: Vec<Vec<SharedMut<'a, u16>>>,
    /// Empty if no layer is recurrent.
    pub(crate) states: Vec<SequenceState<'a>>,
}

impl<P: PageMemory, S: PoolMemory> Memory<P, S> {
    /// An empty storage. `footprint` is that of the layers.
    pub fn new(footprint: Footprint, pages: P, states: S) -> Self {
        Self {
            footprint,
            pages: Pool::new(pages),
            states: States::new(states),
        }
    }

    pub fn pages(&self) -> &P {
        &self.pages.memory
    }

    pub fn states(&self) -> &S {
        self.states.memory()
    }

    /// Pages of a sequence; none without keys and values.
    fn pages_for(&self, len: u32) -> usize {
        match self.pages.memory.is_empty() {
            true => 0,
            false => len.div_ceil(self.footprint.page) as usize,
        }
    }

    /// Whether a sequence of `len` positions has to copy its last page before it appends to it:
    /// the page has free positions, and other owners.
    fn copies_last(&self, table: &[usize], len: u32) -> bool {
        !len.is_multiple_of(self.footprint.page)
            && table.last().is_some_and(|page| self.pages.is_shared(*page))
    }
}

impl HostMemory {
    /// An empty storage for some layers, whose pages will take at most `bytes`.
    pub(crate) fn of(spec: &ModelSpec, layers: Range<u32>, bytes: u64) -> Self {
        let values = state_values(spec, layers.clone());
        let values = usize::try_from(values).unwrap_or(usize::MAX);
        let pages = HostPages::new(Geometry::of(spec, layers.clone()), bytes);
        Self::new(footprint(spec, layers), pages, HostStates::new(values))
    }

    pub(crate) fn views(&mut self, sequences: &[&PagedSequence], spans: &[Span]) -> Views<'_> {
        let pages = self.pages.memory.pages.iter_mut();
        let pages: Vec<SharedMut<'_, u16>> = pages.map(|page| SharedMut::new(page)).collect();
        let table =
            |of: &&PagedSequence| -> Vec<_> { of.table.iter().map(|page| pages[*page]).collect() };
        let states = self.states.views();
        let of_sequence = |(sequence, span): (&&PagedSequence, &Span)| {
            let buffers = sequence.track.batch(span.position)?;
            let checkpoints = buffers.checkpoints.into_iter();
            Some(SequenceState {
                begin: span.position as usize,
                before: buffers.before.map(|buffer| states[buffer]),
                after: states[buffers.after],
                checkpoints: checkpoints
                    .map(|(length, buffer)| (length as usize, states[buffer]))
                    .collect(),
            })
        };
        Views {
            pages: sequences.iter().map(table).collect(),
            states: sequences
                .iter()
                .zip(spans)
                .filter_map(of_sequence)
                .collect(),
        }
    }
}

impl<P: PageMemory, S: PoolMemory> Storage for Memory<P, S> {
    type State = PagedSequence;

    fn footprint(&self) -> Footprint {
        self.footprint
    }

    fn pages_in_use(&self) -> u64 {
        self.pages.in_use() as u64
    }

    fn empty(&self) -> Result<PagedSequence, EngineError> {
        Ok(PagedSequence {
            table: Vec::new(),
            track: Track::default(),
        })
    }

    fn fork(&mut self, sequence: &PagedSequence) -> PagedSequence {
        self.pages.share(sequence.table.iter().copied());
        PagedSequence {
            table: sequence.table.clone(),
            track: self.states.fork(&sequence.track),
        }
    }

    fn pages_needed(&self, PagedSequence { table, .. }: &PagedSequence, len: u32, end: u32) -> u64 {
        let copy = usize::from(self.copies_last(table, len));
        (self.pages_for(end) - table.len() + copy) as u64
    }

    fn grow(
        &mut self,
        PagedSequence { table, track }: &mut PagedSequence,
        len: u32,
        end: u32,
    ) -> Result<(), EngineError> {
        if self.copies_last(table, len)
            && let Some(last) = table.last_mut()
        {
            let copy = self.pages.take()?;
            if let Err(error) = self.pages.memory.copy(*last, copy) {
                self.pages.free([copy]);
                return Err(error);
            }
            self.pages.release(*last);
            *last = copy;
        }
        while table.len() < self.pages_for(end) {
            table.push(self.pages.take()?);
        }
        self.states.grow(track, len, end)
    }

    fn shrink(&mut self, sequence: &mut PagedSequence, len: u32) -> Result<u32, EngineError> {
        let kept = self.states.shrink(&mut sequence.track, len);
        let freed = sequence.table.split_off(self.pages_for(kept));
        self.pages.free(freed);
        Ok(kept)
    }

    fn free(&mut self, sequence: PagedSequence) {
        self.pages.free(sequence.table);
        self.states.close(&sequence.track);
    }
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;
