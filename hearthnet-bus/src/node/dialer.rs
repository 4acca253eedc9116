//! Choice of nodes to dial, and back-off after failures. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use crate::NodeId;

/// Upper bound of linked nodes. Events of other members arrive through these.
pub(super) const MAX_LINKS: usize = 64;
/// Upper bound of concurrent dials.
const MAX_DIALS: usize = 8;
/// First back-off after a failure; doubled with each further one, up to [`LONGEST_MS`]. Short, so
/// that a node comes back soon after its cable is plugged in again.
const FIRST_MS: u64 = 1_000;
const LONGEST_MS: u64 = 15_000;
/// Back-off of a target after a new announcement from it, whatever failed before.
const HEARD_MS: u64 = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// A node, at any of its addresses.
    Node(NodeId),
    /// Any node of the community at this address.
    Address(SocketAddr),
}

#[derive(Debug, Default)]
struct Record {
    failures: u32,
    next_ms: u64,
    dialing: bool,
    heard_ms: u64,
}

/// State of all targets.
#[derive(Debug)]
pub(super) struct Dialer {
    own: NodeId,
    records: BTreeMap<Target, Record>,
    /// Earliest time at which a waiting target may be dialled.
    next_ms: Option<u64>,
}

impl Dialer {
    pub(super) fn new(own: NodeId) -> Dialer {
        Dialer {
            own,
            records: BTreeMap::new(),
            next_ms: None,
        }
    }

    /// Selects the targets to dial now: `wanted` (with the time of each one's last announcement)
    /// without those `linked`. A selected target counts as being dialled until
    /// [`ended`](Self::ended).
    pub(super) fn plan(
        &mut self,
        now_ms: u64,
        wanted: &BTreeMap<Target, u64>,
        linked: &BTreeSet<NodeId>,
    ) -> Vec<Target> {
        self.records
            .retain(|target, record| record.dialing || wanted.contains_key(target));
        // Take the ids that follow this node's own around the ring, so that all nodes together form
        // one connected net at any size.
        let own = Target::Node(self.own);
        let (before, after): (Vec<_>, Vec<_>) =
            wanted.iter().partition(|(target, _)| **target <= own);
        let ring = after.into_iter().chain(before);
        let mut running = self.records.values().filter(|one| one.dialing).count();
        let mut chosen = Vec::new();
        let mut next_ms = u64::MAX;
        for (target, heard_ms) in ring.take(MAX_LINKS) {
            if matches!(target, Target::Node(node) if *node == self.own || linked.contains(node)) {
                // The link has outlasted its back-off: count the dial as a success.
                if let Some(record) = self.records.get_mut(target)
                    && record.next_ms <= now_ms
                {
                    record.failures = 0;
                }
                continue;
            }
            let record = self.records.entry(*target).or_default();
            // If the clock was set back, the back-off must not become longer.
            record.next_ms = record.next_ms.min(now_ms.saturating_add(LONGEST_MS));
            if *heard_ms > record.heard_ms {
                if record.failures > 0 {
                    record.next_ms = record.next_ms.min(now_ms.saturating_add(HEARD_MS));
                }
                record.heard_ms = *heard_ms;
            }
            if !record.dialing && record.next_ms <= now_ms && running < MAX_DIALS {
                record.dialing = true;
                running += 1;
                chosen.push(*target);
            }
            if !record.dialing {
                next_ms = next_ms.min(record.next_ms);
            }
        }
        self.next_ms = (next_ms != u64::MAX).then_some(next_ms);
        chosen
    }

    /// Records the end of a dial, successful or not: a connection that does not last has a back-off
    /// too. `jitter` is a random number.
    pub(super) fn ended(&mut self, target: Target, now_ms: u64, jitter: u64) {
        let Some(record) = self.records.get_mut(&target) else {
            return;
        };
        record.dialing = false;
        record.failures = record.failures.saturating_add(1);
        let rest = FIRST_MS << record.failures.saturating_sub(1).min(6);
        let rest = rest.min(LONGEST_MS);
        // Up to a quarter is random, so that nodes which lost contact together do not dial
        // together.
        record.next_ms = now_ms.saturating_add(rest - jitter % (rest / 4));
        self.next_ms = self
            .next_ms
            .map_or(Some(record.next_ms), |next| Some(next.min(record.next_ms)));
    }

    /// Time at which [`plan`](Self::plan) next selects a target, if nothing else changes.
    pub(super) fn next_ms(&self) -> Option<u64> {
        self.next_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::id as node;

    fn wanted(seeds: impl IntoIterator<Item = u8>) -> BTreeMap<Target, u64> {
        seeds
            .into_iter()
            .map(|seed| (Target::Node(node(seed)), 1))
            .collect()
    }

    #[test]
    fn each_target_is_dialled_once_and_backs_off_after_each_failure() {
        let mut dialer = Dialer::new(node(1));
        let (peers, nobody) = (wanted([2]), BTreeSet::new());
        let target = Target::Node(node(2));
        let mut now = 5_000;
        let mut rests = Vec::new();
        for _ in 0..9 {
            assert_eq!(dialer.plan(now, &peers, &nobody), [target]);
            assert_eq!(dialer.plan(now, &peers, &nobody), []);
            dialer.ended(target, now, 0);
            let next = dialer.next_ms().unwrap();
            assert_eq!(dialer.plan(next - 1, &peers, &nobody), []);
            rests.push((next - now) / 1000);
            now = next;
        }
        assert_eq!(rests, [1, 2, 4, 8, 15, 15, 15, 15, 15]);
    }

    #[test]
    fn a_target_with_a_new_announcement_is_dialled_soon() {
        let mut dialer = Dialer::new(node(1));
        let (mut peers, nobody) = (wanted([2]), BTreeSet::new());
        let target = Target::Node(node(2));
        let mut now = 0;
        for _ in 0..6 {
            dialer.plan(now, &peers, &nobody);
            dialer.ended(target, now, 0);
            now = dialer.next_ms().unwrap();
        }
        dialer.plan(now, &peers, &nobody);
        dialer.ended(target, now, 0);
        peers.insert(target, 2);
        assert_eq!(dialer.plan(now + 1, &peers, &nobody), []);
        assert_eq!(dialer.plan(now + 1 + HEARD_MS, &peers, &nobody), [target]);
    }

    #[test]
    fn linked_nodes_and_the_own_node_are_not_dialled() {
        let mut dialer = Dialer::new(node(1));
        let linked = BTreeSet::from([node(2)]);
        let chosen = dialer.plan(0, &wanted([1, 2, 3]), &linked);
        assert_eq!(chosen, [Target::Node(node(3))]);
        // A link that breaks is dialled again at once.
        let chosen = dialer.plan(1, &wanted([1, 2, 3]), &BTreeSet::new());
        assert_eq!(chosen, [Target::Node(node(2))]);
    }

    #[test]
    fn a_short_connection_backs_off() {
        let mut dialer = Dialer::new(node(1));
        let (peers, nobody) = (wanted([2]), BTreeSet::new());
        let target = Target::Node(node(2));
        dialer.plan(0, &peers, &nobody);
        dialer.ended(target, 0, 0);
        assert_eq!(dialer.plan(1, &peers, &nobody), []);
        assert_eq!(dialer.plan(1_000, &peers, &nobody), [target]);
        // The next rest is longer, unless the link lasts.
        dialer.ended(target, 1_000, 0);
        assert_eq!(dialer.plan(2_999, &peers, &nobody), []);
        let linked = BTreeSet::from([node(2)]);
        assert_eq!(dialer.plan(3_000, &peers, &linked), []);
        assert_eq!(dialer.plan(3_001, &peers, &nobody), [target]);
        dialer.ended(target, 3_001, 0);
        assert_eq!(dialer.next_ms(), Some(4_001));
    }

    #[test]
    fn dials_and_links_are_bounded() {
        let mut dialer = Dialer::new(node(1));
        let all = wanted(2..=200);
        let nobody = BTreeSet::new();
        let mut dialled = BTreeSet::new();
        for now in 0..1_000 {
            let chosen = dialer.plan(now, &all, &nobody);
            assert!(chosen.len() <= MAX_DIALS);
            for target in chosen {
                dialled.insert(target);
                dialer.ended(target, now, 0);
            }
        }
        assert_eq!(dialled.len(), MAX_LINKS);
    }

    #[test]
    fn jitter_shortens_a_backoff_by_less_than_a_quarter() {
        for jitter in [0, 1, 249, 250, u64::MAX] {
            let mut dialer = Dialer::new(node(1));
            dialer.plan(0, &wanted([2]), &BTreeSet::new());
            dialer.ended(Target::Node(node(2)), 0, jitter);
            let next = dialer.next_ms().unwrap();
            assert!((751..=1_000).contains(&next), "{next}");
        }
    }
}
