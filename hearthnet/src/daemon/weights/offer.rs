//! The whole model file of a daemon, offered to neighbours in pieces while the community has adopted
//! its model.

use std::path::Path;
use std::sync::Arc;

use hearthnet_files::ModelFile;
use hearthnet_files::part::{Identity, Part, PartError, folder, identity_of};
use hearthnet_transport::background;
use tokio::time::Instant;

use super::Parts;
use super::retry::{Retry, until};
use crate::cli::{Failure, Stop, note};
use crate::home::Home;
use crate::models::OpenModel;
use crate::models::adopted::{identity, name_in_parts, parts_dir};
use crate::models::open_file::model_failure;

/// Code of an error that may pass: another process has the part open.
const IN_USE: &str = "in_use";

/// Offers the file of `model` until a stop.
pub(in crate::daemon) async fn offer_file(
    home: Home,
    parts: Arc<Parts>,
    model: OpenModel,
    stop: Stop,
) {
    let weights = model.weights.0;
    let mut changes = home.log.changes();
    let (mut wanted, mut offered, mut retry) = (None, None, Retry::default());
    loop {
        let adopted = home.state().model(&weights).map(identity);
        if adopted != wanted {
            wanted = adopted;
            retry.hurry();
        }
        if adopted != offered && retry.is_due(Instant::now()) {
            offered = adopted;
            let open = parts.remove(&weights);
            match adopted {
                // Not if the daemon computes with that part itself.
                None => {
                    let other = open.filter(|part| !is_of(part, &model.file));
                    let name = name_in_parts(&home);
                    let left = tokio::task::spawn_blocking(move || {
                        other.map_or(Ok(false), |part| part.leave(&name))
                    });
                    let left = left.await.map_err(Failure::internal);
                    if let Err(why) = left.and_then(|left| left.map_err(Failure::internal)) {
                        tracing::info!("the part of a dropped model stays: {why}");
                    }
                }
                Some(identity) => {
                    drop(open);
                    let (file, name) = (Arc::clone(&model.file), name_in_parts(&home));
                    // Hashes the whole file.
                    let opened =
                        background().spawn_blocking(move || part_of(&file, &identity, &name));
                    match opened.await.map_err(Failure::internal).flatten() {
                        Ok(part) => parts.add(&Arc::new(part)),
                        Err(why) => {
                            let what =
                                format!("neighbours cannot fetch {} from this node", model.id);
                            if why.has_code(IN_USE) {
                                // It is tried again.
                                offered = None;
                                if let Some(pause) = retry.failed(Instant::now(), why.to_string()) {
                                    let seconds = pause.as_secs();
                                    note(format!("{what}: {why}; trying again in {seconds} s"));
                                }
                            } else {
                                note(format!("{what}: {why}"));
                            }
                        }
                    }
                }
            }
        }
        let again = retry.at().filter(|_| adopted != offered);
        tokio::select! {
            () = stop.asked() => return,
            () = until(again) => {}
            changed = changes.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// Returns true if the part's file and the model file are the same file.
fn is_of(part: &Part, file: &ModelFile) -> bool {
    let canonical = |path: &Path| path.canonicalize().ok();
    let own = file.path().and_then(canonical);
    own.is_some() && own == canonical(&part.path())
}

/// Part of a whole file, without a copy of it.
fn part_of(file: &ModelFile, adopted: &Identity, home: &str) -> Result<Part, Failure> {
    let parts = parts_dir()?;
    let path = file.path().unwrap_or(Path::new(""));
    let unusable = |error: PartError| match error {
        PartError::InUse(_) => model_failure(path, error).code(IN_USE),
        error => model_failure(path, error),
    };
    let part = match here(&parts, file, adopted).map_err(unusable)? {
        Some(part) => part,
        None => {
            let manifest = file.manifest(&mut |_, _| {});
            let (found, pieces) = identity_of(file, &manifest, &mut |_, _| {}).map_err(unusable)?;
            if found != *adopted {
                return Err(unusable(PartError::Mismatch(
                    "the tokenizer, the template or the layout of the file".to_owned(),
                )));
            }
            Part::of_linked_file(&parts, adopted, file, &manifest.encode(), &pieces)
                .map_err(unusable)?
        }
    };
    folder::enter(part.folder(), home).map_err(|e| Failure::file("write", part.folder(), e))?;
    Ok(part)
}

/// The part that is here, if it is whole or the file itself.
fn here(parts: &Path, file: &ModelFile, adopted: &Identity) -> Result<Option<Part>, PartError> {
    let part = match Part::open(&Part::folder_in(parts, &adopted.weights)) {
        Ok(part) => part,
        // Before the whole file is hashed.
        Err(error @ PartError::InUse(_)) => return Err(error),
        Err(_) => return Ok(None),
    };
    let all = [part.table().all()];
    let is_usable = part.missing(&all).is_empty() || is_of(&part, file);
    Ok((part.identity() == adopted && is_usable).then_some(part))
}

#[cfg(test)]
mod tests {
    use hearthnet_testkit::TinyLlama;

    use super::*;

    #[test]
    fn a_whole_file_becomes_a_part_without_a_copy_and_another_file_is_no_source() {
        let dir = tempfile::tempdir().unwrap();
        let file = ModelFile::open(&TinyLlama::default().write(dir.path())).unwrap();
        let manifest = file.manifest(&mut |_, _| {});
        let (identity, pieces) = identity_of(&file, &manifest, &mut |_, _| {}).unwrap();
        let parts = dir.path().join("parts");
        assert!(here(&parts, &file, &identity).unwrap().is_none());
        let encoded = manifest.encode();
        let part = Part::of_linked_file(&parts, &identity, &file, &encoded, &pieces).unwrap();
        assert!(part.is_shared());
        let in_use = here(&parts, &file, &identity);
        assert!(matches!(in_use, Err(PartError::InUse(_))));
        drop(part);
        let part = here(&parts, &file, &identity).unwrap().unwrap();
        assert!(part.missing(&[part.table().all()]).is_empty() && !is_of(&part, &file));
        drop(part);
        let other = Identity {
            head_bytes: identity.head_bytes + 32,
            ..identity
        };
        assert!(here(&parts, &file, &other).unwrap().is_none());
    }
}
