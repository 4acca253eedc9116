//! `hearthnet plan`: which node should hold which layers of a model, and how fast answers would be.
//!
//! The input is what members announced in the log (`daemon/measure.rs`) and the shape of the model.
//! Members that the running node cannot reach are left out. The command changes nothing.

use std::collections::BTreeSet;
use std::path::Path;

use hearthnet_bus::NodeId;
use serde_json::json;

use crate::answering::private_layers;
use crate::cli::args::{PlanArgs, PrivateArgs};
use crate::cli::{Failure, block_on, note, print_result};
use crate::config::Context;
use crate::home::now_ms;
use crate::models::open_model;
use crate::node::{Running, local_api, open_home, sync_or_note};
use crate::planning::{Asked, Report, shape};

pub(crate) fn run(args: &PlanArgs, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    home.require_research(&cx.config)?;
    let model = open_model(cx, args.model.as_ref(), Some(&home))?;
    let unreachable = block_on(async {
        sync_or_note(&home, &cx.config).await;
        Ok(unreachable(&home.dir).await)
    })?;
    // Reads events that a running node has received meanwhile.
    home.log.update()?;
    let (state, now) = (home.state(), now_ms());
    let hosted = private_layers::hosted(&model, PrivateArgs::default(), &cx.config)?;
    let shape = shape(&model.file, hosted);
    let asked = Asked {
        model_id: &model.id,
        weights: model.weights,
        shape: &shape,
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
    print_result(args.json, &report, || report.text())
}

/// Members that do not answer the running node. Without one, nothing is known of them.
async fn unreachable(dir: &Path) -> BTreeSet<NodeId> {
    let params = json!({ "hosts": true });
    let running: Option<Running> = local_api::ask(dir, local_api::NODE_STATUS, &params).await;
    let answers = running.map(|running| running.hosts).unwrap_or_default();
    let away = answers.into_iter().filter(|(_, answers)| !answers);
    away.map(|(member, _)| member).collect()
}
