//! What other members say of this node's key and its clock while it runs, noted for commands and
//! later days.

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Level;
use hearthnet_bus::node::{Node, WeakNode};

use crate::community::Home;
use crate::membership::Membership;

/// Acts on what members say about this node's key. What an anchor says ends what runs here. What
/// others say binds nobody; where nobody else is heard (or this node is the only anchor, whose two
/// histories only others can see), it is noted, and commands say it. `true` if there is something
/// new to say.
pub(super) fn hear_refusals(node: &Node, home: &Home) -> bool {
    let (state, own) = (home.state(), home.key.id());
    let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
    let alone = !state
        .members()
        .any(|(node, _)| *node != own && anchor(node));
    let linked: Vec<NodeId> = node
        .peers()
        .iter()
        .filter(|peer| peer.link.is_some())
        .map(|peer| peer.node)
        .collect();
    let said = node.refused_by();
    if let Some(by) = said.iter().find(|by| anchor(by)) {
        return home.refused_by(by);
    }
    if linked.iter().any(|node| alone || anchor(node)) {
        Membership::note_put_out(&home.dir, None);
    } else if let Some(by) = said.first().filter(|_| alone || linked.is_empty()) {
        return Membership::note_put_out(&home.dir, Some(crate::standing::by(home, by)));
    }
    false
}

/// How often the clock is compared with what neighbours said, and the membership noted.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Notes what other commands and later days should know, until nobody holds the node, and ends what
/// runs for it when an anchor says that its key counts no more. A node that stays `warns`, for a command
/// says it when it ends.
pub(super) async fn watch(node: WeakNode, home: Home, warns: bool) {
    let Some(mut links) = node.upgrade().map(|node| node.changes()) else {
        return;
    };
    let mut changes = home.log.changes();
    while let Some(node) = node.upgrade() {
        let put_out = hear_refusals(&node, &home);
        drop(node);
        let wrong = crate::standing::note_clock(&home.dir, &home.log);
        if warns && put_out && home.level().is_ok() {
            // Nothing ends by it; who looks at the terminal should know.
            crate::standing::warn(&home.dir);
        }
        if warns && wrong {
            crate::standing::say_clock(&home.dir);
        }
        Membership::note(&home.dir, &home.state(), &home.key.id());
        tokio::select! {
            linked = links.changed() => if linked.is_err() { return },
            () = async {
                let _ = changes.changed().await;
                // Heartbeats come in bursts.
                tokio::time::sleep(Duration::from_secs(1)).await;
            } => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}
