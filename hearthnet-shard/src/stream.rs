//! A stream on the compute thread: its sequence and its waiting work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::Step;

use crate::engine::LayerEngine;
use crate::fault::StreamFault;
use crate::notary::StreamClaims;
use crate::plan::{Head, ReturnEstimator, StreamSnapshot};
use crate::stream_handle::{StreamHandle, Ticket};

/// An epoch of a stream.
pub(crate) struct Stream<Q> {
    pub(crate) handle: Arc<StreamHandle>,
    pub(crate) seq: Q,
    pub(crate) work: VecDeque<Work>,
    /// Number of the batch that last served it.
    pub(crate) served: u64,
    /// Time of the last event on it.
    pub(crate) active: Duration,
    pub(crate) return_estimator: ReturnEstimator,
    /// `None` without receipts.
    pub(crate) claims: Option<StreamClaims>,
}

/// Work that a caller asked for, in order.
pub(crate) enum Work {
    Step(Box<Job>),
    Truncate {
        position: u32,
        answer: bool,
        _ticket: Ticket,
    },
}

/// A step on its way through the engine.
pub(crate) struct Job {
    pub(crate) step: Step,
    pub(crate) ticket: Ticket,
    pub(crate) arrived: Duration,
    /// The step's position is checked and the stream truncated to it.
    pub(crate) settled: bool,
    /// Rows computed.
    pub(crate) done: u32,
    /// Rows to return, encoded.
    pub(crate) out: Vec<u8>,
    pub(crate) compute: Duration,
}

impl Job {
    pub(crate) fn new(step: Step, ticket: Ticket, arrived: Duration) -> Self {
        Self {
            step,
            ticket,
            arrived,
            settled: false,
            done: 0,
            out: Vec::new(),
            compute: Duration::ZERO,
        }
    }
}

impl<Q: Copy> Stream<Q> {
    /// The next step.
    pub(crate) fn head(&self) -> Option<&Job> {
        match self.work.front()? {
            Work::Step(job) => Some(job),
            Work::Truncate { .. } => None,
        }
    }

    pub(crate) fn snapshot<E: LayerEngine<Seq = Q>>(&self, id: u64, engine: &E) -> StreamSnapshot {
        let head = self.head().map(|job| Head {
            rows: job.step.rows,
            left: job.step.rows.saturating_sub(job.done),
            served: self.served,
            arrived: job.arrived,
        });
        StreamSnapshot {
            stream: id,
            caller: self.handle.caller.party,
            layers: self.handle.layers,
            length: engine.len(self.seq),
            active: self.active,
            rests: self.handle.rests(),
            head,
        }
    }

    /// Prepares the step at the head: applies earlier truncations, checks the step's position, and
    /// truncates to it if the step repeats earlier positions.
    ///
    /// # Errors
    /// The fault that ends the stream, and the position of the step at fault.
    pub(crate) fn settle<E: LayerEngine<Seq = Q>>(
        &mut self,
        engine: &mut E,
    ) -> Result<(), (Option<u32>, StreamFault)> {
        loop {
            let length = engine.len(self.seq);
            match self.work.front_mut() {
                Some(Work::Truncate {
                    position, answer, ..
                }) => {
                    let (position, answer) = (*position, *answer);
                    self.work.pop_front();
                    if position > length {
                        return Err((None, StreamFault::PositionGap { position, length }));
                    }
                    let kept = match answer {
                        true => engine.truncate(self.seq, position),
                        false => engine.truncate_to(self.seq, position).map(|()| position),
                    };
                    let kept = kept.map_err(|fault| (None, fault))?;
                    if let Some(claims) = &mut self.claims {
                        claims.shorten(kept, !answer);
                    }
                    if answer {
                        self.handle.truncated(kept);
                    }
                }
                Some(Work::Step(job)) if !job.settled => {
                    let (position, rows) = (job.step.position, job.step.rows);
                    let max = self.handle.max_positions();
                    let refuse = |fault| Err((Some(position), fault));
                    if position > length {
                        return refuse(StreamFault::PositionGap { position, length });
                    }
                    if position.checked_add(rows).is_none_or(|end| end > max) {
                        return refuse(StreamFault::ContextFull { max });
                    }
                    if position < length
                        && let Err(fault) = engine.truncate_to(self.seq, position)
                    {
                        return refuse(fault);
                    }
                    job.settled = true;
                }
                _ => return Ok(()),
            }
        }
    }
}
