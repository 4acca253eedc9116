//! Benchmark, the same as for the exact engine.

use std::error::Error;
use std::path::Path;

use hearthnet_engine::Head;
use hearthnet_engine::bench::{BenchOptions, EngineBench, bench_layers};
use hearthnet_files::ModelFile;

use crate::engine::load;
use crate::options::TorchOptions;

/// Measures a model file as [`hearthnet_engine::bench::bench_engine`] does. Of `torch`, only device
/// and format apply. Embedding and logits run on the exact engine, as for callers.
///
/// # Errors
/// The file is not a loadable model, the device cannot be used, or the engine refuses a batch.
pub fn bench(
    path: &Path,
    torch: &TorchOptions,
    options: &BenchOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<EngineBench, Box<dyn Error>> {
    let target = torch.target(ModelFile::open(path)?.spec())?;
    bench_layers(
        path,
        &target.arithmetic(),
        options,
        progress,
        |file, engine| {
            let torch = TorchOptions {
                engine: engine.clone(),
                ..torch.clone()
            };
            let layers = load(file, 0..file.spec().layers, &torch, &mut |_, _| ())?;
            Ok((layers, Head::load(file, engine)?))
        },
    )
}
