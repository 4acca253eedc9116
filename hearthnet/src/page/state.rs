//! State that the page shows, as JSON. Pure.

use std::collections::BTreeSet;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Community, Level};
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::coverage::{Coverage, by_model};
use hearthnet_orchestrator::exact::is_exact;
use serde_json::{Value, json};

use crate::node::Running;

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
            "models": models.collect::<Vec<_>>(),
        },
        "node": null,
        "community": null,
        "members": [],
        "models": [],
        "may_invite": [],
        "downloads": [],
        // Not known: this node cannot be paused from here.
        "paused": null,
    })
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
        })
    });
    page["members"] = members.collect();
    let models = by_model(state.shards(now), there);
    let models = models.iter().map(|it| model(it, state, there, now));
    page["models"] = models.collect();
    page["downloads"] = json!(running.downloads);
    let levels = [Level::Member, Level::Trusted];
    let may = levels
        .into_iter()
        .filter(|level| state.may_invite(own, *level));
    page["may_invite"] = may.map(|level| json!(level)).collect();
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
    })
}
