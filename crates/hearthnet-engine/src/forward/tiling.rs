//! Split of a batch into tiles, and of work into units.

use std::ops::Range;

use crate::sequence::Span;

/// Rows of a tile in a decode pass.
pub(super) const DECODE_TILE: usize = 8;
/// Maximum rows per thread of a decode pass.
pub(super) const DECODE_ROWS: usize = 16;
/// Maximum rows of a tile in a prefill pass. Their activations stay in the L2 cache, and weights
/// are read once for all of them.
pub(super) const PREFILL_TILE: usize = 64;
/// Maximum tiles per thread and pass over the layers. More rows take several passes, which bounds
/// scratch memory.
pub(super) const PASS_TILES: usize = 8;
/// Units per thread into which a matrix is split. More than one, so that a delayed thread does not
/// delay the others.
pub(super) const UNITS: usize = 2;

/// Rows of a tile that belong to one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Segment {
    pub(super) span: usize,
    /// First row, counted from the tile's first row.
    pub(super) row: usize,
    pub(super) rows: usize,
    /// Position of the first row in its sequence.
    pub(super) position: usize,
}

/// Maximum rows of a decode pass. A single thread gains nothing from splitting panels.
pub(super) fn decode_rows(threads: usize) -> usize {
    if threads == 1 {
        DECODE_TILE
    } else {
        DECODE_ROWS * threads
    }
}

/// Splits `rows` of the batch into tiles of `size` rows, and each tile into segments.
pub(super) fn cut(spans: &[Span], rows: &Range<usize>, size: usize) -> Vec<Vec<Segment>> {
    let mut tiles = vec![Vec::new(); rows.len().div_ceil(size.max(1))];
    let mut end = 0;
    for (index, span) in spans.iter().enumerate() {
        let begin = end;
        end = begin + span.rows as usize;
        // First row of the span, counted over the batch, that is not yet in a tile.
        let mut next = begin.max(rows.start);
        while next < end.min(rows.end) {
            let tile = (next - rows.start) / size;
            let first = rows.start + tile * size;
            let stop = end.min(rows.end).min(first + size);
            tiles[tile].push(Segment {
                span: index,
                row: next - first,
                rows: stop - next,
                position: span.position as usize + (next - begin),
            });
            next = stop;
        }
    }
    tiles
}

/// Range of unit `unit` when `count` items are split into `units` nearly equal parts.
pub(crate) fn share(count: usize, units: usize, unit: usize) -> Range<usize> {
    count * unit / units..count * (unit + 1) / units
}

/// Number of units into which `panels` panels are split, at most `each` per thread.
pub(crate) fn units(panels: usize, threads: usize, each: usize) -> usize {
    if threads == 1 {
        1
    } else {
        panels.min(threads * each)
    }
}

/// Rows of a tile in a prefill pass: as many as allowed, with equally many tiles per thread.
pub(super) fn prefill_tile(rows: usize, threads: usize) -> usize {
    let tiles = rows.div_ceil(PREFILL_TILE).next_multiple_of(threads);
    rows.div_ceil(tiles)
        .next_multiple_of(DECODE_TILE)
        .min(PREFILL_TILE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::SeqId;

    fn spans(rows: &[(u32, u32)]) -> Vec<Span> {
        let spans = (0..).zip(rows);
        spans
            .map(|(seq, &(position, rows))| Span::new(SeqId(seq), position, rows))
            .collect()
    }

    #[test]
    fn tiles_have_every_row_once_and_in_order() {
        let batch = spans(&[(5, 3), (0, 1), (100, 70), (7, 2)]);
        for size in [1, 2, 8, 64, 100] {
            for (begin, end) in [(0, 76), (2, 75), (4, 5), (10, 74)] {
                let tiles = cut(&batch, &(begin..end), size);
                let mut rows = Vec::new();
                for (index, tile) in tiles.iter().enumerate() {
                    assert!(!tile.is_empty() && tile.iter().map(|p| p.rows).sum::<usize>() <= size);
                    for segment in tile {
                        rows.extend((0..segment.rows).map(|i| {
                            (
                                index * size + segment.row + i,
                                segment.span,
                                segment.position + i,
                            )
                        }));
                    }
                }
                let all = batch.iter().enumerate().flat_map(|(span, s)| {
                    (s.position..s.position + s.rows).map(move |p| (span, p as usize))
                });
                let expected: Vec<(usize, usize, usize)> = all
                    .skip(begin)
                    .take(end - begin)
                    .enumerate()
                    .map(|(row, (span, position))| (row, span, position))
                    .collect();
                assert_eq!(rows, expected, "tiles of {size}, rows {begin}..{end}");
            }
        }
    }

    #[test]
    fn shares_are_nearly_equal_and_cover_everything() {
        for count in [1, 7, 36, 1000] {
            for units in 1..=count.min(9) {
                let shares: Vec<Range<usize>> =
                    (0..units).map(|u| share(count, units, u)).collect();
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert_eq!((shares[0].start, shares[units - 1].end), (0, count));
                let sizes = shares.iter().map(ExactSizeIterator::len);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }
    }

    #[test]
    fn prefill_tiles_are_as_many_for_every_thread() {
        assert_eq!(prefill_tile(512, 1), 64);
        assert_eq!(prefill_tile(512, 2), 64);
        assert_eq!(prefill_tile(512, 3), 64);
        assert_eq!(prefill_tile(100, 2), 56);
        assert_eq!(prefill_tile(65, 1), 40);
        assert_eq!(prefill_tile(33, 2), 24);
    }
}
