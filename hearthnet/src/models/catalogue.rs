//! What is known of models before a file is opened, and where files lie.

use std::path::{Path, PathBuf};

use hearthnet_model::cache::NoCacheDirectory;
use hearthnet_model::catalogue::{Band, Catalogue, ModelEntry, ResolveError};
use hearthnet_model::sampler::SamplingChoice;
use hearthnet_model::{Gguf, WeightsId};

use crate::args::Global;
use crate::failure::{Failure, Kind};

/// The catalogue that `--catalogue` names, or the built-in one, with what earlier pulls found out.
pub(crate) fn catalogue(global: &Global) -> Result<Catalogue, Failure> {
    let catalogue = match &global.catalogue {
        Some(path) => Catalogue::load(path),
        None => Catalogue::built_in(),
    };
    let catalogue = catalogue.map_err(|e| {
        Failure::new(Kind::Config, e.to_string()).hint("compare with config/models.toml")
    })?;
    let models = models_dir()?;
    catalogue.with_pins(&models).map_err(|e| {
        Failure::new(Kind::Refused, e.to_string())
            .hint("without that file the next pull of the model pins it anew")
    })
}

/// Why a model is not to be had, with what to do about it.
pub(crate) fn not_resolved(error: &ResolveError) -> Failure {
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
        _ => (Kind::Refused, "set HOME or XDG_CACHE_HOME"),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

/// Where fetched models lie.
pub(crate) fn models_dir() -> Result<PathBuf, Failure> {
    hearthnet_model::cache::models().map_err(no_cache)
}

pub(crate) fn no_cache(error: NoCacheDirectory) -> Failure {
    Failure::new(Kind::Refused, error.to_string()).hint("models lie below that directory")
}

/// What the catalogue says about the file at `path`, if it lies where the catalogue puts it. One
/// that broke off in the middle is refused by its size alone.
pub(crate) fn pin<'a>(
    catalogue: &'a Catalogue,
    path: &Path,
) -> Result<Option<&'a ModelEntry>, Failure> {
    let models = models_dir()?;
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
