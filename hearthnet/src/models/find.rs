//! Which model is meant, and where its file is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearthnet_model::cache::NoCacheDirectory;
use hearthnet_model::catalogue::{Band, Catalogue, ModelEntry, ResolveError, Resolved};
use hearthnet_model::sampler::SamplingChoice;
use hearthnet_model::{Gguf, ModelRef, WeightsId};

use super::{cache, capacity, import, pull};
use crate::args::Global;
use crate::community::{Home, now_ms};
use crate::context::Context;
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
        Failure::new(Kind::Host, e.to_string())
            .hint("without that file the next pull of the model pins it anew")
    })
}

/// The model that is meant where nobody says which.
const FALLBACK: &str = "smollm2-135m-instruct";

/// Which model a command is about: the one that it names, else `model.default`, else the one that
/// the community serves, else a small one.
pub(crate) fn pick(
    cx: &Context,
    named: Option<&ModelRef>,
    home: Option<&Home>,
) -> Result<ModelRef, Failure> {
    if let Some(named) = named.cloned().or_else(|| cx.config.model.default()) {
        return Ok(named);
    }
    let Some(home) = home else {
        return Ok(ModelRef::Id(FALLBACK.to_owned()));
    };
    let catalogue = catalogue(&cx.global)?;
    let models = models_dir()?;
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
        None => cache::with_weights(models, weights).map(|fetched| (fetched, true)),
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
        .filter(|entry| entry.weights.is_none() && capacity::is_called(entry, name, layers))?;
    let here = entry.path_in(models).is_file();
    Some((ModelRef::Id(entry.id.clone()), here))
}

/// Finds a model on this machine.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Result<Resolved, Failure> {
    if let Some(imported) = import::resolve(global, name)? {
        return Ok(imported);
    }
    let models = models_dir()?;
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
    let models = models_dir()?;
    match catalogue.resolve(name, &models) {
        Err(ResolveError::NotPulled { .. }) => {
            let path = pull::pull_model(global, &catalogue, name, pull::How::default())?;
            let resolved = catalogue.resolve(name, &models);
            resolved
                .map(|r| Resolved { path, ..r })
                .map_err(|e| not_resolved(&e))
        }
        other => other.map_err(|e| not_resolved(&e)),
    }
}

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
        _ => (Kind::Host, "set HOME or XDG_CACHE_HOME"),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

/// Where fetched models lie.
pub(crate) fn models_dir() -> Result<PathBuf, Failure> {
    hearthnet_model::cache::models().map_err(no_cache)
}

pub(crate) fn no_cache(error: NoCacheDirectory) -> Failure {
    Failure::new(Kind::Host, error.to_string()).hint("models lie below that directory")
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
