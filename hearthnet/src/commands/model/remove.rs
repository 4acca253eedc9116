//! `hearthnet model rm`.

use std::fs;
use std::path::PathBuf;

use hearthnet_files::gguf::files_of;
use hearthnet_files::manifest::{pieces_path, record_path};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Catalogue;

use crate::cli::{Failure, Kind, ask, bytes, failure, note};
use crate::home::remove_file;
use crate::models::catalogue::{models_dir, not_resolved};
use crate::models::local_files::{bytes_here, has_other_name, part_of};

pub(super) fn remove(catalogue: &Catalogue, model: &ModelRef, yes: bool) -> Result<(), Failure> {
    let models = models_dir()?;
    let path = match model {
        ModelRef::Id(id) => catalogue
            .get(id)
            .ok_or_else(|| not_resolved(&catalogue.unknown(id)))?
            .path_in(&models),
        ModelRef::Path(path) => path.clone(),
        fetched => models.join(fetched.place().unwrap_or_default()),
    };
    // A model may be split into several files.
    let files = files_of(&path);
    let mut all = files.clone();
    for part in files.iter().map(|path| part_of(path)) {
        all.push(PathBuf::from(format!("{}.etag", part.display())));
        all.push(part);
    }
    if !all.iter().any(|path| path.is_file()) {
        return Err(failure!(Model, "model {model} is not on this machine")
            .hint("`hearthnet model list` shows the models that are"));
    }
    // Removes only fetched files: a link may lead to another program's file.
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    let inside = models
        .canonicalize()
        .is_ok_and(|models| folder.is_some_and(|f| f.starts_with(&models) && f != models));
    if !inside {
        let (path, models) = (path.display(), models.display());
        return Err(failure!(
            BadRequest,
            "{path} was not fetched by this program: it is not below {models}"
        )
        .hint("remove the file yourself, and NAME.gguf.hearthnet beside it"));
    }
    let size = bytes(bytes_here(&path));
    let freed = match has_other_name(&path) {
        // The part of a model that was adopted by this file.
        true => "no space is freed: the file has another name, such as that of the part of an adopted model, \
                 which `hearthnet model rm` removes by the name of that model"
            .to_owned(),
        false => format!("{size} are freed"),
    };
    if !yes && !ask(&format!("Remove {}? {freed}.", path.display()), None)? {
        return Err(Failure::new(Kind::Interrupted, "nothing was removed"));
    }
    all.extend([
        record_path(&path),
        pieces_path(&path),
        path.with_file_name(".lock"),
    ]);
    for file in &all {
        remove_file(file)?;
    }
    // Removes folders that are empty now; the first non-empty one ends the loop.
    let mut folder = path.parent();
    while let Some(empty) = folder.filter(|f| *f != models && fs::remove_dir(f).is_ok()) {
        folder = empty.parent();
    }
    note(format!("removed {} ({freed})", path.display()));
    Ok(())
}
