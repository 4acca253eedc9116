//! Loading of layers for an engine with memory of its own.

use std::ops::Range;

use hearthnet_files::ModelFile;

use crate::error::LoadError;
use crate::kernels::Arena;
use crate::layer::Layer;
use crate::matrices::layer_bytes;
use crate::weights::{Loader, check_layers};

/// Loads the layers of a half-open range one after another for an engine with memory of its own,
/// and passes each to `take`. The memory of a layer here is free as soon as `take` drops it, and
/// gate and up matrices are separate. `progress` receives the bytes of the file read so far, and the
/// total.
///
/// # Errors
/// See [`LoadError`]; errors of `take`.
pub fn each_layer<E: From<LoadError>>(
    file: &ModelFile,
    threads: usize,
    range: Range<u32>,
    progress: &mut dyn FnMut(u64, u64),
    mut take: impl FnMut(Layer) -> Result<(), E>,
) -> Result<(), E> {
    check_layers(file.spec(), &range)?;
    let total = range.clone().map(|layer| file.layer_bytes(layer)).sum();
    let mut loader = Loader::new(file, threads, 0, total, progress)?;
    loader.pairs = false;
    for layer in range {
        let packed = layer_bytes(file, layer)?;
        let arena = Arena::with_capacity(packed).map_err(|_| LoadError::OutOfMemory(packed))?;
        loader.arena = arena;
        let loaded = loader.layer(layer)?;
        let tensors = file.layer_tensors(layer);
        file.check_copied(tensors).map_err(LoadError::from)?;
        // The loader's own hold on the memory ends before `take` begins.
        loader.arena = Arena::default();
        take(loaded)?;
    }
    Ok(())
}
