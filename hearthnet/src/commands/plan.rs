//! `hearthnet plan`: which node should hold which layers of a model, and how fast answers would be.
//!
//! The input is what members announced in the log (`daemon/measure.rs`) and the shape of the model.
//! The command changes nothing.

use hearthnet_bus::NodeId;

use crate::answering::private_layers;
use crate::cli::args::{PlanArgs, PrivateArgs};
use crate::cli::{Failure, block_on, print_result};
use crate::config::Context;
use crate::home::now_ms;
use crate::models::open_model;
use crate::node::{open_home, sync_or_note};
use crate::planning::{Asked, Report, shape};

pub(crate) fn run(args: &PlanArgs, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    home.require_research(&cx.config)?;
    let model = open_model(cx, args.model.as_ref(), Some(&home))?;
    block_on(async {
        sync_or_note(&home, &cx.config).await;
        Ok(())
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
    };
    let name = |node: &NodeId| state.label(node, now);
    let report = Report::of(&state, &asked, now, &name);
    let report = report.map_err(|why| why.failure(&model.id, &name))?;
    print_result(args.json, &report, || report.text())
}
