//! Parts of adopted models: `hearthnet model pull --layers`, and `verify` and `rm` of a part.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::log::Adoption;
use hearthnet_bus::node::Node;
use hearthnet_files::WeightsId;
use hearthnet_files::part::{Part, PartError, folder};
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::coverage::held_by_others;
use hearthnet_orchestrator::placement::observed::sharing;
use hearthnet_orchestrator::placement::{choose_near, room, runs_text};
use serde_json::json;

use crate::cli::args::{HostEngineArgs, Layers};
use crate::cli::{
    Failure, Kind, Progress, Stop, ask, block_on, bytes, failure, note, print, print_result,
};
use crate::config::Context;
use crate::daemon::weights::Fetcher;
use crate::home::{Home, Lock, now_ms};
use crate::hosting::host_engine::{HostEngine, no_layer_fits, no_such_layers};
use crate::models::adopted::{
    find, held_layers, holds_layer, identity, name_in_parts, part_folder,
};
use crate::models::capacity::community;
use crate::models::open_file::model_failure;
use crate::node::{open_home, sync_log, transient};

/// Time without a new link after which no other one is expected.
const SETTLES: Duration = Duration::from_secs(1);

/// Fetches layers of an adopted model, with a node for the duration of the command.
pub(super) fn pull(
    model: &ModelRef,
    layers: Layers,
    from: Option<PathBuf>,
    cx: &Context,
) -> Result<(), Failure> {
    let home = open_home(cx)?;
    home.level()?;
    if Lock::is_held(&home.dir) {
        return Err(failure!(
            Host,
            "a node runs on this machine: it fetches the layers that it serves itself"
        )
        .code("node_runs")
        .hint("`hearthnet status` shows them; to fetch others, stop it first"));
    }
    let (path, fetched) = block_on(async {
        let stop = Stop::listen(false)?;
        let node = transient::start(&home, &cx.config).await?;
        let fetched = tokio::select! {
            fetched = fetch(&home, &node, model, (layers, from), cx) => fetched,
            () = stop.asked() => {
                let why = Failure::new(Kind::Interrupted, "stopped; the fetched pieces stay");
                Err(why.hint("the same command fetches the others"))
            }
        };
        node.shutdown().await;
        fetched
    })?;
    note(format!("layers {fetched} of {model} are on this machine"));
    print(format!("{path}\n"))
}

/// Returns the path of the part, and the layers.
async fn fetch(
    home: &Home,
    node: &Node,
    model: &ModelRef,
    (layers, from): (Layers, Option<PathBuf>),
    cx: &Context,
) -> Result<(String, String), Failure> {
    sync_log(node, home).await;
    until_links_settle(node, home).await;
    let adopted = find(&model.to_string(), &home.state())?;
    let fetcher = Fetcher::of_command(home, node, &cx.config, adopted, from);
    fetcher.check_from().await?;
    let part = fetcher.part().await?;
    let (lo, hi) = match layers {
        Layers::Range(lo, hi) if hi >= fetcher.model.layers => {
            let (model, total) = (model.to_string(), fetcher.model.layers);
            return Err(no_such_layers(&model, (lo, hi), total));
        }
        Layers::Range(lo, hi) => (lo, hi),
        Layers::Auto => chosen(home, &fetcher.model, &part, cx)?,
    };
    let wanted = part.table().of_layers(lo, hi);
    fetcher.fetch(&part, wanted).await?;
    let path = part.path().display().to_string();
    Ok((path, runs_text(&[(lo, hi)])))
}

/// Waits while further members get linked: the member that the log came from may not have the model.
async fn until_links_settle(node: &Node, home: &Home) {
    let others = home.state().members().count().saturating_sub(1);
    let linked = || node.peers().iter().filter(|it| it.link.is_some()).count();
    let mut before = 0;
    while before < linked() && linked() < others {
        before = linked();
        tokio::time::sleep(SETTLES).await;
    }
}

/// Layers that this node would serve.
fn chosen(
    home: &Home,
    model: &Adoption,
    part: &Arc<Part>,
    cx: &Context,
) -> Result<(u32, u32), Failure> {
    let file = part.model_file();
    let file = file.map_err(|e| model_failure(&part.path(), e))?;
    let engine = HostEngine::of(&HostEngineArgs::default(), &cx.config)?;
    let each = engine.layer_bytes(&file)?;
    let (state, own) = (home.state(), home.key.id());
    let weights = WeightsId(model.weights);
    let models = sharing(&state, [weights]);
    let budget = engine.auto_budget(&file, &cx.config, 0)? / models;
    let room = room(budget, &each);
    let (weights, shards) = (weights.to_string(), state.usable_shards(now_ms()));
    let others = held_by_others(shards, own, &weights, model.layers);
    let here = |layer| holds_layer(part, layer);
    choose_near(model.layers, room, &others, here)
        .ok_or_else(|| no_layer_fits(&model.name, &each, budget, models > 1))
}

/// Reads all pieces that are held, and compares them with the adoption.
pub(super) fn verify(model: &Adoption, accept: bool, as_json: bool) -> Result<(), Failure> {
    let name = &model.name;
    if accept {
        return Err(failure!(
            BadRequest,
            "{name} is adopted by the community, so its file cannot be another one"
        )
        .hint("an anchor adopts another file with `hearthnet model adopt`"));
    }
    let folder = part_folder(model).ok_or_else(|| not_here(model))?;
    let part = Part::open_reading(&folder).map_err(|e| unusable(&folder.display(), &e))?;
    if *part.identity() != identity(model) {
        return Err(unusable(
            &folder.display(),
            &"this is a part of another file than the adopted one",
        ));
    }
    let claimed = part.held();
    let all = part.table().bytes(&claimed);
    let read = Progress::during("reading the part", |set| {
        let mut done = 0;
        let mut damaged = 0_u32;
        for index in claimed.iter().cloned().flatten() {
            match part.read(index)? {
                Some(piece) => done += piece.len() as u64,
                None => damaged += 1,
            }
            set(done, all);
        }
        Ok::<_, std::io::Error>(damaged)
    });
    let damaged = read.map_err(|e| Failure::file("read", &part.path(), &e))?;
    let held = part.held();
    let count: usize = held.iter().map(ExactSizeIterator::len).sum();
    let (path, pieces) = (part.path().display().to_string(), part.table().len());
    let (size, layers) = (part.table().bytes(&held), held_layers(&part, model.layers));
    let found = json!({
        "path": path,
        "weights": part.identity().weights,
        "compared_with": "adopted_model",
        "pieces": pieces,
        "pieces_held": count,
        "pieces_damaged": damaged,
        "bytes": size,
        "model_bytes": model.file_bytes,
        "layers_held": layers,
    });
    if damaged > 0 {
        return Err(failure!(
            Model,
            "{damaged} pieces of {name} were damaged on the disk and are given up; {count} of {pieces} are good"
        )
        .code("model_changed")
        .hint("`hearthnet up`, or `hearthnet model pull` with --layers, fetches them again")
        .beside(found));
    }
    print_result(as_json, &found, || {
        format!(
            "{path}\n  pieces   {count} of {pieces} are here and were read: they match the adopted model\n  \
             bytes    {} of {}\n  layers   {}\n  weights  {}\n",
            bytes(size),
            bytes(model.file_bytes),
            match layers.as_slice() {
                [] => "none is whole".to_owned(),
                whole => runs_text(whole),
            },
            part.identity().weights,
        )
    })
}

/// Removes the part of an adopted model from this machine.
pub(super) fn remove(model: &Adoption, cx: &Context, yes: bool) -> Result<(), Failure> {
    let name = &model.name;
    let dir = cx.global.dir()?;
    let folder = part_folder(model).ok_or_else(|| not_here(model))?;
    if Lock::is_held(&dir) {
        return Err(failure!(
            Host,
            "the node that runs on this machine uses its part of {name}"
        )
        .code("node_runs")
        .hint(format!(
            "stop it first; an anchor drops the model for all homes with `hearthnet model drop {name}`"
        )));
    }
    let part = match Part::open(&folder) {
        Err(error @ PartError::InUse(_)) => return Err(unusable(&name, &error)),
        opened => opened.ok(),
    };
    let size = bytes(folder::disk_bytes(&folder));
    let freed = match folder::is_shared(&folder) {
        true => {
            format!("{size} are freed: its file is another name of a file of yours, which stays")
        }
        false => format!("{size} are freed"),
    };
    let is_used = |home: Home| folder::is_used_beside(&folder, &name_in_parts(&home));
    let others = match community(&cx.global).map(is_used) {
        Some(Ok(true)) => ", which another home of this user uses as well",
        _ => "",
    };
    let question = format!("Remove this machine's part of {name}{others}? {freed}.");
    if !yes && !ask(&question, None)? {
        return Err(Failure::new(Kind::Interrupted, "nothing was removed"));
    }
    // Locked until the folder is gone, so that no other process fetches into it.
    fs::remove_dir_all(&folder).map_err(|e| Failure::file("remove", &folder, &e))?;
    drop(part);
    note(format!("removed {} ({freed})", folder.display()));
    note("the community has adopted the model: `hearthnet up` fetches a part of it again");
    Ok(())
}

fn not_here(model: &Adoption) -> Failure {
    failure!(Model, "no part of {} is on this machine", model.name)
        .hint("`hearthnet model list` shows what is")
}

fn unusable(what: &dyn std::fmt::Display, error: &dyn std::fmt::Display) -> Failure {
    failure!(Model, "{what}: {error}")
        .hint("`hearthnet model rm` removes a part; `hearthnet up` fetches it again")
}
