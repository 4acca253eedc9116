//! `hearthnet plan`: which node should hold which layers of a model, and how fast answers would be.
//!
//! The input is what members announced in the log (`daemon/measure.rs`) and the shape of the model.
//! The command changes nothing.

use hearthnet_bus::NodeId;

use crate::answering::private_layers;
use crate::cli::args::{PlanArgs, PrivateArgs};
use crate::cli::{Failure, block_on, note, print_result};
use crate::config::Context;
use crate::home::now_ms;
use crate::models::open_model;
use crate::node::{open_home, with_synced_node};
use crate::planning::{Asked, Report, shape};

pub(crate) fn run(args: &PlanArgs, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    home.require_research(&cx.config)?;
    let model = open_model(cx, args.model.as_ref(), Some(&home))?;
    block_on(async {
        // If no node runs, the log is as old as the last command that synced.
        if let Err(failure) = with_synced_node(&home, &cx.config, async |_| Ok(())).await {
            note(format!(
                "other members could not be asked: {}",
                failure.with_hint()
            ));
        }
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
