//! `hearthnet plan`: which node should hold which layers of a model, and how fast answers would be.
//!
//! The input is what members announced in the log (`daemon/measure/`) and the shape of the model.
//! The planner is `hearthnet_orchestrator::placement::plan`. Nothing is changed.

mod report;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Community;
use hearthnet_engine::footprint;
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::placement::observed::observed;
use hearthnet_orchestrator::placement::plan::Model;

use self::report::Report;
use crate::answering::private_layers;
use crate::cli::args::{PlanArgs, PrivateArgs};
use crate::cli::{Failure, block_on, failure, note, print_result};
use crate::config::{Config, Context};
use crate::home::now_ms;
use crate::models::{OpenModel, open_model};
use crate::node::{open_home, with_synced_node};

/// Most tokens for which each node keeps memory.
const KV_TOKENS: u32 = 4096;

pub(crate) fn run(args: &PlanArgs, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    home.require_research(&cx.config)?;
    let model = open_model(cx, args.model.as_ref(), Some(&home))?;
    block_on(async {
        // If no node runs, the log is as old as the last command that synced.
        if let Err(failure) = with_synced_node(&home, &cx.config, async |_| Ok(())).await {
            note(format!("other members could not be asked: {failure}"));
        }
        Ok(())
    })?;
    // Reads events that a running node has received meanwhile.
    home.log.update()?;
    let (state, now, own) = (home.state(), now_ms(), home.key.id());
    check_measured(&state, &model.id, model.weights, own, now)?;
    let community = observed(&state, model.weights, now);
    let shape = shape(&model, &cx.config)?;
    let name = |node: &NodeId| state.label(node, now);
    let report = Report::new(&model.id, &community, &shape, own, args.purpose, &name)?;
    print_result(args.json, &report, || report.text())
}

/// Returns an error if measurements are missing without which a plan would be a guess.
fn check_measured(
    state: &Community,
    model: &str,
    weights: WeightsId,
    own: NodeId,
    now_ms: u64,
) -> Result<(), Failure> {
    const START: &str = "nodes measure while `hearthnet up` or `hearthnet serve` runs on them, and \
        announce it within a minute";
    let measures = |node: &NodeId| state.measured(now_ms).any(|(other, _)| other == node);
    if !measures(&own) {
        let what = "this node has announced no measurements, so nothing is known of its chats";
        return Err(failure!(Community, "{what}")
            .code("not_measured")
            .hint(START));
    }
    let mut models = state.measured(now_ms).flat_map(|(_, it)| &it.models);
    if models.any(|speed| speed.weights == weights.0 && speed.layer_us > 0) {
        return Ok(());
    }
    Err(failure!(Community, "no node has measured {model}")
        .code("model_not_measured")
        .hint(format!(
            "a node measures a model of which it holds layers: `hearthnet model adopt {model}` lets the nodes fetch some, or `hearthnet serve --model {model}` here; {START}"
        )))
}

/// What the planner needs to know of a model, with the private layers of this machine's chats.
fn shape(model: &OpenModel, config: &Config) -> Result<Model, Failure> {
    let (file, spec) = (&model.file, model.file.spec());
    let (mut first, mut last) = (0, 0);
    for (lo, hi) in private_layers::wanted(model, PrivateArgs::default(), config)? {
        match lo {
            0 => first = hi.saturating_add(1),
            _ => last = spec.layers.saturating_sub(lo),
        }
    }
    let row = u64::from(spec.width).saturating_mul(spec.boundary.bytes_per_value() as u64);
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(Model {
        layer_bytes: (0..spec.layers)
            .map(|layer| file.layer_bytes(layer))
            .collect(),
        head_bytes: file.head_bytes(),
        row_bytes: small(row),
        kv_bytes_per_token_per_layer: small(footprint(spec, 1).per_position),
        kv_tokens: spec.context.min(KV_TOKENS),
        uncut: Vec::new(),
        private_first: first,
        private_last: last,
    })
}
