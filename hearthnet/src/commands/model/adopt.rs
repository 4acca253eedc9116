//! `hearthnet model adopt` and `hearthnet model drop`: which models the community runs together.

use std::path::Path;

use hearthnet_bus::invite::MAX_NAME_BYTES;
use hearthnet_bus::log::{Adoption, Community};
use hearthnet_files::hugging_face::repository_of;
use hearthnet_files::part::{Part, PartError, folder, identity_of};
use hearthnet_files::spec::CacheDtype;
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::{ModelEntry, Source};
use hearthnet_hub::reference::directory_on_hub;
use serde_json::json;

use super::fit::Fit;
use crate::cli::{Failure, Progress, bytes, failure, first_digits, note, print_result};
use crate::commands::community::change::change;
use crate::config::Context;
use crate::home::Home;
use crate::home::rights::{is_anchor, signs_as_root};
use crate::models::adopted::{adoption, find, name_in_parts, parts_dir};
use crate::models::catalogue::{catalogue, pin};
use crate::models::find::resolve_or_pull;
use crate::models::open_file::{changed, model_failure, open_file, with_cache};
use crate::models::{Capacity, refuse_encoder};
use crate::node::{Change, log_writer};

pub(super) fn run(
    model: &ModelRef,
    cache: Option<CacheDtype>,
    home: &Home,
    cx: &Context,
    as_json: bool,
) -> Result<(), Failure> {
    let adopted = adopt(model, cache, home, cx, as_json)?;
    let fit = fit(&adopted, home, cx);
    let found = json!({
        "name": adopted.name,
        "weights": hex::encode(adopted.weights),
        "layers": adopted.layers,
        "bytes": adopted.file_bytes,
        "sources": adopted.sources,
        "needed_bytes": fit.as_ref().map(|fit| fit.needed),
        "given_bytes": fit.as_ref().map(|fit| fit.given),
    });
    print_result(as_json, &found, || {
        let (name, size) = (&adopted.name, bytes(adopted.file_bytes));
        format!(
            "{:?} runs {name} now ({} layers, {size})\n",
            home.state().name,
            adopted.layers
        )
    })
}

/// Finds or fetches the whole file of a model, keeps it for neighbours to fetch parts from, and lets
/// the community adopt the model, with this format of keys and values or that of the settings.
pub(crate) fn adopt(
    model: &ModelRef,
    cache: Option<CacheDtype>,
    home: &Home,
    cx: &Context,
    quiet: bool,
) -> Result<Adoption, Failure> {
    may_adopt(home)?;
    let resolved = resolve_or_pull(&cx.global, model)?;
    let catalogue = catalogue(&cx.global)?;
    let entry = pin(&catalogue, &resolved.path)?;
    let file = open_file(&resolved.path)?;
    refuse_encoder(&resolved.id, &file)?;
    let cache = cache.unwrap_or(cx.config.research.distributed_inference.cache_dtype);
    let file = with_cache(&resolved.id, file, cache)?;
    let manifest = Progress::during("hashing the model", |set| {
        file.check(entry.map(ModelEntry::expected), set)
    });
    let manifest = manifest.map_err(|e| changed(&e))?;
    let unusable = |error: PartError| model_failure(&resolved.path, error);
    let hashed = Progress::during("hashing its pieces", |set| {
        identity_of(&file, &manifest, set)
    });
    let (identity, pieces) = hashed.map_err(unusable)?;
    let (name, sources) = (name(&resolved.id), sources(model, entry));
    let adoption = adoption(name, file.spec().layers, &identity, sources);
    check_name(&adoption, &home.state())?;
    let parts = parts_dir()?;
    match Part::of_file(&parts, &identity, &file, &manifest.encode(), &pieces) {
        Ok(part) => folder::enter(part.folder(), &name_in_parts(home))
            .map_err(|e| Failure::file("write", part.folder(), e))?,
        // A running node has it open.
        Err(PartError::InUse(_)) => {}
        Err(error) => return Err(unusable(error)),
    }
    change(home, &cx.config, quiet, || {
        let by_root = may_adopt(home)?;
        check_name(&adoption, &home.state())?;
        match home.state().model(&adoption.weights) == Some(&adoption) {
            true => Ok(()),
            false => log_writer::write(home, by_root, Change::Adopt(adoption.clone())),
        }
    })?;
    if let Some(fit) = fit(&adoption, home, cx).filter(|fit| !fit.fits()) {
        note(format!("warning: {fit}"));
    }
    Ok(adoption)
}

/// Memory that all adopted models need, `new` among them, and that the homes give.
fn fit(new: &Adoption, home: &Home, cx: &Context) -> Option<Fit> {
    let given = Capacity::of(cx, Some(home)).community?.bytes;
    let state = home.state();
    let others = state.models().into_iter();
    let others = others.filter(|model| model.weights != new.weights);
    let all = others.chain([new]);
    Fit::of(all.map(|it| (it.name.as_str(), it.file_bytes)), given)
}

/// Whether the root key must sign an adoption.
fn may_adopt(home: &Home) -> Result<bool, Failure> {
    signs_as_root(
        home,
        is_anchor(home),
        "only anchors may choose the community's models",
    )
}

/// Refuses a name that another adopted model has: chats name models.
fn check_name(new: &Adoption, state: &Community) -> Result<(), Failure> {
    let models = state.models().into_iter();
    let mut others = models.filter(|model| model.weights != new.weights);
    match others.find(|model| model.name == new.name) {
        None => Ok(()),
        Some(other) => {
            let digits = first_digits(&other.weights);
            Err(failure!(
                BadRequest,
                "{:?} has adopted another model with the name {} (weights {digits})",
                state.name,
                new.name
            )
            .code("name_taken")
            .hint(format!(
                "adopt a file with another name, or drop the other model first: `hearthnet model drop {digits}`"
            )))
        }
    }
}

/// A line that fits the log.
fn name(id: &str) -> String {
    let mut name = hearthnet_text::sanitize_name(id).into_owned();
    while name.len() > MAX_NAME_BYTES {
        name.pop();
    }
    name
}

/// Public addresses from which other nodes can fetch ranges of the file.
fn sources(model: &ModelRef, entry: Option<&ModelEntry>) -> Vec<String> {
    let known = entry.map_or(&[][..], |entry| &entry.sources[..]);
    let of_entry = known.iter().filter_map(|source| match source {
        Source::Hf { .. } | Source::Url { .. } if source.is_public() => {
            Some(ModelRef::Remote(source.clone()).to_string())
        }
        _ => None,
    });
    let named = match model {
        ModelRef::Remote(source) if source.is_public() => Some(model.to_string()),
        ModelRef::Remote(_) => {
            note(format!(
                "other nodes are not told of {model}, which is not a public https address; they fetch the model from this node"
            ));
            None
        }
        ModelRef::Path(path) if path.is_dir() => {
            let found = directory_source(path);
            if found.is_none() {
                note(format!(
                    "other nodes are told no address of {model}: it is not in the cache of the Hugging Face programs, which has the name of the repository; they fetch the model from this node, or with --from from a copy of the directory"
                ));
            }
            found
        }
        _ => None,
    };
    let mut all: Vec<String> = named.into_iter().chain(of_entry).collect();
    all.dedup();
    all.truncate(hearthnet_bus::log::MAX_SOURCES);
    all
}

/// Repository on the hub of a directory that the hub's own programs have fetched.
fn directory_source(path: &Path) -> Option<String> {
    let (repository, revision) = repository_of(&path.canonicalize().ok()?)?;
    directory_on_hub(&repository, &revision)
}

pub(super) fn drop_model(
    text: &str,
    home: &Home,
    cx: &Context,
    as_json: bool,
) -> Result<(), Failure> {
    let dropped = change(home, &cx.config, as_json, || {
        let model = find(text, &home.state())?;
        let by_root = may_adopt(home)?;
        let weights = model.weights;
        log_writer::write(home, by_root, Change::DropModel { weights })?;
        Ok(model)
    })?;
    if !as_json {
        note(
            "homes that run remove their parts of it, also those of `model pull --layers`; a whole file with a name of its own stays",
        );
    }
    let found = json!({ "name": dropped.name, "weights": hex::encode(dropped.weights) });
    print_result(as_json, &found, || {
        format!("{:?} no longer runs {}\n", home.state().name, dropped.name)
    })
}
