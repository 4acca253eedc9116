//! Helpers of the libtorch engine's tests.
#![allow(dead_code)] // each test binary uses a part

use hearthnet_engine::{Engine, EngineOptions, SeqId, Span};
use hearthnet_files::{Gguf, ModelFile};
use hearthnet_testkit::{encoded, rewritten};
use hearthnet_torch::{DeviceChoice, Dtype, TorchEngine, TorchOptions};

/// On the processor, with one thread and little memory.
pub(crate) fn options(dtype: Dtype) -> TorchOptions {
    TorchOptions {
        device: DeviceChoice::Cpu,
        dtype: Some(dtype),
        engine: EngineOptions {
            threads: 1,
            max_kv_bytes: 64 << 20,
            ..EngineOptions::default()
        },
    }
}

pub(crate) fn load(
    file: &ModelFile,
    layers: std::ops::Range<u32>,
    options: &TorchOptions,
) -> TorchEngine {
    hearthnet_torch::load(file, layers, options, &mut |_, _| ()).unwrap()
}

/// Families that this engine refuses: they have recurrent layers, shared experts, layers with
/// different heads, or gates of attention, or make vectors of texts.
pub(crate) const REFUSED: [&str; 20] = [
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "glm4moe",
    "deepseek2",
    "deepseek3",
    "glm47flash",
    "gemma4",
    "gemma4moe",
    "gemma4ple",
    "granitehybrid",
    "granitehybridmoe",
    "nemotronh",
    "nemotronhmoe",
    "lfm2",
    "lfm2moe",
    "museglimmer",
    "bert",
    "nomicbert",
    "gemmaembedding",
];

/// Names of the small models that this engine computes.
pub(crate) fn families() -> Vec<String> {
    let mut names = hearthnet_testkit::families();
    names.retain(|name| !REFUSED.contains(&name.as_str()));
    names
}

/// The model with changed values of one tensor.
pub(crate) fn rewrite(file: &ModelFile, tensor: &str, change: impl Fn(&mut f32)) -> ModelFile {
    let bytes = rewritten(file.gguf(), &[], |info, mut values| {
        if info.name == tensor {
            values.iter_mut().for_each(&change);
        }
        encoded(info.dtype, &values)
    });
    ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap()
}

/// Rows at every layer boundary on the exact engine: the input of each layer, then the last output.
pub(crate) fn exact(file: &ModelFile, rows: &[f32]) -> Vec<Vec<f32>> {
    let mut all = vec![rows.to_vec()];
    let mut x = rows.to_vec();
    for layer in 0..file.spec().layers {
        x = exact_layers(file, layer..layer + 1, &x);
        all.push(x.clone());
    }
    all
}

/// Runs rows through some layers on the exact engine.
pub(crate) fn exact_layers(
    file: &ModelFile,
    layers: std::ops::Range<u32>,
    rows: &[f32],
) -> Vec<f32> {
    let options = EngineOptions {
        threads: 1,
        ..EngineOptions::default()
    };
    let mut engine = Engine::load(file, layers, &options, &mut |_, _| ()).unwrap();
    let count = rows.len() / file.spec().width as usize;
    let span = Span::new(engine.open().unwrap(), 0, count as u32);
    let mut x = rows.to_vec();
    engine.forward(&[span], &mut x).unwrap();
    x
}

/// Appends rows in batches of `at_once`, and returns their outputs.
pub(crate) fn append(
    engine: &mut TorchEngine,
    seq: SeqId,
    rows: &[f32],
    at_once: usize,
) -> Vec<f32> {
    let width = engine.spec().width as usize;
    let mut out = Vec::new();
    for batch in rows.chunks(at_once * width) {
        let mut x = batch.to_vec();
        let position = engine.len(seq).unwrap();
        let span = Span::new(seq, position, (batch.len() / width) as u32);
        engine.forward(&[span], &mut x).unwrap();
        out.extend(x);
    }
    out
}

/// Per row, the largest difference of a value, relative to the row's largest value.
pub(crate) fn deviations(found: &[f32], expected: &[f32], width: usize) -> Vec<f32> {
    assert_eq!(found.len(), expected.len());
    let rows = found.chunks(width).zip(expected.chunks(width));
    rows.map(|(found, expected)| {
        let largest = expected.iter().fold(0f32, |max, v| max.max(v.abs()));
        let pairs = found.iter().zip(expected);
        let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        difference / largest
    })
    .collect()
}

pub(crate) fn deviation(found: &[f32], expected: &[f32], width: usize) -> f32 {
    let rows = deviations(found, expected, width);
    rows.into_iter().fold(0.0, f32::max)
}
