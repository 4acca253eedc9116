//! States of recurrent layers on the card.
//!
//! Each layer with a recurrence has one buffer, `[state][words]`; a state has the same number in all
//! of them. The buffers grow as those of keys and values do.

use std::ops::Range;

use hearthnet_engine::{EngineError, StateMemory};
use hearthnet_files::spec::ModelSpec;

use crate::{Buffer, Gpu, StateView};

/// States of the first buffers.
const FIRST: u32 = 8;
struct LayerStates {
    /// Words of a state; 0 if the layer has none.
    words: u32,
    /// Words of a state's inputs of the convolution, which come before its heads.
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
            let larger = larger?;
            if let Some(old) = &layer.buffer {
                let words = u64::from(self.room) * u64::from(layer.words);
                let mut step = self.gpu.step();
                step.copy_words(old, 0, &larger, 0, words);
                step.clear(old, 0..words);
                step.submit()?;
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
