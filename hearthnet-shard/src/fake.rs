//! Fakes for tests and fuzzing of scheduling and protocol: an engine of plain arithmetic, a clock that
//! is set by hand, a sink that records, and a host on one thread.

#![cfg_attr(not(test), allow(dead_code))]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hearthnet_bus::NodeKey;
use hearthnet_bus::flight::{Event, SessionId};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::RowShape;
use hearthnet_transport::{DType, Message, NodeId, Step, StreamOpen, Want};
use parking_lot::{Condvar, Mutex};

use crate::clock::Clock;
use crate::config::ServeConfig;
use crate::engine::{
    EngineSource, Footprint, LayerEngine, LoadFault, LoadPhase, Served, Span, StartProgress,
};
use crate::events::{Caller, HostEvents, Stats};
use crate::fault::StreamFault;
use crate::inbox::Inbox;
use crate::notary::Notary;
use crate::sched::{Command, Scheduler};
use crate::stream_handle::{ResponseSink, Slots};
use crate::stream_table::{HostState, StreamTable};
use crate::sync::mpsc::Receiver;

pub(crate) const WIDTH: u32 = 4;
pub(crate) const WEIGHTS: [u8; 32] = [7; 32];
/// Positions per page, and bytes of KV per position.
pub(crate) const PAGE: u32 = 16;
pub(crate) const KV_BYTES: u64 = 10;
pub(crate) const WEIGHT_BYTES: u64 = 1234;
/// A row that begins with this value makes the engine panic, as a defect would.
pub(crate) const PANICS: f32 = 2000.0;
/// A row that begins with this value makes the engine lose its device.
pub(crate) const LOSES: f32 = 3000.0;
/// A row that begins with this value overflows the boundary dtype.
pub(crate) const OVERFLOWS: f32 = 1000.0;

/// A host on one thread and in virtual time.
pub(crate) struct Host {
    pub(crate) host_state: Arc<HostState>,
    pub(crate) commands: Receiver<Command>,
    pub(crate) scheduler: Scheduler<FakeSource>,
    pub(crate) probe: Arc<Probe>,
    pub(crate) clock: Arc<HandClock>,
}

impl Host {
    /// Host that has loaded its engine. `record` gets its events.
    pub(crate) fn start(served: Served, config: ServeConfig, record: fn(Event)) -> Self {
        let (probe, clock) = (Arc::new(Probe::default()), Arc::new(HandClock::default()));
        *probe.clock.lock() = Some(clock.clone());
        let events = Arc::new(HostEvents::recording(record));
        let (inbox, commands) = Inbox::of_thread();
        let key = NodeKey::from_secret(&[1; 32]);
        let owner = key.id();
        let source = FakeSource(Arc::clone(&probe));
        let host_state = host_state(
            owner,
            served.clone(),
            config.clone(),
            inbox,
            Arc::clone(&events),
            clock.clone(),
        );
        let notary = Notary::here(owner, Box::new(move |statement| Some(statement.sign(&key))));
        let mut scheduler = Scheduler::new(source, served, config, events, clock.clone(), notary);
        assert!(scheduler.load(&mut |_| {}).is_ok());
        Self {
            host_state: Arc::new(host_state),
            commands,
            scheduler,
            probe,
            clock,
        }
    }

    /// A caller's connection, and what the host sends to it.
    pub(crate) fn connect(&self, caller: Caller) -> (StreamTable, Arc<Recorder>) {
        let sink = Arc::new(Recorder::default());
        let host_state = Arc::clone(&self.host_state);
        (StreamTable::new(host_state, caller, sink.clone()), sink)
    }

    /// Takes the commands in, as the compute thread does before a batch.
    pub(crate) fn take_in(&mut self) {
        for command in self.commands.try_iter() {
            self.scheduler.handle(command);
        }
        self.scheduler.upkeep();
    }

    /// Runs batches until no step waits.
    pub(crate) fn run(&mut self) {
        self.take_in();
        while self.scheduler.turn() {
            self.take_in();
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.host_state.events.stats()
    }

    /// No stream, step or page is left.
    pub(crate) fn assert_empty(&self) {
        let stats = self.stats();
        assert_eq!(
            (
                stats.streams,
                stats.steps_waiting,
                stats.kv_bytes,
                stats.kv_pages_used
            ),
            (0, 0, 0, 0)
        );
        assert_eq!(self.probe.sequences.load(Ordering::SeqCst), 0);
        assert_eq!(self.probe.kv_bytes.load(Ordering::SeqCst), 0);
    }
}

/// State of a host whose callers each count alone.
pub(crate) fn host_state(
    node: NodeId,
    served: Served,
    config: ServeConfig,
    inbox: Inbox,
    events: Arc<HostEvents>,
    clock: Arc<HandClock>,
) -> HostState {
    HostState {
        node,
        endpoint: "127.0.0.1:1".into(),
        served,
        slots: Slots::new(node, &config, Arc::clone(&events)),
        kv_budget: config.kv_budget_bytes.into(),
        config,
        weight_bytes: 1,
        inbox,
        events,
        clock,
        parties: Arc::new(|caller| *caller),
    }
}

/// Configuration of a host with memory for everything.
pub(crate) fn config() -> ServeConfig {
    ServeConfig {
        kv_budget_bytes: u64::MAX,
        ..ServeConfig::new("")
    }
}

/// A caller that counts alone, in its first session.
pub(crate) fn caller_id(peer: u8) -> Caller {
    let node = NodeId::from_checked([peer; 32]);
    Caller {
        node,
        party: node,
        session: SessionId::of_token(&[peer]),
        receipts: 0,
    }
}

/// Opens a stream through all layers of the host.
pub(crate) fn open_for(stream: u32, epoch: u32, max_positions: u32) -> StreamOpen {
    StreamOpen {
        stream,
        epoch,
        weights: WEIGHTS,
        lo: 2,
        hi: 5,
        max_positions,
        fork: None,
    }
}

pub(crate) fn step_of(stream: u32, position: u32, rows: &[[f32; 4]]) -> Step {
    Step {
        stream,
        epoch: 1,
        position,
        rows: rows.len() as u32,
        width: WIDTH,
        dtype: DType::F16,
        want: Want::All,
        data: encode(rows),
    }
}

pub(crate) fn encode(rows: &[[f32; 4]]) -> Bytes {
    let mut data = Vec::new();
    BoundaryDtype::F16.encode(rows.as_flattened(), &mut data);
    data.into()
}

/// Layers 2 to 5 of a model of 8, whose rows have 4 values in fp16.
pub(crate) fn served() -> Served {
    Served {
        model_id: "fake".into(),
        weights: WEIGHTS,
        lo: 2,
        hi: 5,
        total_layers: 8,
        rows: RowShape::plain(WIDTH),
        boundary: BoundaryDtype::F16,
        context: 4096,
        arithmetic: "fake-1".into(),
    }
}

/// Lets tests observe and block the engine.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// Rows of each span of each batch.
    pub(crate) batches: Mutex<Vec<Vec<u32>>>,
    /// Sequences open now.
    pub(crate) sequences: AtomicU32,
    pub(crate) kv_bytes: AtomicU64,
    /// Engines in memory now.
    pub(crate) loaded: AtomicU32,
    /// How many lost engines may be loaded again.
    pub(crate) reloads: AtomicU32,
    /// Error of the next load.
    pub(crate) load_error: Mutex<Option<String>>,
    /// If set, a sequence returns only to its length and to multiples of this number, as with
    /// recurrent layers.
    pub(crate) checkpoints: AtomicU32,
    /// If set, the engine advances this clock by one millisecond per row.
    pub(crate) clock: Mutex<Option<Arc<HandClock>>>,
    gate: Mutex<Gate>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct Gate {
    shut: bool,
    inside: bool,
}

impl Probe {
    /// Makes the next batch block at its beginning until [`Probe::open_gate`].
    pub(crate) fn shut_gate(&self) {
        self.gate.lock().shut = true;
    }

    pub(crate) fn open_gate(&self) {
        self.gate.lock().shut = false;
        self.moved.notify_all();
    }

    /// Blocks until a batch stands at the shut gate.
    pub(crate) fn wait_inside(&self) {
        let mut gate = self.gate.lock();
        while !gate.inside {
            self.moved.wait(&mut gate);
        }
    }

    fn pass(&self) {
        let mut gate = self.gate.lock();
        gate.inside = true;
        self.moved.notify_all();
        while gate.shut {
            self.moved.wait(&mut gate);
        }
        gate.inside = false;
    }
}

/// Adds three things to each value: the first value of the row before it in its sequence, the
/// position modulo 8, and twice the number of layers that the range lacks. So wrong history, a
/// wrong position or wrong layers show. Small integers stay exact in fp16.
pub(crate) struct FakeEngine {
    probe: Arc<Probe>,
    sequences: HashMap<u32, Vec<f32>>,
    next: u32,
    lost: bool,
}

impl FakeEngine {
    fn count(&self) {
        let pages: u64 = self
            .sequences
            .values()
            .map(|s| (s.len() as u64).div_ceil(u64::from(PAGE)))
            .sum();
        self.probe
            .kv_bytes
            .store(pages * u64::from(PAGE) * KV_BYTES, Ordering::SeqCst);
        self.probe
            .sequences
            .store(self.sequences.len() as u32, Ordering::SeqCst);
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.sequences.clear();
        self.count();
        self.probe.loaded.fetch_sub(1, Ordering::SeqCst);
    }
}

impl LayerEngine for FakeEngine {
    type Seq = u32;

    fn open(&mut self) -> Result<u32, StreamFault> {
        self.next += 1;
        self.sequences.insert(self.next, Vec::new());
        self.count();
        Ok(self.next)
    }

    fn fork(&mut self, seq: u32, length: u32) -> Result<u32, StreamFault> {
        let history = self.sequences.get(&seq).cloned().unwrap_or_default();
        self.next += 1;
        self.sequences.insert(self.next, history);
        let fork = self.next;
        if let Err(fault) = self.truncate_to(fork, length) {
            self.close(fork);
            return Err(fault);
        }
        self.count();
        Ok(fork)
    }

    fn close(&mut self, seq: u32) {
        self.sequences.remove(&seq);
        self.count();
    }

    fn len(&self, seq: u32) -> u32 {
        self.sequences.get(&seq).map_or(0, |s| s.len() as u32)
    }

    fn truncate(&mut self, seq: u32, length: u32) -> Result<u32, StreamFault> {
        if length > self.len(seq) {
            return Err(StreamFault::PositionGap {
                position: length,
                length: self.len(seq),
            });
        }
        let kept = match self.probe.checkpoints.load(Ordering::SeqCst) {
            every if every > 0 && length < self.len(seq) => length - length % every,
            _ => length,
        };
        self.sequences
            .entry(seq)
            .or_default()
            .truncate(kept as usize);
        self.count();
        Ok(kept)
    }

    fn forward(
        &mut self,
        (lo, hi): (u32, u32),
        spans: &[Span<u32>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        assert!(
            (2..=5).contains(&lo) && (lo..=5).contains(&hi),
            "the stream table checks layers"
        );
        let lacking = (2 * (4 - (hi + 1 - lo))) as f32;
        self.probe.pass();
        self.probe
            .batches
            .lock()
            .push(spans.iter().map(|span| span.rows).collect());
        if let Some(clock) = self.probe.clock.lock().as_ref() {
            clock.advance(Duration::from_millis(u64::from(
                spans.iter().map(|s| s.rows).sum::<u32>(),
            )));
        }
        let mut rows = x.chunks_exact_mut(WIDTH as usize);
        for span in spans {
            assert_eq!(
                span.position,
                self.len(span.seq),
                "the scheduler checks positions"
            );
            let history = self.sequences.entry(span.seq).or_default();
            for row in rows.by_ref().take(span.rows as usize) {
                let first = row[0];
                assert_ne!(first, PANICS, "a defect of the engine");
                if first == LOSES {
                    self.lost = true;
                    let reason = "the driver was reset".into();
                    return Err(StreamFault::Internal { reason });
                }
                // Some rows have gone in already: the caller has to undo a failed batch.
                if first == OVERFLOWS {
                    return Err(StreamFault::BoundaryOverflow { layer: 3 });
                }
                let before = history.last().copied().unwrap_or(0.0);
                let add = before + (history.len() % 8) as f32 + lacking;
                row.iter_mut().for_each(|value| *value += add);
                history.push(first);
            }
        }
        self.count();
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        WEIGHT_BYTES
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            per_sequence: 0,
            per_position: KV_BYTES,
            page: PAGE,
        }
    }

    fn kv_bytes_in_use(&self) -> u64 {
        self.probe.kv_bytes.load(Ordering::SeqCst)
    }

    fn is_lost(&mut self) -> bool {
        self.lost
    }
}

/// Expected output for rows at `position`, after a row that began with `before`.
pub(crate) fn expected(before: f32, position: u32, rows: &[[f32; 4]]) -> Vec<[f32; 4]> {
    let firsts = std::iter::once(before).chain(rows.iter().map(|row| row[0]));
    rows.iter()
        .zip(firsts)
        .zip(position..)
        .map(|((row, before), at)| row.map(|value| value + before + (at % 8) as f32))
        .collect()
}

pub(crate) struct FakeSource(pub(crate) Arc<Probe>);

impl EngineSource for FakeSource {
    type Engine = FakeEngine;

    fn load(&mut self, progress: &mut dyn FnMut(StartProgress)) -> Result<FakeEngine, LoadFault> {
        let (done, total) = (WEIGHT_BYTES, WEIGHT_BYTES);
        let mut progress = |phase| progress(StartProgress { phase, done, total });
        progress(LoadPhase::Verifying);
        if let Some(error) = self.0.load_error.lock().take() {
            return Err(error.into());
        }
        progress(LoadPhase::Loading);
        self.0.loaded.fetch_add(1, Ordering::SeqCst);
        Ok(FakeEngine {
            probe: Arc::clone(&self.0),
            sequences: HashMap::new(),
            next: 0,
            lost: false,
        })
    }

    fn may_reload(&mut self) -> bool {
        let reloads = &self.0.reloads;
        let left = reloads.load(Ordering::SeqCst);
        reloads.store(left.saturating_sub(1), Ordering::SeqCst);
        left > 0
    }
}

/// Clock that a test moves by hand.
#[derive(Debug, Default)]
pub(crate) struct HandClock {
    micros: AtomicU64,
    /// Woken when the clock moves, as by a timer.
    inbox: Mutex<Option<Inbox>>,
}

impl HandClock {
    pub(crate) fn drives(&self, inbox: &Inbox) {
        *self.inbox.lock() = Some(inbox.clone());
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.micros
            .fetch_add(by.as_micros() as u64, Ordering::SeqCst);
        if let Some(inbox) = self.inbox.lock().as_ref() {
            // Does nothing: there is no such stream.
            inbox.send(Command::Close { handle: 0 });
        }
    }
}

impl Clock for HandClock {
    fn now(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::SeqCst))
    }
}

/// ResponseSink that records the messages.
#[derive(Default)]
pub(crate) struct Recorder {
    sent: Mutex<Vec<Message>>,
}

impl Recorder {
    pub(crate) fn is_empty(&self) -> bool {
        self.sent.lock().is_empty()
    }

    pub(crate) fn take(&self) -> Vec<Message> {
        std::mem::take(&mut *self.sent.lock())
    }
}

impl ResponseSink for Recorder {
    fn send_all(&self, messages: Vec<Message>) {
        self.sent.lock().extend(messages);
    }
}
