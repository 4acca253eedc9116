//! Fixtures that the tests of several modules use: node ids, descriptors, tiny models.

use std::sync::Arc;

use std::ops::Range;

use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_engine::{ARITHMETIC, Engine, Head};
use hearthnet_files::ModelFile;
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_testkit::{TinyLlama, one_thread};
use hearthnet_tokens::{ChatTemplate, Tokenizer};

use crate::backend::local::SharedEngine;
use crate::backend::{Backend, fuzzing};
use crate::chat::{AnswerOptions, ChatRequest, Prompt, TextModel, TurnOptions};
use crate::error::ChatError;
use crate::exact::Exact;
use crate::placement::Held;
use crate::service::ServedModel;

/// Node id of a test host with a short name.
pub(crate) fn node(name: &str) -> NodeId {
    let mut bytes = [0; 32];
    for (byte, letter) in bytes.iter_mut().zip(name.bytes()) {
        *byte = letter;
    }
    NodeId::from_checked(bytes)
}

/// Layers of a test host. Names in alphabetical order give ids in this order.
pub(crate) fn held(name: &str, lo: u32, hi: u32) -> Held {
    Held {
        node: node(name),
        range: (lo, hi),
    }
}

/// Output of one layer of a scripted host: depends on this row and every row before it.
pub(crate) fn layer(layer: u32, state: &mut Vec<u32>, position: u32, value: u32) -> u32 {
    // Small integers are exact in any float.
    fuzzing::layer(layer, state, position, value) % 60_000 + 1
}

/// Descriptor of an idle exact host of the layers `lo` to `hi`.
pub(crate) fn descriptor(model: &str, host: NodeId, lo: u32, hi: u32, total: u32) -> Descriptor {
    Descriptor {
        shard_id: Descriptor::shard_id(model, lo, hi),
        model_id: model.into(),
        weights_sha256: "ab".repeat(32),
        layer_range: (lo, hi),
        total_layers: total,
        advertised_at: 0,
        arithmetic: ARITHMETIC.into(),
        ms_per_token: 0.0,
        ..hearthnet_bus::testing::descriptor(host)
    }
}

pub(crate) fn tiny_file(layers: u32) -> ModelFile {
    let model = TinyLlama {
        layers,
        ..TinyLlama::default()
    };
    model.file()
}

fn shared(engine: Engine) -> SharedEngine {
    SharedEngine::new(engine, "tiny", 1 << 30)
}

/// Engine over some layers of a model.
pub(crate) fn engine(file: &ModelFile, layers: Range<u32>) -> SharedEngine {
    shared(Engine::load(file, layers, &one_thread(), &mut |_, _| {}).unwrap())
}

/// Tiny model: its file, an engine with both layers, and everything else.
pub(crate) fn tiny() -> (ModelFile, SharedEngine, TextModel) {
    let file = tiny_file(2);
    let engine = Engine::load(&file, 0..2, &one_thread(), &mut |_, _| {}).unwrap();
    let text = text(&file, Head::beside(&file, &engine).unwrap());
    (file, shared(engine), text)
}

/// Caller's side of a model.
pub(crate) fn text(file: &ModelFile, head: Head) -> TextModel {
    TextModel {
        pooling: file.pooling(),
        tokenizer: Tokenizer::from_gguf(file.gguf()).unwrap(),
        template: Some(ChatTemplate::from_gguf(file.gguf()).unwrap()),
        head: head.into(),
        context: file.spec().context,
        sampling: SamplingChoice::GREEDY,
    }
}

/// Request with the default sampling and nothing else.
pub(crate) fn request(prompt: Prompt, max_tokens: u32) -> ChatRequest {
    ChatRequest {
        prompt,
        sampling: SamplerConfig::default(),
        max_tokens: Some(max_tokens),
        stop: Vec::new(),
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    }
}

/// Tiny model as a service has it; `open` makes the backends.
pub(crate) fn served<F>(open: F) -> ServedModel
where
    F: Fn(&SharedEngine, Exact) -> Result<Box<dyn Backend>, ChatError> + Send + Sync + 'static,
{
    let (file, engine, text) = tiny();
    ServedModel {
        id: "tiny".into(),
        weights: file.manifest(&mut |_, _| {}).weights_id(),
        hosted: 0..file.spec().layers,
        file: Arc::new(file),
        text,
        open: Box::new(move |exact, _| open(&engine, exact)),
        exact: Exact::default(),
    }
}
