//! Streams of one connection: checks each message of the caller before it reaches the compute
//! thread.
//!
//! Faults that need no engine are answered here at once, however busy the engine is: wrong weights,
//! wrong layers, no free slot, wrong shape, values that are not finite, an old epoch. Pure but for
//! the shared counters: answers go to the connection's [`ResponseSink`], commands to the compute
//! thread.
//!
//! Two epochs of a stream, and the answers to their steps:
//!
//! ```text
//! caller   open e1   step e1   open e2                step e1      step e2
//! host     opened    result    stale_epoch, opened    stale_epoch  result
//! ```
//!
//! Every step is answered, even if its stream ended while the step was on its way: the answer frees
//! the session's step slot.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_bus::{Descriptor, NodeId, now_ms};
use hearthnet_transport::{
    CloseCode, DType, Fork, Handler, Message, Step, StreamClose, StreamOpen, Truncate,
};

use crate::batch::{all_finite, values_before, wipe};
use crate::clock::Clock;
use crate::config::ServeConfig;
use crate::engine::Served;
use crate::events::{Caller, HostEvents};
use crate::fault::StreamFault;
use crate::inbox::Inbox;
use crate::sched::{Command, ForkSource};
use crate::stream::{Job, Work};
use crate::stream_handle::{ResponseSink, Slots, StreamHandle};

/// Ended streams that a connection remembers per slot, to tell a late step from an invalid one.
const REMEMBERED_PER_SLOT: usize = 16;

/// Maps a node id to the quota group that it counts with (see `Node::quota_key`).
pub(crate) type Parties = Arc<dyn Fn(&NodeId) -> NodeId + Send + Sync>;

/// State shared by the stream tables of all connections.
pub(crate) struct HostState {
    pub(crate) node: NodeId,
    /// Address for callers.
    pub(crate) endpoint: String,
    pub(crate) served: Served,
    pub(crate) config: ServeConfig,
    /// KV budget in bytes, at most that of `config`.
    pub(crate) kv_budget: AtomicU64,
    /// Memory use of the layers.
    pub(crate) weight_bytes: u64,
    pub(crate) slots: Arc<Slots>,
    /// Commands to the compute thread. Their number is bounded by their content: an open holds a
    /// stream's slot, a step or truncation a ticket of its stream, and a close follows an open. So
    /// no message is refused here, and a close never waits behind a full queue.
    pub(crate) inbox: Inbox,
    pub(crate) events: Arc<HostEvents>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) parties: Parties,
}

impl HostState {
    pub(crate) fn kv_budget(&self) -> u64 {
        self.kv_budget.load(Ordering::Relaxed)
    }

    /// Hands a command to the compute thread. Returns `false` if the thread has ended.
    pub(crate) fn tell(&self, command: Command) -> bool {
        self.inbox.send(command)
    }

    /// Limit of positions per stream.
    fn max_positions(&self) -> u32 {
        let limit = self.config.max_positions.unwrap_or(u32::MAX);
        limit.min(self.served.context)
    }

    /// Descriptor with the current load.
    pub(crate) fn descriptor(&self) -> Descriptor {
        let served = &self.served;
        let (ms_per_token, queue_depth) = self.events.load();
        let weights_mb = self.weight_bytes.div_ceil(1 << 20);
        let kv_mb = self.kv_budget().div_ceil(1 << 20);
        Descriptor {
            shard_id: Descriptor::shard_id(&served.model_id, served.lo, served.hi),
            model_id: served.model_id.clone(),
            weights_sha256: hex::encode(served.weights),
            layer_range: (served.lo, served.hi),
            total_layers: served.total_layers,
            vram_required_mb: weights_mb.saturating_add(kv_mb),
            weights_mb,
            kv_mb,
            max_concurrent_streams: self.config.max_concurrent_streams,
            host: self.node,
            endpoint: self.endpoint.clone(),
            advertised_at: now_ms() / 1000,
            boundary_dtype: served.boundary.descriptor_name().to_owned(),
            arithmetic: served.arithmetic.clone(),
            ms_per_token,
            queue_depth,
            software: self.software(),
        }
    }

    /// Products, with that of the graphics card.
    fn software(&self) -> String {
        let mut software = self.config.software.clone();
        if let Some(card) = self.events.stats().card {
            let name = card
                .chars()
                .map(|c| match c.is_ascii_graphic() && c != '/' {
                    true => c,
                    false => '-',
                });
            // Names of drivers can be long, and descriptors are not.
            let name = name.take(CARD_NAME);
            software.push_str(Descriptor::CARD);
            software.extend(name);
        }
        software
    }

    /// Answer to DESCRIBE.
    ///
    /// # Errors
    /// [`CloseCode::Internal`] if the descriptor, valid at the start, cannot be encoded: a defect.
    pub(crate) fn description(&self) -> Result<Message, CloseCode> {
        let bytes = self.descriptor().to_cbor().map_err(|error| {
            tracing::error!("the host's descriptor cannot be encoded: {error}");
            CloseCode::Internal
        })?;
        Ok(Message::Descriptor(bytes.into()))
    }
}

/// Characters of the name of a graphics card in a descriptor.
const CARD_NAME: usize = 48;

/// Name of one epoch of a stream on its connection.
fn name(stream: u32, epoch: u32) -> StreamClose {
    StreamClose { stream, epoch }
}

/// Streams of one connection. Dropping it ends them all.
pub(crate) struct StreamTable {
    host_state: Arc<HostState>,
    caller: Caller,
    sink: Arc<dyn ResponseSink>,
    /// Latest epoch of each stream number.
    handles: BTreeMap<u32, Arc<StreamHandle>>,
}

impl StreamTable {
    pub(crate) fn new(
        host_state: Arc<HostState>,
        caller: Caller,
        sink: Arc<dyn ResponseSink>,
    ) -> Self {
        Self {
            host_state,
            caller,
            sink,
            handles: BTreeMap::new(),
        }
    }

    fn open(&mut self, open: &StreamOpen) {
        if let Some(handle) = self.growing(open) {
            return self.grow(&handle, open);
        }
        if let Err(fault) = self.begin(open) {
            self.refuse(name(open.stream, open.epoch), None, &fault);
        }
    }

    /// Ends the earlier epoch of the stream, and its waiting steps.
    fn supersede(&mut self, open: &StreamOpen) -> Result<(), StreamFault> {
        let (stream, epoch) = (open.stream, open.epoch);
        let Some(old) = self.handles.get(&stream).map(Arc::clone) else {
            return Ok(());
        };
        let current = old.name.epoch;
        if current >= epoch {
            return Err(StreamFault::StaleOpen { stream, current });
        }
        self.fail(&old, None, &StreamFault::StaleEpoch { current: epoch });
        self.handles.remove(&stream);
        Ok(())
    }

    /// The stream that is opened again in the same epoch for more positions.
    fn growing(&self, open: &StreamOpen) -> Option<Arc<StreamHandle>> {
        let handle = self.handles.get(&open.stream)?;
        let grows = handle.name.epoch == open.epoch
            && handle.layers == (open.lo, open.hi)
            && open.max_positions > handle.max_positions();
        (grows && !handle.has_ended()).then(|| Arc::clone(handle))
    }

    fn grow(&self, handle: &Arc<StreamHandle>, open: &StreamOpen) {
        let max_positions = open.max_positions;
        if let Err(fault) = self.check_open(open) {
            return self.fail(handle, None, &fault);
        }
        handle.grow(max_positions);
        let grow = Command::Grow {
            handle: handle.id,
            max_positions,
        };
        if !self.host_state.tell(grow) {
            self.fail(handle, None, &StreamFault::ShuttingDown);
        }
    }

    fn check_open(&self, open: &StreamOpen) -> Result<(), StreamFault> {
        let served = &self.host_state.served;
        if open.weights != served.weights {
            return Err(StreamFault::WeightsMismatch {
                served: hex::encode(served.weights),
            });
        }
        let (lo, hi, total) = (open.lo, open.hi, served.total_layers);
        if lo > hi || hi >= total {
            return Err(StreamFault::BadDescriptor { lo, hi, total });
        }
        if lo < served.lo || hi > served.hi {
            return Err(StreamFault::LayerRange {
                lo: served.lo,
                hi: served.hi,
            });
        }
        let max = self.host_state.max_positions();
        if open.max_positions == 0 || open.max_positions > max {
            return Err(StreamFault::ContextFull { max });
        }
        Ok(())
    }

    /// The stream that a new one is forked off.
    fn source(&self, open: &StreamOpen, fork: Fork) -> Result<ForkSource, StreamFault> {
        let max = open.max_positions;
        if fork.position > max {
            return Err(StreamFault::ContextFull { max });
        }
        let handle = self.handles.get(&fork.stream).filter(|handle| {
            handle.name.epoch == fork.epoch
                && handle.layers == (open.lo, open.hi)
                && !handle.has_ended()
        });
        let handle = handle.ok_or(StreamFault::UnknownStream)?;
        Ok(ForkSource {
            handle: handle.id,
            position: fork.position,
        })
    }

    fn begin(&mut self, open: &StreamOpen) -> Result<(), StreamFault> {
        let now = self.host_state.clock.now();
        // All checks come before `supersede`: a refused open must not end an earlier epoch.
        if self.host_state.slots.is_closed() {
            return Err(StreamFault::ShuttingDown);
        }
        self.check_open(open)?;
        let source = open.fork.map(|fork| self.source(open, fork)).transpose()?;
        if !self.host_state.slots.may_open(self.caller.party, now) {
            return Err(StreamFault::StreamChurn);
        }
        self.supersede(open)?;
        let (slots, sink) = (&self.host_state.slots, Arc::clone(&self.sink));
        // A resting stream that is preempted may belong to another connection.
        let handle = StreamHandle::begin(slots, self.caller, open, sink, now, |resting| {
            self.fail(resting, None, &StreamFault::Preempted);
        })?;
        let begin = Command::Open {
            handle: Arc::clone(&handle),
            source,
        };
        if !self.host_state.tell(begin) {
            handle.end(|| ());
            return Err(StreamFault::ShuttingDown);
        }
        self.forget_old();
        self.handles.insert(open.stream, handle);
        Ok(())
    }

    fn step(&mut self, step: Step) {
        self.host_state.events.received(step.data.len());
        let name = name(step.stream, step.epoch);
        let Some(handle) = self.living(name, Some(step.position)) else {
            self.host_state.events.dropped(1);
            return wipe(step.data);
        };
        let (position, arrived) = (step.position, self.host_state.clock.now());
        handle.asked(step.rows, arrived);
        let ticket = self
            .check(&step, handle.layers)
            .and_then(|()| handle.ticket(step.rows, self.host_state.config.max_waiting_steps));
        let ticket = match ticket {
            Ok(ticket) => ticket,
            Err(fault) => {
                wipe(step.data);
                return self.fail(&handle, Some(position), &fault);
            }
        };
        let work = Work::Step(Box::new(Job::new(step, ticket, arrived)));
        let id = handle.id;
        if !self.host_state.tell(Command::Work { handle: id, work }) {
            self.fail(&handle, Some(position), &StreamFault::ShuttingDown);
        }
    }

    fn check(&self, step: &Step, layers: (u32, u32)) -> Result<(), StreamFault> {
        let served = &self.host_state.served;
        let shape = |what: String| Err(StreamFault::TensorShape { what });
        if step.rows == 0 {
            return shape("a step has at least one row".into());
        }
        let values = values_before(layers, served.rows);
        if step.width as usize != values {
            return shape(format!("rows have {values} values, not {}", step.width));
        }
        let boundary = served.boundary;
        if DType::of_rows(boundary.descriptor_name()) != Some(step.dtype) {
            return shape(format!("values are {boundary}, not {:?}", step.dtype));
        }
        let expected = u64::from(step.rows)
            .checked_mul(u64::from(step.width))
            .and_then(|values| values.checked_mul(boundary.bytes_per_value() as u64));
        if expected != Some(step.data.len() as u64) {
            return shape(format!(
                "{} bytes do not hold {} such rows",
                step.data.len(),
                step.rows
            ));
        }
        if !all_finite(served.boundary, &step.data) {
            return Err(StreamFault::TensorNonFinite);
        }
        Ok(())
    }

    fn truncate(&mut self, truncate: Truncate) {
        let name = name(truncate.stream, truncate.epoch);
        let Some(handle) = self.living(name, None) else {
            return;
        };
        match handle.ticket(0, self.host_state.config.max_waiting_steps) {
            Err(fault) => self.fail(&handle, None, &fault),
            Ok(ticket) => {
                let (answer, now) = (truncate.answer, self.host_state.clock.now());
                match answer {
                    true => handle.asked(0, now),
                    false => handle.rest(now),
                }
                let work = Work::Truncate {
                    position: truncate.position,
                    answer,
                    _ticket: ticket,
                };
                self.host_state.tell(Command::Work {
                    handle: handle.id,
                    work,
                });
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn handle_of(&self, stream: u32) -> Arc<StreamHandle> {
        Arc::clone(&self.handles[&stream])
    }

    fn close(&mut self, close: StreamClose) {
        let handle = self.handles.get(&close.stream);
        if let Some(handle) = handle.filter(|handle| handle.name == close) {
            self.end(handle, || handle.closed("closed"));
        }
    }

    /// Returns the stream that a message is for, if it is open. Otherwise answers with the fault.
    fn living(&self, name: StreamClose, position: Option<u32>) -> Option<Arc<StreamHandle>> {
        let fault = match self.handles.get(&name.stream) {
            Some(handle) if handle.name == name && !handle.was_announced() => {
                return Some(Arc::clone(handle));
            }
            Some(handle) if handle.name == name => StreamFault::StreamEnded,
            Some(handle) if handle.name.epoch > name.epoch => StreamFault::StaleEpoch {
                current: handle.name.epoch,
            },
            _ => StreamFault::UnknownStream,
        };
        self.refuse(name, position, &fault);
        None
    }

    /// Ends a stream from here, if it is open, and calls `announce`.
    fn end(&self, handle: &StreamHandle, announce: impl FnOnce()) {
        handle.end(|| {
            self.host_state.tell(Command::Close { handle: handle.id });
            announce();
        });
    }

    /// Ends a stream from here and tells its caller.
    fn fail(&self, handle: &StreamHandle, position: Option<u32>, fault: &StreamFault) {
        self.end(handle, || handle.failed(position, fault));
    }

    /// Answers a message with a fault, without ending a stream.
    fn refuse(&self, name: StreamClose, position: Option<u32>, fault: &StreamFault) {
        self.host_state
            .events
            .stream_refused(self.caller, name, fault);
        self.sink
            .send(Message::StreamError(fault.message(name, position)));
    }

    /// Bounds the memory for ended streams.
    fn forget_old(&mut self) {
        let slots = self.host_state.config.max_concurrent_streams as usize;
        let most = slots.saturating_mul(REMEMBERED_PER_SLOT);
        if self.handles.len() >= most.max(REMEMBERED_PER_SLOT) {
            self.handles.retain(|_, handle| !handle.has_ended());
        }
    }
}

impl Handler for StreamTable {
    /// Handles one message of the caller, in the task that reads it.
    ///
    /// # Errors
    /// The close code, if a caller of a pipeline session must not send such a message.
    fn message(&mut self, message: Message) -> Result<(), CloseCode> {
        match message {
            Message::StreamOpen(open) => self.open(&open),
            Message::Step(step) => self.step(step),
            Message::Truncate(truncate) => self.truncate(truncate),
            Message::StreamClose(close) => self.close(close),
            Message::Describe => self.sink.send(self.host_state.description()?),
            // Messages of a host, and of other purposes.
            Message::StreamOpened(_)
            | Message::StreamError(_)
            | Message::StepResult(_)
            | Message::Descriptor(_)
            | Message::Truncated(_)
            | Message::Receipt(_)
            | Message::Leaving { .. }
            | Message::Tensor(_) => return Err(CloseCode::ProtocolState),
        }
        Ok(())
    }
}

impl Drop for StreamTable {
    fn drop(&mut self) {
        for handle in self.handles.values() {
            self.end(handle, || handle.closed("session_ended"));
        }
    }
}
