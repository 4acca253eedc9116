//! Memory of pages or states on the card.
//!
//! Each layer that needs it has one buffer, `[slot][words]`; a slot has the same number in all of
//! them. The buffers grow by half: each is replaced by a larger one, one after the other, so that
//! two of one layer exist at a time.
//!
//! Freed slots and replaced buffers are overwritten with zeros.

use hearthnet_engine::{EngineError, PageMemory, PoolMemory};

use crate::{Buffer, Gpu, GpuError};

/// Slots of the first buffers.
const FIRST: u32 = 8;

/// Slots of all layers.
pub struct CardSlots {
    gpu: Gpu,
    layers: Vec<LayerSlots>,
    count: u32,
    /// Slots that each buffer has room for.
    room: u32,
    /// Maximum of `room`.
    limit: u32,
}

struct LayerSlots {
    /// Words of a slot; 0 if the layer needs none.
    words: u64,
    /// `None` before the first slot.
    buffer: Option<Buffer>,
}

impl CardSlots {
    /// Empty memory. `words` has the words of a slot for each layer. There will be at most `most`
    /// slots, and no more than the card can bind.
    pub(super) fn new(gpu: &Gpu, words: impl Iterator<Item = u64>, most: u64) -> Self {
        let layers = words.map(|words| LayerSlots {
            words,
            buffer: None,
        });
        let layers: Vec<LayerSlots> = layers.collect();
        let widest = layers.iter().map(|layer| layer.words).max();
        let bound = gpu.facts().max_binding_words.min(u64::from(u32::MAX));
        let limit = bound / widest.unwrap_or(0).max(1);
        Self {
            gpu: gpu.clone(),
            layers,
            count: 0,
            room: 0,
            limit: limit.min(most) as u32,
        }
    }

    /// Buffer of a layer, and the words of a slot.
    pub(super) fn layer(&self, layer: usize) -> Option<(&Buffer, u64)> {
        let LayerSlots { words, buffer } = self.layers.get(layer)?;
        Some((buffer.as_ref()?, *words))
    }

    /// Makes room for the maximum of slots.
    pub(super) fn reserve(&mut self) -> Result<(), GpuError> {
        self.enlarge(self.limit)
    }

    fn enlarge(&mut self, room: u32) -> Result<(), GpuError> {
        for layer in self.layers.iter_mut().filter(|layer| layer.words > 0) {
            let larger = self.gpu.buffer(u64::from(room) * layer.words)?;
            if let Some(old) = &layer.buffer {
                let words = u64::from(self.room) * layer.words;
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

    fn buffers(&self) -> impl Iterator<Item = (&Buffer, u64)> {
        (0..self.layers.len()).filter_map(|layer| self.layer(layer))
    }
}

impl PoolMemory for CardSlots {
    fn is_empty(&self) -> bool {
        self.layers.iter().all(|layer| layer.words == 0)
    }

    fn add(&mut self) -> Result<(), EngineError> {
        if self.count == self.room {
            let room = (self.room + self.room / 2).max(FIRST).min(self.limit);
            if room <= self.room {
                return Err(EngineError::DeviceMemory);
            }
            self.enlarge(room)?;
        }
        self.count += 1;
        Ok(())
    }

    fn clear(&mut self, slots: &[usize]) {
        let mut slots = slots.to_vec();
        slots.sort_unstable();
        let mut step = self.gpu.step();
        for run in slots.chunk_by(|a, b| a + 1 == *b) {
            for (buffer, words) in self.buffers() {
                let start = run[0] as u64 * words;
                step.clear(buffer, start..start + run.len() as u64 * words);
            }
        }
        // On a lost device the contents are gone anyway.
        let _ = step.submit();
    }
}

impl PageMemory for CardSlots {
    fn copy(&mut self, from: usize, to: usize) -> Result<(), EngineError> {
        let mut step = self.gpu.step();
        for (buffer, words) in self.buffers() {
            let [from, to] = [from, to].map(|slot| slot as u64 * words);
            step.copy_words(buffer, from, buffer, to, words);
        }
        Ok(step.submit()?)
    }
}

impl Drop for CardSlots {
    fn drop(&mut self) {
        let mut step = self.gpu.step();
        for (buffer, _) in self.buffers() {
            step.clear(buffer, 0..buffer.words());
        }
        let _ = step.submit();
    }
}
