//! The layers on hosts: a route turned into streams, rows pumped through them, and
//! hosts that fail replaced while the answer goes on.
//!
//! What is in flight, what is replayed and what an answer means is decided by
//! [`Pipeline`], which is pure; here are the streams, the clocks and the waiting.
//! A failure is whatever makes a host's part of the answer not come: a lost
//! connection, an error reply, numbers that cannot be right, silence, slowness
//! ([`Pace`]). Its host is not asked again in this call; other hosts take over its
//! layers, and its boundary's history is replayed to them.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearthnet_bus::Descriptor;
use hearthnet_model::catalogue::Band;
use hearthnet_model::{BoundaryDtype, ModelSpec, WeightsId};
use hearthnet_transport::{DType, Message, Step, StepResult, StreamOpen, Want};
use tokio::runtime::Handle;

use crate::Cancel;
use crate::backend::{Backend, HopClock, HopTimes, Notice, RouteHop, Run};
use crate::checks::{BoundaryCheck, CheckError};
use crate::error::ChatError;
use crate::hosts::{HostSource, RoutedSpan};
use crate::link::Inbound;
use crate::pace::Pace;
use crate::pipeline::{Action, Limits, Outcome, Pipeline, Rows};

/// How often a waiting chat looks whether its caller gave up.
const CANCEL_POLL: Duration = Duration::from_millis(50);

/// How long before an answer is due its chat is awake. A timer may be late by half of it.
const AWAKE_BEFORE: Duration = Duration::from_micros(150);
/// How long after that the chat goes to sleep again.
const AWAKE_AFTER: Duration = Duration::from_micros(100);
/// Whether a chat of this process is awake for an answer.
static ON_WATCH: AtomicBool = AtomicBool::new(false);

/// How a sequence is pumped.
#[derive(Debug, Clone)]
pub struct PumpSettings {
    /// Rows of prompt per step: small enough to overlap across hosts, large
    /// enough to keep the kernels busy.
    pub prefill_rows: usize,
    /// Steps in flight per host: two keep the next piece waiting when one is done.
    pub depth: usize,
    /// A host that owes an answer for longer than this has stalled.
    pub health_timeout: Duration,
    /// Most bytes of rows kept to rebuild a failed host's part.
    pub history_bytes: usize,
    /// Failures in one call after which no more hosts are tried; `None`: as long as there are any.
    pub give_up_after: Option<u32>,
}

impl Default for PumpSettings {
    fn default() -> Self {
        Self {
            prefill_rows: 64,
            depth: 2,
            health_timeout: Duration::from_secs(30),
            history_bytes: 256 << 20,
            give_up_after: None,
        }
    }
}

/// A model as its hosts must hold it.
#[derive(Debug, Clone)]
pub struct ModelOnWire {
    /// Catalogue id or file stem.
    pub model_id: String,
    /// Identity of the weights.
    pub weights: WeightsId,
    /// Values per row.
    pub width: usize,
    /// Layers of the whole model.
    pub layers: u32,
    /// Longest sequence.
    pub context: u32,
    /// Data type of the rows.
    pub boundary: BoundaryDtype,
    /// Bands of the rows' magnitude, one per layer's output, where the catalogue has them.
    pub bands: Option<Vec<Band>>,
}

impl ModelOnWire {
    /// The wire's view of a model.
    pub fn new(
        model_id: &str,
        weights: WeightsId,
        spec: &ModelSpec,
        bands: Option<Vec<Band>>,
    ) -> Self {
        Self {
            model_id: model_id.to_owned(),
            weights,
            width: spec.width as usize,
            layers: spec.layers,
            context: spec.context,
            boundary: spec.boundary,
            bands,
        }
    }
}

/// A step that a host has not answered yet.
#[derive(Debug, Clone)]
struct Sent {
    at: Instant,
    rows: u32,
    /// The rows, which the answer must not be.
    data: Bytes,
}

/// One span's stream on its host.
struct Hop {
    /// Tells this stream's messages from those of streams before it.
    id: u64,
    span: RoutedSpan,
    stream: u32,
    epoch: u32,
    opened: bool,
    check: BoundaryCheck,
    sent: VecDeque<Sent>,
    /// When it last answered, or was first asked after a pause.
    progress: Instant,
    pace: Pace,
    /// No other host was found when this one was overdue: it has until the health timeout.
    indulged: bool,
    clock: HopClock,
}

impl Hop {
    fn node(&self) -> &str {
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
    fn deadline(&self, health_timeout: Duration) -> Option<(Instant, bool)> {
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
struct Trouble {
    span: usize,
    code: String,
    error: ChatError,
    /// A host that does its work, only late, is kept when nobody else has its layers.
    may_stay: bool,
}

/// Why waiting ended without a message.
enum Interrupted {
    Cancelled,
    Trouble(Trouble),
}

/// A replaced host, until the answer goes on.
struct Recovery {
    shard_id: String,
    host: String,
    code: String,
    replacements: Vec<String>,
    replayed: u32,
    since: Instant,
}

/// A sequence whose blocks run on hosts. Dropping it closes its streams.
pub struct ShardedBackend {
    runtime: Handle,
    source: Box<dyn HostSource>,
    model: ModelOnWire,
    settings: PumpSettings,
    hops: Vec<Hop>,
    next_hop: u64,
    inbox: mpsc::Sender<(u64, Inbound)>,
    inbound: mpsc::Receiver<(u64, Inbound)>,
    pipeline: Pipeline,
    /// Node ids that have failed in this call.
    excluded: BTreeSet<String>,
    failures: u32,
    recoveries: Vec<Recovery>,
}

impl ShardedBackend {
    /// Routes over the source's hosts and opens a stream on every one chosen. Blocks
    /// until all are open; a host that has no room is passed over for another.
    ///
    /// # Errors
    /// [`ChatError`] naming the host that refused, or was too slow, when no other has its layers.
    pub fn open(
        runtime: Handle,
        model: ModelOnWire,
        mut source: Box<dyn HostSource>,
        settings: PumpSettings,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let (inbox, inbound) = mpsc::channel();
        let excluded = BTreeSet::new();
        let route = source.route(0..=model.layers.saturating_sub(1), &excluded)?;
        let limits = Limits {
            depth: settings.depth,
            chunk_rows: settings.prefill_rows,
            history_bytes: settings.history_bytes,
        };
        let row_bytes = model.width * model.boundary.bytes_per_value();
        let pipeline = Pipeline::new(route.len(), row_bytes, limits);
        let mut this = Self {
            runtime,
            source,
            model,
            settings,
            hops: Vec::new(),
            next_hop: 0,
            inbox,
            inbound,
            pipeline,
            excluded,
            failures: 0,
            recoveries: Vec::new(),
        };
        for (index, span) in route.into_iter().enumerate() {
            let hop = this.hop(index, span);
            this.hops.push(hop);
        }
        let mut run = Run {
            cancel,
            notify: &mut |_| {},
        };
        for index in 0..this.hops.len() {
            if let Err(trouble) = this.open_stream(index) {
                this.recover(trouble, &mut run)?;
            }
        }
        while this.hops.iter().any(|hop| !hop.opened) {
            this.wait(&mut run)?;
        }
        // Who was full or gone at the start has not failed this call.
        this.begin_call();
        Ok(this)
    }

    /// Length of the sequence on the hosts, in positions.
    pub fn length(&self) -> u32 {
        self.pipeline.length()
    }

    /// The rows submitted so far, `[n, width]`: what another backend needs to go on.
    ///
    /// # Errors
    /// [`ChatError::Engine`] when they cannot be decoded, which would be a fault of this program.
    pub fn submitted(&self) -> Result<Vec<f32>, ChatError> {
        let mut rows = Vec::new();
        for bytes in self.pipeline.submitted() {
            self.model
                .boundary
                .decode(bytes, &mut rows)
                .map_err(|e| ChatError::Engine(e.to_string()))?;
        }
        Ok(rows)
    }

    /// A stream that is not open yet.
    fn hop(&mut self, index: usize, span: RoutedSpan) -> Hop {
        let id = self.next_hop;
        self.next_hop += 1;
        let stream = span.link.register(id, self.inbox.clone());
        let bands = self.model.bands.as_ref();
        let band = bands.and_then(|b| b.get(span.hi as usize)).copied();
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
        }
    }

    fn open_stream(&self, index: usize) -> Result<(), Trouble> {
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

    fn trouble(&self, span: usize, code: &str, error: impl FnOnce(String) -> ChatError) -> Trouble {
        let name = self.hops.get(span).map_or_else(String::new, Hop::name);
        Trouble {
            span,
            code: code.to_owned(),
            error: error(name),
            may_stay: false,
        }
    }

    fn lost(&self, span: usize, why: &str) -> Trouble {
        self.trouble(span, "connection_lost", |host| {
            ChatError::ShardUnavailable(format!("lost {host}: {why}"))
        })
    }

    /// Waits for one message and does what it asks for.
    fn wait(&mut self, run: &mut Run<'_>) -> Result<(), ChatError> {
        let trouble = match self.receive(run.cancel) {
            Ok((hop, message)) => match self.on_message(hop, message) {
                Ok(()) => return Ok(()),
                Err(trouble) => trouble,
            },
            Err(Interrupted::Cancelled) => return Err(ChatError::Cancelled),
            Err(Interrupted::Trouble(trouble)) => trouble,
        };
        self.recover(trouble, run)
    }

    /// Awaits the answer to a lone decode step awake, when it is due.
    ///
    /// To be woken by the answer would cost the time that a sleeping core takes to come
    /// back, once per hop and token. So this thread wakes by itself shortly before, and
    /// looks for the answer until shortly after.
    fn anticipate(&self) -> Option<(u64, Inbound)> {
        let mut owing = self.hops.iter().filter(|hop| !hop.sent.is_empty());
        let hop = owing.next()?;
        let sent = hop.sent.front()?;
        if owing.next().is_some() || hop.sent.len() > 1 || sent.rows > 1 {
            return None;
        }
        let due = sent.at + hop.pace.usual()?;
        let asleep = due
            .checked_sub(AWAKE_BEFORE)?
            .saturating_duration_since(Instant::now());
        // For a step this long it makes no difference.
        if asleep > CANCEL_POLL {
            return None;
        }
        if let Ok(message) = self.inbound.recv_timeout(asleep) {
            return Some(message);
        }
        // One thread at a time: with many chats at once there is better use for the cores.
        if ON_WATCH.swap(true, Ordering::Acquire) {
            return None;
        }
        let mut message = None;
        while message.is_none() && Instant::now() < due + AWAKE_AFTER {
            message = self.inbound.try_recv().ok();
            std::thread::yield_now();
        }
        ON_WATCH.store(false, Ordering::Release);
        message
    }

    /// The next message of any host, or the one whose time is up.
    fn receive(&self, cancel: &Cancel) -> Result<(u64, Inbound), Interrupted> {
        if !cancel.is_cancelled()
            && let Some(message) = self.anticipate()
        {
            return Ok(message);
        }
        loop {
            if cancel.is_cancelled() {
                return Err(Interrupted::Cancelled);
            }
            let next = self
                .hops
                .iter()
                .enumerate()
                .filter_map(|(index, hop)| {
                    let (at, for_good) = hop.deadline(self.settings.health_timeout)?;
                    Some((at, for_good, index))
                })
                .min();
            let left = next.map_or(CANCEL_POLL, |(at, ..)| {
                at.saturating_duration_since(Instant::now())
            });
            match self.inbound.recv_timeout(left.min(CANCEL_POLL)) {
                Ok(message) => return Ok(message),
                // This side holds a sender, so the queue cannot close.
                Err(RecvTimeoutError::Disconnected) => return Err(Interrupted::Cancelled),
                Err(RecvTimeoutError::Timeout) if left > CANCEL_POLL => {}
                Err(RecvTimeoutError::Timeout) => {
                    let Some((_, for_good, index)) = next else {
                        continue;
                    };
                    let seconds = self.settings.health_timeout.as_secs_f32();
                    let mut trouble = if for_good {
                        self.trouble(index, "pipeline_stalled", |host| {
                            ChatError::PipelineStalled(format!(
                                "no progress for {seconds} s: waiting for {host}"
                            ))
                        })
                    } else {
                        self.trouble(index, "degraded", |host| {
                            ChatError::PipelineStalled(format!("{host} is much slower than it was"))
                        })
                    };
                    trouble.may_stay = !for_good;
                    return Err(Interrupted::Trouble(trouble));
                }
            }
        }
    }

    fn on_message(&mut self, id: u64, message: Inbound) -> Result<(), Trouble> {
        // A stream that has been replaced may still have something to say.
        let Some(index) = self.hops.iter().position(|hop| hop.id == id) else {
            return Ok(());
        };
        match message {
            Inbound::Opened => {
                if let Some(hop) = self.hops.get_mut(index) {
                    hop.opened = true;
                    hop.progress = Instant::now();
                }
                Ok(())
            }
            Inbound::Result(result) => self.on_result(index, result),
            Inbound::Error { code, message } => Err(self.trouble(index, &code, |host| {
                let text = format!("{host} refused with {code}: {message}");
                match code.as_str() {
                    "weights_mismatch" => ChatError::WeightsMismatch(text),
                    "context_full" => ChatError::BadRequest(text),
                    _ => ChatError::ShardUnavailable(text),
                }
            })),
            Inbound::Lost(why) => Err(self.lost(index, &why)),
        }
    }

    fn on_result(&mut self, index: usize, result: StepResult) -> Result<(), Trouble> {
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
        metrics::histogram!(
            "distributed_inference_shard_latency_ms",
            "shard_id" => hop.span.link.descriptor().shard_id.clone()
        )
        .record(round_trip.as_secs_f64() * 1e3);
        if hop.pace.record(round_trip) {
            let mut trouble = self.trouble(index, "degraded", |host| {
                ChatError::PipelineStalled(format!("{host} is much slower than it was"))
            });
            trouble.may_stay = true;
            return Err(trouble);
        }
        Ok(())
    }

    /// Puts other hosts in the place of one that has failed.
    fn recover(&mut self, trouble: Trouble, run: &mut Run<'_>) -> Result<(), ChatError> {
        let mut waiting = VecDeque::from([trouble]);
        while let Some(trouble) = waiting.pop_front() {
            let Some(hop) = self.hops.get_mut(trouble.span) else {
                continue;
            };
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            // The request itself is at fault: another host would say the same.
            if matches!(trouble.error, ChatError::BadRequest(_)) {
                return Err(trouble.error);
            }
            let since = Instant::now();
            let (lo, hi) = (hop.span.lo, hop.span.hi);
            let host = hop.node().to_owned();
            let shard_id = Descriptor::shard_id(&self.model.model_id, lo, hi);
            let mut excluded = self.excluded.clone();
            excluded.insert(host.clone());
            let found = self.source.route(lo..=hi, &excluded);
            if trouble.may_stay && found.is_err() {
                hop.indulged = true;
                continue;
            }
            tracing::warn!(%shard_id, code = trouble.code, "a host has failed: {}", trouble.error);
            (run.notify)(Notice::Degraded {
                shard_id: shard_id.clone(),
                host: host.clone(),
                code: trouble.code.clone(),
            });
            self.excluded = excluded;
            self.failures += 1;
            let gives_up = self.settings.give_up_after;
            if gives_up.is_some_and(|limit| self.failures >= limit) {
                return Err(trouble.error);
            }
            // What went wrong explains more than the hole that it leaves.
            let route = found.map_err(|_| trouble.error)?;
            self.recoveries.push(Recovery {
                shard_id,
                host,
                code: trouble.code,
                replacements: route
                    .iter()
                    .map(|span| span.link.descriptor().host.clone())
                    .collect(),
                replayed: self.pipeline.length(),
                since,
            });
            waiting.extend(self.replace(trouble.span, route));
        }
        Ok(())
    }

    /// Opens streams for the spans that take over; returns what went wrong at once.
    fn replace(&mut self, span: usize, route: Vec<RoutedSpan>) -> Option<Trouble> {
        let count = route.len();
        let reopened = self.pipeline.replace(span, count);
        let fresh: Vec<Hop> = route
            .into_iter()
            .enumerate()
            .map(|(offset, routed)| self.hop(span + offset, routed))
            .collect();
        let old: Vec<Hop> = self.hops.splice(span..=span, fresh).collect();
        old.iter().for_each(|hop| self.release(hop));
        // Those before it that run again begin a new life on the same host.
        for index in reopened.start..span {
            let Some(routed) = self.hops.get(index).map(|hop| hop.span.clone()) else {
                continue;
            };
            let fresh = self.hop(index, routed);
            if let Some(place) = self.hops.get_mut(index) {
                let old = std::mem::replace(place, fresh);
                self.release(&old);
            }
        }
        reopened
            .filter_map(|index| self.open_stream(index).err())
            .next()
    }

    fn release(&self, hop: &Hop) {
        let (link, stream, epoch) = (Arc::clone(&hop.span.link), hop.stream, hop.epoch);
        self.runtime
            .spawn(async move { link.release(stream, epoch).await });
    }

    /// Sends a step; the streams' order makes waiting for STREAM_OPENED unnecessary.
    fn step(
        &mut self,
        span: usize,
        epoch: u32,
        chunk: crate::pipeline::Chunk,
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

    /// Sends whatever can be sent; returns the output when it has come.
    fn pump(&mut self, run: &mut Run<'_>) -> Result<Option<Bytes>, ChatError> {
        while let Some(action) = self.pipeline.poll() {
            match action {
                Action::Output { row } => return Ok(Some(row)),
                Action::Send {
                    span,
                    epoch,
                    chunk,
                    want,
                } => {
                    if let Err(trouble) = self.step(span, epoch, chunk, want) {
                        self.recover(trouble, run)?;
                    }
                }
            }
        }
        Ok(None)
    }

    fn report_recoveries(&mut self, run: &mut Run<'_>) {
        for recovery in self.recoveries.drain(..) {
            metrics::counter!("distributed_inference_failovers_total").increment(1);
            (run.notify)(Notice::Failover {
                shard_id: recovery.shard_id,
                host: Some(recovery.host),
                code: recovery.code,
                replacements: recovery.replacements,
                replayed: recovery.replayed,
                recovery_ms: recovery.since.elapsed().as_secs_f64() * 1e3,
            });
        }
    }
}

impl Backend for ShardedBackend {
    fn run(
        &mut self,
        position: u32,
        rows: &[f32],
        out: &mut Vec<f32>,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        let mut data = Vec::with_capacity(rows.len() * self.model.boundary.bytes_per_value());
        self.model.boundary.encode(rows, &mut data);
        // Going back has to wait until a replay that nobody asked for yet is through.
        while position < self.pipeline.submitted_length() && !self.pipeline.is_idle() {
            self.pump(run)?;
            self.wait(run)?;
        }
        self.pipeline.submit(position, Bytes::from(data));
        loop {
            if let Some(row) = self.pump(run)? {
                self.report_recoveries(run);
                out.clear();
                return self
                    .model
                    .boundary
                    .decode(&row, out)
                    .map_err(|e| ChatError::Engine(e.to_string()));
            }
            self.wait(run)?;
        }
    }

    fn route(&self) -> Vec<RouteHop> {
        self.hops
            .iter()
            .map(|hop| {
                let descriptor = hop.span.link.descriptor();
                RouteHop {
                    shard_id: Descriptor::shard_id(&self.model.model_id, hop.span.lo, hop.span.hi),
                    host: Some(descriptor.host.clone()),
                    endpoint: Some(hop.span.link.addr().endpoint.clone()),
                    layers: (hop.span.lo, hop.span.hi),
                    memory_mb: descriptor.vram_required_mb,
                }
            })
            .collect()
    }

    fn times(&self) -> Vec<HopTimes> {
        self.hops.iter().map(|hop| hop.clock.summary()).collect()
    }

    fn begin_call(&mut self) {
        self.excluded.clear();
        self.failures = 0;
        self.recoveries.clear();
        for hop in &mut self.hops {
            hop.clock.clear();
        }
    }

    fn is_alive(&self) -> bool {
        self.hops.iter().all(|hop| hop.span.link.is_fresh())
    }

    fn close(&mut self) {
        for hop in std::mem::take(&mut self.hops) {
            let release = hop.span.link.release(hop.stream, hop.epoch);
            self.runtime.block_on(release);
        }
    }
}

impl Drop for ShardedBackend {
    fn drop(&mut self) {
        self.hops.iter().for_each(|hop| self.release(hop));
    }
}

fn wire_dtype(boundary: BoundaryDtype) -> DType {
    match boundary {
        BoundaryDtype::F16 => DType::F16,
        BoundaryDtype::Bf16 => DType::Bf16,
        BoundaryDtype::F32 => DType::F32,
    }
}
