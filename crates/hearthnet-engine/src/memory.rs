//! Memory of the sequences of an exact engine: keys and values in pages, and states of recurrent
//! layers.

use std::ops::Range;

use hearthnet_files::spec::ModelSpec;

use crate::error::EngineError;
use crate::kernels::SharedMut;
use crate::kv::{Geometry, Pages};
use crate::sequence::{Footprint, Span};
use crate::sequences::Storage;
use crate::state::{HostStates, SequenceState, States, Track, bytes_per_sequence};

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

/// Storage of an exact engine.
pub struct Memory {
    footprint: Footprint,
    pages: Pages,
    states: States<HostStates>,
}

/// State of a sequence.
pub struct Sequence {
    /// Page table: see [`Pages`].
    table: Vec<usize>,
    track: Track,
}

/// Views of the memory of some sequences, shared between the threads of a batch.
pub(crate) struct Views<'a> {
    pub(crate) pages: Vec<Vec<SharedMut<'a, u16>>>,
    /// Empty if no layer is recurrent.
    pub(crate) states: Vec<SequenceState<'a>>,
}

impl Memory {
    /// An empty storage, whose pages will take at most `bytes`.
    pub(crate) fn new(spec: &ModelSpec, layers: Range<u32>, bytes: u64) -> Self {
        let values = state_values(spec, layers.clone());
        Self {
            footprint: footprint(spec, layers.clone()),
            pages: Pages::new(Geometry::of(spec, layers), bytes),
            states: States::new(HostStates::new(
                usize::try_from(values).unwrap_or(usize::MAX),
            )),
        }
    }

    pub(crate) fn views(&mut self, sequences: &[&Sequence], spans: &[Span]) -> Views<'_> {
        let tables: Vec<&Vec<usize>> = sequences.iter().map(|sequence| &sequence.table).collect();
        let states = self.states.views();
        let of_sequence = |(sequence, span): (&&Sequence, &Span)| {
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
            pages: self.pages.views(&tables),
            states: sequences
                .iter()
                .zip(spans)
                .filter_map(of_sequence)
                .collect(),
        }
    }
}

impl Storage for Memory {
    type State = Sequence;

    fn footprint(&self) -> Footprint {
        self.footprint
    }

    fn pages_in_use(&self) -> u64 {
        self.pages.pages_in_use()
    }

    fn empty(&self) -> Result<Sequence, EngineError> {
        Ok(Sequence {
            table: self.pages.empty()?,
            track: Track::default(),
        })
    }

    fn fork(&mut self, sequence: &Sequence) -> Sequence {
        Sequence {
            table: self.pages.fork(&sequence.table),
            track: self.states.fork(&sequence.track),
        }
    }

    fn pages_needed(&self, sequence: &Sequence, len: u32, end: u32) -> u64 {
        self.pages.pages_needed(&sequence.table, len, end)
    }

    fn grow(&mut self, sequence: &mut Sequence, len: u32, end: u32) -> Result<(), EngineError> {
        self.pages.grow(&mut sequence.table, len, end)?;
        self.states.grow(&mut sequence.track, len, end)
    }

    fn shrink(&mut self, sequence: &mut Sequence, len: u32) -> Result<u32, EngineError> {
        let kept = self.states.shrink(&mut sequence.track, len);
        self.pages.shrink(&mut sequence.table, kept)
    }

    fn free(&mut self, sequence: Sequence) {
        self.pages.free(sequence.table);
        self.states.close(&sequence.track);
    }
}
