//! Start of a sequence: its route, its streams, and waiting for room if all hosts are full.
//!
//! A full host is skipped. If all are full, the sequence holds no stream while it waits, so that
//! two sequences cannot deadlock on each other's hosts. It retries until the timeout, and then
//! fails with `busy`, since a full host is not a missing one. Sequences of one process that wait
//! for the same model queue in FIFO order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hearthnet_bus::flight::{Event, PipelineId};
use hearthnet_files::WeightsId;
use hearthnet_transport::{DType, Want};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::recovery::pause;
use super::{Call, PumpSettings, ShardedBackend};
use crate::Cancel;
use crate::backend::Run;
use crate::backend::events::report_event;
use crate::backend::pipeline::{LayerInputs, Limits, Pipeline};
use crate::error::ChatError;
use crate::hosts::HostSource;
use crate::times::whole_ms;

/// The pause grows up to this exponent: 100 to 200 ms, so that a free stream is taken soon.
const LONGEST_PAUSE: u32 = 2;

/// FIFO queue of sequences that wait for room; the first one holds the lock.
type StartQueue = tokio::sync::Mutex<()>;

/// Returns the queue of this process for a model.
fn start_queue(weights: WeightsId) -> Arc<StartQueue> {
    static QUEUES: Mutex<BTreeMap<[u8; 32], Weak<StartQueue>>> = Mutex::new(BTreeMap::new());
    let mut queues = QUEUES.lock();
    if let Some(queue) = queues.get(&weights.0).and_then(Weak::upgrade) {
        return queue;
    }
    queues.retain(|_, queue| queue.strong_count() > 0);
    let queue = Arc::new(StartQueue::default());
    queues.insert(weights.0, Arc::downgrade(&queue));
    queue
}

impl ShardedBackend {
    /// A sequence without streams.
    pub(super) fn new(
        runtime: Handle,
        source: Box<dyn HostSource>,
        dtype: DType,
        settings: PumpSettings,
        now: Instant,
    ) -> Self {
        // Bounded in practice: hosts only send responses to requests.
        let (inbox, inbound) = mpsc::unbounded_channel();
        Self {
            runtime,
            health: source.choice().health.clone(),
            model: source.choice().model.clone(),
            source: Some(source),
            dtype,
            settings,
            hops: Vec::new(),
            next_hop: 0,
            inbox,
            inbound,
            // Placeholder until the route is known.
            pipeline: Pipeline::new(0, 0, Want::Last, Limits::default()),
            inputs: LayerInputs::default(),
            name: PipelineId::draw(),
            call: Call::default(),
            prepared: now,
            running: false,
            positions: 1,
            hop_failures: VecDeque::new(),
            notices: Vec::new(),
            pending: VecDeque::new(),
            here: None,
            replaced: Vec::new(),
            came: Vec::new(),
            watching_since: now,
            per_layer: None,
        }
    }

    pub(super) fn report_built(&self, took: Duration) {
        report_event(Event::PipelineBuilt {
            pipeline: self.name,
            hosts: u32::try_from(self.hops.len()).unwrap_or(u32::MAX),
            ms: whole_ms(took),
        });
    }

    /// Opens the streams as soon as there is room.
    pub(super) async fn start(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let until = Instant::now() + self.settings.start_timeout;
        let queue = start_queue(self.model.weights);
        // If others wait already, queue behind them.
        let (mut queued, mut first) = (queue.try_lock().is_err(), None);
        let mut pauses = 0;
        loop {
            if queued && first.is_none() {
                let too_late = self.sleep(until.saturating_duration_since(Instant::now()));
                tokio::select! {
                    biased;
                    () = cancel.cancelled() => return Err(ChatError::Cancelled),
                    turn = queue.lock() => first = Some(turn),
                    () = too_late => {
                        return Err(ChatError::HostsFull(
                            "the hosts are full, and other chats have waited longer".into(),
                        ));
                    }
                }
            }
            let opened = self.open_all(cancel).await;
            let full = match (opened, self.call.full.take()) {
                // Full hosts were excluded, which explains the missing layers.
                (
                    Err(ChatError::ShardUnavailable(_) | ChatError::ArithmeticMismatch(_)),
                    Some(full),
                ) => full,
                (Err(ChatError::HostsFull(why)), _) => why,
                (result, _) => return result,
            };
            self.release_all();
            if !std::mem::replace(&mut queued, true) {
                continue;
            }
            // If there is no randomness, use the shortest pause.
            let random = getrandom::u32().unwrap_or_default();
            let pause = pause(LONGEST_PAUSE.min(pauses), random);
            if Instant::now() + pause >= until {
                return Err(ChatError::HostsFull(full));
            }
            pauses += 1;
            let paused = cancel.run_until_cancelled(self.sleep(pause)).await;
            paused.ok_or(ChatError::Cancelled)?;
        }
    }

    /// Selects a route and opens a stream on every host; a full host is skipped.
    async fn open_all(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let layers = self.model.hosted.start..=self.model.hosted.end.saturating_sub(1);
        let route = self
            .route_over(
                layers,
                self.call.excluded.clone(),
                None,
                self.patience(),
                cancel,
            )
            .await?;
        let limits = Limits {
            depth: self.settings.depth,
            chunk_rows: self.settings.prefill_rows,
            history_bytes: self.settings.history_bytes,
        };
        let (row_bytes, hosted) = (self.model.bytes_behind(), self.model.hosted.clone());
        let input_bytes =
            self.model.rows.per_layer as usize * self.model.boundary.bytes_per_value();
        self.inputs = LayerInputs::new(hosted, row_bytes, input_bytes);
        self.pipeline = Pipeline::new(route.len(), row_bytes, self.model.back(), limits);
        for (index, span) in route.into_iter().enumerate() {
            let hop = self.hop(index, span);
            self.hops.push(hop);
        }
        let mut run = Run {
            cancel,
            notify: &mut |_| {},
        };
        self.open_streams(0..self.hops.len());
        self.settle(&mut run).await?;
        while self.hops.iter().any(|hop| !hop.opened) {
            self.wait(cancel).await?;
            self.settle(&mut run).await?;
        }
        Ok(())
    }

    /// Releases all streams and resets the call.
    fn release_all(&mut self) {
        for hop in self.hops.drain(..) {
            hop.release();
        }
        self.hop_failures.clear();
        self.notices.clear();
        self.call = Call::default();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn the_start_queue_is_fifo_and_is_dropped_when_empty() {
        let queue = start_queue(WeightsId([201; 32]));
        let first = queue.try_lock().unwrap();
        {
            let mut second = std::pin::pin!(queue.lock());
            assert!(second.as_mut().now_or_never().is_none());
            let mut third = std::pin::pin!(queue.lock());
            assert!(third.as_mut().now_or_never().is_none());
            drop(first);
            // A released lock belongs to the next waiter, even before that one is polled.
            assert!(start_queue(WeightsId([201; 32])).try_lock().is_err());
            let second = second.await;
            assert!(third.as_mut().now_or_never().is_none());
            drop(second);
            drop(third.await);
        }
        assert!(queue.try_lock().is_ok());
        let weak = Arc::downgrade(&queue);
        drop(queue);
        assert!(weak.upgrade().is_none());
    }
}
