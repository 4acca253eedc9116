//! Plan in words and numbers. Pure.

use std::fmt::Write as _;

use hearthnet_bus::NodeId;
use hearthnet_orchestrator::placement::plan::{
    Community, Layers, Model, Plan, Purpose, Speed, Task, Unplannable, plan, predict,
};
use hearthnet_orchestrator::placement::runs_text;
use serde::Serialize;

use crate::cli::args::PlanFor;
use crate::cli::{Failure, bytes, failure, table};

/// Best placement, and its predicted speed for chats of this node.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    model: String,
    purpose: PlanFor,
    #[serde(flatten)]
    speed: Predicted,
    /// This machine alone; absent if the model does not fit into its memory.
    alone: Option<Predicted>,
    advice: Advice,
    /// First and last layers, inclusive.
    private_layers: Vec<(u32, u32)>,
    nodes: Vec<Row>,
    /// Layers that two or more nodes hold.
    held_twice: Vec<(u32, u32)>,
    /// False if a better plan may exist.
    is_optimal: bool,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Predicted {
    tokens_per_second: f64,
    /// Time to the first token of a prompt of 500 tokens.
    first_token_ms: f64,
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
enum Advice {
    /// This machine alone is at least as fast.
    Alone,
    /// One node runs all hosted layers.
    OneNode,
    /// Fewer nodes than could.
    FewerNodes,
    AllNodes,
}

/// A node of the community.
#[derive(Debug, Serialize)]
struct Row {
    node: NodeId,
    name: String,
    /// Range to hold, inclusive.
    layers: Option<(u32, u32)>,
    /// Layers that it computes in the best route, inclusive.
    computes: Vec<(u32, u32)>,
    serves_now: Option<(u32, u32)>,
    memory_bytes: u64,
    given_bytes: u64,
    /// The slowest node's, if the node has not measured this model.
    layer_us: u32,
    online_permille: u16,
}

fn inclusive(layers: Layers) -> Option<(u32, u32)> {
    let last = layers.end.checked_sub(1)?;
    (layers.first <= last).then_some((layers.first, last))
}

impl Report {
    /// Plans for the chats of `own`. `name` gives the names of nodes.
    ///
    /// # Errors
    /// Returns an error if no plan exists, with what would help.
    pub(super) fn new(
        model_id: &str,
        community: &Community,
        model: &Model,
        own: NodeId,
        purpose: PlanFor,
        name: &dyn Fn(&NodeId) -> String,
    ) -> Result<Self, Failure> {
        let goal = match purpose {
            PlanFor::Chat => Purpose::Chat,
            PlanFor::Batch => Purpose::Batch,
        };
        // Placed for all callers alike, so that every node computes the same plan.
        let task = Task {
            purpose: goal,
            caller: None,
        };
        let best = plan(community, model, task).map_err(|why| unplannable(&why, name))?;
        let predicted = predict(community, model, own, &best.spans, goal);
        let predicted = predicted.ok_or_else(|| Failure::internal("a plan without a route"))?;
        let nodes = rows(community, model, &best, own, name);
        let advice = match best.spans.len() {
            _ if predicted.is_better_alone() => Advice::Alone,
            1 => Advice::OneNode,
            _ if nodes.iter().any(|row| row.computes.is_empty()) => Advice::FewerNodes,
            _ => Advice::AllNodes,
        };
        let hosted = model.hosted();
        let ends = [
            Layers::new(0, hosted.first),
            Layers::new(hosted.end, model.layers()),
        ];
        Ok(Self {
            model: model_id.to_owned(),
            purpose,
            speed: predicted.speed.into(),
            alone: predicted.alone.map(Predicted::from),
            advice,
            private_layers: ends.into_iter().filter_map(inclusive).collect(),
            nodes,
            held_twice: best.twice.iter().copied().filter_map(inclusive).collect(),
            is_optimal: best.is_optimal,
        })
    }

    pub(super) fn text(&self) -> String {
        let mut out = format!(
            "{} for {}\n  {}\n",
            self.model,
            match self.purpose {
                PlanFor::Chat => "one chat of this node",
                PlanFor::Batch => "many chats of this node together",
            },
            self.speed
        );
        let _ = match &self.alone {
            Some(alone) => writeln!(out, "  this machine alone: {alone}"),
            None => writeln!(
                out,
                "  this machine alone: the model does not fit into the memory that it gives"
            ),
        };
        let _ = writeln!(out, "  {}", self.advised());
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
        if !self.is_optimal {
            out.push_str("  the search was cut short, so a better plan may exist\n");
        }
        out
    }

    fn advised(&self) -> String {
        match self.advice {
            Advice::Alone => {
                "advice: answer on this machine alone, which is at least as fast (`hearthnet chat --local`)"
                    .to_owned()
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
            let callers_part = match machine.chats {
                true => model.caller_memory(),
                false => 0,
            };
            Row {
                node: machine.node,
                name: name(&machine.node),
                layers: range.and_then(inclusive),
                computes: spans.filter_map(|span| inclusive(span.layers)).collect(),
                serves_now: machine.holds.and_then(inclusive),
                memory_bytes: callers_part
                    .saturating_add(range.map_or(0, |range| model.memory_of(range))),
                given_bytes: machine.memory_bytes,
                layer_us: machine.layer_us,
                online_permille: machine.online_permille,
            }
        })
        .collect();
    let place = |row: &Row| row.computes.first().map_or(u32::MAX, |(lo, _)| *lo);
    rows.sort_by_key(|row| (place(row), row.layers.is_none(), row.node));
    rows
}

fn unplannable(why: &Unplannable, name: &dyn Fn(&NodeId) -> String) -> Failure {
    match why {
        Unplannable::Memory {
            needed,
            given,
            on,
            more,
            new_node,
        } => failure!(
            Community,
            "the layers need {} of memory, and the nodes give {}",
            bytes(*needed),
            bytes(*given)
        )
        .code("plan_memory")
        .hint(format!(
            "{} more on {}, or another node that gives {}, would suffice; manners.memory_percent sets what a node gives",
            bytes(*more),
            name(on),
            bytes(*new_node)
        )),
        Unplannable::NoMachine => failure!(Community, "{why}").code("plan_no_node"),
        _ => failure!(Community, "{why}").code("plan_layers"),
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::NodeKey;
    use hearthnet_orchestrator::placement::plan::{Link, Machine};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn node(n: u8) -> NodeId {
        NodeKey::from_secret(&[n; 32]).id()
    }

    fn machine(n: u8, layers: u64, layer_us: u32) -> Machine {
        Machine {
            node: node(n),
            memory_bytes: layers * 100 * MIB,
            serves: true,
            layer_us,
            prefill_row_us: layer_us / 4,
            head_us: 2_000,
            online_permille: 950,
            present_s: 3_600,
            chats: false,
            is_answering: false,
            holds: None,
        }
    }

    /// 12 layers of 100 MiB, of which the caller runs the first two itself.
    fn model() -> Model {
        Model {
            layer_bytes: vec![100 * MIB; 12],
            head_bytes: 200 * MIB,
            row_bytes: 4_096,
            kv_bytes_per_token_per_layer: 0,
            kv_tokens: 0,
            uncut: Vec::new(),
            private_first: 2,
            private_last: 0,
        }
    }

    fn report(machines: Vec<Machine>) -> Result<Report, Failure> {
        let link = Link {
            delay_us: 300,
            kbit_s: 1_000_000,
        };
        let links = (2..=3).map(|n| ((node(1), node(n)), link));
        let community = Community::new(machines, links);
        let name = |id: &NodeId| {
            let n = (1..=3).find(|n| node(*n) == *id).unwrap();
            format!("home {n}")
        };
        Report::new(
            "a model",
            &community,
            &model(),
            node(1),
            PlanFor::Chat,
            &name,
        )
    }

    /// Caller with room for its own part and `layers` hosted layers.
    fn caller(layers: u64, layer_us: u32) -> Machine {
        Machine {
            chats: true,
            ..machine(1, layers + 4, layer_us)
        }
    }

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
        let text = found.text();
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
        assert!(found.text().contains("hearthnet chat --local"));
        assert!(found.alone.is_some());
    }

    #[test]
    fn one_fast_neighbour_is_named() {
        let found = report(vec![caller(0, 1_000), machine(2, 10, 100)]).unwrap();
        assert_eq!(found.advice, Advice::OneNode);
        assert!(found.text().contains("let home 2 run all layers"));
    }

    #[test]
    fn missing_memory_is_told_with_what_would_suffice() {
        let why = report(vec![caller(3, 1_000), machine(2, 3, 500)]).unwrap_err();
        assert!(why.has_code("plan_memory"), "{why}");
        let hint = why.hint_text().unwrap();
        assert!(hint.contains("400.0 MiB"), "{hint}");
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
