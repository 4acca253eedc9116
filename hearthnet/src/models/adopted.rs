//! Models that the community has adopted, and the parts of them on this machine.

use std::path::PathBuf;

use hearthnet_bus::log::{Adoption, Community};
use hearthnet_files::part::{Identity, PART_FILE, Part};
use hearthnet_files::{Digest, WeightsId};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;

use super::capacity::community;
use super::catalogue::models_dir;
use crate::cli::Failure;
use crate::cli::args::Global;

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

/// The part of the adopted model of that name, if it is on this machine.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Option<Resolved> {
    let ModelRef::Id(id) = name else {
        return None;
    };
    let state = community(global)?.state();
    let model = state.models().into_iter().find(|model| model.name == *id)?;
    let path = part_folder(model)?.join(PART_FILE);
    Some(Resolved {
        path,
        id: id.clone(),
    })
}
