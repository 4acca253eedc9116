//! State that the page shows, as JSON. Pure.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Adoption, Community, Level};
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::coverage::{Coverage, by_model};
use hearthnet_orchestrator::exact::is_exact;
use hearthnet_orchestrator::{Service, failovers};
use serde_json::{Value, json};

use super::node::{MayChange, PauseState};
use crate::node::Running;
use crate::planning::Words;

/// State of a program without a node.
pub(super) fn service(service: &Service) -> Value {
    let load = service.load();
    let models = service.models();
    let models = models.iter().map(|model| {
        json!({
            "id": model.id,
            "weights_sha256": model.weights.to_string(),
            "context": model.text.context,
        })
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "chats": {
            "running": load.running,
            "waiting": load.waiting,
            "failovers": failovers(),
            "models": models.collect::<Vec<_>>(),
        },
        "node": null,
        "community": null,
        "members": [],
        "models": [],
        "may_invite": [],
        "may_change": [],
        "needs_passphrase": false,
        "downloads": [],
        "waiting": [],
        // Without a node no layers are served, so there is nothing to pause.
        "paused": null,
        "pause_reason": null,
        "quiet_hours": null,
    })
}

/// Adds to the models whether this machine answers with them when no other home can.
pub(super) fn add_alone(page: &mut Value, service: &Service, fallback: bool) {
    let Some(shown) = page["chats"]["models"].as_array_mut() else {
        return;
    };
    let models = service.models();
    for shown in shown {
        let mut models = models.iter();
        let model = models.find(|it| shown["weights_sha256"] == it.weights.to_string());
        shown["alone"] = json!(fallback && model.is_some_and(|it| it.file.is_whole()));
    }
}

/// Adds whether the node serves layers to others.
pub(super) fn add_pause(page: &mut Value, pause: PauseState) {
    page["paused"] = json!(pause.paused);
    page["pause_reason"] = json!(pause.pause_reason);
}

/// Adds plans in words to the models.
pub(super) fn add_plans(page: &mut Value, plans: &BTreeMap<WeightsId, Words>) {
    let Some(models) = page["models"].as_array_mut() else {
        return;
    };
    for model in models {
        let mut plans = plans.iter();
        let found = plans.find(|(weights, _)| model["weights_sha256"] == weights.to_string());
        model["plan"] = json!(found.map(|(_, words)| words));
    }
}

/// Adds what the node knows of its community.
pub(super) fn add_node(
    page: &mut Value,
    state: &Community,
    own: &NodeId,
    running: &Running,
    now: u64,
) {
    let linked = running.peers.iter().filter(|peer| peer.connected);
    let mut there: BTreeSet<NodeId> = linked.map(|peer| peer.node).collect();
    there.insert(*own);
    let there = |node: &NodeId| there.contains(node);
    page["node"] = json!({
        "id": own.to_string(),
        "short": own.short(),
        "name": state.shown_name(own, now),
        "level": state.level(own),
        "serving": running.serving,
        "suspended": running.suspended,
        "gave": running.gave,
    });
    page["community"] = json!({ "name": state.name });
    let members = state.members().map(|(node, member)| {
        json!({
            "id": node.to_string(),
            "short": node.short(),
            "name": state.shown_name(node, now),
            "level": member.level,
            "this_node": node == own,
            "connected": there(node),
            "frozen": state.is_frozen(node),
            "convicted": state.reputation(node).is_convicted(),
            "gave": member.gave,
        })
    });
    page["members"] = members.collect();
    let serves = |node: &NodeId| there(node) && !state.reputation(node).is_convicted();
    let served = by_model(state.shards(now), serves);
    let served = served.iter().map(|it| model(it, state, there, now));
    let mut models: Vec<Value> = served.collect();
    add_adopted(&mut models, &state.models());
    page["models"] = json!(models);
    page["downloads"] = json!(running.downloads);
    let waiting = running.waiting.iter();
    let waiting = waiting.map(|(name, code)| json!({"name": name, "code": code}));
    page["waiting"] = waiting.collect();
    let levels = [Level::Member, Level::Trusted];
    let may = levels
        .into_iter()
        .filter(|level| state.may_invite(own, *level));
    page["may_invite"] = may.map(|level| json!(level)).collect();
}

/// Adds what the client that asks may change about members.
pub(super) fn add_changes(page: &mut Value, may: &MayChange) {
    page["may_change"] = json!(may.levels);
    page["needs_passphrase"] = json!(may.needs_passphrase);
}

/// Marks the models that the community has adopted, and adds those of which nothing is served yet.
fn add_adopted(models: &mut Vec<Value>, adopted: &[&Adoption]) {
    for adoption in adopted {
        let weights = WeightsId(adoption.weights).to_string();
        let served = models.iter_mut().find(|it| it["weights_sha256"] == weights);
        match served {
            Some(model) => model["adopted"] = json!(true),
            None => models.push(json!({
                "name": adoption.name,
                "weights_sha256": weights,
                "layers": adoption.layers,
                "missing": [[0, adoption.layers.saturating_sub(1)]],
                "hosts": [],
                "adopted": true,
            })),
        }
    }
}

fn model(
    model: &Coverage<'_>,
    state: &Community,
    there: impl Fn(&NodeId) -> bool,
    now: u64,
) -> Value {
    let hosts = model.shards.iter().map(|advert| {
        let shard = &advert.descriptor;
        json!({
            "id": advert.author.to_string(),
            "name": state.shown_name(&advert.author, now),
            "connected": there(&advert.author),
            "layers": shard.layer_range,
            "ms_per_token": shard.ms_per_token,
            "exact": is_exact(&shard.arithmetic),
        })
    });
    json!({
        "name": model.names.first(),
        "weights_sha256": model.weights,
        "layers": model.total,
        "missing": model.missing,
        "hosts": hosts.collect::<Vec<_>>(),
        "adopted": false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::adopted::adoption_for_test;

    #[test]
    fn an_adopted_model_is_shown_once_whether_or_not_it_is_served() {
        let (served, new) = (adoption_for_test("served", 1), adoption_for_test("new", 2));
        let other = json!({"name": "other", "weights_sha256": "ff", "adopted": false});
        let weights = WeightsId(served.weights).to_string();
        let first = json!({"name": "served", "weights_sha256": weights, "adopted": false});
        let mut models = vec![other, first];
        add_adopted(&mut models, &[&new, &served]);
        let shown = models.iter().map(|it| (&it["name"], &it["adopted"]));
        let shown: Vec<_> = shown.collect();
        let expected = [("other", false), ("served", true), ("new", true)];
        assert_eq!(shown.len(), expected.len());
        for ((name, adopted), shown) in expected.into_iter().zip(shown) {
            assert_eq!(shown, (&json!(name), &json!(adopted)));
        }
        assert_eq!(models[2]["missing"], json!([[0, 31]]));
    }

    #[test]
    fn a_plan_stands_at_its_model_and_other_models_have_none() {
        let (planned, other) = (WeightsId([1; 32]), WeightsId([2; 32]));
        let mut page = json!({"models": [
            {"weights_sha256": other.to_string()},
            {"weights_sha256": planned.to_string()},
        ]});
        let words = Words::default();
        add_plans(&mut page, &BTreeMap::from([(planned, words)]));
        assert!(page["models"][0]["plan"].is_null());
        let plan = json!({"words": [], "details": []});
        assert_eq!(page["models"][1]["plan"], plan);
    }
}
