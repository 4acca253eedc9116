//! Checks a joiner's log with other members. The member that admitted it may have kept events back,
//! for example the revocation of an accomplice.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::community::log::{Community, EventLog};
use crate::node::Node;
use crate::{NodeId, now_ms};

/// Time limit for other members' logs, if the address of one may be known.
const OTHER_LOGS: Duration = Duration::from_secs(3);
/// Time limit for finding other members. A present node answers over mDNS within 120 ms (RFC 6762
/// section 6), and a packet or its answer may be lost once.
const FINDING: Duration = Duration::from_millis(400);

/// Result of the check with members other than the one that admitted the joiner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SecondOpinion {
    /// Members whose logs are in sync with the joiner's; empty if no member could be asked.
    pub from: Vec<NodeId>,
    /// Revoked nodes that the admitting member had not named.
    pub revoked: Vec<NodeId>,
    /// Members that take the joiner for a stranger: they lack its admission, or the admitting
    /// member was revoked.
    pub unknown_to: Vec<NodeId>,
}

/// Synchronises the log of `own`, admitted by `first`, with other members, except those that share
/// a quota key with `first`. `start` starts a node with that log if there are any such members.
///
/// Ends when all of them are in sync; after 0.4 s if all that were found are in sync, or none was
/// found; and after 3 s in any case.
///
/// # Errors
/// The error of `start`.
pub async fn second_opinion<E>(
    log: &EventLog,
    (own, first): (NodeId, NodeId),
    start: impl AsyncFnOnce() -> Result<Node, E>,
) -> Result<SecondOpinion, E> {
    let given = log.state();
    let others = others(&given, own, first);
    if others.is_empty() {
        return Ok(SecondOpinion::default());
    }
    let node = start().await?;
    // `first` may leave out the addresses of members that it does not want to be asked.
    let named = given
        .nodes(now_ms())
        .any(|seen| others.contains(&seen.node));
    let found = || {
        let mut hints = node.discovery().found().into_iter();
        named || hints.any(|hint| hint.node.is_none_or(|node| others.contains(&node)))
    };
    let (begin, mut changes) = (Instant::now(), node.changes());
    let heard = loop {
        let (heard, waited) = (Snapshot::now(&node, &others), begin.elapsed());
        let until = match waited < FINDING || !found() {
            true => FINDING,
            false => OTHER_LOGS,
        };
        if heard.is_enough(&others, waited >= FINDING) || waited >= until {
            break heard;
        }
        // The loop checks the time again.
        let _ = timeout(until.saturating_sub(waited), changes.changed()).await;
    };
    node.shutdown().await;
    let now = log.state();
    let revoked = now.revoked().map(|(node, _)| *node);
    Ok(SecondOpinion {
        from: heard.even.into_iter().collect(),
        unknown_to: heard.unknown_to,
        revoked: revoked.filter(|node| !given.is_revoked(node)).collect(),
    })
}

/// The other members to ask: those that do not share a quota key with `first`.
fn others(given: &Community, own: NodeId, first: NodeId) -> BTreeSet<NodeId> {
    let of_first = given.answers_for(&first);
    let members = given.members().map(|(node, _)| *node);
    let others = members.filter(|node| *node != own && *node != first);
    let others = others.filter(|node| given.answers_for(node) != of_first);
    others.collect()
}

/// Snapshot of the other members' state.
struct Snapshot {
    /// Members whose logs are in sync with this one.
    even: BTreeSet<NodeId>,
    /// Number of linked members that are not in sync yet.
    uneven: usize,
    /// Members that take this node for a stranger.
    unknown_to: Vec<NodeId>,
}

impl Snapshot {
    fn now(node: &Node, others: &BTreeSet<NodeId>) -> Self {
        let peers = node.peers().into_iter();
        let linked = peers.filter(|peer| others.contains(&peer.node));
        let links = linked.filter_map(|peer| Some((peer.node, peer.link?.progress.in_sync)));
        let (even, uneven): (Vec<_>, Vec<_>) = links.partition(|(_, in_sync)| *in_sync);
        let (state, mut unknown_to) = (node.log().state(), node.unknown_to());
        unknown_to.retain(|node| others.contains(node) && state.level(node).is_some());
        Self {
            even: even.into_iter().map(|(node, _)| node).collect(),
            uneven: uneven.len(),
            unknown_to,
        }
    }

    /// True if no member is left to wait for. `searched`: a member not found by now counts as
    /// absent.
    fn is_enough(&self, others: &BTreeSet<NodeId>, searched: bool) -> bool {
        let all = self.even.len() == others.len();
        let some = searched && !self.even.is_empty();
        self.uneven == 0 && self.unknown_to.is_empty() && (all || some)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::community::log::{Body, Level, Policy};
    use crate::node::calls::Registry;
    use crate::node::discovery::StaticPeer;
    use crate::node::{NodeError, NodeSettings};
    use crate::testing::{Home, hear, id, key};

    /// Node 1 has founded the community and admitted 2, 4 and 6; 2 has admitted 3 and, last, 5.
    fn community() -> (Home, Home) {
        let founder = Home::founded(key(1), true);
        founder.append(Body::PolicyChanged(Policy {
            research: true,
            who_may_invite: Level::Trusted,
        }));
        founder.admit(id(2), Level::Trusted);
        founder.admit(id(4), Level::Member);
        founder.admit(id(6), Level::Member);
        let second = home(2, &founder);
        second.admit(id(3), Level::Member);
        second.admit(id(5), Level::Member);
        hear(&founder.log, &second.log);
        (founder, second)
    }

    /// A home with the same log as `like`.
    fn home(seed: u8, like: &Home) -> Home {
        let home = Home::joining(key(seed));
        hear(&home.log, &like.log);
        home
    }

    async fn start(home: &Home, listens: bool, peers: Vec<StaticPeer>) -> Result<Node, NodeError> {
        let mut settings = NodeSettings::new("node");
        settings.listen = listens.then(|| "127.0.0.1:0".to_owned());
        settings.discovery.mdns = false;
        settings.discovery.static_peers = peers;
        let (key, log) = (Arc::clone(&home.key), home.log.clone());
        Node::start(key, log, settings, Arc::new(Registry::new())).await
    }

    async fn at(home: &Home) -> (Node, StaticPeer) {
        let node = start(home, true, Vec::new()).await.unwrap();
        let peer = StaticPeer::new(node.listen_addr().unwrap(), Some(node.id()));
        (node, peer)
    }

    /// Second opinion of node 5, which node 2 has admitted with the log of `given`.
    async fn asks(given: &Home, peers: Vec<StaticPeer>) -> SecondOpinion {
        let joiner = home(5, given);
        let node = async || start(&joiner, false, peers).await;
        let opinion = second_opinion(&joiner.log, (id(5), id(2)), node).await;
        opinion.unwrap()
    }

    #[test]
    fn members_with_the_same_quota_key_are_not_asked() {
        let (founder, _) = community();
        let state = founder.log.state();
        let others = |own, first| others(&state, id(own), id(first));
        let ids = |seeds: &[u8]| seeds.iter().map(|seed| id(*seed)).collect();
        assert_eq!(others(5, 2), ids(&[1, 4, 6]));
        assert_eq!(others(5, 3), ids(&[1, 4, 6]));
        // An anchor does not answer for the members that it invited.
        assert_eq!(others(5, 1), ids(&[2, 3, 4, 6]));
    }

    #[test]
    fn all_members_are_awaited_and_later_only_those_found() {
        let others: BTreeSet<NodeId> = (1..=3).map(id).collect();
        let heard = |even: &[u8], uneven, strange: &[u8]| Snapshot {
            even: even.iter().map(|seed| id(*seed)).collect(),
            uneven,
            unknown_to: strange.iter().map(|seed| id(*seed)).collect(),
        };
        let when = |heard: Snapshot| [false, true].map(|late| heard.is_enough(&others, late));
        assert_eq!(when(heard(&[], 0, &[])), [false, false]);
        assert_eq!(when(heard(&[1], 0, &[])), [false, true]);
        assert_eq!(when(heard(&[1, 2, 3], 0, &[])), [true, true]);
        // A member is not in sync yet, or does not know the joiner.
        assert_eq!(when(heard(&[1, 2], 1, &[])), [false, false]);
        assert_eq!(when(heard(&[1, 2], 0, &[3])), [false, false]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn accomplices_do_not_hide_a_revocation_from_a_joiner() {
        let (founder, second) = community();
        let (accomplice, honest) = (home(3, &second), home(4, &founder));
        let before = home(2, &founder);
        founder.revoke(id(6));
        hear(&honest.log, &founder.log);
        let (lies, to_accomplice) = at(&accomplice).await;
        // Members that the admitting member invited are not asked.
        let opinion = asks(&before, vec![to_accomplice.clone()]).await;
        assert_eq!(opinion, SecondOpinion::default());
        let (tells, to_honest) = at(&honest).await;
        let opinion = asks(&before, vec![to_accomplice, to_honest]).await;
        assert_eq!((opinion.from, opinion.revoked), (vec![id(4)], vec![id(6)]));
        lies.shutdown().await;
        tells.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn members_that_refuse_a_joiner_are_reported() {
        let (founder, _) = community();
        let knows = home(4, &founder);
        // This member has revoked the one that admitted the joiner.
        let other = home(6, &founder);
        let elsewhere = home(1, &founder);
        elsewhere.revoke(id(2));
        hear(&other.log, &elsewhere.log);
        let (node, to_it) = at(&knows).await;
        let (refuses, to_other) = at(&other).await;
        let opinion = asks(&founder, vec![to_it, to_other]).await;
        assert_eq!(opinion.from, [id(4)]);
        assert_eq!(opinion.unknown_to, [id(6)]);
        node.shutdown().await;
        refuses.shutdown().await;
    }
}
