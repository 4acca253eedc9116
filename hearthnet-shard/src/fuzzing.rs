//! Body of the fuzz target `host_streams`, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearthnet_bus::flight::SessionId;
use hearthnet_transport::{Fork, Handler as _, Message, Step, StreamClose, StreamOpen, Truncate};

use crate::config::ServeConfig;
use crate::events::Caller as CallerId;
use crate::fake::{
    Host, KV_BYTES, OVERFLOWS, PAGE, Recorder, WIDTH, caller_id, encode, expected, open_for,
    served, step_of,
};
use crate::sched::Command;
use crate::stream_table::StreamTable;

const CALLERS: usize = 3;
const STREAMS: u32 = 3;
/// Pages of the KV budget: fewer than the streams may fill.
const PAGES: u64 = 20;
/// Pages of the largest budget that an operation sets.
const MOST_PAGES: u64 = PAGES / 2 + PAGES - 1;

/// Drives a host's stream table and scheduler, with an engine of plain arithmetic, through the
/// messages of three callers. The first byte decides where streams can return to. An operation is
/// four bytes: the kind; caller (low nibble) and stream (high nibble); two arguments.
///
/// | first byte modulo 10 | operation |
/// |---|---|
/// | 0 | open the stream in a new epoch, for a number of positions |
/// | 1 | open it in its epoch, for more positions, or in an earlier one |
/// | 2 | open it in a new epoch as a fork of another stream |
/// | 3, 4 | step at the end of the stream |
/// | 5 | step at any position, with rows of a kind |
/// | 6 | shorten it, with or without an answer |
/// | 7 | close it |
/// | 8 | the host takes in its commands and computes some batches |
/// | 9 | time passes, the caller's connection ends, or the KV budget changes |
///
/// # Panics
/// If a limit is exceeded, a position is answered twice, out of order or with a wrong row, or a
/// stream, step or page is left when all callers are gone.
pub fn host_streams(input: &[u8]) {
    let Some((setting, script)) = input.split_first() else {
        return;
    };
    let mut host = start(u32::from(*setting % 3) * 7);
    let mut sessions = 0_u8;
    let mut connect = |host: &Host, index| {
        sessions = sessions.wrapping_add(1);
        Caller::connect(host, index, sessions)
    };
    let mut callers: Vec<Caller> = (0..CALLERS).map(|index| connect(&host, index)).collect();
    for operation in script.chunks_exact(4).take(256) {
        let [kind, who, a, b] = [operation[0], operation[1], operation[2], operation[3]];
        let index = usize::from(who & 15) % CALLERS;
        let caller = &mut callers[index];
        let stream = 1 + u32::from(who >> 4) % STREAMS;
        match kind % 10 {
            0 => caller.open(stream, 1 + u32::from(a), None),
            1 => caller.open_again(stream, 1 + u32::from(a), u32::from(b % 4)),
            2 => {
                let source = 1 + u32::from(b) % STREAMS;
                let fork = Fork {
                    stream: source,
                    epoch: caller.epoch(source),
                    position: u32::from(a % 64),
                };
                caller.open(stream, 256, Some(fork));
            }
            3 | 4 => {
                let at = caller.end(stream);
                caller.step(stream, at, u32::from(a % 48), 255);
            }
            5 => caller.step(stream, u32::from(a), 1 + u32::from(b % 16), b >> 4),
            6 => caller.truncate(stream, u32::from(a), b % 2 == 0),
            7 => caller.close(stream),
            8 => {
                host.take_in();
                for _ in 0..=a % 4 {
                    host.scheduler.turn();
                }
            }
            _ => match b % 4 {
                0 => callers[index] = connect(&host, index),
                1 => {
                    let budget = (PAGES / 2 + u64::from(a) % PAGES) * page_bytes();
                    host.scheduler.handle(Command::KvBudget(budget));
                }
                _ => host.clock.advance(Duration::from_secs(u64::from(a) * 4)),
            },
        }
        for caller in &mut callers {
            caller.read();
        }
        check(&host);
    }
    drop(callers);
    host.run();
    host.assert_empty();
}

fn page_bytes() -> u64 {
    u64::from(PAGE) * KV_BYTES
}

/// Host of three callers. Its sequences return only to multiples of `checkpoints`, unless it is 0.
fn start(checkpoints: u32) -> Host {
    let config = ServeConfig {
        max_concurrent_streams: STREAMS + 1,
        max_streams_per_caller: STREAMS,
        max_positions: Some(300),
        max_waiting_steps: 4,
        max_waiting_steps_per_caller: 8,
        kv_budget_bytes: PAGES * page_bytes(),
        kv_share_per_caller: 75,
        ..ServeConfig::new("")
    };
    let host = Host::start(served(), config, |_| {});
    host.probe.checkpoints.store(checkpoints, Ordering::SeqCst);
    host
}

fn check(host: &Host) {
    let stats = host.stats();
    assert!(stats.streams <= STREAMS + 1);
    assert!(stats.kv_bytes <= MOST_PAGES * page_bytes());
    assert_eq!(stats.kv_bytes, stats.kv_pages_used * page_bytes());
}

/// Work that the host has accepted and not answered.
enum Asked {
    Rows(u32, Vec<[f32; 4]>),
    Shorten { position: u32, answer: bool },
}

/// A caller's knowledge of one epoch of a stream.
#[derive(Default)]
struct Known {
    asked: VecDeque<Asked>,
    /// First value of each row that the host has computed.
    history: Vec<f32>,
    /// Positions when all that was asked is done.
    end: u32,
    /// The history of a fork is that of its source when the host opens it, which is not known here.
    is_fork: bool,
}

struct Caller {
    table: StreamTable,
    sink: Arc<Recorder>,
    /// Latest epoch of each stream number.
    epochs: BTreeMap<u32, u32>,
    streams: BTreeMap<(u32, u32), Known>,
}

impl Caller {
    /// New connection of a caller: number `session` of the host.
    fn connect(host: &Host, index: usize, session: u8) -> Self {
        let (table, sink) = host.connect(CallerId {
            session: SessionId::of_token(&[session]),
            ..caller_id(index as u8)
        });
        Caller {
            table,
            sink,
            epochs: BTreeMap::new(),
            streams: BTreeMap::new(),
        }
    }

    fn epoch(&self, stream: u32) -> u32 {
        self.epochs.get(&stream).copied().unwrap_or(0)
    }

    fn known(&mut self, stream: u32) -> &mut Known {
        let epoch = self.epoch(stream);
        self.streams.entry((stream, epoch)).or_default()
    }

    fn end(&mut self, stream: u32) -> u32 {
        self.known(stream).end
    }

    fn tell(&mut self, message: Message) {
        assert_eq!(self.table.message(message), Ok(()));
    }

    fn open(&mut self, stream: u32, max_positions: u32, fork: Option<Fork>) {
        let epoch = self.epoch(stream) + 1;
        self.epochs.insert(stream, epoch);
        self.known(stream).is_fork = fork.is_some();
        self.tell(open(stream, epoch, max_positions, fork));
    }

    /// Opens the stream in an epoch that was used before.
    fn open_again(&mut self, stream: u32, max_positions: u32, earlier: u32) {
        let Some(epoch) = self.epoch(stream).checked_sub(earlier) else {
            return;
        };
        if earlier > 0 {
            // The host may take the epoch for a new one, if it has refused the later ones.
            self.streams.remove(&(stream, epoch));
        }
        self.tell(open(stream, epoch, max_positions, None));
        if earlier > 0 {
            self.tell(Message::StreamClose(StreamClose { stream, epoch }));
        }
    }

    /// Sends a step. Its `kind` can make it one that the host must refuse.
    fn step(&mut self, stream: u32, position: u32, count: u32, kind: u8) {
        let epoch = self.epoch(stream);
        let mut rows: Vec<[f32; 4]> = (0..count)
            .map(|row| [((row + position) % 50) as f32, 1.0, -2.0, 0.5])
            .collect();
        match (kind, rows.last_mut()) {
            (0, Some(row)) => row[1] = f32::NAN,
            (1, Some(row)) => row[0] = OVERFLOWS,
            _ => {}
        }
        let step = Step {
            epoch,
            width: if kind == 2 { 3 } else { WIDTH },
            ..step_of(stream, position, &rows)
        };
        let known = self.known(stream);
        known.end = position.saturating_add(count);
        known.asked.push_back(Asked::Rows(position, rows));
        self.tell(Message::Step(step));
        self.forget_refused(stream);
    }

    fn truncate(&mut self, stream: u32, position: u32, answer: bool) {
        let epoch = self.epoch(stream);
        let known = self.known(stream);
        known.end = position;
        known.asked.push_back(Asked::Shorten { position, answer });
        self.tell(Message::Truncate(Truncate {
            stream,
            epoch,
            position,
            answer,
        }));
        self.forget_refused(stream);
    }

    /// Forgets the last work, if the host has refused it at once.
    fn forget_refused(&mut self, stream: u32) {
        let epoch = self.epoch(stream);
        let is_refusal = |message: &Message| match message {
            Message::StreamError(error) => (error.stream, error.epoch) == (stream, epoch),
            _ => false,
        };
        if self.sink.take().iter().any(is_refusal) {
            self.known(stream).asked.pop_back();
        }
    }

    fn close(&mut self, stream: u32) {
        let epoch = self.epoch(stream);
        self.tell(Message::StreamClose(StreamClose { stream, epoch }));
    }

    /// Reads the host's answers, and compares each with what was asked.
    fn read(&mut self) {
        for message in self.sink.take() {
            match message {
                Message::StepResult(result) => {
                    let known = self.streams.get_mut(&(result.stream, result.epoch));
                    let asked = known.and_then(|known| known.next().map(|asked| (known, asked)));
                    let Some((known, Asked::Rows(position, rows))) = asked else {
                        unreachable!("an answer without a question");
                    };
                    assert_eq!(
                        (result.position, result.rows as usize),
                        (position, rows.len())
                    );
                    assert!(known.is_fork || position as usize <= known.history.len());
                    known.history.truncate(position as usize);
                    let before = known.history.last().copied().unwrap_or(0.0);
                    let wanted = encode(&expected(before, position, &rows));
                    assert!(known.is_fork || result.data == wanted, "a wrong row");
                    known.history.extend(rows.iter().map(|row| row[0]));
                }
                Message::Truncated(told) => {
                    let known = self.streams.get_mut(&(told.stream, told.epoch));
                    let asked = known.and_then(|known| known.next().map(|asked| (known, asked)));
                    let Some((known, Asked::Shorten { position, .. })) = asked else {
                        unreachable!("an answer without a question");
                    };
                    assert!(told.position <= position);
                    known.history.truncate(told.position as usize);
                }
                Message::StreamOpened(_) | Message::StreamError(_) => {}
                other => unreachable!("{other:?}"),
            }
        }
    }
}

impl Known {
    /// Next work that is answered. Applies what is not answered and comes before it.
    fn next(&mut self) -> Option<Asked> {
        loop {
            match self.asked.pop_front()? {
                Asked::Shorten {
                    position,
                    answer: false,
                } => self.history.truncate(position as usize),
                asked => return Some(asked),
            }
        }
    }
}

fn open(stream: u32, epoch: u32, max_positions: u32, fork: Option<Fork>) -> Message {
    Message::StreamOpen(StreamOpen {
        fork,
        ..open_for(stream, epoch, max_positions)
    })
}
