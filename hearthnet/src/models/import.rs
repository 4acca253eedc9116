//! Hugging Face directories as models: each is converted to a model file in the user's cache, once
//! for each weight type.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_files::TensorType;
use hearthnet_files::hugging_face::{self, Directory, ImportError};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;

use crate::cli::args::Global;
use crate::cli::{Failure, Kind, Progress, cancel_on_interrupt, failure, note};
use crate::models::catalogue::models_dir;

/// Model file of a directory; `None` if the name is not a directory.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Result<Option<Resolved>, Failure> {
    match name {
        ModelRef::Path(path) if path.is_dir() => {
            let path = cached(path, dtype(global)?)?;
            let id = path.file_stem();
            let id = id.ok_or_else(|| Failure::internal("a converted model has no name"))?;
            let id = id.to_string_lossy().into_owned();
            Ok(Some(Resolved { path, id }))
        }
        _ if global.quantize.is_some() => Err(failure!(
            BadRequest,
            "--quantize is for Hugging Face directories, and {name} is not one"
        )
        .hint("`hearthnet model convert` writes a model file with another weight type")),
        _ => Ok(None),
    }
}

/// Runs `hearthnet model import`; returns the path of the file.
pub(crate) fn run(
    global: &Global,
    directory: &Path,
    output: Option<&Path>,
) -> Result<PathBuf, Failure> {
    let dtype = dtype(global)?;
    let Some(output) = output else {
        return cached(directory, dtype);
    };
    let fail = |error| failure(directory, error);
    if output.exists() {
        return Err(fail(ImportError::Exists(output.to_owned())));
    }
    let cancel = cancel_on_interrupt()?;
    let model = Directory::open(directory).map_err(fail)?;
    let written = Progress::during("reading the directory", |set| {
        model.write(dtype, output, &cancel, set)
    });
    written.map_err(fail)?;
    Ok(output.to_owned())
}

/// Weight type of `--quantize`.
fn dtype(global: &Global) -> Result<Option<TensorType>, Failure> {
    global.quantize.as_deref().map(weight_type).transpose()
}

/// Path of the file in the cache; converts the directory if it is missing.
fn cached(directory: &Path, dtype: Option<TensorType>) -> Result<PathBuf, Failure> {
    let fail = |error| failure(directory, error);
    let models = models_dir()?;
    let place = hugging_face::place(directory, dtype, &models).map_err(fail)?;
    let cancel = match place.is_file() {
        true => Arc::default(),
        false => {
            let shown = (directory.display(), place.display());
            note(format!("reading {} into {}", shown.0, shown.1));
            cancel_on_interrupt()?
        }
    };
    Progress::during("reading the directory", |set| {
        hugging_face::import(directory, dtype, &models, &cancel, set)
    })
    .map_err(fail)
}

fn failure(directory: &Path, error: ImportError) -> Failure {
    let text = format!("{}: {error}", directory.display());
    match error {
        ImportError::Cancelled => {
            Failure::new(Kind::Interrupted, "stopped; nothing is left behind")
        }
        ImportError::Exists(_) => Failure::new(Kind::Config, error.to_string())
            .hint("name a file that does not exist yet"),
        ImportError::File(error) => Failure::new(Kind::Host, error.to_string()),
        ImportError::Write(_) => Failure::new(Kind::Host, text),
        _ => Failure::new(Kind::Model, text)
            .hint("a directory as `transformers` saves it is read: config.json, *.safetensors, tokenizer.json or tokenizer.model"),
    }
}

/// Finds a writable weight type by name.
pub(crate) fn weight_type(name: &str) -> Result<TensorType, Failure> {
    let known = TensorType::WRITABLE;
    known
        .into_iter()
        .find(|dtype| dtype.name().to_lowercase() == name)
        .ok_or_else(|| {
            let names = TensorType::names(known).to_lowercase();
            failure!(Config, "there is no weight type {name:?}").hint(format!("use one of {names}"))
        })
}
