//! `hearthnet model`: the catalogue, pulling, looking into files, converting.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_model::catalogue::{Band, Catalogue, ModelEntry, Resolved};
use hearthnet_model::convert::{ConvertError, convert};
use hearthnet_model::inspect::inspect;
use hearthnet_model::pull::{PullError, PullEvent, PullOptions, pull};
use hearthnet_model::{TensorType, WeightsId};

use crate::args::{Global, ModelCommand};
use crate::commands::{open_file, print_bytes, print_json, runtime};
use crate::failure::{Failure, Kind};
use crate::output::{Progress, bytes, note, table};

pub(crate) fn run(command: ModelCommand, global: &Global) -> Result<(), Failure> {
    match command {
        ModelCommand::Pull { model, from } => {
            let catalogue = catalogue(global)?;
            let entry = catalogue
                .get(&model)
                .ok_or_else(|| failure(catalogue.unknown(&model)))?;
            let path = pull_entry(entry, from)?;
            print_bytes(format!("{}\n", path.display()).as_bytes())
        }
        ModelCommand::List => list(&catalogue(global)?),
        ModelCommand::Inspect { model, json } => {
            let resolved = resolve(global, &model)?;
            let file = open_file(&resolved.path)?;
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
        ModelCommand::Convert { model, to, output } => {
            let resolved = resolve(global, &model)?;
            convert_file(&resolved.path, &to, &output)
        }
    }
}

/// The catalogue that `--catalogue` names, or the built-in one.
pub(crate) fn catalogue(global: &Global) -> Result<Catalogue, Failure> {
    let catalogue = match &global.catalogue {
        Some(path) => Catalogue::load(path),
        None => Catalogue::built_in(),
    };
    catalogue.map_err(|e| {
        Failure::new(Kind::Config, e.to_string()).hint("compare with config/models.toml")
    })
}

/// Finds what `--model` names on this machine.
pub(crate) fn resolve(global: &Global, name: &str) -> Result<Resolved, Failure> {
    let models = hearthnet_model::cache::models().map_err(failure)?;
    catalogue(global)?.resolve(name, &models).map_err(failure)
}

/// The same, fetching it first when the catalogue has it and this machine has not.
pub(crate) fn resolve_or_pull(global: &Global, name: &str) -> Result<Resolved, Failure> {
    let catalogue = catalogue(global)?;
    let models = hearthnet_model::cache::models().map_err(failure)?;
    match (catalogue.resolve(name, &models), catalogue.get(name)) {
        (Ok(resolved), _) => Ok(resolved),
        (Err(_), Some(entry)) => {
            let path = pull_entry(entry, None)?;
            Ok(Resolved {
                path,
                id: entry.id.clone(),
            })
        }
        (Err(error), None) => Err(failure(error)),
    }
}

fn failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(Kind::Model, error.to_string())
        .hint("`hearthnet model list` shows the catalogue and what is on this machine")
}

fn pull_entry(entry: &ModelEntry, from: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let mut options = PullOptions::from_environment().map_err(failure)?;
    options.from = from;
    let cancel = cancel_on_interrupt()?;
    let mut progress = Progress::new("pulling");
    let pulled = pull(entry, &options, &cancel, &mut |event| match event {
        PullEvent::Waiting => note("another process is pulling this model; waiting for it"),
        PullEvent::Trying(source) => {
            note(format!(
                "pulling {} ({}) from {source}",
                entry.id,
                bytes(entry.bytes)
            ));
        }
        PullEvent::Progress { done, total } => progress.set(done, total),
        PullEvent::Failed(source, error) => note(format!("not from {source}: {error}")),
        _ => {}
    });
    drop(progress);
    pulled.map_err(|error| match error {
        PullError::Cancelled => Failure::new(Kind::Interrupted, "stopped; nothing is half-written")
            .hint("the same command goes on where it stopped, if the source allows it"),
        other => Failure::new(Kind::Model, other.to_string()),
    })
}

/// A flag that Ctrl-C and SIGTERM set.
fn cancel_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let runtime = runtime()?;
    let (seen, cancel) = (Arc::clone(&flag), hearthnet_orchestrator::Cancel::default());
    crate::commands::chat::watch_interrupt(&runtime, cancel.clone());
    std::thread::spawn(move || {
        // The runtime lives here for as long as the program does: it waits for the signals.
        runtime.block_on(cancel.cancelled());
        seen.store(true, Ordering::Release);
        runtime.block_on(std::future::pending::<()>());
    });
    Ok(flag)
}

fn list(catalogue: &Catalogue) -> Result<(), Failure> {
    let models = hearthnet_model::cache::models().map_err(failure)?;
    let rows: Vec<Vec<String>> = catalogue
        .models()
        .map(|entry| {
            let here = entry.path_in(&models).is_file();
            vec![
                entry.id.clone(),
                bytes(entry.bytes),
                entry.license.clone(),
                if here { "here" } else { "not here" }.to_owned(),
                entry.name.clone(),
            ]
        })
        .collect();
    print_bytes(table(&["id", "size", "licence", "this machine", "name"], &rows).as_bytes())
}

fn convert_file(source: &Path, to: &str, output: &Path) -> Result<(), Failure> {
    let dtype: TensorType = match to {
        "f32" => TensorType::F32,
        "f16" => TensorType::F16,
        "q8_0" => TensorType::Q8_0,
        "q4_0" => TensorType::Q4_0,
        "q4_1" => TensorType::Q4_1,
        _ => {
            return Err(
                Failure::new(Kind::Config, format!("there is no weight type {to:?}"))
                    .hint("use f32, f16, q8_0, q4_0 or q4_1"),
            );
        }
    };
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

/// The bands of a model's boundaries, where the catalogue has them.
pub(crate) fn bands(catalogue: &Catalogue, weights: WeightsId) -> Option<Vec<Band>> {
    let entry = catalogue.by_weights(weights)?;
    entry.boundary_magnitude.clone()
}
