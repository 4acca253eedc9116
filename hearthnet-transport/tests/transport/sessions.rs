//! Sessions in virtual time: guarantees of the protocol while both sides keep its rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use bytes::Bytes;
use hearthnet_transport::pair::{Pair, Side};
use hearthnet_transport::session::{Event, SendRefused};
use hearthnet_transport::wire::{Flags, FrameType, Header};
use hearthnet_transport::{
    CloseCode, Config, DType, Deadlines, Hello, Message, Receipt, Step, StreamClose, StreamError,
    Tensor, Truncate, Truncated, Want,
};

use crate::support::{answer, ended, messages, noise, open_stream, row, say, step, tensor};

const MIB: usize = 1024 * 1024;

fn pair() -> Pair {
    pair_with(|_| {})
}

/// A pair whose sides have the same configuration.
fn pair_with(change: impl FnOnce(&mut Config)) -> Pair {
    let mut config = Config::default();
    change(&mut config);
    Pair::open(&config, &config)
}

/// Sends a step from the caller, which must be accepted.
fn ask(pair: &mut Pair, step: Step) {
    say(&mut pair.caller, &Message::Step(step));
}

fn close(stream: u32, epoch: u32) -> Message {
    Message::StreamClose(StreamClose { stream, epoch })
}

/// A tensor of so many bytes, which do not compress.
fn bytes(count: usize) -> Tensor {
    tensor(&[count as u32], DType::I8, noise(count))
}

fn frames(pair: &Pair, to: Side) -> Vec<Header> {
    pair.wire(to)
        .map(|message| Header::decode(message).unwrap().0)
        .collect()
}

#[test]
fn both_hellos_open_the_session_and_the_smaller_limits_hold() {
    let caller = Config {
        chunk_bytes: 8192,
        inline_max: 4096,
        ..Config::default()
    };
    let host = Config {
        inline_max: 2048,
        compress_above: None,
        ..Config::default()
    };
    let mut pair = Pair::new(&caller, &host, &Hello::new("pipeline", vec![7; 100]));
    pair.run();
    let Some(Event::Hello(hello)) = pair.host.poll_event() else {
        panic!("no HELLO")
    };
    let said = (hello.purpose.as_str(), hello.token.len());
    assert_eq!(said, ("pipeline", 100));
    assert!(!pair.host.is_open() && !pair.caller.is_open());
    pair.host.accept(pair.now());
    pair.run();
    for session in [&pair.caller, &pair.host] {
        let terms = session.terms().unwrap();
        assert_eq!((terms.chunk_bytes, terms.inline_max), (8192, 2048));
        assert_eq!(terms.compress_above, None);
    }
}

#[test]
fn a_rejected_hello_tells_the_caller_why() {
    let config = Config::default();
    let mut pair = Pair::new(&config, &config, &Hello::new("pipeline", Vec::new()));
    pair.run();
    assert!(matches!(pair.host.poll_event(), Some(Event::Hello(_))));
    pair.host.reject(CloseCode::TokenExpired);
    pair.run();
    let closed = pair.caller.closed().unwrap().clone();
    ended::<()>(Err(closed), CloseCode::TokenExpired, false);
    assert!(pair.host.closed().unwrap().by_us);
}

#[test]
fn five_mebibytes_travel_in_five_chunks() {
    let mut pair = pair();
    let sent = tensor(&[5, 512, 1024], DType::F16, noise(5 * MIB));
    say(&mut pair.caller, &Message::Tensor(sent.clone()));
    while pair.transmit(Side::Caller) {}
    let headers = frames(&pair, Side::Host);
    assert_eq!(headers.len(), 5);
    for (i, header) in headers.iter().enumerate() {
        assert_eq!(header.kind, FrameType::TensorData);
        assert_eq!(header.length as usize, 4 + 3 * 4 + MIB);
        assert_eq!(header.flags.has(Flags::FINAL), i == 4);
        assert!(!header.flags.has(Flags::COMPRESSED));
    }
    pair.run();
    assert_eq!(messages(&mut pair.host), [Message::Tensor(sent)]);
}

#[test]
fn tensors_that_compress_are_compressed_and_arrive_whole() {
    let mut pair = pair();
    let data: Vec<u8> = (0..3 * MIB).map(|i| (i / 1000) as u8).collect();
    let sent = tensor(&[3 * MIB as u32], DType::I8, data.into());
    say(&mut pair.caller, &Message::Tensor(sent.clone()));
    pair.run();
    assert_eq!(messages(&mut pair.host), [Message::Tensor(sent)]);
    let stats = pair.caller.stats();
    assert!(stats.bytes_sent < 3 * MIB as u64 / 10, "{stats:?}");
    assert_eq!(pair.host.stats().bytes_received, stats.bytes_sent);
}

#[test]
fn nothing_is_compressed_when_one_side_declines() {
    let without = Config {
        compress_above: None,
        ..Config::default()
    };
    for (caller, host) in [
        (without.clone(), Config::default()),
        (Config::default(), without),
    ] {
        let mut pair = Pair::open(&caller, &host);
        let sent = tensor(&[2 * MIB as u32], DType::I8, vec![0; 2 * MIB].into());
        say(&mut pair.caller, &Message::Tensor(sent));
        pair.run();
        assert!(pair.caller.stats().bytes_sent > 2 * MIB as u64);
    }
}

#[test]
fn the_size_of_a_decode_step_depends_on_the_width_alone() {
    let mut pair = pair();
    let size = |pair: &mut Pair, position: u32, data: Bytes| {
        let message = step(1, 0, position, 1, data);
        ask(pair, message);
        assert!(pair.transmit(Side::Caller));
        assert!(!pair.transmit(Side::Caller), "a decode step is one message");
        let size = pair.wire(Side::Host).last().unwrap().len();
        pair.run();
        size
    };
    let compressible = size(&mut pair, 0, Bytes::from(vec![0; 1152]));
    let incompressible = size(&mut pair, 4_000_000_000, noise(1152));
    assert_eq!(compressible, 16 + 32 + 1152);
    assert_eq!(incompressible, compressible);
}

#[test]
fn the_window_blocks_at_its_edge_and_resumes_with_credit() {
    let mut pair = pair_with(|config| (config.chunk_bytes, config.window_chunks) = (4096, 3));
    let sent = bytes(10 * 4096);
    say(&mut pair.caller, &Message::Tensor(sent.clone()));
    let mut chunks = 0;
    while pair.transmit(Side::Caller) {
        chunks += 1;
    }
    assert_eq!(chunks, 3);
    assert_eq!(pair.caller.stats().credit_available, 0);
    // Two chunks arrive, and are acknowledged together.
    assert!(pair.deliver(Side::Host) && pair.deliver(Side::Host));
    assert!(pair.transmit(Side::Host) && !pair.transmit(Side::Host));
    assert!(pair.deliver(Side::Caller));
    assert_eq!(pair.caller.stats().credit_available, 2);
    assert!(pair.transmit(Side::Caller) && pair.transmit(Side::Caller));
    assert!(!pair.transmit(Side::Caller));
    pair.run();
    assert_eq!(messages(&mut pair.host), [Message::Tensor(sent)]);
    pair.run();
    assert_eq!(pair.caller.stats().credit_available, 3);
}

#[test]
fn untaken_tensors_hold_their_credit_and_buffer() {
    let mut pair = pair_with(|config| config.window_chunks = 2);
    for _ in 0..4 {
        let small = bytes(100);
        say(&mut pair.caller, &Message::Tensor(small));
    }
    pair.run();
    assert_eq!(pair.host.stats().buffered_bytes, 200);
    assert_eq!(pair.caller.stats().credit_available, 0);
    assert_eq!(messages(&mut pair.host).len(), 2);
    pair.run();
    assert_eq!(messages(&mut pair.host).len(), 2);
    pair.run();
    assert_eq!(pair.caller.stats().credit_available, 2);
    assert_eq!(pair.host.stats().buffered_bytes, 0);
}

#[test]
fn the_receive_buffer_is_respected_and_large_tensors_are_not_starved() {
    let mut pair = pair_with(|config| config.recv_buffer_bytes = 3 * MIB as u32);
    let mut expected = Vec::new();
    for size in [2, 3, 1, 1] {
        let sent = bytes(size * MIB);
        say(&mut pair.caller, &Message::Tensor(sent.clone()));
        expected.push(Message::Tensor(sent));
    }
    let mut got = Vec::new();
    for _ in 0..10 {
        pair.run();
        assert!(pair.host.stats().buffered_bytes <= 3 * MIB as u64);
        got.extend(messages(&mut pair.host));
    }
    assert_eq!(got, expected);
    // A tensor that could never fit is refused at once.
    let huge = bytes(3 * MIB + 1);
    let refused = pair.caller.send_message(&Message::Tensor(huge));
    assert!(matches!(refused, Err(SendRefused::Impossible(v)) if v.code == CloseCode::FrameTooBig));
}

#[test]
fn a_decode_row_overtakes_the_chunks_of_another_stream() {
    let mut pair = pair();
    ask(&mut pair, step(1, 0, 0, 8192, noise(8192 * 1152)));
    for _ in 0..4 {
        assert!(pair.transmit(Side::Caller));
    }
    ask(&mut pair, row(2, 0, 0));
    assert!(pair.transmit(Side::Caller));
    let last = frames(&pair, Side::Host).last().unwrap().kind;
    assert_eq!(last, FrameType::Step);
    pair.run();
    let order = messages(&mut pair.host);
    let streams = order.iter().map(|message| match message {
        Message::Step(step) => step.stream,
        other => panic!("{other:?}"),
    });
    assert_eq!(streams.collect::<Vec<u32>>(), [2, 1]);
}

#[test]
fn messages_of_one_stream_keep_their_order_around_large_steps() {
    let mut pair = pair();
    let sent = [
        Message::StreamOpen(open_stream(1, 0)),
        Message::Step(step(1, 0, 0, 2000, noise(2000 * 1152))),
        Message::Truncate(Truncate {
            stream: 1,
            epoch: 0,
            position: 5,
            answer: false,
        }),
        Message::Step(row(1, 0, 5)),
    ];
    for message in &sent {
        say(&mut pair.caller, message);
    }
    pair.run();
    assert_eq!(messages(&mut pair.host), sent);
}

#[test]
fn the_answer_to_a_truncation_keeps_its_place_and_ends_with_its_stream() {
    let mut pair = pair();
    let (stream, epoch, position) = (1, 0, 0);
    let cut = Message::Truncate(Truncate {
        stream,
        epoch,
        position,
        answer: true,
    });
    let kept = Message::Truncated(Truncated {
        stream,
        epoch,
        position,
    });
    ask(&mut pair, row(stream, epoch, position));
    say(&mut pair.caller, &cut);
    pair.run();
    let step = Message::Step(row(stream, epoch, position));
    assert_eq!(messages(&mut pair.host), [step, cut]);
    let answer = answer(&row(stream, epoch, position));
    say(&mut pair.host, &answer);
    say(&mut pair.host, &kept);
    pair.run();
    assert_eq!(messages(&mut pair.caller), [answer, kept.clone()]);
    // The end of the stream drops it.
    say(&mut pair.host, &kept);
    say(&mut pair.caller, &close(stream, epoch));
    while pair.transmit(Side::Caller) && pair.deliver(Side::Host) {}
    pair.run();
    assert!(messages(&mut pair.caller).is_empty());
    // Only the host may send one.
    let refused = pair.caller.send_message(&kept);
    assert!(matches!(refused, Err(SendRefused::Impossible(_))));
}

#[test]
fn steps_in_flight_are_bounded_and_answers_return_the_slots() {
    let mut pair = pair_with(|config| config.max_steps_in_flight = 2);
    for position in 0..2 {
        ask(&mut pair, row(1, 0, position));
    }
    let third = Message::Step(row(1, 0, 2));
    let blocked = pair.caller.send_message(&third);
    assert!(matches!(blocked, Err(SendRefused::Blocked)));
    pair.run();
    assert_eq!(pair.host.stats().steps_in_flight, 2);
    for message in messages(&mut pair.host) {
        let Message::Step(step) = message else {
            panic!("{message:?}")
        };
        say(&mut pair.host, &answer(&step));
    }
    pair.run();
    assert_eq!(messages(&mut pair.caller).len(), 2);
    assert_eq!(pair.caller.stats().steps_in_flight, 0);
    say(&mut pair.caller, &third);
}

#[test]
fn a_stream_error_answers_every_step_of_its_stream_and_only_those() {
    let mut pair = pair();
    for (stream, epoch) in [(1, 0), (1, 0), (1, 1), (2, 0)] {
        ask(&mut pair, row(stream, epoch, 0));
    }
    pair.run();
    let error = StreamError {
        stream: 1,
        epoch: 0,
        position: Some(0),
        code: "position_gap".into(),
        message: "the stream has no positions yet".into(),
    };
    say(&mut pair.host, &Message::StreamError(error.clone()));
    pair.run();
    assert_eq!(pair.host.stats().steps_in_flight, 2);
    assert_eq!(pair.caller.stats().steps_in_flight, 2);
    assert_eq!(messages(&mut pair.caller), [Message::StreamError(error)]);
    // The undelivered steps of that stream are dropped, and the caller has confirmed its end.
    let left = messages(&mut pair.host);
    assert_eq!(left.len(), 3);
    assert_eq!(left.last(), Some(&close(1, 0)));
}

#[test]
fn cancelling_mid_tensor_frees_both_sides_at_once() {
    let mut pair = pair_with(|config| (config.chunk_bytes, config.window_chunks) = (4096, 4));
    ask(&mut pair, step(1, 0, 0, 100, noise(100 * 1152)));
    // The announcement and some chunks are in transit, some have arrived.
    while pair.transmit(Side::Caller) {}
    for _ in 0..3 {
        pair.deliver(Side::Host);
    }
    assert!(pair.host.stats().buffered_bytes > 0);
    say(&mut pair.caller, &close(1, 0));
    assert!(pair.caller.stats().queued_bytes <= 64);
    assert_eq!(pair.caller.stats().steps_in_flight, 0);
    pair.run();
    assert_eq!(messages(&mut pair.host), [close(1, 0)]);
    for stats in [pair.caller.stats(), pair.host.stats()] {
        let left = (stats.buffered_bytes, stats.queued_bytes);
        assert_eq!((stats.credit_available, left), (4, (0, 0)), "{stats:?}");
        assert_eq!(stats.steps_in_flight, 0);
    }
    assert!(pair.caller.is_open() && pair.host.is_open());
}

#[test]
fn a_stream_close_overtakes_queued_messages_and_drops_its_steps() {
    let mut pair = pair();
    let other = row(2, 0, 0);
    for step in [row(1, 0, 0), other.clone(), row(1, 0, 1)] {
        ask(&mut pair, step);
    }
    say(&mut pair.caller, &close(1, 0));
    pair.run();
    let expected = [close(1, 0), Message::Step(other)];
    assert_eq!(messages(&mut pair.host), expected);
    assert_eq!(pair.caller.stats().steps_in_flight, 1);
    assert_eq!(pair.host.stats().steps_in_flight, 1);
}

#[test]
fn a_large_result_for_a_closed_stream_is_refused_and_its_sender_stops() {
    let mut pair = pair_with(|config| (config.chunk_bytes, config.window_chunks) = (4096, 4));
    let asked = step(1, 0, 0, 100, noise(100 * 1152));
    ask(&mut pair, asked.clone());
    pair.run();
    assert_eq!(messages(&mut pair.host), [Message::Step(asked.clone())]);
    let before = pair.host.stats().frames_sent;
    say(&mut pair.host, &answer(&asked));
    // The result's first chunks are in transit when the caller closes the stream.
    while pair.transmit(Side::Host) {}
    pair.deliver(Side::Caller);
    pair.deliver(Side::Caller);
    say(&mut pair.caller, &close(1, 0));
    while pair.transmit(Side::Caller) {}
    let code = "stream_closed".as_bytes();
    let refuses = |frame: &&Bytes| frame.windows(code.len()).any(|part| part == code);
    assert_eq!(pair.wire(Side::Host).filter(refuses).count(), 1);
    pair.run();
    assert_eq!(messages(&mut pair.caller), []);
    let sent = pair.host.stats().frames_sent - before;
    assert!(sent < 29, "the host sent all of it");
    for stats in [pair.caller.stats(), pair.host.stats()] {
        let credit = stats.credit_available;
        assert_eq!((credit, stats.buffered_bytes), (4, 0), "{stats:?}");
    }
    assert!(pair.caller.is_open() && pair.host.is_open());
}

#[test]
fn an_answer_that_crosses_a_close_is_dropped_and_counted() {
    let mut pair = pair();
    let asked = row(1, 0, 0);
    ask(&mut pair, asked.clone());
    pair.run();
    say(&mut pair.host, &answer(&asked));
    assert!(pair.transmit(Side::Host));
    say(&mut pair.caller, &close(1, 0));
    pair.run();
    assert_eq!(messages(&mut pair.caller), []);
    assert_eq!(pair.caller.stats().stale_results, 1);
    assert!(pair.caller.is_open());
}

#[test]
fn a_result_for_another_stream_or_epoch_ends_the_session() {
    // Two sessions whose frames have the same numbers: an answer is delivered to the wrong one.
    for (stream, epoch) in [(2, 0), (1, 1)] {
        let (mut asked, mut other) = (pair(), pair());
        ask(&mut asked, row(1, 0, 0));
        asked.run();
        let wrong = row(stream, epoch, 0);
        ask(&mut other, wrong.clone());
        other.run();
        say(&mut other.host, &answer(&wrong));
        let now = other.now();
        while let Some(frame) = other.host.poll_transmit(now) {
            asked.caller.handle_message(now, &frame);
        }
        let closed = asked.caller.closed().map(|closed| closed.code);
        assert_eq!(closed, Some(CloseCode::ProtocolState), "{stream} {epoch}");
        assert_eq!(messages(&mut asked.caller), []);
    }
}

#[test]
fn a_second_answer_to_the_same_step_ends_the_session() {
    let mut pair = pair();
    let asked = row(1, 0, 0);
    ask(&mut pair, asked.clone());
    pair.run();
    say(&mut pair.host, &answer(&asked));
    let now = pair.now();
    let first = pair.host.poll_transmit(now).unwrap();
    pair.caller.handle_message(now, &first);
    assert!(pair.caller.is_open());
    // The same frame with the next sequence number (big-endian in bytes 4 to 7).
    let mut second = first.to_vec();
    second[7] += 1;
    pair.caller.handle_message(now, &second.into());
    let closed = pair.caller.closed().map(|closed| closed.code);
    assert_eq!(closed, Some(CloseCode::ProtocolState));
}

#[test]
fn silence_is_met_with_a_ping_and_then_the_end() {
    let mut pair = pair_with(|config| config.keep_alive = Duration::from_secs(30));
    // Both sides alive: pings keep the session open.
    pair.advance(Duration::from_secs(300));
    assert!(pair.caller.is_open() && pair.host.is_open());

    // The host is gone: the caller notices after two intervals.
    let mut alone = pair.caller;
    let mut now = pair.host.poll_timeout().min(alone.poll_timeout());
    let begin = now;
    while alone.is_open() {
        alone.handle_timeout(now);
        while alone.poll_transmit(now).is_some() {}
        now = alone.poll_timeout().min(now + Duration::from_secs(100));
    }
    assert_eq!(alone.closed().unwrap().code, CloseCode::KeepAlive);
    assert!(now.since(begin) <= Duration::from_secs(160));
}

#[test]
fn a_probe_is_answered_and_only_one_is_outstanding() {
    let mut pair = pair();
    pair.run();
    pair.tick(Duration::from_secs(10));
    let now = pair.now();
    assert_eq!(pair.caller.silent_for(now), Duration::from_secs(10));
    assert_eq!(pair.caller.unanswered_for(now), None);
    let sent = pair.caller.stats().frames_sent;
    pair.caller.probe(now);
    pair.caller.probe(now);
    assert!(pair.transmit(Side::Caller) && !pair.transmit(Side::Caller));
    assert_eq!(pair.caller.stats().frames_sent, sent + 1);
    pair.tick(Duration::from_secs(2));
    let now = pair.now();
    pair.caller.probe(now);
    let unanswered = pair.caller.unanswered_for(now);
    assert_eq!(unanswered, Some(Duration::from_secs(2)));
    assert_eq!(pair.caller.silent_for(now), Duration::from_secs(12));
    pair.run();
    assert_eq!(pair.caller.stats().frames_sent, sent + 1);
    assert_eq!(pair.caller.silent_for(now), Duration::ZERO);
    assert_eq!(pair.caller.unanswered_for(now), None);
    assert!(pair.caller.is_open() && pair.host.is_open());
}

#[test]
fn a_session_ends_with_its_lifetime() {
    let short = Config {
        session_lifetime: Duration::from_secs(90),
        ..Config::default()
    };
    let mut pair = Pair::open(&Config::default(), &short);
    pair.advance(Duration::from_secs(89));
    assert!(pair.caller.is_open() && pair.host.is_open());
    pair.advance(Duration::from_secs(2));
    for session in [&pair.caller, &pair.host] {
        assert_eq!(session.closed().unwrap().code, CloseCode::SessionExpired);
    }
}

#[test]
fn a_host_waits_for_hello_only_so_long() {
    let config = Config::default();
    let mut pair = Pair::new(&config, &config, &Hello::new("pipeline", Vec::new()));
    let deadline = pair.host.poll_timeout();
    assert_eq!(deadline.0, 5_000_000);
    pair.host.handle_timeout(deadline);
    assert_eq!(pair.host.closed().unwrap().code, CloseCode::PipelineStalled);
}

#[test]
fn a_tensor_that_trickles_in_is_given_up() {
    let mut pair = pair_with(|config| config.chunk_bytes = 4096);
    let large = bytes(100 * 4096);
    say(&mut pair.caller, &Message::Tensor(large));
    // A chunk a second: 4 KiB/s, below the minimum of 16 KiB/s.
    for _ in 0..16 {
        pair.transmit(Side::Caller);
    }
    while pair.host.is_open() {
        pair.deliver(Side::Host);
        while pair.transmit(Side::Host) {}
        pair.tick(Duration::from_secs(1));
        pair.host.handle_timeout(pair.now());
        assert!(pair.now().0 < 60_000_000, "the host waits for ever");
    }
    assert_eq!(pair.host.closed().unwrap().code, CloseCode::PipelineStalled);
}

#[test]
fn a_message_that_trickles_in_is_given_up() {
    let mut pair = pair();
    for bytes in 1..=100u64 {
        pair.tick(Duration::from_secs(1));
        pair.host.handle_partial(pair.now(), bytes);
        pair.host.handle_timeout(pair.now());
        if !pair.host.is_open() {
            break;
        }
    }
    assert_eq!(pair.host.closed().unwrap().code, CloseCode::PipelineStalled);
    assert!(pair.now().0 <= 12_000_000);
}

#[test]
fn withheld_credit_ends_the_session() {
    let deadlines = Deadlines {
        credit: Duration::from_secs(20),
        ..Deadlines::default()
    };
    let config = Config {
        window_chunks: 1,
        deadlines,
        ..Config::default()
    };
    let mut pair = Pair::open(&config, &config);
    for _ in 0..2 {
        say(&mut pair.caller, &Message::Tensor(bytes(9)));
    }
    // The first tensor is never taken, so the second never gets credit.
    pair.advance(Duration::from_secs(19));
    assert!(pair.caller.is_open());
    pair.advance(Duration::from_secs(2));
    assert_eq!(pair.caller.closed().unwrap().code, CloseCode::CreditStall);
    assert_eq!(pair.host.closed().unwrap().code, CloseCode::CreditStall);
}

#[test]
fn leaving_overtakes_queued_messages_and_the_host_serves_on() {
    let mut pair = pair();
    say(&mut pair.caller, &Message::StreamOpen(open_stream(0, 0)));
    ask(&mut pair, row(0, 0, 0));
    pair.run();
    messages(&mut pair.host);
    let large = bytes(3 * MIB);
    say(&mut pair.host, &Message::Tensor(large));
    let answer = answer(&row(0, 0, 0));
    say(&mut pair.host, &answer);
    for within_ms in [10_000, 5] {
        let leaving = Message::Leaving { within_ms };
        say(&mut pair.host, &leaving);
    }
    pair.run();
    let got = messages(&mut pair.caller);
    assert_eq!(got[0], Message::Leaving { within_ms: 10_000 });
    assert_eq!(got[1], Message::Leaving { within_ms: 5 });
    assert_eq!(got[2], answer);
    assert!(matches!(got[3], Message::Tensor(_)));
    assert!(pair.caller.is_open() && pair.host.is_open());
    // Only the host may send LEAVING.
    let refused = pair.caller.send_message(&Message::Leaving { within_ms: 1 });
    assert!(matches!(refused, Err(SendRefused::Impossible(_))));
}

#[test]
fn a_receipt_outlives_its_stream_and_comes_only_if_both_sides_want_it() {
    let receipt = Message::Receipt(Receipt {
        stream: 0,
        epoch: 0,
        claims: std::num::NonZeroU32::MIN,
        chain: [1; 32],
        signature: [2; 64],
    });
    for (caller, host, interval) in [(64, 16, 64), (0, 16, 0), (16, 0, 0)] {
        let config = |receipts| Config {
            receipts,
            ..Config::default()
        };
        let mut pair = Pair::open(&config(caller), &config(host));
        assert_eq!(pair.caller.terms().unwrap().receipts, interval);
        assert_eq!(pair.host.terms().unwrap().receipts, interval);
        say(&mut pair.caller, &Message::StreamOpen(open_stream(0, 0)));
        ask(&mut pair, row(0, 0, 0));
        pair.run();
        messages(&mut pair.host);
        // The end of the stream drops the answer to its step, and not the receipt.
        let answer = answer(&row(0, 0, 0));
        say(&mut pair.host, &answer);
        say(&mut pair.host, &receipt);
        say(&mut pair.caller, &close(0, 0));
        while pair.transmit(Side::Caller) && pair.deliver(Side::Host) {}
        pair.run();
        let got = messages(&mut pair.caller);
        match interval {
            0 => {
                let closed = pair.caller.closed().unwrap();
                assert_eq!(
                    (closed.code, closed.by_us),
                    (CloseCode::ProtocolState, true)
                );
            }
            _ => assert_eq!(got, std::slice::from_ref(&receipt)),
        }
        // Only the host may send one.
        let refused = pair.caller.send_message(&receipt);
        assert!(matches!(
            refused,
            Err(SendRefused::Impossible(_) | SendRefused::NotOpen)
        ));
    }
}

#[test]
fn a_slow_application_is_not_blamed_on_the_peer() {
    let mut pair = pair_with(|config| (config.window_chunks, config.chunk_bytes) = (2, 4096));
    // Two tensors wait to be taken and hold all credit; a third is half received.
    for _ in 0..2 {
        say(&mut pair.caller, &Message::Tensor(bytes(9)));
    }
    let large = bytes(3 * 4096);
    say(&mut pair.caller, &Message::Tensor(large));
    pair.run();
    pair.advance(Duration::from_secs(25));
    assert!(pair.host.is_open() && pair.caller.is_open());
    let mut got = messages(&mut pair.host);
    pair.run();
    got.extend(messages(&mut pair.host));
    assert_eq!(got.len(), 3);
}

#[test]
fn closing_frees_everything_and_drops_what_was_queued() {
    let mut pair = pair();
    let large = bytes(20 * MIB);
    say(&mut pair.caller, &Message::Tensor(large));
    for _ in 0..5 {
        pair.transmit(Side::Caller);
        pair.deliver(Side::Host);
    }
    pair.caller.close(CloseCode::Shutdown, "going home");
    assert_eq!(pair.caller.stats().queued_bytes, 0);
    pair.run();
    let closed = pair.host.closed().unwrap();
    assert_eq!((closed.code, closed.by_us), (CloseCode::Shutdown, false));
    assert_eq!(closed.detail, "going home");
    assert_eq!(pair.host.stats().buffered_bytes, 0);
    let late = pair.host.send_message(&Message::Tensor(bytes(1)));
    assert!(matches!(late, Err(SendRefused::NotOpen)));
}

#[test]
fn messages_before_a_bye_can_still_be_taken() {
    let mut pair = pair();
    let asked = row(1, 0, 0);
    ask(&mut pair, asked.clone());
    pair.transmit(Side::Caller);
    pair.caller.close(CloseCode::Normal, "");
    pair.run();
    assert!(pair.host.closed().is_some());
    assert_eq!(messages(&mut pair.host), [Message::Step(asked)]);
}

#[test]
fn messages_that_contradict_themselves_are_refused_before_they_are_sent() {
    let mut pair = pair();
    let good = row(1, 0, 0);
    let wrong_length = Message::Step(Step {
        rows: 2,
        ..good.clone()
    });
    let not_ours = answer(&good);
    let short = tensor(&[4], DType::F32, noise(15));
    for (message, code) in [
        (wrong_length, CloseCode::TensorShape),
        (not_ours, CloseCode::ProtocolState),
        (Message::Tensor(short), CloseCode::TensorShape),
    ] {
        match pair.caller.send_message(&message) {
            Err(SendRefused::Impossible(violation)) => assert_eq!(violation.code, code),
            other => panic!("{other:?}"),
        }
    }
    pair.run();
    assert!(pair.host.is_open());
}

#[test]
fn debug_output_names_shapes_and_never_data() {
    let asked = Step {
        want: Want::All,
        ..step(1, 0, 0, 1, Bytes::from(vec![0x5a; 1152]))
    };
    let printed = format!(
        "{asked:?} {:?} {:?} {:?}",
        asked.echo(),
        tensor(&[4], DType::I8, Bytes::from_static(b"ZZZZ")),
        Hello::new("pipeline", vec![0x5a; 64]),
    );
    assert!(printed.contains("width: 576"));
    assert!(!printed.contains("90") && !printed.contains("ZZ") && !printed.contains("5a"));
}
