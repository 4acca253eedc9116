//! Stand-in for graphics cards in a program built without them: the processor computes.

use std::ops::Range;
use std::path::Path;

use hearthnet_engine::bench::{BenchOptions, EngineBench};
use hearthnet_engine::{Engine, EngineOptions};
use hearthnet_files::ModelFile;
use hearthnet_shard::{Device, LoadFault, load_on_processor};

use super::no_cards_built;
use crate::cli::Failure;

pub(crate) type Layers = Engine;

/// None: the program cannot use them.
pub(crate) fn cards() -> Vec<String> {
    Vec::new()
}

/// Calls `isolate` without a card, and returns the function that loads layers.
pub(crate) fn begin(
    _: Device,
    isolate: impl FnOnce(bool),
) -> impl FnOnce(
    &ModelFile,
    Range<u32>,
    &EngineOptions,
    &mut dyn FnMut(u64, u64),
) -> Result<Layers, LoadFault> {
    isolate(false);
    load_on_processor
}

/// Always fails.
pub(crate) fn bench(
    _: &Path,
    _: Device,
    _: &BenchOptions,
    _: &mut dyn FnMut(&str),
) -> Result<EngineBench, Failure> {
    Err(no_cards_built())
}
