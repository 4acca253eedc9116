//! Where the layers run: on this machine, or on hosts.
//!
//! A [`Backend`] takes rows of one sequence and gives back the last one, having
//! been through every block. The chat above it cannot tell one from another, and
//! neither can the answer: the arithmetic is the same to the bit.
//!
//! Backends nest: one that runs some of the layers hands its rows to one that runs the next ones
//! ([`private_layers`](crate::private_layers)). One that does not have the last layer gives back all rows.

use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::PipelineId;
use serde::{Deserialize, Serialize};

use crate::Cancel;
use crate::chat::Frame;
use crate::error::ChatError;

/// One piece of the route, as `done` reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RouteHop {
    /// `<model_id>:<lo>-<hi>` of the layers that ran here.
    pub shard_id: String,
    /// Node id of the host; absent when the layers ran on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// `ADDR:PORT`; absent when the layers ran on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// First and last layer, inclusive.
    pub layers: (u32, u32),
    /// What the host says its layers and KV budget take, in MiB; for this machine, what they take.
    pub memory_mb: u64,
}

/// Time spent at one hop, over the decode steps of an answer.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HopTimes {
    /// Decode steps measured.
    pub steps: u64,
    /// Median of the host's compute time, in microseconds.
    pub compute_us_p50: u32,
    /// Median of the time a step waited in the host's queue, in microseconds.
    pub queue_us_p50: u32,
    /// Median of what remains of the round trip after compute: wire, TLS, queues and wake-ups.
    pub overhead_us_p50: u32,
    /// 95th percentile of the same.
    pub overhead_us_p95: u32,
}

/// The times of one hop's decode steps, in microseconds.
#[derive(Debug, Default)]
pub(crate) struct HopClock {
    compute: Vec<u32>,
    queue: Vec<u32>,
    overhead: Vec<u32>,
}

impl HopClock {
    pub(crate) fn record(&mut self, round_trip: Duration, compute_us: u32, queue_us: u32) {
        let round_trip = u32::try_from(round_trip.as_micros()).unwrap_or(u32::MAX);
        self.compute.push(compute_us);
        self.queue.push(queue_us);
        self.overhead.push(round_trip.saturating_sub(compute_us));
    }

    pub(crate) fn summary(&self) -> HopTimes {
        HopTimes {
            steps: self.compute.len() as u64,
            compute_us_p50: percentile(&self.compute, 50),
            queue_us_p50: percentile(&self.queue, 50),
            overhead_us_p50: percentile(&self.overhead, 50),
            overhead_us_p95: percentile(&self.overhead, 95),
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Nearest-rank percentile; 0 for no values.
pub(crate) fn percentile(values: &[u32], percent: usize) -> u32 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// Whole milliseconds of a time, as the flight record counts.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What a run needs of its caller.
pub struct Run<'a> {
    /// Set when the caller gives up.
    pub cancel: &'a Cancel,
    /// Hears what becomes of the sequence and of its hosts: how much of a prompt is through, after
    /// every piece (whoever listens passes on what it has use for); which host has failed, or is
    /// waited for; who took over.
    pub notify: &'a mut dyn FnMut(Frame),
}

/// Runs the blocks of a model over one sequence, on the loop (`steps.rs`) of its chat.
pub trait Backend: Send {
    /// Hands in `rows` (`[n, width]`, boundary-representable, `n >= 1`) at `position`. What can be
    /// sent to hosts is on its way at the next boundary (`steps.rs`) after this, so that they
    /// work while the caller does something else; what goes wrong is told by [`Backend::output`],
    /// which must follow.
    ///
    /// What the sequence held from `position` on is forgotten first, so that a
    /// caller can go back and continue differently.
    fn submit<'a>(
        &'a mut self,
        position: u32,
        rows: &'a [f32],
        cancel: &'a Cancel,
    ) -> LocalBoxFuture<'a, ()> {
        self.submit_part(position, rows, 0, cancel)
    }

    /// As [`Backend::submit`], where `more` rows follow behind these, in further calls, before
    /// the output is asked for: hosts begin with what is there.
    fn submit_part<'a>(
        &'a mut self,
        position: u32,
        rows: &'a [f32],
        more: u32,
        cancel: &'a Cancel,
    ) -> LocalBoxFuture<'a, ()>;

    /// Waits until the rows handed in have been through every block, and puts the last one, as it
    /// leaves the last block, into `out` (`[width]`). Where the last block is not the model's, all
    /// rows handed in since the last output are put there, and those before them may precede them.
    ///
    /// # Errors
    /// Any [`ChatError`]; the backend is then fit for nothing but being dropped.
    fn output<'a>(
        &'a mut self,
        out: &'a mut Vec<f32>,
        run: &'a mut Run<'_>,
    ) -> LocalBoxFuture<'a, Result<(), ChatError>>;

    /// What a row takes a layer that this machine runs itself: hosts are measured by it where they
    /// have nobody else beside them.
    fn beside(&mut self, per_layer: Duration) {
        let _ = per_layer;
    }

    /// The hosts in order of layers.
    fn route(&self) -> Vec<RouteHop>;

    /// Times per hop since [`Backend::begin_call`]; one entry per hop of the route.
    fn times(&self) -> Vec<HopTimes>;

    /// A new call begins: times and failures are counted from here on.
    fn begin_call(&mut self);

    /// The call may come to so many positions: hosts are asked whether they could hold them, before
    /// the first row is sent. More may be submitted all the same.
    fn expect(&mut self, positions: u32) {
        let _ = positions;
    }

    /// The call has ended, and nothing is asked until the next one begins: hosts that want to
    /// leave need not wait for this sequence.
    fn end_call(&mut self) {}

    /// Its name in the flight record, if it is kept there.
    fn pipeline(&self) -> Option<PipelineId> {
        None
    }

    /// Whether it could take another call, as far as is known here without asking anyone.
    fn is_alive(&self) -> bool {
        true
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::steps::block_on;

    /// [`Backend::submit`], then [`Backend::output`], on a loop of its own.
    pub(crate) fn run_rows(
        backend: &mut dyn Backend,
        position: u32,
        rows: &[f32],
        out: &mut Vec<f32>,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        block_on(async {
            backend.submit(position, rows, run.cancel).await;
            backend.output(out, run).await
        })
    }

    #[test]
    fn percentiles_follow_the_nearest_rank() {
        assert_eq!(percentile(&[], 50), 0);
        assert_eq!(percentile(&[7], 95), 7);
        let values: Vec<u32> = (1..=100).rev().collect();
        assert_eq!((percentile(&values, 50), percentile(&values, 95)), (50, 95));
    }

    #[test]
    fn overhead_is_the_round_trip_less_compute() {
        let mut clock = HopClock::default();
        clock.record(Duration::from_micros(500), 300, 20);
        // A host that claims more than the whole round trip cannot make it negative.
        clock.record(Duration::from_micros(100), 900, 0);
        let times = clock.summary();
        assert_eq!(
            (times.steps, times.overhead_us_p50, times.overhead_us_p95),
            (2, 0, 200)
        );
    }
}
