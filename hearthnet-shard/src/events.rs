//! Events of a host. Each method of [`HostEvents`] reports an event to the host's own numbers
//! ([`Stats`]), to the installed `metrics` recorder, to the flight record, and to `tracing`.
//!
//! [`Stats`] count for one host, the recorder for the whole process: a node that moves to other
//! layers starts another host, whose [`Stats`] begin at zero. A gauge is the sum over the hosts of
//! the process.
//!
//! No event contains anything of the content of rows.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{self, Event, Name, SessionId, StreamTrace};
use hearthnet_transport::{CloseCode, Code, Connection, SessionClosed, StreamClose};
use metrics::{counter, gauge, histogram};
use serde::Serialize;
use tokio::sync::watch;

use crate::fault::StreamFault;
use crate::pace::Pace;
use crate::plan::Kind;
use crate::sync::Mutex;

/// Limit of callers with a counter of their own. Each costs a line of metrics for as long as the
/// host runs; a community has tens of members.
const MAX_CALLERS: usize = 64;
/// Label of all further callers.
const OTHERS: &str = "other";

/// The host's gauges and counters.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Sessions connected now.
    pub sessions: u32,
    /// Streams open now, at most the limit.
    pub streams: u32,
    /// Steps waiting or being computed now.
    pub steps_waiting: u32,
    /// Bytes of KV in use.
    pub kv_bytes: u64,
    /// Pages of KV in use.
    pub kv_pages_used: u64,
    /// Free pages of KV.
    pub kv_pages_left: u64,
    /// Bytes of weights in memory; 0 while they are unloaded.
    pub weight_bytes: u64,
    /// Graphics card that has the weights, if one has.
    pub card: Option<String>,
    /// Steps answered.
    pub steps: u64,
    /// Rows of answered steps per caller: short node id, or `other` beyond the first 64 callers.
    pub caller_rows: BTreeMap<String, u64>,
    /// Rows of answered steps of other nodes, each counted once per layer of its stream.
    pub given_layer_rows: u64,
    /// Batches computed.
    pub turns: u64,
    /// Bytes of rows received.
    pub bytes_in: u64,
    /// Bytes of rows sent.
    pub bytes_out: u64,
    /// Steps dropped before compute, because their stream ended.
    pub dropped_steps: u64,
    /// Streams ended so that others get their pages.
    pub preempted: u64,
    /// Streams refused or ended, by code.
    pub errors: BTreeMap<Code, u64>,
    /// Connections of admitted peers that this host refused or ended, and keys that it does not
    /// admit, by code.
    pub closed: BTreeMap<Code, u64>,
    /// Number of loads of the weights.
    pub loads: u64,
    /// Number of times the weights were unloaded because no stream used them.
    pub evictions: u64,
    /// Time of a decode batch through all layers in milliseconds, as in a running chat (`pace.rs`);
    /// 0 before the first.
    pub ms_per_token: f32,
}

/// Peer and session that a request comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) node: NodeId,
    /// Quota group of the caller: itself, or the member that invited it.
    pub(crate) party: NodeId,
    pub(crate) session: SessionId,
    /// Positions between two receipts; 0: none.
    pub(crate) receipts: u32,
}

impl Caller {
    fn trace(self, name: StreamClose) -> StreamTrace {
        StreamTrace {
            session: self.session,
            stream: name.stream,
            epoch: name.epoch,
        }
    }

    pub(crate) fn of(connection: &Connection, party: NodeId) -> Self {
        Self {
            node: connection.peer(),
            party,
            session: SessionId::of_token(connection.token()),
            receipts: connection.receipts(),
        }
    }
}

/// Work done for a caller in one epoch of a stream.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    /// Steps answered.
    pub(crate) steps: u64,
    /// Rows received.
    pub(crate) rows: u64,
}

/// Sink of a host's events.
#[derive(Debug)]
pub(crate) struct HostEvents {
    stats: Mutex<Stats>,
    pace: Mutex<Pace>,
    /// This host's part of the gauges of the process, which sum up its hosts.
    gauges: Mutex<BTreeMap<&'static str, f64>>,
    /// Why the weights could not be loaded again; `None` once they are loaded.
    unavailable: watch::Sender<Option<String>>,
    record: fn(Event),
}

impl Default for HostEvents {
    fn default() -> Self {
        Self::recording(flight::record)
    }
}

/// The host as a whole.
impl HostEvents {
    /// Sends events to another flight record than that of the process.
    pub(crate) fn recording(record: fn(Event)) -> Self {
        Self {
            stats: Mutex::default(),
            pace: Mutex::default(),
            gauges: Mutex::default(),
            unavailable: watch::Sender::new(None),
            record,
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.stats.lock().clone()
    }

    pub(crate) fn given_layer_rows(&self) -> u64 {
        self.stats.lock().given_layer_rows
    }

    /// Load for the descriptor: milliseconds of a decode batch, and open streams.
    pub(crate) fn load(&self) -> (f32, u32) {
        let stats = self.stats.lock();
        (stats.ms_per_token, stats.streams)
    }

    /// Sets this host's part of a gauge.
    fn gauge(&self, name: &'static str, value: f64) {
        let before = self.gauges.lock().insert(name, value);
        gauge!(name).increment(value - before.unwrap_or(0.0));
    }

    pub(crate) fn serving(&self, addr: SocketAddr, shard: &str, kv_budget: u64) {
        self.kv_budget(kv_budget);
        tracing::info!(%addr, shard, "serving");
        let shard = shard.into();
        (self.record)(Event::ShardServing { shard });
    }

    pub(crate) fn kv_budget(&self, bytes: u64) {
        self.gauge("hearthnet_shard_kv_budget_bytes", bytes as f64);
    }

    pub(crate) fn leaving(&self, shard: Name, streams: u32, within: Duration) {
        (self.record)(Event::ShardLeaving {
            shard,
            streams,
            within_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
        });
    }

    /// The host has stopped and cut `cut` open streams.
    pub(crate) fn stopped(&self, shard: Name, cut: u32) {
        (self.record)(Event::ShardStopped { shard, cut });
    }

    /// `card`: graphics card that computes, if one does.
    pub(crate) fn loaded(&self, bytes: u64, card: Option<String>) {
        let mut stats = self.stats.lock();
        if let Some(card) = &card {
            tracing::info!("the layers are on a graphics card: {card}");
        }
        stats.card = card;
        stats.loads += 1;
        stats.weight_bytes = bytes;
        counter!("hearthnet_shard_loads_total").increment(1);
        self.gauge("hearthnet_shard_weight_bytes", bytes as f64);
        self.unavailable.send_replace(None);
        (self.record)(Event::WeightsLoaded { bytes });
    }

    /// The weights could not be loaded again.
    pub(crate) fn not_loaded(&self, reason: &str) {
        tracing::warn!("the weights could not be loaded again: {reason}");
        self.unavailable.send_replace(Some(reason.to_owned()));
    }

    /// Why the weights could not be loaded again.
    pub(crate) fn unavailable(&self) -> watch::Receiver<Option<String>> {
        self.unavailable.subscribe()
    }

    pub(crate) fn evicted(&self) {
        let mut stats = self.stats.lock();
        stats.evictions += 1;
        stats.weight_bytes = 0;
        counter!("hearthnet_shard_evictions_total").increment(1);
        self.gauge("hearthnet_shard_weight_bytes", 0.0);
        tracing::info!("the weights were unloaded: no stream for a while");
        (self.record)(Event::WeightsEvicted {});
    }
}

impl Drop for HostEvents {
    fn drop(&mut self) {
        for (name, value) in self.gauges.get_mut() {
            gauge!(*name).decrement(*value);
        }
    }
}

/// Peers and their sessions.
impl HostEvents {
    /// A peer whose key is not admitted tried to connect.
    pub(crate) fn stranger_refused(&self, peer: NodeId) {
        self.closed(CloseCode::Unauthorized);
        self.peer_refused(peer, CloseCode::Unauthorized);
    }

    /// A peer was refused a session.
    pub(crate) fn peer_refused(&self, peer: NodeId, code: CloseCode) {
        let code = code.into();
        (self.record)(Event::PeerRefused { peer, code });
    }

    /// A connection is closed, by either side.
    pub(crate) fn connection_closed(&self, peer: &NodeId, closed: &SessionClosed) {
        if closed.by_us {
            tracing::debug!(?peer, code = %closed.code, "session closed: {}", closed.detail);
            self.closed(closed.code);
        }
    }

    fn closed(&self, code: CloseCode) {
        let code = Code::from(code);
        *self.stats.lock().closed.entry(code.clone()).or_default() += 1;
        counter!("hearthnet_shard_sessions_closed_total", "code" => code).increment(1);
    }

    pub(crate) fn session_began(&self, caller: Caller, purpose: &str) {
        let mut stats = self.stats.lock();
        stats.sessions += 1;
        self.gauge("hearthnet_shard_sessions", stats.sessions.into());
        (self.record)(Event::SessionBegan {
            session: caller.session,
            peer: caller.node,
            purpose: purpose.into(),
        });
    }

    pub(crate) fn session_ended(&self, caller: Caller, code: CloseCode, by_us: bool) {
        let mut stats = self.stats.lock();
        stats.sessions = stats.sessions.saturating_sub(1);
        self.gauge("hearthnet_shard_sessions", stats.sessions.into());
        tracing::debug!(%code, by_us, "session ended");
        (self.record)(Event::SessionEnded {
            session: caller.session,
            peer: caller.node,
            code: code.into(),
            by_us,
        });
    }
}

/// Streams. The caller and `name` identify one epoch of a stream.
impl HostEvents {
    pub(crate) fn streams(&self, open: u32) {
        self.stats.lock().streams = open;
        self.gauge("hearthnet_shard_streams", open.into());
    }

    pub(crate) fn stream_opened(&self, caller: Caller, name: StreamClose, layers: (u32, u32)) {
        (self.record)(Event::StreamOpened {
            peer: caller.node,
            trace: caller.trace(name),
            layers,
        });
    }

    /// A stream was refused, or a message came for an ended stream.
    pub(crate) fn stream_refused(&self, caller: Caller, name: StreamClose, fault: &StreamFault) {
        self.fault(name, fault);
        (self.record)(Event::StreamRefused {
            peer: caller.node,
            trace: caller.trace(name),
            code: fault.code(),
        });
    }

    /// The host ended a stream.
    pub(crate) fn stream_failed(
        &self,
        caller: Caller,
        name: StreamClose,
        fault: &StreamFault,
        work: Usage,
    ) {
        self.fault(name, fault);
        self.stream_ended(caller, name, fault.code(), work);
    }

    /// A stream has ended. `code` is `closed` (by the caller), `session_ended`, or the host's
    /// reason.
    pub(crate) fn stream_ended(&self, caller: Caller, name: StreamClose, code: Code, work: Usage) {
        (self.record)(Event::StreamEnded {
            peer: caller.node,
            trace: caller.trace(name),
            code,
            steps: work.steps,
            rows: work.rows,
        });
    }

    fn fault(&self, name: StreamClose, fault: &StreamFault) {
        let code = fault.code();
        let mut stats = self.stats.lock();
        if *fault == StreamFault::Preempted {
            stats.preempted += 1;
            counter!("hearthnet_shard_preempted_total").increment(1);
        }
        *stats.errors.entry(code.clone()).or_default() += 1;
        tracing::debug!(name.stream, name.epoch, %code, "stream refused or ended");
        counter!("hearthnet_shard_errors_total", "code" => code).increment(1);
    }
}

/// Steps: counters only, since steps are as frequent as tokens.
impl HostEvents {
    pub(crate) fn received(&self, bytes: usize) {
        self.stats.lock().bytes_in += bytes as u64;
        counter!("hearthnet_shard_bytes_total", "direction" => "in").increment(bytes as u64);
    }

    pub(crate) fn dropped(&self, steps: usize) {
        self.stats.lock().dropped_steps += steps as u64;
        counter!("hearthnet_shard_dropped_steps_total").increment(steps as u64);
    }

    /// A step of `caller` was answered, of a stream over `given` layers (0 if the host's own node
    /// is the caller). `bytes` is the size of the rows returned.
    pub(crate) fn answered(
        &self,
        caller: NodeId,
        (rows, given): (u32, u32),
        bytes: usize,
        waited: Duration,
    ) {
        let mut stats = self.stats.lock();
        stats.given_layer_rows += u64::from(rows) * u64::from(given);
        stats.steps += 1;
        stats.bytes_out += bytes as u64;
        counter!("hearthnet_shard_steps_total").increment(1);
        counter!("hearthnet_shard_bytes_total", "direction" => "out").increment(bytes as u64);
        histogram!("hearthnet_shard_queue_seconds").record(waited);

        let (callers, mut name) = (&mut stats.caller_rows, caller.short());
        if callers.len() >= MAX_CALLERS && !callers.contains_key(&name) {
            name = OTHERS.to_owned();
        }
        *callers.entry(name.clone()).or_default() += u64::from(rows);
        counter!("hearthnet_shard_caller_rows_total", "caller" => name).increment(rows.into());
    }

    /// A batch was computed, with `short` rows of decode steps and `long` rows of prefill. `layers`:
    /// how many of the host's layers it went through, and how many there are; `None` if its streams
    /// use different ones.
    pub(crate) fn turn(
        &self,
        kind: Kind,
        (short, long): (u32, u32),
        took: Duration,
        layers: Option<(u32, u32)>,
    ) {
        let mut stats = self.stats.lock();
        stats.turns += 1;
        if let (Kind::Decode, 0, Some((used, all))) = (kind, long, layers) {
            let mut pace = self.pace.lock();
            pace.record(took, used, all);
            stats.ms_per_token = pace.typical().as_secs_f32() * 1e3;
        }
        for (of, rows) in [(Kind::Decode, short), (Kind::Prefill, long)] {
            if rows > 0 {
                counter!("hearthnet_shard_rows_total", "kind" => of.into_str())
                    .increment(rows.into());
            }
        }
        histogram!("hearthnet_shard_turn_seconds", "kind" => kind.into_str()).record(took);
    }

    pub(crate) fn waiting(&self, steps: usize) {
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.stats.lock().steps_waiting = steps;
        self.gauge("hearthnet_shard_steps_waiting", steps.into());
    }

    /// Updates the KV gauges: bytes and pages in use, and pages in all.
    pub(crate) fn kv(&self, bytes: u64, used: u64, pages: u64) {
        let left = pages.saturating_sub(used);
        let mut stats = self.stats.lock();
        // Most batches need no new page.
        if (stats.kv_bytes, stats.kv_pages_left) == (bytes, left) {
            return;
        }
        (stats.kv_bytes, stats.kv_pages_used, stats.kv_pages_left) = (bytes, used, left);
        self.gauge("hearthnet_shard_kv_bytes", bytes as f64);
        self.gauge("hearthnet_shard_kv_pages", pages as f64);
        self.gauge("hearthnet_shard_kv_pages_used", used as f64);
        self.gauge("hearthnet_shard_kv_pages_left", left as f64);
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::NodeKey;

    use super::*;

    #[test]
    fn rows_are_counted_by_caller_and_callers_cannot_make_lines_without_end() {
        let events = HostEvents::default();
        let key = |seed: u8| NodeKey::from_secret(&[seed; 32]).id();
        let answered = |seed, rows| events.answered(key(seed), (rows, 2), 0, Duration::ZERO);
        answered(1, 24);
        answered(2, 1);
        answered(1, 1);
        let name = |seed| key(seed).short();
        let rows = events.stats().caller_rows;
        assert_eq!(rows, BTreeMap::from([(name(1), 25), (name(2), 1)]));
        for seed in 3..100 {
            answered(seed, 1);
        }
        answered(1, 1);
        let rows = events.stats().caller_rows;
        assert_eq!(rows.len(), MAX_CALLERS + 1);
        assert_eq!(rows[&name(1)], 26);
        assert_eq!(rows[OTHERS], 99 - MAX_CALLERS as u64);
        assert_eq!(events.stats().given_layer_rows, 2 * (25 + 99));
    }
}
