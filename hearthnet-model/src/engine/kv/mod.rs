//! Keys and values of all sequences, in pages.
//!
//! A page holds 32 positions of one sequence for every layer of the engine. A sequence is a
//! table of pages and a length. Forking copies the table only; a page that more than one table
//! names is copied when one of its owners appends to it. Cells at or beyond a sequence's length
//! are never read, whatever they hold.
//!
//! Freed pages are overwritten with zeros before they are used again, and when the cache is
//! dropped: what one caller's text left behind must not outlive its sequence.
//!
//! ```text
//! sequence A, length 70     sequence B = fork of A at 70, then 3 appended
//!   [p0] [p1] [p2]            [p0] [p1] [p5]      p0, p1: two owners; p5: copy of p2, written by B
//! ```

mod page;
mod snapshot;

use std::collections::BTreeMap;
use std::ops::Range;

pub use snapshot::KvSnapshot;

use super::error::EngineError;
use super::sequence::{SeqId, Span};
use crate::kernels::{PAGE, SharedMut};
pub(crate) use page::Geometry;
use page::Pages;

/// Limits of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// For pages, in bytes.
    pub(crate) bytes: u64,
    /// Positions of a sequence.
    pub(crate) context: u32,
    /// Open sequences.
    pub(crate) sequences: usize,
}

/// All sequences of an engine.
pub(crate) struct KvCache {
    limits: Limits,
    pages: Pages,
    sequences: BTreeMap<SeqId, Sequence>,
    opened: u64,
}

#[derive(Clone, Debug)]
struct Sequence {
    len: u32,
    /// Layers that have run; keys and values of others are not there. Of no account while `len`
    /// is 0.
    layers: Range<u32>,
    /// Enough for `len` positions, and no more between two operations.
    pages: Vec<usize>,
}

impl Sequence {
    /// The error for a position that does not fit.
    fn gap(&self, seq: SeqId, position: u32) -> EngineError {
        EngineError::PositionGap {
            seq,
            position,
            len: self.len,
        }
    }
}

/// What an append needs in pages.
#[derive(Clone, Copy, Default)]
struct Need {
    fresh: usize,
    /// The last page has other owners.
    copy: bool,
}

impl KvCache {
    pub(crate) fn new(geometry: Geometry, limits: Limits) -> Self {
        let count = limits.bytes / geometry.page_bytes().max(1);
        let pages = Pages::new(geometry, usize::try_from(count).unwrap_or(usize::MAX));
        Self {
            limits,
            pages,
            sequences: BTreeMap::new(),
            opened: 0,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        self.pages.geometry()
    }

    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.pages.in_use() as u64 * self.geometry().page_bytes()
    }

    pub(crate) fn open(&mut self) -> Result<SeqId, EngineError> {
        let layers = self.geometry().layer_range();
        self.insert(Sequence {
            len: 0,
            layers,
            pages: Vec::new(),
        })
    }

    fn insert(&mut self, sequence: Sequence) -> Result<SeqId, EngineError> {
        self.check_room_for_sequence()?;
        let id = SeqId(self.opened);
        self.opened += 1;
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn check_room_for_sequence(&self) -> Result<(), EngineError> {
        let limit = self.limits.sequences;
        if self.sequences.len() < limit {
            Ok(())
        } else {
            Err(EngineError::TooManySequences(limit))
        }
    }

    fn get(&self, seq: SeqId) -> Result<&Sequence, EngineError> {
        self.sequences
            .get(&seq)
            .ok_or(EngineError::UnknownSequence(seq))
    }

    pub(crate) fn len(&self, seq: SeqId) -> Result<u32, EngineError> {
        Ok(self.get(seq)?.len)
    }

    /// Number of open sequences.
    pub(crate) fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Whether there was such a sequence.
    pub(crate) fn close(&mut self, seq: SeqId) -> bool {
        let Some(sequence) = self.sequences.remove(&seq) else {
            return false;
        };
        self.pages.release(sequence.pages);
        true
    }

    pub(crate) fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), EngineError> {
        let sequence = self
            .sequences
            .get_mut(&seq)
            .ok_or(EngineError::UnknownSequence(seq))?;
        if len > sequence.len {
            return Err(sequence.gap(seq, len));
        }
        sequence.len = len;
        let keep = pages_for(len);
        self.pages.release(sequence.pages.drain(keep..));
        Ok(())
    }

    pub(crate) fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        self.check_room_for_sequence()?;
        let fork = self.get(seq)?.clone();
        self.pages.share(&fork.pages);
        self.insert(fork)
    }

    /// Gives every span's sequence the pages that its rows will need, all its own from the
    /// span's position on, for a run of `layers`. All or nothing; to be followed by
    /// [`Self::commit`] or [`Self::roll_back`].
    pub(crate) fn reserve(
        &mut self,
        layers: &Range<u32>,
        spans: &[Span],
    ) -> Result<(), EngineError> {
        let mut fresh = 0usize;
        let mut needs = Vec::with_capacity(spans.len());
        for (i, span) in spans.iter().enumerate() {
            let need = self.need(layers, span)?;
            if spans.iter().take(i).any(|other| other.seq == span.seq) {
                return Err(EngineError::DuplicateSequence(span.seq));
            }
            fresh = fresh
                .saturating_add(need.fresh)
                .saturating_add(usize::from(need.copy));
            needs.push(need);
        }
        // Two forks that both append to the page they share need one copy between them, not two;
        // asking for two may refuse a batch that just fits, but never the other way round.
        self.check_budget(fresh)?;
        self.pages.prepare(fresh)?;
        for (span, need) in spans.iter().zip(needs) {
            let Some(sequence) = self.sequences.get_mut(&span.seq) else {
                continue;
            };
            if need.copy
                && let Some(last) = sequence.pages.last_mut()
            {
                *last = self.pages.make_own(*last)?;
            }
            for _ in 0..need.fresh {
                sequence.pages.push(self.pages.take()?);
            }
        }
        Ok(())
    }

    fn need(&self, layers: &Range<u32>, span: &Span) -> Result<Need, EngineError> {
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
            let ran = sequence.layers.clone();
            return Err(EngineError::OtherLayers {
                seq,
                ran,
                asked: layers.clone(),
            });
        }
        let wanted = u64::from(position) + u64::from(rows);
        let limit = self.limits.context;
        let end = u32::try_from(wanted).ok().filter(|end| *end <= limit);
        let end = end.ok_or(EngineError::ContextFull { wanted, limit })?;
        let partial = !(sequence.len as usize).is_multiple_of(PAGE);
        let shared = sequence
            .pages
            .last()
            .is_some_and(|page| self.pages.is_shared(*page));
        Ok(Need {
            fresh: pages_for(end) - pages_for(sequence.len),
            copy: partial && shared,
        })
    }

    fn check_budget(&self, pages: usize) -> Result<(), EngineError> {
        if pages <= self.pages.free() {
            return Ok(());
        }
        let bytes = self.geometry().page_bytes();
        Err(EngineError::KvFull {
            needed: pages as u64 * bytes,
            free: self.pages.free() as u64 * bytes,
            limit: self.limits.bytes,
        })
    }

    /// The rows of the spans are in place.
    pub(crate) fn commit(&mut self, layers: &Range<u32>, spans: &[Span]) {
        for span in spans {
            if let Some(sequence) = self.sequences.get_mut(&span.seq) {
                sequence.len = span.position + span.rows;
                sequence.layers = layers.clone();
            }
        }
    }

    /// The rows of the spans did not come to be.
    pub(crate) fn roll_back(&mut self, spans: &[Span]) {
        for span in spans {
            // As long as before, so this only gives back the pages at the end.
            let _ = self.truncate(span.seq, span.position);
        }
    }

    /// The pages of each span's sequence, in order, for the threads of one batch.
    pub(crate) fn views(&mut self, spans: &[Span]) -> Vec<Vec<SharedMut<'_, u16>>> {
        let pages = self.pages.views();
        let table = |span: &Span| self.sequences.get(&span.seq).map_or(&[][..], |s| &s.pages);
        spans
            .iter()
            .map(|span| table(span).iter().map(|page| pages[*page]).collect())
            .collect()
    }
}

/// Pages that `len` positions take.
fn pages_for(len: u32) -> usize {
    (len as usize).div_ceil(PAGE)
}

#[cfg(test)]
mod tests;
