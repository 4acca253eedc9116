//! One file per command.

pub(crate) mod backup;
pub(crate) mod bench;
pub(crate) mod bench_mesh;
pub(crate) mod chat;
pub(crate) mod community;
pub(crate) mod config;
pub(crate) mod demo;
pub(crate) mod diagnose;
pub(crate) mod id;
pub(crate) mod init;
pub(crate) mod invites;
pub(crate) mod join;
pub(crate) mod leave;
pub(crate) mod log;
pub(crate) mod manual;
pub(crate) mod model;
pub(crate) mod restore;
pub(crate) mod serve;
pub(crate) mod serve_standalone;
pub(crate) mod shard;
pub(crate) mod status;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_bus::NodeKey;
use hearthnet_model::catalogue::{Band, Resolved};
use hearthnet_model::engine::{EngineOptions, Head};
use hearthnet_model::gguf::Gguf;
use hearthnet_model::sampler::{SamplerConfig, SamplingChoice};
use hearthnet_model::template::TemplateError;
use hearthnet_model::{BoundaryDtype, ChatTemplate, ModelFile, ModelRef, Tokenizer, WeightsId};
use hearthnet_orchestrator::chat::TextModel;
use hearthnet_orchestrator::private_layers::PrivateLayers;
use tokio::runtime::Runtime;

use crate::args::{Global, SamplingArgs};
use crate::community::Home;
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::output::{Progress, note};

/// One JSON value and a line end on standard output.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(value).map_err(Failure::internal)?;
    line.push(b'\n');
    print_bytes(&line)
}

/// Bytes on standard output, at once.
pub(crate) fn print_bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()?;
    Ok(())
}

/// The runtime for network I/O. Chats and engines run on threads of their own.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Failure::internal)
}

/// This node's key, made on first use.
pub(crate) fn node_key(global: &Global) -> Result<NodeKey, Failure> {
    let path = crate::paths::data_dir(global.data_dir.clone())?.join("node.key");
    NodeKey::load_or_create(&path).map_err(|e| {
        Failure::new(Kind::Host, e.to_string())
            .hint("--data-dir names another directory for this node's key")
    })
}

/// A model file on this machine, opened, with its identity.
#[derive(Clone)]
pub(crate) struct OpenModel {
    pub(crate) id: String,
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<ModelFile>,
    pub(crate) weights: WeightsId,
    pub(crate) bands: Option<Vec<Band>>,
    /// Layers that this machine computes itself for its chats over hosts: none until
    /// [`crate::private_layers::load`].
    pub(crate) private: PrivateLayers,
    /// How its tokens are chosen where nobody says.
    pub(crate) sampling: SamplingChoice,
}

/// Opens what `--model` names, or what is meant without it ([`model::pick`]). Nothing is fetched.
pub(crate) fn open_model(
    global: &Global,
    config: &Config,
    named: Option<&ModelRef>,
    home: Option<&Home>,
) -> Result<OpenModel, Failure> {
    let name = model::pick(global, config, named, home)?;
    open_resolved(global, config, model::resolve(global, &name)?)
}

/// The same outside of a community, fetching the model first when that is possible and this
/// machine has it not.
pub(crate) fn open_or_pull_model(
    global: &Global,
    config: &Config,
    named: Option<&ModelRef>,
) -> Result<OpenModel, Failure> {
    let name = model::pick(global, config, named, None)?;
    open_resolved(global, config, model::resolve_or_pull(global, &name)?)
}

/// Opens a model that was found.
pub(crate) fn open_resolved(
    global: &Global,
    config: &Config,
    resolved: Resolved,
) -> Result<OpenModel, Failure> {
    let Resolved { id, path, .. } = resolved;
    let catalogue = model::catalogue(global)?;
    let pin = model::pin(&catalogue, &path)?;
    let mut file = open_file(&path)?;
    let fp32 = config.research.distributed_inference.activation_dtype == "fp32";
    if fp32 && file.spec().boundary != BoundaryDtype::F32 {
        note(format!(
            "activations are fp32 for debugging: answers differ from those with {}, and only hosts \
             that are set so, too, can compute them",
            file.spec().boundary
        ));
        file = file.with_boundary(BoundaryDtype::F32);
    }
    let mut progress = Progress::new("hashing the model");
    let weights = file
        .check(pin, &mut |done, total| progress.set(done, total))
        .map_err(|e| model::changed(&e))?
        .weights_id();
    drop(progress);
    // How large rows are, rounding does not change.
    let bands = match pin {
        Some(pin) => pin.boundary_magnitude.clone(),
        None => model::bands(&catalogue, weights),
    };
    let sampling = model::sampling(&catalogue, weights, file.gguf());
    Ok(OpenModel {
        id,
        path,
        weights,
        private: PrivateLayers::none(file.spec().layers),
        file: Arc::new(file),
        bands,
        sampling,
    })
}

/// Opens a model file.
pub(crate) fn open_file(path: &Path) -> Result<ModelFile, Failure> {
    ModelFile::open(path).map_err(|e| model_failure(path, e))
}

pub(crate) fn model_failure(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::new(Kind::Model, format!("{}: {error}", path.display()))
        .hint("`hearthnet model inspect FILE` shows what a file holds; a fresh `hearthnet model pull` replaces a broken one")
}

/// The caller's side of a model: tokenizer, template, embedding and output matrix.
pub(crate) fn text_model(model: &OpenModel, head: Head) -> Result<TextModel, Failure> {
    let fail = |e: &dyn std::fmt::Display| model_failure(&model.path, e);
    let gguf: &Gguf = model.file.gguf();
    let tokenizer = Tokenizer::from_gguf(gguf).map_err(|e| fail(&e))?;
    let template = match ChatTemplate::from_gguf(gguf) {
        Ok(template) => Some(template),
        // Text can be continued without one; a chat then says what is missing.
        Err(TemplateError::Missing) => None,
        Err(error) => return Err(fail(&error)),
    };
    Ok(TextModel {
        tokenizer,
        template,
        head: head.into(),
        context: model.file.spec().context,
        sampling: model.sampling,
    })
}

/// Embedding and output matrix, for a caller whose blocks run elsewhere, all or most of them.
pub(crate) fn load_head(model: &OpenModel, options: &EngineOptions) -> Result<Head, Failure> {
    let head = model.private.head(&model.file, options);
    head.map_err(|e| model_failure(&model.path, e))
}

/// Engine options by configuration, with the thread count a flag may override.
pub(crate) fn engine_options(config: &Config, threads: Option<usize>) -> EngineOptions {
    let host = &config.research.distributed_inference.host;
    EngineOptions {
        threads: threads
            .filter(|&n| n > 0)
            .unwrap_or_else(|| config.threads()),
        max_kv_bytes: host.kv_budget_mb << 20,
        ..EngineOptions::default()
    }
}

/// The sampler's settings: what the flags say, else what the model's makers do. A seed is drawn
/// when none was given.
pub(crate) fn sampling(
    args: &SamplingArgs,
    own: &SamplingChoice,
) -> Result<SamplerConfig, Failure> {
    let seed = match args.seed {
        Some(seed) => seed,
        None => draw_seed()?,
    };
    Ok(args.choice().or_models(own).over(SamplerConfig {
        seed: Some(seed),
        logprobs: args.logprobs,
        ..SamplerConfig::default()
    }))
}

/// A seed that survives every JSON reader: 53 bits.
pub(crate) fn draw_seed() -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(Failure::internal)?;
    Ok(u64::from_le_bytes(bytes) >> 11)
}
