//! Layers on hosts: opens a stream per span of a route, pumps rows through them, and replaces hosts
//! that fail while the answer continues.
//!
//! `Pipeline`, which is pure, decides which steps are in flight, which rows are replayed and what a
//! response means; streams, clocks and waiting are here. A hop fails if its connection is lost, or
//! if it returns an error or implausible rows, is silent or too slow (`hop_timeout.rs`). Its host
//! is not used again in this call, unless only its session was lost. Other hosts take over its
//! layers and get the history of its input rows replayed.
//!
//! | concept | file |
//! |---|---|
//! | a span's stream | `stream.rs` |
//! | steps sent, results received | `steps.rs` |
//! | return to an earlier position | `rewind.rs` |
//! | waiting for messages, timeouts | `waiting.rs` |
//! | detection of slow and silent hosts | `hop_timeout.rs` (pure) |
//! | starting a sequence, waiting for free streams | `starting.rs` |
//! | reasons to replace a span's host | `failure.rs` |
//! | replacing a host that failed, leaves or has no room | `recovery.rs` |
//! | copy of a sequence, on the same hosts | `fork.rs` |
//! | spans computed again on other hosts | `audit.rs`, `audit_span.rs` |
//! | calls whose spans wait for that | `audit_queue.rs` |
//! | rows compared when this machine takes over | `take_over.rs` |
//! | observer in tests | `watch.rs` |

mod audit;
mod audit_queue;
mod audit_span;
mod failure;
mod fork;
mod hop_timeout;
mod recovery;
mod rewind;
mod starting;
mod steps;
mod stream;
mod take_over;
mod waiting;
#[cfg(feature = "testing")]
pub mod watch;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{Event, PipelineId};
use hearthnet_transport::{Code, DType};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;

pub use self::audit::is_drawn;
#[cfg(feature = "testing")]
pub use self::audit_queue::{AuditQueue, Audits};
use self::audit_span::AuditSpan;
pub use self::audit_span::{RecomputeHere, recompute};
use self::failure::{HopFailure, Interrupted};
use self::stream::Hop;
use crate::Cancel;
use crate::backend::events::{Failover, report_event};
use crate::backend::pipeline::{Action, LayerInputs, Pipeline};
use crate::backend::{Backend, HopTimes, Output, RouteHop, Rows, Run};
use crate::error::ChatError;
use crate::frames::Frame;
pub use crate::hosts::ModelOnWire;
use crate::hosts::health::{RunningCall, SharedHealth};
use crate::hosts::link::Inbound;
use crate::hosts::{HostSource, RoutedSpan};
use crate::steps::chat_loop;
use crate::times::HopClock;

/// Interval between preparations of spare hosts during an answer.
const PREPARE_EVERY: Duration = Duration::from_secs(10);

/// Limits of a sharded sequence.
#[derive(Debug, Clone)]
pub struct PumpSettings {
    /// Prompt rows per step: few enough to overlap across hosts, enough to keep the kernels busy.
    pub prefill_rows: usize,
    /// Steps in flight per host. With two, the next chunk is already queued when one is done.
    pub depth: usize,
    /// A host that makes no progress on a pending step for longer than this has stalled.
    pub health_timeout: Duration,
    /// Maximum bytes of rows kept to rebuild a failed host's KV.
    pub history_bytes: usize,
    /// Failures in one call after which no more hosts are tried; `None`: no limit.
    pub give_up_after: Option<u32>,
    /// How long a running answer retries for room after its host had none left. Other answers may
    /// hold it that long; if it passes, this machine may continue. 16 rows of progress restart it.
    pub room_timeout: Duration,
    /// How long a new sequence waits for room before it is refused, or starts on this machine.
    pub start_timeout: Duration,
    /// Share of the answered spans that other hosts compute again, 0 to 1.
    pub audit_share: f64,
    /// Observer of the pipeline.
    #[cfg(feature = "testing")]
    pub watch: Option<watch::Watch>,
    /// Queue of audits instead of that of the process.
    #[cfg(feature = "testing")]
    pub audits: Option<AuditQueue>,
}

impl Default for PumpSettings {
    fn default() -> Self {
        Self {
            prefill_rows: 24,
            depth: 2,
            health_timeout: Duration::from_secs(30),
            history_bytes: 256 << 20,
            give_up_after: None,
            room_timeout: Duration::from_secs(300),
            start_timeout: Duration::from_secs(30),
            audit_share: 0.05,
            #[cfg(feature = "testing")]
            watch: None,
            #[cfg(feature = "testing")]
            audits: None,
        }
    }
}

/// Sequence whose blocks run on hosts. Dropping it closes its streams.
pub struct ShardedBackend {
    runtime: Handle,
    /// `None` while a blocking thread uses it to search for hosts.
    source: Option<Box<dyn HostSource>>,
    /// Tracker that this sequence reports to.
    health: SharedHealth,
    model: ModelOnWire,
    dtype: DType,
    settings: PumpSettings,
    hops: Vec<Hop>,
    next_hop: u64,
    inbox: mpsc::UnboundedSender<(u64, Inbound)>,
    inbound: mpsc::UnboundedReceiver<(u64, Inbound)>,
    pipeline: Pipeline,
    inputs: LayerInputs,
    /// Id of the pipeline in the flight record.
    name: PipelineId,
    call: Call,
    /// When spares were last prepared.
    prepared: Instant,
    /// True once all streams are open. Before that, hosts that fail or have no room are skipped.
    running: bool,
    /// Positions that streams are opened for.
    positions: u32,
    /// Failures that have not been handled yet.
    hop_failures: VecDeque<HopFailure>,
    /// Frames for the caller.
    notices: Vec<Frame>,
    pending: VecDeque<Pending>,
    /// Computes layers on this machine for audits.
    here: Option<RecomputeHere>,
    /// Spans of this call whose hosts were replaced, for the audit.
    replaced: Vec<AuditSpan>,
    /// Output received so far for the submitted rows.
    came: Vec<u8>,
    /// Start of the current wait for results.
    watching_since: Instant,
    /// Time per row and layer on this machine, if it runs layers itself.
    per_layer: Option<Duration>,
}

/// Rows not yet handed to the pipeline.
struct Pending {
    position: u32,
    rows: Bytes,
    /// Number of rows that follow.
    more: u32,
    /// True if all rows come back, false if only the last one does.
    all: bool,
}

impl Pending {
    fn hand_to(self, pipeline: &mut Pipeline, inputs: &mut LayerInputs) {
        pipeline.return_all(self.all);
        let rows = inputs.take(self.position, self.rows);
        pipeline.submit(self.position, rows, self.more);
    }
}

/// State of one call, or of the start, while streams are opened.
#[derive(Default)]
struct Call {
    /// Hosts that are not used again in this call.
    excluded: BTreeSet<NodeId>,
    failures: u32,
    /// Lost sessions per host. Reset once enough rows of the answer have arrived.
    lost: BTreeMap<NodeId, u32>,
    /// When the failure was noticed after which no row of the answer has arrived.
    failed_at: Option<Instant>,
    /// Error of the first host that had no room at the start.
    full: Option<String>,
    /// Replaced layers, reported when the answer continues.
    recoveries: Vec<((u32, u32), Failover)>,
    /// Pauses because of full hosts, and the time at which retrying ends.
    pauses: u32,
    room_until: Option<Instant>,
    /// Rows since the last pause, and preemptions per host with too few rows in between.
    rows: u32,
    preempted: BTreeMap<NodeId, u32>,
    /// `None` before the call and after it.
    running: Option<RunningCall>,
}

impl ShardedBackend {
    /// Selects a route over the source's hosts and opens a stream on each host. Blocks until all
    /// are open, on its own loop (`chat_loop.rs`). A full host is skipped; if all are full, the
    /// sequence waits for [`PumpSettings::start_timeout`].
    ///
    /// # Errors
    /// [`ChatError::HostsFull`] if the hosts are still full then. Otherwise a [`ChatError`] that
    /// names the host that refused or was too slow, if no other host has its layers.
    pub fn open(
        runtime: Handle,
        source: Box<dyn HostSource>,
        settings: PumpSettings,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        chat_loop::block_on(Self::opened(runtime, source, settings, cancel))
    }

    /// [`Self::open`] on the loop of the calling chat.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn opened(
        runtime: Handle,
        source: Box<dyn HostSource>,
        settings: PumpSettings,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let began = Instant::now();
        let boundary = source.choice().model.boundary;
        let dtype = DType::of_rows(boundary.descriptor_name())
            .ok_or_else(|| ChatError::Engine(format!("no host takes rows of {boundary}")))?;
        let mut this = Self::new(runtime, source, dtype, settings, began);
        this.start(cancel).await?;
        this.running = true;
        this.prepare();
        this.notices.clear();
        // Hosts that were full or lost at the start do not count as failures of this call.
        this.begin_call(0);
        this.report_built(began.elapsed());
        Ok(this)
    }

    /// Lets audits compute layers on this machine, if no other host can, or if hosts differ.
    #[must_use]
    pub fn with_local_audits(mut self, here: Option<RecomputeHere>) -> Self {
        self.here = here;
        self
    }

    /// Runtime of its sessions.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub fn name(&self) -> PipelineId {
        self.name
    }

    /// Prepares a spare for each span, in case its host fails.
    fn prepare(&mut self) {
        self.prepared = Instant::now();
        let route: Vec<RoutedSpan> = self.hops.iter().map(|hop| hop.span.clone()).collect();
        if let Some(source) = &mut self.source {
            source.prepare(&route);
        }
    }

    /// When the unresolved failure was noticed.
    pub(crate) fn failed_at(&self) -> Option<Instant> {
        self.call.failed_at
    }

    /// Length of the sequence on the hosts, in positions.
    pub fn length(&self) -> u32 {
        self.pipeline.length()
    }

    /// All rows submitted so far, so that another backend can continue.
    ///
    /// # Errors
    /// [`ChatError::Engine`] if they cannot be decoded, which would be a bug of this program.
    pub fn submitted(&mut self) -> Result<Vec<f32>, ChatError> {
        for pending in self.pending.drain(..) {
            pending.hand_to(&mut self.pipeline, &mut self.inputs);
        }
        let Range { start, end } = self.model.hosted;
        let streams: Vec<Bytes> = self.pipeline.submitted().cloned().collect();
        let rows = self
            .inputs
            .give_all(&streams, (start, end.saturating_sub(1)));
        self.decoded(rows.iter().map(|bytes| &bytes[..]))
    }

    fn decoded<'a>(
        &self,
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Vec<f32>, ChatError> {
        let mut rows = Vec::new();
        for piece in pieces {
            let decoded = self.model.boundary.decode(piece, &mut rows);
            decoded.map_err(|e| ChatError::Engine(e.to_string()))?;
        }
        Ok(rows)
    }

    /// Waits for one message and processes it. Failures are queued for `settle`.
    async fn wait(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        match self.receive(cancel).await {
            Ok((hop, message)) => self.on_message(hop, message),
            Err(Interrupted::Cancelled) => return Err(ChatError::Cancelled),
            Err(Interrupted::HopFailure(hop_failure)) => self.hop_failures.push_back(hop_failure),
            Err(Interrupted::Waiting(index, code)) => {
                if let Some(hop) = self.hops.get(index) {
                    self.notices.push(status("waiting", hop, code));
                }
            }
        }
        let now = Instant::now();
        for hop in &mut self.hops {
            if hop.migrate_at.take_if(|at| *at <= now).is_some() {
                self.hop_failures.push_back(hop.leaving(true));
            }
        }
        Ok(())
    }

    fn on_message(&mut self, id: u64, message: Inbound) {
        // A late message of a stream that has been replaced.
        let mut hops = self.hops.iter_mut().enumerate();
        let Some((index, hop)) = hops.find(|(_, hop)| hop.id == id) else {
            return;
        };
        let hop_failure = match message {
            // Confirmation that an open stream may hold more positions.
            Inbound::Opened if hop.opened => None,
            Inbound::Opened => {
                hop.opened = true;
                let host = hop.node();
                self.health.look(|all, now| all.opened(&host, now));
                hop.progressed(Instant::now());
                report_event(Event::StreamReady {
                    pipeline: self.name,
                    host: hop.node(),
                    trace: hop.trace(),
                });
                None
            }
            Inbound::Result { result, at } => self.on_result(index, result, at).err(),
            Inbound::Truncated(kept) => self.on_truncated(index, kept).err(),
            Inbound::Error { code, message } => Some(hop.refused(code, &message)),
            Inbound::BadReceipt(fault) => Some(hop.bad_receipt(fault)),
            Inbound::Leaving => {
                hop.migrate_at = Some(Instant::now());
                None
            }
            Inbound::Closed => Some(hop.leaving(false)),
            Inbound::Lost(closed) => Some(hop.lost(&closed)),
        };
        self.hop_failures.extend(hop_failure);
    }

    /// Sends all steps that can be sent. Returns the output once it is complete; stops at the first
    /// failure.
    fn advance(&mut self) -> Option<Vec<u8>> {
        // A rewind has to wait until a pending replay is through.
        while let Some(next) = self.pending.front()
            && (next.position >= self.pipeline.submitted_length() || self.pipeline.is_idle())
            && let Some(next) = self.pending.pop_front()
        {
            let (position, before) = (next.position, self.pipeline.submitted_length());
            next.hand_to(&mut self.pipeline, &mut self.inputs);
            if position < before {
                self.rewind_hosts(position);
            }
        }
        while self.hop_failures.is_empty() {
            match self.pipeline.poll()? {
                Action::Output { row } => {
                    self.came.extend_from_slice(&row);
                    if self.pipeline.is_through() {
                        return Some(std::mem::take(&mut self.came));
                    }
                }
                Action::Send {
                    span,
                    epoch,
                    chunk,
                    want,
                } => {
                    let sent = self.step(span, epoch, chunk, want);
                    self.hop_failures.extend(sent.err());
                }
            }
        }
        None
    }

    /// Waits until all submitted rows are through.
    async fn through(&mut self, run: &mut Run<'_>) -> Result<Vec<f32>, ChatError> {
        self.watching_since = Instant::now();
        let begin = self.pipeline.length();
        let mut told = begin;
        loop {
            let (done, total) = (self.pipeline.length(), self.pipeline.submitted_length());
            if done > told && total > begin + 1 {
                told = done;
                (run.notify)(Frame::PromptProgress { done, total });
            }
            self.settle(run).await?;
            if let Some(rows) = self.advance() {
                let moved = !self.call.recoveries.is_empty();
                self.report_recoveries(run);
                if moved
                    || self.watching_since.saturating_duration_since(self.prepared) > PREPARE_EVERY
                {
                    self.prepare();
                }
                return self.decoded([&rows[..]]);
            }
            if self.hop_failures.is_empty() {
                self.wait(run.cancel).await?;
                self.notices.drain(..).for_each(&mut *run.notify);
            }
        }
    }
}

/// Status frame about a host.
fn status(status: &'static str, hop: &Hop, code: Code) -> Frame {
    Frame::ShardStatus {
        shard_id: hop.shard_id.clone(),
        host: Some(hop.node().to_string()),
        status: status.into(),
        code: Some(code),
        arithmetic: None,
    }
}

impl Backend for ShardedBackend {
    fn set_reference_speed(&mut self, per_layer: Duration) {
        self.per_layer = Some(per_layer);
    }

    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        // The steps are sent when the future is polled, because the loop that polls it writes what is
        // queued. A step queued outside of a loop would wait until the host is probed, 1 s later.
        let submitted = async move {
            let (values, boundary) = (rows.values, self.model.boundary);
            let mut data = Vec::with_capacity(values.len() * boundary.bytes_per_value());
            boundary.encode(values, &mut data);
            // Forwards results of earlier parts to the next host meanwhile.
            while !(self.pending.is_empty() && self.pipeline.is_through())
                && let Ok((hop, message)) = self.inbound.try_recv()
            {
                self.on_message(hop, message);
            }
            self.pending.push_back(Pending {
                position: rows.position,
                rows: Bytes::from(data),
                more: rows.more,
                all: rows.all,
            });
            // The last row was only just submitted, so the output cannot be complete: ignore the
            // result.
            let _ = self.advance();
        };
        submitted.boxed_local()
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn fork(&mut self) -> LocalBoxFuture<'_, Option<Box<dyn Backend>>> {
        let fork = self.forked();
        std::future::ready(fork.map(|fork| Box::new(fork) as Box<dyn Backend>)).boxed_local()
    }

    fn route(&self) -> Vec<RouteHop> {
        let hop = |hop: &Hop| {
            let link = &hop.span.link;
            let away = !link.is_here();
            RouteHop {
                shard_id: hop.shard_id.clone(),
                host: away.then(|| hop.node().to_string()),
                endpoint: away.then(|| link.addr.endpoint.clone()),
                layers: (hop.span.lo, hop.span.hi),
                memory_mb: link.descriptor.vram_required_mb,
                arithmetic: link.descriptor.arithmetic.clone(),
                policy: hop.span.policy.into_str().into(),
            }
        };
        self.hops.iter().map(hop).collect()
    }

    fn times(&self) -> Vec<HopTimes> {
        self.hops.iter().map(|hop| hop.clock.summary()).collect()
    }

    fn begin_call(&mut self, positions: u32) {
        self.call = Call {
            running: Some(self.health.call()),
            ..Call::default()
        };
        for hop in &mut self.hops {
            hop.clock = HopClock::default();
            hop.span.link.rest(hop.stream, false);
        }
        // Process messages that arrived between calls, so that no step is sent to a lost host.
        while let Ok((id, message)) = self.inbound.try_recv() {
            self.on_message(id, message);
        }
        self.positions = self.positions.max(positions.min(self.model.context));
        for hop in &mut self.hops {
            let grown = hop.grow(self.model.weights, self.positions);
            self.hop_failures.extend(grown.err());
        }
    }

    fn end_call(&mut self) {
        // Hosts that a replay has not reached yet hold fewer positions.
        let length = self.pipeline.is_idle().then(|| self.pipeline.length());
        for hop in &self.hops {
            hop.span.link.rest(hop.stream, true);
            if let Some(length) = length {
                hop.rest(length);
            }
        }
        self.offer_audit(length.is_some());
    }

    fn pipeline(&self) -> Option<PipelineId> {
        Some(self.name)
    }

    fn is_alive(&self) -> bool {
        self.hops.iter().all(|hop| hop.span.link.is_fresh())
    }
}

impl Drop for ShardedBackend {
    fn drop(&mut self) {
        // The call has failed, so a host cannot escape its audits by failing.
        if self.call.running.is_some() {
            self.offer_audit(true);
        }
        report_event(Event::PipelineEnded {
            pipeline: self.name,
        });
        self.hops.iter().for_each(Hop::release);
    }
}

#[cfg(test)]
mod tests;
