//! A span's stream on its host: steps sent, results received, times measured.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearthnet_bus::Descriptor;
use hearthnet_bus::NodeId;
use hearthnet_bus::flight::Event;
use hearthnet_transport::{
    CloseCode, Code, Message, SendError, Step, StepResult, StreamOpen, Truncate, Want,
};

use super::ShardedBackend;
use super::failure::{Cause, HopFailure};
use crate::chat_loop;
use crate::checks::{BoundaryCheck, CheckError};
use crate::error::ChatError;
use crate::events::{report_event, shard_latency};
use crate::hop_timeout::{CHECK_INTERVAL, HopTimeout, OFFLINE_AFTER, PROBE_AFTER, Silence};
use crate::hosts::RoutedSpan;
use crate::link::{EndCause, Ended};
use crate::pipeline::{Chunk, Outcome};
use crate::times::{HopClock, median};

/// Codes of a host without room for another stream, or for another one of this caller.
const NO_ROOM: [Code; 5] = [
    Code::STREAM_LIMIT,
    Code::STREAM_QUOTA,
    Code::STREAM_CHURN,
    Code::KV_FULL,
    Code::KV_QUOTA,
];

/// Positions by which a stream grows beyond its request: a few KV pages. A larger step would be
/// refused by hosts that can hold no more than requested.
const GROWTH: u32 = 64;

/// A step that a host has not answered yet.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) at: Instant,
    pub(super) rows: u32,
    /// The rows sent; an answer equal to them is rejected (`CheckError::Unchanged`).
    data: Bytes,
}

/// Stream of a span on its host.
pub(super) struct Hop {
    /// Distinguishes this stream's messages from those of earlier streams.
    pub(super) id: u64,
    pub(super) span: RoutedSpan,
    pub(super) stream: u32,
    pub(super) epoch: u32,
    pub(super) opened: bool,
    /// Positions requested for the stream.
    asked: u32,
    check: BoundaryCheck,
    pub(super) sent: VecDeque<Sent>,
    /// Messages for which the send queue had no room, in order; sent while the chat waits.
    pub(super) unsent: VecDeque<Message>,
    /// When the host last answered, or got its first step after a pause.
    pub(super) progress: Instant,
    pub(super) hop_timeout: HopTimeout,
    /// Duration of its silence while a step is pending.
    silence: Silence,
    /// Time of the next search, after no replacement was found for a late or silent host.
    pub(super) retry_search_at: Option<Instant>,
    /// True once the caller was notified of the wait.
    notified: bool,
    /// The host is leaving: time of the next search for a replacement.
    pub(super) migrate_at: Option<Instant>,
    /// True for a running sequence: if the host has no room, it is asked again later.
    waits_for_capacity: bool,
    pub(super) clock: HopClock,
    /// Histogram of its round trips.
    latency: metrics::Histogram,
}

impl Hop {
    pub(super) fn node(&self) -> NodeId {
        self.span.link.descriptor.host
    }

    pub(super) fn arithmetic(&self) -> &String {
        &self.span.link.descriptor.arithmetic
    }

    fn name(&self) -> String {
        let addr = &self.span.link.addr;
        let (lo, hi) = (self.span.lo, self.span.hi);
        format!(
            "{} ({}, layers {lo}-{hi})",
            addr.endpoint,
            addr.node.short()
        )
    }

    /// Closes the stream, so that the host frees its memory at once.
    pub(super) fn release(&self) {
        self.span.link.release(self.stream);
    }

    pub(super) fn hop_failure(
        &self,
        code: Code,
        cause: Cause,
        error: impl FnOnce(String) -> ChatError,
    ) -> HopFailure {
        HopFailure {
            hop: self.id,
            code,
            error: error(self.name()),
            cause,
        }
    }

    pub(super) fn lost(&self, ended: &Ended) -> HopFailure {
        let Ended { why, cause } = ended;
        let (code, cause, what) = match cause.clone() {
            EndCause::Unauthorized(code) => {
                return self.hop_failure(code, Cause::Unauthorized, |host| {
                    ChatError::ShardUnavailable(format!(
                        "{host} is not authorised to compute for this node any more"
                    ))
                });
            }
            EndCause::Lost => (Code::CONNECTION_LOST, Cause::Lost, "lost"),
            EndCause::Refused(code) => (code, Cause::Failed, "lost"),
            EndCause::Broken(code) => (code, Cause::Failed, "left"),
        };
        self.hop_failure(code, cause, |host| {
            ChatError::ShardUnavailable(format!("{what} {host}: {why}"))
        })
    }

    /// Failure after a send error.
    pub(super) fn unsendable(&self, error: &SendError) -> HopFailure {
        self.lost(&match error {
            SendError::Closed(closed) => Ended::of(closed),
            other => Ended {
                why: other.to_string(),
                cause: EndCause::Lost,
            },
        })
    }

    /// Queues a message for the next boundary, or for when the send queue has room.
    fn send(&mut self, message: Message) -> Result<(), HopFailure> {
        let back = match self.unsent.is_empty() {
            true => chat_loop::send(&self.span.link.sender, message),
            false => Ok(Some(message)),
        };
        self.unsent
            .extend(back.map_err(|error| self.unsendable(&error))?);
        Ok(())
    }

    pub(super) fn late(&self) -> HopFailure {
        self.hop_failure(Code::DEGRADED, Cause::Late, |host| {
            ChatError::PipelineStalled(format!("{host} is much slower than it should be"))
        })
    }

    pub(super) fn gone(&self, cause: Cause) -> HopFailure {
        self.hop_failure(Code::SILENT, cause, |host| {
            ChatError::PipelineStalled(format!("{host} has fallen silent"))
        })
    }

    pub(super) fn leaving(&self, open: bool) -> HopFailure {
        self.hop_failure(Code::LEAVING, Cause::Leaving { open }, |host| {
            ChatError::ShardUnavailable(format!("{host} is about to stop"))
        })
    }

    /// Tells the host that the stream is idle at `length` positions, so that it is preempted first.
    pub(super) fn rest(&self, length: u32) {
        let truncate = Message::Truncate(Truncate {
            stream: self.stream,
            epoch: self.epoch,
            position: length,
        });
        // If the queue is full, the host infers it from the silence.
        let _ = self.span.link.sender.try_send(truncate);
    }

    /// Classifies a host's refusal, or the end of a stream by its host.
    pub(super) fn refused(&self, code: Code, message: &str) -> HopFailure {
        let cause = if code == Code::SHUTTING_DOWN {
            return self.leaving(false);
        } else if code == Code::PREEMPTED || code == Code::STEP_QUOTA {
            Cause::Preempted
        } else if self.opened || !NO_ROOM.contains(&code) {
            Cause::Failed
        } else if self.waits_for_capacity {
            Cause::Preempted
        } else {
            Cause::NoCapacity
        };
        let text = format!("{} refused with {code}: {message}", self.name());
        let error = if code == Code::WEIGHTS_MISMATCH {
            ChatError::WeightsMismatch(text)
        } else if code == Code::BOUNDARY_OVERFLOW {
            ChatError::BoundaryOverflow(text)
        } else if code == Code::CONTEXT_FULL {
            ChatError::BadRequest(text)
        } else if cause == Cause::NoCapacity {
            ChatError::HostsFull(text)
        } else {
            ChatError::ShardUnavailable(text)
        };
        self.hop_failure(code, cause, |_| error)
    }

    /// Returns the time until which this host is waited for; `None` if no step is pending.
    /// `reference` is the time that other hosts need for the oldest pending step.
    ///
    /// # Errors
    /// The failure, if the host has timed out.
    pub(super) fn waits_until(
        &mut self,
        now: Instant,
        limits: WaitLimits,
        reference: Option<Duration>,
    ) -> Result<Option<Instant>, HopFailure> {
        let health_timeout = limits.health_timeout;
        let oldest = self.sent.front().filter(|_| self.opened);
        let oldest = oldest.map(|sent| (sent.at, sent.rows));
        if oldest.is_none() && self.opened {
            return Ok(None);
        }
        let waited = now.saturating_duration_since(self.progress);
        if waited >= health_timeout {
            let seconds = health_timeout.as_secs_f32();
            let code = Code::PIPELINE_STALLED;
            return Err(self.hop_failure(code, Cause::Failed, |host| {
                ChatError::PipelineStalled(format!(
                    "no progress for {seconds} s: waiting for {host}"
                ))
            }));
        }
        let mut until = self.progress + health_timeout;
        let may_move = self.may_move(now);
        if let Some((at, rows)) = oldest
            && may_move
            && let Some(after) = self.hop_timeout.overdue_after(rows, reference)
        {
            let overdue = at.max(self.progress) + after;
            if overdue <= now {
                self.hop_timeout.overdue(waited, rows);
                return Err(self.late());
            }
            until = until.min(overdue);
        }
        if waited < PROBE_AFTER {
            return Ok(Some(until.min(self.progress + PROBE_AFTER)));
        }
        let sender = &self.span.link.sender;
        let silent = self.silence.look(now, sender.silent_for());
        if silent >= PROBE_AFTER {
            sender.probe();
        }
        if limits.silence.is_some_and(|most| silent >= most) {
            return Err(self.gone(Cause::Failed));
        }
        if silent >= OFFLINE_AFTER && may_move {
            return Err(self.gone(Cause::Silent));
        }
        Ok(Some(until.min(now + CHECK_INTERVAL)))
    }

    /// Returns true if a search for a replacement is due, should this host be late.
    fn may_move(&self, now: Instant) -> bool {
        self.retry_search_at.is_none_or(|at| at <= now)
    }

    /// Records progress on a pending step.
    pub(super) fn progressed(&mut self, now: Instant) {
        self.progress = now;
        self.silence = Silence::default();
        self.notified = false;
    }

    /// Returns the status code for the caller after a long wait for this host, once per wait.
    pub(super) fn waited_for(&mut self, now: Instant) -> Option<Code> {
        let rows = self.sent.front().map_or(0, |sent| sent.rows);
        let usual = self.hop_timeout.typical(rows).unwrap_or_default();
        let waited = now.saturating_duration_since(self.progress);
        if self.notified || waited < NOTIFY_AFTER.max(2 * usual) {
            return None;
        }
        self.notified = true;
        Some(match self.span.link.sender.silent_for() < PROBE_AFTER {
            true => Code::BUSY,
            false => Code::SILENT,
        })
    }
}

/// Timeouts of a host.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitLimits {
    /// Limit without progress.
    pub(super) health_timeout: Duration,
    /// Limit of complete silence; `None`: only the health timeout applies.
    pub(super) silence: Option<Duration>,
}

/// Wait after which the caller is notified.
const NOTIFY_AFTER: Duration = Duration::from_millis(1500);

impl ShardedBackend {
    pub(super) fn hop(&mut self, index: usize, span: RoutedSpan) -> Hop {
        let id = self.next_hop;
        self.next_hop += 1;
        let epoch = self.pipeline.epoch(index);
        let stream = span.link.register(id, epoch, self.inbox.clone());
        let bands = self.model.bands.as_ref();
        let band = bands.and_then(|b| b.get(span.hi as usize)).copied();
        // Uses this side's model id, so that a host cannot choose the label.
        let shard_id = Descriptor::shard_id(&self.model.model_id, span.lo, span.hi);
        let rows = (self.model.width, self.model.boundary, band);
        let layers = (self.model.weights, span.lo, span.hi);
        let host = span.link.descriptor.host;
        Hop {
            id,
            check: BoundaryCheck::new(rows, self.health.seen(), host, layers),
            span,
            stream,
            epoch,
            opened: false,
            asked: self.positions,
            sent: VecDeque::new(),
            unsent: VecDeque::new(),
            progress: Instant::now(),
            hop_timeout: HopTimeout::default(),
            silence: Silence::default(),
            retry_search_at: None,
            notified: false,
            migrate_at: None,
            waits_for_capacity: self.running,
            clock: HopClock::default(),
            latency: shard_latency(shard_id),
        }
    }

    /// Opens the streams of some spans; an error of one does not stop the others.
    pub(super) fn open_streams(&mut self, spans: Range<usize>) {
        for index in spans {
            let Some(hop) = self.hops.get(index) else {
                return;
            };
            report_event(Event::StreamAsked {
                pipeline: self.name,
                host: hop.node(),
                shard: self.shard_id(hop).as_str().into(),
                session: hop.span.link.session,
                stream: hop.stream,
                epoch: hop.epoch,
            });
            let asked = self.ask(index);
            self.hop_failures.extend(asked.err());
        }
    }

    /// Requests a span's stream, or more positions for an open one.
    fn ask(&mut self, index: usize) -> Result<(), HopFailure> {
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        hop.send(Message::StreamOpen(StreamOpen {
            stream: hop.stream,
            epoch: hop.epoch,
            weights: self.model.weights.0,
            lo: hop.span.lo,
            hi: hop.span.hi,
            max_positions: hop.asked,
        }))
    }

    /// Requests more positions for a stream. It does not wait: if the host refuses, the stream
    /// ends.
    pub(super) fn grow(&mut self, span: usize, positions: u32) -> Result<(), HopFailure> {
        match self.hops.get_mut(span) {
            Some(hop) if hop.asked < positions => hop.asked = positions,
            _ => return Ok(()),
        }
        self.ask(span)
    }

    /// Sends a step. Messages of a stream are ordered, so it need not wait for STREAM_OPENED.
    pub(super) fn step(
        &mut self,
        span: usize,
        epoch: u32,
        chunk: Chunk,
        want: Want,
    ) -> Result<(), HopFailure> {
        let end = chunk.position.saturating_add(chunk.rows);
        if self.hops.get(span).is_some_and(|hop| hop.asked < end) {
            let more = end.saturating_add(GROWTH).min(self.model.context.max(end));
            self.positions = self.positions.max(more);
            self.grow(span, more)?;
        }
        let Some(hop) = self.hops.get_mut(span) else {
            return Ok(());
        };
        let at = Instant::now();
        if hop.sent.is_empty() && hop.opened {
            hop.progressed(at);
        }
        hop.sent.push_back(Sent {
            at,
            rows: chunk.rows,
            data: chunk.data.clone(),
        });
        hop.send(Message::Step(Step {
            stream: hop.stream,
            epoch,
            position: chunk.position,
            rows: chunk.rows,
            width: self.model.width as u32,
            dtype: self.dtype,
            want,
            data: chunk.data,
        }))
    }

    /// Processes a result that arrived at `at`.
    pub(super) fn on_result(
        &mut self,
        index: usize,
        result: StepResult,
        at: Instant,
    ) -> Result<(), HopFailure> {
        let StepResult {
            epoch,
            position,
            rows,
            width,
            dtype,
            compute_us,
            queue_us,
            data,
            ..
        } = result;
        let width_is_right = width as usize == self.model.width;
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        let sent = hop.sent.front().cloned().filter(|_| epoch == hop.epoch);
        if let Some(sent) = sent {
            // A host that returns only the last row of a chunk returns its position.
            let first = position.saturating_add(sent.rows.saturating_sub(rows));
            let checked = if rows == 0 && data.is_empty() {
                Ok(())
            } else if !width_is_right || dtype != self.dtype {
                Err(CheckError::Shape {
                    bytes: data.len(),
                    rows,
                    width: width as usize,
                })
            } else {
                hop.check.check(first, rows, &sent.data, &data)
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
        match self.pipeline.on_result(index, epoch, position, rows, data) {
            Ok(Outcome::Accepted) => self.note_time(index, compute_us, queue_us, at),
            Ok(Outcome::Stale) => {
                report_event(Event::StaleAnswer {
                    pipeline: self.name,
                    host: hop.node(),
                });
                Ok(())
            }
            Err(fault) => {
                // The result may belong to another chat on this session, which would wait for it in
                // vain.
                hop.span.link.closer().close(CloseCode::ProtocolState);
                let code = CloseCode::ProtocolState.into();
                Err(hop.hop_failure(code, Cause::Failed, |host| {
                    ChatError::ShardUnavailable(format!("{host}: {fault}"))
                }))
            }
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
        hop.latency.record(round_trip.as_secs_f64() * 1e3);
        let layers = hop.span.hi - hop.span.lo + 1;
        let (host, shard) = (hop.node(), &hop.span.link.descriptor.shard_id);
        let weights = self.model.weights;
        self.health
            .look(|all, now| all.answered(&host, (shard, weights), layers, round_trip, now));
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
