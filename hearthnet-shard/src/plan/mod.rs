//! Content of the engine's next batch: a pure function of the streams, the waiting steps, the free
//! pages, and the rows given to callers before.
//!
//! A turn is one batch. A *decode* turn takes the waiting short steps of all streams at once. If
//! several callers decode, it takes a row of each, and extra rows that lengthen it by a third, so
//! that one caller's many streams cost another caller no more than that. A *prefill* turn takes a
//! chunk of one long step, or of several until the chunk is full. When both kinds wait, the turns
//! alternate, so
//!
//! - a decode step waits for at most one chunk, however much prefill there is (and, if several
//!   callers decode, for the earlier decode steps of its own caller), and
//! - prefill gets every other turn, however many streams decode.
//!
//! Example: streams A and B decode, C sends 100 rows, a chunk is 40 rows.
//!
//! ```text
//! turn      1        2         3        4         5        6         7
//! rows      A B      C 0..40   A B      C 40..80  A B      C 80..100 A B
//! ```
//!
//! A chunk of a neighbour's prompt takes waiting short steps along, a row of each caller, if all
//! use the same layers ([`piggybacks`]): the weights are read once for all of them. In the example,
//! turn 2 is then `A B C 0..40`.
//!
//! If a turn cannot take all waiting steps of its kind, callers get equal parts of it over time
//! (`fair.rs`), whatever the number of their streams. Among the streams of a caller, the one served
//! longest ago is first. If pages are short, a step is cut to the rows that fit; if none fits, a
//! stream is preempted (`pages.rs`).
//!
//! The length of a chunk follows from the engine's measured speed ([`crate::chunked_prefill`]), so
//! it takes about the same time on every machine. While another caller decodes, the chunk lengthens
//! a turn with decode steps by a third, or takes as long as a decode turn if no decode step waits.
//! That bounds what a neighbour's prompts cost a chat.
//!
//! So the host waits a moment before a turn for streams that return at once ([`ReturnEstimator`]):
//! a step that arrives later waits for a whole turn.
//!
//! | concept | file |
//! |---|---|
//! | kinds of batches, their order and limits | here |
//! | snapshots of the streams | `snapshot.rs` |
//! | division of rows and pages in a batch | `batch_builder.rs` |
//! | rows given to callers over time | `fair.rs` |
//! | page quotas, preemption | `pages.rs` |
//! | streams that return at once | `returns.rs` |

mod batch_builder;
mod fair;
mod pages;
mod returns;
mod snapshot;
#[cfg(test)]
mod tests;

use std::time::Duration;

use batch_builder::{BatchBuilder, Candidate};
use fair::Ledger;
pub(crate) use pages::{Full, IDLE_AFTER, Pool, UNUSED_AFTER, admit, admit_fork};
pub(crate) use returns::{ReturnEstimator, may_grow};
pub(crate) use snapshot::{
    Head, Kind, StreamSnapshot, decoders, holders, others_decode, piggybacks, short_rows,
};

/// Limit of rows per batch: bounds the batch's memory.
pub(crate) const MAX_TURN_ROWS: u32 = 512;

/// Limits of the next batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Rows of a chunk.
    pub(crate) chunk: u32,
    /// Whether a chunk takes short steps along: [`piggybacks`].
    pub(crate) piggybacks: bool,
    pub(crate) decoders: u32,
    /// If several callers decode: extra rows of short steps, beside one row of each caller.
    pub(crate) more: u32,
}

impl Sizes {
    /// Limit of rows of short steps in a batch of this kind.
    fn room(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Decode => MAX_TURN_ROWS,
            Kind::Prefill if self.piggybacks => MAX_TURN_ROWS - self.chunk(),
            Kind::Prefill => 0,
        }
    }

    /// Target rows of short steps in a batch of this kind, if several callers decode.
    fn short(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Decode => self.decoders.saturating_add(self.more),
            // The chunk takes the place of the extra rows.
            Kind::Prefill => self.decoders,
        }
    }

    fn chunk(&self) -> u32 {
        self.chunk.clamp(1, MAX_TURN_ROWS)
    }
}

/// A batch, and the streams to preempt for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) kind: Kind,
    /// Streams, and the rows that each contributes from the head of its step: short steps first.
    /// Empty if each of them was preempted.
    pub(crate) scheduled: Vec<(u64, u32)>,
    /// Number of these rows that belong to long steps.
    pub(crate) chunk: u32,
    /// Streams to end before the batch, for their pages.
    pub(crate) preempted: Vec<u64>,
}

/// Plans batches. Deterministic: the same calls give the same batches.
#[derive(Debug, Clone)]
pub(crate) struct Planner {
    last: Kind,
    decode: Ledger,
    prefill: Ledger,
}

impl Planner {
    pub(crate) fn new() -> Self {
        Self {
            last: Kind::Prefill,
            decode: Ledger::default(),
            prefill: Ledger::default(),
        }
    }

    /// Plans the next batch; `None` if no step waits.
    pub(crate) fn plan(
        &mut self,
        streams: &[StreamSnapshot],
        pool: &Pool,
        sizes: &Sizes,
        now: Duration,
    ) -> Option<Turn> {
        let (mut short, mut short_rows, mut long) = (0, 0u32, 0);
        for head in streams.iter().filter_map(|view| view.head) {
            match Kind::of(head) {
                Kind::Decode => (short, short_rows) = (short + 1, short_rows + head.left),
                Kind::Prefill => long += 1,
            }
        }
        let kind = match (short, long) {
            (0, 0) => return None,
            (_, 0) => Kind::Decode,
            (0, _) => Kind::Prefill,
            _ if self.last == Kind::Prefill => Kind::Decode,
            _ => Kind::Prefill,
        };
        self.last = kind;
        let mut builder = BatchBuilder::new(streams, pool, now, short + long);
        let queue = Candidate::queue(streams, Kind::Decode, short);
        let (most, several) = (sizes.room(kind), sizes.decoders > 1);
        let alike = queue.windows(2).all(|two| two[0].layers == two[1].layers);
        let all = !several || alike && short_rows <= sizes.short(kind);
        if short_rows <= most && all {
            for step in &queue {
                builder.take(step, step.left, step.left);
            }
            // All fit, so no caller has to wait.
            self.decode.settle();
        } else if several {
            builder.share_short(queue, sizes.short(kind).min(most), &mut self.decode);
        } else if most > 0 {
            builder.share(queue, most, Kind::Decode, &mut self.decode);
        }
        builder.own_from = builder.scheduled.len();
        if kind == Kind::Prefill {
            let queue = Candidate::queue(streams, kind, long);
            builder.share(queue, sizes.chunk(), kind, &mut self.prefill);
        }
        if short == 0 {
            self.decode.settle();
        }
        if long == 0 {
            self.prefill.settle();
        }
        let chunk = builder.scheduled.iter().skip(builder.own_from);
        Some(Turn {
            kind,
            chunk: chunk.map(|(_, rows)| rows).sum(),
            scheduled: builder.scheduled,
            preempted: builder.preempted,
        })
    }
}
