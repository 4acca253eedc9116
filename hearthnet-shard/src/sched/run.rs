//! One batch: its plan, its computation, and the answers to its steps.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{Message, StepResult, Want};
use zeroize::Zeroize as _;

use super::Scheduler;
use crate::batch::{self, Part, wipe};
use crate::engine::{EngineSource, LayerEngine as _, Span};
use crate::plan::{BatchLimits, Turn};
use crate::stream::{Job, Stream, Work};
use crate::stream_handle::ResponseSink;

impl<S: EngineSource> Scheduler<S> {
    /// Computes one batch. Returns `false` if no step waited.
    pub(crate) fn turn(&mut self) -> bool {
        self.held_since = None;
        self.settle();
        self.take_snapshots();
        let now = self.clock.now();
        let (turn, chunk_ended) = (self.turn, self.chunk_ended);
        let limits = BatchLimits::of(&self.snapshots, &self.cost, now, turn, chunk_ended);
        let turn = self.planner.plan(&self.snapshots, &self.pool, &limits, now);
        if let Some(turn) = &turn {
            for stream in &turn.preempted {
                self.preempt(*stream);
            }
            if !turn.scheduled.is_empty() {
                self.turn += 1;
                self.run(turn, now);
            }
        }
        self.count_waiting();
        turn.is_some()
    }

    fn run(&mut self, turn: &Turn, began: Duration) {
        let Some(engine) = self.engine.as_mut() else {
            return;
        };
        let mut parts: Vec<Part<_>> = turn
            .scheduled
            .iter()
            .filter_map(|&(stream, rows)| {
                let Stream {
                    seq, handle, work, ..
                } = self.streams.get(&stream)?;
                let span = Span {
                    seq: *seq,
                    position: engine.len(*seq),
                    rows,
                };
                let Some(Work::Step(job)) = work.front() else {
                    return None;
                };
                let row = job.step.data.len() / job.step.rows.max(1) as usize;
                let from = job.done as usize * row;
                Some(Part {
                    stream,
                    layers: handle.layers,
                    span,
                    data: job.step.data.slice(from..from + rows as usize * row),
                })
            })
            .collect();
        // Streams that use the same layers share an engine batch.
        parts.sort_by_key(|part| part.layers);
        let (boundary, width) = (self.served.boundary, self.served.width as usize);
        let results = batch::compute(engine, &parts, &mut self.x, boundary, width);
        let ended = self.clock.now();
        let took = ended.saturating_sub(began);
        self.chunk_ended = (turn.chunk > 0).then_some(ended);

        let rows = batch::rows_of(&parts);
        let (short, chunk) = (rows.saturating_sub(turn.chunk), turn.chunk);
        self.events.turn(short, chunk, took);
        let first = parts.first().map(|part| part.layers);
        if let Some((lo, hi)) = first.filter(|all| parts.iter().all(|part| part.layers == *all)) {
            let layers = hi.saturating_sub(lo) + 1;
            self.cost.note(rows, layers, took);
            if short > 0 {
                self.decode = (short, layers);
            }
        }
        let mut x = std::mem::take(&mut self.x);
        let mut rest = x.as_mut_slice();
        let mut answers = Vec::with_capacity(results.len());
        for (part, result) in parts.into_iter().zip(results) {
            let (rows, after) = rest.split_at_mut(part.span.rows as usize * width);
            rest = after;
            // The step now holds the last reference to its rows, so that they can be wiped.
            drop(part.data);
            match result {
                Ok(()) => answers.extend(self.complete(part.stream, part.span.rows, rows, took)),
                Err(fault) => {
                    let position = self.head(part.stream).map(|job| job.step.position);
                    self.fail(part.stream, position, &fault);
                }
            }
        }
        send(answers);
        x.as_mut_slice().zeroize();
        x.clear();
        self.x = x;
        self.count_kv();
    }

    /// Records computed rows. Returns the answer to the step if these were its last rows.
    fn complete(
        &mut self,
        stream: u64,
        rows: u32,
        x: &[f32],
        took: Duration,
    ) -> Option<(Arc<dyn ResponseSink>, Message)> {
        let now = self.clock.now();
        let (boundary, width) = (self.served.boundary, self.served.width as usize);
        let stream = self.streams.get_mut(&stream)?;
        stream.served = self.turn;
        stream.active = now;
        let Some(Work::Step(job)) = stream.work.front_mut() else {
            return None;
        };
        job.compute += took;
        job.done += rows;
        let finished = job.done >= job.step.rows;
        match job.step.want {
            Want::All => {
                if job.out.capacity() == 0 {
                    job.out.reserve_exact(job.step.data.len());
                }
                boundary.encode(x, &mut job.out);
            }
            Want::Last if finished => {
                boundary.encode(x.rchunks(width).next().unwrap_or_default(), &mut job.out);
            }
            _ => {}
        }
        if !finished {
            return None;
        }
        let Some(Work::Step(job)) = stream.work.pop_front() else {
            return None;
        };
        let Job {
            step,
            ticket,
            arrived,
            out,
            compute,
            ..
        } = *job;
        let queued = now.saturating_sub(arrived).saturating_sub(compute);
        if stream.work.is_empty() {
            stream.return_estimator.answered(step.rows, now);
        }
        let handle = &stream.handle;
        let bytes = out.len();
        let answer = StepResult {
            compute_us: micros(compute),
            queue_us: micros(queued),
            ..step.answer(out.into())
        };
        // Before the caller can see the answer or the counters: its next step may need the ticket.
        handle.answered(now);
        drop(ticket);
        self.events
            .answered(handle.caller.node, step.rows, bytes, queued);
        let sink = Arc::clone(&handle.sink);
        wipe(step.data);
        Some((sink, Message::StepResult(answer)))
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Sends the answers of a batch, all of one session in one call.
fn send(mut answers: Vec<(Arc<dyn ResponseSink>, Message)>) {
    while let Some((sink, _)) = answers.first() {
        let sink = Arc::clone(sink);
        let of_session =
            |answer: &mut (Arc<dyn ResponseSink>, Message)| Arc::ptr_eq(&answer.0, &sink);
        let messages = answers
            .extract_if(.., of_session)
            .map(|(_, message)| message);
        sink.send_all(messages.collect());
    }
}
