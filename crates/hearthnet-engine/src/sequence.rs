//! Sequence ids, spans of rows to append to sequences, and the memory that sequences take.

use std::fmt;

/// Id of a sequence of one engine. An engine never reuses ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SeqId(pub(super) u64);

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rows to append to a sequence. `S` is the type of sequence ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span<S = SeqId> {
    pub seq: S,
    /// Position of the first row; must equal the length of the sequence.
    pub position: u32,
    /// Number of rows, at least 1.
    pub rows: u32,
}

impl<S> Span<S> {
    /// Appends `rows` rows to a sequence of `position` positions.
    pub const fn new(seq: S, position: u32, rows: u32) -> Self {
        Self {
            seq,
            position,
            rows,
        }
    }

    /// Names the sequence of these rows in another way, for instance as another engine does.
    pub fn of<T>(&self, seq: T) -> Span<T> {
        Span::new(seq, self.position, self.rows)
    }
}

/// Memory of the sequences of an engine, in bytes. A sequence owns whole pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Bytes of a sequence of any length above 0, such as those of recurrent states and their
    /// checkpoints. A fork takes as many.
    pub per_sequence: u64,
    /// Bytes of a position, over all layers of the engine.
    pub per_position: u64,
    /// Positions per page, at least 1. A page holds all layers of the engine, also for a sequence
    /// that runs through some of them only.
    pub page: u32,
}

impl Footprint {
    pub const fn page_bytes(&self) -> u64 {
        self.per_position.saturating_mul(self.page as u64)
    }

    /// Unit in which memory for sequences is given out: a page or, if positions take no memory, a
    /// sequence.
    pub const fn unit(&self) -> u64 {
        match self.page_bytes() {
            0 => self.per_sequence,
            page => page,
        }
    }

    /// Bytes of a sequence of `positions` positions that shares no page.
    pub const fn bytes(&self, positions: u32) -> u64 {
        let pages = positions.div_ceil(self.page) as u64;
        self.per_sequence
            .saturating_add(self.page_bytes().saturating_mul(pages))
    }
}
