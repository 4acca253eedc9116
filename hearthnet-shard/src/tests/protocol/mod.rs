//! Protocol from the stream table to the engine and back, on one thread and in virtual time.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearthnet_bus::NodeKey;
use hearthnet_bus::flight::{Event, SessionId};
use hearthnet_bus::receipt::Statement;
use hearthnet_transport::{
    CloseCode, Code, DType, Handler, Message, NodeId, Step, StepResult, StreamClose, StreamError,
    StreamOpen, StreamOpened, Truncate, Truncated, Want,
};
use proptest::prelude::*;

use super::fake::{
    self, FakeSource, HandClock, OVERFLOWS, Probe, Recorder, WEIGHT_BYTES, WIDTH, expected, served,
};
use super::{encode, open_for, rows, step, step_of};
use crate::config::ServeConfig;
use crate::engine::Served;
use crate::events::{Caller as CallerId, HostEvents, Stats};
use crate::inbox::Inbox;
use crate::notary::Notary;
use crate::sched::{Command, Limits, Scheduler};
use crate::stream_handle::Slots;
use crate::stream_table::{HostState, StreamTable};
use crate::sync::mpsc;

mod anything;
mod checkpoints;
mod forks;
mod leaving;
mod memory;
mod receipts;
mod record;
mod slots;
mod steps;
mod streams;
mod time;

const STREAMS: u32 = 3;
const POSITIONS: u32 = 2048;
const WAITING: u32 = 4;
const IDLE: Duration = Duration::from_secs(300);
const EVICT: Duration = Duration::from_secs(600);

struct Host {
    host_state: Arc<HostState>,
    commands: mpsc::Receiver<Command>,
    scheduler: Scheduler<FakeSource>,
    probe: Arc<Probe>,
    clock: Arc<HandClock>,
}

struct Caller {
    stream_table: StreamTable,
    sink: Arc<Recorder>,
}

impl Host {
    fn new() -> Self {
        Self::with_budget(u64::MAX)
    }

    fn with_budget(kv_budget: u64) -> Self {
        Self::with_limits(|limits| limits.kv_budget = kv_budget)
    }

    fn with_limits(change: impl FnOnce(&mut Limits)) -> Self {
        Self::serving(served(), change)
    }

    fn serving(served: Served, change: impl FnOnce(&mut Limits)) -> Self {
        let (probe, clock) = (Arc::new(Probe::default()), Arc::new(HandClock::default()));
        *probe.clock.lock() = Some(clock.clone());
        let events = Arc::new(HostEvents::recording(record));
        let (inbox, commands) = Inbox::of_thread();
        let config = ServeConfig {
            max_concurrent_streams: STREAMS,
            max_streams_per_caller: STREAMS,
            max_positions: Some(POSITIONS),
            max_waiting_steps: WAITING,
            max_waiting_steps_per_caller: 2 * WAITING,
            ..ServeConfig::new("")
        };
        let host_state = HostState {
            node: owner(),
            endpoint: "127.0.0.1:1".into(),
            served: served.clone(),
            slots: Slots::new(owner(), &config, Arc::clone(&events)),
            kv_budget: config.kv_budget_bytes.into(),
            config,
            weight_bytes: 1,
            inbox,
            events: Arc::clone(&events),
            clock: clock.clone(),
            parties: Arc::new(|caller| *caller),
        };
        let mut limits = Limits {
            kv_budget: u64::MAX,
            kv_share: 100,
            stream_idle: IDLE,
            evict_after: Some(EVICT),
            chunk: Duration::from_millis(25),
        };
        change(&mut limits);
        let source = FakeSource(probe.clone());
        let sign = |statement: &Statement| Some(statement.sign(&NodeKey::from_secret(&[1; 32])));
        let notary = Notary::here(owner(), Box::new(sign));
        let mut scheduler = Scheduler::new(source, served, limits, events, clock.clone(), notary);
        scheduler.load(&mut |_| {}).unwrap();
        Self {
            host_state: Arc::new(host_state),
            commands,
            scheduler,
            probe,
            clock,
        }
    }

    fn caller(&self, peer: u8) -> Caller {
        self.caller_as(caller_id(peer))
    }

    fn caller_as(&self, id: CallerId) -> Caller {
        let sink = Arc::new(Recorder::default());
        let host_state = Arc::clone(&self.host_state);
        let stream_table = StreamTable::new(host_state, id, sink.clone());
        Caller { stream_table, sink }
    }

    /// New host with two callers: the first has streams 1 and 2 open, the second has its stream 1.
    fn with_three_streams() -> (Self, Caller, Caller) {
        let mut host = Self::new();
        let (mut a, mut b) = (host.caller(1), host.caller(2));
        a.open(&mut host, 1);
        a.open(&mut host, 2);
        b.open(&mut host, 1);
        (host, a, b)
    }

    /// Takes the commands in, as the compute thread does before a batch.
    fn take_in(&mut self) {
        fake::take_in(&mut self.scheduler, &self.commands);
    }

    /// Runs batches until no step waits.
    fn run(&mut self) {
        fake::run(&mut self.scheduler, &self.commands);
    }

    fn stats(&self) -> Stats {
        self.host_state.events.stats()
    }

    fn errors(&self, code: &str) -> u64 {
        self.stats().errors.get(code).copied().unwrap_or(0)
    }

    /// No stream, step or page is left.
    fn assert_empty(&self) {
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

/// A host, and a caller with the streams 1 to `count`.
fn with_streams(count: u32) -> (Host, Caller) {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    for stream in 1..=count {
        caller.open(&mut host, stream);
    }
    (host, caller)
}

fn caller_id(peer: u8) -> CallerId {
    let node = NodeId::from_checked([peer; 32]);
    CallerId {
        node,
        party: node,
        session: SessionId::of_token(&[peer]),
        receipts: 0,
    }
}

fn owner() -> NodeId {
    NodeKey::from_secret(&[1; 32]).id()
}

thread_local! {
    static RECORDED: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

/// Flight record of the hosts of this thread, that is, of one test.
fn record(event: Event) {
    RECORDED.with_borrow_mut(|all| all.push(event));
}

impl Caller {
    fn tell(&mut self, message: impl Into<Message>) {
        assert_eq!(self.stream_table.message(message.into()), Ok(()));
    }

    /// Sends one message, lets the host run, and takes the answers.
    fn ask(&mut self, host: &mut Host, message: impl Into<Message>) -> Vec<Message> {
        self.tell(message);
        host.run();
        self.sink.take()
    }

    fn open(&mut self, host: &mut Host, stream: u32) {
        assert_eq!(self.ask(host, open(stream, 1)), [opened(stream, 1)]);
    }

    /// Code of the only answer, which must be a refusal.
    fn refusal(&mut self, host: &mut Host, message: impl Into<Message>) -> Code {
        self.tell(message);
        host.run();
        self.code()
    }

    /// Like `refusal`, for faults that the stream table finds: the compute thread does not run.
    fn refusal_now(&mut self, message: impl Into<Message>) -> Code {
        self.tell(message);
        self.code()
    }

    fn code(&self) -> Code {
        match &self.sink.take()[..] {
            [Message::StreamError(StreamError { code, message, .. })] => {
                assert!(!message.is_empty() && message.len() < 512);
                code.clone()
            }
            other => panic!("{other:?}"),
        }
    }
}

fn open(stream: u32, epoch: u32) -> Message {
    open_with(stream, epoch, |_| {})
}

fn open_with(stream: u32, epoch: u32, change: impl FnOnce(&mut StreamOpen)) -> Message {
    let mut open = open_for(stream, epoch, 256);
    change(&mut open);
    Message::StreamOpen(open)
}

fn opened(stream: u32, epoch: u32) -> Message {
    Message::StreamOpened(StreamOpened { stream, epoch })
}

fn close(stream: u32, epoch: u32) -> Message {
    Message::StreamClose(StreamClose { stream, epoch })
}

fn truncate(stream: u32, position: u32) -> Message {
    Message::Truncate(Truncate {
        stream,
        epoch: 1,
        position,
        answer: false,
    })
}

/// Truncation that the host answers.
fn truncate_and_tell(stream: u32, position: u32) -> Message {
    Message::Truncate(Truncate {
        stream,
        epoch: 1,
        position,
        answer: true,
    })
}

fn truncated(stream: u32, position: u32) -> Message {
    Message::Truncated(Truncated {
        stream,
        epoch: 1,
        position,
    })
}

/// Epochs of answers, with their codes.
fn codes(answers: &[Message]) -> Vec<(u32, &str)> {
    answers
        .iter()
        .map(|answer| match answer {
            Message::StreamError(e) => (e.epoch, e.code.as_str()),
            Message::StreamOpened(o) => (o.epoch, "opened"),
            Message::StepResult(r) => (r.epoch, "result"),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn result(answers: &[Message]) -> &StepResult {
    match answers {
        [Message::StepResult(result)] => result,
        other => panic!("{other:?}"),
    }
}
