//! Cost of spans, and predicted speeds.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

use super::input::{Community, Layers, Machine, Model, Purpose, Span, Task};
use super::route::{Offer, narrowest, shortest};

/// Rows of a chunk of a prompt, and unanswered chunks per span: the defaults of `prefill_rows` and
/// `steps_in_flight`.
const PREFILL_ROWS: u64 = 24;
const STEPS_IN_FLIGHT: u64 = 2;
/// Prompt that the time to the first token is predicted for.
const PROMPT_TOKENS: u64 = 500;

/// Predicted speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Speed {
    /// For [`Purpose::Batch`], the time between two tokens of all chats together.
    pub token_us: u64,
    pub tokens_per_1000_s: u64,
    /// Time to the first token of a prompt of 500 tokens.
    pub first_token_us: u64,
}

/// Prediction for one caller.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prediction {
    pub speed: Speed,
    /// Memory that each node of the spans, and the caller, uses.
    pub memory: BTreeMap<NodeId, u64>,
    /// Speed of the caller's machine alone, if the model fits into its memory.
    pub alone: Option<Speed>,
}

impl Prediction {
    /// True if the caller should run the whole model itself.
    pub fn is_better_alone(&self) -> bool {
        self.alone
            .is_some_and(|alone| alone.token_us <= self.speed.token_us)
    }
}

/// Predicts the speed of a chat of `caller` over `spans`. `None` if a node is unknown, or if the
/// spans are not the hosted layers in order.
pub fn predict(
    community: &Community,
    model: &Model,
    caller: NodeId,
    spans: &[Span],
    purpose: Purpose,
) -> Option<Prediction> {
    let own = community.machine(caller)?;
    let hosted = model.hosted();
    let mut next = hosted.first;
    for span in spans {
        if span.layers.first != next || span.layers.is_empty() {
            return None;
        }
        next = span.layers.end;
    }
    if next != hosted.end {
        return None;
    }
    let speed = speed(community, model, own, (spans, true), purpose)?;
    let mut memory = BTreeMap::from([(caller, model.caller_memory())]);
    for span in spans {
        let used = memory.entry(span.node).or_default();
        *used = used.saturating_add(model.memory_of(span.layers));
    }
    let all = Layers::new(0, model.layers());
    let whole = model.memory_of(all).saturating_add(model.head_bytes);
    let alone = Span {
        node: caller,
        layers: hosted,
    };
    let alone = match whole <= own.memory_bytes {
        true => self::speed(community, model, own, (&[alone], false), purpose),
        false => None,
    };
    Some(Prediction {
        speed,
        memory,
        alone,
    })
}

/// Speed over `spans`, which are computed by hosts, or else by the caller's own process.
fn speed(
    community: &Community,
    model: &Model,
    own: &Machine,
    (spans, is_hosted): (&[Span], bool),
    purpose: Purpose,
) -> Option<Speed> {
    let row = u64::from(model.row_bytes);
    let private = u64::from(model.private());
    let head = u64::from(own.head_us);
    let chunk_rows = PROMPT_TOKENS.min(PREFILL_ROWS);
    let chunks = PROMPT_TOKENS.div_ceil(chunk_rows);
    // The caller's own stage. Its wire carries the rows of all hops, each way.
    let mut decode = head + private * u64::from(own.layer_us);
    let own_chunk = private * u64::from(own.prefill_row_us) * chunk_rows;
    let (mut fill, mut slowest) = (own_chunk, own_chunk);
    let mut busiest = head + private * u64::from(own.prefill_row_us);
    let (mut wires, mut chunk_wires) = (0u64, 0u64);
    let mut on_own = 0u64;
    for span in spans {
        let machine = community.machine(span.node)?;
        let count = u64::from(span.layers.count());
        let (delay, wire) = community.way(own.node, span.node, row);
        let step = if is_hosted {
            u64::from(machine.step_us)
        } else {
            0
        };
        decode += 2 * (delay + wire) + step + count * u64::from(machine.layer_us);
        wires += wire;
        let (_, chunk_wire) = community.way(own.node, span.node, row * chunk_rows);
        chunk_wires += chunk_wire;
        let row_us = count * u64::from(machine.prefill_row_us);
        if span.node == own.node {
            on_own += row_us;
        }
        busiest = busiest.max(row_us);
        let compute = row_us * chunk_rows;
        let round = compute + 2 * (delay + chunk_wire);
        fill += round;
        slowest = slowest.max(compute).max(round.div_ceil(STEPS_IN_FLIGHT));
    }
    // Private layers and a span on the same machine share its cores.
    busiest = busiest
        .max(head + private * u64::from(own.prefill_row_us) + on_own)
        .max(wires);
    slowest = slowest
        .max(own_chunk + on_own * chunk_rows)
        .max(chunk_wires);
    let token_us = match purpose {
        Purpose::Chat => decode,
        Purpose::Batch => busiest,
    };
    Some(Speed {
        token_us,
        tokens_per_1000_s: 1_000_000_000 / token_us.max(1),
        first_token_us: fill + (chunks - 1) * slowest + head,
    })
}

/// Best route over `ranges` for a task, and its objective: time per token, or for batches the time
/// of the busiest span. `None` if layers are missing.
pub(super) fn best_route(
    community: &Community,
    model: &Model,
    task: Task,
    hosted: Layers,
    ranges: &BTreeMap<NodeId, Layers>,
) -> Option<(Vec<Span>, u64)> {
    let (mut nodes, mut offers) = (Vec::new(), Vec::new());
    for (&node, &layers) in ranges {
        let Some(machine) = community.machine(node) else {
            continue;
        };
        let (enter_us, layer_us) = community.span_us(model, task, machine);
        nodes.push(node);
        offers.push(Offer {
            layers,
            enter_us,
            layer_us,
        });
    }
    let spans = |route: Vec<(usize, Layers)>| -> Vec<Span> {
        let span = |(index, layers): (usize, Layers)| {
            let node = *nodes.get(index)?;
            Some(Span { node, layers })
        };
        route.into_iter().filter_map(span).collect()
    };
    let (route, cost) = match task.purpose {
        Purpose::Chat => shortest(hosted, &offers, offers.len())?,
        Purpose::Batch => narrowest(hosted, &offers)?,
    };
    Some((spans(route), cost))
}
