//! A new sequence: its route, its streams, and waiting for room where hosts have none.
//!
//! A host that is full is passed over for another. Where all are, the sequence holds nothing while
//! it waits, so that two of them can't wait for each other's hosts; it asks again every now and then,
//! and gives up with `busy`: full is not missing. Those of one process who wait for the same model
//! do so in a [`Line`]: nobody overtakes who came before.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use hearthnet_model::WeightsId;
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout_at;

use super::ShardedBackend;
use super::recovery::pause;
use crate::Cancel;
use crate::backend::Run;
use crate::error::ChatError;
use crate::hosts::Search;
use crate::pipeline::{Limits, Pipeline};

/// Pauses grow until this one: 100 to 200 ms. A free place is not to wait long for who is next.
const LONGEST_PAUSE: u32 = 2;

/// Those who wait for room, first come, first served.
#[derive(Debug, Default)]
struct Line {
    /// Who holds it is the first.
    turn: Arc<tokio::sync::Mutex<()>>,
    waiting: AtomicUsize,
}

/// A place in a line. Dropping it lets the next one ask.
struct Place {
    line: Arc<Line>,
    /// `None` until it is the first.
    turn: Option<OwnedMutexGuard<()>>,
}

impl Line {
    /// The line of this process for a model.
    fn of(weights: WeightsId) -> Arc<Self> {
        static LINES: Mutex<BTreeMap<[u8; 32], Weak<Line>>> = Mutex::new(BTreeMap::new());
        let mut lines = LINES.lock();
        if let Some(line) = lines.get(&weights.0).and_then(Weak::upgrade) {
            return line;
        }
        lines.retain(|_, line| line.strong_count() > 0);
        let line = Arc::new(Self::default());
        lines.insert(weights.0, Arc::downgrade(&line));
        line
    }

    fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    fn join(self: &Arc<Self>) -> Place {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Place {
            line: Arc::clone(self),
            turn: None,
        }
    }
}

impl Place {
    async fn first(&mut self) {
        let turn = Arc::clone(&self.line.turn);
        self.turn = Some(turn.lock_owned().await);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.line.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ShardedBackend {
    /// Opens the streams, as soon as there is room.
    pub(super) fn start(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let until = Instant::now() + self.settings.start_timeout;
        let line = Line::of(self.model.weights);
        let mut place = (!line.is_empty()).then(|| line.join());
        let mut pauses = 0;
        loop {
            if let Some(place) = place.as_mut().filter(|place| place.turn.is_none()) {
                let first = async { timeout_at(until.into(), place.first()).await };
                match self.runtime.block_on(cancel.or(first)) {
                    None => return Err(ChatError::Cancelled),
                    Some(Err(_)) => {
                        return Err(ChatError::HostsFull(
                            "the hosts are full, and others have been waiting for longer".into(),
                        ));
                    }
                    Some(Ok(())) => {}
                }
            }
            let full = match self.connect(cancel) {
                Err(ChatError::HostsFull(why)) => why,
                result => return result,
            };
            self.let_go();
            if place.is_none() {
                place = Some(line.join());
                continue;
            }
            // Without randomness the shortest pause has to do.
            let random = getrandom::u32().unwrap_or_default();
            let pause = pause(LONGEST_PAUSE.min(pauses), random);
            if Instant::now() + pause >= until {
                return Err(ChatError::HostsFull(full));
            }
            pauses += 1;
            let paused = cancel.or(async { tokio::time::sleep(pause).await });
            self.runtime.block_on(paused).ok_or(ChatError::Cancelled)?;
        }
    }

    /// Routes, and opens a stream on every host chosen; one that has no room is passed over.
    fn connect(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let opened = self.open_all(cancel);
        match (opened, self.full.take()) {
            // Those that are missing as well are not what it lacks.
            (Err(ChatError::ShardUnavailable(_)), Some(full)) => Err(ChatError::HostsFull(full)),
            (opened, _) => opened,
        }
    }

    fn open_all(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        let route = self.source.route(&Search {
            layers: self.model.hosted.start..=self.model.hosted.end.saturating_sub(1),
            exclude: &self.excluded,
            optional: false,
            cancel,
        })?;
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
        self.watch(cancel);
        self.open_streams(0..self.hops.len(), cancel);
        self.settle(&mut run)?;
        while self.hops.iter().any(|hop| !hop.opened) {
            self.wait(cancel)?;
            self.settle(&mut run)?;
        }
        Ok(())
    }

    /// Holds nothing any more, and has asked nobody.
    fn let_go(&mut self) {
        for hop in self.hops.drain(..) {
            hop.release();
        }
        self.hop_failures.clear();
        self.recoveries.clear();
        self.notices.clear();
        self.excluded.clear();
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_came_first_is_first_and_a_line_without_anybody_is_gone() {
        let line = Line::of(WeightsId([201; 32]));
        assert!(line.is_empty());
        let (mut a, mut b) = (line.join(), line.join());
        a.first().await;
        {
            let mut next = std::pin::pin!(b.first());
            assert!(futures_util::FutureExt::now_or_never(next.as_mut()).is_none());
            assert!(!Line::of(WeightsId([201; 32])).is_empty());
            drop(a);
            next.await;
        }
        drop(b);
        assert!(line.is_empty());
        let weak = Arc::downgrade(&line);
        drop(line);
        assert!(weak.upgrade().is_none());
    }
}
