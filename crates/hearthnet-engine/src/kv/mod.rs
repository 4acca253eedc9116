//! Paged KV cache of all sequences of an engine.
//!
//! A page holds 32 positions of one sequence for every layer of the engine. A sequence is a page
//! table and a length. Forking copies only the table; a page of several tables is copied when one
//! of its owners appends to it. Cells at or beyond a sequence's length are never read.
//!
//! Pages are overwritten with zeros when they are freed and when the cache is dropped, so that data
//! of a caller's text does not outlive its sequence.
//!
//! ```text
//! sequence A, length 70     sequence B = fork of A at 70, then 3 appended
//!   [p0] [p1] [p2]            [p0] [p1] [p5]      p0, p1: two owners; p5: copy of p2, written by B
//! ```

mod page;

use std::collections::BTreeMap;
use std::ops::Range;

use super::error::EngineError;
use super::sequence::{SeqId, Span};
use crate::kernels::{PAGE, SharedMut};
pub(crate) use page::Geometry;
use page::Pages;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of all pages.
    pub(crate) bytes: u64,
    pub(crate) context: u32,
    pub(crate) sequences: usize,
}

pub(crate) struct KvCache {
    limits: Limits,
    pages: Pages,
    sequences: BTreeMap<SeqId, Sequence>,
    opened: u64,
}

#[derive(Clone, Debug)]
struct Sequence {
    len: u32,
    /// Layers whose keys and values are stored. Ignored while `len` is 0.
    layers: Range<u32>,
    /// Page table. Between operations it has exactly the pages for `len` positions.
    pages: Vec<usize>,
}

impl Sequence {
    fn gap(&self, seq: SeqId, position: u32) -> EngineError {
        EngineError::PositionGap {
            seq,
            position,
            len: self.len,
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Need {
    fresh: usize,
    /// Whether the last page is partly filled and shared, and has to be copied.
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

    pub(crate) fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Returns false for an unknown id.
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

    /// Allocates the pages for the rows of all spans, and copies shared pages that they append to.
    /// Checks all spans before it changes anything. The caller then calls [`Self::commit`] or
    /// [`Self::roll_back`].
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
        // Two forks that append to the same shared page need one copy, but this counts two. It may
        // refuse a batch that just fits; it never accepts one that does not.
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

    /// Extends the sequences by the rows of the spans, once these are written.
    pub(crate) fn commit(&mut self, layers: &Range<u32>, spans: &[Span]) {
        for span in spans {
            if let Some(sequence) = self.sequences.get_mut(&span.seq) {
                sequence.len = span.position + span.rows;
                sequence.layers = layers.clone();
            }
        }
    }

    /// Releases the pages reserved for the spans, after a failure.
    pub(crate) fn roll_back(&mut self, spans: &[Span]) {
        for span in spans {
            // The length is unchanged, so this only releases the pages at the end.
            let _ = self.truncate(span.seq, span.position);
        }
    }

    /// Page table of each span's sequence, shared between the threads of a batch.
    pub(crate) fn views(&mut self, spans: &[Span]) -> Vec<Vec<SharedMut<'_, u16>>> {
        let pages = self.pages.views();
        let table = |span: &Span| self.sequences.get(&span.seq).map_or(&[][..], |s| &s.pages);
        spans
            .iter()
            .map(|span| table(span).iter().map(|page| pages[*page]).collect())
            .collect()
    }
}

fn pages_for(len: u32) -> usize {
    (len as usize).div_ceil(PAGE)
}

#[cfg(test)]
mod tests;
