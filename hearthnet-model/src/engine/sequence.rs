//! What callers name sequences by, and the rows that they add to them.

use std::fmt;

/// Names a sequence of one engine. Ids are never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SeqId(pub(super) u64);

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rows to append to a sequence, named by `S`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span<S = SeqId> {
    /// The sequence.
    pub seq: S,
    /// Where the rows begin: the sequence's length.
    pub position: u32,
    /// Number of rows, at least 1.
    pub rows: u32,
}
