//! Sequences of an engine, apart from the memory that holds their state.
//!
//! The [`Table`] has what is the same on every device: ids, lengths, limits, the budget, and the
//! checks of a batch. A [`Storage`] holds keys and values, or another state, on one device.
//!
//! ```text
//! begin: checks all spans, then makes room     finish: longer by the rows, or as before
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::EngineError;
use crate::sequence::{Footprint, SeqId, Span};

/// Memory for the state of sequences, in pages.
pub trait Storage {
    /// State of one sequence.
    type State;

    fn footprint(&self) -> Footprint;

    /// Pages that sequences own. A page that several own counts once.
    fn pages_in_use(&self) -> u64;

    /// State of an empty sequence.
    ///
    /// # Errors
    /// Errors of the device.
    fn empty(&self) -> Result<Self::State, EngineError>;

    /// A copy, which shares pages with `state` until one of the two appends.
    fn fork(&mut self, state: &Self::State) -> Self::State;

    /// Pages that [`Self::grow`] will take.
    fn pages_needed(&self, state: &Self::State, len: u32, end: u32) -> u64;

    /// Makes room for positions up to `end`, in pages that no other sequence owns. The first `len`
    /// positions are kept.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] and errors of the device. Positions are kept; some pages may
    /// have been taken.
    fn grow(&mut self, state: &mut Self::State, len: u32, end: u32) -> Result<(), EngineError>;

    /// Drops the positions from `len` on, and frees pages. Returns the length that is left: less
    /// than `len` if the state can only return to an earlier position.
    ///
    /// # Errors
    /// Errors of the device: the pages may not be free.
    fn shrink(&mut self, state: &mut Self::State, len: u32) -> Result<u32, EngineError>;

    /// Frees the pages that only this sequence owns.
    fn free(&mut self, state: Self::State) {
        drop(state);
    }
}

/// Limits of an engine's sequences.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory of all sequences, in bytes.
    pub bytes: u64,
    /// Positions per sequence.
    pub context: u32,
    pub sequences: usize,
}

struct Sequence<T> {
    len: u32,
    /// Layers whose state is stored. Ignored while `len` is 0.
    layers: Range<u32>,
    state: T,
}

impl<T> Sequence<T> {
    fn gap(&self, seq: SeqId, position: u32) -> EngineError {
        EngineError::PositionGap {
            seq,
            position,
            len: self.len,
        }
    }
}

/// Open sequences, with their state in a [`Storage`].
pub struct Table<S: Storage> {
    storage: S,
    limits: Limits,
    sequences: BTreeMap<SeqId, Sequence<S::State>>,
    opened: u64,
}

impl<S: Storage> Table<S> {
    pub fn new(storage: S, limits: Limits) -> Self {
        Self {
            storage,
            limits,
            sequences: BTreeMap::new(),
            opened: 0,
        }
    }

    pub fn footprint(&self) -> Footprint {
        self.storage.footprint()
    }

    /// Memory of all sequences, in bytes.
    pub fn bytes_in_use(&self) -> u64 {
        let footprint = self.footprint();
        let pages = footprint.page_bytes() * self.storage.pages_in_use();
        // A sequence without positions takes no memory.
        let begun = self.sequences.values().filter(|sequence| sequence.len > 0);
        pages + footprint.per_sequence * begun.count() as u64
    }

    /// Number of open sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Opens an empty sequence.
    ///
    /// # Errors
    /// [`EngineError::TooManySequences`]; errors of the device.
    pub fn open(&mut self) -> Result<SeqId, EngineError> {
        self.check_room_for_sequence()?;
        let state = self.storage.empty()?;
        Ok(self.insert(0, 0..0, state))
    }

    /// Opens a copy of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::TooManySequences`],
    /// [`EngineError::KvFull`] when there is no room for [`Footprint::per_sequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        self.check_room_for_sequence()?;
        if self.get(seq)?.len > 0 {
            self.check_budget(self.footprint().per_sequence)?;
        }
        let sequence = self.sequences.get(&seq);
        let sequence = sequence.ok_or(EngineError::UnknownSequence(seq))?;
        let (len, layers) = (sequence.len, sequence.layers.clone());
        let state = self.storage.fork(&sequence.state);
        Ok(self.insert(len, layers, state))
    }

    fn insert(&mut self, len: u32, layers: Range<u32>, state: S::State) -> SeqId {
        let seq = SeqId(self.opened);
        self.opened += 1;
        self.sequences.insert(seq, Sequence { len, layers, state });
        seq
    }

    fn check_room_for_sequence(&self) -> Result<(), EngineError> {
        let limit = self.limits.sequences;
        match self.sequences.len() < limit {
            true => Ok(()),
            false => Err(EngineError::TooManySequences(limit)),
        }
    }

    fn get(&self, seq: SeqId) -> Result<&Sequence<S::State>, EngineError> {
        self.sequences
            .get(&seq)
            .ok_or(EngineError::UnknownSequence(seq))
    }

    /// Number of positions of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn len(&self, seq: SeqId) -> Result<u32, EngineError> {
        Ok(self.get(seq)?.len)
    }

    /// Closes a sequence. Returns false for an unknown id.
    pub fn close(&mut self, seq: SeqId) -> bool {
        let Some(sequence) = self.sequences.remove(&seq) else {
            return false;
        };
        self.storage.free(sequence.state);
        true
    }

    /// Drops the positions of a sequence from `len` on, and returns the length that is left. It is
    /// less than `len` if the state can only return to an earlier position.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`]; [`EngineError::PositionGap`] if the sequence is shorter
    /// than `len`; errors of the device, after which the positions are dropped but their memory may
    /// not be free.
    pub fn truncate(&mut self, seq: SeqId, len: u32) -> Result<u32, EngineError> {
        let sequence = self.sequences.get_mut(&seq);
        let sequence = sequence.ok_or(EngineError::UnknownSequence(seq))?;
        if len > sequence.len {
            return Err(sequence.gap(seq, len));
        }
        sequence.len = len;
        sequence.len = self.storage.shrink(&mut sequence.state, len)?;
        Ok(sequence.len)
    }

    /// Checks a batch for `layers`, and makes room for its rows in memory that no other sequence
    /// shares. Checks all spans before it changes anything. The caller must call [`Self::finish`]
    /// afterwards, also after an error.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn begin(&mut self, layers: &Range<u32>, spans: &[Span]) -> Result<(), EngineError> {
        let mut bytes = 0u64;
        for (i, span) in spans.iter().enumerate() {
            bytes = bytes.saturating_add(self.bytes_needed(layers, span)?);
            if spans.iter().take(i).any(|other| other.seq == span.seq) {
                return Err(EngineError::DuplicateSequence(span.seq));
            }
        }
        // If two forks both append, the second needs no copy. Counting a copy for both may refuse a
        // batch that just fits, but never admits one that does not.
        self.check_budget(bytes)?;
        for span in spans {
            if let Some(sequence) = self.sequences.get_mut(&span.seq) {
                let end = span.position + span.rows;
                self.storage.grow(&mut sequence.state, sequence.len, end)?;
            }
        }
        Ok(())
    }

    fn bytes_needed(&self, layers: &Range<u32>, span: &Span) -> Result<u64, EngineError> {
        let &Span {
            seq,
            position,
            rows,
        } = span;
        let sequence = self.get(seq)?;
        if position != sequence.len {
            return Err(sequence.gap(seq, position));
        }
        if rows == 0 {
            return Err(EngineError::EmptySpan(seq));
        }
        if position > 0 && sequence.layers != *layers {
            return Err(EngineError::OtherLayers {
                seq,
                ran: sequence.layers.clone(),
                asked: layers.clone(),
            });
        }
        let wanted = u64::from(position) + u64::from(rows);
        let limit = self.limits.context;
        let end = u32::try_from(wanted).ok().filter(|end| *end <= limit);
        let end = end.ok_or(EngineError::ContextFull { wanted, limit })?;
        let pages = self.storage.pages_needed(&sequence.state, position, end);
        let footprint = self.footprint();
        let begins = if position == 0 {
            footprint.per_sequence
        } else {
            0
        };
        let pages = pages.saturating_mul(footprint.page_bytes());
        Ok(begins.saturating_add(pages))
    }

    fn check_budget(&self, needed: u64) -> Result<(), EngineError> {
        let limit = self.limits.bytes;
        let free = limit.saturating_sub(self.bytes_in_use());
        match needed <= free {
            true => Ok(()),
            false => Err(EngineError::KvFull {
                needed,
                free,
                limit,
            }),
        }
    }

    /// The storage, and the state of each span's sequence, after [`Self::begin`].
    pub fn batch(&mut self, spans: &[Span]) -> (&mut S, Vec<&S::State>) {
        let sequences = spans
            .iter()
            .filter_map(|span| self.sequences.get(&span.seq));
        let states = sequences.map(|sequence| &sequence.state).collect();
        (&mut self.storage, states)
    }

    /// Ends a batch: extends the sequences by the rows of the spans or, after an error, frees the
    /// room that [`Self::begin`] made.
    ///
    /// # Errors
    /// That of `result`.
    pub fn finish(
        &mut self,
        layers: &Range<u32>,
        spans: &[Span],
        result: Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for span in spans {
            let Some(sequence) = self.sequences.get_mut(&span.seq) else {
                continue;
            };
            if result.is_ok() {
                sequence.len = span.position + span.rows;
                sequence.layers = layers.clone();
            } else {
                let len = sequence.len;
                // Only frees memory. If that fails, the sequence keeps it.
                let _ = self.truncate(span.seq, len);
            }
        }
        result
    }
}
