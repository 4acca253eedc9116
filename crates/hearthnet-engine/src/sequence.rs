//! Sequence ids, and spans of rows to append to sequences.

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
