//! Failures and speed of hosts, as seen by this node over all its calls.
//!
//! A host may advertise anything (idle, fast, all layers). This tracker remembers how the host
//! behaved, for all chats of a process. [`ShardHealthTracker`] is pure: callers pass the time.
//! [`SharedHealth`] adds the clock and is shared by the chats.
//!
//! - **Failures** are counted by kind and decay: the weight of each halves every [`HALF_LIFE_MS`].
//!   A host with a recent failure is *failing* and is used only if no good host has the layers.
//!   Every [`STEPS_PER_RECOVERY`] answered steps without a failure halve the weight.
//! - **Implausible rows** put a host into *quarantine*: it is used only if no other host has its
//!   layers. The first quarantine lasts ten minutes and each further one twice as long; this count
//!   has a half-life of a day.
//! - **Speed** is the round trip of decode steps divided by the number of layers, over the last
//!   [`WINDOW`] steps. Measurements older than [`STALE_MS`] are dropped, so that a slow host gets
//!   another chance.
//!
//! Example: a host returns NaN. It is quarantined for 10 minutes; `hearthnet status` shows the time
//! left. Then it is used again. If it returns NaN again, it is quarantined for 20 minutes.
//!
//! Causes that are no fault of the host are not counted: it is full, it leaves, it lost its
//! authorisation, or an input drives the model's activations out of the boundary dtype
//! (`boundary_overflow`).

mod shared;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_files::WeightsId;
use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

pub(crate) use self::shared::RunningCall;
pub use self::shared::{Accuse, SharedHealth};
pub use crate::hosts::audits::AuditCounts;
use crate::hosts::audits::AuditResult;
use crate::times::{median, percentile};

/// Maximum number of hosts; the one updated least recently is evicted. A community has tens.
const MAX_HOSTS: usize = 512;
/// Maximum number of measured shards per node. It serves at most one of each adopted model, and
/// rarely changes it.
const MAX_SHARDS: usize = 16;
/// Decode steps that the speed is computed from.
pub const WINDOW: usize = 64;
/// Steps needed before the speed is known.
const LEARNING: usize = 8;
/// Age after which measurements are dropped.
pub const STALE_MS: u64 = 10 * 60_000;
/// Half-life of a failure's weight.
pub const HALF_LIFE_MS: u64 = 5 * 60_000;
/// Answered steps in a row after which the weight of all failures but corruption is halved.
pub const STEPS_PER_RECOVERY: u32 = 256;
/// Total weight from which a host is failing: one failure in the last half-life.
const FAILING: f64 = 0.5;
/// First and longest quarantine.
const QUARANTINE_MS: (u64, u64) = (10 * 60_000, 24 * 3_600_000);
/// Half-life of the count that the length of the next quarantine is computed from.
const CORRUPTION_HALF_LIFE_MS: u64 = 24 * 3_600_000;
/// Failures of less weight are not reported.
const MIN_WEIGHT: f64 = 0.01;
/// Number of recent streams that a host's share is computed from: days of one user's chats, an hour
/// of a service's.
const STREAMS: usize = 64;

#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
#[non_exhaustive]
pub enum FailureKind {
    /// The host returned implausible rows.
    Corruption,
    /// It made no progress within the timeout.
    Stalled,
    /// It was much slower than other hosts, or than before.
    Slow,
    /// The session with it ended unexpectedly.
    Lost,
    /// It could not be reached, or granted no session.
    Unreachable,
    /// It refused or closed a stream without a good reason.
    Refused,
    /// An audit found that its rows or those of another host are wrong, and not which.
    Disputed,
    /// It computes exactly, but did not sign what it answered.
    Unsigned,
}

impl FailureKind {
    /// Failure kind for the code of a failed hop; `None` if the host is not to blame.
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

/// Codes that do not count as a failure of the host.
const BLAMELESS: [Code; 17] = [
    // Regular behaviour of a full, preempting or leaving host.
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
    // The event log decides about authorisation.
    Code::REVOKED,
    Code::UNAUTHORIZED,
    // A conviction excludes the host by itself.
    Code::CONVICTED,
    // The text is too long for the host, or an activation leaves the range of its dtype.
    Code::CONTEXT_FULL,
    Code::BOUNDARY_OVERFLOW,
];

/// Rating of a host, best first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
#[non_exhaustive]
pub enum Standing {
    Good,
    /// It failed recently: good hosts are preferred.
    Failing,
    /// It returned implausible rows: it is used only if no other host has its layers.
    Quarantined,
}

/// State of one host, as seen by this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShardHealth {
    pub host: NodeId,
    /// True if it answered since it last failed.
    pub online: bool,
    /// Time since its last answer, in milliseconds; `None` if it never answered.
    pub last_seen_ms: Option<u64>,
    pub standing: Standing,
    /// Remaining quarantine in milliseconds; 0 if there is none.
    pub quarantine_ms: u64,
    /// Weight of its failures by kind; a failure of this moment weighs 1.
    pub failures: BTreeMap<FailureKind, f64>,
    /// Shards with recent measurements.
    pub shards: Vec<ShardSpeed>,
    #[serde(default)]
    pub audits: AuditCounts,
}

/// Measured speed of a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShardSpeed {
    /// The shard, `<model_id>:<lo>-<hi>`, as the host advertises it.
    pub shard_id: String,
    /// Median round trip of a decode step through one layer, in milliseconds.
    pub p50_ms: f64,
    /// 95th percentile, in milliseconds.
    pub p95_ms: f64,
}

/// Time of a row from the caller to a host: half of the median round trip of recent decode steps,
/// without the host's queue and compute. Includes the row's time on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Way {
    pub node: NodeId,
    pub took: Duration,
    pub row_bytes: u64,
}

impl Way {
    pub fn new(node: NodeId, took: Duration, row_bytes: u64) -> Self {
        Self {
            node,
            took,
            row_bytes,
        }
    }
}

/// Count that decays exponentially.
#[derive(Debug, Clone, Copy, Default)]
struct DecayingCount {
    weight: f64,
    at_ms: u64,
}

impl DecayingCount {
    fn weight(self, now_ms: u64, half_life_ms: u64) -> f64 {
        let halves = now_ms.saturating_sub(self.at_ms) as f64 / half_life_ms as f64;
        self.weight * (-halves).exp2()
    }

    fn add(&mut self, now_ms: u64, half_life_ms: u64) {
        *self = Self {
            weight: self.weight(now_ms, half_life_ms) + 1.0,
            at_ms: now_ms,
        };
    }
}

/// Recent decode steps of one shard: time per layer.
#[derive(Debug, Clone)]
struct StepTimes {
    weights: WeightsId,
    /// Layers that the latest step ran.
    layers: u32,
    recent: VecDeque<Duration>,
    at_ms: u64,
}

impl StepTimes {
    fn is_known(&self, now_ms: u64) -> bool {
        self.recent.len() >= LEARNING && now_ms.saturating_sub(self.at_ms) < STALE_MS
    }

    /// Percentile of the times per layer, in milliseconds.
    fn quantile(&self, percent: usize) -> f64 {
        percentile(self.recent.iter().copied(), percent).as_secs_f64() * 1e3
    }
}

#[derive(Debug, Clone, Default)]
struct Host {
    /// Time of its last answer.
    seen_ms: Option<u64>,
    /// Time of its last update, used for eviction.
    touched_ms: u64,
    online: bool,
    failures: BTreeMap<FailureKind, DecayingCount>,
    /// Steps answered since the last recovery or failure.
    answered: u32,
    quarantined_until_ms: u64,
    shards: BTreeMap<String, StepTimes>,
    /// Recent round trips without the host's queue and compute.
    ways: VecDeque<Duration>,
    /// Bytes of the latest row that made such a round trip.
    row_bytes: u64,
    audits: AuditCounts,
}

impl Host {
    fn failures(&self, now_ms: u64) -> impl Iterator<Item = (FailureKind, f64)> + '_ {
        let weight = move |(kind, decaying): (&FailureKind, &DecayingCount)| {
            (*kind, decaying.weight(now_ms, half_life(*kind)))
        };
        self.failures.iter().map(weight)
    }

    fn standing(&self, now_ms: u64) -> Standing {
        if now_ms < self.quarantined_until_ms {
            return Standing::Quarantined;
        }
        let others = self.failures(now_ms);
        let weight: f64 = others
            .filter(|(kind, _)| *kind != FailureKind::Corruption)
            .map(|(_, weight)| weight)
            .sum();
        match weight >= FAILING {
            true => Standing::Failing,
            false => Standing::Good,
        }
    }
}

/// Appends to a window of the `most` latest values.
fn push_last<T>(window: &mut VecDeque<T>, most: usize, value: T) {
    if window.len() == most {
        window.pop_front();
    }
    window.push_back(value);
}

fn half_life(kind: FailureKind) -> u64 {
    match kind {
        FailureKind::Corruption => CORRUPTION_HALF_LIFE_MS,
        _ => HALF_LIFE_MS,
    }
}

/// Records of all hosts. Times are milliseconds of any monotonic clock.
#[derive(Debug, Clone, Default)]
pub struct ShardHealthTracker {
    hosts: BTreeMap<NodeId, Host>,
    /// Hosts of the most recent streams.
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

    /// Records an answered decode step of one row through `layers` layers of a shard.
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
        if one.answered >= STEPS_PER_RECOVERY {
            one.answered = 0;
            for (kind, decaying) in &mut one.failures {
                if *kind != FailureKind::Corruption {
                    decaying.weight /= 2.0;
                }
            }
        }
        if !one.shards.contains_key(shard_id) && one.shards.len() >= MAX_SHARDS {
            let oldest = one.shards.iter().min_by_key(|(_, steps)| steps.at_ms);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                one.shards.remove(&name);
            }
        }
        let fresh = || StepTimes {
            weights,
            layers,
            recent: VecDeque::new(),
            at_ms: now_ms,
        };
        let steps = one.shards.entry(shard_id.to_owned()).or_insert_with(fresh);
        // The name of a shard is chosen by the host, so check the weights.
        if now_ms.saturating_sub(steps.at_ms) >= STALE_MS || steps.weights != weights {
            *steps = fresh();
        }
        (steps.at_ms, steps.layers) = (now_ms, layers);
        push_last(&mut steps.recent, WINDOW, took / layers.max(1));
    }

    /// Records an answer with rows.
    pub(crate) fn claimed(&mut self, host: &NodeId, now_ms: u64) {
        self.host(host, now_ms).audits.answers += 1;
    }

    /// Records that a receipt covers so many more answers.
    pub(crate) fn signed(&mut self, host: &NodeId, answers: u32, now_ms: u64) {
        self.host(host, now_ms).audits.signed += u64::from(answers);
    }

    /// Records the result of an audit of so many answers.
    pub(crate) fn audited(
        &mut self,
        host: &NodeId,
        result: AuditResult,
        answers: u64,
        now_ms: u64,
    ) {
        self.host(host, now_ms).audits.note(result, answers);
    }

    /// Records how much of a decode step's round trip the host neither queued nor computed. The row
    /// had `row_bytes` each way.
    pub fn travelled(&mut self, host: &NodeId, took: Duration, row_bytes: u64, now_ms: u64) {
        let one = self.host(host, now_ms);
        one.row_bytes = row_bytes;
        push_last(&mut one.ways, WINDOW, took);
    }

    /// The way to each host that answered recently.
    pub fn ways(&self, now_ms: u64) -> Vec<Way> {
        let hosts = self.hosts.iter().filter(|(_, one)| {
            let is_recent = |at| now_ms.saturating_sub(at) < STALE_MS;
            one.ways.len() >= LEARNING && one.seen_ms.is_some_and(is_recent)
        });
        let way = |(node, one): (&NodeId, &Host)| Way {
            node: *node,
            took: percentile(one.ways.iter().copied(), 50) / 2,
            row_bytes: one.row_bytes,
        };
        hosts.map(way).collect()
    }

    /// Records that a session with the host was opened.
    pub fn reached(&mut self, host: &NodeId, now_ms: u64) {
        let one = self.host(host, now_ms);
        one.seen_ms = Some(now_ms);
        one.online = true;
        // Its past unreachability does not matter any more.
        one.failures.remove(&FailureKind::Unreachable);
    }

    /// Records that the host has opened a stream.
    pub fn opened(&mut self, host: &NodeId, now_ms: u64) {
        self.reached(host, now_ms);
        push_last(&mut self.streams, STREAMS, *host);
    }

    /// Number of the last 64 streams that the host got.
    pub fn streams(&self, host: &NodeId) -> u32 {
        let own = self.streams.iter().filter(|one| *one == host);
        u32::try_from(own.count()).unwrap_or(u32::MAX)
    }

    /// Records a failure.
    pub fn failed(&mut self, host: &NodeId, kind: FailureKind, now_ms: u64) {
        let one = self.host(host, now_ms);
        one.online = !matches!(
            kind,
            FailureKind::Lost | FailureKind::Unreachable | FailureKind::Stalled
        );
        one.answered = 0;
        let decaying = one.failures.entry(kind).or_default();
        decaying.add(now_ms, half_life(kind));
        if kind == FailureKind::Corruption {
            // 1, 2, 4, ... times the first quarantine, by the decayed count.
            let times = (decaying.weight - 1.0).max(0.0).exp2();
            let (first, longest) = QUARANTINE_MS;
            let for_ms = ((first as f64 * times) as u64).min(longest);
            one.quarantined_until_ms = one.quarantined_until_ms.max(now_ms + for_ms);
        }
    }

    pub fn standing(&self, host: &NodeId, now_ms: u64) -> Standing {
        let one = self.hosts.get(host);
        one.map_or(Standing::Good, |one| one.standing(now_ms))
    }

    /// Median time of a decode step through one layer of a shard, in milliseconds. If the shard was
    /// not measured, that of the host's latest measured shard.
    pub fn ms_per_layer(&self, host: &NodeId, shard_id: &str, now_ms: u64) -> Option<f64> {
        Some(self.steps(host, shard_id, now_ms)?.quantile(50))
    }

    /// Layers of the steps that [`Self::ms_per_layer`] is computed from, if they had these weights.
    pub(crate) fn step_layers(
        &self,
        host: &NodeId,
        (shard_id, weights): (&str, WeightsId),
        now_ms: u64,
    ) -> Option<u32> {
        let steps = self.steps(host, shard_id, now_ms)?;
        (steps.weights == weights).then_some(steps.layers)
    }

    fn steps(&self, host: &NodeId, shard_id: &str, now_ms: u64) -> Option<&StepTimes> {
        let one = self.hosts.get(host)?;
        let known = |steps: &&StepTimes| steps.is_known(now_ms);
        let own = one.shards.get(shard_id).filter(known);
        let any = || {
            let all = one.shards.values().filter(known);
            all.max_by_key(|steps| steps.at_ms)
        };
        own.or_else(any)
    }

    /// Median time per row and layer of the other hosts with these weights.
    pub(crate) fn reference_per_layer(
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

    /// Reports all hosts, ordered by node id.
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
                    .filter(|(_, weight)| *weight >= MIN_WEIGHT)
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
                audits: one.audits,
            })
            .collect()
    }
}
