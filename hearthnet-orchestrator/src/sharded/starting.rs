//! A new sequence: its route, its streams, and waiting for room where hosts have none.
//!
//! A host that is full is passed over for another. Where all are, the sequence holds nothing while
//! it waits, so that two of them can't wait for each other's hosts; it asks again every now and then,
//! and gives up with `busy`: full is not missing. Those of one process who wait for the same model
//! do so in a line: nobody overtakes who came before.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use hearthnet_model::WeightsId;
use parking_lot::Mutex;

use super::recovery::pause;
use super::{Call, ShardedBackend};
use crate::Cancel;
use crate::backend::Run;
use crate::error::ChatError;
use crate::pipeline::{Limits, Pipeline};

/// Pauses grow until this one: 100 to 200 ms. A free place is not to wait long for who is next.
const LONGEST_PAUSE: u32 = 2;

/// Those who wait for room, first come, first served: who holds it is the first.
type Line = tokio::sync::Mutex<()>;

/// The line of this process for a model.
fn line_of(weights: WeightsId) -> Arc<Line> {
    static LINES: Mutex<BTreeMap<[u8; 32], Weak<Line>>> = Mutex::new(BTreeMap::new());
    let mut lines = LINES.lock();
    if let Some(line) = lines.get(&weights.0).and_then(Weak::upgrade) {
        return line;
    }
    lines.retain(|_, line| line.strong_count() > 0);
    let line = Arc::new(Line::default());
    lines.insert(weights.0, Arc::downgrade(&line));
    line
}

impl ShardedBackend {
    /// Opens the streams, as soon as there is room.
    pub(super) async fn start(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let until = Instant::now() + self.settings.start_timeout;
        let line = line_of(self.model.weights);
        // Nobody overtakes who waits already.
        let (mut in_line, mut first) = (line.try_lock().is_err(), None);
        let mut pauses = 0;
        loop {
            if in_line && first.is_none() {
                let too_late = self.sleep(until.saturating_duration_since(Instant::now()));
                tokio::select! {
                    biased;
                    () = cancel.cancelled() => return Err(ChatError::Cancelled),
                    turn = line.lock() => first = Some(turn),
                    () = too_late => {
                        return Err(ChatError::HostsFull(
                            "the hosts are full, and others have been waiting for longer".into(),
                        ));
                    }
                }
            }
            let full = match self.connect(cancel).await {
                Err(ChatError::HostsFull(why)) => why,
                result => return result,
            };
            self.let_go();
            if !std::mem::replace(&mut in_line, true) {
                continue;
            }
            // Without randomness the shortest pause has to do.
            let random = getrandom::u32().unwrap_or_default();
            let pause = pause(LONGEST_PAUSE.min(pauses), random);
            if Instant::now() + pause >= until {
                return Err(ChatError::HostsFull(full));
            }
            pauses += 1;
            let paused = cancel.or(self.sleep(pause)).await;
            paused.ok_or(ChatError::Cancelled)?;
        }
    }

    /// Routes, and opens a stream on every host chosen; one that has no room is passed over.
    async fn connect(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let opened = self.open_all(cancel).await;
        match (opened, self.call.full.take()) {
            // Those that are missing as well are not what it lacks.
            (
                Err(ChatError::ShardUnavailable(_) | ChatError::ArithmeticMismatch(_)),
                Some(full),
            ) => Err(ChatError::HostsFull(full)),
            (opened, _) => opened,
        }
    }

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
        let row_bytes = self.model.width * self.model.boundary.bytes_per_value();
        let pipeline = Pipeline::new(route.len(), row_bytes, limits);
        self.pipeline = pipeline.returning(self.model.back());
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

    /// Holds nothing any more, and has asked nobody.
    fn let_go(&mut self) {
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
    async fn whoever_came_first_is_first_and_a_line_without_anybody_is_gone() {
        let line = line_of(WeightsId([201; 32]));
        let first = line.try_lock().unwrap();
        {
            let mut second = std::pin::pin!(line.lock());
            assert!(second.as_mut().now_or_never().is_none());
            let mut third = std::pin::pin!(line.lock());
            assert!(third.as_mut().now_or_never().is_none());
            drop(first);
            // The turn is that of who waits, also before it has taken it.
            assert!(line_of(WeightsId([201; 32])).try_lock().is_err());
            let second = second.await;
            assert!(third.as_mut().now_or_never().is_none());
            drop(second);
            drop(third.await);
        }
        assert!(line.try_lock().is_ok());
        let weak = Arc::downgrade(&line);
        drop(line);
        assert!(weak.upgrade().is_none());
    }
}
