//! Planner against exhaustive search, on random communities, and under churn.

mod churn;
mod examples;
mod exhaustive;
mod random;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hearthnet_bus::{NodeId, NodeKey};

use super::best::primary;
use super::cuts::Cuts;
use super::*;

pub(super) const MIB: u64 = 1 << 20;

/// Node ids in the order of their numbers.
pub(in crate::placement) fn node(n: usize) -> NodeId {
    static IDS: LazyLock<Vec<NodeId>> = LazyLock::new(|| {
        let mut ids: Vec<NodeId> = (1..=64)
            .map(|seed| NodeKey::from_secret(&[seed; 32]).id())
            .collect();
        ids.sort_unstable();
        ids
    });
    IDS[n]
}

/// Node with room for `layers` layers of [`model`], without the head.
pub(in crate::placement) fn machine(n: usize, layers: u64, layer_us: u32) -> Machine {
    Machine {
        memory_bytes: layers * 100 * MIB,
        serves: true,
        layer_us,
        prefill_row_us: layer_us / 4 + 1,
        head_us: 2_000,
        online_permille: 900,
        present_s: 3_600,
        ..Machine::new(node(n))
    }
}

/// Model with layers of 100 MiB, no keys and values, and no private layers.
pub(in crate::placement) fn model(layers: usize) -> Model {
    Model {
        layer_bytes: vec![100 * MIB; layers],
        head_bytes: 200 * MIB,
        row_bytes: 4_096,
        kv_bytes_per_token_per_layer: 0,
        kv_tokens: 0,
        uncut: Vec::new(),
        private_first: 0,
        private_last: 0,
    }
}

pub(in crate::placement) const CHAT: Task = Task {
    purpose: Purpose::Chat,
    caller: None,
};
pub(super) const BATCH: Task = Task {
    purpose: Purpose::Batch,
    caller: None,
};

pub(super) fn covers(model: &Model, ranges: &BTreeMap<NodeId, Layers>) -> bool {
    let hosted = model.hosted();
    (hosted.first..hosted.end).all(|layer| ranges.values().any(|r| r.holds(layer)))
}

/// Objective of a task for spans that no node repeats.
pub(super) fn cost(community: &Community, model: &Model, task: Task, spans: &[Span]) -> u64 {
    let costs = spans.iter().map(|span| {
        let machine = community.machine(span.node).unwrap();
        let (enter, layer) = community.span_us(model, task, machine);
        let compute = layer * u64::from(span.layers.count());
        match task.purpose {
            Purpose::Chat => enter + compute,
            Purpose::Batch => enter.max(compute),
        }
    });
    match task.purpose {
        Purpose::Chat => costs.sum(),
        Purpose::Batch => costs.max().unwrap_or(0),
    }
}

pub(super) fn spans_of(ranges: &BTreeMap<NodeId, Layers>) -> Vec<Span> {
    let spans = ranges.iter().map(|(&node, &layers)| Span { node, layers });
    let mut spans: Vec<Span> = spans.collect();
    spans.sort_by_key(|span| span.layers);
    spans
}

/// SplitMix64: the communities of a seed are the same in every run.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    /// Number of `from..to`.
    pub(super) fn roll(&mut self, from: u64, to: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        from + (z ^ (z >> 31)) % (to - from)
    }

    /// Community of up to 40 nodes, and a model of up to 128 layers.
    pub(super) fn community(&mut self) -> (Vec<Machine>, Vec<((NodeId, NodeId), Link)>, Model) {
        let count = self.roll(1, 41) as usize;
        let layers = self.roll(1, 129) as usize;
        let unlike = self.roll(0, 4) == 0;
        let mut model = model(layers);
        if unlike {
            for bytes in &mut model.layer_bytes {
                *bytes = self.roll(80, 121) * MIB;
            }
        }
        model.private_first = self.roll(0, 3).min(layers as u64 - 1) as u32;
        let machines = (0..count).map(|n| Machine {
            memory_bytes: self.roll(0, 40) * 100 * MIB,
            layer_us: self.roll(100, 5_000) as u32,
            prefill_row_us: self.roll(10, 500) as u32,
            step_us: self.roll(0, 600) as u32,
            online_permille: self.roll(0, 1_001) as u16,
            chats: self.roll(0, 2) == 0,
            ..machine(n, 0, 1)
        });
        let machines = machines.collect();
        let mut links = Vec::new();
        for a in 0..count {
            for b in 0..count {
                let link = Link {
                    delay_us: self.roll(100, 5_000) as u32,
                    kbit_s: self.roll(0, 1_000_000) as u32,
                };
                links.push(((node(a), node(b)), link));
            }
        }
        (machines, links, model)
    }
}
