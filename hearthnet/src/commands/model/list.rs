//! `hearthnet model list`.

use std::fmt::Write as _;
use std::path::PathBuf;

use hearthnet_bus::log::Community;
use hearthnet_files::manifest::{FileState, Pinned, file_state};
use hearthnet_files::{Digest, Gguf, TextId, WeightsId};
use hearthnet_hub::catalogue::{Catalogue, ModelEntry, Shape};
use serde::Serialize;

use super::adopted;
use crate::cli::{Failure, bytes, note, print, print_json, table};
use crate::home::now_ms;
use crate::models::local_files::{State, bytes_here, fetched, named, state};
use crate::models::{Availability, Capacity, models_dir, other_text};
use crate::node::Holdings;

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
    /// Whether only one public source names the size, revision or hash that the catalogue has.
    unconfirmed: bool,
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

/// Row of the list as JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum Listed<'a> {
    Adopted(&'a adopted::Row),
    Row(&'a Row),
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
            unconfirmed: entry.is_some_and(|entry| entry.unconfirmed),
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

/// `state` is that of this node's community, if it is in one; `holdings` those of the members that the
/// running node reaches.
pub(super) fn list(
    catalogue: &Catalogue,
    capacity: &Capacity,
    state: Option<&Community>,
    holdings: Option<&Holdings>,
    json: bool,
) -> Result<(), Failure> {
    let models = models_dir()?;
    let adopted = state.map_or_else(Vec::new, |state| adopted::rows(state, holdings, now_ms()));
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
        let rows = known.iter().chain(&fetched).map(Listed::Row);
        let adopted = adopted.iter().map(Listed::Adopted);
        return print_json(&adopted.chain(rows).collect::<Vec<_>>());
    }
    let name = state.map_or("", |state| &state.name);
    let adopted = adopted::listing(name, &adopted);
    print(adopted + &listing(&known, &fetched, capacity))?;
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

/// Table of models, 80 columns wide except for long file names outside the catalogue.
fn listing(known: &[Row], fetched: &[Row], capacity: &Capacity) -> String {
    let header = match capacity.community {
        Some(_) => "model|size|licence|on disk|here|community",
        None => "model|size|licence|on disk|here",
    };
    let cells = known.iter().map(|row| {
        let mark = if row.terms.is_some() { "*" } else { "" };
        let license = row.license.as_deref().unwrap_or_default();
        let doubt = if row.unconfirmed { "?" } else { "" };
        let size = bytes(row.expected_bytes.unwrap_or(row.bytes));
        let mut cells = vec![
            row.model.clone(),
            format!("{size}{doubt}"),
            format!("{license}{mark}"),
            on_disk(row.state).to_owned(),
            here(row).to_owned(),
        ];
        cells.extend(row.community.map(|there| there.to_string()));
        cells
    });
    let mut out = table(header, cells);
    if !fetched.is_empty() {
        out.push_str("\n also on this machine:\n");
    }
    for row in fetched {
        let (model, size) = (&row.model, bytes(row.bytes));
        let (on_disk, here) = (on_disk(row.state), here(row));
        let _ = writeln!(out, " {model}\n   {size}, on disk: {on_disk}; here: {here}");
    }
    out.push('\n');
    out.push_str(&match capacity.free.map(bytes) {
        Some(free) => format!(" here       fits into the {free} of memory that are free now\n"),
        None => " here       this system does not tell how much memory is free\n".to_owned(),
    });
    if let Some(given) = &capacity.community {
        let _ = writeln!(
            out,
            " community  {:?} serves it, or could with the {} given to layers",
            given.name,
            bytes(given.bytes)
        );
    }
    if known.iter().any(|row| row.unconfirmed) {
        out.push_str(
            " ?          only one public source names this file's size, revision or hash\n",
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(words("glm-4.7-flash")[1..3], ["17.1", "GiB?"]);
        assert!(text.contains("\n ?          only one public source"));
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
}
