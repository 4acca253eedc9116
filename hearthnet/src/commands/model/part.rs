//! Parts of adopted models: `hearthnet model pull --layers`, and `verify` and `rm` of a part.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs};

use hearthnet_bus::log::Adoption;
use hearthnet_bus::node::Node;
use hearthnet_files::WeightsId;
use hearthnet_files::part::{Part, PartError, folder};
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::coverage::held_by_others;
use hearthnet_orchestrator::placement::observed::sharing;
use hearthnet_orchestrator::placement::{choose_near, room, runs_text};
use serde::Serialize;

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

/// Reads all pieces that a part holds, and compares them with the adopted model, or without one with
/// the piece list beside them.
pub(super) fn verify(
    folder: &Path,
    model: Option<&Adoption>,
    accept: bool,
    as_json: bool,
) -> Result<(), Failure> {
    let shown = folder.display();
    let name = model.map_or_else(|| shown.to_string(), |model| model.name.clone());
    if accept {
        return Err(failure!(
            BadRequest,
            "{name} is a part of an adopted model, so its file cannot be another one"
        )
        .hint("an anchor adopts another file with `hearthnet model adopt`"));
    }
    let part = Part::open_reading(folder).map_err(|e| unusable(&shown, &e))?;
    if model.is_some_and(|model| *part.identity() != identity(model)) {
        return Err(unusable(
            &shown,
            &"this is a part of another file than the adopted one",
        ));
    }
    let part = Arc::new(part);
    let file = part
        .model_file()
        .map_err(|e| model_failure(&part.path(), e))?;
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
    let verified = Verified {
        path: part.path().display().to_string(),
        weights: part.identity().weights,
        compared_with: match model {
            Some(_) => "adopted_model",
            None => "piece_list",
        },
        pieces: part.table().len() as usize,
        pieces_held: count,
        pieces_damaged: damaged,
        bytes: part.table().bytes(&held),
        model_bytes: part.identity().file_bytes,
        layers_held: held_layers(&part, file.spec().layers),
    };
    if damaged > 0 {
        let found = serde_json::to_value(&verified).map_err(Failure::internal)?;
        let pieces = verified.pieces;
        return Err(failure!(
            Model,
            "{damaged} pieces of {name} are damaged on the disk; {count} of {pieces} are good"
        )
        .code("model_changed")
        .hint("`hearthnet up`, or `hearthnet model pull` with --layers, fetches them again")
        .beside(found));
    }
    print_result(as_json, &verified, || verified.to_string())
}

/// Findings of `model verify` about a part.
#[derive(Debug, Serialize)]
struct Verified {
    path: String,
    weights: WeightsId,
    compared_with: &'static str,
    pieces: usize,
    /// Pieces that are here and have their hash.
    pieces_held: usize,
    pieces_damaged: u32,
    bytes: u64,
    model_bytes: u64,
    layers_held: Vec<(u32, u32)>,
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, pieces) = (self.pieces_held, self.pieces);
        let like = match self.compared_with {
            "adopted_model" => "they and the file's header match the adopted model",
            _ => {
                "they match the piece list beside them, which was not compared with an adopted model"
            }
        };
        writeln!(f, "{}", self.path)?;
        writeln!(
            f,
            "  pieces   {held} of {pieces} are here and were read: {like}"
        )?;
        if held < pieces {
            let others = pieces - held;
            writeln!(
                f,
                "           the other {others} are not here, so nothing of them was checked"
            )?;
        }
        let (here, all) = (bytes(self.bytes), bytes(self.model_bytes));
        writeln!(f, "  bytes    {here} read, of a file of {all}")?;
        match self.layers_held.as_slice() {
            [] => writeln!(f, "  layers   none is whole")?,
            whole => writeln!(f, "  layers   {}", runs_text(whole))?,
        }
        writeln!(f, "  weights  {}", self.weights)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verified_part_says_what_was_not_read() {
        let part = Verified {
            path: "/models/parts/07/model.gguf".to_owned(),
            weights: WeightsId([7; 32]),
            compared_with: "adopted_model",
            pieces: 9,
            pieces_held: 3,
            pieces_damaged: 0,
            bytes: 3 << 18,
            model_bytes: 10 << 18,
            layers_held: vec![(2, 3)],
        };
        let said = part.to_string();
        for line in [
            "3 of 9 are here and were read: they and the file's header match the adopted model\n",
            "the other 6 are not here",
            "bytes    768.0 KiB read, of a file of 2.5 MiB\n",
            "layers   2-3\n",
        ] {
            assert!(said.contains(line), "{line}: {said}");
        }
        let whole = Verified {
            compared_with: "piece_list",
            pieces_held: 9,
            ..part
        };
        let said = whole.to_string();
        assert!(!said.contains("not here"), "{said}");
        assert!(
            said.contains("not compared with an adopted model"),
            "{said}"
        );
    }
}
