//! Changes of the community since the last look, for the flight record. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::NodeId;
use crate::community::log::Community;
use crate::node::flight::Event;
use hearthnet_transport::Code;

/// Last seen state.
#[derive(Debug, Default)]
pub(super) struct FlightDiff {
    /// Advertised shards, with the end of their validity in Unix milliseconds.
    adverts: BTreeMap<(NodeId, String), u64>,
    revoked: BTreeSet<NodeId>,
    /// Last failure of each node that could not be reached.
    unreachable: BTreeMap<NodeId, Code>,
}

impl FlightDiff {
    /// Events for everything that has changed since the last call.
    pub(super) fn look(&mut self, state: &Community, now_ms: u64) -> Vec<Event> {
        let mut events = Vec::new();
        for (node, _) in state.revoked() {
            if self.revoked.insert(*node) {
                events.push(Event::Revoked { peer: (*node) });
            }
        }
        let adverts: BTreeMap<(NodeId, String), u64> = state
            .shards(now_ms)
            .map(|advert| {
                let shard = advert.descriptor.shard_id.clone();
                ((advert.author, shard), advert.expires_ms)
            })
            .collect();
        for ((peer, shard), until_ms) in &self.adverts {
            if adverts.contains_key(&(*peer, shard.clone())) {
                continue;
            }
            let code = match () {
                () if state.is_revoked(peer) => Code::REVOKED,
                () if *until_ms <= now_ms => Code::new("expired"),
                () => Code::new("withdrawn"),
            };
            events.push(Event::AdvertGone {
                peer: (*peer),
                shard: shard.as_str().into(),
                code,
            });
        }
        for (peer, shard) in adverts.keys() {
            if !self.adverts.contains_key(&(*peer, shard.clone())) {
                events.push(Event::AdvertSeen {
                    peer: (*peer),
                    shard: shard.as_str().into(),
                });
            }
        }
        self.adverts = adverts;
        events
    }

    /// Event for a node that could not be reached, unless the last attempt failed in the same way.
    pub(super) fn unreachable(&mut self, peer: NodeId, code: Code) -> Option<Event> {
        let before = self.unreachable.insert(peer, code.clone());
        (before.as_ref() != Some(&code)).then_some(Event::PeerUnreachable { peer, code })
    }

    /// Event for a connected node.
    pub(super) fn connected(&mut self, peer: NodeId) -> Event {
        self.unreachable.remove(&peer);
        Event::PeerConnected { peer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::community::log::Body;
    use crate::{now_ms, testing};

    #[test]
    fn an_advertisement_that_is_not_renewed_ends_as_expired() {
        let home = testing::Home::founded(testing::key(1), true);
        home.append(Body::ShardAdvertised(Box::new(testing::descriptor(
            testing::id(1),
        ))));
        let mut flight_diff = FlightDiff::default();
        let (state, now) = (home.log.state(), now_ms());
        let seen = flight_diff.look(&state, now);
        assert!(matches!(seen[..], [Event::AdvertSeen { .. }]), "{seen:?}");
        let day = 24 * 3_600_000;
        match &flight_diff.look(&state, now + day)[..] {
            [Event::AdvertGone { code, .. }] => assert_eq!(*code, "expired"),
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn a_node_that_stays_away_is_news_once() {
        let mut flight_diff = FlightDiff::default();
        let peer = testing::id(1);
        assert!(flight_diff.unreachable(peer, Code::UNREACHABLE).is_some());
        assert!(flight_diff.unreachable(peer, Code::UNREACHABLE).is_none());
        assert!(flight_diff.unreachable(peer, Code::REVOKED).is_some());
        flight_diff.connected(peer);
        assert!(flight_diff.unreachable(peer, Code::REVOKED).is_some());
    }
}
