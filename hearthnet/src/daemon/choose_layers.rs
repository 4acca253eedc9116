//! Choice of the layers of a running host: observes the other hosts and their links, and asks the
//! pure rules of `hearthnet_orchestrator::placement`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use hearthnet_bus::node::Node;
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::coverage::held_by_others;
use hearthnet_orchestrator::placement::auto::{
    Loads, LostLinks, MissingSince, Situation, Together, WaitLimits, Wish, left_alone,
};
use hearthnet_orchestrator::placement::observed::observed_by_host;
use hearthnet_orchestrator::placement::plan::Model;
use hearthnet_orchestrator::placement::shrink::ShrinkWait;
use hearthnet_orchestrator::placement::{Held, choose_near, legal, missing, room};
use tokio::task::spawn_blocking;

use super::layer_request::Memory;
use crate::cli::args::Layers;
use crate::cli::{Failure, bytes};
use crate::home::{Home, now_ms};
use crate::hosting::host_engine::HostEngine;
use crate::models::OpenModel;
use crate::planning::shape;

/// Interval of decisions while the other hosts serve the same layers. A plan takes up to 0.1 s.
const DECISION_INTERVAL: Duration = Duration::from_secs(10);

/// Other hosts of the model.
#[derive(Debug, Clone, Default, PartialEq)]
struct Seen {
    /// Advertised ranges.
    others: Vec<Held>,
    /// Nodes whose links have ended.
    gone: BTreeSet<NodeId>,
    /// True without any link.
    is_alone: bool,
    /// True if, before that, there was a link to one of the others.
    is_left_alone: bool,
}

impl Seen {
    fn reachable(&self) -> impl Iterator<Item = &Held> {
        let held = self.others.iter();
        held.filter(|held| !self.gone.contains(&held.node))
    }
}

/// State of a host with `--layers auto`.
struct Auto {
    memory: Memory,
    /// Number of layers for which that memory has room.
    in_memory: u32,
    /// Number of layers of which the KV budget holds a page.
    in_kv: u32,
    /// Number of layers for which the disk has room.
    on_disk: u32,
    layer_bytes: Vec<u64>,
    /// The model without private layers, so that hosts serve all layers.
    shape: Arc<Model>,
    loads: Loads,
    missing: MissingSince,
    /// Input, time and result of the last decision.
    decided: Option<(((u32, u32), bool, u32, Seen), Instant, Option<Wish>)>,
    /// Range that was too large for the limit of bytes.
    refused: Option<(u32, u32)>,
}

/// Chooses the layers of one host, for as long as it is asked to serve.
pub(super) struct Chooser {
    home: Home,
    node: Node,
    own: NodeId,
    weights: WeightsId,
    total: u32,
    /// Layers that one machine must run.
    joined: Range<u32>,
    /// Origin of the times below; a changed clock moves no layers.
    start: Instant,
    links: LostLinks,
    together: Together,
    seen: Seen,
    shrink: ShrinkWait,
    auto: Option<Auto>,
}

impl Chooser {
    /// Chooser for a host of `layers` of a model, which knows no other hosts yet. With `--layers
    /// auto`, the layers fit into `memory`, its part for keys and values holds pages of `in_kv` of
    /// them, and the disk has room for `on_disk` of them.
    ///
    /// # Errors
    /// Returns an error if the engine cannot tell the size of layers.
    pub(super) fn new(
        home: &Home,
        node: &Node,
        (model, engine): (&OpenModel, &HostEngine),
        (layers, on_disk): (Layers, u32),
        (memory, in_kv): (Memory, u32),
    ) -> Result<Self, Failure> {
        let auto = match layers {
            Layers::Range(..) => None,
            Layers::Auto => {
                let layer_bytes = engine.layer_bytes(&model.file)?;
                let mut auto = Auto {
                    memory,
                    in_memory: room(memory.weights, &layer_bytes),
                    in_kv,
                    on_disk,
                    layer_bytes,
                    shape: Arc::new(shape(&model.file, 0..model.file.spec().layers)),
                    loads: Loads::default(),
                    missing: MissingSince::default(),
                    decided: None,
                    refused: None,
                };
                auto.loads = Loads::new(auto.bytes_of_any(auto.room()));
                Some(auto)
            }
        };
        Ok(Self {
            home: home.clone(),
            node: node.clone(),
            own: home.key.id(),
            weights: model.weights,
            total: model.file.spec().layers,
            joined: model.file.spec().together(),
            start: Instant::now(),
            links: LostLinks::default(),
            together: Together::default(),
            seen: Seen::default(),
            shrink: ShrinkWait::default(),
            auto,
        })
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Looks at the links and at what others serve.
    pub(super) fn look(&mut self) {
        let peers = self.node.peers().into_iter();
        let linked = peers.filter(|peer| peer.link.is_some());
        let linked: BTreeSet<NodeId> = linked.map(|peer| peer.node).collect();
        let gone = self.links.look(self.now_ms(), &linked);
        let (state, weights) = (self.home.state(), self.weights.to_string());
        let others = held_by_others(
            state.usable_shards(now_ms()),
            self.own,
            &weights,
            self.total,
        );
        let has_members = state.members().any(|(node, _)| *node != self.own);
        let now = self.now_ms();
        let is_left_alone = self.together.has_ended(now, &linked, &others, has_members);
        self.seen = Seen {
            gone,
            is_alone: linked.is_empty(),
            is_left_alone,
            others,
        };
    }

    /// Ranges that reachable hosts serve, as of the last look.
    pub(super) fn served_by_others(&self) -> Vec<(u32, u32)> {
        self.seen.reachable().map(|held| held.range).collect()
    }

    /// First range of a host that serves nothing yet, and has the weights of the layers that are
    /// `here`. Others do not know it, so it is in no plan.
    pub(super) fn first(&self, here: impl Fn(u32) -> bool) -> Option<(u32, u32)> {
        let others: Vec<Held> = self.seen.reachable().copied().collect();
        let room = self.room()?;
        let range = choose_near(self.total, room, &others, here)?;
        legal(range, &self.joined, room)
    }

    /// Number of layers that the host can hold; `None` if its layers were named.
    pub(super) fn room(&self) -> Option<u32> {
        Some(self.auto.as_ref()?.room())
    }

    /// Takes the memory that the host has at present, and the number of layers of which its part for
    /// keys and values holds a page.
    pub(super) fn set_budget(&mut self, (memory, in_kv): (Memory, u32)) {
        let Some(auto) = &mut self.auto else {
            return;
        };
        let before = auto.room();
        auto.in_memory = room(memory.weights, &auto.layer_bytes);
        (auto.memory, auto.in_kv) = (memory, in_kv);
        if auto.room() != before {
            auto.decided = None;
        }
    }

    /// Resources that a host that is left alone lacks to take all layers, and the settings that
    /// would help. `None` after a short loss of links.
    pub(super) fn lacks(&self) -> Option<String> {
        let auto = self.auto.as_ref()?;
        let is_alone = self.seen.is_left_alone && self.seen.reachable().next().is_none();
        (is_alone && auto.room() < self.total).then(|| auto.lacks(self.total))
    }

    /// Debouncer of a host that has just advertised a range.
    pub(super) fn wait_limits(&self) -> WaitLimits {
        WaitLimits::new(self.now_ms())
    }

    /// Range to which the host of `range` should move now, if any, as of the last look.
    pub(super) async fn due(
        &mut self,
        range: (u32, u32),
        limits: &mut WaitLimits,
    ) -> Option<(u32, u32)> {
        let now_ms = self.now_ms();
        let wish = self.wish(range, !limits.is_new(now_ms)).await;
        let next = limits.look(now_ms, wish)?;
        let (auto, cause) = (self.auto.as_mut()?, wish?.cause);
        let size = auto.bytes_of(next);
        if auto.loads.allows(now_ms, size, cause) {
            return Some(next);
        }
        if auto.refused.replace(next) != Some(next) {
            let (lo, hi) = next;
            tracing::info!(
                "layers {lo}-{hi} ({}) would be needed more, but this host has moved too often within an hour",
                bytes(size)
            );
        }
        None
    }

    /// Layers of `range` that the host keeps, if that is too large for its memory, and once it is its
    /// turn to give up the others. `is_idle`: no answer runs.
    pub(super) fn kept(
        &mut self,
        range: (u32, u32),
        is_too_large: bool,
        is_idle: bool,
    ) -> Option<(u32, u32)> {
        let (now_ms, node) = (self.now_ms(), self.own);
        let others: Vec<Held> = self.seen.reachable().copied().collect();
        let hosts = (node, others.as_slice());
        if !self.shrink.look(now_ms, hosts, is_too_large, is_idle) {
            return None;
        }
        let situation = Situation {
            total: self.total,
            room: self.room()?,
            mine: Held { node, range },
            others: &self.seen.others,
            gone: &self.seen.gone,
            passed_over: 0,
            measured: None,
        };
        legal(situation.kept()?, &self.joined, situation.room)
    }

    /// Counts the load of a range to which the host moves.
    pub(super) fn moves_to(&mut self, range: (u32, u32)) {
        let now_ms = self.now_ms();
        if let Some(auto) = &mut self.auto {
            let size = auto.bytes_of(range);
            auto.loads.add(now_ms, size);
        }
    }

    async fn wish(&mut self, range: (u32, u32), may_plan: bool) -> Option<Wish> {
        let (now, others) = (self.now_ms(), self.served_by_others());
        let auto = self.auto.as_mut()?;
        let held: Vec<(u32, u32)> = others.into_iter().chain([range]).collect();
        // A host without links sees no other one that could take layers.
        let runs = match self.seen.is_alone {
            true => Vec::new(),
            false => missing(self.total, &held),
        };
        let passed_over = auto.missing.look(now, runs);
        if self.seen.is_alone {
            let wish = left_alone(self.total, auto.room(), range);
            return wish.filter(|_| self.seen.is_left_alone);
        }
        let input = (range, may_plan, passed_over, self.seen.clone());
        if let Some((before, at, wish)) = &auto.decided
            && *before == input
            && at.elapsed() < DECISION_INTERVAL
        {
            return *wish;
        }
        let (own, total, room) = (self.own, self.total, auto.room());
        let (seen, shape) = (self.seen.clone(), Arc::clone(&auto.shape));
        let joined = self.joined.clone();
        let (home, weights) = (self.home.clone(), self.weights);
        let decide = move || {
            let reachable = seen.reachable().map(|held| held.node);
            let reachable: BTreeSet<NodeId> = reachable.collect();
            let state = home.state();
            let measured = may_plan
                .then(|| observed_by_host(own, &reachable, &state, weights, now_ms()))
                .flatten();
            let situation = Situation {
                total,
                room,
                mine: Held { node: own, range },
                others: &seen.others,
                gone: &seen.gone,
                passed_over,
                measured: measured.as_ref().map(|measured| (measured, &*shape)),
            };
            let wish = situation.wish()?;
            let next = legal(wish.range, &joined, room)?;
            (next != range).then_some(Wish {
                range: next,
                cause: wish.cause,
            })
        };
        let wish = spawn_blocking(decide).await.ok().flatten();
        auto.decided = Some((input, Instant::now(), wish));
        wish
    }
}

impl Auto {
    /// Number of layers that the host can hold.
    fn room(&self) -> u32 {
        self.in_memory.min(self.in_kv).min(self.on_disk)
    }

    /// Resources that are missing for all `total` layers, and the settings that would help.
    fn lacks(&self, total: u32) -> String {
        let mut lacks = Vec::new();
        if self.in_memory < total {
            let more = self.bytes_of_any(total).saturating_sub(self.memory.weights);
            lacks.push(memory_lacks(self.in_memory, more, self.memory.models));
        }
        if self.in_kv < total {
            lacks.push(format!(
                "memory for keys and values of {} of them \
                 (research.distributed_inference.host.kv_budget_mb)",
                self.in_kv
            ));
        }
        if self.on_disk < total {
            lacks.push(format!(
                "room on the disk for {} of them (manners.disk_gb)",
                self.on_disk
            ));
        }
        format!(
            "This machine does not serve all {total} layers alone; it has {}",
            lacks.join(", and ")
        )
    }

    /// Bytes of so many layers, each counted as large as the largest.
    fn bytes_of_any(&self, layers: u32) -> u64 {
        let largest = self.layer_bytes.iter().copied().max().unwrap_or(0);
        largest.saturating_mul(u64::from(layers))
    }

    /// Bytes of the layers of a range.
    fn bytes_of(&self, (lo, hi): (u32, u32)) -> u64 {
        let layers = self.layer_bytes.get(lo as usize..=hi as usize);
        let layers = layers.unwrap_or_default().iter();
        layers.fold(0, |sum: u64, layer| sum.saturating_add(*layer))
    }
}

/// Memory that a host lacks which has room for `layers` layers, and needs `more` bytes for all. Each of
/// `models` models gets the same share of what its owner gives.
fn memory_lacks(layers: u32, more: u64, models: usize) -> String {
    let all = bytes(more.saturating_mul(models.max(1) as u64));
    let shared = match models {
        0 | 1 => String::new(),
        _ => format!(", because {models} models share it equally"),
    };
    format!(
        "memory for {layers} of them: {all} more would do{shared} (manners.memory_percent, or \
         research.distributed_inference.host.memory_budget_mb)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_would_do_counts_the_shares_of_all_models() {
        let alone = memory_lacks(2, 3 << 20, 1);
        assert!(alone.starts_with("memory for 2 of them: 3.0 MiB more would do (manners"));
        let beside = memory_lacks(2, 3 << 20, 4);
        let said = "12.0 MiB more would do, because 4 models share it equally";
        assert!(beside.contains(said), "{beside}");
    }
}
