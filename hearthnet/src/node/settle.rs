//! Waiting until a node knows what its neighbours know, or has had the time to.

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Level;
use hearthnet_bus::node::Node;
use serde_json::json;

use crate::community::Home;
use crate::local_api::{self, NODE_STATUS};

/// How long a node that has just started waits for what others know, at most.
const FIRST_SYNC: Duration = Duration::from_secs(4);

/// How long a node waits for its first link then: mDNS and a connection take a fraction of it on a home's
/// network, and where the only neighbour is dark there is no link to wait for.
const FIRST_LINK: Duration = Duration::from_millis(2500);

/// How long the daemon may take to answer then.
const ANSWERING: Duration = Duration::from_millis(1500);

/// Waits until this node knows what its neighbours know, or that an anchor tells it nothing more;
/// a few seconds at most: where nobody is, nobody can be waited for.
pub(crate) async fn settle_in(node: &Node) {
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
            crate::standing::note_clock(dir, node.log());
        }
    }
}

/// How long a neighbour is waited for that brings nothing: what this node lacks is on its way as soon as
/// there is a link, so who says that there is more and sends none of it may be lying.
const STALLED: Duration = Duration::from_secs(5);

/// Waits until each neighbour has given what it has, or brings nothing any more, before this node writes
/// what others have to agree with: they may have later events of its own, as after an old state of the
/// disk was put back, and a second history freezes its key. Where there is no link there is nobody to ask.
pub(crate) async fn until_even(node: &Node) {
    let links = || node.peers().into_iter().filter_map(|peer| peer.link);
    while links().any(|link| !link.progress.in_sync) {
        let received = || links().map(|link| link.progress.received).sum::<u64>();
        let before = received();
        let waited = tokio::time::timeout(STALLED, node.until_in_sync()).await;
        if waited.is_err() && received() == before {
            tracing::warn!(
                "a neighbour says that it knows more, and sends nothing: it is not waited for"
            );
            return;
        }
    }
}

/// Resolves once an anchor has said that this node's key counts no more.
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

/// Whether a node that has run for `since` knows what its neighbours know, or has had the time to.
pub(crate) fn in_sync(node: &Node, since: Duration) -> bool {
    since >= FIRST_SYNC
        || links_are_even(node)
        || (since >= FIRST_LINK && node.peers().iter().all(|peer| peer.link.is_none()))
}

/// Whether there is a neighbour, and each one's log is even with this node's.
fn links_are_even(node: &Node) -> bool {
    let peers = node.peers().into_iter();
    let mut links = peers.filter_map(|peer| peer.link).peekable();
    links.peek().is_some() && links.all(|link| link.progress.in_sync)
}

/// The same where the daemon of this home runs in another process, which has just been started perhaps:
/// waits until `is` holds, or that node knows what its neighbours know, or for a few seconds. Somebody
/// [follows](crate::changes::follow) its log meanwhile.
pub(crate) async fn settle_beside(home: &Home, is: impl Fn() -> bool) {
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
