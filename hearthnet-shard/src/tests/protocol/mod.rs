//! Protocol from the stream table to the engine and back, on one thread and in virtual time.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearthnet_bus::flight::Event;
use hearthnet_transport::{
    CloseCode, Code, DType, Fork, Handler, Message, NodeId, Step, StepResult, StreamClose,
    StreamError, StreamOpen, StreamOpened, Truncate, Truncated, Want,
};
use proptest::prelude::*;

use super::fake::{
    Host, OVERFLOWS, Recorder, WEIGHT_BYTES, WIDTH, caller_id, config, encode, expected, open_for,
    served, step_of,
};
use super::{host_key, rows, step};
use crate::config::ServeConfig;
use crate::engine::Served;
use crate::events::Caller as CallerId;
use crate::sched::Command;
use crate::stream_handle::Slots;
use crate::stream_table::StreamTable;

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
/// Default times after which an idle stream ends, and idle weights leave memory.
const IDLE: Duration = Duration::from_secs(300);
const EVICT: Duration = Duration::from_secs(600);

struct Caller {
    stream_table: StreamTable,
    sink: Arc<Recorder>,
}

impl Host {
    fn new() -> Self {
        Self::with_budget(u64::MAX)
    }

    fn with_budget(kv_budget: u64) -> Self {
        Self::with_config(|config| config.kv_budget_bytes = kv_budget)
    }

    fn with_config(change: impl FnOnce(&mut ServeConfig)) -> Self {
        Self::serving(served(), change)
    }

    fn serving(served: Served, change: impl FnOnce(&mut ServeConfig)) -> Self {
        let mut config = ServeConfig {
            max_concurrent_streams: STREAMS,
            max_streams_per_caller: STREAMS,
            max_positions: Some(POSITIONS),
            max_waiting_steps: WAITING,
            max_waiting_steps_per_caller: 2 * WAITING,
            ..config()
        };
        change(&mut config);
        Self::start(served, config, record)
    }

    fn caller(&self, peer: u8) -> Caller {
        self.caller_as(caller_id(peer))
    }

    fn caller_as(&self, id: CallerId) -> Caller {
        let (stream_table, sink) = self.connect(id);
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

    fn errors(&self, code: &str) -> u64 {
        self.stats().errors.get(code).copied().unwrap_or(0)
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

fn owner() -> NodeId {
    host_key().id()
}

thread_local! {
    static RECORDED: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

/// Flight record of the hosts of this thread, that is, of one test.
fn record(event: Event) {
    RECORDED.with_borrow_mut(|all| all.push(event));
}

impl Caller {
    fn tell(&mut self, message: Message) {
        assert_eq!(self.stream_table.message(message), Ok(()));
    }

    /// Sends one message, lets the host run, and takes the answers.
    fn ask(&mut self, host: &mut Host, message: Message) -> Vec<Message> {
        self.tell(message);
        host.run();
        self.sink.take()
    }

    fn open(&mut self, host: &mut Host, stream: u32) {
        assert_eq!(self.ask(host, open(stream, 1)), [opened(stream, 1)]);
    }

    /// Code of the only answer, which must be a refusal.
    fn refusal(&mut self, host: &mut Host, message: Message) -> Code {
        self.tell(message);
        host.run();
        self.code()
    }

    /// Like `refusal`, for faults that the stream table finds: the compute thread does not run.
    fn refusal_now(&mut self, message: Message) -> Code {
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

/// Opens `stream` as a fork of epoch 1 of `source`.
fn fork_of(stream: u32, source: u32, position: u32) -> Message {
    open_with(stream, 1, |open| open.fork = fork(source, position))
}

fn fork(source: u32, position: u32) -> Option<Fork> {
    Some(Fork {
        stream: source,
        epoch: 1,
        position,
    })
}

/// Step in another epoch than the first.
fn step_in(epoch: u32, stream: u32, position: u32, rows: &[[f32; 4]]) -> Message {
    Message::Step(Step {
        epoch,
        ..step_of(stream, position, rows)
    })
}

fn truncate(stream: u32, position: u32) -> Message {
    truncate_in(1, stream, position, false)
}

/// Truncation that the host answers.
fn truncate_and_tell(stream: u32, position: u32) -> Message {
    truncate_in(1, stream, position, true)
}

fn truncate_in(epoch: u32, stream: u32, position: u32, answer: bool) -> Message {
    Message::Truncate(Truncate {
        stream,
        epoch,
        position,
        answer,
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
