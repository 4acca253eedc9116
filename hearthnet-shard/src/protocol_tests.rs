//! The protocol from the desk to the engine and back, on one thread and in virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hearthnet_bus::{Descriptor, NodeKey};
use hearthnet_model::BoundaryDtype;
use hearthnet_transport::{
    CloseCode, DType, Message, PeerKey, Step, StepResult, StreamClose, StreamError, StreamOpen,
    StreamOpened, Truncate, Want,
};
use proptest::prelude::*;

use crate::desk::{About, Desk, Office};
use crate::fake::{
    FakeSource, HandClock, OVERFLOWS, Probe, Recorder, WEIGHT_BYTES, WEIGHTS, WIDTH, expected,
    served,
};
use crate::inbox::Inbox;
use crate::life::{Slots, lock};
use crate::sched::{Limits, Scheduler};
use crate::stats::{Counters, Stats};

const STREAMS: u32 = 3;
const POSITIONS: u32 = 2048;
const WAITING: u32 = 4;
const IDLE: Duration = Duration::from_secs(300);
const EVICT: Duration = Duration::from_secs(600);

struct Host {
    office: Arc<Office>,
    scheduler: Scheduler<FakeSource>,
    probe: Arc<Probe>,
    clock: Arc<HandClock>,
}

struct Caller {
    desk: Desk,
    outlet: Arc<Recorder>,
}

impl Host {
    fn new() -> Self {
        Self::with_budget(u64::MAX)
    }

    fn with_budget(kv_budget: u64) -> Self {
        let (probe, clock) = (Arc::new(Probe::default()), Arc::new(HandClock::default()));
        *lock(&probe.clock) = Some(clock.clone());
        let counters = Arc::new(Counters::default());
        let office = Office {
            about: About {
                node: NodeKey::from_secret(&[1; 32]).id(),
                endpoint: "127.0.0.1:1".into(),
                required_bytes: 1,
            },
            served: served(),
            slots: Slots::new(STREAMS, STREAMS),
            max_streams: STREAMS,
            max_positions: POSITIONS,
            max_waiting_steps: WAITING,
            inbox: Arc::new(Inbox::default()),
            counters: Arc::clone(&counters),
            clock: clock.clone(),
            draining: AtomicBool::new(false),
            next_life: AtomicU64::new(1),
        };
        let limits = Limits {
            kv_budget,
            stream_idle: IDLE,
            evict_after: Some(EVICT),
            piece: Duration::from_millis(25),
        };
        let source = FakeSource(probe.clone());
        let mut scheduler = Scheduler::new(source, served(), limits, counters, clock.clone());
        scheduler.load(&mut |_, _, _| {}).unwrap();
        Self {
            office: Arc::new(office),
            scheduler,
            probe,
            clock,
        }
    }

    fn caller(&self, peer: u8) -> Caller {
        let outlet = Arc::new(Recorder::default());
        let desk = Desk::new(
            Arc::clone(&self.office),
            PeerKey([peer; 32]),
            outlet.clone(),
        );
        Caller { desk, outlet }
    }

    /// What the compute thread does before a batch.
    fn take_in(&mut self) {
        let mut commands = Default::default();
        self.office.inbox.take(&mut commands);
        commands
            .into_iter()
            .for_each(|command| self.scheduler.handle(command));
        self.scheduler.upkeep();
    }

    /// Lets the compute thread run until nothing waits.
    fn run(&mut self) {
        self.take_in();
        while self.scheduler.turn() {
            self.take_in();
        }
    }

    fn stats(&self) -> Stats {
        self.office.counters.snapshot(self.office.slots.taken())
    }

    fn errors(&self, code: &str) -> u64 {
        self.stats().errors.get(code).copied().unwrap_or(0)
    }

    /// Nothing of any stream is left anywhere.
    fn assert_empty(&self) {
        let stats = self.stats();
        assert_eq!(
            (
                stats.streams,
                stats.steps_waiting,
                stats.kv_bytes,
                stats.kv_reserved_bytes
            ),
            (0, 0, 0, 0)
        );
        assert_eq!(self.probe.sequences.load(Ordering::SeqCst), 0);
        assert_eq!(self.probe.kv_bytes.load(Ordering::SeqCst), 0);
    }
}

impl Caller {
    fn tell(&mut self, message: impl Into<Message>) {
        assert_eq!(self.desk.handle(message.into()), Ok(()));
    }

    /// Sends one message, lets the host run, and takes the answers.
    fn ask(&mut self, host: &mut Host, message: impl Into<Message>) -> Vec<Message> {
        self.tell(message);
        host.run();
        self.outlet.take()
    }

    fn open(&mut self, host: &mut Host, stream: u32) {
        assert_eq!(self.ask(host, open(stream, 1)), [opened(stream, 1)]);
    }

    /// The code with which the one answer refuses.
    fn refusal(&mut self, host: &mut Host, message: impl Into<Message>) -> String {
        let answers = self.ask(host, message);
        match &answers[..] {
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
    let mut open = StreamOpen {
        stream,
        epoch,
        weights: WEIGHTS,
        lo: 2,
        hi: 5,
        max_positions: 256,
    };
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
    })
}

fn encode(rows: &[[f32; 4]]) -> Vec<u8> {
    let mut data = Vec::new();
    BoundaryDtype::F16.encode(rows.as_flattened(), &mut data);
    data
}

fn step(stream: u32, position: u32, rows: &[[f32; 4]]) -> Step {
    Step {
        stream,
        epoch: 1,
        position,
        rows: rows.len() as u32,
        width: WIDTH,
        dtype: DType::F16,
        want: Want::All,
        data: encode(rows).into(),
    }
}

fn rows(count: u32) -> Vec<[f32; 4]> {
    (0..count)
        .map(|i| [(i % 50) as f32, 1.0, -2.0, 0.5])
        .collect()
}

fn result(answers: &[Message]) -> &StepResult {
    match answers {
        [Message::StepResult(result)] => result,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_come_back_as_the_engine_made_them() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 9);
    let answers = caller.ask(&mut host, Message::Step(step(9, 0, &rows(3))));
    let answer = result(&answers);
    assert_eq!(
        (answer.stream, answer.epoch, answer.position, answer.rows),
        (9, 1, 0, 3)
    );
    assert_eq!((answer.width, answer.dtype), (WIDTH, DType::F16));
    assert_eq!(answer.data, encode(&expected(0.0, 0, &rows(3))));
    let one = [[5.0, 6.0, 7.0, 8.0]];
    let answers = caller.ask(&mut host, Message::Step(step(9, 3, &one)));
    assert_eq!(result(&answers).data, encode(&expected(2.0, 3, &one)));
}

#[test]
fn the_caller_gets_the_rows_that_it_wants_and_no_others() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    // Long enough to be cut in pieces.
    let all = expected(0.0, 0, &rows(200));
    for (want, count, data) in [
        (Want::None, 0, vec![]),
        (Want::Last, 1, encode(&all[199..])),
        (Want::All, 200, encode(&all)),
    ] {
        let step = Step {
            want,
            ..step(1, 0, &rows(200))
        };
        let answers = caller.ask(&mut host, Message::Step(step));
        assert_eq!(
            (result(&answers).rows, &result(&answers).data[..]),
            (count, &data[..])
        );
    }
    assert!(
        lock(&host.probe.batches)
            .iter()
            .all(|batch| batch.len() == 1)
    );
    assert!(lock(&host.probe.batches).len() > 3);
}

#[test]
fn a_repeated_step_replaces_what_came_after_it() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let first = caller.ask(&mut host, Message::Step(step(1, 0, &rows(20))));
    let again = caller.ask(&mut host, Message::Step(step(1, 0, &rows(20))));
    assert_eq!(result(&first).data, result(&again).data);
    let other = [[40.0, 0.0, 0.0, 0.0]];
    let answers = caller.ask(&mut host, Message::Step(step(1, 5, &other)));
    assert_eq!(result(&answers).data, encode(&expected(4.0, 5, &other)));
    // The stream has six positions now.
    assert_eq!(
        caller.refusal(&mut host, Message::Step(step(1, 7, &other))),
        "position_gap"
    );
    host.assert_empty();
}

#[test]
fn truncation_takes_effect_in_its_place() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.tell(Message::Step(step(1, 0, &rows(20))));
    caller.tell(truncate(1, 3));
    let next = [[9.0, 0.0, 0.0, 0.0]];
    let answers = caller.ask(&mut host, Message::Step(step(1, 3, &next)));
    let [Message::StepResult(_), Message::StepResult(last)] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(last.data, encode(&expected(2.0, 3, &next)));
    assert_eq!(caller.refusal(&mut host, truncate(1, 5)), "position_gap");
    host.assert_empty();
}

#[test]
fn what_does_not_fit_the_host_is_refused_at_the_open_with_its_own_code() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    for (code, message) in [
        ("weights_mismatch", open_with(1, 1, |o| o.weights[31] ^= 1)),
        ("bad_descriptor", open_with(1, 1, |o| (o.lo, o.hi) = (5, 2))),
        ("bad_descriptor", open_with(1, 1, |o| (o.lo, o.hi) = (2, 8))),
        (
            "bad_descriptor",
            open_with(1, 1, |o| (o.lo, o.hi) = (0, u32::MAX)),
        ),
        ("layer_range", open_with(1, 1, |o| (o.lo, o.hi) = (1, 5))),
        ("layer_range", open_with(1, 1, |o| (o.lo, o.hi) = (2, 6))),
        ("layer_range", open_with(1, 1, |o| (o.lo, o.hi) = (0, 1))),
        (
            "context_full",
            open_with(1, 1, |o| o.max_positions = POSITIONS + 1),
        ),
        ("context_full", open_with(1, 1, |o| o.max_positions = 0)),
    ] {
        assert_eq!(caller.refusal(&mut host, message), code);
        host.assert_empty();
    }
}

#[test]
fn a_step_that_cannot_be_computed_ends_its_stream_with_its_own_code() {
    let good = step(1, 0, &rows(2));
    let with = |change: &dyn Fn(&mut Step)| {
        let mut step = good.clone();
        change(&mut step);
        step
    };
    let data = |value: f32| encode(&[[1.0, 2.0, value, 3.0]; 2]).into();
    let cases = [
        (
            "tensor_shape",
            with(&|s| (s.rows, s.data) = (0, Vec::new().into())),
        ),
        ("tensor_shape", with(&|s| (s.width, s.rows) = (2, 4))),
        (
            "tensor_shape",
            with(&|s| (s.dtype, s.width) = (DType::F32, 2)),
        ),
        ("tensor_shape", with(&|s| s.dtype = DType::Bf16)),
        (
            "tensor_shape",
            with(&|s| (s.dtype, s.width) = (DType::I8, 8)),
        ),
        ("tensor_shape", with(&|s| s.rows = 3)),
        ("tensor_shape", with(&|s| s.rows = u32::MAX)),
        ("tensor_nonfinite", with(&|s| s.data = data(f32::NAN))),
        (
            "tensor_nonfinite",
            with(&|s| s.data = data(f32::NEG_INFINITY)),
        ),
        ("position_gap", with(&|s| s.position = 1)),
        ("position_gap", with(&|s| s.position = u32::MAX)),
        ("context_full", step(1, 0, &rows(256)).clone_with_rows(257)),
        (
            "boundary_overflow",
            step(1, 0, &[[OVERFLOWS, 0.0, 0.0, 0.0]]),
        ),
    ];
    for (code, step) in cases {
        // Room for the row too many among the waiting rows.
        let mut host = Host::new();
        let mut caller = host.caller(1);
        caller.open(&mut host, 1);
        let answer = caller.refusal(&mut host, Message::Step(step));
        // A stream may not have more rows waiting than positions: then that is said first.
        let queue_full = code == "context_full" && answer == "queue_full";
        assert!(answer == code || queue_full, "{answer} for {code}");
        assert_eq!(host.errors(&answer), 1);
        host.assert_empty();
        // The place is free, the number can be used again in a later life.
        assert_eq!(caller.ask(&mut host, open(1, 2)), [opened(1, 2)]);
    }
}

trait CloneWithRows {
    fn clone_with_rows(&self, count: u32) -> Step;
}

impl CloneWithRows for Step {
    fn clone_with_rows(&self, count: u32) -> Step {
        step(self.stream, self.position, &rows(count))
    }
}

#[test]
fn a_stream_ends_at_the_positions_that_it_was_opened_for() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let answers = caller.ask(&mut host, Message::Step(step(1, 0, &rows(256))));
    assert_eq!(result(&answers).rows, 256);
    assert_eq!(
        caller.refusal(&mut host, Message::Step(step(1, 256, &rows(1)))),
        "context_full"
    );
    host.assert_empty();
}

#[test]
fn one_stream_too_many_is_refused_at_once_and_takes_nothing() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.open(&mut host, 1);
    a.open(&mut host, 2);
    b.open(&mut host, 1);
    // The compute thread is not asked: no `run` before the answers are there.
    for caller in [&mut a, &mut b] {
        caller.tell(open(7, 1));
        let answers = caller.outlet.take();
        assert!(
            matches!(&answers[..], [Message::StreamError(e)] if e.code == "stream_limit"),
            "{answers:?}"
        );
    }
    assert_eq!(host.stats().streams, STREAMS);
    // A close makes room at once, for whoever asks first.
    a.tell(close(2, 1));
    b.open(&mut host, 7);
    assert_eq!(host.stats().streams, STREAMS);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), STREAMS);
}

#[test]
fn a_peer_cannot_take_more_places_than_its_share() {
    let slots = Slots::new(4, 2);
    let outlet = Arc::new(Recorder::default());
    let begin = |peer: u8, stream| {
        let Message::StreamOpen(open) = open(stream, 1) else {
            unreachable!()
        };
        crate::life::Life::begin(&slots, PeerKey([peer; 32]), 1, &open, outlet.clone())
    };
    let _a = begin(1, 1).unwrap();
    let b = begin(1, 2).unwrap();
    assert_eq!(begin(1, 3).unwrap_err().code(), "stream_limit");
    let _c = begin(2, 1).unwrap();
    drop(b);
    assert!(begin(1, 3).is_ok());
}

#[test]
fn kv_is_promised_at_the_open_and_given_back_at_the_close() {
    // Room for 512 positions of 10 bytes.
    let mut host = Host::with_budget(5120);
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let large = |stream, max| open_with(stream, 1, |o| o.max_positions = max);
    assert_eq!(caller.refusal(&mut host, large(2, 257)), "kv_full");
    assert_eq!(caller.ask(&mut host, large(3, 256)), [opened(3, 1)]);
    assert_eq!(host.stats().kv_reserved_bytes, 5120);
    assert_eq!(caller.refusal(&mut host, large(4, 1)), "kv_full");
    assert_eq!(caller.ask(&mut host, close(1, 1)), []);
    assert_eq!(caller.ask(&mut host, large(5, 1)), [opened(5, 1)]);
}

#[test]
fn a_later_life_ends_the_earlier_one_and_its_steps() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.open(&mut host, 2);
    caller.open(&mut host, 3);
    caller.tell(Message::Step(step(1, 0, &rows(40))));
    // All places are taken: the new life takes the old one's.
    caller.tell(open(1, 5));
    // A step of the old life that crossed with it.
    caller.tell(Message::Step(step(1, 40, &rows(1))));
    caller.tell(Message::Step(Step {
        epoch: 5,
        ..step(1, 0, &rows(2))
    }));
    host.run();
    let answers = caller.outlet.take();
    let codes: Vec<_> = answers
        .iter()
        .map(|answer| match answer {
            Message::StreamError(e) => (e.epoch, e.code.as_str()),
            Message::StreamOpened(o) => (o.epoch, "opened"),
            Message::StepResult(r) => (r.epoch, "result"),
            other => panic!("{other:?}"),
        })
        .collect();
    let stale = (1, "stale_epoch");
    assert_eq!(codes, [stale, stale, (5, "opened"), (5, "result")]);
    assert_eq!(host.errors("stale_epoch"), 2);
    assert_eq!(host.stats().dropped_steps, 2);
    // Only the new life's rows were computed, from an empty beginning.
    assert_eq!(*lock(&host.probe.batches), [[2]]);
    let Some(Message::StepResult(last)) = answers.last() else {
        panic!()
    };
    assert_eq!(last.data, encode(&expected(0.0, 0, &rows(2))));
    assert_eq!(host.stats().streams, 3);
}

#[test]
fn an_open_of_a_life_that_is_over_is_stale() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    assert_eq!(caller.ask(&mut host, open(1, 5)), [opened(1, 5)]);
    assert_eq!(caller.refusal(&mut host, open(1, 5)), "stale_epoch");
    assert_eq!(caller.refusal(&mut host, open(1, 4)), "stale_epoch");
    assert_eq!(caller.ask(&mut host, close(1, 5)), []);
    assert_eq!(caller.refusal(&mut host, open(1, 5)), "stale_epoch");
    host.assert_empty();
}

#[test]
fn a_step_without_a_stream_is_answered_so_that_its_slot_returns() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    let one = Message::Step(step(1, 0, &rows(1)));
    assert_eq!(caller.refusal(&mut host, one.clone()), "unknown_stream");
    assert_eq!(caller.refusal(&mut host, truncate(1, 0)), "unknown_stream");
    caller.open(&mut host, 1);
    assert_eq!(
        caller.refusal(&mut host, Message::Step(step(1, 9, &rows(1)))),
        "position_gap"
    );
    assert_eq!(caller.refusal(&mut host, one.clone()), "stream_ended");
    let early = Message::Step(Step {
        epoch: 2,
        ..step(1, 0, &rows(1))
    });
    assert_eq!(caller.refusal(&mut host, early), "unknown_stream");
    // Another connection's stream of that number is another stream.
    let mut other = host.caller(1);
    assert_eq!(other.refusal(&mut host, one), "unknown_stream");
}

#[test]
fn a_cancelled_stream_is_gone_before_the_next_batch() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.ask(&mut host, Message::Step(step(1, 0, &rows(20))));
    assert!(host.stats().kv_bytes > 0);
    lock(&host.probe.batches).clear();
    caller.tell(Message::Step(step(1, 20, &rows(100))));
    caller.tell(Message::Step(step(1, 120, &rows(1))));
    host.take_in();
    assert!(host.scheduler.turn(), "a first piece is computed");
    caller.tell(close(1, 1));
    // The place is free before the compute thread looks.
    assert_eq!(host.stats().streams, 0);
    host.run();
    assert_eq!(lock(&host.probe.batches).len(), 1);
    assert_eq!(caller.outlet.take(), [], "a cancelled step has no answer");
    assert_eq!(host.stats().dropped_steps, 2);
    host.assert_empty();
}

#[test]
fn a_closed_connection_takes_its_streams_with_it_and_no_others() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.open(&mut host, 1);
    a.open(&mut host, 2);
    b.open(&mut host, 1);
    a.tell(Message::Step(step(1, 0, &rows(30))));
    a.tell(Message::Step(step(2, 0, &rows(1))));
    host.take_in();
    drop(a);
    host.run();
    assert_eq!(host.stats().streams, 1);
    assert_eq!(host.stats().dropped_steps, 2);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), 1);
    let answers = b.ask(&mut host, Message::Step(step(1, 0, &rows(1))));
    assert_eq!(result(&answers).rows, 1);
    drop(b);
    host.run();
    host.assert_empty();
}

#[test]
fn decode_steps_of_all_streams_share_a_batch() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.open(&mut host, 1);
    a.open(&mut host, 2);
    b.open(&mut host, 1);
    a.tell(Message::Step(step(1, 0, &rows(1))));
    a.tell(Message::Step(step(2, 0, &rows(1))));
    b.tell(Message::Step(step(1, 0, &rows(1))));
    host.run();
    assert_eq!(*lock(&host.probe.batches), [[1, 1, 1]]);
    for answer in a.outlet.take().iter().chain(&b.outlet.take()) {
        let Message::StepResult(answer) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(answer.data, encode(&expected(0.0, 0, &rows(1))));
    }
}

#[test]
fn streams_through_some_of_the_layers_run_in_batches_of_their_own() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    let part = |stream, lo, hi| open_with(stream, 1, |o| (o.lo, o.hi) = (lo, hi));
    for open in [part(1, 2, 5), part(2, 3, 4), part(3, 2, 5)] {
        assert_eq!(caller.ask(&mut host, open).len(), 1);
    }
    for stream in 1..=3 {
        caller.tell(Message::Step(step(stream, 0, &rows(1))));
    }
    host.run();
    // One turn, two batches.
    assert_eq!(*lock(&host.probe.batches), [vec![1, 1], vec![1]]);
    assert_eq!(host.stats().turns, 1);
    for answer in caller.outlet.take() {
        let Message::StepResult(answer) = answer else {
            panic!("{answer:?}")
        };
        let mut all = expected(0.0, 0, &rows(1));
        if answer.stream == 2 {
            all.as_flattened_mut()
                .iter_mut()
                .for_each(|value| *value += 4.0);
        }
        assert_eq!(answer.data, encode(&all));
    }
}

#[test]
fn whoever_asks_is_told_what_is_served() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let answers = caller.ask(&mut host, Message::Describe);
    let [Message::Descriptor(bytes)] = &answers[..] else {
        panic!("{answers:?}")
    };
    let descriptor = Descriptor::from_cbor(bytes).unwrap();
    assert_eq!(
        (descriptor.shard_id.as_str(), descriptor.queue_depth),
        ("fake:2-5", 1)
    );
}

#[test]
fn decode_goes_between_the_pieces_of_a_long_prefill() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.open(&mut host, 2);
    caller.tell(Message::Step(step(1, 0, &rows(200))));
    host.take_in();
    assert!(host.scheduler.turn());
    for position in 0..3 {
        caller.tell(Message::Step(step(2, position, &rows(1))));
        // One piece at most, then the answer.
        let mut turns = 0;
        while caller.outlet.is_empty() {
            host.take_in();
            assert!(host.scheduler.turn());
            turns += 1;
        }
        assert!(turns <= 2, "{turns} turns");
        assert_eq!(result(&caller.outlet.take()).stream, 2);
    }
    // The prefill is not through: the decode steps went before the rest of it.
    let batches = lock(&host.probe.batches).clone();
    assert!(batches.iter().flatten().sum::<u32>() < 200, "{batches:?}");
    assert!(
        batches
            .iter()
            .all(|batch| batch.len() == 1 && batch[0] <= 40),
        "{batches:?}"
    );
    host.run();
    assert_eq!(
        result(&caller.outlet.take()).data,
        encode(&expected(0.0, 0, &rows(200)))
    );
}

#[test]
fn a_fault_in_a_shared_batch_costs_only_the_stream_at_fault() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    for stream in 1..=3 {
        caller.open(&mut host, stream);
    }
    caller.tell(Message::Step(step(1, 0, &rows(2))));
    caller.tell(Message::Step(step(
        2,
        0,
        &[[3.0; 4], [OVERFLOWS, 0.0, 0.0, 0.0]],
    )));
    caller.tell(Message::Step(step(3, 0, &rows(2))));
    host.run();
    let answers = caller.outlet.take();
    let mut good = 0;
    for answer in &answers {
        match answer {
            Message::StepResult(result) => {
                good += 1;
                assert_eq!(result.data, encode(&expected(0.0, 0, &rows(2))));
            }
            Message::StreamError(error) => {
                assert_eq!((error.stream, &error.code[..]), (2, "boundary_overflow"));
                assert_eq!(error.position, Some(0));
                assert!(error.message.contains("layer 3"));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((answers.len(), good), (3, 2));
    assert_eq!(host.stats().streams, 2);
}

#[test]
fn a_stream_may_not_pile_up_steps_or_rows() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    for position in 0..WAITING {
        caller.tell(Message::Step(step(1, position, &rows(1))));
    }
    caller.tell(Message::Step(step(1, WAITING, &rows(1))));
    let answers = caller.outlet.take();
    assert!(matches!(&answers[..], [Message::StreamError(e)] if e.code == "queue_full"));
    host.run();
    host.assert_empty();

    caller.open(&mut host, 2);
    caller.tell(Message::Step(step(2, 0, &rows(200))));
    caller.tell(Message::Step(step(2, 200, &rows(57))));
    let answers = caller.outlet.take();
    assert!(matches!(&answers[..], [Message::StreamError(e)] if e.code == "queue_full"));
    host.run();
    host.assert_empty();
}

#[test]
fn an_idle_stream_is_closed_and_one_in_use_is_not() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.open(&mut host, 2);
    host.clock.advance(IDLE / 2);
    caller.ask(&mut host, Message::Step(step(2, 0, &rows(1))));
    host.clock.advance(IDLE / 2);
    host.run();
    let answers = caller.outlet.take();
    assert!(
        matches!(&answers[..], [Message::StreamError(e)] if e.stream == 1 && e.code == "idle_timeout")
    );
    assert!(host.scheduler.upkeep().is_some_and(|left| left <= IDLE / 2));
    assert_eq!(host.stats().streams, 1);
}

#[test]
fn weights_that_nobody_uses_are_put_away_and_come_back_with_the_next_stream() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.ask(&mut host, Message::Step(step(1, 0, &rows(1))));
    // Nothing is put away under an open stream, however old the host is.
    host.clock.advance(IDLE - Duration::from_secs(1));
    host.run();
    caller.ask(&mut host, Message::Step(step(1, 1, &rows(1))));
    caller.ask(&mut host, close(1, 1));
    host.clock.advance(EVICT - Duration::from_secs(1));
    assert_eq!(host.scheduler.upkeep(), Some(Duration::from_secs(1)));
    assert_eq!(host.probe.loaded.load(Ordering::SeqCst), 1);
    host.clock.advance(Duration::from_secs(1));
    assert_eq!(host.scheduler.upkeep(), None);
    assert_eq!(host.probe.loaded.load(Ordering::SeqCst), 0);
    assert_eq!((host.stats().weight_bytes, host.stats().evictions), (0, 1));

    caller.open(&mut host, 2);
    let answers = caller.ask(&mut host, Message::Step(step(2, 0, &rows(2))));
    assert_eq!(result(&answers).data, encode(&expected(0.0, 0, &rows(2))));
    assert_eq!(
        (host.stats().weight_bytes, host.stats().loads),
        (WEIGHT_BYTES, 2)
    );
}

#[test]
fn weights_that_cannot_come_back_refuse_the_stream_and_are_tried_again() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    host.clock.advance(EVICT);
    host.run();
    *lock(&host.probe.load_error) = Some("the file is gone".into());
    let answers = caller.ask(&mut host, open(1, 1));
    assert!(matches!(&answers[..], [Message::StreamError(e)]
        if e.code == "weights_unavailable" && e.message.contains("the file is gone")));
    host.assert_empty();
    caller.open(&mut host, 2);
}

#[test]
fn a_host_that_shuts_down_refuses_what_is_new_and_finishes_what_waits() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.open(&mut host, 2);
    caller.tell(Message::Step(step(1, 0, &rows(40))));
    host.office.draining.store(true, Ordering::Release);
    caller.tell(open(3, 1));
    caller.tell(Message::Step(step(2, 0, &rows(1))));
    host.run();
    let answers = caller.outlet.take();
    let refused =
        |answer: &&Message| matches!(answer, Message::StreamError(e) if e.code == "shutting_down");
    assert_eq!(answers.iter().filter(refused).count(), 2);
    assert!(matches!(answers.last(), Some(Message::StepResult(r)) if r.rows == 40));
    // And after the deadline the rest is told as well.
    host.scheduler
        .end_all(&crate::fault::StreamFault::ShuttingDown);
    assert_eq!(caller.outlet.take().iter().filter(refused).count(), 1);
    host.assert_empty();
}

#[test]
fn what_only_a_host_says_closes_the_session() {
    let host = Host::new();
    let mut caller = host.caller(1);
    for message in [
        opened(1, 1),
        Message::StreamError(StreamError {
            stream: 1,
            epoch: 1,
            position: None,
            code: "x".into(),
            message: String::new(),
        }),
    ] {
        assert_eq!(caller.desk.handle(message), Err(CloseCode::ProtocolState));
    }
}

#[derive(Debug, Clone)]
enum Act {
    Open {
        caller: usize,
        stream: u32,
        epoch: u32,
        positions: u32,
    },
    Step {
        caller: usize,
        stream: u32,
        epoch: u32,
        at: u32,
        rows: u32,
        bad: u8,
    },
    Truncate {
        caller: usize,
        stream: u32,
        position: u32,
    },
    Close {
        caller: usize,
        stream: u32,
        epoch: u32,
    },
    Drop {
        caller: usize,
    },
    Turn,
    Pass {
        secs: u64,
    },
    Read {
        caller: usize,
    },
}

fn any_act() -> impl Strategy<Value = Act> {
    let caller = 0usize..3;
    let (stream, epoch) = (1u32..4, 1u32..4);
    prop_oneof![
        4 => (caller.clone(), stream.clone(), epoch.clone(), 0u32..300).prop_map(
            |(caller, stream, epoch, positions)| Act::Open { caller, stream, epoch, positions }),
        8 => (caller.clone(), stream.clone(), epoch.clone(), 0u32..40, 0u32..80, 0u8..20).prop_map(
            |(caller, stream, epoch, at, rows, bad)| Act::Step { caller, stream, epoch, at, rows, bad }),
        1 => (caller.clone(), stream.clone(), 0u32..40).prop_map(
            |(caller, stream, position)| Act::Truncate { caller, stream, position }),
        2 => (caller.clone(), stream, epoch).prop_map(
            |(caller, stream, epoch)| Act::Close { caller, stream, epoch }),
        1 => caller.clone().prop_map(|caller| Act::Drop { caller }),
        6 => Just(Act::Turn),
        1 => (0u64..700).prop_map(|secs| Act::Pass { secs }),
        3 => caller.prop_map(|caller| Act::Read { caller }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever callers do in whatever order: the limits hold at every moment, every answer
    /// is for a life that was opened, and at the end nothing is left.
    #[test]
    fn limits_hold_and_nothing_leaks_under_any_sequence_of_messages(
        acts in proptest::collection::vec(any_act(), 1..120),
    ) {
        // Room for 400 positions: the KV budget is reached as well.
        let budget = 4000;
        let mut host = Host::with_budget(budget);
        let mut callers: Vec<_> = (0..3).map(|peer| host.caller(peer)).collect();
        for act in acts {
            match act {
                Act::Open { caller, stream, epoch, positions } => {
                    callers[caller].tell(open_with(stream, epoch, |o| o.max_positions = positions));
                }
                Act::Step { caller, stream, epoch, at, rows: count, bad } => {
                    let mut step = Step { epoch, ..step(stream, at, &rows(count)) };
                    match bad {
                        0 => step.width = 3,
                        1 => step.data = encode(&vec![[f32::NAN; 4]; count as usize]).into(),
                        2 if count > 0 => {
                            step.data = encode(&vec![[OVERFLOWS; 4]; count as usize]).into();
                        }
                        _ => {}
                    }
                    callers[caller].tell(Message::Step(step));
                }
                Act::Truncate { caller, stream, position } => {
                    callers[caller].tell(truncate(stream, position));
                }
                Act::Close { caller, stream, epoch } => callers[caller].tell(close(stream, epoch)),
                Act::Drop { caller } => callers[caller] = host.caller(caller as u8),
                Act::Turn => {
                    host.take_in();
                    host.scheduler.turn();
                }
                Act::Pass { secs } => host.clock.advance(Duration::from_secs(secs)),
                Act::Read { caller } => {
                    for message in callers[caller].outlet.take() {
                        let fits = match &message {
                            Message::StepResult(r) => r.data.len() as u32 == r.rows * WIDTH * 2,
                            Message::StreamOpened(_) | Message::StreamError(_) => true,
                            _ => false,
                        };
                        prop_assert!(fits, "{message:?}");
                    }
                }
            }
            let stats = host.stats();
            prop_assert!(stats.streams <= STREAMS);
            prop_assert!(stats.kv_reserved_bytes <= budget);
            prop_assert!(stats.kv_bytes <= stats.kv_reserved_bytes);
        }
        drop(callers);
        host.run();
        host.assert_empty();
    }
}
