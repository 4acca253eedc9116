//! States of recurrent layers on the card.
//!
//! Each layer with a recurrence has one buffer, `[state][words]`; a state has the same number in all
//! of them. The buffers grow as those of keys and values do.

use std::ops::Range;

use hearthnet_engine::{EngineError, Span, StateMemory};
use hearthnet_files::spec::ModelSpec;

use super::pages::CardSequence;
use super::pass::device_error;
use crate::{Buffer, Gpu, GpuError, Pieces, StateView, piece};

/// States of the first buffers.
const FIRST: u32 = 8;
/// Rows of a piece, at most: a launch takes as long as its longest piece.
const ROWS: usize = 64;

struct LayerStates {
    /// Words of a state; 0 if the layer has none.
    words: u32,
    /// Those of the inputs of the convolution, which come first.
    inputs: u32,
    /// `None` before the first state.
    buffer: Option<Buffer>,
}

/// States of all sequences.
pub(super) struct CardStates {
    gpu: Gpu,
    layers: Vec<LayerStates>,
    count: u32,
    /// States that each buffer has room for.
    room: u32,
    /// Maximum of `room`, from the largest buffer that the card binds.
    limit: u32,
}

impl CardStates {
    pub(super) fn new(gpu: &Gpu, spec: &ModelSpec, layers: Range<u32>) -> Self {
        let layers: Vec<LayerStates> = layers
            .map(|layer| {
                let size = spec.block(layer).state();
                LayerStates {
                    words: u32::try_from(size.total()).unwrap_or(u32::MAX),
                    inputs: size.rows.saturating_mul(size.channels),
                    buffer: None,
                }
            })
            .collect();
        let widest = layers.iter().map(|layer| layer.words).max().unwrap_or(0);
        let bound = gpu.facts().max_binding_words.min(u64::from(u32::MAX));
        Self {
            gpu: gpu.clone(),
            layers,
            count: 0,
            room: 0,
            limit: (bound / u64::from(widest.max(1))) as u32,
        }
    }

    /// States of a layer: inputs of its convolution, and those of its heads behind them.
    pub(super) fn layer(&self, layer: usize) -> Option<[StateView<'_>; 2]> {
        let of = self.layers.get(layer)?;
        let buffer = of.buffer.as_ref()?;
        Some([0, of.inputs].map(|at| StateView {
            buffer,
            words: of.words,
            at,
        }))
    }

    /// Makes room for more states.
    fn enlarge(&mut self) -> Result<(), EngineError> {
        let room = (self.room + self.room / 2).max(FIRST).min(self.limit);
        if room <= self.room {
            return Err(EngineError::DeviceMemory);
        }
        for layer in self.layers.iter_mut().filter(|layer| layer.words > 0) {
            let larger = self.gpu.buffer(u64::from(room) * u64::from(layer.words));
            let larger = larger.map_err(device_error)?;
            if let Some(old) = &layer.buffer {
                let words = u64::from(self.room) * u64::from(layer.words);
                let mut step = self.gpu.step();
                step.copy_words(old, 0, &larger, 0, words);
                step.clear(old, 0..words);
                step.submit().map_err(device_error)?;
            }
            layer.buffer = Some(larger);
        }
        self.room = room;
        Ok(())
    }

    /// Records that states are filled with zeros.
    fn wipe(&mut self, states: Range<u32>) {
        let mut step = self.gpu.step();
        for layer in &self.layers {
            let words = u64::from(layer.words);
            if let Some(buffer) = &layer.buffer {
                step.clear(
                    buffer,
                    u64::from(states.start) * words..u64::from(states.end) * words,
                );
            }
        }
        // On a lost device the contents are gone anyway.
        let _ = step.submit();
    }
}

impl StateMemory for CardStates {
    fn is_empty(&self) -> bool {
        self.layers.iter().all(|layer| layer.words == 0)
    }

    fn add(&mut self) -> Result<(), EngineError> {
        if self.count == self.room {
            self.enlarge()?;
        }
        self.count += 1;
        Ok(())
    }

    fn clear(&mut self, state: usize) {
        let state = state as u32;
        self.wipe(state..state + 1);
    }
}

impl Drop for CardStates {
    fn drop(&mut self) {
        self.wipe(0..self.count);
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
        (spans, sequences): (&[Span], &[&CardSequence]),
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
