//! Models that the community has adopted, and the parts of them on this machine.

use std::ops::Range;
use std::path::{Path, PathBuf};

use hearthnet_bus::log::{Adoption, Community};
use hearthnet_bus::{CommunityId, NodeId};
use hearthnet_files::part::{
    Identity, PART_FILE, Part, PartError, PieceTable, folder, stored_identity,
};
use hearthnet_files::{Digest, WeightsId};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;
use hearthnet_orchestrator::placement::missing;

use super::capacity::community;
use super::catalogue::models_dir;
use crate::cli::args::Global;
use crate::cli::{Failure, failure};
use crate::home::Home;

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

/// Adoption of a file with this identity.
pub(crate) fn adoption(
    name: String,
    layers: u32,
    identity: &Identity,
    sources: Vec<String>,
) -> Adoption {
    Adoption {
        name,
        weights: identity.weights.0,
        layers,
        file_bytes: identity.file_bytes,
        head_bytes: identity.head_bytes,
        head: identity.head.0,
        manifest_bytes: identity.manifest_bytes,
        pieces: identity.pieces.0,
        sources,
    }
}

/// Folder of the part of an adopted model, if there is one.
pub(crate) fn part_folder(model: &Adoption) -> Option<PathBuf> {
    let folder = Part::folder_in(&parts_dir().ok()?, &WeightsId(model.weights));
    folder.is_dir().then_some(folder)
}

/// Name of a home in the folders of the parts that it uses: `<community>.<node>`, both in
/// hexadecimal digits. The part of a dropped model is removed by this name.
pub(crate) fn name_in_parts(home: &Home) -> String {
    node_in_parts(home.log.community(), home.key.id())
}

/// As [`name_in_parts`], of the home of a node.
pub(crate) fn node_in_parts(community: CommunityId, node: NodeId) -> String {
    let community = hex::encode(community.as_bytes());
    format!("{community}.{}", hex::encode(node.as_bytes()))
}

/// Renames a home that has a new key in the parts that it uses.
pub(crate) fn rename_in_parts(old: &str, new: &str) {
    let Ok(parts) = parts_dir() else {
        return;
    };
    for weights in folder::parts_in(&parts) {
        if let Err(why) = folder::rename(&Part::folder_in(&parts, &weights), old, new) {
            tracing::warn!("the part {weights} stays when its model is dropped: {why}");
        }
    }
}

/// Part that a home uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UsedPart {
    pub(crate) weights: WeightsId,
    /// Bytes on the disk that its removal frees.
    pub(crate) bytes: u64,
    /// Its file is a second name of a file of the user.
    pub(crate) is_shared: bool,
    /// Another home uses it, too.
    pub(crate) has_other_homes: bool,
}

/// Parts that a home uses, by its name in them.
pub(crate) fn used_parts(parts: &Path, own: &str) -> Vec<UsedPart> {
    let found = folder::parts_in(parts).into_iter();
    let used = found.filter_map(|weights| {
        let folder = Part::folder_in(parts, &weights);
        folder::uses(&folder, own).then(|| UsedPart {
            weights,
            bytes: folder::disk_bytes(&folder),
            is_shared: folder::is_shared(&folder),
            // A folder that cannot be read is not removed.
            has_other_homes: folder::is_used_beside(&folder, own).unwrap_or(true),
        })
    });
    used.collect()
}

/// Ends a home's use of the parts of models that are not adopted. Returns those that were removed: no
/// other home uses them, and no process has them open. `stays` is told why another one was not
/// removed.
pub(crate) fn leave_parts(
    parts: &Path,
    own: &str,
    is_adopted: impl Fn(&[u8; 32]) -> bool,
    stays: impl Fn(PartError),
) -> Vec<UsedPart> {
    let used = used_parts(parts, own).into_iter();
    let ended = used.filter(|part| !is_adopted(&part.weights.0));
    let removed = ended.filter(|part| {
        let left = folder::leave(&Part::folder_in(parts, &part.weights), own);
        left.unwrap_or_else(|why| {
            stays(why);
            false
        })
    });
    removed.collect()
}

/// Checks that the part in a folder is one of the adopted file: weights, tokenizer and template.
fn check_part(folder: &Path, model: &Adoption) -> Result<(), Failure> {
    let name = &model.name;
    let why = match stored_identity(folder) {
        Ok(stored) if stored == identity(model) => return Ok(()),
        Ok(_) => "is of another file than the adopted one".to_owned(),
        Err(error) => format!("cannot be used: {error}"),
    };
    Err(
        failure!(Model, "the part of {name} on this machine {why}").hint(format!(
            "`hearthnet up` fetches what it lacks, or `hearthnet model rm {name}` removes it"
        )),
    )
}

/// Adopted models of which a part is on this machine.
pub(crate) fn here(state: &Community) -> impl Iterator<Item = &Adoption> {
    let all = state.models().into_iter();
    all.filter(|model| part_folder(model).is_some())
}

/// The adopted model of which all is on this machine, if there is exactly one.
pub(crate) fn only_whole(global: &Global) -> Option<ModelRef> {
    let state = community(global)?.state();
    let is_whole = |model: &&Adoption| {
        let part = part_folder(model).and_then(|folder| Part::open_reading(&folder).ok());
        part.is_some_and(|part| part.missing(&[part.table().all()]).is_empty())
    };
    let mut whole = here(&state).filter(is_whole);
    let first = whole.next()?;
    let is_only = whole.next().is_none();
    is_only.then(|| ModelRef::Id(first.name.clone()))
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
///
/// # Errors
/// Refuses a part of another file than the adopted one.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Result<Option<Resolved>, Failure> {
    match named(global, name) {
        Some(model) => resolved(&model),
        None => Ok(None),
    }
}

/// The part of an adopted model, if it is on this machine.
///
/// # Errors
/// As [`resolve`].
pub(crate) fn resolved(model: &Adoption) -> Result<Option<Resolved>, Failure> {
    let Some(folder) = part_folder(model) else {
        return Ok(None);
    };
    check_part(&folder, model)?;
    Ok(Some(Resolved {
        path: folder.join(PART_FILE),
        id: model.name.clone(),
    }))
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

/// Whether a part holds every piece of a layer.
pub(crate) fn holds_layer(part: &Part, layer: u32) -> bool {
    part.missing(&part.table().of_layers(layer, layer))
        .is_empty()
}

/// Ranges of the layers of which a part holds every piece.
pub(crate) fn held_layers(part: &Part, layers: u32) -> Vec<(u32, u32)> {
    ranges(layers, |layer| holds_layer(part, layer))
}

/// Ranges of the layers of which every piece is in `held`: ascending runs that do not touch.
pub(crate) fn layers_in(table: &PieceTable, layers: u32, held: &[Range<u32>]) -> Vec<(u32, u32)> {
    let is_in = |wanted: &Range<u32>| {
        let after = held.partition_point(|run| run.start <= wanted.start);
        let run = after.checked_sub(1).and_then(|at| held.get(at));
        run.is_some_and(|run| wanted.end <= run.end)
    };
    ranges(layers, |layer| {
        table.of_layers(layer, layer).iter().all(is_in)
    })
}

/// Ranges of the layers that are held.
fn ranges(layers: u32, is_held: impl Fn(u32) -> bool) -> Vec<(u32, u32)> {
    let lacking = (0..layers).filter(|layer| !is_held(*layer));
    let lacking: Vec<(u32, u32)> = lacking.map(|layer| (layer, layer)).collect();
    missing(layers, &lacking)
}

/// Adopted model with this name and weights id.
#[cfg(test)]
pub(crate) fn adoption_for_test(name: &str, weights: u8) -> Adoption {
    Adoption {
        name: name.to_owned(),
        weights: [weights; 32],
        layers: 32,
        file_bytes: 4_000_000_000,
        head_bytes: 6_000_000,
        head: [1; 32],
        manifest_bytes: 30_000,
        pieces: [2; 32],
        sources: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_files::ModelFile;
    use hearthnet_files::part::identity_of;
    use hearthnet_testkit::TinyLlama;

    use super::*;

    #[test]
    fn a_part_of_another_file_with_the_same_weights_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = ModelFile::open(&TinyLlama::default().write(dir.path())).unwrap();
        let manifest = file.manifest(&mut |_, _| {});
        let (known, pieces) = identity_of(&file, &manifest, &mut |_, _| {}).unwrap();
        let encoded = manifest.encode();
        let part = Part::of_linked_file(dir.path(), &known, &file, &encoded, &pieces).unwrap();
        let model = adoption("tiny".to_owned(), file.spec().layers, &known, Vec::new());
        check_part(part.folder(), &model).unwrap();
        let other = Adoption {
            head: [9; 32],
            ..model.clone()
        };
        let said = |model: &Adoption| check_part(part.folder(), model).unwrap_err().to_string();
        assert!(said(&other).contains("the part of tiny on this machine is of another file"));
        std::fs::write(part.folder().join("identity"), "{").unwrap();
        assert!(said(&model).contains("tiny on this machine cannot be used"));
    }

    #[test]
    fn only_parts_that_this_home_used_and_no_other_home_uses_are_removed() {
        let parts = tempfile::tempdir().unwrap();
        let path = |n: u8| Part::folder_in(parts.path(), &WeightsId([n; 32]));
        for n in 1..=4 {
            std::fs::create_dir(path(n)).unwrap();
        }
        for (n, home) in [
            (1, "own"),
            (2, "own"),
            (2, "other"),
            (3, "other"),
            (4, "own"),
        ] {
            folder::enter(&path(n), home).unwrap();
        }
        std::fs::create_dir(parts.path().join("own")).unwrap();
        let used = used_parts(parts.path(), "own");
        let shared = used.iter().map(|part| part.has_other_homes);
        assert_eq!(shared.collect::<Vec<_>>(), [false, true, false]);
        let is_adopted = |weights: &[u8; 32]| weights[0] == 4;
        let removed = leave_parts(parts.path(), "own", is_adopted, |why| panic!("{why}"));
        assert_eq!(removed, used[..1]);
        assert_eq!(removed[0].weights, WeightsId([1; 32]));
        assert!(!path(1).exists());
        assert!([2, 3, 4].iter().all(|n| path(*n).exists()));
        // The other home's use alone is left of the second.
        assert!(!folder::uses(&path(2), "own") && folder::uses(&path(2), "other"));
        assert!(parts.path().join("own").exists());
    }
}
