//! Where a model could run: in this machine's memory, and with what the community's hosts give.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Community;
use hearthnet_model::WeightsId;
use hearthnet_model::catalogue::ModelEntry;
use hearthnet_orchestrator::coverage::by_model;
use serde::Serialize;

use crate::args::Global;
use crate::community::{Home, OnDisk, now_ms};
use crate::context::Context;
use crate::memory::{available_bytes, needed_bytes, weights_budget};

/// What there is to run models with.
pub(crate) struct Room {
    /// Bytes of this machine's memory that are free now, where the system tells.
    pub(crate) free: Option<u64>,
    /// The community that this node is in.
    pub(crate) community: Option<Given>,
}

/// What a community's hosts give.
pub(crate) struct Given {
    /// The community's name.
    pub(crate) name: String,
    /// Bytes of layers that its hosts hold now, and that this machine would hold if it holds none.
    pub(crate) bytes: u64,
    served: Vec<Served>,
}

/// A model of which hosts serve layers.
struct Served {
    names: Vec<String>,
    weights: String,
    layers: u32,
    complete: bool,
}

/// What a community does of a model, or could.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum There {
    /// Hosts serve all of its layers.
    Served,
    /// Hosts serve some of its layers.
    Partly,
    /// Its weights would fit into the memory that hosts give to layers of whatever model.
    Could,
    /// They would not.
    No,
}

impl There {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Partly => "partly",
            Self::Could => "could",
            Self::No => "no",
        }
    }
}

/// This node's community as its log knows it, without asking anybody.
pub(crate) fn community(global: &Global) -> Option<Home> {
    let dir = global.dir().ok()?;
    match Home::on_disk(global, &dir) {
        Ok(OnDisk::Here(home)) => Some(home),
        _ => None,
    }
}

impl Room {
    pub(crate) fn of(cx: &Context) -> Self {
        let host = &cx.config.research.distributed_inference.host;
        let own = weights_budget(host.memory_budget_mb);
        Self {
            free: available_bytes(),
            community: community(&cx.global)
                .map(|home| Given::of(&home.state(), home.key.id(), own, now_ms())),
        }
    }

    /// Whether a model of so many bytes fits into this machine's memory; `None` where the system
    /// does not tell how much that is.
    pub(crate) fn runs_here(&self, bytes: u64) -> Option<bool> {
        self.free.map(|free| needed_bytes(bytes) <= free)
    }
}

impl Given {
    /// `own` is what this machine would give, if it does not yet.
    fn of(state: &Community, this: NodeId, own: u64, now: u64) -> Self {
        // A host may still advertise a range that it has left: the larger one counts.
        let mut hosts: BTreeMap<NodeId, u64> = BTreeMap::new();
        for advert in state.shards(now) {
            let holds = advert.descriptor.weights_mb.saturating_mul(1 << 20);
            let most = hosts.entry(advert.author).or_default();
            *most = holds.max(*most);
        }
        hosts.entry(this).or_insert(own);
        let served = by_model(state.shards(now), |_| true);
        Self {
            name: state.name.clone(),
            bytes: hosts.values().fold(0, |all, one| all.saturating_add(*one)),
            served: served
                .iter()
                .map(|model| Served {
                    names: model.names.iter().map(|name| (*name).to_owned()).collect(),
                    weights: model.weights.to_owned(),
                    layers: model.total,
                    complete: model.missing.is_empty(),
                })
                .collect(),
        }
    }

    /// What is done, or could be, of a model: by its weights where they are known, else by its id.
    pub(crate) fn of_model(
        &self,
        entry: Option<&ModelEntry>,
        weights: Option<WeightsId>,
        bytes: u64,
    ) -> There {
        let is_it = |served: &&Served| match (weights, entry) {
            (Some(weights), _) => served.weights == weights.to_string(),
            (None, Some(entry)) => served
                .names
                .iter()
                .any(|name| is_called(entry, name, served.layers)),
            (None, None) => false,
        };
        let mut all = self.served.iter().filter(is_it).map(|s| s.complete);
        match all.clone().any(|complete| complete) {
            true => There::Served,
            false if all.next().is_some() => There::Partly,
            false if bytes <= self.bytes => There::Could,
            false => There::No,
        }
    }
}

/// Whether hosts that serve a model of that name and so many layers mean this entry.
pub(crate) fn is_called(entry: &ModelEntry, name: &str, layers: u32) -> bool {
    let shape = entry.shape.as_ref();
    entry.id.eq_ignore_ascii_case(name) && shape.is_none_or(|shape| shape.layers == layers)
}

#[cfg(test)]
impl Room {
    /// So much memory here, and so much given to a community in which nothing is served yet.
    pub(crate) fn for_test(free: Option<u64>, given: Option<u64>) -> Self {
        let community = given.map(|bytes| Given {
            name: "Elm Street".to_owned(),
            bytes,
            served: Vec::new(),
        });
        Self { free, community }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_model::catalogue::Catalogue;

    #[test]
    fn a_model_is_served_in_part_or_could_be_by_weights_or_by_name_and_depth() {
        let catalogue = Catalogue::built_in().unwrap();
        let entry = catalogue.get("qwen3-4b").unwrap();
        let served = |name: &str, weights: u8, layers: u32, complete: bool| Served {
            names: vec!["a".to_owned(), name.to_owned()],
            weights: WeightsId([weights; 32]).to_string(),
            layers,
            complete,
        };
        let given = Given {
            name: "Elm".to_owned(),
            bytes: 3 << 30,
            served: vec![
                served("Qwen3-4B", 1, 36, false),
                served("qwen3-4b", 2, 36, true),
                served("qwen3-8b", 3, 12, true),
            ],
        };
        let of = |entry, weights: Option<u8>, bytes| {
            given.of_model(entry, weights.map(|w| WeightsId([w; 32])), bytes)
        };
        assert_eq!(of(Some(entry), None, entry.bytes), There::Served);
        assert_eq!(of(Some(entry), Some(1), entry.bytes), There::Partly);
        assert_eq!(of(Some(entry), Some(2), entry.bytes), There::Served);
        // What is called so and is something else, is not this model.
        assert_eq!(of(Some(entry), Some(9), entry.bytes), There::Could);
        let other = catalogue.get("qwen3-8b").unwrap();
        assert_eq!(of(Some(other), None, other.bytes), There::No);
        assert_eq!(of(None, None, 3 << 30), There::Could);
    }
}
