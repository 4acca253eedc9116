//! Models on this machine.
//!
//! | concept | file |
//! |---|---|
//! | catalogue, and the folder of files | `catalogue.rs` |
//! | choice of the model, and search for its file | `find.rs` |
//! | fetching | `pull.rs` |
//! | Hugging Face directories as model files | `import.rs` |
//! | files in the cache and their states | `cache.rs` |
//! | where a model could run | `capacity.rs` |

pub(crate) mod cache;
pub(crate) mod capacity;
pub(crate) mod catalogue;
pub(crate) mod find;
pub(crate) mod import;
pub(crate) mod pull;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_bus::regular_file;
use hearthnet_model::catalogue::{Band, Resolved};
use hearthnet_model::engine::{EngineOptions, Head, LoadError};
use hearthnet_model::manifest::ChangedError;
use hearthnet_model::sampler::SamplingChoice;
use hearthnet_model::template::{TemplateError, TemplateTime};
use hearthnet_model::text::TextError;
use hearthnet_model::{BoundaryDtype, ModelFile, ModelRef, WeightsId};
use hearthnet_orchestrator::chat::TextModel;
use hearthnet_orchestrator::private_layers::PrivateLayers;

use self::catalogue::{catalogue, pin};
use self::find::{pick, resolve, resolve_or_pull};
use crate::community::{Home, now_ms};
use crate::config::Config;
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::output::{Progress, note};
use crate::runtime::no_thread;

/// Open model file with its identity.
#[derive(Clone)]
pub(crate) struct OpenModel {
    pub(crate) id: String,
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<ModelFile>,
    pub(crate) weights: WeightsId,
    pub(crate) bands: Option<Vec<Band>>,
    /// Layers that this machine computes itself for its chats over hosts. Empty until
    /// [`crate::private_layers::load`].
    pub(crate) private: PrivateLayers,
    /// Default sampling.
    pub(crate) sampling: SamplingChoice,
}

/// Opens the model that `named` or [`pick`] chooses. Does not fetch.
pub(crate) fn open_model(
    cx: &Context,
    named: Option<&ModelRef>,
    home: Option<&Home>,
) -> Result<OpenModel, Failure> {
    let name = pick(cx, named, home)?;
    open_resolved(cx, resolve(&cx.global, &name)?)
}

/// Opens a model without a community; fetches it if it is missing and can be fetched.
pub(crate) fn open_or_pull_model(
    cx: &Context,
    named: Option<&ModelRef>,
) -> Result<OpenModel, Failure> {
    let name = pick(cx, named, None)?;
    open_resolved(cx, resolve_or_pull(&cx.global, &name)?)
}

pub(crate) fn open_resolved(cx: &Context, resolved: Resolved) -> Result<OpenModel, Failure> {
    let Resolved { id, path, .. } = resolved;
    let catalogue = catalogue(&cx.global)?;
    let pin = pin(&catalogue, &path)?;
    let mut file = open_file(&path)?;
    let fp32 = cx.config.research.distributed_inference.activation_dtype == "fp32";
    if fp32 && file.spec().boundary != BoundaryDtype::F32 {
        note(format!(
            "activations are fp32 for debugging: answers differ from those with {}, and only hosts with the same setting can compute them",
            file.spec().boundary
        ));
        file = file.with_boundary(BoundaryDtype::F32);
    }
    let manifest = Progress::during("hashing the model", |set| file.check(pin, set));
    let weights = manifest.map_err(|e| changed(&e))?.weights_id();
    // Magnitudes do not depend on the rounding of activations, so the bands still apply.
    let bands = match pin {
        Some(pin) => pin.boundary_magnitude.clone(),
        None => catalogue::bands(&catalogue, weights),
    };
    let sampling = catalogue::sampling(&catalogue, weights, file.gguf());
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

pub(crate) fn open_file(path: &Path) -> Result<ModelFile, Failure> {
    ModelFile::open(path).map_err(|e| match e.is_out_of_memory() {
        true => out_of_memory(&format!("{}: {e}", path.display())),
        false => model_failure(path, e),
    })
}

/// Error for weights that cannot be loaded.
pub(crate) fn load_failure(path: &Path, error: &LoadError) -> Failure {
    match error {
        LoadError::OutOfMemory(_) => out_of_memory(&format!("{}: {error}", path.display())),
        LoadError::Threads(error) => no_thread(error),
        _ => model_failure(path, error),
    }
}

/// Error if this machine has too little free memory for a model.
pub(crate) fn out_of_memory(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Kind::Host, error.to_string())
        .code("out_of_memory")
        .hint(
            "end other programs, take a smaller model (`hearthnet model list` shows which fit), serve \
             fewer layers, or raise the limit: `ulimit -v` shows that of this process, MemoryMax= is \
             that of a systemd unit",
        )
}

pub(crate) fn model_failure(path: &Path, error: impl std::fmt::Display) -> Failure {
    let closed = regular_file::open(path)
        .is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
    let hint = match closed {
        // A daemon's sandbox denies other folders (`isolation.rs`).
        true => {
            "a daemon reads models in the folder of `hearthnet model list` and the one that it was started \
             with: copy the file there, or start the daemon with --model FILE"
        }
        false => {
            "`hearthnet model inspect FILE` shows what a file holds; a fresh `hearthnet model pull` \
             replaces a broken one"
        }
    };
    Failure::new(Kind::Model, format!("{}: {error}", path.display())).hint(hint)
}

/// Caller's part of a model: tokenizer, template, embedding and output matrix.
pub(crate) fn text_model(model: &OpenModel, head: Head) -> Result<TextModel, Failure> {
    let text = model.file.text();
    let mut text = text.map_err(|error| match error {
        TextError::Template(TemplateError::Thread(error)) => no_thread(&error),
        error => model_failure(&model.path, error),
    })?;
    let clock = || TemplateTime::from_unix(now_ms() / 1000);
    text.template = text.template.map(|template| template.with_clock(clock));
    if let Some(warning) = text.warning() {
        note(format!("warning: {warning}"));
    }
    Ok(TextModel {
        tokenizer: text.tokenizer,
        template: text.template,
        head: head.into(),
        context: model.file.spec().context,
        sampling: model.sampling,
    })
}

/// Loads embedding and output matrix, for a caller whose layers mostly run on hosts.
pub(crate) fn load_head(model: &OpenModel, options: &EngineOptions) -> Result<Head, Failure> {
    let head = model.private.head(&model.file, options);
    head.map_err(|e| load_failure(&model.path, &e))
}

/// Engine options from the configuration; `threads` overrides the thread count.
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

/// Error for a file that changed since it was pinned or first used.
pub(crate) fn changed(error: &ChangedError) -> Failure {
    let path = error.path.display();
    let hint = match error.pinned {
        true => "`hearthnet model pull` of its id fetches it again".to_owned(),
        false => format!(
            "restore it from a copy or fetch it again (`hearthnet model pull --force`); \
             `hearthnet model verify {path} --accept` accepts it as it is now"
        ),
    };
    Failure::new(Kind::Model, error.to_string())
        .code("model_changed")
        .hint(hint)
}
