//! Opens the model of a command: its file, identity, and default sampling.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_engine::{EngineOptions, Head};
use hearthnet_files::magnitude::Band;
use hearthnet_files::part::Part;
use hearthnet_files::sampling::SamplingChoice;
use hearthnet_files::{BoundaryDtype, ModelFile, WeightsId};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::{Catalogue, ModelEntry, Resolved};
use hearthnet_orchestrator::chat::TextModel;
use hearthnet_orchestrator::private_layers::PrivateLayers;
use hearthnet_tokens::template::{TemplateError, TemplateTime};
use hearthnet_tokens::text::{ModelText, TextError};

use super::catalogue::{self, catalogue, pin};
use super::find::{pick, resolve, resolve_or_pull};
use super::open_file::{changed, load_failure, model_failure, open_file, with_cache};
use crate::cli::{Failure, Progress, failure, no_thread, note};
use crate::config::Context;
use crate::home::{Home, now_ms};

/// Open model file with its identity.
#[derive(Clone)]
pub(crate) struct OpenModel {
    pub(crate) id: String,
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<ModelFile>,
    pub(crate) weights: WeightsId,
    pub(crate) bands: Option<Vec<Band>>,
    /// Layers that this machine computes itself for its chats over hosts. Empty until
    /// [`crate::answering::private_layers::load`].
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

/// As [`open_model`] without a community, also a model that makes vectors and cannot continue texts.
pub(crate) fn open_any_model(cx: &Context, named: Option<&ModelRef>) -> Result<OpenModel, Failure> {
    let name = pick(cx, named, None)?;
    open_as(cx, resolve(&cx.global, &name)?, Use::Vectors)
}

/// Opens a model without a community; fetches it if it is missing and can be fetched.
pub(crate) fn open_or_pull_model(
    cx: &Context,
    named: Option<&ModelRef>,
) -> Result<OpenModel, Failure> {
    let name = pick(cx, named, None)?;
    open_resolved(cx, resolve_or_pull(&cx.global, &name)?)
}

/// As [`open_or_pull_model`], also a model that makes vectors and cannot continue texts.
pub(crate) fn open_for_vectors(
    cx: &Context,
    named: Option<&ModelRef>,
) -> Result<OpenModel, Failure> {
    let name = pick(cx, named, None)?;
    open_as(cx, resolve_or_pull(&cx.global, &name)?, Use::Vectors)
}

pub(crate) fn open_resolved(cx: &Context, resolved: Resolved) -> Result<OpenModel, Failure> {
    open_as(cx, resolved, Use::Texts)
}

/// The use that a model is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Texts that the model continues, or layers for them.
    Texts,
    Vectors,
}

fn open_as(cx: &Context, resolved: Resolved, wanted: Use) -> Result<OpenModel, Failure> {
    let Resolved { id, path, .. } = resolved;
    let catalogue = catalogue(&cx.global)?;
    let pin = pin(&catalogue, &path)?;
    let file = open_file(&path)?;
    if wanted == Use::Texts {
        refuse_encoder(&id, &file)?;
    }
    let cache = cx.config.research.distributed_inference.cache_dtype;
    let file = with_cache(&id, file, cache)?;
    checked(cx, &catalogue, pin, id, file)
}

/// Refuses a model that makes vectors of whole texts.
pub(crate) fn refuse_encoder(id: &str, file: &ModelFile) -> Result<(), Failure> {
    match file.spec().encoder {
        None => Ok(()),
        Some(_) => Err(failure!(
            Model,
            "model {id:?} makes vectors of texts; it cannot continue a text, nor serve layers to others"
        )
        .hint("`hearthnet embed --model NAME TEXT` prints the vectors, and `hearthnet serve --local --model NAME` answers `/v1/embeddings`; choose another model for chats")),
    }
}

/// Opens an adopted model by the part of it on this machine. The file has new pieces as they come, and
/// the format of keys and values of the adoption.
pub(crate) fn open_part(cx: &Context, id: &str, part: &Arc<Part>) -> Result<OpenModel, Failure> {
    let file = part.model_file();
    let file = file.map_err(|e| model_failure(&part.path(), e))?;
    refuse_encoder(id, &file)?;
    checked(cx, &catalogue(&cx.global)?, None, id.to_owned(), file)
}

/// Checks an opened file, and finds what else is known of it.
fn checked(
    cx: &Context,
    catalogue: &Catalogue,
    pin: Option<&ModelEntry>,
    id: String,
    mut file: ModelFile,
) -> Result<OpenModel, Failure> {
    let fp32 = cx.config.research.distributed_inference.activation_dtype == "fp32";
    if fp32 && file.spec().boundary != BoundaryDtype::F32 {
        note(format!(
            "activations are fp32 for debugging: answers differ from those with {}, and only hosts with the same setting can compute them",
            file.spec().boundary
        ));
        file = file.with_boundary(BoundaryDtype::F32);
    }
    let manifest = Progress::during("hashing the model", |set| {
        file.check(pin.map(ModelEntry::expected), set)
    });
    let manifest = manifest.map_err(|e| changed(&e))?;
    let weights = manifest.weights_id();
    // Magnitudes do not depend on the rounding of activations, so the bands still apply.
    let known = file.stored_weights(&manifest);
    let entry = pin.or_else(|| catalogue.by_weights(known));
    let bands = entry.and_then(|entry| entry.boundary_magnitude.clone());
    let sampling = catalogue::sampling(catalogue, known, file.gguf());
    Ok(OpenModel {
        id,
        path: file.path().unwrap_or(Path::new("")).to_owned(),
        weights,
        private: PrivateLayers::none(file.spec().layers),
        file: Arc::new(file),
        bands,
        sampling,
    })
}

/// Caller's part of a model: tokenizer, template, embedding and output matrix.
pub(crate) fn text_model(model: &OpenModel, head: Head) -> Result<TextModel, Failure> {
    let text = ModelText::of(&model.file);
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
        pooling: model.file.pooling(),
        sampling: model.sampling,
    })
}

/// Loads embedding and output matrix, for a caller whose layers mostly run on hosts.
pub(crate) fn load_head(model: &OpenModel, options: &EngineOptions) -> Result<Head, Failure> {
    let head = model.private.head(&model.file, options);
    head.map_err(|e| load_failure(&model.path, &e))
}
