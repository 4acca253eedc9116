//! Plan in numbers, or what is missing for one. Pure.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{self, Level};
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::placement::observed::{have_measured, observed_for, sharing};
use hearthnet_orchestrator::placement::plan::{
    Community, Layers, Model, Plan, Purpose, Speed, Task, Unplannable, plan, predict,
};
use hearthnet_orchestrator::placement::{missing, runs_text};
use serde::Serialize;

use crate::cli::args::PlanFor;
use crate::cli::{Failure, bytes, failure, table};

/// Model, caller and purpose of a plan.
pub(crate) struct Asked<'a> {
    pub(crate) model_id: &'a str,
    pub(crate) weights: WeightsId,
    pub(crate) shape: &'a Model,
    /// Whether all of the model is on this machine.
    pub(crate) is_here: bool,
    /// Node whose chats the speeds are for.
    pub(crate) own: NodeId,
    pub(crate) purpose: PlanFor,
    /// Members that cannot be reached now. Their measurements are valid for up to two minutes more.
    pub(crate) unreachable: &'a BTreeSet<NodeId>,
}

impl Asked<'_> {
    /// Names of the members that this plan leaves out because they cannot be reached now.
    pub(crate) fn left_out(
        &self,
        state: &log::Community,
        now_ms: u64,
        name: &dyn Fn(&NodeId) -> String,
    ) -> Vec<String> {
        let announced = state.measured(now_ms).map(|(node, _)| node);
        let left_out = announced.filter(|node| self.unreachable.contains(*node));
        left_out.map(name).collect()
    }
}

/// Best placement, and its predicted speed for chats of this node.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    model: String,
    purpose: PlanFor,
    #[serde(flatten)]
    pub(super) speed: Predicted,
    /// This machine alone; absent if the model does not fit into its memory.
    pub(super) alone: Option<Predicted>,
    pub(super) advice: Advice,
    /// First and last layers, inclusive.
    pub(super) private_layers: Vec<(u32, u32)>,
    pub(super) nodes: Vec<Row>,
    /// Names of members that may serve layers, of which no measurement is known.
    pub(super) not_counted: Vec<String>,
    /// Names of members with measurements that cannot be reached now.
    pub(super) unreachable: Vec<String>,
    /// Names of members that verdicts convicted, so that no plan gives them layers.
    pub(super) convicted: Vec<String>,
    /// Layers that two or more nodes hold.
    pub(super) held_twice: Vec<(u32, u32)>,
    /// Model whose measured times this estimates from, if no node has measured the model itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) estimated_from: Option<String>,
    /// False if a better plan may exist.
    is_optimal: bool,
    /// Whether all of the model is on this machine.
    #[serde(skip)]
    is_here: bool,
    /// Layers of the model.
    #[serde(skip)]
    total: u32,
}

/// Reason that there is no plan.
#[derive(Debug)]
pub(crate) enum NoPlan {
    /// This node has announced no measurements.
    NodeNotMeasured,
    /// No node has measured the model.
    ModelNotMeasured,
    Impossible {
        why: Unplannable,
        /// Memory that a node needs in addition if people chat on it.
        callers_part: u64,
        /// Number of models that share the memory of each node equally. The numbers of bytes are
        /// those of one share.
        models: u64,
    },
    /// This node is not among the nodes of the plan.
    NotIncluded,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Predicted {
    pub(super) tokens_per_second: f64,
    /// Time to the first token of a prompt of 500 tokens.
    pub(super) first_token_ms: f64,
}

impl From<Speed> for Predicted {
    fn from(speed: Speed) -> Self {
        Self {
            tokens_per_second: speed.tokens_per_1000_s as f64 / 1e3,
            first_token_ms: speed.first_token_us as f64 / 1e3,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Advice {
    /// This machine alone is at least as fast.
    Alone,
    /// A single node runs all hosted layers.
    OneNode,
    /// Fewer nodes than could.
    FewerNodes,
    AllNodes,
}

/// A node of the community.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    node: NodeId,
    pub(super) name: String,
    /// Range to hold, inclusive.
    pub(super) layers: Option<(u32, u32)>,
    /// Layers that it computes in the best route, inclusive.
    pub(super) computes: Vec<(u32, u32)>,
    serves_now: Option<(u32, u32)>,
    pub(super) memory_bytes: u64,
    pub(super) given_bytes: u64,
    /// If the node has not measured this model, the slowest measured host's, at most four times the
    /// median of the measured hosts.
    pub(super) layer_us: u32,
    /// Whether the node has measured this model.
    pub(super) is_measured: bool,
    pub(super) online_permille: u16,
}

fn inclusive(layers: Layers) -> Option<(u32, u32)> {
    let last = layers.end.checked_sub(1)?;
    (layers.first <= last).then_some((layers.first, last))
}

impl Report {
    /// Plans from what the members announced. `name` gives the names of nodes.
    ///
    /// # Errors
    /// Returns an error if measurements are missing without which a plan would be a guess, or if no
    /// plan exists.
    pub(crate) fn of(
        state: &log::Community,
        asked: &Asked<'_>,
        now_ms: u64,
        name: &dyn Fn(&NodeId) -> String,
    ) -> Result<Self, NoPlan> {
        if !state.measured(now_ms).any(|(node, _)| *node == asked.own) {
            return Err(NoPlan::NodeNotMeasured);
        }
        let of_model = have_measured(state, asked.weights, now_ms);
        if of_model.is_empty() {
            return Err(NoPlan::ModelNotMeasured);
        }
        let community = observed_for(Some(asked.own), state, asked.weights, now_ms);
        let report = Self::planned(state, asked, &community, &of_model, now_ms, name);
        report.map_err(|why| why.among(sharing(state, [asked.weights])))
    }

    /// Plans for these members of a community, of which `measured` have measured the model.
    pub(super) fn planned(
        state: &log::Community,
        asked: &Asked<'_>,
        community: &Community,
        measured: &BTreeSet<NodeId>,
        now_ms: u64,
        name: &dyn Fn(&NodeId) -> String,
    ) -> Result<Self, NoPlan> {
        let community = community.map(|machine| {
            let is_there = !asked.unreachable.contains(&machine.node);
            is_there.then(|| machine.clone().with_held(asked.shape))
        });
        let announced: BTreeSet<&NodeId> = state.measured(now_ms).map(|(node, _)| node).collect();
        let mut report = Self::new(asked, &community, name)?;
        for row in &mut report.nodes {
            row.is_measured = measured.contains(&row.node);
        }
        let members = state.members().map(|(node, _)| node);
        let not_counted = members
            .filter(|node| state.level(node) >= Some(Level::Trusted) && !announced.contains(node));
        report.not_counted = not_counted.map(name).collect();
        report.unreachable = asked.left_out(state, now_ms, name);
        let convicted = state.members().map(|(node, _)| node);
        let convicted = convicted.filter(|node| state.reputation(node).is_convicted());
        report.convicted = convicted.map(name).collect();
        Ok(report)
    }

    /// Plans for a community of which all nodes are measured.
    pub(super) fn new(
        asked: &Asked<'_>,
        community: &Community,
        name: &dyn Fn(&NodeId) -> String,
    ) -> Result<Self, NoPlan> {
        let (model, own, purpose) = (asked.shape, asked.own, asked.purpose);
        let goal = match purpose {
            PlanFor::Chat => Purpose::Chat,
            PlanFor::Batch => Purpose::Batch,
        };
        // Placed for all callers alike, so that every node computes the same plan.
        let task = Task {
            purpose: goal,
            caller: None,
        };
        let best = plan(community, model, task).map_err(|why| NoPlan::Impossible {
            why,
            callers_part: model.caller_memory(),
            models: 1,
        })?;
        let predicted = predict(community, model, own, &best.spans, goal);
        let predicted = predicted.ok_or(NoPlan::NotIncluded)?;
        let nodes = rows(community, model, &best, own, name);
        let advice = match best.spans.len() {
            _ if predicted.is_better_alone() => Advice::Alone,
            1 => Advice::OneNode,
            _ if nodes.iter().any(|row| row.computes.is_empty()) => Advice::FewerNodes,
            _ => Advice::AllNodes,
        };
        Ok(Self {
            model: asked.model_id.to_owned(),
            purpose,
            speed: predicted.speed.into(),
            alone: predicted.alone.map(Predicted::from),
            advice,
            private_layers: missing(model.layers(), inclusive(model.hosted()).as_slice()),
            nodes,
            not_counted: Vec::new(),
            unreachable: Vec::new(),
            convicted: Vec::new(),
            held_twice: best.twice.iter().copied().filter_map(inclusive).collect(),
            estimated_from: None,
            is_optimal: best.is_optimal,
            is_here: asked.is_here,
            total: model.layers(),
        })
    }

    /// Text of the command, for which `named` names the model.
    pub(crate) fn text(&self, named: &str) -> String {
        let mut out = format!(
            "{} for {}\n  {}\n",
            self.model,
            match self.purpose {
                PlanFor::Chat => "one chat of this node",
                PlanFor::Batch => "many chats of this node together",
            },
            self.speed
        );
        if let Some(like) = &self.estimated_from {
            let _ = writeln!(
                out,
                "  an estimate: sizes from the catalogue, times from those of {like}"
            );
        }
        let _ = match &self.alone {
            Some(alone) => writeln!(out, "  this machine alone: {alone}"),
            None => writeln!(
                out,
                "  this machine alone: the model does not fit into the memory that it gives"
            ),
        };
        let _ = writeln!(out, "  {}", self.advised(named));
        let rows = self.nodes.iter().map(|row| {
            let computes = match (row.computes.as_slice(), row.layers) {
                ([], Some(_)) => "as a spare".to_owned(),
                ([], None) => "nothing".to_owned(),
                (runs, _) => runs_text(runs),
            };
            [
                row.name.clone(),
                row.layers
                    .map_or_else(String::new, |layers| runs_text(&[layers])),
                computes,
                bytes(row.memory_bytes),
                bytes(row.given_bytes),
                format!("{:.2}", f64::from(row.layer_us) / 1e3),
                format!("{:.0} %", f64::from(row.online_permille) / 10.0),
            ]
        });
        let header = "node|holds|computes|memory|of|ms per layer|online";
        let _ = write!(out, "\n{}", table(header, rows));
        if !self.private_layers.is_empty() {
            let layers = runs_text(&self.private_layers);
            let _ = writeln!(out, "  private layers, on the machine that asks: {layers}");
        }
        let _ = match self.held_twice.as_slice() {
            [] => writeln!(
                out,
                "  no layer is held twice: while a node is away, its layers are missing"
            ),
            twice => writeln!(out, "  held twice: layers {}", runs_text(twice)),
        };
        if !self.unreachable.is_empty() {
            let names = self.unreachable.join(", ");
            let _ = writeln!(out, "  without {names}: not reachable now");
        }
        if !self.convicted.is_empty() {
            let names = self.convicted.join(", ");
            let _ = writeln!(
                out,
                "  without {names}: convicted of wrong rows (`hearthnet audit list`)"
            );
        }
        if !self.is_optimal {
            out.push_str("  the search was cut short, so a better plan may exist\n");
        }
        out
    }

    fn advised(&self, named: &str) -> String {
        match self.advice {
            Advice::Alone => {
                let once = match self.is_here {
                    true => String::new(),
                    false => format!(
                        ", once all of the model is here: `hearthnet model pull {named} --layers 0-{}` \
                         fetches the rest while no node runs here",
                        self.total.saturating_sub(1)
                    ),
                };
                format!(
                    "advice: answer on this machine alone, which is at least as fast (`hearthnet chat --local \
                     --model {named}`{once})"
                )
            }
            Advice::OneNode => {
                let one = self.nodes.iter().find(|row| !row.computes.is_empty());
                let name = one.map_or("", |row| &row.name);
                format!("advice: let {name} run all layers; splitting them would be slower")
            }
            Advice::FewerNodes => {
                let out = self.nodes.iter().filter(|row| row.computes.is_empty());
                let out: Vec<&str> = out.map(|row| &*row.name).collect();
                format!(
                    "advice: split the layers as below; answers would not be faster with {}",
                    out.join(", ")
                )
            }
            Advice::AllNodes => "advice: split the layers among all nodes, as below".to_owned(),
        }
    }
}

impl std::fmt::Display for Predicted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} tokens/s, first token of a 500-token prompt after {:.1} s",
            self.tokens_per_second,
            self.first_token_ms / 1e3
        )
    }
}

/// A row for each node that may serve or takes part, and for `own`: first those that compute.
fn rows(
    community: &Community,
    model: &Model,
    plan: &Plan,
    own: NodeId,
    name: &dyn Fn(&NodeId) -> String,
) -> Vec<Row> {
    let machines = community.machines();
    let shown = machines.filter(|machine| machine.serves || machine.node == own);
    let mut rows: Vec<Row> = shown
        .map(|machine| {
            let range = plan.ranges.get(&machine.node).copied();
            let spans = plan.spans.iter().filter(|span| span.node == machine.node);
            let hosts_part = range.map_or(0, |range| model.memory_of(range));
            Row {
                node: machine.node,
                name: name(&machine.node),
                layers: range.and_then(inclusive),
                computes: spans.filter_map(|span| inclusive(span.layers)).collect(),
                serves_now: machine.holds.and_then(inclusive),
                memory_bytes: machine.callers_part(model).saturating_add(hosts_part),
                given_bytes: machine.memory_bytes,
                layer_us: machine.layer_us,
                is_measured: true,
                online_permille: machine.online_permille,
            }
        })
        .collect();
    let place = |row: &Row| row.computes.first().map_or(u32::MAX, |(lo, _)| *lo);
    rows.sort_by_key(|row| (place(row), row.layers.is_none(), row.node));
    rows
}

impl NoPlan {
    /// The same if `number` models share the memory of each node.
    pub(super) fn among(mut self, number: u64) -> Self {
        if let Self::Impossible { models, .. } = &mut self {
            *models = number;
        }
        self
    }

    /// Error for a command, with what would help.
    pub(crate) fn failure(&self, model: &str, name: &dyn Fn(&NodeId) -> String) -> Failure {
        const START: &str =
            "nodes measure while `hearthnet up` runs on them, and announce it within a minute";
        match self {
            Self::NodeNotMeasured => failure!(
                Community,
                "this node has announced no measurements, so nothing is known of its chats"
            )
            .code("not_measured")
            .hint(START),
            Self::ModelNotMeasured => failure!(Community, "no node has measured {model}")
                .code("model_not_measured")
                .hint(format!(
                    "a node measures a model of which it holds layers: an anchor lets the nodes fetch some with `hearthnet model adopt {model}`; {START}"
                )),
            Self::Impossible {
                why,
                callers_part,
                models,
            } => impossible(why, (*callers_part, *models), model, name),
            Self::NotIncluded => failure!(
                Community,
                "this node is not among the nodes of the plan, so nothing is known of its chats"
            )
            .code("plan_no_node")
            .hint(START),
        }
    }
}

fn impossible(
    why: &Unplannable,
    (callers_part, models): (u64, u64),
    model: &str,
    name: &dyn Fn(&NodeId) -> String,
) -> Failure {
    let shared = match models {
        0 | 1 => String::new(),
        _ => format!(", because {models} models share their memory equally"),
    };
    // More memory of a node is shared as well.
    let whole = |share: u64| bytes(share.saturating_mul(models.max(1)));
    match why {
        Unplannable::Memory {
            needed,
            given,
            on,
            more,
            new_node,
        } => failure!(
            Community,
            "the layers of {model} need {} of memory, and the nodes give it {}{shared}",
            bytes(*needed),
            bytes(*given)
        )
        .code("plan_memory")
        .hint(format!(
            "{} more on {}, or `hearthnet up` on another node that gives {}, would suffice; \
             manners.memory_percent sets what a node gives{}",
            whole(*more),
            name(on),
            whole(new_node.saturating_add(callers_part)),
            match models {
                0 | 1 => "",
                _ => "; `hearthnet model drop` of another model frees its share",
            }
        )),
        Unplannable::NoMachine => failure!(Community, "{why}")
            .code("plan_no_node")
            .hint("`hearthnet up` on a trusted node serves layers"),
        _ => failure!(Community, "{why}").code("plan_layers").hint(
            "set fewer private layers (research.distributed_inference.private_first_layers and \
             private_last_layers), or take another model",
        ),
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_orchestrator::placement::plan::Machine;

    use super::super::testing::{MIB, caller, machine, name, node, report};
    use super::*;

    #[test]
    fn a_model_that_fits_nowhere_whole_is_split_and_a_slow_node_left_out() {
        let found = report(vec![
            caller(4, 1_000),
            machine(2, 6, 500),
            machine(3, 9, 4_000),
        ]);
        let found = found.unwrap();
        assert_eq!(found.advice, Advice::FewerNodes);
        // 2000 for the head, 2 * 1000 private, 4 * 1000 and 6 * 500 hosted, 2 * (300 + 32) the hop.
        let token_s = 0.011_664;
        assert!((found.speed.tokens_per_second * token_s - 1.0).abs() < 1e-3);
        assert!(found.alone.is_none());
        let text = found.text("a-model");
        for part in [
            "85.7 tokens/s",
            "this machine alone: the model does not fit",
            "not be faster with home 3",
            "private layers, on the machine that asks: 0-1",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // The caller's own part and four layers.
        let own = found.nodes.iter().find(|row| row.node == node(1)).unwrap();
        assert_eq!(own.memory_bytes, 800 * MIB);
        assert_eq!(own.given_bytes, 800 * MIB);
    }

    #[test]
    fn a_machine_that_is_fast_enough_is_advised_to_answer_alone() {
        let found = report(vec![caller(10, 500), machine(2, 10, 480)]).unwrap();
        assert_eq!(found.advice, Advice::Alone);
        let text = found.text("a-model");
        let how = "(`hearthnet chat --local --model a-model`)";
        assert!(text.contains(how), "{text}");
        assert!(found.alone.is_some());
        let part = Report {
            is_here: false,
            ..found
        };
        let text = part.text("a-model");
        let how = "`hearthnet model pull a-model --layers 0-11` fetches the rest";
        assert!(text.contains(how), "{text}");
    }

    #[test]
    fn one_fast_neighbour_is_named() {
        let found = report(vec![caller(0, 1_000), machine(2, 10, 100)]).unwrap();
        assert_eq!(found.advice, Advice::OneNode);
        assert!(found.text("a-model").contains("let home 2 run all layers"));
    }

    #[test]
    fn missing_memory_is_told_with_what_would_suffice() {
        let why = report(vec![caller(3, 1_000), machine(2, 3, 500)]).unwrap_err();
        let why = why.failure("a model", &name);
        assert!(why.has_code("plan_memory"), "{why}");
        let hint = why.hint_text().unwrap();
        assert!(hint.contains("400.0 MiB more on"), "{hint}");
        // With the caller's part, because people may chat on the new node.
        assert!(hint.contains("gives 800.0 MiB"), "{hint}");
    }

    #[test]
    fn a_plan_that_cannot_be_made_says_what_is_missing() {
        let impossible = |why| NoPlan::Impossible {
            why,
            callers_part: 0,
            models: 1,
        };
        for (why, code) in [
            (NoPlan::NodeNotMeasured, "not_measured"),
            (NoPlan::ModelNotMeasured, "model_not_measured"),
            (NoPlan::NotIncluded, "plan_no_node"),
            (impossible(Unplannable::NoMachine), "plan_no_node"),
            (impossible(Unplannable::Layers), "plan_layers"),
        ] {
            let why = why.failure("a model", &name);
            assert!(why.has_code(code), "{code}: {why}");
        }
    }

    #[test]
    fn memory_that_models_share_must_grow_for_each_of_them() {
        let why = report(vec![caller(3, 1_000), machine(2, 3, 500)]).unwrap_err();
        let why = why.among(3).failure("a model", &name);
        let said = why.to_string();
        assert!(said.contains("600.0 MiB, because 3 models share"), "{said}");
        let hint = why.hint_text().unwrap();
        for part in ["1.2 GiB more on", "gives 2.3 GiB", "model drop"] {
            assert!(hint.contains(part), "{part}: {hint}");
        }
    }

    #[test]
    fn a_member_that_may_not_serve_is_not_listed() {
        let member = Machine {
            serves: false,
            ..machine(3, 12, 100)
        };
        let found = report(vec![caller(0, 1_000), machine(2, 10, 400), member]).unwrap();
        let names: Vec<&str> = found.nodes.iter().map(|row| &*row.name).collect();
        assert_eq!(names, ["home 2", "home 1"]);
    }
}
