//! One span's stream on its host: what is sent, what comes back, how long it took.

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
use crate::checks::{BoundaryCheck, CheckError};
use crate::error::ChatError;
use crate::events::{shard_latency, tell};
use crate::hop_timeout::{ASK_AFTER, GONE_AFTER, HopTimeout, LOOK_EVERY, Silence};
use crate::hosts::RoutedSpan;
use crate::link::{EndCause, Ended};
use crate::pipeline::{Chunk, Outcome};
use crate::steps;
use crate::times::{HopClock, median};

/// The host has no room for another stream now, or for one of this caller.
const NO_ROOM: [Code; 5] = [
    Code::STREAM_LIMIT,
    Code::STREAM_QUOTA,
    Code::STREAM_CHURN,
    Code::KV_FULL,
    Code::KV_QUOTA,
];

/// Positions by which a stream grows beyond what was expected of it: some of a host's pages, and few,
/// for a host that could not hold more than it is asked for refuses.
const GROWTH: u32 = 64;

/// A step that a host has not answered yet.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) at: Instant,
    pub(super) rows: u32,
    /// The rows, which the answer must not be.
    data: Bytes,
}

/// One span's stream on its host.
pub(super) struct Hop {
    /// Tells this stream's messages from those of streams before it.
    pub(super) id: u64,
    pub(super) span: RoutedSpan,
    pub(super) stream: u32,
    pub(super) epoch: u32,
    pub(super) opened: bool,
    /// Positions that it was opened for.
    asked: u32,
    check: BoundaryCheck,
    pub(super) sent: VecDeque<Sent>,
    /// What there was no room for, in order: it is sent while the chat waits.
    pub(super) unsent: VecDeque<Message>,
    /// When it last answered, or was first asked after a pause.
    pub(super) progress: Instant,
    pub(super) hop_timeout: HopTimeout,
    /// For how long it has been silent, while it owes something.
    silence: Silence,
    /// Nobody else was found when it was late or silent: when to look again.
    pub(super) look_again: Option<Instant>,
    /// Whether the caller has been told that it is being waited for.
    told: bool,
    /// Its host leaves: when to look for another.
    pub(super) move_at: Option<Instant>,
    /// Its sequence has begun: where there is no room it comes back later.
    patient: bool,
    pub(super) clock: HopClock,
    /// Where its round trips are counted.
    latency: metrics::Histogram,
}

impl Hop {
    pub(super) fn node(&self) -> NodeId {
        self.span.link.descriptor.host
    }

    /// What its host computes with.
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

    /// Ends the stream: its host frees what belongs to it at once.
    pub(super) fn release(&self) {
        self.span.link.release(self.stream);
    }

    /// Something about this stream that needs another host.
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
            EndCause::Barred(code) => {
                return self.hop_failure(code, Cause::Barred, |host| {
                    ChatError::ShardUnavailable(format!(
                        "{host} may not compute for this node any more"
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

    /// Nothing can be sent to it any more.
    pub(super) fn unsendable(&self, error: &SendError) -> HopFailure {
        self.lost(&match error {
            SendError::Closed(closed) => Ended::of(closed),
            other => Ended {
                why: other.to_string(),
                cause: EndCause::Lost,
            },
        })
    }

    /// Sends at the next boundary, or as soon as there is room.
    fn send(&mut self, message: Message) -> Result<(), HopFailure> {
        let back = match self.unsent.is_empty() {
            true => steps::send(&self.span.link.sender, message),
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

    /// Tells the host that nothing is asked of the stream, all of which it holds, for now: it is the
    /// first to give way.
    pub(super) fn rest(&self, length: u32) {
        let truncate = Message::Truncate(Truncate {
            stream: self.stream,
            epoch: self.epoch,
            position: length,
        });
        // Where there is no room to say so, silence will.
        let _ = self.span.link.sender.try_send(truncate);
    }

    /// What a host's refusal, or the end of a stream by its host, means.
    pub(super) fn refused(&self, code: Code, message: &str) -> HopFailure {
        let cause = if code == Code::SHUTTING_DOWN {
            return self.leaving(false);
        } else if code == Code::PREEMPTED || code == Code::STEP_QUOTA {
            Cause::Room
        } else if self.opened || !NO_ROOM.contains(&code) {
            Cause::Failed
        } else if self.patient {
            Cause::Room
        } else {
            Cause::Full
        };
        let text = format!("{} refused with {code}: {message}", self.name());
        let error = if code == Code::WEIGHTS_MISMATCH {
            ChatError::WeightsMismatch(text)
        } else if code == Code::BOUNDARY_OVERFLOW {
            ChatError::BoundaryOverflow(text)
        } else if code == Code::CONTEXT_FULL {
            ChatError::BadRequest(text)
        } else if cause == Cause::Full {
            ChatError::HostsFull(text)
        } else {
            ChatError::ShardUnavailable(text)
        };
        self.hop_failure(code, cause, |_| error)
    }

    /// Until when this host is waited for, at least; `None` when it owes nothing. `reference` is what
    /// the oldest step that it owes takes others.
    ///
    /// # Errors
    /// Its time is up.
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
        if waited < ASK_AFTER {
            return Ok(Some(until.min(self.progress + ASK_AFTER)));
        }
        let sender = &self.span.link.sender;
        let silent = self.silence.look(now, sender.silent_for());
        if silent >= ASK_AFTER {
            sender.probe();
        }
        if limits.silence.is_some_and(|most| silent >= most) {
            return Err(self.gone(Cause::Failed));
        }
        if silent >= GONE_AFTER && may_move {
            return Err(self.gone(Cause::Silent));
        }
        Ok(Some(until.min(now + LOOK_EVERY)))
    }

    /// Whether looking for another host is due, should this one be late.
    fn may_move(&self, now: Instant) -> bool {
        self.look_again.is_none_or(|at| at <= now)
    }

    /// Something has come of what it owes.
    pub(super) fn progressed(&mut self, now: Instant) {
        self.progress = now;
        self.silence = Silence::default();
        self.told = false;
    }

    /// What to tell a caller who has been waiting for this host for long, once: its code.
    pub(super) fn waited_for(&mut self, now: Instant) -> Option<Code> {
        let rows = self.sent.front().map_or(0, |sent| sent.rows);
        let usual = self.hop_timeout.typical(rows).unwrap_or_default();
        let waited = now.saturating_duration_since(self.progress);
        if self.told || waited < TELL_AFTER.max(2 * usual) {
            return None;
        }
        self.told = true;
        Some(match self.span.link.sender.silent_for() < ASK_AFTER {
            true => Code::BUSY,
            false => Code::SILENT,
        })
    }
}

/// How long a host is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitLimits {
    /// That makes no progress.
    pub(super) health_timeout: Duration,
    /// That is silent altogether; `None`: no less.
    pub(super) silence: Option<Duration>,
}

/// Waiting that is worth a word.
const TELL_AFTER: Duration = Duration::from_millis(1500);

impl ShardedBackend {
    /// A stream that is not open yet.
    pub(super) fn hop(&mut self, index: usize, span: RoutedSpan) -> Hop {
        let id = self.next_hop;
        self.next_hop += 1;
        let epoch = self.pipeline.epoch(index);
        let stream = span.link.register(id, epoch, self.inbox.clone());
        let bands = self.model.bands.as_ref();
        let band = bands.and_then(|b| b.get(span.hi as usize)).copied();
        // Of this side's own model, so that what a host calls itself counts nothing.
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
            look_again: None,
            told: false,
            move_at: None,
            patient: self.running,
            clock: HopClock::default(),
            latency: shard_latency(shard_id),
        }
    }

    /// Asks for the streams of some spans; all of them, whatever becomes of one.
    pub(super) fn open_streams(&mut self, spans: Range<usize>) {
        for index in spans {
            let Some(hop) = self.hops.get(index) else {
                return;
            };
            tell(Event::StreamAsked {
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

    /// Asks for a span's stream, or that it may hold as much as it should.
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

    /// Asks for more positions, where a stream was opened for fewer. It is not waited for: what
    /// follows ends with the stream if it is refused.
    pub(super) fn grow(&mut self, span: usize, positions: u32) -> Result<(), HopFailure> {
        match self.hops.get_mut(span) {
            Some(hop) if hop.asked < positions => hop.asked = positions,
            _ => return Ok(()),
        }
        self.ask(span)
    }

    /// Sends a step; the streams' order makes waiting for STREAM_OPENED unnecessary.
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

    /// Takes an answer, which came `at` a time.
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
            // A host that returns only the last row of a piece returns its last position.
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
                        "{host} returned numbers that cannot be right: {}: {error}",
                        error.code()
                    ))
                }));
            }
        }
        match self.pipeline.on_result(index, epoch, position, rows, data) {
            Ok(Outcome::Accepted) => self.note_time(index, compute_us, queue_us, at),
            Ok(Outcome::Stale) => {
                tell(Event::StaleAnswer {
                    pipeline: self.name,
                    host: hop.node(),
                });
                Ok(())
            }
            Err(fault) => {
                // Another chat on the same session may wait for what this one was told.
                hop.span.link.closer().close(CloseCode::ProtocolState);
                let code = CloseCode::ProtocolState.into();
                Err(hop.hop_failure(code, Cause::Failed, |host| {
                    ChatError::ShardUnavailable(format!("{host}: {fault}"))
                }))
            }
        }
    }

    /// Measures an answered step, and the host by it.
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
        // What came while the chat did something else did not take until it looked.
        let seen = if at < self.watching_since { at } else { now };
        if sent.rows > 1 {
            // It was at the piece before this one until then.
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

    /// What a step of `rows` would take on a hop if it were as fast as others, layer for layer: those
    /// of this sequence; or else, with the same weights, those that were measured of late in any
    /// call; or else this machine's own layers. `None` while nobody has shown anything.
    pub(super) fn reference(&self, index: usize, rows: u32) -> Option<Duration> {
        let layers = |hop: &Hop| hop.span.hi.saturating_sub(hop.span.lo) + 1;
        let hop = self.hops.get(index)?;
        let (own, host) = (layers(hop), hop.node());
        let others = self.hops.iter().enumerate().filter(|(i, _)| *i != index);
        let beside =
            others.filter_map(|(_, hop)| Some(hop.hop_timeout.typical(rows)? * own / layers(hop)));
        let per_layer = || {
            let weights = self.model.weights;
            let measured = self.health.look(|all, now| all.beside(&host, weights, now));
            measured.or(self.per_layer)
        };
        median(beside).or_else(|| Some(per_layer()? * own * rows))
    }
}
