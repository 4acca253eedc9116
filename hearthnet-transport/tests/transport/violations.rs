//! Every violation by a peer ends the session with its own code, and has no other effect.
//!
//! The violations of callers are in a table ([`violations`]), which attacks on a real host use too.
//! This file adds violations of hosts, and those that need a session's state.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use ciborium::Value;
use hearthnet_testkit::raw::violations::{self, Reached, Violation, ack, nack};
use hearthnet_testkit::raw::{
    Frame, Hello as RawHello, Step, cbor, chunk as chunk_body, dtype, flag, kind, life, stream_open,
};
use hearthnet_transport::pair::{Pair, Side};
use hearthnet_transport::session::{Event, Session};
use hearthnet_transport::wire::{FrameType, Header};
use hearthnet_transport::{CloseCode, Config, DType, Hello, Message, Time};

use crate::support::{noise, row, say, tensor};

/// A session whose peer is about to break a rule.
struct Victim {
    session: Session,
    sequence: u32,
    now: Time,
}

fn config() -> Config {
    Config {
        chunk_bytes: 4096,
        window_chunks: 4,
        recv_buffer_bytes: 64 * 1024,
        max_steps_in_flight: 3,
        ..Config::default()
    }
}

impl Victim {
    fn host() -> Victim {
        let pair = Pair::open(&config(), &config());
        Victim::of(pair.host, pair.caller.stats().frames_sent)
    }

    fn caller() -> Victim {
        let pair = Pair::open(&config(), &config());
        Victim::of(pair.caller, pair.host.stats().frames_sent)
    }

    fn fresh_host() -> Victim {
        Victim::of(Session::host(&config(), Time::ZERO), 0)
    }

    fn fresh_caller() -> Victim {
        let hello = Hello::new("pipeline", Vec::new());
        Victim::of(Session::caller(&config(), &hello, Time::ZERO), 0)
    }

    fn of(session: Session, heard: u64) -> Victim {
        Victim {
            session,
            sequence: u32::try_from(heard).unwrap(),
            now: Time::ZERO,
        }
    }

    /// A host with default limits, in the state `reached`.
    fn reached(reached: Reached) -> Victim {
        let fresh = || Victim::of(Session::host(&Config::default(), Time::ZERO), 0);
        let hello = RawHello::new("pipeline", Vec::new());
        let greeted = |hello: RawHello| {
            let mut victim = fresh().send(hello.frame());
            assert!(matches!(victim.session.poll_event(), Some(Event::Hello(_))));
            victim.session.accept(victim.now);
            victim.breathe()
        };
        match reached {
            Reached::Upgrade => fresh(),
            Reached::Hello(wrong) => fresh().send(wrong(hello)),
            Reached::Session(change) => greeted(change(hello)),
            Reached::Stream => {
                let mut victim = greeted(hello).send(stream_open(1, &[0; 32], (0, 1), 16));
                assert!(victim.session.poll_event().is_some());
                victim
            }
        }
    }

    /// Sends a frame, with the next sequence number unless it has its own.
    fn send(mut self, frame: Frame) -> Victim {
        self.sequence += 1;
        let message = frame.encode(self.sequence).into();
        self.session.handle_message(self.now, &message);
        self
    }

    /// Transmits pending frames, as the driver would between two reads.
    fn breathe(mut self) -> Victim {
        while self.session.poll_transmit(self.now).is_some() {}
        self
    }

    fn is_open(&self) -> bool {
        self.session.is_open()
    }

    /// Close code, which must also be in the last frame. Checks that everything is freed.
    #[track_caller]
    fn code(mut self) -> CloseCode {
        let closed = self.session.closed().expect("the session goes on").clone();
        assert!(closed.by_us);
        let mut last = None;
        while let Some(frame) = self.session.poll_transmit(self.now) {
            last = Some(frame);
        }
        let last = last.expect("no BYE");
        let (header, body) = Header::decode(&last).unwrap();
        assert_eq!(header.kind, FrameType::Bye);
        let bye: Value = ciborium::from_reader(body).unwrap();
        let mut fields = bye.as_map().unwrap().iter();
        let code = fields.find(|(key, _)| key.as_text() == Some("code"));
        assert_eq!(code.unwrap().1.as_text(), Some(closed.code.as_str()));
        let stats = self.session.stats();
        assert_eq!((stats.buffered_bytes, stats.queued_bytes), (0, 0));
        assert_eq!(stats.steps_in_flight, 0);
        closed.code
    }
}

/// Asserts that each violation of the table ends the session with its code.
fn all_end(violations: Vec<Violation>) {
    for Violation {
        what,
        reached,
        sent,
        code,
    } in violations
    {
        let ended = sent
            .into_iter()
            .fold(Victim::reached(reached), Victim::send);
        assert_eq!(ended.code(), code, "{what}");
    }
}

/// A chunk of an int8 tensor.
fn chunk(id: u16, dims: &[u32], bytes: usize) -> Frame {
    let body = chunk_body(id, dtype::I8, dims, &vec![0x11; bytes]);
    Frame::new(kind::TENSOR_DATA, body)
}

/// The last chunk of an int8 tensor.
fn last(id: u16, dims: &[u32], bytes: usize) -> Frame {
    chunk(id, dims, bytes).flags(flag::FINAL)
}

/// A step of int8 rows, inline or as a tensor.
fn rows(rows: u32, width: u32, tensor: Option<u16>) -> Frame {
    let inline = if tensor.is_some() { 0 } else { rows * width };
    let step = Step {
        epoch: 0,
        rows,
        width,
        dtype: dtype::I8,
        tensor,
        data: vec![0x22; inline as usize],
        ..Step::default()
    };
    step.frame()
}

fn grant(chunks: u32) -> Frame {
    Frame::new(kind::FLOWCTL, cbor(&[("grant", chunks.into())]))
}

fn of(kind: FrameType, body: &[u8]) -> Frame {
    Frame::new(kind as u8, body)
}

// ---------------------------------------------------------------------- framing

#[test]
fn a_payload_length_that_disagrees_is_frame_length() {
    all_end(violations::lengths());
}

#[test]
fn unknown_versions_types_flags_and_reserved_bits_are_frame_unknown() {
    all_end(violations::unknown());
}

#[test]
fn gaps_duplicates_and_wraps_are_frame_sequence() {
    all_end(violations::sequences());
    // The correct sequence number is accepted.
    let victim = Victim::reached(Reached::Stream);
    assert!(victim.send(Frame::ping()).is_open());
}

#[test]
fn messages_above_their_limit_are_frame_too_big() {
    all_end(violations::sizes());
    let early = Victim::fresh_caller().send(Frame::new(kind::HELLO, [0; 4096]));
    assert_eq!(early.code(), CloseCode::FrameTooBig);
    // The negotiated limits count, not the defaults.
    let step = Step {
        width: 65_545,
        dtype: dtype::I8,
        data: vec![0; 65_545],
        ..Step::default()
    };
    for frame in [
        step.frame(),
        chunk(1, &[8192], 4097),
        chunk(1, &[65_537], 4096),
        rows(1024, 65, Some(1)),
    ] {
        assert_eq!(Victim::host().send(frame).code(), CloseCode::FrameTooBig);
    }
}

#[test]
fn frames_in_the_wrong_state_are_protocol_state() {
    all_end(violations::states());
    for &kind in FrameType::ALL {
        if matches!(kind, FrameType::Hello | FrameType::Bye) {
            continue;
        }
        for victim in [Victim::fresh_host(), Victim::fresh_caller()] {
            let code = victim.send(of(kind, &[0; 8])).code();
            assert_eq!(code, CloseCode::ProtocolState, "{kind:?}");
        }
    }
    for victim in [Victim::host(), Victim::caller()] {
        let code = victim.send(Frame::new(kind::HELLO, [0xa0])).code();
        assert_eq!(code, CloseCode::ProtocolState);
    }
}

#[test]
fn frames_in_the_wrong_direction_are_protocol_state() {
    for kind in [
        FrameType::StreamOpened,
        FrameType::StepResult,
        FrameType::StreamError,
        FrameType::Descriptor,
        FrameType::Leaving,
        FrameType::Receipt,
        FrameType::Truncated,
    ] {
        let code = Victim::host().send(of(kind, &life(1, 0))).code();
        assert_eq!(code, CloseCode::ProtocolState, "{kind:?}");
    }
    for kind in [
        FrameType::StreamOpen,
        FrameType::StreamClose,
        FrameType::Step,
        FrameType::Truncate,
        FrameType::Describe,
    ] {
        let code = Victim::caller().send(of(kind, &life(1, 0))).code();
        assert_eq!(code, CloseCode::ProtocolState, "{kind:?}");
    }
}

#[test]
fn a_caller_that_does_not_wait_for_the_hosts_hello_is_protocol_state() {
    let hello = RawHello::new("pipeline", Vec::new()).frame();
    let victim = Victim::fresh_host().send(hello).send(Frame::ping());
    assert_eq!(victim.code(), CloseCode::ProtocolState);
}

#[test]
fn bodies_that_are_not_what_they_should_be_are_body_malformed() {
    all_end(violations::bodies());
    let cbor_kinds = [
        FrameType::TensorEnd,
        FrameType::Ack,
        FrameType::Nack,
        FrameType::FlowCtl,
        FrameType::Bye,
        FrameType::StreamOpen,
        FrameType::StreamClose,
        FrameType::Truncate,
    ];
    let unlike = [
        &[][..],
        &[0x00],
        &[0xff],
        &[0xa0],
        &[0xa1, 0x61, b'x', 0x00],
        &[0x9f],
    ];
    let mut frames: Vec<Frame> = cbor_kinds
        .iter()
        .flat_map(|kind| unlike.map(|body| of(*kind, body)))
        .collect();
    // A STEP that is cut off in its head: one int8 row of one value.
    let mut step = 1u32.to_be_bytes().repeat(5);
    step.extend([4, 2]);
    step.resize(31, 0);
    let stream = |stream: Value| cbor(&[("stream", stream), ("epoch", 0.into())]);
    frames.extend([
        Frame::new(kind::PING, [0; 7]),
        Frame::new(kind::PING, [0; 9]),
        Frame::new(kind::STEP, step),
        Frame::new(kind::STREAM_CLOSE, stream((-1).into())),
        Frame::new(kind::STREAM_CLOSE, stream(0x1_0000_0000u64.into())),
    ]);
    for frame in frames {
        let code = Victim::host().send(frame.clone()).code();
        assert_eq!(code, CloseCode::BodyMalformed, "{frame:?}");
    }
}

#[test]
fn hellos_without_a_common_version_or_a_purpose_are_told_apart() {
    let good = || RawHello::new("pipeline", Vec::new());
    let (version, malformed) = (CloseCode::VersionUnsupported, CloseCode::BodyMalformed);
    let versions = |list: &[u32]| {
        let list = list.iter().map(|&version| version.into());
        good().with("versions", Value::Array(list.collect()))
    };
    for (hello, code) in [
        (versions(&[2, 3]), version),
        (versions(&[]), version),
        (good().without("versions"), malformed),
        (good().without("purpose"), malformed),
        (good().with("purpose", ""), malformed),
        (good().with("purpose", "A B"), malformed),
        (RawHello::new("pipeline", vec![0; 2049]), malformed),
    ] {
        let ended = Victim::fresh_host().send(hello.frame());
        assert_eq!(ended.code(), code, "{hello:?}");
    }
}

#[test]
fn ping_floods_and_control_floods_are_frame_rate() {
    let mut victim = Victim::host();
    for _ in 0..100 {
        if victim.is_open() {
            victim = victim.breathe().send(Frame::ping());
        }
    }
    assert_eq!(victim.code(), CloseCode::FrameRate);
    let mut victim = Victim::host();
    for position in 0..10_000u32 {
        if victim.is_open() {
            let truncate = cbor(&[
                ("stream", 1.into()),
                ("epoch", 0.into()),
                ("position", position.into()),
            ]);
            victim = victim.send(Frame::new(kind::TRUNCATE, truncate));
            while victim.session.poll_event().is_some() {}
        }
    }
    assert_eq!(victim.code(), CloseCode::FrameRate);
}

#[test]
fn a_ping_now_and_then_is_welcome() {
    let mut victim = Victim::host();
    for _ in 0..1000 {
        victim.now = victim.now + Duration::from_millis(300);
        victim = victim.send(Frame::ping()).breathe();
    }
    assert!(victim.is_open());
}

#[test]
fn an_unsolicited_pong_is_protocol_state() {
    let pong = Frame::new(kind::PONG, [0; 8]);
    assert_eq!(Victim::host().send(pong).code(), CloseCode::ProtocolState);
}

// ----------------------------------------------------------------- flow control

#[test]
fn a_chunk_without_credit_is_credit_overrun() {
    let mut victim = Victim::host();
    for id in 0..4 {
        victim = victim.send(last(id, &[9], 9)).breathe();
        assert!(victim.is_open());
    }
    // No tensor was taken, so no chunk was acknowledged.
    let victim = victim.send(last(4, &[9], 9));
    assert_eq!(victim.code(), CloseCode::CreditOverrun);
    // The same with chunks of one tensor, all at once.
    let mut victim = Victim::host();
    for _ in 0..4 {
        victim = victim.send(chunk(1, &[8 * 4096], 4096));
        assert!(victim.is_open());
    }
    let victim = victim.send(chunk(1, &[8 * 4096], 4096));
    assert_eq!(victim.code(), CloseCode::CreditOverrun);
}

#[test]
fn a_step_without_a_slot_is_credit_overrun() {
    let mut victim = Victim::host();
    for _ in 0..3 {
        victim = victim.send(rows(1, 9, None));
        assert!(victim.is_open());
    }
    let victim = victim.send(rows(1, 9, None));
    assert_eq!(victim.code(), CloseCode::CreditOverrun);
}

#[test]
fn grants_of_everything_are_credit_overflow() {
    all_end(violations::grants());
    for chunks in [u32::MAX, u32::MAX - 3, 1021] {
        let code = Victim::caller().send(grant(chunks)).code();
        assert_eq!(code, CloseCode::CreditOverflow, "{chunks}");
    }
    // A grant up to the ceiling widens the window.
    let victim = Victim::caller().send(grant(1020));
    assert_eq!(victim.session.stats().credit_available, 1024);
    assert_eq!(victim.send(grant(1)).code(), CloseCode::CreditOverflow);
    // A grant of nothing is a value out of its range, whatever the window is.
    assert_eq!(
        Victim::caller().send(grant(0)).code(),
        CloseCode::BodyMalformed
    );
}

#[test]
fn acks_of_what_was_never_sent_are_credit_ack() {
    all_end(violations::acks());
    // A caller that is sending a tensor of 3 chunks, with id 1.
    let busy = |chunks: usize| {
        let mut victim = Victim::caller();
        let data = tensor(&[3 * 4096], DType::I8, noise(3 * 4096));
        victim.session.send_message(&Message::Tensor(data)).unwrap();
        for _ in 0..chunks {
            victim.session.poll_transmit(victim.now).unwrap();
        }
        victim
    };
    // The correct ACK, which must not be repeated.
    let done = busy(3).send(ack(1, 3, true));
    assert!(done.is_open());
    for (victim, frame) in [
        (Victim::caller(), ack(1, 1, true)),
        (busy(2), ack(2, 1, false)),
        (busy(2), ack(1, 3, false)),
        (busy(2), ack(1, u32::MAX, false)),
        (busy(2), ack(1, 0, false)),
        (busy(2), ack(1, 2, true)),
        (busy(3), ack(1, 3, false)),
        (busy(3), ack(1, 2, true)),
        (done, ack(1, 3, true)),
        (busy(2), nack(5)),
    ] {
        let code = victim.send(frame.clone()).code();
        assert_eq!(code, CloseCode::CreditAck, "{frame:?}");
    }
}

#[test]
fn tensors_beyond_the_buffer_are_buffer_overrun() {
    // 40 KiB of 64 KiB are announced: another 40 KiB do not fit.
    let victim = Victim::host().send(rows(40, 1024, Some(1)));
    assert!(victim.is_open());
    let victim = victim.send(rows(40, 1024, Some(2)));
    assert_eq!(victim.code(), CloseCode::BufferOverrun);
}

#[test]
fn announced_rows_that_never_arrive_end_the_session() {
    let mut victim = Victim::host().send(rows(60, 1024, Some(1)));
    assert!(victim.is_open());
    victim.now = victim.now + Duration::from_secs(11);
    victim.session.handle_timeout(victim.now);
    assert_eq!(victim.code(), CloseCode::PipelineStalled);
}

#[test]
fn small_chunks_are_chunk_too_small() {
    let broken = violations::small_chunks();
    // The last one is a size that no session may agree on.
    let (last, small) = broken.split_last().unwrap();
    assert!(
        small
            .iter()
            .all(|violation| violation.code == CloseCode::ChunkTooSmall)
    );
    assert_eq!(last.code, CloseCode::BodyMalformed);
    all_end(broken);
}

#[test]
fn open_and_cancel_churn_is_stream_churn() {
    let mut victim = Victim::host();
    for stream in 0..10_000 {
        if victim.is_open() {
            victim = victim.send(stream_open(stream, &[0; 32], (0, 1), 16));
        }
        if victim.is_open() {
            victim = victim.send(Frame::new(kind::STREAM_CLOSE, life(stream, 1)));
            while victim.session.poll_event().is_some() {}
        }
    }
    assert_eq!(victim.code(), CloseCode::StreamChurn);
}

// ---------------------------------------------------------------------- tensors

#[test]
fn shapes_that_are_zero_overflow_or_change_are_tensor_shape() {
    all_end(violations::shapes());
}

#[test]
fn ids_that_are_in_use_or_unknown_are_tensor_id() {
    let end = || Frame::new(kind::TENSOR_END, cbor(&[("tensor", 1.into())]));
    // Complete, but not acknowledged yet.
    let done = || Victim::host().send(last(1, &[9], 9));
    let announced = || Victim::host().send(rows(8, 1024, Some(1)));
    for (victim, frame) in [
        (done(), last(1, &[9], 9)),
        (done(), end()),
        (Victim::host(), end()),
        (announced(), rows(8, 1024, Some(1))),
    ] {
        let code = victim.send(frame.clone()).code();
        assert_eq!(code, CloseCode::TensorId, "{frame:?}");
    }
}

#[test]
fn chunks_that_do_not_decompress_to_what_is_due_are_decompression() {
    all_end(violations::compressed());
    assert!(Victim::host().send(compressed()).is_open());
}

/// A compressed chunk.
fn compressed() -> Frame {
    let good = zstd::bulk::compress(&[7; 4096], 1).unwrap();
    let body = chunk_body(1, dtype::I8, &[4096], &good);
    Frame::new(kind::TENSOR_DATA, body).flags(flag::COMPRESSED | flag::FINAL)
}

#[test]
fn compression_that_was_not_agreed_on_is_frame_unknown() {
    let without = Config {
        compress_above: None,
        ..config()
    };
    let pair = Pair::open(&config(), &without);
    let victim = Victim::of(pair.host, pair.caller.stats().frames_sent);
    assert_eq!(victim.send(compressed()).code(), CloseCode::FrameUnknown);
}

// --------------------------------------------------------------------- the rest

#[test]
fn messages_after_a_violation_are_not_delivered() {
    let mut pair = Pair::open(&config(), &config());
    pair.inject(Side::Host, vec![0xff; 3]);
    say(&mut pair.caller, &Message::Step(row(1, 0, 0)));
    pair.run();
    assert_eq!(pair.host.closed().unwrap().code, CloseCode::FrameLength);
    assert_eq!(pair.host.poll_event(), None);
    assert_eq!(pair.caller.closed().unwrap().code, CloseCode::FrameLength);
}

#[test]
fn a_session_that_runs_out_of_sequence_numbers_ends_in_order() {
    // Too many frames to send here: the receiver's rule is `frame_sequence` above, and this is its
    // last valid number.
    let jump = Victim::host().send(Frame::ping().sequence(u32::MAX));
    let why = "a jump is a gap, however high";
    assert_eq!(jump.code(), CloseCode::FrameSequence, "{why}");
}
