//! One sequence on its way through the spans: a pure state machine.
//!
//! Rows enter as *chunks* (a piece of the prompt, or one decode row). Every
//! chunk visits every span in order; different chunks are in different spans at
//! the same time, and a span may hold several at once so that its host always
//! has the next piece waiting when it finishes one.
//!
//! ```text
//!  submit ─► waiting(0) ─► in flight(0) ─► waiting(1) ─► in flight(1) ─► … ─► Output
//!                 ▲   ≤ depth per span │ on_result
//!                 └────────────────────┘ the next chunk moves up
//! ```
//!
//! Call order: [`Pipeline::submit`] any number of chunks, then drain
//! [`Pipeline::poll`]; after every answer call [`Pipeline::on_result`] and drain
//! `poll` again. Steps are keyed by (span, epoch, position): an answer from an
//! older epoch is dropped and counted, any other answer that was not asked for
//! is a fault of that host.

use std::collections::VecDeque;

use bytes::Bytes;

/// Which rows of a chunk the host sends back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// None: the piece only fills the KV cache of the last span.
    None,
    /// The last row: the next token is sampled from it.
    Last,
    /// All of them: the next span reads them.
    All,
}

/// Rows at one boundary, encoded in the boundary dtype.
#[derive(Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Position of the first row in the sequence.
    pub position: u32,
    /// Number of rows.
    pub rows: u32,
    /// `rows x width` values, row-major.
    pub data: Bytes,
    /// Whether the pipeline's output row is wanted for this chunk.
    pub wants_output: bool,
}

// Activations are sensitive: shapes only.
impl std::fmt::Debug for Chunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chunk")
            .field("position", &self.position)
            .field("rows", &self.rows)
            .field("bytes", &self.data.len())
            .field("wants_output", &self.wants_output)
            .finish()
    }
}

/// What the driver has to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send this step to the host of a span.
    Send {
        /// Index of the span.
        span: usize,
        /// Epoch to send under.
        epoch: u32,
        /// The rows.
        chunk: Chunk,
        /// What the host returns.
        want: Rows,
    },
    /// A chunk has left the last span.
    Output {
        /// Position after the chunk: the length of the sequence.
        length: u32,
        /// The last row when it was wanted, else empty.
        row: Bytes,
    },
}

/// What became of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was the one expected.
    Accepted,
    /// It came from an older epoch and was dropped.
    Stale,
}

/// An answer that no step asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineFault {
    /// Nothing is in flight there, or another step is.
    #[error("span {span} answered for position {position}, which was not asked")]
    Unexpected {
        /// Index of the span.
        span: usize,
        /// Position that it named.
        position: u32,
    },
    /// The answer holds another number of rows or bytes than was asked for.
    #[error("span {span} returned {got} rows in {bytes} bytes where {wanted} rows were asked for")]
    Shape {
        /// Index of the span.
        span: usize,
        /// Rows returned.
        got: u32,
        /// Bytes returned.
        bytes: usize,
        /// Rows asked for.
        wanted: u32,
    },
}

#[derive(Debug)]
struct SpanState {
    epoch: u32,
    waiting: VecDeque<Chunk>,
    in_flight: VecDeque<Chunk>,
}

/// The state of one sequence in its pipeline.
#[derive(Debug)]
pub struct Pipeline {
    spans: Vec<SpanState>,
    row_bytes: usize,
    depth: usize,
    outputs: VecDeque<(u32, Bytes)>,
    stale: u64,
}

impl Pipeline {
    /// A pipeline of `spans` spans for rows of `row_bytes` bytes each, with at
    /// most `depth` steps in flight per span.
    pub fn new(spans: usize, row_bytes: usize, depth: usize) -> Self {
        let state = || SpanState {
            epoch: 1,
            waiting: VecDeque::new(),
            in_flight: VecDeque::new(),
        };
        Self {
            spans: std::iter::repeat_with(state).take(spans).collect(),
            row_bytes,
            depth: depth.max(1),
            outputs: VecDeque::new(),
            stale: 0,
        }
    }

    /// Hands a chunk to the first span.
    pub fn submit(&mut self, chunk: Chunk) {
        match self.spans.first_mut() {
            Some(span) => span.waiting.push_back(chunk),
            None => self
                .outputs
                .push_back((chunk.position + chunk.rows, Bytes::new())),
        }
    }

    /// Steps that are with a host now.
    pub fn in_flight(&self) -> usize {
        self.spans.iter().map(|s| s.in_flight.len()).sum()
    }

    /// Whether the host of this span owes an answer.
    pub fn is_owed_by(&self, span: usize) -> bool {
        self.spans
            .get(span)
            .is_some_and(|s| !s.in_flight.is_empty())
    }

    /// Answers dropped because they came from an older epoch.
    pub fn stale(&self) -> u64 {
        self.stale
    }

    /// The epoch that a span's stream runs under.
    pub fn epoch(&self, span: usize) -> u32 {
        self.spans.get(span).map_or(0, |s| s.epoch)
    }

    /// The next thing to do; `None` when only answers can bring something new.
    ///
    /// Later spans come first: finishing a chunk beats starting one.
    pub fn poll(&mut self) -> Option<Action> {
        if let Some((length, row)) = self.outputs.pop_front() {
            return Some(Action::Output { length, row });
        }
        let last = self.spans.len().checked_sub(1)?;
        for index in (0..=last).rev() {
            let span = self.spans.get_mut(index)?;
            if span.in_flight.len() >= self.depth {
                continue;
            }
            if let Some(chunk) = span.waiting.pop_front() {
                let want = wanted(index == last, &chunk);
                span.in_flight.push_back(chunk.clone());
                return Some(Action::Send {
                    span: index,
                    epoch: span.epoch,
                    chunk,
                    want,
                });
            }
        }
        None
    }

    /// Takes a host's answer. Its numbers must be checked before they come here.
    ///
    /// # Errors
    /// [`PipelineFault`] when the answer does not belong to the oldest step in
    /// flight there: hosts answer a stream's steps in order.
    pub fn on_result(
        &mut self,
        span: usize,
        epoch: u32,
        position: u32,
        rows: u32,
        data: Bytes,
    ) -> Result<Outcome, PipelineFault> {
        let last = self.spans.len().saturating_sub(1);
        let unexpected = PipelineFault::Unexpected { span, position };
        let Some(state) = self.spans.get_mut(span) else {
            return Err(unexpected);
        };
        if epoch < state.epoch {
            self.stale += 1;
            return Ok(Outcome::Stale);
        }
        let asked = match state.in_flight.front() {
            Some(chunk) if epoch == state.epoch && chunk.position == position => chunk,
            _ => return Err(unexpected),
        };
        let wanted = match wanted(span == last, asked) {
            Rows::None => 0,
            Rows::Last => 1,
            Rows::All => asked.rows,
        };
        if rows != wanted || data.len() != self.row_bytes * wanted as usize {
            return Err(PipelineFault::Shape {
                span,
                got: rows,
                bytes: data.len(),
                wanted,
            });
        }
        let Some(asked) = state.in_flight.pop_front() else {
            return Err(unexpected);
        };
        if span == last {
            self.outputs.push_back((asked.position + asked.rows, data));
        } else if let Some(next) = self.spans.get_mut(span + 1) {
            next.waiting.push_back(Chunk { data, ..asked });
        }
        Ok(Outcome::Accepted)
    }
}

/// What the host of a span returns for a chunk.
fn wanted(is_last_span: bool, chunk: &Chunk) -> Rows {
    match (is_last_span, chunk.wants_output) {
        (false, _) => Rows::All,
        (true, true) => Rows::Last,
        (true, false) => Rows::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk(position: u32, rows: u32, wants_output: bool) -> Chunk {
        let data = Bytes::from(vec![position as u8; rows as usize * 4]);
        Chunk {
            position,
            rows,
            data,
            wants_output,
        }
    }

    fn sends(p: &mut Pipeline) -> Vec<(usize, u32)> {
        let mut out = Vec::new();
        while let Some(action) = p.poll() {
            match action {
                Action::Send { span, chunk, .. } => out.push((span, chunk.position)),
                Action::Output { length, .. } => out.push((99, length)),
            }
        }
        out
    }

    #[test]
    fn chunks_overlap_across_spans() {
        let mut p = Pipeline::new(2, 4, 1);
        for i in 0..3 {
            p.submit(chunk(i * 2, 2, i == 2));
        }
        assert_eq!(sends(&mut p), [(0, 0)]);
        p.on_result(0, 1, 0, 2, Bytes::from(vec![0; 8])).unwrap();
        // While the second span has the first chunk, the first one gets the second.
        assert_eq!(sends(&mut p), [(1, 0), (0, 2)]);
        assert_eq!(p.in_flight(), 2);
    }

    #[test]
    fn only_the_last_chunk_returns_a_row_from_the_last_span() {
        let mut p = Pipeline::new(1, 4, 2);
        p.submit(chunk(0, 2, false));
        p.submit(chunk(2, 2, true));
        let wants: Vec<Rows> = std::iter::from_fn(|| p.poll())
            .filter_map(|a| match a {
                Action::Send { want, .. } => Some(want),
                Action::Output { .. } => None,
            })
            .collect();
        assert_eq!(wants, [Rows::None, Rows::Last]);
        p.on_result(0, 1, 0, 0, Bytes::new()).unwrap();
        p.on_result(0, 1, 2, 1, Bytes::from(vec![7; 4])).unwrap();
        assert_eq!(
            p.poll(),
            Some(Action::Output {
                length: 2,
                row: Bytes::new()
            })
        );
        assert_eq!(
            p.poll(),
            Some(Action::Output {
                length: 4,
                row: Bytes::from(vec![7; 4])
            })
        );
    }

    #[test]
    fn an_answer_that_was_not_asked_for_is_a_fault() {
        let mut p = Pipeline::new(1, 4, 2);
        p.submit(chunk(0, 1, true));
        assert!(
            p.on_result(0, 1, 0, 1, Bytes::from(vec![0; 4])).is_err(),
            "not sent yet"
        );
        p.poll();
        assert!(
            p.on_result(0, 1, 5, 1, Bytes::from(vec![0; 4])).is_err(),
            "other position"
        );
        assert!(
            p.on_result(0, 2, 0, 1, Bytes::from(vec![0; 4])).is_err(),
            "future epoch"
        );
        assert!(
            p.on_result(3, 1, 0, 1, Bytes::from(vec![0; 4])).is_err(),
            "no such span"
        );
        for (rows, bytes) in [(1, 3), (2, 8), (0, 0), (1, 8)] {
            assert!(
                matches!(
                    p.on_result(0, 1, 0, rows, Bytes::from(vec![0; bytes])),
                    Err(PipelineFault::Shape { .. })
                ),
                "{rows} rows in {bytes} bytes"
            );
        }
        p.on_result(0, 1, 0, 1, Bytes::from(vec![0; 4])).unwrap();
        assert!(
            p.on_result(0, 1, 0, 1, Bytes::from(vec![0; 4])).is_err(),
            "answered twice"
        );
    }

    #[test]
    fn an_answer_from_an_older_epoch_is_dropped_and_counted() {
        let mut p = Pipeline::new(1, 4, 2);
        p.submit(chunk(0, 1, true));
        p.poll();
        assert_eq!(
            p.on_result(0, 0, 0, 1, Bytes::from(vec![0; 4])),
            Ok(Outcome::Stale)
        );
        assert_eq!((p.stale(), p.in_flight()), (1, 1));
    }

    proptest! {
        /// However the answers of different spans interleave, every chunk leaves
        /// once, in order, and no span ever holds more than `depth`.
        #[test]
        fn every_chunk_leaves_once_and_in_order(
            spans in 1usize..5,
            depth in 1usize..4,
            sizes in proptest::collection::vec(1u32..5, 1..8),
            picks in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let mut p = Pipeline::new(spans, 4, depth);
            let mut position = 0;
            let mut ends = Vec::new();
            for (i, &rows) in sizes.iter().enumerate() {
                p.submit(chunk(position, rows, i + 1 == sizes.len()));
                position += rows;
                ends.push(position);
            }
            let mut hosts: Vec<VecDeque<(Chunk, Rows)>> = vec![VecDeque::new(); spans];
            let mut left = Vec::new();
            let mut picks = picks.into_iter();
            loop {
                while let Some(action) = p.poll() {
                    match action {
                        Action::Send { span, chunk, want, .. } => {
                            hosts[span].push_back((chunk, want));
                            prop_assert!(hosts[span].len() <= depth);
                        }
                        Action::Output { length, .. } => left.push(length),
                    }
                }
                let busy: Vec<usize> = (0..spans).filter(|&s| !hosts[s].is_empty()).collect();
                if busy.is_empty() { break; }
                let span = busy[picks.next().unwrap_or(0) as usize % busy.len()];
                let (chunk, want) = hosts[span].pop_front().unwrap();
                let rows = match want { Rows::None => 0, Rows::Last => 1, Rows::All => chunk.rows };
                p.on_result(span, 1, chunk.position, rows, Bytes::from(vec![0; rows as usize * 4])).unwrap();
            }
            prop_assert_eq!(left, ends);
            prop_assert_eq!(p.in_flight(), 0);
        }
    }
}
