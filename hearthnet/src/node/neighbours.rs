//! Watches, while a node runs, refusals of its key by other members and its clock offset. Records
//! both for commands.

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Level;
use hearthnet_bus::node::{Node, WeakNode};

use crate::home::{Home, Membership, key_status, now_ms};

/// Handles refusals of this node's key. A refusal by an anchor stops everything that runs here.
/// Refusals by other members do not bind; they are only recorded, and shown by commands, if no
/// other member is reachable, or if this node is the only anchor, so that only others can see that
/// its key has two histories. Returns `true` if there is news.
pub(super) fn handle_refusals(node: &Node, home: &Home) -> bool {
    let (state, own) = (home.state(), home.key.id());
    let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
    let alone = !state
        .members()
        .any(|(node, _)| *node != own && anchor(node));
    let peers = node.peers().into_iter();
    let linked = peers.filter_map(|peer| peer.link.map(|_| peer.node));
    let linked: Vec<NodeId> = linked.collect();
    let said = node.refused_by();
    if let Some(by) = said.iter().find(|by| anchor(by)) {
        return home.record_refusal(by);
    }
    if linked.iter().any(|node| alone || anchor(node)) {
        Membership::note_refusal(&home.dir, None);
    } else if let Some(by) = said.first().filter(|_| alone || linked.is_empty()) {
        return Membership::note_refusal(&home.dir, Some(state.label(by, now_ms())));
    }
    false
}

/// Interval at which the clock is compared and the membership file updated.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Records refusals, clock offset and membership until the node is dropped. After a refusal by an
/// anchor it stops everything that runs here. With `warns`, for a long-lived node, it prints
/// warnings; a command prints them when it ends.
pub(super) async fn watch(node: WeakNode, home: Home, warns: bool) {
    let Some(mut links) = node.upgrade().map(|node| node.changes()) else {
        return;
    };
    let mut changes = home.log.changes();
    while let Some(node) = node.upgrade() {
        let refused = handle_refusals(&node, &home);
        drop(node);
        let wrong = key_status::record_clock(&home.dir, &home.log);
        if warns && refused && home.level().is_ok() {
            // The node continues; only warn on the terminal.
            key_status::warn_of_key(&home.dir, None);
        }
        if warns && wrong {
            key_status::warn_of_clock(&home.dir);
        }
        Membership::note(&home.dir, &home.state(), &home.key.id());
        tokio::select! {
            linked = links.changed() => if linked.is_err() { return },
            () = async {
                let _ = changes.changed().await;
                // Heartbeats arrive in bursts.
                tokio::time::sleep(Duration::from_secs(1)).await;
            } => {}
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
    }
}
