//! Limits of a session, the cost of its work, and the budgets of peers. Pure.

use std::sync::Arc;

use hearthnet_transport::{CloseCode, KeyedBuckets, Time, TokenBucket};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::NodeId;

/// Limits of one session. The defaults are those of the specification.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SyncConfig {
    /// Timeout for the peer's HELLO, in ms.
    pub hello_ms: u64,
    /// Timeout for the acknowledgement of a batch, in ms.
    pub ack_ms: u64,
    /// Interval of repeated heads when nothing seems to be missing, in ms.
    pub refresh_ms: u64,
    /// Minimum interval of heads that this side sends, in ms.
    pub heads_gap_ms: u64,
    /// Long-term rate of cost units per second for a peer: see [`cost`]. At 10 to 20 us each, this
    /// is some 4% of a core.
    pub budget_per_second: u64,
    /// Burst of cost units of a peer: enough for a new node to fetch a whole log.
    pub budget: u64,
    /// Long-term rate of heads per minute that a peer may send.
    pub heads_per_minute: u64,
}

impl Default for SyncConfig {
    fn default() -> Self {
        SyncConfig {
            hello_ms: 10_000,
            ack_ms: 120_000,
            refresh_ms: 300_000,
            heads_gap_ms: 5_000,
            budget_per_second: 2_000,
            budget: 400_000,
            heads_per_minute: 30,
        }
    }
}

/// Result of storing a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    pub accepted: u64,
    /// Events that the log had, or had replaced by newer ones.
    pub known: u64,
    pub refused: u64,
    /// Set if the batch held an event that no honest node relays.
    pub hostile: Option<CloseCode>,
}

/// Cost of a batch for the peer's budget, in either direction: one unit per event and KiB, four
/// more for each known event, and fifty more for each refused event, because its signature was
/// checked in vain. Repeating the same events is therefore expensive.
pub fn cost(events: usize, bytes: usize, stored: &Stored) -> u64 {
    (events as u64)
        .saturating_add(bytes as u64 / 1024)
        .saturating_add(stored.known.saturating_mul(4))
        .saturating_add(stored.refused.saturating_mul(50))
}

/// Cost of heads: reading them and finding the missing events.
pub(super) fn cost_of_heads(bytes: usize) -> u64 {
    (bytes as u64 / 1024).saturating_mul(8).max(1)
}

/// Maximum number of peers and parties with a budget.
const MAX_PEERS: usize = 1024;

/// Remaining budgets of all peers.
#[derive(Debug)]
pub(crate) struct Budgets {
    /// Work, by the member that answers for the peer.
    work: KeyedBuckets<NodeId>,
    /// HEADS by peer: 60 units each, with a burst of eight.
    heads: KeyedBuckets<NodeId>,
}

impl Budgets {
    pub(crate) fn new(config: &SyncConfig) -> Budgets {
        Budgets {
            work: KeyedBuckets::new(config.budget_per_second, config.budget, MAX_PEERS),
            heads: KeyedBuckets::new(config.heads_per_minute, 8 * 60, MAX_PEERS),
        }
    }
}

/// Remaining budget of one peer. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(super) budgets: Arc<Mutex<Budgets>>,
    pub(super) peer: NodeId,
    /// Member that answers for the peer.
    pub(super) counted: NodeId,
}

impl Account {
    /// Work budget at `now_ms`.
    pub(super) fn work(&self, now_ms: u64) -> MappedMutexGuard<'_, TokenBucket> {
        MutexGuard::map(self.budgets.lock(), |budgets| {
            budgets.work.of(&self.counted, Time::from_millis(now_ms))
        })
    }

    /// Charges one HEADS. Returns false if that exceeds the rate.
    pub(super) fn take_heads(&self, now_ms: u64) -> bool {
        let mut budgets = self.budgets.lock();
        let heads = budgets.heads.of(&self.peer, Time::from_millis(now_ms));
        let may = heads.has(60);
        if may {
            heads.spend(60);
        }
        may
    }
}
