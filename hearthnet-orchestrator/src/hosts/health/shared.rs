//! Tracker with the clock, and what else all chats of a process share about hosts.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::Evidence;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{FailureKind, ShardHealth, ShardHealthTracker, Standing, Way};
use crate::hosts::checks::SeenRows;
use crate::hosts::tie_breaker::TieBreaker;
use crate::times::whole_ms;

/// Tracker that all chats of a process share. Clones share its state.
#[derive(Clone)]
pub struct SharedHealth(Arc<Shared>);

impl std::fmt::Debug for SharedHealth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hosts = self.0.tracker.lock().hosts.len();
        write!(f, "SharedHealth({hosts} hosts)")
    }
}

/// Takes the evidence that an audit has found. Called on the thread of audits.
pub type Accuse = Box<dyn Fn(Evidence) + Send + Sync>;

struct Shared {
    begin: Instant,
    tracker: Mutex<ShardHealthTracker>,
    /// Rows that hosts returned recently.
    seen: Arc<Mutex<SeenRows>>,
    tie_breaker: TieBreaker,
    /// Number of running calls.
    calls: AtomicUsize,
    /// Takes the evidence of audits.
    accuse: OnceLock<Accuse>,
}

/// A running call, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningCall(SharedHealth);

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.0.0.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Default for SharedHealth {
    fn default() -> Self {
        Self::new(TieBreaker::random())
    }
}

impl SharedHealth {
    pub fn new(tie_breaker: TieBreaker) -> Self {
        Self(Arc::new(Shared {
            begin: Instant::now(),
            tracker: Mutex::default(),
            seen: Arc::default(),
            tie_breaker,
            calls: AtomicUsize::new(0),
            accuse: OnceLock::new(),
        }))
    }

    /// Runs `look` with the tracker and the current time. The lock is not held across waits.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut ShardHealthTracker, u64) -> T) -> T {
        look(&mut self.0.tracker.lock(), whole_ms(self.0.begin.elapsed()))
    }

    /// Key of this process for tie-breaks
    /// ([`RouteRequest::tie_breaker`](crate::hosts::router::RouteRequest::tie_breaker)).
    pub(crate) fn tie_breaker(&self) -> &TieBreaker {
        &self.0.tie_breaker
    }

    /// Counts a call for as long as the result lives.
    pub(crate) fn call(&self) -> RunningCall {
        self.0.calls.fetch_add(1, Ordering::AcqRel);
        RunningCall(self.clone())
    }

    /// Returns true if no call runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.calls.load(Ordering::Acquire) == 0
    }

    /// Sets what is done with the evidence of audits, once per process. Without it, an audit has
    /// consequences for this process alone.
    pub fn on_evidence(&self, accuse: Accuse) {
        // A second setting would be a defect; the first one stays.
        let is_first = self.0.accuse.set(accuse).is_ok();
        debug_assert!(is_first);
    }

    /// Takes the evidence of audits, if it is wanted.
    pub(crate) fn accuse(&self) -> Option<&Accuse> {
        self.0.accuse.get()
    }

    /// Rows that hosts returned recently, over all calls.
    pub(crate) fn seen(&self) -> Arc<Mutex<SeenRows>> {
        Arc::clone(&self.0.seen)
    }

    /// [`ShardHealthTracker::failed`] at the current time; also increments the metric.
    pub fn failed(&self, host: &NodeId, kind: FailureKind) {
        self.look(|all, now| all.failed(host, kind, now));
        metrics::counter!(
            "distributed_inference_host_failures_total",
            "kind" => kind.into_str()
        )
        .increment(1);
        self.count();
    }

    /// [`ShardHealthTracker::all`] at the current time.
    pub fn all(&self) -> Vec<ShardHealth> {
        self.look(|all, now| all.all(now))
    }

    /// [`ShardHealthTracker::ways`] at the current time.
    pub fn ways(&self) -> Vec<Way> {
        self.look(|all, now| all.ways(now))
    }

    /// Updates the metric of hosts per standing.
    pub(crate) fn count(&self) {
        let all = self.all();
        for standing in [Standing::Good, Standing::Failing, Standing::Quarantined] {
            let hosts = all.iter().filter(|one| one.standing == standing).count();
            metrics::gauge!("distributed_inference_hosts", "standing" => standing.into_str())
                .set(hosts as f64);
        }
    }
}
