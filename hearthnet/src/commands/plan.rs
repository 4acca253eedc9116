//! `hearthnet plan`: which node should hold which layers of a model, and how fast answers would be.
//!
//! The input is what members announced in the log (`daemon/measure.rs`) and the shape of the model.
//! Members that the running node cannot reach are left out. The command changes nothing.

use std::collections::BTreeSet;
use std::path::Path;

use hearthnet_bus::NodeId;
use hearthnet_files::WeightsId;
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::ModelEntry;
use serde_json::json;

use super::model::fit::Fit;
use crate::answering::private_layers;
use crate::cli::args::{PlanArgs, PrivateArgs};
use crate::cli::{Failure, block_on, bytes, failure, note, print_result};
use crate::config::Context;
use crate::home::{Home, now_ms};
use crate::models::adopted::part_folder;
use crate::models::catalogue::catalogue;
use crate::models::{Capacity, models_dir, open_model, pick};
use crate::node::{Running, open_home, sync_or_note};
use crate::planning::{Asked, NoPlan, Report, approximate, shape};

pub(crate) fn run(args: &PlanArgs, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    home.require_research(&cx.config)?;
    let named = pick(cx, args.model.as_ref(), Some(&home))?;
    if let Some(absent) = not_here(&named, &home, cx)? {
        let report = estimate(absent, args, &home, cx)?;
        return print_result(args.json, &report, || report.text(&named.to_string()));
    }
    let model = open_model(cx, Some(&named), Some(&home))?;
    let (unreachable, now) = (look(&home, cx)?, now_ms());
    let state = home.state();
    let hosted = private_layers::hosted(&model, PrivateArgs::default(), &cx.config)?;
    let shape = shape(&model.file, hosted);
    let asked = Asked {
        model_id: &model.id,
        weights: model.weights,
        shape: &shape,
        is_here: model.file.is_whole(),
        own: home.key.id(),
        purpose: args.purpose,
        unreachable: &unreachable,
    };
    let name = |node: &NodeId| state.label(node, now);
    let report = Report::of(&state, &asked, now, &name).map_err(|why| {
        let left_out = asked.left_out(&state, now, &name);
        if !left_out.is_empty() {
            note(format!("not reachable now: {}", left_out.join(", ")));
        }
        why.failure(&model.id, &name)
    })?;
    print_result(args.json, &report, || report.text(&named.to_string()))
}

/// Estimates a plan for a model of the catalogue of which nothing is here.
fn estimate(absent: Absent, args: &PlanArgs, home: &Home, cx: &Context) -> Result<Report, Failure> {
    let Absent { why, entry } = absent;
    let Some((entry, known)) = entry.and_then(|entry| Some((entry.clone(), entry.shape?))) else {
        return Err(why);
    };
    let (unreachable, now) = (look(home, cx)?, now_ms());
    let state = home.state();
    let inference = &cx.config.research.distributed_inference;
    let private = (
        inference.private_first_layers.0,
        inference.private_last_layers.0,
    );
    let asked = Asked {
        model_id: &entry.id,
        weights: entry.weights.unwrap_or(WeightsId([0; 32])),
        shape: &approximate(&known, entry.bytes, private),
        is_here: false,
        own: home.key.id(),
        purpose: args.purpose,
        unreachable: &unreachable,
    };
    let name = |node: &NodeId| state.label(node, now);
    Report::estimate(&state, &asked, now, &name).map_err(|no_plan| match no_plan {
        NoPlan::Impossible { .. } => no_plan.failure(&entry.id, &name),
        // Without measurements there is nothing to estimate from.
        _ => why,
    })
}

/// Takes the events of neighbours, and returns the members that cannot be reached.
fn look(home: &Home, cx: &Context) -> Result<BTreeSet<NodeId>, Failure> {
    let unreachable = block_on(async {
        sync_or_note(home, &cx.config).await;
        Ok(unreachable(&home.dir).await)
    })?;
    // Reads events that a running node has received meanwhile.
    home.log.update()?;
    Ok(unreachable)
}

/// Members that do not answer the running node. Without one, nothing is known of them.
async fn unreachable(dir: &Path) -> BTreeSet<NodeId> {
    let params = json!({ "hosts": true });
    let running = Running::ask(dir, &params).await;
    let answers = running.map(|running| running.hosts).unwrap_or_default();
    let away = answers.into_iter().filter(|(_, answers)| !answers);
    away.map(|(member, _)| member).collect()
}

/// Model of which nothing is on this machine.
struct Absent {
    /// Error, unless a plan can be estimated: a plan needs the sizes of its layers.
    why: Failure,
    /// Entry of the catalogue, if it is not adopted: nodes fetch what they need of an adopted one.
    entry: Option<ModelEntry>,
}

/// Whether a model is adopted or in the catalogue, and nothing of it is on this machine.
fn not_here(named: &ModelRef, home: &Home, cx: &Context) -> Result<Option<Absent>, Failure> {
    let ModelRef::Id(name) = named else {
        return Ok(None);
    };
    let catalogue = catalogue(&cx.global)?;
    let entry = catalogue.get(name);
    let models = models_dir()?;
    if entry.is_some_and(|entry| entry.path_in(&models).is_file()) {
        return Ok(None);
    }
    let state = home.state();
    let adopted = state.models();
    if let Some(model) = adopted.iter().find(|model| model.name == *name) {
        return Ok(part_folder(model).is_none().then(|| Absent {
            why: unknown_layers(name).hint(format!(
                "`hearthnet up` fetches what this machine needs of it, or `hearthnet model pull {name} \
                 --layers auto`; then the same command plans"
            )),
            entry: None,
        }));
    }
    let Some(entry) = entry else {
        return Ok(None);
    };
    let given = Capacity::of(cx, Some(home)).community;
    let others = adopted.iter().map(|it| (it.name.as_str(), it.file_bytes));
    let all = others.chain([(name.as_str(), entry.bytes)]);
    let fit = given.and_then(|given| Fit::of(all, given.bytes));
    Ok(Some(Absent {
        why: unknown_layers(name).hint(pull_or_adopt(name, entry.bytes, fit.as_ref())),
        entry: Some(entry.clone()),
    }))
}

fn unknown_layers(model: &str) -> Failure {
    failure!(
        Model,
        "nothing of {model} is on this machine, and a plan needs the sizes of its layers"
    )
}

/// Hint for a model of the catalogue: the commands that fetch it, and whether it would fit.
fn pull_or_adopt(model: &str, size: u64, fit: Option<&Fit>) -> String {
    let fits = fit.map_or_else(String::new, |fit| {
        format!(
            ". With it, the community's models need about {} of memory, and the homes give {} to \
             weights: {}",
            bytes(fit.needed),
            bytes(fit.given),
            match fit.fits() {
                true => "they fit",
                false => "they do not fit",
            }
        )
    });
    format!(
        "an anchor lets the homes fetch parts of it with `hearthnet model adopt {model}`; `hearthnet model \
         pull {model}` fetches its {} to this machine only{fits}",
        bytes(size)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_the_catalogue_that_is_not_here_is_told_with_what_it_needs() {
        let said = |given| {
            let fit = Fit::of([("new", 5 << 30), ("old", 1 << 30)], given);
            pull_or_adopt("new", 5 << 30, fit.as_ref())
        };
        let short = said(9 << 30);
        for part in [
            "`hearthnet model adopt new`",
            "`hearthnet model pull new` fetches its 5.0 GiB",
            "need about 10.0 GiB of memory, and the homes give 9.0 GiB to weights: they do not fit",
        ] {
            assert!(short.contains(part), "{part}: {short}");
        }
        assert!(said(10 << 30).ends_with("they fit"));
    }
}
