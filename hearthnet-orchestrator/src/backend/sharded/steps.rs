//! Streams of a sequence opened, steps sent, results received, times measured.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::Descriptor;
use hearthnet_bus::flight::Event;
use hearthnet_bus::receipt::Statement;
use hearthnet_transport::{Message, Step, StepResult, Want};
use tokio::time::Instant;

use super::ShardedBackend;
use super::failure::{Cause, HopFailure};
use super::hop_timeout::{HopTimeout, Silence};
use super::stream::{Hop, Sent};
use crate::backend::events::{report_event, shard_latency};
use crate::backend::pipeline::{Chunk, Outcome};
use crate::error::ChatError;
use crate::hosts::RoutedSpan;
use crate::hosts::checks::{BoundaryCheck, CheckError};
use crate::hosts::receipts::{Ledger, StreamReceipts};
use crate::times::{HopClock, median};

/// Positions by which a stream grows beyond its request: a few KV pages. A larger step would be
/// refused by hosts that can hold no more than requested.
const GROWTH: u32 = 64;

impl ShardedBackend {
    pub(super) fn hop(&mut self, index: usize, span: RoutedSpan) -> Hop {
        let id = self.next_hop;
        self.next_hop += 1;
        let epoch = self.pipeline.epoch(index);
        let link = &span.link;
        let row_bytes = (
            self.model.bytes_before((span.lo, span.hi)),
            self.model.bytes_behind(),
        );
        let (stream, receipts) = link.register(id, epoch, self.inbox.clone(), |stream| {
            let statement = Statement {
                host: link.descriptor.host,
                caller: link.caller,
                weights: self.model.weights.0,
                layers: (span.lo, span.hi),
                arithmetic: link.descriptor.arithmetic.clone(),
                stream,
                epoch,
                claims: 0,
                chain: [0; 32],
            };
            link.has_receipts().then(|| {
                let ledger = Ledger::new(statement, row_bytes);
                Arc::new(StreamReceipts::new(ledger, self.health.clone()))
            })
        });
        let bands = self.model.bands.as_ref();
        let band = bands.and_then(|b| b.get(span.hi as usize)).copied();
        let shard_id = Descriptor::shard_id(&self.model.model_id, span.lo, span.hi);
        let width = self.model.rows.width as usize;
        let rows = (width, self.model.boundary, band);
        let layers = (self.model.weights, span.lo, span.hi);
        let host = span.link.descriptor.host;
        Hop {
            id,
            check: BoundaryCheck::new(rows, self.health.seen(), host, layers),
            receipts,
            has_failed: false,
            replaces: None,
            span,
            latency: shard_latency(shard_id.clone()),
            shard_id,
            stream,
            epoch,
            opened: false,
            fork: None,
            asked: self.positions,
            sent: VecDeque::new(),
            truncated_at: None,
            unsent: VecDeque::new(),
            progress: Instant::now(),
            hop_timeout: HopTimeout::default(),
            silence: Silence::default(),
            retry_search_at: None,
            notified: false,
            migrate_at: None,
            waits_for_capacity: self.running,
            clock: HopClock::default(),
        }
    }

    /// Opens the streams of some spans; an error of one does not stop the others.
    pub(super) fn open_streams(&mut self, spans: Range<usize>) {
        let hops = self.hops.iter_mut().take(spans.end).skip(spans.start);
        for hop in hops {
            report_event(Event::StreamAsked {
                pipeline: self.name,
                host: hop.node(),
                shard: hop.shard_id.as_str().into(),
                trace: hop.trace(),
            });
            #[cfg(feature = "testing")]
            if let Some(watch) = &self.settings.watch {
                let (layers, epoch) = ((hop.span.lo, hop.span.hi), hop.epoch);
                watch.tell(super::watch::Told::Asked { layers, epoch });
            }
            let asked = hop.ask(self.model.weights);
            self.hop_failures.extend(asked.err());
        }
    }

    /// Sends a step. Messages of a stream are ordered, so it need not wait for STREAM_OPENED.
    pub(super) fn step(
        &mut self,
        span: usize,
        epoch: u32,
        chunk: Chunk,
        want: Want,
    ) -> Result<(), HopFailure> {
        let Some(hop) = self.hops.get_mut(span) else {
            return Ok(());
        };
        let end = chunk.position.saturating_add(chunk.rows);
        if hop.asked < end {
            let more = end.saturating_add(GROWTH).min(self.model.context.max(end));
            self.positions = self.positions.max(more);
            hop.grow(self.model.weights, more)?;
        }
        let at = Instant::now();
        if hop.sent.is_empty() && hop.opened {
            hop.progressed(at);
        }
        if let Some(receipts) = hop.receipts.as_ref().filter(|_| want != Want::None) {
            receipts.look(Ledger::asked);
        }
        let layers = (hop.span.lo, hop.span.hi);
        let data = self.inputs.give(chunk.position, &chunk.data, layers);
        hop.sent.push_back(Sent {
            at,
            rows: chunk.rows,
            stream: chunk.data,
            data: data.clone(),
        });
        hop.send(Message::Step(Step {
            stream: hop.stream,
            epoch,
            position: chunk.position,
            rows: chunk.rows,
            width: self.model.rows.before((layers.0..=layers.1).count()) as u32,
            dtype: self.dtype,
            want,
            data,
        }))
    }

    /// Processes a result that arrived at `at`.
    pub(super) fn on_result(
        &mut self,
        index: usize,
        result: StepResult,
        at: Instant,
    ) -> Result<(), HopFailure> {
        let (epoch, position, rows) = (result.epoch, result.position, result.rows);
        let (width, data) = (result.width, result.data);
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        let sent = hop.sent.front().cloned().filter(|_| epoch == hop.epoch);
        if let Some(sent) = sent {
            // A host that returns only the last row of a chunk returns its position.
            let first = position.saturating_add(sent.rows.saturating_sub(rows));
            let checked = if rows == 0 && data.is_empty() {
                Ok(())
            } else if width != self.model.rows.width || result.dtype != self.dtype {
                Err(CheckError::Shape {
                    bytes: data.len(),
                    rows,
                    width: width as usize,
                })
            } else {
                hop.check.check(first, rows, &sent.stream, &data)
            };
            if let Err(error) = checked {
                metrics::counter!("distributed_inference_shard_corruption_detected_total")
                    .increment(1);
                return Err(hop.hop_failure(error.code(), Cause::Corrupt, |host| {
                    ChatError::PipelineStalled(format!(
                        "{host} returned implausible rows: {}: {error}",
                        error.code()
                    ))
                }));
            }
        }
        let returned = data.clone();
        match self.pipeline.on_result(index, epoch, position, rows, data) {
            Ok(outcome @ (Outcome::Accepted | Outcome::Replayed)) => {
                #[cfg(feature = "testing")]
                if let Some(watch) = &self.settings.watch {
                    watch.tell(super::watch::Told::Taken {
                        layers: (hop.span.lo, hop.span.hi),
                        epoch,
                        position,
                    });
                }
                if outcome == Outcome::Replayed {
                    hop.compare_replay(position, &returned);
                }
                if let (Some(receipts), Some(sent)) = (&hop.receipts, hop.sent.front()) {
                    receipts
                        .look(|ledger| ledger.answered(position, &sent.data, rows, &returned))
                        .map_err(|fault| hop.bad_receipt(fault))?;
                }
                if rows > 0 {
                    self.health.look(|all, now| all.claimed(&hop.node(), now));
                }
                self.note_time(index, result.compute_us, result.queue_us, at)
            }
            Ok(Outcome::Stale) => {
                report_event(Event::StaleAnswer {
                    pipeline: self.name,
                    host: hop.node(),
                });
                Ok(())
            }
            Err(fault) => Err(hop.violation(fault)),
        }
    }

    /// Records the time of an answered step and judges the host by it.
    fn note_time(
        &mut self,
        index: usize,
        compute_us: u32,
        queue_us: u32,
        at: Instant,
    ) -> Result<(), HopFailure> {
        let oldest = self.hops.get_mut(index);
        let Some(sent) = oldest.and_then(|hop| hop.sent.pop_front()) else {
            return Ok(());
        };
        let reference = self.reference(index, sent.rows);
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        let (now, before) = (Instant::now(), hop.progress);
        hop.progressed(now);
        // If the result arrived before this chat waited, use the arrival time: the delay was on
        // this side.
        let seen = if at < self.watching_since { at } else { now };
        if sent.rows > 1 {
            // The host computed the previous chunk until then.
            let began = sent.at.max(before);
            let took = seen.saturating_duration_since(began);
            let slow = hop.hop_timeout.record_piece(took, sent.rows, reference);
            return match slow && hop.may_move(now) {
                true => Err(hop.late()),
                false => Ok(()),
            };
        }
        let round_trip = seen.saturating_duration_since(sent.at);
        hop.clock.record(round_trip, compute_us, queue_us);
        hop.latency.record(round_trip);
        let layers = hop.span.hi - hop.span.lo + 1;
        let (host, shard) = (hop.node(), &hop.span.link.descriptor.shard_id);
        let weights = self.model.weights;
        let inside = u64::from(compute_us).saturating_add(u64::from(queue_us));
        let way = round_trip.saturating_sub(Duration::from_micros(inside));
        self.health.look(|all, now| {
            all.answered(&host, (shard, weights), layers, round_trip, now);
            all.travelled(&host, way, sent.data.len() as u64, now);
        });
        if hop.hop_timeout.record(round_trip, reference) && hop.may_move(now) {
            return Err(hop.late());
        }
        Ok(())
    }

    /// Expected time of a step of `rows` on a hop, from the time per layer of others: the other
    /// hops of this sequence; else recently measured hosts with the same weights; else this
    /// machine's own layers. `None` without any measurement.
    pub(super) fn reference(&self, index: usize, rows: u32) -> Option<Duration> {
        let layers = |hop: &Hop| hop.span.hi.saturating_sub(hop.span.lo) + 1;
        let hop = self.hops.get(index)?;
        let (own, host) = (layers(hop), hop.node());
        let others = self.hops.iter().enumerate().filter(|(i, _)| *i != index);
        let others_scaled =
            others.filter_map(|(_, hop)| Some(hop.hop_timeout.typical(rows)? * own / layers(hop)));
        let per_layer = || {
            let weights = self.model.weights;
            let measured = self
                .health
                .look(|all, now| all.reference_per_layer(&host, weights, now));
            measured.or(self.per_layer)
        };
        median(others_scaled).or_else(|| Some(per_layer()? * own * rows))
    }
}
