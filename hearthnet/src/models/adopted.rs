//! Models that the community has adopted, and the parts of them on this machine.

use std::path::PathBuf;

use hearthnet_bus::log::{Adoption, Community};
use hearthnet_files::part::{Identity, PART_FILE, Part};
use hearthnet_files::{Digest, WeightsId};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;

use super::capacity::community;
use super::catalogue::models_dir;
use crate::cli::args::Global;
use crate::cli::{Failure, failure};

/// Folder of all parts.
pub(crate) fn parts_dir() -> Result<PathBuf, Failure> {
    Ok(models_dir()?.join("parts"))
}

/// Identity of an adopted model's file.
pub(crate) fn identity(model: &Adoption) -> Identity {
    Identity {
        weights: WeightsId(model.weights),
        file_bytes: model.file_bytes,
        head_bytes: model.head_bytes,
        head: Digest(model.head),
        manifest_bytes: model.manifest_bytes,
        pieces: Digest(model.pieces),
    }
}

/// Folder of the part of an adopted model, if there is one.
pub(crate) fn part_folder(model: &Adoption) -> Option<PathBuf> {
    let folder = Part::folder_in(&parts_dir().ok()?, &WeightsId(model.weights));
    folder.is_dir().then_some(folder)
}

/// Adopted models of which a part is on this machine.
pub(crate) fn here(state: &Community) -> impl Iterator<Item = &Adoption> {
    let all = state.models().into_iter();
    all.filter(|model| part_folder(model).is_some())
}

/// The adopted model of that name, if a part of it is on this machine.
pub(crate) fn named(global: &Global, name: &ModelRef) -> Option<Adoption> {
    let ModelRef::Id(id) = name else {
        return None;
    };
    let state = community(global)?.state();
    let model = here(&state).find(|model| model.name == *id)?;
    Some(model.clone())
}

/// The part of the adopted model of that name, if it is on this machine.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Option<Resolved> {
    let model = named(global, name)?;
    let path = part_folder(&model)?.join(PART_FILE);
    Some(Resolved {
        path,
        id: model.name,
    })
}

/// Adopted model by name, or by the first digits of its weights id.
pub(crate) fn find(text: &str, state: &Community) -> Result<Adoption, Failure> {
    let models = state.models();
    let is_named = |model: &&Adoption| model.name == text;
    let begins =
        |model: &&Adoption| text.len() >= 6 && hex::encode(model.weights).starts_with(text);
    let mut found: Vec<&Adoption> = models.iter().copied().filter(is_named).collect();
    if found.is_empty() {
        found = models.iter().copied().filter(begins).collect();
    }
    match found.as_slice() {
        [model] => Ok((*model).clone()),
        [] => Err(failure!(BadRequest, "{:?} has adopted no model {text:?}", state.name)
            .code("model_unknown")
            .hint("`hearthnet model list` shows the adopted models")),
        _ => Err(failure!(BadRequest, "{text:?} names several adopted models")
            .code("model_unknown")
            .hint("name it by the first digits of its weights id, as `hearthnet model list` shows them")),
    }
}

/// Ranges of the layers of which a part holds every piece.
pub(crate) fn held_layers(part: &Part, layers: u32) -> Vec<(u32, u32)> {
    let is_held = |layer: &u32| {
        part.missing(&part.table().of_layers(*layer, *layer))
            .is_empty()
    };
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for layer in (0..layers).filter(is_held) {
        match runs.last_mut() {
            Some((_, hi)) if hi.saturating_add(1) == layer => *hi = layer,
            _ => runs.push((layer, layer)),
        }
    }
    runs
}
