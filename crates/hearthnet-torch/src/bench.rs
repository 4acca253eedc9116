//! Benchmark, the same as for the exact engine.

use std::error::Error;
use std::path::Path;

use hearthnet_engine::bench::{BenchLayers, BenchOptions, EngineBench, bench_layers};
use hearthnet_engine::{Head, Span};
use hearthnet_files::ModelFile;

use crate::engine::TorchEngine;
use crate::kv::Seq;
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
                threads: Some(engine.threads),
                max_kv_bytes: engine.max_kv_bytes,
                ..torch.clone()
            };
            let layers = 0..file.spec().layers;
            let layers = TorchEngine::load(file, layers, &torch, &mut |_, _| ())?;
            Ok((layers, Head::load(file, engine)?))
        },
    )
}

impl BenchLayers for TorchEngine {
    type Seq = Seq;

    fn open(&mut self) -> Result<Seq, Box<dyn Error>> {
        Ok(TorchEngine::open(self)?)
    }

    fn close(&mut self, seq: Seq) {
        TorchEngine::close(self, seq);
    }

    fn truncate(&mut self, seq: Seq, len: u32) -> Result<(), Box<dyn Error>> {
        Ok(TorchEngine::truncate(self, seq, len)?)
    }

    fn forward(&mut self, spans: &[Span<Seq>], rows: &mut [f32]) -> Result<(), Box<dyn Error>> {
        Ok(TorchEngine::forward(self, spans, rows)?)
    }

    fn weight_bytes(&self) -> u64 {
        TorchEngine::weight_bytes(self)
    }

    fn token_bytes(&self) -> u64 {
        TorchEngine::token_bytes(self)
    }
}
