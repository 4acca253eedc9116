//! Estimates where a model could run: in this machine's memory, and on the community's hosts.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Community, Level};
use hearthnet_files::families::Family;
use hearthnet_files::{TextId, WeightsId};
use hearthnet_hub::catalogue::ModelEntry;
use hearthnet_orchestrator::coverage::{Coverage, by_model};
use hearthnet_platform::hardware::available_bytes;
use serde::Serialize;

use crate::cli::args::Global;
use crate::config::Context;
use crate::home::{Home, OnDisk, now_ms};
use crate::models::memory::{needed_bytes, weights_budget};

/// Memory available to run models.
pub(crate) struct Capacity {
    /// Free memory of this machine in bytes, if the system reports it.
    pub(crate) free: Option<u64>,
    /// Capacity of this node's community.
    pub(crate) community: Option<HostCapacity>,
}

/// Memory of a community's hosts.
pub(crate) struct HostCapacity {
    pub(crate) name: String,
    /// Bytes of weights for which its members announced memory, or which they hold now. If this
    /// machine has announced none and holds none, its own budget is added.
    pub(crate) bytes: u64,
    served: Vec<Served>,
}

/// Model of which hosts serve layers.
struct Served {
    names: Vec<String>,
    weights: String,
    layers: u32,
    complete: bool,
    /// Identity of the text (tokenizer and chat template) and name, for each host.
    texts: Vec<(String, String)>,
}

/// Availability of a model in a community.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Availability {
    /// Hosts serve all of its layers.
    Served,
    /// Hosts serve some of its layers.
    Partly,
    /// Its weights would fit into the memory that hosts give to layers of any model.
    Could,
    No,
}

/// This node's community as stored in its log, without contacting other nodes.
pub(crate) fn community(global: &Global) -> Option<Home> {
    let dir = global.dir().ok()?;
    match Home::on_disk(global, &dir) {
        Ok(OnDisk::Here(home)) => Some(home),
        _ => None,
    }
}

impl Capacity {
    /// `home` is this node's, if it is in a community.
    pub(crate) fn of(cx: &Context, home: Option<&Home>) -> Self {
        let own = weights_budget(&cx.config, 0);
        Self {
            free: available_bytes(),
            community: home
                .map(|home| HostCapacity::of(&home.state(), home.key.id(), own, now_ms())),
        }
    }

    /// Whether a model of `bytes` fits into this machine's free memory; `None` if that is unknown.
    pub(crate) fn runs_here(&self, bytes: u64) -> Option<bool> {
        self.free.map(|free| needed_bytes(bytes) <= free)
    }
}

impl HostCapacity {
    /// `own` is the memory that this machine would give, if it does not host layers yet.
    pub(super) fn of(state: &Community, this: NodeId, own: u64, now: u64) -> Self {
        // A host may still advertise a range that it has left; the larger range of a model counts.
        let mut hosts: BTreeMap<(NodeId, String), u64> = BTreeMap::new();
        for advert in state.usable_shards(now) {
            let descriptor = &advert.descriptor;
            let holds = descriptor.weights_mb.saturating_mul(1 << 20);
            let model = descriptor.weights_sha256.clone();
            let most = hosts.entry((advert.author, model)).or_default();
            *most = holds.max(*most);
        }
        let mut given: BTreeMap<NodeId, u64> = BTreeMap::new();
        for ((node, _), holds) in hosts {
            let all = given.entry(node).or_default();
            *all = all.saturating_add(holds);
        }
        // A ninth of the announced memory is left to keys and values.
        let announced = state
            .measured(now)
            .filter(|(node, _)| state.level(node) >= Some(Level::Trusted))
            .filter(|(node, _)| !state.reputation(node).is_convicted())
            .filter(|(_, measured)| measured.memory_bytes > 0);
        for (node, measured) in announced {
            let all = given.entry(*node).or_default();
            *all = (measured.memory_bytes / 9 * 8).max(*all);
        }
        given.entry(this).or_insert(own);
        let served = by_model(state.usable_shards(now), |_| true);
        Self {
            name: state.name.clone(),
            bytes: given.values().fold(0, |all, one| all.saturating_add(*one)),
            served: served
                .iter()
                .map(|model| Served {
                    names: model.names.iter().map(|name| (*name).to_owned()).collect(),
                    weights: model.weights.to_owned(),
                    layers: model.total,
                    complete: model.missing.is_empty(),
                    texts: texts(model, state, now),
                })
                .collect(),
        }
    }

    /// Hosts that serve a file's weights with another tokenizer or chat template.
    pub(crate) fn with_other_text(&self, weights: WeightsId, text: TextId) -> Vec<String> {
        let (weights, text) = (weights.to_string(), text.to_string());
        let served = self
            .served
            .iter()
            .filter(|served| served.weights == weights);
        let others = served.flat_map(|served| &served.texts);
        let others = others.filter(|(theirs, _)| *theirs != text);
        others.map(|(_, host)| host.clone()).collect()
    }

    /// Availability of a model: identified by its weights if known, else by its id.
    pub(crate) fn of_model(
        &self,
        entry: Option<&ModelEntry>,
        weights: Option<WeightsId>,
        bytes: u64,
    ) -> Availability {
        let is_it = |served: &&Served| match (weights, entry) {
            (Some(weights), _) => served.weights == weights.to_string(),
            (None, Some(entry)) => served
                .names
                .iter()
                .any(|name| is_called(entry, name, served.layers)),
            (None, None) => false,
        };
        match self.served.iter().filter(is_it).map(|s| s.complete).max() {
            Some(true) => Availability::Served,
            Some(false) => Availability::Partly,
            // Encoders have no layers for hosts.
            None if bytes <= self.bytes && !entry.is_some_and(is_encoder) => Availability::Could,
            None => Availability::No,
        }
    }
}

/// Whether the model reads a whole text on one machine.
fn is_encoder(entry: &ModelEntry) -> bool {
    let shape = entry.shape.as_ref();
    let family = shape.and_then(|shape| Family::named(&shape.family));
    family.is_some_and(|family| family.encoder.is_some())
}

/// Identity of the text (tokenizer and chat template) and name, for each host.
fn texts(model: &Coverage<'_>, state: &Community, now: u64) -> Vec<(String, String)> {
    let texts = model.by_text().into_iter();
    let each = texts.flat_map(|(text, hosts)| hosts.into_iter().map(move |host| (text, host)));
    each.map(|(text, host)| (text.to_owned(), state.label(&host, now)))
        .collect()
}

/// Warning if hosts with the same weights disagree on tokenizer or chat template.
pub(crate) fn text_disagreement(
    model: &Coverage<'_>,
    state: &Community,
    now: u64,
) -> Option<String> {
    let texts = texts(model, state, now);
    let (first, _) = texts.first()?;
    if texts.iter().all(|(text, _)| text == first) {
        return None;
    }
    let each = texts.iter().map(|(text, host)| {
        let short: String = text.chars().take(8).collect();
        format!("{host} {short}")
    });
    Some(format!(
        "same weights, and not the same tokenizer and chat template: {} (`hearthnet model inspect`)",
        each.collect::<Vec<_>>().join(", ")
    ))
}

/// Warning if hosts serve a file's weights with another tokenizer or chat template.
pub(crate) fn other_text(model: &str, hosts: &[String]) -> String {
    format!(
        "warning: the tokenizer or the chat template of {model} here differs from that of {}, which serve the same weights: one of the files was changed. `hearthnet model inspect` shows the identity of the text",
        hosts.join(", ")
    )
}

/// Whether a served name and number of layers match this entry.
pub(crate) fn is_called(entry: &ModelEntry, name: &str, layers: u32) -> bool {
    let shape = entry.shape.as_ref();
    entry.id.eq_ignore_ascii_case(name) && shape.is_none_or(|shape| shape.layers == layers)
}

#[cfg(test)]
impl Capacity {
    /// Free memory here, and memory given to a community that serves nothing yet.
    pub(crate) fn for_test(free: Option<u64>, given: Option<u64>) -> Self {
        let community = given.map(|bytes| HostCapacity {
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
    use hearthnet_bus::log::{Body, Measured};
    use hearthnet_bus::testing::{self as bus, id, key};
    use hearthnet_hub::catalogue::Catalogue;

    #[test]
    fn a_model_is_served_in_part_or_could_be_by_weights_or_by_name_and_depth() {
        let catalogue = Catalogue::built_in().unwrap();
        let entry = catalogue.get("qwen3-4b").unwrap();
        let served = |name: &str, weights: u8, layers: u32, complete: bool| Served {
            names: vec!["a".to_owned(), name.to_owned()],
            weights: WeightsId([weights; 32]).to_string(),
            layers,
            complete,
            texts: vec![(TextId([4; 32]).to_string(), "kim".to_owned())],
        };
        let given = HostCapacity {
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
        assert_eq!(of(Some(entry), None, entry.bytes), Availability::Served);
        assert_eq!(of(Some(entry), Some(1), entry.bytes), Availability::Partly);
        assert_eq!(of(Some(entry), Some(2), entry.bytes), Availability::Served);
        // A model with the same name but other layers is another model.
        assert_eq!(of(Some(entry), Some(9), entry.bytes), Availability::Could);
        let other = catalogue.get("qwen3-8b").unwrap();
        assert_eq!(of(Some(other), None, other.bytes), Availability::No);
        assert_eq!(of(None, None, 3 << 30), Availability::Could);
        let encoder = catalogue.get("embeddinggemma-300m").unwrap();
        assert_eq!(of(Some(encoder), None, encoder.bytes), Availability::No);
        let other =
            |weights, text| given.with_other_text(WeightsId([weights; 32]), TextId([text; 32]));
        assert_eq!(other(2, 5), ["kim"]);
        assert!(other(2, 4).is_empty() && other(9, 5).is_empty());
    }

    #[test]
    fn the_memory_that_members_announce_counts_if_they_may_serve() {
        let home = bus::Home::founded(key(1), true);
        for (seed, level) in [(2, Level::Trusted), (3, Level::Member)] {
            home.admit(id(seed), level);
        }
        let measure = |seed: u8, memory_bytes: u64| {
            let measured = Measured {
                running_s: 60,
                memory_bytes,
                online_permille: 1000,
                ..Measured::default()
            };
            let body = Body::NodeMeasured(measured);
            home.log.append(&key(seed), body, now_ms()).unwrap();
        };
        let bytes = || HostCapacity::of(&home.log.state(), id(1), 1 << 20, now_ms()).bytes;
        assert_eq!(bytes(), 1 << 20);
        measure(2, 9 << 30);
        measure(3, 9 << 30);
        assert_eq!(bytes(), (8 << 30) + (1 << 20));
        measure(1, 9 << 20);
        assert_eq!(bytes(), (8 << 30) + (8 << 20));
        // Its models are being opened, or it pauses.
        measure(1, 0);
        assert_eq!(bytes(), (8 << 30) + (1 << 20));
    }
}
