//! Small models made by `transformers`, which the exact engine's tests compare with.

use std::path::{Path, PathBuf};

use hearthnet_engine::{EngineOptions, Head};
use hearthnet_files::ModelFile;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../hearthnet-files/tests/data/families")
}

/// Names of the models, sorted.
pub fn families() -> Vec<String> {
    let names = std::fs::read_dir(folder())
        .expect("the folder of models")
        .filter_map(|entry| {
            let name = entry
                .expect("a file")
                .file_name()
                .into_string()
                .expect("UTF-8");
            name.strip_suffix(".gguf").map(str::to_owned)
        });
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

pub fn family(name: &str) -> ModelFile {
    ModelFile::open(&folder().join(format!("{name}.gguf"))).expect("a model")
}

/// Embeddings of pseudo-random tokens, with the per-layer inputs of all layers; deterministic for a
/// seed.
pub fn embeddings(file: &ModelFile, count: usize, seed: u32) -> Vec<f32> {
    let head = Head::load(file, &EngineOptions::default()).expect("a head");
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let ids: Vec<u32> = (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % file.spec().vocab
        })
        .collect();
    let mut rows = Vec::new();
    head.embed(&ids, &mut rows).expect("known tokens");
    rows
}
