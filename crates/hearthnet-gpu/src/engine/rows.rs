//! Inputs of a pass besides the activations: positions, page tables, order of recurrences.

use std::ops::Range;

use hearthnet_engine::{PagedSequence, Span};
use hearthnet_files::spec::ModelSpec;

use crate::kv_layout::PAGE;
use crate::{Buffer, Gpu, GpuError, Pieces, View, attention_words, piece};

/// Words of the scores of attention, unless one row needs more.
const SCORES: u64 = 1 << 24;

/// Rows of a piece, at most: a launch takes as long as its longest piece.
const ROWS: usize = 64;

/// Positions, page tables and further inputs of the rows of a pass.
pub(super) struct RowInfo {
    /// For each window that changes what a row sees, `[row][4]`.
    views: Vec<(Option<u32>, Buffer)>,
    pub(super) tables: Buffer,
    /// Factors of the queries.
    pub(super) factors: Option<Buffer>,
    /// Per-layer inputs, `[row][layer][width]`.
    pub(super) inputs: Buffer,
    /// Number of positions that a row attends to, at most; whole pages.
    pub(super) positions: u32,
    /// For each row, the positions that it attends to.
    ends: Vec<u32>,
    /// `None` if no layer has a state.
    rounds: Option<Rounds>,
}

impl RowInfo {
    /// Rows `from` to `to` of a batch. `inputs` are the per-layer inputs of these rows.
    pub(super) fn of(
        gpu: &Gpu,
        spec: &ModelSpec,
        windows: &[Option<u32>],
        (spans, sequences): (&[Span], &[&PagedSequence]),
        rows: Range<usize>,
        inputs: &[f32],
    ) -> Result<Self, GpuError> {
        let rounds = Rounds::of(gpu, (spans, sequences), &rows)?;
        let mut of_rows = Vec::with_capacity(rows.len());
        let (mut before, mut pages) = (0usize, Vec::new());
        for (span, sequence) in spans.iter().zip(sequences) {
            let first = pages.len() as u32;
            let all = before..before + span.rows as usize;
            before = all.end;
            let (start, end) = (all.start.max(rows.start), all.end.min(rows.end));
            if start >= end {
                continue;
            }
            pages.extend(sequence.table.iter().map(|page| *page as u32));
            let text = span.position + span.rows;
            of_rows.extend((start..end).map(|row| {
                let position = span.position + (row - all.start) as u32;
                (position, first, text)
            }));
        }
        let both_sides = spec.encoder.is_some();
        let end = |position: u32, text: u32, window: Option<u32>| match (both_sides, window) {
            (false, _) => position + 1,
            (true, None) => text,
            (true, Some(window)) => text.min(position.saturating_add(window)),
        };
        let mut views: Vec<(Option<u32>, Buffer)> = Vec::new();
        for &window in windows {
            let window = window.filter(|_| both_sides);
            if views.iter().any(|(known, _)| *known == window) {
                continue;
            }
            let words: Vec<u32> = of_rows
                .iter()
                .flat_map(|&(position, first, text)| {
                    [position, first, end(position, text, window), 0]
                })
                .collect();
            views.push((window, gpu.upload(&words)?));
        }
        let ends: Vec<u32> = of_rows
            .iter()
            .map(|&(position, _, text)| end(position, text, None))
            .collect();
        let factors = spec.attention.temperature.map(|temperature| {
            let positions = of_rows.iter().map(|(position, ..)| *position as usize);
            let factors = positions.map(|position| temperature.factor(position));
            gpu.upload_f32(&factors.collect::<Vec<_>>())
        });
        let positions = ends.iter().copied().max().unwrap_or(0);
        // The card binds no empty buffer.
        pages.push(0);
        Ok(Self {
            views,
            tables: gpu.upload(&pages)?,
            factors: factors.transpose()?,
            inputs: match inputs {
                [] => gpu.buffer(1)?,
                inputs => gpu.upload_f32(inputs)?,
            },
            positions: positions.next_multiple_of(PAGE),
            ends,
            rounds,
        })
    }

    /// Rows for a layer with this window.
    pub(super) fn view(&self, window: Option<u32>) -> View<'_> {
        let found = self.views.iter().find(|(known, _)| *known == window);
        // Without an encoder, there is one for all windows.
        let (_, buffer) = found.unwrap_or(&self.views[0]);
        buffer.rows(4)
    }

    /// Rows in the order of recurrences.
    pub(super) fn rounds(&self) -> impl Iterator<Item = Pieces<'_>> {
        self.rounds.iter().flat_map(Rounds::each)
    }

    /// Rows that one launch of attention takes.
    pub(super) fn rows_at_once(&self, heads: u32) -> u32 {
        let rows = SCORES / attention_words(1, heads, self.positions).max(1);
        u32::try_from(rows).unwrap_or(u32::MAX).max(1)
    }

    /// Words of the scores of one launch.
    pub(super) fn scores(&self, heads: u32) -> u64 {
        let rows = self.rows_at_once(heads).min(self.ends.len() as u32);
        attention_words(rows, heads, self.positions)
    }

    /// Bytes of keys and values that so many rows read, if each reads them by itself.
    pub(super) fn work(&self, first: u32, count: u32, width: u32) -> u64 {
        let ends = self.ends.iter().skip(first as usize).take(count as usize);
        ends.map(|end| u64::from(*end) * u64::from(width) * 4).sum()
    }
}

/// Order in which the rows of a pass go through the states of their sequences. The pieces of a round
/// are of different sequences; those of a sequence are in successive rounds.
pub(super) struct Rounds {
    pieces: Buffer,
    /// First piece, number of pieces, rows of the longest.
    rounds: Vec<(u32, u32, u32)>,
}

impl Rounds {
    /// Rows `rows` of a batch; `None` if no layer has a state.
    pub(super) fn of(
        gpu: &Gpu,
        (spans, sequences): (&[Span], &[&PagedSequence]),
        rows: &Range<usize>,
    ) -> Result<Option<Self>, GpuError> {
        let mut rounds: Vec<Vec<[u32; 8]>> = Vec::new();
        let mut begin = 0;
        for (span, sequence) in spans.iter().zip(sequences) {
            let first = begin;
            begin += span.rows as usize;
            let Some(buffers) = sequence.track.batch(span.position) else {
                return Ok(None);
            };
            let state = |buffer: usize| buffer as u32;
            let after = state(buffers.after);
            let (mut row, end) = (first.max(rows.start), begin.min(rows.end));
            // Earlier rows of the batch have left their state where that of its end will be.
            let mut before = match row == first {
                true => buffers.before.map(state),
                false => Some(after),
            };
            let mut round = 0;
            while row < end {
                let position = span.position as usize + (row - first);
                let mut checkpoints = buffers.checkpoints.iter();
                let next = checkpoints.find(|(length, _)| *length as usize > position);
                let until = next.map_or(usize::MAX, |(length, _)| *length as usize - position);
                let count = (end - row).min(until).min(ROWS);
                let copy = next.filter(|_| count == until).map(|(_, at)| state(*at));
                let own = ((row - rows.start) as u32, count as u32);
                if rounds.len() == round {
                    rounds.push(Vec::new());
                }
                rounds[round].push(piece(own, before, after, copy));
                before = Some(after);
                row += count;
                round += 1;
            }
        }
        let words: Vec<u32> = rounds.iter().flatten().flatten().copied().collect();
        let mut first = 0;
        let rounds = rounds.iter().map(|pieces| {
            let longest = pieces.iter().map(|piece| piece[1]).max();
            let round = (first, pieces.len() as u32, longest.unwrap_or(0));
            first += round.1;
            round
        });
        Ok(Some(Self {
            rounds: rounds.collect(),
            pieces: gpu.upload(&words)?,
        }))
    }

    pub(super) fn each(&self) -> impl Iterator<Item = Pieces<'_>> {
        self.rounds.iter().map(|&(first, count, rows)| Pieces {
            buffer: &self.pieces,
            first,
            count,
            rows,
        })
    }
}
