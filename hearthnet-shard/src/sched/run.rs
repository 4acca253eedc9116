//! Runs a batch: its plan, its computation, and the answers to its steps.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{Message, StepResult, Want};
use zeroize::Zeroize as _;

use super::Scheduler;
use crate::batch::{self, Part, wipe};
use crate::engine::{EngineSource, LayerEngine as _, Span};
use crate::notary::AnsweredRows;
use crate::plan::{Kind, Sizes, Turn, decoders, others_decode, piggybacks, short_rows};
use crate::stream::{Job, Stream, Work};
use crate::stream_handle::ResponseSink;

/// Every 16th batch takes one extra row, so that the cost model sees batches of different sizes.
const EXTRA_ROW_EVERY: u64 = 16;

/// Message, and the session that gets it.
type Answer = (Arc<dyn ResponseSink>, Message);

impl<S: EngineSource> Scheduler<S> {
    /// Computes one batch. Returns `false` if no step waited.
    pub(crate) fn turn(&mut self) -> bool {
        self.settle();
        self.fit_pool();
        self.take_snapshots();
        let now = self.clock.now();
        let beside = others_decode(&self.snapshots, now);
        self.delays_decode = false;
        let (piggybacks, decoders) = (
            piggybacks(&self.snapshots, beside),
            decoders(&self.snapshots, now),
        );
        let more = match decoders > 1 {
            // The extra row lets the cost model see batches of different sizes.
            true => {
                self.prefill.rows_beside(decoders)
                    + u32::from(self.turn.is_multiple_of(EXTRA_ROW_EVERY))
            }
            false => self.prefill.rows_beside(short_rows(&self.snapshots).max(1)),
        };
        let chunk = match (beside, piggybacks) {
            (false, _) => self.prefill.chunk_rows(),
            (true, false) => self.prefill.rows_between(),
            (true, true) => more,
        };
        let sizes = Sizes {
            chunk,
            piggybacks,
            decoders,
            more,
        };
        let turn = self.planner.plan(&self.snapshots, &self.pool, &sizes, now);
        if let Some(turn) = &turn {
            self.delays_decode = beside && turn.kind == Kind::Prefill;
            for stream in &turn.preempted {
                self.preempt(*stream);
            }
            if !turn.scheduled.is_empty() {
                self.turn += 1;
                self.run(turn, beside, now);
            }
        }
        self.count_waiting();
        turn.is_some()
    }

    fn run(&mut self, turn: &Turn, beside: bool, began: Duration) {
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
        let (boundary, shape) = (self.served.boundary, self.served.rows);
        let results = batch::compute(engine, &parts, &mut self.x, boundary, shape);
        let took = self.clock.now().saturating_sub(began);

        let rows = batch::rows_of(&parts);
        let (short, chunk) = (rows.saturating_sub(turn.chunk), turn.chunk);
        let layers = parts.first().map(|part| part.layers);
        let layers = layers.filter(|layers| parts.iter().all(|part| part.layers == *layers));
        let layers = layers.map(|(lo, hi)| (hi + 1).saturating_sub(lo));
        let all = (self.served.hi + 1).saturating_sub(self.served.lo);
        let of_all = layers.map(|layers| (layers, all));
        self.events.turn(turn.kind, (short, chunk), took, of_all);
        match turn.kind {
            Kind::Decode => self.prefill.note_decode(took),
            Kind::Prefill if short > 0 => {}
            Kind::Prefill if beside => self.prefill.note_between(chunk, took),
            Kind::Prefill => self.prefill.note(chunk, took),
        }
        if let Some(layers) = layers.filter(|_| short > 0) {
            self.prefill.note_turn(rows, layers, took);
        }
        let mut x = std::mem::take(&mut self.x);
        let mut rest = x.as_mut_slice();
        let mut answers = Vec::with_capacity(results.len());
        let mut answered = Vec::with_capacity(results.len());
        for (part, result) in parts.into_iter().zip(results) {
            let row_values = part.row_values(shape).max(1);
            let (rows, after) = rest.split_at_mut(part.values(shape));
            rest = after;
            // The step now holds the last reference to its rows, so that they can be wiped.
            drop(part.data);
            match result {
                Ok(()) => {
                    let computed = (part.span.rows, &*rows, row_values);
                    if let Some((answer, rows)) = self.complete(part.stream, computed, took) {
                        answers.push(answer);
                        answered.push((part.stream, rows, row_values));
                    }
                }
                Err(fault) => {
                    let position = self.head(part.stream).map(|job| job.step.position);
                    self.fail(part.stream, position, &fault);
                }
            }
        }
        send(answers);
        // Hashed only now, so that no answer waits for it.
        for (stream, rows, row_values) in answered {
            self.claim(stream, &rows, row_values * boundary.bytes_per_value());
            wipe(rows.received);
        }
        x.as_mut_slice().zeroize();
        x.clear();
        self.x = x;
        self.count_kv();
    }

    /// Takes the rows of an answered step into the claims of its stream.
    fn claim(&mut self, stream: u64, rows: &AnsweredRows, row_bytes: usize) {
        if let Some(stream) = self.streams.get_mut(&stream)
            && let Some(claims) = &mut stream.claims
        {
            claims.answered(rows, row_bytes);
            self.notary.certify(claims, &stream.handle.sink, false);
        }
    }

    /// Records computed rows: their number, their values, and the values of one. Returns the answer
    /// to the step, and its rows, if these were its last rows.
    fn complete(
        &mut self,
        stream: u64,
        (rows, x, row_values): (u32, &[f32], usize),
        took: Duration,
    ) -> Option<(Answer, AnsweredRows)> {
        let now = self.clock.now();
        let (boundary, width) = (self.served.boundary, self.served.rows.width);
        let stream = self.streams.get_mut(&stream)?;
        stream.served = self.turn;
        stream.active = now;
        let Some(Work::Step(job)) = stream.work.front_mut() else {
            return None;
        };
        job.compute += took;
        job.done += rows;
        let finished = job.done >= job.step.rows;
        let wanted = match job.step.want {
            Want::All => x,
            Want::Last if finished => x.rchunks(row_values).next().unwrap_or_default(),
            _ => &[],
        };
        if job.step.want == Want::All && job.out.capacity() == 0 {
            let row = width as usize * boundary.bytes_per_value();
            job.out.reserve_exact(job.step.rows as usize * row);
        }
        // Behind the layers, a row is its residual stream.
        for row in wanted.chunks_exact(row_values) {
            boundary.encode(row.get(..width as usize).unwrap_or(row), &mut job.out);
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
            width,
            ..step.answer(out.into())
        };
        // Before the caller can see the answer or the counters: its next step may need the ticket.
        handle.answered(now);
        drop(ticket);
        let rows = AnsweredRows {
            position: step.position,
            rows: answer.rows,
            returned: answer.data.clone(),
            received: step.data,
        };
        let given = (step.rows, handle.given_layers());
        self.events
            .answered(handle.caller.node, given, bytes, queued);
        let sink = Arc::clone(&handle.sink);
        Some(((sink, Message::StepResult(answer)), rows))
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Sends the answers of a batch, all of one session in one call.
fn send(mut answers: Vec<Answer>) {
    while let Some((sink, _)) = answers.first() {
        let sink = Arc::clone(sink);
        let of_session = |answer: &mut Answer| Arc::ptr_eq(&answer.0, &sink);
        let messages = answers
            .extract_if(.., of_session)
            .map(|(_, message)| message);
        sink.send_all(messages.collect());
    }
}
