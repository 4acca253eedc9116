//! What others know than the member that let a joiner in, which may have kept something back: that an
//! accomplice of it was put out, say.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::NodeId;
use crate::community::log::{Community, EventLog};
use crate::node::Node;

/// How long others are waited for, if it is known where one may be.
const OTHER_LOGS: Duration = Duration::from_secs(3);
/// How long they are looked for: who is there answers over mDNS within 120 ms (RFC 6762 section 6), and a
/// packet or its answer may be lost once.
const FINDING: Duration = Duration::from_millis(400);

/// What a joiner was told by others than the member that let it in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SecondOpinion {
    /// Whose logs this one is even with; nobody if none could be asked.
    pub from: Vec<NodeId>,
    /// Who was put out, and the member that let it in did not say so.
    pub put_out: Vec<NodeId>,
    /// To whom it is no member: they have not heard yet that it was let in, or whoever let it in has been
    /// put out.
    pub strange_to: Vec<NodeId>,
}

/// Makes the log of `own`, which `first` has let in and given it, even with those of other members, but for
/// those that count together with `first`. `start` starts a node with that log, if there are any.
///
/// It ends when all of them have been heard; after 0.4 s when all that were found have been, or nobody was;
/// and after 3 s.
///
/// # Errors
/// What `start` fails with.
pub async fn second_opinion<E>(
    log: &EventLog,
    (own, first): (NodeId, NodeId),
    now_ms: fn() -> u64,
    start: impl AsyncFnOnce() -> Result<Node, E>,
) -> Result<SecondOpinion, E> {
    let given = log.state();
    let others = others(&given, own, first);
    if others.is_empty() {
        return Ok(SecondOpinion::default());
    }
    let node = start().await?;
    // Whom `first` does not want to be asked it need not name as being anywhere.
    let named = given
        .nodes(now_ms())
        .any(|seen| others.contains(&seen.node));
    let found = || {
        let mut hints = node.discovery().found().into_iter();
        named || hints.any(|hint| hint.node.is_none_or(|node| others.contains(&node)))
    };
    let (begin, mut changes) = (Instant::now(), node.changes());
    let heard = loop {
        let (heard, waited) = (Heard::now(&node, &others), begin.elapsed());
        let until = match waited < FINDING || !found() {
            true => FINDING,
            false => OTHER_LOGS,
        };
        if heard.is_enough(&others, waited >= FINDING) || waited >= until {
            break heard;
        }
        // That the time is up is seen above.
        let _ = timeout(until.saturating_sub(waited), changes.changed()).await;
    };
    node.shutdown().await;
    let now = log.state();
    let put_out = now.revoked().map(|(node, _)| *node);
    Ok(SecondOpinion {
        from: heard.even.into_iter().collect(),
        strange_to: heard.strange_to,
        put_out: put_out.filter(|node| !given.is_revoked(node)).collect(),
    })
}

/// The other members that may know better than `first`. Those that count together with it say what it says.
fn others(given: &Community, own: NodeId, first: NodeId) -> BTreeSet<NodeId> {
    let of_first = given.answers_for(&first);
    let members = given.members().map(|(node, _)| *node);
    let others = members.filter(|node| *node != own && *node != first);
    let others = others.filter(|node| given.answers_for(node) != of_first);
    others.collect()
}

/// How the others stand at one moment.
struct Heard {
    /// Whose logs are even with this one.
    even: BTreeSet<NodeId>,
    /// How many are linked whose are not yet.
    uneven: usize,
    /// Who takes this node for a stranger, and is a member by all that was heard.
    strange_to: Vec<NodeId>,
}

impl Heard {
    fn now(node: &Node, others: &BTreeSet<NodeId>) -> Self {
        let peers = node.peers().into_iter();
        let linked = peers.filter(|peer| others.contains(&peer.node));
        let links = linked.filter_map(|peer| Some((peer.node, peer.link?.progress.in_sync)));
        let (even, uneven): (Vec<_>, Vec<_>) = links.partition(|(_, in_sync)| *in_sync);
        let (state, mut strange_to) = (node.log().state(), node.strange_to());
        strange_to.retain(|node| others.contains(node) && state.level(node).is_some());
        Self {
            even: even.into_iter().map(|(node, _)| node).collect(),
            uneven: uneven.len(),
            strange_to,
        }
    }

    /// Whether nobody has to be waited for; `searched`: who was not found by now is not there.
    fn is_enough(&self, others: &BTreeSet<NodeId>, searched: bool) -> bool {
        let all = self.even.len() == others.len();
        let some = searched && !self.even.is_empty();
        self.uneven == 0 && self.strange_to.is_empty() && (all || some)
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
    use crate::now_ms;
    use crate::testing::{Home, hear, id, key};

    /// 1 has founded, and let in 2, 4 and 6; 2 has let in 3 and, last of all, 5.
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

    /// A home that knows what another one knows now.
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

    /// What 5, whom 2 has let in and told what `given` knows, hears where these are.
    async fn asks(given: &Home, peers: Vec<StaticPeer>) -> SecondOpinion {
        let joiner = home(5, given);
        let node = async || start(&joiner, false, peers).await;
        let ids = (id(5), id(2));
        second_opinion(&joiner.log, ids, now_ms, node)
            .await
            .unwrap()
    }

    #[test]
    fn whom_a_member_has_let_in_is_not_asked_about_it() {
        let (founder, _) = community();
        let state = founder.log.state();
        let others = |own, first| others(&state, id(own), id(first));
        let ids = |seeds: &[u8]| seeds.iter().map(|seed| id(*seed)).collect();
        assert_eq!(others(5, 2), ids(&[1, 4, 6]));
        assert_eq!(others(5, 3), ids(&[1, 4, 6]));
        // An anchor may have let in the whole village.
        assert_eq!(others(5, 1), ids(&[2, 3, 4, 6]));
    }

    #[test]
    fn all_are_enough_and_later_all_who_were_found() {
        let others: BTreeSet<NodeId> = (1..=3).map(id).collect();
        let heard = |even: &[u8], uneven, strange: &[u8]| Heard {
            even: even.iter().map(|seed| id(*seed)).collect(),
            uneven,
            strange_to: strange.iter().map(|seed| id(*seed)).collect(),
        };
        let when = |heard: Heard| [false, true].map(|late| heard.is_enough(&others, late));
        assert_eq!(when(heard(&[], 0, &[])), [false, false]);
        assert_eq!(when(heard(&[1], 0, &[])), [false, true]);
        assert_eq!(when(heard(&[1, 2, 3], 0, &[])), [true, true]);
        // Somebody has more to say, or does not know it.
        assert_eq!(when(heard(&[1, 2], 1, &[])), [false, false]);
        assert_eq!(when(heard(&[1, 2], 0, &[3])), [false, false]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn accomplices_who_are_there_at_once_do_not_keep_a_joiner_from_who_knows_better() {
        let (founder, second) = community();
        let (accomplice, honest) = (home(3, &second), home(4, &founder));
        let before = home(2, &founder);
        founder.revoke(id(6));
        hear(&honest.log, &founder.log);
        let (lies, to_accomplice) = at(&accomplice).await;
        // Whoever was let in by the member that is asked about says nothing that counts.
        let opinion = asks(&before, vec![to_accomplice.clone()]).await;
        assert_eq!(opinion, SecondOpinion::default());
        let (tells, to_honest) = at(&honest).await;
        let opinion = asks(&before, vec![to_accomplice, to_honest]).await;
        assert_eq!((opinion.from, opinion.put_out), (vec![id(4)], vec![id(6)]));
        lies.shutdown().await;
        tells.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn who_takes_a_joiner_for_a_stranger_is_told_of_beside_others_who_know_it() {
        let (founder, _) = community();
        let knows = home(4, &founder);
        // It has put out who let the joiner in.
        let other = home(6, &founder);
        let elsewhere = home(1, &founder);
        elsewhere.revoke(id(2));
        hear(&other.log, &elsewhere.log);
        let (node, to_it) = at(&knows).await;
        let (refuses, to_other) = at(&other).await;
        let opinion = asks(&founder, vec![to_it, to_other]).await;
        assert_eq!(opinion.from, [id(4)]);
        assert_eq!(opinion.strange_to, [id(6)]);
        node.shutdown().await;
        refuses.shutdown().await;
    }
}
