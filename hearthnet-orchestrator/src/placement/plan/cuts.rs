//! Legal cuts of a model, and the memory of ranges between them.

use super::input::{Layers, MAX_LAYERS, Model};

/// Hosted layers, their legal cuts, and prefix sums of their memory.
#[derive(Debug, Clone)]
pub(super) struct Cuts {
    hosted: Layers,
    /// Legal cuts, ascending, with both ends of the hosted layers.
    at: Vec<u32>,
    /// Memory of the hosted layers before each cut.
    before: Vec<u64>,
}

impl Cuts {
    /// `None` without a hosted layer or with too many.
    pub(super) fn new(model: &Model) -> Option<Self> {
        let hosted = model.hosted();
        if hosted.is_empty() || model.layer_bytes.len() > MAX_LAYERS {
            return None;
        }
        let is_end = |layer: u32| layer == hosted.first || layer == hosted.end;
        let (mut at, mut before, mut sum) = (Vec::new(), Vec::new(), 0u64);
        for layer in hosted.first..=hosted.end {
            if is_end(layer) || !model.uncut.contains(&layer) {
                at.push(layer);
                before.push(sum);
            }
            sum = sum.saturating_add(model.layer_memory(layer));
        }
        Some(Self { hosted, at, before })
    }

    pub(super) fn hosted(&self) -> Layers {
        self.hosted
    }

    /// Number of pieces between neighbouring cuts.
    pub(super) fn pieces(&self) -> usize {
        self.at.len().saturating_sub(1)
    }

    /// Layers of the pieces `from..to`.
    pub(super) fn layers(&self, from: usize, to: usize) -> Layers {
        let at = |i: usize| self.at.get(i).copied().unwrap_or(self.hosted.end);
        Layers::new(at(from), at(to))
    }

    /// Memory of the pieces `from..to`; more than any node has if they do not exist.
    pub(super) fn memory(&self, from: usize, to: usize) -> u64 {
        match (self.before.get(from), self.before.get(to)) {
            (Some(from), Some(to)) => to.saturating_sub(*from),
            _ => u64::MAX,
        }
    }

    /// Memory of a legal range.
    pub(super) fn bytes(&self, layers: Layers) -> u64 {
        match self.pieces_of(layers) {
            Some((from, to)) => self.memory(from, to),
            None => u64::MAX,
        }
    }

    /// Pieces of a range that begins and ends at legal cuts.
    pub(super) fn pieces_of(&self, layers: Layers) -> Option<(usize, usize)> {
        let from = self.at.binary_search(&layers.first).ok()?;
        let to = self.at.binary_search(&layers.end).ok()?;
        (from < to).then_some((from, to))
    }

    /// All legal ranges.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Layers> {
        let count = self.pieces();
        (0..count).flat_map(move |from| (from + 1..=count).map(move |to| self.layers(from, to)))
    }

    /// Memory of the smallest piece.
    pub(super) fn smallest(&self) -> u64 {
        let pieces = (0..self.pieces()).map(|i| self.memory(i, i + 1));
        pieces.min().unwrap_or(u64::MAX)
    }

    /// True if all pieces have the same number of layers and the same memory.
    pub(super) fn are_alike(&self) -> bool {
        let mut pieces = (0..self.pieces()).map(|i| self.shape(i));
        let first = pieces.next();
        pieces.all(|shape| Some(shape) == first)
    }

    /// True if all pieces have the same number of layers.
    pub(super) fn are_equally_long(&self) -> bool {
        let mut pieces = (0..self.pieces()).map(|i| self.shape(i).0);
        let first = pieces.next();
        pieces.all(|count| Some(count) == first)
    }

    fn shape(&self, piece: usize) -> (u32, u64) {
        let layers = self.layers(piece, piece + 1);
        (layers.count(), self.memory(piece, piece + 1))
    }
}

/// Runs of layers of `all` for which `holds` is true.
pub(super) fn runs(all: Layers, mut holds: impl FnMut(u32) -> bool) -> Vec<Layers> {
    let mut runs: Vec<Layers> = Vec::new();
    for layer in all.first..all.end {
        if !holds(layer) {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == layer => run.end = layer + 1,
            _ => runs.push(Layers::new(layer, layer + 1)),
        }
    }
    runs
}

/// Prefix sums over the layers from 0.
pub(super) struct Sums(Vec<u64>);

impl Sums {
    pub(super) fn new(values: impl IntoIterator<Item = u64>) -> Self {
        let mut sums = vec![0u64];
        for value in values {
            let last = sums.last().copied().unwrap_or(0);
            sums.push(last.saturating_add(value));
        }
        Self(sums)
    }

    pub(super) fn of(&self, layers: Layers) -> u64 {
        if layers.is_empty() {
            return 0;
        }
        let at = |layer: u32| self.0.get(layer as usize).copied().unwrap_or(0);
        at(layers.end).saturating_sub(at(layers.first))
    }

    /// Sum over the layers that are not in `held`.
    pub(super) fn new_in(&self, held: Option<Layers>, layers: Layers) -> u64 {
        let both = held.map_or(0, |held| self.of(held.within(layers)));
        self.of(layers).saturating_sub(both)
    }
}
