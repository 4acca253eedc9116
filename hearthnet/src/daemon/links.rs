//! Links to members: their delay and rate, as announced.
//!
//! The delay comes from this node's chats over the member. Without chats, it is half of the shortest
//! round trip of a small request for weights that no node has, in several rounds (`rounds.rs`). Both
//! ends answer on threads of low priority, so that delay is rather too long than too short.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hearthnet_bus::NodeId;
use hearthnet_bus::log::LinkSpeed;
use hearthnet_bus::node::Node;
use hearthnet_orchestrator::health::Way;
use hearthnet_orchestrator::placement::plan::UNMEASURED_KBIT_S;
use tokio::time::timeout;

use super::rounds::Rounds;
use crate::hosting::layer_times::duration_us;

/// Members asked at a time.
const AT_ONCE: usize = 4;
/// Requests to each in a round, after one that opens the connection and wakes both ends.
const REQUESTS: usize = 3;
/// Time limit for all requests to one member, with the connection.
const LIMIT: Duration = Duration::from_secs(5);
/// Identity that no model has.
const NO_MODEL: [u8; 32] = [0; 32];

/// Delays of members that were asked.
#[derive(Default)]
pub(super) struct Probed(BTreeMap<NodeId, Rounds>);

impl Probed {
    /// Asks a few linked members that are not in `known` and are due: first those that were asked
    /// least. Forgets members without a link.
    pub(super) async fn refresh(&mut self, node: &Node, known: &BTreeSet<NodeId>) {
        let linked = node.peers().into_iter();
        let linked = linked.filter(|peer| peer.level.is_some() && peer.link.is_some());
        let linked: BTreeSet<NodeId> = linked.map(|peer| peer.node).collect();
        self.0.retain(|member, _| linked.contains(member));
        let now = Instant::now();
        let tried = |member: &NodeId| self.0.get(member).map_or(0, Rounds::tried);
        let is_due = |member: &NodeId| {
            let rounds = self.0.get(member);
            !known.contains(member) && rounds.is_none_or(|rounds| rounds.is_due(now))
        };
        let mut asked: Vec<NodeId> = linked.into_iter().filter(is_due).collect();
        asked.sort_by_key(tried);
        asked.truncate(AT_ONCE);
        let delays = join_all(asked.iter().map(|member| delay(node, *member))).await;
        let now = Instant::now();
        for (member, delay) in asked.into_iter().zip(delays) {
            self.0.entry(member).or_default().add(delay, now);
        }
    }

    pub(super) fn delays(&self) -> impl Iterator<Item = (NodeId, Duration)> + '_ {
        let all = self.0.iter();
        all.filter_map(|(node, rounds)| Some((*node, rounds.shortest()?)))
    }
}

async fn delay(node: &Node, member: NodeId) -> Option<Duration> {
    let requests = async {
        let peer = node.weights_of(&member).await.ok()?;
        peer.held(&NO_MODEL).await.ok()?;
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

/// Link of a small request, without time on the wire.
pub(super) fn probed_link(node: NodeId, delay: Duration, kbit_s: u32) -> LinkSpeed {
    LinkSpeed {
        node,
        kbit_s,
        delay_us: duration_us(delay),
    }
}

/// Link of chats; `kbit_s` is its measured rate, or 0. Plans add the time of a row on the wire to the
/// delay. The measured way includes it, so it is taken off. If the row was faster than at the rate that
/// plans assume of an unmeasured link, the least rate is announced at which it can have been.
pub(super) fn chat_link(way: &Way, kbit_s: u32) -> LinkSpeed {
    // Zero is no measurement.
    let way_us = duration_us(way.took).max(1);
    let scaled = way.row_bytes.saturating_mul(8_000);
    let least = u32::try_from(scaled.div_ceil(u64::from(way_us))).unwrap_or(u32::MAX);
    let kbit_s = match kbit_s {
        0 if least > UNMEASURED_KBIT_S => least,
        known => known,
    };
    let assumed = match kbit_s {
        0 => UNMEASURED_KBIT_S,
        known => known,
    };
    let wire_us = u32::try_from(scaled / u64::from(assumed)).unwrap_or(u32::MAX);
    LinkSpeed {
        node: way.node,
        kbit_s,
        delay_us: way_us.saturating_sub(wire_us).max(1),
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::testing;

    use super::*;

    /// Delay and rate of a link on which a row of 1,152 bytes took so long, and what a plan makes of
    /// them for that row.
    fn link(way_us: u64, kbit_s: u32) -> (u32, u32, u64) {
        let way = Way::new(testing::id(1), Duration::from_micros(way_us), 1_152);
        let link = chat_link(&way, kbit_s);
        let rate = match link.kbit_s {
            0 => UNMEASURED_KBIT_S,
            rate => rate,
        };
        let planned = u64::from(link.delay_us) + 1_152 * 8_000 / u64::from(rate);
        (link.delay_us, link.kbit_s, planned)
    }

    #[test]
    fn a_plan_counts_the_row_on_the_wire_once() {
        // 92 us at the assumed rate, 9 us at 1 Gbit/s, 184 us at 50 Mbit/s.
        assert_eq!(link(2_252, 0), (2_160, 0, 2_252));
        assert_eq!(link(76, 1_000_000), (67, 1_000_000, 76));
        assert_eq!(link(300, 50_000), (116, 50_000, 300));
    }

    #[test]
    fn a_row_that_was_faster_than_the_assumed_rate_raises_it() {
        let (delay_us, kbit_s, planned) = link(76, 0);
        assert_eq!((delay_us, kbit_s), (1, 121_264));
        assert_eq!(planned, 76);
        // A rate measured in a bad moment, and no time at all.
        assert_eq!(link(76, 50_000).0, 1);
        assert_eq!(link(0, 0).0, 1);
    }
}
