//! What lies in the cache of models: in which state, reading all of it, removing it.

use std::fs;
use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use hearthnet_model::catalogue::{Catalogue, ModelEntry};
use hearthnet_model::manifest::{FileState, file_state, record_path};
use hearthnet_model::{ModelRef, WeightsId};
use serde::Serialize;

use super::{changed, host_failure, pin};
use crate::commands::{open_file, print_bytes, print_json};
use crate::failure::{Failure, Kind};
use crate::output::{Progress, bytes, note, table};

/// How deep below the cache fetched files are looked for: `hf/OWNER/NAME/DIR/.../FILE`.
const DEPTH: usize = 8;

/// A model that is here or could be.
#[derive(Debug, Serialize)]
struct Row {
    /// How to name it.
    model: String,
    path: PathBuf,
    /// Bytes that are here.
    bytes: u64,
    /// Bytes that there should be, where the catalogue says.
    expected_bytes: Option<u64>,
    state: State,
    license: Option<String>,
    name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// As it was when all of it was read.
    Ok,
    /// Nobody has read all of it yet.
    Unverified,
    /// Written to, or moved, since all of it was read.
    Changed,
    /// Shorter than it must be.
    Truncated,
    /// A download that can go on.
    Partial,
    /// Not on this machine.
    NotHere,
}

/// The state of a file, without reading it.
fn state(path: &Path, entry: Option<&ModelEntry>) -> State {
    let Some(found) = fs::metadata(path).ok().filter(|info| info.is_file()) else {
        return match part_of(path).is_file() {
            true => State::Partial,
            false => State::NotHere,
        };
    };
    let weights = match file_state(path) {
        FileState::Verified(weights) => Ok(weights),
        FileState::Changed => Err(State::Changed),
        _ => Err(State::Unverified),
    };
    match (entry, weights) {
        (Some(entry), _) if found.len() < entry.bytes => State::Truncated,
        (Some(entry), _) if found.len() > entry.bytes => State::Changed,
        (Some(entry), Ok(weights)) if weights != entry.weights => State::Changed,
        (_, Ok(_)) => State::Ok,
        (_, Err(state)) => state,
    }
}

/// The beginning of a download.
fn part_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.part"))
}

pub(super) fn list(catalogue: &Catalogue, json: bool) -> Result<(), Failure> {
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    let mut rows: Vec<Row> = catalogue
        .models()
        .map(|entry| {
            let path = entry.path_in(&models);
            Row {
                model: entry.id.clone(),
                state: state(&path, Some(entry)),
                bytes: bytes_here(&path),
                expected_bytes: Some(entry.bytes),
                license: Some(entry.license.clone()),
                name: Some(entry.name.clone()),
                path,
            }
        })
        .collect();
    rows.extend(fetched(&models).into_iter().map(|path| Row {
        model: named(&path, &models),
        state: state(&path, None),
        bytes: bytes_here(&path),
        expected_bytes: None,
        license: None,
        name: None,
        path,
    }));
    if json {
        return print_json(&rows);
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.model.clone(),
                bytes(row.expected_bytes.unwrap_or(row.bytes)),
                row.license.clone().unwrap_or_default(),
                said(row),
                row.name.clone().unwrap_or_default(),
            ]
        })
        .collect();
    print_bytes(
        table(
            &["model", "size", "licence", "this machine", "name"],
            &cells,
        )
        .as_bytes(),
    )?;
    if rows
        .iter()
        .any(|row| matches!(row.state, State::Truncated | State::Changed))
    {
        note(
            "`hearthnet model verify MODEL` reads all of a file; `hearthnet model pull MODEL` fetches it again",
        );
    }
    Ok(())
}

/// What was fetched without a catalogue.
fn fetched(models: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["hf", "url", "dir"] {
        files(&models.join(folder), DEPTH, &mut found);
    }
    found.sort();
    found
}

/// The name of a fetched model that has these weights, and is untouched since that was found out.
pub(super) fn with_weights(models: &Path, weights: WeightsId) -> Option<ModelRef> {
    let same = |path: &PathBuf| file_state(path) == FileState::Verified(weights);
    let path = fetched(models).into_iter().find(same)?;
    named(&path, models).parse().ok()
}

fn said(row: &Row) -> String {
    let of = |what: &str| match row.expected_bytes {
        Some(all) => format!("{what} ({} of {})", bytes(row.bytes), bytes(all)),
        None => what.to_owned(),
    };
    match row.state {
        State::Ok => "ok".to_owned(),
        State::Unverified => "here, not verified".to_owned(),
        State::Changed => "changed since it was verified".to_owned(),
        State::Truncated => of("truncated"),
        State::Partial => of("partly here"),
        State::NotHere => "not here".to_owned(),
    }
}

fn bytes_here(path: &Path) -> u64 {
    let len = |path: &Path| fs::metadata(path).map(|info| info.len());
    len(path).or_else(|_| len(&part_of(path))).unwrap_or(0)
}

/// Model files below a folder, also those of which only a part is there.
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
                if whole.extension().is_some_and(|e| e == "gguf") && !found.contains(&whole) {
                    found.push(whole);
                }
            }
            _ => {}
        }
    }
}

/// How a fetched file is named: as it was on the hub, else by its path.
fn named(path: &Path, models: &Path) -> String {
    let of_hub = path.strip_prefix(models.join("hf")).ok();
    of_hub
        .and_then(|rest| Some(format!("hf:{}", rest.to_str()?)))
        .filter(|name| name.parse::<ModelRef>().is_ok())
        .unwrap_or_else(|| path.display().to_string())
}

pub(super) fn verify(
    catalogue: &Catalogue,
    path: &Path,
    accept: bool,
    json: bool,
) -> Result<(), Failure> {
    let pin = pin(catalogue, path)?;
    let file = open_file(path)?;
    let known = file_state(path) != FileState::Unverified;
    let mut progress = Progress::new("reading all of the model");
    let mut set = |done, total| progress.set(done, total);
    let (manifest, compared) = match (pin, accept) {
        (None, true) => (file.accept(&mut set), "accepted"),
        (pin, _) => {
            let manifest = file.verify(pin, &mut set).map_err(|e| changed(&e))?;
            let compared = match (pin, known) {
                (Some(_), _) => "catalogue",
                (None, true) => "record",
                (None, false) => "nothing",
            };
            (manifest, compared)
        }
    };
    drop(progress);
    let len = file.gguf().file_bytes();
    let weights = manifest.weights_id();
    if json {
        return print_json(&serde_json::json!({
            "path": path, "bytes": len, "weights": weights, "compared_with": compared,
        }));
    }
    let what = match compared {
        "catalogue" => "they are those that the catalogue pins",
        "record" => "they are what they were when the file was first used",
        "accepted" => "taken as they are now",
        _ => "there was nothing to compare them with; from now on they must stay so",
    };
    print_bytes(
        format!(
            "{}\n  bytes    {len} read: {what}\n  weights  {weights}\n",
            path.display()
        )
        .as_bytes(),
    )
}

pub(super) fn remove(catalogue: &Catalogue, model: &ModelRef, yes: bool) -> Result<(), Failure> {
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    let path = match model {
        ModelRef::Id(id) => catalogue
            .get(id)
            .ok_or_else(|| super::not_resolved(&catalogue.unknown(id)))?
            .path_in(&models),
        ModelRef::Path(path) => path.clone(),
        fetched => models.join(fetched.place().unwrap_or_default()),
    };
    let part = part_of(&path);
    if !path.is_file() && !part.is_file() {
        return Err(
            Failure::new(Kind::Model, format!("model {model} is not on this machine"))
                .hint("`hearthnet model list` shows what is"),
        );
    }
    // Only what was fetched is removed: links lead to files of somebody else.
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    let inside = models
        .canonicalize()
        .is_ok_and(|models| folder.is_some_and(|f| f.starts_with(&models) && f != models));
    if !inside {
        return Err(Failure::new(
            Kind::BadRequest,
            format!(
                "{} was not fetched by this program: it does not lie below {}",
                path.display(),
                models.display()
            ),
        )
        .hint("remove the file yourself, and NAME.gguf.hearthnet beside it"));
    }
    let size = bytes(bytes_here(&path));
    if !yes && !agreed(&format!("Remove {} ({size})?", path.display()))? {
        return Err(Failure::new(Kind::Interrupted, "nothing was removed"));
    }
    let fail = |path: &Path, e: &io::Error| {
        Failure::new(Kind::Host, format!("cannot remove {}: {e}", path.display()))
    };
    let etag = PathBuf::from(format!("{}.etag", part.display()));
    for file in [
        &path,
        &record_path(&path),
        &part,
        &etag,
        &path.with_file_name(".lock"),
    ] {
        match fs::remove_file(file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(fail(file, &e)),
            _ => {}
        }
    }
    // Folders that are empty now; the first that is not ends this.
    let mut folder = path.parent();
    while let Some(empty) = folder.filter(|f| *f != models && fs::remove_dir(f).is_ok()) {
        folder = empty.parent();
    }
    note(format!("removed {} ({size})", path.display()));
    Ok(())
}

/// Asks the person; without one, only `--yes` is an answer.
fn agreed(question: &str) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(
            Failure::new(Kind::Config, "nobody is here to be asked").hint("--yes does without")
        );
    }
    let _ = write!(io::stderr(), "{question} [y/N] ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_model::ModelFile;

    #[test]
    fn a_fetched_model_is_found_by_its_weights_as_long_as_it_is_what_it_was() {
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
}
