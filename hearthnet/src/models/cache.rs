//! Cache of models: lists, verifies and removes files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use hearthnet_model::catalogue::{Catalogue, ModelEntry, Pinned, Shape};
use hearthnet_model::manifest::{FileState, file_state, record_path};
use hearthnet_model::{Digest, Gguf, ModelRef, TextId, WeightsId};
use serde::Serialize;

use super::capacity::{Availability, Capacity};
use crate::failure::{Failure, Kind};
use crate::models::catalogue::{models_dir, not_resolved, pin};
use crate::models::{changed, open_file};
use crate::output::{Progress, ask, bytes, note, print, print_json, table};

/// Depth below the cache to which fetched files are searched: `hf/OWNER/NAME/DIR/.../FILE`.
const DEPTH: usize = 8;

/// Model that is on this machine, or in the catalogue.
#[derive(Debug, Serialize)]
struct Row {
    /// Name for the command line.
    model: String,
    path: PathBuf,
    /// Size on this machine, in bytes.
    bytes: u64,
    /// Size in the catalogue, in bytes.
    expected_bytes: Option<u64>,
    state: State,
    license: Option<String>,
    /// Address of a licence that the user of the model accepts.
    terms: Option<String>,
    name: Option<String>,
    /// Pinned hash, and the origin of the pin.
    sha256: Option<Digest>,
    pinned: Pinned,
    /// Identity of the weights, if pinned or verified.
    weights: Option<WeightsId>,
    /// Identity of tokenizer and chat template, if the file is here.
    text: Option<TextId>,
    /// Hosts that serve the same weights with another tokenizer or chat template.
    other_text: Vec<String>,
    shape: Option<Shape>,
    /// Whether the model fits into this machine's free memory, if known.
    runs_here: Option<bool>,
    /// Availability in the community, if this node is in one.
    community: Option<Availability>,
}

impl Row {
    /// Row of a catalogue entry, or without an entry, of another fetched model.
    fn of(model: String, path: PathBuf, entry: Option<&ModelEntry>, capacity: &Capacity) -> Self {
        let here = bytes_here(&path);
        let size = entry.map_or(here, |entry| entry.bytes);
        let read = match file_state(&path) {
            FileState::Verified(weights) => Some(weights),
            _ => None,
        };
        let weights = entry.map_or(read, |entry| entry.weights.or(read));
        let given = capacity.community.as_ref();
        let text = Gguf::open(&path).ok().and_then(|file| file.text_id().ok());
        let known = given.zip(weights.zip(text));
        Self {
            model,
            state: state(&path, entry),
            bytes: here,
            expected_bytes: entry.map(|entry| entry.bytes),
            license: entry.map(|entry| entry.license.clone()),
            terms: entry.and_then(|entry| entry.terms.clone()),
            name: entry.map(|entry| entry.name.clone()),
            sha256: entry.and_then(|entry| entry.sha256),
            pinned: entry.map_or(Pinned::Never, |entry| entry.pinned),
            weights,
            text,
            other_text: known.map_or_else(Vec::new, |(given, (weights, text))| {
                given.with_other_text(weights, text)
            }),
            shape: entry.and_then(|entry| entry.shape.clone()),
            runs_here: capacity.runs_here(size),
            community: given.map(|given| given.of_model(entry, weights, size)),
            path,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
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
        (Some(entry), Ok(weights)) if entry.weights.is_some_and(|w| w != weights) => State::Changed,
        (_, Ok(_)) => State::Ok,
        (_, Err(state)) => state,
    }
}

/// Path of an unfinished download.
fn part_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.part"))
}

pub(crate) fn list(catalogue: &Catalogue, capacity: &Capacity, json: bool) -> Result<(), Failure> {
    let models = models_dir()?;
    let known: Vec<Row> = catalogue
        .models()
        .map(|entry| {
            Row::of(
                entry.id.clone(),
                entry.path_in(&models),
                Some(entry),
                capacity,
            )
        })
        .collect();
    let fetched: Vec<Row> = fetched(&models)
        .into_iter()
        .map(|path| Row::of(named(&path, &models), path, None, capacity))
        .collect();
    if json {
        return print_json(&known.iter().chain(&fetched).collect::<Vec<_>>());
    }
    print(listing(&known, &fetched, capacity))?;
    for row in known.iter().chain(&fetched) {
        if !row.other_text.is_empty() {
            note(other_text(&row.model, &row.other_text));
        }
    }
    let wrong = |row: &Row| matches!(row.state, State::Truncated | State::Changed);
    if known.iter().chain(&fetched).any(wrong) {
        note(
            "`hearthnet model verify MODEL` reads all of a file; `hearthnet model pull MODEL` fetches it again",
        );
    }
    Ok(())
}

/// Warning if hosts serve a file's weights with another tokenizer or chat template.
pub(crate) fn other_text(model: &str, hosts: &[String]) -> String {
    format!(
        "warning: the tokenizer or the chat template of {model} here differs from that of {}, which serve the same weights: one of the files was changed. `hearthnet model inspect` shows the identity of the text",
        hosts.join(", ")
    )
}

/// Table of models, 80 columns wide except for long file names outside the catalogue.
fn listing(known: &[Row], fetched: &[Row], capacity: &Capacity) -> String {
    let mut heads = vec!["model", "size", "licence", "on disk", "here"];
    if capacity.community.is_some() {
        heads.push("community");
    }
    let cells: Vec<Vec<String>> = known
        .iter()
        .map(|row| {
            let mark = if row.terms.is_some() { "*" } else { "" };
            let license = row.license.as_deref().unwrap_or_default();
            let mut cells = vec![
                row.model.clone(),
                bytes(row.expected_bytes.unwrap_or(row.bytes)),
                format!("{license}{mark}"),
                on_disk(row.state).to_owned(),
                here(row).to_owned(),
            ];
            cells.extend(row.community.map(|there| there.text().to_owned()));
            cells
        })
        .collect();
    let mut out = table(&heads, &cells);
    if !fetched.is_empty() {
        out.push_str("\n also on this machine:\n");
    }
    for row in fetched {
        let size = bytes(row.bytes);
        let _ = writeln!(
            out,
            " {}\n   {size}, on disk: {}; here: {}",
            row.model,
            on_disk(row.state),
            here(row)
        );
    }
    out.push('\n');
    let _ = match capacity.free {
        Some(free) => writeln!(
            out,
            " here       fits into the {} of memory that are free now",
            bytes(free)
        ),
        None => writeln!(
            out,
            " here       this system does not tell how much memory is free"
        ),
    };
    if let Some(given) = &capacity.community {
        let _ = writeln!(
            out,
            " community  {:?} serves it, or could with the {} given to layers",
            given.name,
            bytes(given.bytes)
        );
    }
    if known.iter().any(|row| row.terms.is_some()) {
        out.push_str(
            " *          a licence with conditions, which the user of the model accepts\n",
        );
    }
    out
}

fn here(row: &Row) -> &'static str {
    match row.runs_here {
        Some(true) => "yes",
        Some(false) => "no",
        None => "?",
    }
}

/// Fetched models that are not in the catalogue.
fn fetched(models: &Path) -> Vec<PathBuf> {
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

fn on_disk(state: State) -> &'static str {
    match state {
        State::Ok => "yes",
        State::Unverified => "not read",
        State::Changed => "changed",
        State::Truncated => "cut short",
        State::Partial => "partly",
        State::NotHere => "no",
    }
}

fn bytes_here(path: &Path) -> u64 {
    let len = |path: &Path| fs::metadata(path).map(|info| info.len());
    len(path).or_else(|_| len(&part_of(path))).unwrap_or(0)
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
                if whole.extension().is_some_and(|e| e == "gguf") && !found.contains(&whole) {
                    found.push(whole);
                }
            }
            _ => {}
        }
    }
}

/// Name of a fetched file: its hub reference, else its path.
fn named(path: &Path, models: &Path) -> String {
    let of_hub = path.strip_prefix(models.join("hf")).ok();
    of_hub
        .and_then(|rest| Some(format!("hf:{}", rest.to_str()?)))
        .filter(|name| name.parse::<ModelRef>().is_ok())
        .unwrap_or_else(|| path.display().to_string())
}

pub(crate) fn verify(
    catalogue: &Catalogue,
    path: &Path,
    accept: bool,
    json: bool,
) -> Result<(), Failure> {
    let pin = pin(catalogue, path)?;
    let file = open_file(path)?;
    let known = file_state(path) != FileState::Unverified;
    let what = "reading all of the model";
    let (manifest, compared) = match (pin, accept) {
        (None, true) => (Progress::during(what, |set| file.accept(set)), "accepted"),
        (pin, _) => {
            let manifest = Progress::during(what, |set| file.verify(pin, set));
            let manifest = manifest.map_err(|e| changed(&e))?;
            let compared = match (pin, known) {
                (Some(pin), _) if pin.pinned == Pinned::FirstPull => "first_pull",
                (Some(_), _) => "catalogue",
                (None, true) => "record",
                (None, false) => "nothing",
            };
            (manifest, compared)
        }
    };
    let len = file.gguf().file_bytes();
    let weights = manifest.weights_id();
    if json {
        return print_json(&serde_json::json!({
            "path": path.to_string_lossy(), "bytes": len, "weights": weights, "compared_with": compared,
        }));
    }
    let what = match compared {
        "catalogue" => "they match the catalogue",
        "first_pull" => "they match the first pull on this machine",
        "record" => "they match the hash of the first use",
        "accepted" => "accepted as they are now",
        _ => "no reference hash is known; this hash is recorded and checked from now on",
    };
    print(format!(
        "{}\n  bytes    {len} read: {what}\n  weights  {weights}\n",
        path.display()
    ))
}

pub(crate) fn remove(catalogue: &Catalogue, model: &ModelRef, yes: bool) -> Result<(), Failure> {
    let models = models_dir()?;
    let path = match model {
        ModelRef::Id(id) => catalogue
            .get(id)
            .ok_or_else(|| not_resolved(&catalogue.unknown(id)))?
            .path_in(&models),
        ModelRef::Path(path) => path.clone(),
        fetched => models.join(fetched.place().unwrap_or_default()),
    };
    let part = part_of(&path);
    if !path.is_file() && !part.is_file() {
        return Err(
            Failure::new(Kind::Model, format!("model {model} is not on this machine"))
                .hint("`hearthnet model list` shows the models that are"),
        );
    }
    // Removes only fetched files: a link may lead to another program's file.
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    let inside = models
        .canonicalize()
        .is_ok_and(|models| folder.is_some_and(|f| f.starts_with(&models) && f != models));
    if !inside {
        return Err(Failure::new(
            Kind::BadRequest,
            format!(
                "{} was not fetched by this program: it is not below {}",
                path.display(),
                models.display()
            ),
        )
        .hint("remove the file yourself, and NAME.gguf.hearthnet beside it"));
    }
    let size = bytes(bytes_here(&path));
    if !yes && !ask(&format!("Remove {} ({size})?", path.display()), None)? {
        return Err(Failure::new(Kind::Interrupted, "nothing was removed"));
    }
    let etag = PathBuf::from(format!("{}.etag", part.display()));
    for file in [
        &path,
        &record_path(&path),
        &part,
        &etag,
        &path.with_file_name(".lock"),
    ] {
        match fs::remove_file(file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Failure::file("remove", file, e));
            }
            _ => {}
        }
    }
    // Removes folders that are empty now; the first non-empty one ends the loop.
    let mut folder = path.parent();
    while let Some(empty) = folder.filter(|f| *f != models && fs::remove_dir(f).is_ok()) {
        folder = empty.parent();
    }
    note(format!("removed {} ({size})", path.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_model::ModelFile;

    #[test]
    fn the_list_of_the_catalogue_is_aligned_and_fits_into_80_columns() {
        let models = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::built_in().unwrap();
        let capacity = Capacity::for_test(Some(4 << 30), Some(6 << 30));
        let rows: Vec<Row> = catalogue
            .models()
            .map(|e| Row::of(e.id.clone(), e.path_in(models.path()), Some(e), &capacity))
            .collect();
        let text = listing(&rows, &[], &capacity);
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        let line = |id: &str| text.lines().find(|line| line.contains(id)).unwrap();
        let words = |id: &str| line(id).split_whitespace().collect::<Vec<_>>();
        assert_eq!(
            words(" qwen3-4b "),
            ["qwen3-4b", "2.3", "GiB", "Apache-2.0", "no", "yes", "could"]
        );
        assert_eq!(
            words("gemma-3-12b-it"),
            ["gemma-3-12b-it", "6.8", "GiB", "Gemma*", "no", "no", "no"]
        );
        // All cells of a column begin under its heading.
        let at = line("licence").find("on disk").unwrap();
        for row in &rows {
            let cell = line(&format!(" {} ", row.model)).get(at - 1..at + 2);
            assert_eq!(cell, Some(" no"), "{text}");
        }
        let json = serde_json::to_value(&rows).unwrap();
        let of = |id: &str| {
            json.as_array()
                .unwrap()
                .iter()
                .find(|r| r["model"] == id)
                .unwrap()
                .clone()
        };
        let llama = of("llama-3.2-1b-instruct");
        assert_eq!(llama["terms"], "https://www.llama.com/llama3_2/license/");
        assert_eq!(llama["shape"]["layers"], 16);
        assert_eq!(
            (&llama["pinned"], &llama["weights"]),
            (&"catalogue".into(), &serde_json::Value::Null)
        );
        assert_eq!(
            (&llama["runs_here"], &llama["community"]),
            (&true.into(), &"could".into())
        );
        let alone = listing(&rows, &[], &Capacity::for_test(None, None));
        assert!(
            !alone.contains("community") && alone.contains("does not tell"),
            "{alone}"
        );
    }

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
}
