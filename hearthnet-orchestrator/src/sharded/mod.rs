//! The layers on hosts: a route turned into streams, rows pumped through them, and
//! hosts that fail replaced while the answer goes on.
//!
//! What is in flight, what is replayed and what an answer means is decided by
//! `Pipeline`, which is pure; here are the streams, the clocks and the waiting.
//! A failure is whatever makes a host's part of the answer not come: a lost
//! connection, an error reply, numbers that cannot be right, silence, slowness
//! (`hop_timeout.rs`). Its host is not asked again in this call, unless only the
//! session with it was lost; other hosts take over its layers, and its boundary's history is replayed to
//! them.
//!
//! | concept | file |
//! |---|---|
//! | a span's stream: what is sent, what comes back | `stream.rs` |
//! | waiting, and whose time is up | `waiting.rs` |
//! | a new sequence, and waiting for room for it | `starting.rs` |
//! | what makes a span need another host | `failure.rs` |
//! | other hosts in the place of one that has failed, leaves or has no room | `recovery.rs` |

mod failure;
mod recovery;
mod starting;
mod stream;
mod waiting;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{Event, PipelineId};
use hearthnet_transport::{Code, DType};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use self::failure::HopFailure;
use self::stream::Hop;
use self::waiting::Interrupted;
use crate::backend::{Backend, HopTimes, Output, RouteHop, Rows, Run};
use crate::error::ChatError;
use crate::events::{Failover, tell};
use crate::frames::Frame;
use crate::health::SharedHealth;
pub use crate::hosts::ModelOnWire;
use crate::hosts::{HostSource, RoutedSpan};
use crate::link::Inbound;
use crate::pipeline::{Action, Limits, Pipeline};
use crate::times::{HopClock, whole_ms};
use crate::{Cancel, steps};

/// How often spares are seen to while an answer goes on.
const PREPARE_EVERY: Duration = Duration::from_secs(10);

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
    /// How long an answer that has begun asks for room where its hosts have none any more: as long
    /// as others' answers may take, or until going on here is better. With every row of the answer
    /// it begins anew.
    pub room_timeout: Duration,
    /// How long a new sequence asks for room, before it is refused or begins here.
    pub start_timeout: Duration,
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
        }
    }
}

/// A sequence whose blocks run on hosts. Dropping it closes its streams.
pub struct ShardedBackend {
    runtime: Handle,
    /// `None` while it looks for hosts, on a thread that may wait.
    source: Option<Box<dyn HostSource>>,
    /// Where it is told what hosts do.
    health: SharedHealth,
    model: ModelOnWire,
    /// Element type of the rows.
    dtype: DType,
    settings: PumpSettings,
    hops: Vec<Hop>,
    next_hop: u64,
    inbox: mpsc::UnboundedSender<(u64, Inbound)>,
    inbound: mpsc::UnboundedReceiver<(u64, Inbound)>,
    pipeline: Pipeline,
    /// What the flight record calls this.
    name: PipelineId,
    call: Call,
    /// When spares were last seen to.
    prepared: Instant,
    /// Whether all streams have been opened once: hosts that fail, or have no room,
    /// before that are passed over.
    running: bool,
    /// Positions that streams are asked for.
    positions: u32,
    /// What is wrong and has not been seen to.
    hop_failures: VecDeque<HopFailure>,
    /// What the caller is to hear.
    notices: Vec<Frame>,
    /// Rows that cannot be handed to the pipeline yet, their position, and how many follow.
    pending: VecDeque<(u32, Bytes, u32)>,
    /// What has come out so far of what was submitted.
    came: Vec<u8>,
    /// Whether more rows were announced than have been submitted.
    in_parts: bool,
    /// Since when the chat has been waiting for answers.
    watching_since: Instant,
    /// What a row takes a layer that this machine runs itself, if it runs any.
    per_layer: Option<Duration>,
}

/// What hosts have done in a call, or before the first one, while streams are opened.
#[derive(Default)]
struct Call {
    /// Who is not asked any more.
    excluded: BTreeSet<NodeId>,
    failures: u32,
    /// How often the session of each host was lost, since enough rows of the answer have come.
    lost: BTreeMap<NodeId, u32>,
    /// When the failure was noticed after which no row of the answer has come.
    failed_at: Option<Instant>,
    /// Who had no room, at the start.
    full: Option<String>,
    /// Layers whose host was replaced, until the answer goes on.
    recoveries: Vec<((u32, u32), Failover)>,
    /// How often it has paused for want of room, and until when it goes on asking.
    pauses: u32,
    room_until: Option<Instant>,
    /// Rows of the answer since the last pause, and how often each host has taken its memory back with
    /// too few of them in between.
    rows: u32,
    preempted: BTreeMap<NodeId, u32>,
}

impl ShardedBackend {
    /// Routes over the source's hosts and opens a stream on every one chosen. Blocks until all are
    /// open, on a loop (`steps.rs`) of its own; a host that has no room is passed over for another,
    /// and where all are full the sequence waits for [`PumpSettings::start_timeout`].
    ///
    /// # Errors
    /// [`ChatError::HostsFull`] when there is still no room then; [`ChatError`] naming the host that
    /// refused otherwise, or was too slow, when no other has its layers.
    pub fn open(
        runtime: Handle,
        source: Box<dyn HostSource>,
        settings: PumpSettings,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let began = Instant::now();
        let boundary = source.choice().model.boundary;
        let dtype = DType::of_rows(boundary.descriptor_name())
            .ok_or_else(|| ChatError::Engine(format!("no host takes rows of {boundary}")))?;
        // Hosts say no more than they were asked.
        let (inbox, inbound) = mpsc::unbounded_channel();
        let mut this = Self {
            runtime,
            health: source.choice().health.clone(),
            model: source.choice().model.clone(),
            source: Some(source),
            dtype,
            settings,
            hops: Vec::new(),
            next_hop: 0,
            inbox,
            inbound,
            // Of a route that is not known yet.
            pipeline: Pipeline::new(0, 0, Limits::default()),
            name: PipelineId::draw(),
            call: Call::default(),
            prepared: began,
            running: false,
            positions: 1,
            hop_failures: VecDeque::new(),
            notices: Vec::new(),
            pending: VecDeque::new(),
            came: Vec::new(),
            in_parts: false,
            watching_since: began,
            per_layer: None,
        };
        steps::block_on(this.start(cancel))?;
        this.running = true;
        this.prepare();
        this.notices.clear();
        // Who was full or gone at the start has not failed this call.
        this.begin_call(0);
        tell(Event::PipelineBuilt {
            pipeline: this.name,
            hosts: u32::try_from(this.hops.len()).unwrap_or(u32::MAX),
            ms: whole_ms(began.elapsed()),
        });
        Ok(this)
    }

    /// Where its sessions live.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Its name in the flight record.
    pub fn name(&self) -> PipelineId {
        self.name
    }

    /// Has somebody at hand for each span, should its host fail.
    fn prepare(&mut self) {
        self.prepared = Instant::now();
        let route: Vec<RoutedSpan> = self.hops.iter().map(|hop| hop.span.clone()).collect();
        if let Some(source) = &mut self.source {
            source.prepare(&route);
        }
    }

    /// When the failure was noticed that has not been made up for.
    pub(crate) fn failed_at(&self) -> Option<Instant> {
        self.call.failed_at
    }

    /// Length of the sequence on the hosts, in positions.
    pub fn length(&self) -> u32 {
        self.pipeline.length()
    }

    /// The rows submitted so far, `[n, width]`: what another backend needs to go on.
    ///
    /// # Errors
    /// [`ChatError::Engine`] when they cannot be decoded, which would be a fault of this program.
    pub fn submitted(&mut self) -> Result<Vec<f32>, ChatError> {
        for (position, rows, more) in self.pending.drain(..) {
            self.pipeline.submit(position, rows, more);
        }
        self.decoded(self.pipeline.submitted().map(|bytes| &bytes[..]))
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

    /// Waits for one message and does what it asks for; what is wrong is to be settled then.
    async fn wait(&mut self, cancel: &Cancel) -> Result<(), ChatError> {
        match self.receive(cancel).await {
            Ok((hop, message)) => self.on_message(hop, message),
            Err(Interrupted::Cancelled) => return Err(ChatError::Cancelled),
            Err(Interrupted::HopFailure(hop_failure)) => self.hop_failures.push_back(hop_failure),
            Err(Interrupted::Waiting(index, code)) => {
                if let Some(hop) = self.hops.get(index) {
                    self.notices.push(self.status("waiting", hop, code));
                }
            }
        }
        let now = Instant::now();
        for hop in &mut self.hops {
            if hop.move_at.take_if(|at| *at <= now).is_some() {
                self.hop_failures.push_back(hop.leaving(true));
            }
        }
        Ok(())
    }

    /// What the caller is told of a host.
    fn status(&self, status: &'static str, hop: &Hop, code: Code) -> Frame {
        Frame::ShardStatus {
            shard_id: self.shard_id(hop),
            host: Some(hop.node().to_string()),
            status: status.into(),
            code: Some(code),
            arithmetic: None,
        }
    }

    fn on_message(&mut self, id: u64, message: Inbound) {
        // A stream that has been replaced may still have something to say.
        let mut hops = self.hops.iter_mut().enumerate();
        let Some((index, hop)) = hops.find(|(_, hop)| hop.id == id) else {
            return;
        };
        let hop_failure = match message {
            // It may hold more positions from now on.
            Inbound::Opened if hop.opened => None,
            Inbound::Opened => {
                hop.opened = true;
                let host = hop.node();
                self.health.look(|all, now| all.opened(&host, now));
                hop.progressed(Instant::now());
                tell(Event::StreamReady {
                    pipeline: self.name,
                    host: hop.node(),
                    session: hop.span.link.session,
                    stream: hop.stream,
                    epoch: hop.epoch,
                });
                None
            }
            Inbound::Result { result, at } => self.on_result(index, result, at).err(),
            Inbound::Error { code, message } => Some(hop.refused(code, &message)),
            Inbound::Leaving => {
                hop.move_at = Some(Instant::now());
                None
            }
            Inbound::Closed => Some(hop.leaving(false)),
            Inbound::Lost(ended) => Some(hop.lost(&ended)),
        };
        self.hop_failures.extend(hop_failure);
    }

    /// Sends whatever can be sent; returns the output when all of it has come. Stops at what is to
    /// be settled first.
    fn advance(&mut self) -> Option<Vec<u8>> {
        // Going back has to wait until a replay that nobody asked for yet is through.
        let ready = |pipeline: &Pipeline, position| {
            position >= pipeline.submitted_length() || pipeline.is_idle()
        };
        while let Some((position, rows, more)) = self.pending.pop_front() {
            if !ready(&self.pipeline, position) {
                self.pending.push_front((position, rows, more));
                break;
            }
            self.pipeline.submit(position, rows, more);
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

    /// Waits until everything that was submitted is through.
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

impl Backend for ShardedBackend {
    fn beside(&mut self, per_layer: Duration) {
        self.per_layer = Some(per_layer);
    }

    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        let Rows {
            position,
            values,
            more,
        } = rows;
        let mut data = Vec::with_capacity(values.len() * self.model.boundary.bytes_per_value());
        self.model.boundary.encode(values, &mut data);
        if !self.in_parts {
            self.came.clear();
        }
        // What has come of earlier parts goes on to the next host meanwhile.
        while self.in_parts
            && let Ok((hop, message)) = self.inbound.try_recv()
        {
            self.on_message(hop, message);
        }
        self.in_parts = more > 0;
        self.pending.push_back((position, Bytes::from(data), more));
        // The last row is only on its way now, so the output is not complete: nothing is lost here.
        let _ = self.advance();
        std::future::ready(()).boxed_local()
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn route(&self) -> Vec<RouteHop> {
        let hop = |hop: &Hop| {
            let link = &hop.span.link;
            let away = !link.is_here();
            RouteHop {
                shard_id: self.shard_id(hop),
                host: away.then(|| hop.node().to_string()),
                endpoint: away.then(|| link.addr.endpoint.clone()),
                layers: (hop.span.lo, hop.span.hi),
                memory_mb: link.descriptor.vram_required_mb,
                arithmetic: link.descriptor.arithmetic.clone(),
            }
        };
        self.hops.iter().map(hop).collect()
    }

    fn times(&self) -> Vec<HopTimes> {
        self.hops.iter().map(|hop| hop.clock.summary()).collect()
    }

    fn begin_call(&mut self, positions: u32) {
        self.call = Call::default();
        for hop in &mut self.hops {
            hop.clock = HopClock::default();
            hop.span.link.rest(hop.stream, false);
        }
        // What has happened since the last call, so that nothing is sent where nobody is.
        while let Ok((id, message)) = self.inbound.try_recv() {
            self.on_message(id, message);
        }
        self.positions = self.positions.max(positions.min(self.model.context));
        for index in 0..self.hops.len() {
            let grown = self.grow(index, self.positions);
            self.hop_failures.extend(grown.err());
        }
    }

    fn end_call(&mut self) {
        // Hosts that a replay has not reached yet hold less.
        let length = self.pipeline.is_idle().then(|| self.pipeline.length());
        for hop in &self.hops {
            hop.span.link.rest(hop.stream, true);
            if let Some(length) = length {
                hop.rest(length);
            }
        }
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
        tell(Event::PipelineEnded {
            pipeline: self.name,
        });
        self.hops.iter().for_each(Hop::release);
    }
}

#[cfg(test)]
mod tests;
