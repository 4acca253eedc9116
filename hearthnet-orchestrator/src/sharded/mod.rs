//! The layers on hosts: a route turned into streams, rows pumped through them, and
//! hosts that fail replaced while the answer goes on.
//!
//! What is in flight, what is replayed and what an answer means is decided by
//! [`Pipeline`], which is pure; here are the streams, the clocks and the waiting.
//! A failure is whatever makes a host's part of the answer not come: a lost
//! connection, an error reply, numbers that cannot be right, silence, slowness
//! ([`Pace`](crate::pace::Pace)). Its host is not asked again in this call; other hosts take
//! over its layers, and its boundary's history is replayed to them.
//!
//! | concept | file |
//! |---|---|
//! | a span's stream: what is sent, what comes back | `stream.rs` |
//! | waiting, and whose time is up | `waiting.rs` |
//! | other hosts in the place of one that has failed | `recovery.rs` |

mod recovery;
mod stream;
mod waiting;

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearthnet_bus::Descriptor;
use hearthnet_model::catalogue::Band;
use hearthnet_model::{BoundaryDtype, ModelSpec, WeightsId};
use tokio::runtime::Handle;

use self::recovery::Recovery;
use self::stream::{Hop, Trouble};
use self::waiting::Interrupted;
use crate::Cancel;
use crate::backend::{Backend, HopTimes, RouteHop, Run};
use crate::error::ChatError;
use crate::hosts::HostSource;
use crate::link::Inbound;
use crate::pipeline::{Action, Limits, Pipeline};

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
