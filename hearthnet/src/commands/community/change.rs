//! Shared by the commands that change a community: writing the event and sending it to other
//! members.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Community, Level};
use hearthnet_bus::node::{LinkInfo, Node};

use crate::cli::{Failure, block_on, failure, note};
use crate::config::Config;
use crate::home::{Home, KeyStatus, now_ms};
use crate::node::{transient, wait_for_neighbours, with_synced_node};

/// Makes a change to the community; `work` checks the log and writes. If a daemon runs on this
/// home, the daemon writes and sends the event.
///
/// Otherwise the command first syncs with other members for a few seconds, since their events may
/// decide, and since they know this node's events if an old copy of the log was restored. Then it
/// sends the change to them.
pub(crate) fn change<T>(
    home: &Home,
    config: &Config,
    quiet: bool,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (done, told) = block_on(with_synced_node(home, config, async |node| {
        if let Some(node) = node {
            wait_for_neighbours(node).await;
        }
        let before = node.map(sent);
        // `work` blocks on the disk or on the daemon.
        let done = tokio::task::block_in_place(work)?;
        Ok(match (node, before) {
            (Some(node), Some(before)) => (done, Some(told(node, &before, false).await)),
            _ => (done, None),
        })
    }))?;
    let told = match KeyStatus::of(home) {
        KeyStatus::Good => told,
        // Other nodes refuse this node's key, but accept events signed by the root key.
        _ => Some(bring_as_root(home, config)?),
    };
    if let Some(told) = told.filter(|_| !quiet) {
        note(match told {
            0 if KeyStatus::of(home) != KeyStatus::Good => {
                "no other member could be told yet; repeat `hearthnet community renew` when one runs"
                    .to_owned()
            }
            0 => "no other member could be told yet; a node that runs here (`hearthnet up`) will tell them"
                .to_owned(),
            1 => "told one other node".to_owned(),
            n => format!("told {n} other nodes"),
        });
    }
    Ok(done)
}

/// Time limit to find other members and send them events signed by the root key.
const ROOT_DELIVERY_TIMEOUT: Duration = Duration::from_secs(6);

/// Sends events signed by the root key to every member that is found. Returns how many have them.
pub(super) fn bring_as_root(home: &Home, config: &Config) -> Result<usize, Failure> {
    let others = home
        .state()
        .members()
        .any(|(node, _)| *node != home.key.id());
    if !others {
        return Ok(0);
    }
    let root = home.open_root_key()?;
    block_on(async {
        let node = transient::start(home, config).await?;
        let told = node.push_root_events(&root, ROOT_DELIVERY_TIMEOUT).await;
        node.shutdown().await;
        Ok(told.map_err(Failure::internal)?.len())
    })
}

/// Number of events that each linked node has taken.
pub(super) fn sent(node: &Node) -> BTreeMap<NodeId, u64> {
    let peers = node.peers().into_iter();
    let sent = peers.filter_map(|peer| Some((peer.node, peer.link?.progress.taken())));
    sent.collect()
}

/// Time limit for linked nodes to receive a change.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(4);

/// Waits a few seconds until every linked node has the events appended after `before`. Returns how
/// many have them. If this node `leaves`, a closed link counts as received: a node that receives
/// the event closes its link.
pub(crate) async fn told(node: &Node, before: &BTreeMap<NodeId, u64>, leaves: bool) -> usize {
    let mut changes = node.changes();
    let deadline = Instant::now() + DELIVERY_TIMEOUT;
    loop {
        let peers = node.peers().into_iter();
        let linked = peers.filter_map(|peer| Some((peer.node, peer.link?)));
        let linked: BTreeMap<NodeId, LinkInfo> = linked.collect();
        let has = |node: &NodeId, earlier: u64| match linked.get(node) {
            Some(link) => link.progress.in_sync && link.progress.taken() > earlier,
            None => leaves,
        };
        let told = before.iter().filter(|(node, sent)| has(node, **sent));
        let told = told.count();
        let wait_for = match leaves {
            true => before.len(),
            false => before
                .keys()
                .filter(|node| linked.contains_key(*node))
                .count(),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if told >= wait_for || left.is_zero() {
            return told;
        }
        // Watchers report whether a link is in sync, but not its progress, which is polled.
        let _ = tokio::time::timeout(left.min(POLL_INTERVAL), changes.changed()).await;
    }
}

/// Poll interval for the progress of a link.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Refuses to remove the last anchor of a community: without one only the holder of the root key
/// could invite or revoke members. The log itself accepts it, because an event signed by the root
/// key about a lost key must always apply.
pub(super) fn keeps_an_anchor(state: &Community, node: &NodeId, what: &str) -> Result<(), Failure> {
    let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
    let others = state
        .members()
        .any(|(other, _)| other != node && anchor(other));
    if !anchor(node) || others {
        return Ok(());
    }
    let (who, name) = (state.label(node, now_ms()), &state.name);
    Err(failure!(
        Community,
        "{who} is the last anchor of {name:?}, and cannot be {what}: no member could invite or revoke nodes any more"
    )
    .code("last_anchor")
    .hint("first make another member an anchor: `hearthnet community promote NODE anchor`, on the machine that has root.key"))
}

/// Error for a node that is already in a community.
pub(super) fn in_community(name: &str) -> Failure {
    failure!(Community, "this node is in {name:?} already")
    .code("in_community")
    .hint("`hearthnet community leave` leaves it; or use --data-dir with another directory, for another node")
}
