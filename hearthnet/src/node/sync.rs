//! Waits, with a time limit, until a node has synced with its neighbours.

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Level;
use hearthnet_bus::node::Node;
use serde_json::json;

use super::local_api::{self, NODE_STATUS};
use crate::home::{Home, key_status};

/// Longest wait for the first sync of a new node.
const FIRST_SYNC: Duration = Duration::from_secs(4);

/// Longest wait for its first link. mDNS and a connection take a fraction of this on a home
/// network; if the only neighbour is off, no link will come.
const FIRST_LINK: Duration = Duration::from_millis(2500);

/// Time for the daemon's answer beyond the sync.
const ANSWERING: Duration = Duration::from_millis(1500);

/// Waits a few seconds at most, until this node has synced with its neighbours, or an anchor
/// refuses it.
pub(crate) async fn wait_until_synced(node: &Node) {
    let alone = node.log().state().members().count() < 2;
    if !alone {
        let settled = async {
            tokio::select! {
                () = node.until_in_sync() => {}
                () = until_refused(node) => {}
            }
        };
        let _ = tokio::time::timeout(FIRST_SYNC, settled).await;
        if let Some(dir) = node.log().path().parent() {
            key_status::record_clock(dir, node.log());
        }
    }
}

/// Longest wait for a neighbour that sends nothing. Missing events arrive as soon as a link exists,
/// so a neighbour that announces events but sends none may be lying.
const STALLED: Duration = Duration::from_secs(5);

/// Waits until each neighbour has sent its events, or sends nothing any more. Call it before this
/// node writes an event: after a restore from an old disk state, neighbours may have later events
/// of this node, and a second history freezes its key. Returns at once without links.
pub(crate) async fn wait_for_neighbours(node: &Node) {
    let links = || node.peers().into_iter().filter_map(|peer| peer.link);
    while links().any(|link| !link.progress.in_sync) {
        let received = || links().map(|link| link.progress.received).sum::<u64>();
        let before = received();
        let waited = tokio::time::timeout(STALLED, node.until_in_sync()).await;
        if waited.is_err() && received() == before {
            tracing::warn!("a neighbour announces events but sends none: continuing without it");
            return;
        }
    }
}

/// Resolves once an anchor has refused this node's key.
async fn until_refused(node: &Node) {
    let mut changes = node.changes();
    loop {
        let state = node.log().state();
        let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
        if node.refused_by().iter().any(anchor) {
            return;
        }
        // The sender lives as long as this node.
        let _ = changes.changed().await;
    }
}

/// Whether a node that has run for `since` has synced with its neighbours, or has had the time to.
pub(crate) fn in_sync(node: &Node, since: Duration) -> bool {
    let peers = node.peers().into_iter();
    let mut links = peers.filter_map(|peer| peer.link).peekable();
    since >= FIRST_SYNC
        || match links.peek().is_some() {
            true => links.all(|link| link.progress.in_sync),
            false => since >= FIRST_LINK,
        }
}

/// Waits for the sync of a daemon in another process, which may have just started: until `is`
/// holds, the daemon has synced, or a time limit. The caller must
/// [follow](crate::node::log_writer::follow) the daemon's log meanwhile.
pub(crate) async fn wait_for_daemon_sync(home: &Home, is: impl Fn() -> bool) {
    let mut changes = home.log.changes();
    let becomes = async {
        while !is() {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let settled = async {
        let client = local_api::connect(&home.dir).await?;
        let call = local_api::call(&client, NODE_STATUS, &json!({ "settled": true }))?;
        call.result_within(FIRST_SYNC + ANSWERING).await
    };
    tokio::select! {
        () = becomes => {}
        _ = settled => {}
    }
    if let Err(error) = home.log.update() {
        tracing::warn!("the event log could not be read: {error}");
    }
}
