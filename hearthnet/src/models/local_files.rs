//! Fetched files on this machine, and their states.

use std::fs;
use std::path::{Path, PathBuf};

use hearthnet_files::WeightsId;
use hearthnet_files::gguf::{SplitName, files_of};
use hearthnet_files::manifest::{FileState, file_state};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::ModelEntry;
use hearthnet_platform::files::names;
use serde::Serialize;

/// Depth below the cache to which fetched files are searched: `hf/OWNER/NAME/DIR/.../FILE`.
const DEPTH: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// Unchanged since it was read completely.
    Ok,
    /// Never read completely.
    Unverified,
    /// Changed or moved since it was read completely.
    Changed,
    /// Shorter than the catalogue says.
    Truncated,
    /// A download that can be resumed.
    Partial,
    NotHere,
}

/// State of a file, without reading its content.
pub(crate) fn state(path: &Path, entry: Option<&ModelEntry>) -> State {
    // The first file of a split model is fetched last.
    if !path.is_file() {
        return match bytes_here(path) {
            0 => State::NotHere,
            _ => State::Partial,
        };
    }
    let found = bytes_here(path);
    let weights = match file_state(path) {
        FileState::Verified(weights) => Ok(weights),
        FileState::Changed => Err(State::Changed),
        _ => Err(State::Unverified),
    };
    match (entry, weights) {
        (Some(entry), _) if found < entry.bytes => State::Truncated,
        (Some(entry), _) if found > entry.bytes => State::Changed,
        (Some(entry), Ok(weights)) if entry.weights.is_some_and(|w| w != weights) => State::Changed,
        (_, Ok(_)) => State::Ok,
        (_, Err(state)) => state,
    }
}

/// Path of an unfinished download.
pub(crate) fn part_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.part"))
}

/// Bytes on the disk of a model file, also of an unfinished one; of a split model, of all its files.
pub(crate) fn bytes_here(path: &Path) -> u64 {
    let len = |path: &Path| fs::metadata(path).map(|info| info.len());
    let files = files_of(path).into_iter();
    let each = files.map(|path| len(&path).or_else(|_| len(&part_of(&path))));
    each.flatten().sum()
}

/// Whether a file has another name (hard link): removing it frees no space.
pub(crate) fn has_other_name(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|info| names(&info) > 1)
}

/// Fetched models that are not in the catalogue.
pub(crate) fn fetched(models: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["hf", "url", "dir"] {
        files(&models.join(folder), DEPTH, &mut found);
    }
    found.sort();
    found
}

/// Name of a fetched model that has these weights, verified and unchanged.
pub(crate) fn with_weights(models: &Path, weights: WeightsId) -> Option<ModelRef> {
    let same = |path: &PathBuf| file_state(path) == FileState::Verified(weights);
    let path = fetched(models).into_iter().find(same)?;
    named(&path, models).parse().ok()
}

/// Model files below a folder, including unfinished downloads.
fn files(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth > 0 => files(&path, depth - 1, found),
            Ok(kind) if kind.is_file() => {
                let part = name.strip_prefix('.').and_then(|n| n.strip_suffix(".part"));
                let whole = match part {
                    Some(whole) => path.with_file_name(whole),
                    None => path,
                };
                // A split model goes by its first file.
                let name = whole.file_name().unwrap_or_default().to_string_lossy();
                let first = SplitName::parse(&name).map(|name| whole.with_file_name(name.of(1)));
                let whole = first.unwrap_or(whole);
                if whole.extension().is_some_and(|e| e == "gguf") && !found.contains(&whole) {
                    found.push(whole);
                }
            }
            _ => {}
        }
    }
}

/// Name of a fetched file: its hub reference, else its path.
pub(crate) fn named(path: &Path, models: &Path) -> String {
    let of_hub = path.strip_prefix(models.join("hf")).ok();
    of_hub
        .and_then(|rest| Some(format!("hf:{}", rest.to_str()?)))
        .filter(|name| name.parse::<ModelRef>().is_ok())
        .unwrap_or_else(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_files::ModelFile;

    #[test]
    fn a_fetched_model_is_found_by_its_weights_until_it_changes() {
        let models = tempfile::tempdir().unwrap();
        let folder = models.path().join("hf/o/r");
        fs::create_dir_all(&folder).unwrap();
        let written = hearthnet_testkit::TinyLlama::default().write(&folder);
        let path = folder.join("tiny.gguf");
        fs::rename(written, &path).unwrap();
        let file = ModelFile::open(&path).unwrap();
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        let found = with_weights(models.path(), weights).unwrap();
        assert_eq!(found.to_string(), "hf:o/r/tiny.gguf");
        assert_eq!(with_weights(models.path(), WeightsId([0; 32])), None);
        fs::write(&path, b"GGUF").unwrap();
        assert_eq!(with_weights(models.path(), weights), None);
    }

    #[test]
    fn a_split_model_is_one_model_and_is_partial_without_its_first_file() {
        let models = tempfile::tempdir().unwrap();
        let folder = models.path().join("hf/o/r");
        fs::create_dir_all(&folder).unwrap();
        let files = hearthnet_testkit::split(&hearthnet_testkit::TinyLlama::default().bytes(), 3);
        let path = hearthnet_testkit::write_split(&folder, &files);
        let bytes: usize = files.iter().map(Vec::len).sum();
        assert_eq!(fetched(models.path()), std::slice::from_ref(&path));
        assert_eq!(state(&path, None), State::Unverified);
        assert_eq!(bytes_here(&path), bytes as u64);
        let file = ModelFile::open(&path).unwrap();
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        assert_eq!(state(&path, None), State::Ok);
        assert!(with_weights(models.path(), weights).is_some());
        fs::remove_file(&path).unwrap();
        assert_eq!(fetched(models.path()), std::slice::from_ref(&path));
        assert_eq!(state(&path, None), State::Partial);
    }
}
