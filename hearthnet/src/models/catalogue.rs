//! Catalogue of models, and the folder of fetched files.

use std::path::{Path, PathBuf};

use hearthnet_files::cache::NoCacheDirectory;
use hearthnet_files::sampling::SamplingChoice;
use hearthnet_files::{Gguf, WeightsId};
use hearthnet_hub::catalogue::{Catalogue, ModelEntry, ResolveError};

use super::local_files::bytes_here;
use crate::cli::args::Global;
use crate::cli::{Failure, Kind, failure};

/// Loads the catalogue of `--catalogue`, or the built-in one, with the pins of earlier pulls.
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
            .hint("remove that file; the next pull of the model records it again")
    })
}

/// Error for an unknown or missing model, with a hint.
pub(crate) fn not_resolved(error: &ResolveError) -> Failure {
    let (kind, hint) = match error {
        ResolveError::Unknown { .. } => (
            Kind::BadRequest,
            "`hearthnet model list` shows the catalogue and what is on this machine; a directory \
             here is named with its path: ./NAME",
        ),
        ResolveError::NotPulled { .. } => (
            Kind::Model,
            "chatting over hosts needs the file, too: embedding and sampling run on this machine. It is fetched once; an interrupted download is resumed",
        ),
        ResolveError::NoFile(_) => (Kind::Model, "check the path"),
        _ => (Kind::Refused, "set HOME or XDG_CACHE_HOME"),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

/// Folder of fetched models.
pub(crate) fn models_dir() -> Result<PathBuf, Failure> {
    hearthnet_files::cache::models().map_err(no_cache)
}

pub(crate) fn no_cache(error: NoCacheDirectory) -> Failure {
    Failure::new(Kind::Refused, error.to_string()).hint("models are stored below that directory")
}

/// Catalogue entry of the file at `path`, if it is the entry's place in the cache. Returns an error
/// if the size differs.
pub(crate) fn pin<'a>(
    catalogue: &'a Catalogue,
    path: &Path,
) -> Result<Option<&'a ModelEntry>, Failure> {
    let models = models_dir()?;
    let Some(entry) = catalogue.by_path(path, &models) else {
        return Ok(None);
    };
    let found = bytes_here(path);
    if found == entry.bytes {
        // An entry with a size only does not identify the file; its record does. Nor do the hashes
        // of several files, before the first pull has recorded the one over all.
        let says = entry.sha256.is_some() || entry.weights.is_some();
        return Ok(Some(entry).filter(|_| says));
    }
    Err(failure!(
        Model,
        "{} has {found} bytes instead of {}: it is {}",
        path.display(),
        entry.bytes,
        if found < entry.bytes {
            "truncated"
        } else {
            "another file"
        }
    )
    .code("model_changed")
    .hint(format!(
        "`hearthnet model pull {}` fetches it again",
        entry.id
    )))
}

/// Default sampling of a model: from the catalogue, else from the file, else the usual values.
pub(crate) fn sampling(catalogue: &Catalogue, weights: WeightsId, file: &Gguf) -> SamplingChoice {
    let entry = catalogue.by_weights(weights);
    let entry = entry.map_or_else(SamplingChoice::default, |entry| entry.sampling);
    let own = entry.or_models(&SamplingChoice::from_gguf(file));
    match own.is_empty() {
        true => SamplingChoice::USUAL,
        false => own,
    }
}
