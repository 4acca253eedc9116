//! The front desk of one connection: judges each message of the caller before it
//! reaches the compute thread.
//!
//! Everything that can be said without the engine is said here and at once, however busy
//! the engine is: wrong weights, wrong layers, no place free, wrong shape, values that are
//! not finite, an old epoch. Pure but for the shared counters: answers go to the
//! connection's [`Outlet`], commands to the [`Inbox`].
//!
//! Two lives of a stream, and what answers a step of each:
//!
//! ```text
//! caller   open e1   step e1   open e2                step e1      step e2
//! host     opened    result    stale_epoch, opened    stale_epoch  result
//! ```
//!
//! Every step is answered, also one that was on its way when its stream ended: the answer
//! gives the session's step slot back.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_model::BoundaryDtype;
use hearthnet_transport::{
    CloseCode, DType, Message, PeerKey, Step, StreamClose, StreamOpen, Truncate,
};

use crate::batch::{all_finite, wipe};
use crate::clock::Clock;
use crate::engine::Served;
use crate::fault::StreamFault;
use crate::inbox::Inbox;
use crate::life::{Beginning, Life, Outlet, Slots};
use crate::sched::Command;
use crate::stats::Counters;

/// Ended lives that a connection remembers per place that it could hold, to tell a late
/// step of one from a step that makes no sense.
const REMEMBERED_PER_SLOT: usize = 16;

/// What all desks share.
pub(crate) struct Office {
    /// What is said about the host: the parts of the descriptor that do not change.
    pub(crate) about: About,
    pub(crate) served: Served,
    pub(crate) slots: Arc<Slots>,
    pub(crate) max_streams: u32,
    pub(crate) max_positions: u32,
    pub(crate) max_waiting_steps: u32,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) next_life: AtomicU64,
}

/// The host's own description of itself, as far as it stays the same.
pub(crate) struct About {
    pub(crate) node: NodeId,
    pub(crate) endpoint: String,
    /// Memory that the layers take.
    pub(crate) weight_bytes: u64,
    /// Memory that the KV of all streams may take.
    pub(crate) kv_budget_bytes: u64,
}

impl Office {
    /// What others need to know in order to use this host, as of now.
    pub(crate) fn descriptor(&self) -> Descriptor {
        let served = &self.served;
        let streams = self.slots.taken();
        let weights_mb = self.about.weight_bytes.div_ceil(1 << 20);
        let kv_mb = self.about.kv_budget_bytes.div_ceil(1 << 20);
        Descriptor {
            shard_id: Descriptor::shard_id(&served.model_id, served.lo, served.hi),
            model_id: served.model_id.clone(),
            weights_sha256: hex(&served.weights),
            layer_range: (served.lo, served.hi),
            total_layers: served.total_layers,
            vram_required_mb: weights_mb.saturating_add(kv_mb),
            weights_mb,
            kv_mb,
            max_concurrent_streams: self.max_streams,
            host: self.about.node.to_string(),
            endpoint: self.about.endpoint.clone(),
            advertised_at: self.clock.unix_secs(),
            boundary_dtype: served.boundary.descriptor_name().to_owned(),
            arithmetic: served.arithmetic.clone(),
            ms_per_token: self.counters.snapshot(streams).ms_per_token,
            queue_depth: streams,
            software: concat!("hearthnet/", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }

    /// The answer to a caller that asks what is served.
    pub(crate) fn description(&self) -> Message {
        let bytes = self.descriptor().to_cbor();
        debug_assert!(bytes.is_ok(), "its texts were checked at the start");
        Message::Descriptor(bytes.unwrap_or_default().into())
    }
}

/// One connection's desk. Dropping it ends all its streams.
pub(crate) struct Desk {
    office: Arc<Office>,
    peer: PeerKey,
    outlet: Arc<dyn Outlet>,
    /// The latest life of each stream number.
    lives: HashMap<u32, Arc<Life>>,
}

impl Desk {
    pub(crate) fn new(office: Arc<Office>, peer: PeerKey, outlet: Arc<dyn Outlet>) -> Self {
        Self {
            office,
            peer,
            outlet,
            lives: HashMap::new(),
        }
    }

    /// Takes one message of the caller.
    ///
    /// # Errors
    /// The code to close the session with, if the message has no place in it.
    pub(crate) fn handle(&mut self, message: Message) -> Result<(), CloseCode> {
        match message {
            Message::StreamOpen(open) => self.open(&open),
            Message::Step(step) => self.step(step),
            Message::Truncate(truncate) => self.truncate(truncate),
            Message::StreamClose(close) => self.close(close),
            Message::Describe => self.outlet.send(self.office.description()),
            // What only a host says, and what belongs to other purposes.
            Message::StreamOpened(_)
            | Message::StreamError(_)
            | Message::StepResult(_)
            | Message::Descriptor(_)
            | Message::Leaving { .. }
            | Message::Tensor(_) => return Err(CloseCode::ProtocolState),
        }
        Ok(())
    }

    fn open(&mut self, open: &StreamOpen) {
        let name = StreamClose {
            stream: open.stream,
            epoch: open.epoch,
        };
        if let Some(life) = self.growing(open) {
            return self.grow(&life, open);
        }
        // Before an earlier life is given up for what would be refused.
        let begun = self
            .stays()
            .and_then(|()| self.judge(open))
            .and_then(|()| self.supersede(open))
            .and_then(|()| self.begin(open));
        if let Err(fault) = begun {
            self.refuse(name, None, &fault);
        }
    }

    /// A later life begins, so the earlier one is over, and its waiting steps with it.
    fn supersede(&mut self, open: &StreamOpen) -> Result<(), StreamFault> {
        let (stream, epoch) = (open.stream, open.epoch);
        let Some(old) = self.lives.get(&stream).map(Arc::clone) else {
            return Ok(());
        };
        if old.epoch >= epoch {
            let current = old.epoch;
            return Err(StreamFault::StaleOpen { stream, current });
        }
        self.fail(&old, None, &StreamFault::StaleEpoch { current: epoch });
        self.lives.remove(&stream);
        Ok(())
    }

    /// The life that is opened once more, for more positions.
    fn growing(&self, open: &StreamOpen) -> Option<Arc<Life>> {
        let life = self.lives.get(&open.stream)?;
        let grows = life.epoch == open.epoch
            && life.layers == (open.lo, open.hi)
            && open.max_positions > life.max_positions();
        (grows && !life.has_ended()).then(|| Arc::clone(life))
    }

    fn grow(&self, life: &Arc<Life>, open: &StreamOpen) {
        let max_positions = open.max_positions;
        if let Err(fault) = self.judge(open) {
            return self.fail(life, None, &fault);
        }
        life.grow(max_positions);
        let grow = Command::Grow {
            life: life.id,
            max_positions,
        };
        if !self.office.inbox.push(grow) {
            self.fail(life, None, &StreamFault::ShuttingDown);
        }
    }

    fn stays(&self) -> Result<(), StreamFault> {
        match self.office.slots.is_closed() {
            true => Err(StreamFault::ShuttingDown),
            false => Ok(()),
        }
    }

    fn judge(&self, open: &StreamOpen) -> Result<(), StreamFault> {
        let (office, served) = (&self.office, &self.office.served);
        if open.weights != served.weights {
            return Err(StreamFault::WeightsMismatch {
                served: hex(&served.weights),
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
        if open.max_positions == 0 || open.max_positions > office.max_positions {
            return Err(StreamFault::ContextFull {
                max: office.max_positions,
            });
        }
        Ok(())
    }

    fn begin(&mut self, open: &StreamOpen) -> Result<(), StreamFault> {
        let office = &self.office;
        let id = office.next_life.fetch_add(1, Ordering::Relaxed);
        let beginning = Beginning {
            caller: self.peer,
            id,
            open,
            outlet: Arc::clone(&self.outlet),
            now: office.clock.now(),
        };
        let life = Life::begin(&office.slots, beginning, |resting| self.preempt(resting))?;
        if !office.inbox.push(Command::Open(Arc::clone(&life))) {
            life.end(|| ());
            return Err(StreamFault::ShuttingDown);
        }
        self.forget_old();
        self.lives.insert(open.stream, life);
        Ok(())
    }

    /// A life that rests gives way to one that begins. Its caller may sit at another desk.
    fn preempt(&self, life: &Life) {
        if self.end(life) {
            let fault = StreamFault::Preempted;
            self.office.counters.preempted();
            self.office.counters.error(fault.code());
            let error = fault.message(life.name(), None);
            life.outlet.send(Message::StreamError(error));
        }
    }

    fn step(&mut self, step: Step) {
        self.office.counters.received(step.data.len());
        let name = StreamClose {
            stream: step.stream,
            epoch: step.epoch,
        };
        let Some(life) = self.living(name, Some(step.position)) else {
            self.office.counters.dropped(1);
            return wipe(step.data);
        };
        if let Err(fault) = self.check(&step) {
            wipe(step.data);
            return self.fail(&life, Some(step.position), &fault);
        }
        let position = step.position;
        match life.ticket(step.rows, self.office.max_waiting_steps) {
            Err(fault) => {
                wipe(step.data);
                self.fail(&life, Some(position), &fault);
            }
            Ok(ticket) => {
                let arrived = self.office.clock.now();
                life.asked(arrived);
                let step = Command::Step {
                    life: life.id,
                    step,
                    ticket,
                    arrived,
                };
                if !self.office.inbox.push(step) {
                    self.fail(&life, Some(position), &StreamFault::ShuttingDown);
                }
            }
        }
    }

    fn check(&self, step: &Step) -> Result<(), StreamFault> {
        let served = &self.office.served;
        let shape = |what: String| Err(StreamFault::TensorShape { what });
        if step.rows == 0 {
            return shape("a step has at least one row".into());
        }
        if step.width != served.width {
            return shape(format!(
                "rows have {} values, not {}",
                served.width, step.width
            ));
        }
        let dtype = wire_dtype(served.boundary);
        if step.dtype != dtype {
            return shape(format!("values are {dtype:?}, not {:?}", step.dtype));
        }
        let expected = u64::from(step.rows)
            .checked_mul(u64::from(step.width))
            .and_then(|values| values.checked_mul(dtype.size() as u64));
        if expected != Some(step.data.len() as u64) {
            return shape(format!(
                "{} bytes are not {} such rows",
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
        let name = StreamClose {
            stream: truncate.stream,
            epoch: truncate.epoch,
        };
        let Some(life) = self.living(name, None) else {
            return;
        };
        match life.ticket(0, self.office.max_waiting_steps) {
            Err(fault) => self.fail(&life, None, &fault),
            Ok(ticket) => {
                let position = truncate.position;
                life.rest(self.office.clock.now());
                self.office.inbox.push(Command::Truncate {
                    life: life.id,
                    position,
                    ticket,
                });
            }
        }
    }

    fn close(&mut self, close: StreamClose) {
        let Some(life) = self
            .lives
            .get(&close.stream)
            .filter(|life| life.epoch == close.epoch)
        else {
            return;
        };
        self.end(life);
    }

    /// The life that a message is for, if it is still going on. If not, the caller is told.
    fn living(&self, name: StreamClose, position: Option<u32>) -> Option<Arc<Life>> {
        let fault = match self.lives.get(&name.stream) {
            Some(life) if life.epoch == name.epoch && !life.has_ended() => {
                return Some(Arc::clone(life));
            }
            Some(life) if life.epoch == name.epoch => StreamFault::StreamEnded,
            Some(life) if life.epoch > name.epoch => StreamFault::StaleEpoch {
                current: life.epoch,
            },
            _ => StreamFault::UnknownStream,
        };
        self.refuse(name, position, &fault);
        None
    }

    /// Ends a life from here; `false` if it had ended.
    fn end(&self, life: &Life) -> bool {
        life.end(|| {
            self.office.inbox.push(Command::Close { life: life.id });
        })
    }

    /// Ends a life from here and tells the caller.
    fn fail(&self, life: &Life, position: Option<u32>, fault: &StreamFault) {
        if self.end(life) {
            self.refuse(life.name(), position, fault);
        }
    }

    fn refuse(&self, name: StreamClose, position: Option<u32>, fault: &StreamFault) {
        self.office.counters.error(fault.code());
        tracing::debug!(
            stream = name.stream,
            epoch = name.epoch,
            code = fault.code(),
            "stream refused"
        );
        self.outlet
            .send(Message::StreamError(fault.message(name, position)));
    }

    /// Keeps the memory of ended lives bounded.
    fn forget_old(&mut self) {
        let most = (self.office.max_streams as usize).saturating_mul(REMEMBERED_PER_SLOT);
        if self.lives.len() >= most.max(REMEMBERED_PER_SLOT) {
            self.lives.retain(|_, life| !life.has_ended());
        }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        for life in self.lives.values() {
            self.end(life);
        }
    }
}

/// Bytes as lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The wire's name of a boundary format.
pub(crate) fn wire_dtype(boundary: BoundaryDtype) -> DType {
    match boundary {
        BoundaryDtype::F16 => DType::F16,
        BoundaryDtype::Bf16 => DType::Bf16,
        BoundaryDtype::F32 => DType::F32,
    }
}
