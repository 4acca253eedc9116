//! One span's stream on its host: what is sent, what comes back, how long it took.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearthnet_bus::Descriptor;
use hearthnet_model::BoundaryDtype;
use hearthnet_transport::{DType, Message, Step, StepResult, StreamOpen, Want};

use super::ShardedBackend;
use crate::backend::HopClock;
use crate::checks::{BoundaryCheck, CheckError};
use crate::error::ChatError;
use crate::hosts::RoutedSpan;
use crate::labels;
use crate::pace::Pace;
use crate::pipeline::{Chunk, Outcome, Rows};

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
    check: BoundaryCheck,
    pub(super) sent: VecDeque<Sent>,
    /// When it last answered, or was first asked after a pause.
    pub(super) progress: Instant,
    pub(super) pace: Pace,
    /// No other host was found when this one was overdue: it has until the health timeout.
    pub(super) indulged: bool,
    pub(super) clock: HopClock,
    /// Where its round trips are counted.
    latency: metrics::Histogram,
}

impl Hop {
    pub(super) fn node(&self) -> &str {
        &self.span.link.descriptor().host
    }

    fn name(&self) -> String {
        let addr = self.span.link.addr();
        let (lo, hi) = (self.span.lo, self.span.hi);
        format!(
            "{} ({}, layers {lo}-{hi})",
            addr.endpoint,
            addr.node.short()
        )
    }

    /// When waiting for this host ends, and whether that is for good.
    pub(super) fn deadline(&self, health_timeout: Duration) -> Option<(Instant, bool)> {
        let oldest = match self.sent.front() {
            Some(sent) => sent,
            None if self.opened => return None,
            None => return Some((self.progress + health_timeout, true)),
        };
        let stalled = (self.progress + health_timeout, true);
        if self.indulged || oldest.rows > 1 || !self.opened {
            return Some(stalled);
        }
        let overdue = self
            .pace
            .overdue_after()
            .map(|after| (oldest.at + after, false));
        Some(overdue.map_or(stalled, |overdue| overdue.min(stalled)))
    }
}

/// Why a span needs another host.
pub(super) struct Trouble {
    pub(super) span: usize,
    pub(super) code: String,
    pub(super) error: ChatError,
    /// A host that does its work, only late, is kept when nobody else has its layers.
    pub(super) may_stay: bool,
}

impl ShardedBackend {
    /// A stream that is not open yet.
    pub(super) fn hop(&mut self, index: usize, span: RoutedSpan) -> Hop {
        let id = self.next_hop;
        self.next_hop += 1;
        let stream = span.link.register(id, self.inbox.clone());
        let bands = self.model.bands.as_ref();
        let band = bands.and_then(|b| b.get(span.hi as usize)).copied();
        // Of this side's own model, so that what a host calls itself counts nothing.
        let shard_id = Descriptor::shard_id(&self.model.model_id, span.lo, span.hi);
        let latency = metrics::histogram!(
            "distributed_inference_shard_latency_ms",
            "shard_id" => labels::shard(shard_id)
        );
        Hop {
            id,
            check: BoundaryCheck::new(self.model.width, self.model.boundary, band),
            span,
            stream,
            epoch: self.pipeline.epoch(index),
            opened: false,
            sent: VecDeque::new(),
            progress: Instant::now(),
            pace: Pace::default(),
            indulged: false,
            clock: HopClock::default(),
            latency,
        }
    }

    pub(super) fn open_stream(&self, index: usize) -> Result<(), Trouble> {
        let Some(hop) = self.hops.get(index) else {
            return Ok(());
        };
        let open = StreamOpen {
            stream: hop.stream,
            epoch: hop.epoch,
            weights: self.model.weights.0,
            lo: hop.span.lo,
            hi: hop.span.hi,
            max_positions: self.model.context,
        };
        self.send(index, Message::StreamOpen(open))
    }

    fn send(&self, index: usize, message: Message) -> Result<(), Trouble> {
        let Some(hop) = self.hops.get(index) else {
            return Ok(());
        };
        let sent = self.runtime.block_on(hop.span.link.sender().send(message));
        sent.map_err(|closed| self.lost(index, &closed.to_string()))
    }

    pub(super) fn trouble(
        &self,
        span: usize,
        code: &str,
        error: impl FnOnce(String) -> ChatError,
    ) -> Trouble {
        let name = self.hops.get(span).map_or_else(String::new, Hop::name);
        Trouble {
            span,
            code: code.to_owned(),
            error: error(name),
            may_stay: false,
        }
    }

    pub(super) fn lost(&self, span: usize, why: &str) -> Trouble {
        self.trouble(span, "connection_lost", |host| {
            ChatError::ShardUnavailable(format!("lost {host}: {why}"))
        })
    }

    pub(super) fn release(&self, hop: &Hop) {
        let (link, stream, epoch) = (Arc::clone(&hop.span.link), hop.stream, hop.epoch);
        self.runtime
            .spawn(async move { link.release(stream, epoch).await });
    }

    /// Sends a step; the streams' order makes waiting for STREAM_OPENED unnecessary.
    pub(super) fn step(
        &mut self,
        span: usize,
        epoch: u32,
        chunk: Chunk,
        want: Rows,
    ) -> Result<(), Trouble> {
        let Some(hop) = self.hops.get_mut(span) else {
            return Ok(());
        };
        let at = Instant::now();
        if hop.sent.is_empty() && hop.opened {
            hop.progress = at;
        }
        hop.sent.push_back(Sent {
            at,
            rows: chunk.rows,
            data: chunk.data.clone(),
        });
        let step = Step {
            stream: hop.stream,
            epoch,
            position: chunk.position,
            rows: chunk.rows,
            width: self.model.width as u32,
            dtype: wire_dtype(self.model.boundary),
            want: match want {
                Rows::None => Want::None,
                Rows::Last => Want::Last,
                Rows::All => Want::All,
            },
            data: chunk.data,
        };
        self.send(span, Message::Step(step))
    }

    pub(super) fn on_result(&mut self, index: usize, result: StepResult) -> Result<(), Trouble> {
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
        let wire = wire_dtype(self.model.boundary);
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
            } else if !width_is_right || dtype != wire {
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
                return Err(self.trouble(index, error.code(), |host| {
                    ChatError::PipelineStalled(format!(
                        "{host} returned numbers that cannot be right: {}: {error}",
                        error.code()
                    ))
                }));
            }
        }
        let outcome = self.pipeline.on_result(index, epoch, position, rows, data);
        match outcome {
            Ok(Outcome::Accepted) => self.note_time(index, compute_us, queue_us),
            Ok(Outcome::Stale) => {
                metrics::counter!("distributed_inference_stale_answers_total").increment(1);
                Ok(())
            }
            Err(fault) => Err(self.trouble(index, "protocol_state", |host| {
                ChatError::ShardUnavailable(format!("{host}: {fault}"))
            })),
        }
    }

    /// Measures an answered step, and the host by it.
    fn note_time(&mut self, index: usize, compute_us: u32, queue_us: u32) -> Result<(), Trouble> {
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        hop.progress = Instant::now();
        hop.indulged = false;
        let Some(sent) = hop.sent.pop_front() else {
            return Ok(());
        };
        if sent.rows > 1 {
            return Ok(());
        }
        let round_trip = sent.at.elapsed();
        hop.clock.record(round_trip, compute_us, queue_us);
        hop.latency.record(round_trip.as_secs_f64() * 1e3);
        if hop.pace.record(round_trip) {
            let mut trouble = self.trouble(index, "degraded", |host| {
                ChatError::PipelineStalled(format!("{host} is much slower than it was"))
            });
            trouble.may_stay = true;
            return Err(trouble);
        }
        Ok(())
    }
}

fn wire_dtype(boundary: BoundaryDtype) -> DType {
    match boundary {
        BoundaryDtype::F16 => DType::F16,
        BoundaryDtype::Bf16 => DType::Bf16,
        BoundaryDtype::F32 => DType::F32,
    }
}
