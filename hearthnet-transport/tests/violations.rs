//! Every rule that a peer can break ends the session with its own code, and takes nothing down.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use ciborium::Value;
use hearthnet_transport::pair::{Pair, Side};
use hearthnet_transport::session::Session;
use hearthnet_transport::wire::{Flags, FrameType, Header};
use hearthnet_transport::{CloseCode, Config, DType, Hello, Message, Time};
use support::{noise, step, tensor};

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
        let sequence = u32::try_from(pair.caller.stats().frames_sent).unwrap();
        Victim {
            now: pair.now(),
            session: pair.host,
            sequence,
        }
    }

    fn caller() -> Victim {
        let pair = Pair::open(&config(), &config());
        let sequence = u32::try_from(pair.host.stats().frames_sent).unwrap();
        Victim {
            now: pair.now(),
            session: pair.caller,
            sequence,
        }
    }

    fn fresh_host() -> Victim {
        Victim {
            session: Session::host(&config(), Time::ZERO),
            sequence: 0,
            now: Time::ZERO,
        }
    }

    fn fresh_caller() -> Victim {
        let session = Session::caller(&config(), &Hello::new("pipeline", Vec::new()), Time::ZERO);
        Victim {
            session,
            sequence: 0,
            now: Time::ZERO,
        }
    }

    /// Sends bytes as one message.
    fn raw(mut self, message: Vec<u8>) -> Victim {
        self.session.handle_message(self.now, &message.into());
        self
    }

    /// Sends a frame with the right sequence number.
    fn frame(mut self, kind: FrameType, flags: Flags, body: &[u8]) -> Victim {
        self.sequence += 1;
        let message = message(self.sequence, kind, flags, body);
        self.raw(message)
    }

    fn send(self, kind: FrameType, body: &[u8]) -> Victim {
        self.frame(kind, Flags::NONE, body)
    }

    /// Lets the victim transmit, as the driver would between two reads.
    fn breathe(mut self) -> Victim {
        while self.session.poll_transmit(self.now).is_some() {}
        self
    }

    fn is_open(&self) -> bool {
        self.session.is_open()
    }

    /// The code it closed with, which must also be in its last frame, and everything freed.
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
        let code = bye
            .as_map()
            .unwrap()
            .iter()
            .find(|(key, _)| key.as_text() == Some("code"));
        assert_eq!(code.unwrap().1.as_text(), Some(closed.code.as_str()));
        let stats = self.session.stats();
        assert_eq!(
            (
                stats.buffered_bytes,
                stats.queued_bytes,
                stats.steps_in_flight
            ),
            (0, 0, 0)
        );
        closed.code
    }
}

fn message(sequence: u32, kind: FrameType, flags: Flags, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    let mut out = Header {
        kind,
        sequence,
        length,
        flags,
    }
    .encode()
    .to_vec();
    out.extend_from_slice(body);
    out
}

fn cbor(fields: &[(&str, Value)]) -> Vec<u8> {
    let map = fields
        .iter()
        .map(|(key, value)| (Value::from(*key), value.clone()))
        .collect();
    let mut out = Vec::new();
    ciborium::into_writer(&Value::Map(map), &mut out).unwrap();
    out
}

fn life(stream: u32) -> Vec<u8> {
    cbor(&[("stream", stream.into()), ("epoch", 0.into())])
}

fn open(stream: u32) -> Vec<u8> {
    cbor(&[
        ("stream", stream.into()),
        ("epoch", 0.into()),
        ("weights", Value::Bytes(vec![0; 32])),
        ("lo", 0.into()),
        ("hi", 1.into()),
        ("max_positions", 16.into()),
    ])
}

fn chunk(id: u16, dtype: u8, dims: &[u32], data: usize) -> Vec<u8> {
    let mut body = id.to_be_bytes().to_vec();
    body.extend_from_slice(&[dtype, u8::try_from(dims.len()).unwrap()]);
    for dim in dims {
        body.extend_from_slice(&dim.to_be_bytes());
    }
    body.resize(body.len() + data, 0x11);
    body
}

/// STEP: int8 rows, inline or as tensor `id`.
fn step_body(rows: u32, width: u32, tensor: Option<u16>, data: usize) -> Vec<u8> {
    let mut body = Vec::new();
    for field in [1u32, 0, 0, rows, width] {
        body.extend_from_slice(&field.to_be_bytes());
    }
    body.extend_from_slice(&[4, 2, u8::from(tensor.is_some()), 0]);
    body.extend_from_slice(&tensor.unwrap_or(0).to_be_bytes());
    body.extend_from_slice(&[0; 6]);
    body.resize(body.len() + data, 0x22);
    body
}

const DATA: FrameType = FrameType::TensorData;

// ---------------------------------------------------------------------- framing

#[test]
fn a_payload_length_that_disagrees_is_frame_length() {
    let mut good = message(3, FrameType::Ping, Flags::NONE, &[0; 8]);
    good.push(0);
    assert_eq!(Victim::host().raw(good).code(), CloseCode::FrameLength);
    assert_eq!(
        Victim::host().raw(vec![1, 8, 0]).code(),
        CloseCode::FrameLength
    );
    assert_eq!(
        Victim::host().raw(Vec::new()).code(),
        CloseCode::FrameLength
    );
}

#[test]
fn unknown_versions_types_flags_and_reserved_bits_are_frame_unknown() {
    let good = message(3, FrameType::Ping, Flags::NONE, &[0; 8]);
    for (at, byte) in [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 0x0a),
        (1, 0x1a),
        (1, 0xff),
        (2, 1),
        (3, 1),
    ] {
        let mut bad = good.clone();
        bad[at] = byte;
        assert_eq!(
            Victim::host().raw(bad).code(),
            CloseCode::FrameUnknown,
            "{byte} at {at}"
        );
    }
    for flag in [1, 2, 4, 8, 0x10, 0x8000_0000] {
        let mut bad = good.clone();
        bad[12..16].copy_from_slice(&u32::to_be_bytes(flag));
        assert_eq!(
            Victim::host().raw(bad).code(),
            CloseCode::FrameUnknown,
            "flag {flag:#x}"
        );
    }
    for flag in [Flags::GRAD, Flags::ENCRYPTED] {
        let reserved = Victim::host().frame(DATA, flag, &chunk(1, 4, &[9], 9));
        assert_eq!(reserved.code(), CloseCode::FrameUnknown);
    }
}

#[test]
fn gaps_duplicates_and_wraps_are_frame_sequence() {
    let right = Victim::host().sequence + 1;
    for sequence in [0, 1, right - 1, right + 1, u32::MAX] {
        let bad = message(sequence, FrameType::Ping, Flags::NONE, &[0; 8]);
        assert_eq!(
            Victim::host().raw(bad).code(),
            CloseCode::FrameSequence,
            "{sequence}"
        );
    }
    assert!(
        Victim::host()
            .raw(message(right, FrameType::Ping, Flags::NONE, &[0; 8]))
            .is_open()
    );
}

#[test]
fn messages_above_their_limit_are_frame_too_big() {
    // Before HELLO, 4 KiB.
    let early = Victim::fresh_host().send(FrameType::Hello, &[0; 4096]);
    assert_eq!(early.code(), CloseCode::FrameTooBig);
    let early = Victim::fresh_caller().send(FrameType::Hello, &[0; 4096]);
    assert_eq!(early.code(), CloseCode::FrameTooBig);
    // Control frames stay at that limit.
    let control = Victim::host().send(FrameType::Truncate, &[0; 4081]);
    assert_eq!(control.code(), CloseCode::FrameTooBig);
    // Inline rows above the agreed size.
    let rows = Victim::host().send(FrameType::Step, &step_body(1, 65_545, None, 65_545));
    assert_eq!(rows.code(), CloseCode::FrameTooBig);
    // A chunk above the agreed size.
    let large = Victim::host().send(DATA, &chunk(1, 4, &[8192], 4097));
    assert_eq!(large.code(), CloseCode::FrameTooBig);
    // A tensor above the receive buffer, announced or not: refused before anything is kept.
    let huge = Victim::host().send(DATA, &chunk(1, 4, &[65_537], 4096));
    assert_eq!(huge.code(), CloseCode::FrameTooBig);
    let announced = Victim::host().send(FrameType::Step, &step_body(1024, 65, Some(1), 0));
    assert_eq!(announced.code(), CloseCode::FrameTooBig);
}

#[test]
fn frames_in_the_wrong_state_are_protocol_state() {
    for kind in FrameType::ALL {
        if matches!(kind, FrameType::Hello | FrameType::Bye) {
            continue;
        }
        for victim in [Victim::fresh_host(), Victim::fresh_caller()] {
            assert_eq!(
                victim.send(kind, &[0; 8]).code(),
                CloseCode::ProtocolState,
                "{kind:?}"
            );
        }
    }
    for victim in [Victim::host(), Victim::caller()] {
        assert_eq!(
            victim.send(FrameType::Hello, &[0xa0]).code(),
            CloseCode::ProtocolState
        );
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
    ] {
        assert_eq!(
            Victim::host().send(kind, &life(1)).code(),
            CloseCode::ProtocolState
        );
    }
    for kind in [
        FrameType::StreamOpen,
        FrameType::StreamClose,
        FrameType::Step,
        FrameType::Truncate,
        FrameType::Describe,
    ] {
        assert_eq!(
            Victim::caller().send(kind, &life(1)).code(),
            CloseCode::ProtocolState
        );
    }
}

#[test]
fn a_caller_that_does_not_wait_for_the_hosts_hello_is_protocol_state() {
    let hello = cbor(&[
        ("versions", Value::Array(vec![1.into()])),
        ("purpose", "pipeline".into()),
    ]);
    let victim = Victim::fresh_host().send(FrameType::Hello, &hello);
    assert_eq!(
        victim.send(FrameType::Ping, &[0; 8]).code(),
        CloseCode::ProtocolState
    );
}

#[test]
fn bodies_that_are_not_what_they_should_be_are_body_malformed() {
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
    for kind in cbor_kinds {
        for body in [
            &[][..],
            &[0x00],
            &[0xff],
            &[0xa0],
            &[0xa1, 0x61, b'x', 0x00],
            &[0x9f],
        ] {
            let code = Victim::host().send(kind, body).code();
            assert_eq!(code, CloseCode::BodyMalformed, "{kind:?} {body:02x?}");
        }
    }
    for body in [&[0; 7][..], &[0; 9]] {
        assert_eq!(
            Victim::host().send(FrameType::Ping, body).code(),
            CloseCode::BodyMalformed
        );
    }
    let cut_off = Victim::host().send(FrameType::Step, &step_body(1, 1, None, 1)[..31]);
    assert_eq!(cut_off.code(), CloseCode::BodyMalformed);
    let negative = cbor(&[("stream", (-1).into()), ("epoch", 0.into())]);
    assert_eq!(
        Victim::host()
            .send(FrameType::StreamClose, &negative)
            .code(),
        CloseCode::BodyMalformed
    );
    let wide = cbor(&[("stream", 0x1_0000_0000u64.into()), ("epoch", 0.into())]);
    assert_eq!(
        Victim::host().send(FrameType::StreamClose, &wide).code(),
        CloseCode::BodyMalformed
    );
}

#[test]
fn hellos_without_a_common_version_or_a_purpose_are_told_apart() {
    let hello = |fields: &[(&str, Value)]| {
        Victim::fresh_host()
            .send(FrameType::Hello, &cbor(fields))
            .code()
    };
    let versions = |list: &[u32]| {
        (
            "versions",
            Value::Array(list.iter().map(|&version| version.into()).collect()),
        )
    };
    let purpose = ("purpose", "pipeline".into());
    assert_eq!(
        hello(&[versions(&[2, 3]), purpose.clone()]),
        CloseCode::VersionUnsupported
    );
    assert_eq!(
        hello(&[versions(&[]), purpose.clone()]),
        CloseCode::VersionUnsupported
    );
    assert_eq!(hello(&[purpose]), CloseCode::BodyMalformed);
    assert_eq!(hello(&[versions(&[1])]), CloseCode::BodyMalformed);
    assert_eq!(
        hello(&[versions(&[1]), ("purpose", "".into())]),
        CloseCode::BodyMalformed
    );
    assert_eq!(
        hello(&[versions(&[1]), ("purpose", "A B".into())]),
        CloseCode::BodyMalformed
    );
    let long_token = ("token", Value::Bytes(vec![0; 2049]));
    assert_eq!(
        hello(&[versions(&[1]), ("purpose", "pipeline".into()), long_token]),
        CloseCode::BodyMalformed
    );
}

#[test]
fn ping_floods_and_control_floods_are_frame_rate() {
    let mut victim = Victim::host();
    for _ in 0..100 {
        if victim.is_open() {
            victim = victim.breathe().send(FrameType::Ping, &[0; 8]);
        }
    }
    assert_eq!(victim.code(), CloseCode::FrameRate);
    let mut victim = Victim::host();
    for position in 0..10_000u32 {
        if victim.is_open() {
            let truncate = [
                ("stream", 1.into()),
                ("epoch", 0.into()),
                ("position", position.into()),
            ];
            victim = victim.send(FrameType::Truncate, &cbor(&truncate));
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
        victim = victim.send(FrameType::Ping, &[0; 8]).breathe();
    }
    assert!(victim.is_open());
}

#[test]
fn a_pong_that_nobody_asked_for_is_protocol_state() {
    assert_eq!(
        Victim::host().send(FrameType::Pong, &[0; 8]).code(),
        CloseCode::ProtocolState
    );
}

// ----------------------------------------------------------------- flow control

#[test]
fn a_chunk_without_credit_is_credit_overrun() {
    let mut victim = Victim::host();
    for id in 0..4 {
        victim = victim
            .frame(DATA, Flags::FINAL, &chunk(id, 4, &[9], 9))
            .breathe();
        assert!(victim.is_open());
    }
    // Nothing was taken, so nothing was acknowledged.
    let victim = victim.frame(DATA, Flags::FINAL, &chunk(4, 4, &[9], 9));
    assert_eq!(victim.code(), CloseCode::CreditOverrun);
    // The same with the chunks of one tensor, all at once.
    let mut victim = Victim::host();
    for _ in 0..4 {
        victim = victim.send(DATA, &chunk(1, 4, &[8 * 4096], 4096));
        assert!(victim.is_open());
    }
    assert_eq!(
        victim.send(DATA, &chunk(1, 4, &[8 * 4096], 4096)).code(),
        CloseCode::CreditOverrun
    );
}

#[test]
fn a_step_without_a_slot_is_credit_overrun() {
    let mut victim = Victim::host();
    for _ in 0..3 {
        victim = victim.send(FrameType::Step, &step_body(1, 9, None, 9));
        assert!(victim.is_open());
    }
    let victim = victim.send(FrameType::Step, &step_body(1, 9, None, 9));
    assert_eq!(victim.code(), CloseCode::CreditOverrun);
}

#[test]
fn grants_of_everything_are_credit_overflow() {
    for grant in [u32::MAX, u32::MAX - 3, 1021, 0] {
        let body = cbor(&[("grant", grant.into())]);
        let code = Victim::caller().send(FrameType::FlowCtl, &body).code();
        assert_eq!(code, CloseCode::CreditOverflow, "{grant}");
    }
    let most = cbor(&[("grant", 1020.into())]);
    let victim = Victim::caller().send(FrameType::FlowCtl, &most);
    assert!(victim.is_open());
    let one_more = cbor(&[("grant", 1.into())]);
    assert_eq!(
        victim.send(FrameType::FlowCtl, &one_more).code(),
        CloseCode::CreditOverflow
    );
}

#[test]
fn acks_of_what_was_never_sent_are_credit_ack() {
    let ack = |tensor: u16, chunks: u32, end: bool| {
        cbor(&[
            ("tensor", tensor.into()),
            ("chunks", chunks.into()),
            ("end", end.into()),
        ])
    };
    // A caller with a tensor of 3 chunks under way: its id is 1, the first.
    let busy = |chunks: usize| {
        let mut victim = Victim::caller();
        let data = tensor(&[3 * 4096], DType::I8, noise(3 * 4096));
        victim.session.send_message(&Message::Tensor(data)).unwrap();
        for _ in 0..chunks {
            victim.session.poll_transmit(victim.now).unwrap();
        }
        victim
    };
    let code = |victim: Victim, body: &[u8]| victim.send(FrameType::Ack, body).code();
    assert_eq!(
        code(Victim::caller(), &ack(1, 1, true)),
        CloseCode::CreditAck
    );
    assert_eq!(code(busy(2), &ack(2, 1, false)), CloseCode::CreditAck);
    assert_eq!(code(busy(2), &ack(1, 3, false)), CloseCode::CreditAck);
    assert_eq!(
        code(busy(2), &ack(1, u32::MAX, false)),
        CloseCode::CreditAck
    );
    assert_eq!(code(busy(2), &ack(1, 0, false)), CloseCode::CreditAck);
    assert_eq!(code(busy(2), &ack(1, 2, true)), CloseCode::CreditAck);
    assert_eq!(code(busy(3), &ack(1, 3, false)), CloseCode::CreditAck);
    assert_eq!(code(busy(3), &ack(1, 2, true)), CloseCode::CreditAck);
    // The right one, and then the same again.
    let done = busy(3).send(FrameType::Ack, &ack(1, 3, true));
    assert!(done.is_open());
    assert_eq!(code(done, &ack(1, 3, true)), CloseCode::CreditAck);
    let nack = cbor(&[("tensor", 5.into()), ("code", "no".into())]);
    assert_eq!(
        busy(2).send(FrameType::Nack, &nack).code(),
        CloseCode::CreditAck
    );
}

#[test]
fn tensors_beyond_the_buffer_are_buffer_overrun() {
    // 40 KiB of 64 KiB are announced: another 40 KiB do not fit.
    let victim = Victim::host().send(FrameType::Step, &step_body(40, 1024, Some(1), 0));
    assert!(victim.is_open());
    let victim = victim.send(FrameType::Step, &step_body(40, 1024, Some(2), 0));
    assert_eq!(victim.code(), CloseCode::BufferOverrun);
}

#[test]
fn what_is_announced_and_never_sent_takes_no_memory_and_ends() {
    let mut victim = Victim::host().send(FrameType::Step, &step_body(60, 1024, Some(1), 0));
    assert!(victim.is_open());
    victim.now = victim.now + Duration::from_secs(11);
    victim.session.handle_timeout(victim.now);
    assert_eq!(victim.code(), CloseCode::PipelineStalled);
}

#[test]
fn small_chunks_are_chunk_too_small() {
    for size in [0, 1, 4095] {
        let victim = Victim::host().send(DATA, &chunk(1, 4, &[2 * 4096], size));
        assert_eq!(victim.code(), CloseCode::ChunkTooSmall, "{size}");
    }
    let last = Victim::host().frame(DATA, Flags::FINAL, &chunk(1, 4, &[9], 8));
    assert_eq!(last.code(), CloseCode::ChunkTooSmall);
}

#[test]
fn open_and_cancel_churn_is_stream_churn() {
    let mut victim = Victim::host();
    for stream in 0..10_000 {
        if victim.is_open() {
            victim = victim.send(FrameType::StreamOpen, &open(stream));
        }
        if victim.is_open() {
            victim = victim.send(FrameType::StreamClose, &life(stream));
            while victim.session.poll_event().is_some() {}
        }
    }
    assert_eq!(victim.code(), CloseCode::StreamChurn);
}

// ---------------------------------------------------------------------- tensors

#[test]
fn shapes_that_are_zero_overflow_or_change_are_tensor_shape() {
    for body in [
        chunk(1, 0, &[9], 9),              // an element type that does not exist
        chunk(1, 5, &[9], 9),              // another
        chunk(1, 4, &[], 9),               // no dimensions
        chunk(1, 4, &[1; 9], 1),           // too many
        chunk(1, 4, &[3, 0], 0),           // one of zero
        chunk(1, 2, &[u32::MAX; 8], 4096), // more than 64 bits
    ] {
        let victim = Victim::host().frame(DATA, Flags::FINAL, &body);
        assert_eq!(victim.code(), CloseCode::TensorShape);
    }
    for (rows, width, data) in [
        (0, 9, 0),
        (9, 0, 0),
        (3, 3, 8),
        (3, 3, 10),
        (u32::MAX, 2, 9),
    ] {
        let victim = Victim::host().send(FrameType::Step, &step_body(rows, width, None, data));
        assert_eq!(
            victim.code(),
            CloseCode::TensorShape,
            "{rows} x {width}, {data} bytes"
        );
    }
    // A second chunk that says something else than the first.
    for second in [chunk(1, 4, &[8193], 4096), chunk(1, 4, &[4096, 2], 4096)] {
        let victim = Victim::host().send(DATA, &chunk(1, 4, &[8192], 4096));
        assert_eq!(
            victim.frame(DATA, Flags::FINAL, &second).code(),
            CloseCode::TensorShape
        );
    }
    // A chunk that is not what the step announced.
    let victim = Victim::host().send(FrameType::Step, &step_body(8, 1024, Some(1), 0));
    assert_eq!(
        victim.send(DATA, &chunk(1, 4, &[8192], 4096)).code(),
        CloseCode::TensorShape
    );
    // FINAL too early, and missing.
    let early = Victim::host().frame(DATA, Flags::FINAL, &chunk(1, 4, &[8192], 4096));
    assert_eq!(early.code(), CloseCode::TensorShape);
    let missing = Victim::host().send(DATA, &chunk(1, 4, &[9], 9));
    assert_eq!(missing.code(), CloseCode::TensorShape);
}

#[test]
fn ids_that_are_in_use_or_unknown_are_tensor_id() {
    let done = || Victim::host().frame(DATA, Flags::FINAL, &chunk(1, 4, &[9], 9));
    // Complete, but not acknowledged yet.
    let again = done().frame(DATA, Flags::FINAL, &chunk(1, 4, &[9], 9));
    assert_eq!(again.code(), CloseCode::TensorId);
    let end = cbor(&[("tensor", 1.into())]);
    assert_eq!(
        done().send(FrameType::TensorEnd, &end).code(),
        CloseCode::TensorId
    );
    assert_eq!(
        Victim::host().send(FrameType::TensorEnd, &end).code(),
        CloseCode::TensorId
    );
    let announced = Victim::host().send(FrameType::Step, &step_body(8, 1024, Some(1), 0));
    let twice = announced.send(FrameType::Step, &step_body(8, 1024, Some(1), 0));
    assert_eq!(twice.code(), CloseCode::TensorId);
}

#[test]
fn chunks_that_do_not_decompress_to_what_is_due_are_decompression() {
    let send = |data: &[u8]| {
        let mut body = chunk(1, 4, &[4096], 0);
        body.extend_from_slice(data);
        Victim::host().frame(DATA, Flags::COMPRESSED.with(Flags::FINAL), &body)
    };
    let zstd = |data: &[u8]| zstd::bulk::compress(data, 1).unwrap();
    assert!(send(&zstd(&[7; 4096])).is_open());
    let bomb = zstd(&vec![0; 16 << 20]);
    assert!(bomb.len() < 4096);
    assert_eq!(send(&bomb).code(), CloseCode::Decompression);
    assert_eq!(send(&zstd(&[7; 4095])).code(), CloseCode::Decompression);
    assert_eq!(send(&zstd(&[7; 4097])).code(), CloseCode::Decompression);
    assert_eq!(send(&[]).code(), CloseCode::Decompression);
    let mut legacy = zstd(&[7; 4096]);
    legacy[0] = 0x27;
    assert_eq!(send(&legacy).code(), CloseCode::Decompression);
}

#[test]
fn compression_that_was_not_agreed_on_is_frame_unknown() {
    let without = Config {
        compress_above: None,
        ..config()
    };
    let pair = Pair::open(&config(), &without);
    let sequence = u32::try_from(pair.caller.stats().frames_sent).unwrap();
    let victim = Victim {
        now: pair.now(),
        session: pair.host,
        sequence,
    };
    let mut body = chunk(1, 4, &[4096], 0);
    body.extend_from_slice(&zstd::bulk::compress(&[7; 4096], 1).unwrap());
    let victim = victim.frame(DATA, Flags::COMPRESSED.with(Flags::FINAL), &body);
    assert_eq!(victim.code(), CloseCode::FrameUnknown);
}

// --------------------------------------------------------------------- the rest

#[test]
fn nothing_is_heard_after_the_end() {
    let mut pair = Pair::open(&config(), &config());
    pair.inject(Side::Host, vec![0xff; 3]);
    pair.caller
        .send_message(&Message::Step(step(1, 0, 0, 1, noise(1152))))
        .unwrap();
    pair.run();
    assert_eq!(pair.host.closed().unwrap().code, CloseCode::FrameLength);
    assert_eq!(pair.host.poll_event(), None);
    assert_eq!(pair.caller.closed().unwrap().code, CloseCode::FrameLength);
}

#[test]
fn a_session_that_runs_out_of_sequence_numbers_ends_in_order() {
    // Too many to send here: the receiving end of the rule is `frame_sequence` above, and this is
    // its last valid number.
    let victim = Victim {
        sequence: u32::MAX - 1,
        ..Victim::host()
    };
    assert_eq!(
        victim.send(FrameType::Ping, &[0; 8]).code(),
        CloseCode::FrameSequence,
        "a jump is a gap, however high"
    );
}
