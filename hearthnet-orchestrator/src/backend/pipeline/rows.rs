//! Chunks of rows, and the rows that are kept at a boundary. Pure.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Consecutive rows of one sequence.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Position of the first row.
    pub position: u32,
    /// Number of rows, at least 1.
    pub rows: u32,
    /// The rows in the boundary's data type, `rows * row_bytes` bytes.
    pub data: Bytes,
}

impl Chunk {
    pub(super) fn end(&self) -> u32 {
        self.position + self.rows
    }

    /// Cuts before `position`, which lies inside; returns the second part.
    pub(super) fn split_off(&mut self, position: u32, row_bytes: usize) -> Self {
        let stays = position - self.position;
        let rest = Self {
            position,
            rows: self.rows - stays,
            data: self.data.split_off(stays as usize * row_bytes),
        };
        self.rows = stays;
        rest
    }
}

// Activations are sensitive: shapes only.
impl std::fmt::Debug for Chunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chunk")
            .field("position", &self.position)
            .field("rows", &self.rows)
            .field("bytes", &self.data.len())
            .finish()
    }
}

/// Row granularity of engines: a chunk of a few rows less takes as long.
pub(super) const GRAIN: usize = 8;

/// Rows per chunk, 1 to `most`, when `rows` are cut into the fewest chunks. Chunks are about equal,
/// because every host behind the first waits for one whole chunk.
pub(crate) fn even_cut(rows: usize, most: usize) -> usize {
    let chunks = rows.div_ceil(most).max(1);
    let even = rows.div_ceil(chunks).max(1);
    even.next_multiple_of(GRAIN).min(most)
}

/// Cuts rows, the first of them at `position`, into chunks of at most `chunk_rows` rows.
pub(super) fn cut(
    mut position: u32,
    mut rows: Bytes,
    chunk_rows: usize,
    row_bytes: usize,
) -> Vec<Chunk> {
    let chunk_rows = even_cut(rows.len() / row_bytes, chunk_rows);
    let mut chunks = Vec::new();
    while rows.len() >= row_bytes {
        let count = chunk_rows.min(rows.len() / row_bytes);
        let chunk = Chunk {
            position,
            rows: u32::try_from(count).unwrap_or(u32::MAX),
            data: rows.split_to(count * row_bytes),
        };
        position = chunk.end();
        chunks.push(chunk);
    }
    chunks
}

/// Input rows of a span, from position 0 on. Clones share the rows.
#[derive(Debug, Clone)]
pub(super) struct Boundary {
    /// Positions that have arrived.
    pub(super) have: u32,
    /// Rows of these positions, without gaps; `None` once dropped.
    pub(super) kept: Option<VecDeque<Bytes>>,
}

impl Boundary {
    pub(super) fn new(keep: bool) -> Self {
        Self {
            have: 0,
            kept: keep.then(VecDeque::new),
        }
    }

    pub(super) fn push(&mut self, chunk: &Chunk) {
        self.have = chunk.end();
        if let Some(kept) = &mut self.kept {
            kept.push_back(chunk.data.clone());
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.kept.iter().flatten().map(Bytes::len).sum()
    }

    /// Drops the positions from `position` on.
    pub(super) fn truncate(&mut self, position: u32, row_bytes: usize) {
        self.have = self.have.min(position);
        let Some(kept) = &mut self.kept else { return };
        let mut room = self.have as usize * row_bytes;
        let mut whole = 0;
        for piece in kept.iter_mut() {
            if room == 0 {
                break;
            }
            if piece.len() > room {
                *piece = piece.slice(..room);
            }
            room -= piece.len();
            whole += 1;
        }
        kept.truncate(whole);
    }

    /// The kept rows of some positions as chunks of at most `chunk_rows` rows.
    pub(super) fn replay(
        &self,
        positions: Range<u32>,
        chunk_rows: usize,
        row_bytes: usize,
    ) -> Vec<Chunk> {
        let mut rows = BytesMut::with_capacity(self.bytes());
        for piece in self.kept.iter().flatten() {
            rows.extend_from_slice(piece);
        }
        debug_assert_eq!(rows.len(), self.have as usize * row_bytes);
        let [begin, end] = [positions.start, positions.end].map(|at| at as usize * row_bytes);
        let rows = rows.freeze().slice(begin..end);
        cut(positions.start, rows, chunk_rows, row_bytes)
    }
}
