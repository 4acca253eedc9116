//! How a batch is cut into tiles, and work into units.

use std::ops::Range;

use crate::engine::sequence::Span;

/// Rows of a tile when panels are split: what the kernels take at once.
pub(super) const WIDE_TILE: usize = 8;
/// Rows per member up to which panels are split.
pub(super) const WIDE_ROWS: usize = 16;
/// Most rows of a tile in prefill: their activations stay in the second-level cache, and weights
/// are read once for all of them.
pub(super) const TALL_TILE: usize = 64;
/// Tiles per member that one pass over the layers takes at most; more rows go in several passes,
/// so that scratch memory is bounded.
pub(super) const PASS_TILES: usize = 8;
/// Units per member into which a matrix is split: some slack, so that a member that is held up
/// does not hold up the others.
pub(super) const UNITS: usize = 2;

/// Rows of a tile that belong to one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) span: usize,
    /// Counted from the tile's first.
    pub(super) row: usize,
    pub(super) rows: usize,
    /// Of the first row.
    pub(super) position: usize,
}

/// Most rows for which panels are split. One thread has nothing to split.
pub(super) fn wide_rows(threads: usize) -> usize {
    if threads == 1 {
        WIDE_TILE
    } else {
        WIDE_ROWS * threads
    }
}

/// Rows `rows` of the batch as tiles of `size` rows, each as the pieces it consists of.
pub(super) fn cut(spans: &[Span], rows: &Range<usize>, size: usize) -> Vec<Vec<Piece>> {
    let mut tiles = vec![Vec::new(); rows.len().div_ceil(size.max(1))];
    let mut end = 0;
    for (index, span) in spans.iter().enumerate() {
        let begin = end;
        end = begin + span.rows as usize;
        // Rows of the batch that are in the span and not yet in a tile.
        let mut next = begin.max(rows.start);
        while next < end.min(rows.end) {
            let tile = (next - rows.start) / size;
            let first = rows.start + tile * size;
            let stop = end.min(rows.end).min(first + size);
            tiles[tile].push(Piece {
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

/// Unit `unit` of `units` nearly equal parts of `count` things.
pub(super) fn share(count: usize, units: usize, unit: usize) -> Range<usize> {
    count * unit / units..count * (unit + 1) / units
}

/// Into how many units `panels` panels are split.
pub(super) fn units(panels: usize, threads: usize) -> usize {
    if threads == 1 {
        1
    } else {
        panels.min(threads * UNITS)
    }
}

/// Rows of a tile: as many as allowed, but the same number of tiles for every member.
pub(super) fn tall_tile(rows: usize, threads: usize) -> usize {
    let tiles = rows.div_ceil(TALL_TILE).next_multiple_of(threads);
    rows.div_ceil(tiles)
        .next_multiple_of(WIDE_TILE)
        .min(TALL_TILE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kv::{Geometry, KvCache, Limits};

    fn spans(rows: &[(u32, u32)]) -> Vec<Span> {
        let geometry = Geometry {
            first_layer: 0,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
        };
        let limits = Limits {
            bytes: 0,
            context: 0,
            sequences: 100,
        };
        let mut cache = KvCache::new(geometry, limits);
        rows.iter()
            .map(|&(position, rows)| Span {
                seq: cache.open().unwrap(),
                position,
                rows,
            })
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
                    for piece in tile {
                        rows.extend((0..piece.rows).map(|i| {
                            (index * size + piece.row + i, piece.span, piece.position + i)
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
    fn tall_tiles_are_as_many_for_every_member() {
        assert_eq!(tall_tile(512, 1), 64);
        assert_eq!(tall_tile(512, 2), 64);
        assert_eq!(tall_tile(512, 3), 64);
        assert_eq!(tall_tile(100, 2), 56);
        assert_eq!(tall_tile(65, 1), 40);
        assert_eq!(tall_tile(33, 2), 24);
    }
}
