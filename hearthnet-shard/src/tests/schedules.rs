//! Schedules of the compute thread and of connections: the `shuttle` crate decides at each lock,
//! queue and atomic value which thread runs next.
//!
//! ```text
//! cargo test -p hearthnet-shard --features shuttle --lib schedules
//! ```
//!
//! A schedule in which all threads wait fails as well. `tests/planted/` of `hearthnet-sim` has bugs
//! that these tests find.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hearthnet_bus::flight::Event;
use hearthnet_transport::{Handler as _, Message, NodeId, StreamClose};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler as Schedules};
use shuttle::{Config, Runner};

use super::fake::{
    FakeSource, HandClock, OVERFLOWS, Probe, Recorder, caller_id, config, encode, expected,
    host_state, open_for, served,
};
use super::{rows, step};
use crate::compute::{Compute, Running};
use crate::config::ServeConfig;
use crate::events::HostEvents;
use crate::notary::Notary;
use crate::plan::UNUSED_AFTER;
use crate::sched::Scheduler;
use crate::stream_table::{HostState, StreamTable};
use crate::sync::thread;

/// Schedules of a scene, of each kind.
const SCHEDULES: usize = 1_000;
/// Switches at which a schedule of the second kind lets a thread of lower priority go first.
const SWITCHES: usize = 3;

thread_local! {
    static RECORDED: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

/// Flight record of the host: all threads of a schedule are one thread of the system.
fn record(event: Event) {
    RECORDED.with_borrow_mut(|all| all.push(event));
}

/// Runs a scene under random schedules, and under those that find bugs of few switches (PCT).
fn explore(scene: fn()) {
    run(RandomScheduler::new_from_seed(1, SCHEDULES), scene);
    run(PctScheduler::new_from_seed(1, SWITCHES, SCHEDULES), scene);
}

fn run(schedules: impl Schedules + 'static, scene: fn()) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    Runner::new(schedules, config).run(scene);
}

/// A host with a compute thread.
struct Host {
    state: Arc<HostState>,
    compute: Compute,
    probe: Arc<Probe>,
    clock: Arc<HandClock>,
}

/// A connection and what its caller received.
struct Connection {
    table: StreamTable,
    sink: Arc<Recorder>,
}

impl Host {
    fn start(streams: u32) -> Self {
        RECORDED.with_borrow_mut(Vec::clear);
        let (probe, clock) = (Arc::new(Probe::default()), Arc::new(HandClock::default()));
        let events = Arc::new(HostEvents::recording(record));
        let config = ServeConfig {
            max_concurrent_streams: streams,
            evict_after: None,
            ..config()
        };
        let owner = NodeId::from_checked([100; 32]);
        let scheduler = {
            let (source, clock) = (FakeSource(Arc::clone(&probe)), clock.clone());
            let (events, notary) = (Arc::clone(&events), Notary::here(owner, Box::new(|_| None)));
            let config = config.clone();
            move || Scheduler::new(source, served(), config, events, clock, notary)
        };
        let (compute, _) = Compute::start(scheduler, 0).unwrap();
        let inbox = compute.inbox.clone();
        let state = host_state(owner, served(), config, inbox, events, clock.clone());
        Self {
            state: Arc::new(state),
            compute,
            probe,
            clock,
        }
    }

    fn connection(&self, peer: u8) -> Connection {
        let sink = Arc::new(Recorder::default());
        let table = StreamTable::new(Arc::clone(&self.state), caller_id(peer), sink.clone());
        Connection { table, sink }
    }

    /// Runs a thread for the connection of each peer, and waits for all.
    fn at_once(&self, peers: &[u8], run: impl Fn(Connection) + Clone + Send + 'static) {
        let threads: Vec<_> = peers
            .iter()
            .map(|peer| {
                let (connection, run) = (self.connection(*peer), run.clone());
                thread::spawn(move || run(connection))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    /// Ends the compute thread. All connections have ended: nothing may be left.
    fn end(self) {
        self.compute.stop();
        while *self.compute.running.borrow() == Running::Yes {
            thread::yield_now();
        }
        assert_eq!(*self.compute.running.borrow(), Running::Ended);
        assert_eq!(self.state.slots.taken(), 0, "slots");
        assert_eq!(self.state.events.stats().streams, 0, "counted streams");
        assert_eq!(self.probe.sequences.load(Ordering::SeqCst), 0, "sequences");
        let mut ends = BTreeMap::<String, u32>::new();
        RECORDED.with_borrow(|all| {
            for event in all {
                if let Event::StreamEnded { peer, trace, .. } = event {
                    *ends.entry(format!("{peer} {trace:?}")).or_default() += 1;
                }
            }
        });
        assert!(ends.values().all(|ends| *ends == 1), "{ends:?}");
    }
}

impl Connection {
    fn tell(&mut self, message: Message) {
        assert_eq!(self.table.message(message), Ok(()));
    }

    /// Opens a stream, sends two steps of these rows, and closes it without waiting for answers.
    fn use_stream(&mut self, row: [f32; 4]) {
        self.tell(Message::StreamOpen(open_for(1, 1, 64)));
        self.tell(step(1, 0, &[row]));
        self.tell(step(1, 1, &[row]));
        self.tell(Message::StreamClose(StreamClose {
            stream: 1,
            epoch: 1,
        }));
    }

    /// Ends the connection, and checks the answers: steps in order, each once, with their rows.
    fn end(self, row: [f32; 4]) {
        drop(self.table);
        let mut position = 0;
        for message in self.sink.take() {
            let Message::StepResult(result) = message else {
                continue;
            };
            assert_eq!(result.position, position);
            let before = if position == 0 { 0.0 } else { row[0] };
            let right = encode(&expected(before, position, &[row]));
            assert_eq!(result.data, right);
            position += 1;
        }
    }
}

#[test]
fn slots_and_sequences_come_back_however_connections_and_batches_interleave() {
    explore(|| {
        let host = Host::start(2);
        let row = rows(1)[0];
        host.at_once(&[1, 2, 3], move |mut connection| {
            connection.use_stream(row);
            connection.end(row);
        });
        host.end();
    });
}

#[test]
fn a_stream_that_fails_and_is_closed_at_once_ends_once() {
    explore(|| {
        let host = Host::start(2);
        let row = [OVERFLOWS; 4];
        host.at_once(&[1, 2], move |mut connection| {
            connection.use_stream(row);
            connection.end(row);
        });
        host.end();
    });
}

#[test]
fn callers_that_preempt_each_other_neither_lose_slots_nor_wait_for_each_other() {
    explore(|| {
        let host = Host::start(1);
        let row = rows(1)[0];
        let clock = Arc::clone(&host.clock);
        host.at_once(&[1, 2, 3], move |mut connection| {
            // The stream of another caller is unused for long enough.
            clock.advance(UNUSED_AFTER);
            connection.tell(Message::StreamOpen(open_for(1, 1, 64)));
            connection.tell(step(1, 0, &[row]));
            connection.end(row);
        });
        host.end();
    });
}

#[test]
fn a_host_that_stops_leaves_nothing_behind_whatever_arrives() {
    explore(|| {
        let host = Host::start(2);
        let row = rows(1)[0];
        let mut connection = host.connection(1);
        let thread = thread::spawn(move || {
            connection.use_stream(row);
            connection.end(row);
        });
        host.compute.stop();
        thread.join().unwrap();
        host.end();
    });
}
