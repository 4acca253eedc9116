//! Content of the engine's next batch: a pure function of the streams, the waiting steps, the free
//! pages, the rows given to callers before, and the learnt cost of a batch.
//!
//! A batch takes decode rows first, then prefill rows up to a time budget, as Sarathi-Serve and vLLM
//! schedule. The engine runs all of them in one pass, so the weights are read once for all.
//!
//! - *Decode.* All waiting short steps. If several callers decode, it takes a row of each, and extra
//!   rows that lengthen the batch by a third, so that one caller's many streams cost another caller
//!   no more than that.
//! - *Prefill.* A chunk of one long step, or of several until the chunk is full.
//!
//! The budget follows from the [cost](BatchCost) of a batch. While only the caller of a prompt
//! decodes, it is a fixed time. While other callers decode, a batch is at most a third longer than
//! one of their decode rows alone; if these rows are on their way, it takes as long as such a batch.
//! If the chunk takes the extra rows, each caller has one decode row.
//!
//! A chunk delays a decode step once: the step either shares a batch with it, or waits for its end.
//! In the latter case the step's own batch has no prefill. So at least every second batch has
//! prefill, however many streams decode.
//!
//! Example: streams A and B decode, C sends 100 rows, a batch has 42 rows.
//!
//! ```text
//! batch    1          2           3            4
//! rows     A B        A B         A B          A B
//!          C 0..40    C 40..80    C 80..100
//! ```
//!
//! Streams that use other layers than the rest of a batch run in an engine pass of their own.
//!
//! If a batch cannot take all waiting steps of a kind, callers get equal parts of it over time
//! (`fair.rs`), whatever the number of their streams. Among the streams of a caller, the one served
//! longest ago is first. If pages are short, a step is cut to the rows that fit; if none fits, a
//! stream is preempted (`pages.rs`).
//!
//! The host waits a moment before a batch for streams that return at once (`returns.rs`): a step
//! that arrives later waits for a whole batch.
//!
//! | concept | file |
//! |---|---|
//! | limits of a batch, order of decode and prefill | here |
//! | time of a batch by its rows | `cost.rs` |
//! | snapshots of the streams | `snapshot.rs` |
//! | division of rows and pages in a batch | `batch_builder.rs` |
//! | rows given to callers over time | `fair.rs` |
//! | page quotas, preemption | `pages.rs` |
//! | streams that return at once | `returns.rs` |

mod batch_builder;
mod cost;
mod fair;
mod pages;
mod returns;
mod snapshot;
#[cfg(test)]
mod tests;

use std::time::Duration;

use batch_builder::{BatchBuilder, Candidate, queue, rows_of};
pub(crate) use cost::BatchCost;
use cost::MAX_TURN_ROWS;
use fair::Ledger;
pub(crate) use pages::{Full, IDLE_AFTER, Pool, UNUSED_AFTER, admit, holders};
pub(crate) use returns::{ReturnEstimator, may_grow};
pub(crate) use snapshot::{Head, StreamSnapshot};
use snapshot::{Kind, decoders, others_decode};

/// Minimum rows of a batch between decode batches of other callers.
const MIN_ROWS_BETWEEN: u32 = 2;
/// If several callers decode, every 16th batch may have one more row: batches of one size only would
/// never show what a row costs.
const EXTRA_ROW_EVERY: u64 = 16;

/// Limits of the next batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchLimits {
    /// If several callers decode: rows of short steps. Otherwise all are taken.
    short: Option<u32>,
    /// Rows of a batch with long steps, which has at least one row of them. `None`: it takes short
    /// steps only.
    rows: Option<u32>,
}

impl BatchLimits {
    /// Limits of batch number `turn`. `chunk_ended` is the end of the last batch, if that had a
    /// chunk.
    pub(crate) fn of(
        streams: &[StreamSnapshot],
        cost: &BatchCost,
        now: Duration,
        turn: u64,
        chunk_ended: Option<Duration>,
    ) -> Self {
        let (short, long) = (queue(streams, Kind::Decode), queue(streams, Kind::Prefill));
        let decoders = decoders(streams, now);
        let several = decoders > 1;
        let decoding = match several {
            true => decoders,
            false => rows_of(&short).max(1),
        };
        let beside = cost.rows_beside(decoding);
        let waited = |step: &Candidate<'_>| Some(step.head.arrived) < chunk_ended;
        let has_waited = short.iter().any(waited);
        let rows = match long.first() {
            Some(_) if has_waited => None,
            Some(first) if !others_decode(streams, now) => {
                let (lo, hi) = first.view.layers;
                Some(cost.chunk_rows(hi.saturating_sub(lo) + 1))
            }
            // The decode rows are on their way.
            Some(_) if short.is_empty() => Some(decoding.max(MIN_ROWS_BETWEEN)),
            Some(_) => Some(beside),
            None => None,
        };
        // A chunk takes the place of the extra rows.
        let most = match rows {
            Some(_) => decoders,
            None => beside + u32::from(turn.is_multiple_of(EXTRA_ROW_EVERY)),
        };
        Self {
            short: several.then_some(most),
            rows,
        }
    }
}

/// A batch, and the streams to preempt for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Streams, and the rows that each contributes from the head of its step: short steps first.
    /// Empty if each of them was preempted.
    pub(crate) scheduled: Vec<(u64, u32)>,
    /// Number of these rows that belong to long steps.
    pub(crate) chunk: u32,
    /// Streams to end before the batch, for their pages.
    pub(crate) preempted: Vec<u64>,
}

/// Plans batches. Deterministic: the same calls give the same batches.
#[derive(Debug, Clone, Default)]
pub(crate) struct Planner {
    decode: Ledger,
    prefill: Ledger,
}

impl Planner {
    /// Plans the next batch; `None` if no step waits.
    pub(crate) fn plan(
        &mut self,
        streams: &[StreamSnapshot],
        pool: &Pool,
        limits: &BatchLimits,
        now: Duration,
    ) -> Option<Turn> {
        let (short, long) = (queue(streams, Kind::Decode), queue(streams, Kind::Prefill));
        if short.is_empty() && long.is_empty() {
            return None;
        }
        let mut builder = BatchBuilder::new(streams, pool, now);
        // A chunk has at least a row.
        let most = MAX_TURN_ROWS - u32::from(limits.rows.is_some());
        let waiting = rows_of(&short);
        let mut layers = short.iter().map(|step| step.view.layers);
        let first = layers.next();
        let alike = layers.all(|one| Some(one) == first);
        match limits.short.filter(|rows| !alike || waiting > *rows) {
            Some(rows) => builder.share_short(&short, rows.min(most), &mut self.decode),
            None if waiting > most => builder.share(&short, most, None, &mut self.decode),
            None => {
                for step in &short {
                    builder.take(step, step.head.left, step.head.left);
                }
                // All fit, so no caller has to wait.
                self.decode.settle();
            }
        }
        if let Some(rows) = limits.rows {
            let chunk = rows.min(MAX_TURN_ROWS).saturating_sub(builder.rows());
            builder.share(&long, chunk.max(1), Some(1), &mut self.prefill);
        }
        if long.is_empty() {
            self.prefill.settle();
        }
        let (scheduled, preempted) = (builder.scheduled, builder.preempted);
        let is_long = |stream: u64| long.iter().any(|step| step.view.stream == stream);
        let chunk = scheduled.iter().filter(|(stream, _)| is_long(*stream));
        Some(Turn {
            chunk: chunk.map(|(_, rows)| rows).sum(),
            scheduled,
            preempted,
        })
    }
}
