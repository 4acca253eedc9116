//! How reliably a node answers what it is asked.
//!
//! Pure: times are Unix milliseconds, given by the caller.
//!
//! ```text
//!              half of the last calls failed, at least 3
//!   healthy ────────────────────────────────────────────> quarantined
//!      ^                                                   │      ^
//!      │ the probe succeeded                time is over   │      │ the probe failed:
//!      │                                                   v      │ twice as long
//!      └────────────────────────────────────────────────  probing ┘
//! ```
//!
//! Worked example: of five calls within five minutes three fail; the node is left
//! alone for 5 s, then one call may try it. That fails as well: 10 s. The next one
//! succeeds: the node is healthy and its past forgotten.

use std::collections::{BTreeMap, VecDeque};

use crate::NodeId;

/// Calls that are looked back on.
const WINDOW_CALLS: usize = 20;
/// How long a call is looked back on, in milliseconds.
const WINDOW_MS: u64 = 5 * 60 * 1000;
/// Fewer failures than this prove nothing.
const MIN_FAILURES: usize = 3;
/// The first quarantine, in milliseconds; each further one is twice as long.
const FIRST_QUARANTINE_MS: u64 = 5_000;
/// The longest quarantine, in milliseconds.
const MAX_QUARANTINE_MS: u64 = 5 * 60 * 1000;
/// A probe that was let through and never reported is forgotten after this time.
const PROBE_MS: u64 = 60_000;
/// Pairs of node and capability that are remembered: 64 peers with 16 capabilities.
const MAX_ENTRIES: usize = 1024;

/// What is known of a node's answers to one capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Nothing speaks against calling it.
    Healthy,
    /// It failed too often: not to be called before this time (Unix milliseconds).
    Quarantined {
        /// When it may be tried again.
        until_ms: u64,
    },
    /// The quarantine is over: one call may try it.
    Probing,
}

/// Figures of the rolling window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HealthFigures {
    /// Calls in the window.
    pub calls: usize,
    /// Those that failed through the node's fault.
    pub failures: usize,
    /// Median milliseconds from a call to its end, over those that succeeded.
    pub median_ms: Option<u64>,
}

#[derive(Debug, Default)]
struct Entry {
    calls: VecDeque<Outcome>,
    quarantine: Option<Quarantine>,
    touched_ms: u64,
}

#[derive(Debug)]
struct Outcome {
    at_ms: u64,
    took_ms: Option<u64>,
}

#[derive(Debug)]
struct Quarantine {
    until_ms: u64,
    length_ms: u64,
    probe_since_ms: Option<u64>,
}

/// The health of every (node, capability) that was called.
#[derive(Debug, Default)]
pub struct HealthTable {
    entries: BTreeMap<(NodeId, String), Entry>,
}

impl HealthTable {
    /// Whether a call may be made now.
    pub fn health(&self, node: NodeId, capability: &str, now_ms: u64) -> Health {
        let Some(entry) = self.entries.get(&(node, capability.to_owned())) else {
            return Health::Healthy;
        };
        match &entry.quarantine {
            None => Health::Healthy,
            Some(q) if now_ms < q.until_ms => Health::Quarantined {
                until_ms: q.until_ms,
            },
            Some(Quarantine {
                probe_since_ms: Some(since),
                ..
            }) if now_ms < since.saturating_add(PROBE_MS) => Health::Quarantined {
                until_ms: since.saturating_add(PROBE_MS),
            },
            Some(_) => Health::Probing,
        }
    }

    /// To be called before each call: takes the one probe after a quarantine. Returns
    /// what [`HealthTable::health`] said; a quarantined node should not be called.
    pub fn begin(&mut self, node: NodeId, capability: &str, now_ms: u64) -> Health {
        let health = self.health(node, capability, now_ms);
        if health == Health::Probing
            && let Some(entry) = self.entries.get_mut(&(node, capability.to_owned()))
            && let Some(quarantine) = &mut entry.quarantine
        {
            quarantine.probe_since_ms = Some(now_ms);
        }
        health
    }

    /// A call succeeded after `took_ms`.
    pub fn succeeded(&mut self, node: NodeId, capability: &str, took_ms: u64, now_ms: u64) {
        let entry = self.entry(node, capability, now_ms);
        if entry.quarantine.take().is_some() {
            entry.calls.clear();
        }
        entry.push(now_ms, Some(took_ms));
    }

    /// A call failed, and the node is to blame ([`super::CallError::is_fault`]).
    pub fn failed(&mut self, node: NodeId, capability: &str, now_ms: u64) {
        let entry = self.entry(node, capability, now_ms);
        entry.push(now_ms, None);
        let length_ms = match &entry.quarantine {
            // A call that began before the quarantine says nothing new.
            Some(q) if now_ms < q.until_ms => return,
            Some(q) => q.length_ms.saturating_mul(2).min(MAX_QUARANTINE_MS),
            None => {
                let failures = entry.failures();
                if failures < MIN_FAILURES || failures * 2 < entry.calls.len() {
                    return;
                }
                FIRST_QUARANTINE_MS
            }
        };
        entry.quarantine = Some(Quarantine {
            until_ms: now_ms.saturating_add(length_ms),
            length_ms,
            probe_since_ms: None,
        });
    }

    /// A call ended without saying anything about the node: a probe that it was may be
    /// made again.
    pub fn undecided(&mut self, node: NodeId, capability: &str) {
        if let Some(entry) = self.entries.get_mut(&(node, capability.to_owned()))
            && let Some(quarantine) = &mut entry.quarantine
        {
            quarantine.probe_since_ms = None;
        }
    }

    /// The figures of the window.
    pub fn figures(&self, node: NodeId, capability: &str, now_ms: u64) -> HealthFigures {
        let Some(entry) = self.entries.get(&(node, capability.to_owned())) else {
            return HealthFigures::default();
        };
        let recent = || entry.calls.iter().filter(|c| c.is_recent(now_ms));
        let mut times: Vec<u64> = recent().filter_map(|c| c.took_ms).collect();
        times.sort_unstable();
        HealthFigures {
            calls: recent().count(),
            failures: recent().filter(|c| c.took_ms.is_none()).count(),
            median_ms: times.get(times.len() / 2).copied(),
        }
    }

    /// Forgets a node, which is no longer a member.
    pub fn forget(&mut self, node: NodeId) {
        self.entries.retain(|(of, _), _| *of != node);
    }

    fn entry(&mut self, node: NodeId, capability: &str, now_ms: u64) -> &mut Entry {
        let key = (node, capability.to_owned());
        if self.entries.len() >= MAX_ENTRIES && !self.entries.contains_key(&key) {
            let oldest = self.entries.iter().min_by_key(|(_, e)| e.touched_ms);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.entries.remove(&oldest);
            }
        }
        let entry = self.entries.entry(key).or_default();
        entry.touched_ms = now_ms;
        entry
    }
}

impl Entry {
    fn push(&mut self, at_ms: u64, took_ms: Option<u64>) {
        self.calls.push_back(Outcome { at_ms, took_ms });
        while self.calls.len() > WINDOW_CALLS
            || self.calls.front().is_some_and(|c| !c.is_recent(at_ms))
        {
            self.calls.pop_front();
        }
    }

    fn failures(&self) -> usize {
        self.calls.iter().filter(|c| c.took_ms.is_none()).count()
    }
}

impl Outcome {
    fn is_recent(&self, now_ms: u64) -> bool {
        self.at_ms.saturating_add(WINDOW_MS) > now_ms
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::NodeKey;

    const CAP: &str = "a.b";

    fn node(seed: u8) -> NodeId {
        NodeKey::from_secret(&[seed; 32]).id()
    }

    fn fail(table: &mut HealthTable, times: usize, now_ms: u64) {
        for _ in 0..times {
            table.failed(node(1), CAP, now_ms);
        }
    }

    #[test]
    fn the_worked_example_holds() {
        let mut table = HealthTable::default();
        for n in 0..2 {
            table.succeeded(node(1), CAP, 7, n);
        }
        fail(&mut table, 3, 1000);
        assert_eq!(
            table.health(node(1), CAP, 1001),
            Health::Quarantined { until_ms: 6000 }
        );
        assert_eq!(table.begin(node(1), CAP, 6000), Health::Probing);
        // One probe at a time.
        assert!(matches!(
            table.begin(node(1), CAP, 6001),
            Health::Quarantined { .. }
        ));
        table.failed(node(1), CAP, 6500);
        assert_eq!(
            table.health(node(1), CAP, 6501),
            Health::Quarantined { until_ms: 16_500 }
        );
        assert_eq!(table.begin(node(1), CAP, 16_500), Health::Probing);
        table.succeeded(node(1), CAP, 9, 16_600);
        assert_eq!(table.health(node(1), CAP, 16_600), Health::Healthy);
        let figures = table.figures(node(1), CAP, 16_600);
        assert_eq!(
            (figures.calls, figures.failures, figures.median_ms),
            (1, 0, Some(9))
        );
    }

    #[test]
    fn two_failures_or_a_minority_prove_nothing() {
        let mut table = HealthTable::default();
        fail(&mut table, 2, 0);
        assert_eq!(table.health(node(1), CAP, 0), Health::Healthy);
        let mut table = HealthTable::default();
        for _ in 0..10 {
            table.succeeded(node(1), CAP, 1, 0);
        }
        fail(&mut table, 9, 0);
        assert_eq!(table.health(node(1), CAP, 0), Health::Healthy);
        fail(&mut table, 1, 0);
        assert!(matches!(
            table.health(node(1), CAP, 0),
            Health::Quarantined { .. }
        ));
    }

    #[test]
    fn old_failures_are_forgotten() {
        let mut table = HealthTable::default();
        fail(&mut table, 2, 0);
        fail(&mut table, 1, WINDOW_MS);
        assert_eq!(table.health(node(1), CAP, WINDOW_MS), Health::Healthy);
        assert_eq!(table.figures(node(1), CAP, WINDOW_MS).failures, 1);
    }

    #[test]
    fn one_capability_and_one_node_do_not_answer_for_others() {
        let mut table = HealthTable::default();
        fail(&mut table, 3, 0);
        assert_eq!(table.health(node(1), "a.c", 0), Health::Healthy);
        assert_eq!(table.health(node(2), CAP, 0), Health::Healthy);
    }

    #[test]
    fn a_probe_that_never_reports_does_not_block_for_ever() {
        let mut table = HealthTable::default();
        fail(&mut table, 3, 0);
        assert_eq!(table.begin(node(1), CAP, 5000), Health::Probing);
        assert_eq!(table.begin(node(1), CAP, 5000 + PROBE_MS), Health::Probing);
        table.undecided(node(1), CAP);
        assert_eq!(table.begin(node(1), CAP, 5001 + PROBE_MS), Health::Probing);
    }

    proptest! {
        #[test]
        fn memory_is_bounded_and_quarantines_end(
            steps in prop::collection::vec((0u8..200, 0u32..4000, any::<bool>(), 0u64..20_000), 1..400),
        ) {
            let mut table = HealthTable::default();
            let mut now = 0u64;
            for (n, cap, ok, pass) in steps {
                now += pass;
                let (node, cap) = (node(n % 3), format!("c{cap}"));
                table.begin(node, &cap, now);
                if ok { table.succeeded(node, &cap, pass, now) } else { table.failed(node, &cap, now) }
                prop_assert!(table.entries.len() <= MAX_ENTRIES);
                let entry = table.entries.get(&(node, cap.clone())).unwrap();
                prop_assert!(entry.calls.len() <= WINDOW_CALLS);
                let later = now + MAX_QUARANTINE_MS + PROBE_MS;
                let quarantined = matches!(table.health(node, &cap, later), Health::Quarantined { .. });
                prop_assert!(!quarantined);
            }
        }
    }
}
