//! State machine of one sequence on its way through the spans. Pure.
//!
//! Rows enter at the first span, cut into *chunks*. Every chunk visits every
//! span in order; different chunks are in different spans at the same time, and
//! a span may hold several at once so that its host always has the next piece
//! waiting when it finishes one.
//!
//! ```text
//!  submit ─► waiting(0) ─► in flight(0) ─► waiting(1) ─► in flight(1) ─► … ─► Output
//!                 ▲   ≤ depth per span │ on_result
//!                 └────────────────────┘ the next chunk moves up
//! ```
//!
//! # History and replacement
//!
//! A *boundary* is the input of a span: boundary 0 holds the rows that were
//! submitted, boundary `s` the rows that span `s - 1` returned. Each keeps its rows until
//! the sequence ends. When a span's host fails, [`Pipeline::replace`] puts one or
//! several new spans in its place, which read the boundary from its first row
//! again. Rows that the span behind them already has are not sent twice: whether a
//! chunk is a replay follows from positions alone.
//!
//! Example: two spans, 10 positions through both, the row of position 10 is in
//! flight in span 1 when its host dies. The new span 1 gets the rows 0 to 9 of
//! boundary 1 (nothing is asked back, they have been through), then row 10
//! again, under a new epoch. Span 0 notices nothing.
//!
//! If the rows of the failed host may be wrong, [`Pipeline::redo`] runs the spans behind it again
//! as well, because their keys and values come from these rows.
//!
//! Kept rows have a limit in bytes. Beyond it, all boundaries but the first are dropped, and a
//! replacement replays through the spans before it as well: slower, but correct.
//!
//! # Going back
//!
//! [`Pipeline::submit`] at an earlier position drops all later rows. A host with recurrent layers
//! may be able to return to an even earlier position only. [`Pipeline::hold`] keeps rows away from
//! its span until the host has told which ([`Pipeline::kept`]). The rows in between are then
//! replayed to this span from its boundary.
//!
//! Call order: [`Pipeline::submit`], then drain [`Pipeline::poll`]; after every answer call
//! [`Pipeline::on_result`], after every failure [`Pipeline::replace`], and drain `poll` again.
//! Steps are keyed by (span, epoch, position): an answer from an older epoch is dropped and
//! counted; any other unrequested answer is a fault of that host.

mod layer_inputs;
mod rows;

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use hearthnet_transport::Want;

pub(crate) use self::layer_inputs::LayerInputs;
use self::rows::{Boundary, cut};
pub(crate) use self::rows::{Chunk, even_cut};

/// Next action of the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send a step to the host of `span`.
    Send {
        /// Index of the span.
        span: usize,
        /// Epoch of the span's stream.
        epoch: u32,
        /// The rows.
        chunk: Chunk,
        /// Rows that the host should return.
        want: Want,
    },
    /// Rows have left the last span: the last submitted row once all are through, or, if all rows
    /// come back, the next rows in order.
    Output {
        /// The row or rows, in the boundary's data type.
        row: Bytes,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It answered the oldest step in flight.
    Accepted,
    /// It has rows that were there before, for a comparison ([`Pipeline::compare_replay`]).
    Replayed,
    /// It belongs to an older epoch and was dropped.
    Stale,
}

/// Answer that was not requested.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PipelineFault(String);

/// Limits of one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Limits {
    /// Maximum unanswered steps per span, at least 1.
    pub depth: usize,
    /// Maximum rows per chunk, at least 1.
    pub chunk_rows: usize,
    /// Maximum bytes of kept rows over all boundaries; the first boundary is always kept.
    pub history_bytes: usize,
}

#[derive(Debug, Clone)]
struct Span {
    epoch: u32,
    input: Boundary,
    waiting: VecDeque<Chunk>,
    /// Chunks with the requested rows: what is requested can change while a step is in flight.
    in_flight: VecDeque<(Chunk, Want)>,
    /// True if hosts return the rows of a replay.
    compares: bool,
    /// Position to which the host was asked to return, until it has answered.
    returns_to: Option<u32>,
}

impl Span {
    fn new(epoch: u32, input: Boundary) -> Self {
        Self {
            epoch,
            input,
            waiting: VecDeque::new(),
            in_flight: VecDeque::new(),
            compares: false,
            returns_to: None,
        }
    }

    /// Forgets what was under way to the old stream.
    fn reopen(&mut self, epoch: u32) {
        self.epoch = epoch;
        self.waiting.clear();
        self.in_flight.clear();
        self.compares = false;
        self.returns_to = None;
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Pipeline {
    spans: Vec<Span>,
    row_bytes: usize,
    limits: Limits,
    epoch: u32,
    /// Positions that have left the last span.
    left: u32,
    /// First position of the current submission.
    first: u32,
    /// Number of positions submitted and announced.
    target: u32,
    /// Rows that have left the last span and have not been polled.
    output: VecDeque<Bytes>,
    /// Rows that the last span returns: the last one, or all.
    back: Want,
    /// Whether it returns all rows of this submission.
    all: bool,
}

impl Pipeline {
    /// Creates a pipeline through `spans` spans (at least 1), with `row_bytes` bytes per row. The
    /// last span returns `back`: [`Want::Last`], or [`Want::All`] for a caller that computes the
    /// layers behind it.
    pub(crate) fn new(spans: usize, row_bytes: usize, back: Want, limits: Limits) -> Self {
        let limits = Limits {
            depth: limits.depth.max(1),
            chunk_rows: limits.chunk_rows.max(1),
            ..limits
        };
        Self {
            spans: std::iter::repeat_with(|| Span::new(1, Boundary::new(true)))
                .take(spans)
                .collect(),
            row_bytes,
            limits,
            epoch: 1,
            left: 0,
            first: 0,
            target: 0,
            output: VecDeque::new(),
            back,
            all: false,
        }
    }

    /// Submits the rows from `position` on; later positions are dropped first.
    ///
    /// The last row is the next [`Action::Output`]. The caller must ensure that the previous output
    /// has arrived and that `position` lies within the sequence. Going back (`position` less than
    /// [`Pipeline::submitted_length`]) requires [`Pipeline::is_idle`], since a replay in flight
    /// reaches beyond it.
    ///
    /// `more` rows follow in further calls; the output is that of all of them.
    pub(crate) fn submit(&mut self, position: u32, rows: Bytes, more: u32) {
        let goes_on = position == self.submitted_length() && position < self.target;
        for span in &mut self.spans {
            span.input.truncate(position, self.row_bytes);
        }
        self.left = self.left.min(position);
        if !goes_on {
            self.output.clear();
            self.first = position;
        }
        let Some(first) = self.spans.first_mut() else {
            return;
        };
        for chunk in cut(position, rows, self.limits.chunk_rows, self.row_bytes) {
            first.input.push(&chunk);
            first.waiting.push_back(chunk);
        }
        self.target = first.input.have.saturating_add(more);
    }

    /// Sets whether all rows of the next submissions come back, and not only the last one.
    pub(crate) fn return_all(&mut self, all: bool) {
        self.all = all;
    }

    /// Positions that have been through every span.
    pub(crate) fn length(&self) -> u32 {
        self.left
    }

    /// Positions that have been submitted.
    pub(crate) fn submitted_length(&self) -> u32 {
        self.spans.first().map_or(0, |span| span.input.have)
    }

    /// Returns true if all submitted and announced rows have left the last span.
    pub(crate) fn is_through(&self) -> bool {
        self.left >= self.target
    }

    /// Returns true if no chunk waits or is in flight, and no span is held.
    pub(crate) fn is_idle(&self) -> bool {
        let mut spans = self.spans.iter();
        spans.all(|s| s.waiting.is_empty() && s.in_flight.is_empty() && s.returns_to.is_none())
    }

    /// Sends no rows to a span until [`Pipeline::kept`]. To be called after a submission that went
    /// back to `position`.
    pub(crate) fn hold(&mut self, span: usize, position: u32) {
        if let Some(span) = self.spans.get_mut(span) {
            span.returns_to = Some(position);
        }
    }

    /// Position to which a held span has to return.
    pub(crate) fn returns_to(&self, span: usize) -> Option<u32> {
        self.spans.get(span)?.returns_to
    }

    /// The host of a held span has returned, and holds `kept` positions, no more than it was asked
    /// for. Returns false if the rows behind them are not kept here: the span has to be replaced.
    pub(crate) fn kept(&mut self, span: usize, kept: u32) -> bool {
        let (rows, row_bytes) = (self.limits.chunk_rows, self.row_bytes);
        let Some(span) = self.spans.get_mut(span) else {
            return true;
        };
        let Some(position) = span.returns_to.take().filter(|position| kept < *position) else {
            return true;
        };
        if span.input.kept.is_none() {
            return false;
        }
        // New rows may wait already.
        let replay = span.input.replay(kept..position, rows, row_bytes);
        replay
            .into_iter()
            .rev()
            .for_each(|chunk| span.waiting.push_front(chunk));
        true
    }

    pub(crate) fn history_bytes(&self) -> usize {
        self.spans.iter().map(|s| s.input.bytes()).sum()
    }

    /// Epoch with which a span's stream is opened.
    pub(crate) fn epoch(&self, span: usize) -> u32 {
        self.spans.get(span).map_or(0, |s| s.epoch)
    }

    /// Input rows of a span from position 0 on, if they are kept.
    pub(crate) fn input(&self, span: usize) -> Option<Vec<Bytes>> {
        let kept = self.spans.get(span)?.input.kept.as_ref()?;
        Some(kept.iter().cloned().collect())
    }

    /// Submitted rows from position 0 on, so that another backend can take over.
    pub(crate) fn submitted(&self) -> impl Iterator<Item = &Bytes> {
        self.spans
            .first()
            .into_iter()
            .flat_map(|span| span.input.kept.iter().flatten())
    }

    /// Next action, or `None` until the next answer.
    pub(crate) fn poll(&mut self) -> Option<Action> {
        if let Some(row) = self.output.pop_front() {
            return Some(Action::Output { row });
        }
        // From the back: the chunk that is furthest along frees its slot first.
        for index in (0..self.spans.len()).rev() {
            let passed_on = self.passed_on(index);
            let span = self.spans.get_mut(index)?;
            if span.in_flight.len() >= self.limits.depth || span.returns_to.is_some() {
                continue;
            }
            let Some(mut chunk) = span.waiting.pop_front() else {
                continue;
            };
            // A chunk that contains both replayed and new rows is cut in two.
            if chunk.position < passed_on && passed_on < chunk.end() {
                span.waiting
                    .push_front(chunk.split_off(passed_on, self.row_bytes));
            }
            let epoch = span.epoch;
            let want = self.wanted(index, &chunk);
            let in_flight = &mut self.spans.get_mut(index)?.in_flight;
            in_flight.push_back((chunk.clone(), want));
            return Some(Action::Send {
                span: index,
                epoch,
                chunk,
                want,
            });
        }
        None
    }

    /// Processes a host's answer to the oldest step in flight on its span.
    ///
    /// # Errors
    /// [`PipelineFault`] if the answer was not requested. The pipeline is then unchanged.
    pub(crate) fn on_result(
        &mut self,
        span: usize,
        epoch: u32,
        position: u32,
        rows: u32,
        data: Bytes,
    ) -> Result<Outcome, PipelineFault> {
        let unexpected = || {
            PipelineFault(format!(
                "it answered for position {position}, which was not requested"
            ))
        };
        let Some(state) = self.spans.get_mut(span) else {
            return Err(unexpected());
        };
        if epoch < state.epoch {
            return Ok(Outcome::Stale);
        }
        let (asked, want) = match state.in_flight.front() {
            Some((chunk, want)) if epoch == state.epoch && chunk.position == position => {
                (chunk.rows, *want)
            }
            _ => return Err(unexpected()),
        };
        let wanted = match want {
            Want::None => 0,
            Want::Last => 1,
            Want::All => asked,
        };
        if rows != wanted || data.len() != self.row_bytes * wanted as usize {
            let bytes = data.len();
            return Err(PipelineFault(format!(
                "it returned {rows} rows in {bytes} bytes where {wanted} rows were asked for"
            )));
        }
        let Some((asked, _)) = state.in_flight.pop_front() else {
            return Err(unexpected());
        };
        let end = asked.end();
        if want == Want::All && end <= self.passed_on(span) {
            return Ok(Outcome::Replayed);
        }
        match self.spans.get_mut(span + 1) {
            Some(next) if want == Want::All => {
                let chunk = Chunk { data, ..asked };
                next.input.push(&chunk);
                next.waiting.push_back(chunk);
                self.bound_history();
            }
            Some(_) => {}
            None => {
                self.left = self.left.max(end);
                if want != Want::None {
                    self.output.push_back(data);
                }
            }
        }
        Ok(Outcome::Accepted)
    }

    /// Replaces a span whose host has failed by `count` new ones (at least 1).
    ///
    /// Returns the indices of the spans whose streams must be opened first: the new ones, and
    /// earlier ones that must run again because their output was dropped.
    pub(crate) fn replace(&mut self, span: usize, count: usize) -> Range<usize> {
        if span >= self.spans.len() {
            return 0..0;
        }
        let count = count.max(1);
        let from = (0..=span)
            .rev()
            .find(|&i| self.spans.get(i).is_some_and(|s| s.input.kept.is_some()))
            .unwrap_or(0);
        self.epoch += 1;
        let keep = from == span;
        let fresh = |_| Span::new(self.epoch, Boundary::new(keep));
        self.spans
            .splice(span + 1..span + 1, (1..count).map(fresh))
            .for_each(drop);
        let reopened = from..span + count;
        for index in reopened.clone() {
            let Some(state) = self.spans.get_mut(index) else {
                break;
            };
            state.reopen(self.epoch);
            if index > from {
                state.input.truncate(0, self.row_bytes);
            } else {
                let (all, rows) = (0..state.input.have, self.limits.chunk_rows);
                let replay = state.input.replay(all, rows, self.row_bytes);
                state.waiting.extend(replay);
            }
        }
        reopened
    }

    /// As [`Pipeline::replace`], if the host's rows may be wrong: all spans behind it run again,
    /// and so does the part of the current submission that has left the last span. If all rows come
    /// back, those before it do as well, because the caller computes layers behind.
    pub(crate) fn redo(&mut self, span: usize, count: usize) -> Range<usize> {
        let reopened = self.replace(span, count);
        if reopened.is_empty() {
            return reopened;
        }
        for behind in self.spans.iter_mut().skip(reopened.end) {
            behind.reopen(self.epoch);
            behind.input.truncate(0, self.row_bytes);
        }
        let is_out = self.is_through() && self.output.is_empty();
        self.left = match self.back {
            Want::All => 0,
            _ if is_out => self.left,
            _ => self.left.min(self.first),
        };
        self.output.clear();
        reopened.start..self.spans.len()
    }

    /// Lets a span return the rows of its replay, which are then not passed on. To be called after
    /// [`Pipeline::replace`].
    pub(crate) fn compare_replay(&mut self, span: usize) {
        if let Some(span) = self.spans.get_mut(span) {
            span.compares = true;
        }
    }

    /// Number of positions that a span has returned to the next span or the caller.
    fn passed_on(&self, span: usize) -> u32 {
        self.spans.get(span + 1).map_or(self.left, |s| s.input.have)
    }

    /// Rows that a span should return for a chunk: only those that are new.
    fn wanted(&self, span: usize, chunk: &Chunk) -> Want {
        let is_last = span + 1 == self.spans.len();
        if chunk.end() <= self.passed_on(span) {
            match self.spans.get(span).is_some_and(|span| span.compares) {
                true => Want::All,
                false => Want::None,
            }
        } else if !is_last || self.all || self.back == Want::All {
            Want::All
        } else if chunk.end() == self.target {
            Want::Last
        } else {
            Want::None
        }
    }

    /// Drops all boundaries but the first if they take too much memory.
    fn bound_history(&mut self) {
        if self.history_bytes() > self.limits.history_bytes {
            for span in self.spans.iter_mut().skip(1) {
                span.input.kept = None;
            }
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;
