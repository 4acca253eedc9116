//! What this node has seen of hosts, over all its calls: M26's `ShardHealthTracker`.
//!
//! A host's own words (idle, fast, all layers) cost it nothing; what it did is remembered here, by
//! one tracker for all chats of a process. [`ShardHealthTracker`] is pure: it is told the time.
//! [`SharedHealth`] has the clock, and is what chats share.
//!
//! - **Failures** count by kind, and fade: each is worth half after [`HALF_LIFE_MS`]. A host with a
//!   fresh one is *failing*, and is asked after all others. [`FORGIVING`] answered steps in a row
//!   halve what it has to live down.
//! - **Numbers that cannot be right** put a host into *quarantine*: nobody asks it while anybody
//!   else has its layers. The first time for ten minutes, and twice as long each further time; the
//!   count fades with a half-life of a day.
//! - **Speed** is the round trip of decode steps divided by the layers that were run, of the last
//!   [`WINDOW`] steps. What was not measured for [`STALE_MS`] is not known any more: a slow host
//!   gets its chance again.
//!
//! Example: a host returns NaN. It is in quarantine for 10 minutes, and `hearthnet status` says how
//! long it still is. After that it is asked again, by one chat; if it lies once more, it is left
//! alone for 20 minutes.
//!
//! What is no fault of the host counts nothing: it is full, it leaves, it lost its right, or an
//! input drives the model's activations out of the boundary dtype (`boundary_overflow`).

use std::collections::{BTreeMap, VecDeque};
use std::hash::RandomState;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use hearthnet_model::WeightsId;
use hearthnet_transport::Code;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::checks::SeenRows;
use crate::times::{median, percentile, whole_ms};

/// Most hosts that are remembered; the one not heard of for longest goes. A community has tens.
const MAX_HOSTS: usize = 512;
/// Most shards of one host whose speed is remembered. A host serves one, and moves now and then.
const MAX_SHARDS: usize = 4;
/// Decode steps that a host's speed is read from.
pub const WINDOW: usize = 64;
/// Steps before a speed is known.
const LEARNING: usize = 8;
/// How long measurements hold.
pub const STALE_MS: u64 = 10 * 60_000;
/// In what time a failure is worth half.
pub const HALF_LIFE_MS: u64 = 5 * 60_000;
/// Answered steps after which what a host has to live down is halved.
pub const FORGIVING: u32 = 256;
/// A host with failures worth this much is failing: one, in the last half-life.
const FAILING: f64 = 0.5;
/// The first quarantine, and the longest.
const QUARANTINE_MS: (u64, u64) = (10 * 60_000, 24 * 3_600_000);
/// In what time a wrong number is worth half, for how long the next quarantine is.
const GRUDGE_MS: u64 = 24 * 3_600_000;
/// What is worth less is forgotten.
const NOTHING: f64 = 0.01;
/// Streams of which a host's share is counted: some days of one person's chats, an hour of a service's.
const STREAMS: usize = 64;

/// What went wrong with a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailureKind {
    /// It returned numbers that cannot be right.
    Corruption,
    /// It answered nothing in its time.
    Stalled,
    /// It was much slower than before.
    Slow,
    /// The session with it ended unexpectedly.
    Lost,
    /// It could not be reached, or granted no session.
    Unreachable,
    /// It refused or gave up a stream without a good reason.
    Refused,
}

impl FailureKind {
    /// The stable name, for labels and people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Corruption => "corruption",
            Self::Stalled => "stalled",
            Self::Slow => "slow",
            Self::Lost => "lost",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
        }
    }

    /// What the code of a failed hop says about its host; `None`: nothing bad.
    pub fn of_code(code: &Code) -> Option<Self> {
        let said = [
            (Code::PIPELINE_STALLED, Self::Stalled),
            (Code::SILENT, Self::Stalled),
            (Code::DEGRADED, Self::Slow),
            (Code::CONNECTION_LOST, Self::Lost),
        ];
        let found = said.into_iter().find(|(said, _)| said == code);
        found
            .map(|(_, kind)| kind)
            .or_else(|| (!BLAMELESS.contains(code)).then_some(Self::Refused))
    }
}

/// Codes that say nothing bad about a host.
const BLAMELESS: [Code; 16] = [
    // It has no room, takes its memory back, or leaves: that is how it is meant to be.
    Code::STREAM_LIMIT,
    Code::STREAM_QUOTA,
    Code::STREAM_CHURN,
    Code::KV_FULL,
    Code::KV_QUOTA,
    Code::KV_TOO_SMALL,
    Code::PREEMPTED,
    Code::STEP_QUOTA,
    Code::QUEUE_FULL,
    Code::SHUTTING_DOWN,
    Code::LEAVING,
    Code::IDLE_TIMEOUT,
    // Whose right has ended, the log says.
    Code::REVOKED,
    Code::UNAUTHORIZED,
    // The text is too long for it, or the model's numbers are for its dtype.
    Code::CONTEXT_FULL,
    Code::BOUNDARY_OVERFLOW,
];

/// What is thought of a host, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Standing {
    /// Nothing speaks against it.
    Good,
    /// It failed of late: others are asked first.
    Failing,
    /// It returned numbers that cannot be right: it is asked when nobody else has its layers.
    Quarantined,
}

impl Standing {
    /// The stable name, for labels and people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Failing => "failing",
            Self::Quarantined => "quarantined",
        }
    }
}

/// A host's shard, as this node has seen it (M26 section 4.1).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShardHealth {
    /// The host's node id.
    pub host: NodeId,
    /// Whether it answered since it last failed.
    pub online: bool,
    /// How long ago it last answered, in milliseconds; `None`: it never did.
    pub last_seen_ms: Option<u64>,
    /// What is thought of it.
    pub standing: Standing,
    /// How long it is still in quarantine, in milliseconds; 0 if it is not.
    pub quarantine_ms: u64,
    /// What its failures are still worth, by kind: 1 is one of this moment.
    pub failures: BTreeMap<FailureKind, f64>,
    /// Its shards that were measured of late.
    pub shards: Vec<ShardSpeed>,
}

/// How fast a host runs a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShardSpeed {
    /// The shard, `<model_id>:<lo>-<hi>`, as its host calls it.
    pub shard_id: String,
    /// Median round trip of a decode step through one layer, in milliseconds.
    pub p50_ms: f64,
    /// What 95 of 100 do not exceed.
    pub p95_ms: f64,
}

/// A count that fades.
#[derive(Debug, Clone, Copy, Default)]
struct Fading {
    worth: f64,
    at_ms: u64,
}

impl Fading {
    fn worth(self, now_ms: u64, half_life_ms: u64) -> f64 {
        let halves = now_ms.saturating_sub(self.at_ms) as f64 / half_life_ms as f64;
        self.worth * (-halves).exp2()
    }

    fn add(&mut self, now_ms: u64, half_life_ms: u64) {
        *self = Self {
            worth: self.worth(now_ms, half_life_ms) + 1.0,
            at_ms: now_ms,
        };
    }
}

/// The recent decode steps of one shard: what a layer took.
#[derive(Debug, Clone)]
struct Steps {
    weights: WeightsId,
    recent: VecDeque<Duration>,
    at_ms: u64,
}

impl Steps {
    fn is_known(&self, now_ms: u64) -> bool {
        self.recent.len() >= LEARNING && now_ms.saturating_sub(self.at_ms) < STALE_MS
    }

    /// What `percent` of all do not exceed, in milliseconds.
    fn quantile(&self, percent: usize) -> f64 {
        percentile(self.recent.iter().copied(), percent).as_secs_f64() * 1e3
    }
}

#[derive(Debug, Clone, Default)]
struct Host {
    /// When it last answered.
    seen_ms: Option<u64>,
    /// When anything was last heard of it.
    touched_ms: u64,
    online: bool,
    failures: BTreeMap<FailureKind, Fading>,
    /// Steps answered since it was last forgiven something.
    answered: u32,
    quarantined_until_ms: u64,
    shards: BTreeMap<String, Steps>,
}

impl Host {
    fn failures(&self, now_ms: u64) -> impl Iterator<Item = (FailureKind, f64)> + '_ {
        let worth = move |(kind, fading): (&FailureKind, &Fading)| {
            (*kind, fading.worth(now_ms, half_life(*kind)))
        };
        self.failures.iter().map(worth)
    }

    fn standing(&self, now_ms: u64) -> Standing {
        if now_ms < self.quarantined_until_ms {
            return Standing::Quarantined;
        }
        let others = self.failures(now_ms);
        let worth: f64 = others
            .filter(|(kind, _)| *kind != FailureKind::Corruption)
            .map(|(_, worth)| worth)
            .sum();
        match worth >= FAILING {
            true => Standing::Failing,
            false => Standing::Good,
        }
    }
}

fn half_life(kind: FailureKind) -> u64 {
    match kind {
        FailureKind::Corruption => GRUDGE_MS,
        _ => HALF_LIFE_MS,
    }
}

/// What has been seen of hosts. Times are in milliseconds of any clock that does not go back.
#[derive(Debug, Clone, Default)]
pub struct ShardHealthTracker {
    hosts: BTreeMap<NodeId, Host>,
    /// Whom the last streams were given to.
    streams: VecDeque<NodeId>,
}

impl ShardHealthTracker {
    fn host(&mut self, host: &NodeId, now_ms: u64) -> &mut Host {
        if !self.hosts.contains_key(host) && self.hosts.len() >= MAX_HOSTS {
            let longest = self.hosts.iter().min_by_key(|(_, one)| one.touched_ms);
            if let Some(node) = longest.map(|(node, _)| *node) {
                self.hosts.remove(&node);
            }
        }
        let one = self.hosts.entry(*host).or_default();
        one.touched_ms = now_ms;
        one
    }

    /// A host has answered a decode step of one row through `layers` layers of a shard of a model with
    /// these weights.
    pub fn answered(
        &mut self,
        host: &NodeId,
        (shard_id, weights): (&str, WeightsId),
        layers: u32,
        took: Duration,
        now_ms: u64,
    ) {
        let one = self.host(host, now_ms);
        one.seen_ms = Some(now_ms);
        one.online = true;
        one.answered += 1;
        if one.answered >= FORGIVING {
            one.answered = 0;
            for (kind, fading) in &mut one.failures {
                if *kind != FailureKind::Corruption {
                    fading.worth /= 2.0;
                }
            }
        }
        if !one.shards.contains_key(shard_id) && one.shards.len() >= MAX_SHARDS {
            let oldest = one.shards.iter().min_by_key(|(_, steps)| steps.at_ms);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                one.shards.remove(&name);
            }
        }
        let fresh = || Steps {
            weights,
            recent: VecDeque::new(),
            at_ms: now_ms,
        };
        let steps = one.shards.entry(shard_id.to_owned()).or_insert_with(fresh);
        // A host may call anything by the same name.
        if now_ms.saturating_sub(steps.at_ms) >= STALE_MS || steps.weights != weights {
            *steps = fresh();
        }
        steps.at_ms = now_ms;
        if steps.recent.len() == WINDOW {
            steps.recent.pop_front();
        }
        steps.recent.push_back(took / layers.max(1));
    }

    /// A host can be talked to.
    pub fn reached(&mut self, host: &NodeId, now_ms: u64) {
        let one = self.host(host, now_ms);
        one.seen_ms = Some(now_ms);
        one.online = true;
        // It is there: how often it was not says nothing any more.
        one.failures.remove(&FailureKind::Unreachable);
    }

    /// A host has opened a stream for this node.
    pub fn opened(&mut self, host: &NodeId, now_ms: u64) {
        self.reached(host, now_ms);
        if self.streams.len() == STREAMS {
            self.streams.pop_front();
        }
        self.streams.push_back(*host);
    }

    /// How many of the last 64 streams a host was given.
    pub fn streams(&self, host: &NodeId) -> u32 {
        let own = self.streams.iter().filter(|one| *one == host);
        u32::try_from(own.count()).unwrap_or(u32::MAX)
    }

    /// A host has failed.
    pub fn failed(&mut self, host: &NodeId, kind: FailureKind, now_ms: u64) {
        let one = self.host(host, now_ms);
        one.online = !matches!(
            kind,
            FailureKind::Lost | FailureKind::Unreachable | FailureKind::Stalled
        );
        one.answered = 0;
        let fading = one.failures.entry(kind).or_default();
        fading.add(now_ms, half_life(kind));
        if kind == FailureKind::Corruption {
            // 1, 2, 4, ... times the first one; what has faded counts for less.
            let times = (fading.worth - 1.0).max(0.0).exp2();
            let (first, longest) = QUARANTINE_MS;
            let for_ms = ((first as f64 * times) as u64).min(longest);
            one.quarantined_until_ms = one.quarantined_until_ms.max(now_ms + for_ms);
        }
    }

    /// What is thought of a host now.
    pub fn standing(&self, host: &NodeId, now_ms: u64) -> Standing {
        let one = self.hosts.get(host);
        one.map_or(Standing::Good, |one| one.standing(now_ms))
    }

    /// How long a host takes for a decode step through one layer of a shard, as measured: the
    /// median in milliseconds. Of a shard that was not measured, what its other shards take.
    pub fn ms_per_layer(&self, host: &NodeId, shard_id: &str, now_ms: u64) -> Option<f64> {
        let one = self.hosts.get(host)?;
        let known = |steps: &&Steps| steps.is_known(now_ms);
        let own = one.shards.get(shard_id).filter(known);
        let any = || {
            let all = one.shards.values().filter(known);
            all.max_by_key(|steps| steps.at_ms)
        };
        Some(own.or_else(any)?.quantile(50))
    }

    /// What a row takes a layer with these weights, as far as others than `host` were measured: the
    /// median of theirs.
    pub(crate) fn beside(
        &self,
        host: &NodeId,
        weights: WeightsId,
        now_ms: u64,
    ) -> Option<Duration> {
        let others = self.hosts.iter().filter(|(node, _)| *node != host);
        median(others.filter_map(|(_, one)| {
            let all = one.shards.values();
            let known = all.filter(|steps| steps.weights == weights && steps.is_known(now_ms));
            let latest = known.max_by_key(|steps| steps.at_ms)?;
            Some(percentile(latest.recent.iter().copied(), 50))
        }))
    }

    /// All hosts, by node id.
    pub fn all(&self, now_ms: u64) -> Vec<ShardHealth> {
        let hosts = self.hosts.iter();
        hosts
            .map(|(name, one)| ShardHealth {
                host: *name,
                online: one.online,
                last_seen_ms: one.seen_ms.map(|at| now_ms.saturating_sub(at)),
                standing: one.standing(now_ms),
                quarantine_ms: one.quarantined_until_ms.saturating_sub(now_ms),
                failures: one
                    .failures(now_ms)
                    .filter(|(_, worth)| *worth >= NOTHING)
                    .collect(),
                shards: one
                    .shards
                    .iter()
                    .filter(|(_, steps)| steps.is_known(now_ms))
                    .map(|(shard_id, steps)| ShardSpeed {
                        shard_id: shard_id.clone(),
                        p50_ms: steps.quantile(50),
                        p95_ms: steps.quantile(95),
                    })
                    .collect(),
            })
            .collect()
    }
}

/// A tracker that all chats of a process share. Clones are the same one.
#[derive(Debug, Clone)]
pub struct SharedHealth(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    begin: Instant,
    tracker: Mutex<ShardHealthTracker>,
    /// What hosts returned.
    seen: Arc<Mutex<SeenRows>>,
    key: RandomState,
}

impl Default for SharedHealth {
    fn default() -> Self {
        Self(Arc::new(Shared {
            begin: Instant::now(),
            tracker: Mutex::default(),
            seen: Arc::default(),
            key: RandomState::new(),
        }))
    }
}

impl SharedHealth {
    /// The tracker, and the time by its clock. Never held while anything is waited for.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut ShardHealthTracker, u64) -> T) -> T {
        look(&mut self.0.tracker.lock(), whole_ms(self.0.begin.elapsed()))
    }

    /// The lots of this process ([`RouteRequest::lots`](crate::router::RouteRequest::lots)).
    pub(crate) fn lots(&self) -> &RandomState {
        &self.0.key
    }

    /// What hosts returned, in all calls of late.
    pub(crate) fn seen(&self) -> Arc<Mutex<SeenRows>> {
        Arc::clone(&self.0.seen)
    }

    /// As [`ShardHealthTracker::failed`], now; it is counted.
    pub fn failed(&self, host: &NodeId, kind: FailureKind) {
        self.look(|all, now| all.failed(host, kind, now));
        metrics::counter!(
            "distributed_inference_host_failures_total",
            "kind" => kind.as_str()
        )
        .increment(1);
        self.count();
    }

    /// As [`ShardHealthTracker::all`], now.
    pub fn all(&self) -> Vec<ShardHealth> {
        self.look(|all, now| all.all(now))
    }

    /// Says how many hosts are in which standing.
    pub(crate) fn count(&self) {
        let all = self.all();
        for standing in [Standing::Good, Standing::Failing, Standing::Quarantined] {
            let hosts = all.iter().filter(|one| one.standing == standing).count();
            metrics::gauge!("distributed_inference_hosts", "standing" => standing.as_str())
                .set(hosts as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::node;

    const MINUTE: u64 = 60_000;
    const WEIGHTS: WeightsId = WeightsId([7; 32]);

    fn steps(all: &mut ShardHealthTracker, host: &NodeId, count: usize, ms: u64, now_ms: u64) {
        for _ in 0..count {
            let took = Duration::from_millis(ms);
            all.answered(host, ("m:0-9", WEIGHTS), 10, took, now_ms);
        }
    }

    #[test]
    fn speed_is_measured_per_layer_and_known_after_a_few_steps_until_it_is_stale() {
        let mut all = ShardHealthTracker::default();
        steps(&mut all, &node("a"), LEARNING - 1, 20, 0);
        assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", 0), None);
        steps(&mut all, &node("a"), 1, 20, 0);
        assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", 0), Some(2.0));
        // Nothing was measured of its other shard: the same machine is as fast.
        assert_eq!(all.ms_per_layer(&node("a"), "m:10-19", 0), Some(2.0));
        assert_eq!(all.ms_per_layer(&node("b"), "m:0-9", 0), None);
        assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", STALE_MS), None);
        // And one step later it is still not known again.
        steps(&mut all, &node("a"), 1, 10, STALE_MS);
        assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", STALE_MS), None);
    }

    #[test]
    fn what_others_take_is_known_by_the_same_weights_only_and_never_by_the_host_itself() {
        let mut all = ShardHealthTracker::default();
        for (host, ms) in [("a", 20), ("b", 30), ("c", 400)] {
            steps(&mut all, &node(host), LEARNING, ms, 0);
        }
        let beside = |host: &str, weights| all.beside(&node(host), weights, 0);
        assert_eq!(beside("c", WEIGHTS), Some(Duration::from_millis(3)));
        assert_eq!(beside("nobody", WEIGHTS), Some(Duration::from_millis(3)));
        assert_eq!(beside("c", WeightsId([8; 32])), None);
        assert_eq!(all.beside(&node("c"), WEIGHTS, STALE_MS), None);
    }

    #[test]
    fn one_hiccup_in_twenty_is_in_the_95th_percentile_and_not_in_the_median() {
        let mut all = ShardHealthTracker::default();
        for step in 0..40 {
            let ms = if step % 10 == 9 { 500 } else { 10 };
            steps(&mut all, &node("a"), 1, ms, 0);
        }
        let health = all.all(0);
        let speed = &health[0].shards[0];
        assert_eq!((speed.p50_ms, speed.p95_ms), (1.0, 50.0));
        assert_eq!(health[0].standing, Standing::Good);
    }

    #[test]
    fn a_failure_puts_a_host_behind_for_one_half_life_and_good_work_shortens_that() {
        for kind in [FailureKind::Lost, FailureKind::Slow, FailureKind::Refused] {
            let mut all = ShardHealthTracker::default();
            all.failed(&node("a"), kind, 0);
            assert_eq!(
                all.standing(&node("a"), HALF_LIFE_MS - 1),
                Standing::Failing
            );
            assert_eq!(all.standing(&node("a"), HALF_LIFE_MS + 1), Standing::Good);
            assert_eq!(all.standing(&node("b"), 0), Standing::Good);
            // Twice in a row takes twice as long to live down.
            all.failed(&node("a"), kind, 0);
            assert_eq!(
                all.standing(&node("a"), 2 * HALF_LIFE_MS - 1),
                Standing::Failing
            );
            steps(&mut all, &node("a"), 2 * FORGIVING as usize + 2, 1, 1);
            assert_eq!(all.standing(&node("a"), 1000), Standing::Good);
        }
    }

    #[test]
    fn whoever_is_reached_again_was_only_away() {
        let mut all = ShardHealthTracker::default();
        all.failed(&node("a"), FailureKind::Unreachable, 0);
        all.failed(&node("a"), FailureKind::Unreachable, 0);
        let away = &all.all(0)[0];
        assert_eq!((away.online, away.standing), (false, Standing::Failing));
        assert_eq!(away.last_seen_ms, None);
        all.reached(&node("a"), 5);
        let back = &all.all(10)[0];
        assert_eq!((back.online, back.standing), (true, Standing::Good));
        assert_eq!(back.last_seen_ms, Some(5));
    }

    #[test]
    fn numbers_that_cannot_be_right_are_a_quarantine_that_doubles_and_ends() {
        let mut all = ShardHealthTracker::default();
        let (first, longest) = QUARANTINE_MS;
        all.failed(&node("a"), FailureKind::Corruption, 0);
        assert_eq!(all.standing(&node("a"), first - 1), Standing::Quarantined);
        assert_eq!(all.all(MINUTE)[0].quarantine_ms, first - MINUTE);
        assert_eq!(all.standing(&node("a"), first), Standing::Good);
        // Good work in between does not make a liar honest.
        steps(&mut all, &node("a"), 10 * FORGIVING as usize, 1, first);
        all.failed(&node("a"), FailureKind::Corruption, first);
        let second = all.all(first)[0].quarantine_ms;
        assert!(
            (2 * first - MINUTE..=2 * first).contains(&second),
            "{second}"
        );
        for _ in 0..100 {
            all.failed(&node("a"), FailureKind::Corruption, first);
        }
        assert_eq!(all.all(first)[0].quarantine_ms, longest);
        // After a month it is as if it had been the first time.
        let month = 30 * 24 * 60 * MINUTE;
        let mut all = ShardHealthTracker::default();
        all.failed(&node("a"), FailureKind::Corruption, 0);
        all.failed(&node("a"), FailureKind::Corruption, month);
        assert_eq!(all.all(month)[0].quarantine_ms, first);
    }

    #[test]
    fn what_is_no_fault_of_a_host_counts_nothing() {
        for code in [
            "boundary_overflow",
            "stream_limit",
            "kv_full",
            "leaving",
            "revoked",
        ] {
            assert_eq!(FailureKind::of_code(&Code::new(code)), None, "{code}");
        }
        for (code, kind) in [
            ("connection_lost", FailureKind::Lost),
            ("pipeline_stalled", FailureKind::Stalled),
            ("degraded", FailureKind::Slow),
            ("internal", FailureKind::Refused),
            ("anything that a host makes up", FailureKind::Refused),
        ] {
            assert_eq!(FailureKind::of_code(&Code::new(code)), Some(kind), "{code}");
        }
    }

    proptest! {
        #[test]
        fn however_many_hosts_and_shards_there_are_what_is_remembered_is_bounded(
            events in proptest::collection::vec((0u32..2000, 0u8..20, 0u8..8, 0u64..1000), 0..3000)
        ) {
            let mut all = ShardHealthTracker::default();
            let mut now_ms = 0;
            for (host, shard, what, later) in events {
                now_ms += later * MINUTE;
                let host = node(&format!("h{host}"));
                match what {
                    0 => all.failed(&host, FailureKind::Corruption, now_ms),
                    1 => all.failed(&host, FailureKind::Lost, now_ms),
                    2 => all.reached(&host, now_ms),
                    _ => all.answered(&host, (&format!("s{shard}"), WEIGHTS), 0, Duration::MAX, now_ms),
                }
            }
            let told = all.all(now_ms);
            prop_assert!(told.len() <= MAX_HOSTS);
            for one in &told {
                prop_assert!(one.quarantine_ms <= QUARANTINE_MS.1);
                prop_assert!(one.shards.len() <= MAX_SHARDS);
                prop_assert!(one.failures.values().all(|worth| worth.is_finite()));
            }
            prop_assert!(all.hosts.values().all(|one| one.shards.len() <= MAX_SHARDS));
        }
    }
}
