//! Delays of links to members over which this node had no chats.
//!
//! The delay is half of the shortest of three round trips of a request for weights that no node has.
//! Both ends answer on threads of low priority, so it is rather too long than too short.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hearthnet_bus::NodeId;
use hearthnet_bus::node::Node;
use tokio::time::timeout;

/// Members asked at a time.
const AT_ONCE: usize = 4;
/// Requests to each.
const REQUESTS: usize = 3;
/// Time limit for all requests to one member, with the connection.
const LIMIT: Duration = Duration::from_secs(5);
/// Age after which a member is asked again.
const STALE: Duration = Duration::from_secs(600);
/// Identity that no model has.
const NO_MODEL: [u8; 32] = [0; 32];

/// Members that were asked recently, and their delays. `None`: no answer.
#[derive(Default)]
pub(super) struct Probed(BTreeMap<NodeId, (Instant, Option<Duration>)>);

impl Probed {
    /// Asks a few linked members that are not in `known` and were not asked recently.
    pub(super) async fn refresh(&mut self, node: &Node, known: &BTreeSet<NodeId>) {
        self.0.retain(|_, (at, _)| at.elapsed() < STALE);
        let linked = node.peers().into_iter();
        let linked = linked.filter(|peer| peer.level.is_some() && peer.link.is_some());
        let fresh = |member: &NodeId| !known.contains(member) && !self.0.contains_key(member);
        let members = linked.map(|peer| peer.node).filter(fresh);
        let asked: Vec<NodeId> = members.take(AT_ONCE).collect();
        let delays = join_all(asked.iter().map(|member| delay(node, *member))).await;
        let at = Instant::now();
        let found = delays.into_iter().map(|delay| (at, delay));
        self.0.extend(asked.into_iter().zip(found));
    }

    pub(super) fn delays(&self) -> impl Iterator<Item = (NodeId, Duration)> + '_ {
        let all = self.0.iter();
        all.filter_map(|(node, (_, delay))| Some((*node, (*delay)?)))
    }
}

async fn delay(node: &Node, member: NodeId) -> Option<Duration> {
    let requests = async {
        let peer = node.weights_of(&member).await.ok()?;
        let mut shortest = Duration::MAX;
        for _ in 0..REQUESTS {
            let begin = Instant::now();
            peer.held(&NO_MODEL).await.ok()?;
            shortest = shortest.min(begin.elapsed());
        }
        Some(shortest / 2)
    };
    timeout(LIMIT, requests).await.ok()?
}
