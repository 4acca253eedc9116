//! What the host counts.
//!
//! Each number exists twice: in [`Stats`], which the program prints and tests assert, and
//! as a metric of the `metrics` crate, for whatever recorder the program installs:
//!
//! | metric | kind | labels |
//! |---|---|---|
//! | `hearthnet_shard_sessions` | gauge | |
//! | `hearthnet_shard_streams` | gauge | |
//! | `hearthnet_shard_steps_waiting` | gauge | |
//! | `hearthnet_shard_kv_bytes` | gauge | |
//! | `hearthnet_shard_kv_budget_bytes` | gauge | |
//! | `hearthnet_shard_kv_pages` (in all) | gauge | |
//! | `hearthnet_shard_kv_pages_used`, `hearthnet_shard_kv_pages_left` | gauge | |
//! | `hearthnet_shard_weight_bytes` | gauge | |
//! | `hearthnet_shard_steps_total` | counter | |
//! | `hearthnet_shard_rows_total` | counter | `kind` = decode, prefill |
//! | `hearthnet_shard_caller_rows_total` | counter | `caller` = short node id, or `other` |
//! | `hearthnet_shard_turn_seconds` | histogram | `kind` |
//! | `hearthnet_shard_queue_seconds` | histogram | |
//! | `hearthnet_shard_bytes_total` | counter | `direction` = in, out |
//! | `hearthnet_shard_dropped_steps_total` | counter | |
//! | `hearthnet_shard_preempted_total` | counter | |
//! | `hearthnet_shard_errors_total` | counter | `code` |
//! | `hearthnet_shard_sessions_closed_total` | counter | `code` |
//! | `hearthnet_shard_loads_total`, `hearthnet_shard_evictions_total` | counter | |
//!
//! None of them carries anything of what the rows contain.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{self, Event};
use hearthnet_transport::{CloseCode, Code};
use metrics::{Counter, counter, gauge, histogram};
use parking_lot::Mutex;
use serde::Serialize;

use crate::plan::Kind;

/// Most callers that are counted under a name of their own. Each costs a line of the numbers for as
/// long as the host runs; a community has tens of members.
const MAX_CALLERS: usize = 64;
/// The name of all others.
const OTHERS: &str = "other";

/// A snapshot of the host's gauges and counters.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Sessions connected now.
    pub sessions: u32,
    /// Streams open now, at most the limit.
    pub streams: u32,
    /// Steps that wait or are computed now.
    pub steps_waiting: u32,
    /// Bytes of KV in use.
    pub kv_bytes: u64,
    /// Pages of KV in use.
    pub kv_pages_used: u64,
    /// Pages of KV that nobody uses.
    pub kv_pages_left: u64,
    /// Bytes of weights in memory; 0 while they are put away.
    pub weight_bytes: u64,
    /// Steps answered.
    pub steps: u64,
    /// Rows computed in decode turns.
    pub decode_rows: u64,
    /// Rows computed in prefill turns.
    pub prefill_rows: u64,
    /// Rows of answered steps by caller: short node id, or `other` for those beyond the first 64.
    pub caller_rows: BTreeMap<String, u64>,
    /// Batches run.
    pub turns: u64,
    /// Bytes of rows received.
    pub bytes_in: u64,
    /// Bytes of rows sent.
    pub bytes_out: u64,
    /// Steps dropped before compute, because their stream ended.
    pub dropped_steps: u64,
    /// Streams that had to give their pages to others.
    pub preempted: u64,
    /// Streams refused or ended, by code.
    pub errors: BTreeMap<Code, u64>,
    /// Connections of admitted peers that this host refused or ended, and keys that it does not
    /// admit, by code.
    pub closed: BTreeMap<Code, u64>,
    /// Times that the weights were loaded.
    pub loads: u64,
    /// Times that they were put away for want of use.
    pub evictions: u64,
    /// Milliseconds of a decode turn, recent turns weighing most; 0 before the first.
    pub ms_per_token: f32,
}

/// Where the numbers are kept while the host runs.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sessions: AtomicU32,
    waiting: AtomicU32,
    kv: AtomicU64,
    kv_pages_used: AtomicU64,
    kv_pages: AtomicU64,
    weights: AtomicU64,
    steps: AtomicU64,
    decode_rows: AtomicU64,
    prefill_rows: AtomicU64,
    turns: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    dropped: AtomicU64,
    preempted: AtomicU64,
    loads: AtomicU64,
    evictions: AtomicU64,
    /// `f32` bits: only the compute thread writes.
    ms_per_token: AtomicU32,
    errors: Mutex<BTreeMap<Code, u64>>,
    closed: Mutex<BTreeMap<Code, u64>>,
    callers: Mutex<Callers>,
}

/// Rows by caller.
#[derive(Default)]
struct Callers {
    named: HashMap<NodeId, (Counter, u64)>,
    others: u64,
}

impl std::fmt::Debug for Callers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callers")
            .field("named", &self.named.len())
            .field("others", &self.others)
            .finish()
    }
}

fn caller_counter(caller: &str) -> Counter {
    counter!("hearthnet_shard_caller_rows_total", "caller" => caller.to_owned())
}

impl Callers {
    fn count(&mut self, caller: NodeId, rows: u64) {
        let room = self.named.len() < MAX_CALLERS;
        let named = match room {
            true => Some(
                self.named
                    .entry(caller)
                    .or_insert_with(|| (caller_counter(&caller.short()), 0)),
            ),
            false => self.named.get_mut(&caller),
        };
        match named {
            Some((counter, total)) => {
                *total += rows;
                counter.increment(rows);
            }
            None => {
                self.others += rows;
                caller_counter(OTHERS).increment(rows);
            }
        }
    }

    fn snapshot(&self) -> BTreeMap<String, u64> {
        let others = (self.others > 0).then(|| (OTHERS.to_owned(), self.others));
        let named = self.named.iter();
        let mut all = BTreeMap::new();
        for (name, rows) in named
            .map(|(who, (_, rows))| (who.short(), *rows))
            .chain(others)
        {
            *all.entry(name).or_insert(0) += rows;
        }
        all
    }
}

impl Counters {
    pub(crate) fn session_began(&self) {
        gauge!("hearthnet_shard_sessions").set(self.sessions.fetch_add(1, Relaxed) + 1);
    }

    pub(crate) fn session_ended(&self) {
        gauge!("hearthnet_shard_sessions").set(self.sessions.fetch_sub(1, Relaxed) - 1);
    }

    pub(crate) fn session_closed(&self, code: CloseCode) {
        let code = Code::from(code);
        *self.closed.lock().entry(code.clone()).or_insert(0) += 1;
        counter!("hearthnet_shard_sessions_closed_total", "code" => code).increment(1);
    }

    pub(crate) fn error(&self, code: Code) {
        *self.errors.lock().entry(code.clone()).or_insert(0) += 1;
        counter!("hearthnet_shard_errors_total", "code" => code).increment(1);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Relaxed);
        counter!("hearthnet_shard_bytes_total", "direction" => "in").increment(bytes as u64);
    }

    pub(crate) fn dropped(&self, steps: usize) {
        self.dropped.fetch_add(steps as u64, Relaxed);
        counter!("hearthnet_shard_dropped_steps_total").increment(steps as u64);
    }

    /// A step of a caller, of so many rows.
    pub(crate) fn answered(&self, caller: NodeId, rows: u32, bytes: usize, waited: Duration) {
        self.callers.lock().count(caller, u64::from(rows));
        self.steps.fetch_add(1, Relaxed);
        self.bytes_out.fetch_add(bytes as u64, Relaxed);
        counter!("hearthnet_shard_steps_total").increment(1);
        counter!("hearthnet_shard_bytes_total", "direction" => "out").increment(bytes as u64);
        histogram!("hearthnet_shard_queue_seconds").record(waited);
    }

    pub(crate) fn turn(&self, kind: Kind, rows: u32, took: Duration) {
        self.turns.fetch_add(1, Relaxed);
        let (total, label) = match kind {
            Kind::Decode => (&self.decode_rows, "decode"),
            Kind::Prefill => (&self.prefill_rows, "prefill"),
        };
        total.fetch_add(u64::from(rows), Relaxed);
        counter!("hearthnet_shard_rows_total", "kind" => label).increment(u64::from(rows));
        histogram!("hearthnet_shard_turn_seconds", "kind" => label).record(took);
        if kind == Kind::Decode {
            let now = took.as_secs_f32() * 1000.0;
            let old = f32::from_bits(self.ms_per_token.load(Relaxed));
            // The last 16 turns or so; the first one stands for itself.
            let new = if old == 0.0 {
                now
            } else {
                old + (now - old) / 16.0
            };
            self.ms_per_token.store(new.to_bits(), Relaxed);
        }
    }

    pub(crate) fn waiting(&self, steps: usize) {
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.waiting.store(steps, Relaxed);
        gauge!("hearthnet_shard_steps_waiting").set(steps);
    }

    /// Bytes of KV in use, and pages, of how many.
    pub(crate) fn kv(&self, bytes: u64, used: u64, pages: u64) {
        // Most turns need no new page: those pay for one swap.
        let before = self.kv.swap(bytes, Relaxed);
        if before == bytes && self.kv_pages.load(Relaxed) == pages {
            return;
        }
        self.kv_pages_used.store(used, Relaxed);
        self.kv_pages.store(pages, Relaxed);
        gauge!("hearthnet_shard_kv_bytes").set(bytes as f64);
        gauge!("hearthnet_shard_kv_pages").set(pages as f64);
        gauge!("hearthnet_shard_kv_pages_used").set(used as f64);
        gauge!("hearthnet_shard_kv_pages_left").set(pages.saturating_sub(used) as f64);
    }

    pub(crate) fn preempted(&self) {
        self.preempted.fetch_add(1, Relaxed);
        counter!("hearthnet_shard_preempted_total").increment(1);
    }

    pub(crate) fn kv_budget(&self, bytes: u64) {
        gauge!("hearthnet_shard_kv_budget_bytes").set(bytes as f64);
    }

    pub(crate) fn loaded(&self, weight_bytes: u64) {
        self.loads.fetch_add(1, Relaxed);
        self.weights.store(weight_bytes, Relaxed);
        flight::record(Event::WeightsLoaded {
            bytes: weight_bytes,
        });
        counter!("hearthnet_shard_loads_total").increment(1);
        gauge!("hearthnet_shard_weight_bytes").set(weight_bytes as f64);
    }

    pub(crate) fn evicted(&self) {
        self.evictions.fetch_add(1, Relaxed);
        self.weights.store(0, Relaxed);
        flight::record(Event::WeightsEvicted {});
        counter!("hearthnet_shard_evictions_total").increment(1);
        gauge!("hearthnet_shard_weight_bytes").set(0.0);
    }

    pub(crate) fn snapshot(&self, streams: u32) -> Stats {
        let used = self.kv_pages_used.load(Relaxed);
        Stats {
            sessions: self.sessions.load(Relaxed),
            streams,
            steps_waiting: self.waiting.load(Relaxed),
            kv_bytes: self.kv.load(Relaxed),
            kv_pages_used: used,
            kv_pages_left: self.kv_pages.load(Relaxed).saturating_sub(used),
            weight_bytes: self.weights.load(Relaxed),
            steps: self.steps.load(Relaxed),
            decode_rows: self.decode_rows.load(Relaxed),
            prefill_rows: self.prefill_rows.load(Relaxed),
            caller_rows: self.callers.lock().snapshot(),
            turns: self.turns.load(Relaxed),
            bytes_in: self.bytes_in.load(Relaxed),
            bytes_out: self.bytes_out.load(Relaxed),
            dropped_steps: self.dropped.load(Relaxed),
            preempted: self.preempted.load(Relaxed),
            errors: self.errors.lock().clone(),
            closed: self.closed.lock().clone(),
            loads: self.loads.load(Relaxed),
            evictions: self.evictions.load(Relaxed),
            ms_per_token: f32::from_bits(self.ms_per_token.load(Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::NodeKey;

    use super::*;

    #[test]
    fn rows_are_counted_by_caller_and_callers_cannot_make_lines_without_end() {
        let counters = Counters::default();
        let key = |seed: u8| NodeKey::from_secret(&[seed; 32]).id();
        let answered = |seed, rows| counters.answered(key(seed), rows, 0, Duration::ZERO);
        answered(1, 24);
        answered(2, 1);
        answered(1, 1);
        let name = |seed| key(seed).short();
        let rows = counters.snapshot(0).caller_rows;
        assert_eq!(rows, BTreeMap::from([(name(1), 25), (name(2), 1)]));
        for seed in 3..100 {
            answered(seed, 1);
        }
        answered(1, 1);
        let rows = counters.snapshot(0).caller_rows;
        assert_eq!(rows.len(), MAX_CALLERS + 1);
        assert_eq!(rows[&name(1)], 26);
        assert_eq!(rows[OTHERS], 99 - MAX_CALLERS as u64);
    }
}
