//! What the commands that change a community have in common: who writes, and telling others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Community, Level};
use hearthnet_bus::node::{LinkInfo, Node};

use crate::community::{Home, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::node::settle::until_even;
use crate::node::transient::{self, among_others};
use crate::output::note;
use crate::runtime::block_on;
use crate::standing::Standing;

/// Makes a change to the community: `work` judges by the log and writes. Where a daemon runs on this
/// home, it writes, and tells the others. Else others are looked for first, for a few seconds: their
/// news may decide, and after an old copy of the log was put back they know what this node has said.
/// Then they are told.
pub(super) fn change<T>(
    home: &Home,
    config: &Config,
    quiet: bool,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (done, told) = block_on(among_others(home, config, async |node| {
        if let Some(node) = node {
            until_even(node).await;
        }
        let before = node.map(sent);
        // It waits for the disk, or for the daemon.
        let done = tokio::task::block_in_place(work)?;
        Ok(match (node, before) {
            (Some(node), Some(before)) => (done, Some(told(node, &before, false).await)),
            _ => (done, None),
        })
    }))?;
    let told = match Standing::of(home) {
        Standing::Good => told,
        // Nobody talks to this node's key: it was the root's that signed, and that one is heard.
        _ => Some(bring_as_root(home, config)?),
    };
    if let Some(told) = told.filter(|_| !quiet) {
        note(match told {
            0 if Standing::of(home) != Standing::Good => {
                "nobody else could be told yet; `hearthnet community renew` brings it to whoever is there then"
                    .to_owned()
            }
            0 => "nobody else could be told yet; a node that runs here (`hearthnet serve`) will"
                .to_owned(),
            1 => "told one other node".to_owned(),
            n => format!("told {n} other nodes"),
        });
    }
    Ok(done)
}

/// How long others are looked for, and listen, when the root key has something to say.
const BRINGING: Duration = Duration::from_secs(6);

/// Brings what the root key has signed to whoever is found. How many others have it now.
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
        let told = node.bring_as_root(&root, BRINGING).await;
        node.shutdown().await;
        Ok(told.map_err(Failure::internal)?.len())
    })
}

/// How many events each node that is linked was sent and has taken.
pub(super) fn sent(node: &Node) -> BTreeMap<NodeId, u64> {
    let peers = node.peers();
    let links = peers
        .iter()
        .filter_map(|peer| Some((peer, peer.link.as_ref()?)));
    links
        .map(|(peer, link)| (peer.node, link.progress.taken()))
        .collect()
}

/// How long those who are linked may take to hear of a change.
const TELLING: Duration = Duration::from_secs(4);

/// Waits until everybody who was linked has what was appended after `before` was taken, for a few
/// seconds; how many have. Who hears that this node `leaves` closes the link.
pub(crate) async fn told(node: &Node, before: &BTreeMap<NodeId, u64>, leaves: bool) -> usize {
    let mut changes = node.changes();
    let deadline = Instant::now() + TELLING;
    loop {
        let peers = node.peers();
        let linked: BTreeMap<NodeId, &LinkInfo> = peers
            .iter()
            .filter_map(|peer| Some((peer.node, peer.link.as_ref()?)))
            .collect();
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
        // Whether a link is even is told; how much went over it has to be looked at.
        let _ = tokio::time::timeout(left.min(LOOK), changes.changed()).await;
    }
}

/// How often it is looked whether a change has gone over a link.
const LOOK: Duration = Duration::from_millis(20);

/// Whether the root key of this home signs what the node itself `may` not: it may do all that anchors
/// may, and what only it may, also where the node's own key counts no more. `rule` says who may, as in
/// "only anchors may do this".
pub(super) fn signs_as_root(home: &Home, may: bool, rule: &str) -> Result<bool, Failure> {
    if may || home.root_key()?.is_some() {
        return Ok(!may);
    }
    let own = home.level()?;
    Err(
        Failure::new(Kind::Community, format!("{rule}, and this node is {own}"))
            .code("unauthorized")
            .hint("ask one of them; `hearthnet community members` shows who is what"),
    )
}

/// Whether this node is an anchor.
pub(super) fn is_anchor(home: &Home) -> bool {
    home.state().level(&home.key.id()) == Some(Level::Anchor)
}

/// Refuses what would take the last anchor from a community: nobody could invite or revoke any
/// more but whoever finds the root key. The log itself does not refuse it, for the root's word
/// about a lost key must hold whatever else has happened.
pub(super) fn keeps_an_anchor(state: &Community, node: &NodeId, what: &str) -> Result<(), Failure> {
    let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
    let others = state
        .members()
        .any(|(other, _)| other != node && anchor(other));
    if !anchor(node) || others {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Community,
        format!(
            "{} is the last anchor of {:?}, and cannot be {what}: nobody could invite or put out anybody any more",
            state.label(node, now_ms()),
            state.name
        ),
    )
    .code("last_anchor")
    .hint("first make another member an anchor: `hearthnet community promote NODE anchor`, on the machine that has root.key"))
}

/// The refusal of a second community.
pub(super) fn in_community(name: &str) -> Failure {
    Failure::new(
        Kind::Community,
        format!("this node is in {name:?} already"),
    )
    .code("in_community")
    .hint("`hearthnet community leave` ends that; or --data-dir names another directory, for another node")
}

/// The end of a command whose question was answered with no.
pub(super) fn nothing_changed() -> Failure {
    Failure::new(Kind::Interrupted, "nothing was changed")
}
