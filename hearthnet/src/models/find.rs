//! Chooses the model of a command, and finds its file.

use std::collections::BTreeMap;
use std::path::Path;

use hearthnet_files::WeightsId;
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::{Catalogue, ModelEntry, ResolveError, Resolved};

use super::catalogue::{catalogue, models_dir, not_resolved};
use super::{adopted, capacity, import, local_files, pull};
use crate::cli::args::{Global, PullArgs};
use crate::cli::{Failure, failure};
use crate::config::Context;
use crate::home::{Home, now_ms};

/// Model to use if none is named, configured or served.
pub(crate) const FALLBACK: &str = "smollm2-135m-instruct";

/// Model of a command: the named one, else `model.default`, else the one that the community has
/// adopted and of which a part is here, else the one that it serves, else [`FALLBACK`].
pub(crate) fn pick(
    cx: &Context,
    named: Option<&ModelRef>,
    home: Option<&Home>,
) -> Result<ModelRef, Failure> {
    if let Some(named) = named.cloned().or_else(|| cx.config.model.default.clone()) {
        return Ok(named);
    }
    let Some(home) = home else {
        return Ok(ModelRef::Id(FALLBACK.to_owned()));
    };
    let catalogue = catalogue(&cx.global)?;
    let models = models_dir()?;
    let state = home.state();
    let adopted: Vec<(ModelRef, bool)> = adopted::here(&state)
        .map(|model| (ModelRef::Id(model.name.clone()), true))
        .collect();
    if !adopted.is_empty() {
        let all = state.models();
        let names: Vec<&str> = all.iter().map(|model| model.name.as_str()).collect();
        return among(&state.name, &names, adopted);
    }
    // Keyed by weights: one model may have several names.
    let served: BTreeMap<&str, (&str, u32)> = state
        .usable_shards(now_ms())
        .map(|advert| &advert.descriptor)
        .map(|d| (&*d.weights_sha256, (&*d.model_id, d.total_layers)))
        .collect();
    let usable = served
        .iter()
        .filter_map(|(weights, shape)| here_or_known(&catalogue, &models, weights, *shape))
        .collect();
    let names: Vec<&str> = served.values().map(|(name, _)| *name).collect();
    among(&state.name, &names, usable)
}

/// Chooses among the models that a community serves (`names`). `usable` ones are in the catalogue
/// or on this machine; the flag is true for the latter. A single one on this machine is preferred.
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
        (Some(_), false) => Err(failure!(BadRequest, "{community:?} serves several models: {listed}")
        .hint("choose one with --model, or set model.default")),
        (None, _) if names.is_empty() => Ok(ModelRef::Id(FALLBACK.to_owned())),
        (None, _) => Err(failure!(Model, "{community:?} serves {listed}, which is neither in the catalogue nor on this machine")
        .hint("ask a host where the file is from, and name it: `--model` takes a path, hf:OWNER/REPOSITORY/FILE.gguf or an https address")),
    }
}

/// Local name of a served model, and whether its file is on this machine. A catalogue entry without
/// known weights is matched by name. After the fetch its weights are compared with those that hosts
/// serve.
fn here_or_known(
    catalogue: &Catalogue,
    models: &Path,
    weights: &str,
    (name, layers): (&str, u32),
) -> Option<(ModelRef, bool)> {
    let known = |entry: &ModelEntry| {
        let here = entry.path_in(models).is_file();
        (ModelRef::Id(entry.id.clone()), here)
    };
    if let Ok(weights) = weights.parse() {
        let fetched = || local_files::with_weights(models, weights).map(|fetched| (fetched, true));
        let found = catalogue.by_weights(weights).map(known).or_else(fetched);
        if found.is_some() {
            return found;
        }
    }
    let fits =
        |entry: &&ModelEntry| entry.weights.is_none() && capacity::is_called(entry, name, layers);
    catalogue.get(name).filter(fits).map(known)
}

/// Local name of a model with these weights, if there is one on this machine.
pub(crate) fn here_with(
    cx: &Context,
    home: &Home,
    weights: WeightsId,
) -> Result<Option<ModelRef>, Failure> {
    let state = home.state();
    let adopted = adopted::here(&state).find(|model| model.weights == weights.0);
    if let Some(model) = adopted {
        return Ok(Some(ModelRef::Id(model.name.clone())));
    }
    let (catalogue, models) = (catalogue(&cx.global)?, models_dir()?);
    let known = catalogue.by_weights(weights);
    let known = known.filter(|entry| entry.path_in(&models).is_file());
    let known = known.map(|entry| ModelRef::Id(entry.id.clone()));
    Ok(known.or_else(|| local_files::with_weights(&models, weights)))
}

/// Finds a model on this machine.
pub(crate) fn resolve(global: &Global, name: &ModelRef) -> Result<Resolved, Failure> {
    find(global, name, false)
}

/// Finds a model; fetches it if it is missing and can be fetched.
pub(crate) fn resolve_or_pull(global: &Global, name: &ModelRef) -> Result<Resolved, Failure> {
    find(global, name, true)
}

fn find(global: &Global, name: &ModelRef, may_pull: bool) -> Result<Resolved, Failure> {
    if let Some(imported) = import::resolve(global, name)? {
        return Ok(imported);
    }
    if let Some(part) = adopted::resolve(global, name)? {
        return Ok(part);
    }
    let (catalogue, models) = (catalogue(global)?, models_dir()?);
    let found = match catalogue.resolve(name, &models) {
        Err(ResolveError::NotPulled { .. }) if may_pull => {
            let path = pull::pull_model(global, &catalogue, name, PullArgs::default())?;
            let resolved = catalogue.resolve(name, &models);
            resolved.map(|resolved| Resolved { path, ..resolved })
        }
        found => found,
    };
    found.map_err(|e| not_resolved(&e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Kind;

    #[test]
    fn without_a_name_the_only_usable_served_model_is_chosen() {
        let id = |id: &str| ModelRef::Id(id.to_owned());
        let choose = |names: &[&str], usable: Vec<(ModelRef, bool)>| among("Elm", names, usable);
        // No host serves a model yet.
        assert_eq!(choose(&[], vec![]).unwrap(), id(FALLBACK));
        assert_eq!(choose(&["a"], vec![(id("a"), false)]).unwrap(), id("a"));
        // Models that could not run here are not a choice.
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
