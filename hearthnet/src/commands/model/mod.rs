//! `hearthnet model`: how models are named and found, the catalogue, pulling, looking into files,
//! converting. What lies in the cache, and in which state, is in `store.rs`; where a model could run,
//! in `room.rs`.

mod import;
mod room;
mod store;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_model::cache::NoCacheDirectory;
use hearthnet_model::catalogue::{
    Band, Catalogue, ModelEntry, Pinned, ResolveError, Resolved, Source,
};
use hearthnet_model::convert::{ConvertError, convert};
use hearthnet_model::inspect::{container, inspect};
use hearthnet_model::manifest::{ChangedError, FileState, file_state};
use hearthnet_model::pins::Pin;
use hearthnet_model::pull::{PullError, PullEvent, PullOptions, SourceError, pull, pull_reference};
use hearthnet_model::sampler::SamplingChoice;
use hearthnet_model::{Digest, Gguf, ModelError, ModelFile, ModelRef, TensorType, WeightsId};

use crate::args::{Global, ModelCommand};
use crate::commands::{open_file, print_bytes, print_json, runtime};
use crate::community::{Home, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::output::{Progress, bytes, note};

pub(crate) fn run(command: ModelCommand, global: &Global, config: &Config) -> Result<(), Failure> {
    match command {
        ModelCommand::Pull {
            model,
            from,
            sha256,
            force,
        } => {
            let how = How {
                from,
                sha256,
                force,
            };
            let path = pull_model(global, &catalogue(global)?, &model, how)?;
            print_bytes(format!("{}\n", path.display()).as_bytes())
        }
        ModelCommand::List { json } => {
            store::list(&catalogue(global)?, &room::Room::of(global, config), json)
        }
        ModelCommand::Rm { model, yes } => store::remove(&catalogue(global)?, &model, yes),
        ModelCommand::Verify {
            model,
            accept,
            json,
        } => store::verify(
            &catalogue(global)?,
            &resolve(global, &model)?.path,
            accept,
            json,
        ),
        ModelCommand::Inspect { model, json } => {
            let resolved = resolve(global, &model)?;
            let file = match ModelFile::open(&resolved.path) {
                Ok(file) => file,
                Err(error) => return Err(inspect_container(&resolved.path, &error, json)),
            };
            let mut progress = Progress::new("hashing");
            let weights = file
                .manifest(&mut |done, total| progress.set(done, total))
                .weights_id();
            let inspection = inspect(&file, weights);
            drop(progress);
            if json {
                print_json(&inspection)
            } else {
                print_bytes(format!("{inspection}").as_bytes())
            }
        }
        ModelCommand::Import { directory, output } => {
            let path = import::run(global, &directory, output.as_deref())?;
            print_bytes(format!("{}\n", path.display()).as_bytes())
        }
        ModelCommand::Convert { model, to, output } => {
            let resolved = resolve(global, &model)?;
            convert_file(&resolved.path, &to, &output)
        }
    }
}

/// Shows what there is to see of a file whose model cannot be run.
fn inspect_container(path: &Path, error: &ModelError, json: bool) -> Failure {
    let failure = Failure::new(Kind::Model, format!("{}: {error}", path.display())).hint(
        "`hearthnet model list` names models that run; a fresh `hearthnet model pull` replaces a \
         broken file",
    );
    let Ok(gguf) = Gguf::open(path) else {
        return failure;
    };
    let container = container(&gguf, Some(path));
    match json {
        true => match serde_json::to_value(&container) {
            Ok(found) => failure.beside(found),
            Err(_) => failure,
        },
        false => match print_bytes(container.to_string().as_bytes()) {
            Ok(()) => failure,
            Err(closed) => closed,
        },
    }
}

/// The catalogue that `--catalogue` names, or the built-in one, with what earlier pulls found out.
pub(crate) fn catalogue(global: &Global) -> Result<Catalogue, Failure> {
    let catalogue = match &global.catalogue {
        Some(path) => Catalogue::load(path),
        None => Catalogue::built_in(),
    };
    let catalogue = catalogue.map_err(|e| {
        Failure::new(Kind::Config, e.to_string()).hint("compare with config/models.toml")
    })?;
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    catalogue.with_pins(&models).map_err(|e| {
        Failure::new(Kind::Host, e.to_string())
            .hint("without that file the next pull of the model pins it anew")
    })
}

/// The model that is meant where nobody says which.
const FALLBACK: &str = "smollm2-135m-instruct";

/// Which model a command is about: the one that it names, else `model.default`, else the one that
/// the community serves, else a small one.
pub(crate) fn pick(
    global: &Global,
    config: &Config,
    named: Option<&ModelRef>,
    home: Option<&Home>,
) -> Result<ModelRef, Failure> {
    if let Some(named) = named.cloned().or_else(|| config.model.default()) {
        return Ok(named);
    }
    let Some(home) = home else {
        return Ok(ModelRef::Id(FALLBACK.to_owned()));
    };
    let catalogue = catalogue(global)?;
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    let state = home.state();
    // By weights: two names of one model are one model.
    let served: BTreeMap<&str, (&str, u32)> = state
        .shards(now_ms())
        .map(|advert| &advert.descriptor)
        .map(|d| (&*d.weights_sha256, (&*d.model_id, d.total_layers)))
        .collect();
    let usable = served
        .iter()
        .filter_map(|(weights, (name, layers))| {
            here_or_known(&catalogue, &models, weights)
                .or_else(|| known_by_name(&catalogue, &models, name, *layers))
        })
        .collect();
    let names: Vec<&str> = served.values().map(|(name, _)| *name).collect();
    among(&state.name, &names, usable)
}

/// The one model of those that a community serves (`names`). Of `usable` ones it is told whether
/// they are on this machine: the only one that is needs no further choice.
fn among(
    community: &str,
    names: &[&str],
    mut usable: Vec<(ModelRef, bool)>,
) -> Result<ModelRef, Failure> {
    if usable.iter().filter(|(_, here)| *here).count() == 1 {
        usable.retain(|(_, here)| *here);
    }
    let listed = names.join(", ");
    match (usable.pop(), usable.is_empty()) {
        (Some((only, _)), true) => Ok(only),
        (Some(_), false) => Err(Failure::new(
            Kind::BadRequest,
            format!("{community:?} serves several models: {listed}"),
        )
        .hint("say which with --model, or set model.default")),
        (None, _) if names.is_empty() => Ok(ModelRef::Id(FALLBACK.to_owned())),
        (None, _) => Err(Failure::new(
            Kind::Model,
            format!("{community:?} serves {listed}, which is neither in the catalogue nor on this machine"),
        )
        .hint("ask a host where the file is from, and name it: `--model` takes a path, hf:OWNER/REPOSITORY/FILE.gguf or an https address")),
    }
}

/// How a model of these weights is called here, and whether its file is on this machine.
fn here_or_known(catalogue: &Catalogue, models: &Path, weights: &str) -> Option<(ModelRef, bool)> {
    let weights = weights.parse().ok()?;
    match catalogue.by_weights(weights) {
        Some(entry) => {
            let here = entry.path_in(models).is_file();
            Some((ModelRef::Id(entry.id.clone()), here))
        }
        None => store::with_weights(models, weights).map(|fetched| (fetched, true)),
    }
}

/// The same of an entry whose weights nobody here has seen: it goes by what hosts call it. What is
/// then fetched is compared with what they serve.
fn known_by_name(
    catalogue: &Catalogue,
    models: &Path,
    name: &str,
    layers: u32,
) -> Option<(ModelRef, bool)> {
    let entry = catalogue
        .get(name)
        .filter(|entry| entry.weights.is_none() && room::is_called(entry, name, layers))?;
    let here = entry.path_in(models).is_file();
    Some((ModelRef::Id(entry.id.clone()), here))
}

/// Finds a model on this machine.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Result<Resolved, Failure> {
    if let Some(imported) = import::resolve(global, name)? {
        return Ok(imported);
    }
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    catalogue(global)?
        .resolve(name, &models)
        .map_err(|e| not_resolved(&e))
}

/// The same, fetching it first when that is possible and this machine has it not.
pub(crate) fn resolve_or_pull(global: &Global, name: &ModelRef) -> Result<Resolved, Failure> {
    if let Some(imported) = import::resolve(global, name)? {
        return Ok(imported);
    }
    let catalogue = catalogue(global)?;
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    match catalogue.resolve(name, &models) {
        Err(ResolveError::NotPulled { .. }) => {
            let path = pull_model(global, &catalogue, name, How::default())?;
            let resolved = catalogue.resolve(name, &models);
            resolved
                .map(|r| Resolved { path, ..r })
                .map_err(|e| not_resolved(&e))
        }
        other => other.map_err(|e| not_resolved(&e)),
    }
}

fn not_resolved(error: &ResolveError) -> Failure {
    let (kind, hint) = match error {
        ResolveError::Unknown { .. } => (
            Kind::BadRequest,
            "`hearthnet model list` shows the catalogue and what is on this machine; a directory \
             here is named with its path: ./NAME",
        ),
        ResolveError::NotPulled { .. } => (
            Kind::Model,
            "who only chats needs the file, too: the words go in and come out on this machine. It is \
             fetched once, and goes on where it broke off",
        ),
        ResolveError::NoFile(_) => (Kind::Model, "check the path"),
        _ => (Kind::Host, "set HOME or XDG_CACHE_HOME"),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

fn host_failure(error: NoCacheDirectory) -> Failure {
    Failure::new(Kind::Host, error.to_string()).hint("models lie below that directory")
}

/// How a model is to be fetched.
#[derive(Debug, Default)]
struct How {
    from: Option<PathBuf>,
    sha256: Option<Digest>,
    force: bool,
}

/// Fetches a model, wherever it is named to be, and has its file looked at.
fn pull_model(
    global: &Global,
    catalogue: &Catalogue,
    model: &ModelRef,
    how: How,
) -> Result<PathBuf, Failure> {
    let mut options = PullOptions::from_environment().map_err(host_failure)?;
    options.from = how.from;
    // What was fetched and has changed since, is not what was fetched.
    let place = model.place().map(|place| options.models.join(place));
    options.again = how.force
        || place.is_some_and(|path| {
            path.is_file()
                && (file_state(&path) == FileState::Changed || ModelFile::open(&path).is_err())
        });
    let id = match model {
        ModelRef::Path(path) => {
            return Err(Failure::new(
                Kind::BadRequest,
                format!("{} is a path: there is nothing to fetch", path.display()),
            )
            .hint("name a catalogue id, hf:OWNER/REPOSITORY/FILE.gguf or an https address; --from takes the file itself from a path"));
        }
        ModelRef::Id(id) => Some(id),
        _ => None,
    };
    let entry = id
        .map(|id| {
            catalogue
                .get(id)
                .ok_or_else(|| not_resolved(&catalogue.unknown(id)))
        })
        .transpose()?;
    let cancel = cancel_on_interrupt()?;
    let mut progress = Progress::new("pulling");
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
        PullEvent::Failed(source, error) => note(format!("not from {source}: {error}")),
        _ => {}
    };
    let pulled = match entry {
        Some(entry) => pull(entry, &options, &cancel, &mut tell),
        None => pull_reference(model, how.sha256, &options, &cancel, &mut tell),
    };
    drop(progress);
    let path = pulled.map_err(|error| match error {
        PullError::Cancelled => Failure::new(Kind::Interrupted, "stopped; nothing is half-written")
            .hint("the same command goes on where it stopped, if the source allows it"),
        PullError::NoSource { ref file, ref failures, .. } => {
            let own = closed(failures).or_else(|| replaced(entry?, &options.models, failures));
            let hint = own.unwrap_or_else(|| match id {
                Some(id) => format!("connect this machine to the network and try again, or bring the file {file} here and run `hearthnet model pull {id} --from FILE`"),
                None => "check the name and the network; HF_ENDPOINT names another hub".to_owned(),
            });
            // Why not, was said when it was tried.
            Failure::new(Kind::Model, format!("model {model} could not be fetched: no source has it")).hint(hint)
        }
        PullError::Unprotected(_) => Failure::new(Kind::BadRequest, error.to_string())
            .hint("`sha256sum FILE` where the file is good prints what --sha256 takes"),
        other => Failure::new(Kind::Model, other.to_string()),
    })?;
    let file = open_file(&path)?;
    let mut progress = Progress::new("hashing the model");
    let mut set = |done, total| progress.set(done, total);
    match (entry, fetched) {
        // Another file of the same name may have lain there.
        (None, true) => drop(file.accept(&mut set)),
        (entry, _) => {
            let manifest = file.check(entry, &mut set).map_err(|e| changed(&e))?;
            drop(progress);
            if let Some(entry) = entry {
                keep_pin(global, entry, &options.models, &file, manifest.weights_id())?;
            }
        }
    }
    Ok(path)
}

/// What one has to know of the licence before a model comes.
fn licence(entry: &ModelEntry) -> String {
    match &entry.terms {
        Some(terms) => format!(
            "licence: {}; whoever uses the model accepts {terms}",
            entry.license
        ),
        None => format!("licence: {}", entry.license),
    }
}

/// What to do where a repository of the hub is not open to whoever asks.
fn closed(failures: &[(Source, SourceError)]) -> Option<String> {
    failures.iter().find_map(|failure| match failure {
        (Source::Hf { repository, .. }, SourceError::Status(401 | 403)) => Some(format!(
            "the repository may want its licence accepted: do that on its page \
             (https://huggingface.co/{repository}), and set HF_TOKEN to a token of your account there"
        )),
        _ => None,
    })
}

/// What to do where a file is no longer the one that this machine pulled first.
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

/// Keeps what the first pull of a model finds out, and says what the community makes of it.
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
        // It was compared.
        Some(sha256) => sha256,
        None => Digest::of(file.gguf().bytes()),
    };
    let pin = Pin { sha256, weights };
    pin.write(models, &entry.id)
        .map_err(|e| Failure::new(Kind::Host, e.to_string()))?;
    note(match entry.pinned {
        Pinned::Never => format!(
            "nobody says what this file must be: from now on it must be this one here \
             (SHA-256 {sha256}, weights {weights})"
        ),
        _ => format!("the file is the one that the catalogue pins (weights {weights})"),
    });
    let Some(home) = room::community(global) else {
        return Ok(());
    };
    let state = home.state();
    let served: Vec<&str> = state
        .shards(now_ms())
        .map(|advert| &advert.descriptor)
        .filter(|d| room::is_called(entry, &d.model_id, d.total_layers))
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

/// A file that is not what it was.
pub(crate) fn changed(error: &ChangedError) -> Failure {
    let path = error.path.display();
    let hint = match error.pinned {
        true => "`hearthnet model pull` of its id fetches it again".to_owned(),
        false => format!(
            "restore it from a copy or fetch it again (`hearthnet model pull --force`); \
             `hearthnet model verify {path} --accept` takes it as it is now"
        ),
    };
    Failure::new(Kind::Model, error.to_string())
        .code("model_changed")
        .hint(hint)
}

/// A flag that Ctrl-C and SIGTERM set.
fn cancel_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let runtime = runtime()?;
    let (seen, cancel) = (Arc::clone(&flag), hearthnet_orchestrator::Cancel::default());
    crate::signals::watch_interrupt(&runtime, cancel.clone());
    std::thread::spawn(move || {
        // The runtime lives here for as long as the program does: it waits for the signals.
        runtime.block_on(cancel.cancelled());
        seen.store(true, Ordering::Release);
        runtime.block_on(std::future::pending::<()>());
    });
    Ok(flag)
}

/// The weight type of that name, of those that can be written.
fn weight_type(name: &str) -> Result<TensorType, Failure> {
    let known = TensorType::WRITABLE;
    known
        .into_iter()
        .find(|dtype| dtype.name().to_lowercase() == name)
        .ok_or_else(|| {
            let names = TensorType::names(known).to_lowercase();
            Failure::new(Kind::Config, format!("there is no weight type {name:?}"))
                .hint(format!("use one of {names}"))
        })
}

fn convert_file(source: &Path, to: &str, output: &Path) -> Result<(), Failure> {
    let dtype = weight_type(to)?;
    let file = open_file(source)?;
    let cancel = cancel_on_interrupt()?;
    let mut progress = Progress::new("converting");
    let done = convert(&file, dtype, output, &cancel, &mut |d, t| {
        progress.set(d, t);
    });
    drop(progress);
    done.map_err(|error| match error {
        ConvertError::Cancelled => {
            Failure::new(Kind::Interrupted, "stopped; nothing is left behind")
        }
        ConvertError::Exists(_) => Failure::new(Kind::Config, error.to_string())
            .hint("name a file that does not exist yet"),
        other => Failure::new(Kind::Host, other.to_string()),
    })?;
    print_bytes(format!("{}\n", output.display()).as_bytes())
}

/// What the catalogue says about the file at `path`, if it lies where the catalogue puts it. One
/// that broke off in the middle is refused by its size alone.
pub(crate) fn pin<'a>(
    catalogue: &'a Catalogue,
    path: &Path,
) -> Result<Option<&'a ModelEntry>, Failure> {
    let models = hearthnet_model::cache::models().map_err(host_failure)?;
    let Some(entry) = catalogue.by_path(path, &models) else {
        return Ok(None);
    };
    let found = std::fs::metadata(path).map_or(0, |info| info.len());
    if found == entry.bytes {
        // One that says no more than the size leaves the rest to the record of the file.
        let says = entry.sha256.is_some() || entry.weights.is_some();
        return Ok(Some(entry).filter(|_| says));
    }
    Err(Failure::new(
        Kind::Model,
        format!(
            "{} has {found} bytes instead of {}: it is {}",
            path.display(),
            entry.bytes,
            if found < entry.bytes {
                "truncated"
            } else {
                "another file"
            }
        ),
    )
    .code("model_changed")
    .hint(format!(
        "`hearthnet model pull {}` fetches it again",
        entry.id
    )))
}

/// The bands of a model's boundaries, where the catalogue has them.
pub(crate) fn bands(catalogue: &Catalogue, weights: WeightsId) -> Option<Vec<Band>> {
    let entry = catalogue.by_weights(weights)?;
    entry.boundary_magnitude.clone()
}

/// How the model's tokens are chosen where nobody says: as the catalogue has it, else the file,
/// else as is usual.
pub(crate) fn sampling(catalogue: &Catalogue, weights: WeightsId, file: &Gguf) -> SamplingChoice {
    let entry = catalogue.by_weights(weights);
    let entry = entry.map_or_else(SamplingChoice::default, |entry| entry.sampling);
    let own = entry.or_models(&SamplingChoice::from_gguf(file));
    match own.is_empty() {
        true => SamplingChoice::USUAL,
        false => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_name_it_is_the_one_model_that_the_community_serves_and_is_here_or_known() {
        let id = |id: &str| ModelRef::Id(id.to_owned());
        let choose = |names: &[&str], usable: Vec<(ModelRef, bool)>| among("Elm", names, usable);
        // Nobody serves anything yet.
        assert_eq!(choose(&[], vec![]).unwrap(), id(FALLBACK));
        assert_eq!(choose(&["a"], vec![(id("a"), false)]).unwrap(), id("a"));
        // What nobody here could run leaves no choice to make.
        assert_eq!(
            choose(&["a", "x"], vec![(id("a"), false)]).unwrap(),
            id("a")
        );
        let one_here = vec![(id("a"), false), (id("b"), true)];
        assert_eq!(choose(&["a", "b"], one_here).unwrap(), id("b"));
        for usable in [
            vec![(id("a"), true), (id("b"), true)],
            vec![(id("a"), false), (id("b"), false)],
        ] {
            let failure = choose(&["a", "b"], usable).unwrap_err();
            assert_eq!(failure.kind, Kind::BadRequest);
            assert!(failure.to_string().contains("a, b"), "{failure}");
        }
        let failure = choose(&["x"], vec![]).unwrap_err();
        assert_eq!(failure.kind, Kind::Model);
        assert!(failure.to_string().contains("serves x"), "{failure}");
    }
}
