//! Random messages, chunk sizes, windows and interleavings, with streams closed and failing in the
//! middle: messages arrive unchanged and in order, and all credit returns.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use hearthnet_transport::pair::{Pair, Side};
use hearthnet_transport::session::{Event, SendRefused, Session};
use hearthnet_transport::{
    Config, DType, Message, Step, StreamClose, StreamError, Tensor, Truncate, Want,
};
use proptest::prelude::*;

use crate::support::{messages, noise, say, tensor};

#[derive(Clone, Debug)]
enum Op {
    Step {
        stream: u32,
        rows: u32,
        want: Want,
        smooth: bool,
    },
    Tensor {
        bytes: usize,
        smooth: bool,
    },
    Truncate {
        stream: u32,
    },
    Close {
        stream: u32,
    },
    /// The host takes its messages and answers some of the steps.
    HostWorks {
        answers: usize,
    },
    /// The host ends a stream with an error.
    HostFails {
        stream: u32,
    },
    CallerTakes,
    Transmit(Side, u8),
    Deliver(Side, u8),
}

fn side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Caller), Just(Side::Host)]
}

fn op() -> impl Strategy<Value = Op> {
    let want = prop_oneof![Just(Want::None), Just(Want::Last), Just(Want::All)];
    let rows = prop_oneof![3 => 1u32..4, 1 => 20u32..200];
    prop_oneof![
        6 => (0u32..4, rows, want, any::<bool>())
            .prop_map(|(stream, rows, want, smooth)| Op::Step { stream, rows, want, smooth }),
        1 => (1usize..60_000, any::<bool>()).prop_map(|(bytes, smooth)| Op::Tensor { bytes, smooth }),
        1 => (0u32..4).prop_map(|stream| Op::Truncate { stream }),
        1 => (0u32..4).prop_map(|stream| Op::Close { stream }),
        3 => (0usize..4).prop_map(|answers| Op::HostWorks { answers }),
        1 => (0u32..4).prop_map(|stream| Op::HostFails { stream }),
        2 => Just(Op::CallerTakes),
        8 => (side(), 1u8..6).prop_map(|(side, n)| Op::Transmit(side, n)),
        8 => (side(), 1u8..6).prop_map(|(side, n)| Op::Deliver(side, n)),
    ]
}

fn config() -> impl Strategy<Value = Config> {
    (1u32..5, 1u32..6, 1u32..4, 0u32..2, 1u32..9).prop_map(
        |(chunks, window, buffer, zstd, steps)| Config {
            chunk_bytes: 4096 * chunks,
            window_chunks: window,
            recv_buffer_bytes: 120_000 * buffer,
            inline_max: 2048,
            compress_above: (zstd == 1).then_some(8192),
            max_steps_in_flight: steps,
            ..Config::default()
        },
    )
}

/// Bytes that are all `fill` if they are `smooth`; otherwise they do not compress.
fn data(bytes: usize, smooth: bool, fill: u8) -> Bytes {
    match smooth {
        true => vec![fill; bytes].into(),
        false => noise(bytes),
    }
}

/// Both applications, and the messages that each has yet to receive.
struct World {
    pair: Pair,
    /// Per stream: its current epoch and position.
    streams: BTreeMap<u32, (u32, u32)>,
    to_host: BTreeMap<(u32, u32), VecDeque<Message>>,
    tensors: Vec<Tensor>,
    unanswered: VecDeque<Step>,
    /// Stream epochs that the host ended with an error.
    failed: BTreeSet<(u32, u32)>,
    results: BTreeMap<(u32, u32), VecDeque<(u32, Bytes)>>,
    received: u64,
}

impl World {
    fn stream_key(&self, stream: u32) -> (u32, u32) {
        let epoch = self.streams.get(&stream).map_or(0, |(epoch, _)| *epoch);
        (stream, epoch)
    }

    fn next_epoch(&mut self, stream: u32) {
        let entry = self.streams.entry(stream).or_default();
        entry.0 += 1;
        entry.1 = 0;
    }

    /// Sends from the caller, and expects the message at the host unless sending is blocked.
    fn send(&mut self, stream_key: (u32, u32), message: Message) {
        match self.pair.caller.send_message(&message) {
            Ok(()) => self
                .to_host
                .entry(stream_key)
                .or_default()
                .push_back(message),
            Err(SendRefused::Blocked) => {}
            other => panic!("{other:?}"),
        }
    }

    fn host_works(&mut self, answers: usize) {
        for message in messages(&mut self.pair.host) {
            match &message {
                Message::Tensor(got) => {
                    let at = self.tensors.iter().position(|sent| sent == got);
                    self.tensors.swap_remove(at.expect("a tensor nobody sent"));
                }
                Message::StreamClose(close) => {
                    self.unanswered
                        .retain(|s| (s.stream, s.epoch) != (close.stream, close.epoch));
                }
                // A message that crossed the end of its stream is answered like one for an unknown
                // stream.
                Message::Step(step) if self.failed.contains(&(step.stream, step.epoch)) => {
                    self.fail((step.stream, step.epoch));
                }
                Message::Truncate(cut) if self.failed.contains(&(cut.stream, cut.epoch)) => {}
                Message::Step(step) => {
                    self.expect_next((step.stream, step.epoch), &message);
                    self.unanswered.push_back(step.clone());
                }
                Message::Truncate(cut) => self.expect_next((cut.stream, cut.epoch), &message),
                other => panic!("{other:?}"),
            }
            self.received += 1;
        }
        for _ in 0..answers {
            let Some(step) = self.unanswered.pop_front() else {
                break;
            };
            let result = step.echo();
            self.results
                .entry((result.stream, result.epoch))
                .or_default()
                .push_back((result.position, result.data.clone()));
            say(&mut self.pair.host, &Message::StepResult(result));
        }
    }

    /// The host ends a stream with an error.
    fn fail(&mut self, (stream, epoch): (u32, u32)) {
        let error = StreamError {
            stream,
            epoch,
            position: None,
            code: "internal".into(),
            message: String::new(),
        };
        say(&mut self.pair.host, &Message::StreamError(error));
        self.unanswered
            .retain(|step| (step.stream, step.epoch) != (stream, epoch));
        self.failed.insert((stream, epoch));
    }

    #[track_caller]
    fn expect_next(&mut self, stream_key: (u32, u32), message: &Message) {
        // A closed or failed stream may have lost its last messages, but none in the middle.
        let queue = self.to_host.get_mut(&stream_key);
        let next = queue.expect("a stream that was opened").pop_front();
        assert_eq!(next.as_ref(), Some(message));
    }

    fn caller_takes(&mut self) {
        for message in messages(&mut self.pair.caller) {
            match message {
                Message::StepResult(result) => {
                    let stream_key = (result.stream, result.epoch);
                    let open = self.stream_key(result.stream);
                    assert_eq!(stream_key, open, "an answer for a closed stream");
                    let queue = self.results.get_mut(&stream_key);
                    let next = queue.expect("an answer that was sent").pop_front();
                    assert_eq!(next, Some((result.position, result.data)));
                }
                Message::StreamError(error) => {
                    if self.stream_key(error.stream) == (error.stream, error.epoch) {
                        self.next_epoch(error.stream);
                    }
                }
                other => panic!("{other:?}"),
            }
            self.received += 1;
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Step {
                stream,
                rows,
                want,
                smooth,
            } => {
                let (_, epoch) = self.stream_key(stream);
                let position = self.streams.entry(stream).or_default().1;
                let data = data(rows as usize * 300 * 2, smooth, stream as u8);
                let step = Step {
                    stream,
                    epoch,
                    position,
                    rows,
                    width: 300,
                    dtype: DType::Bf16,
                    want,
                    data,
                };
                self.send((stream, epoch), Message::Step(step));
                self.streams.entry(stream).or_default().1 += rows;
            }
            Op::Tensor { bytes, smooth } => {
                let dims = [u32::try_from(bytes).unwrap()];
                let sent = tensor(&dims, DType::I8, data(bytes, smooth, 9));
                let message = Message::Tensor(sent.clone());
                match self.pair.caller.send_message(&message) {
                    Ok(()) => self.tensors.push(sent),
                    Err(SendRefused::Blocked) => {}
                    other => panic!("{other:?}"),
                }
            }
            Op::Truncate { stream } => {
                let (_, epoch) = self.stream_key(stream);
                let cut = Truncate {
                    stream,
                    epoch,
                    position: 0,
                    answer: true,
                };
                self.send((stream, epoch), Message::Truncate(cut));
            }
            Op::Close { stream } => {
                let (_, epoch) = self.stream_key(stream);
                let close = StreamClose { stream, epoch };
                say(&mut self.pair.caller, &Message::StreamClose(close));
                self.next_epoch(stream);
            }
            Op::HostWorks { answers } => self.host_works(answers),
            Op::HostFails { stream } => {
                let step = self.unanswered.iter().find(|step| step.stream == stream);
                if let Some(stream_key) = step.map(|step| (step.stream, step.epoch)) {
                    self.fail(stream_key);
                }
            }
            Op::CallerTakes => self.caller_takes(),
            Op::Transmit(side, n) => {
                for _ in 0..n {
                    self.pair.transmit(side);
                }
            }
            Op::Deliver(side, n) => {
                for _ in 0..n {
                    self.pair.deliver(side);
                }
            }
        }
    }

    /// Runs until no message has moved for a few rounds.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 3 {
            let before = self.received;
            self.pair.run();
            self.host_works(1000);
            self.caller_takes();
            quiet = match self.received == before {
                true => quiet + 1,
                false => 0,
            };
        }
        self.pair.run();
    }
}

fn at_rest(session: &Session, window: u32) {
    let stats = session.stats();
    assert!(session.is_open(), "{:?}", session.closed());
    assert_eq!(stats.credit_available, window, "{stats:?}");
    assert_eq!(stats.buffered_bytes, 0, "{stats:?}");
    assert_eq!(stats.queued_bytes, 0, "{stats:?}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn everything_arrives_in_order_and_all_credit_returns(
        caller in config(),
        host in config(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let pair = Pair::open(&caller, &host);
        let mut world = World {
            pair,
            streams: BTreeMap::new(),
            to_host: BTreeMap::new(),
            tensors: Vec::new(),
            unanswered: VecDeque::new(),
            failed: BTreeSet::new(),
            results: BTreeMap::new(),
            received: 0,
        };
        for op in &ops {
            world.apply(op);
            let stats = world.pair.host.stats();
            prop_assert!(stats.buffered_bytes <= u64::from(host.recv_buffer_bytes));
            prop_assert!(world.pair.caller.closed().is_none(), "{:?}", world.pair.caller);
            prop_assert!(world.pair.host.closed().is_none(), "{:?}", world.pair.host);
        }
        world.settle();
        prop_assert!(world.tensors.is_empty(), "a tensor never arrived");
        // Open streams have lost no message.
        for (&stream, &(epoch, _)) in &world.streams {
            let missing = world.to_host.get(&(stream, epoch)).map_or(0, VecDeque::len);
            prop_assert_eq!(missing, 0, "stream {} epoch {}", stream, epoch);
            let unread = world.results.get(&(stream, epoch)).map_or(0, VecDeque::len);
            prop_assert_eq!(unread, 0);
        }
        for (stream, (epoch, _)) in world.streams.clone() {
            let close = StreamClose { stream, epoch };
            say(&mut world.pair.caller, &Message::StreamClose(close));
        }
        world.settle();
        at_rest(&world.pair.caller, host.window_chunks);
        at_rest(&world.pair.host, caller.window_chunks);
        prop_assert_eq!(world.pair.caller.stats().steps_in_flight, 0);
        prop_assert_eq!(world.pair.host.stats().steps_in_flight, 0);
    }

    #[test]
    fn tensors_of_any_shape_survive_any_chunking(
        config in config(),
        dims in prop::collection::vec(1u32..9, 1..=8),
        dtype in 0usize..4,
        smooth in any::<bool>(),
    ) {
        let dtype = DType::ALL[dtype];
        let config = Config { recv_buffer_bytes: 1 << 28, ..config };
        // At most about half a megabyte.
        let mut dims = dims;
        while dims.iter().map(|&d| d as usize).product::<usize>() > 120_000 {
            dims.pop();
        }
        let bytes = dims.iter().map(|&d| d as usize).product::<usize>() * dtype.size();
        let sent = tensor(&dims, dtype, data(bytes, smooth, 3));
        let mut pair = Pair::open(&config, &config);
        let before = pair.host.stats().frames_sent;
        say(&mut pair.host, &Message::Tensor(sent.clone()));
        pair.run();
        let got = pair.caller.poll_event();
        prop_assert_eq!(got, Some(Event::Message(Message::Tensor(sent))));
        pair.run();
        at_rest(&pair.host, config.window_chunks);
        let chunks = bytes.div_ceil(config.chunk_bytes as usize) as u64;
        prop_assert_eq!(pair.host.stats().frames_sent - before, chunks);
    }

    #[test]
    fn a_session_survives_whatever_a_peer_sends(
        messages in prop::collection::vec(
            (0u8..24, any::<bool>(), prop::collection::vec(any::<u8>(), 0..80)),
            1..40,
        ),
    ) {
        // Valid headers around arbitrary bodies reach deeper than arbitrary bytes.
        let mut pair = Pair::open(&Config::default(), &Config::default());
        let mut sequence = pair.caller.stats().frames_sent as u32;
        for (kind, last, body) in messages {
            sequence += 1;
            let mut message = vec![1, kind, 0, 0];
            message.extend_from_slice(&sequence.to_be_bytes());
            message.extend_from_slice(&(body.len() as u32).to_be_bytes());
            message.extend_from_slice(&[0, 0, 0, if last && kind == 1 { 2 } else { 0 }]);
            message.extend_from_slice(&body);
            pair.inject(Side::Host, message);
            pair.deliver(Side::Host);
            while pair.transmit(Side::Host) {}
            while pair.host.poll_event().is_some() {}
        }
        prop_assert!(pair.host.stats().buffered_bytes <= 64 << 20);
    }
}
