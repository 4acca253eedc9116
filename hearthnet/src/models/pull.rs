//! Fetches models.

use std::path::{Path, PathBuf};

use hearthnet_files::manifest::{FileState, Pinned, file_state};
use hearthnet_files::{Digest, ModelFile, WeightsId};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::{Catalogue, ModelEntry, Source};
use hearthnet_hub::pins::Pin;
use hearthnet_hub::pull::{PullError, PullEvent, PullOptions, SourceError, pull, pull_reference};

use super::capacity::{self, HostCapacity, other_text};
use crate::cli::args::{Global, PullArgs};
use crate::cli::{Failure, Kind, Progress, bytes, cancel_on_interrupt, failure, note};
use crate::home::now_ms;
use crate::models::catalogue::{no_cache, not_resolved};
use crate::models::open_file::{changed, open_file};

/// Fetches a model and checks its file.
pub(crate) fn pull_model(
    global: &Global,
    catalogue: &Catalogue,
    model: &ModelRef,
    request: PullArgs,
) -> Result<PathBuf, Failure> {
    let mut options = PullOptions::from_environment().map_err(no_cache)?;
    options.from = request.from;
    // Fetch again if the fetched file has changed since, or is broken.
    let place = model.place().map(|place| options.models.join(place));
    options.again = request.force
        || place.is_some_and(|path| {
            path.is_file()
                && (file_state(&path) == FileState::Changed || ModelFile::open(&path).is_err())
        });
    let entry = match model {
        ModelRef::Path(path) => {
            return Err(failure!(BadRequest, "{} is a path: there is nothing to fetch", path.display())
            .hint("name a catalogue id, hf:OWNER/REPOSITORY/FILE.gguf or an https address; --from takes the file itself from a path"));
        }
        ModelRef::Id(id) => {
            let entry = catalogue.get(id);
            Some(entry.ok_or_else(|| not_resolved(&catalogue.unknown(id)))?)
        }
        _ => None,
    };
    // TLS checks the dates of servers' certificates, and its clock does not begin before 1970.
    if options.from.is_none() && now_ms() == 0 {
        return Err(
            Failure::new(Kind::Host, "this machine's clock is before 1970")
                .hint("set it, for example with `timedatectl set-ntp true`"),
        );
    }
    let cancel = cancel_on_interrupt()?;
    let progress = Progress::new("pulling");
    let size = entry.map_or_else(String::new, |e| format!(" ({})", bytes(e.bytes)));
    let mut fetched = false;
    let mut tell = |event: PullEvent<'_>| match event {
        PullEvent::Waiting => note("another process is pulling this model; waiting for it"),
        PullEvent::Trying(source) => {
            if let Some(entry) = entry.filter(|_| !fetched) {
                note(licence(entry));
            }
            fetched = true;
            note(format!("pulling {model}{size} from {source}"));
        }
        PullEvent::Progress { done, total } => progress.set(done, total),
        PullEvent::Busy { status, wait } => note(format!(
            "the server is busy (status {status}): asking again in {} s",
            wait.as_secs_f32().ceil()
        )),
        PullEvent::Failed(source, error) => note(format!("not from {source}: {error}")),
        _ => {}
    };
    let pulled = match entry {
        Some(entry) => pull(entry, &options, &cancel, &mut tell),
        None => pull_reference(model, request.sha256, &options, &cancel, &mut tell),
    };
    drop(progress);
    let path = pulled.map_err(|error| match error {
        PullError::Cancelled => Failure::new(Kind::Interrupted, "stopped; nothing is half-written")
            .hint("the same command resumes where it stopped, if the source allows it"),
        PullError::NoSource { ref file, ref failures, .. } => {
            let busy = busy(failures);
            let own = busy.clone().or_else(|| closed(failures)).or_else(|| replaced(entry?, &options.models, failures));
            let hint = own.unwrap_or_else(|| match entry {
                Some(_) => format!("connect this machine to the network and try again, or bring the file {file} here and run `hearthnet model pull {model} --from FILE`"),
                None => "check the name and the network; HF_ENDPOINT names another hub".to_owned(),
            });
            // The reasons were printed as each source failed.
            let why = match busy {
                Some(_) => "the server is busy",
                None => "no source has it",
            };
            failure!(Model, "model {model} could not be fetched: {why}").hint(hint)
        }
        PullError::NotFirst(_) | PullError::SplitDigest => {
            Failure::new(Kind::BadRequest, error.to_string())
        }
        PullError::Unprotected(_) => Failure::new(Kind::BadRequest, error.to_string())
            .hint("`sha256sum FILE` where the file is good prints what --sha256 takes"),
        other => Failure::new(Kind::Model, other.to_string()),
    })?;
    let file = open_file(&path)?;
    let what = "hashing the model";
    let manifest = match (entry, fetched) {
        // The record may belong to an earlier file of the same name.
        (None, true) => Progress::during(what, |set| file.accept(set)),
        (entry, _) => {
            let expected = entry.map(ModelEntry::expected);
            Progress::during(what, |set| file.check(expected, set)).map_err(|e| changed(&e))?
        }
    };
    let weights = manifest.weights_id();
    if let Some(entry) = entry {
        keep_pin(global, entry, &options.models, &file, weights)?;
    }
    compare_text(global, model, &file, weights);
    Ok(path)
}

/// Warns if hosts of the community serve the same weights with another tokenizer or chat template.
fn compare_text(global: &Global, model: &ModelRef, file: &ModelFile, weights: WeightsId) {
    if let Some(home) = capacity::community(global)
        && let Ok(text) = file.gguf().text_id()
    {
        let given = HostCapacity::of(&home.state(), home.key.id(), 0, now_ms());
        let others = given.with_other_text(weights, text);
        if !others.is_empty() {
            note(other_text(&model.to_string(), &others));
        }
    }
}

/// Licence notice, printed before the download.
fn licence(entry: &ModelEntry) -> String {
    let license = &entry.license;
    match &entry.terms {
        Some(terms) => format!("licence: {license}; the user of the model accepts {terms}"),
        None => format!("licence: {license}"),
    }
}

/// Hint if a server refused temporarily.
fn busy(failures: &[(Source, SourceError)]) -> Option<String> {
    failures.iter().find_map(|(_, error)| match error {
        SourceError::Busy { retry_after, .. } => {
            let when = retry_after.map_or("later".to_owned(), |time| {
                format!("in {} s, as the server asks", time.as_secs())
            });
            Some(format!(
                "run the same command again {when}; it resumes where it stopped"
            ))
        }
        _ => None,
    })
}

/// Hint if a hub repository requires an account or an accepted licence.
fn closed(failures: &[(Source, SourceError)]) -> Option<String> {
    failures.iter().find_map(|failure| match failure {
        (Source::Hf { repository, .. }, SourceError::Status(401 | 403)) => Some(format!(
            "the repository may require you to accept its licence: do that on its page \
             (https://huggingface.co/{repository}), and set HF_TOKEN to a token of your account there"
        )),
        _ => None,
    })
}

/// Hint if a file differs from the one that this machine pulled first.
fn replaced(
    entry: &ModelEntry,
    models: &Path,
    failures: &[(Source, SourceError)],
) -> Option<String> {
    let other = failures
        .iter()
        .any(|(_, error)| matches!(error, SourceError::Contents { .. }));
    (other && entry.pinned == Pinned::FirstPull).then(|| {
        format!(
            "the first pull on this machine pinned another file. If its publisher has replaced it, \
             remove {} and pull again",
            Pin::path(models, &entry.id).display()
        )
    })
}

/// Records hash and weights at the first pull, and compares the weights with the community's hosts.
fn keep_pin(
    global: &Global,
    entry: &ModelEntry,
    models: &Path,
    file: &ModelFile,
    weights: WeightsId,
) -> Result<(), Failure> {
    if entry.weights.is_some() {
        return Ok(());
    }
    let sha256 = match entry.sha256 {
        // The pull has already compared it.
        Some(sha256) => sha256,
        None => Digest::of_all(&file.gguf().files()),
    };
    let pin = Pin { sha256, weights };
    pin.write(models, &entry.id)
        .map_err(|e| Failure::new(Kind::Host, e.to_string()))?;
    note(match entry.pinned {
        Pinned::Never => format!(
            "no reference hash is known for this model; this file is recorded and checked from now on \
             (SHA-256 {sha256}, weights {weights})"
        ),
        _ => format!("the file is the one that the catalogue pins (weights {weights})"),
    });
    let Some(home) = capacity::community(global) else {
        return Ok(());
    };
    let state = home.state();
    let served: Vec<&str> = state
        .shards(now_ms())
        .map(|advert| &advert.descriptor)
        .filter(|d| capacity::is_called(entry, &d.model_id, d.total_layers))
        .map(|d| &*d.weights_sha256)
        .collect();
    let own = weights.to_string();
    match served.iter().find(|served| **served != own) {
        Some(other) => note(format!(
            "warning: hosts of {:?} serve other weights under the name {}: {other} instead of \
             {own}. They cannot compute together: ask their owners where their file is from",
            state.name, entry.id
        )),
        None if served.is_empty() => {}
        None => note(format!("hosts of {:?} serve the same weights", state.name)),
    }
    Ok(())
}
