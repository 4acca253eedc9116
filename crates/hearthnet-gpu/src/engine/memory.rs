//! Memory of the sequences of an engine on the card: keys and values in pages, and states of
//! recurrent layers.
//!
//! A page holds 32 positions of one sequence for every layer of the engine, as in the exact engine:
//! `[key/value head][32 positions]` of each layer that has keys.

use std::ops::Range;

use hearthnet_engine::{Memory, footprint};
use hearthnet_files::spec::ModelSpec;

use super::slots::CardSlots;
use crate::Gpu;
use crate::kv_layout::page_words;

/// Storage of an engine on a card.
pub(super) type CardMemory = Memory<CardSlots, CardSlots>;

/// Empty memory for pages of keys and values, which will take at most `budget` bytes.
pub(super) fn pages(gpu: &Gpu, spec: &ModelSpec, layers: Range<u32>, budget: u64) -> CardSlots {
    let page = footprint(spec, layers.clone()).page_bytes();
    let words = layers.map(|layer| {
        let block = spec.block(layer);
        match block.has_keys() {
            true => u64::from(block.kv_heads) * u64::from(page_words(block.key_width())),
            false => 0,
        }
    });
    CardSlots::new(gpu, words, budget / page.max(1))
}

/// An empty storage, whose pages will take at most `budget` bytes.
pub(super) fn memory(gpu: &Gpu, spec: &ModelSpec, layers: Range<u32>, budget: u64) -> CardMemory {
    let words = layers
        .clone()
        .map(|layer| spec.block(layer).state().total());
    let states = CardSlots::new(gpu, words, u64::MAX);
    let pages = pages(gpu, spec, layers.clone(), budget);
    Memory::new(footprint(spec, layers), pages, states)
}
