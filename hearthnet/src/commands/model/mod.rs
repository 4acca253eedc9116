//! `hearthnet model`: pulls, lists, inspects, verifies and converts models.

pub(super) mod adopt;
mod adopted;
pub(super) mod fit;
mod list;
mod part;
mod remove;
mod verify;

use std::fmt::Display;
use std::path::Path;

use hearthnet_bus::log::Adoption;
use hearthnet_engine::LoadError;
use hearthnet_files::convert::{ConvertError, convert};
use hearthnet_files::part::{open_model, part_folder};
use hearthnet_files::{Gguf, ModelError};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;
use hearthnet_tokens::inspect::{container, inspect};
use serde::Serialize;
use serde_json::json;

use crate::cli::args::ModelCommand;
use crate::cli::{
    Failure, Kind, Progress, block_on, cancel_on_interrupt, failure, print, print_result,
};
use crate::config::Context;
use crate::home::Home;
use crate::models::adopted::{named, resolved};
use crate::models::capacity::community;
use crate::models::catalogue::catalogue;
use crate::models::open_file::{open_file, require_whole};
use crate::models::{Capacity, import, pull_model, resolve, weight_type};
use crate::node::{Holdings, Running, open_home};

/// Runs a command. For a command that only reads, `adopted` is the adopted model that it names: its
/// sandbox denies the log, which has the names.
pub(crate) fn run(
    command: ModelCommand,
    adopted: Option<&Adoption>,
    cx: &Context,
) -> Result<(), Failure> {
    let file = |model: &ModelRef| -> Result<Resolved, Failure> {
        match adopted.map(resolved).transpose()?.flatten() {
            Some(part) => Ok(part),
            None => resolve(&cx.global, model),
        }
    };
    match command {
        ModelCommand::Pull { model, options } => {
            if let Some(layers) = options.layers {
                return part::pull(&model, layers, options.from, cx);
            }
            let path = pull_model(&cx.global, &catalogue(&cx.global)?, &model, options)?;
            print(format!("{}\n", path.display()))
        }
        ModelCommand::List { json } => {
            let (catalogue, home) = (catalogue(&cx.global)?, community(&cx.global));
            let capacity = Capacity::of(cx, home.as_ref());
            let holdings = match &home {
                Some(home) => block_on(holdings(home))?,
                None => None,
            };
            let state = home.map(|home| home.state());
            list::list(
                &catalogue,
                &capacity,
                state.as_deref(),
                holdings.as_ref(),
                json,
            )
        }
        ModelCommand::Adopt { model, cache, json } => {
            adopt::run(&model, cache, &open_home(cx)?, cx, json)
        }
        ModelCommand::Drop { model, json } => adopt::drop_model(&model, &open_home(cx)?, cx, json),
        ModelCommand::Rm { model, yes } => match named(&cx.global, &model) {
            Some(adopted) => part::remove(&adopted, cx, yes),
            None => remove::remove(&catalogue(&cx.global)?, &model, yes),
        },
        ModelCommand::Verify {
            model,
            accept,
            json,
        } => {
            let path = file(&model)?.path;
            match part_folder(&path) {
                Some(folder) => part::verify(&folder, adopted, accept, json),
                None => verify::verify(&catalogue(&cx.global)?, &path, accept, json),
            }
        }
        ModelCommand::Inspect { model, json } => {
            let path = file(&model)?.path;
            let file = match open_model(&path) {
                Ok(file) => file,
                Err(error) => return Err(inspect_container(&path, &error, json)),
            };
            let manifest = Progress::during("hashing", |set| file.manifest(set));
            let mut inspection = inspect(&file, manifest.weights_id());
            let broken = Progress::during("reading the weights", |set| file.not_finite(set));
            if let Some(tensor) = broken {
                inspection.chat_refused = Some(LoadError::NotFinite(tensor.to_owned()).to_string());
            }
            let Some(why) = &inspection.chat_refused else {
                return print_result(json, &inspection, || inspection.to_string());
            };
            let refused = failure!(Model, "chat: not with this file: {why}").hint(
                "a fresh `hearthnet model pull` replaces a broken file; otherwise ask its publisher for a corrected one",
            );
            Err(shown_beside(refused, &inspection, json))
        }
        ModelCommand::Import { directory, output } => {
            let path = import::run(&cx.global, &directory, output.as_deref())?;
            print(format!("{}\n", path.display()))
        }
        ModelCommand::Convert { model, to, output } => convert_file(&file(&model)?, &to, &output),
    }
}

/// Layers of the adopted models on the disks of members that the running node reaches; `None` if no node
/// runs.
async fn holdings(home: &Home) -> Result<Option<Holdings>, Failure> {
    let asked = json!({ "holdings": true });
    let running = Running::ask(&home.dir, &asked).await;
    Ok(running.and_then(|running| running.holdings))
}

/// Shows the container of a file whose model cannot be run.
fn inspect_container(path: &Path, error: &ModelError, json: bool) -> Failure {
    let failure = failure!(Model, "{}: {error}", path.display()).hint(
        "`hearthnet model list` names models that run; a fresh `hearthnet model pull` replaces a \
         broken file",
    );
    let Ok(gguf) = Gguf::open(path) else {
        return failure;
    };
    shown_beside(failure, &container(&gguf, Some(path)), json)
}

/// Prints what could be read of the file, then returns the failure.
fn shown_beside(failure: Failure, shown: &(impl Serialize + Display), json: bool) -> Failure {
    match json {
        true => match serde_json::to_value(shown) {
            Ok(found) => failure.beside(found),
            Err(_) => failure,
        },
        false => match print(shown.to_string()) {
            Ok(()) => failure,
            Err(closed) => closed,
        },
    }
}

fn convert_file(source: &Resolved, to: &str, output: &Path) -> Result<(), Failure> {
    let dtype = weight_type(to)?;
    let file = open_file(&source.path)?;
    require_whole(&source.id, &file)?;
    let source = &source.path;
    let cancel = cancel_on_interrupt()?;
    let done = Progress::during("converting", |set| {
        convert(&file, dtype, output, &cancel, set)
    });
    done.map_err(|error| match error {
        ConvertError::Cancelled => {
            Failure::new(Kind::Interrupted, "stopped; nothing is left behind")
        }
        ConvertError::Exists(_) => Failure::new(Kind::Config, error.to_string())
            .hint("name a file that does not exist yet"),
        other @ (ConvertError::Tensor { .. } | ConvertError::Model(_)) => {
            failure!(Model, "{}: {other}", source.display())
                .hint("`hearthnet model inspect` says more; a fresh `hearthnet model pull` replaces a broken file")
        }
        other => Failure::new(Kind::Host, other.to_string()),
    })?;
    print(format!("{}\n", output.display()))
}
