//! The layers on hosts: a route turned into streams, and rows pumped through them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearthnet_bus::Descriptor;
use hearthnet_model::catalogue::Band;
use hearthnet_model::{BoundaryDtype, ModelSpec, WeightsId};
use hearthnet_transport::{DType, Message, Step, StepResult, StreamOpen, Want};
use tokio::runtime::Handle;

use crate::backend::{Backend, HopClock, HopTimes, RouteHop};
use crate::cancel::Cancel;
use crate::checks::{BoundaryCheck, CheckError};
use crate::error::ChatError;
use crate::link::{HostLink, Inbound};
use crate::pipeline::{Action, Chunk, Outcome, Pipeline, Rows};

/// How often a waiting chat looks whether its caller gave up.
const CANCEL_POLL: Duration = Duration::from_millis(50);

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
}

impl Default for PumpSettings {
    fn default() -> Self {
        Self {
            prefill_rows: 64,
            depth: 2,
            health_timeout: Duration::from_secs(30),
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

/// One host of the route and the layers it runs for this sequence.
#[derive(Debug, Clone)]
pub struct RoutedSpan {
    /// The session with the host.
    pub link: Arc<HostLink>,
    /// First layer.
    pub lo: u32,
    /// Last layer.
    pub hi: u32,
}

struct Hop {
    span: RoutedSpan,
    stream: u32,
    check: BoundaryCheck,
    /// When each step in flight was sent, and with how many rows.
    sent: VecDeque<(Instant, u32)>,
    clock: HopClock,
}

/// A sequence whose blocks run on hosts. Dropping it closes its streams.
pub struct ShardedBackend {
    runtime: Handle,
    model: ModelOnWire,
    settings: PumpSettings,
    hops: Vec<Hop>,
    inbound: mpsc::Receiver<(usize, Inbound)>,
    pipeline: Pipeline,
    length: u32,
}

impl ShardedBackend {
    /// Opens a stream on every host of the route. Blocks until all are open.
    ///
    /// # Errors
    /// [`ChatError`] naming the host that refused, or was too slow.
    pub fn open(
        runtime: Handle,
        model: ModelOnWire,
        route: Vec<RoutedSpan>,
        settings: PumpSettings,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let (inbox, inbound) = mpsc::channel();
        let row_bytes = model.width * model.boundary.bytes_per_value();
        let pipeline = Pipeline::new(route.len(), row_bytes, settings.depth);
        let hops = route
            .into_iter()
            .enumerate()
            .map(|(index, span)| {
                let stream = span.link.register(index, inbox.clone());
                let band = model
                    .bands
                    .as_ref()
                    .and_then(|b| b.get(span.hi as usize))
                    .copied();
                let check = BoundaryCheck::new(model.width, model.boundary, band);
                Hop {
                    span,
                    stream,
                    check,
                    sent: VecDeque::new(),
                    clock: HopClock::default(),
                }
            })
            .collect();
        let this = Self {
            runtime,
            model,
            settings,
            hops,
            inbound,
            pipeline,
            length: 0,
        };
        for index in 0..this.hops.len() {
            let Some(hop) = this.hops.get(index) else {
                break;
            };
            let open = StreamOpen {
                stream: hop.stream,
                epoch: this.pipeline.epoch(index),
                weights: this.model.weights.0,
                lo: hop.span.lo,
                hi: hop.span.hi,
                max_positions: this.model.context,
            };
            this.send(index, Message::StreamOpen(open))?;
        }
        let mut waiting = this.hops.len();
        let mut opened = vec![false; waiting];
        let deadline = Instant::now() + this.settings.health_timeout;
        while waiting > 0 {
            match this.receive(deadline, cancel, &|i| {
                !opened.get(i).copied().unwrap_or(true)
            })? {
                (index, Inbound::Opened) => {
                    if let Some(flag) = opened.get_mut(index).filter(|flag| !**flag) {
                        *flag = true;
                        waiting -= 1;
                    }
                }
                (index, other) => return Err(this.fault(index, other)),
            }
        }
        Ok(this)
    }

    /// Length of the sequence on the hosts, in positions.
    pub fn length(&self) -> u32 {
        self.length
    }

    fn name(&self, index: usize) -> String {
        self.hops.get(index).map_or_else(String::new, |hop| {
            let addr = hop.span.link.addr();
            format!(
                "{} ({}, layers {}-{})",
                addr.endpoint,
                addr.node.short(),
                hop.span.lo,
                hop.span.hi
            )
        })
    }

    fn send(&self, index: usize, message: Message) -> Result<(), ChatError> {
        let Some(hop) = self.hops.get(index) else {
            return Ok(());
        };
        self.runtime
            .block_on(hop.span.link.sender().send(message))
            .map_err(|closed| {
                ChatError::ShardUnavailable(format!("lost {}: {closed}", self.name(index)))
            })
    }

    /// The next message, or the error that ends the wait. `owes` tells which
    /// hosts are waited for, to name the one that stalls.
    fn receive(
        &self,
        deadline: Instant,
        cancel: &Cancel,
        owes: &dyn Fn(usize) -> bool,
    ) -> Result<(usize, Inbound), ChatError> {
        loop {
            if cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.inbound.recv_timeout(left.min(CANCEL_POLL)) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Timeout) if left > CANCEL_POLL => {}
                Err(_) => {
                    let late: Vec<String> = (0..self.hops.len())
                        .filter(|&i| owes(i))
                        .map(|i| self.name(i))
                        .collect();
                    return Err(ChatError::PipelineStalled(format!(
                        "no progress for {} s: waiting for {}",
                        self.settings.health_timeout.as_secs_f32(),
                        late.join(" and ")
                    )));
                }
            }
        }
    }

    /// What an unwelcome message means for the chat.
    fn fault(&self, index: usize, message: Inbound) -> ChatError {
        let host = self.name(index);
        match message {
            Inbound::Error { code, message } => {
                let text = format!("{host} refused with {code}: {message}");
                match code.as_str() {
                    "weights_mismatch" => ChatError::WeightsMismatch(text),
                    "context_full" => ChatError::BadRequest(text),
                    _ => ChatError::ShardUnavailable(text),
                }
            }
            Inbound::Lost(why) => ChatError::ShardUnavailable(format!("lost {host}: {why}")),
            Inbound::Opened | Inbound::Result(_) => {
                ChatError::ShardUnavailable(format!("{host} answered out of turn"))
            }
        }
    }

    fn act(
        &mut self,
        action: Action,
        position_end: u32,
        out: &mut Vec<f32>,
    ) -> Result<bool, ChatError> {
        match action {
            Action::Send {
                span,
                epoch,
                chunk,
                want,
            } => {
                let Some(hop) = self.hops.get_mut(span) else {
                    return Ok(false);
                };
                hop.sent.push_back((Instant::now(), chunk.rows));
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
                self.send(span, Message::Step(step))?;
                Ok(false)
            }
            Action::Output { length, row } => {
                self.length = length;
                if length < position_end {
                    return Ok(false);
                }
                out.clear();
                self.model
                    .boundary
                    .decode(&row, out)
                    .map_err(|e| ChatError::Engine(e.to_string()))?;
                Ok(true)
            }
        }
    }

    fn on_result(&mut self, index: usize, result: StepResult) -> Result<(), ChatError> {
        let name = self.name(index);
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
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        let sent = hop
            .sent
            .front()
            .copied()
            .filter(|_| epoch == self.pipeline.epoch(index));
        if let Some((_, rows_sent)) = sent {
            // A host that returns only the last row of a piece returns its last position.
            let first = position.saturating_add(rows_sent.saturating_sub(rows));
            let shape = CheckError::Shape {
                bytes: data.len(),
                rows,
                width: width as usize,
            };
            let checked = if rows == 0 && data.is_empty() {
                Ok(())
            } else if width as usize != self.model.width || dtype != wire_dtype(self.model.boundary)
            {
                Err(shape)
            } else {
                hop.check.check(first, rows, &data)
            };
            if let Err(error) = checked {
                metrics::counter!("distributed_inference_shard_corruption_detected_total")
                    .increment(1);
                return Err(ChatError::PipelineStalled(format!(
                    "{name} returned numbers that cannot be right: {}: {error}",
                    error.code()
                )));
            }
        }
        let outcome = self.pipeline.on_result(index, epoch, position, rows, data);
        match (outcome, sent) {
            (Ok(Outcome::Accepted), Some((at, rows_sent))) => {
                hop.sent.pop_front();
                if rows_sent == 1 {
                    let round_trip = at.elapsed();
                    hop.clock.record(round_trip, compute_us, queue_us);
                    metrics::histogram!(
                        "distributed_inference_shard_latency_ms",
                        "shard_id" => hop.span.link.descriptor().shard_id.clone()
                    )
                    .record(round_trip.as_secs_f64() * 1e3);
                }
                Ok(())
            }
            (Ok(_), _) => Ok(()),
            (Err(fault), _) => Err(ChatError::ShardUnavailable(format!("{name}: {fault}"))),
        }
    }
}

impl Backend for ShardedBackend {
    fn run(
        &mut self,
        position: u32,
        rows: &[f32],
        out: &mut Vec<f32>,
        cancel: &Cancel,
    ) -> Result<(), ChatError> {
        let count = rows.len() / self.model.width;
        let end = position + count as u32;
        let mut at = position;
        for piece in rows.chunks(self.settings.prefill_rows.max(1) * self.model.width) {
            let rows = (piece.len() / self.model.width) as u32;
            let mut data = Vec::with_capacity(piece.len() * self.model.boundary.bytes_per_value());
            self.model.boundary.encode(piece, &mut data);
            self.pipeline.submit(Chunk {
                position: at,
                rows,
                data: Bytes::from(data),
                wants_output: at + rows == end,
            });
            at += rows;
        }
        let mut deadline = Instant::now() + self.settings.health_timeout;
        loop {
            while let Some(action) = self.pipeline.poll() {
                if self.act(action, end, out)? {
                    return Ok(());
                }
            }
            match self.receive(deadline, cancel, &|i| self.pipeline.is_owed_by(i))? {
                (index, Inbound::Result(result)) => self.on_result(index, result)?,
                (index, other) => return Err(self.fault(index, other)),
            }
            deadline = Instant::now() + self.settings.health_timeout;
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

    fn reset_times(&mut self) {
        for hop in &mut self.hops {
            hop.clock.clear();
        }
    }
}

impl Drop for ShardedBackend {
    fn drop(&mut self) {
        for (index, hop) in self.hops.iter().enumerate() {
            let (link, stream) = (Arc::clone(&hop.span.link), hop.stream);
            let epoch = self.pipeline.epoch(index);
            self.runtime
                .spawn(async move { link.release(stream, epoch).await });
        }
    }
}

fn wire_dtype(boundary: BoundaryDtype) -> DType {
    match boundary {
        BoundaryDtype::F16 => DType::F16,
        BoundaryDtype::Bf16 => DType::Bf16,
        BoundaryDtype::F32 => DType::F32,
    }
}
