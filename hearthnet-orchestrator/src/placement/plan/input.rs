//! Input of the planner: what nodes measured and what a model needs.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

/// Machines of a plan. Of more, the first of [`Community::for_caller`] take part.
pub const MAX_MACHINES: usize = 64;
/// Layers of a model.
pub const MAX_LAYERS: usize = 512;

/// Time per layer of a node without measurements, if no node has any.
const UNMEASURED_LAYER_US: u32 = 10_000;
/// A node without measurements counts as no slower than the median of the measured hosts, times
/// this: one false announcement does not exclude it.
const SLOWEST_TIMES_MEDIAN: u64 = 4;
/// Link without measurements: a home network.
const UNMEASURED_DELAY_US: u32 = 1_000;
/// Rate that plans assume of a link without measurements.
pub const UNMEASURED_KBIT_S: u32 = 100_000;

/// Half-open range of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_structs)] // Built by callers from advertisements.
pub struct Layers {
    pub first: u32,
    pub end: u32,
}

impl Layers {
    pub const fn new(first: u32, end: u32) -> Self {
        Self { first, end }
    }

    /// Range with these first and last layers.
    pub const fn from_inclusive((lo, hi): (u32, u32)) -> Self {
        Self::new(lo, hi.saturating_add(1))
    }

    pub const fn count(self) -> u32 {
        self.end.saturating_sub(self.first)
    }

    pub const fn is_empty(self) -> bool {
        self.first >= self.end
    }

    pub const fn holds(self, layer: u32) -> bool {
        self.first <= layer && layer < self.end
    }

    /// Layers of both ranges.
    #[must_use]
    pub fn within(self, other: Self) -> Self {
        Self::new(self.first.max(other.first), self.end.min(other.end))
    }
}

/// Consecutive layers that one node computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_structs)] // Built by callers from routes.
pub struct Span {
    pub node: NodeId,
    pub layers: Layers,
}

/// Measurements and layers of one node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_structs)] // Built by callers from events.
pub struct Machine {
    pub node: NodeId,
    /// Memory for weights, keys and values.
    pub memory_bytes: u64,
    /// True if the node may serve layers to others.
    pub serves: bool,
    /// Time of one row through one layer, batch 1; 0 if not measured.
    pub layer_us: u32,
    /// Time per row of a prompt's chunk through one layer; 0 if not measured.
    pub prefill_row_us: u32,
    /// Time of embedding and output matrix for one token.
    pub head_us: u32,
    /// Time of a step of one row without its layers, if the node computes it as a host.
    pub step_us: u32,
    /// Share of the last 7 days in which the node was online.
    pub online_permille: u16,
    /// Time for which the node's daemon ran when it announced this.
    pub present_s: u32,
    /// True if people chat on the node: it keeps memory for the head and the private layers.
    pub chats: bool,
    /// True while the node computes for an answer: its range stays.
    pub is_answering: bool,
    /// True if the node keeps what it holds, and plans give it no other range: it has not measured
    /// the model, or does not do what plans say.
    pub is_fixed: bool,
    /// Layers of this model that the node serves.
    pub holds: Option<Layers>,
}

impl Machine {
    /// Node of which nothing is known: without memory, and no host.
    pub const fn new(node: NodeId) -> Self {
        Self {
            node,
            memory_bytes: 0,
            serves: false,
            layer_us: 0,
            prefill_row_us: 0,
            head_us: 0,
            step_us: 0,
            online_permille: 0,
            present_s: 0,
            chats: false,
            is_answering: false,
            is_fixed: false,
            holds: None,
        }
    }

    /// Memory that the machine keeps for its own chats.
    pub fn callers_part(&self, model: &Model) -> u64 {
        if self.chats { model.caller_memory() } else { 0 }
    }

    /// This machine with memory for the layers that it holds, and for its chats: they fit, whatever
    /// was measured.
    #[must_use]
    pub fn with_held(mut self, model: &Model) -> Self {
        if let Some(held) = self.holds {
            let used = model.memory_of(held.within(model.hosted()));
            let used = used.saturating_add(self.callers_part(model));
            self.memory_bytes = self.memory_bytes.max(used);
        }
        self
    }
}

/// Measured link from a caller to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_structs)] // Built by callers from events.
pub struct Link {
    /// Half a round trip, with wake-ups.
    pub delay_us: u32,
    /// 0 if not measured.
    pub kbit_s: u32,
}

/// Facts of a model that the planner uses.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built by callers from a model file or an adoption.
pub struct Model {
    /// Weights of each layer.
    pub layer_bytes: Vec<u64>,
    pub head_bytes: u64,
    /// Bytes of a row on the wire.
    pub row_bytes: u32,
    /// Keys and values of one token in one layer.
    pub kv_bytes_per_token_per_layer: u32,
    /// Tokens for which each node keeps memory.
    pub kv_tokens: u32,
    /// Layers before which the model must not be cut.
    pub uncut: Vec<u32>,
    /// First and last layers that callers run themselves.
    pub private_first: u32,
    pub private_last: u32,
}

impl Model {
    pub fn layers(&self) -> u32 {
        u32::try_from(self.layer_bytes.len()).unwrap_or(u32::MAX)
    }

    /// Number of layers that the caller runs itself.
    pub fn private(&self) -> u32 {
        self.layers().saturating_sub(self.hosted().count())
    }

    /// Layers that hosts run. Empty if all are private.
    pub fn hosted(&self) -> Layers {
        let end = self.layers().saturating_sub(self.private_last);
        Layers::new(self.private_first.min(end), end)
    }

    /// Memory of layer `layer`: weights, keys and values.
    pub(super) fn layer_memory(&self, layer: u32) -> u64 {
        let kv = u64::from(self.kv_bytes_per_token_per_layer) * u64::from(self.kv_tokens);
        let weights = self.layer_bytes.get(layer as usize).copied();
        weights.unwrap_or(0).saturating_add(kv)
    }

    /// Memory of the layers of a range.
    pub fn memory_of(&self, layers: Layers) -> u64 {
        let all = (layers.first..layers.end).map(|layer| self.layer_memory(layer));
        all.fold(0, u64::saturating_add)
    }

    /// Memory in which any range of so many layers fits.
    pub fn memory_of_any(&self, layers: u32) -> u64 {
        let largest = (0..self.layers())
            .map(|layer| self.layer_memory(layer))
            .max();
        largest.unwrap_or(0).saturating_mul(layers.into())
    }

    /// Memory of a caller: head and private layers.
    pub fn caller_memory(&self) -> u64 {
        let hosted = self.hosted();
        let private = (0..self.layers()).filter(|&layer| !hosted.holds(layer));
        private.fold(self.head_bytes, |sum, layer| {
            sum.saturating_add(self.layer_memory(layer))
        })
    }
}

/// Goal of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)]
pub enum Purpose {
    /// Shortest time per token of one chat.
    Chat,
    /// Most tokens per second of many chats.
    Batch,
}

/// Purpose and caller of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Task {
    pub purpose: Purpose,
    /// Caller of the chats. `None`: the mean over all nodes that chat.
    pub caller: Option<NodeId>,
}

/// Time of a node without measurements: the longest of these times, at most four times their
/// median. Of an even number, the median is the lower one in the middle. Times of 0 do not count;
/// `None` without others.
pub fn slowest(times: impl Iterator<Item = u64>) -> Option<u64> {
    let mut times: Vec<u64> = times.filter(|&us| us > 0).collect();
    times.sort_unstable();
    let median = *times.get(times.len().saturating_sub(1) / 2)?;
    let longest = times.last().copied()?;
    Some(longest.min(median.saturating_mul(SLOWEST_TIMES_MEDIAN)))
}

/// Nodes and links of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Community {
    machines: BTreeMap<NodeId, Machine>,
    links: BTreeMap<(NodeId, NodeId), Link>,
}

impl Community {
    /// [`Self::for_caller`] without a caller: the same on all nodes.
    pub fn new(
        machines: impl IntoIterator<Item = Machine>,
        links: impl IntoIterator<Item = ((NodeId, NodeId), Link)>,
    ) -> Self {
        Self::for_caller(None, machines, links)
    }

    /// Keeps one entry per node and per link, and at most [`MAX_MACHINES`] nodes: `caller`, then
    /// hosts that serve layers of the model, then nodes that may; of equal ones, those that give
    /// most memory. A node without measurements counts as slow as the slowest measured host, at
    /// most four times their median.
    pub fn for_caller(
        caller: Option<NodeId>,
        machines: impl IntoIterator<Item = Machine>,
        links: impl IntoIterator<Item = ((NodeId, NodeId), Link)>,
    ) -> Self {
        let mut all: Vec<Machine> = machines.into_iter().collect();
        // The memory is only a claim. The log admits advertisements of trusted members only.
        let place = |m: &Machine| match (caller == Some(m.node), m.serves, m.holds.is_some()) {
            (true, ..) => 0,
            (_, true, true) => 1,
            (_, true, false) => 2,
            (_, false, _) => 3,
        };
        all.sort_unstable_by(|a, b| {
            let memory = || b.memory_bytes.cmp(&a.memory_bytes);
            let order = place(a).cmp(&place(b)).then_with(memory);
            order.then_with(|| a.cmp(b))
        });
        let mut machines: BTreeMap<NodeId, Machine> = BTreeMap::new();
        for machine in all {
            if machines.len() < MAX_MACHINES {
                machines.entry(machine.node).or_insert(machine);
            }
        }
        let hosts = machines.values().filter(|m| m.serves);
        let layer_us = slowest(hosts.map(|m| u64::from(m.layer_us)));
        let layer_us = layer_us.and_then(|us| u32::try_from(us).ok());
        let layer_us = layer_us.unwrap_or(UNMEASURED_LAYER_US);
        for machine in machines.values_mut() {
            if machine.layer_us == 0 {
                machine.layer_us = layer_us;
            }
            if machine.prefill_row_us == 0 {
                machine.prefill_row_us = machine.layer_us;
            }
        }
        let mut sorted: BTreeMap<(NodeId, NodeId), Link> = BTreeMap::new();
        for (ends, link) in links {
            let kept = sorted.entry(ends).or_insert(link);
            *kept = (*kept).max(link);
        }
        Self {
            machines,
            links: sorted,
        }
    }

    pub fn machine(&self, node: NodeId) -> Option<&Machine> {
        self.machines.get(&node)
    }

    pub fn machines(&self) -> impl Iterator<Item = &Machine> {
        self.machines.values()
    }

    /// The same links, and the machines that `of` returns for these.
    #[must_use]
    pub fn map(&self, of: impl Fn(&Machine) -> Option<Machine>) -> Self {
        let machines = self.machines().filter_map(of);
        Self {
            machines: machines.map(|m| (m.node, m)).collect(),
            links: self.links.clone(),
        }
    }

    /// The same links, and the machines for which `takes` is true.
    pub(super) fn only(&self, takes: impl Fn(&Machine) -> bool) -> Self {
        self.map(|machine| takes(machine).then(|| machine.clone()))
    }

    /// Link from `caller` to `host`. What `caller` did not measure comes from the other end.
    fn link(&self, caller: NodeId, host: NodeId) -> Link {
        let near = self.links.get(&(caller, host));
        let far = self.links.get(&(host, caller));
        let measured = || near.into_iter().chain(far);
        let kbit_s = measured()
            .map(|link| link.kbit_s)
            .find(|&kbit_s| kbit_s > 0);
        Link {
            delay_us: measured()
                .next()
                .map_or(UNMEASURED_DELAY_US, |link| link.delay_us),
            kbit_s: kbit_s.unwrap_or(UNMEASURED_KBIT_S),
        }
    }

    /// Delay of one way, and time of `bytes` on the wire. Zero between a node and itself.
    pub fn way(&self, caller: NodeId, host: NodeId, bytes: u64) -> (u64, u64) {
        if caller == host {
            return (0, 0);
        }
        let link = self.link(caller, host);
        let wire = bytes.saturating_mul(8_000) / u64::from(link.kbit_s);
        (u64::from(link.delay_us), wire)
    }

    /// Nodes whose chats a task is about.
    pub(super) fn callers(&self, task: Task) -> Vec<NodeId> {
        if let Some(caller) = task.caller {
            return vec![caller];
        }
        let chat: Vec<NodeId> = self
            .machines()
            .filter(|m| m.chats)
            .map(|m| m.node)
            .collect();
        match chat.is_empty() {
            true => self.machines.keys().copied().collect(),
            false => chat,
        }
    }

    /// Memory for hosted layers on `machine`.
    pub(super) fn free(&self, model: &Model, machine: &Machine) -> u64 {
        if !machine.serves {
            return 0;
        }
        machine
            .memory_bytes
            .saturating_sub(machine.callers_part(model))
    }

    /// Time of a span on `machine` beside its layers, and per layer: the mean over the callers.
    /// For a chat the hop there and back and the rest of a step; for batches the wire time, which bounds the rate.
    pub(super) fn span_us(&self, model: &Model, task: Task, machine: &Machine) -> (u64, u64) {
        let callers = self.callers(task);
        let row = u64::from(model.row_bytes);
        let ways = callers.iter().map(|&caller| {
            let (delay, wire) = self.way(caller, machine.node, row);
            match task.purpose {
                Purpose::Chat => 2 * (delay + wire),
                Purpose::Batch => wire,
            }
        });
        let way = ways.sum::<u64>() / (callers.len() as u64).max(1);
        match task.purpose {
            Purpose::Chat => (way + u64::from(machine.step_us), machine.layer_us.into()),
            Purpose::Batch => (way, machine.prefill_row_us.into()),
        }
    }
}
